"""Whole copies of checkpoints, and runs that lose a drive: which copies are made, and what a run resumes from."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.checkpoint import local_copier
from megatrain.checkpoint.copier import open_copier
from megatrain.checkpoint.copy_thread import Throttle
from megatrain.checkpoint.document import Checkpoint, RankGeneration
from megatrain.checkpoint.inventory import saved_checkpoints, usable_checkpoint
from megatrain.checkpoint.listing import read_checkpoints
from megatrain.checkpoint.local_copier import LocalCopier
from megatrain.checkpoint.locations import bytes_on_drives
from megatrain.checkpoint.table import CheckpointConfig, CheckpointSpec
from processes.saved_run import NVME, ON_NVME, SavedRun
from tiered import GenerationReader, MiB, NvmeTier, RamTier, TieredStore, format_size
from tiered.durable.manifest import list_generations

ON_DRIVE = {"placement": ON_NVME, "more": NVME}
_TWO = '[[tiers.nvme]]\npath = "one"\nsize = "20MiB"\n[[tiers.nvme]]\npath = "two"\nsize = "20MiB"\n'
ON_TWO_DRIVES = {"placement": ON_NVME, "more": f'{_TWO}[advanced]\nfile_size = "32KiB"\n'}


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    made = unbroken.copy(tmp_path / "w")
    made.out.rename(made.folder / "undisturbed")
    return made


def weights(run: SavedRun, out: str = "out") -> bytes:
    return (run.folder / out / "final/model.safetensors").read_bytes()


def copied_steps(run: SavedRun) -> list[object]:
    path = run.out / "copies"
    readers = [GenerationReader(path, number) for number in list_generations(path)]
    assert [list(reader.problems()) for reader in readers] == [[] for _ in readers]
    return [reader.manifest.meta["step"] for reader in readers]


@pytest.fixture
def synchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make training wait for every copy, so that the set of copies does not depend on timing."""
    offer = LocalCopier.offer

    def offer_and_wait(self: LocalCopier, *arguments: Any, **options: Any) -> None:
        offer(self, *arguments, **options)
        self.finish()

    monkeypatch.setattr(LocalCopier, "offer", offer_and_wait)


# -- which checkpoints are copied --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "steps"), [("false", []), ("true", [2, 4, 6]), ("2", [4, 6]), ('"last"', [6])], ids=str
)
def test_save_copy_rule_selects_checkpoints(
    run: SavedRun, synchronous_copies: None, rule: str, steps: list[int]
) -> None:
    result = run.run(checkpoint=f"save_copy = {rule}", **ON_DRIVE)
    assert result.exit_code == 0, result.output
    assert copied_steps(run) == steps
    assert result.stdout.count("copied checkpoint at step") == len(steps)
    assert weights(run) == weights(run, "undisturbed"), "copies change nothing"


def test_copies_follow_the_checkpoint_limit(run: SavedRun, synchronous_copies: None) -> None:
    config = {**ON_DRIVE, "checkpoint": "save_copy = true"}
    path = run.write_config(**config)
    path.write_text(path.read_text().replace("save_total_limit = 3", "save_total_limit = 1"))
    result = run.call("run", path)
    assert result.exit_code == 0, result.output
    assert copied_steps(run) == [6] and len(list_generations(run.out / "checkpoints")) == 1


def test_copies_continue_after_generation_numbers_restart(tmp_path: Path) -> None:
    """A copy of generation 5 exists, but all checkpoints were removed. The next checkpoint, generation 1, is copied."""
    table = CheckpointConfig(save_total_limit=1, save_copy=True, min_free_disk="0B")
    spec = CheckpointSpec(table, tmp_path, (tmp_path / "drive",), "error")

    def save(steps: list[int]) -> None:
        store = TieredStore(
            [RamTier(MiB, pin_memory=False), NvmeTier([tmp_path / "drive"], MiB)], path=str(tmp_path / "checkpoints")
        )
        with store, closing(open_copier(spec, 4000, lambda text: None)) as copies:
            for step in steps:
                store.put("a", torch.full((1000,), float(step)))
                commit = store.commit({"step": step})
                commit.wait(60)
                copies.offer(read_checkpoints(tmp_path / "checkpoints")[-1])
                copies.finish()

    save([1, 2, 3, 4, 5])
    for name in ("checkpoints", "drive"):
        shutil.rmtree(tmp_path / name)
    save([6])
    assert list_generations(tmp_path / "checkpoints") == [1]
    (newest,) = list_generations(tmp_path / "copies")
    copy = GenerationReader(tmp_path / "copies", newest)
    assert newest == 6 and copy.manifest.meta["step"] == 6 and list(copy.problems()) == []


def test_copies_of_several_ranks_do_not_count_in_a_run_of_one_process(tmp_path: Path) -> None:
    """Generation numbers of one process and of several ranks are independent."""
    table = CheckpointConfig(save_total_limit=3, save_copy=2, min_free_disk="0B")
    copies = open_copier(CheckpointSpec(table, tmp_path, (tmp_path / "drive",), "error"), 4000, lambda text: None)
    assert isinstance(copies, LocalCopier)
    ranks = tuple(RankGeneration(f"rank{rank:05}", 2, "0") for rank in range(2))
    copies._folder.known = [
        Checkpoint(tmp_path / "copies", 1, (RankGeneration("", 1),), {}),
        Checkpoint(tmp_path / "copies", 2, ranks, {}),
    ]
    assert [number for number in (1, 2, 3, 4) if copies._is_due(number)] == [3, 4]
    copies.close()


def small_store(folder: Path) -> TieredStore:
    tiers = [RamTier(MiB, pin_memory=False), NvmeTier([folder / "drive"], MiB)]
    return TieredStore(tiers, path=str(folder / "checkpoints"), keep_generations=9)


def save(store: TieredStore, folder: Path, step: int) -> Checkpoint:
    store.put("a", torch.full((1000,), float(step)))
    store.commit({"step": step}).wait(60)
    return read_checkpoints(folder / "checkpoints")[-1]


def without_figures(messages: list[str]) -> list[str]:
    return [re.sub(r"(: [^:]+ copied.*,) compared, in [0-9.]+ s$", ": copied", text) for text in messages]


@pytest.mark.parametrize(
    ("rule", "copied"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5]), (5, [5]), ("last", [5])]
)
def test_copies_are_made_and_reported_by_the_rule(tmp_path: Path, rule: int | str, copied: list[int]) -> None:
    """The last checkpoint is offered twice: when it is saved, and as the last one of the process."""
    table = CheckpointConfig.model_validate({"save_total_limit": 9, "save_copy": rule, "min_free_disk": "0B"})
    spec = CheckpointSpec(table, tmp_path, (tmp_path / "drive",), "error")
    told: list[str] = []
    with small_store(tmp_path) as store, closing(open_copier(spec, 4000, told.append)) as copies:
        for step in (1, 2, 3, 4, 5):
            checkpoint = save(store, tmp_path, step)
            copies.offer(checkpoint)
            copies.finish()
        for _ in range(2):
            copies.offer(checkpoint, is_last=True)
            copies.finish()
    made = [GenerationReader(tmp_path / "copies", number) for number in list_generations(tmp_path / "copies")]
    assert [reader.manifest.meta["step"] for reader in made] == copied
    begun = [text for text in told if text.startswith("copying ")]  # only if the copy was still running
    assert set(begun) <= {
        f"copying the checkpoint of step {step} into '{tmp_path / 'copies'}', 3.91 KiB" for step in copied
    }
    done = without_figures([text for text in told if text not in begun])
    assert done == [f"copied checkpoint at step {step} into '{tmp_path / 'copies'}': copied" for step in copied]


def test_newer_checkpoint_replaces_a_queued_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy is still running when the next three checkpoints are offered."""
    released, pause = threading.Event(), Throttle.pause

    def hold(self: Throttle, start_s: float) -> float:
        assert released.wait(60)
        return pause(self, start_s)

    monkeypatch.setattr(Throttle, "pause", hold)
    table = CheckpointConfig.model_validate({"save_total_limit": 9, "save_copy": True, "min_free_disk": "0B"})
    spec, told = CheckpointSpec(table, tmp_path, (tmp_path / "drive",), "error"), list[str]()
    with small_store(tmp_path) as store, closing(open_copier(spec, 4000, told.append)) as copies:
        offered = []
        for step in (1, 2, 3, 4):
            offered.append(save(store, tmp_path, step))
            copies.offer(offered[-1])
        copies.wait_until_prunable(offered[1:3], lambda: False)  # these are not being copied, so nothing waits
        released.set()
        copies.finish()
    folder = tmp_path / "copies"
    assert without_figures(told) == [
        "the checkpoint of step 2 is not copied: the copy of step 1 is still running, and a newer one is due. Save "
        "less often, or copy fewer: checkpoint.save_copy = 2",
        *([f"copying the checkpoint of step 1 into '{folder}', 3.91 KiB"] if told[1].startswith("copying") else []),
        f"copied checkpoint at step 1 into '{folder}': copied",
        *(text for text in told if text.startswith("copying the checkpoint of step 4")),
        f"copied checkpoint at step 4 into '{folder}': copied",
    ]


def test_a_full_drive_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, told = shutil.disk_usage, list[str]()
    table = CheckpointConfig.model_validate({"save_copy": True, "min_free_disk": "1KiB"})
    spec = CheckpointSpec(table, tmp_path, (tmp_path / "drive",), "error")
    free = {"bytes": 3 * 1024 - 1}
    full = SimpleNamespace(disk_usage=lambda path: real(path)._replace(free=free["bytes"]))
    monkeypatch.setattr(local_copier, "shutil", full)
    folder = tmp_path / "copies"
    with small_store(tmp_path) as store, closing(open_copier(spec, 2048, told.append)) as copies:
        copies.offer(save(store, tmp_path, 1))
        copies.finish()
        free["bytes"] += 1
        copies.offer(save(store, tmp_path, 2))
        copies.finish()
    assert without_figures([text for text in told if not text.startswith("copying ")]) == [
        f"the checkpoint of step 1 was not copied into '{folder}': the drive of '{folder}' has 3.00 KiB free, but a "
        "copy takes 2.00 KiB and checkpoint.min_free_disk is 1.00 KiB. Free 1 B. The original is whole; the next "
        "checkpoint is copied again",
        f"copied checkpoint at step 2 into '{folder}': copied",
    ]


def test_run_without_drives_makes_no_copy(run: SavedRun) -> None:
    result = run.run(checkpoint="save_copy = true")
    assert result.exit_code == 0, result.output
    assert not (run.out / "copies").exists()


def test_save_never_removes_a_checkpoint_being_copied(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """If saves are faster than copies, training waits only before it would remove a checkpoint that is being copied."""
    rest = Throttle.pause

    def rest_longer(self: Throttle, since_s: float) -> float:
        if not self._disabled.is_set():
            time.sleep(0.02)
        return rest(self, since_s)

    monkeypatch.setattr(Throttle, "pause", rest_longer)
    path = run.write_config(checkpoint="save_copy = true", **ON_DRIVE)
    path.write_text(
        path.read_text().replace("save_steps = 2\nsave_total_limit = 3", "save_steps = 1\nsave_total_limit = 1")
    )
    result = run.call("run", path)
    assert result.exit_code == 0, result.output
    assert "was not copied" not in result.output
    assert copied_steps(run) == [6]
    assert weights(run) == weights(run, "undisturbed")


def test_failed_copy_does_not_stop_training(run: SavedRun) -> None:
    (run.out / "copies").mkdir(parents=True)
    (run.out / "copies/thesis.tex").write_text("mine")
    result = run.run(checkpoint='save_copy = "last"', **ON_DRIVE)
    assert result.exit_code == 0, result.output
    assert "the checkpoint of step 6 was not copied" in result.stdout and "was not made by tiered" in result.stdout
    assert weights(run) == weights(run, "undisturbed")
    assert sorted(path.name for path in (run.out / "copies").iterdir()) == ["thesis.tex"]


def test_copy_without_space_does_not_stop_training(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    full = SimpleNamespace(disk_usage=lambda path: real(path)._replace(free=100))
    monkeypatch.setattr(local_copier, "shutil", full)
    result = run.run(checkpoint='save_copy = "last"', **ON_DRIVE)
    assert "was not copied" in result.stdout and "has 100 B free" in result.stdout, result.output
    assert result.exit_code == 0 and copied_steps(run) == []


def test_a_second_stop_gives_up_the_copy_and_the_next_start_makes_it(
    run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.training.training_loop import TrainingLoop

    train_step, rest = TrainingLoop.train_step, Throttle.pause
    copying = threading.Event()

    def train_and_stop(self: TrainingLoop, *arguments: Any) -> None:
        if self.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(self, *arguments)

    def stop_again(self: Throttle, since_s: float) -> float:
        if not copying.is_set() and self._disabled.is_set():  # training waits for the copy, and everything is saved
            copying.set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert self._cancelled.wait(30)
        return rest(self, since_s)

    monkeypatch.setattr(TrainingLoop, "train_step", train_and_stop)
    monkeypatch.setattr(Throttle, "pause", stop_again)
    config = {**ON_DRIVE, "checkpoint": "save_copy = true"}
    result = run.run(**config)
    assert result.exit_code == 75, result.output
    assert "the copy was given up" in result.stdout and copied_steps(run) == []
    assert "interrupted at step 2, saved: run the same command again" in result.stderr
    monkeypatch.undo()
    stop_and_train = lambda *own: os.kill(os.getpid(), signal.SIGTERM) or train_step(*own)  # noqa: E731
    monkeypatch.setattr(TrainingLoop, "train_step", stop_and_train)
    result = run.run(**config)
    assert result.exit_code == 75 and "copied checkpoint at step 2" in result.stdout, result.output
    assert copied_steps(run) == [2, 3]


def test_finished_run_can_be_copied_later(run: SavedRun) -> None:
    assert run.run(**ON_DRIVE).exit_code == 0
    for _ in range(2):
        result = run.run(checkpoint='save_copy = "last"', **ON_DRIVE)
        assert result.exit_code == 0 and "nothing to do" in result.stdout, result.output
        assert copied_steps(run) == [6]
    assert "copied checkpoint" not in result.stdout, "it already exists"


# -- the checkpoint that a run resumes ---------------------------------------------------------------------------


@pytest.fixture
def lost(run: SavedRun) -> SavedRun:
    """Return a run with checkpoints of steps 2 and 4 and a copy of step 4, after the loss of its drive."""
    result = run.run(steps=4, checkpoint='save_copy = "last"', **ON_DRIVE)
    assert result.exit_code == 0, result.output
    shutil.rmtree(run.out / "final")
    shutil.rmtree(run.folder / "drive")
    return run


def test_run_with_a_lost_drive_resumes_from_the_copy(lost: SavedRun) -> None:
    found = usable_checkpoint(lost.out)
    assert found is not None and (found.step, found.is_copy) == (4, True)
    status = lost.call("status", lost.out).stdout
    assert "copies   step 4, complete in output_dir" in status and "steps 2, 4 are gone" in status
    result = lost.run(checkpoint='save_copy = "last"', **ON_DRIVE)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("are gone") == 1 and "steps 2, 4 are gone" in result.stdout
    assert "the copy of the checkpoint of step 4" in result.stdout
    assert "continuing after step 4 of 6" in result.stdout and "cannot be used" not in result.output
    assert weights(lost) == weights(lost, "undisturbed")
    assert copied_steps(lost) == [4, 6]
    lost.call("ckpt", "rm", lost.out, "--step", 2, "--yes")
    assert not any(each.is_gone for each in saved_checkpoints(lost.out) if each.checkpoint.step == 6)


def test_run_resumes_from_a_copy_without_checkpoints(lost: SavedRun) -> None:
    """The folder ``checkpoints`` is gone, and only the copy of step 4 is left."""
    shutil.rmtree(lost.out / "checkpoints")
    result = lost.run(**ON_DRIVE)
    assert result.exit_code == 0 and "continuing after step 4 of 6" in result.stdout, result.output
    assert weights(lost) == weights(lost, "undisturbed")
    found = [(each.step, each.save_number) for each in read_checkpoints(lost.out / "checkpoints")]
    assert found == [(6, 3)], "the copy of step 4 was the second save"


def test_copies_are_listed_verified_exported_and_removed(lost: SavedRun) -> None:
    rows = [line.split() for line in lost.call("ckpt", "ls", lost.out).stdout.splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows if row[0].isdigit()] == [("2", "lost"), ("4", "lost"), ("4", "newest")]
    assert " ".join(rows[-1]) == "a run continues from copy of step 4"
    infos = json.loads(lost.call("ckpt", "ls", lost.out, "--json").stdout)["checkpoints"]
    assert [(i["step"], i["is_copy"], i["is_newest"], i["problem"] is None) for i in infos] == [
        (2, False, False, False), (4, False, False, False), (4, True, True, True),
    ]  # fmt: skip
    (part,) = infos[0]["lost"]
    assert part["blocks"] and not part["is_there"] and 0 < len(part["blocks"]) <= part["num_blocks"]
    text = " ".join(lost.call("ckpt", "ls", lost.out).stdout.split())
    named = f"{len(part['blocks'])} of {part['num_blocks']} blocks ("
    assert text.count(named) == 2 and f"lay in '{part['path']}', which is not there" in text
    verified = lost.call("ckpt", "verify", lost.out)
    assert verified.exit_code == 1 and "copy of step 4 (generation 2): sound" in verified.stdout, verified.output
    assert verified.stdout.count("parts of it are gone: ") == 2
    exported = lost.call("export", lost.out, lost.folder / "model4", "--dtype", "float32")
    assert exported.exit_code == 0, exported.output
    only = lost.call("ckpt", "rm", lost.out, "--step", 4, "--yes")
    assert only.exit_code == 1 and "--all" in only.stderr and copied_steps(lost) == [4]
    assert lost.call("ckpt", "rm", lost.out, "--all", "--yes").exit_code == 0
    assert list_generations(lost.out / "copies") == list_generations(lost.out / "checkpoints") == []
    result = lost.run(**ON_DRIVE)
    assert result.exit_code == 0 and "step 1/6" in result.stdout, result.output


def test_export_of_a_copy_equals_that_of_the_checkpoint(run: SavedRun) -> None:
    assert run.run(checkpoint='save_copy = "last"', **ON_DRIVE).exit_code == 0
    for source, out in ((run.out, "own"), (run.out / "copies", "copied")):
        result = run.call("export", source, run.folder / out, "--dtype", "float32")
        assert result.exit_code == 0, result.output
    assert (run.folder / "own/model.safetensors").read_bytes() == (run.folder / "copied/model.safetensors").read_bytes()


# -- nothing is left ---------------------------------------------------------------------------------------------


def test_lost_drive_without_copies_is_reported_once(run: SavedRun) -> None:
    assert run.run(steps=4, **ON_DRIVE).exit_code == 0
    drive = run.folder / "drive"
    shutil.move(drive, run.folder / "away")
    before = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    result = run.run(**ON_DRIVE)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("error: ") == 1 and len(result.stderr.strip().splitlines()) == 1
    for part in (
        "steps 2, 4 are gone",
        f"'{drive}', which is not there",
        "final",
        "name another output_dir",
        "copy it again",
    ):
        assert part in result.stderr, result.stderr
    assert "ckpt rm" not in result.stderr, "the drive may be mounted again"
    verified = run.call("ckpt", "verify", run.out)
    assert verified.exit_code == 1 and "ckpt rm" not in verified.output, verified.output
    after = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} <= {run.out / "LOCK", run.out / "status.json"}
    assert not drive.exists(), "nothing is created in the mount point of a drive"

    status = run.call("status", run.out)
    assert "continue from" not in status.stdout and "steps 2, 4 are gone" in status.stdout, status.stdout
    (seen,) = json.loads(run.call("status", run.out, "--json").stdout)["runs"]
    assert (seen["saved_step"], seen["lost_steps"], seen["copied_steps"]) == (None, [2, 4], [])
    check = run.call("check", run.write_config(**ON_DRIVE))
    assert check.exit_code == 1 and "steps 2, 4 are gone" in check.stdout, check.output

    shutil.move(run.folder / "away", drive)  # as if the drive had only been unmounted
    result = run.run(**ON_DRIVE)
    assert result.exit_code == 0 and "continuing after step 4 of 6" in result.stdout, result.output
    assert weights(run) == weights(run, "undisturbed")


def test_finished_run_does_not_need_its_drive(run: SavedRun) -> None:
    assert run.run(**ON_DRIVE).exit_code == 0
    shutil.rmtree(run.folder / "drive")
    result = run.run(**ON_DRIVE)
    assert result.exit_code == 0 and "nothing to do: this run is done" in result.stdout, result.output
    check = run.call("check", run.write_config(**ON_DRIVE))
    assert check.exit_code == 0 and "the run is done" in check.stdout, check.output


def test_run_resumes_after_the_loss_of_one_of_two_drives(run: SavedRun) -> None:
    assert run.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    shutil.rmtree(run.folder / "two")
    result = run.run(**ON_TWO_DRIVES)
    assert result.exit_code == 1 and f"'{run.folder / 'two'}', which is not there" in result.stderr, result.output
    assert str(run.folder / "one") not in result.stderr


# -- runs that were copied as a folder ---------------------------------------------------------------------------


def verified(run: SavedRun) -> Any:
    return run.call("ckpt", "verify", run.out)


def test_copied_folder_is_read_from_its_drives(run: SavedRun, tmp_path: Path) -> None:
    """With two drive folders, arrays in the first link to files in the second by absolute paths."""
    assert run.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    sound, damaged = (run.copy(tmp_path / name) for name in ("sound", "damaged"))
    (file,) = (damaged.folder / "two/snap").glob("00000002/model.layers.0/m/c/1")
    file.write_bytes(b"damaged!" + file.read_bytes()[8:])
    result = verified(damaged)
    assert result.exit_code == 1 and f"'{file}'" in result.stdout, result.output
    assert "a run continues from step 2" in result.stdout and "warning: " not in result.output
    result = damaged.run(**ON_TWO_DRIVES)
    assert result.exit_code == 0 and "continuing after step 2 of 6" in result.stdout, result.output

    shutil.rmtree(run.folder)  # the original is gone, as after a move
    for words in (("ckpt", "ls"), ("ckpt", "verify"), ("status",)):
        result = sound.call(*words, sound.out)
        assert result.exit_code == 0 and str(run.folder) not in result.output, result.output
    assert sound.call("export", sound.out, tmp_path / "x", "--model", sound.folder / "model").exit_code == 0
    result = sound.run(**ON_TWO_DRIVES)
    assert result.exit_code == 0 and "continuing after step 4 of 6" in result.stdout, result.output
    assert weights(sound) == weights(damaged)


@pytest.mark.parametrize("drive", ["one", "two"])
def test_folders_outside_a_copy_are_named_by_every_command(run: SavedRun, tmp_path: Path, drive: str) -> None:
    assert run.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    copied = run.copy(tmp_path / "copied")
    shutil.rmtree(copied.folder / drive)
    named = f"4 are read from '{run.folder / drive}', because '{copied.folder / drive}' does not hold them"
    config = copied.write_config(**ON_TWO_DRIVES)
    calls = [("ckpt", "ls", copied.out), ("ckpt", "verify", copied.out), ("status", copied.out), ("check", config)]
    for words in (*calls, ("export", copied.out, tmp_path / "x"), ("run", config)):
        result = copied.call(*words)
        assert result.exit_code == 0 and named in " ".join(result.output.split()), result.output
        assert result.output.count("warning") >= 1


def test_a_copy_next_to_the_drives_of_another_run(run: SavedRun, tmp_path: Path) -> None:
    """Both runs have folders and blocks with the same names. The copied run still reads from the recorded drives."""
    assert run.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    other = run.copy(tmp_path / "other")
    for name in ("one", "two", run.out.name):
        shutil.rmtree(other.folder / name)
    assert other.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    shutil.rmtree(other.out)
    shutil.copytree(run.out, other.out)
    result = verified(other)
    assert result.exit_code == 0 and f"are read from '{run.folder / 'one'}'" in " ".join(result.output.split())
    away = [(run.folder / name).rename(tmp_path / name) for name in ("one", "two")]
    for words in (("ckpt", "verify"), ("status",), ("ckpt", "ls")):
        result = other.call(*words, other.out)
        shown = " ".join(result.output.split())
        assert f"lay in '{run.folder / 'one'}', which is not there" in shown and "ckpt rm" not in shown, result.output
    assert len(away) == 2


def test_incomplete_live_copy_names_its_folders(run: SavedRun, tmp_path: Path) -> None:
    assert run.run(steps=4, **ON_TWO_DRIVES).exit_code == 0
    shutil.rmtree(run.out / "final")
    copied = run.copy(tmp_path / "copied")
    for folder in (run.folder, copied.folder):  # snapshots were removed while the run was being copied
        shutil.rmtree(folder / "two/snap")
    result = copied.run(**ON_TWO_DRIVES)
    assert result.exit_code == 1 and str(run.folder) not in result.stderr, result.output
    for part in (f"lay in '{copied.folder / 'two'}'", "copy it again; a larger checkpoint.save_total_limit keeps more"):
        assert part in result.stderr, result.stderr


# -- messages before anything is lost ----------------------------------------------------------------------------


def test_drive_folder_describes_its_contents(run: SavedRun) -> None:
    result = run.run(steps=4, **ON_DRIVE)
    drive = run.folder / "drive"
    nbytes = bytes_on_drives(run.out)[drive]
    files = {path.lstat().st_ino: path.lstat().st_size for path in drive.glob("snap/*/**/c/*")}
    assert nbytes == sum(files.values()) > 0, "each file once, whatever the number of links"
    text = (drive / "README.txt").read_text()
    for part in (str(run.out), "IT HOLDS CHECKPOINTS", f"megatrain-tier clean {drive}", "ckpt rm RUN", "save_copy"):
        assert part in text, text
    assert f"stay in '{drive}' (now 0 B): deleting that folder destroys them" in result.stdout
    shown = " ".join(run.call("status", run.out).stdout.split())
    assert f"{format_size(nbytes)} of the checkpoints are in {drive}" in shown
    check = run.call("check", run.write_config(**ON_DRIVE))
    assert check.exit_code == 0 and " ".join(check.stdout.split()).count(f"stay in '{drive}'") == 1, check.output

    other = run.run(out="other", steps=2, **ON_DRIVE)
    assert other.exit_code == 0, other.output
    text = (drive / "README.txt").read_text()
    assert f"  {run.folder / 'other'}\n  {run.out}\n" in text, text
    assert run.call("clean", drive, "--yes").exit_code == 0
    assert (drive / "README.txt").exists() and run.call("ckpt", "verify", run.out).exit_code == 0
