"""examples/embed/fsdp2.py on two gloo ranks: losses as of the plain program, also when it is stopped and resumed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import embed_examples, fsdp2_example, warm

ROOT = Path(__file__).parents[2]
#: Kernels of torch and ours round differently in fp32; so much of a loss it was after 6 updates.
TOLERANCE = 1e-5


def run(which: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return what each of two ranks printed about a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(fsdp2_example.__file__)), which, "--output", str(folder), *options]
    children = [
        warm.Popen(
            command,
            env={**os.environ, **paths, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    said = [child.communicate(timeout=240) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    return [json.loads(out.decode().splitlines()[-1]) for out, _ in said]


def test_two_ranks_with_fsdp2(tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    plain = run("plain", tmp_path / "plain")
    stopped = run("tiered", tmp_path / "tiered", "--steps", "3")
    resumed = run("tiered", tmp_path / "tiered", "--resume")
    for rank in (0, 1):
        losses = stopped[rank]["losses"] + resumed[rank]["losses"]
        expected = [float(loss) for loss in plain[rank]["losses"]]
        assert [float(loss) for loss in losses] == pytest.approx(expected, rel=TOLERANCE)
        assert len(expected) == 6 and expected[-1] < expected[0] - 0.2
        for found in (stopped[rank], resumed[rank]):
            assert 0 < found["high_water_bytes"] <= found["ram_bytes"]
    assert plain[0]["losses"] != plain[1]["losses"]
    text = embed_examples.source(fsdp2_example.NAME)
    assert len(embed_examples.marked_lines(text)) <= 4
    assert "megatrain" not in embed_examples.plain(text), "a line that was added is not marked"
