"""Tiers that a run can have, fast to slow. Each class decides whether a run has the tier, and creates it.

To add a tier, add a class here, and the tier's name and config keys in ``megatrain/machine/table.py``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from megatrain.machine.resources import TierSpecs
from megatrain.plan.placement import TierBudget
from megatrain.plan.plan import Plan
from megatrain.plan.run_spec import RunSpec
from tiered import GpuTier, NvmeTier, RamTier, Tier
from tiered.ext import UnifiedTier, check_rates, plan_chunks
from tiered.units import PAGE_BYTES, GiB, round_up

_GPU_ALIGNMENT_BYTES = 512
#: RAM that each rank leaves to Python, torch and libraries if ``tiers.ram.size`` is "auto".
_RANK_BYTES = GiB


class RunTier(ABC):
    """Tier that a run can have.

    Attributes:
        name: Name of the tier in plans, in ``[placement]`` and in the store.
    """

    name: str

    def is_used(self, tiers: TierSpecs, device: torch.device) -> bool:
        """Return whether a run has this tier."""
        return True

    @abstractmethod
    def budget(self, run: RunSpec, workspace: int) -> TierBudget:
        """Return the tier's capacity, rounding and links. ``workspace`` is a step's workspace in the compute tier."""

    @abstractmethod
    def make(self, plan: Plan, budget: TierBudget, on_notice: Callable[[str], None] | None) -> Tier:
        """Create the tier with the budget that the plan gives it. Messages for the user go to ``on_notice``."""


class _GpuMemory(RunTier):
    """Memory of the GPU that computes, or a part of RAM that emulates it."""

    name = "gpu"

    def is_used(self, tiers: TierSpecs, device: torch.device) -> bool:
        return tiers.compute_tier(device) == "gpu"

    def budget(self, run: RunSpec, workspace: int) -> TierBudget:
        alignment = PAGE_BYTES if run.tiers.can_bypass_ram(run.device) else _GPU_ALIGNMENT_BYTES
        capacity = run.tiers.gpu_capacity_bytes(run.device)
        return TierBudget("gpu", capacity, lambda n: round_up(n, alignment), workspace, links=link_pair("gpu", "ram"))

    def make(self, plan: Plan, budget: TierBudget, on_notice: Callable[[str], None] | None) -> Tier:
        return GpuTier(budget.capacity_bytes, device=str(plan.device), alignment_bytes=budget.slot_bytes(1))


class _HostMemory(RunTier):
    """Memory of the host. On some machines, the GPU shares it."""

    name = "ram"

    def budget(self, run: RunSpec, workspace: int) -> TierBudget:
        capacity = run.tiers.ram_capacity_bytes()
        if run.tiers.table.ram.size.is_auto and not run.world.is_single:
            capacity -= run.world.local_size * _RANK_BYTES
        return TierBudget(
            "ram",
            max(0, capacity) // run.world.local_size,  # sizes in the config are for the whole host
            lambda n: round_up(n, PAGE_BYTES),
            0 if run.tiers.compute_tier(run.device) == "gpu" else workspace,
            num_processes=run.world.local_size,
        )

    def make(self, plan: Plan, budget: TierBudget, on_notice: Callable[[str], None] | None) -> Tier:
        is_cuda = plan.device.type == "cuda"
        if is_cuda and plan.program.compute_tier == "ram":
            return UnifiedTier(budget.capacity_bytes, device=str(plan.device))
        return RamTier(budget.capacity_bytes, pin_memory=is_cuda)


class _Drives(RunTier):
    """Folders on drives, over which blocks are striped."""

    name = "nvme"

    def is_used(self, tiers: TierSpecs, device: torch.device) -> bool:
        return bool(tiers.table.nvme)

    def budget(self, run: RunSpec, workspace: int) -> TierBudget:
        tiers = run.tiers
        shares = check_rates(tiers.rates, len(tiers.table.nvme))
        is_direct = tiers.can_bypass_ram(run.device)
        return TierBudget(
            "nvme",
            tiers.nvme_capacity_bytes(run.output_dir) // run.world.local_size,
            functools.cache(lambda n: plan_chunks(n, shares, tiers.file_bytes).slot_bytes),  # most sizes repeat
            generations=run.checkpoint.table.num_generations,
            links=(*link_pair("ram", "nvme"), *(link_pair("gpu", "nvme") if is_direct else ())),
            is_addressable=False,
            is_durable=True,
            num_processes=run.world.local_size,
        )

    def make(self, plan: Plan, budget: TierBudget, on_notice: Callable[[str], None] | None) -> Tier:
        specs = plan.run.tiers
        return NvmeTier(
            [str(plan.run.world.rank_folder(drive.path)) for drive in specs.table.nvme],
            budget.capacity_bytes,
            rates=specs.rates,
            chunk_bytes=specs.file_bytes,
            engine=specs.table.engine,
            past_ram=("nvme", "gpu") in budget.links,
            verify=specs.table.verify,
            on_full=specs.table.on_disk_full,
            on_notice=on_notice,
            max_written_bytes=[drive.max_written for drive in specs.table.nvme],
        )


#: All tiers, fast to slow. ``budgets.with_folder`` adds the model's folder after RAM.
RUN_TIERS: tuple[RunTier, ...] = (_GpuMemory(), _HostMemory(), _Drives())


def tier_names(tiers: TierSpecs, device: torch.device) -> list[str]:
    """Return the names of a run's writable tiers, fast to slow."""
    return [tier.name for tier in RUN_TIERS if tier.is_used(tiers, device)]


def tier_budgets(run: RunSpec, workspace: int) -> dict[str, TierBudget]:
    """Return the budgets of a run's writable tiers, fast to slow, with capacities, roundings and links.

    Args:
        workspace: Workspace bytes of a step in the compute tier.
    """
    return {tier.name: tier.budget(run, workspace) for tier in RUN_TIERS if tier.is_used(run.tiers, run.device)}


def make_tier(plan: Plan, budget: TierBudget, on_notice: Callable[[str], None] | None) -> Tier:
    """Create the writable tier that has this budget in the plan."""
    return next(tier for tier in RUN_TIERS if tier.name == budget.name).make(plan, budget, on_notice)


def link_pair(fast: str, slow: str) -> tuple[tuple[str, str], ...]:
    """Return the links in both directions between two tiers."""
    return (fast, slow), (slow, fast)
