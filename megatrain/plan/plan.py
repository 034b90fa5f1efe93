"""Records of a plan, which contains all decisions made before a run starts. ``megatrain.plan.show`` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatrain.checkpoint.table import CheckpointSpec
from megatrain.converters.spec import ModelSpec
from megatrain.data.dataset import DataSpec
from megatrain.engine.device import device_kernels
from megatrain.engine.device.flash import FlashKernels
from megatrain.engine.head.objective import Objective
from megatrain.engine.program.encoding import Encoding
from megatrain.engine.program.forward_programs import evaluation_program
from megatrain.engine.program.step_program import StepProgram, Tick
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.table import RecomputeChoice
from megatrain.engine.tape.streamed import StepRecipe, StreamedModel
from megatrain.engine.tape.updates import weight_is_split
from megatrain.engine.unit.compiled_layers import LayerCompiler
from megatrain.machine.resources import TierSpecs
from megatrain.models.graph import ModelGraph
from megatrain.models.in_place import FrozenBlock
from megatrain.models.table import ExportConfig
from megatrain.optim import clip
from megatrain.optim.base import Optimizer
from megatrain.optim.factory import segment_builder
from megatrain.optim.on_device import warm_up_norm
from megatrain.optim.table import OptimizerConfig
from megatrain.plan.limits import Objection
from megatrain.plan.placement import Placement, PlacementSpec, TierBudget
from megatrain.plan.table import AdvancedConfig
from megatrain.ranks.collectives import Collectives, SingleRank, collectives_of
from megatrain.ranks.lanes import Lanes
from megatrain.ranks.shards import RankLanes, RankShards, Sharding
from megatrain.ranks.world import World
from tiered.units import format_size

#: Target tokens of a micro-batch by device type, if the config sets only tokens per step. They are constants because
#: the split into micro-batches affects results and so must not depend on the machine's memory. A GPU needs more tokens:
#: with shorter matrix products, the host could not launch kernels ahead.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The rows of a step and their split into micro-batches.

    Attributes:
        num_rows: Number of rows in a step. Each has ``max_length`` tokens.
        max_length: Tokens in a row.
        given_rows: Rows of a micro-batch, or None to choose the number closest to ``aimed_tokens``.
        single_rows: Whether micro-batches have one row by default, because the kernels cannot otherwise separate packed
            documents.
        order: "layer" runs all micro-batches through each layer before the next layer.
        aimed_tokens: Target tokens of a micro-batch; see ``MICRO_BATCH_TOKENS``.
        num_lanes: Lanes that add the gradients of micro-batches (``ranks/lanes.py``), or None for one per rank.
        rows_per_example: Number of rows of an example. They must be in the same micro-batch.
    """

    num_rows: int
    max_length: int
    given_rows: int | None
    single_rows: bool
    order: Literal["layer", "micro_batch"]
    aimed_tokens: int = MICRO_BATCH_TOKENS["cpu"]
    num_lanes: int | None = None
    rows_per_example: int = 1

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch: as configured, else the largest divisor within ``aimed_tokens`` that fills all lanes.

        The number of processes has no influence, because it can change at each start and must not affect results.
        """
        if self.given_rows is not None:
            return self.given_rows
        if self.single_rows:
            return 1
        rows, together = self.num_rows, self.rows_per_example
        most = min(self.aimed_tokens // self.max_length, rows // (self.num_lanes or 1))
        return max((n for n in range(together, most + 1, together) if rows % n == 0), default=together)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.num_rows // self.micro_batch_rows

    def together(self, num_micro_batches: int) -> int:
        """Return how many of ``num_micro_batches`` run through one layer before any of them runs through the next."""
        return num_micro_batches if self.order == "layer" else 1

    @property
    def num_tokens(self) -> int:
        """Token positions in a step, including padding."""
        return self.num_rows * self.max_length


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The resolved config of a run on this machine. ``megatrain.training.resolve`` creates it.

    Attributes:
        task: Name in ``megatrain.tasks.table``.
        seed: Seed of dropout and random weights.
        dtype: Compute dtype of layers.
        grad_dtype: Dtype of gradients between two visits.
        is_deterministic: Whether only deterministic kernels are allowed.
        objective: Loss that the steps minimize, and noise on the embeddings.
        num_epochs: Passes over the data if ``max_steps`` is None.
        max_steps: Maximum number of steps, or None if ``num_epochs`` sets the length.
        recompute: Config of activation checkpointing.
        advanced: Table ``[advanced]``, for example prefetch and eviction.
        trace_steps: 1-based numbers of the steps whose timeline is written.
    """

    name: str
    task: str
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
    optimizer: OptimizerConfig
    num_epochs: float
    max_steps: int | None
    tiers: TierSpecs
    placement: PlacementSpec
    recompute: RecomputeChoice
    advanced: AdvancedConfig
    trace_steps: tuple[int, ...]
    checkpoint: CheckpointSpec
    export: ExportConfig
    world: World = field(default_factory=World.single)

    def __post_init__(self) -> None:
        if self.batch.num_lanes is None and not self.world.is_single:
            # The config does not set the lanes, but the split of a step into micro-batches depends on them.
            object.__setattr__(self, "batch", replace(self.batch, num_lanes=self.world.size))

    @property
    def lanes(self) -> RankLanes:
        """Assignment of the step's lanes to ranks."""
        return RankLanes(self.num_lanes, self.world.size, self.world.num_hosts)

    @property
    def num_lanes(self) -> int:
        """Lanes that add the gradients of a step's micro-batches."""
        return self.batch.num_lanes or 1

    @property
    def one_at_a_time(self) -> RunSpec | None:
        """A copy of the run with one micro-batch at a time, or None if that would change results or nothing."""
        same_bits = self.world.is_single and self.num_lanes == 1 and self.grad_dtype == torch.float32
        if not same_bits or self.batch.num_micro_batches < 2 or self.batch.order == "micro_batch":
            return None
        advanced = self.advanced.model_copy(update={"micro_batch_order": "micro_batch"})
        return replace(self, batch=replace(self.batch, order="micro_batch"), advanced=advanced)

    def sharding(self, gathers_ahead: int) -> Sharding:
        """Return this rank's part of a step that gathers weights ``gathers_ahead`` visits ahead."""
        rank, size = self.world.rank, self.world.size
        own_lanes = Lanes.of_rank(rank, size, self.num_lanes, self.batch.num_micro_batches)
        return Sharding(RankShards(rank, size), self.lanes, own_lanes, gathers_ahead)

    @property
    def own_micro_batches(self) -> range:
        """Numbers of the micro-batches of a step that this rank computes."""
        return self.lanes.micro_batches_of_rank(self.world.rank, self.batch.num_micro_batches)

    def tokens_of_rank(self, rank: int) -> int:
        """Return the token positions in a rank's micro-batches of a step."""
        own = self.lanes.micro_batches_of_rank(rank, self.batch.num_micro_batches)
        return len(own) * self.batch.micro_batch_rows * self.batch.max_length

    @property
    def num_own_tokens(self) -> int:
        """Token positions in this rank's micro-batches of a step."""
        return self.tokens_of_rank(self.world.rank)

    @property
    def num_fullest_tokens(self) -> int:
        """Token positions in the busiest rank's micro-batches. All other ranks wait for this rank."""
        return max(map(self.tokens_of_rank, range(self.world.size)))

    def as_fullest_rank(self, size: int, num_hosts: int = 1) -> RunSpec:
        """Return the run as the busiest rank of a hypothetical world executes it. Ties go to the lowest rank.

        Args:
            size: Number of ranks on all hosts.
        """
        first = replace(self, world=World.local(0, size, num_hosts))
        if first.num_lanes < size or 1 < num_hosts < size:  # the planner refuses both cases
            return first
        return replace(self, world=World.local(max(range(size), key=first.tokens_of_rank), size, num_hosts))

    @property
    def num_together(self) -> int:
        """Micro-batches of this rank whose activations exist at the same time."""
        return self.batch.together(len(self.own_micro_batches))

    @property
    def traced_on(self) -> torch.device:
        """Device whose kernels the plan counts: the run's device, or the CPU if the plan is for a different machine."""
        return self.device if self.tiers.machine.is_here else torch.device("cpu")

    @property
    def is_traced_elsewhere(self) -> bool:
        """Whether fake CPU tensors represent GPU tensors."""
        return self.device.type == "cuda" and self.traced_on.type == "cpu"

    @property
    def uses_liger(self) -> bool:
        """Whether liger-kernel computes norms and MLPs. False before the choice is made."""
        return self.model.table.use_liger_kernel is True

    @property
    def flash(self) -> FlashKernels:
        """Flash-attention kernels. Until a run chooses, these are torch's own."""
        kernels = self.model.table.flash_attention
        return "FA2" if kernels == "auto" else kernels

    def with_kernels(self, **choices: object) -> RunSpec:
        """Return the run with these keys of ``[model]`` that choose kernels."""
        table = self.model.table.model_copy(update=choices)
        return replace(self, model=replace(self.model, table=table))

    def with_packing(self, packing: bool | Literal["concat"]) -> RunSpec:
        """Return the run with this packing of its data."""
        single_rows = self.batch.single_rows and bool(packing)
        data, batch = self.data.with_keys(packing=packing), replace(self.batch, single_rows=single_rows)
        return replace(self, data=data, batch=batch)


@dataclass(frozen=True, slots=True)
class MeasuredTicks:
    """Measured seconds of a step in which every block's home is the tier that uses the block.

    Attributes:
        seconds: Median seconds of each tick of the program, by number.
        between_s: Median seconds of a step outside its ticks.
        num_steps: Number of timed steps.
        num_micro_batches: Number of micro-batches in the timed steps.
        is_extrapolated: Whether the timed steps had fewer micro-batches than the plan's steps.
        memory_bytes: Peak memory of the measurement, including workspace.
    """

    seconds: tuple[float, ...]
    between_s: float
    num_steps: int
    num_micro_batches: int
    is_extrapolated: bool
    memory_bytes: int

    @property
    def note(self) -> str:
        """The measurement as one line of the report."""
        what = f"{self.num_steps} steps of this model"
        if self.is_extrapolated:
            what += f" with {self.num_micro_batches} micro-batches each, extrapolated to all micro-batches"
        return f"computing       measured: {what}, in {format_size(self.memory_bytes)} of RAM"


@dataclass(frozen=True, slots=True)
class StepShape:
    """Inputs of the estimate, apart from the plan.

    Attributes:
        tokens_per_step: Tokens of one rank (T).
        num_steps: Steps of the run, or None if only the data determines them.
        weights: Relative share of each path in striped blocks.
        has_rates: Whether the config sets the weights.
    """

    tokens_per_step: int
    num_steps: int | None
    paths: Sequence[Path]
    weights: Sequence[float]
    has_rates: bool = False


@dataclass(frozen=True, slots=True)
class OutsideTraffic:
    """Drive traffic of a run outside its steps.

    Attributes:
        name: ``start`` (loading the model's weights), ``checkpoint`` (the first one) or ``export``.
        read_bytes: Bytes read from the model's folder or the tiers' drives. An export also reads back its files.
        written_bytes: Bytes written to the tiers' drives or to ``output_dir``.
        linked_bytes: Bytes of a checkpoint that stay on the drives and are only linked.
        seconds: Seconds at measured rates on otherwise idle drives, or None if a rate is unknown.
    """

    name: str
    read_bytes: int
    written_bytes: int
    linked_bytes: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds per step at measured rates with perfect overlap, which is a lower bound on the real time.

    If steps of the model were timed, ``step_s`` is the expected time instead, including waits.

    Attributes:
        seconds: Busy seconds in a step, by resource: ``compute``, ``host`` (launches operators and leases blocks),
            ``optimizer`` on the host, ``gpu optimizer``, ``nvme``, ``ram->gpu`` and ``gpu->ram``.
        unmeasured: Resources without a rate in the profile. If there are any, ``step_s`` is None.
        step_s: Seconds per step, or None if a rate is unknown.
        bound_by: Resource that determines ``step_s``.
        crossing_tokens: Tokens per step (T*) above which computing takes longer than moving. 0 means always; None means
            never or unknown.
        written_bytes: Bytes written in a step, by NVMe path.
        run_written_bytes: Bytes written in the run, by NVMe path, or None if the run's length is unknown.
        computing_s_per_nvme_byte: Compute slowdown per byte moved to or from a drive; 0 if unknown.
        seconds_per_nvme_copy: Time that moving a block takes on the step's thread; 0 if unknown.
        is_timed: Whether steps of the model were timed.
        notes: Age of the rates, or the reason why there are none.
        occasions: Traffic of the run outside its steps.
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
    occasions: tuple[OutsideTraffic, ...] = ()

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
            "occasions": [asdict(each) for each in self.occasions],
        }


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The model of a run before placement. It does not depend on tier sizes or gradient dtypes.

    Attributes:
        run: The run, with packing and kernels chosen for the model.
        padded: Whether rows may have padding or hold several documents.
        trace: Visits of the model's units in a step, with memory and FLOPs for one micro-batch.
        optimizer: Optimizer for updates in RAM.
        device_optimizer: Optimizer for groups in GPU memory, or None.
        host_updates: Reason why all updates run in RAM despite a GPU tier, or "".
        packing_warning: Reason why ``run.data`` does not use the default packing. Empty for the default or a configured
            value.
        flash_note: Reason why ``model.flash_attention = "auto"`` chose FA2 on a GPU, or "".
        in_place: Frozen layouts that may stay in the model's folder, by name.
        encodings: Encoding of each layout's weight, by layout name, as in ``StepProgram``.
    """

    run: RunSpec
    padded: bool
    graph: ModelGraph
    trace: VisitTrace
    optimizer: Optimizer
    compute_tier: str
    in_place: Mapping[str, FrozenBlock]
    encodings: Mapping[str, Encoding]
    device_optimizer: Optimizer | None = None
    host_updates: str = ""
    packing_warning: str = ""
    flash_note: str = ""


@dataclass(frozen=True)
class Plan:
    """All decisions made before a run starts.

    Attributes:
        run: The traced model's run, or a variant with a different order of micro-batches.
        budgets_by_tier: Budgets of the tiers, fast to slow.
        estimate: Time of a step and its writes to drives, at rates measured on this machine.
        ticks: Seconds of each tick, if steps of this model were timed. No decision depends on them.
        kept_bytes: Workspace bytes of the compute tier for graphs that are kept until the backward.
        objections: Reasons against running the plan on this machine.
        library_memory: A sentence about the GPU memory left to libraries, or "" without a GPU.
        passthrough_tensors: Description of untrained tensors in the model's folder; "" if there are none.
    """

    run: RunSpec
    traced: TracedModel
    program: StepProgram
    placement: Placement
    budgets_by_tier: Mapping[str, TierBudget]
    fits: bool = True
    estimate: Estimate | None = None
    ticks: MeasuredTicks | None = None
    kept_bytes: int = 0
    objections: Sequence[Objection] = ()
    library_memory: str = ""
    passthrough_tensors: str = ""

    @property
    def graph(self) -> ModelGraph:
        return self.traced.graph

    @property
    def trace(self) -> VisitTrace:
        return self.traced.trace

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer for updates in RAM."""
        return self.traced.optimizer

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.run.device

    @property
    def for_steps(self) -> StreamedModel:
        """The model as an engine runs it in training steps."""
        homes, stays = self.placement.homes, self.placement.stays
        return StreamedModel(self.graph, self.trace, self.program, homes, self.device, stays)

    @property
    def for_passes(self) -> StreamedModel:
        """The model as an engine runs it in forward passes, where no copies stay between two passes."""
        return replace(self.for_steps, program=evaluation_program(self.program), stays={})

    def recipe(self) -> StepRecipe:
        """Return the recipe from which an engine computes the steps of the run."""
        run, is_split = self.run, weight_is_split(self.graph)
        return StepRecipe(
            self.optimizer,
            segment_builder(run.optimizer, self.optimizer, split_master=is_split, graph=self.graph),
            run.optimizer.max_grad_norm,
            device_optimizer=self.traced.device_optimizer,
            nonfinite=run.optimizer.nonfinite,
            seed=run.seed,
            order=run.batch.order,
            objective=run.objective,
            compiler=LayerCompiler.from_backend(run.model.table.compiler),
        )

    def collectives(self) -> Collectives | SingleRank:
        """Return the collectives of the run's ranks. All ranks call this together, after their rendezvous."""
        return collectives_of(self.run.world, self.program.compute_tier)

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
        """The inputs of the estimate, apart from the plan."""
        tiers = self.run.tiers
        paths = [drive.path for drive in tiers.table.nvme]
        return StepShape(self.run.num_own_tokens, self.run.max_steps, paths, tiers.rates, tiers.has_rates)

    @property
    def tiers(self) -> Sequence[str]:
        return tuple(self.budgets_by_tier)

    @property
    def totals(self) -> Mapping[str, int]:
        return {tier: self.placement.peak_bytes(tier) for tier in self.tiers}

    @property
    def budgets(self) -> Mapping[str, int]:
        return {tier: budget.capacity_bytes for tier, budget in self.budgets_by_tier.items()}

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes moved in one step, by link."""
        return self.placement.traffic_bytes

    @property
    def checkpoint_bytes_in_output_dir(self) -> int:
        """Bytes of one checkpoint that are written to ``output_dir``, because no durable tier contains them."""
        return self._checkpoint_bytes(is_kept_by_tier=False)

    @property
    def guesses(self) -> Sequence[str]:
        """Guesses about the workspace and their reasons. Empty if the workspace is known exactly."""
        return self.trace.guesses

    @property
    def checkpoint_bytes_on_drives(self) -> int:
        """Bytes of one checkpoint that stay on the drives. A whole copy also writes them to ``output_dir``."""
        return self._checkpoint_bytes(is_kept_by_tier=True)

    @property
    def checkpoint_traffic(self) -> Mapping[str, int]:
        """Bytes that a checkpoint moves to RAM from tiers that are neither addressable nor durable, by link."""
        moved = Counter[str]()
        for key, home in self.placement.homes.items():
            budget, block = self.budgets_by_tier[home], self.program.blocks[key]
            if block.is_saved and not budget.is_addressable and not budget.is_durable:
                for src, dst in self.placement.routes.between(home, "ram"):
                    moved[f"{src}->{dst}"] += block.nbytes
        return moved

    def _checkpoint_bytes(self, *, is_kept_by_tier: bool) -> int:
        homes = {key: self.budgets_by_tier[tier] for key, tier in self.placement.homes.items()}
        saved = (block for block in self.program.blocks.values() if block.is_saved)
        return sum(block.nbytes for block in saved if homes[block.key].is_durable == is_kept_by_tier)

    @property
    def device_updates(self) -> Sequence[Tick]:
        """The updates that run in GPU memory."""
        program, homes = self.program, self.placement.homes
        return [tick for tick in self.updates if program.tier_of(tick, homes) == program.compute_tier != "ram"]

    @property
    def updates(self) -> Sequence[Tick]:
        """All updates of a step."""
        return [tick for tick in self.program.ticks if tick.phase == "update"]

    def warm_up(self) -> None:
        """Compile or load the update kernels of the host and the device, so that the first step does not have to."""
        gradients = {block.dtype for block in self.program.blocks.values() if block.kind == "gradients"}
        formats = [(self.graph.dtype.itemsize == 2, dtype) for dtype in gradients]
        self.optimizer.warm_up(formats)
        if self.traced.device_optimizer is not None and self.device_updates:
            self.traced.device_optimizer.warm_up(formats)
        clip.warm_up()
        warm_up_norm(self.device)
        device_kernels.warm_up(self.device, self.graph.dtype)

    def num_updated(self, *, on_gpu: bool) -> int:
        """Return the number of weights that a step updates, on a GPU or on the host (which can emulate a GPU)."""
        there = self.device_updates if self.device.type == "cuda" else ()
        return self.num_updated_by(there if on_gpu else [tick for tick in self.updates if tick not in there])

    def num_updated_by(self, updates: Iterable[Tick]) -> int:
        """Return the number of weights that these updates change."""
        blocks = [self.program.blocks[key] for tick in updates for key, _ in tick.uses]
        return sum(block.num_elements for block in blocks if block.kind == "weights")
