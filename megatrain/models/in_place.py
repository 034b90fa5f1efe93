"""Frozen weights read in place: blocks whose home is the model's folder, not a second copy of it.

A block of frozen weights is put together from ranges of the folder's safetensors files each time that it is fetched:
read past the kernel's cache into a small buffer, brought into the dtype that layers compute in, and laid where the
unit's layout has it. The bits are those of a copy at home elsewhere. Nothing is written to the folder; a file that
changes under the run ends it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.models.folder import ModelFolder, ModelFolderError, TensorRecord, tensor_bytes
from megatrain.models.layout import UnitLayout
from megatrain.precision import high_half
from tiered.errors import TransferError
from tiered.ext import ReadPart, drop_cached, open_direct, read_all
from tiered.units import PAGE_BYTES, MiB, round_up

if TYPE_CHECKING:
    from megatrain.models.load import WeightLoader

__all__ = ["NUM_READERS", "FileRange", "FolderSource", "buffer_bytes", "layouts_in_place"]

#: Parts of blocks that are read at once.
NUM_READERS = 4
_PIECE_BYTES = 1 * MiB
_DECODING = 20  # bytes for each number: an index, what it stands for, its scale


@dataclass(frozen=True, slots=True)
class FileRange:
    """Some rows of a tensor in a file, and the same rows in a block: elements at `offset` with `stride`."""

    record: TensorRecord
    skip_nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def layouts_in_place(loader: WeightLoader, layouts: Iterable[UnitLayout]) -> dict[str, tuple[FileRange, ...]]:
    """Return the frozen layouts that can be read from the folder range by range, with their ranges.

    Left out are those with a weight that the files have in another form than the model, or do not have.
    """
    found = {}
    for layout in layouts:
        ranges = None if layout.trainable else _ranges(loader, layout)
        if ranges is not None:
            found[layout.name] = ranges
    return found


def _ranges(loader: WeightLoader, layout: UnitLayout) -> tuple[FileRange, ...] | None:
    on_meta = torch.empty(layout.num_elements, device="meta")
    found: list[FileRange] = []
    for entry in layout.entries:
        regions = loader.regions(entry.name)
        if regions is None:
            return None
        for region in regions:
            record = loader.origin.folder.records[region.source]
            is_row_of_file = region.source_strides == torch.empty(region.shape, device="meta").stride()
            if not record.dtype.is_floating_point or not is_row_of_file:
                return None
            place = torch.as_strided(on_meta, region.shape, region.target_strides, entry.offset + region.target_start)
            if record.decoder is not None and record.decoder.is_transposed:
                if region.num_elements != record.numel:
                    return None
                place = place.transpose(-1, -2)
            offset = record.offset + region.source_start * record.dtype.itemsize
            nbytes = region.num_elements * record.dtype.itemsize
            found += _cut(replace(record, shape=tuple(place.shape), offset=offset, nbytes=nbytes), place)
    return tuple(found)


def _cut(record: TensorRecord, place: Tensor) -> Iterator[FileRange]:
    """Cut a tensor into ranges of whole rows, of about ``_PIECE_BYTES`` each."""
    if record.numel == 0:
        return
    if place.dim() == 0 or place.is_contiguous():
        place = place.reshape(-1)
    row_nbytes = record.nbytes // place.shape[0]
    if row_nbytes > _PIECE_BYTES and place.dim() > 1:
        for number, row in enumerate(place):
            offset = record.offset + number * row_nbytes
            yield from _cut(replace(record, shape=tuple(row.shape), offset=offset, nbytes=row_nbytes), row)
        return
    step = max(1, _PIECE_BYTES // row_nbytes)
    for first in range(0, place.shape[0], step):
        rows = place[first : first + step]
        yield FileRange(record, first * row_nbytes, tuple(rows.shape), rows.stride(), int(rows.storage_offset()))


def buffer_bytes(ranges: Iterable[Sequence[FileRange]], dtype: torch.dtype) -> int:
    """Return the RAM that the readers take beside the blocks: each a buffer, and its piece in other dtypes."""
    ranges = list(ranges)
    most = 3 * _PIECE_BYTES if any(not several for several in ranges) else 0  # of a folder that nobody has looked into
    for each in (one for several in ranges for one in several):
        is_rounded = dtype == torch.bfloat16 and each.record.dtype != dtype
        converted = each.numel * (torch.float32.itemsize + dtype.itemsize) if is_rounded else 0
        most = max(most, _window(each)[1] + PAGE_BYTES + converted)
    return round_up(NUM_READERS * most, PAGE_BYTES)


def _window(each: FileRange) -> tuple[int, int]:
    """Return (start, bytes) of the whole pages of the file around a range; for a quantized one what decoding takes."""
    if each.record.decoder is not None:
        return 0, _DECODING * each.numel
    start = each.record.offset + each.skip_nbytes
    first = start // PAGE_BYTES * PAGE_BYTES
    return first, round_up(start + each.numel * each.record.dtype.itemsize - first, PAGE_BYTES)


class FolderSource:
    """A ``BlockSource`` of frozen weights. Thread-safe.

    Args:
        folder: of the model.
        blocks: key of a block -> its layout.
        ranges: by name of a layout.
        dtype: of the blocks.

    Raises:
        ModelFolderError: a file is gone.
    """

    def __init__(
        self,
        folder: ModelFolder,
        blocks: Mapping[str, UnitLayout],
        ranges: Mapping[str, Sequence[FileRange]],
        dtype: torch.dtype,
    ) -> None:
        self._folder = folder
        self._blocks, self._ranges, self._dtype = blocks, ranges, dtype
        self.block_bytes = {key: layout.num_elements * dtype.itemsize for key, layout in blocks.items()}
        self._identity: dict[Path, tuple[int, ...]] = {}
        for layout in blocks.values():
            for each in ranges[layout.name]:
                decoder = each.record.decoder
                for name in (each.record.name,) if decoder is None else decoder.parts:
                    self._identify(folder.stored[name].file)
        self._buffers = threading.local()
        self._is_direct = True
        self._checked: set[tuple[str, int]] = set()

    def _identify(self, path: Path) -> None:
        if path not in self._identity:
            try:
                self._identity[path] = _identity(os.stat(path))
            except OSError as error:
                raise ModelFolderError(path, f"cannot be read: {error.strerror}. Bring it back") from error

    def parts(self, key: str) -> Sequence[ReadPart]:
        """Return what reads a block; see ``BlockSource``."""
        layout = self._blocks[key]
        reads = [partial(self._read, key, number, each) for number, each in enumerate(self._ranges[layout.name])]
        return [partial(self._zero_padding, layout), *reads]

    def _zero_padding(self, layout: UnitLayout, into: Tensor) -> None:
        flat = into.view(self._dtype)
        ends = [*(entry.offset for entry in layout.entries[1:]), layout.num_elements]
        for entry, end in zip(layout.entries, ends, strict=True):
            flat[entry.offset + entry.numel : end].zero_()

    def _read(self, key: str, number: int, each: FileRange, into: Tensor) -> None:
        piece = self._bytes(each).view(each.record.dtype) if each.record.decoder is None else self._decoded(each)
        place = torch.as_strided(into.view(self._dtype), each.shape, each.stride, each.offset)
        if piece.dtype != self._dtype and self._dtype == torch.bfloat16:
            rounded = torch.empty(piece.numel(), dtype=torch.bfloat16)
            high_half(piece.float(), rounded)
            piece = rounded
        place.copy_(piece.view(each.shape))
        if (key, number) not in self._checked:  # once: the files stay as they are
            low, high = torch.aminmax(place)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise TransferError(
                    f"tensor {each.record.name} holds infinite values or NaN. Take an undamaged model",
                    tier="folder",
                    path=str(each.record.file),
                )
            self._checked.add((key, number))

    def _decoded(self, each: FileRange) -> Tensor:
        decoder = each.record.decoder
        assert decoder is not None
        first = (each.record.offset + each.skip_nbytes) // each.record.dtype.itemsize
        return decoder.decode(first, each.numel, self._stored)

    def _stored(self, name: str, first: int, nbytes: int) -> Tensor:
        part = FileRange(self._folder.stored[name], first, (nbytes,), (1,), 0)
        return self._bytes(replace(part, record=replace(part.record, dtype=torch.uint8))).clone()

    def _bytes(self, each: FileRange) -> Tensor:
        """Read a range past the kernel's cache; valid until the thread reads its next one."""
        first, nbytes = _window(each)
        window = self._buffer(nbytes)[:nbytes]
        path = each.record.file
        fd = open_direct(path, os.O_RDONLY, self._stop_direct) if self._is_direct else os.open(path, os.O_RDONLY)
        try:
            self._check_same(path, os.fstat(fd))
            found = read_all(fd, tensor_bytes(window), first, self._stop_direct)
            if not self._is_direct:  # else the kernel would keep a copy of what the RAM tier accounts for
                drop_cached(fd, first, nbytes)
        finally:
            os.close(fd)
        start = each.record.offset + each.skip_nbytes - first
        stop = start + each.numel * each.record.dtype.itemsize
        if found < stop:
            raise self._changed(path)
        return window[start:stop] if start % each.record.dtype.itemsize == 0 else window[start:stop].clone()

    def _buffer(self, nbytes: int) -> Tensor:
        """Return the thread's own buffer, on a page."""
        held: Tensor | None = getattr(self._buffers, "bytes", None)
        if held is None or held.numel() < nbytes:
            whole = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
            held = self._buffers.bytes = whole[-whole.data_ptr() % PAGE_BYTES :]
        return held

    def _stop_direct(self) -> None:
        self._is_direct = False  # the file system does not do it

    def _check_same(self, path: Path, status: os.stat_result) -> None:
        if _identity(status) != self._identity[path]:
            raise self._changed(path)

    def _changed(self, path: Path) -> TransferError:
        return TransferError(
            "the file was changed or replaced while a run reads its weights from it. Bring the original back and start "
            "the run again: it continues from its last checkpoint",
            tier="folder",
            path=str(path),
        )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
