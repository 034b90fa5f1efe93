"""A block's bytes as a zarr array in a folder: written from a tensor, read into one, checked. Bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tiered.block import BlockSpec
from tiered.checksums import PieceDigest
from tiered.errors import GenerationError, TransferError
from tiered.tiers.directory import make_groups, read_document, sync_path, write_document
from tiered.units import PAGE_BYTES, MiB, round_up
from tiered.zarr_layout import array_document, document_chunk_bytes, own_attributes

#: Most bytes of a block that are in working memory at once.
PIECE_BYTES = 8 * MiB
#: Largest chunk file of a block whose home is not a file tier.
_CHUNK_BYTES = 512 * MiB
_NUM_FLUSH_THREADS = 4  # a drive flushes several files at once for the price of one


def array_bytes(spec: BlockSpec) -> int:
    """Return the size of the files that ``write_contents`` makes."""
    chunk_bytes = _chunk_bytes(spec)
    return chunk_bytes * len(range(0, spec.nbytes, chunk_bytes))


def _chunk_bytes(spec: BlockSpec) -> int:
    return min(round_up(max(spec.nbytes, 1), PAGE_BYTES), _CHUNK_BYTES)


def write_contents(root: Path, spec: BlockSpec, tensor: torch.Tensor) -> tuple[str, ...]:
    """Write a block as the array ``<root>/<key>`` and flush its files; return its checksums.

    Args:
        root: folder of a generation. tensor: the block's contents, contiguous, on any device.

    Raises:
        TransferError: the drive refused.
    """
    chunk_bytes = _chunk_bytes(spec)
    folder = root / spec.key
    digest = PieceDigest()
    try:
        make_groups(root, spec.key)
        write_document(folder, array_document(spec.key, spec.shape, spec.dtype, chunk_bytes))
        (folder / "c").mkdir()
        data = byte_view(tensor)
        starts = range(0, spec.nbytes, chunk_bytes)
        for number, start in enumerate(starts):
            _write_file(folder / "c" / str(number), data[start : start + chunk_bytes], chunk_bytes, digest)
    except OSError as error:
        path = str(error.filename or folder)
        text = f"block '{spec.key}' cannot be written: {error.strerror}"
        raise TransferError(text, tier=spec.home, path=path, errno=error.errno) from error
    return digest.checksums()


def _write_file(path: Path, data: torch.Tensor, nbytes: int, digest: PieceDigest) -> None:
    """Write one chunk file, padded with zeros to ``nbytes``; a full drive shows before the first byte."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        for start in range(0, data.numel(), PIECE_BYTES):
            piece = memoryview(data[start : start + PIECE_BYTES].cpu().numpy().data)
            digest.update(piece)
            written = 0
            while written < len(piece):
                written += os.pwrite(fd, piece[written:], start + written)
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # it does not know the file by itself
    finally:
        os.close(fd)


def read_contents(
    folder: Path, spec: BlockSpec, use: Callable[[int, bytearray], None] | None = None
) -> tuple[str, ...]:
    """Read a block's array piece by piece and return its checksums.

    Args:
        folder: of the array. use: called with the byte offset and every piece in turn; it must not keep the piece.

    Raises:
        GenerationError: a part is missing. TransferError: the drive refused.
    """
    digest = PieceDigest()
    path = folder
    try:
        for path, start, nbytes in _files(folder, spec):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset, piece in _pieces(fd, nbytes):
                    digest.update(piece)
                    if use is not None:
                        use(start + offset, piece)
            finally:
                os.close(fd)
    except FileNotFoundError as error:
        raise GenerationError(f"a part of block '{spec.key}' is missing: '{path}'. Open another generation") from error
    except OSError as error:
        text = f"block '{spec.key}' cannot be read: {error.strerror}"
        raise TransferError(text, tier=spec.home, path=str(path), errno=error.errno) from error
    return digest.checksums()


def flush_contents(arrays: Sequence[tuple[Path, BlockSpec]]) -> None:
    """Return once the contents of blocks, in arrays in these folders, survive a power cut.

    Raises:
        GenerationError: a part is missing. TransferError: the drive refused.
    """
    files = [(path, spec) for folder, spec in arrays for path, _, _ in _files(folder, spec)]
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


def place_in(folder: Path, spec: BlockSpec, start: int, stop: int) -> str:
    """Return where bytes ``start`` to ``stop`` of a block's array lie, for a message: files and ranges in them."""
    places = []
    for path, offset, nbytes in _files(folder, spec):
        first, last = max(start, offset), min(stop, offset + nbytes)
        if first < last:
            places.append(f"'{os.path.realpath(path)}' bytes {first - offset} to {last - offset}")
    return ", ".join(places)


def _files(folder: Path, spec: BlockSpec) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset of its contents in the block, bytes of contents) of an array."""
    document = read_document(folder)
    if own_attributes(document) is None:
        raise GenerationError(f"block '{spec.key}' has no array in '{folder}'. Open another generation")
    chunk_bytes = document_chunk_bytes(document)
    for number, start in enumerate(range(0, spec.nbytes, chunk_bytes)):
        yield folder / "c" / str(number), start, min(chunk_bytes, spec.nbytes - start)


def _pieces(fd: int, nbytes: int) -> Iterator[tuple[int, bytearray]]:
    """Yield (offset, bytes) of an open file; a file that is too short ends early and fails its checksum."""
    for offset in range(0, nbytes, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, nbytes - offset))
        have = 0
        while have < len(piece):
            count = os.preadv(fd, [memoryview(piece)[have:]], offset + have)
            if count == 0:
                return
            have += count
        yield offset, piece
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads it again through the kernel's cache


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as 1-D uint8, no copy."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


def sync_tree(root: Path, top: Path) -> None:
    """Flush all documents and folders below ``root``, innermost first, and the folders from there up to ``top``."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            if not name.isdigit():
                sync_path(Path(folder, name))
        sync_path(Path(folder))
    folder_above = root
    while folder_above != top:
        folder_above = folder_above.parent
        sync_path(folder_above)
