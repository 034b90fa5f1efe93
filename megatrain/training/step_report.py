"""Resources that a step uses (seconds, bytes by link and drive), and the metrics that loggers receive."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import psutil

from megatrain.base.observer import StepMetrics
from megatrain.checkpoint.state import RunState
from megatrain.data.loader import StepBatch
from megatrain.engine.step import StepEngine, StepResult
from megatrain.plan.plan import Plan
from megatrain.ranks.record import StepRecord
from megatrain.trace.counting import step_flops
from tiered import StoreStats, TieredStore

__all__ = ["StepMeter", "StepUsage", "add_by_key", "link_bytes"]

#: Number of most recent steps in the mean step time. A run's first steps are slower, because they compile kernels.
_MEAN_STEP_WINDOW = 20

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class StepUsage:
    """Resources used by a step.

    Attributes:
        step_s: Step time in seconds, including the time to read the batch.
        link_bytes: Bytes moved, in blocks and outside of blocks, by link, for example ``"ram->nvme"``.
        link_busy_s: Seconds with at least one active transfer, by link.
        process: CPU time and page faults of the process, as in ``StepMetrics.process_usage``.
    """

    step_s: float
    store_stats: StoreStats
    link_bytes: Mapping[str, int]
    link_busy_s: Mapping[str, float]
    process: Mapping[str, float] = field(default_factory=dict)

    def record(self, *, is_paused: bool) -> StepRecord:
        """Return the measurements that ranks exchange. ``is_paused`` states whether the rank waited for drive space."""
        return StepRecord(
            is_paused=is_paused,
            step_s=self.step_s,
            tier_used_bytes={name: tier.used_bytes for name, tier in self.store_stats.tiers.items()},
            stall_s=dict(self.store_stats.stall_s),
            link_bytes=self.link_bytes,
            written_bytes=dict(self.store_stats.written_bytes),
            rss_bytes=psutil.Process().memory_info().rss,
        )


class StepMeter:
    """Meter for the steps since the run was last started or resumed.

    Args:
        steps_per_epoch: Number of steps in one pass over all rows.
        first_step: Number of steps that were finished before this start.
    """

    def __init__(
        self, plan: Plan, store: TieredStore, engine: StepEngine, *, steps_per_epoch: int, first_step: int
    ) -> None:
        self._plan, self._store, self._engine = plan, store, engine
        self._steps_per_epoch, self._first_step = steps_per_epoch, first_step
        self._start_s = time.perf_counter()
        self._seconds = deque[float](maxlen=_MEAN_STEP_WINDOW)
        # Totals of the engine's transfers outside of blocks, up to the last step, by link.
        self._bytes_outside: Mapping[str, int] = {}
        self._busy_s_outside: Mapping[str, float] = {}
        self._step_start_s, self._stats_before, self._process_before = self._start_s, store.stats(), _process_usage()

    def start(self) -> None:
        """Start measuring a step."""
        self._step_start_s, self._stats_before = time.perf_counter(), self._store.stats()
        self._process_before = _process_usage()

    def stop(self) -> StepUsage:
        """Return the resources used since ``start``."""
        step_s, stats = time.perf_counter() - self._step_start_s, self._store.stats() - self._stats_before
        self._seconds.append(step_s)
        old_bytes, self._bytes_outside = self._bytes_outside, self._engine.moved_bytes
        old_busy_s, self._busy_s_outside = self._busy_s_outside, self._engine.moving_s
        busy_s = {name: link.busy_s for name, link in stats.links.items()}
        return StepUsage(
            step_s,
            stats,
            link_bytes=add_by_key(stats.due_bytes, add_by_key(self._bytes_outside, old_bytes, -1)),
            link_busy_s=add_by_key(busy_s, add_by_key(self._busy_s_outside, old_busy_s, -1)),
            process=add_by_key(_process_usage(), self._process_before, -1),
        )

    def metrics(
        self,
        state: RunState,
        batch: StepBatch,
        result: StepResult,
        lr: float,
        usage: StepUsage,
        records: Sequence[StepRecord],
        warmup_steps: int,
    ) -> StepMetrics:
        """Return the metrics of the last step.

        Args:
            state: State of the run after the step.
            lr: Learning rate of the step.
            usage: Result of ``stop``.
            records: Records of all ranks; empty for a single process.
            warmup_steps: Number of steps in which the learning rate rises.
        """
        position, stats = batch.position, usage.store_stats
        recompute = self._plan.program.recompute
        if self._plan.run.objective.loss.compares_rows:
            recompute = replace(recompute, kept_parts=0)
        flops = step_flops(
            self._plan.trace,
            num_positions=sum(micro_batch["input_ids"].numel() for micro_batch in batch.micro_batches),
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            recompute=recompute,
        )
        mean_s = (time.perf_counter() - self._start_s) / (state.step - self._first_step)
        return StepMetrics(
            step=state.step,
            max_steps=state.max_steps,
            epoch=position.epoch + position.step / self._steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            num_real_tokens=batch.num_real_tokens,
            num_trained_tokens=result.num_trained_tokens,
            step_s=usage.step_s,
            eta_s=mean_s * (state.max_steps - state.step),
            mean_step_s=sum(self._seconds) / len(self._seconds),
            warmup_steps=warmup_steps,
            tier_used_bytes={name: tier.used_bytes for name, tier in stats.tiers.items()},
            tier_capacity_bytes={name: tier.capacity_bytes for name, tier in stats.tiers.items()},
            stall_s=dict(stats.stall_s),
            written_bytes=dict(stats.written_bytes),
            link_bytes=records[0].link_bytes if records else usage.link_bytes,
            ranks=[record.figures() for record in records],
            link_busy_s=usage.link_busy_s,
            rss_bytes=psutil.Process().memory_info().rss,
            process_usage=usage.process,
            model_flops=flops.model,
            hardware_flops=flops.hardware,
            preferences=result.metrics,
        )


def _process_usage() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"user_s": usage.ru_utime, "system_s": usage.ru_stime, "page_faults": usage.ru_minflt + usage.ru_majflt}


def link_bytes(stats: StoreStats) -> dict[str, int]:
    """Return the moved bytes by link."""
    return {name: link.num_bytes for name, link in stats.links.items()}


def add_by_key(values: Mapping[str, Number], addends: Mapping[str, Number], factor: int = 1) -> dict[str, Number]:
    """Add two mappings by key. The values of ``addends`` are multiplied by ``factor`` first."""
    return {name: values.get(name, 0) + factor * addends.get(name, 0) for name in {**values, **addends}}
