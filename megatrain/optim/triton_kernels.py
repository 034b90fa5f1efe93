"""Triton kernels for updates and gradient norms. Importing this file imports triton.

Kernels are compiled at their first launch. They run the same operations as `megatrain.optim.kernels`, in the same
order. Three rules make updates round each operation to fp32:

* Every launch has `enable_fp_fusion=False` (`LAUNCH_OPTIONS`), so products and sums are not fused.
* Kernels call `div_rn` and `sqrt_rn`, because `/` and `tl.sqrt` on fp32 are approximations.
* Denormal numbers are not flushed to zero, and scalars arrive in fp32, which the caller rounds once from fp64.

As on the CPU, bf16 is passed as 16 bits: bf16 gradients and moments, and the high halves of split masters, are int16
tensors. Moments in bytes have scales and a code. For other formats, scales and code are None.

`update` is the kernel of every elementwise optimizer. An optimizer adds a rule to `RULES`: a function of a weight, a
gradient and two moments, in fp32.

An update takes one array of each kind. With `rows`, it takes a table with the addresses of many arrays, one row of
`ROW_COLUMNS` per parameter, and the array arguments only supply dtypes. Addresses in a table are multiples of
`ROW_ALIGNMENT` bytes, and lengths are multiples of `ROW_ALIGNMENT` elements. A `decision` (see `Update`) replaces
`grad_scale`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatrain.optim.moments import BLOCK_ELEMENTS as MOMENT_BLOCK_ELEMENTS

__all__ = [
    "BLOCK_ELEMENTS",
    "IS_INTERPRETED",
    "LAUNCH_OPTIONS",
    "ROW_ALIGNMENT",
    "ROW_COLUMNS",
    "RULES",
    "average",
    "squared_norms",
    "sum_in_order",
    "update",
]

BLOCK_ELEMENTS = 1024
"""Elements per program: 8 per thread, which are two 16-byte loads of fp32."""
ROW_COLUMNS = ("program", "num_elements", "weight", "low", "gradient", "m", "v")
"""Columns of an address table: the row's first program, the arrays' length, and their addresses (0 if unused)."""
ROW_ALIGNMENT = 16
_MOMENTS = tl.constexpr(MOMENT_BLOCK_ELEMENTS)
_NUM_COLUMNS = tl.constexpr(len(ROW_COLUMNS))
_ALIGNMENT = tl.constexpr(ROW_ALIGNMENT)
_NOT_SPECIALIZED = ["num_rows", "first_key", "second_key", "first_index"]  # their values change; avoid recompilation
LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


@triton.jit
def _load_master(weight: tl.tensor, low: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return fp32 masters: `weight` itself, or the high halves in `weight` joined with `low`."""
    if low is None:
        return tl.load(weight + index, mask=mask)
    else:
        high_bits = tl.load(weight + index, mask=mask).to(tl.int32) << 16
        return (high_bits + tl.load(low + index, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _store_master(weight: tl.tensor, low: tl.tensor, index: tl.tensor, mask: tl.tensor, value: tl.tensor) -> None:
    if low is None:
        tl.store(weight + index, value, mask=mask)
    else:
        bits = value.to(tl.int32, bitcast=True)
        tl.store(weight + index, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(low + index, bits.to(tl.int16), mask=mask)


@triton.jit
def _load_gradient(grad: tl.tensor, index: tl.tensor, mask: tl.tensor, grad_scale: tl.tensor) -> tl.tensor:
    """Return scaled gradients in fp32. bf16 bits are widened exactly, and -0 is converted to 0."""
    return (_load_float32(grad, index, mask) + 0.0) * grad_scale


@triton.jit
def _load_float32(grad: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return elements in fp32, and 0 where `mask` is False."""
    g = tl.load(grad + index, mask=mask, other=0)
    if grad.dtype.element_ty == tl.int16:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return g


@triton.jit
def _positions(block_elements: tl.constexpr) -> tl.tensor:
    """Return the indices of this program's elements, in 64 bits because embeddings can exceed 2**31 elements."""
    return tl.program_id(0).to(tl.int64) * block_elements + tl.arange(0, block_elements)


@triton.jit
def _program_row(rows: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Return the address of this program's row: the last row that starts at this program or an earlier one."""
    start = 0
    stop = num_rows
    while stop - start > 1:
        middle = (start + stop) // 2
        is_later = tl.load(rows + middle * _NUM_COLUMNS) > tl.program_id(0)
        start = tl.where(is_later, start, middle)
        stop = tl.where(is_later, middle, stop)
    return rows + start * _NUM_COLUMNS


@triton.jit
def _row_positions(row: tl.tensor, block_elements: tl.constexpr) -> tl.tensor:
    """Return the indices of this program's elements in the arrays of its row."""
    return (tl.program_id(0) - tl.load(row)) * block_elements + tl.arange(0, block_elements)


@triton.jit
def _row_length(row: tl.tensor) -> tl.tensor:
    return tl.load(row + 1) // _ALIGNMENT * _ALIGNMENT  # shows the compiler that the length is aligned


@triton.jit
def _row_array(row: tl.tensor, column: tl.constexpr, example: tl.tensor) -> tl.tensor:
    """Return the pointer in a column of an address table's row, with the dtype of `example`."""
    return tl.multiple_of(tl.load(row + column).to(example.dtype), _ALIGNMENT)


@triton.jit
def _apply_decision(mask: tl.tensor, decision: tl.tensor) -> tl.tensor:
    """Return `mask`, or an all-False mask if the decision skips the update."""
    if decision is None:
        return mask
    else:
        return tl.where(tl.load(decision + 1) > 0.0, mask, False)


@triton.jit
def _lowbias32(bits: tl.tensor) -> tl.tensor:
    """See `kernels.lowbias32`."""
    x = bits ^ (bits >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(first_key: tl.tensor, second_key: tl.tensor, first_index: tl.tensor, index: tl.tensor) -> tl.tensor:
    """See `kernels.random_bits`."""
    element = first_index.to(tl.int64) + index
    first_hash = _lowbias32(element.to(tl.uint32) + first_key.to(tl.uint32))
    high_bits = (element >> 32).to(tl.uint32) * 0x9E3779B9
    return _lowbias32((first_hash ^ second_key.to(tl.uint32)) + high_bits)


@triton.jit
def _load_moment(moment: tl.tensor, scale: tl.tensor, code: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return moments in fp32. `code` holds the value of each byte, then the rounding boundary above each value."""
    if moment.dtype.element_ty == tl.uint8:
        code_index = tl.load(moment + index, mask=mask, other=0).to(tl.int32)
        return tl.load(code + code_index) * tl.load(scale + index // _MOMENTS, mask=mask, other=0.0)
    else:
        return _load_float32(moment, index, mask)


@triton.jit
def _maximum(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right)


@triton.jit
def _store_moment(
    moment: tl.tensor,
    scale: tl.tensor,
    code: tl.tensor,
    cells: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    value: tl.tensor,
    bits: tl.tensor,
    num_elements: tl.tensor,
    decision: tl.tensor,
    block_elements: tl.constexpr,
) -> None:
    """Write moments in their block's format, rounded with 16 random `bits` or by `cells` (`moments.moment_code`)."""
    if moment is None:
        pass
    elif moment.dtype.element_ty == tl.uint8:
        num_rows: tl.constexpr = block_elements // _MOMENTS
        magnitude = tl.where(mask, value, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scales = tl.reduce(tl.reshape(magnitude, [num_rows, _MOMENTS]), 1, _maximum).to(tl.float32, bitcast=True)
        divisor = tl.where(scales == 0.0, 1.0, scales)
        divisor = tl.reshape(tl.broadcast_to(tl.expand_dims(divisor, 1), [num_rows, _MOMENTS]), [block_elements])
        ratio = tl.math.div_rn(value, divisor)
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        lower_index = tl.load(cells + ((ratio.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)).to(tl.int32)
        code_index = lower_index + (ratio > tl.load(code + 256 + lower_index)).to(tl.int32)
        tl.store(moment + index, code_index.to(tl.uint8), mask=mask)
        row = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
        tl.store(scale + row, scales, mask=_apply_decision(row * _MOMENTS < num_elements, decision))
    elif moment.dtype.element_ty == tl.int16:
        bf16_bits = (value.to(tl.uint32, bitcast=True) + bits) >> 16
        bf16_bits = tl.where(value == value, bf16_bits, 0x7FC0)
        tl.store(moment + index, bf16_bits.to(tl.int16), mask=mask)
    else:
        tl.store(moment + index, value, mask=mask)


@triton.jit
def _adamw(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, scalars: tl.tuple) -> tl.tuple:
    """AdamW; see `elementwise.AdamW`. A rule returns the new weight and two moments; unused moments are arbitrary."""
    decay, one_minus_beta1, beta2, one_minus_beta2, correction2_sqrt, eps, step_size = scalars
    w_decayed = w * decay
    m_new = m + (g - m) * one_minus_beta1
    v_new = v * beta2 + (one_minus_beta2 * g) * g
    denominator = tl.math.div_rn(tl.math.sqrt_rn(v_new), correction2_sqrt) + eps
    return w_decayed - tl.math.div_rn(step_size * m_new, denominator), m_new, v_new


@triton.jit
def _lion(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: None, scalars: tl.tuple) -> tl.tuple:
    """Lion; see `megatrain.optim.elementwise.Lion`."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = scalars
    w_decayed = w * decay
    direction = m * beta1 + g * one_minus_beta1
    minus_lr = lr * -1.0  # exact; Triton may compile `-lr` to `0 - lr`, which is +0 if lr is 0
    step = tl.where(direction > 0.0, lr, tl.where(direction < 0.0, minus_lr, 0.0))  # 0 if direction is 0 or NaN
    m_new = m * beta2 + g * one_minus_beta2
    return w_decayed - step, m_new, m_new


@triton.jit
def _sgd(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: None, scalars: tl.tuple) -> tl.tuple:
    """SGD; see `megatrain.optim.elementwise.SGD`. Without momentum `m` is None."""
    decay, momentum, lr = scalars
    m_new = g + w * decay
    if m is not None:
        m_new = m * momentum + m_new
    return w - m_new * lr, m_new, m_new


@triton.jit
def _nesterov(w: tl.tensor, g: tl.tensor, m: tl.tensor, v: None, scalars: tl.tuple) -> tl.tuple:
    """SGD with Nesterov momentum; see `megatrain.optim.elementwise.SGD`."""
    decay, momentum, lr = scalars
    g_decayed = g + w * decay
    m_new = m * momentum + g_decayed
    return w - (g_decayed + m_new * momentum) * lr, m_new, m_new


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def update(
    rows: tl.tensor,
    num_rows: tl.tensor,
    decision: tl.tensor,
    weight: tl.tensor,
    low: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    grad: tl.tensor,
    m_scale: tl.tensor,
    v_scale: tl.tensor,
    signed: tl.tensor,
    signed_cells: tl.tensor,
    unsigned: tl.tensor,
    unsigned_cells: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    first_index: tl.tensor,
    num_elements: tl.tensor,
    grad_scale: tl.tensor,
    scalars: tl.tuple,
    rule: tl.constexpr,
    block_elements: tl.constexpr,
) -> None:
    """Update elements with a rule of `RULES`, `block_elements` per program.

    `low` is None without a split master, and unused moments are None. Only int8 moments use the scales and codes. Only
    bf16 moments use the key and `first_index`, the index of the first element.
    """
    if rows is None:
        index = _positions(block_elements)
    else:
        row = _program_row(rows, num_rows)
        index = _row_positions(row, block_elements)
        num_elements = _row_length(row)
        weight = _row_array(row, 2, weight)
        grad = _row_array(row, 4, grad)
        if low is not None:
            low = _row_array(row, 3, low)
        if m is not None:
            m = _row_array(row, 5, m)
        if v is not None:
            v = _row_array(row, 6, v)
    if decision is not None:
        grad_scale = tl.load(decision)
    mask = _apply_decision(index < num_elements, decision)
    w = _load_master(weight, low, index, mask)
    g = _load_gradient(grad, index, mask, grad_scale)
    # The loads are inlined, because functions in Triton 3.6 cannot return None.
    m_old = None
    v_old = None
    if m is not None:
        m_old = _load_moment(m, m_scale, signed, index, mask)
    if v is not None:
        v_old = _load_moment(v, v_scale, unsigned, index, mask)

    w_new, m_new, v_new = rule(w, g, m_old, v_old, scalars)

    bits = _random_bits(first_key, second_key, first_index, index)
    _store_moment(
        m, m_scale, signed, signed_cells, index, mask, m_new, bits & 0xFFFF, num_elements, decision, block_elements
    )
    _store_moment(
        v, v_scale, unsigned, unsigned_cells, index, mask, v_new, bits >> 16, num_elements, decision, block_elements
    )
    _store_master(weight, low, index, mask, w_new)


RULES = {"adamw": _adamw, "lion": _lion, "nesterov": _nesterov, "sgd": _sgd}
"""The rule of each elementwise optimizer, by `ElementwiseOptimizer.kernel_name`."""


@triton.jit
def average(
    weight: tl.tensor,
    low: tl.tensor,
    ema: tl.tensor,
    num_elements: tl.tensor,
    share: tl.tensor,
    block_elements: tl.constexpr,
) -> None:
    """Move averages toward the masters; see `megatrain.optim.average.WeightAverage`."""
    index = _positions(block_elements)
    mask = index < num_elements
    ema_old = tl.load(ema + index, mask=mask)
    distance = _load_master(weight, low, index, mask) - ema_old
    tl.store(ema + index, ema_old + distance * share, mask=mask)


@triton.jit
def _add(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return left + right


@triton.jit(do_not_specialize=["num_rows", "num_elements"])
def squared_norms(
    rows: tl.tensor,
    num_rows: tl.tensor,
    grad: tl.tensor,
    partials: tl.tensor,
    num_elements: tl.tensor,
    block_elements: tl.constexpr,
    num_lanes: tl.constexpr,
    unroll: tl.constexpr,
) -> None:
    """Write the fp64 sum of squares of every `block_elements` elements of `grad`, like `kernels.squared_norms`.

    Each program computes a block. Lane j adds elements j, j + num_lanes, ... in this order. Then the lanes are added in
    order. The square of an fp32 number is exact in fp64, so a fused multiply-add gives the same sum. With `rows`, the
    kernel processes many gradients and writes their partial sums consecutively.
    """
    lane = tl.arange(0, num_lanes)
    if rows is None:
        start = tl.program_id(0).to(tl.int64) * block_elements
    else:
        row = _program_row(rows, num_rows)
        start = (tl.program_id(0) - tl.load(row)) * block_elements
        num_elements = tl.load(row + 1)
        grad = _row_array(row, 4, grad)
    lanes = tl.full([num_lanes], 0.0, tl.float64)
    for row in range(0, block_elements // num_lanes, unroll):
        for offset in tl.static_range(unroll):  # unrolled to load several rows concurrently
            index = start + (row + offset) * num_lanes + lane
            value = _load_float32(grad, index, index < num_elements).to(tl.float64)
            lanes += value * value
    total = tl.reduce(tl.where(lane == 0, lanes, 0.0), 0, _add)
    for lane_index in range(1, num_lanes):
        # All terms except one are zero, so this reduction is exact in any order.
        total += tl.reduce(tl.where(lane == lane_index, lanes, 0.0), 0, _add)
    tl.store(partials + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count"])
def sum_in_order(values: tl.tensor, total: tl.tensor, count: tl.tensor) -> None:
    """Write the sum of `count` fp64 numbers, added sequentially."""
    result = tl.load(values)
    for index in range(1, count):
        result += tl.load(values + index)
    tl.store(total, result)


IS_INTERPRETED = not isinstance(update, triton.JITFunction)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on host tensors."""
