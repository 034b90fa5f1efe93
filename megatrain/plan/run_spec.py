"""Resolved config of a run, with the split of a step into micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from megatrain.checkpoint.table import CheckpointSpec
from megatrain.converters.spec import ModelSpec
from megatrain.data.dataset import DataSpec
from megatrain.engine.device.flash import FlashKernels
from megatrain.engine.head.objective import Objective
from megatrain.engine.table import RecomputeChoice
from megatrain.machine.resources import TierSpecs
from megatrain.models.table import ExportConfig
from megatrain.optim.table import OptimizerConfig
from megatrain.plan.placement import PlacementSpec
from megatrain.plan.table import AdvancedConfig
from megatrain.ranks.lanes import Lanes
from megatrain.ranks.shards import RankLanes, RankShards, Sharding
from megatrain.ranks.world import World

#: Target tokens per micro-batch by device type, if the config sets only tokens per step. They are constants because the
#: split into micro-batches affects results and so must not depend on the machine's memory. A GPU needs more tokens:
#: with shorter matrix products, the host could not launch kernels ahead.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Rows in a step, and their split into micro-batches.

    Attributes:
        num_rows: Number of rows in a step. Each has ``max_length`` tokens.
        max_length: Tokens in a row.
        configured_rows: Rows per micro-batch, or None to choose the number closest to ``target_tokens``.
        single_rows: Whether micro-batches have one row by default, because the kernels cannot otherwise separate the
            documents of a row.
        order: "layer" runs all micro-batches through each layer before the next layer.
        target_tokens: Target tokens per micro-batch; see ``MICRO_BATCH_TOKENS``.
        num_lanes: Number of lanes that add gradients (``ranks/lanes.py``), or None for one lane per rank.
        rows_per_example: Number of rows per example. They must be in the same micro-batch.
    """

    num_rows: int
    max_length: int
    configured_rows: int | None
    single_rows: bool
    order: Literal["layer", "micro_batch"]
    target_tokens: int = MICRO_BATCH_TOKENS["cpu"]
    num_lanes: int | None = None
    rows_per_example: int = 1

    @property
    def micro_batch_rows(self) -> int:
        """Configured rows per micro-batch, or the largest divisor of ``num_rows`` that target tokens and lanes allow.

        The number of processes has no influence, because it can change at each start and must not affect results.
        """
        if self.configured_rows is not None:
            return self.configured_rows
        if self.single_rows:
            return 1
        rows, step_rows = self.num_rows, self.rows_per_example
        max_rows = min(self.target_tokens // self.max_length, rows // (self.num_lanes or 1))
        return max((n for n in range(step_rows, max_rows + 1, step_rows) if rows % n == 0), default=step_rows)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a step."""
        return self.num_rows // self.micro_batch_rows

    def together(self, num_micro_batches: int) -> int:
        """Return how many of ``num_micro_batches`` pass through one layer before any of them reaches the next layer."""
        return num_micro_batches if self.order == "layer" else 1

    @property
    def num_tokens(self) -> int:
        """Number of token positions in a step, including padding."""
        return self.num_rows * self.max_length


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Resolved config of a run on a machine. ``megatrain.training.resolve`` creates it.

    Attributes:
        task: Name in ``megatrain.tasks.table``.
        seed: Seed of dropout and random weights.
        dtype: Compute dtype of layers.
        grad_dtype: Dtype of gradients between two visits.
        is_deterministic: Whether only deterministic kernels are allowed.
        objective: Loss that the steps minimize, and noise on the embeddings.
        num_epochs: Number of passes over the data, used if ``max_steps`` is None.
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
            # Even if the config does not set the lanes, the split of a step into micro-batches depends on them.
            object.__setattr__(self, "batch", replace(self.batch, num_lanes=self.world.size))

    @property
    def lanes(self) -> RankLanes:
        """Assignment of lanes to ranks in a step."""
        return RankLanes(self.num_lanes, self.world.size, self.world.num_hosts)

    @property
    def num_lanes(self) -> int:
        """Number of lanes that add the gradients of a step's micro-batches."""
        return self.batch.num_lanes or 1

    @property
    def sequential_run(self) -> RunSpec | None:
        """Copy of the run with one micro-batch at a time; None if it would change results or have no effect."""
        keeps_bits = self.world.is_single and self.num_lanes == 1 and self.grad_dtype == torch.float32
        if not keeps_bits or self.batch.num_micro_batches < 2 or self.batch.order == "micro_batch":
            return None
        advanced = self.advanced.model_copy(update={"micro_batch_order": "micro_batch"})
        return replace(self, batch=replace(self.batch, order="micro_batch"), advanced=advanced)

    def sharding(self, gathers_ahead: int) -> Sharding:
        """Return this rank's share of a step in which weights are gathered ``gathers_ahead`` visits ahead."""
        rank, size = self.world.rank, self.world.size
        own_lanes = Lanes.for_rank(rank, size, self.num_lanes, self.batch.num_micro_batches)
        return Sharding(RankShards(rank, size), self.lanes, own_lanes, gathers_ahead)

    @property
    def own_micro_batches(self) -> range:
        """Indices of the micro-batches in a step that this rank computes."""
        return self.lanes.rank_micro_batches(self.world.rank, self.batch.num_micro_batches)

    def tokens_of_rank(self, rank: int) -> int:
        """Return the number of token positions in a rank's micro-batches of a step."""
        micro_batches = self.lanes.rank_micro_batches(rank, self.batch.num_micro_batches)
        return len(micro_batches) * self.batch.micro_batch_rows * self.batch.max_length

    @property
    def num_own_tokens(self) -> int:
        """Number of token positions in this rank's micro-batches of a step."""
        return self.tokens_of_rank(self.world.rank)

    @property
    def num_busiest_tokens(self) -> int:
        """Number of token positions in the micro-batches of the busiest rank, for which all other ranks wait."""
        return max(map(self.tokens_of_rank, range(self.world.size)))

    def as_busiest_rank(self, size: int, num_hosts: int = 1) -> RunSpec:
        """Return the run as the busiest rank of a hypothetical world executes it. Ties go to the lowest rank.

        Args:
            size: Number of ranks on all hosts.
        """
        first_rank = replace(self, world=World.local(0, size, num_hosts))
        if first_rank.num_lanes < size or 1 < num_hosts < size:  # the planner refuses both cases
            return first_rank
        return replace(self, world=World.local(max(range(size), key=first_rank.tokens_of_rank), size, num_hosts))

    @property
    def num_together(self) -> int:
        """Number of this rank's micro-batches whose activations exist at the same time."""
        return self.batch.together(len(self.own_micro_batches))

    @property
    def trace_device(self) -> torch.device:
        """Device whose kernels the plan counts: the run's device, or the CPU if the plan is for a different machine."""
        return self.device if self.tiers.machine.is_here else torch.device("cpu")

    @property
    def has_fake_gpu(self) -> bool:
        """Whether fake CPU tensors represent GPU tensors."""
        return self.device.type == "cuda" and self.trace_device.type == "cpu"

    @property
    def uses_liger(self) -> bool:
        """Whether liger-kernel computes norms and MLPs. False before the choice is made."""
        return self.model.table.use_liger_kernel is True

    @property
    def flash(self) -> FlashKernels:
        """Flash-attention kernels that the layers use; torch's own until the run has chosen."""
        kernels = self.model.table.flash_attention
        return "FA2" if kernels == "auto" else kernels

    def with_kernels(self, **choices: object) -> RunSpec:
        """Return the run with these values for the keys of ``[model]`` that choose kernels."""
        table = self.model.table.model_copy(update=choices)
        return replace(self, model=replace(self.model, table=table))
