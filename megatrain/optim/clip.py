"""Sums of gradients over the uses of a parameter, exact gradient norms, and the clip coefficient.

The norm is the square root of an fp64 sum. The sum's order depends only on the layout: first within chunks of 65,536
elements, then over these partial sums in a block group, then over the block groups. The norm is therefore bit-identical
for every placement and number of threads, and on a GPU (`on_device.device_squared_norm`). Clipping needs no separate
pass over the gradients, because updates multiply by the coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import GRADIENT_DTYPES
from megatrain.optim.elementwise import flat_gradient
from megatrain.optim.on_device import concat_device_partials, device_partials, sum_partials
from megatrain.optim.threads import RANGE_ELEMENTS, KernelThreads, cut, group_calls

__all__ = [
    "NonFiniteGradientError",
    "SquaredNorm",
    "add_in_order",
    "clip_coefficient",
    "decide_on_device",
    "global_norm",
    "gradient_scale",
    "partial_squares",
    "squared_norm",
    "squared_norms",
    "sum_gradients",
    "warm_up",
]

_EPS = 1e-6
"""Number added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""
_CALLING_THREAD = KernelThreads(1)


class NonFiniteGradientError(Exception):
    """Error for a NaN or infinite gradient that was not applied. The message says whether others were applied."""


def sum_gradients(total: Tensor, addend: Tensor, threads: KernelThreads | None = None) -> None:
    """Add the gradient of another use site to `total` in fp32, and round the sum to the dtype of `total`.

    Args:
        total: 1-D contiguous fp32 or bf16 CPU tensor. Changed in place.
        addend: 1-D contiguous fp32 or bf16 CPU tensor of the same length.
        threads: Compute threads. None uses the calling thread.
    """
    from megatrain.optim import kernels

    total_flat, addend_flat = flat_gradient(total), flat_gradient(addend)
    assert total_flat.size == addend_flat.size, (total_flat.size, addend_flat.size)
    (threads or _CALLING_THREAD).run(
        partial(kernels.add_in_place, total_flat[start:stop], addend_flat[start:stop])
        for start, stop in cut(0, total_flat.size)
    )


def squared_norm(gradient: Tensor, threads: KernelThreads | None = None) -> float:
    """Return the fp64 sum of squares of a block group's gradient.

    The sum is finite if all elements are finite, because squares and sums of finite fp32 numbers fit into fp64.

    Args:
        gradient: 1-D contiguous fp32 or bf16 CPU tensor, padding (zeros) included.
        threads: Compute threads, which do not affect the result. None uses the calling thread.
    """
    return _sum_in_order(_host_partials(gradient, threads))


def partial_squares(gradient: Tensor, threads: KernelThreads | None = None) -> Tensor:
    """Return the fp64 sums of squares of chunks of 65,536 elements, on the gradient's device, without a host sync.

    Args:
        gradient: As in `squared_norm` or `device_squared_norm`.
        threads: Compute threads. None uses the calling thread.
    """
    if gradient.is_cuda:
        return device_partials(gradient)
    return torch.tensor(_host_partials(gradient, threads), dtype=torch.float64)


def add_in_order(partials: Tensor) -> float:
    """Return the sum of fp64 numbers on the host, added sequentially as in `squared_norm`."""
    return float(np.add.accumulate(partials.numpy())[-1]) if len(partials) else 0.0


def _host_partials(gradient: Tensor, threads: KernelThreads | None) -> list[float]:
    from megatrain.optim import kernels

    grad = flat_gradient(gradient)
    block = kernels.NORM_BLOCK_ELEMENTS
    partials = np.zeros(-(-grad.size // block), dtype=np.float64)

    def calls() -> Iterator[Callable[[], None]]:
        for start, stop in cut(0, partials.size, elements=4):
            yield partial(kernels.squared_norms, grad[start * block : stop * block], partials[start:stop])

    (threads or _CALLING_THREAD).run(calls())
    sums: list[float] = partials.tolist()
    return sums


class SquaredNorm:
    """Sum of squares of a block group's gradient. Parts can be added in any order; the result equals `squared_norm`.

    Args:
        threads: Compute threads. None uses the calling thread.
    """

    def __init__(self, threads: KernelThreads | None = None) -> None:
        self._threads = threads
        self._host: dict[int, list[float]] = {}
        self._device: dict[int, Tensor] = {}

    def add(self, index: int, part: Tensor) -> None:
        """Add a part, as in `squared_norm` or `device_squared_norm`.

        Args:
            index: Position of the part in the order of summation, from 0.
            part: Gradient of the part. The length of every part except the last is a multiple of
                ``kernels.NORM_BLOCK_ELEMENTS``.
        """
        if part.is_cuda:
            self._device[index] = device_partials(part)
        else:
            self._host[index] = _host_partials(part, self._threads)

    def add_all(self, parts: Sequence[Tensor]) -> None:
        """Add all parts in one call. The result is the same as if ``add`` were called for each part."""
        if parts[0].is_cuda:
            self._device[0] = concat_device_partials(parts)
            return
        for index, part in enumerate(parts):
            self.add(index, part)

    def total(self) -> float | Tensor:
        """Return the sum over all parts, ordered by index: a float, or a scalar on the device."""
        if self._device:
            return sum_partials(torch.cat([self._device[index] for index in sorted(self._device)]))
        return _sum_in_order(value for index in sorted(self._host) for value in self._host[index])


def squared_norms(gradients: Sequence[Tensor], threads: KernelThreads) -> list[float]:
    """Return `squared_norm` of each gradient, computed in only a few kernel calls.

    Args:
        gradients: Contiguous fp32 or bf16 CPU tensors of any shape.
    """
    from megatrain.optim import kernels

    block = kernels.NORM_BLOCK_ELEMENTS
    counts = [-(-gradient.numel() // block) for gradient in gradients]
    ends = list(accumulate(counts))
    partials = np.zeros(sum(counts), np.float64)
    calls: list[Callable[[], None]] = []
    for dtype in GRADIENT_DTYPES:
        rows = [
            (
                gradient.data_ptr() + start * dtype.itemsize,
                stop - start,
                end - count + start // block,
                end - count - (-stop // block),
            )
            for gradient, count, end in zip(gradients, counts, ends, strict=True)
            if gradient.dtype == dtype
            for start, stop in cut(0, gradient.numel(), elements=4 * block)
        ]
        example = flat_gradient(torch.empty(0, dtype=dtype))
        table = np.array(rows, np.int64).reshape(len(rows), 4)
        for start_row, stop_row in group_calls([row[1] for row in rows], RANGE_ELEMENTS):
            calls.append(partial(kernels.squared_norms_rows, table[start_row:stop_row], example, partials))
    threads.run(calls)
    sums = partials.tolist()
    return [_sum_in_order(sums[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def global_norm(squared_norms: Iterable[float]) -> float:
    """Return the gradient norm over all block groups.

    Args:
        squared_norms: `squared_norm` of each block group, in layout order. The order affects the result.
    """
    return math.sqrt(_sum_in_order(squared_norms))


def clip_coefficient(norm: float, max_grad_norm: float) -> float:
    """Return the factor that scales a gradient with this norm down to `max_grad_norm`, or 1 if the norm is smaller.

    The formula is the same as in `torch.nn.utils.clip_grad_norm_`, but in fp64 instead of fp32.

    Args:
        norm: Global norm. Must be finite.
        max_grad_norm: Largest norm after clipping. 0 disables clipping.
    """
    assert math.isfinite(norm) and norm >= 0, norm
    assert max_grad_norm >= 0, max_grad_norm
    return min(1.0, max_grad_norm / (norm + _EPS)) if max_grad_norm > 0 else 1.0


def gradient_scale(norm: float, max_grad_norm: float, nonfinite: Literal["stop", "skip", "ignore"]) -> float | None:
    """Return the factor by which to multiply a step's gradients, or None if the step must not be applied.

    Args:
        norm: Global norm of the step.
        max_grad_norm: Largest norm after clipping.
        nonfinite: Treatment of a NaN or infinite norm: "ignore" divides by the norm as torch does; "stop" and "skip"
            return None.
    """
    if math.isfinite(norm):
        return clip_coefficient(norm, max_grad_norm)
    return max_grad_norm / norm if nonfinite == "ignore" else None


def decide_on_device(
    squared_norms: Sequence[Tensor], max_grad_norm: float, nonfinite: Literal["stop", "skip", "ignore"]
) -> Tensor:
    """Return the decision of `gradient_scale` as an `Update.decision`, on the norms' device, without a host sync.

    The host and a GPU compute the same result, because all operations are in fp64 and round to nearest.

    Args:
        squared_norms: fp64 scalars on one device, in layout order.
        max_grad_norm: As in `gradient_scale`.
        nonfinite: As in `gradient_scale`.
    """
    norm = sum_partials(torch.stack(list(squared_norms))).sqrt()
    is_finite, one = norm.isfinite(), torch.ones_like(norm)
    # Divide only tensors by tensors. If one operand were a Python number, torch would multiply by a reciprocal instead.
    max_norm = torch.full_like(norm, max_grad_norm)
    scale = torch.div(max_norm, norm + _EPS).minimum(one) if max_grad_norm > 0 else one
    if nonfinite == "ignore":
        scale, is_used = torch.where(is_finite, scale, torch.div(max_norm, norm)), one
    else:
        is_used = is_finite.to(norm.dtype)
    return torch.stack([scale, is_used]).to(torch.float32)


def warm_up() -> None:
    """Compile or load the kernels for gradient sums and norms before the first step."""
    for dtype in GRADIENT_DTYPES:
        sum_gradients(torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
        squared_norm(torch.zeros(1, dtype=dtype))


def _sum_in_order(values: Iterable[float]) -> float:
    total = 0.0  # since Python 3.12, sum() compensates rounding errors, which changes the result
    for value in values:
        total += value
    return total
