"""Buffers of exact size, kept for the next request of their size: the memory of slots in RAM and on GPUs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tiered.tiers.base import Ledger

Buffer = TypeVar("Buffer")


class SlabPool(Generic[Buffer]):
    """Hands out buffers of exact size; keeps returned ones for the next request of the same size. Thread-safe.

    ``used + pooled <= capacity`` at every instant, and a buffer is dropped *before* the one that takes its room is
    made, so the memory in use obeys the same bound. There is no arena: whatever the order of requests, any request
    that fits the free bytes succeeds (no fragmentation).

    Args:
        ledger: the tier's; the pool charges slots and reservations to it.
        make: returns a new buffer of that many bytes; called from any thread, by ``take`` without the pool's lock.
        drop: destroys a buffer and returns once its memory is gone; called with the pool's lock held.
        is_idle: whether nothing uses a returned buffer any more, if that is uncertain. Idle buffers are handed out
            first, else the one returned longest ago. By default the newest goes first: its lines are in a CPU cache.

    Attributes:
        pooled_bytes: free room that exists already, in buffers kept for reuse.
    """

    def __init__(
        self,
        ledger: Ledger,
        make: Callable[[int], Buffer],
        drop: Callable[[Buffer], None],
        is_idle: Callable[[Buffer], bool] | None = None,
    ) -> None:
        self.pooled_bytes = 0
        self._ledger = ledger
        self._make = make
        self._drop = drop
        self._is_idle = is_idle
        self._lock = threading.RLock()  # `make` may read `free_bytes`
        self._pooled: dict[int, list[Buffer]] = {}  # by size, oldest first
        self._num_made = Counter[int]()  # by size, those that exist
        self._kept: Mapping[int, int] = {}
        self._is_closed = False

    def keep(self, counts: Mapping[int, int]) -> None:
        """Make the missing buffers of each size, and from now on drop those last.

        Stops without error if there is no more room. Raises what ``make`` raises.

        Args:
            counts: size -> number of buffers, including those in use.
        """
        with self._lock:
            assert not self._is_closed, "pool used after close"
            self._kept = dict(counts)
            for nbytes, count in counts.items():
                while self._num_made[nbytes] < count and self._available_bytes() >= nbytes:
                    self._drop_pooled(nbytes)
                    self.pooled_bytes += nbytes  # before it is made, as in `take`
                    try:
                        buffer = self._make(nbytes)
                    except BaseException:
                        self.pooled_bytes -= nbytes
                        raise
                    self._pooled.setdefault(nbytes, []).append(buffer)
                    self._num_made[nbytes] += 1

    def has(self, nbytes: int) -> bool:
        """Return whether ``take(nbytes)`` would give a buffer without dropping a kept one.

        A size with all its kept buffers gets no more, and a size that ``keep`` did not name gets only free bytes.
        Otherwise two sizes would forever take the remaining room from each other.
        """
        with self._lock:
            if self._pooled.get(nbytes):
                return True
            if self._kept.get(nbytes, 0) or not self._kept:
                has_all = bool(self._kept) and self._num_made[nbytes] >= self._kept[nbytes]
                return not has_all and self._available_bytes() >= nbytes
            return self.free_bytes >= nbytes

    def take(self, nbytes: int) -> Buffer | None:
        """Return a buffer of exactly ``nbytes`` with undefined contents, or None if there is no room now.

        Raises what ``make`` raises; the ledger is then as before.
        """
        with self._lock:
            assert not self._is_closed, "pool used after close"
            same_size = self._pooled.get(nbytes)
            position = self._next_of(same_size) if same_size else 0  # may raise: nothing is charged yet
            if not self._ledger.take(nbytes):  # charged under the lock, so no other caller gets this room
                return None
            if same_size:
                self.pooled_bytes -= nbytes
                return same_size.pop(position)
            self._drop_pooled()
            self._num_made[nbytes] += 1
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self._num_made[nbytes] -= 1
                self._ledger.give(nbytes)
            raise

    def give(self, nbytes: int, buffer: Buffer) -> None:
        """Take back a buffer that ``take(nbytes)`` gave."""
        with self._lock:
            self._ledger.give(nbytes)
            if self._is_closed:
                self._num_made[nbytes] -= 1
                self._drop(buffer)
                return
            self._pooled.setdefault(nbytes, []).append(buffer)
            self.pooled_bytes += nbytes

    def reserve(self, nbytes: int) -> None:
        """Charge bytes that live elsewhere (negative: give back), dropping pooled buffers for them if needed.

        Raises:
            CapacityError: no such room; nothing is charged.
        """
        with self._lock:
            self._ledger.reserve(nbytes)
            self._drop_pooled()

    def close(self) -> None:
        """Drop every pooled buffer; those still held are dropped when they come back. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._drop_pooled(everything=True)

    def _next_of(self, same_size: list[Buffer]) -> int:
        if self._is_idle is None:
            return -1
        return next((n for n, buffer in enumerate(same_size) if self._is_idle(buffer)), 0)

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are not reserved and not in a buffer, finished or in the making."""
        with self._lock:
            return self._ledger.capacity_bytes - self._ledger.used_bytes - self.pooled_bytes

    def _num_surplus(self, nbytes: int) -> int:
        """Return the number of pooled buffers of a size that ``keep`` did not ask for."""
        return min(len(self._pooled[nbytes]), max(0, self._num_made[nbytes] - self._kept.get(nbytes, 0)))

    def _available_bytes(self) -> int:
        return self.free_bytes + sum(nbytes * self._num_surplus(nbytes) for nbytes in self._pooled)

    def _drop_pooled(self, need_bytes: int = 0, *, everything: bool = False) -> None:
        """Drop pooled buffers, kept ones last, largest size first, oldest first, until ``need_bytes`` are free."""
        for drops_kept in (False, True):
            for nbytes in sorted(self._pooled, reverse=True):
                num_to_drop = len(self._pooled[nbytes]) if drops_kept else self._num_surplus(nbytes)
                while num_to_drop and (everything or self.free_bytes < need_bytes):
                    self._drop(self._pooled[nbytes].pop(0))
                    self._num_made[nbytes] -= 1
                    self.pooled_bytes -= nbytes
                    num_to_drop -= 1
                if not self._pooled[nbytes]:
                    del self._pooled[nbytes]
