"""Files read and written past the kernel's cache, from and into tensors on any device; a few MiB of working memory.

Where a file system cannot do O_DIRECT, and for memory that it cannot take, bytes go another way by themselves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tiered.checksums import PieceDigest
from tiered.units import PAGE_BYTES, MiB, round_up

_SCRATCH_BYTES = 4 * MiB
_of_thread = threading.local()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yield a file for ``write_range`` and ``read_range``, with O_DIRECT where that works. Raises ``OSError``."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC, 0o644)  # the first try may have made the file
    try:
        yield fd
    finally:
        os.close(fd)


def write_range(fd: int, offset: int, data: torch.Tensor, digest: PieceDigest) -> None:
    """Write bytes into a file, filling up its last 4096 with zeros, and add them to a digest.

    Args:
        offset: in the file, a multiple of 4096.
        data: 1-D uint8 on any device.
    """
    whole = _num_bytes_in_place(data)
    if whole:
        view = memoryview(data[:whole].numpy().data)
        digest.update(view)
        _write_all(fd, view, offset)
    for start in range(whole, data.numel(), _SCRATCH_BYTES):
        nbytes = min(_SCRATCH_BYTES, data.numel() - start)
        scratch = _scratch()[: round_up(nbytes, PAGE_BYTES)]
        torch.from_numpy(scratch[:nbytes]).copy_(data[start : start + nbytes])
        scratch[nbytes:] = 0
        digest.update(memoryview(scratch[:nbytes].data))
        _write_all(fd, memoryview(scratch.data), offset + start)


def read_range(fd: int, offset: int, nbytes: int, into: torch.Tensor | None, digest: PieceDigest) -> int:
    """Read bytes of a file and add them to a digest; return how many there were.

    Args:
        offset: in the file, a multiple of 4096.
        into: 1-D uint8 of ``nbytes`` on any device, or None.
    """
    done = 0
    whole = 0 if into is None else _num_bytes_in_place(into)
    if into is not None and whole:
        view = memoryview(into[:whole].numpy().data)
        done = _read_all(fd, view, offset)
        digest.update(view[:done])
    while whole <= done < nbytes:
        scratch = _scratch()[: round_up(min(_SCRATCH_BYTES, nbytes - done), PAGE_BYTES)]
        count = min(_read_all(fd, memoryview(scratch.data), offset + done), nbytes - done)
        digest.update(memoryview(scratch[:count].data))
        if into is not None:
            into[done : done + count].copy_(torch.from_numpy(scratch[:count]))
        done += count
        if count < len(scratch):
            break
    return done


def _num_bytes_in_place(data: torch.Tensor) -> int:
    """Return how many bytes O_DIRECT can move from or to this memory itself: whole pages of aligned host memory."""
    is_aligned = data.device.type == "cpu" and data.data_ptr() % PAGE_BYTES == 0
    return data.numel() // PAGE_BYTES * PAGE_BYTES if is_aligned else 0


def _scratch() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the calling thread's page-aligned working memory; it goes with the thread."""
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(_of_thread, "scratch", None)
    if found is None:
        whole = np.empty(_SCRATCH_BYTES + PAGE_BYTES, dtype=np.uint8)
        skip = -whole.ctypes.data % PAGE_BYTES
        found = _of_thread.scratch = whole[skip : skip + _SCRATCH_BYTES]
    return found


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            _stop_direct(fd, error)


def _read_all(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from a file; return the bytes that there are."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            _stop_direct(fd, error)
            continue
        done += count
        if count == 0 or done % PAGE_BYTES:
            break  # the end of the file
    return done


def _stop_direct(fd: int, error: OSError) -> None:
    """Go on through the kernel's cache: some file systems accept O_DIRECT when a file is opened and refuse it then."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def forget_cached(fd: int) -> None:
    """Drop what the kernel cached of a flushed file, if it did: nobody reads it again from there."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
