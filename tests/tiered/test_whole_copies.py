"""Whole copies contain all bytes of a generation, need none of the drives, and exist completely or not at all."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zarr

from fakes.record_files import record
from fakes.recorded_disk import SURVIVALS, cut_power
from tiered import (
    CorruptBlockError,
    GenerationError,
    GenerationReader,
    KiB,
    LockedError,
    MiB,
    NvmeTier,
    RamTier,
    TieredStore,
)
from tiered.durable.manifest import MANIFEST_NAME, list_generations, newest_first
from tiered.durable.ownership import StoreIdentity
from tiered.durable.whole_copies import WholeCopies
from tiered.locks import lock_directory

BLOCKS = {
    "embedding": ((12_345,), torch.uint8, "nvme"),
    "layer.0/weight": ((30, 50), torch.float32, "ram"),
    "layer.0/m": ((40_000,), torch.bfloat16, "nvme"),  # several files, on both drives
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    drives = [tmp_path / "disk/drive", tmp_path / "disk/second"]
    tier = NvmeTier(drives, 4 * MiB, chunk_bytes=16 * KiB, on_notice=lambda text: None)
    path = str(tmp_path / "disk/out/checkpoints")
    with TieredStore([RamTier(4 * MiB, pin_memory=False), tier], path=path, keep_generations=3) as store:
        for key, (shape, dtype, home) in BLOCKS.items():
            store.register(key, shape, dtype, home=home)
        yield store


def write(store: TieredStore, value: int) -> None:
    for key in BLOCKS:
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)


def commit(store: TieredStore, value: int) -> GenerationReader:
    write(store, value)
    commit = store.commit({"value": value})
    commit.wait(60)
    assert store.path is not None
    return GenerationReader(store.path, commit.generation)


def check_copy(path: Path, generation: int | None = None) -> None:
    """Assert that a copy is intact, and that its blocks have the value in the generation's ``meta``."""
    reader = GenerationReader(path, generation)
    # A power cut during the first change of the top manifest leaves a complete copy that no file names yet.
    is_named = (path / MANIFEST_NAME).exists()
    assert [text for text in reader.problems() if is_named or "names the current" not in text] == []
    for key, (shape, dtype, _) in BLOCKS.items():
        out = torch.empty(shape, dtype=dtype)
        reader.read(key, out)
        assert torch.equal(out, torch.full(shape, float(reader.manifest.meta["value"]), dtype=dtype)), key  # type: ignore[arg-type]


def test_copy_is_readable_without_the_original_drives(store: TieredStore, tmp_path: Path) -> None:
    reader, copies = commit(store, 1), WholeCopies(tmp_path / "disk/out/copies")
    write(store, 2)  # the run continues
    figures = copies.copy(reader)
    assert figures.generation == reader.generation and newest_first(copies.path) == [reader.generation]
    assert figures.linked_bytes == 8 * KiB, "files in the directory of generations are linked"
    assert figures.copied_bytes == 16 * KiB + 80 * KiB
    copies.close()
    for folder in ("drive", "second", "out/checkpoints"):
        shutil.rmtree(tmp_path / "disk" / folder)
    check_copy(tmp_path / "disk/out/copies")
    group = zarr.open(tmp_path / "disk/out/copies", mode="r")  # pytest turns warnings into errors
    assert isinstance(group, zarr.Group)
    arrays = {name for name, member in group.members(max_depth=None) if isinstance(member, zarr.Array)}
    assert arrays == {f"latest/{key}" for key in reader.blocks}


def test_copy_numbers_increase_and_old_copies_are_removed(store: TieredStore, tmp_path: Path) -> None:
    copies, path = WholeCopies(tmp_path / "copies"), tmp_path / "copies"
    first = commit(store, 1)
    assert [copies.copy(first).generation for _ in range(2)] == [1, 2], "a number is never used twice"
    assert copies.copy(commit(store, 3)).generation == 3
    copies.keep_only({2, 3})
    assert list_generations(path) == [2, 3]
    for number in (2, 3):
        check_copy(path, number)
    copies.close()


def test_incomplete_copy_is_not_listed(store: TieredStore, tmp_path: Path) -> None:
    path, reader = tmp_path / "copies", commit(store, 1)

    class Cut(Exception):
        pass

    def cut_after(num_pieces: int) -> None:
        left = iter(range(num_pieces))

        def on_piece() -> None:
            if next(left, None) is None:
                raise Cut

        copies = WholeCopies(path)
        with pytest.raises(Cut):
            copies.copy(reader, on_piece)
        copies.close()

    for num_pieces in range(5):
        cut_after(num_pieces)
        assert list_generations(path) == [] and not any(f.is_dir() for f in (path / "snap").iterdir())
    copies = WholeCopies(path)
    copies.copy(reader)
    copies.close()
    check_copy(path)


def test_remains_of_copies_are_removed_unless_foreign(store: TieredStore, tmp_path: Path) -> None:
    reader, path = commit(store, 1), tmp_path / "copies"
    with contextlib.closing(WholeCopies(path)) as copies:
        identity = copies._identity
        for number, owner in ((5, identity), (6, StoreIdentity("f" * 32, tmp_path / "other"))):
            owner.mark(path / f"snap/{number:08d}")
        (path / "snap/00000007").mkdir()
        (path / "snap/00000007/OWNER.json").write_text("cut")
        (path / "snap/00000008").mkdir()
        (path / "snap/00000009").mkdir()
        (path / "snap/00000009/OWNER.tmp").write_text("")
        assert copies.copy(reader).generation == 7, "one more than the number of the foreign folder"
        assert sorted(folder.name for folder in path.glob("snap/0*")) == ["00000006", "00000007"]
        with pytest.raises(LockedError):
            lock_directory(path)
    lock_directory(path).release()
    copies.close()
    check_copy(path)


@pytest.mark.parametrize("which", ["source", "copy"])
def test_damaged_copy_raises_and_is_not_listed(
    store: TieredStore, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, copies = commit(store, 1), WholeCopies(tmp_path / "copies")

    def flip(path: Path) -> None:
        path.write_bytes(b"\7" + path.read_bytes()[1:])

    if which == "source":
        flip(tmp_path / "disk/drive/snap/00000001/embedding/c/0")
        expected = "disk/drive/snap/00000001/embedding/c/0"
    else:  # the copy's drive returns a byte that was not written
        from tiered.durable import reader as reader_module

        real = reader_module.read_piece

        def lie(files, spec, piece, into=None):
            if spec.key == "embedding" and "/copies/" in str(files[0].path):
                flip(files[0].path)
            return real(files, spec, piece, into)

        monkeypatch.setattr(reader_module, "read_piece", lie)
        expected = "copies/snap/00000001/embedding/c/0"
    with pytest.raises(CorruptBlockError, match=expected):
        copies.copy(reader)
    assert list_generations(tmp_path / "copies") == []
    copies.close()


def test_missing_part_is_named(store: TieredStore, tmp_path: Path) -> None:
    reader, copies = commit(store, 1), WholeCopies(tmp_path / "copies")
    shutil.rmtree(tmp_path / "disk/second/snap")
    with pytest.raises(GenerationError, match="disk/second/snap/00000001/"):
        copies.copy(reader)
    assert list_generations(tmp_path / "copies") == []
    copies.close()


@pytest.mark.fault
def test_a_power_cut_leaves_whole_copies(store: TieredStore, tmp_path: Path) -> None:
    """After power cuts at many points, with each kind of survival, all listed copies are complete."""
    path, root = tmp_path / "disk/out/copies", tmp_path / "disk"
    path.parent.mkdir(parents=True, exist_ok=True)
    first, second = commit(store, 1), commit(store, 2)
    ends = []
    with record(root) as recording:
        copies = WholeCopies(path)
        for reader in (first, second):
            copies.keep_only(newest_first(path)[:1])
            copies.copy(reader)
            ends.append(len(recording.operations))
        copies.close()
    chance, seen = random.Random(1), set()
    cuts = [chance.randrange(len(recording.operations) + 1) for _ in range(20)]
    cuts += [end - back for end in ends for back in range(12)]  # while a copy is being marked as complete
    for number, cut in enumerate(cuts):
        survival = SURVIVALS[number % len(SURVIVALS)]
        other = tmp_path / "cut"
        other.mkdir()
        cut_power(recording, cut, survival, chance).make(other)
        there = other / "out/copies"
        newest = next(iter(newest_first(there)), 0)
        assert newest >= sum(cut >= end for end in ends), (cut, survival, "a finished copy is lost")
        if (there / MANIFEST_NAME).exists():
            check_copy(there)
        copies = WholeCopies(there)  # as when a run resumes
        for generation in list_generations(there):
            check_copy(there, generation)
        assert copies.copy(second).generation > newest or newest == 0
        copies.close()
        check_copy(there)
        seen.add(newest)
        shutil.rmtree(other)
    assert seen == {0, 1, 2}
