"""Store-backed optimizers with ordinary parameters on a GPU.

Losses match torch's optimizers, and are bit-identical wherever the state is stored. Copies wait for the
kernels that precede them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_embed import embedded
from megatrain.embed.ordinary_groups import DeviceCopies
from megatrain.engine.device.environment import deterministic_kernels

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
    gpu = options.pop("gpu", None)
    with megatrain.open_store(ram="2MiB", nvme=folder, nvme_size="16MiB", gpu=gpu) as store:
        optimizer = megatrain.TieredAdamW(model.parameters(), store=store, state=state, **KERNELS, **options)
        losses = train(model, optimizer, own_stream=own_stream)
        return losses, [parameter.detach().cpu() for parameter in model.parameters()]


# torch 2.11 and newer warn because hooks keep AccumulateGrad nodes of the stream on which the optimizer was created.
# This is harmless, because the streams are synchronized.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_results_are_bit_identical_for_all_state_placements(
    max_grad_norm: float, dtype: torch.dtype, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    options = {"max_grad_norm": max_grad_norm}
    losses, weights = tiered(tmp_path / "ram", dtype, ["ram"], **options)
    assert losses[-1] < losses[0]
    for name, state, others in (
        ("nvme", ["nvme"], {}),
        ("stream", ["ram"], {"own_stream": True}),
        ("nvme_and_stream", ["nvme"], {"own_stream": True}),
        ("gradients_leave", ["ram"], {"offload_gradients": True}),
        ("gradients_leave_by_the_gpu", ["nvme"], {"offload_gradients": True, "gpu": "1MiB", "own_stream": True}),
    ):
        other_losses, other_weights = tiered(tmp_path / name, dtype, state, **options, **others)
        assert other_losses == losses, name
        assert all(map(torch.equal, other_weights, weights)), name


def test_losses_match_the_torch_optimizer(virtual: VirtualCuda | None, tmp_path: Path) -> None:
    model = make_model(torch.float32)
    expected = train(model, torch.optim.AdamW(model.parameters(), foreach=False, **KERNELS))
    losses, _ = tiered(tmp_path, torch.float32, ["ram"])
    assert losses == pytest.approx(expected, rel=1e-5)


def test_muon_products_run_on_the_parameter_device(virtual: VirtualCuda | None, tmp_path: Path) -> None:
    """Results match torch's Muon, and do not depend on where the state is stored. Some matrices are added later."""

    def run(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[list[float], Tensor]:
        model = make_model(torch.float32)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        optimizer = make(matrices[:1], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **options)
        optimizer.add_param_group({"params": matrices[1:]})
        losses = train(model, optimizer)
        if isinstance(optimizer, megatrain.TieredMuon):
            assert optimizer._orthogonalizer is not None
            assert optimizer._orthogonalizer.moved_bytes == STEPS * 2 * sum(matrix.numel() for matrix in matrices)
        return losses, torch.cat([matrix.detach().cpu().reshape(-1) for matrix in matrices])

    found = {}
    for home in ("ram", "nvme"):
        with megatrain.open_store(ram="2MiB", nvme=tmp_path / home, nvme_size="16MiB") as store:
            found[home] = run(megatrain.TieredMuon, store=store, state=[home])
    assert found["ram"][0] == found["nvme"][0] and torch.equal(found["ram"][1], found["nvme"][1])
    losses, weights = run(torch.optim.Muon)
    assert found["ram"][0] == pytest.approx(losses, rel=1e-3)
    assert torch.allclose(found["ram"][1], weights, atol=1e-3)


def stepped(gradients: Sequence[Any]) -> Tensor:
    """Return a parameter after one step per gradient. ``gradients`` holds functions that make gradients."""
    parameter = nn.Parameter(torch.zeros(64, 24, device="cuda"))
    with megatrain.open_store(ram="2MiB") as store:
        optimizer = megatrain.TieredAdamW([parameter], store=store, state=["ram"], max_grad_norm=0.0, **KERNELS)
        for make in gradients:
            parameter.grad = make()
            optimizer.step()
        return parameter.detach().cpu()


@pytest.mark.usefixtures("virtual")
def test_flattened_gradient_is_copied_after_its_kernel() -> None:
    """The kernel that flattens a gradient is queued after the copy stream has begun to wait for the backward.

    The copy must therefore also wait for this kernel.
    """
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.randn(24, 64, generator=generator) for _ in range(STEPS)]
    crossed = stepped([lambda n=n: n.to("cuda").t() for n in numbers])
    straight = stepped([lambda n=n: n.t().contiguous().to("cuda") for n in numbers])
    assert torch.equal(crossed, straight)


class Sparse:
    """Stand-in for a sparse gradient, which a software device does not support. ``to_dense`` queues a kernel."""

    layout, dtype = torch.sparse_coo, torch.float32

    def __init__(self, numbers: Tensor, dense: Tensor) -> None:
        self._numbers, self._dense = numbers, dense
        self.device = dense.device

    def numel(self) -> int:
        return self._dense.numel()

    def element_size(self) -> int:
        return self._dense.element_size()

    def to_dense(self) -> Tensor:
        return self._dense.copy_(self._numbers)


def test_sparse_gradient_is_densified_on_its_copy_stream(virtual: VirtualCuda | None) -> None:
    numbers = torch.randn(64, 24)
    numbers[1:60] = 0
    there, copies = numbers.to("cuda"), DeviceCopies()
    gradient: Any = there.to_sparse() if virtual is None else Sparse(there, torch.full_like(there, 7.0))
    assert torch.equal(copies.copy_to_ram(gradient), numbers.reshape(-1))


@pytest.mark.usefixtures("virtual")
def test_parameter_copy_waits_for_the_last_in_place_update() -> None:
    def replaced(device: str) -> Tensor:
        model = nn.Linear(24, 8, bias=False)
        nn.init.ones_(model.weight)
        model.to(device)
        with megatrain.open_store(ram="2MiB") as store, torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            optimizer = megatrain.TieredAdamW(
                model.parameters(), store=store, state=["ram"], offload_gradients=True, **KERNELS
            )
            for number in range(2):
                model(torch.ones(4, 24).to(device)).sum().backward()
                with torch.no_grad():
                    model.weight.mul_(number + 3.0)
                optimizer.step()
                optimizer.finish_updates()
                optimizer.zero_grad()
            return model.weight.detach().cpu()

    assert torch.equal(replaced("cuda"), replaced("cpu"))
