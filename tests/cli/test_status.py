"""``megatrain-tier status`` for live runs, and for runs that ended or died."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatrain.base.observer import RunInfo, RunSummary, StepMetrics, format_step
from megatrain.run.folder import RunFolder
from megatrain.run.status import RunStatus, StatusWriter, read_status, write_status
from tiered import NvmeTier
from tiered.durable.manifest import Manifest, write_manifest

CliModule = Callable[[str], ModuleType]
GIB = 1 << 30
STATUS = RunStatus(
    "training", run_name="tiny", step=412, max_steps=1000, checkpoint_step=400,
    checkpoint_at="2026-01-01T00:00:00+00:00", metrics=StepMetrics(
        step=412, max_steps=1000, epoch=0.5, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=2468,
        num_trained_tokens=100, step_s=2.0, eta_s=7530.0, tier_used_bytes={"ram": 61 * GIB},
        tier_capacity_bytes={"ram": 64 * GIB}, rss_bytes=66 * GIB,
    ),
)  # fmt: skip


@pytest.fixture
def call(cli_module: CliModule) -> Callable[..., Result]:
    group = cli_module("main").command_group
    return lambda *words: CliRunner().invoke(group, ["status", *map(str, words)])


def leave(path: Path, status: RunStatus, *, saved_step: int | None = None, ago: timedelta = timedelta()) -> None:
    """Write the files that a run leaves when it ends or dies. ``ago`` is the age of its last status."""
    with RunFolder(path) as folder:
        (path / "metrics.jsonl").touch()
        write_status(folder.path, status)
    if saved_step is not None:
        (path / "checkpoints").mkdir()
        write_manifest(path / "checkpoints", Manifest(1, (), {"step": saved_step}))
    moment = (datetime.now(UTC) - ago).isoformat(timespec="seconds")
    values = {**json.loads((path / "status.json").read_text()), "updated_at": moment}
    (path / "status.json").write_text(json.dumps(values))


def test_status_of_a_live_run(tmp_path: Path, call: Callable[..., Result]) -> None:
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, replace(STATUS, message="careful", activity={"notice": "stopping"}))
        result = call(tmp_path / "out")
        seen = json.loads(call(tmp_path / "out", "--json").stdout)["runs"]
    assert result.exit_code == 0, result.output
    assert re.sub(r"last wrote \d+ s ago", "last wrote N s ago", result.stdout).splitlines() == [
        str(tmp_path / "out"),
        "  training step 412/1000 41.2% | loss 1.2500 | gnorm 0.50 | lr 1.0e-05 | 1,234 tok/s | eta 2 h 5 min",
        "  notice   stopping",
        "  memory   ram 61.0/64.0 GiB  process 66.00 GiB",
        f"  process  {os.getpid()} on {STATUS.host}, last wrote N s ago",
        "  message  careful",
    ]
    assert "\x1b" not in result.output
    assert len(seen) == 1 and seen[0]["running"] and seen[0]["saved_step"] is None
    assert seen[0]["status"]["step"] == 412 and seen[0]["owner"].startswith(f"process {os.getpid()} on")


def test_waiting_status_is_written_on_a_full_drive(
    tmp_path: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file would get no space, so the run overwrites the status file, even if the new text is shorter."""
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, STATUS)
        real = Path.write_text

        def full(self: Path, *arguments: Any, **options: Any) -> int:
            if self.name.endswith(".tmp"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, *arguments, **options)

        monkeypatch.setattr(Path, "write_text", full)
        write_status(folder.path, replace(STATUS, state="paused", message="the drive is full"))
        lines = call(tmp_path / "out").stdout.splitlines()
        assert lines[1].startswith("  paused   step 412/1000") and "eta" not in lines[1]
        assert "  message  the drive is full" in lines
        write_status(folder.path, replace(STATUS, metrics=None))
        found = read_status(folder.path)
    assert found is not None and (found.state, found.message) == ("training", "")


def test_silent_live_run_is_reported(tmp_path: Path, call: Callable[..., Result]) -> None:
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, STATUS)
        values = json.loads((folder.path / "status.json").read_text())
        values["updated_at"] = (datetime.now(UTC) - timedelta(seconds=90)).isoformat(timespec="seconds")
        (folder.path / "status.json").write_text(json.dumps(values))
        lines = call(tmp_path / "out").stdout.splitlines()
    assert lines[2].startswith(
        "  silent   no status for 1 min, although the run writes one every second; a step usually takes 2 s."
    )


def test_start_of_a_finished_run_keeps_the_status(tmp_path: Path) -> None:
    done = replace(STATUS, state="done", step=1000, exit_code=0)
    leave(tmp_path, done, saved_step=1000, ago=timedelta(hours=3))
    before = (tmp_path / "status.json").read_bytes()
    with RunFolder(tmp_path) as folder, StatusWriter(folder.path) as status:
        status.on_message("nothing to do: this run is done")
        status.on_end(RunSummary(1000, 2.0, 1.0, 5.0, 10, 10))
    assert (tmp_path / "status.json").read_bytes() == before
    with RunFolder(tmp_path) as folder, StatusWriter(folder.path) as status:
        status.on_start(RunInfo("r", "sft", "cpu", tmp_path, 2000, 10))
        found = read_status(folder.path)
    assert found is not None and found.state == "training"


def test_status_lists_each_rank_of_a_live_run(tmp_path: Path, call: Callable[..., Result]) -> None:
    assert STATUS.metrics is not None
    ranks = [{"tier_used_bytes": {"ram": 1 << 20}, "link_bytes": {"ram->ranks": 2 << 20}, "rss_bytes": 3 << 20}]
    metrics = replace(STATUS.metrics, ranks=[*ranks, {**ranks[0], "stall_s": {"fill": 1.5}, "is_paused": True}])
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, replace(STATUS, metrics=metrics))
        lines = call(tmp_path / "out").stdout.splitlines()
    said = "ram 1.00 MiB  moved 2.00 MiB, 2.00 MiB of it to other ranks"
    assert f"  rank 0   {said}  process 3.00 MiB" in lines
    assert f"  rank 1   {said}  wait fill 1.5s  process 3.00 MiB  waits for space on a drive" in lines


def test_status_shows_the_checkpoint_of_a_live_run(tmp_path: Path, call: Callable[..., Result]) -> None:
    leave(tmp_path, STATUS, saved_step=400)
    with RunFolder(tmp_path) as folder:
        at = (datetime.now(UTC) - timedelta(minutes=12)).isoformat(timespec="seconds")
        write_status(folder.path, replace(STATUS, checkpoint_at=at))
        assert "  saved    step 400, 12 min ago" in call(tmp_path).stdout


@pytest.mark.parametrize(
    ("status", "saved_step", "line"),
    [
        (STATUS, 400, "not running; last seen at step 412, 3 min ago; run it again to continue from step 400"),
        (
            STATUS,
            None,
            "not running; last seen at step 412, 3 min ago; nothing was saved; "
            "run it again to start from the beginning",
        ),
        (
            replace(STATUS, state="stopped"),
            412,
            "stopped at step 412, 3 min ago; run it again to continue from step 412",
        ),
        (
            replace(STATUS, state="failed", message="the drive died"),
            400,
            "failed at step 412, 3 min ago: the drive died",
        ),
        (replace(STATUS, state="done", step=1000), 1000, "done, 1,000 steps, 3 min ago"),
        (replace(STATUS, state="done", step=1), 1, "done, 1 step, 3 min ago"),
    ],
)
def test_status_of_ended_runs(
    tmp_path: Path, call: Callable[..., Result], status: RunStatus, saved_step: int | None, line: str
) -> None:
    leave(tmp_path / "out", status, saved_step=saved_step, ago=timedelta(minutes=3, seconds=20))
    result = call(tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:2] == [str(tmp_path / "out"), f"  {line}"]
    (seen,) = json.loads(call(tmp_path / "out", "--json").stdout)["runs"]
    assert (seen["running"], seen["owner"], seen["saved_step"]) == (False, None, saved_step)


def test_status_offers_no_resume_if_the_drive_has_other_files(tmp_path: Path, call: Callable[..., Result]) -> None:
    """`run` and `check` refuse such a drive by the same rule, with the same message."""
    leave(tmp_path / "out", replace(STATUS, state="stopped"), saved_step=412)
    drive = tmp_path / "drive"
    (tmp_path / "out/config.resolved.toml").write_text(f'[[tiers.nvme]]\npath = "{drive}"\n')
    assert "run it again to continue from step 412" in call(tmp_path / "out").stdout, "the folder is created again"
    drive.mkdir()
    assert "run it again to continue from step 412" in call(tmp_path / "out").stdout
    (drive / "thesis.tex").touch()
    text = call(tmp_path / "out").stdout
    assert f"it cannot continue\n  '{drive}' is not empty and was not made by tiered" in text, text
    assert "run it again" not in text
    NvmeTier([tmp_path / "ours"], 1 << 20).close()
    (tmp_path / "out/config.resolved.toml").write_text(f'[[tiers.nvme]]\npath = "{tmp_path / "ours"}"\n')
    assert "run it again to continue from step 412" in call(tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        (replace(STATUS, state="done", step=1000), 0, "done, 1,000 steps, "),
        (replace(STATUS, state="done", step=1000, exit_code=0), 0, "done, 1,000 steps, "),
        (replace(STATUS, state="stopped", exit_code=75), 75, "stopped at step 412, "),
        (replace(STATUS, state="failed", exit_code=4, message="bad row"), 4, "failed at step 412, "),
        (STATUS, 1, "not running; last seen at step 412, "),
    ],
)
def test_follow_of_an_ended_run_shows_its_end_and_exit_code(
    tmp_path: Path, call: Callable[..., Result], status: RunStatus, code: int, line: str
) -> None:
    leave(tmp_path / "out", status)
    result = call(tmp_path / "out", "--follow")
    assert result.exit_code == code and result.stdout.startswith(line), result.output
    result = call(tmp_path / "out", "--follow", "--json")
    assert result.exit_code == code and json.loads(result.stdout)["state"] == status.state


def test_followed_run_prints_each_step_and_message_once(
    cli_module: CliModule, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STATUS.metrics is not None
    later = replace(STATUS.metrics, step=413)
    view = cli_module("follow")._Lines()
    for status in (
        replace(STATUS, metrics=None), STATUS, replace(STATUS, message="careful"), replace(STATUS, message="careful"),
        replace(STATUS, metrics=later, message="full"), replace(STATUS, metrics=later), replace(STATUS, metrics=later),
    ):  # fmt: skip
        view.show(status)
    view.close()
    assert capsys.readouterr().out.splitlines() == [
        format_step(STATUS.metrics), "careful", format_step(later), "full"
    ]  # fmt: skip
    view = cli_module("follow")._JsonLines()
    shown = [
        replace(STATUS, updated_at="1", step=1), replace(STATUS, updated_at="1", step=2),
        replace(STATUS, updated_at="2", step=2),
    ]  # fmt: skip
    for status in (shown[0], *shown, shown[2]):
        view.show(status)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(json.dumps(status.to_json())) for status in shown]


def test_follow_rejects_a_folder_without_a_run(tmp_path: Path, call: Callable[..., Result]) -> None:
    result = call(tmp_path, "--follow")
    assert result.exit_code == 2 and "is not the folder of a run" in result.stderr


def test_active_run_shows_all_facts(tmp_path: Path, call: Callable[..., Result]) -> None:
    assert STATUS.metrics is not None
    metrics = replace(
        STATUS.metrics, tier_used_bytes={"gpu": 0, "ram": 3 * GIB, "nvme": 5 * GIB}, mean_step_s=7.5, step_s=2.0
    )
    evaluations = {"a": {"step": 3, "loss": 2.0, "perplexity": 7.5, "preferences": {"rewards/margins": "0.5"}}}
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, replace(STATUS, metrics=metrics, evaluations=evaluations))
        values = json.loads((folder.path / "status.json").read_text())
        values["updated_at"] = (datetime.now(UTC) - timedelta(seconds=15, milliseconds=200)).isoformat()
        (folder.path / "status.json").write_text(json.dumps(values))
        text = call(tmp_path / "out").stdout
    assert re.sub(r"1[5-9] s", "N s", text).splitlines() == [
        str(tmp_path / "out"),
        "  training step 412/1000 41.2% | loss 1.2500 | gnorm 0.50 | lr 1.0e-05 | 1,234 tok/s | eta 2 h 5 min",
        "  silent   no status for N s, although the run writes one every second; a step usually takes 7.5 s. A drive "
        "may be full, or the process suspended: see the output of the run",
        "  eval     a: loss 2.0000, margin 0.500 at step 3",
        "  memory   ram 3.0/64.0 GiB  nvme 5.00 GiB  process 66.00 GiB",
        f"  process  {os.getpid()} on {STATUS.host}, last wrote N s ago",
    ]


def test_starting_run_does_not_show_the_previous_status(tmp_path: Path, call: Callable[..., Result]) -> None:
    leave(tmp_path / "out", replace(STATUS, pid=1))
    with RunFolder(tmp_path / "out"):
        lines = call(tmp_path / "out").stdout.splitlines()
    assert lines[1].startswith(f"  starting process {os.getpid()} on")
    with RunFolder(tmp_path / "fresh"):
        assert "starting" in call(tmp_path / "fresh").stdout, "before it wrote anything"


def test_status_lists_all_runs_below_a_folder(
    tmp_path: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b/run2", "a/run1", ".hidden/run3", "a/run1/inner"):
        leave(tmp_path / name, STATUS)
    monkeypatch.chdir(tmp_path)
    result = call()
    heads = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert heads == ["a/run1", "b/run2"]
    seen = json.loads(call("--json").stdout)["runs"]
    assert [one["path"] for one in seen] == [str(tmp_path / "a/run1"), str(tmp_path / "b/run2")]
    assert [line for line in call("b").stdout.splitlines() if not line.startswith(" ")] == ["b/run2"]


def test_empty_folder_is_reported(tmp_path: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (call().exit_code, call().stdout) == (0, "no runs in the current folder or below\n")
    assert json.loads(call("--json").stdout) == {"runs": []}
    result = call(tmp_path)
    assert result.exit_code == 2 and f"no run in '{tmp_path}' or below" in result.stderr
    assert call(tmp_path / "nowhere").exit_code == 2


def test_damaged_status_of_a_dead_run_is_ignored(tmp_path: Path, call: Callable[..., Result]) -> None:
    leave(tmp_path, STATUS)
    (tmp_path / "status.json").write_text("{")
    result = call(tmp_path)
    assert result.exit_code == 0 and result.stdout.splitlines()[1] == "  not running"


def test_last_evaluations_are_shown_for_live_and_ended_runs(tmp_path: Path, call: Callable[..., Result]) -> None:
    values = {
        "book": {"step": 400, "loss": 2.0, "perplexity": 7.389},
        "x": {"step": 400, "loss": "nan", "perplexity": "nan"},
    }
    lines = [
        "  eval     book: loss 2.0000, perplexity 7.39 at step 400",
        "  eval     x: loss nan, perplexity nan at step 400",
    ]
    status = replace(STATUS, evaluations=values)
    with RunFolder(tmp_path / "out") as folder:
        write_status(folder.path, status)
        assert call(tmp_path / "out").stdout.splitlines()[2:4] == lines
    leave(tmp_path / "out", replace(status, state="done"))
    assert call(tmp_path / "out").stdout.splitlines()[2:4] == lines
    seen = json.loads(call(tmp_path / "out", "--json").stdout)["runs"]
    assert seen[0]["status"]["evaluations"] == values


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min"), (3599, "59 min"), (7530, "2 h 5 min"), (200_000, "2 d 7 h")],
)
def test_durations_are_formatted(cli_module: CliModule, seconds: float, text: str) -> None:
    assert cli_module("run_state").format_seconds(seconds) == text


@pytest.mark.parametrize("words", [["status"], ["save"], ["stop"]])
def test_status_imports_no_heavy_library(tmp_path: Path, cli_package: str, words: list[str]) -> None:
    leave(tmp_path / "out", STATUS, saved_step=400)
    script = (
        "import sys, runpy, atexit\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'zarr'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
        f"sys.argv = ['megatrain-tier', *{[*words, str(tmp_path / 'out')]!r}]\n"
        f"runpy.run_module('{cli_package}', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert "HEAVY []" in result.stdout
    assert "last seen at step 412" in result.stdout + result.stderr
    assert result.returncode == (0 if words == ["status"] else 1)
