"""Forward passes over batches with a store's weights, for evaluations, a reference model, and scores.

A head is a function that computes a pass's result with the layer runner. All other code is the same for all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from megatrain.engine.step import EvaluationEngine
from megatrain.plan.stepping import model_for_passes
from megatrain.plan.tiers import set_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.program.step_program import NextUses
    from megatrain.plan.plan import Plan
    from megatrain.ranks.collectives import Collectives, SingleRank
    from tiered import TieredStore

__all__ = ["Passes"]

Result = TypeVar("Result")


class Passes:
    """Runner of forward passes. Must be used by only one thread, after all updates are finished.

    Args:
        plan: Plan of passes, or of a training step, whose forward is then run as a pass.
        timeline: Timeline that records every op, or None to record nothing.
        activity: Progress of the current pass, for a live view.
        collectives: Collectives of the ranks that share the weights, or None for a single process.
        stays: Copies that the plan of passes keeps in the compute tier between passes.
    """

    def __init__(
        self,
        plan: Plan,
        store: TieredStore,
        *,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
        collectives: Collectives | SingleRank | None = None,
        stays: NextUses | None = None,
    ) -> None:
        self._plan, self._store = plan, store
        self._engine = EvaluationEngine(
            store,
            replace(model_for_passes(plan), stays=stays or {}),
            collectives=collectives,
            timeline=timeline,
            activity=activity,
        )

    @property
    def num_ticks(self) -> int:
        """Number of ticks in a pass."""
        return len(self._engine.program.ticks)

    def run(
        self,
        batches: Iterable[Sequence[Mapping[str, Tensor]]],
        head: Callable[[LayerRunner, Sequence[Mapping[str, Tensor]]], Result],
        *,
        num_passes: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """Run a pass for each item of ``batches`` and yield the head's result. The caller must exhaust the iterator.

        Weights are prefetched for all passes. At the end, all copies are evicted, and the store has no schedule.

        Args:
            batches: Micro-batches of each pass. Each unit runs all of them before the next unit starts.
            head: Function that computes a pass's result, such as ``LayerRunner.evaluate``.
            num_passes: Number of passes.
            should_stop: Called after each pass, on all ranks.

        Raises:
            VisitOrderError: The model calls its units in a different order in eval mode than in the plan.
        """
        schedule = self._engine.program.schedule(self._plan.placement.homes, num_passes)
        set_schedule(self._store, schedule, self._plan.run.advanced.prefetch_bytes)
        for index, micro_batches in enumerate(batches):
            yield self._engine.run_pass(micro_batches, head, pass_index=index)
            if should_stop():
                break
        self._engine.finish()
        self._store.set_schedule(None)
