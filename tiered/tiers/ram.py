"""RamTier: slots in slabs of host memory, pinned if the machine has a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import platform
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiered.errors import TransferError
from tiered.tiers.base import Ledger, Slot, TierUsage
from tiered.tiers.pool import SlabPool
from tiered.units import PAGE_BYTES, MiB, format_size, round_up

_HUGE_PAGE_BYTES = 2 * MiB
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23  # Since Linux 5.14; older kernels return EINVAL.
_POPULATE_BYTES = 256 * MiB  # bytes that a thread makes resident per task
_MAX_POPULATE_THREADS = 8
_THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")
_GROWTH_S = 2.0  # If a virtual machine's memory does not grow for this long, it is exhausted.
_NODES_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers of mbind, which the C library does not wrap
_MPOL_PREFERRED = 1
_PROT_NONE = 0
_MAP_FIXED_NOREPLACE = 0x100000
_MREMAP_FLAGS = 1 | 2 | 4  # MAYMOVE, FIXED, DONTUNMAP (Linux 5.7). The source addresses stay reserved.
_MAX_UNITS = 1 << 13  # Each unit of pages can become a mapping, and a process can have 65,530 mappings.


@functools.cache
def huge_pages_allowed() -> bool:
    """Return whether the kernel grants transparent huge pages on request."""
    try:
        return "[never]" not in _THP_SETTING.read_text()
    except OSError:
        return False


def cuda_is_available() -> bool:
    """Return whether the machine has a CUDA device. Memory is pinned only then."""
    return torch.cuda.is_available()


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    libc.mremap.restype = ctypes.c_void_p
    libc.syscall.restype = ctypes.c_long
    return libc


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise without holding the GIL, unlike ``mmap.madvise``. Return 0 or the errno."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


def _move_pages(source: int, target: int, nbytes: int) -> bool:
    """Move resident pages to a range without pages. Return False on failure, which may leave an unmapped hole."""
    return bool(_libc().mremap(source, nbytes, nbytes, _MREMAP_FLAGS, target) == target)


@functools.cache
def _pages_can_move() -> bool:
    """Return whether this kernel can move pages. Tests this on a scratch page."""
    with mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping[0] = 7
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return _move_pages(address, address + PAGE_BYTES, PAGE_BYTES) and (mapping[0], mapping[PAGE_BYTES]) == (0, 7)


def _array_address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array. This is ten times faster than ``array.ctypes``."""
    return int(array.__array_interface__["data"][0])


#: Mappings of slabs. A forked child does not inherit their pages; see decision 0088.
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
#: Mappings that may have a hole. They are never unmapped, because another mapping may use the hole's addresses.
_mappings_with_holes: list[mmap.mmap] = []


def _reserve_addresses_in_child() -> None:
    """Map inaccessible pages at the addresses of the parent's slabs.

    Otherwise, a new mapping of the child could get these addresses. The child's copies of the parent's tensors would
    then read and write the new mapping, and closing a slab would unmap it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    for mapping in list(_mappings):
        if not mapping.closed:
            array = np.frombuffer(mapping, dtype=np.uint8)
            _libc().mmap(_array_address(array), array.nbytes, _PROT_NONE, flags, -1, 0)


os.register_at_fork(after_in_child=_reserve_addresses_in_child)


def _managed_ram_kb() -> int:
    """Return the kilobytes of RAM that the kernel manages now. A virtual machine may start with only part of it."""
    match = re.search(r"^MemTotal:\s+(\d+)", _MEMORY.read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) if match else 0


def _has_ram_grown(old_kb: int) -> bool:
    """Wait until the kernel manages more than ``old_kb`` kilobytes of RAM; return False after ``_GROWTH_S``."""
    deadline_s = time.monotonic() + _GROWTH_S
    while (has_grown := _managed_ram_kb() > old_kb) is False and time.monotonic() < deadline_s:
        time.sleep(_GROWTH_S / 20)
    return has_grown


@functools.cache
def _gpu_node(device: int) -> int | None:
    """Return the NUMA node of a CUDA device, or None if only one node has memory or the node is unknown."""
    try:
        if _NODES_WITH_MEMORY.read_text(encoding="ascii").strip().isdigit():
            return None
        properties: Any = torch.cuda.get_device_properties(device)
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int(Path(_PCI_DEVICES, address, "numa_node").read_text(encoding="ascii"))
    except (OSError, AttributeError):
        return None
    return node if node >= 0 else None


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Prefer a NUMA node for pages that are touched later. Failures are ignored, because this is only a hint."""
    call_number = _MBIND.get(platform.machine())
    if call_number is not None:
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        num_bits = 64 * len(mask) + 1  # The kernel reads one bit fewer than this.
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(_MPOL_PREFERRED), mask)
        _libc().syscall(ctypes.c_long(call_number), *arguments, ctypes.c_ulong(num_bits), ctypes.c_ulong(0))


class SparePages:
    """Resident pages of closed slabs, kept for new slabs so that the kernel need not zero pages. Thread-safe.

    A forked child does not inherit the pages, so in the child this object does nothing.

    Args:
        max_bytes: maximum bytes that callers will keep. Determines the size of the units that are moved.

    Attributes:
        moved_bytes: bytes moved to slabs so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self.moved_bytes = 0
        self._unit_bytes = _HUGE_PAGE_BYTES * max(1, -(-max_bytes // (_MAX_UNITS * _HUGE_PAGE_BYTES)))
        self._units: list[tuple[mmap.mmap, int]] = []  # (mapping, address); a mapping is freed with its last unit
        self._lock = threading.Lock()
        self._is_closed = not _pages_can_move()
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of the kept pages."""
        return len(self._units) * self._unit_bytes

    def keep(self, mapping: mmap.mmap, address: int, nbytes: int) -> bool:
        """Keep the pages and the mapping of an unused range. Return False if none were kept."""
        with self._lock:
            end = nbytes // self._unit_bytes * self._unit_bytes
            if self._is_closed or not end or os.getpid() != self._pid:
                return False
            _advise(address + end, nbytes - end, _MADV_DONTNEED)
            self._units += [(mapping, address + start) for start in reversed(range(0, end, self._unit_bytes))]
        return True

    def fill(self, address: int, nbytes: int) -> bool:
        """Move kept pages to the beginning of a range without pages. Return False if the kernel refused a move.

        After a refusal, the range has no pages and may have an unmapped hole. No more pages are moved from then on.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return True
            for target in range(address, address + nbytes - self._unit_bytes + 1, self._unit_bytes):
                if not self._units:
                    break
                _mapping, source = self._units.pop()  # This reference keeps the mapping alive during the move.
                if not _move_pages(source, target, self._unit_bytes):
                    self._is_closed = True
                    _advise(address, target - address, _MADV_DONTNEED)  # Free the pages that were already moved.
                    return False
                self.moved_bytes += self._unit_bytes
        return True

    def trim(self, max_bytes: int, *, next_bytes: int = 0) -> None:
        """Return pages to the system until at most ``max_bytes`` are kept, plus ``next_bytes`` for a new range."""
        max_bytes = max(0, max_bytes) + next_bytes // self._unit_bytes * self._unit_bytes
        with self._lock:
            while self.nbytes > max_bytes:
                _mapping, address = self._units.pop(0)
                _advise(address, self._unit_bytes, _MADV_DONTNEED)

    def close(self) -> None:
        """Return all pages to the system, and keep no more pages. Idempotent."""
        self._is_closed = True
        self.trim(0)


class HostSlab:
    """A private range of host memory with a fixed size.

    The range is page-aligned for O_DIRECT and ``cudaHostRegister``. From 2 MiB on, it is aligned to 2 MiB for huge
    pages. All bytes are resident from the start, so a tier cannot run out of memory later. A forked child does not
    inherit the memory, because ``fork`` would copy pinned pages.

    Args:
        nbytes: size, rounded up to a multiple of 4096. 0 maps nothing.
        pin: whether to pin the memory for CUDA, preferably on the GPU's NUMA node. Initializes CUDA. If pinning fails,
            ``is_pinned`` is False.
        spare_pages: source of resident pages, to which ``close`` returns the slab's pages. Not used for pinned memory.

    Attributes:
        has_huge_pages: whether huge pages were requested and are allowed.
        populate_s: seconds spent making the bytes resident.
        pin_s: seconds spent on pinning.

    Raises:
        OSError: the machine is out of memory (ENOMEM).
    """

    def __init__(self, nbytes: int, *, pin: bool = False, spare_pages: SparePages | None = None) -> None:
        self._spare_pages = None if pin else spare_pages
        self.nbytes = round_up(nbytes, PAGE_BYTES)
        self.is_pinned = False
        self.has_huge_pages = False
        self.populate_s = self.pin_s = 0.0
        self._is_refused = False
        self._mapping: mmap.mmap | None = None
        self._array: Any = np.empty(0, dtype=np.uint8)
        if self.nbytes:
            self._map_memory(_gpu_node(torch.cuda.current_device()) if pin and torch.cuda.is_available() else None)
            if pin:
                start_s = time.perf_counter()
                self.is_pinned = _register(self.address, self.nbytes)
                self.pin_s = time.perf_counter() - start_s
            if self.is_pinned:
                # Unpin even without ``close``, because CUDA must never keep a registration of unmapped memory.
                self._unpin = weakref.finalize(self, _unregister, self.address)
                self._unpin.atexit = False  # At exit, CUDA may already be shut down, and all memory is freed anyway.
        self._tensor: torch.Tensor | None = torch.from_numpy(self._array)

    def _map_memory(self, node: int | None) -> None:
        use_huge_pages = self.nbytes >= _HUGE_PAGE_BYTES
        # The extra 2 MiB for the alignment are never touched, so they only take address space.
        padding_bytes = _HUGE_PAGE_BYTES if use_huge_pages else 0
        self._mapping = mmap.mmap(-1, self.nbytes + padding_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _mappings.add(self._mapping)
        array = np.frombuffer(self._mapping, dtype=np.uint8)
        address = _array_address(array)
        _advise(address, array.nbytes, _MADV_DONTFORK)
        offset = -address % _HUGE_PAGE_BYTES if use_huge_pages else 0
        # Use numpy instead of torch.frombuffer, because a numpy array and its tensors keep the mapping alive.
        self._array = array[offset : offset + self.nbytes]
        if use_huge_pages:
            # Advise only the used range, because a huge page across its end would take more memory than the ledger
            # counts.
            self.has_huge_pages = not _advise(self.address, self.nbytes, _MADV_HUGEPAGE) and huge_pages_allowed()
        if node is not None:
            _prefer_node(self.address, self.nbytes, node)
        start_s = time.perf_counter()
        if self._spare_pages is not None and use_huge_pages and not self._spare_pages.fill(self.address, self.nbytes):
            _mappings_with_holes.append(self._mapping)
            raise OSError(errno.ENOMEM, "pages of a closed slab could not be moved")
        self._populate()
        self.populate_s = time.perf_counter() - start_s

    def _populate(self) -> None:
        """Make all bytes resident, with several threads because one thread uses little of the memory bandwidth."""
        starts = range(0, self.nbytes, _POPULATE_BYTES)
        num_threads = 1 if len(starts) == 1 else min(_MAX_POPULATE_THREADS, len(os.sched_getaffinity(0)))
        if num_threads == 1:
            errors = [self._populate_part(start) for start in starts]
        else:
            with ThreadPoolExecutor(min(num_threads, len(starts)), thread_name_prefix="tiered-populate") as threads:
                errors = list(threads.map(self._populate_part, starts))
        if error := max(errors):
            raise OSError(error, os.strerror(error))

    def _populate_part(self, start: int) -> int:
        nbytes = min(_POPULATE_BYTES, self.nbytes - start)
        old_kb: int | None = None  # Read only after a refusal, because reading takes as long as making a small slab.
        while not self._is_refused:
            error = _advise(self.address + start, nbytes, _MADV_POPULATE_WRITE)
            if error == errno.EINVAL:
                self._array[start : start + nbytes : PAGE_BYTES] = 0
                return 0
            if error != errno.ENOMEM:
                return error
            if old_kb is not None:
                self._is_refused |= not _has_ram_grown(old_kb)
            old_kb = _managed_ram_kb()
        return errno.ENOMEM

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return _array_address(self._array)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as a 1-D uint8 CPU tensor, without a copy. The tensor keeps the memory mapped."""
        assert self._tensor is not None, "slab used after close"
        return self._tensor

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` as a writable memoryview."""
        assert 0 <= start <= stop <= self.nbytes, (start, stop, self.nbytes)
        return memoryview(self._array)[start:stop]

    def close(self) -> None:
        """Unpin and unmap the memory. An existing tensor keeps it mapped. Idempotent."""
        if self._tensor is None:
            return
        if self.is_pinned:
            self._unpin()
            self.is_pinned = False
        address, array = self.address, weakref.ref(self._array)
        self._tensor = None
        self._array = np.empty(0, dtype=np.uint8)
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            is_free = array() is None  # All tensors and views of the slab hold a reference to this array.
            if is_free and self._spare_pages is not None and self._spare_pages.keep(mapping, address, self.nbytes):
                return
            try:
                mapping.close()
            except BufferError:
                return  # Deleting the last tensor unmaps the memory.


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, nbytes: int) -> bool:
    if not torch.cuda.is_available():
        return False
    flags = 1  # flag: pinned for all CUDA contexts
    return _succeeded(_cudart().cudaHostRegister(address, nbytes, flags))


def _unregister(address: int) -> None:
    # Log instead of raising: after a device error every call fails, and only the first error matters.
    if not _succeeded(result := _cudart().cudaHostUnregister(address)):
        logging.getLogger(__name__).info("CUDA error %d while unpinning memory", int(result))


def _succeeded(result: Any) -> bool:
    if int(result) == 0:
        return True
    # CUDA keeps the error for the calling thread, and torch would raise it after this thread's next kernel. Launch a
    # kernel here to clear the error.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


class RamTier:
    """Tier in host memory. Every slot is a separate slab of exactly the slot's size (a multiple of 4096 bytes).

    Args:
        capacity_bytes: maximum total bytes of slots and reservations.
        pin_memory: whether to pin the slabs for CUDA; default: True if the machine has a CUDA device.

    Attributes:
        num_unpinned_slabs: number of slabs that could not be pinned. Copies from these slabs to a device are slow and
            block the link's thread.
        huge_page_bytes: bytes of slabs on huge pages.
        num_drops: number of slabs dropped, to make space or on ``close``.
        made_bytes: bytes of all slabs created so far.
        populate_s: seconds spent making slabs resident.
        pin_s: seconds spent pinning slabs.
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
        self._stats_lock = threading.Lock()
        self._ledger = Ledger(name, capacity_bytes)
        self._spare_pages = SparePages(self._ledger.capacity_bytes)
        self._pool: SlabPool[HostSlab] = SlabPool(self._ledger, self._make, self._drop)

    def _make(self, nbytes: int) -> HostSlab:
        pin = cuda_is_available() if self._pin_memory is None else self._pin_memory
        # ``free_bytes`` already excludes the new slab.
        self._spare_pages.trim(self._pool.free_bytes, next_bytes=0 if pin else nbytes)
        try:
            slab = HostSlab(nbytes, pin=pin, spare_pages=self._spare_pages)
        except OSError:
            if not self._spare_pages.nbytes:
                raise
            self._spare_pages.trim(0)  # Spare pages also take address space, which may be scarce.
            slab = HostSlab(nbytes, pin=pin, spare_pages=self._spare_pages)
        with self._stats_lock:
            self.num_unpinned_slabs += pin and not slab.is_pinned
            self.huge_page_bytes += slab.nbytes if slab.has_huge_pages else 0
            self.made_bytes += slab.nbytes
            self.populate_s += slab.populate_s
            self.pin_s += slab.pin_s
        return slab

    def _drop(self, slab: HostSlab) -> None:
        with self._stats_lock:
            self.num_drops += 1
            self.huge_page_bytes -= slab.nbytes if slab.has_huge_pages else 0
        slab.close()

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to a multiple of 4096."""
        return round_up(nbytes, PAGE_BYTES)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot with a ``HostSlab`` as its resource, or None if there is not enough space.

        Raises:
            TransferError: the machine has less free memory than the ledger shows.
        """
        slot_bytes = self.slot_bytes(nbytes)
        if slot_bytes == 0:
            return Slot(self.name, 0, 0, HostSlab(0))
        try:
            slab = self._pool.take(slot_bytes)
        except OSError as error:
            raise self._memory_error(f"{format_size(slot_bytes)} of block '{name}'", error) from error
        if slab is None:
            return None
        # The padding goes to disk with the contents, so clear the bytes of earlier blocks. Use a memoryview, because
        # indexing a tensor is slow: it takes as long as the rest of a small block's registration.
        slab.view(nbytes, slot_bytes)[:] = bytes(slot_bytes - nbytes)
        return Slot(self.name, nbytes, slot_bytes, slab)

    def free(self, slot: Slot) -> None:
        """Free a slot. Its slab is kept for the next slot of the same size while space allows."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        if slot.slot_bytes:
            self._pool.give(slot.slot_bytes, slot.resource)
        slot.resource = None  # A second free or a later use then fails an assertion.

    def _memory_error(self, purpose: str, error: OSError) -> TransferError:
        return TransferError(
            f"no memory for {purpose}: {error.strerror}. "
            f"Give tier '{self.name}' fewer bytes than the {format_size(self.capacity_bytes)} it has",
            tier=self.name,
            errno=error.errno,
        )

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        """Allocate the missing slabs; see ``BufferTier``.

        Raises:
            TransferError: the machine has less free memory than the ledger shows.
        """
        try:
            self._pool.keep(counts)
        except OSError as error:
            raise self._memory_error("the buffers of copies", error) from error

    def has_buffer(self, nbytes: int) -> bool:
        """Return whether a slot can be allocated without dropping kept slabs; see ``BufferTier``."""
        return self._pool.has(self.slot_bytes(nbytes))

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU view of the slot's first bytes."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        return view_as(slot.resource.tensor, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot. A negative number returns bytes. Raises ``CapacityError``."""
        self._pool.reserve(nbytes)
        self._spare_pages.trim(self._pool.free_bytes)

    def sync(self) -> None:
        """Do nothing, because host memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the tier's current byte counts. Slabs kept for reuse count as free."""
        return self._ledger.usage()

    def close(self) -> None:
        """Return the memory of all unused slabs to the system."""
        self._spare_pages.close()
        self._pool.close()


def view_as(buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """View the first bytes of a 1-D uint8 ``buffer`` as a contiguous tensor."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    buffer_bytes = buffer.numel()
    assert nbytes <= buffer_bytes, f"{tuple(shape)} of {dtype} needs {nbytes} bytes, the slot has {buffer_bytes}"
    if nbytes == 0:
        return buffer.new_empty(tuple(shape), dtype=dtype)  # torch cannot view an empty tensor as another dtype.
    # Skip operators that would change nothing, because this runs at every lease.
    flat = (buffer if buffer_bytes == nbytes else buffer[:nbytes]).view(dtype)
    return flat if len(shape) == 1 else flat.view(tuple(shape))
