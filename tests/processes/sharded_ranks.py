"""A job for two ranks: train a module with FSDP2, with the optimizer state of each rank in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import megatrain
from megatrain.ranks.dtensors import add_over_shards
from megatrain.ranks.world import World
from tiered import TieredStore

STEPS = 4
#: Case -> (dtype, optimizer options, norm limit for torch's clipping or 0, checkpoint formats to resume from).
CASES: dict[str, tuple[torch.dtype, dict[str, Any], float, tuple[str, ...]]] = {
    "fp32": (torch.float32, {}, 0.0, ("generation", "tensors")),
    "bf16": (torch.bfloat16, {"state_dtype": "bfloat16", "ema_decay": 0.5}, 0.0, ("generation", "tensors")),
    "int8": (torch.bfloat16, {"state_dtype": "int8"}, 0.0, ("generation", "tensors")),
    "clipped": (torch.float32, {}, 0.05, ()),
    "own norm": (torch.float32, {"max_grad_norm": 0.05}, 0.0, ()),
}


class Net(nn.Module):
    """Module with tied weights, an odd number of embeddings, a one-element parameter and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 150), nn.Tanh(), nn.Linear(150, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0][0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return self.head(x)


def make(dtype: torch.dtype) -> Net:
    """Return the initial module, which is the same on all ranks."""
    torch.manual_seed(0)
    return Net().to(dtype)


def loss_of(module: nn.Module, step: int, half: int) -> Tensor:
    """Return the loss of one half of a batch."""
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(10 * step + half))
    loss: Tensor = nn.functional.cross_entropy(module(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
    return loss


def optimizer_of(module: nn.Module, case: str, store: TieredStore, **options: Any) -> megatrain.TieredAdamW:
    """Return the optimizer of a case. The case ``clipped`` passes a torch optimizer's groups, as accelerate does."""
    params: Any = module.parameters()
    if case == "clipped":
        params = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1).param_groups
    return megatrain.TieredAdamW(params, lr=1e-2, weight_decay=0.1, store=store, **{**CASES[case][1], **options})


def step(module: nn.Module, optimizer: torch.optim.Optimizer, case: str) -> None:
    """Clip as the case specifies, run the optimizer's step, and clear the gradients."""
    if CASES[case][2]:
        nn.utils.clip_grad_norm_(module.parameters(), CASES[case][2])
    optimizer.step()
    optimizer.zero_grad()


def shard(module: Net, *, offloads: bool = False) -> Net:
    """Shard each layer of a module over all ranks, and then the module itself."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
    }
    for layer in module.layers:
        fully_shard(layer, **options)
    return fully_shard(module, **options)


def train(module: Net, optimizer: torch.optim.Optimizer, case: str, steps: Iterable[int], rank: int) -> list[float]:
    """Train on this rank's half of each batch, and return the losses."""
    losses = []
    for number in steps:
        loss = loss_of(module, number, rank)
        loss.backward()
        step(module, optimizer, case)
        losses.append(loss.item())
    return losses


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return all weights, unsharded."""
    return {name: one.full_tensor().clone() for name, one in module.state_dict().items()}


def averages(module: nn.Module, optimizer: megatrain.TieredAdamW) -> dict[str, Tensor]:
    """Return the averages of all weights, unsharded, or an empty dict if the optimizer computes no averages."""
    if not optimizer.ema_decay:
        return {}
    with optimizer.averaged_parameters():
        return whole(module)


def said(spoil: Callable[[], object]) -> str:
    """Call ``spoil``, and return the message of the error that it raises, or ``nothing``."""
    try:
        spoil()
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def refusals(module: Net, folder: Path) -> dict[str, str]:
    """Make requests that must be refused, and return their error messages."""
    from torch.distributed.tensor import Partial, distribute_tensor

    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    with megatrain.open_store(ram="4MiB", nvme=folder, nvme_size="16MiB") as store:
        found = {
            "offload": said(lambda: megatrain.offload(module, store)),
            "gradients": said(lambda: optimizer_of(module, "fp32", store, offload_gradients=True, name="a")),
            "whole": said(lambda: megatrain.TieredAdafactor(module.parameters(), store=store, name="c")),
            "matrix": said(lambda: megatrain.TieredMuon(matrices, store=store, name="m")),
        }
        mesh = module.scale.device_mesh
        other = distribute_tensor(torch.ones(4), mesh).redistribute(placements=module.scale.placements)
        with torch.no_grad():
            term = nn.Parameter(type(other).from_local(torch.ones(2), mesh, [Partial()]))
        found["partial"] = said(lambda: megatrain.TieredAdamW([term], store=store, name="d"))
        optimizer = optimizer_of(module, "fp32", store, checkpoint="generation", name="e")
        found["checkpoint"] = said(lambda: get_optimizer_state_dict(module, optimizer))
        module.scale.grad = distribute_tensor(torch.ones(1), mesh)
        found["gradient"] = said(optimizer.step)
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        saved["tiered"]["shards"] = [1 - torch.distributed.get_rank(), 2]
        found["rank"] = said(lambda: optimizer.load_state_dict(saved))
        saved["tiered"]["shards"] = [0, 4]
        found["world"] = said(lambda: optimizer.load_state_dict(saved))
        partly_sharded = [module.scale, nn.Parameter(torch.ones(4))]
        optimizer = megatrain.TieredAdamW(partly_sharded, store=store, checkpoint="generation", name="p")
        saved = optimizer.state_dict()
        saved["tiered"]["shards"] = None
        found["partly sharded"] = said(lambda: optimizer.load_state_dict(saved))
        early = make(torch.float32)
        optimizer = optimizer_of(early, "fp32", store, name="f")
        optimizer.param_groups[0]["params"] = list(shard(early).parameters())
        found["replaced"] = said(optimizer.step)
    return found


def run(case: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train with state in RAM, with state on a drive, and with a stop and resume halfway for each checkpoint format."""
    dtype, _, _, resumed = CASES[case]
    found: dict[str, Any] = {}
    for place in ("ram", "nvme"):
        module = shard(make(dtype), offloads=place == "nvme")
        with megatrain.open_store(ram="4MiB", nvme=folder / place, nvme_size="16MiB") as store:
            optimizer = optimizer_of(module, case, store, state=place)
            found[place] = {"losses": train(module, optimizer, case, range(STEPS), rank), "weights": whole(module)}
            found[place]["averages"] = averages(module, optimizer)
            found[place]["norm"] = optimizer.grad_norm
            tiers = store.stats().tiers
            found[place]["home_bytes"] = {name: tier.home_bytes for name, tier in tiers.items()}
            found[place]["is_kept"] = all(
                tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in tiers.values()
            )
    for kind in resumed:
        module = shard(make(dtype))
        with megatrain.open_store(ram="4MiB", nvme=folder / kind, nvme_size="16MiB") as store:
            optimizer = optimizer_of(module, case, store, checkpoint=kind, state="nvme")
            losses = train(module, optimizer, case, range(STEPS // 2), rank)
            half = {name: one.detach().clone() for name, one in module.state_dict().items()}
            if kind == "generation":
                torch.save(optimizer.state_dict(), folder / f"optimizer{rank}.pt")
            else:
                save(
                    {"model": half, "optimizer": get_optimizer_state_dict(module, optimizer)},
                    checkpoint_id=folder / "saved",
                )
        module = shard(make(dtype))
        with torch.no_grad():
            for one in module.parameters():
                one.zero_()
        with megatrain.open_store(ram="4MiB", nvme=folder / kind, nvme_size="16MiB") as store:
            optimizer = optimizer_of(module, case, store, checkpoint=kind)
            load_half(module, optimizer, half, folder, f"optimizer{rank}.pt" if kind == "generation" else None)
            losses += train(module, optimizer, case, range(STEPS // 2, STEPS), rank)
            found[kind] = {"losses": losses, "averages": averages(module, optimizer), "weights": whole(module)}
    return found


def load_half(module: nn.Module, optimizer: Any, half: Any, folder: Path, file: str | None) -> None:
    """Load the state saved halfway, from the generation that a file names or from a torch distributed checkpoint."""
    if file is not None:
        module.load_state_dict(half)
        optimizer.load_state_dict(torch.load(folder / file))
        return
    states: dict[str, Any] = {
        "model": {name: one.detach().clone() for name, one in module.state_dict().items()},
        "optimizer": get_optimizer_state_dict(module, optimizer),
    }
    load(states, checkpoint_id=folder / "saved", no_dist=not torch.distributed.is_initialized())
    module.load_state_dict(states["model"])
    set_optimizer_state_dict(module, optimizer, states["optimizer"])


def sums_over_shards(world: World) -> list[float]:
    """Return the sums over four ranks for differently sharded parameters. The last two are not sharded."""
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    row, grid = (torch.distributed.init_device_mesh("cpu", shape) for shape in ((4,), (2, 2)))
    split, copied = Shard(0), Replicate()
    placements: list[list[Placement]] = [[split, split], [split, copied], [copied, split], [copied, copied]]
    parameters = [distribute_tensor(torch.ones(4), row, [split]) for _ in range(2)]
    parameters += [distribute_tensor(torch.ones(4), grid, each) for each in placements]
    value = 10.0**world.rank
    return add_over_shards([*parameters, torch.ones(4)], [value, 2 * value, value, value, value, 3.0, 4.0])


def run_all(world: World, folder: Path) -> dict[str, Any]:
    """Run all cases, and make the requests that must be refused."""
    results: dict[str, Any] = {case: run(case, world.rank, folder / case) for case in CASES}
    return {**results, "refused": refusals(shard(make(torch.float32)), folder / "refused")}
