from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiered import GenerationError
from tiered.durable.manifest import (
    MANIFEST_NAME,
    BlockRecord,
    Manifest,
    current_generation,
    forget_current,
    forget_generation,
    generation_folder,
    list_generations,
    make_current,
    manifest_text,
    newest_first,
    read_manifest,
    store_id_in_manifests,
    top_problem,
    top_text,
    write_manifest,
)
from tiered.file_io import checksum


def sample(generation: int) -> Manifest:
    block = BlockRecord(
        "layer.0/weight", (3, 4), "bfloat16", "nvme", 24, ("0123456789abcdef",), "snap/1/layer.0/weight"
    )
    meta = {"step": generation * 10, "lr": 0.1, "names": ["a", None]}
    return Manifest(generation, (block,), meta, {"nvme": ("/drive0/run", "/drive1/run")}, "0123456789abcdef" * 2)


def test_round_trip(tmp_path: Path) -> None:
    write_manifest(tmp_path, sample(3))
    assert read_manifest(tmp_path) == sample(3)
    assert current_generation(tmp_path) == 3


def test_the_last_commit_is_current_and_older_ones_stay_readable(tmp_path: Path) -> None:
    for generation in (1, 2, 12):
        write_manifest(tmp_path, sample(generation))
    assert list_generations(tmp_path) == [1, 2, 12]
    assert read_manifest(tmp_path).generation == 12
    assert read_manifest(tmp_path, 2).meta["step"] == 20
    forget_generation(tmp_path, 1)
    assert list_generations(tmp_path) == [2, 12]
    with pytest.raises(GenerationError) as caught:
        read_manifest(tmp_path, 1)
    assert str(caught.value) == (
        f"no generation 1 in '{tmp_path}' ('{tmp_path}/snap/00000001/MANIFEST.json' does not exist). Existing "
        "generations: 2, 12"
    )


def test_manifest_texts_are_stable() -> None:
    """Programs of other versions read these texts."""
    assert top_text(12) == '{"body": {"generation": 12}, "format": 1, "xxh3_64": "HASH"}'.replace(
        "HASH", checksum(b'{"generation": 12}')
    )
    body = (
        '{"blocks": [{"dtype": "bfloat16", "home": "nvme", "key": "layer.0/weight", "location": '
        '"snap/1/layer.0/weight", "nbytes": 24, "shape": [3, 4], "xxh3_64": ["0123456789abcdef"]}], "generation": 3, '
        '"meta": {"lr": 0.1, "names": ["a", null], "step": 30}, "paths": {"nvme": ["/drive0/run", "/drive1/run"]}, '
        '"store": "0123456789abcdef0123456789abcdef"}'
    )
    seal = checksum(body.encode())
    assert manifest_text(sample(3)) == f'{{"body": {body}, "format": 1, "xxh3_64": "{seal}"}}'


def test_problem_of_the_top_manifest_is_complete(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    assert top_problem(tmp_path) is None
    make_current(tmp_path, 5)
    missing = f"names generation 5, but '{tmp_path}/snap/00000005/MANIFEST.json' is missing"
    assert top_problem(tmp_path) == f"'{path}' {missing}, and no generation exists"
    with pytest.raises(GenerationError, match=r"no generation 5 in .* Existing generations: none"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, sample(3))
    assert top_problem(tmp_path) is None
    path.unlink()
    assert top_problem(tmp_path) == f"'{path}' is missing, and the newest generation is 3"


def test_store_id_comes_from_the_newest_readable_manifest(tmp_path: Path) -> None:
    assert store_id_in_manifests(tmp_path) is None
    for generation, store in ((1, "1" * 32), (2, ""), (3, "3" * 32)):
        write_manifest(tmp_path, replace(sample(generation), store=store))
    assert store_id_in_manifests(tmp_path) == "3" * 32
    (generation_folder(tmp_path, 3) / MANIFEST_NAME).write_text("{")
    assert store_id_in_manifests(tmp_path) is None, "the newest readable one has no id"
    (generation_folder(tmp_path, 2) / MANIFEST_NAME).write_text("{")
    assert store_id_in_manifests(tmp_path) == "1" * 32


def test_opening_candidates_are_listed_despite_damage(tmp_path: Path) -> None:
    for generation in (1, 2, 12):
        write_manifest(tmp_path, sample(generation))
    assert newest_first(tmp_path) == [12, 2, 1]
    assert top_problem(tmp_path) is None
    make_current(tmp_path, 2)
    assert newest_first(tmp_path) == [12, 2, 1], "the top file may be older: each generation with a manifest is whole"
    assert top_problem(tmp_path) == f"'{tmp_path / MANIFEST_NAME}' names generation 2, and the newest generation is 12"
    assert read_manifest(tmp_path).generation == 12
    (tmp_path / MANIFEST_NAME).write_text("{")
    assert newest_first(tmp_path) == [12, 2, 1]
    forget_current(tmp_path)
    assert newest_first(tmp_path) == [12, 2, 1] and current_generation(tmp_path) is None
    (generation_folder(tmp_path, 12) / MANIFEST_NAME).write_text("{")
    assert newest_first(tmp_path) == [12, 2, 1], "the reader that opens it detects this"


def test_manifests_of_the_first_version_have_no_paths(tmp_path: Path) -> None:
    write_manifest(tmp_path, sample(1))
    path = generation_folder(tmp_path, 1) / MANIFEST_NAME
    body = json.loads(path.read_text())["body"]
    del body["paths"], body["store"]
    seal = checksum(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"format": 1, "xxh3_64": seal, "body": body}))
    found = read_manifest(tmp_path)
    assert (found.paths, found.store, found.blocks) == ({}, "", sample(1).blocks)


def test_directory_without_a_commit_has_no_generations(tmp_path: Path) -> None:
    assert current_generation(tmp_path) is None
    assert list_generations(tmp_path) == []
    with pytest.raises(GenerationError, match="nothing was committed"):
        read_manifest(tmp_path)


def test_crash_at_any_file_operation_leaves_the_old_or_the_new_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, sample(1))
    real_fsync, real_replace = os.fsync, os.replace

    class Crash(Exception):
        pass

    for crash_at in range(20):
        calls = iter([None] * crash_at)

        def count(calls: Iterator[None] = calls) -> None:
            if next(calls, "end") == "end":
                raise Crash

        def fsync(fd: int) -> None:
            count()
            real_fsync(fd)

        def replace(source: Path, target: Path) -> None:
            count()
            real_replace(source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        try:
            write_manifest(tmp_path, sample(2))
        except Crash:
            assert read_manifest(tmp_path) in (sample(1), sample(2))
        else:
            assert read_manifest(tmp_path) == sample(2)
            return
    pytest.fail("the commit never completed")


def test_any_flipped_bit_is_detected(tmp_path: Path) -> None:
    write_manifest(tmp_path, sample(1))
    path = generation_folder(tmp_path, 1) / MANIFEST_NAME
    good = path.read_bytes()
    num_detected = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        try:
            found = read_manifest(tmp_path)
        except GenerationError:
            num_detected += 1
        else:
            assert found == sample(1), "a flip that changes nothing, e.g. in white space"
    assert num_detected > 0.95 * len(good)


def test_newer_format_garbage_and_strange_contents_are_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, sample(1))
    path = generation_folder(tmp_path, 1) / MANIFEST_NAME
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(GenerationError, match="upgrade"):
        read_manifest(tmp_path)
    for garbage in ("", "[]", "{}", "null", '{"format": 1, "xxh3_64": "", "body": 3}'):
        path.write_text(garbage)
        with pytest.raises(GenerationError):
            read_manifest(tmp_path)
    other = generation_folder(tmp_path, 7)
    other.mkdir(parents=True)
    write_manifest(tmp_path, sample(2))
    (other / MANIFEST_NAME).write_bytes((generation_folder(tmp_path, 2) / MANIFEST_NAME).read_bytes())
    with pytest.raises(GenerationError, match="describes generation 2"):
        read_manifest(tmp_path, 7)
