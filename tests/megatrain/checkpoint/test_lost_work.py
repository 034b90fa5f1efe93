"""A run resumes saved work even if the top file is outdated or the clock was set back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatrain.checkpoint import state
from megatrain.checkpoint.inventory import RunInventory
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from processes.saved_run import NVME, ON_NVME, SavedRun
from tiered import MiB, RamTier, TieredStore
from tiered.durable.manifest import MANIFEST_NAME, list_generations, make_current


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    return unbroken.copy(tmp_path / "w")


def step_of(text: str) -> int:
    found = re.search(r"continuing after step (\d+)", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("top", [1, None])
def test_outdated_top_file_still_resumes_the_newest_checkpoint(top: int | None, run: SavedRun) -> None:
    """Before a fix, such a run started from the model, and its first save removed the sound checkpoints."""
    final = (run.out / "final/model.safetensors").read_bytes()
    folder = run.out / "checkpoints"
    for number in (1, 3):
        shutil.rmtree(folder / f"snap/{number:08d}")
    shutil.rmtree(run.out / "final")
    if top is None:
        (folder / MANIFEST_NAME).unlink()
    else:
        make_current(folder, top)
    text = f"{folder / MANIFEST_NAME}' " + ("is missing" if top is None else "names generation 1, but '")
    listed, verified = (run.call("ckpt", word, run.out) for word in ("ls", "verify"))
    checked = run.call("check", run.folder / "run.toml")
    for result in (listed, verified, checked):
        assert result.exit_code == 0, result.output
        assert text in " ".join(result.output.split()), result.output
    for result in (listed, verified):
        assert "a run continues from step 4\n" in result.output
    assert "starts from the model" not in checked.output
    result = run.run(steps=6)
    assert result.exit_code == 0 and text in result.output and step_of(result.output) == 4
    assert list_generations(folder) == [2, 3]
    assert (run.out / "final/model.safetensors").read_bytes() == final


def test_run_with_only_incomplete_checkpoints_does_not_restart(run: SavedRun) -> None:
    """A copy of a live run may hold the top file, but only part of each generation."""
    folder = run.out / "checkpoints"
    for path in folder.glob("snap/*/MANIFEST.json"):
        path.unlink()
    files = sorted(folder.rglob("*"))
    text = "names generation 3, but '"
    for command, code in (("run", 1), ("check", 2)):
        result = run.call(command, run.folder / "run.toml")
        assert result.exit_code == code and text in " ".join(result.output.split()), result.output
        assert "no generation exists" in " ".join(result.output.split())
    assert sorted(folder.rglob("*")) == files, "nothing was removed"
    assert text in " ".join(run.call("ckpt", "ls", run.out).output.split())


def test_clock_set_back_loses_no_checkpoint(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a fix, an old checkpoint with a later time was resumed, and the newer checkpoints were dropped."""
    run.folder.joinpath("drive").mkdir()
    shutil.rmtree(run.out)
    options = {"placement": ON_NVME, "more": NVME, "checkpoint": "save_copy = 2"}
    times = iter(f"20{year:02d}-01-01T00:00:00.000000+00:00" for year in range(99, 0, -1))
    monkeypatch.setattr(state, "now_text", lambda timespec="seconds": next(times))
    assert run.run(steps=6, **options).exit_code == 0  # saves steps 2, 4 and 6; copies steps 4 and 6
    final = (run.out / "final/model.safetensors").read_bytes()
    shutil.rmtree(run.out / "final")
    shutil.rmtree(run.out / "copies/snap/00000003")
    infos = [entry.checkpoint for entry in RunInventory(run.out).entries]
    assert [(info.step, info.is_copy, info.save_number) for info in infos] == [
        (2, False, 1), (4, False, 2), (6, False, 3), (4, True, 2),
    ]  # fmt: skip
    assert infos[3].saved_at > infos[2].saved_at, "the copy of step 4 looks newer by the clock"
    assert "a run continues from step 6\n" in run.call("ckpt", "ls", run.out).output
    result = run.run(steps=6, **options)
    assert result.exit_code == 0 and step_of(result.output) == 6, result.output
    assert (run.out / "final/model.safetensors").read_bytes() == final


def test_a_save_gets_a_larger_number_than_any_checkpoint_or_copy(run: SavedRun) -> None:
    folder = CheckpointFolder(run.out / "checkpoints", 0, lambda item: [item], 3, print)
    with TieredStore([RamTier(MiB, pin_memory=False)], path=str(run.folder / "other")) as store:
        for elsewhere, numbers in ((0, [4, 5]), (3, [4, 5]), (9, [10, 11])):
            writer = CheckpointWriter(folder, store, lanes=1, elements={}, save_number=elsewhere)
            assert [writer.next_save_number(), writer.next_save_number()] == numbers
