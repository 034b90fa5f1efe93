"""Muon on the CPU: momentum of matrices made orthogonal before it is applied; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

__all__ = ["COEFFICIENTS", "AdjustLr", "Muon", "orthogonalized"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: of X, X X^T X and (X X^T)^2 X. Jordan et al., Muon (2024)."""
_EPS = 1e-7
AdjustLr = Literal["original", "match_rms_adamw"]


def orthogonalized(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of another one, and singular values of about 1: in bf16.

    Args:
        matrix: [rows, columns].
        num_steps: Steps of the Newton-Schulz iteration.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(torch.bfloat16).contiguous()
    x = x / x.norm().clamp(min=_EPS)
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
    wherever the blocks have their home: then their bits are the same.

    Args:
        adamw: Updates the parameters that are no such matrices.
        is_matrix: Tells those that are by full name and shape.
        momentum: At least 0 and below 1.
        nesterov: Look one step of momentum ahead.
        num_steps: Of the iteration.
        adjust_lr: "original" is sqrt(max(1, rows / columns)), "match_rms_adamw" 0.2 * sqrt(max(rows, columns)): with it
            updates are as large as AdamW's, and one learning rate serves both.
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
    ) -> None:
        assert 0 <= momentum < 1 and num_steps >= 1, (momentum, num_steps)
        assert adamw.state_dtype == "float32", adamw.state_dtype
        self.adamw, self.is_matrix = adamw, is_matrix
        self.momentum, self.nesterov, self.num_steps, self.adjust_lr = momentum, nesterov, num_steps, adjust_lr

    @property
    def threads(self) -> KernelThreads:
        """Threads of the elementwise updates."""
        return self.adamw.threads

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the master, `m`, and `v` of what AdamW updates."""
        first = StateKind("m", torch.float32)
        second = StateKind("v", torch.float32, lambda entry: 0 if self._is_matrix(entry) else entry.numel)
        return (*master_kinds(split_master), first, second)

    def _is_matrix(self, entry: TensorEntry) -> bool:
        return self.is_matrix(entry.name, entry.shape)

    def workspace_bytes(self, entry: TensorEntry) -> int:
        """Return the bytes that the update of a parameter takes beside its blocks."""
        if not self._is_matrix(entry):
            return 0
        rows, columns = entry.shape[-2:]
        return 4 * 4 * rows * columns + 3 * 2 * rows * columns + 2 * 2 * min(rows, columns) ** 2

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step in place; see `megatrain.optim.base.Optimizer.update`. Matrices come whole."""
        assert update.step >= 1, update.step
        for segment in segments:
            assert 0 <= segment.start <= segment.stop <= gradient.numel(), (segment, gradient.numel())
            inside = slice(segment.start, segment.stop)
            own = {name: block[inside] for name, block in blocks.items() if name != "v"}
            size = segment.stop - segment.start
            if self.is_matrix(segment.name, segment.shape):
                assert size == math.prod(segment.shape), segment
                self._update_matrices(own, gradient[inside], segment, update)
            elif size:
                start = segment.state_starts["v"]  # build_segments puts it there when it is told the kinds
                own["v"] = blocks["v"][start : start + size]
                alone = replace(segment, start=0, stop=size)
                self.adamw.update(own, gradient[inside], (alone,), update)

    def _update_matrices(self, own: Mapping[str, Tensor], gradient: Tensor, segment: Segment, update: Update) -> None:
        rows, columns = segment.shape[-2:]
        lr = update.lr * segment.lr_scale
        ratio = math.sqrt(max(1.0, rows / columns)) if self.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5
        for start in range(0, gradient.numel(), rows * columns):
            part = slice(start, start + rows * columns)
            g = gradient[part].to(torch.float32) * update.grad_scale
            m = own["m"][part]
            m.lerp_(g, 1.0 - self.momentum)
            direction = g.lerp_(m, self.momentum) if self.nesterov else m
            orthogonal = orthogonalized(direction.view(rows, columns), self.num_steps).reshape(-1)
            if "low" not in own:
                own["weight"][part].mul_(1.0 - lr * segment.weight_decay).add_(orthogonal, alpha=-lr * ratio)
                continue
            master = torch.empty_like(g)
            high, low = own["weight"][part], own["low"][part]
            decode(high, low, master)
            master.mul_(1.0 - lr * segment.weight_decay).add_(orthogonal, alpha=-lr * ratio)
            encode(master, high, low)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load AdamW's kernels for these kinds of master and gradient."""
        self.adamw.warm_up(formats)
