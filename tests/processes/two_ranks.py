"""One of two processes that train a module together: ``python two_ranks.py RANK FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatrain
from megatrain.embed.partition import OffloadError
from tiered import TieredStore


def make(seed: int = 0) -> nn.Module:
    """Return the module that both train."""
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
    """Return the optimizer of every run."""
    return megatrain.TieredAdamW(module.parameters(), lr=1e-2, store=store, max_grad_norm=0.3)


def refusals(store: TieredStore) -> list[str]:
    """Return what is said to things that would train each rank by itself."""
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


def main() -> None:
    """Train 4 steps, save after 2, and load that into a second store of the rank."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results: dict[str, Any] = {"norms": []}
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
    torch.save(weights, folder / f"weights{rank}.pt")
    (folder / f"results{rank}.json").write_text(json.dumps(results))
    # Not destroy_process_group, and no end of the interpreter: the last reference to the group is DDP's reducer, and
    # gloo's destructor joins, with the GIL held, a thread that may be waiting for the GIL to free its last all-reduce.
    os._exit(0)


if __name__ == "__main__":
    main()
