"""The records of a plan: what is decided before a run starts, and the figures a person wants to see of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatrain.engine.program import (
    KINDS,
    Kind,
    StepProgram,
    Tick,
    VisitTrace,
)
from megatrain.models.graph import ModelGraph
from megatrain.optim import clip
from megatrain.optim.base import Optimizer
from megatrain.plan.kept import num_layers_kept
from megatrain.plan.limits import Objection
from megatrain.plan.placement import (
    DURABLE_KINDS,
    Placement,
    TierBudget,
)
from tiered.units import format_decimal_size, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatrain.checkpoint.state import CheckpointSpec
    from megatrain.data.dataset import DataSpec
    from megatrain.engine.objective import Objective
    from megatrain.models.export import ExportSpec
    from megatrain.models.graph import ModelSpec
    from megatrain.optim.factory import OptimizerSpec
    from megatrain.optim.lr import ScheduleSpec
    from megatrain.plan.machine import TierSpecs
    from megatrain.plan.placement import PlacementSpec


#: Tokens that a micro-batch aims at where the config gives tokens per step only. A constant, because the cut
#: into micro-batches is part of the numbers and must not depend on the memory of the machine.
MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The tokens of a step, and their cut into micro-batches.

    Attributes:
        num_rows: of ``max_length`` tokens in a step.
        max_length: tokens in a row.
        given_rows: of a micro-batch; None: as many as come nearest to ``MICRO_BATCH_TOKENS``.
        single_rows: without ``given_rows``: the kernels keep packed documents apart in micro-batches of one row only.
        order: "layer": each layer runs for all micro-batches before the next.
    """

    num_rows: int
    max_length: int
    given_rows: int | None
    single_rows: bool
    order: Literal["layer", "micro_batch"]

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch: as given, else the largest divisor within ``MICRO_BATCH_TOKENS``."""
        if self.given_rows is not None:
            return self.given_rows
        if self.single_rows:
            return 1
        rows, length = self.num_rows, self.max_length
        return max((n for n in range(1, rows + 1) if rows % n == 0 and n * length <= MICRO_BATCH_TOKENS), default=1)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.num_rows // self.micro_batch_rows

    @property
    def num_together(self) -> int:
        """Micro-batches whose activations are there at once."""
        return self.together(self.num_micro_batches)

    def together(self, num_micro_batches: int) -> int:
        """Return how many of so many micro-batches pass a layer before the next one runs."""
        return num_micro_batches if self.order == "layer" else 1

    @property
    def num_tokens(self) -> int:
        """Places for tokens in a step, padding included."""
        return self.num_rows * self.max_length


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run in values: what its config asks for, on this machine, as ``megatrain.config.resolve`` makes it.

    Attributes:
        name: of the run.
        output_dir: folder of the run.
        seed: of dropout and random weights.
        device: that computes.
        dtype: that layers compute in.
        grad_dtype: of gradients between two visits.
        is_deterministic: only kernels that give the same bits at every run.
        model: what is trained.
        data: on which rows.
        batch: in which pieces.
        objective: what is minimised beside cross entropy.
        optimizer: the update.
        schedule: its learning rate.
        num_epochs: passes over the data, where ``max_steps`` does not say how long the run is.
        max_steps: of the run; None: as many as the data has.
        tiers: what it may use of the machine.
        placement: where kinds of blocks may live.
        keep_graphs: layers whose graphs are kept for the backward; "auto": as many as fit.
        prefetch_bytes: fetched ahead; None: no limit but the room.
        eviction: policy of what leaves a full tier.
        trace_steps: numbers, from 1, of steps whose timeline is written.
        checkpoint: when it is saved.
        export: how the trained model is written.
    """

    name: str
    output_dir: Path
    seed: int
    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    is_deterministic: bool
    model: ModelSpec
    data: DataSpec
    batch: BatchSpec
    objective: Objective
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    num_epochs: float
    max_steps: int | None
    tiers: TierSpecs
    placement: PlacementSpec
    keep_graphs: Literal["auto"] | int
    prefetch_bytes: int | None
    eviction: Literal["schedule", "lru"]
    trace_steps: tuple[int, ...]
    checkpoint: CheckpointSpec
    export: ExportSpec

    def with_packing(self, packing: bool | Literal["concat"]) -> RunSpec:
        """Return the run with another packing of its data."""
        single_rows = self.batch.single_rows and bool(packing)
        data, batch = replace(self.data, packing=packing), replace(self.batch, single_rows=single_rows)
        return replace(self, data=data, batch=batch)


@dataclass(frozen=True, slots=True)
class MeasuredTicks:
    """Seconds of a step where all blocks are at home where they are used.

    Attributes:
        seconds: of each tick of the program, by its number.
        between_s: of a step, outside of its ticks.
        num_steps: that were timed; seconds are medians of them.
        num_micro_batches: how many they had.
        is_extrapolated: they had fewer micro-batches than the plan's steps.
        memory_bytes: that measuring took, at most, workspace included.
    """

    seconds: tuple[float, ...]
    between_s: float
    num_steps: int
    num_micro_batches: int
    is_extrapolated: bool
    memory_bytes: int

    @property
    def note(self) -> str:
        """A line for people."""
        what = f"{self.num_steps} steps of this model"
        if self.is_extrapolated:
            what += f" with {self.num_micro_batches} micro-batches each, the others by extrapolation"
        return f"computing       measured: {what}, in {format_size(self.memory_bytes)} of RAM"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a run the estimate depends on besides the plan.

    Attributes:
        tokens_per_step: T.
        num_steps: of the run; None where only the data tells.
        paths: NVMe paths.
        weights: the shares of each in what is striped, in any unit.
        has_rates: the config gives the weights.
    """

    tokens_per_step: int
    num_steps: int | None
    paths: Sequence[Path]
    weights: Sequence[float]
    has_rates: bool = False


_STEPS_OF_WEAR = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds per step at measured rates, if everything overlaps that can: a run is not faster.

    Where steps of the model were timed, ``step_s`` is what a run should take, waits included.

    Attributes:
        seconds: resource (``compute``, ``optimizer`` on the host, ``gpu optimizer``, ``nvme``, ``ram->gpu``,
            ``gpu->ram``) -> seconds that it is busy in a step.
        unmeasured: resources of which the profile has no rate; then ``step_s`` is None.
        step_s: seconds per step, and the resource that decides it.
        bound_by: seconds per step, and the resource that decides it.
        crossing_tokens: T*, the tokens per step from which on computing takes longer than moving; 0: always, None:
            never, or not known.
        written_bytes: NVMe path -> bytes written in a step.
        run_written_bytes: in the run; None where its length is not known.
        computing_s_per_nvme_byte: what computing loses while a byte goes to or from a drive; 0 where it is not known.
        seconds_per_nvme_copy: of the thread that runs the step, for each block that moves; 0 where it is not known.
        is_timed: steps of the model were timed.
        notes: on the age of the figures, or why there are none.
    """

    tokens_per_step: int
    seconds: Mapping[str, float]
    unmeasured: tuple[str, ...] = ()
    step_s: float | None = None
    bound_by: str | None = None
    crossing_tokens: float | None = None
    written_bytes: Mapping[str, int] | None = None
    run_written_bytes: Mapping[str, int] | None = None
    computing_s_per_nvme_byte: float = 0.0
    seconds_per_nvme_copy: float = 0.0
    is_timed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> Sequence[str]:
        """Lines for people."""
        lines = []
        if self.seconds:
            parts = "  ".join(f"{name} {format_duration(seconds)}" for name, seconds in self.seconds.items())
            lines.append(f"busy per step   {parts}")
        if self.step_s:
            line = f"predicted step  {format_duration(self.step_s)}{'' if self.is_timed else ' at best'}, "
            line += f"{self.tokens_per_step / self.step_s:,.0f} "
            lines.append(f"{line}tokens/s   bound by: {self.bound_by}{self._crossing()}")
        if self.written_bytes and any(self.written_bytes.values()):
            lines.append(self._wear())
        return (*lines, *self.notes)

    def _crossing(self) -> str:
        if not self.crossing_tokens:
            return ""
        return f"   T* = {self.crossing_tokens:,.0f} tokens/step (here {self.tokens_per_step:,})"

    def _wear(self) -> str:
        written = self.written_bytes or {}
        each = (
            "  ".join(f"{path} {format_decimal_size(nbytes)}" for path, nbytes in written.items())
            if len(written) > 1
            else ""
        )
        total = sum(written.values())
        if self.run_written_bytes is None:
            run = f"{format_decimal_size(total * _STEPS_OF_WEAR)} in {_STEPS_OF_WEAR:,} steps"
        else:
            run = f"{format_decimal_size(sum(self.run_written_bytes.values()))} in this run"
        return f"NVMe writes     {format_decimal_size(total)} per step, {run}   {each}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values, in bytes and seconds."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "busy_s": dict(self.seconds),
            "not_measured": list(self.unmeasured),
            "predicted_step_s": self.step_s,
            "computing_is_timed": self.is_timed,
            "predicted_tokens_per_s": self.tokens_per_step / self.step_s if self.step_s else None,
            "bound_by": self.bound_by,
            "crossing_tokens_per_step": self.crossing_tokens,
            "nvme_written_bytes_per_step": dict(self.written_bytes or {}),
            "nvme_written_bytes_per_run": None if self.run_written_bytes is None else dict(self.run_written_bytes),
            "notes": list(self.notes),
        }


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
        run: what is planned, with the packing that suits the model.
        graph: the model, its visits, the ticks of a step, the homes of its blocks.
        trace: the model, its visits, the ticks of a step, the homes of its blocks.
        program: the model, its visits, the ticks of a step, the homes of its blocks.
        placement: the model, its visits, the ticks of a step, the homes of its blocks.
        device_optimizer: makes the updates of groups that live in GPU memory; None: there is none.
        host_updates: why all updates are made in RAM although there is a GPU tier, or "".
        budgets_by_tier: capacities, fast to slow.
        estimate: time and wear of a step at the rates that were measured on this machine.
        ticks: what each tick computes, where steps of this model were timed; no decision depends on it.
        kept_bytes: of the compute tier's workspace, what the graphs take that wait for their backward.
        objections: what speaks against running it on this machine.
        room_beside_tier: what of a GPU's memory is left to libraries, in a sentence; "": there is no GPU.
        carried_tensors: what the model's folder has beside what is trained, in words; "": nothing, or nobody looked.
        packing_warning: why ``run.data.packing`` is not the default; "": it is, or is what the config says.
    """

    run: RunSpec
    graph: ModelGraph
    trace: VisitTrace
    program: StepProgram
    placement: Placement
    optimizer: Optimizer
    budgets_by_tier: Mapping[str, TierBudget]
    device_optimizer: Optimizer | None = None
    host_updates: str = ""
    fits: bool = True
    estimate: Estimate | None = None
    ticks: MeasuredTicks | None = None
    kept_bytes: int = 0
    objections: Sequence[Objection] = ()
    room_beside_tier: str = ""
    carried_tensors: str = ""
    packing_warning: str = ""

    @property
    def device(self) -> torch.device:
        """The one that computes."""
        return self.run.device

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch."""
        return self.run.batch.micro_batch_rows

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.run.batch.num_micro_batches

    @property
    def shape(self) -> StepShape:
        """What the estimate depends on besides."""
        tiers = self.run.tiers
        paths = [drive.path for drive in tiers.drives]
        return StepShape(self.run.batch.num_tokens, self.run.max_steps, paths, tiers.rates, tiers.has_rates)

    @property
    def headline(self) -> str:
        """Model, format and tokens, in one line."""
        run, count = self.run, self.graph.num_parameters
        name = run.model.folder.rstrip("/").split("/")[-1]
        size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
        layers = sum(unit.is_layer for unit in self.graph.units)
        dtype, task = str(run.dtype).removeprefix("torch."), "pretrain" if run.data.only_text else "sft"
        tokens = f"{run.batch.num_tokens:,} tokens/step"
        return f"{name}  {size} parameters, {layers} layers   {task}, {dtype}, {tokens}"

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
        updates: tuple[str, ...] = (self.carried_tensors,) if self.carried_tensors else ()
        updates += () if compute == "ram" else (self._where_updates_are_made(),)
        if self.run.checkpoint.num_copies and self.checkpoint_bytes_on_drives:
            size = format_size(self.checkpoint_bytes_on_drives)
            count = self.run.checkpoint.num_copies
            updates += (f"output_dir comes to hold {count} whole copies of checkpoints, {size} each: save_copy",)
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
