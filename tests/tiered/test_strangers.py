"""Untrusted folders: whatever links, names and documents they contain, nothing outside them is changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.strange_values import VALUES, places_in
from tiered import GenerationError, GenerationReader, MiB, NvmeTier, RamTier, TieredError, TieredStore
from tiered.durable.generations import remove_generation
from tiered.errors import UnusableDirectoryError
from tiered.ext import measure_leftovers, remove_leftovers
from tiered.file_io import checksum

SHAPE = (30, 1000)


def open_store(folder: Path) -> TieredStore:
    tiers = [RamTier(2 * MiB, pin_memory=False), NvmeTier([folder], 4 * MiB)]
    return TieredStore(tiers, keep_generations=1)


def commit(store: TieredStore, value: float) -> None:
    if not list(store.blocks()):
        store.register("layer.0/weight", SHAPE, torch.float32, home="nvme")
        store.register("m", SHAPE, torch.float32, home="ram")
    for key in ("layer.0/weight", "m"):
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
    store.commit().wait(60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    with open_store(folder) as store:
        commit(store, 1.0)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "theirs" / "store", symlinks=True))


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the user's files, some named like a store's. Assert that no file has changed."""
    folder = tmp_path / "mine"
    for name in ("notes.txt", "1", "c/0", "MANIFEST.json", "deep/c/7"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(4096))
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def use(folder: Path) -> None:
    """Try all operations on a store's folder: open, change, commit, prune, remove, clean up. Ignore errors."""
    with contextlib.suppress(TieredError, OSError), open_store(folder) as store:
        commit(store, 2.0)
        commit(store, 3.0)
    with contextlib.suppress(TieredError, OSError):
        list(GenerationReader(folder).problems())
    for generation in (1, 2, 3, 7):
        with contextlib.suppress(TieredError, OSError):
            remove_generation(folder, generation)
    with contextlib.suppress(TieredError, OSError):
        remove_leftovers(folder)


PLACES = [
    *("snap/00000007", "snap/00000002", ".pool/4096", ".pool/x", "snap/00000001/layer.0", "snap/00000001/x"),
    *("live/x", "live/layer.0"),
]


@pytest.mark.parametrize("place", PLACES)
def test_links_to_folders_are_not_followed(place: str, folder: Path, mine: Path) -> None:
    link = folder / place
    link.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(mine, target_is_directory=True)
    use(folder)


@pytest.mark.parametrize("place", ["snap", "live", ".pool"])
def test_directory_with_linked_folders_is_refused(place: str, folder: Path, mine: Path) -> None:
    link = folder / place
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(mine, target_is_directory=True)
    with pytest.raises(UnusableDirectoryError, match=f"{place}' is a symbolic link"), open_store(folder):
        pass
    use(folder)


@pytest.mark.parametrize(
    "name", ["MANIFEST.tmp", "MANIFEST.json", "zarr.tmp", "zarr.json", "STORE.json", "STORE.tmp", "WEAR.json", "LOCK"]
)
def test_links_to_files_are_not_written_through(name: str, folder: Path, mine: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine / "notes.txt")
    use(folder)


def test_symlinked_generation_documents_are_not_written_through(folder: Path, mine: Path) -> None:
    for document in [*folder.rglob("zarr.json"), *folder.rglob("OWNER.json")]:
        for path in (document, document.with_suffix(".tmp")):
            if path.parent != folder:
                path.unlink(missing_ok=True)
                path.symlink_to(mine / "notes.txt")
    use(folder)


def read_first(folder: Path) -> None:
    reader = GenerationReader(folder)
    reader.read(next(iter(reader.blocks)), torch.empty(SHAPE))


def manifest_of(folder: Path) -> Path:
    (path,) = folder.glob("snap/*/MANIFEST.json")
    return path


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest, and give it a correct checksum, as an attacker could."""
    document = json.loads(path.read_text())
    edit(document["body"])
    document["xxh3_64"] = checksum(json.dumps(document["body"], sort_keys=True).encode())
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("location", "../../../mine", "not a folder of that block"),
        ("location", "/etc", "not a folder of that block"),
        ("location", "snap/00000001/other", "not a folder of that block"),
        ("key", "../../mine/notes.txt", "block key"),
        ("key", "/etc/passwd", "block key"),
        ("nbytes", 1 << 60, "bytes"),
        ("nbytes", -1, "bytes"),
        ("shape", [1 << 62], "shape"),
        ("shape", [-1], "shape"),
        ("shape", ["30"], "shape"),
        ("shape", [30.5], "shape"),
        ("dtype", "object", "object"),
        ("dtype", ["float32"], "text"),
        ("xxh3_64", [5], "text"),
    ],
)
def test_invalid_manifest_records_are_refused(field: str, value: Any, says: str, folder: Path, mine: Path) -> None:
    change(manifest_of(folder), lambda body: body["blocks"][0].update({field: value}))
    with pytest.raises(GenerationError, match=says):
        read_first(folder)
    use(folder)


def test_manifest_paths_never_reach_foreign_generations(folder: Path, tmp_path: Path) -> None:
    """A removal deletes a generation's parts on the drives that its manifest lists, but only if its store owns them."""
    mine = tmp_path / "mine"
    with open_store(mine) as store:
        commit(store, 5.0)
    before = contents(mine)
    change(manifest_of(folder), lambda body: body.update(paths={"nvme": [str(mine)]}))
    remove_generation(folder, 1)
    assert contents(mine) == before


def test_named_pipe_does_not_block(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name in ("zarr.json", "OWNER.json", "0")]
    assert len(files) == 13
    for path in [*files, folder / "STORE.json"]:
        path.unlink()
        os.mkfifo(path)
    assert list(GenerationReader(folder).problems())
    manifest_of(folder).unlink()
    (folder / "MANIFEST.json").unlink()
    os.mkfifo(folder / "MANIFEST.json")
    with pytest.raises(GenerationError, match="not a regular file"):
        GenerationReader(folder)
    use(folder)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_manifest_is_read_or_refused(made: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder, symlinks=True)

    def spoil(body: dict[str, Any]) -> None:
        tree, key = data.draw(st.sampled_from(list(places_in(body))))
        tree[key] = data.draw(VALUES)

    change(manifest_of(folder), spoil)
    with contextlib.suppress(TieredError):
        reader = GenerationReader(folder)
        list(reader.problems())
        for key in list(reader.blocks)[:2]:
            reader.read_range(key, 0, 8)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_zarr_document_is_read_or_refused(made: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder, symlinks=True)
    path = data.draw(st.sampled_from(sorted(folder.rglob("zarr.json"))))
    document = json.loads(path.read_text())
    tree, key = data.draw(st.sampled_from(list(places_in(document))))
    tree[key] = data.draw(VALUES)
    path.write_text(json.dumps(document))
    with contextlib.suppress(TieredError):
        list(GenerationReader(folder).problems())


def open_committed(folder: Path) -> TieredStore:
    tiers = [RamTier(2 * MiB, pin_memory=False), NvmeTier([folder], 4 * MiB)]
    return TieredStore.open(str(folder), tiers, keep_generations=1)


@pytest.mark.parametrize("name", ["²", "٣", "1²", "³/c/0"])
def test_names_with_non_ascii_digits_are_not_numbers(folder: Path, name: str) -> None:
    for place in ("snap", ".pool", ".pool/4096", "live/x/c"):
        (folder / place / name).mkdir(parents=True)
    for place in (".pool/4096/²²", "snap/²²"):
        (folder / place).write_bytes(bytes(4096))
    with open_committed(folder) as store:
        commit(store, 5.0)
    assert measure_leftovers(folder).owner is None and remove_leftovers(folder)
    with open_committed(folder) as store:
        assert store["m"][0, 0] == 5


def test_folder_at_a_kept_file_path_is_left_alone(folder: Path) -> None:
    (folder / ".pool" / "122880" / "1" / "mine").mkdir(parents=True)
    (folder / ".pool" / "file").touch()
    with open_committed(folder) as store:
        commit(store, 5.0)
        commit(store, 6.0)
        store.unregister(*store)
        store.register("again", SHAPE, torch.float32, home="nvme")
    assert (folder / ".pool" / "122880" / "1" / "mine").is_dir()
