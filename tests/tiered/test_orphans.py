"""Orphans: generations that no store or run uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tiered import GenerationReader, KiB, LockedError, MiB, NvmeTier, RamTier, TieredStore
from tiered.durable.manifest import forget_generation, list_generations
from tiered.durable.ownership import StoreIdentity
from tiered.tiers.cleanup import Orphan, find_orphans, remove_orphan

SLOT_BYTES = 48 * KiB


def make_store(root: Path, name: str, *, on: str = "drive") -> TieredStore:
    tier = NvmeTier([root / on], MiB, chunk_bytes=16 * KiB, on_notice=lambda text: None)
    store = TieredStore(
        [RamTier(MiB, pin_memory=False), tier], path=str(root / name), keep_generations=3, overwrite=True
    )
    for key in ("a", "b"):
        store.register(key, (10_000,), torch.float32, home="nvme")
    return store


def commit(store: TieredStore, *keys: str) -> None:
    for key in keys:
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(3)
    store.commit().wait(60)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return a drive with generations 1 and 2 of one store, which share a block, and generation 3 of another store."""
    with make_store(tmp_path, "one") as store:
        commit(store, "a", "b")
        commit(store, "b")
    with make_store(tmp_path, "two") as store:
        commit(store, "a", "b")
    return tmp_path / "drive"


def test_known_generations_are_not_orphans(drive: Path) -> None:
    assert find_orphans(drive) == []
    assert len(list(drive.glob("snap/0*"))) == 3


def test_forgotten_generation_is_an_orphan(drive: Path) -> None:
    forget_generation(drive.parent / "one", 1)
    (orphan,) = find_orphans(drive)
    assert (orphan.path, orphan.generation, orphan.is_store_gone) == (drive / "snap/00000001", 1, False)
    assert orphan.store_path == drive.parent / "one"
    assert orphan.nbytes == SLOT_BYTES, "the other block is also in generation 2"
    remove_orphan(orphan)
    assert find_orphans(drive) == [] and not orphan.path.exists()
    for name in ("one", "two"):
        for number in list_generations(drive.parent / name):
            assert list(GenerationReader(drive.parent / name, number).problems()) == []


def test_orphans_of_a_removed_store_are_distinguished(drive: Path) -> None:
    shutil.rmtree(drive.parent / "one")
    orphans = find_orphans(drive)
    assert [(o.generation, o.is_store_gone) for o in orphans] == [(1, True), (2, True)]
    assert sum(orphan.nbytes for orphan in orphans) == 3 * SLOT_BYTES, "each file once"
    for orphan in orphans:
        remove_orphan(orphan)
    assert list(GenerationReader(drive.parent / "two").problems()) == []
    assert [folder.name for folder in drive.glob("snap/0*")] == ["00000003"]


def test_live_stores_are_not_orphans(drive: Path) -> None:
    StoreIdentity.of(drive.parent / "one").mark(drive / "snap/00000009")  # as during a commit, or after a crash
    orphan = Orphan(drive / "snap/00000009", 9, drive.parent / "one", 0, is_store_gone=False)
    with make_store(drive.parent, "two"):
        assert find_orphans(drive) == []
        with pytest.raises(LockedError):
            remove_orphan(orphan)
    with make_store(drive.parent, "one", on="other") as store:
        commit(store, "a", "b")
        assert find_orphans(drive) == []
        remove_orphan(orphan)
        assert orphan.path.exists(), "its store is open and may name it next"
    assert [orphan.generation for orphan in find_orphans(drive)] == [9]
    (drive / "snap/00000009/OWNER.json").write_text("{}")
    (drive / "snap/00000010").mkdir()
    assert find_orphans(drive) == [], "their owner is unknown"
