"""Exponential moving average of the weights, stored as an additional kind of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatrain.base.precision import decode, encode
from megatrain.optim.base import FORMATS, Format, MatrixOptimizer, Optimizer, Segment, StateKind, Update, master_kinds
from megatrain.optim.elementwise import (
    Array,
    ElementwiseOptimizer,
    flat_block,
    flat_gradient,
    flat_master,
    master_examples,
)
from megatrain.optim.threads import KernelThreads, cut

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry

__all__ = ["EMA", "MatrixWeightAverage", "WeightAverage", "begin_average", "swap_average"]

EMA = StateKind("ema", torch.float32, begins_as_weight=True)
"""The average of the fp32 masters, 4 bytes per parameter."""


class WeightAverage:
    """Wrapper that adds an average of the weights to any optimizer; see `megatrain.optim.base.Optimizer`.

    After updating an element, it updates the average with the new fp32 master w. Each operation is rounded to fp32::

        ema = ema + (w - ema) * (1 - decay)

    The average begins as a copy of the weights. If a parameter has no gradient in a step, its average does not change.

    Args:
        inner: Optimizer of the weights. It must not have a kind named "ema".
        decay: Above 0 and below 1.
        threads: Compute threads. Default: the threads of ``inner``, or new threads.
    """

    def __init__(self, inner: Optimizer, decay: float, threads: KernelThreads | None = None) -> None:
        assert 0 < decay < 1, decay
        self.inner, self.decay = inner, decay
        if threads is None:
            threads = getattr(inner, "threads", None)
        self.threads = KernelThreads() if threads is None else threads

    @property
    def share(self) -> np.float32:
        """Weight of the new masters in the average: 1 - decay."""
        return np.float32(1.0 - self.decay)

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the wrapped optimizer's state kinds, followed by the average."""
        return (*self.inner.state_kinds(split_master), EMA)

    def workspace_bytes(self, entry: Any) -> int:
        """Return the scratch bytes that `update` needs for a parameter."""
        inner_bytes = getattr(self.inner, "workspace_bytes", None)
        return 0 if inner_bytes is None else int(inner_bytes(entry))

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place, then update the average; see `megatrain.optim.base.Optimizer.update`."""
        num_elements = gradient.numel()
        inner_blocks = {name: block for name, block in blocks.items() if name != EMA.name}
        weight, low = flat_master(blocks, num_elements)
        average = flat_block(EMA.name, blocks[EMA.name], EMA.dtype, num_elements)
        average_calls = self._kernel_calls(weight, low, average, segments)
        if not isinstance(self.inner, ElementwiseOptimizer):
            self.inner.update(inner_blocks, gradient, segments, update)
            self.threads.run(average_calls)
            return
        arrays: dict[str, Array | None] = {"weight": weight, "low": low}
        for kind in self.inner.state:
            arrays[kind.name] = flat_block(kind.name, blocks[kind.name], kind.dtype, kind.elements_for(num_elements))
        update_calls = self.inner.kernel_calls(arrays, flat_gradient(gradient), segments, update)
        # Updating and averaging split segments at the same elements, so a thread averages the range that it has just
        # updated, while this range is in the cache.
        self.threads.run(partial(_run_both, *pair) for pair in zip(update_calls, average_calls, strict=True))

    def _kernel_calls(
        self, weight: Array, low: Array | None, average: Array, segments: Sequence[Segment]
    ) -> Iterator[Callable[[], None]]:
        from megatrain.optim import kernels  # imported late, because importing numba takes half a second

        for segment in segments:
            for start, stop in cut(segment.start, segment.stop):
                elements = slice(start, stop)
                low_part = None if low is None else low[elements]
                yield partial(kernels.average, weight[elements], low_part, average[elements], self.share)

    @property
    def supports_rows(self) -> bool:
        """Whether the wrapped optimizer supports `make_row_update`."""
        return isinstance(self.inner, ElementwiseOptimizer) and self.inner.supports_rows

    @property
    def row_kinds(self) -> tuple[str, ...]:
        """State kinds, beginning with the average; see `ElementwiseOptimizer.row_kinds`."""
        assert isinstance(self.inner, ElementwiseOptimizer), self.inner
        return (EMA.name, *self.inner.row_kinds)

    def make_row_update(
        self, split_master: bool, gradient: torch.dtype, segment: Segment, update: Update
    ) -> Callable[[Any], None]:
        """Return a function that updates the parameters in rows of an address table, and then their averages.

        See `ElementwiseOptimizer.make_row_update`.
        """
        from megatrain.optim import kernels

        assert isinstance(self.inner, ElementwiseOptimizer), self.inner
        update_inner = self.inner.make_row_update(split_master, gradient, segment, update)
        examples = (*master_examples(split_master), np.zeros(0, np.float32))

        def update_rows(rows: Any) -> None:
            update_inner(np.ascontiguousarray(rows[:, 1:]))
            kernels.average_rows(rows, *examples, self.share)

        return update_rows

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernels for these formats."""
        formats = list(formats)
        self.inner.warm_up(formats)
        for split_master in {is_split for is_split, _ in formats}:
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in master_kinds(split_master)}
            weight, low = flat_master(blocks, 1)
            self.threads.run(self._kernel_calls(weight, low, np.zeros(1, np.float32), (Segment(0, 1, 0.0),)))


def begin_average(weight: Tensor, low: Tensor | None, average: Tensor) -> None:
    """Initialize an average with the masters.

    Args:
        weight: Masters, or their high halves. 1-D, contiguous, in host memory.
        low: Low halves, or None if `weight` contains the full fp32 masters.
        average: fp32 output of the same length.
    """
    if low is None:
        average.copy_(weight)
    else:
        decode(weight, low, average)


def swap_average(weight: Tensor, low: Tensor | None, average: Tensor) -> None:
    """Swap masters and averages without rounding errors. A second call restores both; see `begin_average`."""
    masters = torch.empty_like(average)
    begin_average(weight, low, masters)
    if low is None:
        weight.copy_(average)
    else:
        encode(average, weight, low)
    average.copy_(masters)


class MatrixWeightAverage(WeightAverage):
    """`WeightAverage` for a `megatrain.optim.base.MatrixOptimizer`."""

    inner: MatrixOptimizer

    @property
    def piece_bytes(self) -> int:
        """Scratch bytes of the wrapped optimizer; averaging needs none."""
        return self.inner.piece_bytes

    def has_matrices(self, entry: TensorEntry) -> bool:
        """Return whether the wrapped optimizer treats a parameter as matrices."""
        return self.inner.has_matrices(entry)

    def make_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Start an update of matrices. `apply_directions` finishes it and updates the averages."""
        self.inner.make_directions(blocks, gradient, segments, update, directions)

    def orthogonalize(self, matrix: Tensor, scratch: Tensor, name: str = "") -> None:
        """Orthogonalize a matrix with the wrapped optimizer."""
        self.inner.orthogonalize(matrix, scratch, name)

    def orthogonalize_bytes(self, rows: int, columns: int) -> int:
        """Return the scratch bytes that the wrapped optimizer needs for a matrix."""
        return self.inner.orthogonalize_bytes(rows, columns)

    def orthogonalize_flops(self, rows: int, columns: int, name: str = "") -> int:
        """Return the FLOPs that the wrapped optimizer needs to orthogonalize a matrix."""
        return self.inner.orthogonalize_flops(rows, columns, name)

    def apply_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Finish an update of matrices, then update the averages."""
        num_elements = gradient.numel()
        weight, low = flat_master(blocks, num_elements)
        average = flat_block(EMA.name, blocks[EMA.name], EMA.dtype, num_elements)
        inner_blocks = {name: block for name, block in blocks.items() if name != EMA.name}
        self.inner.apply_directions(inner_blocks, gradient, segments, update, directions)
        self.threads.run(self._kernel_calls(weight, low, average, segments))


def _run_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
