"""Source that reads frozen weights from the model's folder, so that no tier needs a second copy of them.

Each fetch of a frozen block assembles the block from ranges of the folder's safetensors files. A range is read into a
small buffer, bypassing the page cache. It is then cast to the compute dtype and copied into the block. The block is
bit-identical to a block that is stored in a tier. Nothing is written to the folder. If a file changes during the run,
the run ends with an error.

Blocks of a quantized folder contain the unchanged packed bytes (``packed.py``), whether or not a tier stores them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.base.layout import UnitLayout
from megatrain.base.precision import encode_high_half
from megatrain.models.folder import ModelFolderError, TensorRecord, tensor_bytes
from megatrain.models.load import WeightLoader
from megatrain.models.packed import Packing, pack, split_rows
from tiered.errors import TransferError
from tiered.ext import ReadPart, drop_cached, open_direct, read_all
from tiered.units import PAGE_BYTES, MiB, round_up

__all__ = ["NUM_READERS", "FolderSource", "FrozenBlock", "buffer_bytes", "frozen_blocks"]

#: Number of ranges that are read concurrently.
NUM_READERS = 4
_PIECE_BYTES = 1 * MiB


@dataclass(frozen=True, slots=True)
class FileRange:
    """Rows of a tensor in a file, and their position in a block.

    Attributes:
        record: The tensor in the file. Its dtype is uint8 for packed bytes, which are copied unchanged.
        skip_nbytes: Offset of the rows in the tensor, in bytes.
        shape: Shape of the rows.
        stride: Strides of the rows in the block, in elements.
        offset: Offset of the rows in the block, in elements (in bytes if packed).
        is_finite: Function that returns whether packed bytes decode to finite numbers, or None if not packed.
    """

    record: TensorRecord
    skip_nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_finite: Callable[[Tensor], bool] | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class FrozenBlock:
    """File ranges and decoder from which a block of frozen weights is assembled.

    Attributes:
        ranges: File ranges that fill the block. Empty if the folder has not been read.
        gaps: Byte ranges of the block that no file range fills. They are set to zero.
        packing: Decoder for a block of packed bytes, or None if the block contains the weights themselves.
    """

    layout: UnitLayout
    ranges: tuple[FileRange, ...]
    gaps: tuple[range, ...]
    nbytes: int
    packing: Packing | None = None


def frozen_blocks(loader: WeightLoader, layouts: Iterable[UnitLayout], dtype: torch.dtype) -> dict[str, FrozenBlock]:
    """Return a block for each frozen layout that can be read from the folder range by range, by layout name.

    A layout is skipped if the files lack one of its weights or store it in a form that needs a conversion.

    Args:
        layouts: Layouts of the model. Trained layouts are skipped.
        dtype: Compute dtype.
    """
    blocks = {}
    for layout in layouts:
        block = None if layout.trainable else _make_block(loader, layout, dtype)
        if block is not None:
            blocks[layout.name] = block
    return blocks


def unread_block(layout: UnitLayout, dtype: torch.dtype) -> FrozenBlock:
    """Return a block without ranges. Plans use it if the folder's weights have not been read."""
    return FrozenBlock(layout, (), (), layout.num_elements * dtype.itemsize)


def _make_block(loader: WeightLoader, layout: UnitLayout, dtype: torch.dtype) -> FrozenBlock | None:
    folder = loader.origin.folder
    packing = pack(layout, loader.regions, folder, dtype)
    if packing is None:
        return None
    ranges: list[FileRange] = []
    if not packing.weights:
        for weight in packing.plain_weights:
            record, view = weight.source, weight.target.view()
            ranges += _split_ranges(record, view)
        return FrozenBlock(layout, tuple(ranges), _find_gaps(layout, dtype), layout.num_elements * dtype.itemsize)
    for weight in packing.plain_weights:
        start = weight.offset // dtype.itemsize
        ranges += _split_ranges(weight.source, torch.empty(start + weight.source.numel, device="meta")[start:])
    for (name, span), (offset, decoder) in packing.byte_ranges.items():
        tensor = folder.file_records[name]
        start = tensor.offset + span.start
        record = replace(tensor, dtype=torch.uint8, shape=(len(span),), offset=start, nbytes=len(span))
        view = torch.empty(offset + len(span), dtype=torch.uint8, device="meta")[offset:]
        is_finite = partial(decoder.is_finite, name)
        ranges += (replace(file_range, is_finite=is_finite) for file_range in _split_ranges(record, view))
    return FrozenBlock(layout, tuple(ranges), packing.gaps, packing.nbytes, packing)


def _split_ranges(record: TensorRecord, view: Tensor) -> Iterator[FileRange]:
    """Split a tensor into ranges of whole rows. Each range has about ``_PIECE_BYTES``."""
    for start, rows in split_rows(view, _PIECE_BYTES // record.dtype.itemsize):
        skip_nbytes = start * record.dtype.itemsize
        yield FileRange(record, skip_nbytes, tuple(rows.shape), rows.stride(), int(rows.storage_offset()))


def _find_gaps(layout: UnitLayout, dtype: torch.dtype) -> tuple[range, ...]:
    ends = [*(entry.offset for entry in layout.entries[1:]), layout.num_elements]
    size = dtype.itemsize
    gaps = (
        range((entry.offset + entry.numel) * size, end * size) for entry, end in zip(layout.entries, ends, strict=True)
    )
    return tuple(gap for gap in gaps if gap)


def buffer_bytes(blocks: Iterable[FrozenBlock], dtype: torch.dtype) -> int:
    """Return the bytes of RAM that all readers need for buffers and converted pieces, excluding the blocks."""
    blocks = list(blocks)
    max_bytes = 3 * _PIECE_BYTES if any(not block.ranges for block in blocks) else 0  # estimate if the folder is unread
    for file_range in (r for block in blocks for r in block.ranges):
        is_rounded = dtype == torch.bfloat16 and file_range.record.dtype not in (dtype, torch.uint8)
        cast_bytes = file_range.numel * (torch.float32.itemsize + dtype.itemsize) if is_rounded else 0
        check_bytes = 0 if file_range.is_finite is None else 6 * file_range.numel  # temporary tensors in `is_finite`
        max_bytes = max(max_bytes, _page_window(file_range)[1] + PAGE_BYTES + cast_bytes + check_bytes)
    return round_up(NUM_READERS * max_bytes, PAGE_BYTES)


def _page_window(file_range: FileRange) -> tuple[int, int]:
    """Return (start, number of bytes) of the whole file pages that contain a range."""
    start = file_range.record.offset + file_range.skip_nbytes
    page_start = start // PAGE_BYTES * PAGE_BYTES
    return page_start, round_up(start + file_range.numel * file_range.record.dtype.itemsize - page_start, PAGE_BYTES)


class FolderSource:
    """``BlockSource`` of frozen weights. Thread-safe.

    Args:
        blocks: Blocks by key.
        dtype: dtype of a block's weights if they are not packed.

    Raises:
        ModelFolderError: A file cannot be read.
    """

    def __init__(self, blocks: Mapping[str, FrozenBlock], dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype
        self.block_bytes = {key: block.nbytes for key, block in blocks.items()}
        self._identities: dict[Path, tuple[int, ...]] = {}
        for path in {file_range.record.file for block in blocks.values() for file_range in block.ranges}:
            try:
                self._identities[path] = _file_identity(os.stat(path))
            except OSError as error:
                raise ModelFolderError(path, f"cannot be read: {error.strerror}. Restore it") from error
        self._buffers = threading.local()
        self._is_direct = True
        self._checked_ranges: set[tuple[str, int]] = set()

    def parts(self, key: str) -> Sequence[ReadPart]:
        """Return a block's readers. See ``BlockSource``."""
        block = self._blocks[key]
        reads = [partial(self._read, key, index, file_range) for index, file_range in enumerate(block.ranges)]
        return [partial(self._zero_gaps, block.gaps), *reads]

    @staticmethod
    def _zero_gaps(gaps: Sequence[range], out: Tensor) -> None:
        for gap in gaps:
            out[gap.start : gap.stop].zero_()

    def _read(self, key: str, index: int, file_range: FileRange, out: Tensor) -> None:
        dtype = torch.uint8 if file_range.record.dtype == torch.uint8 else self._dtype
        piece = self._read_bytes(file_range).view(file_range.record.dtype)
        view = torch.as_strided(out.view(dtype), file_range.shape, file_range.stride, file_range.offset)
        if piece.dtype != dtype and dtype == torch.bfloat16:
            cast_piece = torch.empty(piece.numel(), dtype=torch.bfloat16)
            encode_high_half(piece.float(), cast_piece)
            piece = cast_piece
        view.copy_(piece.view(file_range.shape))
        if (key, index) not in self._checked_ranges:  # check only once, because a changed file ends the run
            if not (_is_finite(view) if file_range.is_finite is None else file_range.is_finite(view)):
                raise TransferError(
                    f"tensor {file_range.record.name} contains infinite values or NaN. Use an undamaged model",
                    tier="folder",
                    path=str(file_range.record.file),
                )
            self._checked_ranges.add((key, index))

    def _read_bytes(self, file_range: FileRange) -> Tensor:
        """Read a range, bypassing the page cache. The result is valid until this thread reads again."""
        page_start, nbytes = _page_window(file_range)
        window = self._buffer(nbytes)[:nbytes]
        path = file_range.record.file
        fd = open_direct(path, os.O_RDONLY, self._disable_direct) if self._is_direct else os.open(path, os.O_RDONLY)
        try:
            self._check_unchanged(path, os.fstat(fd))
            num_read = read_all(fd, tensor_bytes(window), page_start, self._disable_direct)
            if not self._is_direct:  # drop the cached pages, which the RAM tier does not count
                drop_cached(fd, page_start, nbytes)
        finally:
            os.close(fd)
        start = file_range.record.offset + file_range.skip_nbytes - page_start
        stop = start + file_range.numel * file_range.record.dtype.itemsize
        if num_read < stop:
            raise self._changed_error(path)
        return window[start:stop] if start % file_range.record.dtype.itemsize == 0 else window[start:stop].clone()

    def _buffer(self, nbytes: int) -> Tensor:
        """Return this thread's page-aligned buffer. It has at least ``nbytes`` bytes."""
        buffer: Tensor | None = getattr(self._buffers, "bytes", None)
        if buffer is None or buffer.numel() < nbytes:
            storage = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
            buffer = self._buffers.bytes = storage[-storage.data_ptr() % PAGE_BYTES :]
        return buffer

    def _disable_direct(self) -> None:
        self._is_direct = False  # the file system does not support direct reads

    def _check_unchanged(self, path: Path, status: os.stat_result) -> None:
        if _file_identity(status) != self._identities[path]:
            raise self._changed_error(path)

    def _changed_error(self, path: Path) -> TransferError:
        return TransferError(
            "the file was changed or replaced during a run that reads its weights from it. Restore the original file "
            "and start the run again, which continues from its last checkpoint",
            tier="folder",
            path=str(path),
        )


def _file_identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_finite(view: Tensor) -> bool:
    minimum, maximum = torch.aminmax(view)
    return bool(torch.isfinite(minimum) and torch.isfinite(maximum))
