"""Ledger: the bytes of one tier, counted exactly and never above its capacity."""

from __future__ import annotations

import threading

from tiered.errors import CapacityError
from tiered.tiers.base import TierUsage


class Ledger:
    """Counts what slots and reservations take of a tier. Thread-safe.

    Args:
        tier: name of the tier, for messages.
        capacity_bytes: the bound.
    """

    def __init__(self, tier: str, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"tier '{tier}' cannot have {capacity_bytes} bytes")
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._slot_bytes = self._reserved_bytes = self._high_water_bytes = 0
        self._lock = threading.Lock()

    def take(self, slot_bytes: int) -> bool:
        """Charge a slot; return False, and charge nothing, when there is no room for it."""
        with self._lock:
            if self._used() + slot_bytes > self._capacity_bytes:
                return False
            self._slot_bytes += slot_bytes
            self._high_water_bytes = max(self._high_water_bytes, self._used())
            return True

    def give(self, slot_bytes: int) -> None:
        """Take a slot that was charged off the ledger."""
        with self._lock:
            assert 0 <= slot_bytes <= self._slot_bytes, (self._tier, slot_bytes, self._slot_bytes)
            self._slot_bytes -= slot_bytes

    def reserve(self, nbytes: int) -> None:
        """Charge bytes that live outside any slot; negative gives back.

        Raises:
            CapacityError: no such room; nothing is charged.
        """
        with self._lock:
            free_bytes = self._capacity_bytes - self._used()
            if nbytes > free_bytes:
                raise CapacityError(self._tier, nbytes, free_bytes, detail="to reserve room")
            assert self._reserved_bytes + nbytes >= 0, (self._tier, self._reserved_bytes, nbytes)
            self._reserved_bytes += nbytes
            self._high_water_bytes = max(self._high_water_bytes, self._used())

    def usage(self) -> TierUsage:
        """Return the counts now."""
        with self._lock:
            return TierUsage(self._capacity_bytes, self._used(), self._high_water_bytes)

    def _used(self) -> int:
        return self._slot_bytes + self._reserved_bytes
