"""On a GPU, the loss and all gradients match plain Hugging Face. The losses of a run are close to those on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.gpu_run import deterministic, gpu_config_text
from fakes.virtual_cuda import VirtualCuda
from megatrain.converters.spec import build_graph
from oracles.families import FAMILIES, packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import TieredRun, config_text, run_config

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic.*")

SEED, NUM_STEPS = 11, 3
BATCHES = {"padded": padded_batches, "packed": packed_batches}


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gpu_loss_and_gradients_match_hugging_face(family: str, batches: str, virtual: VirtualCuda | None) -> None:
    """In fp32 without TF32, the relative error of the loss is at most 1e-5.

    The error of each gradient is at most 1e-4 of its largest element, or 1e-6 of the largest element of all gradients,
    whichever is larger.

    The arithmetic is the same, but kernels for different shapes add in different orders. For example, the head runs in
    pieces, and a recompute has contiguous inputs. On a CPU, tolerances are a tenth of these
    (tests/parity/test_families.py).
    """
    assert not torch.backends.cuda.matmul.allow_tf32
    config = tiny_config(family)
    model = build_model(config).to("cuda")
    model.tie_weights()  # moving weights to a different tensor class unties them
    micro_batches = BATCHES[batches]()
    on_device = [{name: tensor.to("cuda") for name, tensor in batch.items()} for batch in micro_batches]
    with deterministic():
        expected = train_step(model, on_device, SEED)
        graph = build_graph(config)
        access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32, "cuda")
        runner = layer_runner(graph, access, device="cuda")
        before = 0 if virtual is None else len(virtual.waits)
        loss = runner.forward_backward(micro_batches, seed=SEED)
    if virtual is not None:
        assert not {what for what in virtual.waits[before:] if "copy" not in what}, "no model waits for values"
    gradients = access.finish()
    assert loss.loss == pytest.approx(expected.loss, rel=1e-5)
    assert set(gradients) == set(expected.gradients)
    noise = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= max(noise, 1e-4 * float(gradient.abs().max())), (name, error)


def run(folder: Path, model: Path, dtype: str, **tables: str) -> TieredRun:
    text = gpu_config_text(folder, model, precision=f'compute_dtype = "{dtype}"', **tables)
    with deterministic():
        return run_config(text, folder, num_steps=NUM_STEPS)


@pytest.mark.usefixtures("virtual")
def test_gpu_losses_are_close_to_cpu_losses(tiny_model: Path, tmp_path: Path) -> None:
    """With the same data and weights in fp32, the losses of three steps agree within a relative error of 1e-3."""
    on_gpu = run(tmp_path / "gpu", tiny_model, "float32")
    text = config_text(tmp_path, tiny_model, precision='compute_dtype = "float32"')
    on_cpu = run_config(text, tmp_path / "cpu", num_steps=NUM_STEPS)
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)
