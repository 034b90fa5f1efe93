"""Passes of an evaluation: the forward alone, weights streamed as in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatrain.activity import Activity
from megatrain.engine.program import evaluation_program
from megatrain.engine.residency import StoreAccess
from megatrain.engine.runner import LayerRunner, SummedLoss
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    import torch

    from megatrain.engine.objective import CrossEntropy
    from megatrain.engine.program import StepProgram
    from megatrain.engine.trace import VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.timeline import Timeline
    from tiered.store import TieredStore

__all__ = ["EvaluationEngine"]


class EvaluationEngine:
    """Runs forwards on blocks of a store, between steps that left no update. Used by the thread that trains.

    Args:
        store: holds the weights.
        program: of a training step.
        homes: of the placement.
        timeline: told of every tick.
        cross_entropy: in the place of torch's; None: torch's.
        activity: told of every tick and micro-batch.

    Attributes:
        program: of one pass.
    """

    def __init__(
        self,
        store: TieredStore,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        homes: Mapping[str, str],
        *,
        device: torch.device | str,
        timeline: Timeline | None = None,
        cross_entropy: CrossEntropy | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.program = evaluation_program(program)
        self._access = StoreAccess(
            store, graph, trace, self.program, homes, {}, KernelThreads(1), timeline=timeline, activity=activity
        )
        self._runner = LayerRunner(
            graph,
            self._access,
            device=device,
            compute_dtype=graph.dtype,
            head_rows=trace.head_rows or None,
            trace=trace,
            cross_entropy=cross_entropy,
            activity=activity,
        )

    def run_pass(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, number: int) -> SummedLoss:
        """Run pass ``number`` (from 0) of the evaluation that the store has the schedule of.

        Raises:
            VisitOrderError: in eval mode the model calls its units in another order.
        """
        self._access.start_step(number, updates=False)
        loss = self._runner.evaluate(micro_batches)
        self._access.end_step()
        return loss
