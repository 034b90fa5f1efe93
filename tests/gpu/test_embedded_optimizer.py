"""TieredAdamW over ordinary parameters on a GPU: torch's numbers, the same bits wherever state is, no order lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.engine.determinism import deterministic_kernels
from reference.virtual_cuda import VirtualCuda
from reference.virtual_embed import embedded

STEPS = 4
KERNELS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _embedded(virtual: VirtualCuda | None) -> Iterator[None]:
    device = nullcontext() if virtual is None else embedded(virtual)
    with deterministic_kernels(torch.device("cuda"), "a test's model"), device:
        yield


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to("cuda", dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, own_stream: bool = False) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    losses: list[Tensor] = []
    stream = torch.cuda.Stream() if own_stream else None  # type: ignore[no-untyped-call]
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for _ in range(STEPS):
            rows = torch.randn(16, 24, generator=generator).to("cuda", dtype)
            loss = model(rows).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if isinstance(optimizer, megatrain.TieredAdamW):
            optimizer.finish_updates()
        return [loss.item() for loss in losses]


def tiered(
    folder: Path, dtype: torch.dtype, state: Sequence[str], *, own_stream: bool = False, **options: Any
) -> tuple[list[float], list[Tensor]]:
    model = make_model(dtype)
    if options.pop("behind", False):
        options["overlap"] = model
    gpu = options.pop("gpu", None)
    with megatrain.open_store(ram="2MiB", nvme=folder, nvme_size="16MiB", gpu=gpu) as store:
        optimizer = megatrain.TieredAdamW(model.parameters(), store=store, state=state, **KERNELS, **options)
        losses = train(model, optimizer, own_stream=own_stream)
        return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_bits_are_the_same_wherever_the_state_is_and_whenever_updates_are_made(
    max_grad_norm: float, dtype: torch.dtype, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    options = {"max_grad_norm": max_grad_norm}
    losses, weights = tiered(tmp_path / "ram", dtype, ["ram"], **options)
    assert losses[-1] < losses[0]
    for name, state, others in (
        ("nvme", ["nvme"], {}),
        ("stream", ["ram"], {"own_stream": True}),
        ("behind", ["nvme"], {"behind": True}),
        ("behind_on_stream", ["ram"], {"behind": True, "own_stream": True}),
        ("gradients_leave", ["ram"], {"offload_gradients": True}),
        ("gradients_leave_by_the_gpu", ["nvme"], {"offload_gradients": True, "gpu": "1MiB", "own_stream": True}),
    ):
        other_losses, other_weights = tiered(tmp_path / name, dtype, state, **options, **others)
        assert other_losses == losses, name
        assert all(map(torch.equal, other_weights, weights)), name


def test_losses_are_those_of_torchs_optimizer(virtual: VirtualCuda | None, tmp_path: Path) -> None:
    model = make_model(torch.float32)
    expected = train(model, torch.optim.AdamW(model.parameters(), foreach=False, **KERNELS))
    losses, _ = tiered(tmp_path, torch.float32, ["ram"])
    assert losses == pytest.approx(expected, rel=1e-5)
