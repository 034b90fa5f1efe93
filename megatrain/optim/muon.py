"""Muon on the CPU: momentum of matrices made orthogonal before it is applied; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megatrain.optim.base import FORMATS, Format, Segment, StateKind, Update, master_kinds
from megatrain.optim.elementwise import AdamW
from megatrain.optim.threads import KernelThreads
from megatrain.precision import decode, encode

if TYPE_CHECKING:
    from megatrain.models.layout import TensorEntry

__all__ = ["COEFFICIENTS", "EPS", "AdjustLr", "Muon", "orthogonalized"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: of X, X X^T X and (X X^T)^2 X. Jordan et al., Muon (2024)."""
EPS = 1e-7
_PIECE_ELEMENTS = 1 << 16
"""Elements of a matrix that are updated at a time: their copies in fp32 stay in the cache."""
AdjustLr = Literal["original", "match_rms_adamw"]


def orthogonalized(
    matrix: Tensor,
    num_steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> Tensor:
    """Return a matrix with the singular vectors of another one, and singular values of about 1: in bf16.

    Args:
        matrix: [rows, columns].
        num_steps: Steps of the Newton-Schulz iteration.
        coefficients: Of the iteration.
        eps: The least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(torch.bfloat16).contiguous()
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon:
    """Muon for matrices, AdamW for the rest; see `megatrain.optim.base.Optimizer` for the contract.

    8 bytes per parameter of a matrix, 12 of all others. Of each matrix, in fp32 but for the iteration::

        g = grad * grad_scale
        m = m + (g - m) * (1 - momentum)
        u = orthogonalized(g + (m - g) * momentum)        # without nesterov: of m
        w = w * (1 - lr * weight_decay) - u * (lr * adjusted)

    A parameter of more than two dimensions is a batch of matrices, as experts are stacked: each is made orthogonal
    alone. An update needs whole matrices, so layouts that have some are not cut. Products are torch's, on the host,
    wherever the blocks have their home: then their bits are the same. All else is element by element, so several ranks
    make it where their shares are (`megatrain.optim.base.MatrixOptimizer`).

    Args:
        adamw: Updates the parameters that are no such matrices.
        is_matrix: Tells those that are by full name and shape.
        momentum: At least 0 and below 1.
        nesterov: Look one step of momentum ahead.
        num_steps: Of the iteration.
        adjust_lr: "original" is sqrt(max(1, rows / columns)), "match_rms_adamw" 0.2 * sqrt(max(rows, columns)): with it
            updates are as large as AdamW's, and one learning rate serves both.
        coefficients: Of the iteration.
        eps: Of the iteration.
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
    ) -> None:
        assert 0 <= momentum < 1 and num_steps >= 1, (momentum, num_steps)
        assert adamw.state_dtype == "float32", adamw.state_dtype
        self.adamw, self.is_matrix = adamw, is_matrix
        self.momentum, self.nesterov, self.num_steps, self.adjust_lr = momentum, nesterov, num_steps, adjust_lr
        self.coefficients, self.eps = coefficients, eps

    @property
    def piece_bytes(self) -> int:
        """What updates take at most, beside what is made orthogonal: a few copies of a piece in fp32."""
        return 4 * 4 * _PIECE_ELEMENTS

    @property
    def threads(self) -> KernelThreads:
        """Threads of the elementwise updates."""
        return self.adamw.threads

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the master, `m`, and `v` of what AdamW updates."""
        first = StateKind("m", torch.float32)
        second = StateKind("v", torch.float32, lambda entry: 0 if self.is_matrix_of(entry) else entry.numel)
        return (*master_kinds(split_master), first, second)

    def is_matrix_of(self, entry: TensorEntry) -> bool:
        """Return whether a parameter is made of such matrices."""
        return self.is_matrix(entry.name, entry.shape)

    def workspace_bytes(self, entry: TensorEntry) -> int:
        """Return the bytes that the update of a parameter takes beside its blocks."""
        if not self.is_matrix_of(entry):
            return 0
        rows, columns = entry.shape[-2:]
        pieces = min(self.piece_bytes, 4 * 4 * rows * columns)
        return 2 * rows * columns + max(pieces, self.orthogonalize_bytes(rows, columns))

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`. Matrices come whole."""
        for segment in segments:
            if not self.is_matrix(segment.name, segment.shape):
                self._update_other(blocks, gradient, segment, update)
                continue
            assert segment.stop - segment.start == math.prod(segment.shape), segment
            rows, columns = segment.shape[-2:]
            for start in range(segment.start, segment.stop, rows * columns):
                # One by one: the directions of a matrix take less room than those of a stack.
                inside = range(start, start + rows * columns)
                direction = torch.empty(rows * columns, dtype=torch.bfloat16)
                self._make_direction(blocks, gradient, inside, update, direction)
                made = self.orthogonalize(direction.view(rows, columns))
                self._apply_direction(blocks, inside, segment, update, made.reshape(-1))

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
                inside = range(segment.start, segment.stop)
                self._make_direction(blocks, gradient, inside, update, directions[segment.start : segment.stop])

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Return a matrix made orthogonal, in bf16."""
        return orthogonalized(matrix, self.num_steps, self.coefficients, self.eps)

    def orthogonalize_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that this takes beside the matrix: three copies, and two products of the smaller side."""
        return 3 * 2 * rows * columns + 2 * 2 * min(rows, columns) ** 2

    def apply_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the weights of matrices, and all else; see `megatrain.optim.base.MatrixOptimizer`."""
        for segment in segments:
            if self.is_matrix(segment.name, segment.shape):
                inside = range(segment.start, segment.stop)
                self._apply_direction(blocks, inside, segment, update, directions[segment.start : segment.stop])
            else:
                self._update_other(blocks, gradient, segment, update)

    def _update_other(self, blocks: Mapping[str, Tensor], gradient: Tensor, segment: Segment, update: Update) -> None:
        assert 0 <= segment.start <= segment.stop <= gradient.numel(), (segment, gradient.numel())
        size = segment.stop - segment.start
        if not size:
            return
        inside = slice(segment.start, segment.stop)
        own = {name: block[inside] for name, block in blocks.items() if name != "v"}
        start = segment.state_starts["v"]  # build_segments puts it there when it is told the kinds
        own["v"] = blocks["v"][start : start + size]
        self.adamw.update(own, gradient[inside], (replace(segment, start=0, stop=size),), update)

    def _make_direction(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, elements: range, update: Update, direction: Tensor
    ) -> None:
        assert update.step >= 1, update.step
        assert 0 <= elements.start <= elements.stop <= gradient.numel(), (elements, gradient.numel())
        for piece in _pieces(elements):
            g = gradient[piece].to(torch.float32) * update.grad_scale
            m = blocks["m"][piece]
            m.lerp_(g, 1.0 - self.momentum)
            made = g.lerp_(m, self.momentum) if self.nesterov else m
            direction[piece.start - elements.start : piece.stop - elements.start] = made

    def _apply_direction(
        self, blocks: Mapping[str, Tensor], elements: range, segment: Segment, update: Update, direction: Tensor
    ) -> None:
        """Update the weights of some elements of a matrix, or of a stack of them."""
        rows, columns = segment.shape[-2:]
        lr = update.lr * segment.lr_scale
        ratio = math.sqrt(max(1.0, rows / columns)) if self.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5
        for piece in _pieces(elements):
            made = direction[piece.start - elements.start : piece.stop - elements.start]
            if "low" not in blocks:
                blocks["weight"][piece].mul_(1.0 - lr * segment.weight_decay).add_(made, alpha=-lr * ratio)
                continue
            master = torch.empty(len(made), dtype=torch.float32)
            high, low = blocks["weight"][piece], blocks["low"][piece]
            decode(high, low, master)
            master.mul_(1.0 - lr * segment.weight_decay).add_(made, alpha=-lr * ratio)
            encode(master, high, low)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load AdamW's kernels for these kinds of master and gradient."""
        self.adamw.warm_up(formats)


def _pieces(elements: range) -> Iterator[slice]:
    """Yield ranges of at most `_PIECE_ELEMENTS`."""
    for start in range(elements.start, elements.stop, _PIECE_ELEMENTS):
        yield slice(start, min(start + _PIECE_ELEMENTS, elements.stop))
