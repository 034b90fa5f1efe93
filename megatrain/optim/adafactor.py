"""Adafactor on the CPU. Its state (row and column means of squares) is about a thousandth as large as AdamW's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.elementwise import Array, flat_block, flat_gradient, flat_master
from megatrain.optim.threads import RANGE_ELEMENTS, KernelThreads, cut

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry

__all__ = ["MAX_ROW_BLOCKS", "Adafactor", "rows_per_block", "second_moment_elements"]

MAX_ROW_BLOCKS = 64
"""Maximum number of row blocks per matrix. Each row block stores column sums until they are added."""


def second_moment_elements(entry: TensorEntry) -> int:
    """Return the number of state elements: one per row and per column of a matrix, or one per element of a vector."""
    num_matrices, num_rows, num_columns = matrix_shape(entry.shape, entry.numel)
    return num_matrices * (num_rows + num_columns) if len(entry.shape) >= 2 else entry.numel


_STATE = (StateKind("v", torch.float32, second_moment_elements, needs_whole=True),)


def matrix_shape(shape: Sequence[int], num_elements: int) -> tuple[int, int, int]:
    """Return `(matrices, rows, columns)` of a shape. All dimensions before the last two form a batch of matrices."""
    if len(shape) < 2:
        return 1, 1, num_elements
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def rows_per_block(num_rows: int, num_columns: int) -> int:
    """Return the number of rows per partial column sum. It affects results, so it depends only on the shape."""
    return max(RANGE_ELEMENTS // max(num_columns, 1), -(-num_rows // MAX_ROW_BLOCKS), 1)


@dataclass(frozen=True, slots=True)
class _KernelSlice:
    """Work of one kernel call: several complete matrices, or some rows of one matrix."""

    matrices: slice
    rows: slice


class Adafactor:
    """Adafactor for flat CPU blocks; see `megatrain.optim.base.Optimizer` for the contract.

    It takes 4 bytes per parameter. The algorithm follows `transformers.Adafactor` (Shazeer and Stern, 2018), without
    first moment, `scale_parameter` and `relative_step`. A parameter is updated in fp32, with sums in fp64::

        g = grad * grad_scale
        rows = rows * b + (mean(g * g, columns) + eps) * (1 - b)       where b = 1 - step ** decay_rate
        columns = columns * b + (mean(g * g, rows) + eps) * (1 - b)
        u = g * (sqrt(mean(rows) / rows) * sqrt(1 / columns))          a vector: u = g / sqrt(v), v per element
        w = w * (1 - lr * weight_decay) - u * (lr / max(1, rms(u) / clip_threshold))

    An update reads the gradient of a matrix three times: for the means, the update's mean square, and the weights.

    Args:
        decay_rate: Negative exponent. Second moments decay by `1 - step ** decay_rate`.
        clip_threshold: Maximum root mean square of a parameter's update before it is multiplied by the learning rate.
        threads: Compute threads. None creates one thread per usable CPU.
    """

    def __init__(
        self,
        decay_rate: float = -0.8,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        *,
        threads: KernelThreads | None = None,
    ) -> None:
        assert decay_rate < 0 and eps > 0 and clip_threshold > 0, (decay_rate, eps, clip_threshold)
        self.decay_rate, self.eps, self.clip_threshold = decay_rate, eps, clip_threshold
        self.threads = KernelThreads() if threads is None else threads

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the state kinds of the master, and `v`, which has fewer elements than the weights."""
        return (*master_kinds(split_master), *_STATE)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`. Each segment is a whole parameter."""
        assert update.step >= 1, update.step
        num_elements = gradient.numel()
        weight, low = flat_master(blocks, num_elements)
        moments = flat_block("v", blocks["v"], torch.float32, blocks["v"].numel())
        grad = flat_gradient(gradient)
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= num_elements, (segment, num_elements)
            elements = slice(segment.start, segment.stop)
            size = segment.stop - segment.start
            shape = matrix_shape(segment.shape, size)
            is_matrix = len(segment.shape) >= 2
            num_moments = shape[0] * (shape[1] + shape[2]) if is_matrix else size
            assert "v" in segment.state_starts, segment  # set by `build_segments` if its argument `kinds` is given
            start = segment.state_starts["v"]
            assert math.prod(shape) == size and start + num_moments <= moments.size, (segment, moments.size)
            if size:
                parameter_update = _ParameterUpdate(
                    self,
                    (weight[elements], None if low is None else low[elements]),
                    moments[start : start + num_moments],
                    grad[elements],
                    segment,
                    update,
                )
                parameter_update.update_matrices(shape) if is_matrix else parameter_update.update_vector()

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernels for these formats."""
        segments = (Segment(0, 1, 0.0, state_starts={"v": 0}), Segment(1, 2, 0.0, shape=(1, 1), state_starts={"v": 1}))
        for split_master, dtype in formats:
            blocks = {kind.name: torch.zeros(3, dtype=kind.dtype)[:2] for kind in master_kinds(split_master)}
            blocks["v"] = torch.zeros(3)
            self.update(blocks, torch.zeros(2, dtype=dtype), segments, Update(step=1, lr=0.0))


class _ParameterUpdate:
    """One parameter's update in one step. All arrays are views of the blocks."""

    def __init__(
        self,
        optimizer: Adafactor,
        master: tuple[Array, Array | None],
        moments: Array,
        grad: Array,
        segment: Segment,
        update: Update,
    ) -> None:
        beta2 = 1.0 - update.step**optimizer.decay_rate
        self._optimizer, self._threads = optimizer, optimizer.threads
        self._master, self._moments, self._grad = master, moments, grad
        self._beta2, self._one_minus_beta2 = np.float32(beta2), np.float32(1.0 - beta2)
        self._lr = update.lr * segment.lr_scale
        self._decay = np.float32(1.0 - self._lr * segment.weight_decay)
        self._grad_scale = np.float32(update.grad_scale)

    def update_vector(self) -> None:
        """Update a parameter with fewer than two dimensions."""
        from megatrain.optim import kernels

        block, eps, (weight, low) = kernels.NORM_BLOCK_ELEMENTS, np.float32(self._optimizer.eps), self._master
        sums = np.zeros(-(-self._grad.size // block))

        def measure() -> Iterator[Callable[[], None]]:
            for start, stop in cut(0, sums.size, RANGE_ELEMENTS // block):
                part = slice(start * block, stop * block)
                arrays = (self._moments[part], self._grad[part], self._grad_scale, eps)
                yield partial(kernels.adafactor_vector, *arrays, self._beta2, self._one_minus_beta2, sums[start:stop])

        self._threads.run(measure())
        scalars = (self._grad_scale, self._decay, self._step_size(sums))
        self._threads.run(
            partial(
                kernels.apply_vector,
                weight[start:stop],
                None if low is None else low[start:stop],
                self._moments[start:stop],
                self._grad[start:stop],
                *scalars,
            )
            for start, stop in cut(0, self._grad.size)
        )

    def update_matrices(self, shape: tuple[int, int, int]) -> None:
        """Update a parameter with two or more dimensions; `shape` is (matrices, rows, columns)."""
        from megatrain.optim import kernels

        num_matrices, num_rows, num_columns = shape
        num_row_means = num_matrices * num_rows
        rows = self._moments[:num_row_means].reshape(num_matrices, num_rows)
        columns = self._moments[num_row_means:].reshape(num_matrices, num_columns)
        self._update_means(shape, rows, columns)
        with np.errstate(all="ignore"):  # no warnings: as in every optimizer, non-finite values reach the weights
            mean = np.add.accumulate(rows, axis=1, dtype=np.float64)[:, -1:] / num_rows
            row_factor = np.sqrt(mean / rows).astype(np.float32)
            column_factor = np.sqrt(1.0 / columns.astype(np.float64)).astype(np.float32)
        sums = np.zeros((num_matrices, num_rows))
        grad, pieces = self._grad.reshape(shape), list(_kernel_slices(shape))
        self._threads.run(
            partial(
                kernels.adafactor_square_sums,
                grad[piece.matrices, piece.rows],
                self._grad_scale,
                row_factor[piece.matrices, piece.rows],
                column_factor[piece.matrices],
                sums[piece.matrices, piece.rows],
            )
            for piece in pieces
        )
        scalars = (self._decay, self._step_size(sums))
        weight, low = (None if half is None else half.reshape(shape) for half in self._master)
        assert weight is not None
        self._threads.run(
            partial(
                kernels.apply_factored,
                weight[piece.matrices, piece.rows].reshape(-1),
                None if low is None else low[piece.matrices, piece.rows].reshape(-1),
                grad[piece.matrices, piece.rows],
                self._grad_scale,
                row_factor[piece.matrices, piece.rows],
                column_factor[piece.matrices],
                *scalars,
            )
            for piece in pieces
        )

    def _update_means(self, shape: tuple[int, int, int], rows: Array, columns: Array) -> None:
        """Update the mean squares of rows and columns in place."""
        from megatrain.optim import kernels

        num_matrices, num_rows, num_columns = shape
        block = rows_per_block(num_rows, num_columns)
        num_blocks, grad = -(-num_rows // block), self._grad.reshape(shape)
        matrices_per_batch = max(1, RANGE_ELEMENTS // (num_rows * num_columns)) * 4 if num_blocks == 1 else 1
        for start, stop in cut(0, num_matrices, matrices_per_batch):
            row_sums = np.zeros((stop - start, num_rows))
            partials = np.zeros((num_blocks, stop - start, num_columns))
            self._threads.run(
                partial(
                    kernels.adafactor_columns,
                    grad[start:stop][piece.matrices, piece.rows],
                    self._grad_scale,
                    row_sums[piece.matrices, piece.rows],
                    partials[piece.rows.start // block][piece.matrices],
                )
                for piece in _kernel_slices((stop - start, num_rows, num_columns))
            )
            for block_sums in partials[1:]:
                partials[0] += block_sums
            self._blend(rows[start:stop], row_sums, num_columns)
            self._blend(columns[start:stop], partials[0], num_rows)

    def _blend(self, means: Array, sums: Array, count: int) -> None:
        with np.errstate(all="ignore"):
            new_means = (sums / count + self._optimizer.eps).astype(np.float32)
            means[:] = means * self._beta2 + new_means * self._one_minus_beta2

    def _step_size(self, sums: Array) -> np.float32:
        """Return the clipped learning rate for an update with these sums of squares."""
        with np.errstate(all="ignore"):
            total = float(np.add.accumulate(sums.reshape(-1))[-1])
        rms = math.sqrt(total / self._grad.size)
        ratio = rms / self._optimizer.clip_threshold
        return np.float32(self._lr / ratio if ratio > 1.0 or math.isnan(ratio) else self._lr)


def _kernel_slices(shape: tuple[int, int, int]) -> Iterator[_KernelSlice]:
    """Yield slices of about RANGE_ELEMENTS elements each: several matrices, or one row block of a matrix."""
    num_matrices, num_rows, num_columns = shape
    block = rows_per_block(num_rows, num_columns)
    if block >= num_rows:
        for start, stop in cut(0, num_matrices, max(1, RANGE_ELEMENTS // (num_rows * num_columns))):
            yield _KernelSlice(slice(start, stop), slice(0, num_rows))
        return
    for matrix in range(num_matrices):
        for start, stop in cut(0, num_rows, block):
            yield _KernelSlice(slice(matrix, matrix + 1), slice(start, stop))
