"""SlabPool: buffers of exact size behind one ledger that never exceeds its capacity."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer")


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of a pool. ``used_bytes`` = held + reserved; ``pooled_bytes`` are free room that exists already."""

    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int
    pooled_bytes: int
    reserved_bytes: int


class SlabPool(Generic[Buffer]):
    """Hands out buffers of exact size; keeps returned ones for the next request of the same size. Thread-safe.

    ``held + pooled + reserved <= capacity`` at every instant, and a buffer is dropped *before* the one that takes
    its room is made, so the memory in use obeys the same bound. There is no arena: whatever the order of requests,
    any request that fits the free bytes succeeds (no fragmentation).

    Args:
        capacity_bytes: the bound.
        make: returns a new buffer of that many bytes; called without the pool's lock, from any thread.
        drop: destroys a buffer and returns once its memory is gone; called with the pool's lock held.
    """

    def __init__(self, capacity_bytes: int, make: Callable[[int], Buffer], drop: Callable[[Buffer], None]) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a tier cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self._make = make
        self._drop = drop
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._reserved_bytes = 0
        self._pooled_bytes = 0
        self._high_water_bytes = 0
        self._pooled: dict[int, list[Buffer]] = {}  # by size, oldest first
        self._is_closed = False

    def take(self, nbytes: int) -> Buffer | None:
        """Return a buffer of exactly ``nbytes`` with undefined contents, or None when there is no room now.

        Raises what ``make`` raises; the ledger is then as before.
        """
        with self._lock:
            assert not self._is_closed, "pool used after close"
            same_size = self._pooled.get(nbytes)
            if same_size:
                buffer = same_size.pop()  # the newest: its lines are the likeliest to be in a CPU cache
                self._pooled_bytes -= nbytes
                self._hold(nbytes)
                return buffer
            if self._used() + nbytes > self.capacity_bytes:
                return None
            self._drop_until(nbytes)
            self._hold(nbytes)  # before the lock goes, so that nobody else counts on this room
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self._held_bytes -= nbytes
            raise

    def give(self, nbytes: int, buffer: Buffer) -> None:
        """Return a buffer that ``take(nbytes)`` gave."""
        with self._lock:
            assert nbytes <= self._held_bytes, (nbytes, self._held_bytes)
            self._held_bytes -= nbytes
            if self._is_closed:
                self._drop(buffer)
                return
            self._pooled.setdefault(nbytes, []).append(buffer)
            self._pooled_bytes += nbytes

    def reserve(self, nbytes: int) -> bool:
        """Charge bytes that live elsewhere (negative: give back); return False when there is no room for them."""
        with self._lock:
            if self._used() + nbytes > self.capacity_bytes:
                return False
            assert self._reserved_bytes + nbytes >= 0, (self._reserved_bytes, nbytes)
            self._drop_until(nbytes)
            self._reserved_bytes += nbytes
            self._high_water_bytes = max(self._high_water_bytes, self._used())
            return True

    def usage(self) -> PoolUsage:
        """Return the ledger now."""
        with self._lock:
            return PoolUsage(
                self.capacity_bytes, self._used(), self._high_water_bytes, self._pooled_bytes, self._reserved_bytes
            )

    def close(self) -> None:
        """Drop every pooled buffer; those still held are dropped when they come back. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._drop_until(self.capacity_bytes + 1)

    def _used(self) -> int:
        return self._held_bytes + self._reserved_bytes

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._high_water_bytes = max(self._high_water_bytes, self._used())

    def _drop_until(self, room_bytes: int) -> None:
        """Drop pooled buffers, largest size first, oldest first, until ``room_bytes`` fit (or none is left)."""
        for size in sorted(self._pooled, reverse=True):
            same_size = self._pooled[size]
            while same_size and self._used() + self._pooled_bytes + room_bytes > self.capacity_bytes:
                self._drop(same_size.pop(0))
                self._pooled_bytes -= size
            if not same_size:
                del self._pooled[size]
