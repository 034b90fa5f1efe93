"""Files are flushed before a manifest names them, so a store can be opened after a crash at any point."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import GenerationReader, KiB, MiB, NvmeTier, RamTier, TieredStore
from tiered.durable import generations
from tiered.durable.manifest import Manifest, list_generations, newest_first

HOMES = {"a/weight": "nvme", "a/m": "ram", "b": "nvme"}
NUM_ELEMENTS = 10_000


def make_store(root: Path, keep: int = 1) -> TieredStore:
    tier = NvmeTier([root / "x/0", root / "x/1"], MiB, chunk_bytes=16 * KiB, on_notice=lambda text: None)
    store = TieredStore(
        [RamTier(MiB, pin_memory=False), tier], path=str(root / "run/out"), keep_generations=keep, overwrite=True
    )
    for key, home in HOMES.items():
        store.register(key, (NUM_ELEMENTS,), torch.float32, home=home)
    return store


def write(store: TieredStore, value: float) -> None:
    for key in HOMES:
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)


def values(store: TieredStore) -> set[float]:
    found = set()
    for key in HOMES:
        with store.acquire(key, "ram") as lease:
            found |= set(lease.tensor.unique().tolist())
    return found


def test_files_are_flushed_before_their_manifest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[tuple[int, int]] = set()

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(fd: int) -> None:
            real(fd)
            status = os.fstat(fd)
            flushed.add((status.st_dev, status.st_ino))

        monkeypatch.setattr(os, name, watched)

    watch("fsync")
    watch("fdatasync")
    rename, renamed = os.replace, set()

    def replace(source: str | Path, target: str | Path) -> None:
        if (name := Path(target).name) in ("MANIFEST.json", "STORE.json", "WEAR.json"):
            status = os.stat(source)
            assert (status.st_dev, status.st_ino) in flushed, f"{target} would be empty after a power cut"
            renamed.add(name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    real_write = generations.write_manifest
    num_looked_at = 0

    def write_manifest(directory: Path, manifest: Manifest) -> None:
        nonlocal num_looked_at
        roots = [directory, tmp_path / "x/0", tmp_path / "x/1"]
        paths = [path for root in roots for path in (root / f"snap/{manifest.generation:08d}").rglob("*")]
        paths += [path for root in roots for path in (root, root / "snap", root / f"snap/{manifest.generation:08d}")]
        if manifest.generation == 1:
            paths += [tmp_path, tmp_path / "run", tmp_path / "x", directory / "STORE.json"]
            paths += [root / name for root in roots[:2] for name in ("zarr.json", "snap/zarr.json")]
        missing = [str(path) for path in paths if (path.stat().st_dev, path.stat().st_ino) not in flushed]
        assert not missing, missing
        num_looked_at += len(paths)
        real_write(directory, manifest)
        assert (directory / "MANIFEST.json").stat().st_ino in {inode for _, inode in flushed}

    monkeypatch.setattr(generations, "write_manifest", write_manifest)
    with make_store(tmp_path) as store:
        for value in range(3):
            write(store, value)
            store.commit().wait(60)
            flushed.clear()
    assert num_looked_at > 100 and len(renamed) == 3


def crash_at(operation: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child process that dies after ``operation`` file operations.

    Return whether ``work`` finished.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    try:
        left = [operation]

        def hook(name: str) -> None:
            real = getattr(os, name)

            def dying(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(1)
                return real(*arguments, **options)

            setattr(os, name, dying)

        for name in (
            "replace",
            "rename",
            "unlink",
            "link",
            "symlink",
            "mkdir",
            "rmdir",
            "fsync",
            "fdatasync",
            "pwrite",
            "pwritev",
        ):
            hook(name)
        work()
        os._exit(0)
    finally:
        os._exit(2)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_store_opens_after_a_crash_during_commit_or_pruning(stride: int, tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        write(store, 1)
        store.commit({"value": 1}).wait(60)
    start, is_done, num_crashes = 1, False, 0
    for operation in range(stride, 2000, stride):

        def work(start: int = start) -> None:
            with make_store(tmp_path) as store:
                store.load()
                for value in (start + 1, start + 2):
                    write(store, value)
                    store.commit({"value": value}).wait(60)

        is_done = crash_at(operation, work)
        if is_done:
            break
        num_crashes += 1
        candidates = newest_first(tmp_path / "run/out")
        assert list(GenerationReader(tmp_path / "run/out", candidates[0]).problems()) == [], operation
        with make_store(tmp_path) as store:
            manifest = store.load()
            assert values(store) == {manifest.meta["value"]}, operation
            assert start <= manifest.meta["value"] <= start + 2
            start = manifest.meta["value"]
            assert len(list_generations(tmp_path / "run/out")) <= 2
            numbers = {int(folder.name) for folder in tmp_path.glob("*/*/snap/0*")}
            assert numbers == set(newest_first(tmp_path / "run/out")), "halves are removed when it is opened"
    assert is_done and num_crashes > 8
