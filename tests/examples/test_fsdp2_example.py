"""On two gloo ranks, examples/python/fsdp2.py matches the losses of the plain program, even when resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import embed_examples, fsdp2_example
from processes.ranks import start_ranks

#: Relative loss difference after 6 updates. torch's fp32 kernels and this project's kernels round differently.
TOLERANCE = 1e-5


def run(which: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run the program on two ranks, and return the JSON object that each rank printed last."""
    ranks = start_ranks([[fsdp2_example.__file__, which, "--output", folder, *options]] * 2)
    said = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_fsdp2_example_matches_the_plain_program_on_two_ranks(tmp_path: Path) -> None:
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
