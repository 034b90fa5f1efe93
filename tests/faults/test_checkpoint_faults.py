"""Checkpoints that cannot be written or used: the message to the user, and the safety of earlier checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatrain.run.folder import RunFolder
from processes.kill_checks import problems_of
from processes.saved_run import command_group, make_model, make_run
from tiered import MiB
from tiered.durable.manifest import generation_folder, list_generations, read_manifest
from tiered.file_io import checksum

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
NUM_STEPS = 4
CONFIG = f"""task = "pretrain"
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
gradient_accumulation_steps = 1
max_steps = {NUM_STEPS}
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
[tiers]
ram.size = "64MiB"
on_disk_full = "pause"
[checkpoint]
save_steps = 1
min_free_disk = "0MiB"
"""


@dataclass
class Work:
    """Folder with a model, data and the config that the command runs."""

    folder: Path

    def run(self, *options: str, **changes: Any) -> Result:
        """Run the config with changed values. ``changes`` maps keys to values."""
        (self.folder / "run.toml").write_text(CONFIG)
        sets = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return CliRunner().invoke(command_group(), ["run", str(self.folder / "run.toml"), *sets, *options])

    def weights(self, out: Path | str = "out") -> bytes:
        return (self.folder / out / "final/model.safetensors").read_bytes()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "out/checkpoints"

    def steps(self, path: Path | None = None) -> list[int]:
        """Return the steps of all checkpoints and assert that each is complete."""
        path = path or self.checkpoints
        for generation in list_generations(path):
            assert problems_of(path, generation) == []
        return [read_manifest(path, generation).meta["step"] for generation in list_generations(path)]  # type: ignore[misc, index, call-overload]

    def files(self) -> dict[str, bytes]:
        """Return the contents of all checkpoint files, by path."""
        return {str(path): path.read_bytes() for path in sorted(self.checkpoints.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, data and the results of an undisturbed run."""
    folder = tmp_path_factory.mktemp("good")
    make_run(folder)
    result = Work(folder).run(output_dir=str(folder / "without_faults"))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def work(good: Path, tmp_path: Path) -> Work:
    folder = tmp_path / "w"
    shutil.copytree(good, folder)
    return Work(folder)


@pytest.fixture
def saved(work: Work) -> Work:
    """Return a run that ended after two of its four steps, with a checkpoint of each step."""
    result = work.run("--max-steps", "2")
    assert result.exit_code == 0, result.output
    shutil.rmtree(work.folder / "out/final")
    assert work.steps() == [1, 2]
    return work


@pytest.fixture
def before_save(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets a callback for the save of a step, before or after the saver checks for space."""

    def arrange(step: int, then: Callable[[], object], *, after_space_check: bool = False) -> None:
        from megatrain.checkpoint.saver import Saver
        from tiered import TieredStore

        saving: list[int] = []
        save, commit = Saver.save, TieredStore.commit

        def save_after_fault(self: Saver, state: Any, *arguments: Any, **options: Any) -> None:
            saving.append(state.step)
            if state.step == step and saving.count(step) == 1 and not after_space_check:
                self.finish()
                then()
            save(self, state, *arguments, **options)

        def commit_after_fault(self: TieredStore, *arguments: Any) -> Any:
            if saving[-1] == step and saving.count(step) == 1 and after_space_check:
                then()
            return commit(self, *arguments)

        monkeypatch.setattr(Saver, "save", save_after_fault)
        monkeypatch.setattr(TieredStore, "commit", commit_after_fault)

    return arrange


def check_failure(result: Result, *parts: str, exit_code: int = 1) -> None:
    assert result.exit_code == exit_code, result.output
    for part in parts:
        assert part in result.stderr, result.stderr
    assert result.stderr.count("error: ") <= 1, result.stderr
    assert "Traceback" not in result.output and "internal error" not in result.output


@pytest.fixture
def on_drive(work: Work, small_drive: Any) -> Work:
    """Return a work folder whose output folder is on a small drive."""
    (small_drive.path / "out").mkdir()
    (work.folder / "out").symlink_to(small_drive.path / "out")
    return work


KEEP_ALL = {"checkpoint.save_total_limit": 9}  # otherwise the new checkpoint reuses the space of an old one


@pytest.mark.fault
@pytest.mark.parametrize("after_space_check", [False, True], ids=["before it starts", "in the middle"])
def test_a_full_drive_can_end_the_run(
    on_drive: Work, small_drive: Any, before_save: Callable[..., None], after_space_check: bool
) -> None:
    changes = {"tiers.on_disk_full": "error", **KEEP_ALL}
    before_save(3, small_drive.fill, after_space_check=after_space_check)
    result = on_drive.run(**changes)
    texts = (
        ["No space left on device", "checkpoints"] if after_space_check else ["no room for a checkpoint", "min_free"]
    )
    check_failure(result, str(on_drive.folder / "out"), *texts)
    assert on_drive.steps() == [1, 2]
    assert not (on_drive.folder / "out/final").exists()
    small_drive.make_room()
    result = on_drive.run(**changes)
    assert result.exit_code == 0, result.output
    assert "continuing after step 2 of 4" in result.stdout
    assert on_drive.weights() == on_drive.weights("without_faults")
    assert on_drive.steps() == [1, 2, 3, 4]


@pytest.mark.fault
@pytest.mark.parametrize("after_space_check", [False, True], ids=["before it starts", "in the middle"])
def test_a_full_drive_pauses_the_run(
    on_drive: Work, small_drive: Any, before_save: Callable[..., None], after_space_check: bool, quick_retry: None
) -> None:
    def fill() -> None:
        small_drive.fill()
        make_room_after(1.0, small_drive)

    before_save(3, fill, after_space_check=after_space_check)
    result = on_drive.run(**KEEP_ALL)
    assert result.exit_code == 0, result.output
    assert "paused, nothing is lost" in result.stdout and "automatically" in result.stdout
    assert on_drive.weights() == on_drive.weights("without_faults")
    assert on_drive.steps() == [1, 2, 3, 4]


def test_missing_checkpoint_space_is_reported_before_the_first_step(work: Work) -> None:
    """Otherwise, the run would train until its first save, and then wait forever."""
    result = work.run(**{"checkpoint.min_free_disk": "900TiB"})
    check_failure(
        result,
        "does not fit: the drive of output_dir",
        "900.00 TiB that stay free (checkpoint.min_free_disk). Lower checkpoint.min_free_disk, free space",
        exit_code=3,
    )
    assert "step 1/4" not in result.stdout and not (work.folder / "out").exists()
    result = CliRunner().invoke(
        command_group(), ["check", str(work.folder / "run.toml"), "--set", 'checkpoint.min_free_disk="900TiB"']
    )
    assert result.exit_code == 3 and "checkpoint.min_free_disk" in result.stdout, result.output
    result = work.run(
        **{"checkpoint.min_free_disk": "900TiB", "checkpoint.save_strategy": "no", "checkpoint.save_on_signal": False}
    )
    assert result.exit_code == 0, "a run that never saves needs no such space"


@pytest.fixture
def stop_during_pause(monkeypatch: pytest.MonkeyPatch, before_save: Callable[..., None]) -> Callable[[int], None]:
    """Return a function that limits the free space when step 3 is saved, and sends SIGTERM while the run waits."""
    from megatrain.checkpoint import saver

    def arrange(free_bytes: int) -> None:
        real = shutil.disk_usage

        def fill() -> None:
            monkeypatch.setattr(saver.shutil, "disk_usage", lambda path: real(path)._replace(free=free_bytes))
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

        monkeypatch.setattr(saver, "RETRY_S", 0.02)
        before_save(3, fill)

    return arrange


def test_stop_during_pause_saves_into_the_reserved_space(
    work: Work, stop_during_pause: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"checkpoint.min_free_disk": "64MiB", **KEEP_ALL}
    stop_during_pause(32 * MiB)
    result = work.run(**changes)
    assert result.exit_code == 75, result.output
    assert "paused, nothing is lost" in result.stdout
    assert "step 3 is saved into the space that checkpoint.min_free_disk keeps free" in result.stdout
    assert "interrupted at step 3, saved: run the same command again to continue" in result.stderr
    assert work.steps() == [1, 2, 3]
    monkeypatch.undo()
    result = work.run(**changes)
    assert result.exit_code == 0 and "continuing after step 3 of 4" in result.stdout, result.output
    assert work.weights() == work.weights("without_faults")


def test_stop_without_space_reports_the_last_checkpoint(
    work: Work, stop_during_pause: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_during_pause(MiB // 8)
    result = work.run(**KEEP_ALL)
    assert result.exit_code == 1, result.output
    assert "step 3 cannot be saved, so the steps after 2 are lost: no room for a checkpoint" in result.stdout
    assert "interrupted; last saved at step 2: run the same command again to continue from there" in result.stderr
    assert json.loads((work.folder / "out/status.json").read_text())["state"] == "stopped"
    assert work.steps() == [1, 2]
    monkeypatch.undo()
    assert work.run(**KEEP_ALL).exit_code == 0
    assert work.weights() == work.weights("without_faults")


@pytest.mark.fault
def test_next_checkpoint_reuses_the_oldest_space(
    on_drive: Work, small_drive: Any, before_save: Callable[..., None]
) -> None:
    """The drive needs space only for the checkpoints that are kept."""
    before_save(3, lambda: small_drive.fill(leave_bytes=MiB))
    result = on_drive.run(**{"tiers.on_disk_full": "error"})
    assert result.exit_code == 0, result.output
    assert on_drive.steps() == [3, 4]


@pytest.mark.fault
def test_drive_filled_between_checkpoints_pauses_the_run(
    on_drive: Work, small_drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further line can be added to the metrics file, long before the next checkpoint is due."""
    from megatrain.training.training_loop import TrainingLoop

    train_step = TrainingLoop.train_step

    def train_and_fill(self: TrainingLoop, *arguments: Any) -> None:
        if self.state.step == 2:
            fill_to_the_last_byte(small_drive)
            make_room_after(3.0, small_drive)
        train_step(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "train_step", train_and_fill)
    result = on_drive.run("--max-steps", "16", **{"checkpoint.save_steps": 100, "tiers.on_disk_full": "pause"})
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (on_drive.folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 17))
    assert on_drive.steps() == [16]


def make_room_after(seconds: float, drive: Any) -> None:
    def make_room() -> None:
        with contextlib.suppress(OSError):  # the test may have failed and unmounted the drive
            drive.make_room()

    threading.Timer(seconds, make_room).start()


def fill_to_the_last_byte(drive: Any) -> None:
    drive.fill()
    with (drive.path / "filler").open("ab", buffering=0) as file:
        for nbytes in (65536, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(nbytes))


@pytest.mark.fault
def test_a_drive_that_becomes_read_only_ends_the_run_and_leaves_the_checkpoints(
    on_drive: Work, small_drive: Any, before_save: Callable[..., None]
) -> None:
    before_save(3, small_drive.make_read_only)
    check_failure(on_drive.run(), "Read-only file system")
    assert on_drive.steps()[-1] == 2


@pytest.mark.fault
def test_a_read_only_output_dir_is_refused_before_anything_is_done(on_drive: Work, small_drive: Any) -> None:
    small_drive.make_read_only()
    check_failure(on_drive.run(), "output_dir: cannot write", "Read-only file system", exit_code=2)


def test_the_output_dir_of_a_run_with_another_config_is_refused(saved: Work) -> None:
    before = saved.files()
    changes = {"optimizer.weight_decay": 0.2, "training.per_device_train_batch_size": 1, "tiers.ram.size": "65MiB"}
    result = saved.run(**changes)
    check_failure(result, "optimizer.weight_decay", "per_device_train_batch_size", "--allow-config-change", exit_code=2)
    assert "ram" not in result.stderr, "a key that alters no result"
    assert saved.files() == before
    result = saved.run("--allow-config-change", **changes)
    assert result.exit_code == 0, result.output
    assert "weight_decay" in result.stdout and saved.steps() == [3, 4]


def test_second_run_on_a_locked_output_dir_is_refused(saved: Work) -> None:
    before = saved.files()
    with RunFolder(saved.folder / "out"):
        check_failure(saved.run(), f"'{saved.folder / 'out'}' is in use by process")
    assert saved.files() == before
    assert saved.run().exit_code == 0


def test_the_checkpoint_of_another_model_is_refused(saved: Work) -> None:
    before = saved.files()
    shutil.rmtree(saved.folder / "model")
    make_model(saved.folder / "model", hidden_size=32)
    check_failure(saved.run(), str(saved.checkpoints), "the model's config.json", exit_code=2)
    assert saved.files() == before
    result = saved.run("--allow-config-change")  # another model cannot resume it
    check_failure(result, str(saved.checkpoints), "block 'model.embed_tokens/weight'")
    assert saved.files() == before


def test_kill_while_creating_the_checkpoint_folder_is_recovered(work: Work) -> None:
    """A kill after the first document is written, but before it is renamed, leaves these two files."""
    work.checkpoints.mkdir(parents=True)
    (work.checkpoints / "LOCK").touch()
    (work.checkpoints / "zarr.tmp").write_text("{")
    result = work.run()
    assert result.exit_code == 0, result.output
    assert work.weights() == work.weights("without_faults") and work.steps() == [3, 4]


def test_duplicate_stop_signal_counts_once(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` and some shells send a signal to the process and then to its whole group. They are one request."""
    from megatrain.training.training_loop import TrainingLoop

    train_step = TrainingLoop.train_step

    def train_and_stop(self: TrainingLoop, *arguments: Any) -> None:
        if self.state.step == 1:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        train_step(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "train_step", train_and_stop)
    result = work.run()
    assert result.exit_code == 75, result.output
    assert work.steps()[-1] == 2


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, version: int | None = None) -> None:
    """Change the body of a manifest, and update its checksum so that the manifest stays valid."""
    document = json.loads(path.read_text())
    change(document["body"])
    text = json.dumps(document["body"], sort_keys=True)
    path.write_text(
        json.dumps({**document, "format": version or document["format"], "xxh3_64": checksum(text.encode())})
    )


def manifests(work: Work) -> list[Path]:
    """Return the paths of the manifests of all generations, oldest first."""
    numbers = list_generations(work.checkpoints)
    return [generation_folder(work.checkpoints, number) / "MANIFEST.json" for number in numbers]


def make_newer(path: Path, kind: str) -> None:
    if kind == "checkpoint":
        edit(path, lambda body: body["meta"].update(checkpoint_format=99))
    else:
        edit(path, lambda body: None, version=99)


@pytest.mark.parametrize("kind", ["checkpoint", "manifest"])
def test_checkpoints_of_a_newer_version_are_refused(saved: Work, kind: str) -> None:
    for path in manifests(saved):
        make_newer(path, kind)
    before = saved.files()
    check_failure(saved.run(), "has format 99", "this version reads up to", "upgrade")
    assert saved.files() == before


@pytest.mark.parametrize("kind", ["checkpoint", "manifest"])
def test_only_the_newest_checkpoint_is_of_a_newer_version(saved: Work, kind: str) -> None:
    """If the run resumed from an older checkpoint, the work of the newer version would be silently lost."""
    make_newer(manifests(saved)[-1], kind)
    before = saved.files()
    check_failure(saved.run(), "has format 99", "this version reads up to", "upgrade")
    assert saved.files() == before


def test_newer_top_manifest_does_not_hide_checkpoints(saved: Work) -> None:
    edit(saved.checkpoints / "MANIFEST.json", lambda body: None, version=99)
    result = saved.run()
    if result.exit_code:
        check_failure(result, "has format 99", "this version reads up to", "upgrade")
    else:
        assert "continuing after step 2 of 4" in result.stdout
        assert saved.weights() == saved.weights("without_faults")


def test_damaged_manifests_do_not_restart_the_run(saved: Work) -> None:
    for path in manifests(saved):
        path.write_text(re.sub(r'"step": \d', '"step": 7', path.read_text()))
    before = saved.files()
    check_failure(saved.run(), "is damaged", str(saved.checkpoints))
    assert saved.files() == before
