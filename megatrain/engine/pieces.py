"""Weights and gradients as pieces: a matrix whose blocks are leased one after the other, or all at once.

A weight is bound as one tensor where its only block is there, or as ``LeasedParts``, which lease a part when it is
asked for. Its gradient goes to ``UseSiteGradients``: to a sum that is held for the visit, or to that of the part that
is there (``PassingGradient``). What comes between a block and a piece is said by the hooks of `leased.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from megatrain.base.layout import InPieces, Piece, UnitLayout
from megatrain.engine.weight_gradients import GradientAccumulator, LaneAccumulator

if TYPE_CHECKING:
    from megatrain.engine.gradients import StepGradients
    from tiered import Mode

__all__ = [
    "DecodedWeights",
    "GradientPlace",
    "LeasedParts",
    "PassingGradient",
    "UseSiteGradients",
    "fp32_like",
    "fp32_sum",
    "rows_of_parts",
    "zero_gaps",
]


class GradientPlace(Protocol):
    """Where gradients of a visit are summed, and what becomes of the sums: they are blocks, or go to other ranks."""

    def held(self, layouts: Sequence[UnitLayout], visit: int, /) -> AbstractContextManager[LaneAccumulator]:
        """Yield the sums of some layouts at a use site; afterwards they are where they belong."""

    def part(
        self, layout: UnitLayout, visit: int, number: int, key: str, /
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Yield memory for the fp32 sums of one part of a gradient; afterwards the block has that of all use sites.

        There is a sum for each node of the tree of lanes that is left to this process; of all lanes it is one. The
        first is zeroed, or continued; the others are zeroed.
        """

    def open_sums(self) -> AbstractContextManager[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield what makes memory for open sums of lanes that are not left in the end, each like a given one."""


class DecodedWeights:
    """Room for the weights that a visit makes of what their blocks hold. Used by one thread.

    It is one buffer for a whole step: from layer to layer the allocator of a device would be asked for large pieces of
    changing sizes between small ones, and take more than there is planned for.

    Args:
        nbytes: room for the visit that decodes most.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._taken = nbytes, 0
        self._buffer: torch.Tensor | None = None

    @contextmanager
    def room(self, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield room for weights, uint8 [nbytes]. Last in, first out."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        before, self._taken = self._taken, self._taken + nbytes
        assert self._taken <= self._nbytes, (self._taken, self._nbytes)
        try:
            yield self._buffer[before : self._taken]
        finally:
            self._taken = before

    def free(self) -> None:
        """Give the room back until the next visit."""
        assert not self._taken, "weights are in use"
        self._buffer = None


class LeasedParts:
    """A weight that is cut; ``MatrixParts``.

    Args:
        held: Blocks that are leased already, by key: all of the parts or none.
        lease: Leases blocks by their keys, where none is.
    """

    def __init__(
        self,
        layout: UnitLayout,
        keys: Sequence[str],
        held: Mapping[str, torch.Tensor],
        lease: Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]],
    ) -> None:
        self._keys, self._held, self._lease = keys, held, lease
        self.shape, self.rows = layout.entries[0].shape, rows_of_parts(layout)
        self.passes = keys[0] not in held

    @contextmanager
    def part(self, number: int) -> Iterator[torch.Tensor]:
        """Yield the rows of a part."""
        key, shape = self._keys[number], (len(self.rows[number]), self.shape[1])
        if not self.passes:
            yield _matrix(self._held[key], shape)
            return
        with self._lease([key]) as blocks:
            yield _matrix(blocks[key], shape)


def rows_of_parts(layout: UnitLayout) -> list[range]:
    """Return the rows of each part of a layout of one matrix."""
    first = layout.first_rows
    stops = (*first[1:], layout.entries[0].shape[0])
    return [range(start, stop) for start, stop in zip(first, stops, strict=True)]


def _matrix(block: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a part's rows; a block may end with padding."""
    return block[: shape[0] * shape[1]].view(shape)


class PassingGradient:
    """The gradient of one matrix at one use site, whose parts are leased one after the other."""

    def __init__(
        self, place: GradientPlace, gradients: StepGradients, layout: UnitLayout, visit: int, keys: Sequence[str]
    ) -> None:
        self._place, self._gradients = place, gradients
        self._layout, self._visit, self._keys = layout, visit, keys
        (self._entry,) = layout.entries
        self.rows = rows_of_parts(layout)
        self._micro_batch = 0
        self._recorded: list[tuple[int, torch.Tensor, torch.Tensor, int | None]] = []
        # That is leased, and the memory of its sums: the first zeroed or continued, the others zeroed.
        self._part: tuple[range, list[torch.Tensor]] | None = None
        self._open: LaneAccumulator | None = None
        self._num_closed = 0

    def at(self, micro_batch: int) -> None:
        """Go on to a micro-batch."""
        self._micro_batch = micro_batch
        if self._open is not None:
            self._open.at(micro_batch)

    def record(self, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None) -> None:
        """Keep rows that are added when their parts are there."""
        self._recorded.append((self._micro_batch, indexes, rows, ignored))

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Lease a part for what is added inside."""
        rows = self.rows[number]
        with self._place.part(self._layout, self._visit, number, self._keys[number]) as sums:
            self._part = rows, [_matrix(each, (len(rows), self._entry.shape[-1])) for each in sums]
            try:
                yield
            finally:
                self._part = None
                sums.clear()
        self._num_closed += 1

    @contextmanager
    def some_rows(self, start: int, stop: int) -> Iterator[LaneAccumulator]:
        """Sum gradients of some rows of the part that is there, for all micro-batches."""
        assert self._part is not None, f"no part of {self._entry.name} is there"
        held, matrices = self._part
        places = [matrix[start - held.start : stop - held.start] for matrix in matrices]
        name, left = self._entry.name, iter(places[1:])

        def sums(memory: torch.Tensor, added: set[str]) -> GradientAccumulator:
            target = InPieces([(Piece(0, 0, range(start, stop), None, tuple(memory.shape)), memory)])
            return GradientAccumulator({name: target}, added, begins_with_zero=True)

        with self._place.open_sums() as make:

            def room() -> GradientAccumulator:
                # Open sums are numbered: those that are left in the end are the first ones.
                place = next(left, None)
                return sums(make(places[0]) if place is None else place, set())

            self._open = LaneAccumulator(self._gradients.lanes, sums(places[0], {name}), room)
            try:
                yield self._open
                found = self._open.close()
            finally:
                self._open = None
        for place, (_, own) in zip(places, found, strict=True):
            if own is not None and not own.added:
                place.zero_()  # it was that of other lanes, which were added to those before

    def add_product(self, left: torch.Tensor, right: torch.Tensor, first_row: int) -> None:
        """Accumulate a product in rows of the part that is there."""
        assert self._open is not None, f"no part of {self._entry.name} is there"
        self._open.add_product(self._entry.name, left, right, first_row)
        self._gradients.note_filled(self._layout.name, self._visit, [self._entry.name])

    def close(self) -> None:
        """Lease the parts that were not, adding the rows that were recorded; take the norm."""
        if not self._num_closed:
            for number, held in enumerate(self.rows):
                with self.part(number), self.some_rows(held.start, held.stop) as sums:
                    for micro_batch, indexes, rows, ignored in self._recorded:
                        sums.at(micro_batch)
                        sums.add_rows(self._entry.name, indexes, rows, ignored)
            if self._recorded:
                self._gradients.note_filled(self._layout.name, self._visit, [self._entry.name])
            self._recorded.clear()
        self._gradients.complete(self._layout.name, self._visit)


class UseSiteGradients:
    """The gradients of a use site, held or passing part by part; the ``GradientSink`` of a visit.

    Args:
        held: Sums of those that are there for the whole visit; None: all pass.
        passing: Parameter -> its gradient, part by part; nothing: the usual case.
    """

    def __init__(self, held: LaneAccumulator | None, passing: Mapping[str, PassingGradient]) -> None:
        self._held, self._passing = held, passing

    def at(self, micro_batch: int) -> None:
        """Go on to a micro-batch."""
        if self._held is not None:
            self._held.at(micro_batch)
        for gradient in self._passing.values():
            gradient.at(micro_batch)

    def rows_of_parts(self, name: str) -> Sequence[range]:
        """Return the rows of each part; nothing for what is held."""
        return self._passing[name].rows if name in self._passing else ()

    def part(self, name: str, number: int) -> AbstractContextManager[None]:
        """Lease a part."""
        return self._passing[name].part(number)

    @contextmanager
    def rows(self, name: str, start: int, stop: int) -> Iterator[None]:
        """Accumulate in these rows of the part that is leased."""
        with self._passing[name].some_rows(start, stop):
            yield

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Accumulate a whole gradient."""
        assert name not in self._passing, f"the gradient of {name} was planned to come part by part"
        assert self._held is not None, name
        self._held.add(name, gradient)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor, first_row: int = 0) -> None:
        """Accumulate a product, in the part that is there."""
        if name in self._passing:
            self._passing[name].add_product(left, right, first_row)
        else:
            assert self._held is not None, name
            self._held.add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None = None) -> None:
        """Accumulate rows, or keep them until their parts are there."""
        if name in self._passing:
            self._passing[name].record(indexes, rows, ignored)
        else:
            assert self._held is not None, name
            self._held.add_rows(name, indexes, rows, ignored)

    def close(self) -> None:
        """Fill the parts that are left."""
        for gradient in self._passing.values():
            gradient.close()


def fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return the fp32 tensor that a use site's gradients are summed in: the block itself if it is fp32."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a sum that was rounded cannot be continued"
    return fp32_like(gradient)


def fp32_like(gradient: torch.Tensor) -> torch.Tensor:
    """Return memory for an fp32 sum of a gradient, which the plan counts as workspace."""
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(blocks: Sequence[torch.Tensor], parts: Sequence[range], layout: UnitLayout, filled: set[str]) -> None:
    """Zero what no gradient was copied into: padding between entries, and entries without a gradient."""
    position = 0
    ends = [(entry.offset, entry.offset + entry.numel) for entry in layout.entries if entry.name in filled]
    for start, stop in (*ends, (layout.num_elements, layout.num_elements)):
        for block, part in zip(blocks, parts, strict=True) if position < start else ():
            first, last = max(position, part.start), min(start, part.stop)
            if first < last:
                block[first - part.start : last - part.start].zero_()
        position = stop
