"""Weights and gradients of matrices that are stored in several blocks.

A weight with one block is bound as one tensor. A weight with several blocks is bound as ``LeasedParts``, which can
lease one part at a time. ``UseSiteGradients`` adds a gradient to a sum that the visit holds, or to the sum of the
leased part (``PassingGradient``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from megatrain.base.layout import Piece, SplitTensor, UnitLayout
from megatrain.engine.unit.weight_gradients import GradientAccumulator, LaneAccumulator

if TYPE_CHECKING:
    from megatrain.engine.tape.gradients import StepGradients
    from tiered import Mode


class GradientPlace(Protocol):
    """Interface that provides memory for a visit's gradient sums, which are then stored or exchanged."""

    def held(self, layouts: Sequence[UnitLayout], visit: int, /) -> AbstractContextManager[LaneAccumulator]:
        """Yield accumulators for some layouts at a use site. On exit, the sums are stored or kept for an exchange."""

    def part(
        self, layout: UnitLayout, visit: int, number: int, key: str, /
    ) -> AbstractContextManager[list[torch.Tensor]]:
        """Yield memory for the fp32 sums of one part of a gradient. Exiting the context stores the total in the block.

        There is one sum per unfinished node of the tree of lanes, and only one sum if this process has all lanes. The
        first sum starts at zero or at an earlier partial sum. All other sums start at zero.
        """

    def open_sums(self) -> AbstractContextManager[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield a function that allocates memory for a partial sum, with the shape of a given tensor."""


class DecodedWeights:
    """Memory in which visits decode weights. Not thread-safe.

    A whole step uses one buffer. Separate allocations of varying sizes would fragment a device's memory, which would
    then exceed the plan.

    Args:
        nbytes: Maximum bytes that one visit decodes.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._taken = nbytes, 0
        self._buffer: torch.Tensor | None = None

    @contextmanager
    def room(self, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield memory for weights, uint8 [nbytes]. Nested contexts must exit in reverse order."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        before, self._taken = self._taken, self._taken + nbytes
        assert self._taken <= self._nbytes, (self._taken, self._nbytes)
        try:
            yield self._buffer[before : self._taken]
        finally:
            self._taken = before

    def free(self) -> None:
        """Free the buffer until the next visit."""
        assert not self._taken, "weights are in use"
        self._buffer = None


class LeasedParts:
    """``MatrixParts`` for a weight that is stored in several blocks.

    Args:
        held: Leased blocks of all parts, by key; empty if parts are leased one at a time.
        lease: Function that leases blocks by key, used if ``held`` is empty.
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
        """Yield the rows of part ``number``. Lease the part if it is not held."""
        key, shape = self._keys[number], (len(self.rows[number]), self.shape[1])
        if not self.passes:
            yield _matrix(self._held[key], shape)
            return
        with self._lease([key]) as blocks:
            yield _matrix(blocks[key], shape)


def rows_of_parts(layout: UnitLayout) -> list[range]:
    """Return the row range of each part of a layout that has a single matrix."""
    first = layout.first_rows
    stops = (*first[1:], layout.entries[0].shape[0])
    return [range(start, stop) for start, stop in zip(first, stops, strict=True)]


def _matrix(block: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the block of a part as a matrix, without padding."""
    return block[: shape[0] * shape[1]].view(shape)


class PassingGradient:
    """Gradient of a matrix at one use site. Its parts are leased one at a time."""

    def __init__(
        self, place: GradientPlace, gradients: StepGradients, layout: UnitLayout, visit: int, keys: Sequence[str]
    ) -> None:
        self._place, self._gradients = place, gradients
        self._layout, self._visit, self._keys = layout, visit, keys
        (self._entry,) = layout.entries
        self.rows = rows_of_parts(layout)
        self._micro_batch = 0
        self._recorded: list[tuple[int, torch.Tensor, torch.Tensor, int | None]] = []
        # Rows of the leased part, and the memory of its sums. Only the first sum can be nonzero.
        self._part: tuple[range, list[torch.Tensor]] | None = None
        self._open: LaneAccumulator | None = None
        self._num_closed = 0

    def at(self, micro_batch: int) -> None:
        """Set the micro-batch to which the next gradients belong."""
        self._micro_batch = micro_batch
        if self._open is not None:
            self._open.at(micro_batch)

    def record(self, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None) -> None:
        """Keep rows until ``close``, which adds them."""
        self._recorded.append((self._micro_batch, indexes, rows, ignored))

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Lease a part, to which gradients can be added within the context."""
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
        """Yield accumulators for some rows of the leased part, to which all micro-batches add."""
        assert self._part is not None, f"no part of {self._entry.name} is leased"
        held, matrices = self._part
        places = [matrix[start - held.start : stop - held.start] for matrix in matrices]
        name, left = self._entry.name, iter(places[1:])

        def sums(memory: torch.Tensor, added: set[str]) -> GradientAccumulator:
            target = SplitTensor([(Piece(0, 0, range(start, stop), None, tuple(memory.shape)), memory)])
            return GradientAccumulator({name: target}, added, begins_with_zero=True)

        with self._place.open_sums() as make:

            def make_accumulator() -> GradientAccumulator:
                # The first open sums are also the final sums, so they use the memory of the leased part.
                place = next(left, None)
                return sums(make(places[0]) if place is None else place, set())

            self._open = LaneAccumulator(self._gradients.lanes, sums(places[0], {name}), make_accumulator)
            try:
                yield self._open
                found = self._open.close()
            finally:
                self._open = None
        for place, (_, own) in zip(places, found, strict=True):
            if own is not None and not own.added:
                # This memory contains a temporary sum, which has been added to an earlier sum.
                place.zero_()

    def add_product(self, left: torch.Tensor, right: torch.Tensor, first_row: int) -> None:
        """Add a product to rows of the leased part."""
        assert self._open is not None, f"no part of {self._entry.name} is leased"
        self._open.add_product(self._entry.name, left, right, first_row)
        self._gradients.record_filled(self._layout.name, self._visit, [self._entry.name])

    def close(self) -> None:
        """Record the norm. If no part has been leased yet, first lease all parts and add the recorded rows."""
        if not self._num_closed:
            for number, held in enumerate(self.rows):
                with self.part(number), self.some_rows(held.start, held.stop) as sums:
                    for micro_batch, indexes, rows, ignored in self._recorded:
                        sums.at(micro_batch)
                        sums.add_rows(self._entry.name, indexes, rows, ignored)
            if self._recorded:
                self._gradients.record_filled(self._layout.name, self._visit, [self._entry.name])
            self._recorded.clear()
        self._gradients.complete(self._layout.name, self._visit)


class UseSiteGradients:
    """``GradientSink`` of a visit, for held gradients and for gradients whose parts are leased one at a time.

    Args:
        held: Accumulators that are leased for the whole visit; None if there are none.
        passing: Gradients whose parts are leased one at a time, by parameter; usually empty.
    """

    def __init__(self, held: LaneAccumulator | None, passing: Mapping[str, PassingGradient]) -> None:
        self._held, self._passing = held, passing

    def at(self, micro_batch: int) -> None:
        """Set the micro-batch to which the next gradients belong."""
        if self._held is not None:
            self._held.at(micro_batch)
        for gradient in self._passing.values():
            gradient.at(micro_batch)

    def rows_of_parts(self, name: str) -> Sequence[range]:
        """Return the row range of each part; empty for a held gradient."""
        return self._passing[name].rows if name in self._passing else ()

    def part(self, name: str, number: int) -> AbstractContextManager[None]:
        """Lease one part of a parameter's gradient accumulator."""
        return self._passing[name].part(number)

    @contextmanager
    def rows(self, name: str, start: int, stop: int) -> Iterator[None]:
        """Add products to these rows of the leased part within the context."""
        with self._passing[name].some_rows(start, stop):
            yield

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a complete gradient to a held sum."""
        assert name not in self._passing, f"the plan expects the gradient of {name} part by part"
        assert self._held is not None, name
        self._held.add(name, gradient)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor, first_row: int = 0) -> None:
        """Add a product to a held sum, or to the leased part if the gradient is leased by part."""
        if name in self._passing:
            self._passing[name].add_product(left, right, first_row)
        else:
            assert self._held is not None, name
            self._held.add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None = None) -> None:
        """Add rows to a held sum. If the gradient is leased by part, keep the rows until ``close``."""
        if name in self._passing:
            self._passing[name].record(indexes, rows, ignored)
        else:
            assert self._held is not None, name
            self._held.add_rows(name, indexes, rows, ignored)

    def close(self) -> None:
        """Close all gradients that are leased by part."""
        for gradient in self._passing.values():
            gradient.close()


def fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return the tensor in which to sum a gradient: the block itself if it is fp32, otherwise a new fp32 tensor."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a rounded sum cannot be continued"
    return fp32_like(gradient)


def fp32_like(gradient: torch.Tensor) -> torch.Tensor:
    """Allocate memory for the fp32 sum of a gradient. The plan counts this memory as workspace."""
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(blocks: Sequence[torch.Tensor], parts: Sequence[range], layout: UnitLayout, filled: set[str]) -> None:
    """Zero all elements that have no gradient: the padding between entries, and entries that are not in ``filled``."""
    position = 0
    ends = [(entry.offset, entry.offset + entry.numel) for entry in layout.entries if entry.name in filled]
    for start, stop in (*ends, (layout.num_elements, layout.num_elements)):
        for block, part in zip(blocks, parts, strict=True) if position < start else ():
            first, last = max(position, part.start), min(start, part.stop)
            if first < last:
                block[first - part.start : last - part.start].zero_()
        position = stop
