"""Trunk of a model: the forwards of all micro-batches, from the inputs to the cut before the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.head.head_model import has_use_cache_argument
from megatrain.engine.lockstep import SinglePass, Stop, run_in_lockstep
from megatrain.engine.program.visit_trace import KEEP_NOTHING, Recompute
from megatrain.engine.unit.bound_unit import BoundUnit, forbid_buffer_changes, read_containers, stub_units
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
    """Runner for the forwards of all micro-batches. If the model has a cut before its head, the forwards end there.

    Args:
        visits: Sequence to which each pass appends its visits.
        bounds: All units, in order, with slots for their weights.
        cut_module: Module whose output ends the forward; None if the forward runs to its end.
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
        cut_module: torch.nn.Module | None,
        trace: VisitTrace | None,
        mirror: AbstractContextManager[Any] | None = None,
        recompute: Recompute = KEEP_NOTHING,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._context = context
        self._mirror = mirror
        self._graph, self.visits, self._bounds, self._device = graph, visits, bounds, device
        self._cut_module, self._trace = cut_module, trace
        self._recompute = recompute
        self._has_use_cache_argument = has_use_cache_argument(graph.model)

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Replace all weights with placeholders, and all units' forwards with stubs, within the context."""
        stubs = {} if self._cut_module is None else {self._cut_module: _trunk_stub(self._cut_module.forward)}
        buffer_guard = forbid_buffer_changes("the model", self._graph.model.modules(), may_replace=True)
        with buffer_guard, stub_units(self._bounds, stubs), self._context():
            yield

    def run(self, batches: Mapping[int, dict[str, Any]], seed: int, first_index: int = 0) -> list[SuspendedOutput]:
        """Run the forward of every micro-batch in the current grad mode. Call this within the `prepare` context.

        Args:
            first_index: Position of micro-batch 0 in the step.

        Raises:
            VisitOrderError: If the forwards call different units, or units that differ from the plan.
        """
        self.visits.clear()
        anchor = torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
        forwards = [
            SuspendedForward(
                index,
                self._make_forward(batch),
                self.visits.random,
                self._device,
                micro_batch_seed(seed, first_index + index),
                self._mirror,
            )
            for index, batch in batches.items()
        ]

        def visit(stop: Stop) -> list[Callable[[], Any]]:
            absent_micro_batches = [forward.micro_batch for forward in forwards if forward not in stop.forwards]
            return self._visit(stop.index, stop.unit, anchor, absent_micro_batches).forward(stop.forwards)

        run_in_lockstep(forwards, SinglePass(self._graph, self._trace), visit)
        return [(forward.micro_batch, forward.result, forward.random_state) for forward in forwards]

    def _visit(self, visit_index: int, unit: int, anchor: Tensor, absent_micro_batches: Sequence[int]) -> UnitVisit:
        """Create a visit and append it to the pass. The micro-batches in ``absent_micro_batches`` skip the visit."""
        visits, access, random = self.visits, self.visits.access, self.visits.random
        planned_visit = None if self._trace is None else self._trace.visits[visit_index]
        strategy: GraphKeeping | InputSaving = GraphKeeping(random)
        saved_indexes: list[int | None] = []
        if not self._recompute.is_graph_kept(visit_index):
            unneeded_weights = frozenset[str]() if planned_visit is None else planned_visit.unneeded_products.weights
            results = self._saved_results(visit_index, planned_visit)
            strategy = InputSaving(visit_index, access, random, results, unneeded_weights)
            saved_indexes += [] if planned_visit is None else range(len(planned_visit.saved_inputs))
            saved_indexes += [None] if saved_indexes and visit_index in self._recompute.saving_visits else []
        blocks = [(micro_batch, index) for micro_batch in absent_micro_batches for index in saved_indexes]
        visit = UnitVisit(
            visit_index,
            self._bounds[unit],
            visits,
            strategy,
            AbsentMicroBatches(visit_index, access, blocks, anchor),
            anchor,
            planned_visit is not None and planned_visit.has_backward,
        )
        visits.append(visit)
        return visit

    def _saved_results(self, index: int, planned_visit: TracedVisit | None) -> Callable[[], SavedResults] | None:
        """Return a function that creates a visit's saved results, or None if the visit saves none."""
        if index not in self._recompute.saving_visits:
            return None
        with_products = index in self._recompute.saved_results
        attention_nbytes = planned_visit.attention.nbytes if planned_visit is not None and with_products else None
        return partial(SavedResults, attention_nbytes, with_products=with_products)

    def _make_forward(self, batch: dict[str, Any]) -> Callable[[SuspendedForward], Any]:
        options: dict[str, Any] = {"use_cache": False} if self._has_use_cache_argument else {}

        def forward(suspended_forward: SuspendedForward) -> Any:
            try:
                for parameters, leaf, value in read_containers(self._graph.units):
                    suspended_forward.bind(parameters, leaf, value)
                return self._graph.model(**batch, **options)
            except _TrunkReached as signal:  # the head phase runs the rest of the forward
                return signal.output

        return forward
