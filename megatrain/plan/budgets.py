"""The tiers of a run, fast to slow: which there are, and what each may hold."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatrain.machine import machine
from megatrain.plan.placement import TierBudget
from tiered.ext import check_rates, plan_chunks
from tiered.units import PAGE_BYTES, GiB, round_up

if TYPE_CHECKING:
    import torch

    from megatrain.machine.machine import TierSpecs
    from megatrain.plan.plan import RunSpec

_GPU_ALIGNMENT_BYTES = 512
#: RAM that each process of a host is left for Python, torch and libraries, where the tier takes what is free.
_RANK_BYTES = GiB


def tier_names(tiers: TierSpecs, device: torch.device) -> list[str]:
    """Return the tiers of a run, fast to slow."""
    first = ["gpu"] if machine.compute_tier(tiers, device) == "gpu" else []
    return [*first, "ram", *(["nvme"] if tiers.table.nvme else [])]


def tier_budgets(run: RunSpec, workspace: int) -> dict[str, TierBudget]:
    """Return the tiers of a run, fast to slow, with their capacities and roundings.

    Args:
        workspace: Bytes that a step takes beside blocks in the compute tier.
    """
    tiers, device = run.tiers, run.device
    on_gpu = machine.compute_tier(tiers, device) == "gpu"
    is_direct = machine.moves_past_ram(tiers, device)
    budgets: dict[str, TierBudget] = {}
    if on_gpu:
        capacity = machine.gpu_capacity_bytes(tiers, device)
        alignment = PAGE_BYTES if is_direct else _GPU_ALIGNMENT_BYTES
        budgets["gpu"] = TierBudget("gpu", capacity, lambda n: round_up(n, alignment), workspace)
    capacity = machine.ram_capacity_bytes(tiers)
    if tiers.table.ram.size.is_auto and not run.world.is_single:
        capacity -= run.world.local_size * _RANK_BYTES
    capacity = max(0, capacity) // run.world.local_size  # RAM and drives are what a host gives the run
    budgets["ram"] = TierBudget(
        "ram",
        capacity,
        lambda n: round_up(n, PAGE_BYTES),
        0 if on_gpu else workspace,
        num_processes=run.world.local_size,
    )
    if tiers.table.nvme:
        shares = check_rates(tiers.rates, len(tiers.table.nvme))
        capacity = machine.nvme_capacity_bytes(tiers, run.output_dir) // run.world.local_size
        budgets["nvme"] = TierBudget(
            "nvme",
            capacity,
            functools.cache(lambda n: plan_chunks(n, shares, tiers.file_bytes).slot_bytes),  # blocks have few sizes
            generations=run.checkpoint.table.num_generations,
            direct_to=frozenset({"gpu"} if is_direct else ()),
            num_processes=run.world.local_size,
        )
    return budgets
