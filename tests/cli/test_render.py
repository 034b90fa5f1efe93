"""What is drawn: plain text in files, control characters only on terminals, colours only where wanted."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from megatrain.metrics import EvaluationMetrics, RunInfo, RunSummary, StepMetrics
from tiered.units import GiB

CliModule = Callable[[str], ModuleType]


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, max_steps=10, epoch=0.1, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=100,
        num_trained_tokens=50, step_s=0.5, eta_s=4.5, tier_used_bytes={"gpu": 21 * GiB, "ram": 100 * GiB},
        tier_capacity_bytes={"gpu": 22 * GiB, "ram": 110 * GiB}, stall_s={"io": 0.4, "cpu": 0.001}, rss_bytes=GiB,
    )  # fmt: skip


SUMMARY = RunSummary(
    10,
    2.0,
    1.0,
    5.0,
    1000,
    500,
    {"ram": GiB},
    {"ram": 2 * GiB},
    {"ram->nvme": GiB},
    GiB,
    Path("out/final"),
    link_paths={"ram->nvme": "posix-direct", "nvme->ram": "posix-direct"},
)


def drive(observer: object, steps: int = 10) -> None:
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))  # type: ignore[attr-defined]
    for step in range(1, steps + 1):
        observer.on_step(metrics(step))  # type: ignore[attr-defined]
    observer.on_message("hello [bold]x[/bold]")  # type: ignore[attr-defined]
    observer.on_end(SUMMARY)  # type: ignore[attr-defined]


def test_auto_is_plain_without_a_terminal(cli_module: CliModule) -> None:
    stream = io.StringIO()
    drive(cli_module("render").make_observer("auto", logging_steps=4, console=Console(file=stream)))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/10", "4/10", "8/10", "10/10"]
    assert "hello [bold]x[/bold]" in lines
    assert lines[-4:] == [
        "done   10 steps in 5.00 s   loss 2.0000 -> 1.0000   200 tok/s   1,000 tokens, 500 trained",
        "peak   ram 1.0/2.0 GiB   process 1.00 GiB",
        "moved  ram->nvme 1.00 GiB (posix-direct)",
        "model  out/final",
    ]
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("no_color", [True, False])
def test_live_view_on_a_terminal(cli_module: CliModule, no_color: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, no_color=no_color, color_system="standard")
    drive(cli_module("render").make_observer("auto", console=console))
    shown = stream.getvalue()
    assert "21.0/22.0 GiB" in shown
    assert "wait io 0.4s" in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    assert ("\x1b[32m" in shown or "\x1b[1;32m" in shown) != no_color


def test_close_restores_the_cursor_after_a_failure(cli_module: CliModule) -> None:
    stream = io.StringIO()
    observer = cli_module("render").make_observer("bar", console=Console(file=stream, force_terminal=True))
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))
    observer.close()
    observer.close()
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_the_live_view_fits_80_columns_and_shows_the_last_evaluation(cli_module: CliModule) -> None:
    render = cli_module("render")
    stream = io.StringIO()
    many = dataclasses.replace(metrics(1), step=123456, max_steps=1234567, num_real_tokens=10**7, eta_s=10**6)
    evaluation = EvaluationMetrics(123400, 1234567, "held_out", 1.25, 10, 0.1)
    Console(file=stream, width=80).print(render.live_view(many, {"held_out": evaluation}))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 and "\u2026" not in line for line in lines), lines
    assert lines[-1].rstrip() == "eval  held_out loss 1.2500 at step 123400"
    stream = io.StringIO()
    observer = render.make_observer("bar", console=Console(file=stream, force_terminal=True, width=80))
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))
    observer.on_step(metrics(10))
    observer.on_evaluation(evaluation)  # after the last step, too
    observer.close()
    assert "held_out loss 1.2500 at step 123400" in stream.getvalue()


def test_lines_are_cut_between_words_on_a_terminal_only(cli_module: CliModule) -> None:
    text = "saved  " + " ".join(f"word{number}" for number in range(20)) + "\n  1 row dropped: why"
    for is_terminal in (True, False):
        stream = io.StringIO()
        cli_module("render").print_line(Console(file=stream, force_terminal=is_terminal, width=60, no_color=True), text)
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= 60 or not is_terminal
        assert " ".join(stream.getvalue().split()) == " ".join(text.split())
        assert len(lines) == (4 if is_terminal else 2)
        assert not is_terminal or lines[1].startswith(" " * 7 + "word")
