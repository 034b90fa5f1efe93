"""Positions of a unit's tensors in one flat block.

A unit's blocks of different kinds (weight, low half, m, v, gradient) have the same element offsets, so they share one
layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

__all__ = [
    "ALIGNMENT_ELEMENTS",
    "MAX_PARTS",
    "PART_ALIGNMENT_ELEMENTS",
    "PART_ELEMENTS",
    "Piece",
    "SplitTensor",
    "TensorEntry",
    "UnitLayout",
    "build_layout",
    "build_layouts",
    "entries_within",
    "pieces",
    "split_into_parts",
    "views",
    "views_of_parts",
]

ALIGNMENT_ELEMENTS = 1024
"""Every tensor starts at a multiple of this many elements: 4 KiB in fp32, the alignment of O_DIRECT transfers."""

PART_ELEMENTS = 16 << 20
"""Elements of a part: 64 MiB in fp32. A constant, so that the set of blocks depends on the model, not on memory."""
MAX_PARTS = 1024
"""Approximate limit on the parts of a model; a model that would exceed it gets larger parts."""
PART_ALIGNMENT_ELEMENTS = 65_536
"""Parts begin at multiples of this number of elements, which is the size of one partial sum of a norm."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of a parameter in a flat block.

    Attributes:
        name: Full parameter name as in `model.named_parameters()`.
        shape: Shape of the parameter; `()` for a scalar.
        offset: Index of its first element in the block, a multiple of `ALIGNMENT_ELEMENTS`.
        part_of: The model's parameter, if this entry is only a range of its first dimension. "" for a whole parameter.
        start: Index of this entry's first element in the model's parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    part_of: str = ""
    start: int = 0

    @property
    def parameter(self) -> str:
        """Name of the model's parameter."""
        return self.part_of or self.name

    @property
    def numel(self) -> int:
        """Number of elements in this entry."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Layout of one block group's parameters.

    Attributes:
        name: Name of the block group: the unit's name, or `<unit>.frozen` for the frozen part of a partly frozen unit.
        entries: Locations of the parameters in definition order, without overlap.
        num_elements: Length of the block in elements including padding, a multiple of `ALIGNMENT_ELEMENTS`.
        trainable: Whether the group has gradients and optimizer state.
        parts: Consecutive ranges of elements. Each part has separate blocks for state and gradient. A small group has
            only one part.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    num_elements: int
    trainable: bool
    parts: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", (range(self.num_elements),))

    @property
    def first_rows(self) -> tuple[int, ...]:
        """First row of each part. Empty unless the group is one matrix that is split at row boundaries."""
        if len(self.entries) != 1 or len(self.entries[0].shape) != 2:
            return ()
        width = self.entries[0].shape[1]
        if not width or any(part.start % width for part in self.parts):
            return ()
        return tuple(part.start // width for part in self.parts)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without padding."""
        return sum(entry.numel for entry in self.entries)


def build_layout(name: str, parameters: Iterable[tuple[str, Sequence[int]]], trainable: bool) -> UnitLayout:
    """Return a layout in which the parameters follow each other at aligned offsets.

    Args:
        parameters: `(full name, shape)` of every parameter, in definition order.
        trainable: Whether the group has gradients and optimizer state.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for parameter_name, shape in parameters:
        entry = TensorEntry(parameter_name, tuple(int(size) for size in shape), offset)
        entries.append(entry)
        offset += -(-entry.numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
    return UnitLayout(name, tuple(entries), offset, trainable)


def split_into_parts(layouts: Iterable[UnitLayout]) -> list[UnitLayout]:
    """Split each layout that is larger than a part, and return all layouts.

    If a model would have more than `MAX_PARTS` parts, larger parts are used, because every block takes time to plan and
    to lease.
    """
    all_layouts = list(layouts)
    num_elements = sum(layout.num_elements for layout in all_layouts)
    part_elements = PART_ELEMENTS * max(1, -(-num_elements // (PART_ELEMENTS * MAX_PARTS)))
    return [replace(layout, parts=_parts(layout, part_elements)) for layout in all_layouts]


def _parts(layout: UnitLayout, part_elements: int) -> tuple[range, ...]:
    """Split a layout into ranges of at most `part_elements`."""
    assert part_elements % PART_ALIGNMENT_ELEMENTS == 0, part_elements
    starts = [0]
    while layout.num_elements - starts[-1] > part_elements:
        starts.append(_part_end(layout.entries, starts[-1], starts[-1] + part_elements))
    ends = [*starts[1:], layout.num_elements]
    return tuple(range(start, stop) for start, stop in zip(starts, ends, strict=True))


def _part_end(entries: Sequence[TensorEntry], start: int, limit: int) -> int:
    """Return the end of a part: the last row boundary in the second half of `start` to `limit`, else `limit`.

    A part that consists of whole rows is a matrix, so a gradient can be split without making it contiguous.
    """
    for end in range(limit, (start + limit) // 2, -PART_ALIGNMENT_ELEMENTS):
        entry = next(entry for entry in reversed(entries) if entry.offset <= end)
        offset = end - entry.offset
        if offset >= entry.numel or not entry.shape or offset % entry.shape[-1] == 0:
            return end
    return limit


def build_layouts(path: str, parameters: Mapping[str, nn.Parameter], *, by_dtype: bool = False) -> list[UnitLayout]:
    """Return the layouts of a unit's own parameters, with separate blocks for trained and frozen parameters.

    Args:
        path: Name of the unit and of the first layout.
        parameters: Parameters by full name, in definition order.
        by_dtype: Whether each dtype gets separate blocks.

    Returns:
        Layouts `<unit>` and `<unit>.frozen`, trained parameters first. Other dtypes are in `<unit>.<dtype>` and
            `<unit>.<dtype>.frozen`.
    """
    kinds: dict[tuple[bool, torch.dtype | None], list[tuple[str, torch.Size]]] = {}
    for name, parameter in parameters.items():
        kind = (parameter.requires_grad, parameter.dtype if by_dtype else None)
        kinds.setdefault(kind, []).append((name, parameter.shape))
    layouts = []
    sorted_kinds = sorted(kinds, key=lambda kind: not kind[0])
    for is_trained, dtype in sorted_kinds:
        dtype_suffix = "" if dtype == sorted_kinds[0][1] else f".{str(dtype).removeprefix('torch.')}"
        frozen_suffix = ".frozen" if sorted_kinds[0][0] and not is_trained else ""
        layouts.append(build_layout(f"{path}{dtype_suffix}{frozen_suffix}", kinds[is_trained, dtype], is_trained))
    return layouts


def entries_within(layout: UnitLayout, start: int, stop: int) -> Iterator[tuple[TensorEntry, int, int]]:
    """Yield each parameter in a range of a block, with the start and stop of the parameter's elements in the range.

    Args:
        layout: Layout of the block.
        start: First element of the range.
    """
    for entry in layout.entries:
        begin, end = max(entry.offset, start), min(entry.offset + entry.numel, stop)
        if begin < end:
            yield entry, begin - entry.offset, end - entry.offset


def views(flat: Tensor, layout: UnitLayout) -> dict[str, Tensor]:
    """Return views of `flat` for all parameters, by full name. No data is copied.

    Args:
        flat: 1-D tensor with `layout.num_elements` elements, of any dtype on any device.
    """
    assert flat.dim() == 1 and flat.numel() == layout.num_elements, (
        tuple(flat.shape),
        layout.name,
        layout.num_elements,
    )
    return {entry.name: flat.narrow(0, entry.offset, entry.numel).view(entry.shape) for entry in layout.entries}


@dataclass(frozen=True, slots=True)
class Piece:
    """Section of a parameter within one part: some of its rows, or a range of one row.

    Attributes:
        start: Index of the first element in the part's block.
        rows: Indices along the parameter's first dimension. A scalar has one row.
        columns: Range of elements in a single row. None for whole rows.
    """

    part: int
    start: int
    rows: range
    columns: range | None
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor with the parameter's shape. The result is a view if the row is contiguous."""
        if self.columns is not None:
            row = tensor[self.rows.start] if tensor.dim() else tensor
            return row.reshape(-1)[self.columns.start : self.columns.stop]
        return tensor[self.rows.start : self.rows.stop] if tensor.dim() else tensor

    def view(self, block: Tensor) -> Tensor:
        """Return the view of the part's block that contains this piece."""
        return block.narrow(0, self.start, math.prod(self.shape)).view(self.shape)


def pieces(entry: TensorEntry, parts: Sequence[range]) -> Iterator[Piece]:
    """Yield the pieces into which the parts divide a parameter, in order."""
    row_elements = entry.numel // entry.shape[0] if entry.shape and entry.shape[0] else entry.numel
    for part_index, part in enumerate(parts):
        start, stop = max(part.start, entry.offset), min(part.stop, entry.offset + entry.numel)
        if start >= stop:
            continue
        position, end = start - entry.offset, stop - entry.offset
        while position < end:
            row, column = divmod(position, row_elements)
            size = min(end - position, row_elements - column)
            columns: range | None = None
            if size == row_elements:
                rows = range(row, end // row_elements)
                size = len(rows) * row_elements
                shape = (len(rows), *entry.shape[1:]) if entry.shape else ()
            else:
                rows, columns, shape = range(row, row + 1), range(column, column + size), (size,)
            yield Piece(part_index, entry.offset + position - part.start, rows, columns, shape)
            position += size


class SplitTensor:
    """A parameter's tensor, split over several blocks.

    Args:
        piece_views: The parameter's pieces, each with the view of its block.
    """

    def __init__(self, piece_views: Sequence[tuple[Piece, Tensor]]) -> None:
        self.piece_views = piece_views

    def copy_(self, tensor: Tensor) -> None:
        """Copy a tensor with the parameter's shape into the blocks."""
        for piece, view in self.piece_views:
            view.copy_(piece.of(tensor))

    def add_(self, tensor: Tensor) -> None:
        """Add a tensor with the parameter's shape to the blocks."""
        for piece, view in self.piece_views:
            view.add_(piece.of(tensor))


def pieces_of_parts(parts: Sequence[range], layout: UnitLayout) -> Sequence[Sequence[Piece]]:
    """Return the pieces into which the parts divide each parameter of a layout."""
    return [tuple(pieces(entry, parts)) for entry in layout.entries]


def views_of_pieces(
    blocks: Sequence[Tensor], parameter_pieces: Sequence[Sequence[Piece]], layout: UnitLayout
) -> dict[str, Tensor | SplitTensor]:
    """Return each parameter by full name: a view of its block, or a `SplitTensor` over several blocks.

    Args:
        blocks: 1-D tensors, one for each part.
        parameter_pieces: Pieces of each parameter; see `pieces_of_parts`.
    """
    if len(blocks) == 1:
        return dict(views(blocks[0], layout))
    tensors: dict[str, Tensor | SplitTensor] = {}
    for entry, entry_pieces in zip(layout.entries, parameter_pieces, strict=True):
        piece_views = [(piece, piece.view(blocks[piece.part])) for piece in entry_pieces]
        is_whole = len(piece_views) == 1 and piece_views[0][1].shape == entry.shape
        tensors[entry.name] = piece_views[0][1] if is_whole else SplitTensor(piece_views)
    return tensors


def views_of_parts(
    blocks: Sequence[Tensor], parts: Sequence[range], layout: UnitLayout
) -> dict[str, Tensor | SplitTensor]:
    """Return each parameter by full name, like `views_of_pieces`."""
    return views_of_pieces(blocks, pieces_of_parts(parts, layout), layout)
