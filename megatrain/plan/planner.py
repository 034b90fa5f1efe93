"""From a config to a plan: model graph, program of a step, placement. Touches no data and allocates nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.determinism import deterministic_kernels
from megatrain.engine.objective import Objective
from megatrain.engine.program import KINDS, Kind, ProgramBuilder, StepProgram, Tick
from megatrain.engine.tiled import tile_mlps
from megatrain.engine.trace import VisitTrace, trace_visits
from megatrain.models.errors import UnsupportedModelError
from megatrain.models.graph import ModelGraph, build_graph
from megatrain.models.kept import kept_modules
from megatrain.models.liger import check_liger_kernels
from megatrain.optim import clip
from megatrain.optim.base import Optimizer
from megatrain.optim.factory import check_groups, make_optimizer
from megatrain.optim.on_device import DeviceKernelError, device_optimizer
from megatrain.plan import machine
from megatrain.plan.budgets import gradient_staging_bytes, tier_budgets, with_residents, workspace_bytes
from megatrain.plan.cost import Estimate, estimate_step
from megatrain.plan.drives import StepShape, measured_drive_rates
from megatrain.plan.kept import GraphKeeper, num_layers_kept, weights_stay
from megatrain.plan.limits import Objection, find_objections
from megatrain.plan.profile import load_profile
from megatrain.plan.simulate import measured_rates, simulate_step
from megatrain.plan.solve import (
    DURABLE_KINDS,
    MIN_GENERATIONS,
    DoesNotFitError,
    Placement,
    PlacementSolver,
    TierBudget,
)
from tiered.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from megatrain.config.schema import RunConfig
    from megatrain.plan.measure import MeasuredTicks

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

_TITLES: Mapping[Kind, str] = {
    "weights": "weights",
    "activations": "activations",
    "gradients": "gradients",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run starts, and the figures a person wants to see of it.

    Attributes:
        graph: the model, its visits, the ticks of a step, the homes of its blocks.
        trace: the model, its visits, the ticks of a step, the homes of its blocks.
        program: the model, its visits, the ticks of a step, the homes of its blocks.
        placement: the model, its visits, the ticks of a step, the homes of its blocks.
        device_optimizer: makes the updates of groups that live in GPU memory; None: there is none.
        host_updates: why all updates are made in RAM although there is a GPU tier, or "".
        budgets_by_tier: capacities, fast to slow.
        micro_batch_size: rows, and their number.
        num_micro_batches: rows, and their number.
        nvme_rates: shares of the NVMe paths in what is striped, in any unit.
        estimate: time and wear of a step at the rates that were measured on this machine.
        ticks: what each tick computes, where steps of this model were timed; no decision depends on it.
        kept_bytes: of the compute tier's workspace, what the graphs take that wait for their backward.
        copies: whole copies of checkpoints that ``output_dir`` holds at most.
        objections: what speaks against running it on this machine.
        room_beside_tier: what of a GPU's memory is left to libraries, in a sentence; "": there is no GPU.
        kept_tensors: what the model's folder has beside what is trained, in words; "": nothing, or nobody looked.
    """

    graph: ModelGraph
    trace: VisitTrace
    program: StepProgram
    placement: Placement
    optimizer: Optimizer
    device: torch.device
    budgets_by_tier: Mapping[str, TierBudget]
    micro_batch_size: int
    num_micro_batches: int
    nvme_rates: Sequence[float]
    headline: str
    device_optimizer: Optimizer | None = None
    host_updates: str = ""
    fits: bool = True
    estimate: Estimate | None = None
    ticks: MeasuredTicks | None = None
    kept_bytes: int = 0
    copies: int = 0
    objections: Sequence[Objection] = ()
    room_beside_tier: str = ""
    kept_tensors: str = ""

    @property
    def tiers(self) -> Sequence[str]:
        return tuple(self.budgets_by_tier)

    @property
    def rows(self) -> Sequence[tuple[str, Mapping[str, int], str]]:
        """(kind, tier -> bytes, note) for the table."""
        notes = self._notes()
        rows: list[tuple[str, Mapping[str, int], str]] = [
            (_TITLES[kind], {tier: self.placement.home_bytes[tier][kind] for tier in self.tiers}, notes[kind])
            for kind in KINDS
        ]
        rows.append(("working set", self.placement.working_bytes, "copies away from home that one tick needs at once"))
        precision = "exact" if self.trace.exact else "estimated"
        if any(self.placement.generation_bytes.values()):
            count = max(budget.generations for budget in self.budgets_by_tier.values())
            note = f"{count} at most beside the live blocks there; the rest is written to output_dir"
            rows.append(("checkpoints", self.placement.generation_bytes, note))
        workspace = dict(self.placement.workspace_bytes)
        if self.kept_bytes:
            tier = self.program.compute_tier
            workspace[tier] -= self.kept_bytes
            kept, layers = num_layers_kept(self.graph, self.trace, self.program)
            note = f"{kept} of {layers} layers are not recomputed: their graphs wait for the backward"
            rows.append(("kept graphs", {name: self.kept_bytes * (name == tier) for name in self.tiers}, note))
        rows.append(("workspace", workspace, f"activations inside one unit, logits; {precision}"))
        return rows

    @property
    def totals(self) -> Mapping[str, int]:
        return {tier: self.placement.peak_bytes(tier) for tier in self.tiers}

    @property
    def budgets(self) -> Mapping[str, int]:
        return {tier: budget.capacity_bytes for tier, budget in self.budgets_by_tier.items()}

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes that cross each link in one step."""
        return self.placement.traffic_bytes

    @property
    def checkpoint_bytes_in_output_dir(self) -> int:
        """Bytes of one checkpoint that are written to ``output_dir``: of durable blocks at home in no file tier."""
        homes, blocks = self.placement.homes, self.program.blocks.values()
        return sum(b.nbytes for b in blocks if b.kind in DURABLE_KINDS and homes[b.key] != "nvme")

    @property
    def guesses(self) -> Sequence[str]:
        """What of the workspace had to be guessed, and why; nothing where it is exact."""
        return self.trace.guesses

    @property
    def checkpoint_bytes_on_drives(self) -> int:
        """Bytes of one checkpoint that stay on the drives, and that a whole copy of it writes to ``output_dir``."""
        homes, blocks = self.placement.homes, self.program.blocks.values()
        return sum(b.nbytes for b in blocks if b.kind in DURABLE_KINDS and homes[b.key] == "nvme")

    @property
    def messages(self) -> Sequence[str]:
        estimates = [f"the workspace is estimated: {guess}" for guess in self.guesses]
        if self.trace.uncounted:
            estimates.append(f"the FLOPs of a step are not known: {'; '.join(self.trace.uncounted)}")
        beside = [self.room_beside_tier] if self.room_beside_tier else []
        return (*self._messages_of_moves(), *beside, *estimates)

    def _messages_of_moves(self) -> tuple[str, ...]:
        compute = self.program.compute_tier
        placement, capacity = self.placement, self.budgets_by_tier[compute].capacity_bytes
        updates: tuple[str, ...] = (self.kept_tensors,) if self.kept_tensors else ()
        updates += () if compute == "ram" else (self._where_updates_are_made(),)
        if self.copies and self.checkpoint_bytes_on_drives:
            size = format_size(self.checkpoint_bytes_on_drives)
            updates += (f"output_dir comes to hold {self.copies} whole copies of checkpoints, {size} each: save_copy",)
        if placement.direct:
            updates += ("nvme->gpu, gpu->nvme: copies between drives and GPU memory do not pass ram",)
        if not any(self.traffic.values()):
            return (f"every block is at home in {compute}: nothing is fetched", *updates)
        held = sum(placement.home_bytes[compute].values()) + placement.workspace_bytes.get(compute, 0)
        return (
            f"{format_size(capacity - held)} of {compute} are open to copies; half of the ticks need at most "
            f"{format_size(placement.median_working_bytes[compute])}, the rest is fetched ahead",
            *updates,
        )

    @property
    def device_updates(self) -> Sequence[Tick]:
        """The updates that are made in GPU memory."""
        program, homes = self.program, self.placement.homes
        return [tick for tick in self._updates if program.tier_of(tick, homes) == program.compute_tier != "ram"]

    @property
    def _updates(self) -> Sequence[Tick]:
        return [tick for tick in self.program.ticks if tick.phase == "update"]

    def warm_up(self) -> None:
        """Compile or load the kernels of this run's updates, of host and device, so that no step pays for it."""
        gradients = {block.dtype for block in self.program.blocks.values() if block.kind == "gradients"}
        formats = [(self.graph.dtype.itemsize == 2, dtype) for dtype in gradients]
        self.optimizer.warm_up(formats)
        if self.device_optimizer is not None and self.device_updates:
            self.device_optimizer.warm_up(formats)
        clip.warm_up()

    def num_updated(self, *, on_gpu: bool) -> int:
        """Return the elements of weights that a step updates on a GPU, or on the host, which may take its place."""
        there = self.device_updates if self.device.type == "cuda" else ()
        return self._num_elements(there if on_gpu else [tick for tick in self._updates if tick not in there])

    def _num_elements(self, updates: Iterable[Tick]) -> int:
        blocks = [self.program.blocks[key] for tick in updates for key, _ in tick.held]
        return sum(block.num_elements for block in blocks if block.kind == "weights")

    def _where_updates_are_made(self) -> str:
        if self.host_updates:
            return f"updates are made in ram: {self.host_updates}"
        there = self.device_updates
        share = 100 * self._num_elements(there) // max(1, self._num_elements(self._updates))
        which = f"{len(there)} of {len(self._updates)} groups of blocks, {share} % of the trained parameters,"
        return f"{which} live in gpu and are updated there"

    def _notes(self) -> dict[Kind, str]:
        notes: dict[Kind, str] = {}
        homes = self.placement.homes
        elsewhere = {access.key for access in self.program.accesses(homes) if homes[access.key] != access.tier}
        for kind in KINDS:
            blocks = [block for block in self.program.blocks.values() if block.kind == kind]
            dtypes = ", ".join(dict.fromkeys(str(block.dtype).removeprefix("torch.") for block in blocks))
            away = sum(block.key in elsewhere for block in blocks)
            at_home = f"{dtypes}; {len(blocks) - away} of {len(blocks)} blocks at home where they are used"
            notes[kind] = at_home if blocks else "none"
        notes["activations"] += f"; micro-batches {self.num_micro_batches} x {self.micro_batch_size} rows"
        return notes


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
    if config.data.packing and kept_modules(graph.model) is not None:
        # Several of transformers' classes let packed texts attend to each other, by positions of three dimensions, by
        # masks of their own or by linear attention; nothing they declare tells which.
        raise UnsupportedModelError(
            type(graph.model).__name__,
            "as it reads images as well, it may not keep apart the texts that share a row. Write data.packing = false",
        )
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
