"""Blocks that contain the packed bytes of quantized weights, which are decoded in the compute tier.

In a quantized folder, a frozen layout is one block of bytes. It contains the unchanged packed bytes of the quantized
weights, and all other weights in the compute dtype. Tiers and links handle only this small form. Decoded weights exist
only in the compute tier, for one tick. ``Packing.decode`` computes them from the leased block. The result is
bit-identical to decoding on the host. ``in_place.py`` reads such blocks from files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megatrain.base.layout import UnitLayout
from megatrain.base.precision import encode_high_half
from megatrain.models.folder import ModelFolder, TensorRecord
from megatrain.models.quantized import Decoder
from megatrain.models.regions import Region
from tiered.units import round_up

__all__ = ["Packing", "pack", "split_rows"]

#: Alignment of all parts of a block: a GPU cache line, which is a multiple of every element size.
_ALIGNMENT_BYTES = 128
#: Number of elements to decode at a time. Small enough for CPU caches, or large enough to keep a GPU busy.
_NUMBERS_ON_CPU, _NUMBERS_ON_DEVICE = 1 << 18, 1 << 24
_DECODING_BYTES = 20  # temporary bytes per decoded element: index, value, scale, and the value's two halves


@dataclass(frozen=True, slots=True)
class Target:
    """Location of elements in a layout's flat weights."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor | None = None) -> Tensor:
        """Return the view of ``tensor`` at this location. If ``tensor`` is None, return a view of a meta tensor."""
        if tensor is None:
            span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
            tensor = torch.empty(self.offset + span, device="meta")
        return torch.as_strided(tensor, self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A box of elements from a tensor that is not quantized.

    Attributes:
        source: Location of the box in the file.
        target: Location of the elements in the layout's weights.
        offset: First byte of the box in a block of packed bytes. The box is contiguous there.
    """

    source: TensorRecord
    target: Target
    offset: int


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A range of a quantized tensor's elements.

    Attributes:
        offsets: Byte offset in the block of each tensor that the decoder reads. If the block contains only a range of
            the tensor, this is the offset at which the whole tensor would start.
        start: Index of the range's first element in the tensor.
        target: Location of the decoded elements in the layout's weights.
    """

    decoder: Decoder
    offsets: tuple[int, ...]
    start: int
    target: Target


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of a block of packed bytes. Implements ``Encoding``.

    Attributes:
        plain_weights: Weights that are not quantized.
        weights: Quantized weights. Empty for a block without packed bytes.
        byte_ranges: Offset in the block and decoder, by (name of a tensor in the files, range of its bytes).
        gaps: Byte ranges of the block that are unused.
        nbytes: Size of the block.
        num_elements: Length of the layout.
        dtype: Compute dtype.
    """

    plain_weights: tuple[PlainWeight, ...]
    weights: tuple[PackedWeight, ...]
    byte_ranges: Mapping[tuple[str, range], tuple[int, Decoder]]
    gaps: tuple[range, ...]
    nbytes: int
    num_elements: int
    dtype: torch.dtype

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of additional blocks with encoded weights. Empty, because the layout's own block contains all bytes."""
        return ()

    def decode(self, block: Tensor, weights: Tensor) -> None:
        """Decode a block to a layout's weights. Does not synchronize with the device.

        Elements between parameters are unchanged.

        Args:
            block: ``(nbytes,)``, uint8.
            weights: Output on the same device, ``(num_elements,)``, ``dtype``.
        """
        with torch.no_grad():
            for plain_weight in self.plain_weights:
                count = plain_weight.source.numel
                values = block[plain_weight.offset : plain_weight.offset + count * self.dtype.itemsize].view(self.dtype)
                plain_weight.target.view(weights).copy_(values.view(plain_weight.target.shape))
            chunk_size = _decode_chunk_size(block.device)
            for weight in self.weights:
                for start, piece in split_rows(weight.target.view(weights), chunk_size):
                    piece.copy_(self._decode(weight, weight.start + start, piece.numel(), block).view(piece.shape))

    def decoding_bytes(self, device: torch.device) -> int:
        """Return the peak number of bytes that ``decode`` allocates. The block and the weights are not counted."""
        chunk_size = _decode_chunk_size(device)
        targets = {replace(weight.target, offset=0) for weight in self.weights}
        pieces = (piece for target in targets for _, piece in split_rows(target.view(), chunk_size))
        return _DECODING_BYTES * max((piece.numel() for piece in pieces), default=0)

    def _decode(self, weight: PackedWeight, start: int, count: int, block: Tensor) -> Tensor:
        spans = zip(weight.offsets, weight.decoder.spans(start, count), strict=True)
        numbers = weight.decoder.numbers(start, count, [block[base + s.start : base + s.stop] for base, s in spans])
        if self.dtype != torch.bfloat16:
            return numbers
        output = torch.empty_like(numbers, dtype=torch.bfloat16)
        encode_high_half(numbers, output)  # round like all other loaded weights
        return output


def split_rows(tensor: Tensor, num_elements: int) -> Iterator[tuple[int, Tensor]]:
    """Split a view into pieces of whole rows. Yield (index of the first element, piece) for each piece.

    Args:
        tensor: View of a flat tensor, with any strides.
        num_elements: Approximate number of elements in a piece.
    """
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0 or tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_size = tensor.numel() // tensor.shape[0]
    if row_size > num_elements and tensor.dim() > 1:
        for index in range(tensor.shape[0]):
            yield from ((index * row_size + start, piece) for start, piece in split_rows(tensor[index], num_elements))
        return
    step = max(1, num_elements // row_size)
    for start in range(0, tensor.shape[0], step):
        yield start * row_size, tensor[start : start + step]


def pack(
    layout: UnitLayout,
    find_regions: Callable[[str], Sequence[Region] | None],
    folder: ModelFolder,
    dtype: torch.dtype,
) -> Packing | None:
    """Return a layout's packing, or None if a weight is missing or must be converted as a whole tensor.

    Args:
        find_regions: Function that returns the regions of the folder's tensors that form a parameter.
        dtype: Compute dtype.
    """
    plain_weights: list[PlainWeight] = []
    weights: list[PackedWeight] = []
    byte_ranges: dict[tuple[str, range], tuple[int, Decoder]] = {}
    gaps: list[range] = []
    end = 0

    def allocate(nbytes: int) -> int:
        nonlocal end
        start = round_up(end, _ALIGNMENT_BYTES)
        if start > end:
            gaps.append(range(end, start))
        end = start + nbytes
        return start

    for entry in layout.entries:
        regions = find_regions(entry.parameter)
        if regions is None:
            return None
        stop = entry.start + entry.numel
        for region in chain.from_iterable(region.clip(entry.start, stop) for region in regions):
            record = folder.records[region.source]
            is_contiguous = region.source_strides == torch.empty(region.shape, device="meta").stride()
            if not record.dtype.is_floating_point or not is_contiguous:
                return None
            target = Target(region.shape, region.target_strides, entry.offset + region.target_start - entry.start)
            decoder = record.decoder
            if decoder is None:
                offset = record.offset + region.source_start * record.dtype.itemsize
                nbytes = region.num_elements * record.dtype.itemsize
                box = replace(record, shape=region.shape, offset=offset, nbytes=nbytes)
                plain_weights.append(PlainWeight(box, target, allocate(region.num_elements * dtype.itemsize)))
                continue
            if decoder.is_transposed:
                if not _has_whole_matrices(region, record):
                    return None
                *shape, rows, columns = target.shape
                *strides, row_stride, column_stride = target.stride
                target = replace(target, shape=(*shape, columns, rows), stride=(*strides, column_stride, row_stride))
            # If the weight is split among several layouts, keep only the bytes that this layout needs.
            spans = decoder.spans(region.source_start, region.num_elements)
            offsets = []
            for name, span in zip(decoder.packed_names, spans, strict=True):
                byte_range = span if entry.part_of else range(folder.file_records[name].nbytes)
                if (name, byte_range) not in byte_ranges:
                    byte_ranges[name, byte_range] = allocate(len(byte_range)), decoder
                offsets.append(byte_ranges[name, byte_range][0] - byte_range.start)
            weights.append(PackedWeight(decoder, tuple(offsets), region.source_start, target))
    return Packing(tuple(plain_weights), tuple(weights), byte_ranges, tuple(gaps), end, layout.num_elements, dtype)


def _has_whole_matrices(region: Region, record: TensorRecord) -> bool:
    """Return whether a contiguous region consists of whole matrices of a tensor."""
    if len(region.shape) < 2 or len(record.shape) < 2:
        return False
    matrix = record.shape[-2:]
    return region.shape[-2:] == matrix and region.source_start % max(1, matrix[0] * matrix[1]) == 0


def _decode_chunk_size(device: torch.device) -> int:
    return _NUMBERS_ON_CPU if device.type == "cpu" else _NUMBERS_ON_DEVICE
