"""Loss and every gradient against plain Hugging Face on the same device, and the same bits wherever blocks live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.runner import LayerRunner
from megatrain.models.graph import build_graph
from reference.families import packed_batches, padded_batches, tiny_config
from reference.gpu_run import DEVICES, deterministic, gpu_config_text, gpu_tier
from reference.huggingface import build_model, train_step
from reference.memory_access import MemoryAccess
from reference.tiered_run import TieredRun, run_config

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic.*")

SEED, NUM_STEPS = 11, 5
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mixtral"]
BATCHES = {"padded": padded_batches, "packed": packed_batches}

ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
ON_THE_GPU = 'weights = ["gpu"]\ngradients = ["gpu"]\nactivations = ["gpu"]'
#: Homes by text of `[placement]`, and the devices that know them: a new one is a line here.
PLACEMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "all on NVMe": ("both", {"placement": ALL_NVME}),
    "state on NVMe": ("both", {"placement": 'optimizer = ["nvme"]'}),
    "activations and gradients on NVMe": ("both", {"placement": 'gradients = ["nvme"]\nactivations = ["nvme"]'}),
    "nothing fetched ahead": ("both", {"advanced": "prefetch = 0"}),
    "micro-batch-major": ("both", {"advanced": 'micro_batch_order = "micro_batch"'}),
    "weights, gradients and activations on the GPU": ("cuda", {"placement": ON_THE_GPU}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_hugging_face(family: str, batches: str, device: str) -> None:
    """fp32 without TF32. Loss within 1e-5, each gradient within 1e-4 of its largest element.

    The arithmetic is the same; sums are made in another order, by other kernels for other shapes: the head in pieces,
    a recompute with contiguous inputs. On a CPU the tolerance is a tenth of that (tests/parity/test_families.py).
    """
    assert not torch.backends.cuda.matmul.allow_tf32
    config = tiny_config(family)
    model = build_model(config).to(device)
    micro_batches = BATCHES[batches]()
    on_device = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]
    with deterministic(device):
        expected = train_step(model, on_device, SEED)
        graph = build_graph(config)
        access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32, device)
        runner = LayerRunner(graph, access, device=device, compute_dtype=torch.float32)
        loss = runner.forward_backward(micro_batches, seed=SEED)
    gradients = access.finish()
    assert loss.loss == pytest.approx(expected.loss, rel=1e-5)
    assert set(gradients) == set(expected.gradients)
    noise = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= max(noise, 1e-4 * float(gradient.abs().max())), (name, error)


def run(folder: Path, model: Path, device: str, dtype: str, **tables: str) -> TieredRun:
    text = gpu_config_text(folder, model, device, precision=f'compute_dtype = "{dtype}"', **tables)
    with gpu_tier(device), deterministic(device):
        return run_config(text, folder, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def baselines() -> dict[Any, TieredRun]:
    """Return runs with everything at home in RAM, filled as they are asked for."""
    return {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bits_and_traffic_do_not_depend_on_placement(
    placement: str, dtype: str, device: str, tiny_model: Path, tmp_path: Path, baselines: dict[Any, TieredRun]
) -> None:
    known_by, tables = PLACEMENTS[placement]
    if known_by not in ("both", device):
        pytest.skip("the config of a run on the CPU has no such home")
    if (device, dtype) not in baselines:
        baselines[device, dtype] = run(tmp_path / "ram", tiny_model, device, dtype)
    expected, result = baselines[device, dtype], run(tmp_path / "other", tiny_model, device, dtype, **tables)
    assert result.plan.tiers == ("gpu", "ram", "nvme")
    assert result.losses == expected.losses
    assert result.grad_norms == expected.grad_norms
    assert result.digests == expected.digests and result.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
    for tier, stats in result.moved.tiers.items():
        assert stats.high_water_bytes <= stats.capacity_bytes == result.plan.budgets[tier]


@pytest.mark.gpu
def test_a_run_on_the_gpu_is_near_one_on_the_cpu(tiny_model: Path, tmp_path: Path) -> None:
    """The same data and weights in fp32: losses of five steps within 1e-3."""
    on_gpu = run(tmp_path / "gpu", tiny_model, "cuda", "float32")
    on_cpu = run(tmp_path / "cpu", tiny_model, "cpu", "float32")
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)
