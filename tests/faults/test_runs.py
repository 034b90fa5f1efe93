"""Complete runs on drives that are full, fail, die or wear out: their messages and final weights."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from processes import warm
from processes.saved_run import command_group, make_run
from tiered import MiB, NvmeTier
from tiered.links.files import FileEngine
from tiered.testing.faults import Fault, FaultyMover

CONFIG = """task = "pretrain"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
[precision]
compute_dtype = "float32"
[data]
max_length = 32
[[data.train]]
path = "data.txt"
[training]
per_device_train_batch_size = 2
max_steps = 4
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
[placement]
weights = "nvme"
optimizer = "nvme"
[tiers]
ram.size = "{ram}"
verify = "{verify}"
on_disk_full = "{on_full}"
[checkpoint]
save_strategy = "no"
save_on_signal = false
[[tiers.nvme]]
path = "{drive}"
size = "40MiB"
{more}
"""


@dataclass
class Work:
    """Folder with a model, data and the config that the command runs."""

    folder: Path

    def run(self, drive: Path | str = "scratch", *, out: str = "out", more: str = "", **values: str) -> Result:
        values = {"ram": "3MiB", "verify": "resume", "on_full": "pause", **values}
        text = CONFIG.replace('"out"', f'"{out}"').format(drive=drive, more=more, **values)
        (self.folder / "run.toml").write_text(text)
        return CliRunner().invoke(command_group(), ["run", str(self.folder / "run.toml")])

    def weights(self, out: str = "out") -> bytes:
        return (self.folder / out / "final/model.safetensors").read_bytes()

    def metrics(self, out: str = "out") -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and the result of a run without faults. Tests use less RAM than the model needs."""
    folder = tmp_path_factory.mktemp("good")
    make_run(folder)
    result = Work(folder).run(out="without_faults", ram="64MiB")
    assert result.exit_code == 0, result.output
    shutil.rmtree(folder / "scratch")
    return folder


@pytest.fixture
def work(good: Path, tmp_path: Path) -> Work:
    folder = tmp_path / "w"
    shutil.copytree(good, folder)
    return Work(folder)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """Return an empty list. Every new ``FileEngine`` gets the faults that a test adds to the list."""
    faults: list[Fault] = []
    real = FileEngine.__init__

    def make(self: FileEngine, tier: NvmeTier, mover: object, **options: object) -> None:
        real(self, tier, FaultyMover(mover, faults), **options)  # type: ignore[arg-type]
        self.mover.faults = faults  # type: ignore[attr-defined]

    monkeypatch.setattr(FileEngine, "__init__", make)
    return faults


def check_failure(result: Result, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    for part in parts:
        assert part in result.stderr, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "Traceback" not in result.output and "internal error" not in result.output


def test_verify_modes_write_to_the_drive_and_are_bit_identical(work: Work) -> None:
    for verify in ("off", "resume", "always"):
        result = work.run(out=verify, verify=verify)
        assert result.exit_code == 0, result.output
        assert work.weights(verify) == work.weights("without_faults")
        scratch = str(work.folder / "scratch")
        written = [step["written_bytes"] for step in work.metrics(verify)]
        assert len(written) == 4 and all(list(step) == [scratch] for step in written)  # type: ignore[call-overload]
        assert written[-1][scratch] > 0  # type: ignore[index]
        assert f"wrote  {scratch} " in result.stdout


def test_full_at_the_start_is_refused_with_numbers(work: Work, small_drive) -> None:
    small_drive.fill(leave_bytes=MiB)
    result = work.run(small_drive.store)
    assert result.exit_code == 3, result.output
    assert "does not fit: the drive of" in result.stderr and str(small_drive.store) in result.stderr
    assert "needs at least" in result.stderr and not small_drive.store.exists()


def test_full_during_the_run_pauses_and_ends_with_the_same_bits(work: Work, faults, quick_retry) -> None:
    faults.append(Fault("error", "write", errno.ENOSPC, skip=30, times=8))
    result = work.run()
    assert result.exit_code == 0, result.output
    assert "is full (No space left on device): paused" in result.stdout and "free space again" in result.stdout
    assert work.weights() == work.weights("without_faults")


def test_full_during_the_run_can_end_it(work: Work, faults) -> None:
    faults.append(Fault("error", "write", errno.ENOSPC, skip=30))
    check_failure(work.run(on_full="error"), "No space left on device (ENOSPC)", "scratch/live/", "Free space")
    assert not (work.folder / "out/final").exists()
    faults.clear()
    assert work.run().exit_code == 0, "the same folders must serve the next run"
    assert work.weights() == work.weights("without_faults")


@pytest.mark.parametrize("on", ["read", "write"])
def test_eio_ends_the_run_with_one_message(work: Work, faults, on: str) -> None:
    faults.append(Fault("error", on, errno.EIO, skip=30))  # type: ignore[arg-type]
    check_failure(work.run(), f"{on} failed: Input/output error (EIO)", "scratch/live/", "dmesg")
    assert not (work.folder / "out/final").exists()


def test_single_eio_ends_the_run_or_has_no_effect(work: Work, faults) -> None:
    faults.append(Fault("error", "write", errno.EIO, skip=30, times=1))
    result = work.run()
    if result.exit_code:  # a fetch was waiting for the space that this block occupies
        check_failure(result, "write failed: Input/output error (EIO)")
    else:
        assert "stays in memory" in result.stdout
        assert work.weights() == work.weights("without_faults")


@pytest.mark.parametrize("kind", ["short", "flip"])
def test_silently_corrupting_drive_ends_the_run(work: Work, faults, kind: str) -> None:
    faults.append(Fault(kind, "write", skip=30, times=1))  # type: ignore[arg-type]
    result = work.run(verify="always")
    check_failure(result, "is damaged: checksum", "scratch/live/", "bytes 0 to")


def test_a_read_only_drive_ends_the_run(work: Work, faults) -> None:
    faults.append(Fault("error", "write", errno.EROFS, skip=30))
    check_failure(work.run(), "Read-only file system (EROFS)", "became read-only", "mount it again")


def test_run_ends_before_exceeding_the_wear_limit(work: Work) -> None:
    counter = work.folder / "scratch/WEAR.json"
    assert work.run(out="unlimited").exit_code == 0
    once = json.loads(counter.read_text())["written_bytes"]
    limit = once + once // 2  # for all runs together
    check_failure(work.run(more=f'max_written = "{limit}B"'), "max_written", "scratch", "Raise max_written")
    assert once < json.loads(counter.read_text())["written_bytes"] <= limit
    result = work.run(more=f'max_written = "{3 * once}B"')
    assert result.exit_code == 0, result.output
    assert work.weights() == work.weights("without_faults")


def test_a_drive_in_use_is_refused(work: Work) -> None:
    tier = NvmeTier([work.folder / "scratch"], MiB)
    check_failure(work.run(), "scratch' is in use by process", "Stop that run, or give this one another directory")
    tier.close()


@pytest.mark.fault
def test_a_drive_that_dies_in_the_middle_ends_the_run(work: Work, small_drive, monkeypatch: pytest.MonkeyPatch) -> None:
    call_after_second_step(monkeypatch, small_drive.die)
    check_failure(work.run(small_drive.store), "Input/output error (EIO)", str(small_drive.store), "dmesg")


@pytest.mark.fault
def test_a_drive_that_becomes_read_only_in_the_middle(work: Work, small_drive, monkeypatch: pytest.MonkeyPatch) -> None:
    call_after_second_step(monkeypatch, small_drive.make_read_only)
    check_failure(work.run(small_drive.store), "Read-only file system (EROFS)", str(small_drive.store))


def call_after_second_step(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Arrange for ``then`` to be called after the second step."""
    from megatrain.training.training_loop import TrainingLoop

    real = TrainingLoop.train_step

    def train_step(self: TrainingLoop, *arguments: Any) -> None:
        if self.state.step == 2:
            then()
        real(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "train_step", train_step)


@pytest.mark.fault
def test_next_run_reports_a_killed_run(work: Work) -> None:
    """A run is killed when its third step starts. The next run reports that it took over leftovers, and succeeds."""
    script = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from test_runs import *
from megatrain.training.training_loop import TrainingLoop
real = TrainingLoop.train_step
def train_step(self, *arguments):
    if self.state.step == 2:
        os.kill(os.getpid(), 9)
    real(self, *arguments)
TrainingLoop.train_step = train_step
Work(Path({str(work.folder)!r})).run()
"""
    process = warm.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], timeout=200)
    assert process.returncode == -9
    result = work.run()
    assert result.exit_code == 0, result.output
    assert "scratch': took over" in result.stdout and "a dead run left" in result.stdout
    assert work.weights() == work.weights("without_faults")
    assert "took over" not in work.run(out="third").stdout


@pytest.mark.fault
def test_a_drive_that_fills_up_for_real_pauses(work: Work, small_drive, quick_retry, monkeypatch) -> None:
    """A backup makes hard links to the run's files. Every write then needs a new file, and there is no space for it."""
    import os

    def freeze_and_fill() -> None:
        (small_drive.path / "backup").mkdir()
        for number, path in enumerate(small_drive.store.glob("live/**/c/*")):
            os.link(path, small_drive.path / "backup" / str(number))
        small_drive.fill(leave_bytes=MiB // 4)
        threading.Timer(1.0, small_drive.make_room).start()

    call_after_second_step(monkeypatch, freeze_and_fill)
    result = work.run(small_drive.store)
    assert result.exit_code == 0, result.output
    assert "paused, nothing is lost" in result.stdout and "the run resumes" in result.stdout
    assert work.weights() == work.weights("without_faults")
