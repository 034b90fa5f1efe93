"""Maps from elements of source tensors to elements of a target tensor, so that any range can be computed separately.

Most transforms between a model's tensors and its files only move elements: they stack, join, cut and transpose. A
``Region`` describes one move, from a strided box of a source to a strided box of the target. Given all regions of a
target, any range of the target can be copied from ranges of its sources. No tensor has to fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ReadSpan", "Region", "read_regions", "region_of", "trace_regions"]
#: Maximum number of elements to read per requested element. A box with wider gaps is read row by row.
_MAX_WASTE = 1.5
#: Rows that span fewer elements are read together with their gaps, because one call per row would cost more.
_SHORT_ROW = 1 << 14


class ReadSpan(Protocol):
    """Function that reads a range of a source tensor."""

    def __call__(self, source: str, start: int, count: int, out: Tensor | None, /) -> Tensor:
        """Return elements ``start`` to ``start + count`` of a source, in memory order, as a 1-D tensor.

        If ``out`` is a suitable output (1-D, contiguous, of this size), it is filled and returned. Otherwise the
        result is valid until the next call.
        """


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a source tensor that becomes a box of the target tensor. Strides are counted in elements.

    Attributes:
        source: Name of the source tensor.
        shape: Shape of both boxes.
        source_start: Index of the box's first element in the contiguous source.
        target_start: Index of the box's first element in the contiguous target.
    """

    source: str
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source_start: int
    target_start: int

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def source_span(self) -> int:
        """Number of source elements from the box's first element to its last."""
        return _span(self.shape, self.source_strides)

    @property
    def is_readable_in_place(self) -> bool:
        """Whether the source box has contiguous rows or few gaps. False for transposed slices of columns."""
        if self.num_elements == 0:
            return True
        region = _merge_dimensions(self)
        return region.source_span <= _MAX_WASTE * region.num_elements or region.source_strides[-1] == 1

    def rows(self, start: int, stop: int) -> Region:
        """Return the rows from ``start`` to ``stop`` (exclusive) of the outermost dimension."""
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            source_start=self.source_start + start * self.source_strides[0],
            target_start=self.target_start + start * self.target_strides[0],
        )

    def row(self, index: int) -> Region:
        """Return a single row. The result lacks the outermost dimension."""
        row = self.rows(index, index + 1)
        return replace(
            row,
            shape=row.shape[1:],
            source_strides=row.source_strides[1:],
            target_strides=row.target_strides[1:],
        )

    def clip(self, start: int, stop: int) -> Iterator[Region]:
        """Yield boxes that cover this region's elements in the target's range from ``start`` to ``stop``."""
        span = _span(self.shape, self.target_strides)
        if self.num_elements == 0 or self.target_start >= stop or self.target_start + span <= start:
            return
        if start <= self.target_start and self.target_start + span <= stop:
            yield self
            return
        # The region has several elements here, because a single element would be either inside or outside the range.
        size, stride = self.shape[0], self.target_strides[0]
        row_span = _span(self.shape[1:], self.target_strides[1:])
        first_whole = max(0, -(-(start - self.target_start) // stride))
        end_whole = max(first_whole, min(size, (stop - self.target_start - row_span) // stride + 1))
        first_touched = max(0, (start - self.target_start - row_span) // stride + 1)
        end_touched = min(size, -(-(stop - self.target_start) // stride))
        for index in range(first_touched, min(first_whole, end_touched)):
            yield from self.row(index).clip(start, stop)
        if first_whole < end_whole:
            yield self.rows(first_whole, end_whole)
        for index in range(max(end_whole, first_touched), end_touched):
            yield from self.row(index).clip(start, stop)


def region_of(source: str, source_view: Tensor, target_view: Tensor) -> Region:
    """Return the region that maps a view of the source to a view of the target. Both views have the same shape."""
    assert source_view.shape == target_view.shape, (source, source_view.shape, target_view.shape)
    return Region(
        source,
        tuple(source_view.shape),
        tuple(source_view.stride()),
        tuple(target_view.stride()),
        int(source_view.storage_offset()),
        int(target_view.storage_offset()),
    )


def read_regions(regions: Sequence[Region], start: int, out: Tensor, read: ReadSpan, max_elements: int) -> None:
    """Fill ``out`` with elements of the target, starting at element ``start``.

    Args:
        regions: All regions of the target.
        start: Index of the first requested element in the target.
        out: 1-D contiguous output of any dtype. Elements outside all regions are unchanged.
        read: Function that reads the sources.
        max_elements: Maximum number of elements per read.
    """
    for region in regions:
        for box in _merge_dimensions(region).clip(start, start + out.numel()):
            _copy_box(box, start, out, read, max_elements)


def _copy_box(box: Region, start: int, out: Tensor, read: ReadSpan, max_elements: int) -> None:
    box = _merge_dimensions(box)
    span, size, stride = box.source_span, box.shape[0], max(1, box.source_strides[0])
    row_span = _span(box.shape[1:], box.source_strides[1:])
    # Read the gaps between rows if this costs less than a separate read for each row.
    read_gaps = span <= _MAX_WASTE * box.num_elements or row_span < _SHORT_ROW
    if span <= max_elements and read_gaps:
        view = out.as_strided(box.shape, box.target_strides, out.storage_offset() + box.target_start - start)
        is_plain = box.source_strides == box.target_strides == (1,)
        values = read(box.source, box.source_start, span, view if is_plain else None)
        if values is not view:
            view.copy_(values.as_strided(box.shape, box.source_strides, values.storage_offset()))
        return
    if not read_gaps or row_span > max_elements:
        for index in range(size):
            _copy_box(box.row(index), start, out, read, max_elements)
        return
    step = (max_elements - row_span) // stride + 1
    for row in range(0, size, step):
        _copy_box(box.rows(row, min(row + step, size)), start, out, read, max_elements)


def _merge_dimensions(region: Region) -> Region:
    """Return an equivalent region with as few dimensions as possible."""
    dimensions = [
        (size, source, target)
        for size, source, target in zip(region.shape, region.source_strides, region.target_strides, strict=True)
        if size != 1
    ] or [(1, 1, 1)]
    result = dimensions[-1:]
    for size, source, target in reversed(dimensions[:-1]):
        inner_size, inner_source, inner_target = result[0]
        if source == inner_size * inner_source and target == inner_size * inner_target:
            result[0] = (size * inner_size, inner_source, inner_target)
        else:
            result.insert(0, (size, source, target))
    shape, sources, targets = zip(*result, strict=True)
    return replace(region, shape=shape, source_strides=sources, target_strides=targets)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class _AliasingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which ``contiguous`` and ``clone`` return views, so that output strides locate elements of the inputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} changes numbers")
        return func(*args, **(kwargs or {}))


def trace_regions(
    shapes: Mapping[str, torch.Size],
    convert: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]],
) -> dict[str, list[Region]] | None:
    """Return the regions of a conversion's outputs, or None if the conversion must run on whole tensors.

    Args:
        shapes: Shape of each input, by name.
        convert: The conversion. It gets a function that returns the meta tensor of an input by name.
    """
    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {value.untyped_storage()._cdata: name for name, value in inputs.items()}
    try:
        with _AliasingMode():  # type: ignore[no-untyped-call]
            outputs = convert(inputs.__getitem__)
    except RuntimeError:
        return None  # the conversion changes values or needs contiguous memory
    regions: dict[str, list[Region]] = {}
    for target, value in outputs.items():
        source = names.get(value.untyped_storage()._cdata)
        if source is None:
            return None
        region = region_of(source, value, torch.empty(value.shape, device="meta"))
        if not region.is_readable_in_place:
            return None
        regions[target] = [region]
    return regions
