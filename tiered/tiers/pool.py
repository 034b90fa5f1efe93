"""Pool of exact-size buffers for slots in RAM and on GPUs. A freed buffer is kept for the next slot of that size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tiered.tiers.base import Ledger

Buffer = TypeVar("Buffer")


class SlabPool(Generic[Buffer]):
    """Pool of exact-size buffers, which keeps freed buffers for the next request of the same size. Thread-safe.

    ``used + pooled <= capacity`` always holds. A buffer is dropped *before* its replacement is allocated, so memory
    usage never exceeds the capacity. There is no arena, so no fragmentation: requests that fit the free bytes succeed.

    Args:
        ledger: ledger of the tier. The pool charges slots and reservations to it.
        make: function that creates a buffer of a given size, on any thread. ``take`` calls it without the pool's lock.
        drop: function that frees a buffer's memory synchronously. Called with the pool's lock held.
        is_idle: function that returns whether the device has finished its work on a freed buffer. The pool then prefers
            idle buffers, then the buffer freed longest ago. If None, the pool prefers the last freed buffer, which may
            still be in a CPU cache.

    Attributes:
        pooled_bytes: bytes of freed buffers kept for reuse.
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
        self._lock = threading.RLock()  # Reentrant, because ``make`` may read ``free_bytes``.
        self._pooled_buffers: dict[int, list[Buffer]] = {}  # by size, oldest first
        self._num_buffers = Counter[int]()  # number of existing buffers, by size
        self._kept_counts: Mapping[int, int] = {}
        self._is_closed = False

    def keep(self, counts: Mapping[int, int]) -> None:
        """Allocate the missing buffers of each size. Buffers of these sizes are dropped last.

        Stops without an error if there is not enough space. Raises the errors of ``make``.

        Args:
            counts: number of buffers by size, including buffers in use.
        """
        with self._lock:
            assert not self._is_closed, "pool used after close"
            self._kept_counts = dict(counts)
            for nbytes, count in counts.items():
                while self._num_buffers[nbytes] < count and self._available_bytes() >= nbytes:
                    self._drop_pooled(nbytes)
                    self.pooled_bytes += nbytes  # Count the buffer before allocating it, as ``take`` does.
                    try:
                        buffer = self._make(nbytes)
                    except BaseException:
                        self.pooled_bytes -= nbytes
                        raise
                    self._pooled_buffers.setdefault(nbytes, []).append(buffer)
                    self._num_buffers[nbytes] += 1

    def has(self, nbytes: int) -> bool:
        """Return whether ``take(nbytes)`` would return a buffer without dropping a kept buffer.

        A size requested with ``keep`` gets at most the requested number of buffers; other sizes get only free bytes.
        Otherwise, two sizes would endlessly take space from each other.
        """
        with self._lock:
            if self._pooled_buffers.get(nbytes):
                return True
            if self._kept_counts.get(nbytes, 0) or not self._kept_counts:
                has_all = bool(self._kept_counts) and self._num_buffers[nbytes] >= self._kept_counts[nbytes]
                return not has_all and self._available_bytes() >= nbytes
            return self.free_bytes >= nbytes

    def take(self, nbytes: int) -> Buffer | None:
        """Return a buffer of exactly ``nbytes`` with undefined contents, or None if there is not enough space.

        If ``make`` raises an error, the ledger stays unchanged.
        """
        with self._lock:
            assert not self._is_closed, "pool used after close"
            buffers = self._pooled_buffers.get(nbytes)
            position = self._find_position(buffers) if buffers else 0  # Call before charging: it can raise.
            if not self._ledger.take(nbytes):  # Charge under the lock, so that no other caller takes the space.
                return None
            if buffers:
                self.pooled_bytes -= nbytes
                return buffers.pop(position)
            self._drop_pooled()
            self._num_buffers[nbytes] += 1
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self._num_buffers[nbytes] -= 1
                self._ledger.give(nbytes)
            raise

    def give(self, nbytes: int, buffer: Buffer) -> None:
        """Return a buffer from ``take(nbytes)`` to the pool."""
        with self._lock:
            self._ledger.give(nbytes)
            if self._is_closed:
                self._num_buffers[nbytes] -= 1
                self._drop(buffer)
                return
            self._pooled_buffers.setdefault(nbytes, []).append(buffer)
            self.pooled_bytes += nbytes

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside the pool. Drops pooled buffers if needed. A negative number returns bytes.

        Raises:
            CapacityError: there is not enough space. Nothing is charged.
        """
        with self._lock:
            self._ledger.reserve(nbytes)
            self._drop_pooled()

    def close(self) -> None:
        """Drop all pooled buffers. Buffers in use are dropped when they are returned. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._drop_pooled(drop_all=True)

    def _find_position(self, buffers: list[Buffer]) -> int:
        if self._is_idle is None:
            return -1
        return next((position for position, buffer in enumerate(buffers) if self._is_idle(buffer)), 0)

    @property
    def free_bytes(self) -> int:
        """Bytes that are neither reserved nor in a buffer. Buffers about to be allocated count as in use."""
        with self._lock:
            return self._ledger.capacity_bytes - self._ledger.used_bytes - self.pooled_bytes

    def _num_surplus(self, nbytes: int) -> int:
        """Return how many pooled buffers of a size exceed the number requested with ``keep``."""
        num_surplus = max(0, self._num_buffers[nbytes] - self._kept_counts.get(nbytes, 0))
        return min(len(self._pooled_buffers[nbytes]), num_surplus)

    def _available_bytes(self) -> int:
        return self.free_bytes + sum(nbytes * self._num_surplus(nbytes) for nbytes in self._pooled_buffers)

    def _drop_pooled(self, need_bytes: int = 0, *, drop_all: bool = False) -> None:
        """Drop pooled buffers until ``need_bytes`` are free: surplus before kept, then large, then oldest first."""
        for include_kept in (False, True):
            for nbytes in sorted(self._pooled_buffers, reverse=True):
                num_drops = len(self._pooled_buffers[nbytes]) if include_kept else self._num_surplus(nbytes)
                while num_drops and (drop_all or self.free_bytes < need_bytes):
                    self._drop(self._pooled_buffers[nbytes].pop(0))
                    self._num_buffers[nbytes] -= 1
                    self.pooled_bytes -= nbytes
                    num_drops -= 1
                if not self._pooled_buffers[nbytes]:
                    del self._pooled_buffers[nbytes]
