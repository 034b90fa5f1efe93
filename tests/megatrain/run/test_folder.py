"""A run's folder: one owner at a time, an always complete status, and no leftovers from a run that never began."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from megatrain.base.names import LOCK_NAME
from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunInfo, RunSummary, StepMetrics
from megatrain.base.owner import LockHolder, UnreachableRunError, find_owner, has_signal_handler, send_signal
from megatrain.base.progress import Activity
from megatrain.run import status as status_module
from megatrain.run.folder import RunFolder, committed_step
from megatrain.run.record import write_summary
from megatrain.run.status import RunStatus, StatusWriter, read_status, write_status
from tiered import LockedError, locks
from tiered.durable.manifest import Manifest, write_manifest

ROOT = Path(__file__).parents[3]
METRICS = StepMetrics(
    step=1, max_steps=9, epoch=0.5, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=100, num_trained_tokens=50,
    step_s=0.5, eta_s=4.0, tier_used_bytes={"ram": 10}, tier_capacity_bytes={"ram": 40}, rss_bytes=7,
)  # fmt: skip
SUMMARY = RunSummary(
    num_steps=9, first_loss=1.25, last_loss=1.0, seconds=1.0, num_real_tokens=200, num_trained_tokens=100
)


@contextmanager
def another_process(path: Path, code: str = "") -> Iterator[subprocess.Popen[str]]:
    """Yield a process that owns the run folder until its standard input is closed."""
    script = f"""
import select, signal, sys
from megatrain.base.owner import *
from megatrain.run.folder import *
with RunFolder({str(path)!r}) as folder:
    {code or "pass"}
    print("entered", flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:  # a signal just before a read would wait for its end
        pass
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "entered\n"
        yield process
        if process.poll() is None:
            process.stdin.close()
            process.wait()


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert find_owner(path) is None
    with RunFolder(path) as folder:
        assert (folder.path, folder.checkpoints, folder.final) == (path, path / "checkpoints", path / "final")
        owner = find_owner(path)
        assert owner is not None and owner.pid == os.getpid() and f"process {os.getpid()} on" in owner.text
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"), RunFolder(path):
            pass
        assert find_owner(path) == owner, "a refused run does not change the lock"
        (path / "config.resolved.toml").touch()
    assert find_owner(path) is None
    with RunFolder(path) as folder:
        assert folder.dead_owner is None


def test_lock_of_a_taken_over_folder_is_released_once(tmp_path: Path) -> None:
    """A second release would truncate and close a file that has reused the lock's file descriptor."""
    path = tmp_path / "out"
    with RunFolder(path) as folder:
        path.rename(tmp_path / "moved")
        path.mkdir()
        with another_process(path):
            with pytest.raises(LockedError):
                folder.keep_lock()
            files = [tmp_path / f"file{number}" for number in range(3)]
            for file in files:
                file.write_text("contents")
            opened = [file.open("r+") for file in files]  # they reuse the descriptors of the lost lock
            with pytest.raises(LockedError):
                folder.keep_lock()
    assert [(file.read(), file.close()) for file in opened] == [("contents", None)] * 3


def test_dead_process_owns_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with another_process(tmp_path) as process:
        owner = find_owner(tmp_path)
        assert owner is not None and owner.pid == process.pid
        process.kill()
        process.wait()
    assert find_owner(tmp_path) is None
    assert (tmp_path / "LOCK").read_text().startswith(f"process {process.pid} on")
    with RunFolder(tmp_path) as folder:
        assert folder.dead_owner is not None and f"process {process.pid} on" in folder.dead_owner


def test_lock_name_matches_the_store() -> None:
    assert LOCK_NAME == locks.LOCK_NAME


def test_folder_of_a_run_that_never_started_is_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a/b/c") as folder:
        StatusWriter(folder.path).set_state("starting")
        assert (tmp_path / "a/b/c/status.json").exists()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="no data"), RunFolder(tmp_path / "a"):
        raise RuntimeError("no data")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with RunFolder(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir(), "it existed before"
    with RunFolder(tmp_path / "b/c") as folder:
        (folder.path / "metrics.jsonl").touch()
    assert sorted(os.listdir(tmp_path / "b/c")) == ["LOCK", "metrics.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"), RunFolder(tmp_path / "file/run"):
        pass
    (tmp_path / "run").mkdir()
    (tmp_path / "run/LOCK").mkdir()
    with pytest.raises(OSError, match="Is a directory"), RunFolder(tmp_path / "run"):
        pass


def test_run_retries_a_briefly_held_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = locks.lock_directory, []

    def refuse_once(path: Path) -> locks.DirectoryLock:
        if not refused:
            refused.append(path)
            raise LockedError(str(path), "another process")
        return real(path)

    monkeypatch.setattr(locks, "lock_directory", refuse_once)
    with RunFolder(tmp_path):
        assert refused == [tmp_path]
        assert find_owner(tmp_path) is not None


def test_status_round_trips(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    with RunFolder(tmp_path) as folder:
        status = RunStatus("training", run_name="r", step=3, max_steps=9, metrics=replace(METRICS, loss=math.nan))
        write_status(folder.path, status)
        found = read_status(tmp_path)
        assert found is not None and found.metrics is not None and math.isnan(found.metrics.loss)
        assert replace(found, metrics=None) == replace(status, metrics=None, updated_at=found.updated_at)
        assert found.updated_at and found.pid == os.getpid()
        values = json.loads((tmp_path / "status.json").read_text(), parse_constant=lambda name: pytest.fail(name))
        (tmp_path / "status.json").write_text(json.dumps({**values, "of_a_newer_version": 1}))
        again = read_status(tmp_path)
        assert again is not None and replace(again, metrics=None) == replace(found, metrics=None)
        for text in ("", "{", "[]", '{"pid": 3}', '{"state": "done", "metrics": {"loss": "much"}}'):
            (tmp_path / "status.json").write_text(text)
            assert read_status(tmp_path) is None, text
        write_status(folder.path, replace(status, state="done"))


def test_status_is_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now_s)
    writer = StatusWriter(tmp_path)

    def written(step: int) -> int:
        writer.on_step(replace(METRICS, step=step))
        found = read_status(tmp_path)
        assert found is not None
        return found.step

    assert [written(1), written(2)] == [1, 1]
    writer.on_message("at once")
    assert [written(3), written(METRICS.max_steps)] == [2, METRICS.max_steps], "so are messages and the last step"
    assert written(4) == METRICS.max_steps
    now_s += 1.0
    assert written(5) == 5


@pytest.mark.parametrize(("error", "step"), [(errno.ENOSPC, 2), (errno.EIO, 1)])
def test_failed_status_write_does_not_fail_the_run(
    error: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full drive, the existing status file is overwritten in place. On a broken drive, it stays unchanged."""

    def refuse(source: object, target: object) -> None:
        raise OSError(error, os.strerror(error))

    with RunFolder(tmp_path) as folder:
        write_status(folder.path, RunStatus("training", step=1))
        monkeypatch.setattr(os, "replace", refuse)
        write_status(folder.path, RunStatus("done", step=2))
        found = read_status(tmp_path)
        assert found is not None and found.step == step
        assert sorted(os.listdir(tmp_path)) == ["LOCK", "status.json"]


def test_status_writer_records_the_states_of_a_run(tmp_path: Path) -> None:
    def status() -> RunStatus:
        found = read_status(tmp_path)
        assert found is not None
        return found

    activity = Activity()
    with RunFolder(tmp_path) as folder:
        writer = StatusWriter(folder.path, run_name="r", activity=activity)
        assert read_status(tmp_path) is None, "unchanged until the run starts"
        writer.set_state("starting")
        assert (status().state, status().run_name, status().checkpoint_step) == ("starting", "r", None)
        writer.on_start(RunInfo("r", "sft", "cpu", tmp_path, 9, 128))
        assert (status().state, status().max_steps) == ("training", 9)
        writer.on_step(METRICS)
        writer.on_message("careful")
        assert (status().step, status().metrics, status().message) == (1, METRICS, "careful")
        activity.is_paused = lambda: True
        writer.on_message("full")
        assert (status().state, status().message, status().step) == ("paused", "full", 1)
        activity.is_paused = lambda: False
        writer.on_message("space is free again")
        assert status().state == "training"
        writer.set_state("exporting", "nearly done")
        assert (status().state, status().message) == ("exporting", "nearly done")
        writer.on_step(replace(METRICS, step=9))
        assert (status().state, status().step) == ("exporting", 9), "the last step is written at once"
        writer.on_checkpoint(CheckpointMetrics(9, tmp_path, 1, 1, 0, 1.0, 0.0))
        assert status().checkpoint_step == 9 and status().checkpoint_at == status().updated_at
        writer.on_evaluation(EvaluationMetrics(8, 9, "held_out", 2.0, 10, 0.1))
        writer.on_evaluation(EvaluationMetrics(9, 9, "held_out", math.nan, 10, 0.1))
        assert status().evaluations == {"held_out": {"step": 9, "loss": "nan", "perplexity": "nan"}}
        writer.on_end(replace(SUMMARY, interrupted=True, num_steps=8))
        assert (status().state, status().step, status().exit_code) == ("stopped", 8, 1), "the previous step was not due"
        writer.on_end(replace(SUMMARY, evaluations={"book": EvaluationMetrics(9, 9, "book", 0.0, 10, 0.1)}))
        assert status().state == "done"
        assert status().evaluations["book"] == {"step": 9, "loss": 0.0, "perplexity": 1.0}
        assert list(status().evaluations) == ["held_out", "book"]
        assert replace(status(), metrics=None, updated_at="", checkpoint_at="") == RunStatus(
            "done", run_name="r", step=9, max_steps=9, checkpoint_step=9, checkpoint_at="", exit_code=0,
            evaluations=status().evaluations, message="nearly done",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (RuntimeError("the drive died"), "failed", "the drive died"),
        (ValueError(), "failed", "ValueError"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
    ],
)
def test_status_records_why_a_run_failed(tmp_path: Path, error: BaseException, state: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").touch()

    def run() -> None:
        with RunFolder(tmp_path) as folder, StatusWriter(folder.path) as writer:
            writer.on_start(RunInfo("r", "sft", "cpu", tmp_path, 9, 128))
            raise error

    with pytest.raises(type(error)):
        run()
    found = read_status(tmp_path)
    assert found is not None and found.host == socket.gethostname() and found.updated_at
    expected = RunStatus(state, run_name="r", max_steps=9, message=message, exit_code=1)  # type: ignore[arg-type]
    assert found == replace(expected, updated_at=found.updated_at)


def test_failure_of_another_thread_is_recorded_once(tmp_path: Path) -> None:
    """Afterwards, nothing changes the status, because the process is about to end."""
    (tmp_path / "metrics.jsonl").touch()
    with RunFolder(tmp_path) as folder, StatusWriter(folder.path) as writer:
        writer.fail("too early", 3)
        assert read_status(tmp_path) is None
        writer.on_start(RunInfo("r", "sft", "cpu", tmp_path, 9, 128))
        writer.fail("it hangs", 4)
        writer.on_message("late")
        writer.on_step(replace(METRICS, step=9))
    found = read_status(tmp_path)
    expected = RunStatus("failed", run_name="r", max_steps=9, message="it hangs", exit_code=4)
    assert found is not None and found == replace(expected, updated_at=found.updated_at)


def test_previous_status_is_kept_until_the_first_update(tmp_path: Path) -> None:
    def starting(step: int | None) -> RunStatus:
        if step is not None:
            (tmp_path / "checkpoints").mkdir(exist_ok=True)
            write_manifest(tmp_path / "checkpoints", Manifest(1, (), {"step": step}))
        with RunFolder(tmp_path) as folder:
            StatusWriter(folder.path, run_name="r").set_state("starting")
            found = read_status(tmp_path)
            evaluations = {name: {"step": step} for name, step in (("a", 4), ("b", 5), ("c", 6))}
            before = RunStatus(
                "failed", step=7, max_steps=9, checkpoint_step=5, checkpoint_at="then", evaluations=evaluations
            )
            write_status(tmp_path, before)
        assert found is not None
        return found

    assert (starting(None).step, starting(None).checkpoint_step) == (0, None), "it starts at the beginning"
    assert (starting(5).step, starting(5).max_steps, starting(5).checkpoint_at) == (7, 9, "then")
    assert (starting(4).step, starting(4).checkpoint_step, starting(4).checkpoint_at) == (7, 4, None)
    assert [list(starting(step).evaluations) for step in (4, 5)] == [["a"], ["a", "b"]], "up to the checkpoint"


def test_message_from_a_signal_handler_does_not_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive while the status file is being written."""
    real = os.replace
    with RunFolder(tmp_path) as folder:
        writer = StatusWriter(folder.path, run_name="r")

        def interrupted(source: Path, target: Path) -> None:
            monkeypatch.setattr(os, "replace", real)
            writer.on_message("stopping after this step")
            real(source, target)

        monkeypatch.setattr(os, "replace", interrupted)
        writer.on_start(RunInfo("r", "sft", "cpu", tmp_path, 9, 128))
        found = read_status(tmp_path)
        assert found is not None and (found.state, found.message) == ("training", "stopping after this step")
        writer.set_state("done")


def test_committed_step_reads_the_manifests(tmp_path: Path) -> None:
    assert committed_step(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    for generation, step in ((1, 10), (2, 20)):
        write_manifest(tmp_path / "checkpoints", Manifest(generation, (), {"step": step}))
    assert committed_step(tmp_path) == 20
    write_manifest(tmp_path / "checkpoints", Manifest(3, (), {}))
    assert committed_step(tmp_path) is None, "committed by another program"


def test_signals_reach_the_owner_only(tmp_path: Path) -> None:
    with another_process(tmp_path, "signal.signal(signal.SIGUSR1, lambda *a: print('saved', flush=True))") as process:
        owner = find_owner(tmp_path)
        assert owner is not None and owner.pid == process.pid
        assert has_signal_handler(process.pid, signal.SIGUSR1)
        assert not has_signal_handler(process.pid, signal.SIGUSR2)
        send_signal(tmp_path, owner, signal.SIGUSR1)
        assert process.stdout is not None and process.stdout.readline() == "saved\n"
        with pytest.raises(UnreachableRunError, match=r"process 1 on elsewhere\. Run this command on that machine"):
            send_signal(tmp_path, LockHolder(1, "elsewhere", "process 1 on elsewhere"), signal.SIGUSR1)
        with pytest.raises(UnreachableRunError, match="another process"):
            send_signal(tmp_path, LockHolder(None, None, "another process"), signal.SIGUSR1)
    with pytest.raises(ProcessLookupError):
        send_signal(tmp_path, owner, signal.SIGUSR1)
    assert not has_signal_handler(process.pid, signal.SIGUSR1)


def test_a_process_of_the_same_number_in_another_container_gets_no_signal(tmp_path: Path) -> None:
    """The lock names a process id in the other container. Here, this id may belong to an unrelated process."""
    with another_process(tmp_path), subprocess.Popen(["sleep", "600"]) as bystander:
        text = (tmp_path / "LOCK").read_text()
        owner = find_owner(tmp_path)
        assert owner is not None
        (tmp_path / "LOCK").write_text(text.replace(f"process {owner.pid} ", f"process {bystander.pid} "))
        claimed = find_owner(tmp_path)
        assert claimed is not None and claimed.pid == bystander.pid
        with pytest.raises(UnreachableRunError, match="in another container"):
            send_signal(tmp_path, claimed, signal.SIGTERM)
        assert bystander.poll() is None
        bystander.kill()


def test_status_queries_import_no_heavy_packages(tmp_path: Path) -> None:
    script = f"""
import sys
from megatrain.base.owner import *
from megatrain.run.folder import *
from megatrain.run.record import write_summary
from megatrain.run.status import *
print(read_status({str(tmp_path)!r}), find_owner({str(tmp_path)!r}), committed_step({str(tmp_path)!r}))
print([name for name in ("torch", "numpy", "pydantic", "zarr") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines() == ["None None None", "[]"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("{torn", []), ("7", []), ('{"format": 2, "ends": [{"a": 1}]}', []), ('{"format": 1}', []),
        ('{"format": 1, "ends": true}', []), ('{"format": 1, "ends": {"a": 1}}', []),
        ('{"format": 1, "ends": [{"a": 1}, 7, {"b": 2}]}', [{"a": 1}, {"b": 2}]),
    ],
)  # fmt: skip
def test_summary_is_added_to_the_readable_ones(tmp_path: Path, text: str, entries: list[dict[str, int]]) -> None:
    (tmp_path / "summary.json").write_text(text)
    write_summary(SUMMARY, tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    last = found["ends"].pop()
    assert found == {"format": 1, "ends": entries}
    assert datetime.fromisoformat(last.pop("at")).tzinfo is not None
    assert last == json.loads(json.dumps(SUMMARY.to_json()))
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()
    write_summary(SUMMARY, tmp_path)  # no error, although it cannot be written
