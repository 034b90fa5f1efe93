"""What a plan may use of each tier, and what it must leave free there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.engine.program import KINDS, layouts_of_unit, state_key
from megatrain.plan import machine
from megatrain.plan.resident import Residency
from megatrain.plan.solve import MIN_GENERATIONS, TierBudget
from tiered.tiers.stripe import check_rates, plan_chunks
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from megatrain.config.schema import RunConfig
    from megatrain.engine.program import StepProgram
    from megatrain.engine.trace import VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.plan.profile import MachineProfile

GPU_ALIGNMENT_BYTES = 512


def workspace_bytes(trace: VisitTrace, num_micro_batches: int) -> int:
    """Return what the compute device holds outside blocks at its fullest.

    All micro-batches' streams are there between two units, each with the input of one and the output of the other;
    one micro-batch at a time is computed.
    """
    streams = max((visit.held_nbytes for visit in trace.visits), default=0)
    inside = max((max(visit.forward_nbytes, visit.backward_nbytes) for visit in trace.visits), default=0)
    return round_up(2 * num_micro_batches * streams + max(inside, trace.head_nbytes), PAGE_BYTES)


def gradient_staging_bytes(graph: ModelGraph, trace: VisitTrace, config: RunConfig) -> int:
    """Return what the fp32 sums of gradients take that are kept in another dtype, at the fullest visit."""
    if config.precision.grad_dtype == "float32":
        return 0
    nbytes_by_visit = [
        sum(4 * graph.layouts[name].num_elements for name in layouts_of_unit(graph, visit.unit))
        for visit in trace.visits
    ]
    head = sum(nbytes for nbytes, visit in zip(nbytes_by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head, *nbytes_by_visit])


def tier_budgets(
    config: RunConfig, device: torch.device, workspace: int, rates: Sequence[float]
) -> dict[str, TierBudget]:
    """Return the tiers of the run, fast to slow, with their capacities and roundings."""
    on_gpu = machine.compute_tier(config, device) == "gpu"
    is_direct = machine.moves_past_ram(config, device)
    budgets: dict[str, TierBudget] = {}
    if on_gpu:
        capacity = machine.gpu_capacity_bytes(config, device)
        alignment = PAGE_BYTES if is_direct else GPU_ALIGNMENT_BYTES
        budgets["gpu"] = TierBudget("gpu", capacity, lambda n: round_up(n, alignment), workspace)
    capacity = machine.ram_capacity_bytes(config)
    budgets["ram"] = TierBudget("ram", capacity, lambda n: round_up(n, PAGE_BYTES), 0 if on_gpu else workspace)
    if config.tiers.nvme:
        shares = check_rates(rates, len(config.tiers.nvme))
        capacity = machine.nvme_capacity_bytes(config)
        file_size = config.advanced.file_size
        budgets["nvme"] = TierBudget(
            "nvme",
            capacity,
            lambda n: plan_chunks(n, shares, file_size).slot_bytes,
            generations=max(config.checkpoint.save_total_limit, MIN_GENERATIONS) if config.checkpoint.is_on else 0,
            direct_to=frozenset({"gpu"} if is_direct else ()),
        )
    return budgets


def with_residents(
    budgets: Mapping[str, TierBudget], config: RunConfig, program: StepProgram, profile: MachineProfile | None
) -> dict[str, TierBudget]:
    """Return the budgets with what decides about homes in GPU memory, and what that takes in RAM.

    Args:
        profile: of this machine, if its GPU is the compute device; where it lacks a rate, bytes decide.
    """
    if program.compute_tier == "ram":
        return dict(budgets)
    wanted = {kind: getattr(config.placement, kind) for kind in KINDS}
    kinds = {kind for kind, tiers in wanted.items() if tiers == "auto" or "gpu" in tiers}
    if not program.updates_in_compute_tier:
        kinds.discard("optimizer")  # state is worth nothing where nobody can use it
    gpu = profile.gpu if profile is not None else None
    rate = profile.adamw_params_per_s.get(_master(program)) if profile is not None else None
    residency = Residency(frozenset(kinds))
    if gpu is not None:
        residency = Residency(
            frozenset(kinds),
            bus_s_per_byte=0.5 / gpu.h2d_bytes_per_s + 0.5 / gpu.d2h_bytes_per_s,
            host_update_s_per_element=1 / rate if rate and config.optimizer.optim == "adamw" else 0.0,
        )
    compute = program.compute_tier
    return {
        **budgets,
        compute: replace(budgets[compute], residency=residency),
        "ram": replace(budgets["ram"], filling_bytes=filling_bytes(program)),
    }


def _master(program: StepProgram) -> str:
    """Return the name of the weights' dtype, by which rates of updates are kept."""
    dtype = next(block.dtype for block in program.blocks.values() if block.kind == "weights")
    return str(dtype).removeprefix("torch.")


def filling_bytes(program: StepProgram) -> int:
    """Return what the weights of the largest layout take in RAM on their way in or out, with their fp32 master."""
    most = 0
    for key, block in program.blocks.items():
        if block.kind == "weights":
            parts = [block.nbytes]
            if block.dtype.itemsize == 2:
                low = program.blocks.get(state_key(key.rsplit("/", 1)[0], "low"))
                parts += [4 * block.num_elements, low.nbytes if low is not None else 0]
            most = max(most, sum(round_up(nbytes, PAGE_BYTES) for nbytes in parts))
    return most
