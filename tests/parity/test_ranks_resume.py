"""A run resumed with another number of processes, other tiers or drives is bit-identical to an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.inventory import RunInventory, find_checkpoint, next_start
from megatrain.checkpoint.removal import remove_checkpoint
from megatrain.checkpoint.resume import settings_of_newest
from megatrain.checkpoint.state import CheckpointError
from megatrain.training.export import export_checkpoint
from oracles.tiered_run import ALL_NVME, config_text
from processes.ranks import run_on_ranks
from processes.worlds import digests, go_on

BF16 = 'compute_dtype = "bfloat16"'
#: A different placement for each start.
TABLES: tuple[dict[str, Any], ...] = (
    {"placement": 'optimizer = ["nvme"]'},
    {"nvme": 2, "placement": ALL_NVME, "ram": "24MiB"},
    {"nvme": 0},
    {"gpu": "64MiB", "ram": "24MiB"},
)


def text_of(folder: Path, model: Path, **tables: Any) -> str:
    text = config_text(folder, model, precision=BF16, **{"nvme": 1, **tables})
    batch = "per_device_train_batch_size = 1\ngradient_accumulation_steps = 4\ngradient_lanes = 4"
    return text.replace("per_device_train_batch_size = 2\ngradient_accumulation_steps = 3", batch)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 4, 3, 1)])
def test_another_world_size_resumes_bitwise_equal(worlds: tuple[int, ...], tiny_model: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (unbroken,) = run_on_ranks(1, go_on, whole, text_of(whole, tiny_model), 0, len(worlds))
    losses: list[float] = []
    folder = tmp_path / "cut"
    folder.mkdir()
    for step, world in enumerate(worlds):
        tables = TABLES[step % len(TABLES)]
        results = run_on_ranks(world, go_on, folder, text_of(folder, tiny_model, **tables), step, 1)
        assert all(each[0] == results[0][0] for each in results)
        losses += results[0][0]
        out = folder / "out"
        entries = RunInventory(out).entries
        assert next_start(entries) is entries[-1] and entries[-1].problem is None
        assert (entries[-1].checkpoint.step, entries[-1].checkpoint.world) == (step + 1, world)
        kept = settings_of_newest(out, "auto")
        assert kept is not None and kept.num_lanes == 4
        if world > 1:
            verified = RunInventory(out).verify(step + 1)
            assert [problems for each, problems in verified if each.checkpoint.world > 1] == [[]]
    assert losses == unbroken[0]
    assert digests([each[1] for each in results]) == digests([unbroken[1]])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_export_of_ranks_matches_one_process(size: int, tiny_model: Path, tmp_path: Path) -> None:
    """All exported files are equal.

    A checkpoint with a missing drive is reported, and the only checkpoint can be removed only with ``force``.
    """
    for world in (1, size):
        folder = tmp_path / f"by{world}"
        folder.mkdir()
        run_on_ranks(world, go_on, folder, text_of(folder, tiny_model, placement=ALL_NVME, ram="24MiB"), 0, 1)
        assert find_checkpoint(folder / "out").checkpoint.world == world
        export_checkpoint(folder / "out", tmp_path / f"export{world}")
    files = {path.name for path in (tmp_path / "export1").iterdir()}
    assert files == {path.name for path in (tmp_path / f"export{size}").iterdir()} and "model.safetensors" in files
    for name in files:
        assert (tmp_path / "export1" / name).read_bytes() == (tmp_path / f"export{size}" / name).read_bytes(), name

    out = tmp_path / f"by{size}" / "out"
    only = find_checkpoint(out).checkpoint
    with pytest.raises(CheckpointError, match="is the only one"):
        remove_checkpoint(out, only)
    gone = tmp_path / f"by{size}" / "drive0" / "rank00001"
    gone.rename(gone.with_name("unplugged"))
    (lost,) = RunInventory(out).entries
    assert lost.problem is not None and "rank00001" in lost.problem
    with pytest.raises(CheckpointError, match="rank00001"):
        export_checkpoint(out, tmp_path / "never")
    gone.with_name("unplugged").rename(gone)
    remove_checkpoint(out, only, force=True)
    assert RunInventory(out).entries == []
