"""Muon: updates matrices with their orthogonalized momentum. AdamW updates all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.elementwise import AdamW, flat_block, flat_gradient, flat_master
from megatrain.optim.fused import FusedMatrix
from megatrain.optim.matrices import DIRECTION_BYTES, HostOrthogonalizer, Orthogonalizer, update_by_matrix
from megatrain.optim.threads import KernelThreads, cut
from tiered.units import round_up

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry
    from megatrain.optim.table import AdjustLr

__all__ = ["COEFFICIENTS", "EPS", "Muon", "newton_schulz", "newton_schulz_bytes"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X X^T X and (X X^T)^2 X in the quintic iteration. Jordan et al., Muon (2024)."""
EPS = 1e-7
_SCRATCH_ALIGNMENT = 256


def newton_schulz(
    matrix: Tensor,
    scratch: Tensor,
    num_steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> None:
    """Bring all singular values of a matrix close to 1 in place, without changing the singular vectors.

    Args:
        matrix: [rows, columns] in bf16, contiguous, on any device.
        scratch: uint8 scratch memory on the same device, at least `newton_schulz_bytes`.
        eps: Lower bound for the norm by which the matrix is divided.
    """
    a, b, c = coefficients
    rows, columns = matrix.shape
    side = min(rows, columns)
    space = scratch[: newton_schulz_bytes(rows, columns)].view(torch.bfloat16)
    temp, gram, poly = (part.view(side, -1) for part in torch.split(space, [matrix.numel(), side * side, side * side]))
    # Transpose a tall matrix, so that the square matrices of the iteration have the length of the shorter side.
    is_tall = rows > columns
    x, y = (temp.copy_(matrix.T), matrix.view(side, -1)) if is_tall else (matrix, temp)
    x.div_(x.norm().clamp(min=eps))
    for _ in range(num_steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.addmm(x, poly, x, beta=a, out=y)
        x, y = y, x
    # Each step swaps the buffers. `x` starts in `matrix` if the matrix is wide, and in `temp` if it is tall.
    is_in_matrix = (num_steps % 2 == 1) == is_tall
    if is_tall:
        matrix.copy_((y.copy_(x) if is_in_matrix else x).T)
    elif not is_in_matrix:
        matrix.copy_(x)


def newton_schulz_bytes(rows: int, columns: int) -> int:
    """Return the scratch bytes of `newton_schulz`: a copy of the matrix, and two squares of the smaller side."""
    return 2 * (rows * columns + 2 * min(rows, columns) ** 2)


class Muon:
    """Muon for matrices and AdamW for all other parameters; see `megatrain.optim.base.Optimizer` for the contract.

    It takes 8 bytes per matrix element and 12 bytes per other parameter. A matrix is updated as follows, with the
    iteration in bf16 and all other operations rounded to fp32::

        g = grad * grad_scale
        m = m + (g - m) * (1 - momentum)
        u = newton_schulz(g + (m - g) * momentum)         # without nesterov: newton_schulz(m)
        w = w * (1 - lr * weight_decay) - u * (lr * adjusted)

    A parameter with more than two dimensions is a batch of matrices, such as stacked experts. Each matrix in a batch
    and each logical matrix in a fused parameter is orthogonalized separately, with the factor for its shape. An update
    needs whole matrices, so layouts with matrices are not divided, and several ranks cannot use Muon. torch computes
    the matmuls on the model's compute device (`megatrain.optim.matrices`), so results do not depend on the homes of the
    blocks. All other operations are elementwise.

    Args:
        adamw: Optimizer of the parameters that are not matrices.
        is_matrix: Function that returns whether Muon updates a parameter, given its full name and shape.
        momentum: Decay of the momentum, at least 0 and below 1.
        adjust_lr: "original" multiplies the learning rate by sqrt(max(1, rows / columns)), "match_rms_adamw" by 0.2 *
            sqrt(max(rows, columns)). The latter makes updates as large as AdamW's, so both can share a learning rate.
        matrices: Orthogonalizer that `update` uses. Default: ``HostOrthogonalizer``.
        fused: Parameters that hold several logical matrices, by full name.
    """

    def __init__(
        self,
        adamw: AdamW,
        is_matrix: Callable[[str, Sequence[int]], bool] = lambda name, shape: len(shape) >= 2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_steps: int = 5,
        adjust_lr: AdjustLr = "match_rms_adamw",
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        matrices: Orthogonalizer | None = None,
        fused: Mapping[str, FusedMatrix] | None = None,
    ) -> None:
        assert 0 <= momentum < 1 and num_steps >= 1, (momentum, num_steps)
        assert adamw.state_dtype == "float32", adamw.state_dtype
        self.adamw, self.is_matrix = adamw, is_matrix
        self.momentum, self.nesterov, self.num_steps, self.adjust_lr = momentum, nesterov, num_steps, adjust_lr
        self.coefficients, self.eps = coefficients, eps
        self.matrices: Orthogonalizer = matrices or HostOrthogonalizer()
        self.fused = dict(fused or {})
        self._copies_matrices = any(matrix.needs_copies for matrix in self.fused.values())

    @property
    def piece_bytes(self) -> int:
        """Always 0, because the kernels need no scratch memory."""
        return 0

    @property
    def threads(self) -> KernelThreads:
        """Threads that compute the elementwise updates."""
        return self.adamw.threads

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the state kinds: the master, `m` and `v`. Only parameters that AdamW updates have elements in `v`."""
        first_moment = StateKind("m", torch.float32)
        second_moment = StateKind("v", torch.float32, lambda entry: 0 if self.has_matrices(entry) else entry.numel)
        return (*master_kinds(split_master), first_moment, second_moment)

    def has_matrices(self, entry: TensorEntry) -> bool:
        """Return whether Muon updates a parameter as matrices."""
        return self.is_matrix(entry.name, entry.shape)

    def workspace_bytes(self, entry: TensorEntry) -> int:
        """Return the scratch bytes that `update` needs for a parameter."""
        if not self.has_matrices(entry):
            return 0
        rows, columns = entry.shape[-2:]
        return DIRECTION_BYTES * rows * columns + self.orthogonalize_bytes(rows, columns)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`. Blocks must contain whole matrices."""

        def is_matrix(segment: Segment) -> bool:
            return self.is_matrix(segment.name, segment.shape)

        update_by_matrix(self, self.matrices, is_matrix, blocks, gradient, segments, update)

    def make_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the moments of matrices; see `megatrain.optim.base.MatrixOptimizer`."""
        for segment in segments:
            if self.is_matrix(segment.name, segment.shape):
                elements = range(segment.start, segment.stop)
                self._make_direction(blocks, gradient, elements, update, directions[segment.start : segment.stop])

    def orthogonalize(self, matrix: Tensor, scratch: Tensor, name: str = "") -> None:
        """Orthogonalize each logical matrix of a parameter's matrix, in place."""
        fused, iterate = self.fused.get(name), partial(self._newton_schulz, scratch)
        if fused is None:
            iterate(matrix)
            return
        for view in fused.views(matrix):
            dim = int(fused.divides_columns)
            if not fused.needs_copies:
                iterate(view.flatten(dim, dim + 1))
                continue
            # The remaining scratch memory is large enough even for the whole matrix.
            num_bytes = DIRECTION_BYTES * view.numel()
            copy = scratch[:num_bytes].view(torch.bfloat16).view(view.shape).copy_(view)
            self._newton_schulz(scratch[round_up(num_bytes, _SCRATCH_ALIGNMENT) :], copy.flatten(dim, dim + 1))
            view.copy_(copy)

    def _newton_schulz(self, scratch: Tensor, matrix: Tensor) -> None:
        newton_schulz(matrix, scratch, self.num_steps, self.coefficients, self.eps)

    def orthogonalize_bytes(self, rows: int, columns: int) -> int:
        """Return the scratch bytes that `orthogonalize` needs for any division into logical matrices."""
        copy_bytes = round_up(DIRECTION_BYTES * rows * columns, _SCRATCH_ALIGNMENT) if self._copies_matrices else 0
        return copy_bytes + newton_schulz_bytes(rows, columns)

    def orthogonalize_flops(self, rows: int, columns: int, name: str = "") -> int:
        """Return the FLOPs of `orthogonalize`. A step has two matmuls with the matrix and one of square matrices."""
        fused = self.fused.get(name)
        if fused is not None:
            return sum(self.orthogonalize_flops(*shape) for shape in fused.shapes(rows, columns))
        small, large = sorted((rows, columns))
        return self.num_steps * (4 * small * small * large + 2 * small**3)

    def apply_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the weights of matrices, and all other parameters; see `megatrain.optim.base.MatrixOptimizer`."""
        for segment in segments:
            if self.is_matrix(segment.name, segment.shape):
                elements = range(segment.start, segment.stop)
                segment_directions = directions[segment.start : segment.stop]
                for part, shape in self._logical_matrices(segment):
                    part_directions = segment_directions[part.start - elements.start : part.stop - elements.start]
                    self._apply_direction(blocks, part, shape, segment, update, part_directions)
            else:
                self._update_other(blocks, gradient, segment, update)

    def _update_other(self, blocks: Mapping[str, Tensor], gradient: Tensor, segment: Segment, update: Update) -> None:
        assert 0 <= segment.start <= segment.stop <= gradient.numel(), (segment, gradient.numel())
        size = segment.stop - segment.start
        if not size:
            return
        elements = slice(segment.start, segment.stop)
        segment_blocks = {name: block[elements] for name, block in blocks.items() if name != "v"}
        start = segment.state_starts["v"]  # set by `build_segments` if its argument `kinds` is given
        segment_blocks["v"] = blocks["v"][start : start + size]
        self.adamw.update(segment_blocks, gradient[elements], (replace(segment, start=0, stop=size),), update)

    def _make_direction(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, elements: range, update: Update, directions: Tensor
    ) -> None:
        from megatrain.optim import kernels  # imported late, because importing numba takes half a second

        num_elements = gradient.numel()
        assert update.step >= 1, update.step
        assert 0 <= elements.start <= elements.stop <= num_elements, (elements, num_elements)
        moments = flat_block("m", blocks["m"], torch.float32, num_elements)
        grad = flat_gradient(gradient)
        output = flat_block("directions", directions, torch.bfloat16, len(elements))
        scalars = [np.float32(scalar) for scalar in (update.grad_scale, self.momentum, 1.0 - self.momentum)]
        self.threads.run(
            partial(
                kernels.muon_direction,
                moments[start:stop],
                grad[start:stop],
                output[start - elements.start : stop - elements.start],
                *scalars,
                self.nesterov,
            )
            for start, stop in cut(elements.start, elements.stop)
        )

    def _logical_matrices(self, segment: Segment) -> Iterator[tuple[range, tuple[int, int]]]:
        """Yield ranges of a segment with a single learning rate factor, and the shape that determines the factor."""
        rows, columns = segment.shape[-2:]
        fused = self.fused.get(segment.name)
        shapes = [(rows, columns)] if fused is None else fused.shapes(rows, columns)
        if fused is None or len({self._lr_factor(*shape) for shape in shapes}) == 1:
            yield range(segment.start, segment.stop), shapes[0]
            return
        shift = segment.start - segment.param_start
        for start, stop, index in fused.runs(columns, segment.param_start, segment.stop - shift):
            yield range(start + shift, stop + shift), shapes[index]

    def _lr_factor(self, rows: int, columns: int) -> float:
        """Return the learning rate factor for a matrix of this shape."""
        return math.sqrt(max(1.0, rows / columns)) if self.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5

    def _apply_direction(
        self,
        blocks: Mapping[str, Tensor],
        elements: range,
        shape: tuple[int, int],
        segment: Segment,
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update a range of the weights in a matrix or in a stack of matrices."""
        from megatrain.optim import kernels

        lr = update.lr * segment.lr_scale
        lr_factor = self._lr_factor(*shape)
        weight, low = flat_master(blocks, len(blocks["weight"]))
        directions_array = flat_block("directions", directions, torch.bfloat16, len(elements))
        scalars = np.float32(1.0 - lr * segment.weight_decay), np.float32(lr * lr_factor)
        self.threads.run(
            partial(
                kernels.muon_apply,
                weight[start:stop],
                low if low is None else low[start:stop],
                directions_array[start - elements.start : stop - elements.start],
                *scalars,
            )
            for start, stop in cut(elements.start, elements.stop)
        )

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernels for these formats."""
        formats = list(formats)
        self.adamw.warm_up(formats)
        segment, update = Segment(0, 1, 0.0, shape=(1, 1)), Update(step=1, lr=0.0)
        for split_master, dtype in formats:
            blocks = {kind.name: torch.zeros(1, dtype=kind.dtype) for kind in self.state_kinds(split_master)}
            directions = torch.zeros(1, dtype=torch.bfloat16)
            self._make_direction(blocks, torch.zeros(1, dtype=dtype), range(1), update, directions)
            self._apply_direction(blocks, range(1), (1, 1), segment, update, directions)
