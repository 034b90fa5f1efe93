"""Numba kernels of the optimizers. Importing this file imports numba, which compiles a kernel at its first call.

These rules make the results bit-identical for every partition of a block, every thread count and every CPU:

* Arithmetic runs in fp32 in the written order, and each operation is rounded. `fastmath` stays off, so LLVM does
  not reorder operations or fuse a product and a sum into a multiply-add (a test reads the machine code).
* Elements are independent, except in sums over a tensor. These sums are in fp64, in an order that depends only on
  positions in the block.
* Scalars arrive in fp32. The caller rounds them once from fp64.

With `error_model="numpy"`, division by zero returns infinity instead of branching, which vectorization requires.

Moments have one of three formats: fp32; bf16, rounded stochastically with a hash of the element (`random_bits`); or
bytes, with a scale for each block of 256 elements (`megatrain.optim.moments`).

A master weight is `(weight, low)`: fp32 and None, or the bf16 bits and the int16 half of `megatrain.base.precision`. A
gradient is fp32 or the bits of bf16. Each kernel is written once; numba compiles it for the argument types and drops
unused branches.

An elementwise optimizer is a function of a weight, a gradient and two moments, in fp32. `UPDATES` contains three
kernels for each function: for a range of a block, for a range with moments in bytes, and for many parameters in one
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable
from numpy.typing import NDArray

from megatrain.optim.moments import BLOCK_ELEMENTS

__all__ = [
    "NORM_BLOCK_ELEMENTS",
    "NORM_LANES",
    "UPDATES",
    "UpdateKernels",
    "adafactor_columns",
    "adafactor_square_sums",
    "adafactor_vector",
    "add_in_place",
    "apply_factored",
    "apply_vector",
    "average",
    "average_rows",
    "muon_apply",
    "muon_direction",
    "squared_norms",
    "squared_norms_rows",
]

NORM_BLOCK_ELEMENTS = 65_536
NORM_LANES = 64

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Master = NDArray[np.float32] | NDArray[np.uint16]
Low = NDArray[np.int16] | None
Moment = NDArray[np.float32] | NDArray[np.uint16] | None
Key = tuple[np.uint32, np.uint32, np.int64] | None
Codes = NDArray[np.uint8]
Scalars = tuple[np.float32, ...]
Code = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8]]
Int8Moments = tuple[tuple[Codes, NDArray[np.float32], Code], ...]
Gradient = NDArray[np.float32] | NDArray[np.uint16]
Rows = NDArray[np.int64]


# -- loads and stores ---------------------------------------------------------------------------------------------


def as_float32(value: Any) -> Any:
    """Return an element of a gradient block in fp32. bf16 bits are widened exactly."""
    raise NotImplementedError("only compiled code calls this")  # numba calls the overload below


@overload(as_float32)
def _as_float32(value: Any) -> Any:
    def identity(value: Any) -> Any:
        return value

    def widen(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    return widen if value == types.uint16 else identity


def as_gradient(value: Any) -> Any:
    """Return an element of a gradient block in fp32, with -0 converted to 0.

    Because of the conversion, results do not depend on where zeros are added for parameters without a gradient.
    """
    raise NotImplementedError("only compiled code calls this")


@overload(as_gradient)
def _as_gradient(value: Any) -> Any:
    def add_zero(value: Any) -> Any:
        return value + np.float32(0.0)

    def widen(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32) + np.float32(0.0)

    return widen if value == types.uint16 else add_zero


def from_float32(value: Any, example: Any) -> Any:
    """Convert `value` to the dtype of `example`, an element of a block. bf16 is rounded to nearest, ties to even."""
    raise NotImplementedError("only compiled code calls this")


@overload(from_float32)
def _from_float32(value: Any, example: Any) -> Any:
    def identity(value: Any, example: Any) -> Any:
        return value

    def round_to_bf16(value: Any, example: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        lowest_bit = (bits >> np.uint32(16)) & np.uint32(1)
        nearest = np.uint16((bits + np.uint32(0x7FFF) + lowest_bit) >> np.uint32(16))
        return np.uint16(0x7FC0) if np.isnan(value) else nearest  # rounding the bits of a NaN could yield infinity

    return round_to_bf16 if example == types.uint16 else identity


@njit(fastmath=False, error_model="numpy")
def load_master(weight: Master, low: Low, i: int) -> Any:
    """Return the fp32 value of master weight `i`."""
    if low is None:
        return weight[i]
    bits = (np.uint32(weight[i]) << np.uint32(16)) + np.uint32(np.int32(low[i]))
    return np.uint32(bits).view(np.float32)


@njit(fastmath=False, error_model="numpy")
def store_master(weight: Any, low: Low, i: int, value: np.float32) -> None:
    """Write master weight `i`, given in fp32."""
    if low is None:
        weight[i] = value
    else:
        bits = np.float32(value).view(np.uint32)
        weight[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
        low[i] = np.int16(bits)


# -- moments -------------------------------------------------------------------------------------------------------


@njit(fastmath=False, error_model="numpy")
def lowbias32(bits: Any) -> Any:
    """Return Wellons' lowbias32 hash of 32 bits, a bijection. Every output bit depends on all input bits."""
    x = np.uint32(bits)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


def random_bits(key: Any, i: int) -> Any:
    """Return 32 random bits for element `i` of the arrays, or 0 without a key.

    Args:
        key: `(two halves of a 64-bit key, index of the arrays' first element)`, or None.
    """
    raise NotImplementedError("only compiled code calls this")


@overload(random_bits)
def _random_bits(key: Any, i: int) -> Any:
    def zero_bits(key: Any, i: int) -> Any:
        return np.uint32(0)

    def hash_element(key: Any, i: int) -> Any:
        element = np.uint64(key[2]) + np.uint64(i)
        first_hash = lowbias32(np.uint32(np.uint32(element) + key[0]))
        high_bits = np.uint32(np.uint32(element >> np.uint64(32)) * np.uint32(0x9E3779B9))
        return lowbias32(np.uint32(np.uint32(first_hash ^ key[1]) + high_bits))

    return zero_bits if isinstance(key, types.NoneType) else hash_element


def moment_from_float32(value: Any, bits: Any, example: Any) -> Any:
    """Convert `value` to the dtype of `example`. bf16 rounds up with a probability equal to the truncated fraction.

    Args:
        value: New moment in fp32.
        bits: 16 random bits.
        example: Any element of the moments' block.
    """
    raise NotImplementedError("only compiled code calls this")


@overload(moment_from_float32)
def _moment_from_float32(value: Any, bits: Any, example: Any) -> Any:
    def identity(value: Any, bits: Any, example: Any) -> Any:
        return value

    def round_to_bf16(value: Any, bits: Any, example: Any) -> Any:
        rounded = np.uint16(np.uint32(np.float32(value).view(np.uint32) + bits) >> np.uint32(16))
        return np.uint16(0x7FC0) if np.isnan(value) else rounded  # adding bits to a NaN could overflow into the sign

    return round_to_bf16 if example == types.uint16 else identity


@njit(fastmath=False, error_model="numpy")
def load_moment(moment: Moment, i: int) -> Any:
    """Return moment `i` in fp32, or None if the optimizer does not have this moment."""
    if moment is None:
        return None
    return as_float32(moment[i])


@njit(fastmath=False, error_model="numpy")
def store_moment(moment: Moment, i: int, value: Any, bits: Any) -> None:
    """Write moment `i`, given in fp32. The lowest 16 random bits determine the rounding."""
    if moment is not None:
        moment[i] = moment_from_float32(value, np.uint32(bits & np.uint32(0xFFFF)), moment[i])


# -- rules of elementwise optimizers -------------------------------------------------------------------------------
# Each rule updates one element, and returns the new weight and the new moments. Unused moments are None.


@register_jitable(fastmath=False, error_model="numpy")
def _adamw(w: np.float32, g: np.float32, m: np.float32, v: np.float32, scalars: Scalars) -> Any:
    """AdamW; see `megatrain.optim.elementwise.AdamW`."""
    decay, one_minus_beta1, beta2, one_minus_beta2, correction2_sqrt, eps, step_size = scalars
    w_decayed = w * decay
    m_new = m + (g - m) * one_minus_beta1
    v_new = v * beta2 + (one_minus_beta2 * g) * g
    denominator = np.sqrt(v_new) / correction2_sqrt + eps
    return w_decayed - (step_size * m_new) / denominator, m_new, v_new


@register_jitable(fastmath=False, error_model="numpy")
def _lion(w: np.float32, g: np.float32, m: np.float32, v: None, scalars: Scalars) -> Any:
    """Lion; see `megatrain.optim.elementwise.Lion`."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    w_decayed = w * decay
    direction = m * beta1 + g * one_minus_beta1
    m_new = m * beta2 + g * one_minus_beta2
    step = lr if direction > np.float32(0.0) else (-lr if direction < np.float32(0.0) else np.float32(0.0))
    return w_decayed - step, m_new, v


@register_jitable(fastmath=False, error_model="numpy")
def _sgd(w: np.float32, g: np.float32, m: np.float32 | None, v: None, scalars: Scalars) -> Any:
    """SGD; see `megatrain.optim.elementwise.SGD`. Without momentum `m` is None."""
    decay, momentum, lr = scalars
    g_decayed = g + w * decay
    m_new = g_decayed if m is None else m * momentum + g_decayed
    return w - m_new * lr, m_new, v


@register_jitable(fastmath=False, error_model="numpy")
def _nesterov(w: np.float32, g: np.float32, m: np.float32, v: None, scalars: Scalars) -> Any:
    """SGD with Nesterov momentum; see `megatrain.optim.elementwise.SGD`."""
    decay, momentum, lr = scalars
    g_decayed = g + w * decay
    m_new = m * momentum + g_decayed
    return w - (g_decayed + m_new * momentum) * lr, m_new, v


# -- kernels of elementwise optimizers -----------------------------------------------------------------------------


@register_jitable(fastmath=False, error_model="numpy")
def update_range(
    rule: Any,
    weight: Master,
    low: Low,
    m: Moment,
    v: Moment,
    grad: Gradient,
    key: Key,
    grad_scale: np.float32,
    scalars: Scalars,
) -> None:
    """Update a range of a block with a rule. Each moment of an element is rounded with half the bits of one hash."""
    for i in range(grad.size):
        g = as_gradient(grad[i]) * grad_scale
        w = load_master(weight, low, i)
        w_new, m_new, v_new = rule(w, g, load_moment(m, i), load_moment(v, i), scalars)
        bits = random_bits(key, i)
        store_moment(m, i, m_new, bits)
        store_moment(v, i, v_new, np.uint32(bits >> np.uint32(16)))
        store_master(weight, low, i, w_new)


@njit(fastmath=False, error_model="numpy")
def load_moments(codes: Codes, scale: np.float32, code: Code, moments: Float32) -> None:
    """Dequantize code indices to fp32 moments."""
    values = code[0]
    for i in range(codes.size):
        moments[i] = values[codes[i]] * scale


@njit(fastmath=False, error_model="numpy")
def store_moments(moments: Float32, code: Code, codes: Codes) -> Any:
    """Write the indices of the nearest code values (ties go to the smaller value), and return the scale.

    The scale is the largest magnitude. A NaN counts as the largest, so it spreads to all moments in its block.
    """
    max_magnitude = np.uint32(0)
    for i in range(codes.size):
        magnitude = np.uint32(np.float32(moments[i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        max_magnitude = magnitude if magnitude > max_magnitude else max_magnitude
    scale = np.uint32(max_magnitude).view(np.float32)
    divisor = np.float32(1.0) if scale == np.float32(0.0) else scale
    borders, cells = code[1], code[2]
    for i in range(codes.size):
        ratio = moments[i] / divisor
        ratio = np.float32(0.0) if np.isnan(ratio) else ratio
        index = cells[np.float32(ratio).view(np.uint32) >> np.uint32(16)]
        codes[i] = np.uint8(index + np.uint8(ratio > borders[index]))
    return scale


def second_row(moments: Int8Moments, new_moments: NDArray[np.float32]) -> Any:
    """Return the second row of `new_moments`, which has one row per moment, or None if there is only one moment."""
    raise NotImplementedError("only compiled code calls this")


@overload(second_row)
def _second_row(moments: Any, new_moments: Any) -> Any:
    def return_none(moments: Any, new_moments: Any) -> Any:
        return None

    def return_row(moments: Any, new_moments: Any) -> Any:
        return new_moments[1]

    return return_none if len(moments) == 1 else return_row


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Convert an address to a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), build


def array_at(address: int, size: int, example: Any) -> Any:
    """Return the array of `size` elements at an address, with the dtype of `example`, or None if `example` is None."""
    raise NotImplementedError("only compiled code calls this")


@overload(array_at)
def _array_at(address: int, size: int, example: Any) -> Any:
    def return_none(address: int, size: int, example: Any) -> Any:
        return None

    def return_array(address: int, size: int, example: Any) -> Any:
        return carray(_pointer(address), size, example.dtype)

    return return_none if isinstance(example, types.NoneType) else return_array


@dataclass(frozen=True, slots=True)
class UpdateKernels:
    """Kernels of an elementwise optimizer. They update 1-D contiguous arrays in place.

    Attributes:
        update: `(weight, low, m, v, grad, key, grad_scale, scalars)`, with arrays of equal length.
        int8: `(weight, low, moments, grad, grad_scale, scalars)`, where each moment is a tuple of codes, scales
            and code. The kernel decodes each block of moments to fp32, updates it, and encodes it again.
        rows: `(rows, weight, low, m, v, grad, grad_scale, scalars)`. Each parameter has a row with the addresses of its
            arrays, then their size. The array arguments are empty and only supply dtypes.
    """

    update: Callable[..., None]
    int8: Callable[..., None]
    rows: Callable[..., None]


def _compile_kernels(rule: Any) -> UpdateKernels:
    """Compile an optimizer's kernels for its rule.

    Numba's cache identifies a closure by its pickled cells. `rule` is a plain function of this module, so it is pickled
    by name. A function created by `njit` would have a different key in each process, and be recompiled.
    """

    @njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
    def update(
        weight: Master,
        low: Low,
        m: Moment,
        v: Moment,
        grad: Gradient,
        key: Key,
        grad_scale: np.float32,
        scalars: Scalars,
    ) -> None:
        update_range(rule, weight, low, m, v, grad, key, grad_scale, scalars)

    @njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
    def int8(
        weight: Master, low: Low, moments: Int8Moments, grad: Gradient, grad_scale: np.float32, scalars: Scalars
    ) -> None:
        new_moments = np.empty((len(moments), BLOCK_ELEMENTS), np.float32)
        m_new, v_new = new_moments[0], second_row(moments, new_moments)
        for block in range(moments[0][1].size):
            start, stop = block * BLOCK_ELEMENTS, min((block + 1) * BLOCK_ELEMENTS, grad.size)
            for moment_index in range(len(moments)):
                codes, scales, code = moments[moment_index]
                load_moments(codes[start:stop], scales[block], code, new_moments[moment_index])
            low_part = None if low is None else low[start:stop]
            grad_part = grad[start:stop]
            update_range(rule, weight[start:stop], low_part, m_new, v_new, grad_part, None, grad_scale, scalars)
            # A scale is the largest magnitude in its block, so all new moments must be known before rounding.
            for moment_index in range(len(moments)):
                codes, scales, code = moments[moment_index]
                scales[block] = store_moments(new_moments[moment_index], code, codes[start:stop])

    @njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
    def rows(
        rows: Rows, weight: Any, low: Any, m: Any, v: Any, grad: Any, grad_scale: np.float32, scalars: Scalars
    ) -> None:
        for i in range(rows.shape[0]):
            row = rows[i]
            update_range(
                rule,
                array_at(row[0], row[5], weight),
                array_at(row[1], row[5], low),
                array_at(row[2], row[5], m),
                array_at(row[3], row[5], v),
                array_at(row[4], row[5], grad),
                None,
                grad_scale,
                scalars,
            )

    return UpdateKernels(update, int8, rows)


UPDATES = {
    "adamw": _compile_kernels(_adamw),
    "lion": _compile_kernels(_lion),
    "nesterov": _compile_kernels(_nesterov),
    "sgd": _compile_kernels(_sgd),
}
"""Kernels of the elementwise optimizers, by `ElementwiseOptimizer.kernel_name`."""


# -- Muon ----------------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def muon_direction(
    m: Float32,
    grad: Gradient,
    directions: NDArray[np.uint16],
    grad_scale: np.float32,
    momentum: np.float32,
    one_minus_momentum: np.float32,
    nesterov: bool,
) -> None:
    """Update moments and write bf16 directions for orthogonalization; see `megatrain.optim.muon.Muon`."""
    for i in range(grad.size):
        g = as_gradient(grad[i]) * grad_scale
        m_new = m[i] + (g - m[i]) * one_minus_momentum
        m[i] = m_new
        direction = g + (m_new - g) * momentum if nesterov else m_new
        directions[i] = from_float32(direction, directions[i])


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def muon_apply(
    weight: Master, low: Low, directions: NDArray[np.uint16], decay: np.float32, step_size: np.float32
) -> None:
    """Update weights with the orthogonalized directions; see `megatrain.optim.muon.Muon`."""
    for i in range(directions.size):
        w_decayed = load_master(weight, low, i) * decay
        store_master(weight, low, i, w_decayed - as_float32(directions[i]) * step_size)


# -- sums and norms of gradients ---------------------------------------------------------------------------------


@njit(fastmath=False, error_model="numpy")
def sum_lanes(lanes: Float64) -> float:
    total = 0.0
    for lane in range(lanes.size):
        total += lanes[lane]
    return total


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def add_in_place(total: Any, addend: Gradient) -> None:
    """Add `addend` to `total` elementwise in fp32, and round the sums to the dtype of `total`."""
    for i in range(total.size):
        total[i] = from_float32(as_float32(total[i]) + as_float32(addend[i]), total[i])


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def squared_norms(grad: Gradient, partials: Float64) -> None:
    """Write the fp64 sum of squares of every NORM_BLOCK_ELEMENTS elements of `grad` to `partials`.

    Lane j of a block adds elements j, j + 64, j + 128, ... in this order. Then the lanes are added in order. The square
    of an fp32 number is exact in fp64, so only the additions round.
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
                value = np.float64(as_float32(values[lane]))
                lanes[lane] += value * value
        for lane in range(part.size - num_rows * NORM_LANES):
            value = np.float64(as_float32(part[num_rows * NORM_LANES + lane]))
            lanes[lane] += value * value
        partials[block] = sum_lanes(lanes)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def squared_norms_rows(rows: Rows, grad: Any, partials: Float64) -> None:
    """Run `squared_norms` for each row of a table: gradient address, size, and the range of its partial sums."""
    for i in range(rows.shape[0]):
        row = rows[i]
        squared_norms(array_at(row[0], row[1], grad), partials[row[2] : row[3]])


# -- Adafactor -----------------------------------------------------------------------------------------------------
# These kernels repeat the loops of `squared_norms` instead of calling it, so that they read a gradient only once.


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def adafactor_columns(grad: Gradient, grad_scale: np.float32, row_sums: Float64, column_sums: Float64) -> None:
    """Write the fp64 sum of squares of each row and each column.

    Column sums add rows in order. Row sums use lanes, as in `squared_norms`.

    Args:
        grad: `matrices x rows x columns`.
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
            num_chunks = num_columns // NORM_LANES
            for chunk in range(num_chunks):
                part = values[chunk * NORM_LANES : (chunk + 1) * NORM_LANES]
                sums_part = sums[chunk * NORM_LANES : (chunk + 1) * NORM_LANES]
                for lane in range(NORM_LANES):
                    value = np.float64(as_gradient(part[lane]) * grad_scale)
                    square = value * value
                    lanes[lane] += square
                    sums_part[lane] += square
            for column in range(num_chunks * NORM_LANES, num_columns):
                value = np.float64(as_gradient(values[column]) * grad_scale)
                square = value * value
                lanes[column - num_chunks * NORM_LANES] += square
                sums[column] += square
            row_sums[matrix, row] = sum_lanes(lanes)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def adafactor_square_sums(
    grad: Gradient, grad_scale: np.float32, row_factor: Float32, column_factor: Float32, sums: Float64
) -> None:
    """Write the fp64 sum of squares of each row's update, added in lanes as in `squared_norms`.

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
            num_chunks = num_columns // NORM_LANES
            for chunk in range(num_chunks):
                part = values[chunk * NORM_LANES : (chunk + 1) * NORM_LANES]
                factors_part = factors[chunk * NORM_LANES : (chunk + 1) * NORM_LANES]
                for lane in range(NORM_LANES):
                    update = np.float64((as_gradient(part[lane]) * grad_scale) * (factor * factors_part[lane]))
                    lanes[lane] += update * update
            for column in range(num_chunks * NORM_LANES, num_columns):
                update = np.float64((as_gradient(values[column]) * grad_scale) * (factor * factors[column]))
                lanes[column - num_chunks * NORM_LANES] += update * update
            sums[matrix, row] = sum_lanes(lanes)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def average(weight: Master, low: Low, ema: Float32, share: np.float32) -> None:
    """Move an average toward the masters, in place; see `average.WeightAverage`.

    Args:
        ema: Average; 1-D, with the length of `weight`.
        share: Weight of the masters in the new average.
    """
    for i in range(ema.size):
        distance = load_master(weight, low, i) - ema[i]
        ema[i] = ema[i] + distance * share


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def average_rows(rows: Rows, weight: Any, low: Any, ema: Any, share: np.float32) -> None:
    """Run `average` for each row: addresses of average, weight, low and unused arrays, then the size."""
    for i in range(rows.shape[0]):
        row = rows[i]
        size = row[rows.shape[1] - 1]
        average(array_at(row[1], size, weight), array_at(row[2], size, low), array_at(row[0], size, ema), share)


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
        weight: 1-D, with the number of elements of `grad`.
        grad: `matrices x rows x columns`.
        row_factor: `matrices x rows`.
        column_factor: `matrices x columns`.
    """
    num_matrices, num_rows, num_columns = grad.shape
    for matrix in range(num_matrices):
        factors = column_factor[matrix]
        for row in range(num_rows):
            start = (matrix * num_rows + row) * num_columns
            weight_row = weight[start : start + num_columns]
            low_row = None if low is None else low[start : start + num_columns]
            values = grad[matrix, row]
            factor = row_factor[matrix, row]
            for column in range(num_columns):
                w_decayed = load_master(weight_row, low_row, column) * decay
                update = (as_gradient(values[column]) * grad_scale) * (factor * factors[column])
                store_master(weight_row, low_row, column, w_decayed - update * step_size)


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
    """Update the second moment of a vector parameter, and write the sums of squares of the parameter's update.

    Args:
        v: Second moment, 1-D with the length of `grad`.
        sums: Output: one fp64 sum per NORM_BLOCK_ELEMENTS elements, added in order.
    """
    for block in range(sums.size):
        total = 0.0
        for i in range(block * NORM_BLOCK_ELEMENTS, min((block + 1) * NORM_BLOCK_ELEMENTS, grad.size)):
            g = as_gradient(grad[i]) * grad_scale
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
    """Apply Adafactor's update to a vector parameter, in place."""
    for i in range(grad.size):
        w_decayed = load_master(weight, low, i) * decay
        update = (as_gradient(grad[i]) * grad_scale) / np.sqrt(v[i])
        store_master(weight, low, i, w_decayed - update * step_size)
