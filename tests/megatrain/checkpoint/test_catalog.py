"""Listing, finding, verifying and removing checkpoints in folders that real runs saved."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint.inspection import InventoryEntry
from megatrain.checkpoint.inventory import RunInventory, checkpoint_folders, find_checkpoint, next_start
from megatrain.checkpoint.removal import remove_checkpoint
from megatrain.checkpoint.state import CheckpointError
from megatrain.run.folder import RunFolder
from oracles.run_state import make_state
from processes.saved_run import NVME, ON_NVME, SavedRun
from tiered import MiB, NvmeTier, RamTier, TieredStore
from tiered.durable.manifest import MANIFEST_NAME, generation_folder, make_current


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    return unbroken.copy(tmp_path / "w")


@pytest.fixture
def on_nvme(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    """Return a run with blocks on a drive. Its folder must not be copied, because the manifests name the drive."""
    run = SavedRun(tmp_path / "w")
    run.folder.mkdir()
    for name in ("model", "data.txt"):
        source = unbroken.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, run.folder / name)
    result = run.run(placement=ON_NVME, more=NVME, dtype="bfloat16")
    assert result.exit_code == 0, result.output
    return run


def steps(entries: Iterable[InventoryEntry]) -> list[int | None]:
    return [entry.checkpoint.step for entry in entries]


def newest_number(run: SavedRun) -> int | None:
    """Return the number of the checkpoint from which the run would resume."""
    newest = next_start(RunInventory(run.out).entries)
    return None if newest is None else newest.checkpoint.number


def notices_of(run: SavedRun) -> list[str]:
    inventory = RunInventory(run.out)
    return inventory.notices(inventory.entries)


def remove(run: SavedRun, number: int, *, force: bool = False) -> int:
    (chosen,) = (each.checkpoint for each in RunInventory(run.out).entries if each.checkpoint.number == number)
    return remove_checkpoint(run.out, chosen, force=force)


def manifest_of(run: SavedRun, generation: int) -> Path:
    return generation_folder(run.out / "checkpoints", generation) / MANIFEST_NAME


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 2
    path.write_bytes(data)


def chunk_of(folder: Path, key: str) -> Path:
    return next(path for path in sorted((folder / key / "c").iterdir()))


def test_listed_oldest_first(run: SavedRun) -> None:
    infos = RunInventory(run.out).entries
    assert steps(infos) == [2, 4, 6]
    assert newest_number(run) == 3
    metrics = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in metrics if "loss" in line}
    for info in infos:
        checkpoint = info.checkpoint
        assert checkpoint.step is not None and checkpoint.loss == losses[checkpoint.step]
        assert info.problem is None and MiB < info.nbytes < 2 * MiB
        assert checkpoint.saved_at.endswith("+00:00")
    assert RunInventory(run.out / "checkpoints").entries == infos


def test_a_damaged_manifest_is_listed_with_its_problem(run: SavedRun) -> None:
    damage(manifest_of(run, 3))
    infos = RunInventory(run.out).entries
    assert steps(infos) == [2, 4, None] and newest_number(run) == 2
    assert infos[-1].problem is not None and str(manifest_of(run, 3)) in infos[-1].problem
    assert find_checkpoint(run.out).checkpoint.state.step == 4


def test_damaged_top_file_hides_no_checkpoint(run: SavedRun) -> None:
    damage(run.out / "checkpoints" / MANIFEST_NAME)
    assert newest_number(run) == 3
    assert find_checkpoint(run.out).checkpoint.number == 3


def test_found_by_folder_and_step(run: SavedRun) -> None:
    folder = run.out / "checkpoints"
    for given, step, generation in (
        (run.out, None, 3), (run.out, 2, 1), (folder, None, 3), (folder, 4, 2),
        (folder / "snap/00000001", None, 1), (folder / "snap/00000001", 2, 1),
    ):  # fmt: skip
        found = find_checkpoint(given, step).checkpoint
        assert (found.folder, found.number, found.state.step) == (folder, generation, 2 * generation), (given, step)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3\. Saved steps: 2, 4, 6"):
        find_checkpoint(run.out, 3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4\. Saved steps: 2$"):
        find_checkpoint(folder / "snap/00000001", 4)


def test_outdated_top_file_is_ignored_and_reported(run: SavedRun) -> None:
    assert notices_of(run) == []
    make_current(run.out / "checkpoints", 2)
    assert find_checkpoint(run.out).checkpoint.state.step == 6 and find_checkpoint(run.out, 6).checkpoint.number == 3
    assert newest_number(run) == 3
    (notice,) = notices_of(run)
    assert "names generation 2, and the newest generation is 3" in notice
    assert [problems for _, problems in RunInventory(run.out).verify(None)] == [[], [], []]


def test_empty_folder_is_reported(tmp_path: Path, run: SavedRun) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        RunInventory(tmp_path / "nowhere")
    (tmp_path / "snap").mkdir()
    assert RunInventory(tmp_path).entries == []
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    for generation in (1, 2, 3):
        damage(manifest_of(run, generation))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*snap/00000003/MANIFEST.json"):
        find_checkpoint(run.out)


def test_generations_of_another_program_are_not_checkpoints(tmp_path: Path) -> None:
    with TieredStore([RamTier(MiB, pin_memory=False)], path=str(tmp_path)) as store:
        store.register("a", (10,), torch.float32, home="ram")
        with store.acquire("a", "ram", "w") as lease:
            lease.tensor.fill_(1)
        store.commit({"step": 3}).wait()
    (info,) = RunInventory(tmp_path).entries
    assert info.problem is not None and "another program" in info.problem and next_start([info]) is None
    with pytest.raises(CheckpointError, match="another program"):
        find_checkpoint(tmp_path)


def test_verify_reads_every_block(run: SavedRun) -> None:
    read = Counter[str]()
    results = list(RunInventory(run.out).verify(None, lambda key: read.update([key])))
    assert [(info.checkpoint.step, problems) for info, problems in results] == [(2, []), (4, []), (6, [])]
    assert set(read.values()) == {3}
    assert read.keys() >= {"model.embed_tokens/weight", "model.layers.1/m"}
    assert steps(info for info, _ in RunInventory(run.out).verify(4)) == [4]
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        list(RunInventory(run.out).verify(5))


def test_verify_names_damaged_files(run: SavedRun) -> None:
    chunk = chunk_of(generation_folder(run.out / "checkpoints", 2), "model.layers.0/weight")
    damage(chunk)
    lost = chunk_of(generation_folder(run.out / "checkpoints", 2), "model.layers.1/m")
    lost.unlink()
    results = {info.checkpoint.step: problems for info, problems in RunInventory(run.out).verify(None)}
    assert results[2] == results[6] == []
    assert len(results[4]) == 2
    assert str(chunk) in results[4][0] and "model.layers.0/weight" in results[4][0]
    assert str(lost) in results[4][1]
    damage(manifest_of(run, 3))
    *_, (info, problems) = RunInventory(run.out).verify(None)
    assert info.checkpoint.number == 3 and str(manifest_of(run, 3)) in problems[0]


def test_verify_on_a_drive(on_nvme: SavedRun) -> None:
    assert all(not problems for _, problems in RunInventory(on_nvme.out).verify(None))
    damage(chunk_of(on_nvme.folder / "drive/snap/00000003", "model.layers.0/low"))
    results = {info.checkpoint.step: problems for info, problems in RunInventory(on_nvme.out).verify(None)}
    assert results[2] == results[4] == []
    assert "model.layers.0/low" in results[6][0] and str(on_nvme.folder / "drive") in results[6][0]


def test_moved_to_another_place(on_nvme: SavedRun, tmp_path: Path) -> None:
    on_nvme.folder.rename(tmp_path / "elsewhere")
    moved = SavedRun(tmp_path / "elsewhere")
    results = RunInventory(moved.out).verify(None)
    assert all(not problems for _, problems in results), "output_dir and drive moved together"
    (moved.folder / "drive").rename(tmp_path / "another drive")
    assert all(problems for _, problems in RunInventory(moved.out).verify(None))
    path = moved.out / "config.resolved.toml"
    text = path.read_text()
    assert text.count(f'"{on_nvme.folder / "drive"}"') == 1
    path.write_text(text.replace(f'"{on_nvme.folder / "drive"}"', f'"{tmp_path / "another drive"}"'))
    assert all(not problems for _, problems in RunInventory(moved.out).verify(None)), "as the config names it now"


def test_removed(run: SavedRun) -> None:
    nbytes = RunInventory(run.out).entries[0].nbytes
    assert remove(run, 1) == nbytes
    assert steps(RunInventory(run.out).entries) == [4, 6]
    assert not generation_folder(run.out / "checkpoints", 1).exists()
    remove(run, 3)
    assert steps(RunInventory(run.out).entries) == [4] and newest_number(run) == 2, "the previous one counts"
    with pytest.raises(CheckpointError, match="step 4 is the only one"):
        remove(run, 2)
    assert steps(RunInventory(run.out).entries) == [4]
    last = find_checkpoint(run.out).checkpoint
    remove_checkpoint(run.out, last, force=True)
    assert RunInventory(run.out).entries == []
    with pytest.raises(CheckpointError, match="holds no generation 2"):
        remove_checkpoint(run.out, last)


def test_run_resumes_from_the_remaining_checkpoint(run: SavedRun) -> None:
    weights = (run.out / "final/model.safetensors").read_bytes()
    remove(run, 3)
    shutil.rmtree(run.out / "final")
    result = run.run(steps=6)
    assert result.exit_code == 0, result.output
    assert "step 5/6" in result.output and "step 4/6" not in result.output
    assert (run.out / "final/model.safetensors").read_bytes() == weights


def test_only_complete_checkpoint_is_kept(run: SavedRun) -> None:
    damage(manifest_of(run, 1))
    damage(manifest_of(run, 2))
    with pytest.raises(CheckpointError, match="step 6 is the only one"):
        remove(run, 3)
    remove(run, 2)  # a damaged checkpoint may be removed
    assert [info.checkpoint.number for info in RunInventory(run.out).entries] == [1, 3]


def test_checkpoint_is_removed_from_the_drive(on_nvme: SavedRun) -> None:
    drive = on_nvme.folder / "drive"
    remove(on_nvme, 2)
    assert sorted(path.name for path in (drive / "snap").iterdir() if path.is_dir()) == ["00000001", "00000003"]
    assert all(not problems for _, problems in RunInventory(on_nvme.out).verify(None)), "links that others share stay"
    tier = NvmeTier([drive], 40 * MiB)  # another run uses the drive now
    remove(on_nvme, 1)
    tier.close()
    assert [path.name for path in (drive / "snap").iterdir() if path.is_dir()] == ["00000003"]
    assert all(not problems for _, problems in RunInventory(on_nvme.out).verify(None))


def test_removal_is_refused_during_a_run(run: SavedRun) -> None:
    with RunFolder(run.out), pytest.raises(CheckpointError, match=r"in use by process .* nothing was removed"):
        remove(run, 1, force=True)
    with RunFolder(run.out / "checkpoints"), pytest.raises(CheckpointError, match="in use by process"):
        remove_checkpoint(run.out / "checkpoints", RunInventory(run.out).entries[0].checkpoint)
    assert steps(RunInventory(run.out).entries) == [2, 4, 6]
    assert checkpoint_folders(run.out) == [run.out / "checkpoints"]


def test_listing_reads_each_manifest_once_and_no_block_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredStore([RamTier(MiB), NvmeTier([tmp_path / "checkpoints"], MiB)], keep_generations=9) as store:
        for number in range(3):
            store.put(f"a/w{number}", torch.ones(9))
        for step in (1, 2, 3, 4):
            store.commit(make_state(step=step).to_meta()).wait()
    read: list[str] = []
    real = os.open

    def note(path: Any, *arguments: Any, **options: Any) -> int:
        read.append(str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr("megatrain.checkpoint.locations.read_note", lambda path: pytest.fail(f"{path} was read"))
    assert steps(RunInventory(tmp_path).entries) == [1, 2, 3, 4]
    of_generations = Counter(Path(path).name for path in set(read) if "snap/" in path)
    assert of_generations == {"MANIFEST.json": 4, "OWNER.json": 4}
    assert sum("snap/" in path for path in read) == 8, "each once"
