"""Files on drives: direct I/O, checksums, flushing, replacing in one step. Tiers, links and commits use this layer.

O_DIRECT moves whole pages between page-aligned memory and page-aligned offsets, past the kernel's cache. If a file
system refuses it, when a file is opened or only when it is used, these functions fall back to the cache.

Every piece (16 MiB of a block's contents) has an xxh3-64 checksum, which detects damage and locates it.
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

#: Contents under one checksum. A constant of the format: not of a tier, an engine or a machine.
PIECE_BYTES = 16 * MiB
#: Checksum of contents that arrive in parts: ``update`` with each, then ``hexdigest``.
Digest = xxhash.xxh3_64

#: The manifest of a model of 600 B parameters has some 20 MB.
_MAX_DOCUMENT_BYTES = 1 << 30
_NUM_SHARES = 8  # shares of the paths per thread
_NUM_SYNC_THREADS = 8  # a drive flushes several files at once for the price of one


def open_direct(path: str | os.PathLike[str], flags: int, on_buffered: Callable[[], None] | None = None) -> int:
    """Return a new file descriptor, with O_DIRECT if that works; the caller closes it. Raises ``OSError``.

    Args:
        on_buffered: called if O_DIRECT is refused.
    """
    try:
        # Without O_NONBLOCK, opening a stranger's named pipe would block. For a file the flag means nothing.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if on_buffered is not None:
        on_buffered()
    # Without O_EXCL: the first try may have made the file.
    return os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yield the file descriptor of ``open_direct``. An ``OSError`` of the system inside names the file."""
    try:
        fd = open_direct(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, TieredError) or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # fallocate, pwritev and fsync do not name it


def write_all(fd: int, view: memoryview, offset: int, on_buffered: Callable[[], None] | None = None) -> None:
    """Write all of ``view`` at ``offset``; both multiples of 4096 if the file is open with O_DIRECT."""
    done = 0
    while done < len(view):
        try:
            with view[done:] as rest:
                done += os.pwritev(fd, [rest], offset + done)
        except OSError as error:
            _stop_direct(fd, error, on_buffered)


def read_all(fd: int, view: memoryview, offset: int, on_buffered: Callable[[], None] | None = None) -> int:
    """Fill ``view`` from ``offset`` and return the number of bytes read, fewer if the file ends."""
    done = 0
    while done < len(view):
        try:
            with view[done:] as rest:
                count = os.preadv(fd, [rest], offset + done)
        except OSError as error:
            _stop_direct(fd, error, on_buffered)
            continue
        done += count
        if count == 0 or done % PAGE_BYTES:
            break  # the end of the file
    return done


def _stop_direct(fd: int, error: OSError, on_buffered: Callable[[], None] | None) -> None:
    """Fall back to the kernel's cache: some file systems accept O_DIRECT when opening and refuse it later."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        raise error
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    if on_buffered is not None:
        on_buffered()


def drop_cached(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop a file's pages from the kernel's cache (``nbytes`` 0: to its end): the RAM tier counts the contents."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of every piece of a block's contents."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, nbytes)


def checksum(*buffers: Any) -> str:
    """Return the xxh3-64 of the concatenated buffers, as 16 hex digits. Releases the GIL while it runs.

    0.09 CPU-seconds per GB, a third of crc32; crc32c bindings hold the GIL (docs/decisions/0006-checksums.md).

    Args:
        buffers: contiguous objects with the buffer protocol (memoryview, numpy array, bytes).
    """
    digest = Digest()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


# -- surviving a power cut -------------------------------------------------------------------------------------------


def flush_contents(path: Path) -> None:
    """Return once a file's contents survive a power cut. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Return once a file's contents and size, or a folder's entries, survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_paths(paths: Iterable[Path], sync: Callable[[Path], None]) -> None:
    """Call ``sync`` for several paths concurrently; raises the error of the first share that failed."""
    todo = list(paths)
    # A hand-off to a thread takes longer than a flush that has nothing to write: each thread gets a few shares.
    num_shares = max(1, min(len(todo), _NUM_SHARES * _NUM_SYNC_THREADS))

    def sync_share(number: int) -> None:
        for path in todo[number::num_shares]:
            sync(path)

    with ThreadPoolExecutor(_NUM_SYNC_THREADS, thread_name_prefix="tiered-sync") as threads:
        for _ in threads.map(sync_share, range(num_shares)):
            pass


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file in one step: readers see the old one or the new one, also after a crash.

    Args:
        path: the file that is written; ``<path>.tmp`` is used meanwhile.
        durable: return once it survives a power cut.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with create_text_file(temporary) as file:
            file.write(text)
            if durable:
                # Before the rename: else a power cut could leave the new name with no contents.
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_path(path.parent)


def create_text_file(path: Path) -> TextIO:
    """Create a UTF-8 text file for writing. An old file of this name is removed; of a link, only the link.

    Raises:
        OSError: the drive refused, or another process creates the file at the same time.
    """
    path.unlink(missing_ok=True)
    return open(path, "x", encoding="utf-8")  # exclusive: follows no link that appears meanwhile


def read_document_file(path: Path, max_bytes: int = _MAX_DOCUMENT_BYTES) -> bytes:
    """Return the contents of a small file that a stranger may have made. A named pipe is refused without waiting.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening some devices acts on them
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = (file.read(max_bytes + 1) or b"") if status.st_size <= max_bytes else b""
        if max(status.st_size, len(content)) > max_bytes:  # files of /proc have more bytes than their size
            raise OSError(errno.EFBIG, f"more than {format_size(max_bytes)}", str(path))
        return content


def write_json(path: Path, document: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a JSON file in one step; see ``replace_file``."""
    replace_file(path, json.dumps(document), durable=durable)


def make_folder(path: Path) -> None:
    """Make a folder and its parents. New ones survive a power cut; existing ones are left alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def folder_clashes(paths: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[int, int, str]]:
    """Yield (number, number of an earlier path, how they clash) of folders that are equal or contain each other.

    Symbolic links are resolved. The folders need not exist. A clash matters because a tier empties its folder.
    """
    real = [Path(os.path.realpath(path)) for path in paths]
    for number, path in enumerate(real):
        for first, other in enumerate(real[:number]):
            if path == other:
                yield number, first, "is the same folder as"
            elif other in path.parents:
                yield number, first, "lies inside"
            elif path in other.parents:
                yield number, first, "contains"
