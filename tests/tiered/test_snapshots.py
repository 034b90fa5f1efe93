"""Snapshots of an NvmeTier: hard links to files that are never written again, and adopting blocks from snapshots."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from oracles.disk import bytes_on_disk
from tiered import CapacityError, GenerationError, KiB, MiB, NvmeTier, TransferError
from tiered.ext import Slot
from tiered.tiers.layout import files_of


def take(tier: NvmeTier, nbytes: int, key: str = "layer.0/weight") -> Slot:
    slot = tier.allocate(nbytes, name=key, home=True)
    assert slot is not None
    return slot


def fill(tier: NvmeTier, slot: Slot, value: int) -> None:
    """Write ``value`` to every byte of a slot's files, the way a link does."""
    for file in files_of(slot).files:
        fd = tier.open_for_write(file)
        os.close(fd)
        assert file.path.stat().st_nlink == 1, "a file that a snapshot links must not be written"
        file.path.write_bytes(bytes([value]) * file.nbytes)


def contents(tree: Path, key: str) -> set[int]:
    """Read an array with zarr, and return the set of its byte values."""
    return set(np.unique(np.asarray(zarr.open_array(tree / key, mode="r")[:]).view(np.uint8)).tolist())


@pytest.fixture(params=[1, 2], ids=["one-path", "two-paths"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], NvmeTier]:
    paths = [tmp_path / str(number) for number in range(request.param)]
    return lambda: NvmeTier(paths, MiB, chunk_bytes=16 * KiB)


def test_snapshot_is_unchanged_by_later_writes(make_tier: Callable[[], NvmeTier]) -> None:
    tier = make_tier()
    first = Path(tier.paths[0])
    slot = take(tier, 50_000)
    tier.describe(slot, (50_000,), torch.uint8)
    fill(tier, slot, 1)
    tier.snapshots.take(slot, "00000001")
    assert tier.snapshots.nbytes == 0
    tier.sync()
    tier.snapshots.sync("00000001")
    fill(tier, slot, 2)
    assert tier.snapshots.nbytes == slot.slot_bytes
    assert contents(first / "snap/00000001", "layer.0/weight") == {1}
    assert contents(first / "live", "layer.0/weight") == {2}
    fill(tier, slot, 3)
    assert tier.snapshots.nbytes == slot.slot_bytes, "only the first write after a snapshot takes another file"
    tier.snapshots.drop("00000001")
    tier.snapshots.drop("00000001")
    assert tier.snapshots.nbytes == 0 and tier.pool_bytes == slot.slot_bytes
    assert contents(first / "live", "layer.0/weight") == {3}
    assert bytes_on_disk(*map(Path, tier.paths)) == 2 * slot.slot_bytes
    tier.close()


def test_generations_share_unchanged_files(make_tier: Callable[[], NvmeTier]) -> None:
    tier = make_tier()
    slot = take(tier, 20_000)
    tier.describe(slot, (20_000,), torch.uint8)
    fill(tier, slot, 1)
    tier.snapshots.take(slot, "1")
    tier.snapshots.take(slot, "2")
    fill(tier, slot, 2)
    assert tier.snapshots.nbytes == slot.slot_bytes
    tier.snapshots.drop("1")
    assert tier.snapshots.nbytes == slot.slot_bytes
    assert contents(Path(tier.paths[0]) / "snap/2", "layer.0/weight") == {1}
    tier.free(slot)
    tier.snapshots.drop("2")
    assert tier.snapshots.nbytes == 0
    assert tier.pool_bytes == bytes_on_disk(*map(Path, tier.paths)) == 2 * slot.slot_bytes
    tier.close()


def test_file_shared_by_generations_is_counted_once(make_tier: Callable[[], NvmeTier]) -> None:
    tier = make_tier()
    slot = take(tier, 20_000)
    tier.describe(slot, (20_000,), torch.uint8)
    for generation in ("1", "2", "3"):
        tier.snapshots.take(slot, generation)
    slot_bytes = slot.slot_bytes
    tier.close()
    tier = make_tier()
    assert tier.snapshots.nbytes == bytes_on_disk(*map(Path, tier.paths)) == slot_bytes
    tier.close()


def test_partially_failed_snapshot_can_be_retried(
    make_tier: Callable[[], NvmeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    slot = take(tier, 50_000)
    tier.describe(slot, (50_000,), torch.uint8)
    fill(tier, slot, 1)
    link, left = os.link, [2]

    def raise_enospc_after_two_links(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", raise_enospc_after_two_links)
        with pytest.raises(TransferError, match="cannot be linked into generation 1: No space left"):
            tier.snapshots.take(slot, "1")
    assert tier.snapshots.nbytes == 0
    tier.snapshots.take(slot, "1")
    fill(tier, slot, 2)
    assert contents(Path(tier.paths[0]) / "snap/1", "layer.0/weight") == {1}
    assert contents(Path(tier.paths[0]) / "live", "layer.0/weight") == {2}
    tier.close()


def test_snapshots_take_the_reserved_space(tmp_path: Path) -> None:
    """Snapshots use up the reserve instead of adding to it, so there is space to keep a freed file for reuse."""
    tier = NvmeTier([tmp_path], 4 * 16 * KiB)
    tier.reserve(2 * 16 * KiB)
    slot, other = take(tier, 16 * KiB), take(tier, 16 * KiB, "other")
    tier.describe(slot, (16 * KiB,), torch.uint8)
    tier.snapshots.take(slot, "1")
    fill(tier, slot, 1)
    assert tier.snapshots.nbytes == 16 * KiB
    tier.free(other)
    assert tier.pool_bytes == 16 * KiB and bytes_on_disk(tmp_path) == 3 * 16 * KiB
    tier.close()


def test_snapshot_outlives_its_freed_block(make_tier: Callable[[], NvmeTier]) -> None:
    tier = make_tier()
    slot = take(tier, 20_000)
    tier.describe(slot, (20_000,), torch.uint8)
    fill(tier, slot, 5)
    tier.snapshots.take(slot, "1")
    slot_bytes = slot.slot_bytes
    tier.free(slot)
    assert tier.usage().used_bytes == 0 and tier.pool_bytes == 0 and tier.snapshots.nbytes == slot_bytes
    assert contents(Path(tier.paths[0]) / "snap/1", "layer.0/weight") == {5}
    tier.close()


def test_adopt_brings_a_committed_block_back_in_a_new_process(make_tier: Callable[[], NvmeTier]) -> None:
    tier = make_tier()
    first = Path(tier.paths[0])
    slot = take(tier, 50_000)
    tier.describe(slot, (100, 125), torch.float32)
    fill(tier, slot, 1)
    tier.snapshots.take(slot, "1")
    fill(tier, slot, 2)
    tier.close()
    tier = make_tier()
    slot = take(tier, 50_000)
    tier.snapshots.adopt(slot, "1")
    assert tier.snapshots.nbytes == 0 and tier.usage().used_bytes == slot.slot_bytes
    assert contents(first / "live", "layer.0/weight") == {1}
    assert json.loads((first / "live/layer.0/weight/zarr.json").read_text())["attributes"]["megatrain"]["shape"] == [
        100,
        125,
    ]
    fill(tier, slot, 3)
    assert contents(first / "snap/1", "layer.0/weight") == {1}
    assert contents(first / "live", "layer.0/weight") == {3}
    tier.snapshots.adopt(slot, "1")
    assert contents(first / "live", "layer.0/weight") == {1}
    tier.snapshots.adopt(slot, "1")
    assert tier.snapshots.nbytes == 0
    tier.free(slot)
    tier.close()


def test_adopt_keeps_the_snapshot_chunk_size_and_charges_it(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = NvmeTier(paths, MiB, rates=[1, 1], chunk_bytes=4096)
    slot = take(tier, 50_000)
    tier.describe(slot, (50_000,), torch.uint8)
    for file in files_of(slot).files:
        file.path.write_bytes(bytes([7]) * file.nbytes)
    tier.snapshots.take(slot, "1")
    tier.close()
    tier = NvmeTier(paths, MiB, rates=[3, 1], chunk_bytes=32768)
    slot = take(tier, 50_000)
    tier.snapshots.adopt(slot, "1")
    assert files_of(slot).chunk_bytes == 4096
    assert slot.slot_bytes == tier.usage().used_bytes == 13 * 4096
    assert contents(tmp_path / "a/live", "layer.0/weight") == {7}
    tier.free(slot)
    assert tier.usage().used_bytes == 0
    tier.close()


def test_adopt_refuses_files_that_do_not_fit(tmp_path: Path) -> None:
    tier = NvmeTier([tmp_path], MiB, chunk_bytes=12 * KiB)
    slot = take(tier, 40_000)
    tier.describe(slot, (40_000,), torch.uint8)
    fill(tier, slot, 7)
    tier.snapshots.take(slot, "1")
    tier.close()
    other_bytes = 8 * KiB
    for spare_bytes in (4 * KiB, 8 * KiB):  # The files in the snapshot are 8 KiB larger than the slot.
        tier = NvmeTier([tmp_path], 40 * KiB + other_bytes + spare_bytes, chunk_bytes=4 * KiB)
        slot, other = take(tier, 40_000), take(tier, other_bytes, "other")
        if spare_bytes == 8 * KiB:
            tier.snapshots.adopt(slot, "1")
            assert slot.slot_bytes == 48 * KiB and contents(tmp_path / "live", "layer.0/weight") == {7}
        else:
            with pytest.raises(CapacityError) as caught:
                tier.snapshots.adopt(slot, "1")
            assert str(caught.value) == (
                "tier 'nvme' is too small: 8192 bytes (8.00 KiB) needed, 4096 (4.00 KiB) free, 0 pinned, 0 leased; "
                "for 'layer.0/weight'"
            )
            assert slot.slot_bytes == 40 * KiB
        assert tier.usage().used_bytes == slot.slot_bytes + other_bytes
        tier.free(slot)
        tier.free(other)
        assert tier.usage().used_bytes == 0
        tier.close()


def test_adopt_names_missing_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = NvmeTier(paths, MiB, chunk_bytes=4096)
    slot = take(tier, 20_000)
    tier.describe(slot, (20_000,), torch.uint8)
    tier.snapshots.take(slot, "1")
    with pytest.raises(GenerationError, match="generation 2 has no block"):
        tier.snapshots.adopt(slot, "2")
    tier.free(slot)
    small = take(tier, 10_000)
    with pytest.raises(GenerationError, match="larger"):
        tier.snapshots.adopt(small, "1")
    tier.close()
    tier = NvmeTier(paths[:1], MiB, chunk_bytes=4096)
    slot = take(tier, 20_000)
    with pytest.raises(GenerationError, match="lacks a part"):
        tier.snapshots.adopt(slot, "1")
    assert tier.usage().used_bytes == slot.slot_bytes
    tier.close()
