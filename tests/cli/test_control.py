"""``megatrain-tier save`` and ``stop`` send requests to a live run in another process, and the run carries them out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.base.owner import find_owner
from megatrain.run.folder import RunFolder, committed_step
from megatrain.run.status import RunStatus, read_status, write_status
from processes.saved_run import SavedRun, end

MANY = 100_000
NO_STRATEGY = 'save_strategy = "no"'
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(untrained: SavedRun, tmp_path: Path) -> SavedRun:
    return untrained.copy(tmp_path / "w")


@pytest.fixture
def start(run: SavedRun) -> Iterator[Start]:
    """Return a function that starts the run in a process and waits for a step. The process is killed after the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*options: str, until_step: int = 1, **config: str) -> subprocess.Popen[str]:
        process = run.start(*options, **{"steps": MANY, "top": "logging.progress = 'none'", **config})  # type: ignore[arg-type]
        processes.append(process)
        while process.poll() is None and ((status := read_status(run.out)) is None or status.step < until_step):
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        return process

    yield begin
    for process in processes:
        end(process)


def step_of(run: SavedRun) -> int:
    status = read_status(run.out)
    assert status is not None
    return status.step


def test_save_continues_and_stop_ends_the_run(run: SavedRun, start: Start) -> None:
    process = start(checkpoint=NO_STRATEGY)
    before = step_of(run)
    result = run.call("save", run.out)
    assert result.exit_code == 0, result.output
    assert f"asked process {process.pid}" in result.stderr
    saved = committed_step(run.out)
    assert saved is not None and saved >= before  # the run may have finished more steps since
    assert result.stdout == f"saved  checkpoint at step {saved}\n"
    assert process.poll() is None, "it continues"
    again = run.call("save", run.out, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == {"saved_step": committed_step(run.out), "path": str(run.out / "checkpoints")}
    assert json.loads(again.stdout)["saved_step"] > saved
    result = run.call("stop", run.out)
    assert result.exit_code == 0, result.output
    last = committed_step(run.out)
    assert last is not None and last > saved
    assert result.stdout.startswith(f"stopped at step {last}, ")
    assert result.stdout.endswith(f"run it again to continue from step {last}\n")
    assert process.wait(60) == 75
    assert f"interrupted at step {last}, saved: run the same command again to continue" in process.communicate()[1]
    assert find_owner(run.out) is None
    assert f"stopped at step {last}" in run.call("status", run.out).stdout


def test_live_run_relocks_its_folder_after_the_lock_is_removed(run: SavedRun, start: Start) -> None:
    """``rm -rf`` on the folder of a live run removes the lock, but may miss files that the run is writing."""
    process = start()
    (run.out / "LOCK").unlink()
    deadline = time.monotonic() + 60
    warning = f"warning: '{run.out / 'LOCK'}' was removed while this run uses the folder"
    while find_owner(run.out) is None or not (status := read_status(run.out)) or warning not in str(status.message):
        assert process.poll() is None and time.monotonic() < deadline, "the run did not lock its folder again"
        time.sleep(0.05)
    shown = run.call("status", run.out).stdout
    assert f"{process.pid} on " in shown and "not running" not in shown
    result = run.call("stop", run.out)
    assert result.exit_code == 0, result.output
    assert process.wait(60) == 75


def test_removed_run_folder_is_reported(run: SavedRun, start: Start) -> None:
    process = start(checkpoint=NO_STRATEGY)
    run.out.rename(run.folder / "removed")
    assert process.wait(60) == 1
    error = process.communicate()[1]
    assert f"{run.out}: the folder was removed while this run used it" in error, error


def test_stop_without_checkpoints(run: SavedRun, start: Start) -> None:
    process = start(checkpoint=f"{NO_STRATEGY}\nsave_on_signal = false")
    result = run.call("stop", run.out, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["saved_step"] is None and values["state"] == "stopped"
    assert process.wait(60) == 1
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "event" not in row] == list(range(1, values["step"] + 1)) != []
    assert "interrupted; nothing saved" in process.communicate()[1]
    assert "nothing was saved; run it again to start from the beginning" in run.call("status", run.out).stdout


def test_killed_run_is_reported_and_resumes(run: SavedRun, start: Start) -> None:
    process = start(until_step=12)
    process.kill()
    process.wait(60)
    saved = committed_step(run.out)
    assert saved is not None and saved % 2 == 0
    text = run.call("status", run.out).stdout
    assert "not running; last seen at step" in text and f"run it again to continue from step {saved}" in text
    for command in ("save", "stop"):
        result = run.call(command, run.out)
        assert result.exit_code == 1 and "not running; last seen at step" in result.stderr, command
    result = run.run(steps=saved + 2)
    assert f"continuing after step {saved}" in result.output or result.exit_code == 2, result.output


def test_starting_run_gets_no_signal(run: SavedRun) -> None:
    """SIGUSR1 kills a process that has no handler for it, so a run that is still starting is not sent one."""
    run.out.mkdir()
    (run.out / "metrics.jsonl").touch()
    previous = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with RunFolder(run.out) as opened:
            result = run.call("save", run.out, "--timeout", "0.3")
            assert result.exit_code == 1 and "still starting" in result.stderr
            write_status(opened.path, RunStatus("training", step=3))
            result = run.call("save", run.out, "--timeout", "0.3")
            assert result.exit_code == 1 and "still starting" in result.stderr
            write_status(opened.path, RunStatus("exporting", step=9, max_steps=9))
            result = run.call("save", run.out)
            assert result.exit_code == 1 and "it will not save again" in result.stderr
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_save_and_stop_time_out(run: SavedRun) -> None:
    """The test process locks the run's folder, and receives the signals without acting on them."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGUSR1, signal.SIGTERM)
    }
    try:
        with RunFolder(run.out) as opened:
            write_status(opened.path, RunStatus("paused", step=3, message="the drive is full"))
            result = run.call("save", run.out, "--timeout", "0.3")
            assert result.exit_code == 1 and "no checkpoint within 0.3 s: the drive is full" in result.stderr
            result = run.call("stop", run.out, "--timeout", "0.3")
            assert result.exit_code == 1 and "has not ended within 0.3 s" in result.stderr
        assert heard == [signal.SIGUSR1, signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("checkpoint", "is_enough"),
    [((4, "2026-01-01T00:00:02"), True), ((3, "2026-01-01T00:00:02"), True), ((2, "2026-01-01T00:00:02"), False)],
    ids=["of a later step", "of the very step", "of a step before"],
)
def test_any_later_checkpoint_answers_a_save_request(
    run: SavedRun, checkpoint: tuple[int, str], is_enough: bool
) -> None:
    """The request arrives after step 3, so a checkpoint of step 3 or later answers it. The test acts as the run."""

    def save(number: int, frame: object) -> None:
        status = RunStatus("training", step=4, checkpoint_step=checkpoint[0], checkpoint_at=checkpoint[1])
        write_status(opened.path, status)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        with RunFolder(run.out) as opened:
            asked = RunStatus("training", step=3, checkpoint_step=2, checkpoint_at="2026-01-01T00:00:01")
            write_status(opened.path, asked)
            result = run.call("save", run.out, "--timeout", "5" if is_enough else "0.3")
    finally:
        signal.signal(signal.SIGUSR1, before)
    if is_enough:
        assert result.exit_code == 0, result.output
        assert result.stdout == f"saved  checkpoint at step {checkpoint[0]}\n"
    else:
        assert result.exit_code == 1 and "no checkpoint within 0.3 s" in result.stderr


def test_save_and_stop_refuse_a_run_on_another_machine(run: SavedRun) -> None:
    with RunFolder(run.out):
        (run.out / "LOCK").write_text("process 1 on elsewhere, since 2026-01-01\n")
        for command in ("save", "stop"):
            result = run.call(command, run.out, "--timeout", "5")
            assert result.exit_code == 1, result.output
            assert "in use by process 1 on elsewhere" in result.stderr and "on that machine" in result.stderr


def test_save_and_stop_reject_a_folder_without_a_run(run: SavedRun, tmp_path: Path) -> None:
    for command in ("save", "stop"):
        result = run.call(command, tmp_path)
        assert result.exit_code == 2 and "is not the folder of a run" in result.stderr
        assert run.call(command, tmp_path / "nowhere").exit_code == 2
        assert run.call(command, "--help").exit_code == 0
    assert os.listdir(tmp_path) == ["w"]
