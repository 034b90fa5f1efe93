"""The tiers of a run, fast to slow, with their capacities and the links between them."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.base.precision import MASTER_ELEMENTS
from megatrain.engine.program import state_key, stored_keys
from megatrain.machine import machine
from megatrain.optim.average import EMA
from megatrain.plan.placement import TierBudget
from megatrain.plan.residents import Residency
from tiered.ext import check_rates, plan_chunks
from tiered.units import PAGE_BYTES, GiB, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from megatrain.engine.program import StepProgram
    from megatrain.machine.profiles import MachineProfile
    from megatrain.machine.target import TierSpecs
    from megatrain.plan.plan import RunSpec

#: Name of the read-only tier over the model's folder.
FOLDER = "folder"
_GPU_ALIGNMENT_BYTES = 512
#: RAM that each rank keeps for Python, torch and libraries if ``tiers.ram.size`` is "auto".
_RANK_BYTES = GiB


def tier_names(tiers: TierSpecs, device: torch.device) -> list[str]:
    """Return the writable tiers of a run, fast to slow."""
    first = ["gpu"] if machine.compute_tier(tiers, device) == "gpu" else []
    return [*first, "ram", *(["nvme"] if tiers.table.nvme else [])]


def tier_budgets(run: RunSpec, workspace: int) -> dict[str, TierBudget]:
    """Return the writable tiers of a run, fast to slow, with their capacities, roundings and links.

    Args:
        workspace: Workspace bytes of a step in the compute tier.
    """
    tiers, device = run.tiers, run.device
    on_gpu = machine.compute_tier(tiers, device) == "gpu"
    is_direct = machine.moves_past_ram(tiers, device)
    budgets: dict[str, TierBudget] = {}
    if on_gpu:
        capacity = machine.gpu_capacity_bytes(tiers, device)
        alignment = PAGE_BYTES if is_direct else _GPU_ALIGNMENT_BYTES
        budgets["gpu"] = TierBudget(
            "gpu", capacity, lambda n: round_up(n, alignment), workspace, links=both_ways("gpu", "ram")
        )
    capacity = machine.ram_capacity_bytes(tiers)
    if tiers.table.ram.size.is_auto and not run.world.is_single:
        capacity -= run.world.local_size * _RANK_BYTES
    capacity = max(0, capacity) // run.world.local_size  # sizes in the config are for the whole host
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
            functools.cache(lambda n: plan_chunks(n, shares, tiers.file_bytes).slot_bytes),  # most sizes repeat
            generations=run.checkpoint.table.num_generations,
            links=(*both_ways("ram", "nvme"), *(both_ways("gpu", "nvme") if is_direct else ())),
            is_addressable=False,
            is_durable=True,
            num_processes=run.world.local_size,
        )
    return budgets


def with_folder(budgets: Mapping[str, TierBudget], program: StepProgram, reader_bytes: int) -> dict[str, TierBudget]:
    """Add the model's folder as a tier after RAM if some blocks can have their home in it.

    Args:
        reader_bytes: RAM for the buffers of the folder's readers.
    """
    nbytes = sum(block.nbytes for block in program.blocks.values() if block.in_place)
    if not nbytes:
        return dict(budgets)
    found: dict[str, TierBudget] = {}
    for name, budget in budgets.items():
        found[name] = budget
        if name == "ram":
            found[name] = replace(budget, workspace_bytes=budget.workspace_bytes + reader_bytes)
            found[FOLDER] = TierBudget(
                FOLDER, nbytes, lambda n: n, links=((FOLDER, "ram"),), is_addressable=False, is_read_only=True
            )
    return found


def both_ways(fast: str, slow: str) -> tuple[tuple[str, str], ...]:
    """Return the two links between two tiers."""
    return (fast, slow), (slow, fast)


def teacher_bytes(run: RunSpec) -> int:
    """Return the bytes of the teacher's scores that the loss reads for the tokens of a step."""
    return run.batch.num_tokens * run.objective.loss.token_nbytes


def with_workspace(budgets: Mapping[str, TierBudget], nbytes: int, compute_tier: str) -> dict[str, TierBudget]:
    """Add ``nbytes`` of workspace to RAM, and also to the compute tier, which gets a copy of the same data."""
    found = dict(budgets)
    for tier in dict.fromkeys(("ram", compute_tier)):
        found[tier] = replace(found[tier], workspace_bytes=found[tier].workspace_bytes + round_up(nbytes, PAGE_BYTES))
    return found


def with_residents(
    budgets: Mapping[str, TierBudget], run: RunSpec, program: StepProgram, profile: MachineProfile | None
) -> dict[str, TierBudget]:
    """Return the budgets with the rules for homes in GPU memory, and the RAM needed to load weights.

    Args:
        profile: Rates of this machine if its GPU computes. Without rates, the planner ranks homes by bytes.
    """
    budgets = {**budgets, "ram": replace(budgets["ram"], filling_bytes=filling_bytes(program))}
    if program.compute_tier == "ram":
        return budgets
    kinds = set(run.placement.residents)
    if not program.updates.in_compute_tier:
        kinds.discard("optimizer")  # updates outside GPU memory read the state
    gpu = profile.gpu if profile is not None else None
    rate = profile.adamw_params_per_s.get(_master(program)) if profile is not None else None
    residency = Residency(frozenset(kinds))
    if gpu is not None:
        residency = Residency(
            frozenset(kinds),
            bus_s_per_byte=0.5 / gpu.h2d_bytes_per_s + 0.5 / gpu.d2h_bytes_per_s,
            host_update_s_per_element=1 / rate if rate and run.optimizer.optim == "adamw" else 0.0,
        )
    compute = program.compute_tier
    return {**budgets, compute: replace(budgets[compute], residency=residency)}


def _master(program: StepProgram) -> str:
    """Return the dtype name of the weights, which is the key of the update rates."""
    dtype = next(block.dtype for block in program.blocks.values() if block.kind == "weights" and not block.num_packed)
    return str(dtype).removeprefix("torch.")


def filling_bytes(program: StepProgram) -> int:
    """Return the RAM needed to load or save the weights of the largest layout, with their fp32 master."""
    most, elements = 0, Counter[str]()  # elements by whole, because an export gathers all parts and shards
    for block in program.blocks.values():
        if block.kind == "weights":
            elements[block.whole] += block.num_elements * program.sharding.shards.size
    for key, block in program.blocks.items():
        if block.kind == "weights":
            parts = [block.nbytes]
            if block.dtype.itemsize == 2:
                low = stored_keys(state_key(key.rsplit("/", 1)[0], "low"), program.blocks)
                parts += [
                    4 * min(elements[block.whole], MASTER_ELEMENTS),
                    max((program.blocks[part].nbytes for part in low), default=0),
                ]
            averages = stored_keys(state_key(key.rsplit("/", 1)[0], EMA.name), program.blocks)
            parts.append(max((program.blocks[part].nbytes for part in averages), default=0))
            most = max(most, sum(round_up(nbytes, PAGE_BYTES) for nbytes in parts))
    return most
