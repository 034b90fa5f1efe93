"""Stores that use the same drives one after the other: each store removes only its own generations."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from processes import warm
from tiered import GenerationError, GenerationReader, KiB, MiB, NvmeTier, RamTier, TieredStore
from tiered.durable.generations import remove_generation
from tiered.durable.manifest import list_generations, newest_first
from tiered.durable.ownership import StoreIdentity, read_owner, read_store_id
from tiered.ext import files_below, reusable_bytes
from tiered.tiers import directory

KEYS = ["a/weight", "b"]


def make_store(root: Path, name: str, keep: int = 2) -> TieredStore:
    """Return a store that has its own directory, and shares its drives with the other stores."""
    tier = NvmeTier([root / "drive0", root / "drive1"], MiB, chunk_bytes=16 * KiB, on_notice=lambda text: None)
    store = TieredStore(
        [RamTier(MiB, pin_memory=False), tier], path=str(root / name), keep_generations=keep, overwrite=True
    )
    for key in KEYS:
        store.register(key, (10_000,), torch.float32, home="nvme")
    return store


def commit(store: TieredStore, value: float) -> int:
    for key in KEYS:
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
    done = store.commit()
    done.wait(60)
    return done.generation


def contents(root: Path, name: str) -> dict[int, float]:
    """Return the value in each generation of a store, by number. Assert that all generations are intact."""
    found = {}
    for number in newest_first(root / name):
        reader = GenerationReader(root / name, number)
        assert list(reader.problems()) == []
        out = torch.empty(10_000)
        reader.read(KEYS[0], out)
        found[number] = float(out[0])
    return found


def on_drives(root: Path) -> list[int]:
    numbers = [sorted(int(folder.name) for folder in root.glob(f"drive{n}/snap/0*")) for n in (0, 1)]
    assert numbers[0] == numbers[1]
    return numbers[0]


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_ownership import commit, make_store
from tiered.durable import generations
with make_store(Path(sys.argv[1]), sys.argv[2]) as store:
    store.load()
    generations.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    commit(store, 99)
"""


def killed_commit(root: Path, name: str) -> None:
    command = [sys.executable, "-c", _KILLED, str(root), name, *map(str, Path(__file__).parents[:2])]
    assert warm.run(command, timeout=120).returncode == -9


def test_alternating_stores_keep_each_other_intact(tmp_path: Path) -> None:
    with make_store(tmp_path, "one") as store:
        assert [commit(store, value) for value in (1, 2, 3)] == [1, 2, 3]
    with make_store(tmp_path, "two", keep=1) as store:
        assert [commit(store, value) for value in (11, 12)] == [4, 5], "numbers are used once on a drive"
    assert contents(tmp_path, "one") == {3: 3, 2: 2} and contents(tmp_path, "two") == {5: 12}
    assert on_drives(tmp_path) == [2, 3, 5]
    killed_commit(tmp_path, "two")
    assert on_drives(tmp_path) == [2, 3, 5, 6]
    with make_store(tmp_path, "one") as store:
        store.load(2)
        assert on_drives(tmp_path) == [2, 3, 5, 6], "only the other store removes its half-written files"
        assert commit(store, 4) == 7
    assert contents(tmp_path, "one") == {7: 4, 2: 2} and contents(tmp_path, "two") == {5: 12}
    killed_commit(tmp_path, "one")
    with make_store(tmp_path, "two") as store:
        store.load()
        assert on_drives(tmp_path) == [5, 7, 8]
        assert commit(store, 13) == 9
    assert contents(tmp_path, "one") == {7: 4} and contents(tmp_path, "two") == {9: 13, 5: 12}
    with make_store(tmp_path, "one") as store:
        store.load()
        assert on_drives(tmp_path) == [5, 7, 9]
    remove_generation(tmp_path / "two", 9)
    assert contents(tmp_path, "one") == {7: 4} and contents(tmp_path, "two") == {5: 12}
    assert on_drives(tmp_path) == [5, 7]


def test_new_store_in_a_used_folder_changes_no_files(tmp_path: Path) -> None:
    with make_store(tmp_path, "one") as store:
        commit(store, 1)
    (tmp_path / "one").rename(tmp_path / "away")
    with make_store(tmp_path, "one") as store:
        with pytest.raises(GenerationError, match="nothing was committed"):
            store.load()
        assert commit(store, 2) == 2
    assert on_drives(tmp_path) == [1, 2]
    assert contents(tmp_path, "away") == {1: 1}
    with make_store(tmp_path, "away") as store:
        store.load()
        assert commit(store, 3) == 3
        owner = read_owner(tmp_path / "drive1/snap/00000001")
        assert owner is not None and owner.path == str(tmp_path / "away"), "it was moved"
    assert contents(tmp_path, "one") == {2: 2} and contents(tmp_path, "away") == {1: 1, 3: 3}


def test_copied_store_leaves_the_original_intact(tmp_path: Path) -> None:
    with make_store(tmp_path, "one") as store:
        for value in (1, 2):
            commit(store, value)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with make_store(tmp_path, "copy", keep=1) as store:
        store.load()
        for value in (3, 4):
            commit(store, value)
    assert contents(tmp_path, "one") == {1: 1, 2: 2} and contents(tmp_path, "copy") == {4: 4}
    remove_generation(tmp_path / "copy", 4)
    assert on_drives(tmp_path) == [1, 2]


def test_another_stores_generation_is_not_adopted(tmp_path: Path) -> None:
    """While a store's drives are unmounted, another store commits a generation with the same number to new drives."""
    with make_store(tmp_path, "one") as store:
        commit(store, 1)
    for number in (0, 1):
        (tmp_path / f"drive{number}").rename(tmp_path / f"away{number}")
    with make_store(tmp_path, "two") as store:
        commit(store, 2)
    with make_store(tmp_path, "one") as store, pytest.raises(GenerationError, match="has no array"):
        store.load()
    assert contents(tmp_path, "two") == {1: 2}


def test_first_path_of_a_tier_can_be_a_shared_directory(tmp_path: Path) -> None:
    def make(path: Path | None) -> TieredStore:
        tier = NvmeTier([tmp_path / "drive"], MiB, chunk_bytes=16 * KiB)
        store = TieredStore(
            [RamTier(MiB, pin_memory=False), tier], path=None if path is None else str(path), overwrite=True
        )
        store.register(KEYS[0], (10_000,), torch.float32, home="nvme")
        store.register(KEYS[1], (10_000,), torch.float32, home="ram")
        return store

    for turn in (1, 2, 3):
        for name, path in (("drive", None), ("other", tmp_path / "other")):
            with make(path) as store:
                if turn > 1:
                    store.load()
                commit(store, 10 * turn + (path is not None))
            assert len(contents(tmp_path, name)) == min(turn, 2)
    assert list(contents(tmp_path, "drive").values()) == [30, 20]
    assert list(contents(tmp_path, "other").values()) == [31, 21]


def test_lost_store_id_is_recovered_from_its_generations(tmp_path: Path) -> None:
    with make_store(tmp_path, "one") as store:
        commit(store, 1)
    identity = read_store_id(tmp_path / "one")
    for text in ("", "{}", '{"id": "x"}', "[]"):
        (tmp_path / "one/STORE.json").write_text(text)
        with make_store(tmp_path, "one") as store:
            store.load()
        assert read_store_id(tmp_path / "one") == identity is not None
    assert contents(tmp_path, "one") == {1: 1}


def test_folder_with_a_damaged_owner_record_is_not_removed(tmp_path: Path) -> None:
    with make_store(tmp_path, "one", keep=1) as store:
        commit(store, 1)
        note = tmp_path / "drive0/snap/00000001/OWNER.json"
        note.write_text(json.dumps({**json.loads(note.read_text()), "path": "/elsewhere"}))
        commit(store, 2)
    assert (tmp_path / "drive0/snap/00000001").is_dir() and not (tmp_path / "drive1/snap/00000001").exists()
    assert list_generations(tmp_path / "one") == [2]
    assert not StoreIdentity("0" * 32, tmp_path / "one").owns(tmp_path / "drive0/snap/00000001")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_partially_removed_folder_names_its_owner(
    is_reversed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``OWNER.json`` is removed last, in whatever order the file system lists the files.

    Otherwise, no store could remove what a crash leaves.
    """
    num_looks = 0

    def check(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **options: Any) -> Any:
            nonlocal num_looks
            result = call(*arguments, **options)
            for folder in tmp_path.glob("drive*/snap/0*"):
                left = {entry.name for entry in os.scandir(folder)} - {"OWNER.tmp"}
                assert "OWNER.json" in left or not left, (folder, left)
                num_looks += 1
            return result

        return checked

    list_of = os.listdir
    with make_store(tmp_path, "one", keep=1) as store:
        commit(store, 1)
        monkeypatch.setattr(os, "listdir", lambda path=".": sorted(list_of(path), reverse=is_reversed))
        for name in ("unlink", "rmdir"):
            monkeypatch.setattr(os, name, check(getattr(os, name)))
        commit(store, 2)
    assert num_looks > 10
    assert on_drives(tmp_path) == [2]


def test_files_removed_by_another_process_are_not_counted(tmp_path: Path) -> None:
    """A rank counts other ranks' files while those ranks open their stores and remove leftovers of dead runs."""
    with make_store(tmp_path, "run") as store:
        with store.acquire(KEYS[0], "ram", "w"):
            pass
        store.evict(KEYS[0], "ram")
        store.wait_idle()
        drive = tmp_path / "drive0"
        sizes = [path.stat().st_size for path in directory.files_below(drive / "live")]
        assert reusable_bytes(drive) == sum(sizes) > 0
        gone = [path.with_name("99") for path in directory.files_below(drive / "live")]
        with mock.patch.object(directory, "files_below", lambda root: [*gone, *files_below(root)]):
            assert reusable_bytes(drive) == sum(sizes)


def test_empty_folders_of_a_crash_are_removed(tmp_path: Path) -> None:
    with make_store(tmp_path, "one") as store:
        assert commit(store, 1) == 1
    for name in ("drive0/snap/00000005", "drive1/snap/00000006", "one/snap/00000007", "drive1/snap/00000008"):
        (tmp_path / name).mkdir()
    (tmp_path / "drive1/snap/00000006/OWNER.tmp").write_text("{")
    (tmp_path / "drive1/snap/00000008/notes").write_text("mine")
    with make_store(tmp_path, "one") as store:
        store.load()
        left = sorted(str(folder.relative_to(tmp_path)) for folder in tmp_path.glob("*/snap/0*"))
        snapshots = [f"{name}/snap/00000001" for name in ("drive0", "drive1", "one")]
        assert left == sorted([*snapshots, "drive1/snap/00000008"])
        assert commit(store, 2) == 9, "no number of an existing folder is used"
