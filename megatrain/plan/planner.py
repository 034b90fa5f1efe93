"""From a config to a plan: model graph, program of a step, placement. Touches no data and allocates nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.environment import deterministic_kernels
from megatrain.engine.objective import Objective
from megatrain.engine.program import (
    KINDS,
    Kind,
    ProgramBuilder,
    StepProgram,
    VisitTrace,
    layouts_of_unit,
    state_key,
)
from megatrain.engine.tiled import tile_mlps
from megatrain.engine.trace import trace_visits
from megatrain.models.graph import ModelGraph, build_graph
from megatrain.models.liger import check_liger_kernels
from megatrain.optim.base import Optimizer
from megatrain.optim.factory import check_groups, make_optimizer
from megatrain.optim.on_device import DeviceKernelError, device_optimizer
from megatrain.plan import machine
from megatrain.plan.estimate import estimate_step, measured_drive_rates
from megatrain.plan.kept import GraphKeeper, weights_stay
from megatrain.plan.limits import find_objections
from megatrain.plan.machine import load_profile
from megatrain.plan.packing import settle_packing
from megatrain.plan.placement import (
    MIN_GENERATIONS,
    DoesNotFitError,
    PlacementSolver,
    Residency,
    TierBudget,
)
from megatrain.plan.plan import Plan, StepShape
from megatrain.plan.simulate import measured_rates, simulate_step
from tiered.ext import check_rates, plan_chunks
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from megatrain.config.schema import RunConfig
    from megatrain.plan.machine import MachineProfile

#: Tokens that a micro-batch aims at where the config gives tokens per step only. A constant, because the cut
#: into micro-batches is part of the numbers and must not depend on the memory of the machine.
MICRO_BATCH_TOKENS = 2048

#: Shares of RAM and GPU memory that may be kept open to copies where not everything is at home, the usual one first
#: (docs/decisions/0008-open-room.md).
OPEN_SHARES = (0.1, 0.0, 0.2, 0.35, 0.5)
#: Share of the open room that copies may take which wait for their next use (docs/decisions/0009-stays.md).
STAY_SHARE = 0.9
#: A plan must be this much faster than the one before it in the list to be preferred.
WORTHWHILE = 0.99


def plan_run(config: RunConfig, *, padded: bool | None = None) -> Plan:
    """Plan a run.

    Args:
        padded: whether rows may come with a mask, of memory quadratic in their length; False: each is one document
            without padding. None: as the data comes; a micro-batch of one row that is not packed has none.

    Raises:
        DoesNotFitError: a tier is too small; it names the size that would do.
        ModelFolderError: the model cannot be trained.
        UnsupportedModelError: the model cannot be trained.
        FreezeError: the model cannot be trained.
        ParameterGroupError: a group of the optimizer names no parameter.
    """
    device = machine.resolve_device(config)
    dtype = machine.resolve_compute_dtype(config, device)
    graph = _make_graph(config, device, dtype)
    config, packing_warning = settle_packing(config, graph)
    check_groups(config.optimizer, (e for layout in graph.layouts.values() if layout.trainable for e in layout.entries))
    micro_batch_size = micro_batch_rows(config)
    num_micro_batches = config.rows_per_step // micro_batch_size
    objective = Objective.of(config.training)
    if padded is None:
        padded = bool(config.data.packing) or micro_batch_size > 1
    # As the run will be: which kernels there are to choose from, and what they take, depends on it.
    with deterministic_kernels(device, type(graph.model).__name__, enabled=config.full_determinism):
        trace = trace_visits(
            graph, micro_batch_size, config.data.max_length, dtype, device=device, objective=objective, padded=padded
        )
    optimizer = make_optimizer(config.optimizer)
    on_device, host_updates = _on_device(config, optimizer, device)
    program = _build_program(config, graph, trace, optimizer, machine.compute_tier(config, device), on_device)
    together = num_micro_batches if config.advanced.micro_batch_order == "layer" else 1
    workspace = workspace_bytes(trace, together) + gradient_staging_bytes(graph, trace, config)
    rates, profile = nvme_rates(config), load_profile()
    budgets = tier_budgets(config, device, workspace, rates)
    budgets = with_residents(budgets, config, program, profile.machine if device.type == "cuda" else None)
    allowed = allowed_tiers(config, list(budgets))
    kept = GraphKeeper(graph, trace, program, budgets, allowed, together).solve(_graphs_wanted(config))
    plan = Plan(
        graph=graph,
        trace=trace,
        program=kept.program,
        placement=kept.placement,
        optimizer=optimizer,
        device=device,
        budgets_by_tier=kept.budgets,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        nvme_rates=tuple(rates),
        headline=_headline(config, graph),
        kept_bytes=kept.nbytes,
        device_optimizer=on_device,
        host_updates=host_updates,
        room_beside_tier=machine.gpu_room_beside_tier(budgets[program.compute_tier].capacity_bytes, device),
        copies=copies_at_most(config),
        packing=config.data.packing,
        packing_warning=packing_warning,
    )
    shape = step_shape(config, rates)
    plan = replace(plan, estimate=estimate_step(plan, shape, profile))
    if any(plan.traffic.values()):
        plan = fastest(
            replace(other, estimate=estimate_step(other, shape, profile)) for other in with_open_room(plan, allowed)
        )
    return replace(plan, objections=find_objections(config, device, plan.totals))


def _make_graph(config: RunConfig, device: torch.device, dtype: torch.dtype) -> ModelGraph:
    table = config.model
    graph = build_graph(
        table.model_name_or_path,
        attn_implementation=table.attn_implementation,
        freeze=table.freeze,
        dtype=dtype,
        text_only=table.train_from_scratch,
    )
    if table.use_liger_kernel:
        check_liger_kernels(graph.model, device)
    if table.mlp_rows:
        tile_mlps(graph, table.mlp_rows)
    return graph


def _graphs_wanted(config: RunConfig) -> Literal["auto"] | int:
    """Return the layers whose graphs are to be kept. Nobody knows what graphs of kernels take that were not traced."""
    wanted, has_other_kernels = config.advanced.keep_graphs, config.model.compile or config.model.use_liger_kernel
    return 0 if wanted == "auto" and has_other_kernels else wanted


def _build_program(
    config: RunConfig,
    graph: ModelGraph,
    trace: VisitTrace,
    optimizer: Optimizer,
    compute_tier: str,
    on_device: Optimizer | None,
) -> StepProgram:
    return ProgramBuilder(
        graph,
        trace,
        num_micro_batches=config.rows_per_step // micro_batch_rows(config),
        order=config.advanced.micro_batch_order,
        compute_tier=compute_tier,
        compute_dtype=graph.dtype,
        state_kinds=optimizer.state_kinds(graph.dtype.itemsize == 2),
        grad_dtype=getattr(torch, config.precision.grad_dtype),
        defer_updates=defers_updates(config),
        updates_in_compute_tier=on_device is not None,
    ).build()


def _on_device(config: RunConfig, optimizer: Optimizer, device: torch.device) -> tuple[Optimizer | None, str]:
    """Return what updates blocks in GPU memory; or None, and why there is nothing although there is such memory."""
    if machine.compute_tier(config, device) == "ram":
        return None, ""
    try:
        return device_optimizer(optimizer, device), ""
    except DeviceKernelError as error:
        return None, str(error)


def with_open_room(plan: Plan, allowed: Mapping[Kind, Sequence[str]]) -> Iterator[Plan]:
    """Yield the plan with more and more of RAM and GPU memory kept open to copies, the usual share first.

    Homes save traffic; open room lets copies be fetched further ahead. Neither changes a number of the run.
    """
    budgets = list(plan.budgets_by_tier.values())
    for share in OPEN_SHARES:
        room = {tier: int(share * plan.budgets[tier]) for tier in {"ram", plan.program.compute_tier}}
        try:
            placement = PlacementSolver(plan.program, budgets, allowed, room, STAY_SHARE).solve()
        except DoesNotFitError:  # the drive has no room for what RAM keeps open
            continue
        if weights_stay(plan.graph, plan.trace, plan.program, placement.homes):
            yield replace(plan, placement=placement)
    if plan.program.kept:
        yield plan


def fastest(plans: Iterable[Plan]) -> Plan:
    """Return the plan whose replayed step is the shortest; the first where this machine was not measured."""
    best, best_s = None, math.inf
    seen: list[Mapping[str, str]] = []
    for plan in plans:
        rates = measured_rates(plan)
        if rates is None or plan.estimate is None:
            return plan
        if plan.placement.homes in seen:
            continue
        seen.append(plan.placement.homes)
        step_s = simulate_step(plan, plan.estimate.tokens_per_step, rates).step_s
        if step_s < WORTHWHILE * best_s:
            best, best_s = plan, step_s
    assert best is not None
    return best


def copies_at_most(config: RunConfig) -> int:
    """Return how many whole copies of checkpoints are there at once: while one is made, the one before stays."""
    table = config.checkpoint
    return max(table.save_total_limit, MIN_GENERATIONS) if table.is_on and table.save_copy is not False else 0


def defers_updates(config: RunConfig) -> bool:
    """Return whether updates wait for the norm of all gradients; only who asks for neither check can do without."""
    return config.optimizer.max_grad_norm > 0 or config.optimizer.nonfinite != "ignore"


def micro_batch_rows(config: RunConfig) -> int:
    """Return the rows of a micro-batch: as configured, else the largest divisor within ``MICRO_BATCH_TOKENS``."""
    if config.micro_batch_size is not None:
        return config.micro_batch_size
    if config.data.packing and config.model.attn_implementation == "flash_attention_2":
        return 1  # its kernels keep packed documents apart in batches of one row only
    rows = config.rows_per_step
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n * config.data.max_length <= MICRO_BATCH_TOKENS]
    return max(fitting, default=1)


def nvme_rates(config: RunConfig) -> list[float]:
    """Return the relative weights of the NVMe paths: as configured, else as measured on this machine, else equal."""
    paths = [table.path for table in config.tiers.nvme]
    given = [table.rate for table in config.tiers.nvme if table.rate is not None]
    if len(paths) <= 1 or len(given) == len(paths):
        return given or [1.0] * len(paths)
    return measured_drive_rates(paths, load_profile().machine) or [1.0] * len(paths)


def step_shape(config: RunConfig, rates: Sequence[float]) -> StepShape:
    """Return what the estimate of a step needs of the config."""
    return StepShape(
        tokens_per_step=config.rows_per_step * config.data.max_length,
        num_steps=config.training.max_steps if config.training.max_steps > 0 else None,
        paths=[table.path for table in config.tiers.nvme],
        weights=rates,
        has_rates=all(table.rate is not None for table in config.tiers.nvme),
    )


def allowed_tiers(config: RunConfig, tiers: Sequence[str]) -> dict[Kind, Sequence[str]]:
    """Return for each kind the tiers that may be its home, preferred first.

    GPU memory is among them where the config names it; what else lives there is a matter of ``residency``.
    """
    default = [tier for tier in tiers if tier != "gpu"]
    allowed: dict[Kind, Sequence[str]] = {}
    for kind in KINDS:
        wanted = getattr(config.placement, kind)
        allowed[kind] = default if wanted == "auto" else [tier for tier in wanted if tier in tiers] or default
    return allowed


def _headline(config: RunConfig, graph: ModelGraph) -> str:
    name = config.model.model_name_or_path.rstrip("/").split("/")[-1]
    count = graph.num_parameters
    size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    layers = sum(unit.is_layer for unit in graph.units)
    dtype = str(graph.dtype).removeprefix("torch.")
    tokens = config.rows_per_step * config.data.max_length
    return f"{name}  {size} parameters, {layers} layers   {config.task}, {dtype}, {tokens:,} tokens/step"


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
