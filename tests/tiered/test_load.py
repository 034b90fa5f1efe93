"""``TieredStore.load`` fills registered blocks from a committed generation, even if their homes have changed."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tiered import (
    CorruptBlockError,
    GenerationError,
    GenerationReader,
    KiB,
    LeaseError,
    MiB,
    NvmeTier,
    RamTier,
    TieredStore,
)
from tiered.durable import generations
from tiered.durable.manifest import current_generation, list_generations, newest_first

NUM_BLOCKS, SHAPE = 8, (60, 1000)  # 240 000 bytes each: not a multiple of 4096
KEYS = [f"layer.{number}/weight" for number in range(NUM_BLOCKS)]
RAM_BYTES = 600 * KiB  # room for only two of the blocks


def make_store(
    path: Path, homes: str = "nvme", drives: tuple[str, ...] = ("drive",), *, capacity_bytes: int = 8 * MiB, **options
) -> TieredStore:
    """Return a store with all blocks registered. ``homes`` is ``nvme``, ``ram``, or ``mixed`` (alternating)."""
    nvme = NvmeTier([path / drive for drive in drives], capacity_bytes, **{"chunk_bytes": 64 * KiB, **options})
    ram = RamTier(RAM_BYTES if homes == "nvme" else 4 * MiB, pin_memory=False)
    store = TieredStore([ram, nvme], path=str(path / "generations"), overwrite=True)
    for number, key in enumerate(KEYS):
        home = ("ram" if number % 2 else "nvme") if homes == "mixed" else homes
        store.register(key, SHAPE, torch.float32, home=home)
    return store


def fill(store: TieredStore, value: float) -> None:
    for number, key in enumerate(KEYS):
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value + number)


def check(store: TieredStore, value: float) -> None:
    for number, key in enumerate(KEYS):
        with store.acquire(key, "ram") as lease:
            assert torch.equal(lease.tensor, torch.full(SHAPE, value + number)), key


def commit(store: TieredStore, value: float) -> int:
    fill(store, value)
    done = store.commit({"value": value})
    done.wait(60)
    return done.generation


def damage(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[1000] ^= 4
    path.write_bytes(contents)


def inodes(*roots: Path) -> set[int]:
    return {file.stat().st_ino for root in roots for file in root.rglob("c/*") if not file.is_symlink()}


@pytest.mark.parametrize("homes", ["nvme", "ram", "mixed"])
@pytest.mark.parametrize("committed_homes", ["nvme", "ram", "mixed"])
def test_homes_may_change_after_the_commit(tmp_path: Path, committed_homes: str, homes: str) -> None:
    with make_store(tmp_path, committed_homes) as store:
        commit(store, 10)
    with make_store(tmp_path, homes) as store:
        manifest = store.load()
        assert (manifest.generation, manifest.meta) == (1, {"value": 10})
        check(store, 10)
        assert commit(store, 20) == 2
    with make_store(tmp_path, committed_homes) as store:
        store.load()
        check(store, 20)


def test_load_adopts_files_without_copying(tmp_path: Path) -> None:
    with make_store(tmp_path, drives=("a", "b")) as store:
        commit(store, 10)
    with make_store(tmp_path, drives=("a", "b")) as store:
        store.load()
        assert inodes(tmp_path / "a/live", tmp_path / "b/live") == inodes(tmp_path / "a/snap", tmp_path / "b/snap")
        nvme = store.tier("nvme")
        assert isinstance(nvme, NvmeTier) and sum(nvme.bytes_written_by_path().values()) == 0
        check(store, 10)


@pytest.mark.parametrize(
    ("drives", "options"),
    [
        (("b", "a"), {}),
        (("a", "b", "c"), {}),
        (("a",), {}),
        (("c",), {}),
        (("a", "b"), {"chunk_bytes": 16 * KiB, "rates": [3, 1]}),
        (("a", "b"), {"capacity_bytes": 4 * MiB}),
    ],
)
def test_paths_may_change_after_the_commit(tmp_path: Path, drives: tuple[str, ...], options: dict) -> None:
    with make_store(tmp_path, drives=("a", "b")) as store:
        commit(store, 10)
    with make_store(tmp_path, drives=drives, **options) as store:
        store.load()
        check(store, 10)
        assert commit(store, 20) == 2
    with make_store(tmp_path, drives=("a", "b", "c")) as store:
        store.load()
        check(store, 20)


def test_load_rechunks_files_that_no_longer_fit(tmp_path: Path) -> None:
    """The old files exceed the new capacity, which is exactly enough for the contents in smaller files."""
    with make_store(tmp_path, chunk_bytes=512 * KiB, drives=("a", "b")) as store:
        commit(store, 10)
    exact = NUM_BLOCKS * 236 * KiB  # 59 files of 4 KiB per block, instead of two of 120 KiB
    with make_store(tmp_path, drives=("a", "b"), chunk_bytes=4 * KiB, capacity_bytes=exact) as store:
        store.load()
        check(store, 10)
        nvme = store.stats().tiers["nvme"]
        assert nvme.used_bytes <= nvme.high_water_bytes <= nvme.capacity_bytes == exact


def test_drives_that_were_mounted_elsewhere_are_found(tmp_path: Path) -> None:
    """After drives are mounted elsewhere, links between them are broken, and the recorded paths are wrong."""
    with make_store(tmp_path, drives=("a", "b")) as store:
        commit(store, 10)
    shutil.move(tmp_path / "a", tmp_path / "x")
    shutil.move(tmp_path / "b", tmp_path / "y")
    with make_store(tmp_path, "mixed", drives=("x", "y")) as store:
        store.load()
        check(store, 10)
    with (
        make_store(tmp_path, "ram", drives=("new",)) as store,
        pytest.raises(GenerationError, match=r"layer\.0/weight"),
    ):
        store.load()


def test_an_older_generation_can_be_loaded_after_damage(tmp_path: Path) -> None:
    with make_store(tmp_path, "mixed") as store:
        for value in (10, 20):
            commit(store, value)
    damage(tmp_path / "drive/snap/00000002" / KEYS[4] / "c/1")
    with make_store(tmp_path, "mixed") as store:
        assert newest_first(tmp_path / "generations") == [2, 1]
        with pytest.raises(CorruptBlockError, match=rf"'{KEYS[4]}' of generation 2 is damaged.*00000002"):
            store.load()
        store.load(1)
        check(store, 10)
        assert list_generations(tmp_path / "generations") == [1, 2], "removed only when a commit needs it"
        assert commit(store, 30) == 3
        assert list_generations(tmp_path / "generations") == [1, 3], "the abandoned future before the past"
    with make_store(tmp_path, "mixed") as store:
        store.load()
        check(store, 30)


@pytest.mark.parametrize("homes", ["nvme", "ram"])
def test_missing_parts_and_damaged_manifests_are_found(tmp_path: Path, homes: str) -> None:
    with make_store(tmp_path, homes) as store:
        for value in (10, 20):
            commit(store, value)
    root = tmp_path / ("drive" if homes == "nvme" else "generations") / "snap/00000002"
    (root / KEYS[7] / "c/0").unlink()
    with make_store(tmp_path, homes) as store:
        fill(store, 99)  # a load discards these contents, even if it fails
        with pytest.raises(GenerationError, match=f"'{KEYS[7]}' is missing: '.*{KEYS[7]}/c/0'"):
            store.load()
        damage(tmp_path / "generations/snap/00000002/MANIFEST.json")
        (tmp_path / "generations/MANIFEST.json").write_text("{")
        with pytest.raises(GenerationError, match=r"cannot be read as a manifest|damaged"):
            store.load(2)
        assert newest_first(tmp_path / "generations") == [2, 1]
        store.load()  # the top manifest is unreadable, so the newest complete generation is loaded
        check(store, 10)
        assert commit(store, 30) == 3
    assert current_generation(tmp_path / "generations") == 3


def test_a_generation_of_another_model_is_refused(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        commit(store, 10)
    with make_store(tmp_path) as store:
        store.register("extra", (5,), torch.int16, home="ram", durable=False)
        store.load()
        store.register("more", (3, 4), torch.bfloat16, home="ram")
        with pytest.raises(
            GenerationError, match=r"no block 'more', which is \(3, 4\) of bfloat16 here.*another model"
        ):
            store.load()
        store.unregister("more", KEYS[3])
        with pytest.raises(GenerationError, match=rf"has a block '{KEYS[3]}', \(60, 1000\) of float32"):
            store.load()
        for shape, dtype, found in (((1000, 60), torch.float32, "float32"), (SHAPE, torch.float16, "float16")):
            store.register(KEYS[3], shape, dtype, home="nvme")
            there = rf"'{KEYS[3]}' is \(60, 1000\) of float32 in .*, and \({shape[0]}, {shape[1]}\) of {found} here"
            with pytest.raises(GenerationError, match=there):
                store.load()
            store.unregister(KEYS[3])
        store.register(KEYS[3], SHAPE, torch.float32, home="nvme")
        store.load()
        check(store, 10)


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        with pytest.raises(GenerationError, match="nothing was committed"):
            store.load()
        assert not (tmp_path / "generations").exists()
        commit(store, 10)
        with store.acquire(KEYS[0], "ram"), pytest.raises(LeaseError):
            store.load()
        with pytest.raises(GenerationError, match="no generation 7"):
            store.load(7)
        check(store, 10)
    with TieredStore([RamTier(MiB, pin_memory=False)]) as store, pytest.raises(GenerationError, match="pass path="):
        store.load()


def test_moved_directory_keeps_blocks_on_the_drives(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        commit(store, 10)
    moved = tmp_path / "deep/er"
    moved.mkdir(parents=True)
    shutil.move(tmp_path / "generations", moved)
    os.symlink(tmp_path / "drive", moved / "drive")
    with make_store(moved) as store:
        store.load()
        check(store, 10)
        for value in (20, 30):
            commit(store, value)
    assert [folder.name for folder in sorted((tmp_path / "drive/snap").glob("0*"))] == ["00000002", "00000003"]


def test_failed_load_waits_for_reads_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read writes into leased memory, so it must not outlive the leases."""
    with make_store(tmp_path, "ram") as store:
        commit(store, 10)
    read, has_failed, leased = GenerationReader.read, threading.Event(), list[int]()

    def read_later(self: GenerationReader, key: str, out: torch.Tensor) -> None:
        if key == KEYS[0]:
            has_failed.set()
            raise CorruptBlockError(key, "1", "2", place="here")
        assert has_failed.wait(60)
        time.sleep(0.05)
        leased.append(len(store._leasing.leases))
        read(self, key, out)

    monkeypatch.setattr(generations, "_BLOCKS_PER_TASK", 2)
    monkeypatch.setattr(GenerationReader, "read", read_later)
    with make_store(tmp_path, "ram") as store, pytest.raises(CorruptBlockError, match="here"):
        store.load()
    assert leased == [NUM_BLOCKS] * (NUM_BLOCKS - 2)
