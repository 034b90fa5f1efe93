"""File I/O for tiers with kvikio, NVIDIA's I/O library."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiered.errors import TieredError, TransferError, install_command
from tiered.tiers.layout import ChunkFile
from tiered.tiers.nvme import NvmeTier
from tiered.units import PAGE_BYTES, MiB

_TASK_BYTES = 16 * MiB
_MIN_THREADS = 4
_THREADS_PER_PATH = 2
#: Maximum number of open handles. Each handle has two file descriptors.
_MAX_HANDLES = 128
_ADVICE = "or choose the engine 'posix'"
_settings_lock = threading.Lock()  # kvikio's settings are global.
_Identity = tuple[int, int, bool]  # (device, inode, whether opened for writing)

#: Error numbers by error message, because kvikio reports system errors only as text.
_ERRNO_BY_TEXT = {os.strerror(number): number for number in errno.errorcode}


@dataclass(slots=True)
class _Handle:
    """An open kvikio file, and the number of threads that use the file."""

    file: Any
    num_users: int


class KvikioMover:
    """``PartMover`` with kvikio. Thread-safe. Raises an error in a forked child, where kvikio would hang.

    Files stay open between parts. They are identified by inode, so a snapshot's file is never confused with the new
    file of the same name. At most 128 files stay open. Opening a file also closes files that were deleted.

    All movers of a process share kvikio's settings. With kvikio's default settings (one thread, the kernel's cache),
    I/O would be three times slower.

    Args:
        has_gds: whether a probe has shown that GPUDirect Storage works here. If False, kvikio does not open libcufile's
            driver, because this call may never return.

    Raises:
        TieredError: kvikio or the NVIDIA driver is missing. There is no silent fallback.
    """

    def __init__(self, tier: NvmeTier, *, has_gds: bool = False) -> None:
        self._tier = tier
        self._process_id = os.getpid()
        # Without this setting, cuFile writes its log to the working directory.
        os.environ.setdefault("CUFILE_LOGFILE_PATH", os.path.join(tier.paths[0], "cufile.log"))
        self._kvikio = _load(tier.name)
        num_threads = max(_MIN_THREADS, _THREADS_PER_PATH * len(tier.paths))
        _tune(self._kvikio, num_threads=num_threads, has_gds=has_gds, is_direct=tier.is_direct)
        self._monitor = self._kvikio.SummaryMonitor()
        self._lock = threading.Lock()
        self._handles: OrderedDict[_Identity, _Handle] = OrderedDict()  # in LRU order

    @property
    def path(self) -> str:
        """``kvikio-gds`` if kvikio has counted bytes moved by GPUDirect Storage, otherwise ``kvikio-posix``."""
        by_backend = self._monitor.get().by_backend
        return "kvikio-gds" if by_backend["GDS"]["bytes_transferred"] else "kvikio-posix"

    def read(self, file: ChunkFile, offset: int, view: memoryview | torch.Tensor) -> None:
        """Fill ``view`` from the file; see ``PartMover``."""
        self._move_or_retry(file, offset, view, is_write=False)

    def write(self, file: ChunkFile, offset: int, view: memoryview | torch.Tensor) -> None:
        """Write ``view`` to the file; see ``PartMover``."""
        self._move_or_retry(file, offset, view, is_write=True)

    def close(self) -> None:
        """Close all files, and stop counting their bytes. Idempotent."""
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            handle.file.close()
        self._monitor.stop()

    # -- one part ----------------------------------------------------------------------------------------------

    def _move_or_retry(self, file: ChunkFile, offset: int, view: memoryview | torch.Tensor, *, is_write: bool) -> None:
        was_direct = self._tier.is_direct
        try:
            self._move(file, offset, view, is_write)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._close_unused()  # A deleted file takes space until it is closed.
            elif error.errno == errno.EINVAL and was_direct:
                self._stop_direct_io()  # Some file systems accept O_DIRECT when opening and refuse it later.
            else:
                raise
            self._move(file, offset, view, is_write)

    def _move(self, file: ChunkFile, offset: int, view: memoryview | torch.Tensor, is_write: bool) -> None:
        # cuFile accepts any device address. System calls move host memory, which must be aligned.
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data if isinstance(view, memoryview) else 0
        values = (address, offset, len(view))
        assert not any(value % PAGE_BYTES for value in values), f"not aligned to {PAGE_BYTES}: {values}"
        if os.getpid() != self._process_id:
            raise self._error("kvikio cannot be used in a forked process: start it with 'spawn'", file, offset)
        identity = self._identity_to_write(file) if is_write else self._identity_to_read(file, offset, len(view))
        with self._handle(identity, file, offset) as handle:
            try:
                method = handle.pwrite if is_write else handle.pread
                # kvikio's future does not keep the memory alive, so wait for the future while ``view`` exists.
                count = method(view, len(view), offset, _TASK_BYTES).get()
            except RuntimeError as cause:
                raise self._translate(cause, file, offset) from cause
            if count != len(view):
                raise self._error(f"kvikio moved {count} bytes of {len(view)}", file, offset)
            if not self._tier.is_direct:  # Drop the kernel's cached copy, because the RAM tier holds the contents.
                os.posix_fadvise(handle.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)

    def _identity_to_write(self, file: ChunkFile) -> _Identity:
        fd = self._tier.open_for_write(file)  # Replaces the file if a snapshot links it.
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return status.st_dev, status.st_ino, True

    def _identity_to_read(self, file: ChunkFile, offset: int, nbytes: int) -> _Identity:
        status = os.stat(file.path)
        missing_bytes = offset + nbytes - status.st_size
        if missing_bytes > 0:
            text = f"file is truncated: it ends {missing_bytes} bytes before the block does"
            raise self._error(text, file, status.st_size)
        return status.st_dev, status.st_ino, False

    # -- open files --------------------------------------------------------------------------------------------

    @contextmanager
    def _handle(self, identity: _Identity, file: ChunkFile, offset: int) -> Iterator[Any]:
        """Yield a kvikio file that stays open during the ``with`` block."""
        with self._lock:
            handle = self._handles.get(identity)
            if handle is None:
                handle = self._handles[identity] = _Handle(self._open(identity, file, offset), num_users=1)
                self._close_surplus()
            else:
                self._handles.move_to_end(identity)
                handle.num_users += 1
        try:
            yield handle.file
        finally:
            with self._lock:
                handle.num_users -= 1

    def _open(self, identity: _Identity, file: ChunkFile, offset: int) -> Any:
        try:
            handle = self._kvikio.CuFile(str(file.path), "r+" if identity[2] else "r")
        except RuntimeError as cause:
            raise self._translate(cause, file, offset) from cause
        status = os.fstat(handle.fileno())
        if (status.st_dev, status.st_ino) != identity[:2]:
            handle.close()
            raise self._error("another program replaced the file while it was being opened", file, offset)
        if self._tier.is_direct and not handle.is_direct_io_supported():
            self._tier.stop_direct_io()
        return handle

    def _close_surplus(self) -> None:
        """Close deleted files. Above the limit, also close the least recently used files. The caller holds the lock."""
        num_surplus = len(self._handles) - _MAX_HANDLES
        for identity, handle in list(self._handles.items()):
            if handle.num_users == 0 and (num_surplus > 0 or os.fstat(handle.file.fileno()).st_nlink == 0):
                del self._handles[identity]
                handle.file.close()
                num_surplus -= 1

    def _close_unused(self) -> None:
        with self._lock:
            for identity, handle in list(self._handles.items()):
                if handle.num_users == 0:
                    del self._handles[identity]
                    handle.file.close()

    def _stop_direct_io(self) -> None:
        self._tier.stop_direct_io()
        with _settings_lock:
            self._kvikio.defaults.set({"auto_direct_io_read": False, "auto_direct_io_write": False})

    # -- errors ------------------------------------------------------------------------------------------------

    def _error(self, text: str, file: ChunkFile, offset: int) -> TransferError:
        return TransferError(text, tier=self._tier.name, path=str(file.path), offset=offset)

    def _translate(self, cause: RuntimeError, file: ChunkFile, offset: int) -> OSError:
        """Return the system error named at the end of kvikio's message, or a ``TransferError`` with the message."""
        message = str(cause).rsplit(": ", 1)[-1]
        if message in _ERRNO_BY_TEXT:
            return OSError(_ERRNO_BY_TEXT[message], message, str(file.path))
        return self._error(f"kvikio failed: {cause}", file, offset)


def _load(tier: str) -> Any:
    """Import kvikio, and check for the NVIDIA driver, which kvikio needs even for host memory."""
    try:
        import kvikio
        import kvikio.defaults
    except ModuleNotFoundError as error:
        raise TieredError(
            f"tier '{tier}' is to use kvikio, but the package {error.name} is not installed: "
            f"{install_command('gds')}, then pip install --no-deps kvikio-cu13, {_ADVICE}"
        ) from error
    except Exception as error:
        raise TieredError(
            f"tier '{tier}' is to use kvikio, which does not load: {error}. Repair it, {_ADVICE}"
        ) from error
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TieredError(
            f"tier '{tier}' is to use kvikio, which needs the NVIDIA driver even for files and host memory ({error}): "
            f"install the driver, {_ADVICE}"
        ) from error
    return kvikio


def _tune(kvikio: Any, *, num_threads: int, has_gds: bool, is_direct: bool) -> None:
    with _settings_lock:
        settings = {
            "compat_mode": kvikio.CompatMode.AUTO if has_gds else kvikio.CompatMode.ON,
            "task_size": _TASK_BYTES,
            "bounce_buffer_size": _TASK_BYTES,
            "auto_direct_io_read": is_direct,
            "auto_direct_io_write": is_direct,
        }
        if num_threads > kvikio.defaults.get("num_threads"):  # Never shrink another mover's pool.
            settings["num_threads"] = num_threads
        kvikio.defaults.set(settings)
