"""Forward passes over batches by the weights of a store: evaluations, a reference, scores.

Whatever is asked of the model is a head, a function of what runs its layers; schedule, order and end are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from megatrain.engine.step import EvaluationEngine
from megatrain.plan.tiers import set_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.program import Stays
    from megatrain.plan.plan import Plan
    from megatrain.ranks.collectives import Alone, Collectives
    from tiered import TieredStore

__all__ = ["Passes"]

Result = TypeVar("Result")


class Passes:
    """Runs forward passes of a plan. Used by one thread, with no update pending.

    Args:
        plan: Of a training step, whose forward is a pass, or of passes.
        timeline: Records every op; None: nothing is recorded.
        activity: Progress within a pass, for status.
        collectives: The ranks that share the weights; None: one process has them.
        stays: Copies that stay in the compute tier from one pass to the next, as the plan of passes says.
    """

    def __init__(
        self,
        plan: Plan,
        store: TieredStore,
        *,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
        collectives: Collectives | Alone | None = None,
        stays: Stays | None = None,
    ) -> None:
        self._plan, self._store = plan, store
        self._engine = EvaluationEngine(
            store,
            replace(plan.for_passes, stays=stays or {}),
            collectives=collectives,
            timeline=timeline,
            activity=activity,
        )

    @property
    def num_ticks(self) -> int:
        """Ticks of a pass."""
        return len(self._engine.program.ticks)

    def run(
        self,
        batches: Iterable[Sequence[Mapping[str, Tensor]]],
        head: Callable[[LayerRunner, Sequence[Mapping[str, Tensor]]], Result],
        *,
        num_passes: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """Run a pass for each item and yield what the head returns; to be iterated to its end.

        Weights are fetched ahead for all passes. Afterwards no copy stays and the store has no schedule.

        Args:
            batches: Micro-batches of each pass, each unit for all of them before the next.
            head: Returns what is asked of a pass, such as ``LayerRunner.evaluate``.
            num_passes: How many there will be.
            should_stop: Asked after each pass, by all ranks.

        Raises:
            VisitOrderError: in eval mode the model calls its units in another order.
        """
        schedule = self._engine.program.schedule(self._plan.placement.homes, num_passes)
        set_schedule(self._store, schedule, self._plan.run.advanced.prefetch_bytes)
        for number, micro_batches in enumerate(batches):
            yield self._engine.run_pass(micro_batches, head, number=number)
            if should_stop():
                break
        self._engine.finish()
        self._store.set_schedule(None)
