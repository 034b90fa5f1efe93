"""Replay of a planned step in virtual time, to find its duration and stalls.

The store, its prefetcher and its evictions are real (``tiered.simulation``). Only data movement and arithmetic are
replaced by their durations. A stall in the replay therefore comes from the schedule, never from machine noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.engine.tape.tape import Op, PinnedCopy, TapeStore, compile_step
from megatrain.plan.flops import flops_per_token, matrix_flops, tick_flops
from megatrain.plan.plan import Plan
from megatrain.ranks.shards import NETWORK, PEER
from tiered import Belady, TieredStore
from tiered.ext import SimulatedChannel, SimulatedClock, SimulatedLink, SimulatedTier
from tiered.units import format_duration

_NUM_WARM_STEPS = 2  # the first step has no update; the second may start with an empty drive queue
_NUM_STEPS = 2
_SHORTEST_S = 1e-6
_MAX_DELAY_SHARE = 0.9  # of the previous delay; below 1, so that the sum of delays converges


@dataclass(frozen=True, slots=True)
class SimulatedRates:
    """Rates for the replay, in bytes, FLOPs and parameters per second.

    Attributes:
        nvme_bytes_per_s: Combined rate of reads and writes on all drives.
        bus_bytes_per_s: Rate between RAM and GPU, in each direction.
        flops_per_s: Rate reached in forward and backward, including launches and operators other than matmuls.
        update_params_per_s: Rate of the optimizer kernel on the host.
        gpu_update_params_per_s: Rate of the optimizer kernel on a GPU, or None if the host emulates the GPU.
        products_flops_per_s: Rate of a GPU's orthogonalization for updates on the host. None if there is no
            orthogonalization, or if ``update_params_per_s`` includes it.
        peer_bytes_per_s: Rate between this rank and the other ranks on all hosts, in each direction.
        others_bytes_per_s: Rates of the storage tiers other than ``nvme``, by tier name.
        computing_s_per_nvme_byte: Seconds by which a byte on a drive's link delays computing, for timed ticks.
        seconds_per_nvme_copy: Seconds of the step's thread per copy to or from a drive, for timed ticks.
    """

    nvme_bytes_per_s: float
    flops_per_s: float
    update_params_per_s: float
    bus_bytes_per_s: float = 25e9
    computing_s_per_nvme_byte: float = 0.0
    seconds_per_nvme_copy: float = 0.0
    gpu_update_params_per_s: float | None = None
    products_flops_per_s: float | None = None
    others_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    peer_bytes_per_s: float = 1e12

    def storage_rate(self, tier: str) -> float:
        """Return the combined rate of reads and writes of a storage tier."""
        return self.nvme_bytes_per_s if tier == "nvme" else self.others_bytes_per_s.get(tier, 1e12)


def measured_rates(plan: Plan) -> SimulatedRates | None:
    """Return the rates behind the plan's estimate, or None if one of them is unknown."""
    estimate, seconds, traffic = plan.estimate, plan.estimate.seconds, plan.traffic
    if estimate.step_s is None:
        return None
    num_on_host, num_on_gpu = (plan.updates.num_weights(on_gpu=is_gpu) for is_gpu in (False, True))
    products = sum(matrix_flops(plan).values()) if plan.device.type == "cuda" else 0
    assert not (num_on_gpu and products), "optimizers that orthogonalize matrices do not run whole updates on a GPU"
    flops = flops_per_token(plan) * estimate.tokens_per_step
    host_s = seconds.get("host", 0.0)
    computing_s = seconds["compute"] + host_s if plan.device.type == "cpu" else max(seconds["compute"], host_s)
    storage = {
        name: sum(nbytes for link, nbytes in traffic.items() if name in link.split("->")) / seconds[name]
        for name, budget in plan.budgets_by_tier.items()
        if not budget.is_addressable and name in seconds
    }
    rate = max((traffic[link] / seconds[link] for link in ("ram->gpu", "gpu->ram") if link in seconds), default=1e12)
    gpu_s = seconds.get("gpu optimizer")
    return SimulatedRates(
        nvme_bytes_per_s=storage.pop("nvme", 1e12),
        others_bytes_per_s=storage,
        flops_per_s=flops / computing_s,
        update_params_per_s=num_on_host / seconds["optimizer"] if seconds.get("optimizer") else 1e12,
        gpu_update_params_per_s=num_on_gpu / gpu_s if num_on_gpu and gpu_s else None,
        products_flops_per_s=products / gpu_s if products and gpu_s else None,
        bus_bytes_per_s=rate,
        peer_bytes_per_s=next(
            (traffic[link] / seconds[link] for link in seconds if PEER in link or NETWORK in link), 1e12
        ),
        computing_s_per_nvme_byte=estimate.computing_s_per_nvme_byte,
        seconds_per_nvme_copy=estimate.seconds_per_nvme_copy,
    )


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Results of replayed steps, as means over the steps after the warm-up.

    Attributes:
        compute_s: Seconds spent computing, including updates. The rest of the step is stalls.
        stall_s: Seconds that the step waited, by cause.
        prefetch_on_time: Prefetched copies per step that arrived before their use.
        prefetch_late: Prefetched copies per step for which the step waited.
        prefetch_wasted: Prefetched copies per step that were evicted unused.
        moved_bytes: Bytes per step, by link.
    """

    step_s: float
    compute_s: float
    stall_s: Mapping[str, float]
    prefetch_on_time: float
    prefetch_late: float
    prefetch_wasted: float
    moved_bytes: Mapping[str, float]

    @property
    def line(self) -> str:
        """Summary of the replay, as one line of the report."""
        waits = "  ".join(f"{cause} {format_duration(seconds)}" for cause, seconds in self.stall_s.items())
        copies = f"{self.prefetch_on_time:.0f} copies in time, {self.prefetch_late:.0f} late"
        return (
            f"replayed step   {format_duration(self.step_s)}: computing {format_duration(self.compute_s)}, "
            f"waiting: {waits or 'nothing'}; fetched ahead: {copies}, {self.prefetch_wasted:.0f} unused"
        )


def simulate_step(plan: Plan, tokens_per_step: int, rates: SimulatedRates) -> SimulatedStep:
    """Replay steps of a plan and return their mean after the warm-up."""
    replay_run = _Replay(plan, tokens_per_step, rates)
    for step_index in range(_NUM_WARM_STEPS):
        replay_run.step(step_index)
    stats_before, start_s, compute_s = replay_run.store.stats(), replay_run.clock.now_s, replay_run.compute_s
    peer_wait_s = replay_run.peer_wait_s
    for step_index in range(_NUM_WARM_STEPS, _NUM_WARM_STEPS + _NUM_STEPS):
        replay_run.step(step_index)
    window = replay_run.store.stats() - stats_before
    stall_s = {**window.stall_s, PEER: replay_run.peer_wait_s - peer_wait_s}
    return SimulatedStep(
        step_s=(replay_run.clock.now_s - start_s) / _NUM_STEPS,
        compute_s=(replay_run.compute_s - compute_s) / _NUM_STEPS,
        stall_s={cause: seconds / _NUM_STEPS for cause, seconds in stall_s.items() if seconds},
        prefetch_on_time=window.prefetch_on_time / _NUM_STEPS,
        prefetch_late=window.prefetch_late / _NUM_STEPS,
        prefetch_wasted=window.prefetch_wasted / _NUM_STEPS,
        moved_bytes={name: link.num_bytes / _NUM_STEPS for name, link in window.links.items()},
    )


def replay(plan: Plan, num_tokens: int | None = None) -> SimulatedStep | None:
    """Replay a step at the rates behind the plan's estimate. Return None if a rate is unknown.

    Args:
        num_tokens: Tokens in the step. Default: as in the plan's estimate.
    """
    rates = measured_rates(plan)
    if rates is None:
        return None
    return simulate_step(plan, plan.estimate.tokens_per_step if num_tokens is None else num_tokens, rates)


def step_seconds(plan: Plan) -> float | None:
    """Return the step time in seconds, from a replay that includes stalls, or None if this machine was not measured.

    For a planned machine, return the estimate, because a replay would add less than the uncertainty of the rates.
    """
    if not plan.run.tiers.machine.is_here:
        return plan.estimate.step_s
    simulated = replay(plan)
    return None if simulated is None else simulated.step_s


class _Replay:
    """Store of simulated tiers with the plan's blocks, and the clock that replayed steps advance."""

    def __init__(self, plan: Plan, tokens_per_step: int, rates: SimulatedRates) -> None:
        self._plan, self._tokens, self._rates = plan, tokens_per_step, rates
        self.clock = SimulatedClock()
        self.compute_s = 0.0
        # All ranks run in lockstep, so each waits equally long. Collectives run one at a time. If the program
        # gathers ahead, they run concurrently with the layers.
        self.peer_wait_s = 0.0
        self._peer_free_s = 0.0
        self._gathered_s: dict[tuple[str, int], float] = {}  # times at which the full copies for each tick arrive
        self._flops, self._products = tick_flops(plan), matrix_flops(plan)
        self._drive: SimulatedChannel | None = None
        # For a GPU, the step's thread only queues kernels, so it can run an update on the host while the GPU computes.
        self._is_queued = plan.device.type != "cpu" and plan.ticks is None
        self._queued_s = 0.0  # seconds of GPU ticks since the last host tick
        tiers = [
            SimulatedTier(
                name,
                budget.capacity_bytes,
                budget.slot_bytes,
                addressable=budget.is_addressable,
                is_read_only=budget.is_read_only,
            )
            for name, budget in plan.budgets_by_tier.items()
        ]
        self.store = TieredStore(tiers, Belady(), self._links(), clock=self.clock)
        homes = plan.placement.homes
        for key, block in plan.program.blocks.items():
            self.store.register(key, (block.num_elements,), block.dtype, home=homes[key], durable=False)
        for key in plan.program.blocks:
            home = plan.budgets_by_tier[homes[key]]
            if home.is_read_only:
                continue
            tier = home.name if home.is_addressable else "ram"
            with self.store.acquire(key, tier, "w"):
                pass
            if home.name != tier:
                self.store.evict(key, tier)
        self.store.wait_idle()
        self._copies = TapeStore(self.store, homes)
        self._pinned: Mapping[str, PinnedCopy] = {}  # copies that the previous tape left pinned
        for tier, nbytes in plan.placement.workspace_bytes.items():
            self.store.reserve(tier, nbytes)
        for tier, counts in plan.placement.buffers.items():
            self.store.keep_buffers(tier, counts)
        self.store.set_schedule(plan.program.schedule(homes, _NUM_WARM_STEPS + _NUM_STEPS + 1))

    def _links(self) -> list[SimulatedLink]:
        budgets, links = self._plan.budgets_by_tier, []
        # Reads and writes of a storage tier share one channel. Direct paths to a GPU ignore the bus, which is faster.
        storage = {
            name: SimulatedChannel(self.clock, self._rates.storage_rate(name))
            for name, budget in budgets.items()
            if not budget.is_addressable
        }
        self._drive = storage.get("nvme")
        for src, dst in self._plan.placement.routes.links:
            channel = storage.get(src) or storage.get(dst) or SimulatedChannel(self.clock, self._rates.bus_bytes_per_s)
            links.append(SimulatedLink(src, dst, channel, priority=int(dst in storage)))
        return links

    def step(self, step_index: int) -> None:
        """Replay one step from the tape that the engine executes."""
        program, placement = self._plan.program, self._plan.placement
        tape = compile_step(program, placement.homes, placement.stays, updates=step_index > 0, pinned=self._pinned)
        self._pinned = tape.pinned
        for op in tape.ops:
            num_copies = self._num_copies
            self.store.advance(step_index * len(program.ticks) + op.tick)
            self._run(op)
            if self._plan.ticks is not None:
                self._compute((self._num_copies - num_copies) * self._rates.seconds_per_nvme_copy)
        if self._plan.ticks is not None:
            self._compute(self._plan.ticks.between_s)

    def _run(self, op: Op) -> None:
        self._wait_for_peers(self._gathered_s.pop((op.phase, op.visit), 0.0))
        seconds = (self._visible_seconds(op, self._seconds(op)) + self._orthogonalization_s(op)) / (1 + len(op.passing))
        with self.store.acquire_many([(use.key, op.tier, use.mode) for use in op.held]):
            self._copies.unpin_copies(op.held)
            self._compute(seconds)
            for group in op.passing:
                with self.store.acquire_many([(use.key, op.tier, use.mode) for use in group]):
                    self._copies.unpin_copies(group)
                    self._compute(seconds)
                self._copies.release_copies(group, op.tier)
        self._copies.release_copies(op.held, op.tier)
        self._move_between_ranks(op)

    def _move_between_ranks(self, op: Op) -> None:
        nbytes = max([0, *(nbytes for link, nbytes in op.bytes_outside.items() if PEER in link or NETWORK in link)])
        if not nbytes:
            return
        moving_s = nbytes / self._rates.peer_bytes_per_s
        self._peer_free_s = max(self._peer_free_s, self.clock.now_s) + moving_s
        if op.phase == "gather":
            assert op.served_phase is not None
            self._gathered_s[op.served_phase, op.visit] = self._peer_free_s
        # Parts that are gathered or exchanged inside a tick make the step wait each time.
        if op.served_phase is None or not self._plan.program.sharding.gathers_ahead:
            self._wait_for_peers(self._peer_free_s)

    def _wait_for_peers(self, end_s: float) -> None:
        wait_s = end_s - self.clock.now_s
        if wait_s > _SHORTEST_S:
            self.peer_wait_s += wait_s
            self.clock.advance(wait_s)

    def _visible_seconds(self, op: Op, seconds: float) -> float:
        """Return the seconds that a tick adds to the step. Queued GPU kernels hide host time."""
        if not self._is_queued:
            return seconds
        if op.tier != "ram":
            self._queued_s += seconds
            return seconds
        hidden_s, self._queued_s = min(seconds, self._queued_s), 0.0
        return seconds - hidden_s

    def _orthogonalization_s(self, op: Op) -> float:
        """Return the seconds that a GPU spends on the orthogonalization for an update on the host."""
        rate = self._rates.products_flops_per_s
        return self._products.get(op.visit, 0) / rate if rate and op.phase == "update" else 0.0

    @property
    def _num_copies(self) -> int:
        return 0 if self._drive is None else self._drive.num_submitted

    def _compute(self, seconds: float) -> None:
        """Advance the clock by the compute time, including its slowdown from concurrent transfers."""
        while seconds > _SHORTEST_S:
            before_s = 0.0 if self._drive is None else self._drive.busy_s
            self.compute_s += seconds
            self.clock.advance(seconds)
            if self._drive is None or self._plan.ticks is None:
                return
            moved_bytes = (self._drive.busy_s - before_s) * self._rates.nvme_bytes_per_s
            seconds = min(moved_bytes * self._rates.computing_s_per_nvme_byte, _MAX_DELAY_SHARE * seconds)

    def _seconds(self, op: Op) -> float:
        """Return a tick's measured seconds, or an estimate from its FLOPs or updated parameters."""
        if self._plan.ticks is not None:
            return self._plan.ticks.seconds[op.tick]
        if op.phase == "update":
            blocks = self._plan.program.blocks
            num_params = sum(blocks[use.key].num_elements for use in op.uses if blocks[use.key].kind == "weights")
            gpu_rate = self._rates.gpu_update_params_per_s if op.tier != "ram" else None
            return num_params / (gpu_rate or self._rates.update_params_per_s)
        return self._flops[op.tick] * self._tokens / self._rates.flops_per_s  # 0 for collectives
