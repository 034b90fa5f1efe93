"""Committed work survives an outdated top manifest, a failing drive, a new store in the folder, and nested paths."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import (
    CorruptBlockError,
    GenerationError,
    GenerationReader,
    KiB,
    LockedError,
    MiB,
    NvmeTier,
    RamTier,
    Tier,
    TieredStore,
    TransferError,
)
from tiered.durable import manifest
from tiered.durable.manifest import (
    MANIFEST_NAME,
    current_generation,
    forget_generation,
    list_generations,
    make_current,
    read_manifest,
)

KEYS = {"a": "nvme", "b/c": "ram"}
CALLS = ("replace", "rename", "unlink", "link", "symlink", "mkdir", "rmdir", "fsync", "fdatasync", "pwrite", "pwritev")


def tiers(root: Path) -> list[Tier]:
    drive = NvmeTier([root / "drive"], MiB, chunk_bytes=16 * KiB, on_notice=lambda text: None)
    return [RamTier(MiB, pin_memory=False), drive]


def make(root: Path, values: int, keep: int = 2) -> None:
    with TieredStore(tiers(root), keep_generations=keep) as store:
        for value in range(1, values + 1):
            write(store, value)
            store.commit({"value": value}).wait(60)


def write(store: TieredStore, value: float) -> None:
    for key, home in KEYS.items():
        store.put(key, torch.full((5000,), float(value)), home=home)


def value_of(store: TieredStore) -> float:
    (value,) = {float(each) for key in KEYS for each in store[key].unique()}
    return value


def opened_value(root: Path, notices: list[str] | None = None) -> float:
    with TieredStore.open(str(root / "drive"), tiers(root), on_notice=(notices or []).append) as store:
        return value_of(store)


@pytest.mark.parametrize("top", [3, 1, 77, None, "damaged"])
def test_newest_generation_is_opened_despite_the_top_file(top: int | str | None, tmp_path: Path) -> None:
    make(tmp_path, 4)
    path = tmp_path / "drive" / MANIFEST_NAME
    if isinstance(top, int):
        make_current(tmp_path / "drive", top)
    elif top is None:
        path.unlink()
    else:
        path.write_text("{")
    notices: list[str] = []
    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path), on_notice=notices.append) as store:
        assert value_of(store) == 4
        reasons = {
            3: f"'{path}' names generation 3, and the newest generation is 4",
            1: f"'{path}' names generation 1, but '{path.parent}/snap/00000001/MANIFEST.json' is missing, and the "
            "newest generation is 4",
            77: f"'{path}' names generation 77, but '{path.parent}/snap/00000077/MANIFEST.json' is missing, and the "
            "newest generation is 4",
            None: f"'{path}' is missing, and the newest generation is 4",
            "damaged": f"'{path}' cannot be read as a manifest: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        }
        assert notices == [f"{reasons[top]}. Using generation 4, the newest complete one"]
        assert list_generations(tmp_path / "drive") == [3, 4], "opening removes nothing"
        write(store, 5)
        assert store.commit({"value": 5}).generation == 5
    assert list_generations(tmp_path / "drive") == [4, 5] and current_generation(tmp_path / "drive") == 5
    assert opened_value(tmp_path) == 5
    assert read_manifest(tmp_path / "drive").meta["value"] == 5


def test_current_top_manifest_yields_no_notice(tmp_path: Path) -> None:
    make(tmp_path, 2)
    reader = GenerationReader(tmp_path / "drive")
    assert (reader.generation, reader.notice) == (2, None)


@pytest.mark.parametrize("part", ["file", "manifest", "array"])
def test_incomplete_newest_generation_falls_back_to_a_complete_one(part: str, tmp_path: Path) -> None:
    """A ``cp -r`` of a live store may copy an old top manifest, and a generation that is being removed."""
    make(tmp_path, 3, keep=3)
    make_current(tmp_path / "drive", 1)
    newest = tmp_path / "drive/snap/00000003"
    if part == "file":
        (newest / "b/c/c/0").unlink()
    elif part == "array":
        shutil.rmtree(newest / "a")
    else:
        (newest / MANIFEST_NAME).write_text("{")
    reader = GenerationReader(tmp_path / "drive")
    assert reader.generation == 2
    assert reader.notice is not None and "generation 3 is incomplete: " in reader.notice
    assert opened_value(tmp_path) == 2
    assert read_manifest(tmp_path / "drive").generation == (2 if part == "manifest" else 3)
    forget_generation(tmp_path / "drive", 1)
    shutil.rmtree(tmp_path / "drive/snap/00000002")
    with pytest.raises(GenerationError, match=r"no generation in .* is complete: generation 3 is incomplete"):
        GenerationReader(tmp_path / "drive")


@pytest.mark.parametrize("is_moved", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("damaged", [1, 2, 3])
@pytest.mark.parametrize("part", ["byte", "file", "manifest"])
def test_damaged_generations_are_reported_and_passed_over(
    part: str, damaged: int, is_moved: bool, tmp_path: Path
) -> None:
    """By default, the newest complete generation is opened. A requested generation is never replaced by another."""
    make(tmp_path / "made", 3, keep=3)
    root = tmp_path / "made"
    if is_moved:
        root = root.rename(tmp_path / "moved")
    numbers = list(range(3, 3 - damaged, -1))
    for number in numbers:
        file = root / f"drive/snap/{number:08d}" / ("b/c" if number % 2 else "a") / "c/0"
        if part == "manifest":
            file = root / f"drive/snap/{number:08d}/MANIFEST.json"
        if part == "file":
            file.unlink()
        else:
            contents = bytearray(file.read_bytes())
            file.unlink()  # other generations may have hard links to it
            contents[100] ^= 1
            file.write_bytes(contents)
    before = {path: path.read_bytes() for path in (root / "drive/snap").glob("**/c/0")}
    error = CorruptBlockError if part == "byte" else GenerationError
    text = "damaged" if part == "manifest" else "b/c"
    with pytest.raises(error, match=text):
        TieredStore.open(str(root / "drive"), tiers(root), generation=3)
    if damaged == 3:
        with pytest.raises(error, match=text):
            TieredStore.open(str(root / "drive"), tiers(root))
        return
    notices: list[str] = []
    with TieredStore.open(str(root / "drive"), tiers(root), on_notice=notices.append) as store:
        assert value_of(store) == 3 - damaged and sorted(store) == sorted(KEYS)
        (notice,) = notices
        assert all(f"generation {number} cannot be used: " in notice for number in numbers), notice
        assert notice.endswith(f"Using generation {3 - damaged}, the newest complete one"), notice
        assert before == {path: path.read_bytes() for path in (root / "drive/snap").glob("**/c/0")}
        write(store, 9)
        assert store.commit().generation == 4
    assert opened_value(root) == 9


def test_skipped_generations_stay_until_newer_ones_replace_them(tmp_path: Path) -> None:
    """The missing part of a skipped generation may be on an unmounted drive."""
    make(tmp_path, 2, keep=2)
    away = (tmp_path / "drive/snap/00000002/a").rename(tmp_path / "away")
    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path), keep_generations=2) as store:
        assert value_of(store) == 1
        write(store, 8)
        assert store.commit().generation == 3
    away.rename(tmp_path / "drive/snap/00000002/a")
    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path), generation=2) as store:
        assert value_of(store) == 2
    away = (tmp_path / "drive/snap/00000003/a").rename(tmp_path / "away")
    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path), keep_generations=2) as store:
        for value in (8, 9):
            write(store, value)
            store.commit().wait()
    assert list_generations(tmp_path / "drive") == [4, 5]


def test_new_store_refuses_to_overwrite_committed_generations(tmp_path: Path) -> None:
    make(tmp_path, 1)
    refused = tiers(tmp_path)
    with pytest.raises(GenerationError, match=r"has generation 1,.*TieredStore\.open\('.*drive', t.*overwrite=True"):
        TieredStore(refused)
    with TieredStore.open(str(tmp_path / "drive"), refused) as store:  # the same tier objects
        assert value_of(store) == 1
    with TieredStore(tiers(tmp_path), overwrite=True) as store:
        assert list(store) == []
        store.put("other", torch.ones(10))
        assert store.commit().generation == 2
    assert list_generations(tmp_path / "drive") == [1, 2], "it goes when keep_generations newer ones exist"
    with pytest.raises(GenerationError, match="has generation 2,"):
        TieredStore([RamTier(MiB, pin_memory=False)], path=str(tmp_path / "drive"))


def test_dropped_tiers_of_a_refused_store_release_their_locks(tmp_path: Path) -> None:
    """As in a notebook, the user follows the error's advice with new tiers, while the error is still being handled."""
    make(tmp_path, 1)
    try:
        TieredStore(tiers(tmp_path))
    except GenerationError:
        with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path)) as store:
            assert value_of(store) == 1
    kept = tiers(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        tiers(tmp_path)
    kept[-1].close()


def test_open_does_not_create_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="nothere' is not a directory"):
        TieredStore.open(str(tmp_path / "nothere"), [RamTier(MiB, pin_memory=False)])
    assert list(tmp_path.iterdir()) == []
    try:
        TieredStore.open(str(tmp_path / "nothere"), tiers(tmp_path))
    except GenerationError:
        tiers(tmp_path)[-1].close()  # works because a failed `open` closes its tiers


@pytest.mark.parametrize("inner", ["x/live", "x/sub/y", "x"])
def test_drives_that_contain_each_other_are_refused(inner: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("x")
    nested = tmp_path / inner.replace("x", "link", 1)
    for paths in ([tmp_path / "x", nested], [nested, tmp_path / "x"]):
        with pytest.raises(ValueError, match=r"different paths: .* (lies inside|contains|is the same folder as) '"):
            NvmeTier(paths, MiB)
    assert list((tmp_path / "x").iterdir()) == [], "nothing was made"
    first = NvmeTier([tmp_path / "x"], MiB)
    with pytest.raises(ValueError, match="give each its own folder"):
        TieredStore([RamTier(MiB, pin_memory=False), first], path=str(nested))
    if inner != "x":
        second = NvmeTier([nested], MiB, name="second")
        with pytest.raises(ValueError, match="lies inside"):
            TieredStore([RamTier(MiB, pin_memory=False), first, second])
        second.close()
    first.close()


# -- a drive that refuses ---------------------------------------------------------------------------------------------


def failing_at(number: int, patch: pytest.MonkeyPatch, error: int = errno.EIO) -> list[str]:
    """Make only system call ``number`` fail. Return a list that receives the name and arguments of the failed call."""
    left, failed = [number], []

    def hook(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def refusing(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                failed.append(f"{name}{arguments[1:] if name.startswith('pwrite') else arguments}")
                raise OSError(error, os.strerror(error), arguments[0] if isinstance(arguments[0], str | Path) else None)
            return real(*arguments, **options)

        patch.setattr(os, name, refusing)

    for name in CALLS:
        hook(name)
    return failed


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_store_opens_after_any_failing_system_call_of_a_commit(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failed = num_raised = 0
    for number in range(0, 1000, stride):
        root = tmp_path / str(number)
        make(root, 2)
        store = TieredStore.open(str(root / "drive"), tiers(root), on_notice=lambda text: None)
        write(store, 3)
        store.wait_idle()
        raised = False
        with monkeypatch.context() as patch:
            failed = failing_at(number, patch)
            try:
                store.commit({"value": 3}).wait(60)
            except TransferError:
                raised = True
        try:
            store.close()
        except TransferError:
            raised = True
        if not failed:
            break
        num_failed, num_raised = num_failed + 1, num_raised + raised
        current, known = current_generation(root / "drive"), list_generations(root / "drive")
        assert current in known and current == known[-1], (failed, current, known)
        value = opened_value(root)
        assert value in ((2, 3) if raised else (3,)), (failed, value)
        assert value == read_manifest(root / "drive", current).meta["value"], failed
        assert list(GenerationReader(root / "drive").problems()) == [], failed
        shutil.rmtree(root)
    else:
        raise AssertionError("a commit makes fewer calls")
    assert num_failed * stride > 40 and num_raised > num_failed / 2


def test_failed_flush_after_the_rename_keeps_the_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 2)
    real, has_failed = manifest.replace_file, []

    def replace_file(path: Path, text: str, **options: Any) -> None:
        real(path, text, **options)
        if path == tmp_path / "drive" / MANIFEST_NAME and not has_failed:
            has_failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path.parent))

    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path)) as store:
        write(store, 3)
        monkeypatch.setattr(manifest, "replace_file", replace_file)
        with pytest.raises(TransferError, match="generation 3 cannot be written"):
            store.commit().wait(60)
        assert has_failed and current_generation(tmp_path / "drive") == 3
    assert opened_value(tmp_path) == 3
    with TieredStore.open(str(tmp_path / "drive"), tiers(tmp_path)) as store:
        write(store, 4)
        assert store.commit().generation == 4
    assert opened_value(tmp_path) == 4 and list_generations(tmp_path / "drive") == [3, 4]
