"""Arrays of committed generations: writing, reading and verifying a block's chunk files in 16 MiB pieces.

An array is a folder with a zarr document and the files ``c/0``, ``c/1``, ... of equal size. A piece is 16 MiB of
contents with one checksum. A piece can span several files if a tier wrote them, but not if ``write_array`` did.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tiered.block import BlockSpec
from tiered.errors import CorruptBlockError, GenerationError, TransferError
from tiered.file_io import (
    PIECE_BYTES,
    Digest,
    checksum,
    drop_cached,
    flush_contents,
    open_direct,
    opened,
    pieces,
    read_all,
    sync_path,
    sync_paths,
    write_all,
)
from tiered.tiers.directory import documents_and_folders, make_groups, read_document, write_document
from tiered.tiers.layout import DOCUMENT_NAME, ChunkFile, array_document, document_chunk_bytes, parts_of, place_text
from tiered.units import PAGE_BYTES, MiB, round_up

#: Maximum size in bytes of a chunk file, for blocks whose home is not a file tier.
_CHUNK_BYTES = 512 * MiB
#: Maximum number of files per block. Tiers create files of many MiB, but an untrusted document can claim any number
#: of files.
_MAX_FILES = 1 << 20
#: Number of pieces in flight, enough for a fast drive.
_NUM_THREADS = 4
_SCRATCH_BYTES = 4 * MiB
#: Maximum block size in bytes for ``read_small``. Larger blocks gain nothing from fewer system calls.
SMALL_BYTES = 1 * MiB
_thread_local = threading.local()

#: Remedy in messages about a missing part of a generation.
ADVICE = "Name the paths of the run that wrote it, or open another generation"


# -- location of the bytes -------------------------------------------------------------------------------------------


def new_chunk_bytes(spec: BlockSpec) -> int:
    """Return the size of each file that ``write_array`` creates for a block. No 16 MiB piece spans two files."""
    num_files = math.ceil(spec.nbytes / _CHUNK_BYTES)
    if num_files < 2:
        return round_up(max(spec.nbytes, 1), PAGE_BYTES)
    return round_up(math.ceil(spec.nbytes / num_files), PIECE_BYTES)


def array_bytes(spec: BlockSpec) -> int:
    """Return the total size of the files that ``write_array`` creates for a block."""
    chunk_bytes = new_chunk_bytes(spec)
    return chunk_bytes * len(range(0, spec.nbytes, chunk_bytes))


def array_chunk_bytes(folder: Path) -> int | None:
    """Return the size of each chunk file of an array, or None if the folder has no document that states this size."""
    return document_chunk_bytes(read_document(folder))


def chunk_files(
    folder: Path,
    spec: BlockSpec,
    other_folders: Sequence[Path] = (),
    chunk_bytes: int | None = None,
    moved_paths: Mapping[Path, Path] | None = None,
) -> list[ChunkFile]:
    """Return all chunk files of an array in order, including files that do not exist.

    Args:
        other_folders: folders of the same array on other paths, searched for files that are missing in ``folder``.
        chunk_bytes: size of each file, if already known.
        moved_paths: current paths of moved drives, by recorded path. Used to resolve links to recorded paths.

    Raises:
        GenerationError: the folder has no array, or the array's document claims too many files.
    """
    chunk_bytes = chunk_bytes or array_chunk_bytes(folder)
    if chunk_bytes is None:
        raise GenerationError(no_array_text(spec.key, folder))
    files = []
    starts = range(0, spec.nbytes, chunk_bytes)
    if len(starts) > _MAX_FILES:
        raise GenerationError(f"the document of block '{spec.key}' in '{folder}' claims {len(starts)} files. {ADVICE}")
    for index, start in enumerate(starts):
        paths = [_current_path(root / "c" / str(index), moved_paths) for root in (folder, *other_folders)]
        path = next((path for path in paths if path.exists()), paths[0])  # ``exists`` is False for a dangling link.
        files.append(ChunkFile(path, start, chunk_bytes))
    return files


def _current_path(file: Path, moved_paths: Mapping[Path, Path] | None) -> Path:
    """Return the path of a chunk file. A link to a moved drive is resolved to the drive's current path."""
    if not moved_paths or not file.is_symlink():
        return file
    target = Path(os.readlink(file))
    drive = next((parent for parent in target.parents if parent in moved_paths), None)
    return file if drive is None else moved_paths[drive] / target.relative_to(drive)


def snapshot_of(file: Path, key: str) -> Path:
    """Return the folder ``snap/<generation>`` that contains a block's chunk file."""
    return Path(os.path.realpath(file)).parents[key.count("/") + 2]


def link_text(path: Path) -> str:
    """Describe a chunk file for a message: its path, and its target if it is a link."""
    return f"'{path}', a link to '{os.readlink(path)}'," if path.is_symlink() else f"'{path}'"


def missing_text(path: Path) -> str:
    """Return the message about a missing chunk file."""
    return f"{link_text(path)} does not exist. {ADVICE}"


def no_array_text(key: str, folder: Path) -> str:
    """Return the error message for an array that is missing or whose metadata file is damaged."""
    return f"block '{key}' has no array in '{folder}': '{folder / DOCUMENT_NAME}' is missing or damaged. {ADVICE}"


# -- writing ---------------------------------------------------------------------------------------------------------

#: Function that returns bytes ``start`` to ``stop`` (one piece) of a block as 1-D uint8 on any device.
Contents = Callable[[int, int], torch.Tensor]


def contents_of(tensor: torch.Tensor) -> Contents:
    """Return a ``Contents`` function for a contiguous tensor."""
    data = byte_view(tensor)
    return lambda start, stop: data[start:stop]


def write_array(root: Path, spec: BlockSpec, contents: Contents, *, num_threads: int = _NUM_THREADS) -> tuple[str, ...]:
    """Write a block as the array ``<root>/<key>``, flush its files, and return its checksums.

    Args:
        root: folder of a generation.
        contents: called once per piece, on several threads. If ``num_threads`` is 1, called in order on the
            caller's thread.
        num_threads: maximum number of pieces processed at the same time.

    Raises:
        TransferError: the drive returned an error.
    """
    chunk_bytes = new_chunk_bytes(spec)
    folder = root / spec.key
    checksums: list[str] = []
    try:
        make_groups(root, spec.key)
        write_document(folder, array_document(spec.key, spec.shape, spec.dtype, chunk_bytes))
        (folder / "c").mkdir()
        for index, start in enumerate(range(0, spec.nbytes, chunk_bytes)):
            with opened(folder / "c" / str(index), os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:

                def write(piece: tuple[int, int], fd: int = fd, start: int = start) -> str:
                    return write_range(fd, piece[0], contents(start + piece[0], start + piece[1]))

                os.posix_fallocate(fd, 0, chunk_bytes)  # If the drive is full, this fails before the first write.
                checksums += _map_pieces(write, pieces(min(chunk_bytes, spec.nbytes - start)), num_threads)
                os.fsync(fd)
                drop_cached(fd)  # Drop the pages, now that they are flushed, so that later reads come from the drive.
    except TransferError:  # Raised by ``contents``. It is also an OSError, so do not convert it below.
        raise
    except OSError as error:
        path = str(error.filename or folder)
        text = f"block '{spec.key}' cannot be written: {error.strerror}"
        raise TransferError(text, tier=spec.home, path=path, errno=error.errno) from error
    return tuple(checksums)


def write_range(fd: int, offset: int, data: torch.Tensor) -> str:
    """Write bytes to a file, pad the last page with zeros, and return the checksum of the bytes.

    Args:
        offset: offset in the file, a multiple of 4096.
        data: 1-D uint8 on any device.
    """
    digest = Digest()
    direct_bytes = _num_direct_bytes(data)
    if direct_bytes:
        view = memoryview(data[:direct_bytes].numpy().data)
        digest.update(view)
        write_all(fd, view, offset)
    for start in range(direct_bytes, data.numel(), _SCRATCH_BYTES):
        nbytes = min(_SCRATCH_BYTES, data.numel() - start)
        scratch = _scratch()[: round_up(nbytes, PAGE_BYTES)]
        torch.from_numpy(scratch[:nbytes]).copy_(data[start : start + nbytes])
        scratch[nbytes:] = 0
        digest.update(memoryview(scratch[:nbytes].data))
        write_all(fd, memoryview(scratch.data), offset + start)
    return digest.hexdigest()


def flush_arrays(arrays: Sequence[tuple[Path, BlockSpec]]) -> None:
    """Flush arrays, given as (folder, spec) pairs, so that their contents survive a power cut.

    Raises:
        GenerationError: a file is missing.
        TransferError: the drive returned an error.
    """
    specs = {file.path: spec for folder, spec in arrays for file in chunk_files(folder, spec)}

    def flush(path: Path) -> None:
        try:
            flush_contents(path)
        except OSError as error:
            text = f"block '{specs[path].key}' cannot be flushed: {error.strerror}"
            raise TransferError(text, tier=specs[path].home, path=str(path), errno=error.errno) from error

    sync_paths(specs, flush)


def sync_tree(root: Path, top: Path) -> None:
    """Flush all documents and folders below ``root``, and its parents up to ``top`` with their documents."""
    parents = [folder for folder in root.parents if folder == top or top in folder.parents]
    documents = [path for folder in parents if (path := folder / DOCUMENT_NAME).exists()]
    sync_paths([*documents_and_folders(root), *documents, *parents], sync_path)


# -- reading ---------------------------------------------------------------------------------------------------------


def read_array(files: Sequence[ChunkFile], spec: BlockSpec, out: torch.Tensor | None = None) -> tuple[str, ...]:
    """Read a block's chunk files with several threads, and return one checksum per piece.

    The checksum of a piece in a truncated file covers only the existing bytes.

    Args:
        out: destination, contiguous 1-D uint8 on any device. None if only the checksums are needed.

    Raises:
        GenerationError: a file is missing.
        TransferError: the drive returned an error.
    """

    def read(piece: tuple[int, int]) -> str:
        return read_piece(files, spec, piece, None if out is None else out[slice(*piece)])

    return tuple(_map_pieces(read, pieces(spec.nbytes), _NUM_THREADS))


def read_small(path: str, out: torch.Tensor) -> str | None:
    """Read the first bytes of a file with as few system calls as possible, and return their checksum.

    Args:
        out: destination, 1-D uint8 of at most ``SMALL_BYTES`` on any device. Undefined if the result is None.

    Returns:
        Checksum, or None if the file is missing, too short or unreadable. Call ``read_array`` for an error message.
    """
    nbytes = out.numel()
    scratch = _scratch()[: round_up(nbytes, PAGE_BYTES)]
    try:
        fd = open_direct(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        count = os.preadv(fd, [memoryview(scratch.data)], 0)
        drop_cached(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    if count < nbytes:
        return None
    contents = scratch[:nbytes]
    out.copy_(torch.from_numpy(contents))
    return checksum(contents.data)


def read_piece(
    files: Sequence[ChunkFile], spec: BlockSpec, piece: tuple[int, int], out: torch.Tensor | None = None
) -> str:
    """Read one piece of a block and return its checksum; see ``read_array``.

    Args:
        piece: byte range [start, stop) of the piece.
        out: destination with the size of the piece, or None.
    """
    digest, nbytes = Digest(), 0
    for path, begin, end, start in parts_of(files, *piece):
        target = None if out is None else out[start - piece[0] : start - piece[0] + end - begin]
        try:
            with opened(path, os.O_RDONLY) as fd:
                nbytes += read_range(fd, begin, end - begin, target, digest)
                drop_cached(fd)
        except FileNotFoundError as error:
            raise GenerationError(f"a part of block '{spec.key}' is missing: {missing_text(path)}") from error
        except OSError as error:
            text = f"block '{spec.key}' cannot be read: {error.strerror}"
            raise TransferError(text, tier=spec.home, path=str(path), errno=error.errno) from error
    return digest.hexdigest() if nbytes else "nothing"


def read_range(fd: int, offset: int, nbytes: int, out: torch.Tensor | None, digest: Digest) -> int:
    """Read at most ``nbytes`` bytes of a file and add them to ``digest``. Return the number of bytes read.

    Args:
        offset: offset in the file, a multiple of 4096.
        out: destination, 1-D uint8 of ``nbytes`` on any device, or None.
    """
    num_read = 0
    direct_bytes = 0 if out is None else _num_direct_bytes(out)
    if out is not None and direct_bytes:
        view = memoryview(out[:direct_bytes].numpy().data)
        num_read = read_all(fd, view, offset)
        digest.update(view[:num_read])
    while direct_bytes <= num_read < nbytes:
        scratch = _scratch()[: round_up(min(_SCRATCH_BYTES, nbytes - num_read), PAGE_BYTES)]
        count = min(read_all(fd, memoryview(scratch.data), offset + num_read), nbytes - num_read)
        digest.update(memoryview(scratch[:count].data))
        if out is not None:
            out[num_read : num_read + count].copy_(torch.from_numpy(scratch[:count]))
        num_read += count
        if count < len(scratch):
            break
    return num_read


def check_pieces(
    key: str,
    files: Sequence[ChunkFile],
    nbytes: int,
    expected: Sequence[str],
    checksums: Sequence[str],
    generation: int | None = None,
) -> None:
    """Raise ``CorruptBlockError`` for the first piece whose checksum differs from the expected one.

    Args:
        generation: number of the generation, for the message.
    """
    for index, piece in enumerate(pieces(nbytes)):
        expected_sum = expected[index] if index < len(expected) else "none"
        actual_sum = checksums[index] if index < len(checksums) else "none"
        if actual_sum != expected_sum:
            raise CorruptBlockError(
                key, expected_sum, actual_sum, place=place_text(files, *piece), generation=generation
            )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a 1-D uint8 view."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


def page_aligned(nbytes: int) -> torch.Tensor:
    """Return page-aligned host memory for O_DIRECT, 1-D uint8."""
    buffer = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    offset = -buffer.data_ptr() % PAGE_BYTES
    return buffer[offset : offset + nbytes]


def _num_direct_bytes(data: torch.Tensor) -> int:
    """Return the number of bytes that O_DIRECT can move without a copy: whole pages of page-aligned host memory."""
    is_aligned = data.device.type == "cpu" and data.data_ptr() % PAGE_BYTES == 0
    return data.numel() // PAGE_BYTES * PAGE_BYTES if is_aligned else 0


def _scratch() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return page-aligned scratch memory of the calling thread. The memory is freed when the thread ends."""
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(_thread_local, "scratch", None)
    if buffer is None:
        buffer = _thread_local.scratch = page_aligned(_SCRATCH_BYTES).numpy()
    return buffer


def _map_pieces(task: Callable[[tuple[int, int]], str], jobs: Iterator[tuple[int, int]], num_threads: int) -> list[str]:
    all_jobs = list(jobs)
    if len(all_jobs) < 2 or num_threads == 1:
        return list(map(task, all_jobs))
    with ThreadPoolExecutor(min(num_threads, len(all_jobs)), thread_name_prefix="tiered-pieces") as threads:
        return list(threads.map(task, all_jobs))
