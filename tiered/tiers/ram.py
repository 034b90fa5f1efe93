"""RAM as a tier: pools of slots cut from slabs, pinned if a GPU reads them."""

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
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_POPULATE_BYTES = 256 * MiB  # that a thread makes resident at a time
_MOST_POPULATING_THREADS = 8
_THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")
_GROWTH_S = 2.0  # a virtual machine without growth for this long has no more memory
_NODES_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call, which the C library does not wrap
_MPOL_PREFERRED = 1
_PROT_NONE = 0
_MAP_FIXED_NOREPLACE = 0x100000
_MREMAP_FLAGS = 1 | 2 | 4  # MAYMOVE, FIXED and DONTUNMAP (Linux 5.7): addresses that pages leave stay reserved
_MOST_UNITS = 1 << 13  # of pages that move together; each may become a mapping, and a process may have 65,530


@functools.cache
def huge_pages_allowed() -> bool:
    """Return whether the kernel gives transparent huge pages to memory that asks for them."""
    try:
        return "[never]" not in _THP_SETTING.read_text()
    except OSError:
        return False


def cuda_is_available() -> bool:
    """Return whether the machine has a CUDA device, for which memory is worth pinning."""
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
    """Call madvise without holding the GIL (``mmap.madvise`` holds it); return 0 or the errno."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


def _move_pages(source: int, target: int, nbytes: int) -> bool:
    """Move resident pages to a range that has none; if this fails, the range may have a hole."""
    return bool(_libc().mremap(source, nbytes, nbytes, _MREMAP_FLAGS, target) == target)


@functools.cache
def _pages_can_move() -> bool:
    """Return whether this kernel moves pages. Tried once, on a separate page."""
    with mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as trial:
        trial[0] = 7
        first = ctypes.addressof(ctypes.c_char.from_buffer(trial))
        return _move_pages(first, first + PAGE_BYTES, PAGE_BYTES) and (trial[0], trial[PAGE_BYTES]) == (0, 7)


def _address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array; ``array.ctypes`` takes ten times as long."""
    return int(array.__array_interface__["data"][0])


#: Mappings of slabs. A forked child has none of their pages, see decision 0088.
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
#: Mappings that may have a hole, which another mapping may use by now. They are never unmapped.
_with_holes: list[mmap.mmap] = []


def _reserve_addresses_in_child() -> None:
    """Map no-access pages where the parent's slabs are.

    Without them a mapping of the child could take those addresses: a tensor of the parent would then read and write it,
    and the end of a slab would unmap it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    for mapping in list(_mappings):
        if not mapping.closed:
            whole = np.frombuffer(mapping, dtype=np.uint8)
            _libc().mmap(_address_of(whole), whole.nbytes, _PROT_NONE, flags, -1, 0)


os.register_at_fork(after_in_child=_reserve_addresses_in_child)


def _memory_of_machine() -> int:
    """Return the kilobytes of RAM that the kernel manages now: a virtual machine may start with a part of its RAM."""
    found = re.search(r"^MemTotal:\s+(\d+)", _MEMORY.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def _machine_grows(beyond: int) -> bool:
    """Wait until the kernel manages more kilobytes of RAM; return False if it does not within ``_GROWTH_S``."""
    deadline_s = time.monotonic() + _GROWTH_S
    while (has_grown := _memory_of_machine() > beyond) is False and time.monotonic() < deadline_s:
        time.sleep(_GROWTH_S / 20)
    return has_grown


@functools.cache
def _node_of_gpu(device: int) -> int | None:
    """Return the NUMA node of a CUDA device; None if only one node has memory, or the machine does not report it."""
    try:
        if _NODES_WITH_MEMORY.read_text(encoding="ascii").strip().isdigit():
            return None
        seen: Any = torch.cuda.get_device_properties(device)
        address = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
        node = int(Path(_PCI_DEVICES, address, "numa_node").read_text(encoding="ascii"))
    except (OSError, AttributeError):
        return None
    return node if node >= 0 else None


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Place pages that are touched later in a NUMA node while it has free memory. A hint: failures are ignored."""
    number = _MBIND.get(platform.machine())
    if number is not None:
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        num_bits = 64 * len(mask) + 1  # the kernel reads one bit less
        words = (ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(_MPOL_PREFERRED), mask)
        _libc().syscall(ctypes.c_long(number), *words, ctypes.c_ulong(num_bits), ctypes.c_ulong(0))


class SparePages:
    """Resident pages of closed slabs, which move to new slabs: the kernel need not zero them. Thread-safe.

    A forked child has none of the pages, so there it keeps and moves nothing.

    Args:
        most_bytes: most bytes that it will have to keep; decides how many pages move together.

    Attributes:
        moved_bytes: bytes that slabs have got from here.
    """

    def __init__(self, most_bytes: int) -> None:
        self.moved_bytes = 0
        self._unit = _HUGE_PAGE_BYTES * max(1, -(-most_bytes // (_MOST_UNITS * _HUGE_PAGE_BYTES)))
        self._units: list[tuple[mmap.mmap, int]] = []  # the mapping and the address of each; unmapped with the last
        self._lock = threading.Lock()
        self._is_closed = not _pages_can_move()
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Return the resident bytes that are kept."""
        return len(self._units) * self._unit

    def keep(self, mapping: mmap.mmap, address: int, nbytes: int) -> bool:
        """Keep the pages and the mapping of an unused range; return whether they were kept."""
        with self._lock:
            end = nbytes // self._unit * self._unit
            if self._is_closed or not end or os.getpid() != self._process:
                return False
            _advise(address + end, nbytes - end, _MADV_DONTNEED)
            self._units += [(mapping, address + start) for start in reversed(range(0, end, self._unit))]
        return True

    def fill(self, address: int, nbytes: int) -> bool:
        """Move kept pages to the beginning of a range that has no page.

        Returns:
            Whether the range is whole. If the kernel refuses a move, the range has no page, may have a hole, and no
            page moves any more.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._process:
                return True
            for target in range(address, address + nbytes - self._unit + 1, self._unit):
                if not self._units:
                    break
                _mapping, source = self._units.pop()  # unmapped after the move at the earliest
                if not _move_pages(source, target, self._unit):
                    self._is_closed = True
                    _advise(address, target - address, _MADV_DONTNEED)  # nothing unmaps what lies before the hole
                    return False
                self.moved_bytes += self._unit
        return True

    def trim(self, most_bytes: int, *, next_bytes: int = 0) -> None:
        """Give pages back to the system until ``most_bytes`` are kept, plus ``next_bytes`` for a new range."""
        most_bytes = max(0, most_bytes) + next_bytes // self._unit * self._unit
        with self._lock:
            while self.nbytes > most_bytes:
                _mapping, address = self._units.pop(0)
                _advise(address, self._unit, _MADV_DONTNEED)

    def close(self) -> None:
        """Give all pages back, and keep no more. Idempotent."""
        self._is_closed = True
        self.trim(0)


class HostSlab:
    """A private range of host memory of one size for life.

    Page-aligned (2 MiB-aligned from 2 MiB on), so that O_DIRECT, ``cudaHostRegister`` and huge pages all work.
    Every byte is resident from the start: a tier that fits at first cannot run out of memory later.
    A forked child does not get the memory, as the kernel would copy pinned pages in ``fork``.

    Args:
        nbytes: size; rounded up to 4096. 0 is allowed and maps nothing.
        pin: pin it for CUDA, in the GPU's NUMA node while that has memory. Initialises CUDA. A failure leaves ordinary
            memory (``is_pinned`` False).
        spare: gives resident pages to the slab, and takes its pages when it is closed. Pinned memory uses none.

    Attributes:
        has_huge_pages: huge pages were requested and are allowed.
        populate_s: seconds that it took to make the bytes resident.
        pin_s: seconds that it took to pin them.

    Raises:
        OSError: the machine has no such memory (ENOMEM).
    """

    def __init__(self, nbytes: int, *, pin: bool = False, spare: SparePages | None = None) -> None:
        self._spare = None if pin else spare
        self.nbytes = round_up(nbytes, PAGE_BYTES)
        self.is_pinned = False
        self.has_huge_pages = False
        self.populate_s = self.pin_s = 0.0
        self._is_refused = False
        self._map: mmap.mmap | None = None
        self._array: Any = np.empty(0, dtype=np.uint8)
        if self.nbytes:
            self._map_memory(_node_of_gpu(torch.cuda.current_device()) if pin and torch.cuda.is_available() else None)
            if pin:
                start_s = time.perf_counter()
                self.is_pinned = _register(self.address, self.nbytes)
                self.pin_s = time.perf_counter() - start_s
            if self.is_pinned:
                # Also without close: CUDA must never keep a registration of unmapped memory.
                self._unpin = weakref.finalize(self, _unregister, self.address)
                self._unpin.atexit = False  # CUDA may be gone by then, and the process gives all back anyway
        self._tensor: torch.Tensor | None = torch.from_numpy(self._array)

    def _map_memory(self, node: int | None) -> None:
        wants_huge = self.nbytes >= _HUGE_PAGE_BYTES
        # The extra 2 MiB are address space only: never touched, so never resident.
        extra = _HUGE_PAGE_BYTES if wants_huge else 0
        self._map = mmap.mmap(-1, self.nbytes + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _mappings.add(self._map)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        address = _address_of(whole)
        _advise(address, whole.nbytes, _MADV_DONTFORK)
        skip = -address % _HUGE_PAGE_BYTES if wants_huge else 0
        # Through numpy, not torch.frombuffer: numpy's array holds the mapping, so a live tensor cannot lose it.
        self._array = whole[skip : skip + self.nbytes]
        if wants_huge:
            # Exactly the used range: a huge page over its end would be resident beyond the size on the ledger.
            self.has_huge_pages = not _advise(self.address, self.nbytes, _MADV_HUGEPAGE) and huge_pages_allowed()
        if node is not None:
            _prefer_node(self.address, self.nbytes, node)
        start_s = time.perf_counter()
        if self._spare is not None and wants_huge and not self._spare.fill(self.address, self.nbytes):
            _with_holes.append(self._map)
            raise OSError(errno.ENOMEM, "pages of a closed slab could not be moved")
        self._populate()
        self.populate_s = time.perf_counter() - start_s

    def _populate(self) -> None:
        """Make all bytes resident. One thread zeroes a few GB per second, a small part of the memory bandwidth."""
        starts = range(0, self.nbytes, _POPULATE_BYTES)
        num_threads = 1 if len(starts) == 1 else min(_MOST_POPULATING_THREADS, len(os.sched_getaffinity(0)))
        if num_threads == 1:
            errors = [self._populate_part(start) for start in starts]
        else:
            with ThreadPoolExecutor(min(num_threads, len(starts)), thread_name_prefix="tiered-populate") as threads:
                errors = list(threads.map(self._populate_part, starts))
        if error := max(errors):
            raise OSError(error, os.strerror(error))

    def _populate_part(self, start: int) -> int:
        nbytes = min(_POPULATE_BYTES, self.nbytes - start)
        before: int | None = None  # reading it takes as long as a small slab, so the first refusal comes first
        while not self._is_refused:
            error = _advise(self.address + start, nbytes, _MADV_POPULATE_WRITE)
            if error == errno.EINVAL:
                self._array[start : start + nbytes : PAGE_BYTES] = 0
                return 0
            if error != errno.ENOMEM:
                return error
            if before is not None:
                self._is_refused |= not _machine_grows(before)
            before = _memory_of_machine()
        return errno.ENOMEM

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return _address_of(self._array)

    @property
    def tensor(self) -> torch.Tensor:
        """Return all bytes as a 1-D uint8 CPU tensor, no copy. It keeps the memory mapped while it lives."""
        assert self._tensor is not None, "slab used after close"
        return self._tensor

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` as a writable memoryview, no copy."""
        assert 0 <= start <= stop <= self.nbytes, (start, stop, self.nbytes)
        return memoryview(self._array)[start:stop]

    def close(self) -> None:
        """Unlock and unmap the memory; idempotent. A tensor that still lives keeps it mapped until it dies."""
        if self._tensor is None:
            return
        if self.is_pinned:
            self._unpin()
            self.is_pinned = False
        address, array = self.address, weakref.ref(self._array)
        self._tensor = None
        self._array = np.empty(0, dtype=np.uint8)
        mapping, self._map = self._map, None
        if mapping is not None:
            is_free = array() is None  # all tensors and views of it hold this array
            if is_free and self._spare is not None and self._spare.keep(mapping, address, self.nbytes):
                return
            try:
                mapping.close()
            except BufferError:
                return  # a tensor holds it: without our reference the last holder unmaps it


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, nbytes: int) -> bool:
    if not torch.cuda.is_available():
        return False
    portable = 1  # pinned for every CUDA context, not only the current one
    return _succeeded(_cudart().cudaHostRegister(address, nbytes, portable))


def _unregister(address: int) -> None:
    # Not raised: after a device error every call fails, and the first error is the one to report.
    if not _succeeded(result := _cudart().cudaHostUnregister(address)):
        logging.getLogger(__name__).info("CUDA error %d where pinned memory was to be unpinned", int(result))


def _succeeded(result: Any) -> bool:
    if int(result) == 0:
        return True
    # CUDA keeps the error for the calling thread, and torch would raise it after the next kernel of any caller.
    # After this one it does no harm.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


class RamTier:
    """Host memory of at most ``capacity_bytes``. Every slot is its own slab of exact size (rounded to 4096).

    Args:
        capacity_bytes: bound on the memory of all slots and reservations together.
        pin_memory: pin the slabs for CUDA; default: if the machine has a CUDA device.

    Attributes:
        num_unpinned_slabs: slabs that should have been pinned and could not be; copies to a device from them are
            slow and block the link's thread.
        huge_page_bytes: bytes of slabs on huge pages.
        num_drops: slabs that were dropped, for another size or at the end.
        made_bytes: bytes of all slabs ever made.
        populate_s: seconds that it took to make them resident, one slab after the other.
        pin_s: seconds that it took to pin them.
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
        self._ledger = Ledger(name, capacity_bytes)
        self._spare = SparePages(self._ledger.capacity_bytes)
        self._pool: SlabPool[HostSlab] = SlabPool(self._ledger, self._make, self._drop)

    def _make(self, nbytes: int) -> HostSlab:
        pin = cuda_is_available() if self._pin_memory is None else self._pin_memory
        # The room of the new slab is on the ledger already.
        self._spare.trim(self._pool.free_bytes, next_bytes=0 if pin else nbytes)
        try:
            slab = HostSlab(nbytes, pin=pin, spare=self._spare)
        except OSError:
            if not self._spare.nbytes:
                raise
            self._spare.trim(0)  # spare pages hold addresses too, which the process may lack
            slab = HostSlab(nbytes, pin=pin, spare=self._spare)
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
            raise self._no_memory(f"{format_size(slot_bytes)} of block '{name}'", error) from error
        if slab is None:
            return None
        # Padding goes to disk with the contents: never leftovers of another block. Through a memoryview, as indexing a
        # tensor takes as long as the rest of a small block's registration.
        slab.view(nbytes, slot_bytes)[:] = bytes(slot_bytes - nbytes)
        return Slot(self.name, nbytes, slot_bytes, slab)

    def free(self, slot: Slot) -> None:
        """Take the slot back; its slab is kept for the next slot of that size while there is room."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        if slot.slot_bytes:
            self._pool.give(slot.slot_bytes, slot.resource)
        slot.resource = None  # a second free, or a use after it, fails the assertion above

    def _no_memory(self, what: str, error: OSError) -> TransferError:
        return TransferError(
            f"no memory for {what}: {error.strerror}. "
            f"Give tier '{self.name}' fewer bytes than the {format_size(self.capacity_bytes)} it has",
            tier=self.name,
            errno=error.errno,
        )

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        """Make the slabs that are missing; see ``BufferTier``.

        Raises:
            TransferError: the machine has less free memory than the ledger says.
        """
        try:
            self._pool.keep(counts)
        except OSError as error:
            raise self._no_memory("the buffers of copies", error) from error

    def has_buffer(self, nbytes: int) -> bool:
        """Return whether a slot needs no room of slabs that are kept; see ``BufferTier``."""
        return self._pool.has(self.slot_bytes(nbytes))

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU view of the slot's first bytes."""
        assert slot.tier == self.name and isinstance(slot.resource, HostSlab), slot
        return view_as(slot.resource.tensor, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Charge bytes that live outside any slot; negative gives back. Raises ``CapacityError`` without room."""
        self._pool.reserve(nbytes)
        self._spare.trim(self._pool.free_bytes)

    def sync(self) -> None:
        """Do nothing: host memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the ledger now; slabs kept for reuse count as free."""
        return self._ledger.usage()

    def close(self) -> None:
        """Return all memory that no slot holds to the system."""
        self._spare.close()
        self._pool.close()


def view_as(buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the first bytes of a 1-D uint8 ``buffer`` as a contiguous tensor of ``shape`` and ``dtype``, no copy."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    have = buffer.numel()
    assert nbytes <= have, f"{tuple(shape)} of {dtype} needs {nbytes} bytes, the slot has {have}"
    if nbytes == 0:
        return buffer.new_empty(tuple(shape), dtype=dtype)  # nothing to share; torch cannot re-view an empty tensor
    # Operators that change nothing are left out: this runs at every lease.
    flat = (buffer if have == nbytes else buffer[:nbytes]).view(dtype)
    return flat if len(shape) == 1 else flat.view(tuple(shape))
