"""UnifiedTier and its links, for machines where GPU and CPU share one memory. The GPU computes in host memory."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tiered.errors import TransferError
from tiered.links.base import Link, LinkUsage, Workers
from tiered.links.route import links_between
from tiered.tiers.base import Slot, Tier
from tiered.tiers.gpu import DeviceBuffer, GpuTier, buffer_of
from tiered.tiers.ram import HostSlab, RamTier
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, round_up

#: Value of CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES.
_USES_HOST_PAGE_TABLES = 100


@dataclass(eq=False, slots=True, kw_only=True)
class UnifiedBuffer(DeviceBuffer):
    """The resource of a UnifiedTier's slot. ``tensor`` is the device's view of ``slab``."""

    slab: HostSlab

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[Any]:
        """Yield bytes ``start`` to ``stop`` as a memoryview of host memory."""
        yield self.slab.view(start, stop)


class UnifiedTier(GpuTier):
    """Tier in memory that the host and the GPU share. The device computes in host slabs.

    Use this tier for a GPU that shares the host's memory, where a separate copy would only double the bytes. It also
    works with a GPU that has its own memory, but then every access crosses the bus. The slabs are pinned, unless the
    GPU uses the host's page tables and can therefore access all host memory. A slot's tensor is on the device. File I/O
    uses the slot's slab after the device has finished the recorded work.

    Args:
        capacity_bytes: maximum total bytes of slots and reservations.
        device: CUDA device, or ``"cpu"`` for a tier in host memory (for tests).
    """

    def __init__(self, capacity_bytes: int, *, name: str = "ram", device: str | torch.device = "cuda") -> None:
        super().__init__(capacity_bytes, name=name, device=device, alignment_bytes=PAGE_BYTES)

    def _make(self, nbytes: int) -> DeviceBuffer:
        should_pin = self._is_cuda and not uses_host_page_tables(self._device.index or 0)
        slab = HostSlab(nbytes, pin=should_pin)
        if nbytes and should_pin and not slab.is_pinned:
            slab.close()
            raise OSError(errno.ENOMEM, f"CUDA cannot pin this memory ({os.strerror(errno.ENOMEM)})")
        return UnifiedBuffer(device_view(slab.tensor, self._device) if self._is_cuda else slab.tensor, slab=slab)

    def _drop(self, buffer: DeviceBuffer) -> None:
        assert isinstance(buffer, UnifiedBuffer), buffer
        buffer.wait()  # The host must wait, because streams do not order the unmapping of memory.
        buffer.tensor = torch.empty(0, dtype=torch.uint8)
        buffer.slab.close()
        self.num_drops += 1  # The pool's lock guards this counter.

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot (resource: a ``UnifiedBuffer``), or None if there is not enough space.

        Raises:
            TransferError: the machine has less free memory than the ledger shows, or CUDA cannot pin the memory.
        """
        slot_bytes = self.slot_bytes(nbytes)
        try:
            buffer = self._pool.take(slot_bytes) if slot_bytes else self._make(0)
        except OSError as error:
            raise self._memory_error(f"{slot_bytes} bytes of block '{name}': {error.strerror}") from error
        return None if buffer is None else Slot(self.name, nbytes, slot_bytes, buffer)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to a multiple of 4096."""
        return round_up(nbytes, PAGE_BYTES)

    def links_with(self, neighbour: Tier) -> Sequence[Link] | None:
        """Return the links that a RamTier would have, wrapped so that they wait for the device's queued work.

        Returns None if the neighbour is addressable, or if the tiers cannot be linked.
        """
        if neighbour.device is not None:
            return None
        # Create the links for an empty RamTier of the same name.
        ram_tier = RamTier(0, name=self.name, pin_memory=False)
        return [DeviceOrderedLink(link, self) for link in links_between(ram_tier, neighbour)] or None


class DeviceOrderedLink:
    """Wrapper of a RamTier's link for slots of a UnifiedTier. Bytes move only after the device has stopped using them.

    Streams do not order file I/O. If the device still uses a slot, a thread of the link waits for the device; other
    slots move at once. After a read has ended, kernels that are queued later see the bytes.
    """

    def __init__(self, link: Link, tier: UnifiedTier) -> None:
        self.src, self.dst = link.src, link.dst
        self._link, self._tier = link, tier
        self._order_workers = Workers(1, f"tiered-{self.src}-{self.dst}-order")

    @property
    def path(self) -> str:
        """Name of the inner link's current copy method."""
        return self._link.path

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once; see ``Link``."""
        is_write = src_slot.tier == self._tier.name
        slot = src_slot if is_write else dst_slot
        buffer = buffer_of(slot)
        assert isinstance(buffer, UnifiedBuffer), slot
        host_slot = Slot(slot.tier, slot.nbytes, slot.slot_bytes, buffer.slab)

        def start() -> Transfer:
            buffer.slab.tensor[slot.nbytes :] = 0  # Padding is written to disk, so clear bytes of earlier blocks.
            return self._link.submit(*((host_slot, dst_slot) if is_write else (src_slot, host_slot)), nbytes)

        if buffer.is_idle():
            return start()
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._order_workers.submit(lambda: self._start_when_idle(buffer, start, transfer), urgent=not is_write)
        return transfer

    def _start_when_idle(self, buffer: DeviceBuffer, start: Callable[[], Transfer], transfer: Transfer) -> None:
        try:
            buffer.wait()
            inner_transfer = start()
        except Exception as cause:  # Every exception must end the transfer, because otherwise its waiters would hang.
            error = TransferError(f"the device failed: {cause}", tier=f"{self.src}->{self.dst}")
            error.__cause__ = cause
            transfer.finish(error)
        else:
            inner_transfer.add_done_callback(lambda ended: transfer.finish(ended.error))

    def usage(self) -> LinkUsage:
        """Return the counters of the inner link."""
        return self._link.usage()

    def close(self) -> None:
        """Finish transfers in progress and stop the threads. Idempotent."""
        self._order_workers.close()
        self._link.close()


class _CudaArrayView:
    """Host memory with the CUDA array interface. It keeps the memory alive while a tensor is created from it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
        }


@functools.cache
def uses_host_page_tables(device: int) -> bool:
    """Return whether a CUDA device uses the host's page tables and can access unregistered host memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        value = ctypes.c_int()
        error = driver.cuDeviceGetAttribute(ctypes.byref(value), _USES_HOST_PAGE_TABLES, device)
    except (OSError, AttributeError):  # There is no CUDA driver, for example with ROCm.
        return False
    return not error and bool(value.value)


def device_view(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host memory as a CUDA tensor without a copy. The address is the same on the device.

    Args:
        memory: 1-D uint8. Keep the memory mapped (and pinned, if the device requires that) while the view is in use.
    """
    if not memory.numel():
        return torch.empty(0, dtype=torch.uint8, device=device)
    if memory.is_pinned():
        view: torch.Tensor = torch.as_tensor(_CudaArrayView(memory), device=device)
    else:  # torch rejects memory that is not registered with CUDA, so construct the storage directly.
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, memory.numel())
        view = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    assert view.data_ptr() == memory.data_ptr(), "pinned memory has different addresses on the device and the host"
    return view


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host view of a UnifiedTier's tensor without a copy. The device must have finished its work on it.

    Args:
        tensor: contiguous tensor of a lease, or a part of this tensor. Keep it alive while the view is used.
    """
    if not tensor.is_cuda or not tensor.numel():
        return tensor.cpu()
    assert tensor.is_contiguous(), (tuple(tensor.shape), tensor.stride())
    memory = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
