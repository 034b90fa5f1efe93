"""The compiled loops of Adafactor; see `megatrain.optim.adafactor`, and `megatrain.optim.kernels` for their rules.

numba's cache looks at the time of one file: whoever changes what is imported here from `kernels` also touches this one.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from megatrain.optim.kernels import (
    NORM_BLOCK_ELEMENTS,
    NORM_LANES,
    Float32,
    Float64,
    Gradient,
    Low,
    Master,
    as_float32,
    load_master,
    store_master,
    sum_lanes,
)

__all__ = [
    "NORM_BLOCK_ELEMENTS",
    "adafactor_columns",
    "adafactor_square_sums",
    "adafactor_vector",
    "apply_factored",
    "apply_vector",
]


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def adafactor_columns(grad: Gradient, grad_scale: np.float32, row_sums: Float64, column_sums: Float64) -> None:
    """Write the sums of squares over each row and each column, in fp64.

    Column sums add rows in order. Row sums are in the lanes of `squared_norms`.

    Args:
        grad: `matrices x rows x columns`.
        grad_scale: factor, applied in fp32.
        row_sums: `matrices x rows`, written.
        column_sums: `matrices x columns`, written.
    """
    num_matrices, num_rows, num_columns = grad.shape
    lanes = np.empty(NORM_LANES, np.float64)
    column_sums[:, :] = 0.0
    for matrix in range(num_matrices):
        sums = column_sums[matrix]
        for row in range(num_rows):
            values = grad[matrix, row]
            lanes[:] = 0.0
            num_whole = num_columns // NORM_LANES
            for whole in range(num_whole):
                part = values[whole * NORM_LANES : (whole + 1) * NORM_LANES]
                sums_part = sums[whole * NORM_LANES : (whole + 1) * NORM_LANES]
                for lane in range(NORM_LANES):
                    value = np.float64(as_float32(part[lane]) * grad_scale)
                    square = value * value
                    lanes[lane] += square
                    sums_part[lane] += square
            for column in range(num_whole * NORM_LANES, num_columns):
                value = np.float64(as_float32(values[column]) * grad_scale)
                square = value * value
                lanes[column - num_whole * NORM_LANES] += square
                sums[column] += square
            row_sums[matrix, row] = sum_lanes(lanes)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def adafactor_square_sums(
    grad: Gradient, grad_scale: np.float32, row_factor: Float32, column_factor: Float32, sums: Float64
) -> None:
    """Write the sum of squares of the update of each row, in fp64 and in the lanes of `squared_norms`.

    Args:
        grad: `matrices x rows x columns`.
        row_factor: `matrices x rows`.
        column_factor: `matrices x columns`.
        sums: `matrices x rows`, written.
    """
    num_matrices, num_rows, num_columns = grad.shape
    lanes = np.empty(NORM_LANES, np.float64)
    for matrix in range(num_matrices):
        factors = column_factor[matrix]
        for row in range(num_rows):
            values = grad[matrix, row]
            factor = row_factor[matrix, row]
            lanes[:] = 0.0
            num_whole = num_columns // NORM_LANES
            for whole in range(num_whole):
                part = values[whole * NORM_LANES : (whole + 1) * NORM_LANES]
                factors_part = factors[whole * NORM_LANES : (whole + 1) * NORM_LANES]
                for lane in range(NORM_LANES):
                    update = np.float64((as_float32(part[lane]) * grad_scale) * (factor * factors_part[lane]))
                    lanes[lane] += update * update
            for column in range(num_whole * NORM_LANES, num_columns):
                update = np.float64((as_float32(values[column]) * grad_scale) * (factor * factors[column]))
                lanes[column - num_whole * NORM_LANES] += update * update
            sums[matrix, row] = sum_lanes(lanes)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def apply_factored(
    weight: Master,
    low: Low,
    grad: Gradient,
    grad_scale: np.float32,
    row_factor: Float32,
    column_factor: Float32,
    decay: np.float32,
    step_size: np.float32,
) -> None:
    """Apply Adafactor's update to matrices, in place.

    Args:
        weight: masters, 1-D, as long as `grad` is large.
        low: masters, 1-D, as long as `grad` is large.
        grad: `matrices x rows x columns`.
        row_factor: `matrices x rows`.
        column_factor: `matrices x columns`.
    """
    num_matrices, num_rows, num_columns = grad.shape
    for matrix in range(num_matrices):
        factors = column_factor[matrix]
        for row in range(num_rows):
            start = (matrix * num_rows + row) * num_columns
            weights = weight[start : start + num_columns]
            lows = None if low is None else low[start : start + num_columns]
            values = grad[matrix, row]
            factor = row_factor[matrix, row]
            for column in range(num_columns):
                decayed = load_master(weights, lows, column) * decay
                update = (as_float32(values[column]) * grad_scale) * (factor * factors[column])
                store_master(weights, lows, column, decayed - update * step_size)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def adafactor_vector(
    v: Float32,
    grad: Gradient,
    grad_scale: np.float32,
    eps: np.float32,
    beta2: np.float32,
    one_minus_beta2: np.float32,
    sums: Float64,
) -> None:
    """Update the second moment of a parameter that is no matrix; write the sum of squares of its update.

    Args:
        v: 1-D, equally long.
        grad: 1-D, equally long.
        sums: one per NORM_BLOCK_ELEMENTS, in fp64, added up in order; written.
    """
    for block in range(sums.size):
        total = 0.0
        for i in range(block * NORM_BLOCK_ELEMENTS, min((block + 1) * NORM_BLOCK_ELEMENTS, grad.size)):
            g = as_float32(grad[i]) * grad_scale
            v_new = v[i] * beta2 + (g * g + eps) * one_minus_beta2
            v[i] = v_new
            update = np.float64(g / np.sqrt(v_new))
            total += update * update
        sums[block] = total


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def apply_vector(
    weight: Master,
    low: Low,
    v: Float32,
    grad: Gradient,
    grad_scale: np.float32,
    decay: np.float32,
    step_size: np.float32,
) -> None:
    """Apply Adafactor's update to a parameter that is no matrix, in place."""
    for i in range(grad.size):
        decayed = load_master(weight, low, i) * decay
        update = (as_float32(grad[i]) * grad_scale) / np.sqrt(v[i])
        store_master(weight, low, i, decayed - update * step_size)
