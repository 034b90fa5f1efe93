"""Next uses and upcoming accesses of schedules that run once or repeat."""

from __future__ import annotations

import pytest

from tiered import NEVER, Access, Schedule, Trace


def accesses(*items: tuple[int, str]) -> list[Access]:
    return [Access(tick, key, "ram") for tick, key in items]


def test_next_use_of_a_single_pass() -> None:
    schedule = Schedule(accesses((5, "a"), (1, "a"), (3, "b")))
    assert [schedule.next_use("a", "ram", after) for after in (0, 1, 4, 5)] == [1, 5, 5, NEVER]
    assert schedule.next_use("b", "gpu", 0) == schedule.next_use("c", "ram", 0) == NEVER


def test_next_use_wraps_around_the_period_until_the_end() -> None:
    schedule = Schedule(accesses((1, "a"), (3, "b")), period=4, end=12)
    assert [schedule.next_use("a", "ram", after) for after in (0, 1, 4, 5, 9)] == [1, 5, 5, 9, NEVER]
    assert schedule.next_use("b", "ram", 7) == 11 and schedule.next_use("b", "ram", 11) == NEVER


def test_a_walk_is_one_period_in_deadline_order() -> None:
    schedule = Schedule(accesses((0, "a"), (1, "b"), (1, "c"), (2, "d")), period=3)
    coming = [(tick, access.key) for tick, access in schedule.walk(4)]
    assert coming == [(5, "d"), (6, "a"), (7, "b"), (7, "c")]
    assert [access.key for access in schedule.used_at(7)] == ["b", "c"]
    once = Schedule(accesses((0, "a"), (1, "b"), (2, "d")))
    assert [access.key for _, access in once.walk(0)] == ["b", "d"] and not list(once.walk(2))
    ends = Schedule(accesses((0, "a"), (1, "b")), period=2, end=4)
    assert [tick for tick, _ in ends.walk(2)] == [3]
    assert not list(Schedule([]).walk(0))


def test_contains_uses_the_tick_within_the_period() -> None:
    schedule = Schedule(accesses((1, "a")), period=3)
    assert Access(4, "a", "ram", "rw") in schedule
    assert Access(5, "a", "ram") not in schedule and Access(4, "a", "gpu") not in schedule


def test_a_trace_becomes_a_schedule_and_ticks_must_fit_the_period() -> None:
    trace = Trace(accesses((2, "b"), (0, "a")))
    assert [access.key for access in Schedule.from_trace(trace, period=3).accesses] == ["a", "b"]
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        Schedule.from_trace(trace, period=2)


def deferring_schedule() -> Schedule:
    """Return three steps of "update a, use a, use b" in which the update finishes the previous step."""
    accesses = [Access(0, "a/m", "ram", "rw"), Access(1, "a", "ram"), Access(2, "b", "ram")]
    return Schedule(accesses, period=3, end=9, deferred=[0])


def test_deferred_ticks_are_missing_at_first_and_alone_at_the_end() -> None:
    schedule = deferring_schedule()
    reached = [(tick, a.key) for tick in range(15) for a in schedule.used_at(tick)]
    assert reached == [(1, "a"), (2, "b"), (3, "a/m"), (4, "a"), (5, "b"), (6, "a/m"), (7, "a"), (8, "b"), (9, "a/m")]
    assert Access(0, "a/m", "ram", "rw") not in schedule
    assert Access(9, "a/m", "ram", "rw") in schedule


def test_next_use_and_walk_respect_deferred_ticks() -> None:
    schedule = deferring_schedule()
    assert [schedule.next_use("a/m", "ram", now) for now in (-1, 0, 2, 3, 6, 8, 9)] == [3, 3, 3, 6, 9, 9, NEVER]
    assert schedule.next_use("a", "ram", 7) == NEVER
    assert [(tick, a.key) for tick, a in schedule.walk(8)] == [(9, "a/m")]
    assert [(tick, a.key) for tick, a in schedule.walk(0)] == [(1, "a"), (2, "b"), (3, "a/m")]


def test_a_schedule_can_start_late() -> None:
    schedule = Schedule([Access(0, "a", "ram"), Access(1, "b", "ram")], period=2, start=4, end=6, deferred=[1])
    assert [(tick, a.key) for tick in range(10) for a in schedule.used_at(tick)] == [(4, "a"), (7, "b")]
    assert schedule.next_use("a", "ram", -1) == 4
