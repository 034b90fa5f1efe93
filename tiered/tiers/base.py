"""Protocols for tiers and their optional features, and the ledger that counts a tier's bytes."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from tiered.errors import CapacityError


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Byte counts of one tier. ``used_bytes`` includes the padding of slots."""

    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


@dataclass(eq=False, slots=True)
class Slot:
    """Space for one copy of one block in one tier.

    Attributes:
        tier: name of the tier.
        slot_bytes: bytes charged to the tier's ledger (``nbytes`` rounded up to the tier's alignment).
        resource: object that the tier's links use to access the bytes (a host slab, a device buffer, a set of files).
    """

    tier: str
    nbytes: int
    slot_bytes: int
    resource: object


@runtime_checkable
class Tier(Protocol):
    """Storage for bytes, such as RAM or drives. Thread-safe: the store and its links call it from several threads.

    A tier counts bytes and allocates slots. It does not copy bytes and does not know the states of copies.
    """

    name: str
    capacity_bytes: int
    alignment_bytes: int
    device: torch.device | None  # None if only links can access the tier (not addressable).
    durable: bool  # Whether contents can outlive the process.

    def slot_bytes(self, nbytes: int) -> int:
        """Return the bytes that a slot for ``nbytes`` of contents would add to ``used_bytes``."""
        ...

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot, or None if the tier is too full.

        Args:
            name: key of the block. A file tier derives file names from the key.
            home: whether the slot lives as long as its block. Files are preallocated, so the call fails on a full disk.

        Raises:
            TransferError: the ledger has space, but the machine does not (disk full, out of memory).
        """
        ...

    def free(self, slot: Slot) -> None:
        """Return the slot's bytes to the tier. The contents are lost."""
        ...

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of the slot without a copy. Only for addressable tiers."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot (workspace, staging) to the ledger. A negative number returns bytes.

        Raises:
            CapacityError: the tier is too full.
        """
        ...

    def sync(self) -> None:
        """Flush all bytes written so far, so that they survive a power cut. No-op if ``durable`` is False."""
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...


@runtime_checkable
class StreamTier(Tier, Protocol):
    """A tier on a device with streams. The store orders kernels after earlier work on the same slot."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream, or None if the tier's device has no streams."""
        ...

    def order_before(self, slot: Slot, stream: Any) -> None:
        """Make later work on ``stream`` wait for all recorded uses of the slot's bytes. Does not block the host."""
        ...

    def record_use(self, slots: Sequence[Slot], stream: Any = None) -> None:
        """Record the work queued so far on ``stream`` (default: the current one) as a use of all these slots."""
        ...


@runtime_checkable
class BufferTier(Tier, Protocol):
    """A tier that uses buffers of exact size as slots, and keeps a freed buffer for the next slot of that size."""

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        """Allocate missing buffers as far as space allows. Buffers of these sizes are dropped last.

        Args:
            counts: number of buffers by slot size, including buffers in use.

        Raises:
            TransferError: the ledger has space, but the machine does not.
        """
        ...

    def has_buffer(self, nbytes: int) -> bool:
        """Return whether a slot for ``nbytes`` can be allocated without dropping buffers that are kept."""
        ...


@runtime_checkable
class DescribingTier(Tier, Protocol):
    """A tier that stores a description of each home slot."""

    def describe(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Record the shape and dtype of a home slot. The store calls this when it allocates or adopts the slot."""
        ...


@runtime_checkable
class WriteCountingTier(Tier, Protocol):
    """A tier that counts the bytes written to each of its paths, for ``StoreStats.written_bytes``."""

    def bytes_written_by_path(self) -> Mapping[str, int]:
        """Return the bytes of contents written to each path since the tier was created."""
        ...


@runtime_checkable
class PausingTier(Tier, Protocol):
    """A tier that can make writes wait for space, for example on a full drive."""

    @property
    def is_waiting(self) -> bool:
        """Whether a write is waiting for space."""
        ...

    def give_up_waiting(self) -> None:
        """Make current and future writes fail instead of waiting for space."""
        ...


@runtime_checkable
class ReadOnlyTier(Tier, Protocol):
    """A tier whose home slots have their contents from the start and are never written."""

    is_read_only: bool


class Ledger:
    """Ledger of the bytes that slots and reservations take from a tier's capacity. Thread-safe."""

    def __init__(self, tier: str, capacity_bytes: int) -> None:
        try:
            capacity_bytes = operator.index(capacity_bytes)
        except TypeError:
            text = f"tier '{tier}' cannot have {capacity_bytes!r}: pass whole bytes, such as 4 * tiered.GiB"
            raise ValueError(text) from None
        if capacity_bytes < 0:
            raise ValueError(f"tier '{tier}' cannot have {capacity_bytes} bytes")
        self._tier = tier
        self.capacity_bytes = capacity_bytes
        self._slot_bytes = self._reserved_bytes = self._high_water_bytes = 0
        self._lock = threading.Lock()

    def take(self, slot_bytes: int) -> bool:
        """Charge a slot. If there is not enough space, charge nothing and return False."""
        with self._lock:
            if self.used_bytes + slot_bytes > self.capacity_bytes:
                return False
            self._slot_bytes += slot_bytes
            self._high_water_bytes = max(self._high_water_bytes, self.used_bytes)
            return True

    def give(self, slot_bytes: int) -> None:
        """Remove a charged slot from the ledger."""
        with self._lock:
            assert 0 <= slot_bytes <= self._slot_bytes, (self._tier, slot_bytes, self._slot_bytes)
            self._slot_bytes -= slot_bytes

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot. A negative number returns bytes.

        Raises:
            CapacityError: the tier is too full; nothing is charged.
        """
        with self._lock:
            free_bytes = self.capacity_bytes - self.used_bytes
            if nbytes > free_bytes:
                raise CapacityError(self._tier, nbytes, free_bytes, detail="to reserve bytes")
            assert self._reserved_bytes + nbytes >= 0, (self._tier, self._reserved_bytes, nbytes)
            self._reserved_bytes += nbytes
            self._high_water_bytes = max(self._high_water_bytes, self.used_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self._slot_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations."""
        return self._reserved_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots and reservations."""
        return self._slot_bytes + self._reserved_bytes

    def usage(self) -> TierUsage:
        """Return the current byte counts."""
        with self._lock:
            return TierUsage(self.capacity_bytes, self.used_bytes, self._high_water_bytes)
