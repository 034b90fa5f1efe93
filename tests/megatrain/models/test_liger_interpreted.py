"""liger-kernel's own kernels without a GPU: run by Triton's interpreter, and compiled. Needs both packages.

The interpreter must be asked for before a process first imports Triton, so those tests run in one of their own.
"""

from __future__ import annotations

import importlib
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

from fakes.liger_packages import complete_interpreter
from megatrain.config import problems
from megatrain.engine.forward import LayerRunner
from megatrain.models.graph import build_graph
from megatrain.models.liger import _PLAIN, LigerCrossEntropy, apply_liger_kernels, check_liger_kernels
from megatrain.plan import planner
from oracles.families import packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.tiered_run import config_text, run_config, write_tiny_model

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_PACKAGES = find_spec("triton") is not None and find_spec("liger_kernel") is not None
pytestmark = pytest.mark.skipif(not HAS_PACKAGES, reason="needs triton and liger-kernel")
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that the first test starts")


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> None:
    if IS_INTERPRETED and HAS_PACKAGES:
        complete_interpreter()


@pytest.mark.skipif(IS_INTERPRETED, reason="starts the process of the others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", which, "--timeout=500"]
    command += [f"--basetemp={tmp_path / 'run'}", __file__]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def logits_and_labels(num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_columns)
    leaf = (4 * torch.randn(7, num_columns, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(num_columns, (7,), generator=generator)
    labels[3] = -100
    return leaf, labels


@interpreted
@pytest.mark.parametrize("num_columns", [5, 128, 1000, 40_000])  # the last: more than the kernel takes at a time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(num_columns: int, dtype: torch.dtype) -> None:
    leaf, labels = logits_and_labels(num_columns, dtype)
    logits = leaf * 1.0
    loss = LigerCrossEntropy()(logits, labels, 50, -100)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = torch.nn.functional.cross_entropy(leaf.float(), labels, reduction="sum") / 50
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    assert loss.dtype == torch.float32 and gradient.data_ptr() == logits.data_ptr()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # The interpreter cuts fp32 off where a GPU rounds it to bfloat16.
    assert torch.allclose(gradient, expected_gradient, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-9)
    assert not gradient[3].any()


@interpreted
def test_without_a_gradient_logits_stay() -> None:
    leaf, labels = logits_and_labels(300, torch.float32)
    logits, labelled = leaf.detach().clone(), labels != -100
    loss = LigerCrossEntropy()(logits, labels, 1, -100)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(leaf, labels, reduction="sum").item())
    assert torch.equal(logits[labelled], leaf.detach()[labelled])
    assert not logits[~labelled].any(), "liger clears rows without a label all the same"


def step(family: str, batches: Any, *, liger: bool, kept: Any = ()) -> tuple[float, Any, dict[str, Tensor]]:
    """Return loss, evaluation and gradients of a tiny model, in fp32."""
    config = tiny_config(family)
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    if liger:
        check_liger_kernels(graph.model, torch.device("cuda"))
        apply_liger_kernels(graph.model, with_mlps=True)
    kernel = LigerCrossEntropy() if liger else None
    options: dict[str, Any] = {"head_rows": 8, "cross_entropy": kernel, "kept": kept}
    runner = LayerRunner(graph, access, device="cpu", compute_dtype=torch.float32, **options)
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
def test_a_step_is_that_without_it(family: str, batches: list[dict[str, Tensor]]) -> None:
    """Norms before and in attention, SwiGLU, GeGLU, biases, logits that the model caps before its loss."""
    found, expected = (step(family, batches, liger=liger) for liger in (True, False))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert sum(found[1].terms) == pytest.approx(sum(expected[1].terms), rel=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert (found[2][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@interpreted
def test_kept_graphs_have_the_bits_of_a_recompute() -> None:
    """Kernels write gradients over what they saved; a graph is used once, so that nobody reads it afterwards."""
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
@pytest.mark.slow
def test_placement_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_check_kernels", lambda config: iter(()))
    monkeypatch.setattr(
        planner, "check_liger_kernels", lambda model, device: check_liger_kernels(model, torch.device("cuda"))
    )
    model = write_tiny_model(tmp_path / "model")
    runs = {}
    for name, tables in {**PLACEMENTS, "plain": {"nvme": 0}}.items():
        text = config_text(tmp_path / name, model, **tables).replace("max_length = 64", "max_length = 12")
        text = text.replace("accumulation_steps = 3", "accumulation_steps = 2")
        if name != "plain":
            text = text.replace("[data]", "use_liger_kernel = true\n[data]", 1)
        runs[name] = run_config(text, tmp_path / name, num_steps=2)
    plain = runs.pop("plain")
    for run in runs.values():
        run.assert_as_planned()
        run.assert_same(runs["RAM"])
    assert runs["RAM"].losses == pytest.approx(plain.losses, rel=1e-5)
    assert runs["RAM"].digests != plain.digests, "other kernels round in other places"


@pytest.mark.skipif(IS_INTERPRETED, reason="compiles")
@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_as_it_is_launched_and_adds_in_a_fixed_order(
    dtype: str, has_gradient: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a device of compute capability 9.0, with the arguments that a launch gives it: no atomics in its code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.backends.compiler")
    kernel = LigerCrossEntropy()._kernel
    constants = {**_PLAIN, "HAS_GRADIENTS": has_gradient, "BLOCK_SIZE": 32768, "Y_stride": 1, "loss_stride": 1}
    numbers = ("sum_non_ignore_weight", "weight_sum")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names and name not in numbers}
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys((*numbers, "n_non_ignore"), "fp32")
    signature |= {"X_ptr": f"*{dtype}", "Y_ptr": "*i64", "loss_ptr": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 32})
    assert "st.global" in compiled.asm["ptx"]
    assert not re.search(r"^\s+(?:@\S+ )?(?:atom|red)\.", compiled.asm["ptx"], re.MULTILINE)
