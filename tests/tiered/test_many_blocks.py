"""Stores with many blocks: the work of one call does not grow with the number of blocks."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tiered import CorruptBlockError, GenerationError, GiB, MiB, NvmeTier, RamTier, TieredStore
from tiered.durable import commit

NUM_BLOCKS = 300  # more than the store reads in one batch
KEYS = [f"{number // 100}/{number}" for number in range(NUM_BLOCKS)]
ROOT = "snap/00000001"


def num_calls_of_register(store: TieredStore, key: str, home: str) -> int:
    """Return the number of Python and C function calls that one ``register`` makes."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        store.register(key, (8,), torch.float32, home=home)
    finally:
        sys.setprofile(None)
    return num_calls


def test_registration_time_is_independent_of_block_count(tmp_path: Path) -> None:
    with TieredStore([RamTier(GiB, pin_memory=False), NvmeTier([tmp_path], GiB)]) as store:
        for home in ("ram", "nvme"):
            for number in range(10):
                store.register(f"{home}.few.{number}", (8,), torch.float32, home=home)
            of_few = num_calls_of_register(store, f"{home}.few", home)
            for number in range(200):
                store.register(f"{home}.many.{number}", (8,), torch.float32, home=home)
            assert of_few <= num_calls_of_register(store, f"{home}.many", home) <= of_few + 20


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store with one commit. Its blocks are small, and their home is RAM."""
    folder = tmp_path_factory.mktemp("original")
    with ram_store(folder) as store:
        store.commit().wait(250)
    return folder


@pytest.fixture
def committed(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder ``original`` that a test may change."""
    return shutil.copytree(original, tmp_path / "copy", symlinks=True)


def ram_store(folder: Path) -> TieredStore:
    store = TieredStore([RamTier(16 * MiB, pin_memory=False)], path=str(folder))
    for number, key in enumerate(KEYS):
        store.put(key, torch.full((number % 3 + 1, 3), float(number)))
    return store


def opened(folder: Path) -> TieredStore:
    return TieredStore.open(str(folder), [RamTier(16 * MiB, pin_memory=False)])


@contextmanager
def counted_opens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Yield how often ``os.open`` opens each path, relative to a folder."""
    counts: Counter[str] = Counter()
    os_open = os.open

    def count(path: Any, *arguments: Any, **options: Any) -> int:
        counts[os.path.relpath(os.fspath(path), folder)] += 1
        return os_open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", count)
        yield counts


def test_opening_opens_one_file_per_block(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_opens(committed / ROOT, monkeypatch) as counts, opened(committed) as store:
        assert [(spec.key, spec.home) for spec in store.blocks()] == [(key, "ram") for key in KEYS]
        for number, key in enumerate(KEYS):
            assert torch.equal(store[key], torch.full((number % 3 + 1, 3), float(number))), key
    of_blocks = {path: count for path, count in counts.items() if re.match(r"\d+/", path)}
    assert of_blocks == {f"{key}/c/0": 1 for key in KEYS}


def test_damage_error_names_the_first_damaged_block(committed: Path) -> None:
    for number in (298, 260, 200):
        path = committed / ROOT / KEYS[number] / "c/0"
        contents = bytearray(path.read_bytes())
        contents[5] ^= 16
        path.write_bytes(contents)
        with pytest.raises(CorruptBlockError, match=f"'{KEYS[number]}'.*{path}"):
            opened(committed)


@pytest.mark.parametrize("number", [1, NUM_BLOCKS - 2])
def test_a_missing_or_short_file_names_the_block(number: int, committed: Path) -> None:
    path = committed / ROOT / KEYS[number] / "c/0"
    os.truncate(path, 4)
    with pytest.raises(CorruptBlockError, match=f"'{KEYS[number]}'"):
        opened(committed)
    path.unlink()
    with pytest.raises(GenerationError, match=f"'{KEYS[number]}' is missing: '{path}'"):
        opened(committed)


def test_opening_needs_no_array_metadata(committed: Path) -> None:
    """If a block has one file, the checksum in the manifest suffices to verify its contents."""
    for key in KEYS:
        (committed / ROOT / key / "zarr.json").write_text("{")
    with opened(committed) as store:
        assert float(store[KEYS[-1]][0, 0]) == NUM_BLOCKS - 1


def test_manifest_checksum_ignores_json_formatting(committed: Path) -> None:
    """Earlier versions formatted the same document differently. Only its contents count."""
    path = committed / ROOT / "MANIFEST.json"
    document = json.loads(path.read_text())
    assert path.read_text() == json.dumps(document, sort_keys=True)
    path.write_text(json.dumps(document, indent=1))
    with opened(committed) as store:
        assert len(store) == NUM_BLOCKS
    path.write_text(path.read_text().replace('"home": "ram"', '"home": "rat"', 1))
    with pytest.raises(GenerationError, match="damaged: its checksum"):
        opened(committed)
    path.write_text(json.dumps(document, sort_keys=True).replace('"home": "ram"', '"home": "rat"', 1))
    with pytest.raises(GenerationError, match="damaged: its checksum"):
        opened(committed)


def test_store_folder_is_identified_by_its_attributes(committed: Path) -> None:
    """``zarr.json`` also lists the members. This list grows with the blocks, and is not read to identify the folder."""
    path = committed / "zarr.json"
    document = json.loads(path.read_text())
    assert len(document["consolidated_metadata"]["metadata"]) == NUM_BLOCKS + 4, "and the groups above them"
    path.write_text(json.dumps(dict(reversed(document.items()))))  # the attributes now follow the members
    with opened(committed) as store:
        store.commit().wait(250)
    assert json.loads(path.read_text()) == document


def test_commit_work_is_linear_in_the_number_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0
    array_bytes = commit.array_bytes

    def count(spec: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        return array_bytes(spec)

    monkeypatch.setattr(commit, "array_bytes", count)
    with ram_store(tmp_path) as store:
        store.commit().wait(250)
    assert NUM_BLOCKS <= num_calls <= 10 * NUM_BLOCKS
