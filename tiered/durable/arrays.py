"""Bytes of committed arrays on a drive: their files, direct I/O, and reading them back verified."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tiered.block import BlockSpec
from tiered.checksums import PIECE_BYTES, PieceDigest, pieces
from tiered.errors import GenerationError, TransferError
from tiered.tiers.directory import documents_and_folders, make_groups, read_document, sync_paths, write_document
from tiered.tiers.layout import DOCUMENT_NAME, array_document, document_chunk_bytes
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


#: Largest chunk file of a block whose home is not a file tier.
_CHUNK_BYTES = 512 * MiB
#: Pieces under way at once, each 16 MiB at most: what a fast drive needs.
_NUM_THREADS = 4
_NUM_FLUSH_THREADS = 4  # a drive flushes several files at once for the price of one


def array_bytes(spec: BlockSpec) -> int:
    """Return the size of all files together that ``write_contents`` makes."""
    chunk_bytes = chunk_bytes_written(spec)
    return chunk_bytes * len(range(0, spec.nbytes, chunk_bytes))


def chunk_bytes_written(spec: BlockSpec) -> int:
    """Return the size of the files that ``write_contents`` makes: all equal; no piece of 16 MiB lies in two of them."""
    num_files = math.ceil(spec.nbytes / _CHUNK_BYTES)
    if num_files < 2:
        return round_up(max(spec.nbytes, 1), PAGE_BYTES)
    return round_up(math.ceil(spec.nbytes / num_files), PIECE_BYTES)


def write_contents(root: Path, spec: BlockSpec, tensor: torch.Tensor) -> tuple[str, ...]:
    """Write a block as the array ``<root>/<key>`` and flush its files; return its checksums.

    Args:
        root: folder of a generation.
        tensor: the block's contents, contiguous, on any device.

    Raises:
        TransferError: the drive refused.
    """
    chunk_bytes = chunk_bytes_written(spec)
    folder = root / spec.key
    found: list[str] = []
    try:
        make_groups(root, spec.key)
        write_document(folder, array_document(spec.key, spec.shape, spec.dtype, chunk_bytes))
        (folder / "c").mkdir()
        data = byte_view(tensor)
        for number, start in enumerate(range(0, spec.nbytes, chunk_bytes)):
            found += _write_file(folder / "c" / str(number), data[start : start + chunk_bytes], chunk_bytes)
    except OSError as error:
        path = str(error.filename or folder)
        text = f"block '{spec.key}' cannot be written: {error.strerror}"
        raise TransferError(text, tier=spec.home, path=path, errno=error.errno) from error
    return tuple(found)


def _write_file(path: Path, data: torch.Tensor, nbytes: int) -> list[str]:
    """Write one chunk file of ``nbytes`` and return the checksums; a full drive shows before the first byte."""

    def write(piece: tuple[int, int]) -> str:
        digest = PieceDigest()
        write_range(fd, piece[0], data[slice(*piece)], digest)
        return digest.checksums()[0]

    try:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.posix_fallocate(fd, 0, nbytes)
            found = _in_parallel(write, list(pieces(data.numel())))
            os.fsync(fd)
            forget_cached(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # it does not know the file by itself
    return found


def _in_parallel(act: Callable[[tuple[int, int]], str], todo: Sequence[tuple[int, int]]) -> list[str]:
    if len(todo) < 2:
        return list(map(act, todo))
    with ThreadPoolExecutor(min(_NUM_THREADS, len(todo)), thread_name_prefix="tiered-pieces") as threads:
        return list(threads.map(act, todo))


#: For messages about a part of a generation that is not where it should be.
ADVICE = "Name the paths of the run that wrote it, or open another generation"
#: A chunk file, the offset of its contents in the block, and how many bytes of contents it has.
ChunkPlace = tuple[Path, int, int]


def read_contents(folder: Path, spec: BlockSpec) -> tuple[str, ...]:
    """Read a block's array and return its checksums; see ``read_files``."""
    return read_files(chunk_files(folder, spec), spec)


def read_files(files: Sequence[ChunkPlace], spec: BlockSpec, into: torch.Tensor | None = None) -> tuple[str, ...]:
    """Read the chunk files of a block and return the checksums of its pieces, by a few threads.

    Args:
        files: all of the block, in order.
        into: takes the contents: contiguous, 1-D uint8, on any device.

    Returns:
        One checksum per piece; what is missing at the end of a file that was cut off is left out of it.

    Raises:
        GenerationError: a file is missing.
        TransferError: the drive refused.
    """
    return tuple(_in_parallel(partial(read_piece, files, spec, into), list(pieces(spec.nbytes))))


def read_piece(files: Sequence[ChunkPlace], spec: BlockSpec, into: torch.Tensor | None, piece: tuple[int, int]) -> str:
    """Read one piece of a block and return its checksum; see ``read_files``."""
    digest = PieceDigest()
    for path, first, last, start in parts_of(files, *piece):
        target = None if into is None else into[start : start + last - first]
        try:
            with opened(path, os.O_RDONLY) as fd:
                read_range(fd, first, last - first, target, digest)
                forget_cached(fd)
        except FileNotFoundError as error:
            raise GenerationError(f"a part of block '{spec.key}' is missing: {missing_text(path)}") from error
        except OSError as error:
            text = f"block '{spec.key}' cannot be read: {error.strerror}"
            raise TransferError(text, tier=spec.home, path=str(path), errno=error.errno) from error
    return (digest.checksums() or ("nothing",))[0]


def parts_of(files: Sequence[ChunkPlace], start: int, stop: int) -> Iterator[tuple[Path, int, int, int]]:
    """Yield (file, first, last, start) of the parts of bytes ``start`` to ``stop`` of a block: a range in a file."""
    for path, offset, nbytes in files:
        first, last = max(start, offset), min(stop, offset + nbytes)
        if first < last:
            yield path, first - offset, last - offset, first


def snapshot_of(file: Path, key: str) -> Path:
    """Return the folder ``snap/<generation>`` on the drive that a chunk file of a block lies on."""
    return Path(os.path.realpath(file)).parents[key.count("/") + 2]


def flush_contents(arrays: Sequence[tuple[Path, BlockSpec]]) -> None:
    """Return once the contents of blocks, in arrays in these folders, survive a power cut.

    Raises:
        GenerationError: a part is missing.
        TransferError: the drive refused.
    """
    files = [(path, spec) for folder, spec in arrays for path, _, _ in chunk_files(folder, spec)]
    with ThreadPoolExecutor(_NUM_FLUSH_THREADS, thread_name_prefix="tiered-flush") as threads:
        for _ in threads.map(_flush, files):
            pass


def _flush(file: tuple[Path, BlockSpec]) -> None:
    path, spec = file
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        text = f"block '{spec.key}' cannot be flushed: {error.strerror}"
        raise TransferError(text, tier=spec.home, path=str(path), errno=error.errno) from error


def place_in(files: Sequence[ChunkPlace], start: int, stop: int) -> str:
    """Return where bytes ``start`` to ``stop`` of a block lie, for a message: files and ranges in them."""
    parts = parts_of(files, start, stop)
    return ", ".join(f"'{os.path.realpath(path)}' bytes {first} to {last}" for path, first, last, _ in parts)


def link_text(path: Path) -> str:
    """Return the name of a chunk file for a message, and what it is a link to."""
    return f"'{path}', a link to '{os.readlink(path)}'," if path.is_symlink() else f"'{path}'"


def missing_text(path: Path) -> str:
    """Return what to tell of a chunk file that is not there."""
    return f"{link_text(path)} is not there. {ADVICE}"


def array_chunk_bytes(folder: Path) -> int | None:
    """Return the size of the chunk files of an array, None if the folder has no document that says so."""
    return document_chunk_bytes(read_document(folder))


def no_array_text(key: str, folder: Path) -> str:
    """Return what to tell where an array is not, or its document is damaged."""
    return f"block '{key}' has no array in '{folder}': '{folder / DOCUMENT_NAME}' is missing or damaged. {ADVICE}"


def chunk_files(folder: Path, spec: BlockSpec, elsewhere: Sequence[Path] = ()) -> list[ChunkPlace]:
    """Return all chunk files of an array, in order; also those that are missing.

    Raises:
        GenerationError: the folder holds no array.
    """
    chunk_bytes = array_chunk_bytes(folder)
    if chunk_bytes is None:
        raise GenerationError(no_array_text(spec.key, folder))
    files = []
    for number, start in enumerate(range(0, spec.nbytes, chunk_bytes)):
        paths = [place / "c" / str(number) for place in (folder, *elsewhere)]
        path = next((path for path in paths if path.exists()), paths[0])  # a dangling link does not exist
        files.append((path, start, min(chunk_bytes, spec.nbytes - start)))
    return files


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as 1-D uint8, no copy."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


def sync_tree(root: Path, top: Path) -> None:
    """Flush all documents and folders below ``root``, and those of the folders from there up to ``top``."""
    above = [folder for folder in root.parents if folder == top or top in folder.parents]
    documents = [path for folder in above if (path := folder / DOCUMENT_NAME).exists()]
    sync_paths([*documents_and_folders(root), *documents, *above])
