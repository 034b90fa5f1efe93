"""Learns in which order blocks are used, and fetches the next ones ahead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["UseOrder"]

_EVENTS_AHEAD = 3


class UseOrder:
    """The order of events (a unit's forward, its backward, its update), as it was the last time.

    A host trainer may add micro-batches, evaluate in between or leave modules out: what follows an event is what
    followed it last. A wrong guess costs a fetch; it is never an error. Used by one thread at a time.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._next: dict[Hashable, Hashable] = {}
        self._requests: dict[Hashable, tuple[tuple[str, str], ...]] = {}
        self._last: Hashable = None

    def note(self, event: Hashable, requests: Sequence[tuple[str, str]]) -> None:
        """Note that an event takes place now, which uses ``(key, tier)``, and fetch for those that should follow."""
        self._requests[event] = tuple(requests)
        if self._last is not None:
            self._next[self._last] = event
        self._last = event
        for _ in range(_EVENTS_AHEAD):
            following = self._next.get(event)
            if following is None or following == self._last:
                return
            event = following
            for key, tier in self._requests[event]:
                if self._store.prefetch(key, tier).skipped:
                    return
