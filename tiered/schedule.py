"""Schedules: sequences of future accesses, used by policies and the prefetcher."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["r", "w", "rw"]

#: Tick that is later than all others. As a next use, it means that the copy is not used again.
NEVER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Access:
    """One use of one block.

    Attributes:
        tick: position in the trainer's sequence of ticks (``TieredStore.advance``). Several accesses can share a tick.
        mode: ``r`` reads, ``rw`` changes, ``w`` overwrites without reading.
    """

    tick: int
    key: str
    tier: str
    mode: Mode = "r"


class Schedule:
    """Sequence of future accesses, which can repeat periodically.

    Args:
        accesses: accesses in any order. The constructor sorts them by tick; the sort is stable.
        period: number of ticks after which the sequence repeats (one training step), or None if it does not repeat.
            With a period, all ticks must be in ``[0, period)``.
        end: first tick after the last access (the end of training), or None.
        start: first tick of the sequence, a multiple of the period.
        deferred: ticks that finish work of the previous period. The first period skips these ticks. The period that
            starts at ``end`` consists only of these ticks.

    Raises:
        ValueError: a tick is outside the period.
    """

    def __init__(
        self,
        accesses: Iterable[Access],
        period: int | None = None,
        end: int | None = None,
        *,
        start: int = 0,
        deferred: Collection[int] = (),
    ) -> None:
        self.accesses: Sequence[Access] = sorted(accesses, key=lambda access: access.tick)
        self.period = period
        self.end = end
        self.start = start
        self.deferred = frozenset(deferred)
        assert period is not None or not self.deferred, "deferred ticks need a period"
        if period is not None and self.accesses and not 0 <= self.accesses[0].tick <= self.accesses[-1].tick < period:
            raise ValueError(f"all ticks of a schedule with period {period} must be in [0, {period})")
        self._ticks = [access.tick for access in self.accesses]
        self.keys = frozenset(access.key for access in self.accesses)
        self._uses: dict[tuple[str, str], list[int]] = {}
        for access in self.accesses:
            self._uses.setdefault((access.key, access.tier), []).append(access.tick)

    @classmethod
    def from_trace(cls, trace: Trace, period: int | None = None) -> Schedule:
        """Return a schedule from a recorded trace (``with store.record() as trace``)."""
        return cls(trace.accesses, period)

    def of(self, predicate: Callable[[Access], bool]) -> Schedule:
        """Return a copy of the schedule with only the accesses for which ``predicate`` returns True."""
        accesses = filter(predicate, self.accesses)
        return Schedule(accesses, self.period, self.end, start=self.start, deferred=self.deferred)

    def __contains__(self, access: Access) -> bool:
        tick = access.tick if self.period is None else access.tick % self.period
        return self._is_used(access.tick) and tick in self._uses.get((access.key, access.tier), ())

    def next_use(self, key: str, tier: str, tick: int) -> int:
        """Return the first tick later than ``tick`` at which the copy is used, or ``NEVER``."""
        ticks = self._uses.get((key, tier))
        if not ticks:
            return NEVER
        if self.period is None:
            index = bisect_right(ticks, tick)
            return ticks[index] if index < len(ticks) and self._is_used(ticks[index]) else NEVER
        tick = max(tick, self.start - 1)
        base, offset = tick - tick % self.period, tick % self.period
        index = bisect_right(ticks, offset)
        for position in range(index, index + 2 * len(ticks)):  # The first and last period have only some of the ticks.
            num_periods, index = divmod(position, len(ticks))
            use = base + num_periods * self.period + ticks[index]
            if self._is_used(use):
                return use
        return NEVER

    def used_at(self, tick: int) -> Sequence[Access]:
        """Return the accesses at a tick. The returned objects have ticks within the first period."""
        if not self._is_used(tick):
            return ()
        offset = tick if self.period is None else tick % self.period
        return self.accesses[bisect_right(self._ticks, offset - 1) : bisect_right(self._ticks, offset)]

    def walk(self, tick: int) -> Iterator[tuple[int, Access]]:
        """Yield (tick, access) pairs later than ``tick`` in deadline order, for at most one period.

        The walk creates no objects: each access keeps its tick within the first period.
        """
        tick = max(tick, self.start - 1)
        base, offset = (0, tick) if self.period is None else (tick - tick % self.period, tick % self.period)
        start = bisect_right(self._ticks, offset)
        spans = [(base, range(start, len(self.accesses)))]
        if self.period is not None:
            spans.append((base + self.period, range(start)))
        all_used = not self.deferred and self.end is None  # Then every tick after the start is used.
        for span_start, indices in spans:
            for index in indices:
                access = self.accesses[index]
                access_tick = span_start + access.tick
                if all_used or self._is_used(access_tick):
                    yield access_tick, access

    def _is_used(self, tick: int) -> bool:
        """Return whether the tick is between the start and the end, with deferred ticks shifted by one period."""
        delay = 0 if self.period is None or tick % self.period not in self.deferred else self.period
        return self.start <= tick - delay and (self.end is None or tick - delay < self.end)


@dataclass
class Trace:
    """Accesses in the order in which they happened, recorded by ``TieredStore.record``."""

    accesses: list[Access] = field(default_factory=list)
