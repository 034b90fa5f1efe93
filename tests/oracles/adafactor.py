"""Plain reimplementation of Adafactor: one matrix at a time, with fp64 sums in a fixed order."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

RANGE, MAX_ROW_BLOCKS, LANES, VECTOR_BLOCK = 1 << 20, 64, 64, 65_536


def sum_in_lanes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum along the last axis in a fixed order: element j goes into lane j modulo 64, then the lanes are added."""
    width = -(-values.shape[-1] // LANES) * LANES
    padded = np.zeros((*values.shape[:-1], width))
    padded[..., : values.shape[-1]] = values
    return sum_in_order(sum_in_order(padded.reshape(*values.shape[:-1], -1, LANES), axis=-2), axis=-1)


def sum_in_order(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Sum along an axis, element by element."""
    total = np.zeros_like(np.take(values, 0, axis))
    for index in range(values.shape[axis]):
        total = total + np.take(values, index, axis)
    return total


def sum_rows_in_blocks(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum the rows of a matrix in a fixed order: first within each block of rows, then over the blocks."""
    num_rows, num_columns = squares.shape
    block = max(RANGE // num_columns, -(-num_rows // MAX_ROW_BLOCKS), 1)
    parts = [sum_in_order(squares[start : start + block], axis=0) for start in range(0, num_rows, block)]
    return sum_in_order(np.stack(parts), axis=0)


def adafactor_step(
    weight: Array,
    moments: Array,
    grad: Array,
    shape: tuple[int, ...],
    *,
    step: int,
    lr: float,
    decay_rate: float = -0.8,
    eps: float = 1e-30,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> tuple[Array, Array]:
    """Return a parameter's new flat `(weight, moments)`.

    A vector has one moment per element. Matrices have one moment per row and per column.
    """
    one = np.float32
    beta2 = 1.0 - step**decay_rate
    g = (grad + one(0)) * one(grad_scale)  # turns -0 into 0
    if len(shape) < 2:
        squares = g * g
        moments = moments * one(beta2) + (squares + one(eps)) * one(1.0 - beta2)
        update = g / np.sqrt(moments)
        squares = update.astype(np.float64) ** 2
        starts = range(0, squares.size, VECTOR_BLOCK)
        total = sum_in_order(np.array([sum_in_order(squares[s : s + VECTOR_BLOCK], 0) for s in starts]), 0)
    else:
        num_rows, num_columns = shape[-2:]
        g = g.reshape(-1, num_rows, num_columns)
        squares = g.astype(np.float64) ** 2
        row_means = (sum_in_lanes(squares) / num_columns + eps).astype(np.float32)
        column_means = (np.stack([sum_rows_in_blocks(each) for each in squares]) / num_rows + eps).astype(np.float32)
        rows = moments[: row_means.size].reshape(row_means.shape)
        columns = moments[row_means.size :].reshape(column_means.shape)
        rows = rows * one(beta2) + row_means * one(1.0 - beta2)
        columns = columns * one(beta2) + column_means * one(1.0 - beta2)
        mean = sum_in_order(rows.astype(np.float64), axis=1)[:, None] / num_rows
        row_factor = np.sqrt(mean / rows).astype(np.float32)
        column_factor = np.sqrt(1.0 / columns.astype(np.float64)).astype(np.float32)
        update = g * (row_factor[:, :, None] * column_factor[:, None, :])
        total = sum_in_order(sum_in_lanes(update.astype(np.float64) ** 2).reshape(-1), axis=0)
        moments = np.concatenate([rows.reshape(-1), columns.reshape(-1)])
    ratio = math.sqrt(float(total) / grad.size) / clip_threshold
    step_size = one(lr if ratio <= 1.0 else lr / ratio)
    decayed = weight * one(1.0 - lr * weight_decay)
    return decayed - update.reshape(-1) * step_size, moments
