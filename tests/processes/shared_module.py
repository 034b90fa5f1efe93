"""A job for several ranks, which share one offloaded module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import megatrain
from fakes.gpu_run import virtual_gpu
from fakes.virtual_embed import embedded
from megatrain.engine.device.environment import deterministic_kernels
from megatrain.ranks.collectives import RanksDifferError
from megatrain.ranks.world import World
from tiered import TieredStore
from tiered.errors import TieredError

LANES, STEPS = 4, 3
#: Case -> (parameter dtype, optimizer options, home tier of weights, gradients and state).
CASES: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "fp32": (torch.float32, {"max_grad_norm": 0.5, "ema_decay": 0.5}, "nvme"),
    "bf16": (torch.bfloat16, {"state_dtype": "bfloat16"}, "ram"),
    "int8": (torch.bfloat16, {"state_dtype": "int8", "max_grad_norm": 0.5}, "nvme"),
    "gpu": (torch.float32, {"max_grad_norm": 0.5}, "nvme"),
}
#: Case that runs on a software CUDA device -> size of the GPU tier.
ON_GPU = {"gpu": "6MiB"}


class Net(nn.Module):
    """Module with layers large enough to be split over four ranks, tied weights, a frozen bias and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 160)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(160, 900), nn.Sequential(nn.GELU(), nn.Linear(900, 160))) for _ in range(2)
        )
        self.head = nn.Linear(160, 50, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(8, 8)
        self.layers[0][0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor, skipped: int | None = None) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = x + layer(x)
        return self.head(x)


def make(dtype: torch.dtype, seed: int = 0) -> Net:
    """Return the initial module. With the same seed, it is the same on all ranks."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def loss_of(module: nn.Module, step: int, lane: int, **options: Any) -> Tensor:
    """Return the loss of one lane's part of a batch. One part has zero loss, like a part without labels."""
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(LANES * step + lane))
    tokens = tokens.to(next(module.parameters()).device)
    logits = module(tokens, **options).float().flatten(0, 1)
    labels = tokens.roll(1, 1).flatten()
    loss: Tensor = nn.functional.cross_entropy(logits, labels)
    return loss * 0 if (step, lane) == (1, 2) else loss


def open_store(folder: Path, gpu: str | None = None) -> TieredStore:
    """Open the store of a rank."""
    return megatrain.open_store(ram="24MiB", nvme=folder, nvme_size="96MiB", gpu=gpu)


@contextmanager
def device_of(case: str) -> Iterator[None]:
    """Install the software CUDA device in the context, if the case runs on it."""
    if case not in ON_GPU:
        yield
        return
    with virtual_gpu() as device, deterministic_kernels(torch.device("cuda"), "a test's module"), embedded(device):
        yield


def offloaded(case: str, store: TieredStore, **options: Any) -> tuple[Net, megatrain.TieredAdamW]:
    """Return the offloaded module and the optimizer of a case."""
    dtype, settings, home = CASES[case]
    given = {"group": torch.distributed.group.WORLD, "gradient_lanes": LANES, **options}
    module = megatrain.offload(make(dtype), store, weights=home, gradients=home, **given)
    optimizer = megatrain.TieredAdamW(module.parameters(), lr=1e-2, weight_decay=0.1, state=home, **settings)
    return module, optimizer


def train(module: Net, optimizer: megatrain.TieredAdamW, steps: range) -> tuple[dict[str, float], list[float | None]]:
    """Train. Return this rank's losses by step and lane, and the gradient norm of each step."""
    losses, norms = {}, []
    for step in steps:
        for lane in megatrain.gradient_lanes(module):
            loss = loss_of(module, step, lane)
            loss.backward()
            losses[f"{step}.{lane}"] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return losses, norms


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights, on the CPU."""
    return {name: one.cpu().clone() for name, one in module.state_dict().items()}


def averages(module: nn.Module, optimizer: megatrain.TieredAdamW) -> dict[str, Tensor]:
    """Return the averages of all weights, or an empty dict if the optimizer computes no averages."""
    if not optimizer.ema_decay:
        return {}
    with optimizer.averaged_parameters():
        return copied(module)


def run(case: str, folder: Path) -> dict[str, Any]:
    """Train without interruption, and with a stop and resume after the first step. Return what was observed."""
    found: dict[str, Any] = {}
    if gpu := ON_GPU.get(case):
        with open_store(folder / "tight", "2MiB") as store:
            found["room"] = said(lambda: offloaded(case, store))
    with open_store(folder / "unbroken", gpu) as store:
        module, optimizer = offloaded(case, store)
        losses, norms = train(module, optimizer, range(STEPS))
        tiers = store.stats().tiers
        found |= {"losses": losses, "norms": norms, "averages": averages(module, optimizer)}
        found["weights"] = copied(module)
        found["state"] = said(optimizer.full_state_dict)
        with torch.no_grad(), megatrain.gathered(module.layers[0], writable=True):
            module.layers[0][0].weight.mul_(2)
        module.load_state_dict({"head.weight": found["weights"]["head.weight"] + 1}, strict=False)
        found["changed"] = copied(module)
        found["is_kept"] = all(
            tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in tiers.values()
        )
        found["state_bytes"] = sum(spec.nbytes for spec in store.blocks() if spec.durable)
    with open_store(folder / "stopped", gpu) as store:
        module, optimizer = offloaded(case, store)
        train(module, optimizer, range(STEPS // 2))
        saved = optimizer.state_dict()
    with open_store(folder / "stopped", gpu) as store:
        module, optimizer = offloaded(case, store)
        optimizer.load_state_dict(saved)
        train(module, optimizer, range(STEPS // 2, STEPS))
        found["resumed"], found["resumed averages"] = copied(module), averages(module, optimizer)
    return found


def said(spoil: Callable[[], object]) -> str:
    """Call ``spoil``, and return the type and message of the error that it raises, or ``nothing``."""
    try:
        spoil()
    except (RanksDifferError, TieredError, ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, folder: Path) -> dict[str, str]:
    """Make calls that differ between ranks, and requests that must be refused. Return the error messages."""
    found = {}
    with open_store(folder) as store:
        module, optimizer = offloaded("fp32", store)
        found["forward"] = said(lambda: loss_of(module, 0, 0, skipped=0 if rank else None).backward())
    with open_store(folder) as store:
        module, optimizer = offloaded("fp32", store)
        loss = loss_of(module, 0, 0)
        found["backward"] = said(loss.backward if rank else optimizer.step)
        optimizer.zero_grad()
    with open_store(folder) as store:
        group = torch.distributed.group.WORLD
        found["seed"] = said(lambda: megatrain.offload(make(torch.float32, rank), store, group=group))
        found["lanes"] = said(lambda: megatrain.offload(make(torch.float32), store, group=group, gradient_lanes=3))
        found["left"] = said(lambda: megatrain.offload(make(torch.float32), store, group=group, leave=["unused.*"]))
        module = megatrain.offload(make(torch.float32), store, group=group)
        found["parallel"] = said(lambda: nn.parallel.DistributedDataParallel(module))
        found["whole"] = said(lambda: megatrain.TieredAdafactor(module.parameters()))
        found["no group"] = said(lambda: megatrain.offload(make(torch.float32), store, name="b", gradient_lanes=2))
    with megatrain.open_store(ram="24MiB" if rank else "1MiB") as store:
        found["room"] = said(lambda: megatrain.offload(make(torch.float32), store, group=group))
        found["left over"] = str(store.tier("ram").usage().free_bytes == store.tier("ram").capacity_bytes)
    return found


def measure_before_step(world: World) -> dict[str, Any]:
    """Take two steps. Before each, measure the gradient norm twice, and run another backward, which must be refused."""
    torch.distributed.init_process_group("gloo")
    layer = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(layer.weight)
    found: dict[str, Any] = {"norms": [], "late": []}
    with megatrain.open_store(ram="24MiB") as store:
        module = megatrain.offload(layer, store, group=torch.distributed.group.WORLD)
        optimizer = megatrain.TieredSGD(module.parameters(), lr=1.0)
        for _ in range(2):
            module(torch.ones(1, 8)).sum().backward()
            found["norms"] += [optimizer.measure_grad_norm() for _ in range(2)]
            found["late"].append(said(module(torch.ones(1, 8)).sum().backward))
            optimizer.step()
            optimizer.zero_grad()
        found["weight"] = copied(module)["weight"].unique().tolist()
    return found


def run_all(world: World, folder: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Run the given cases. With two ranks, also make the requests that must be refused."""
    if world.is_single:  # a single rank also passes a process group to offload
        torch.distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in cases:
        with device_of(case):
            results[case] = run(case, folder / case)
    if world.size == 2:
        results["refused"] = refusals(world.rank, folder / "refused")
    return results
