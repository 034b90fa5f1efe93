"""Plain reimplementation of AdamW, the split master and the gradient norm.

numpy rounds every operation to the dtype of its arrays and never fuses two operations, so this code defines the exact
arithmetic of the kernels.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def adamw_step(
    weight: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    grad: NDArray[np.float32],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return the new `(weight, m, v)` without changing the arguments."""
    one = np.float32
    g = grad * one(grad_scale)
    decayed = weight * one(1.0 - lr * weight_decay)
    difference = g - m
    m_new = m + difference * one(1.0 - beta1)
    scaled = g * one(1.0 - beta2)
    square = scaled * g
    v_new = v * one(beta2) + square
    root = np.sqrt(v_new)
    denominator = root / one(math.sqrt(1.0 - beta2**step)) + one(eps)
    numerator = m_new * one(lr / (1.0 - beta1**step))
    return decayed - numerator / denominator, m_new, v_new


def split(master: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """Return the bf16 bits nearest to each finite master (ties round away from zero), and the master's low 16 bits."""
    bits = master.view(np.uint32)
    truncated = (bits >> 16).astype(np.uint16)
    remainder = bits & 0xFFFF
    high = np.where(remainder >= 0x8000, truncated + np.uint16(1), truncated).astype(np.uint16)
    return high, remainder.astype(np.uint16).view(np.int16)


def join(high: NDArray[np.uint16], low: NDArray[np.int16]) -> NDArray[np.float32]:
    """Restore the masters from the two halves that `split` returned."""
    truncated = np.where(low < 0, high - np.uint16(1), high).astype(np.uint32)
    return ((truncated << 16) | low.view(np.uint16)).view(np.float32)


def squared_norm(grad: NDArray[np.float32], block_elements: int = 65_536, num_lanes: int = 64) -> float:
    """Return the sum of squares in fp64. The order is fixed: over each lane of a block, over lanes, over blocks."""
    total = 0.0
    for start in range(0, grad.size, block_elements):
        part = grad[start : start + block_elements].astype(np.float64)
        padded = np.zeros(-(-part.size // num_lanes) * num_lanes)
        padded[: part.size] = part * part
        lanes = np.zeros(num_lanes)
        for row in padded.reshape(-1, num_lanes):
            lanes = lanes + row
        block_total = 0.0
        for lane in lanes.tolist():
            block_total += lane
        total += block_total
    return total
