"""The programs in examples/python match the losses of the same programs without megatrain, and need less RAM."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oracles.tiered_run import QUICKSTART
from processes import embed_examples, warm

ROOT = Path(__file__).parents[2]
#: Relative loss difference after 8 updates. torch's fp32 kernels and this project's kernels round differently.
TOLERANCE = 1e-5
#: Bytes per parameter that the plain program holds in memory for data that the example keeps in the store.
STATE_BYTES = {"pytorch_optimizer": 8, "pytorch_offload": 16, "lightning_offload": 16}


@dataclass(frozen=True)
class Runs:
    """Results that one example printed and weights that it saved, by name of the run."""

    by_name: dict[str, dict[str, Any]]
    weights: dict[str, dict[str, torch.Tensor]]

    def losses(self, name: str) -> list[str]:
        losses: list[str] = self.by_name[name]["losses"]
        return losses


@functools.cache
def runs_of(name: str) -> Runs:
    """Run every variant of an example. A separate process resumes the stopped run, so it can only use saved state."""
    with tempfile.TemporaryDirectory() as folder:
        lines = start(name, folder, "plain", "in_ram", "unbroken", "stopped") + start(name, folder, "resumed")
        weights = {which: saved_weights(Path(folder, which)) for which in ("plain", "in_ram", "unbroken", "broken")}
    return Runs({line["run"]: line for line in lines}, weights)


def start(name: str, folder: str, *runs: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/processes/embed_examples.py"), name, folder, *runs]
    done = warm.run(command, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "dead run" not in done.stderr, "a store was not closed"
    return [json.loads(line) for line in done.stdout.splitlines()]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the last checkpoint that a program wrote."""
    for name, key in (("checkpoint.pt", "model"), ("final.ckpt", "state_dict")):
        if (folder / name).exists():
            found: dict[str, torch.Tensor] = torch.load(folder / name)[key]
            return found
    raise AssertionError(sorted(folder.iterdir()))


@pytest.fixture(params=embed_examples.PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("lightning"):
        pytest.importorskip("lightning")
    return str(request.param)


def num_parameters() -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART))
    return sum(parameter.numel() for parameter in model.parameters())


def test_losses_match_the_plain_program(name: str) -> None:
    runs = runs_of(name)
    plain, tiered = ([float(loss) for loss in runs.losses(which)] for which in ("plain", "unbroken"))
    assert len(plain) >= 8
    assert tiered == pytest.approx(plain, rel=TOLERANCE)
    assert plain[-1] < plain[0] - 0.2


def test_losses_and_weights_are_bit_identical_to_all_in_ram(name: str) -> None:
    runs = runs_of(name)
    assert runs.losses("unbroken") == runs.losses("in_ram")
    assert_same_bits(runs.weights["unbroken"], runs.weights["in_ram"])


def test_stopped_example_resumes_bitwise_equal(name: str) -> None:
    runs = runs_of(name)
    assert len(runs.losses("stopped")) == len(runs.losses("unbroken")) // 2
    assert runs.losses("stopped") + runs.losses("resumed") == runs.losses("unbroken")
    assert_same_bits(runs.weights["broken"], runs.weights["unbroken"])


def test_plain_program_exceeds_the_memory(name: str) -> None:
    runs = runs_of(name)
    for which in ("unbroken", "stopped", "resumed"):
        run = runs.by_name[which]
        assert 0 < run["high_water_bytes"] <= run["ram_bytes"] < STATE_BYTES[name] * num_parameters()
    assert "ram_bytes" not in runs.by_name["plain"]
    assert runs.by_name["in_ram"]["high_water_bytes"] > runs.by_name["unbroken"]["ram_bytes"]


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, numbers in expected.items():
        assert torch.equal(found[name].view(torch.int32), numbers.view(torch.int32)), name


def test_example_adds_at_most_five_lines(name: str) -> None:
    text = embed_examples.source(name)
    assert 0 < len(embed_examples.marked_lines(text)) <= 5
    assert "megatrain" not in embed_examples.plain(text), "a line that was added is not marked"
