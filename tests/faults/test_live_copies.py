"""Copies of a live run, made file by file as with ``cp -r`` or ``rsync``, can be resumed.

Run the long test with ``pytest -m slow tests/faults/test_live_copies.py``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from processes.saved_run import NVME, ON_NVME, SavedRun, end, make_run

pytestmark = pytest.mark.fault
CONFIGS: dict[str, dict[str, Any]] = {
    "RAM": {"top": 'run_name = "copied"'},
    "NVMe": {"placement": ON_NVME, "more": NVME, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("made") / "w")


def whole_steps(run: SavedRun) -> dict[int, int]:
    """Return the step of each complete, undamaged generation, by number, without the program's own code."""
    found = {}
    top = run.out / "checkpoints"
    for folder in sorted(top.glob("snap/*")):
        try:
            body = json.loads((folder / "MANIFEST.json").read_text())["body"]
            for block in body["blocks"]:
                place = Path(os.path.normpath(top / block["location"]))
                number_of = {int(path.name): path for path in (place / "c").iterdir()}
                data = b"".join(number_of[number].read_bytes() for number in range(len(number_of)))[: block["nbytes"]]
                (expected,) = block["xxh3_64"]  # one checksum per 16 MiB of a block, and all blocks here are smaller
                if xxhash.xxh3_64_hexdigest(data) != expected:
                    raise ValueError(block["key"])
            found[int(folder.name)] = body["meta"]["step"]
        except (OSError, ValueError, KeyError):
            continue
    return found


def copies_of_live_runs(made: SavedRun, folder: Path, count: int, kind: str) -> Iterator[tuple[SavedRun, bytes]]:
    """Yield copies that were made while a run was training, each with the final weights of that run."""
    chance, number = random.Random(1), 0
    while number < count:
        source = made.copy(folder / f"live{number}")
        process = source.start(steps=40, **CONFIGS[kind])
        copies: list[SavedRun] = []
        try:
            while process.poll() is None and number + len(copies) < count:
                target = folder / f"copy{number + len(copies)}"
                if not list((source.out / "checkpoints").glob("snap/*/MANIFEST.json")):
                    time.sleep(0.01)
                    continue
                # Files can vanish while cp reads them. It reports these files and copies the others.
                subprocess.run(["cp", "-r", source.folder, target], capture_output=True, check=False)
                if process.poll() is None:
                    copies.append(SavedRun(target))
                else:
                    shutil.rmtree(target)
                time.sleep(chance.uniform(0, 0.3))
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
        finally:
            end(process)
        final = (source.out / "final/model.safetensors").read_bytes()
        for copy in copies:
            yield copy, final
            shutil.rmtree(copy.folder)
        number += len(copies)
        shutil.rmtree(source.folder)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "count", [1, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["some", "many"]
)
def test_copies_of_a_live_run_resume_from_the_newest_whole_checkpoint(
    made: SavedRun, kind: str, count: int, tmp_path: Path
) -> None:
    seen: Counter[str] = Counter()
    for copy, final in copies_of_live_runs(made, tmp_path, count, kind):
        config = copy.folder / "run.toml"
        whole, top = whole_steps(copy), copy.out / "checkpoints/MANIFEST.json"
        there = sorted(int(path.parent.name) for path in copy.out.glob("checkpoints/snap/*/MANIFEST.json"))
        named = json.loads(top.read_text())["body"]["generation"] if top.exists() else None
        verified = copy.call("ckpt", "verify", copy.out).stdout if there else ""
        result = copy.call("run", config)
        if not whole:
            seen["none whole"] += 1
            assert result.exit_code == 1 or not there, result.output
            continue
        newest = whole[max(whole)]
        assert f"a run continues from step {newest}\n" in verified
        found = re.search(r"continuing after step (\d+) of|is done, all (\d+) steps", result.output)
        assert found is not None and int(found[1] or found[2]) == newest, (there, whole, named, result.output)
        assert result.exit_code == 0, result.output
        is_stale = named != there[-1]
        assert (("and the newest generation is" in result.output) or ("is missing" in result.output)) == is_stale
        assert ("note: " in verified) == is_stale
        seen["older top file" if is_stale else "top file of the newest"] += 1
        seen["passed over"] += max(whole) != there[-1]
        assert (copy.out / "final/model.safetensors").read_bytes() == final, "not the bits of the run that was copied"
    print(dict(seen))
    assert sum(seen.values()) - seen["passed over"] == count
    assert count == 1 or seen["none whole"] < count / 2
