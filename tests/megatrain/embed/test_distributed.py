"""Two data-parallel ranks with separate state folders match one process that trains on both halves of each batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatrain
from megatrain.embed.partition import OffloadError
from megatrain.machine.cgroups import total_ram_bytes
from megatrain.ranks.world import World
from processes.ranks import run_on_ranks
from tiered import TieredStore


def make(seed: int = 0) -> nn.Module:
    """Return the module that both ranks train."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int, rank: int) -> Tensor:
    """Return one rank's half of a batch."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(module: Any, step: int, rank: int) -> Tensor:
    """Return the loss of one rank."""
    loss: Tensor = module(batch(step, rank)).square().mean()
    return loss


def optimizer_of(module: nn.Module, store: TieredStore) -> Any:
    """Return the optimizer that every run uses."""
    return megatrain.TieredAdamW(module.parameters(), lr=1e-2, store=store, max_grad_norm=0.3)


def refusals(store: TieredStore) -> list[str]:
    """Return the errors of wrappers and optimizers that would train each rank separately."""
    said = []
    tiered = megatrain.offload(make(1), store)
    for spoil in (
        lambda: DistributedDataParallel(tiered),
        lambda: megatrain.TieredAdamW(make(2).parameters(), store=store, offload_gradients=True, name="x"),
    ):
        try:
            spoil()
        except (OffloadError, ValueError) as error:
            said.append(str(error))
    return said


def train(world: World, folder: Path) -> dict[str, Any]:
    """Train four steps and save after two. Load the saved state into a second store, and repeat the last two steps."""
    rank, results = world.rank, dict[str, Any](norms=[])
    with megatrain.open_store(ram="8MiB", nvme=folder / "store", nvme_size="16MiB") as store:
        results["path"] = store.path
        module = DistributedDataParallel(make())
        optimizer = optimizer_of(module.module, store)
        for step in range(4):
            loss_of(module, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            results["norms"].append(optimizer.grad_norm)
            if step == 1:
                saved = optimizer.state_dict()
                half = {name: one.clone() for name, one in module.module.state_dict().items()}
        weights = {name: one.clone() for name, one in module.module.state_dict().items()}
        results["refused"] = refusals(store)
    with megatrain.open_store(ram="1%", nvme=folder / "store", nvme_size="16MiB") as store:
        results["ram"] = store.stats().tiers["ram"].capacity_bytes
        module = DistributedDataParallel(make(5))
        optimizer = optimizer_of(module.module, store)
        module.module.load_state_dict(half)
        optimizer.load_state_dict(saved)
        for step in (2, 3):
            loss_of(module, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        results["resumed"] = all(torch.equal(one, weights[name]) for name, one in module.module.state_dict().items())
    return {**results, "weights": weights}


def test_two_ranks_match_one_process(tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    results = run_on_ranks(2, train, tmp_path)
    module = make()
    norms = []
    with megatrain.open_store(ram="8MiB") as store:
        optimizer = optimizer_of(module, store)
        for step in range(4):
            for rank in (0, 1):
                (loss_of(module, step, rank) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm)
    for rank in (0, 1):
        assert results[rank]["norms"] == norms and results[rank]["resumed"]
        assert results[rank]["path"] == str(tmp_path / "store" / f"rank{rank}")
        assert results[rank]["ram"] == total_ram_bytes() // 2 // 100
        assert all(torch.equal(one, results[rank]["weights"][name]) for name, one in module.state_dict().items())
        parallel, offloaded = results[rank]["refused"]
        assert "DistributedDataParallel around an offloaded module" in parallel and "averaged" in offloaded
