"""Working sets of a step's ticks in one tier, and the search for the fullest tick."""

from __future__ import annotations

import heapq


class WorkingSets:
    """Bytes that each tick of a step needs in one tier in addition to homes, and their maximum.

    Attributes:
        by_tick: Bytes of each tick: the held group plus the largest passing group.
    """

    def __init__(self, num_ticks: int) -> None:
        self.by_tick = [0] * num_ticks
        self._groups: list[list[int]] = [[0]] * num_ticks
        #: Heaps of (-bytes, first tick) for single ticks (False) and for pairs of consecutive ticks (True). A stale
        #: entry is dropped when it reaches the top. Most layers are identical, so most changes affect a fullest tick.
        self._heaps: dict[bool, list[tuple[int, int]]] = {
            ahead: [(0, tick) for tick in range(num_ticks)] for ahead in (False, True)
        }
        self._changed: dict[bool, set[int]] = {False: set(), True: set()}  # ticks to push to the heaps

    def put(self, tick: int, groups: list[int]) -> None:
        """Set the bytes of each of a tick's groups. Group 0 is held for the whole tick."""
        self._groups[tick] = groups
        self._set(tick, groups[0] + max(groups[1:], default=0))

    def add(self, tick: int, group: int, nbytes: int) -> None:
        """Add bytes to one of a tick's groups. Group 0 is held for the whole tick."""
        groups = self._groups[tick]
        groups[group] += nbytes
        self._set(tick, groups[0] + max(groups[1:], default=0))

    def _set(self, tick: int, nbytes: int) -> None:
        if self.by_tick[tick] != nbytes:
            self.by_tick[tick] = nbytes
            self._changed[False].add(tick)
            self._changed[True].update((tick, (tick or len(self.by_tick)) - 1))

    def largest(self, *, ahead: bool) -> int:
        """Return the bytes of the fullest tick, or if ``ahead`` is True, of the fullest two consecutive ticks."""
        heap, changed = self._heaps[ahead], self._changed[ahead]
        if len(heap) + len(changed) > 4 * len(self.by_tick):
            heap[:] = [(-self._bytes_from(tick, ahead=ahead), tick) for tick in range(len(self.by_tick))]
            heapq.heapify(heap)
        else:
            for tick in changed:
                heapq.heappush(heap, (-self._bytes_from(tick, ahead=ahead), tick))
        changed.clear()
        while heap and -heap[0][0] != self._bytes_from(heap[0][1], ahead=ahead):
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0

    def fullest(self, *, ahead: bool) -> tuple[int, ...]:
        """Return the tick or ticks that the last call to ``largest`` found."""
        first = self._heaps[ahead][0][1] if self._heaps[ahead] else 0
        return (first, (first + 1) % len(self.by_tick)) if ahead and self.by_tick else (first,)

    def _bytes_from(self, tick: int, *, ahead: bool) -> int:
        return self.by_tick[tick] + (self.by_tick[tick + 1 - len(self.by_tick)] if ahead else 0)
