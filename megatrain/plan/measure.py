"""Timing of a step's ticks on this machine. The engine runs steps of the real model, but blocks share memory.

All blocks share a limited amount of memory (``SharedMemoryTier``), so a model larger than RAM can be measured. Kernels,
shapes, leases and updates are real. Weights and tokens are random, and the learning rate is 0.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatrain.base.timeline import TimedOp, Timeline
from megatrain.engine.device.freed_memory import keep_freed_memory
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.workspace import computing_bytes, step_workspace_bytes
from megatrain.engine.step import StepEngine
from megatrain.machine.cgroups import available_ram_bytes
from megatrain.machine.profiles import load_profile
from megatrain.optim import clip
from megatrain.optim.threads import KernelThreads
from megatrain.plan.plan import Plan
from megatrain.plan.process import HEAP_BYTES, own_bytes
from megatrain.plan.search import price_step
from megatrain.plan.simulate import step_seconds
from megatrain.plan.stepping import model_for_steps, step_recipe
from megatrain.plan.times import MeasuredTicks
from tiered import Belady, TieredStore
from tiered.ext import HostSlab, Slot, TierUsage, view_as
from tiered.units import PAGE_BYTES, MiB, format_duration, format_size, round_up

#: Far more than a CPU's caches hold. Data is therefore evicted from the caches before a step reads it again.
KIND_BYTES = 256 * MiB

_LARGEST_WEIGHT = 0.03  # so that activations neither grow from layer to layer nor become denormal


class _Ring(NamedTuple):
    """Kind, dtype and slot size of blocks that alias one list of slabs round-robin."""

    kind: str
    dtype: torch.dtype
    slot_bytes: int


class SharedMemoryTier:
    """RAM tier in which blocks of the same kind and size alias a few slabs, limited by ``kind_bytes``.

    If all blocks of a kind fit in ``kind_bytes``, they share no memory. Slabs are created as in ``RamTier``. Weights
    are small random numbers; all other blocks start as zeros. Every lease is a view of existing memory, so a step takes
    as long as if all homes were in RAM.

    Args:
        kind_bytes: Approximate limit for the blocks of one kind. Each size gets at least one slab. 0 means one slab per
            kind, as large as the kind's largest block.

    Attributes:
        capacity_bytes: Bytes of all blocks without aliasing.
    """

    alignment_bytes = PAGE_BYTES
    durable = False

    def __init__(self, blocks: Mapping[str, BlockPlan], kind_bytes: int = KIND_BYTES, *, name: str = "ram") -> None:
        self.name = name
        self.device: torch.device | None = torch.device("cpu")
        self.capacity_bytes = sum(self.slot_bytes(block.nbytes) for block in blocks.values())
        self._used_bytes = 0
        counts = _slab_counts(blocks, kind_bytes)
        self._slabs: dict[_Ring, list[HostSlab]] = {}
        try:
            for ring, count in counts.items():
                self._slabs[ring] = []
                for _ in range(count):
                    self._slabs[ring].append(_make_slab(ring))
        except BaseException:
            self.close()
            raise
        self._places: dict[str, HostSlab] = {}
        num_assigned = Counter[_Ring]()
        for block in blocks.values():
            ring = _find_ring(block, counts)
            self._places[block.key] = self._slabs[ring][num_assigned[ring] % counts[ring]]
            num_assigned[ring] += 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to whole pages."""
        return round_up(nbytes, PAGE_BYTES)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return the slot of a block. Its resource is a uint8 tensor."""
        self._used_bytes += self.slot_bytes(nbytes)
        return Slot(self.name, nbytes, self.slot_bytes(nbytes), self._places[name].tensor)

    def free(self, slot: Slot) -> None:
        """Release the slot. Its memory is freed when the tier closes."""
        self._used_bytes -= slot.slot_bytes
        slot.resource = None

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the slot."""
        assert isinstance(slot.resource, torch.Tensor), slot
        return view_as(slot.resource, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Do nothing, because this tier does not count workspace."""

    def sync(self) -> None:
        """Do nothing, because host memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the bytes of the slots, counting aliased memory once per slot."""
        return TierUsage(self.capacity_bytes, self._used_bytes, self._used_bytes)

    def close(self) -> None:
        """Free the memory as soon as no view of it exists."""
        self._places = {}
        slabs, self._slabs = self._slabs, {}
        for slab in (slab for ring in slabs.values() for slab in ring):
            slab.close()


def shared_bytes(blocks: Mapping[str, BlockPlan], kind_bytes: int) -> int:
    """Return the bytes of all slabs that a tier for these blocks needs."""
    return sum(ring.slot_bytes * count for ring, count in _slab_counts(blocks, kind_bytes).items())


def _slab_counts(blocks: Mapping[str, BlockPlan], kind_bytes: int) -> dict[_Ring, int]:
    rings = Counter(_own_ring(block) for block in blocks.values())
    if not kind_bytes:
        max_bytes: dict[tuple[str, torch.dtype], int] = {}
        for ring in rings:
            max_bytes[ring[:2]] = max(max_bytes.get(ring[:2], 0), ring.slot_bytes)
        return {_Ring(*kind, nbytes): 1 for kind, nbytes in max_bytes.items()}
    kind_totals = Counter[tuple[str, torch.dtype]]()
    for ring, count in rings.items():
        kind_totals[ring[:2]] += ring.slot_bytes * count
    shares = {ring: min(1.0, kind_bytes / max(1, kind_totals[ring[:2]])) for ring in rings}
    return {ring: max(1, int(count * shares[ring])) for ring, count in rings.items()}


def _find_ring(block: BlockPlan, counts: Mapping[_Ring, int]) -> _Ring:
    ring = _own_ring(block)
    return ring if ring in counts else next(other for other in counts if other[:2] == ring[:2])


def _own_ring(block: BlockPlan) -> _Ring:
    kind = block.key.rsplit("/", 1)[-1] if block.kind == "optimizer" else block.kind
    return _Ring(kind, block.dtype, round_up(block.nbytes, PAGE_BYTES))


def _make_slab(ring: _Ring) -> HostSlab:
    slab = HostSlab(ring.slot_bytes)
    if ring.kind == "weights" and ring.slot_bytes and ring.dtype.is_floating_point:  # packed blocks stay zero
        slab.tensor.view(ring.dtype).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)
    return slab


#: Target duration of the timed steps. Whole steps of at least one micro-batch are run.
BUDGET_S = 8.0
#: Largest and smallest number of timed steps.
MAX_STEPS, MIN_STEPS = 7, 3
#: If one micro-batch would compute longer than this at the matmul rate, the model is not measured.
MAX_MICRO_BATCH_S = 60.0

_NUM_SCHEDULED_STEPS = 1000

MicroBatches = Sequence[Mapping[str, torch.Tensor]]


class NotMeasurableError(Exception):
    """Error for a plan whose steps cannot be timed on this machine. The message contains the reason."""


def measure_ticks(
    plan: Plan,
    *,
    budget_s: float = BUDGET_S,
    kind_bytes: int = KIND_BYTES,
    flops_per_s: float | None = None,
) -> MeasuredTicks:
    """Time steps of a plan on this machine.

    The measurement reads no weights or data, writes nothing, and uses at most the RAM tier's size.

    Args:
        budget_s: Approximate duration. At least ``MIN_STEPS`` steps are timed in any case.
        kind_bytes: See ``SharedMemoryTier``. It is reduced if the RAM tier is small.
        flops_per_s: Matmul rate, or None if unknown.

    Raises:
        NotMeasurableError: If the device is a GPU, RAM is too small, or one micro-batch would compute for minutes.
    """
    if plan.device.type != "cpu":
        raise NotMeasurableError("steps are timed on a CPU only")
    trace = plan.trace
    flops = sum(visit.forward.flops + visit.backward.flops for visit in trace.visits) + trace.head.flops
    if flops_per_s and flops / flops_per_s > MAX_MICRO_BATCH_S:
        seconds = format_duration(flops / flops_per_s)
        raise NotMeasurableError(f"a single micro-batch would compute for about {seconds}")
    workspace = step_workspace_bytes(plan.graph, trace, plan.program, plan.run.num_together, plan.device)
    workspace += plan.kept_bytes
    blocks = plan.program.blocks
    before_bytes = own_bytes()
    tier = SharedMemoryTier(blocks, _kind_bytes(plan, workspace, kind_bytes))
    threads = KernelThreads()
    try:
        # Keep as much freed memory as a run does, because a lower limit makes steps slower.
        max_bytes = before_bytes + tier.memory_bytes + plan.kept_bytes + HEAP_BYTES
        max_bytes += max(computing_bytes(trace, plan.program))
        with TieredStore([tier], Belady()) as store, keep_freed_memory(store, max_bytes):
            for block in blocks.values():
                store.register(block.key, (block.num_elements,), block.dtype, home="ram", durable=False)
                with store.acquire(block.key, "ram", "w"):
                    pass
            steps = _StepRunner(plan, store, threads)
            return _time_steps(plan, steps, budget_s, tier.memory_bytes + workspace)
    finally:
        threads.close()


def _kind_bytes(plan: Plan, workspace: int, kind_bytes: int) -> int:
    """Return ``kind_bytes``, halved until blocks and workspace fit in RAM."""
    room_bytes = min(plan.budgets["ram"], available_ram_bytes())
    while True:
        need_bytes = workspace + shared_bytes(plan.program.blocks, kind_bytes)
        if need_bytes <= room_bytes:
            return kind_bytes
        if not kind_bytes:
            need, room = format_size(need_bytes), format_size(room_bytes)
            raise NotMeasurableError(f"timing steps takes {need} of RAM, but only {room} are available")
        kind_bytes = kind_bytes // 2 if kind_bytes > MiB else 0


def _time_steps(plan: Plan, steps: _StepRunner, budget_s: float, memory_bytes: int) -> MeasuredTicks:
    """Time steps with the largest affordable number of micro-batches, and extrapolate linearly to the rest."""
    num_micro_batches = plan.run.batch.num_micro_batches
    min_count, max_count = 1, num_micro_batches
    if not steps.accepts_any_count:
        min_count = num_micro_batches
    steps.run(min_count)  # not timed: it has no update, compiles kernels and touches new memory
    one_batch_s = steps.run(min_count).total_s
    if steps.accepts_any_count and num_micro_batches > 1:
        two_batches_s = steps.run(2).total_s
        batch_s = max(two_batches_s - one_batch_s, 0.2 * one_batch_s)
        affordable_count = 2 + int((budget_s / MIN_STEPS - two_batches_s) / batch_s)
        max_count = max(2, min(num_micro_batches, affordable_count))
    short_steps: list[_TimedStep] = []
    long_steps: list[_TimedStep] = []
    start_s = time.perf_counter()
    while len(long_steps) < MIN_STEPS or (time.perf_counter() - start_s < budget_s and len(long_steps) < MAX_STEPS):
        long_steps.append(steps.run(max_count))
        if max_count < num_micro_batches:
            short_steps.append(steps.run(min_count))
    seconds, between_s = _medians(long_steps)
    if short_steps:
        short_seconds, _ = _medians(short_steps)
        factor = (num_micro_batches - max_count) / (max_count - min_count)
        seconds = [b + factor * max(0.0, b - a) for a, b in zip(short_seconds, seconds, strict=True)]
    return MeasuredTicks(
        seconds=tuple(seconds),
        between_s=between_s,
        num_steps=len(long_steps),
        num_micro_batches=max_count,
        is_extrapolated=max_count < num_micro_batches,
        memory_bytes=memory_bytes,
    )


def _medians(steps: Sequence[_TimedStep]) -> tuple[list[float], float]:
    by_tick = zip(*(step.seconds for step in steps), strict=True)
    return [statistics.median(seconds) for seconds in by_tick], statistics.median(step.between_s for step in steps)


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """Seconds of each tick, by index, and of the whole step, for one timed step."""

    seconds: tuple[float, ...]
    total_s: float

    @property
    def between_s(self) -> float:
        return max(0.0, self.total_s - sum(self.seconds))


class _TickTimer(Timeline):
    """Timeline that records the seconds of a program's ticks."""

    def __init__(self, program: StepProgram) -> None:
        super().__init__()
        self._seconds = [0.0] * len(program.ticks)
        self._current_tick: tuple[int, float] | None = None

    def on_op(self, op: TimedOp | None) -> None:
        """Record that the engine starts an op of the tape, or that it ends a step (None)."""
        now_s = time.perf_counter()
        if self._current_tick is not None:
            tick, start_s = self._current_tick
            self._seconds[tick] += now_s - start_s
        self._current_tick = None if op is None else (op.tick, now_s)

    def take(self) -> tuple[float, ...]:
        """Return the seconds recorded so far, and reset them."""
        seconds, self._seconds = tuple(self._seconds), [0.0] * len(self._seconds)
        return seconds


class _StepRunner:
    """Runner of consecutive steps on a plan's engine. Each step includes the previous step's update."""

    def __init__(self, plan: Plan, store: TieredStore, threads: KernelThreads) -> None:
        run = plan.run
        plan.traced.optimizer.warm_up()
        clip.warm_up()
        self.accepts_any_count = run.batch.order == "layer"
        self._micro_batches = synthetic_batches(plan)
        self._timer = _TickTimer(plan.program)
        homes = dict.fromkeys(plan.program.blocks, "ram")
        # Set the compute tier to RAM. A step computes the same even if the plan emulates a GPU.
        updates = replace(plan.program.updates, in_compute_tier=False)
        program = replace(plan.program, compute_tier="ram", updates=updates)
        # Set a schedule as in a run, because the prefetcher also takes time.
        store.set_schedule(program.schedule(homes, _NUM_SCHEDULED_STEPS))
        self._engine = StepEngine(
            store,
            replace(model_for_steps(plan), program=program, homes=homes, stays={}),
            replace(step_recipe(plan), device_optimizer=None, nonfinite="ignore"),
            threads=threads,
            timeline=self._timer,
        )
        self._step_index = 0

    def run(self, num_micro_batches: int) -> _TimedStep:
        """Run a step with only the first ``num_micro_batches`` micro-batches."""
        start_s = time.perf_counter()
        self._engine.step(self._micro_batches[:num_micro_batches], step_index=self._step_index, lr=0.0)
        total_s = time.perf_counter() - start_s
        self._step_index += 1
        return _TimedStep(self._timer.take(), total_s)


def synthetic_batches(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step in the format of real data: full rows in which every token is trained.

    Packed rows of conversations contain two documents each, so that a mask is needed. Packed rows of text contain one.
    """
    generator = torch.Generator().manual_seed(plan.run.seed)
    shape = (plan.run.batch.micro_batch_rows, plan.run.batch.max_length)
    vocab_size = plan.graph.model.get_input_embeddings().weight.shape[0]
    batches: list[dict[str, Any]] = []
    for _ in range(plan.run.batch.num_micro_batches):
        ids = torch.randint(vocab_size, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if not plan.run.data.table.packing:
            batch["attention_mask"] = torch.ones_like(ids)
        else:
            positions = torch.arange(shape[1])
            if not plan.run.data.kind.is_text:
                positions %= max(1, -(-shape[1] // 2))
            batch["position_ids"] = positions.expand(shape).clone()
        batches.append(batch)
    return batches


def with_timed_steps(
    plan: Plan,
    on_progress: Callable[[str], None] = lambda text: None,
    on_problem: Callable[[str], None] = lambda text: None,
    measure: Callable[..., MeasuredTicks] = measure_ticks,
) -> Plan:
    """Return a plan with timed steps, or the plan itself if its steps cannot be timed.

    Args:
        on_progress: Function called with a description of the measurement when it starts.
        on_problem: Function called with the reason if steps are not timed.
    """
    on_progress("steps of this model")
    machine = load_profile().machine
    dtype = str(plan.graph.dtype).removeprefix("torch.")
    rate = None if machine is None else machine.matmul_flops_per_s.get(f"cpu/{dtype}")
    try:
        return with_ticks(plan, measure(plan, flops_per_s=rate))
    except NotMeasurableError as error:
        on_problem(f"steps of this model are not timed: {error}")
        return plan


def with_ticks(plan: Plan, ticks: MeasuredTicks) -> Plan:
    """Return a plan with measured ticks. Its step time is from a replay at the measured rates of drives and buses."""
    timed_plan = price_step(replace(plan.step, ticks=ticks), load_profile())
    step_s, estimate = step_seconds(timed_plan), timed_plan.estimate
    return replace(plan, ticks=ticks, estimate=estimate if step_s is None else replace(estimate, step_s=step_s))
