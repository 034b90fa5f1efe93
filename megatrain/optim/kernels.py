"""The compiled loops of the optimizer. Importing this file imports numba; nothing is compiled before the first call.

Rules that make the bits the same for every cut of a block, every thread count and every CPU:

* one fp32 operation per line of arithmetic, in the order written, rounded each time. `fastmath` stays off, so LLVM may
  neither reassociate nor contract a product and a sum into a fused multiply-add (a test reads the machine code);
* elements never meet, except in `squared_norms`, whose order of summation is fixed by position in the block;
* scalars arrive in fp32, rounded once from fp64 by the caller.

`error_model="numpy"` makes division by zero give infinity instead of a branch, without which nothing vectorizes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["NORM_BLOCK_ELEMENTS", "NORM_LANES", "add_in_place", "squared_norms", "update_master", "update_split_master"]

NORM_BLOCK_ELEMENTS = 65_536
NORM_LANES = 64

Float32 = NDArray[np.float32]


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def update_master(
    weight: Float32,
    m: Float32,
    v: Float32,
    grad: Float32,
    grad_scale: np.float32,
    decay: np.float32,
    one_minus_beta1: np.float32,
    beta2: np.float32,
    one_minus_beta2: np.float32,
    correction2_sqrt: np.float32,
    eps: np.float32,
    step_size: np.float32,
) -> None:
    """AdamW on fp32 masters, in place; all arrays 1-D, contiguous and equally long."""
    for i in range(weight.size):
        decayed = weight[i] * decay
        g = grad[i] * grad_scale
        m_new = m[i] + (g - m[i]) * one_minus_beta1
        v_new = v[i] * beta2 + (one_minus_beta2 * g) * g
        denominator = np.sqrt(v_new) / correction2_sqrt + eps
        m[i] = m_new
        v[i] = v_new
        weight[i] = decayed - (step_size * m_new) / denominator


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def update_split_master(
    high: NDArray[np.uint16],
    low: NDArray[np.int16],
    m: Float32,
    v: Float32,
    grad: Float32,
    grad_scale: np.float32,
    decay: np.float32,
    one_minus_beta1: np.float32,
    beta2: np.float32,
    one_minus_beta2: np.float32,
    correction2_sqrt: np.float32,
    eps: np.float32,
    step_size: np.float32,
) -> None:
    """AdamW on masters held as bf16 high and int16 low halves (`megatrain.precision`), in place, in one pass.

    The arithmetic between decoding and encoding is that of `update_master`, line for line: a function that both call
    would have to return several values per element, and that loop no longer vectorizes.
    """
    for i in range(high.size):
        bits = (np.uint32(high[i]) << np.uint32(16)) + np.uint32(np.int32(low[i]))
        decayed = np.uint32(bits).view(np.float32) * decay
        g = grad[i] * grad_scale
        m_new = m[i] + (g - m[i]) * one_minus_beta1
        v_new = v[i] * beta2 + (one_minus_beta2 * g) * g
        denominator = np.sqrt(v_new) / correction2_sqrt + eps
        m[i] = m_new
        v[i] = v_new
        bits = np.float32(decayed - (step_size * m_new) / denominator).view(np.uint32)
        high[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
        low[i] = np.int16(bits)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def add_in_place(total: Float32, addend: Float32) -> None:
    """Add `addend` to `total`, element by element."""
    for i in range(total.size):
        total[i] += addend[i]


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def squared_norms(grad: Float32, partials: NDArray[np.float64]) -> None:
    """Write the sum of squares of each NORM_BLOCK_ELEMENTS of `grad` to `partials`, in fp64.

    Lane j of a block adds up elements j, j + 64, j + 128, ... in this order; then the lanes are added in order. The
    square of an fp32 number is exact in fp64, so only the additions round.
    """
    lanes = np.empty(NORM_LANES, np.float64)
    for block in range(partials.size):
        start = block * NORM_BLOCK_ELEMENTS
        part = grad[start : min(start + NORM_BLOCK_ELEMENTS, grad.size)]
        lanes[:] = 0.0
        num_rows = part.size // NORM_LANES
        for row in range(num_rows):
            values = part[row * NORM_LANES : (row + 1) * NORM_LANES]
            for lane in range(NORM_LANES):
                value = np.float64(values[lane])
                lanes[lane] += value * value
        for lane in range(part.size - num_rows * NORM_LANES):
            value = np.float64(part[num_rows * NORM_LANES + lane])
            lanes[lane] += value * value
        total = 0.0
        for lane in range(NORM_LANES):
            total += lanes[lane]
        partials[block] = total
