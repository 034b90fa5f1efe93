"""liger-kernel's kernels without a GPU, in Triton's interpreter. Needs both packages.

The interpreter must be selected before a process first imports Triton, so the tests run in a child process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.liger_packages import extend_triton_interpreter
from megatrain.config import combinations
from megatrain.converters.liger import apply_liger_kernels, check_liger_kernels
from megatrain.converters.spec import build_graph
from megatrain.plan import traced
from oracles.families import packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import config_text, run_config, write_tiny_model

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_PACKAGES = find_spec("triton") is not None and find_spec("liger_kernel") is not None
pytestmark = pytest.mark.skipif(not HAS_PACKAGES, reason="needs triton and liger-kernel")
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that the first test starts")


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> None:
    if IS_INTERPRETED and HAS_PACKAGES:
        extend_triton_interpreter()


@pytest.mark.skipif(IS_INTERPRETED, reason="starts the process of the others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_this_file_passes_in_the_triton_interpreter(which: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "--timeout=500"]
    command += [f"--basetemp={tmp_path / 'run'}", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def step(family: str, batches: Any, *, liger: bool, kept: Any = ()) -> tuple[float, Any, dict[str, Tensor]]:
    """Run a tiny model in fp32. Return the loss, the evaluation and the gradients."""
    config = tiny_config(family)
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    if liger:
        check_liger_kernels(graph.model, torch.device("cuda"))
        apply_liger_kernels(graph.model, include_mlps=True)
    runner = layer_runner(graph, access, device="cpu", head_rows=8, kept=kept)
    evaluation = runner.evaluate(batches)
    loss = runner.forward_backward(batches, seed=1).loss
    return loss, evaluation, access.finish()


@interpreted
@pytest.mark.parametrize(
    ("family", "batches"),
    [
        ("llama", packed_batches()),
        *(
            pytest.param(family, padded_batches(), marks=pytest.mark.slow)
            for family in ("llama", "qwen2", "qwen3", "gemma2")
        ),
    ],
)
def test_step_matches_one_without_liger(family: str, batches: list[dict[str, Tensor]]) -> None:
    """The models have norms before and in attention, SwiGLU, GeGLU and biases. Transformers' own step also matches."""
    found, expected = (step(family, batches, liger=liger) for liger in (True, False))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert sum(found[1].terms) == pytest.approx(sum(expected[1].terms), rel=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert (found[2][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    plain = train_step(build_model(tiny_config(family)), batches, seed=1)
    assert found[0] == pytest.approx(plain.loss, rel=2e-6)
    assert found[2].keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert (found[2][name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@interpreted
def test_kept_graphs_are_bit_identical_to_a_recompute() -> None:
    """Kernels overwrite their saved tensors with gradients. This is safe because each graph is used only once."""
    batches = packed_batches()[:1]
    kept, again = (step("llama", batches, liger=True, kept=which) for which in (range(99), ()))
    assert kept[0] == again[0] and kept[2].keys() == again[2].keys()
    assert all(torch.equal(kept[2][name], gradient) for name, gradient in again[2].items())


PLACEMENTS: dict[str, dict[str, Any]] = {
    "RAM": {"nvme": 0},
    "NVMe": {"placement": 'weights = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'},
    "GPU": {"nvme": 0, "gpu": "6MiB"},
}


@interpreted
@pytest.mark.slow  # tests/gpu/test_liger.py has the same test with stand-ins of the kernels
def test_placements_are_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "_check_kernels", lambda config: iter(()))
    monkeypatch.setattr(
        traced, "check_liger_kernels", lambda model, device: check_liger_kernels(model, torch.device("cuda"))
    )
    model = write_tiny_model(tmp_path / "model")
    runs = {}
    for name, tables in {**PLACEMENTS, "plain": {"nvme": 0}}.items():
        text = config_text(tmp_path / name, model, **tables).replace("max_length = 64", "max_length = 8")
        text = text.replace("batch_size = 2\ngradient_accumulation_steps = 3", "batch_size = 1")
        if name != "plain":
            text = text.replace("[data]", "use_liger_kernel = true\n[data]", 1)
        runs[name] = run_config(text, tmp_path / name, num_steps=2)
    plain = runs.pop("plain")
    for run in runs.values():
        run.assert_as_planned()
        run.assert_same(runs["RAM"])
    assert runs["RAM"].losses == pytest.approx(plain.losses, rel=1e-5)
    assert runs["RAM"].digests != plain.digests, "other kernels round in other places"
