"""Reading and checking a generation with ``GenerationReader``, without a store, and removing it from all drives."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiered import (
    BlockNotFoundError,
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
from tiered.durable.generations import remove_generation
from tiered.durable.manifest import current_generation, list_generations, newest_first, read_manifest, write_manifest
from tiered.durable.ownership import StoreIdentity

#: key -> (home, contents). The largest blocks have several checksums or several files.
BLOCKS = {
    "layer.0/weight": ("nvme", torch.arange(300_000, dtype=torch.float32)),
    "layer.0/m": ("ram", torch.arange(70_000, dtype=torch.int64).reshape(70, 1000)),
    "bias": ("nvme", torch.full((7,), 2.5, dtype=torch.bfloat16)),
    "large": ("ram", torch.arange(18 * MiB).to(torch.uint8)),
    "empty": ("ram", torch.empty((0, 3))),
}


def make_store(path: Path) -> TieredStore:
    nvme = NvmeTier([path / "a", path / "b"], 8 * MiB, chunk_bytes=256 * KiB)
    return TieredStore(
        [RamTier(64 * MiB, pin_memory=False), nvme], path=str(path / "generations"), keep_generations=4, overwrite=True
    )


def write(store: TieredStore, times: int = 1) -> None:
    for key, (_, tensor) in BLOCKS.items():
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.copy_(tensor * times)


def register(store: TieredStore) -> None:
    for key, (home, tensor) in BLOCKS.items():
        store.register(key, tensor.shape, tensor.dtype, home=home)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    root = folder / "run"
    with make_store(root) as store:
        register(store)
        for times in (1, 2):
            write(store, times)
            store.commit({"times": times}).wait(60)
    root.rename(folder / "archive")  # so that a copy cannot find the original's files
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the run. Its links between drives point into the copy."""
    shutil.copytree(original.parent / "archive", tmp_path / "run", symlinks=True)
    for link in (tmp_path / "run").rglob("c/*"):
        if link.is_symlink():
            target = os.readlink(link).replace(str(original), str(tmp_path / "run"))
            link.unlink()
            link.symlink_to(target)
    return tmp_path / "run"


def check(reader: GenerationReader, times: int) -> None:
    for key, (_, tensor) in BLOCKS.items():
        out = torch.empty_like(tensor)
        reader.read(key, out)
        assert torch.equal(out, tensor * times), key


def test_every_block_can_be_read_during_a_live_store(root: Path) -> None:
    with make_store(root) as store:
        register(store)
        store.load(1)
        reader = GenerationReader(root / "generations")
        assert (reader.generation, reader.manifest.meta) == (2, {"times": 2})
        assert {key: record.home for key, record in reader.blocks.items()} == {
            k: home for k, (home, _) in BLOCKS.items()
        }
        assert [Path(path).name for path in reader.manifest.paths["nvme"]] == ["a", "b"]
        check(reader, 2)
        check(GenerationReader(root / "generations", 1), 1)
        assert list(reader.problems()) == []


def test_invalid_reader_calls_are_refused(root: Path) -> None:
    reader = GenerationReader(root / "generations")
    with pytest.raises(BlockNotFoundError, match=r"'no' is registered.*generation 2 has 5 blocks"):
        reader.read("no", torch.empty(1))
    for out in (torch.empty(8, dtype=torch.bfloat16), torch.empty(7), torch.empty(14, dtype=torch.bfloat16)[::2]):
        with pytest.raises(ValueError, match=r"'bias' is \(7,\) of torch.bfloat16, not"):
            reader.read("bias", out)
    with pytest.raises(GenerationError, match="no generation 9"):
        GenerationReader(root / "generations", 9)
    with pytest.raises(GenerationError, match="nothing was committed"):
        GenerationReader(root / "a")


def test_moved_drives_are_found_by_search(root: Path) -> None:
    shutil.move(root / "b", root / "deep")  # the links in ``a`` now dangle
    reader = GenerationReader(root / "generations")
    with pytest.raises(
        GenerationError, match=r"'layer\.0/weight' is missing: '.*a/snap/00000002/layer\.0/weight/c/1', a "
    ):
        check(reader, 2)
    assert any("a link to" in problem and "/b/snap/" in problem for problem in reader.problems())
    check(GenerationReader(root / "generations", search=[root / "deep"]), 2)
    assert list(GenerationReader(root / "generations", search=[root / "deep"]).problems()) == []
    shutil.move(root / "a", root / "deeper")
    reader = GenerationReader(root / "generations", search=[root / "deep", root / "deeper"])
    check(reader, 2)
    assert list(reader.problems()) == []


def test_folder_of_another_store_is_not_adopted(root: Path, tmp_path: Path) -> None:
    """Both stores have a generation 2 with the same blocks."""
    with make_store(tmp_path / "other") as store:
        register(store)
        for times in (3, 4):
            write(store, times)
            store.commit().wait(60)
    shutil.rmtree(root / "a")
    shutil.rmtree(root / "b")
    with pytest.raises(GenerationError, match="has no array"):
        check(GenerationReader(root / "generations", search=[tmp_path / "other/a", tmp_path / "other/b"]), 2)


def files_of_generation(root: Path) -> list[Path]:
    """Return all files of generation 2 except symbolic links, and the store's files in the folders above it."""
    top = [root / "generations/MANIFEST.json", root / "generations/STORE.json"]
    documents = [root / f"{name}/{rest}zarr.json" for name in ("a", "generations") for rest in ("", "snap/")]
    inside = [path for path in root.glob("*/snap/00000002/**/*") if path.is_file() and not path.is_symlink()]
    return sorted([*top, *documents, *inside])


def open_and_check(root: Path) -> list[str]:
    try:
        return list(GenerationReader(root / "generations", 2).problems())
    except GenerationError as error:
        return [str(error)]


def test_every_damaged_and_every_missing_file_is_named(root: Path) -> None:
    assert open_and_check(root) == []
    files = files_of_generation(root)
    assert len(files) == 27
    for path in files:
        good = path.read_bytes()
        is_contents = path.name.isdigit()
        flipped = bytearray(good)
        flipped[5 if is_contents else len(good) // 2] ^= 1
        for bad in (bytes(flipped), good[: len(good) // 2], b"", None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            problems = open_and_check(root)
            assert problems, (path, bad and len(bad))
            is_named = any(str(path) in problem for problem in problems)
            assert is_named or path.name == "MANIFEST.json", (path, problems)
            path.unlink(missing_ok=True)
            path.write_bytes(good)
    assert open_and_check(root) == []


def test_problems_lists_all_damage(root: Path) -> None:
    snap = root / "generations/snap/00000002"
    (root / "b/snap/00000002/layer.0/weight/c/1").unlink()
    (snap / "layer.0/zarr.json").write_text("{}")
    large = bytearray((snap / "large/c/0").read_bytes())
    large[100] ^= 1
    large[17 * MiB] ^= 1
    (snap / "large/c/0").write_bytes(large)
    seen: list[str] = []
    problems = list(GenerationReader(root / "generations").problems(lambda record: seen.append(record.key)))
    assert seen == list(BLOCKS)
    hidden = [
        re.sub(r"checksum [0-9a-f]{16}, expected [0-9a-f]{16}", "checksum S, expected S", text) for text in problems
    ]
    link, contents = root / "a/snap/00000002/layer.0/weight/c/1", root / "generations/snap/00000002/large/c/0"
    assert hidden == [
        f"a file is missing: '{link}', a link to '{root}/b/snap/00000002/layer.0/weight/c/1', does not exist. Name the "
        "paths of the run that wrote it, or open another generation (block 'layer.0/weight')",
        f"'{snap}/layer.0/zarr.json' is damaged: zarr_format, node_type, attributes has a wrong value",
        f"'{contents}' bytes 0 to 16777216: checksum S, expected S (block 'large')",
        f"'{contents}' bytes 16777216 to 18874368: checksum S, expected S (block 'large')",
    ]


def test_problems_name_damaged_documents_and_notes(root: Path) -> None:
    generations, drive = root / "generations", root / "a/snap/00000002"
    store_id = json.loads((generations / "STORE.json").read_text())["id"]
    (generations / "MANIFEST.json").unlink()
    (generations / "STORE.json").unlink()
    (generations / "zarr.json").write_text("[]")
    (generations / "snap/zarr.json").unlink()
    (drive / "OWNER.json").write_text("{}")
    document = json.loads((drive / "layer.0/weight/zarr.json").read_text())
    document["shape"], document["more"] = [7], 1
    (drive / "layer.0/weight/zarr.json").write_text(json.dumps(document))
    (drive / "bias/zarr.json").write_text("[" * 100_000)
    (drive / "bias/c/0").write_bytes(bytes(4097))
    (generations / "snap/00000002/large/c/0").unlink()
    expected = [
        f"'{generations}/STORE.json' is missing or damaged: it must name the store {store_id}",
        f"'{generations}/zarr.json' is damaged: zarr_format, node_type, attributes, consolidated_metadata has a "
        "wrong value",
        f"'{generations}/snap/zarr.json' is missing",
        f"'{drive}/OWNER.json' is missing or damaged: it must name the store {store_id}",
        f"'{drive}/layer.0/weight/zarr.json' is damaged: shape, more has a wrong value",
        f"'{drive}/bias/zarr.json' is damaged: it is not JSON",
        f"a file is missing: '{generations}/snap/00000002/large/c/0' does not exist. Name the paths of the run that "
        "wrote it, or open another generation (block 'large')",
    ]
    reader = GenerationReader(generations, 2)
    assert list(reader.problems(with_top=False)) == expected
    top = f"'{generations}/MANIFEST.json' is missing, which names the current generation"
    assert list(reader.problems()) == [top, *expected]
    document["shape"] = [300_000]
    (drive / "layer.0/weight/c/0").write_bytes(bytes(4097))
    size = f"'{drive}/layer.0/weight/c/0' has 4097 bytes instead of 241664 (block 'layer.0/weight')"
    (drive / "layer.0/weight/zarr.json").write_text(json.dumps(document))
    assert [text for text in reader.problems() if "weight" in text] == [
        f"'{drive}/layer.0/weight/zarr.json' is damaged: more has a wrong value",
        size,
    ]


def test_foreign_folders_and_wrong_lists_of_members_are_problems(root: Path) -> None:
    generations, drive = root / "generations", root / "a/snap/00000002"
    for folder in (generations, generations / "snap/00000002"):
        document = json.loads((folder / "zarr.json").read_text())
        document["consolidated_metadata"]["metadata"]["more"] = {}
        (folder / "zarr.json").write_text(json.dumps(document))
    for path in (drive, root / "b/snap/00000002"):
        StoreIdentity("f" * 32, root / "other").mark(path)
    missing = [
        f"block '{key}' has no array in '{drive}/{key}': '{drive}/{key}/zarr.json' is missing or damaged. Name the "
        "paths of the run that wrote it, or open another generation"
        for key in ("layer.0/weight", "bias")
    ]
    listing = f"'{generations}/snap/00000002/zarr.json' is damaged: consolidated_metadata has a wrong value"
    reader, seen = GenerationReader(generations), list[str]()
    assert list(reader.problems(lambda record: seen.append(record.key))) == [listing, *missing]
    assert seen == list(BLOCKS)
    with pytest.raises(GenerationError, match="has no array"):
        reader.read("bias", torch.empty(7, dtype=torch.bfloat16))


def test_reading_damaged_contents_is_refused(root: Path) -> None:
    path = root / "generations/snap/00000002/layer.0/m/c/0"
    contents = bytearray(path.read_bytes())
    contents[3] ^= 128
    path.write_bytes(contents)
    with pytest.raises(CorruptBlockError, match=r"'layer\.0/m' of generation 2 is damaged.*generations/snap") as caught:
        check(GenerationReader(root / "generations"), 2)
    assert caught.value.generation == 2
    path.write_bytes(contents[:4096])
    with pytest.raises(CorruptBlockError):
        check(GenerationReader(root / "generations"), 2)


def snapshots(root: Path) -> set[str]:
    return {str(folder.relative_to(root)) for folder in root.glob("*/snap/0*")}


def test_a_generation_is_removed_from_all_drives(root: Path) -> None:
    assert len(snapshots(root)) == 6
    remove_generation(root / "generations", 2)
    assert newest_first(root / "generations") == [1] and current_generation(root / "generations") == 1
    assert not any("00000002" in folder for folder in snapshots(root))
    check(GenerationReader(root / "generations"), 1)
    remove_generation(root / "generations", 1)
    assert not snapshots(root)
    assert current_generation(root / "generations") is None and list_generations(root / "generations") == []
    with pytest.raises(GenerationError, match=r"nothing was committed|generations: none"):
        remove_generation(root / "generations", 1)
    with make_store(root) as store:
        register(store)
        write(store, 5)
        store.commit().wait(60)
    check(GenerationReader(root / "generations"), 5)


def test_generation_with_a_damaged_manifest_can_be_removed(root: Path) -> None:
    (root / "generations/snap/00000002/MANIFEST.json").write_text("?")
    (root / "generations/MANIFEST.json").write_text("?")
    remove_generation(root / "generations", 2)
    assert len(snapshots(root)) == 3
    check(GenerationReader(root / "generations"), 1)


def test_removal_spares_open_stores_and_foreign_generations(root: Path) -> None:
    note = root / "a/snap/00000001/OWNER.json"
    foreign = json.loads(note.read_text())
    note.write_text(json.dumps({**foreign, "id": "0" * 32}))
    with make_store(root) as store:
        register(store)
        store.load(2)
        with pytest.raises(LockedError):
            remove_generation(root / "generations", 1)
    assert len(snapshots(root)) == 6
    remove_generation(root / "generations", 1)
    assert {name for name in snapshots(root) if "00000001" in name} == {"a/snap/00000001"}


def test_to_zarr_shows_every_block_in_its_shape(root: Path) -> None:
    reader = GenerationReader(root / "generations")
    group = reader.to_zarr()
    assert group.attrs["megatrain"] == {"format": 1, "generation": 2, "meta": {"times": 2}}
    assert sorted(name for name, _ in group["layer.0"].arrays()) == ["m", "weight"]
    for key, (_, tensor) in BLOCKS.items():
        array = group[key]
        assert array.shape == tuple(tensor.shape) and array.attrs["megatrain"]["key"] == key
        found = torch.from_numpy(np.ascontiguousarray(array[...])).view(tensor.dtype)
        assert torch.equal(found, tensor * 2), key
    assert np.array_equal(group["layer.0/m"][40:50, 7], (BLOCKS["layer.0/m"][1] * 2).numpy()[40:50, 7])
    with pytest.raises(ValueError, match="read-only"):
        group["large"][0] = 1


@pytest.mark.parametrize("bounds", [(0, 0), (0, 7), (5, 16 * MiB + 3), (16 * MiB, 18 * MiB), (17 * MiB, 18 * MiB)])
def test_a_range_of_a_block_is_read_verified(root: Path, bounds: tuple[int, int]) -> None:
    reader = GenerationReader(root / "generations")
    expected = (BLOCKS["large"][1] * 2).to(torch.uint8)
    assert torch.equal(reader.read_range("large", *bounds), expected[slice(*bounds)])


def test_damaged_piece_raises_and_others_stay_readable(root: Path) -> None:
    reader = GenerationReader(root / "generations")
    path = reader.files("large")[0].path
    with path.open("r+b") as file:
        file.seek(17 * MiB)
        file.write(b"\xff\xfe")
    with pytest.raises(CorruptBlockError, match="large"):
        reader.read_range("large", 18 * MiB - 1, 18 * MiB)
    assert reader.read_range("large", 0, 16 * MiB).numel() == 16 * MiB
    with pytest.raises(CorruptBlockError, match="large"):
        reader.to_zarr()["large"][-1]
    with pytest.raises(ValueError, match="bytes, not"):
        reader.read_range("large", 0, 18 * MiB + 1)


def test_block_with_a_wrong_checksum_count_is_damaged(root: Path) -> None:
    folder = root / "generations"
    manifest = read_manifest(folder)
    short = [replace(record, xxh3_64=record.xxh3_64[:-1]) for record in manifest.blocks]
    write_manifest(folder, replace(manifest, blocks=tuple(short)))
    reader = GenerationReader(folder)
    for key, (_, tensor) in BLOCKS.items():
        if tensor.numel():
            with pytest.raises(CorruptBlockError, match="expected none"):
                reader.read(key, torch.empty_like(tensor))


def test_current_generation_exists_throughout_a_removal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, num_looks = root / "generations", 0
    with make_store(root) as store:
        register(store)
        store.load()
        store.commit().wait(60)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            nonlocal num_looks
            result = call(*arguments, **options)
            assert current_generation(folder) in list_generations(folder)
            num_looks += 1
            return result

        return act

    for name in ("unlink", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    remove_generation(folder, 3)
    assert num_looks > 2 and current_generation(folder) == 2
