"""Copies away from home: they go back after their turn, or stay pinned until their next use, as planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.engine.program import Turn
    from tiered.store import TieredStore


class Copies:
    """What becomes of a copy once its lease is over. Used by the thread that runs the step.

    Args:
        homes: block key -> tier.
    """

    def __init__(self, store: TieredStore, homes: Mapping[str, str]) -> None:
        self._store, self._homes = store, homes
        self._waiting: dict[str, str] = {}  # key -> tier that it stays in
        self._waited: set[str] = set()  # keys in use whose copies were not brought for this use

    def arrived(self, keys: Iterable[str]) -> None:
        """Note that blocks are leased: a copy that waited for this use waits no longer."""
        for key in keys:
            tier = self._waiting.pop(key, None)
            if tier is not None:
                self._store.unpin(key, tier)
                self._waited.add(key)

    def leave(self, turn: Turn, key: str, tier: str) -> None:
        """Let go of a block after its turn: spent contents are dropped, other copies stay or go back home."""
        has_waited = key in self._waited
        self._waited.discard(key)
        if key in turn.tick.spent:
            self._store.discard(key)
        elif self._homes[key] != tier:
            passed_ram = tier == "gpu" and self._homes[key] == "nvme" and not self._store.is_linked("nvme", "gpu")
            if passed_ram and not has_waited:
                # The middle copy first: with it still there, the prefetcher could bring the next use from it. One that
                # waited has none: what is in RAM then was fetched for a use there.
                self._store.evict(key, "ram")
            if key in turn.kept:
                # Pinned, so that nothing else decides about it and its room is counted as taken.
                self._store.pin(key, tier)
                self._waiting[key] = tier
            else:
                self._store.evict(key, tier)

    def send_home(self) -> None:
        """Let go of all that waits for a use that will not come."""
        for key, tier in self._waiting.items():
            self._store.unpin(key, tier)
            self._store.evict(key, tier)
        self._waiting.clear()
