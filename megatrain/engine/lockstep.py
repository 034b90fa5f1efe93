"""Forwards in lockstep: all forwards that call a unit run it together, before any of them continues.

A unit's weights are therefore leased once for all forwards. Training passes, evaluation passes and generation all use
`run_in_lockstep`. An `Itinerary` chooses the next unit and compares it with the planned visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.engine.program.visit_trace import VisitTrace
    from megatrain.engine.unit.suspend import SuspendedForward
    from megatrain.models.graph import ModelGraph


class VisitOrderError(Exception):
    """Error for unit calls whose order differs from the plan or between micro-batches."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Next visit in lockstep, with the forwards that wait for it.

    Attributes:
        index: Position of the visit in its pass.
        unit: Index of the unit.
        forwards: Forwards that wait at the unit. Other forwards have ended, or skip the unit.
    """

    index: int
    unit: int
    forwards: list[SuspendedForward]


def run_in_lockstep(
    forwards: Sequence[SuspendedForward], itinerary: Itinerary, visit: Callable[[Stop], list[Callable[[], Any]]]
) -> None:
    """Run all forwards to completion, one unit at a time.

    Args:
        visit: Function that runs the unit of a stop. It returns one function per waiting forward, which builds the
            result of the forward's call.
    """
    try:
        for forward in forwards:
            forward.start()
        while (stop := itinerary.next_stop(forwards)) is not None:
            results = visit(stop)
            for forward in stop.forwards:
                forward.resume(results.pop(0))  # pop frees each result after its use
    finally:
        for forward in forwards:
            forward.close()


class Itinerary:
    """Order in which forwards visit the units of a model.

    Args:
        trace: Planned visits to compare the forwards with; None for no comparison.
    """

    def __init__(self, graph: ModelGraph, trace: VisitTrace | None) -> None:
        self._graph, self._trace = graph, trace
        self._visit_index = 0  # position of the next visit in its pass

    def next_stop(self, forwards: Sequence[SuspendedForward]) -> Stop | None:
        """Return the next visit, or None at the end."""
        raise NotImplementedError

    def _stop_at(self, unit: int, forwards: list[SuspendedForward]) -> Stop:
        self._visit_index += 1
        return Stop(self._visit_index - 1, unit, forwards)

    def _common_unit(self, next_units: set[int | None], subject: str, advice: str = "") -> int:
        """Return the unit that all forwards call next. Raise `VisitOrderError` if they differ or deviate from the plan.

        Args:
            next_units: Units that forwards call next; None for a forward that has ended.
            subject: Name of the forwards in the error message.
        """
        units, visit_index = self._graph.units, self._visit_index
        if len(next_units) > 1:
            names = sorted("the end" if unit_index is None else units[unit_index].name for unit_index in next_units)
            raise VisitOrderError(f"{subject} reach different units at visit {visit_index}: {', '.join(names)}{advice}")
        (unit,) = next_units
        assert unit is not None
        if self._trace is not None:
            expected = self._trace.visits[visit_index].unit if visit_index < len(self._trace.visits) else None
            if expected != unit:
                planned_name = "the end of the forward" if expected is None else units[expected].name
                raise VisitOrderError(f"visit {visit_index} is {units[unit].name}, but {planned_name} was planned")
        return unit


class SinglePass(Itinerary):
    """Itinerary of one forward per micro-batch, up to the head. A forward can skip an optional unit."""

    def next_stop(self, forwards: Sequence[SuspendedForward]) -> Stop | None:
        """Return the next visit, or None if all forwards have ended after all planned visits."""
        if all(forward.call is None for forward in forwards):
            self._check_count()
            return None
        unit = self._optional_unit(forwards)
        if unit is not None:
            return self._stop_at(unit, [f for f in forwards if f.call and f.call.unit_index == unit])
        next_units = {forward.call.unit_index if forward.call else None for forward in forwards}
        unit = self._common_unit(
            next_units,
            "micro-batches",
            '. Which layers this model runs depends on the data; train it with order = "micro_batch" and no plan',
        )
        return self._stop_at(unit, list(forwards))

    def _optional_unit(self, forwards: Sequence[SuspendedForward]) -> int | None:
        """Return the next visit's unit if it is optional.

        A planned visit takes place even if no forward waits at it, because the step must take all planned leases.
        """
        if self._trace is not None:
            units = [visit.unit for visit in self._trace.visits[self._visit_index : self._visit_index + 1]]
        else:
            units = [forward.call.unit_index for forward in forwards if forward.call is not None]
        return next((unit for unit in units if unit in self._graph.optional_units), None)

    def _check_count(self) -> None:
        """Raise `VisitOrderError` if the forwards ended before all planned visits."""
        num_planned = None if self._trace is None else sum(not visit.is_head for visit in self._trace.visits)
        if num_planned not in (None, self._visit_index):
            raise VisitOrderError(
                f"the forward ended after {self._visit_index} unit calls, but {num_planned} were planned"
            )


class RepeatedPasses(Itinerary):
    """Itinerary of functions that run the model's forward repeatedly, until all of them have ended.

    Args:
        any_rank: Collective that takes whether this rank continues, and returns whether any rank continues, so that all
            ranks run the same number of passes. None for a single process.
        on_pass: Function called before each pass except the first, with the number of the pass.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace | None,
        any_rank: Callable[[bool], bool] | None,
        on_pass: Callable[[int], None],
    ) -> None:
        super().__init__(graph, trace)
        assert any_rank is None or trace is not None, "several ranks need planned visits"
        self._any_rank, self._on_pass = any_rank, on_pass
        self._num_passes = 0

    def next_stop(self, forwards: Sequence[SuspendedForward]) -> Stop | None:
        """Return the next visit, or None if all functions of all ranks have ended."""
        callers = [forward for forward in forwards if forward.call is not None]
        units: set[int | None] = {forward.call.unit_index for forward in callers if forward.call is not None}
        if self._trace is not None and self._visit_index == len(self._trace.visits):
            if not (units if self._any_rank is None else self._any_rank(bool(units))):
                return None
            self._visit_index, self._num_passes = 0, self._num_passes + 1
            self._on_pass(self._num_passes)
        if not units:
            if self._any_rank is None or self._trace is None:
                return None
            units = {
                self._trace.visits[self._visit_index].unit
            }  # join the pass, because prompts on other ranks continue
        return self._stop_at(self._common_unit(units, "prompts"), callers)
