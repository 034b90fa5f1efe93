"""What the ticks of a step take on this machine: the engine runs steps of the very model, without having its blocks.

All blocks lie in memory that they share (``SharedMemoryTier``), so a model larger than RAM is measured too. Kernels,
shapes, leases and updates are the real ones; weights and tokens are random, and the learning rate is 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatrain.engine.compiled import LayerCompiler
from megatrain.engine.objective import Objective
from megatrain.engine.step import StepEngine, weight_is_split
from megatrain.optim import clip
from megatrain.optim.factory import segment_builder
from megatrain.optim.threads import KernelThreads
from megatrain.plan.budgets import gradient_staging_bytes, workspace_bytes
from megatrain.plan.machine import available_ram_bytes
from megatrain.plan.shared_memory import KIND_BYTES, SharedMemoryTier, shared_bytes
from megatrain.timeline import Timeline
from tiered.policies import Belady
from tiered.store import TieredStore
from tiered.units import MiB, format_duration, format_size

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from megatrain.engine.program import StepProgram
    from megatrain.engine.tape import Op
    from megatrain.plan.planner import Plan

#: Seconds of steps that are timed, as far as whole ones of at least one micro-batch go into them.
BUDGET_S = 8.0
#: Most steps that are timed, and fewest.
MOST_STEPS, LEAST_STEPS = 7, 3
#: A model whose single micro-batch computes longer than this, at the rate of matrix products, is not measured.
MOST_MICRO_BATCH_S = 60.0

_MOST_STEPS_OF_A_RUN = 1000

MicroBatches = Sequence[Mapping[str, torch.Tensor]]


class NotMeasurableError(Exception):
    """The steps of a plan cannot be timed here; the text says why."""


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


def same_ticks(one: Plan, config: RunConfig, other: Plan, other_config: RunConfig) -> bool:
    """Return whether two plans' steps compute the same: only homes and the sizes of tiers may differ."""
    return (
        one.device == other.device
        and one.program == other.program
        and one.trace == other.trace
        and all(getattr(config, table) == getattr(other_config, table) for table in _TABLES_THAT_DECIDE)
        and Objective.of(config.training) == Objective.of(other_config.training)
        and (config.task, config.data.packing) == (other_config.task, other_config.data.packing)
    )


_TABLES_THAT_DECIDE = ("model", "precision", "optimizer")


def measure_ticks(
    plan: Plan,
    config: RunConfig,
    *,
    budget_s: float = BUDGET_S,
    kind_bytes: int = KIND_BYTES,
    flops_per_s: float | None = None,
) -> MeasuredTicks:
    """Time steps of a plan.

    Reads no weight and no data, writes nothing, and takes at most the RAM tier's size.

    Args:
        budget_s: about how long; a step of one micro-batch is timed ``LEAST_STEPS`` times whatever that takes.
        kind_bytes: see ``SharedMemoryTier``; less where the RAM tier is small.
        flops_per_s: of matrix products; None: not known.

    Raises:
        NotMeasurableError: not on a GPU; RAM is too small; one micro-batch would compute for minutes.
    """
    if plan.device.type != "cpu":
        raise NotMeasurableError("steps are timed on a CPU only")
    trace = plan.trace
    flops = sum(visit.forward_flops + visit.backward_flops for visit in trace.visits) + trace.head_flops
    if flops_per_s and flops / flops_per_s > MOST_MICRO_BATCH_S:
        seconds = format_duration(flops / flops_per_s)
        raise NotMeasurableError(f"a single micro-batch would compute for about {seconds}")
    workspace = workspace_bytes(trace, plan.num_micro_batches) + gradient_staging_bytes(plan.graph, trace, config)
    workspace += plan.kept_bytes
    blocks = plan.program.blocks
    tier = SharedMemoryTier(blocks, _kind_bytes(plan, workspace, kind_bytes))
    threads = KernelThreads()
    try:
        with TieredStore([tier], Belady()) as store:
            for block in blocks.values():
                store.register(block.key, (block.num_elements,), block.dtype, home="ram", durable=False)
                with store.acquire(block.key, "ram", "w"):
                    pass
            steps = _Steps(plan, config, store, threads)
            return _measured(plan, steps, budget_s, tier.memory_bytes + workspace)
    finally:
        threads.close()


def _kind_bytes(plan: Plan, workspace: int, kind_bytes: int) -> int:
    """Return what the blocks of a kind may share, beside the workspace."""
    room = min(plan.budgets["ram"], available_ram_bytes())
    while True:
        need = workspace + shared_bytes(plan.program.blocks, kind_bytes)
        if need <= room:
            return kind_bytes
        if not kind_bytes:
            have = format_size(room)
            raise NotMeasurableError(f"timing steps takes {format_size(need)} of RAM, {have} are there for it")
        kind_bytes = kind_bytes // 2 if kind_bytes > MiB else 0


def _measured(plan: Plan, steps: _Steps, budget_s: float, memory_bytes: int) -> MeasuredTicks:
    """Time steps with as many micro-batches as there is time for; what is left is a straight line."""
    most = plan.num_micro_batches
    num_few, num_many = 1, most
    if not steps.takes_any_number:
        num_few = most
    steps.run(num_few)  # kernels are compiled and memory is touched here; the first step has no update
    one_s = steps.run(num_few).total_s
    if steps.takes_any_number and most > 1:
        two_s = steps.run(2).total_s
        each_s = max(two_s - one_s, 0.2 * one_s)
        affordable = 2 + int((budget_s / LEAST_STEPS - two_s) / each_s)
        num_many = max(2, min(most, affordable))
    few: list[_Timed] = []
    many: list[_Timed] = []
    start_s = time.perf_counter()
    while len(many) < LEAST_STEPS or (time.perf_counter() - start_s < budget_s and len(many) < MOST_STEPS):
        many.append(steps.run(num_many))
        if num_many < most:
            few.append(steps.run(num_few))
    seconds, between_s = _medians(many)
    if few:
        few_seconds, _ = _medians(few)
        more = (most - num_many) / (num_many - num_few)
        seconds = [b + more * max(0.0, b - a) for a, b in zip(few_seconds, seconds, strict=True)]
    return MeasuredTicks(
        seconds=tuple(seconds),
        between_s=between_s,
        num_steps=len(many),
        num_micro_batches=num_many,
        is_extrapolated=num_many < most,
        memory_bytes=memory_bytes,
    )


def _medians(steps: Sequence[_Timed]) -> tuple[list[float], float]:
    by_tick = zip(*(step.seconds for step in steps), strict=True)
    return [statistics.median(each) for each in by_tick], statistics.median(step.between_s for step in steps)


@dataclass(frozen=True, slots=True)
class _Timed:
    """One step: seconds of each tick by its number, and outside of them."""

    seconds: tuple[float, ...]
    total_s: float

    @property
    def between_s(self) -> float:
        return max(0.0, self.total_s - sum(self.seconds))


class _Watch(Timeline):
    """Adds up the seconds of each tick of a program."""

    def __init__(self, program: StepProgram) -> None:
        super().__init__()
        self._seconds = [0.0] * len(program.ticks)
        self._now: tuple[int, float] | None = None

    def on_op(self, op: Op | None) -> None:
        """Note that the engine comes to an op of the tape, or to the end of a step (None)."""
        now_s = time.perf_counter()
        if self._now is not None:
            number, start_s = self._now
            self._seconds[number] += now_s - start_s
        self._now = None if op is None else (op.tick, now_s)

    def take(self) -> tuple[float, ...]:
        """Return the seconds so far, and begin anew."""
        found, self._seconds = tuple(self._seconds), [0.0] * len(self._seconds)
        return found


class _Steps:
    """Steps of a plan's engine, one after the other, each with the update of the one before it."""

    def __init__(self, plan: Plan, config: RunConfig, store: TieredStore, threads: KernelThreads) -> None:
        plan.optimizer.warm_up()
        clip.warm_up()
        self.takes_any_number = config.advanced.micro_batch_order == "layer"
        self._micro_batches = made_up_batches(plan, config)
        self._watch = _Watch(plan.program)
        homes = dict.fromkeys(plan.program.blocks, "ram")
        # Without a GPU, and with another part of RAM in its place, a step computes the same.
        program = replace(plan.program, compute_tier="ram", updates_in_compute_tier=False)
        store.set_schedule(program.schedule(homes, _MOST_STEPS_OF_A_RUN))  # looking ahead costs time, too
        self._engine = StepEngine(
            store,
            plan.graph,
            plan.trace,
            program,
            homes,
            {},
            plan.optimizer,
            device=plan.device,
            order=config.advanced.micro_batch_order,
            segments=segment_builder(config.optimizer, plan.optimizer, split_master=weight_is_split(plan.graph)),
            max_grad_norm=config.optimizer.max_grad_norm,
            nonfinite="ignore",
            seed=config.seed,
            objective=Objective.of(config.training),
            compiler=LayerCompiler.of(config.model),
            threads=threads,
            timeline=self._watch,
        )
        self._number = 0

    def run(self, num_micro_batches: int) -> _Timed:
        """Run a step with the first so many micro-batches."""
        start_s = time.perf_counter()
        self._engine.step(self._micro_batches[:num_micro_batches], number=self._number, lr=0.0)
        total_s = time.perf_counter() - start_s
        self._number += 1
        return _Timed(self._watch.take(), total_s)


def made_up_batches(plan: Plan, config: RunConfig) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step as the data would give them, rows full, every token trained.

    Packed rows of conversations hold two documents each, which takes a mask; those of plain text hold one.
    """
    generator = torch.Generator().manual_seed(config.seed)
    shape = (plan.micro_batch_size, config.data.max_length)
    num_words = plan.graph.model.get_input_embeddings().weight.shape[0]
    batches: list[dict[str, Any]] = []
    for _ in range(plan.num_micro_batches):
        ids = torch.randint(num_words, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if not config.data.packing:
            batch["attention_mask"] = torch.ones_like(ids)
        else:
            positions = torch.arange(shape[1])
            if config.task != "pretrain":
                positions %= max(1, -(-shape[1] // 2))
            batch["position_ids"] = positions.expand(shape).clone()
        batches.append(batch)
    return batches
