"""Files on drives: direct I/O, checksums, flushing, atomic replacement. Tiers, links and commits use this layer.

O_DIRECT moves whole pages between page-aligned memory and page-aligned offsets, and bypasses the kernel's cache. Some
file systems refuse O_DIRECT when a file is opened or first accessed; these functions then use the cache.

Every piece (16 MiB of a block's contents) has an xxh3-64 checksum, which detects and locates damage.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import xxhash

from tiered.errors import TieredError
from tiered.units import PAGE_BYTES, MiB, format_size

#: Bytes of contents per checksum. The stored format fixes this number.
PIECE_BYTES = 16 * MiB
#: Incremental checksum: call ``update`` with each part, then ``hexdigest``.
Digest = xxhash.xxh3_64

#: Maximum size of a document. The limit is generous: a model with 600 B parameters has a manifest of about 20 MB.
_MAX_DOCUMENT_BYTES = 1 << 30
_BATCHES_PER_THREAD = 8  # Small batches balance the load, because some flushes take much longer than others.
_NUM_SYNC_THREADS = 8  # A drive flushes several files concurrently in about the time of one.


def open_direct(path: str | os.PathLike[str], flags: int, on_buffered: Callable[[], None] | None = None) -> int:
    """Open a file, with O_DIRECT if possible. Return its descriptor, which the caller closes. Raises ``OSError``.

    Args:
        on_buffered: called if the file system refuses O_DIRECT.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would block. The flag has no effect on regular files.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if on_buffered is not None:
        on_buffered()
    # The first attempt may have created the file, so O_EXCL would make this attempt fail.
    return os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yield a descriptor from ``open_direct``. Adds the file name to an ``OSError`` raised in the ``with`` block."""
    try:
        fd = open_direct(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, TieredError) or error.filename is not None:
            raise
        # Errors from fallocate, pwritev and fsync do not contain the file name.
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_all(fd: int, view: memoryview, offset: int, on_buffered: Callable[[], None] | None = None) -> None:
    """Write all of ``view`` at ``offset``. With O_DIRECT, size and offset must be multiples of 4096."""
    num_written = 0
    while num_written < len(view):
        try:
            with view[num_written:] as tail:
                num_written += os.pwritev(fd, [tail], offset + num_written)
        except OSError as error:
            _stop_direct(fd, error, on_buffered)


def read_all(fd: int, view: memoryview, offset: int, on_buffered: Callable[[], None] | None = None) -> int:
    """Fill ``view`` with the bytes at ``offset``. Return the number of bytes read (smaller if the file ends)."""
    num_read = 0
    while num_read < len(view):
        try:
            with view[num_read:] as tail:
                count = os.preadv(fd, [tail], offset + num_read)
        except OSError as error:
            _stop_direct(fd, error, on_buffered)
            continue
        num_read += count
        if count == 0 or num_read % PAGE_BYTES:
            break  # The file ends here.
    return num_read


def _stop_direct(fd: int, error: OSError, on_buffered: Callable[[], None] | None) -> None:
    """Turn off O_DIRECT if a file system accepted it on opening but now refuses it. Re-raise other errors."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    if on_buffered is not None:
        on_buffered()


def drop_cached(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop a file's pages from the kernel's cache. If ``nbytes`` is 0, drop all pages from ``offset`` on."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) byte range of every piece of a block."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, nbytes)


def checksum(*buffers: Any) -> str:
    """Return the xxh3-64 of the concatenated buffers, as 16 hex digits. Releases the GIL while it runs.

    xxh3 takes 0.09 CPU-seconds per GB, a third of the time of crc32. Python bindings for crc32c hold the GIL
    (docs/decisions/0006-checksums.md).

    Args:
        buffers: contiguous objects with the buffer protocol (memoryview, numpy array, bytes).
    """
    digest = Digest()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


# -- surviving a power cut -------------------------------------------------------------------------------------------


def flush_contents(path: Path) -> None:
    """Flush a file's contents so that they survive a power cut. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Flush a file's contents and size, or a folder's entries, so that they survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_paths(paths: Iterable[Path], sync: Callable[[Path], None]) -> None:
    """Call ``sync`` for several paths concurrently. Raises the error of the first batch that failed."""
    all_paths = list(paths)
    # Handing a task to a thread takes longer than an empty flush, so each thread gets a few batches of paths.
    num_batches = max(1, min(len(all_paths), _BATCHES_PER_THREAD * _NUM_SYNC_THREADS))

    def sync_batch(index: int) -> None:
        for path in all_paths[index::num_batches]:
            sync(path)

    with ThreadPoolExecutor(_NUM_SYNC_THREADS, thread_name_prefix="tiered-sync") as threads:
        for _ in threads.map(sync_batch, range(num_batches)):
            pass


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically, through ``<path>.tmp``. Readers get the old or the new contents, even after a crash.

    Args:
        durable: whether the new contents must survive a power cut as soon as the function returns.
    """
    temporary_path = path.with_suffix(".tmp")
    try:
        with create_text_file(temporary_path) as file:
            file.write(text)
            if durable:
                # Flush before the rename. Otherwise, a power cut could leave an empty file under the final name.
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except OSError:
        temporary_path.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def create_text_file(path: Path) -> TextIO:
    """Create a UTF-8 text file for writing. Removes an old file or link (not its target) with this name.

    Raises:
        OSError: the write failed, or another process creates the file at the same time.
    """
    path.unlink(missing_ok=True)
    return open(path, "x", encoding="utf-8")  # Mode "x" does not follow a link created since the unlink.


def read_document_file(path: Path, max_bytes: int = _MAX_DOCUMENT_BYTES) -> bytes:
    """Return the contents of a small, untrusted file. Never blocks on a named pipe.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than ``max_bytes``.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # Check before opening, because opening some devices has side effects.
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = (file.read(max_bytes + 1) or b"") if status.st_size <= max_bytes else b""
        if max(status.st_size, len(content)) > max_bytes:  # Check both, because files in /proc report size 0.
            raise OSError(errno.EFBIG, f"more than {format_size(max_bytes)}", str(path))
        return content


def write_json(path: Path, document: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace a JSON file atomically; see ``replace_file``."""
    replace_file(path, json.dumps(document), durable=durable)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, so that they survive a power cut. Leaves existing folders unchanged."""
    missing_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing_folders:
        sync_path(folder.parent)


def folder_clashes(paths: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[int, int, str]]:
    """Yield (index, index of an earlier path, relation) for each pair of folders that are equal or nested.

    Resolves symbolic links. The folders need not exist. A clash is an error, because a tier empties its folder.
    """
    real_paths = [Path(os.path.realpath(path)) for path in paths]
    for index, path in enumerate(real_paths):
        for other_index, other_path in enumerate(real_paths[:index]):
            if path == other_path:
                yield index, other_index, "is the same folder as"
            elif other_path in path.parents:
                yield index, other_index, "lies inside"
            elif path in other_path.parents:
                yield index, other_index, "contains"
