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


class GradientMemory(Protocol):
    """Interface that provides memory for a visit's gradient sums, which are then stored or exchanged."""

    def lease_sums(self, layouts: Sequence[UnitLayout], visit: int, /) -> AbstractContextManager[LaneAccumulator]:
        """Yield accumulators for some layouts at a use site. On exit, the sums are stored or kept for an exchange."""

    def part(
        self, layout: UnitLayout, visit: int, index: int, key: str, /
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
        self._nbytes, self._used_bytes = nbytes, 0
        self._buffer: torch.Tensor | None = None

    @contextmanager
    def reserve(self, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield memory for weights, uint8 [nbytes]. Nested contexts must exit in reverse order."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        start, self._used_bytes = self._used_bytes, self._used_bytes + nbytes
        assert self._used_bytes <= self._nbytes, (self._used_bytes, self._nbytes)
        try:
            yield self._buffer[start : self._used_bytes]
        finally:
            self._used_bytes = start

    def free(self) -> None:
        """Free the buffer until the next visit."""
        assert not self._used_bytes, "weights are in use"
        self._buffer = None


class LeasedParts:
    """``MatrixParts`` for a weight that is stored in several blocks.

    Args:
        held_blocks: Leased blocks of all parts, by key; empty if parts are leased one at a time.
        lease: Function that leases blocks by key, used if ``held_blocks`` is empty.
    """

    def __init__(
        self,
        layout: UnitLayout,
        keys: Sequence[str],
        held_blocks: Mapping[str, torch.Tensor],
        lease: Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]],
    ) -> None:
        self._keys, self._held_blocks, self._lease = keys, held_blocks, lease
        self.shape, self.rows = layout.entries[0].shape, part_rows(layout)
        self.is_passing = keys[0] not in held_blocks

    @contextmanager
    def part(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the rows of part ``index``. Lease the part if it is not held."""
        key, shape = self._keys[index], (len(self.rows[index]), self.shape[1])
        if not self.is_passing:
            yield _matrix(self._held_blocks[key], shape)
            return
        with self._lease([key]) as blocks:
            yield _matrix(blocks[key], shape)


def part_rows(layout: UnitLayout) -> list[range]:
    """Return the row range of each part of a layout that has a single matrix."""
    starts = layout.first_rows
    stops = (*starts[1:], layout.entries[0].shape[0])
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _matrix(block: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the block of a part as a matrix, without padding."""
    return block[: shape[0] * shape[1]].view(shape)


class PassingGradient:
    """Gradient of a matrix at one use site. Its parts are leased one at a time."""

    def __init__(
        self, memory: GradientMemory, gradients: StepGradients, layout: UnitLayout, visit: int, keys: Sequence[str]
    ) -> None:
        self._memory, self._gradients = memory, gradients
        self._layout, self._visit, self._keys = layout, visit, keys
        (self._entry,) = layout.entries
        self.rows = part_rows(layout)
        self._micro_batch = 0
        self._recorded_rows: list[tuple[int, torch.Tensor, torch.Tensor, int | None]] = []
        # Rows of the leased part, and the memory of its sums. Initially, only the first sum can be nonzero.
        self._part: tuple[range, list[torch.Tensor]] | None = None
        self._open_sums: LaneAccumulator | None = None
        self._num_closed = 0

    def set_micro_batch(self, micro_batch: int) -> None:
        """Set the micro-batch to which the next gradients belong."""
        self._micro_batch = micro_batch
        if self._open_sums is not None:
            self._open_sums.set_micro_batch(micro_batch)

    def record(self, indexes: torch.Tensor, rows: torch.Tensor, padding_idx: int | None) -> None:
        """Keep rows until ``close``, which adds them."""
        self._recorded_rows.append((self._micro_batch, indexes, rows, padding_idx))

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        """Lease a part, to which gradients can be added within the context."""
        rows = self.rows[index]
        with self._memory.part(self._layout, self._visit, index, self._keys[index]) as sums:
            self._part = rows, [_matrix(memory, (len(rows), self._entry.shape[-1])) for memory in sums]
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
        part_rows, matrices = self._part
        targets = [matrix[start - part_rows.start : stop - part_rows.start] for matrix in matrices]
        name, free_targets = self._entry.name, iter(targets[1:])

        def make_sums(memory: torch.Tensor, filled_params: set[str]) -> GradientAccumulator:
            split_tensor = SplitTensor([(Piece(0, 0, range(start, stop), None, tuple(memory.shape)), memory)])
            return GradientAccumulator({name: split_tensor}, filled_params, is_zeroed=True)

        with self._memory.open_sums() as allocate:

            def make_accumulator() -> GradientAccumulator:
                # The first open sums are also the final sums, so they use the memory of the leased part.
                free_target = next(free_targets, None)
                return make_sums(allocate(targets[0]) if free_target is None else free_target, set())

            self._open_sums = LaneAccumulator(self._gradients.lanes, make_sums(targets[0], {name}), make_accumulator)
            try:
                yield self._open_sums
                closed_sums = self._open_sums.close()
            finally:
                self._open_sums = None
        for target, (_, accumulator) in zip(targets, closed_sums, strict=True):
            if accumulator is not None and not accumulator.added_names:
                # Zero this temporary sum: an earlier sum already contains it, so it would count twice.
                target.zero_()

    def add_product(self, left: torch.Tensor, right: torch.Tensor, first_row: int) -> None:
        """Add a product to rows of the leased part."""
        assert self._open_sums is not None, f"no part of {self._entry.name} is leased"
        self._open_sums.add_product(self._entry.name, left, right, first_row)
        self._gradients.record_filled(self._layout.name, self._visit, [self._entry.name])

    def close(self) -> None:
        """Record the norm. If no part has been leased yet, first lease all parts and add the recorded rows."""
        if not self._num_closed:
            for index, row_range in enumerate(self.rows):
                with self.part(index), self.some_rows(row_range.start, row_range.stop) as sums:
                    for micro_batch, indexes, rows, padding_idx in self._recorded_rows:
                        sums.set_micro_batch(micro_batch)
                        sums.add_rows(self._entry.name, indexes, rows, padding_idx)
            if self._recorded_rows:
                self._gradients.record_filled(self._layout.name, self._visit, [self._entry.name])
            self._recorded_rows.clear()
        self._gradients.complete(self._layout.name, self._visit)


class UseSiteGradients:
    """``GradientSink`` of a visit, for held gradients and for gradients whose parts are leased one at a time.

    Args:
        held_sums: Accumulators that are leased for the whole visit; None if there are none.
        passing_gradients: Gradients whose parts are leased one at a time, by parameter; usually empty.
    """

    def __init__(self, held_sums: LaneAccumulator | None, passing_gradients: Mapping[str, PassingGradient]) -> None:
        self._held_sums, self._passing_gradients = held_sums, passing_gradients

    def set_micro_batch(self, micro_batch: int) -> None:
        """Set the micro-batch to which the next gradients belong."""
        if self._held_sums is not None:
            self._held_sums.set_micro_batch(micro_batch)
        for gradient in self._passing_gradients.values():
            gradient.set_micro_batch(micro_batch)

    def part_rows(self, name: str) -> Sequence[range]:
        """Return the row range of each part; empty for a held gradient."""
        return self._passing_gradients[name].rows if name in self._passing_gradients else ()

    def part(self, name: str, index: int) -> AbstractContextManager[None]:
        """Lease one part of a parameter's gradient accumulator."""
        return self._passing_gradients[name].part(index)

    @contextmanager
    def rows(self, name: str, start: int, stop: int) -> Iterator[None]:
        """Return a context in which products are added to these rows of the leased part."""
        with self._passing_gradients[name].some_rows(start, stop):
            yield

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a complete gradient to a held sum."""
        assert name not in self._passing_gradients, f"the plan expects the gradient of {name} part by part"
        assert self._held_sums is not None, name
        self._held_sums.add(name, gradient)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor, first_row: int = 0) -> None:
        """Add a product to a held sum, or to the leased part if the gradient is leased by part."""
        if name in self._passing_gradients:
            self._passing_gradients[name].add_product(left, right, first_row)
        else:
            assert self._held_sums is not None, name
            self._held_sums.add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: torch.Tensor, rows: torch.Tensor, padding_idx: int | None = None) -> None:
        """Add rows to a held sum. If the gradient is leased by part, keep the rows until ``close``."""
        if name in self._passing_gradients:
            self._passing_gradients[name].record(indexes, rows, padding_idx)
        else:
            assert self._held_sums is not None, name
            self._held_sums.add_rows(name, indexes, rows, padding_idx)

    def close(self) -> None:
        """Close all gradients that are leased by part."""
        for gradient in self._passing_gradients.values():
            gradient.close()


def fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return the tensor in which to sum a gradient: the block itself if it is fp32, otherwise a new fp32 tensor."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a rounded sum cannot be continued"
    return empty_sum(gradient)


def empty_sum(gradient: torch.Tensor) -> torch.Tensor:
    """Allocate memory for the fp32 sum of a gradient. The plan counts this memory as workspace."""
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(blocks: Sequence[torch.Tensor], parts: Sequence[range], layout: UnitLayout, params: set[str]) -> None:
    """Zero all elements that have no gradient: the padding between entries, and entries that are not in ``params``."""
    position = 0
    ends = [(entry.offset, entry.offset + entry.numel) for entry in layout.entries if entry.name in params]
    for start, stop in (*ends, (layout.num_elements, layout.num_elements)):
        for block, part in zip(blocks, parts, strict=True) if position < start else ():
            gap_start, gap_stop = max(position, part.start), min(start, part.stop)
            if gap_start < gap_stop:
                block[gap_start - part.start : gap_stop - part.start].zero_()
        position = stop
