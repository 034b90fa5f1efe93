"""Two ranks with the state of each in folders of its own: what one process with both halves computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain.machine.machine import total_ram_bytes
from processes import two_ranks, warm

ROOT = Path(__file__).resolve().parents[3]


def test_two_ranks_and_one(tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    script = Path(two_ranks.__file__)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    children = [
        warm.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said = [child.communicate(timeout=120)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    results = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in (0, 1)]
    weights = [torch.load(tmp_path / f"weights{rank}.pt", weights_only=True) for rank in (0, 1)]
    module = two_ranks.make()
    norms = []
    with megatrain.open_store(ram="8MiB") as store:
        optimizer = two_ranks.optimizer_of(module, store)
        for step in range(4):
            for rank in (0, 1):
                (two_ranks.loss_of(module, step, rank) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
    for rank in (0, 1):
        assert results[rank]["norms"] == norms and results[rank]["resumed"]
        assert results[rank]["path"] == str(tmp_path / "store" / f"rank{rank}")
        assert results[rank]["ram"] == total_ram_bytes() // 2 // 100
        assert all(torch.equal(one, weights[rank][name]) for name, one in module.state_dict().items())
        parallel, offloaded = results[rank]["refused"]
        assert "DistributedDataParallel around an offloaded module" in parallel and "averaged" in offloaded
