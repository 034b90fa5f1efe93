"""A backward in a different thread than the forward is bit-identical. Autograd runs a device's backward this way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from tiered import KiB, MiB

STEPS, MICRO_BATCHES = 3, 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(6)))


def train(folder: Path, backward: Callable[[Tensor], Any], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    rows = torch.randn(STEPS * MICRO_BATCHES, 32, 128, generator=torch.Generator().manual_seed(1))
    with megatrain.open_store(ram=6 * MiB, nvme=folder, nvme_size="32MiB") as store:
        model = make_model()
        if tiered := options.pop("tiered"):
            megatrain.offload(model, store, weights="nvme", gradients="nvme")
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2, store=store, max_grad_norm=0.1, **options)
        context = megatrain.offload_activations(store, model=model, min_bytes=4 * KiB)
        for number, batch in enumerate(rows):
            with context:
                loss = model(batch).square().mean()
            backward(loss)
            losses.append(loss.item())
            if (number + 1) % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        num_saved = len(rows) * 6 * 32 * (128 + 256 + 256)  # per layer: its input, and GELU's input and output
        assert context.stats().restored_bytes == 4 * num_saved or not tiered
        return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [{"tiered": True}, {"tiered": True, "state": ["nvme"]}, {"tiered": False, "offload_gradients": True}],
    ids=["tiered", "tiered, all on a drive", "gradients leave"],
)
def test_backward_in_another_thread_is_bitwise_equal(options: dict[str, Any], tmp_path: Path) -> None:
    losses, weights = train(tmp_path / "same", Tensor.backward, **options)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = train(tmp_path / "other", lambda loss: pool.submit(loss.backward).result(), **options)
    assert elsewhere[0] == losses and 0.4 * losses[0] < losses[-1] < 0.6 * losses[0]
    assert all(torch.equal(elsewhere[1][name], weights[name]) for name in weights)
