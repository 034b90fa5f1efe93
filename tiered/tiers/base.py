"""What a tier is: named capacity that hands out slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes of one tier. ``used_bytes`` counts whole slots (after alignment), never contents alone."""

    capacity_bytes: int
    used_bytes: int
    high_water_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one copy of one block in one tier.

    Attributes:
        tier: name of the tier that owns it.
        nbytes: bytes of contents asked for.
        slot_bytes: bytes charged to the tier's ledger (``nbytes`` rounded up to the tier's alignment).
        resource: what the tier's links need to reach the bytes (a host slab, a device buffer, a file set).
    """

    tier: str
    nbytes: int
    slot_bytes: int
    resource: object


@runtime_checkable
class Tier(Protocol):
    """A place that holds bytes. Thread-safe: the store and its links call it from several threads.

    A tier counts bytes and hands out slots; it copies nothing and knows nothing of blocks' states.
    """

    name: str
    capacity_bytes: int
    alignment_bytes: int
    device: torch.device | None  # None: not addressable, reached only through links
    durable: bool  # contents can survive the process

    def slot_bytes(self, nbytes: int) -> int:
        """Return what a slot for ``nbytes`` of contents would add to ``used_bytes``."""
        ...

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot, or None when the tier has no room now.

        Args:
            nbytes: bytes of contents, >= 0.
            name: the block's key; a tier backed by files names them after it.
            home: the slot lives as long as its block. Files are preallocated here, so a full disk shows now.

        Raises:
            TransferError: the room exists on the ledger but the machine refused it (disk full, no memory).
        """
        ...

    def free(self, slot: Slot) -> None:
        """Return the slot's bytes to the tier. The contents are gone."""
        ...

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of the slot (no copy). Only for addressable tiers."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Put bytes that live outside any slot (workspace, staging) on the ledger; negative gives back.

        Raises:
            CapacityError: the tier has no such room.
        """
        ...

    def sync(self) -> None:
        """Return once everything written so far survives a power cut. A no-op where ``durable`` is False."""
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...
