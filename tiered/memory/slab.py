"""HostSlab: exact-size host memory, on huge pages and page-locked where the machine allows it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiered.units import PAGE_BYTES, MiB, round_up

_HUGE_PAGE_BYTES = 2 * MiB
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels answer EINVAL
_THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def huge_pages_allowed() -> bool:
    """Return whether the kernel gives transparent huge pages to memory that asks for them."""
    try:
        return "[never]" not in _THP_SETTING.read_text()
    except OSError:
        return False


def cuda_is_available() -> bool:
    """Return whether the machine has a CUDA device, for which memory is worth page-locking."""
    return torch.cuda.is_available()


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise without holding the GIL (``mmap.madvise`` holds it); return 0 or the errno."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


class HostSlab:
    """A private range of host memory of one size for life.

    Page-aligned (2 MiB-aligned from 2 MiB on), so that O_DIRECT, ``cudaHostRegister`` and huge pages all work.
    Every byte is resident from the start: a tier that fits at first cannot run out of memory later.

    Args:
        nbytes: size; rounded up to 4096. 0 is allowed and maps nothing.
        pin: page-lock it for CUDA. Initialises CUDA. A failure leaves ordinary memory (``is_pinned`` False).

    Attributes:
        nbytes: the rounded size.
        is_pinned: page-locked.
        has_huge_pages: huge pages were asked for and are allowed.
        populate_s: seconds that it took to make the bytes resident, and to page-lock them.
        pin_s: seconds that it took to make the bytes resident, and to page-lock them.

    Raises:
        OSError: the machine has no such memory (ENOMEM).
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = round_up(nbytes, PAGE_BYTES)
        self.is_pinned = False
        self.has_huge_pages = False
        self.populate_s = self.pin_s = 0.0
        self._map: mmap.mmap | None = None
        self._array: Any = np.empty(0, dtype=np.uint8)
        if self.nbytes:
            self._map_memory()
            if pin:
                start_s = time.perf_counter()
                self.is_pinned = _register(self.address, self.nbytes)
                self.pin_s = time.perf_counter() - start_s
            if self.is_pinned:
                # Also when nobody calls close: CUDA must never keep a registration of unmapped memory.
                self._unpin = weakref.finalize(self, _unregister, self.address)
                self._unpin.atexit = False  # CUDA may be gone by then, and the process gives all back anyway
        self._tensor: torch.Tensor | None = torch.from_numpy(self._array)

    def _map_memory(self) -> None:
        wants_huge = self.nbytes >= _HUGE_PAGE_BYTES
        # The extra 2 MiB are address space only: never touched, so never resident.
        extra = _HUGE_PAGE_BYTES if wants_huge else 0
        self._map = mmap.mmap(-1, self.nbytes + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        skip = -whole.ctypes.data % _HUGE_PAGE_BYTES if wants_huge else 0
        # Through numpy, not torch.frombuffer: numpy's array holds the mapping, so a live tensor cannot lose it.
        self._array = whole[skip : skip + self.nbytes]
        if wants_huge:
            # Exactly the used range: a huge page over its end would be resident beyond the size on the ledger.
            self.has_huge_pages = not _advise(self.address, self.nbytes, _MADV_HUGEPAGE) and huge_pages_allowed()
        start_s = time.perf_counter()
        error = _advise(self.address, self.nbytes, _MADV_POPULATE_WRITE)
        if error == errno.EINVAL:
            self._array[::PAGE_BYTES] = 0
        self.populate_s = time.perf_counter() - start_s
        if error and error != errno.EINVAL:
            raise OSError(error, os.strerror(error))

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return int(self._array.ctypes.data)

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
        self._tensor = None
        self._array = np.empty(0, dtype=np.uint8)
        mapping, self._map = self._map, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                return  # somebody's tensor holds it: dropping our reference leaves the unmapping to the last holder


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(address: int, nbytes: int) -> bool:
    if not torch.cuda.is_available():
        return False
    portable = 1  # page-locked for every CUDA context, not only the current one
    return _succeeded(_cudart().cudaHostRegister(address, nbytes, portable))


def _unregister(address: int) -> None:
    # Not raised: after an error of the device every call fails, and that error is the one to hear of.
    if not _succeeded(result := _cudart().cudaHostUnregister(address)):
        logging.getLogger(__name__).info("CUDA error %d where page-locked memory was to be unlocked", int(result))


def _succeeded(result: Any) -> bool:
    if int(result) == 0:
        return True
    # CUDA keeps the error for the calling thread, and torch would raise it behind the next kernel, whosever that is.
    # Behind this one it does no harm.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False
