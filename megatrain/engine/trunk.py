"""Trunk of a model: the forwards of all micro-batches, from the inputs to the cut before the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.head.head_model import accepts_use_cache
from megatrain.engine.lockstep import SinglePass, Stop, run_in_lockstep
from megatrain.engine.program.visit_trace import KEEP_NOTHING, Recompute
from megatrain.engine.unit.bound_unit import BoundUnit, buffers_unchanged, read_containers, units_stubbed
from megatrain.engine.unit.graph_keeping import GraphKeeping
from megatrain.engine.unit.input_saving import AbsentMicroBatches, InputSaving
from megatrain.engine.unit.saved_results import SavedResults
from megatrain.engine.unit.state import micro_batch_seed
from megatrain.engine.unit.suspend import SuspendedForward
from megatrain.engine.unit.visit import UnitVisit, VisitSequence

if TYPE_CHECKING:
    from megatrain.engine.program.visit_trace import TracedVisit, VisitTrace
    from megatrain.models.graph import ModelGraph

#: A micro-batch's number, the result of its forward, and the final state of its random stream.
SuspendedOutput = tuple[int, Any, tuple[Tensor, ...]]


class _TrunkReached(BaseException):
    """Signal that aborts a forward at the cut before the head. Not an `Exception`, so model code does not catch it."""

    def __init__(self, output: Any) -> None:
        self.output = output
        super().__init__()


def _trunk_stub(trunk_forward: Callable[..., Any]) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        raise _TrunkReached(trunk_forward(*args, **kwargs))

    return stub


class Trunk:
    """Runner for the forwards of all micro-batches. If the model has a cut, they end there, before the head.

    Args:
        visits: Sequence to which each pass appends its visits.
        bounds: All units, in order, with slots for their weights.
        cut: Module whose output ends the forward; None if the forward runs to its end.
        trace: Planned visits to compare each forward with; None for no comparison.
        mirror: Context in which the model's own code reads inputs from host copies; None to read from the device.
        recompute: Forward results that visits keep for the backward.
    """

    def __init__(
        self,
        graph: ModelGraph,
        visits: VisitSequence,
        bounds: Sequence[BoundUnit],
        device: torch.device,
        cut: torch.nn.Module | None,
        trace: VisitTrace | None,
        mirror: AbstractContextManager[Any] | None = None,
        recompute: Recompute = KEEP_NOTHING,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._context = context
        self._mirror = mirror
        self._graph, self.visits, self._bounds, self._device = graph, visits, bounds, device
        self._cut, self._trace = cut, trace
        self._recompute = recompute
        self._accepts_use_cache = accepts_use_cache(graph.model)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Replace all weights by placeholders and all units' forwards by stubs within the context."""
        stubs = {} if self._cut is None else {self._cut: _trunk_stub(self._cut.forward)}
        unchanged = buffers_unchanged("the model", self._graph.model.modules(), may_replace=True)
        with unchanged, units_stubbed(self._bounds, stubs), self._context():
            yield

    def run(self, batches: Mapping[int, dict[str, Any]], seed: int, first_number: int = 0) -> list[SuspendedOutput]:
        """Run the forward of every micro-batch in the current grad mode. Call this within the `prepared` context.

        Args:
            first_number: Position of micro-batch 0 in the step.

        Raises:
            VisitOrderError: If the forwards call different units, or units that differ from the plan.
        """
        self.visits.clear()
        anchor = torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
        forwards = [
            SuspendedForward(
                number,
                self._forward_of(batch),
                self.visits.random,
                self._device,
                micro_batch_seed(seed, first_number + number),
                self._mirror,
            )
            for number, batch in batches.items()
        ]

        def visit(stop: Stop) -> list[Callable[[], Any]]:
            absent = [forward.micro_batch for forward in forwards if forward not in stop.waiting]
            return self._visit(stop.number, stop.unit, anchor, absent).forward(stop.waiting)

        run_in_lockstep(forwards, SinglePass(self._graph, self._trace), visit)
        return [(forward.micro_batch, forward.result, forward.random_state) for forward in forwards]

    def _visit(self, number: int, unit: int, anchor: Tensor, absent: Sequence[int]) -> UnitVisit:
        """Create the visit ``number`` and append it to the pass. Micro-batches in ``absent`` skip the visit."""
        visits, access, random = self.visits, self.visits.access, self.visits.random
        planned = None if self._trace is None else self._trace.visits[number]
        keeping: GraphKeeping | InputSaving = GraphKeeping(random)
        saved: list[int | None] = []
        if not self._recompute.keeps_graph(number):
            unneeded = frozenset[str]() if planned is None else planned.unneeded.weights
            keeping = InputSaving(number, access, random, self._saved_results(number, planned), unneeded)
            saved += [] if planned is None else range(len(planned.saved))
            saved += [None] if saved and number in self._recompute.saving else []
        blocks = [(micro_batch, index) for micro_batch in absent for index in saved]
        visit = UnitVisit(
            number,
            self._bounds[unit],
            visits,
            keeping,
            AbsentMicroBatches(number, access, blocks, anchor),
            anchor,
            planned is not None and planned.has_backward,
        )
        visits.append(visit)
        return visit

    def _saved_results(self, number: int, planned: TracedVisit | None) -> Callable[[], SavedResults] | None:
        """Return a function that creates a visit's saved results, or None if the visit saves none."""
        if number not in self._recompute.saving:
            return None
        with_products = number in self._recompute.saved_results
        attention_nbytes = planned.attention.nbytes if planned is not None and with_products else None
        return partial(SavedResults, attention_nbytes, with_products=with_products)

    def _forward_of(self, batch: dict[str, Any]) -> Callable[[SuspendedForward], Any]:
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}

        def forward(suspended: SuspendedForward) -> Any:
            try:
                for parameters, leaf, value in read_containers(self._graph.units):
                    suspended.bind(parameters, leaf, value)
                return self._graph.model(**batch, **options)
            except _TrunkReached as reached:  # the head phase runs the rest of the forward
                return reached.output

        return forward
