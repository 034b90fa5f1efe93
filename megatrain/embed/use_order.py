"""Prefetches blocks in the order in which another trainer uses them. The order is learned at run time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tiered import TieredStore

_EVENTS_AHEAD = 3


class UseOrder:
    """Learned access order. It predicts the event (a unit's forward or backward) that last followed the current one.

    The engine compiles its order into a tape, but a host trainer can add micro-batches, evaluate in between or skip
    modules. A wrong prediction costs a fetch and never causes an error. Used by one thread at a time.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._next_events: dict[Hashable, Hashable] = {}
        self._requests: dict[Hashable, tuple[tuple[str, str], ...]] = {}
        self._last_event: Hashable = None

    def note(self, event: Hashable, requests: Sequence[tuple[str, str]]) -> None:
        """Record an event and the ``(key, tier)`` pairs that it uses. Then prefetch for the events expected next."""
        self._requests[event] = tuple(requests)
        if self._last_event is not None:
            self._next_events[self._last_event] = event
        self._last_event = event
        for _ in range(_EVENTS_AHEAD):
            next_event = self._next_events.get(event)
            if next_event is None or next_event == self._last_event:
                return
            event = next_event
            for key, tier in self._requests[event]:
                if self._store.prefetch(key, tier).skipped:
                    return
