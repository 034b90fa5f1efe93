"""The next unit of forwards in lockstep: its position, the forwards that wait for it, and orders that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.converters.spec import build_graph
from megatrain.engine.lockstep import RepeatedPasses, SinglePass, Stop, VisitOrderError
from megatrain.engine.program.visit_trace import TracedVisit, VisitMemory, VisitTrace
from oracles.families import tiny_config


class Call:
    def __init__(self, unit_index: int) -> None:
        self.unit_index = unit_index


class Forward:
    """Forward that waits at a unit, or has ended."""

    def __init__(self, unit: int | None) -> None:
        self.call = None if unit is None else Call(unit)


def at(*units: int | None) -> Any:
    return [Forward(unit) for unit in units]


def planned(*units: int, num_head: int = 0) -> VisitTrace:
    memory, last = VisitMemory(0, 0, 0, 0, 0), len(units) - num_head
    visits = [TracedVisit(unit, number >= last, True, (), memory) for number, unit in enumerate(units)]
    return VisitTrace(tuple(visits), 0, 0)


@pytest.fixture(scope="module")
def graph() -> Any:
    return build_graph(tiny_config("llama", num_hidden_layers=1))


def test_all_forwards_stop_at_the_same_unit(graph: Any) -> None:
    for trace in (None, planned(0, 1, 3, num_head=1)):
        itinerary = SinglePass(graph, trace)
        for index in range(2):
            forwards = at(index, index)
            assert itinerary.next_stop(forwards) == Stop(index, index, forwards)
        assert itinerary.next_stop(at(None, None)) is None


def test_forwards_that_differ_are_refused(graph: Any) -> None:
    itinerary = SinglePass(graph, None)
    itinerary.next_stop(at(0, 0))
    with pytest.raises(VisitOrderError) as caught:
        itinerary.next_stop(at(2, None, 1))
    assert str(caught.value) == (
        "micro-batches reach different units at visit 1: model.layers.0, model.norm, the end. Which layers this model "
        'runs depends on the data; train it with order = "micro_batch" and no plan'
    )


def test_forwards_that_leave_the_plan_are_refused(graph: Any) -> None:
    def error(trace: VisitTrace, *steps: Any) -> str:
        itinerary = SinglePass(graph, trace)
        for step in steps[:-1]:
            itinerary.next_stop(step)
        with pytest.raises(VisitOrderError) as caught:
            itinerary.next_stop(steps[-1])
        return str(caught.value)

    assert error(planned(0, 2), at(0), at(1)) == "visit 1 is model.layers.0, but model.norm was planned"
    assert error(planned(0), at(0), at(1)) == "visit 1 is model.layers.0, but the end of the forward was planned"
    trace = planned(0, 1, 2, 3, num_head=1)
    assert error(trace, at(0), at(None)) == "the forward ended after 1 unit calls, but 3 were planned"


def test_optional_units_are_visited_by_the_forwards_that_call_them(graph: Any) -> None:
    optional: Any = replace(graph, optional_units=frozenset({1}))
    free = SinglePass(optional, None)
    forwards = at(2, 1, None)
    assert free.next_stop(forwards) == Stop(0, 1, [forwards[1]])
    forwards = at(2, 2)
    assert free.next_stop(forwards) == Stop(1, 2, forwards)
    bound = SinglePass(optional, planned(1, 2, 1))
    forwards = at(2, 1)
    assert bound.next_stop(forwards) == Stop(0, 1, [forwards[1]])
    forwards = at(2, 2)
    assert bound.next_stop(forwards) == Stop(1, 2, forwards)
    forwards = at(3, 3)
    assert bound.next_stop(forwards) == Stop(2, 1, []), "a planned visit takes place without a forward"


def test_passes_repeat_until_every_prompt_has_ended(graph: Any) -> None:
    passes: list[int] = []
    itinerary = RepeatedPasses(graph, planned(0, 1), None, passes.append)
    for number in range(3):
        for unit in range(2):
            forwards = at(None, unit)
            assert itinerary.next_stop(forwards) == Stop(unit, unit, [forwards[1]])
        assert passes == list(range(1, number + 1))
    assert itinerary.next_stop(at(None, None)) is None
    assert passes == [1, 2]
    fresh = RepeatedPasses(graph, planned(0, 1), None, passes.append)
    fresh.next_stop(at(0))
    with pytest.raises(VisitOrderError) as caught:
        fresh.next_stop(at(0, 2))
    assert str(caught.value) == "prompts reach different units at visit 1: model.embed_tokens, model.norm"
    unplanned = RepeatedPasses(graph, None, None, passes.append)
    assert [unplanned.next_stop(at(unit)).index for unit in (0, 1, 0)] == [0, 1, 2]  # type: ignore[union-attr]
    assert unplanned.next_stop(at(None)) is None


def test_a_rank_without_prompts_joins_the_passes_of_other_ranks(graph: Any) -> None:
    asked, passes, others = [], list[int](), [True, False]

    def any_rank(goes_on: bool) -> bool:
        asked.append(goes_on)
        return goes_on or others.pop(0)

    itinerary = RepeatedPasses(graph, planned(0, 1), any_rank, passes.append)
    stops = [itinerary.next_stop(at(0)), itinerary.next_stop(at(1)), *(itinerary.next_stop(at(None)) for _ in range(3))]
    assert [stop and (stop.index, stop.unit, len(stop.forwards)) for stop in stops] == [
        (0, 0, 1), (1, 1, 1), (0, 0, 0), (1, 1, 0), None,
    ]  # fmt: skip
    assert (asked, passes) == ([False, False], [1])


def test_visits_of_the_head_are_not_awaited(graph: Any) -> None:
    itinerary = SinglePass(graph, planned(0, 3, 3, num_head=2))
    itinerary.next_stop(at(0))
    assert itinerary.next_stop(at(None)) is None
