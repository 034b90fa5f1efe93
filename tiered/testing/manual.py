"""Tiers and links for deterministic tests. Tiers are in memory, and links move bytes on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered.errors import TieredError, TransferError
from tiered.links.base import LinkUsage
from tiered.tiers.base import Ledger, Slot, TierUsage
from tiered.tiers.ram import view_as
from tiered.transfer import Transfer


class MemoryTier:
    """A tier of plain tensors with an alignment of 1 byte.

    Args:
        addressable: whether leases can use the tier. If False, the tier behaves like a file tier.
    """

    alignment_bytes = 1
    durable = False

    def __init__(self, name: str, capacity_bytes: int, *, addressable: bool = True) -> None:
        self.name, self.capacity_bytes = name, capacity_bytes
        self.device = torch.device("cpu") if addressable else None
        self._ledger = Ledger(name, capacity_bytes)

    def slot_bytes(self, nbytes: int) -> int:
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        if not self._ledger.take(nbytes):
            return None
        return Slot(self.name, nbytes, nbytes, torch.full((nbytes,), 0xAB, dtype=torch.uint8))

    def free(self, slot: Slot) -> None:
        assert isinstance(slot.resource, torch.Tensor), slot
        slot.resource = None
        self._ledger.give(slot.slot_bytes)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.device is None:
            raise TieredError(f"tier '{self.name}' is not addressable: fetch the block into a faster tier first")
        assert isinstance(slot.resource, torch.Tensor), slot
        return view_as(slot.resource, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        self._ledger.reserve(nbytes)

    def sync(self) -> None:
        pass

    def usage(self) -> TierUsage:
        return self._ledger.usage()

    def close(self) -> None:
        pass


@dataclass(eq=False)
class PendingCopy:
    """A submitted copy that has not yet been made."""

    src_slot: Slot
    dst_slot: Slot
    nbytes: int
    transfer: Transfer


class ManualLink:
    """A link that keeps copies in ``pending`` until the test calls ``complete`` or ``fail``, in any order."""

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
        """Overwrite the destination of one pending copy with garbage, and finish its transfer with an error."""
        copy = self.pending.pop(index)
        assert isinstance(copy.dst_slot.resource, torch.Tensor)
        copy.dst_slot.resource.fill_(0xEE)
        copy.transfer.finish(TransferError("injected failure", tier=self.dst))

    def usage(self) -> LinkUsage:
        return LinkUsage(self.num_bytes, 0.0, sum(copy.nbytes for copy in self.pending), 0, self.path)

    def close(self) -> None:
        pass
