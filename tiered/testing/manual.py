"""A store's surroundings without hardware or time: memory tiers, and links that move bytes only when told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered.errors import CapacityError, TransferError
from tiered.links.base import LinkUsage
from tiered.tiers.base import Slot, TierUsage
from tiered.transfer import Transfer


class MemoryTier:
    """A tier of plain tensors that counts exactly (alignment 1 byte).

    Args:
        addressable: False makes it behave like a file tier, reached only through links.
    """

    alignment_bytes = 1
    durable = False

    def __init__(self, name: str, capacity_bytes: int, *, addressable: bool = True) -> None:
        self.name, self.capacity_bytes = name, capacity_bytes
        self.device = torch.device("cpu") if addressable else None
        self._used = self._high_water = 0
        self._lock = threading.Lock()

    def slot_bytes(self, nbytes: int) -> int:
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        with self._lock:
            if self._used + nbytes > self.capacity_bytes:
                return None
            self._used += nbytes
            self._high_water = max(self._high_water, self._used)
        return Slot(self.name, nbytes, nbytes, torch.full((nbytes,), 0xAB, dtype=torch.uint8))

    def free(self, slot: Slot) -> None:
        with self._lock:
            self._used -= slot.slot_bytes
        slot.resource = None

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(slot.resource, torch.Tensor)
        return slot.resource.view(dtype).view(tuple(shape))

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            if self._used + nbytes > self.capacity_bytes:
                raise CapacityError(self.name, nbytes, self.capacity_bytes - self._used)
            self._used += nbytes

    def sync(self) -> None:
        pass

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(self.capacity_bytes, self._used, self._high_water)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class PendingCopy:
    """A copy that was asked for and has not happened yet."""

    src_slot: Slot
    dst_slot: Slot
    nbytes: int
    transfer: Transfer


class ManualLink:
    """A link whose copies wait in ``pending`` until ``complete`` or ``fail`` is called, in any order."""

    path = "manual"

    def __init__(self, src: str, dst: str) -> None:
        self.src, self.dst = src, dst
        self.pending: list[PendingCopy] = []
        self.num_bytes = 0

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self.pending.append(PendingCopy(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def complete(self, index: int = 0) -> None:
        """Move the bytes of one pending copy and finish its transfer."""
        copy = self.pending.pop(index)
        assert isinstance(copy.src_slot.resource, torch.Tensor) and isinstance(copy.dst_slot.resource, torch.Tensor)
        copy.dst_slot.resource[: copy.nbytes].copy_(copy.src_slot.resource[: copy.nbytes])
        self.num_bytes += copy.nbytes
        copy.transfer.finish()

    def fail(self, index: int = 0) -> None:
        """Finish one pending copy with an error, after scribbling over the destination."""
        copy = self.pending.pop(index)
        assert isinstance(copy.dst_slot.resource, torch.Tensor)
        copy.dst_slot.resource.fill_(0xEE)
        copy.transfer.finish(TransferError("injected failure", tier=self.dst))

    def usage(self) -> LinkUsage:
        return LinkUsage(self.num_bytes, 0.0, sum(copy.nbytes for copy in self.pending), 0, self.path)

    def close(self) -> None:
        pass
