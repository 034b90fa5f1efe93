"""Runs that are killed or stopped at any instant, and then restarted, are bit-identical to an undisturbed run.

The short test is part of every test run. The long test prints the phases that the signals hit:

    pytest -m slow -s tests/faults/test_kills.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processes.kills import AIMS

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(),
    reason="a CUDA build of torch starts threads for autograd, which the plan uses: its process cannot fork",
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with 0.82 M parameters and fixed random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source, folder = ROOT / "examples/quickstart/model", tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def send_signals(model: Path, folder: Path, *, kills: int, stops: int, seed: int, per_run: int = 12) -> dict[str, Any]:
    """Run ``processes.kills`` in a process with only one thread, which can fork safely. Return its figures."""
    result = folder / "result.json"
    numbers = ["--kills", str(kills), "--stops", str(stops), "--seed", str(seed), "--per-run", str(per_run)]
    paths = ["--model", str(model), "--scratch", str(folder), "--result", str(result)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-m", "processes.kills", *numbers, *paths],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(result.read_text())
    assert figures["problems"] == []
    return figures


@pytest.mark.fault
def test_killed_and_stopped_runs_end_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    figures = send_signals(model, tmp_path, kills=2, stops=1, seed=1, per_run=1)
    assert len(figures["SIGKILL"]["hits"]) >= 2 and figures["SIGKILL"]["runs"] >= 2  # of the first two placements
    assert len(figures["SIGTERM"]["hits"]) >= 1


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)  # for a loaded machine; a child that hangs is killed much earlier
def test_hundreds_of_kills_in_every_phase(model: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("MEGATRAIN_TIER_KILL_SEED", "2"))
    figures = send_signals(
        model, tmp_path, kills=int(os.environ.get("MEGATRAIN_TIER_KILLS", "240")), stops=40, seed=seed
    )
    hits = figures["SIGKILL"]["hits"]
    assert len(hits) >= 200
    for phase in ("starting", "step", *AIMS):
        assert any(phase in where for where in hits), phase
