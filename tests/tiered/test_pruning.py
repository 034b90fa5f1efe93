"""Pruning: the space used on the drives is bounded, and a complete generation exists at every instant."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.disk import bytes_on_disk
from tiered import GenerationReader, KiB, NvmeTier, RamTier, TieredStore
from tiered.durable.manifest import list_generations, newest_first

KEYS, NUM_ELEMENTS = ["a/weight", "a/m", "b"], 10_000
SLOT_BYTES = 48 * KiB  # three files of 16 KiB each
SET_BYTES = len(KEYS) * SLOT_BYTES


def make_store(path: Path, keep: int, home: str = "nvme") -> TieredStore:
    tier = NvmeTier([path / "drive"], (2 + max(keep, 2)) * SET_BYTES, chunk_bytes=16 * KiB)
    ram = RamTier(256 * KiB, pin_memory=False)
    store = TieredStore([ram, tier], path=str(path / "generations"), keep_generations=keep, overwrite=True)
    for key in KEYS:
        store.register(key, (NUM_ELEMENTS,), torch.float32, home=home)
    return store


def write(store: TieredStore, value: int) -> None:
    for key in KEYS:
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
        store.evict(key, "ram")


def value_of(store: TieredStore) -> float:
    values = set()
    for key in KEYS:
        with store.acquire(key, "ram") as lease:
            values |= set(lease.tensor.unique().tolist())
    assert len(values) == 1, values
    return float(values.pop())


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> Iterator[list[int]]:
    """Call ``look`` before and after every file operation. Yield a list with the number of these operations."""
    count, is_looking = [0], [False]

    def hook(name: str, module: Any) -> None:
        real = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if is_looking[0]:
                return real(*arguments, **options)
            is_looking[0] = True
            try:
                look()
                result = real(*arguments, **options)
                look()
            finally:
                is_looking[0] = False
            count[0] += 1
            return result

        patch.setattr(module, name, watched)

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "link", "posix_fallocate", "rmdir"):
            hook(name, os)
        hook("rmtree", shutil)
        yield count


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_pruning_bounds_disk_use_and_keeps_a_complete_generation(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_bytes = 0

    def look() -> None:
        nonlocal max_bytes
        max_bytes = max(max_bytes, bytes_on_disk(tmp_path / "drive"))
        newest = newest_first(tmp_path / "generations")[0]  # openable after a crash at this instant
        assert list(GenerationReader(tmp_path / "generations", newest).problems()) == []

    with make_store(tmp_path, keep) as store:
        store.tier("nvme").reserve(max(keep, 2) * SET_BYTES)
        write(store, 1)
        store.commit().wait(60)
        with watching(monkeypatch, look) as count:
            for value in range(2, 6):
                write(store, value)
                commit = store.commit()
                write(store, 10 * value)  # while the commit is in progress
                commit.wait(60)
                store.wait_idle()
        assert count[0] > 50
        assert SET_BYTES < max_bytes <= (1 + max(keep, 2)) * SET_BYTES
        assert list_generations(tmp_path / "generations") == list(range(6 - keep, 6))
        nvme = store.tier("nvme")
        assert isinstance(nvme, NvmeTier) and nvme.snapshots.nbytes == keep * SET_BYTES
    with make_store(tmp_path, keep) as store:
        store.load()
        assert value_of(store) == 5


@pytest.mark.parametrize("home", ["nvme", "ram"])
@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [1, 5]), (3, [1, 4, 5])])
def test_abandoned_newer_generations_are_pruned_first(
    keep: int, left: list[int], home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_store(tmp_path, 9, home) as store:
        for value in range(1, 5):
            write(store, value)
            store.commit().wait(60)

    def look() -> None:
        candidates = newest_first(tmp_path / "generations")
        assert list(GenerationReader(tmp_path / "generations", candidates[0]).problems()) == []
        assert 1 in candidates or 5 in candidates, "the loaded generation stays until the next one exists"

    with make_store(tmp_path, keep, home) as store:
        store.load(1)
        assert list_generations(tmp_path / "generations") == [1, 2, 3, 4]
        with watching(monkeypatch, look):
            store.commit().wait(60)
        assert list_generations(tmp_path / "generations") == left
        write(store, 7)
        store.commit().wait(60)
        assert (
            4 not in list_generations(tmp_path / "generations") and len(newest_first(tmp_path / "generations")) == keep
        )
    with make_store(tmp_path, keep, home) as store:
        store.load()
        assert value_of(store) == 7
        store.load(newest_first(tmp_path / "generations")[-1])
        assert value_of(store) == (7 if keep == 1 else 1)


def test_old_generations_that_cannot_be_removed_do_not_fail_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make_store(tmp_path, 1) as store:
        write(store, 1)
        store.commit().wait(60)

        def refuse(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("tiered.durable.generations.remove_snapshot_folder", refuse)
            store.commit().wait(60)
        assert "could not be removed" in caplog.text
        store.commit().wait(60)
    assert [folder.name for folder in (tmp_path / "generations/snap").glob("0*")] == ["00000003"]
    assert [folder.name for folder in (tmp_path / "drive/snap").glob("0*")] == ["00000003"]
