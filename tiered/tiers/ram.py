"""RamTier: slots in host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from tiered.errors import CapacityError, TransferError
from tiered.memory.pool import SlabPool
from tiered.memory.slab import HostSlab, cuda_is_available
from tiered.tiers.base import Slot, TierUsage
from tiered.units import PAGE_BYTES, format_size, round_up


class RamTier:
    """Host memory of at most ``capacity_bytes``. Every slot is its own slab of exact size (rounded to 4096).

    Args:
        capacity_bytes: bound on the memory of all slots and reservations together.
        name: what the store calls it.
        pin_memory: page-lock the slabs for CUDA. None: when the machine has a CUDA device.

    Attributes:
        num_unpinned_slabs: slabs that should have been page-locked and could not be; copies to a device from them are
            slow and block the link's thread.
        huge_page_bytes: bytes of slabs on huge pages.
        num_drops: slabs that were given back, for another size or at the end.
        made_bytes: bytes of all slabs ever made, and the seconds, over all threads, that it took to make them resident
            and to page-lock them.
        populate_s: bytes of all slabs ever made, and the seconds, over all threads, that it took to make them resident
            and to page-lock them.
        pin_s: bytes of all slabs ever made, and the seconds, over all threads, that it took to make them resident and
            to page-lock them.
    """

    def __init__(self, capacity_bytes: int, *, name: str = "ram", pin_memory: bool | None = None) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = PAGE_BYTES
        self.device: torch.device | None = torch.device("cpu")
        self.durable = False
        self.num_unpinned_slabs = 0
        self.huge_page_bytes = 0
        self.num_drops = 0
        self.made_bytes = 0
        self.populate_s = self.pin_s = 0.0
        self._pin_memory = pin_memory
        self._counting = threading.Lock()
        self._pool: SlabPool[HostSlab] = SlabPool(capacity_bytes, self._make, self._drop)

    def _make(self, nbytes: int) -> HostSlab:
        pin = cuda_is_available() if self._pin_memory is None else self._pin_memory
        slab = HostSlab(nbytes, pin=pin)
        with self._counting:
            self.num_unpinned_slabs += pin and not slab.is_pinned
            self.huge_page_bytes += slab.nbytes if slab.has_huge_pages else 0
            self.made_bytes += slab.nbytes
            self.populate_s += slab.populate_s
            self.pin_s += slab.pin_s
        return slab

    def _drop(self, slab: HostSlab) -> None:
        with self._counting:
            self.num_drops += 1
            self.huge_page_bytes -= slab.nbytes if slab.has_huge_pages else 0
        slab.close()

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to 4096."""
        return round_up(nbytes, PAGE_BYTES)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot (resource: a ``HostSlab``), or None when there is no room now.

        Raises:
            TransferError: the machine has less free memory than the ledger says.
        """
        slot_bytes = self.slot_bytes(nbytes)
        if slot_bytes == 0:
            return Slot(self.name, 0, 0, HostSlab(0))
        try:
            slab = self._pool.take(slot_bytes)
        except OSError as error:
            raise TransferError(
                f"no memory for {format_size(slot_bytes)} of block '{name}': {error.strerror}. "
                f"Give tier '{self.name}' fewer bytes than the {format_size(self.capacity_bytes)} it has",
                tier=self.name,
                errno=error.errno,
            ) from error
        if slab is None:
            return None
        slab.tensor[nbytes:] = 0  # padding goes to disk with the contents: never leftovers of another block
        return Slot(self.name, nbytes, slot_bytes, slab)

    def free(self, slot: Slot) -> None:
        """Take the slot back; its slab is kept for the next slot of that size while there is room."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        if slot.slot_bytes:
            self._pool.give(slot.slot_bytes, slot.resource)
        slot.resource = None  # a second free, or a use after it, fails the assertion above

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU view of the slot's first bytes."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        return view_as(slot.resource.tensor, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Charge bytes that live outside any slot; negative gives back. Raises ``CapacityError`` without room."""
        if not self._pool.reserve(nbytes):
            raise CapacityError(self.name, nbytes, self.usage().free_bytes, detail="to reserve working memory")

    def sync(self) -> None:
        """Do nothing: host memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the ledger now; slabs kept for reuse count as free."""
        usage = self._pool.usage()
        return TierUsage(usage.capacity_bytes, usage.used_bytes, usage.high_water_bytes)

    def close(self) -> None:
        """Return all memory that no slot holds to the system."""
        self._pool.close()


def view_as(buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the first bytes of a 1-D uint8 ``buffer`` as a contiguous tensor of ``shape`` and ``dtype``, no copy."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    assert nbytes <= buffer.numel(), f"{tuple(shape)} of {dtype} needs {nbytes} bytes, the slot has {buffer.numel()}"
    if nbytes == 0:
        return buffer.new_empty(tuple(shape), dtype=dtype)  # nothing to share; torch cannot re-view an empty tensor
    return buffer[:nbytes].view(dtype).view(tuple(shape))
