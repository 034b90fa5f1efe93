"""Rendering: plain text in files, control characters only on terminals, and no colours if they are disabled."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from megatrain.base.observer import (
    CheckpointMetrics,
    EvaluationMetrics,
    RunInfo,
    RunObserver,
    RunSummary,
    Sample,
    StepMetrics,
    format_step,
)
from megatrain.base.progress import Activity, ActivitySnapshot
from tiered import GiB

CliModule = Callable[[str], ModuleType]


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, max_steps=10, epoch=0.1, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=100,
        num_trained_tokens=50, step_s=0.5, eta_s=4.5, tier_used_bytes={"gpu": 21 * GiB, "nvme": 0, "ram": 100 * GiB},
        tier_capacity_bytes={"gpu": 22 * GiB, "ram": 110 * GiB}, stall_s={"io": 0.4, "cpu": 0.001}, rss_bytes=GiB,
    )  # fmt: skip


SUMMARY = RunSummary(
    10,
    2.0,
    1.0,
    5.0,
    1000,
    500,
    {"ram": GiB, "nvme": 0},
    {"ram": 2 * GiB, "nvme": 9 * GiB},
    {"ram->nvme": GiB, "nvme->ram": 0},
    GiB,
    Path("out/final"),
    written_bytes={"drive": 3_000_000_000, "other": 0},
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
    drive(cli_module("observers").make_observer("auto", logging_steps=4, console=Console(file=stream)))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/10", "4/10", "8/10", "10/10"]
    assert "hello [bold]x[/bold]" in lines
    assert lines[-7:] == [
        "done   10 steps in 5.00 s of training   200 tok/s   1,000 tokens, 500 trained",
        "loss   2.0000 -> 1.0000 (first and last step)",
        "peak   ram 1.0/2.0 GiB   process 1.00 GiB",
        "moved  ram->nvme 1.00 GiB (posix-direct)",
        "wrote  drive 3.00 GB with saves",
        "model  out/final",
        "next   megatrain-tier generate out/final --interactive",
    ]
    assert "\x1b" not in stream.getvalue()


SAVE = CheckpointMetrics(4, Path("out"), 3 * GiB, 3 * GiB, 0, 1.5, 0.0)
EVALUATION = EvaluationMetrics(4, 10, "held", 1.25, 1234, 0.5, samples=[Sample("Call me", "Ishmael", "Ahab")])


def observe_all(observer: RunObserver) -> None:
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 12_800))
    for step in (1, 3, 4, 10):
        observer.on_step(metrics(step))
    observer.on_evaluation(EVALUATION)
    observer.on_checkpoint(SAVE)
    observer.on_message("hello")
    observer.on_end(SUMMARY)


def test_all_events_are_printed_as_lines(cli_module: CliModule) -> None:
    stream = io.StringIO()
    observe_all(cli_module("observers").make_observer("plain", logging_steps=4, console=Console(file=stream)))
    assert stream.getvalue().splitlines() == [
        "start  first: sft on cpu, 10 steps of 12,800 tokens",
        *(format_step(metrics(step)) for step in (1, 4, 10)),
        "eval  held at step 4: loss 1.2500, perplexity 3.49 (1,234 tokens in 0.5 s)",
        "      ...Call me >> Ishmael (reference: Ahab)",
        "saved  checkpoint at step 4: 3.00 GiB in 1.5 s",
        "hello",
        *cli_module("summary_text").summary_lines(SUMMARY),
    ]


def test_all_events_are_printed_as_json(cli_module: CliModule) -> None:
    stream = io.StringIO()
    observe_all(cli_module("observers").make_observer("json", logging_steps=4, console=Console(file=stream)))
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == json.loads(json.dumps([
        *({"event": "step", **metrics(step).to_json()} for step in (1, 4, 10)),
        {"event": "evaluation", **EVALUATION.to_json()},
        {"event": "checkpoint", **SAVE.to_json()},
        {"event": "message", "text": "hello"},
        {"event": "end", **SUMMARY.to_json()},
    ]))  # fmt: skip


@pytest.mark.parametrize("is_lost", [False, True])
def test_live_view_prints_all_events_except_steps_above_it(cli_module: CliModule, is_lost: bool) -> None:
    """If the terminal is gone, steps are printed too, on the redirected standard output."""
    stream, printed = io.StringIO(), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200, no_color=True)
    make_observer = cli_module("observers").make_observer
    observer = make_observer("auto", logging_steps=4, console=console, is_lost=lambda: is_lost)
    with contextlib.redirect_stdout(printed):
        observe_all(observer)
    steps = [format_step(metrics(step)) for step in (1, 4, 10)]
    others = [
        "start  first: sft on cpu, 10 steps of 12,800 tokens",
        "eval  held at step 4: loss 1.2500, perplexity 3.49 (1,234 tokens in 0.5 s)",
        "      ...Call me >> Ishmael (reference: Ahab)",
        "saved  checkpoint at step 4: 3.00 GiB in 1.5 s",
        "hello",
        *cli_module("summary_text").summary_lines(SUMMARY),
    ]
    text = printed.getvalue() if is_lost else re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line.rstrip() for line in text.splitlines()]
    if is_lost:
        assert lines == [others[0], *steps, *others[1:]]
    else:
        assert printed.getvalue() == "" and [line for line in lines if line in others] == others
        assert not set(lines) & set(steps)


def test_the_plan_of_a_continued_run_is_one_line(cli_module: CliModule) -> None:
    stream = io.StringIO()
    console = cli_module("observers").make_observer("plain", console=Console(file=stream))
    plan = SimpleNamespace(totals={"gpu": 0, "ram": 3 * GiB, "nvme": 5 * GiB}, budgets={"ram": 8 * GiB})
    for note in ("", "careful"):
        cli_module("observers").PlanObserver(console, plan, "a.toml", note).on_ready(7)
    line = "plan   ram 3.0/8.0 GiB nvme 5.00 GiB; `megatrain-tier plan a.toml` shows details"
    assert stream.getvalue().splitlines() == [line, line, "careful"]


@pytest.mark.parametrize("no_color", [True, False])
def test_live_view_on_a_terminal(cli_module: CliModule, no_color: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, no_color=no_color, color_system="standard")
    drive(cli_module("observers").make_observer("auto", console=console))
    shown = stream.getvalue()
    assert "21.0/22.0 GiB" in shown
    assert "wait io 0.4s" in shown
    assert "\x1b[?25h" in shown  # the cursor is visible again
    assert ("\x1b[32m" in shown or "\x1b[1;32m" in shown) != no_color


def test_close_restores_the_cursor_after_a_failure(cli_module: CliModule) -> None:
    stream = io.StringIO()
    observer = cli_module("observers").make_observer("bar", console=Console(file=stream, force_terminal=True))
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))
    observer.close()
    observer.close()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1
    assert stream.getvalue().endswith("\x1b[2K"), "no line of the view is left"


def drawn(cli_module: CliModule, width: int, *arguments: object) -> list[str]:
    stream = io.StringIO()
    # The empty part of a bar is drawn only if colours are enabled.
    console = Console(file=stream, width=width, force_terminal=True, color_system="standard")
    console.print(cli_module("live_view").live_view(*arguments, width=width))
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]


def test_live_view_shows_all_figures(cli_module: CliModule) -> None:
    shown = dataclasses.replace(metrics(3), mean_step_s=2.5, rss_bytes=3 * GiB)
    activity = ActivitySnapshot(
        "step", "forward", "model.layers.7", 3, 10, 2, 4, 61.0, "stopping", saved_bytes=GiB, checkpoint_bytes=4 * GiB
    )
    evaluations = {name: EvaluationMetrics(step, 9, name, 1.5, 1, 0.1) for name, step in (("a", 2), ("b", 3))}
    lines = drawn(cli_module, 100, shown, activity, evaluations)
    assert [line.split("\u2501", 1)[0].rstrip() for line in lines] == [
        "step 3/10  loss 1.2500  gnorm 0.50  lr 1.0e-05  eta 4 s",
        "run", "now", "save", "gpu", "ram",
        "200 tok/s (trained 100)  wait io 0.4s  process 3.00 GiB",
        "eval  a loss 1.5000 at step 2  b loss 1.5000 at step 3",
        "stopping",
    ]  # fmt: skip
    assert [re.split("[\u2501\u2578\u257a]+ +", line)[-1] for line in lines[1:6]] == [
        "30.0%  2.50 s/step (mean)",
        "forward layers.7, micro-batch 2/4  1m01s",
        "checkpoint, 1.00 GiB of 4.00 GiB",
        "21.0/22.0 GiB",
        "100.0/110.0 GiB",
    ]


@pytest.mark.parametrize(
    ("activity", "text"),
    [
        (ActivitySnapshot("step", seconds=1.25), "next rows  1.2 s"),
        (
            ActivitySnapshot("step", "update", "a.b.c", micro_batch=1, num_micro_batches=1, seconds=59.0),
            "update b.c  59.0 s",
        ),
        (ActivitySnapshot("step", "head", "x" * 30, micro_batch=0, num_micro_batches=2), f"head {'x' * 24}  0.0 s"),
        (ActivitySnapshot("loading", seconds=60.0), "loading  1m00s"),
        (ActivitySnapshot("evaluation", "forward", "model.norm"), "evaluation  forward norm  0.0 s"),
        (ActivitySnapshot("loading", "a", done_bytes=GiB, num_bytes=2 * GiB), "loading, 1.00 GiB of 2.00 GiB  0.0 s"),
    ],
)
def test_activity_is_described(cli_module: CliModule, activity: ActivitySnapshot, text: str) -> None:
    assert cli_module("live_view").describe_activity(activity) == text


def test_long_text_is_shortened_before_its_duration(cli_module: CliModule) -> None:
    shorten = cli_module("live_view")._shorten
    assert [shorten("a long text  1.5 s", width).plain for width in (18, 17, 9)] == [
        "a long text  1.5 s", "a long t..  1.5 s", "..  1.5 s",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_view_uses_the_available_width(cli_module: CliModule, width: int) -> None:
    many = dataclasses.replace(
        metrics(1), step=1234, max_steps=123456, num_real_tokens=10**7, eta_s=10**6, mean_step_s=12.34, lr=0.0,
        warmup_steps=2000,
    )  # fmt: skip
    evaluation = EvaluationMetrics(1200, 123456, "held_out", 1.25, 10, 0.1)
    moment = ActivitySnapshot("step", "backward", "model.language_model.layers.127", 70, 100, 12, 16, 345.6)
    lines = drawn(cli_module, width, many, moment, {"held_out": evaluation})
    assert all(len(line) <= width for line in lines), lines
    assert width < 80 or not any("\u2026" in line for line in lines), lines
    bars = [line for line in lines if "\u2501" in line]
    assert [line.split()[0] for line in bars] == ["run", "now", "gpu", "ram"]
    lengths = {line.count("\u2501") + line.count("\u2578") + line.count("\u257a") for line in bars}
    assert lengths == {{60: 8, 80: 26, 120: 59}[width]}
    assert bars[0].endswith("1.0%  12.3 s/step (mean)")
    assert bars[1].endswith("backward layers.127, micro-batch 12/16  5m46s")
    assert "lr 0 (warm-up 1234/2000)" in lines[0] or width < 80
    assert lines[-1] == "eval  held_out loss 1.2500 at step 1200"


def test_live_view_shows_bars_for_loading_and_saving(cli_module: CliModule) -> None:
    activity = Activity()
    activity.begin("loading weights", num_bytes=4 * GiB)
    activity.begin_part(3, unit="model.layers.2", num_parts=12)
    activity.add_bytes(GiB)
    activity.saving = SimpleNamespace(is_done=False, done_bytes=3 * GiB, num_bytes=4 * GiB)
    lines = drawn(cli_module, 100, None, activity.snapshot())
    assert lines[0].split()[0] == "now" and "loading weights, 1.00 GiB of 4.00 GiB" in lines[0]
    assert lines[1].split()[0] == "save" and lines[1].endswith("checkpoint, 3.00 GiB of 4.00 GiB")
    now, save = (line.count("\u2501") for line in lines[:2])
    assert now == save and ActivitySnapshot.from_json(dataclasses.asdict(activity.snapshot())).saved_bytes == 3 * GiB
    activity.saving.is_done = True
    assert not activity.snapshot().checkpoint_bytes


def test_live_view_is_redrawn_during_a_step(cli_module: CliModule) -> None:
    """A separate thread draws the view from the counters of the engine. The training thread draws nothing."""
    stream, activity = io.StringIO(), Activity()
    console = Console(file=stream, force_terminal=True, width=80)
    observer = cli_module("observers").LiveObserver(console=console, activity=activity)
    observer.__enter__()
    activity.begin("loading weights", num_parts=4)
    wait_for(lambda: "loading weights" in stream.getvalue())
    observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))
    activity.begin("step", num_parts=10, num_micro_batches=3)
    for number in (1, 2, 3):
        activity.begin_part(number, "forward", f"model.layers.{number}")
        activity.micro_batch = number
        wait_for(lambda number=number: f"forward layers.{number}, micro-batch {number}/3" in stream.getvalue())
    activity.notice = "stopping after this step"
    wait_for(lambda: "stopping after this step" in stream.getvalue())
    observer.on_message("a message")
    observer.close()
    last = stream.getvalue().rpartition("a message")[2]
    assert "a message" in stream.getvalue()
    assert not activity.is_watched and "layers" not in last.rpartition("\x1b[2K")[2]


def test_blocked_terminal_does_not_block_training(cli_module: CliModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-S, or on a dead connection, a write to the terminal blocks. Training still continues and ends."""
    released, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(cli_module("live_view"), "_CLOSE_TIMEOUT_S", 0.05)

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            entered.set()
            assert released.wait(30)
            return len(text)

    observer = cli_module("observers").LiveObserver(console=Console(file=Stopped(), force_terminal=True, width=80))
    try:
        observer.on_start(RunInfo("first", "sft", "cpu", Path("out"), 10, 128))
        assert entered.wait(30)
        for step in range(1, 5):
            observer.on_step(metrics(step))
            observer.on_message("hello")
        observer.close()
    finally:
        released.set()


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_summary_shows_mean_losses(cli_module: CliModule) -> None:
    summary = dataclasses.replace(SUMMARY, mean_losses=(2.125, 1.0625), num_averaged=10)
    assert "loss   2.1250 -> 1.0625 (means of the first and last 10 steps)" in cli_module("summary_text").summary_lines(
        summary
    )


def test_summary_of_a_stopped_run(cli_module: CliModule, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    summary = RunSummary(
        1, 2.0, None, 4.0, 12_000, 500, {}, {}, {"nvme->ram": 2 * GiB}, GiB, folder, interrupted=True,
        evaluations={"held": EVALUATION}, link_paths={"nvme->ram": ""}, mean_losses=(3.0, 2.0), num_averaged=1,
    )  # fmt: skip
    summary_lines = cli_module("summary_text").summary_lines
    expected = [
        "stopped   1 step in 4.00 s of training   3,000 tok/s   12,000 tokens, 500 trained",
        "eval   held: loss 1.2500, perplexity 3.49 at step 4",
        "moved  nvme->ram 2.00 GiB",
        f"model  {folder}",
    ]
    assert list(summary_lines(summary)) == expected
    for text in ("{torn", "[]", '{"architectures": null}', '{"architectures": ["LlamaForCausalLM"]}'):
        (folder / "config.json").write_text(text)
        assert list(summary_lines(summary)) == [
            *expected, f"next   megatrain-tier generate '{folder}' --interactive"
        ], text  # fmt: skip
    assert list(summary_lines(RunSummary(0, None, None, 0.0, 0, 0))) == [
        "done   0 steps in 0.00 s of training   0 tokens, 0 trained"
    ]


def test_summary_labels_single_rank_figures(cli_module: CliModule) -> None:
    lines = list(cli_module("summary_text").summary_lines(dataclasses.replace(SUMMARY, num_processes=2)))
    assert "ranks  2 processes; peak, moved and wrote show the first process" in lines
    assert not any(line.startswith("ranks") for line in cli_module("summary_text").summary_lines(SUMMARY))


def test_lines_are_cut_between_words_on_a_terminal_only(cli_module: CliModule) -> None:
    text = "saved  " + " ".join(f"word{number}" for number in range(20)) + "\n  1 row dropped: why"
    for is_terminal in (True, False):
        stream = io.StringIO()
        cli_module("console").print_line(
            Console(file=stream, force_terminal=is_terminal, width=60, no_color=True), text
        )
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= 60 or not is_terminal
        assert " ".join(stream.getvalue().split()) == " ".join(text.split())
        assert len(lines) == (4 if is_terminal else 2)
        assert not is_terminal or lines[1].startswith(" " * 7 + "word")


@pytest.mark.parametrize("indent", [0, 7, 16, 21])
@pytest.mark.parametrize("width", [20, 32, 40, 60])
def test_words_and_numbers_stay_whole_on_narrow_terminals(cli_module: CliModule, width: int, indent: int) -> None:
    text = "process         about 507.01 MiB of RAM: 504.71 MiB of Python\n                and libraries"
    lines = cli_module("terminal").wrap_words(text, width, indent=indent)
    assert [word for line in lines for word in line.split()] == text.split()
    assert max(map(len, lines)) <= width
    assert cli_module("terminal").wrap_words("", width, indent=indent) == []
    (path,) = cli_module("terminal").wrap_words("/" + "x" * 70, width, indent=indent)
    assert len(path) == 71, "a path is one word"
