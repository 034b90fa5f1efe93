"""The Triton kernels of the optimizers, and of the norm of a gradient. Importing this file imports triton.

Kernels are compiled at their first launch. The same operations as in `megatrain.optim.kernels`, in the same order, in
updates each one rounded to fp32:

* every launch has `enable_fp_fusion=False` (`LAUNCH_OPTIONS`): no product and sum are fused;
* division and square root are those that round to nearest: `/` and `tl.sqrt` on fp32 are approximations;
* nothing flushes denormal numbers to zero, and scalars arrive in fp32, rounded once from fp64 by the caller.

As on the CPU, bf16 is passed as its 16 bits: a bf16 gradient and the high half of a split master are int16 tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "BLOCK_ELEMENTS",
    "IS_INTERPRETED",
    "LAUNCH_OPTIONS",
    "adamw",
    "lion",
    "sgd",
    "squared_norms",
    "sum_in_order",
]

BLOCK_ELEMENTS = 1024
"""Elements of one program: 8 for each of its threads, two loads of 16 bytes of an fp32 stream."""
LAUNCH_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


@triton.jit
def _load_master(weight: tl.tensor, low: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return fp32 masters: the weights themselves, or their high halves put together with `low`."""
    if low is None:
        return tl.load(weight + at, mask=inside)
    else:
        high_bits = tl.load(weight + at, mask=inside).to(tl.int32) << 16
        return (high_bits + tl.load(low + at, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _store_master(weight: tl.tensor, low: tl.tensor, at: tl.tensor, inside: tl.tensor, value: tl.tensor) -> None:
    if low is None:
        tl.store(weight + at, value, mask=inside)
    else:
        bits = value.to(tl.int32, bitcast=True)
        tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(low + at, bits.to(tl.int16), mask=inside)


@triton.jit
def _load_gradient(grad: tl.tensor, at: tl.tensor, inside: tl.tensor, grad_scale: tl.tensor) -> tl.tensor:
    """Return gradients in fp32, scaled; bf16 bits are widened exactly, and -0 is 0."""
    return (_load_float32(grad, at, inside) + 0.0) * grad_scale


@triton.jit
def _load_float32(grad: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return gradients in fp32, 0 where they are not `inside`."""
    g = tl.load(grad + at, mask=inside, other=0)
    if grad.dtype.element_ty == tl.int16:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return g


@triton.jit
def _positions(block_elements: tl.constexpr) -> tl.tensor:
    """Return the elements of this program, in 64 bits: the embedding of a large model has more than 2**31."""
    return tl.program_id(0).to(tl.int64) * block_elements + tl.arange(0, block_elements)


@triton.jit
def adamw(
    weight: tl.tensor,
    low: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    grad: tl.tensor,
    num_elements: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    correction2_sqrt: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    block_elements: tl.constexpr,
) -> None:
    """AdamW; see `elementwise.AdamW`. Programs take `block_elements` each; without a split `low` is None."""
    at = _positions(block_elements)
    inside = at < num_elements
    w = _load_master(weight, low, at, inside)
    m_old = tl.load(m + at, mask=inside)
    v_old = tl.load(v + at, mask=inside)

    decayed = w * decay
    g = _load_gradient(grad, at, inside, grad_scale)
    m_new = m_old + (g - m_old) * one_minus_beta1
    v_new = v_old * beta2 + (one_minus_beta2 * g) * g
    denominator = tl.math.div_rn(tl.math.sqrt_rn(v_new), correction2_sqrt) + eps

    tl.store(m + at, m_new, mask=inside)
    tl.store(v + at, v_new, mask=inside)
    _store_master(weight, low, at, inside, decayed - tl.math.div_rn(step_size * m_new, denominator))


@triton.jit
def lion(
    weight: tl.tensor,
    low: tl.tensor,
    m: tl.tensor,
    grad: tl.tensor,
    num_elements: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    lr: tl.tensor,
    block_elements: tl.constexpr,
) -> None:
    """Lion; see `megatrain.optim.elementwise.Lion`. Arguments as of `adamw`."""
    at = _positions(block_elements)
    inside = at < num_elements
    decayed = _load_master(weight, low, at, inside) * decay
    g = _load_gradient(grad, at, inside, grad_scale)
    m_old = tl.load(m + at, mask=inside)

    direction = m_old * beta1 + g * one_minus_beta1
    minus_lr = lr * -1.0  # exact; triton may compile `-lr` to `0 - lr`, which is +0 for an lr of 0
    step = tl.where(direction > 0.0, lr, tl.where(direction < 0.0, minus_lr, 0.0))  # of zero and of NaN: none

    tl.store(m + at, m_old * beta2 + g * one_minus_beta2, mask=inside)
    _store_master(weight, low, at, inside, decayed - step)


@triton.jit
def sgd(
    weight: tl.tensor,
    low: tl.tensor,
    m: tl.tensor,
    grad: tl.tensor,
    num_elements: tl.tensor,
    grad_scale: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    lr: tl.tensor,
    nesterov: tl.constexpr,
    block_elements: tl.constexpr,
) -> None:
    """SGD; see `megatrain.optim.elementwise.SGD`. Arguments as of `adamw`; without momentum `m` is None."""
    at = _positions(block_elements)
    inside = at < num_elements
    w = _load_master(weight, low, at, inside)
    direction = _load_gradient(grad, at, inside, grad_scale) + w * decay
    if m is not None:
        m_new = tl.load(m + at, mask=inside) * momentum + direction
        tl.store(m + at, m_new, mask=inside)
        if nesterov:
            direction = direction + m_new * momentum
        else:
            direction = m_new
    _store_master(weight, low, at, inside, w - direction * lr)


@triton.jit
def _add(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return left + right


@triton.jit(do_not_specialize=["num_elements"])
def squared_norms(
    grad: tl.tensor,
    partials: tl.tensor,
    num_elements: tl.tensor,
    block_elements: tl.constexpr,
    num_lanes: tl.constexpr,
    unrolled: tl.constexpr,
) -> None:
    """Write the sum of squares of each `block_elements` of `grad`, in fp64, as `kernels.squared_norms` does.

    A program is a block: lane j adds elements j, j + num_lanes, ... in this order, then the lanes are added in order.
    The square of an fp32 number is exact in fp64, so it does not matter whether it is rounded before it is added.
    """
    lane = tl.arange(0, num_lanes)
    first = tl.program_id(0).to(tl.int64) * block_elements
    lanes = tl.full([num_lanes], 0.0, tl.float64)
    for row in range(0, block_elements // num_lanes, unrolled):
        for step in tl.static_range(unrolled):  # loads of several rows are under way at once
            at = first + (row + step) * num_lanes + lane
            value = _load_float32(grad, at, at < num_elements).to(tl.float64)
            lanes += value * value
    total = tl.reduce(tl.where(lane == 0, lanes, 0.0), 0, _add)
    for number in range(1, num_lanes):
        total += tl.reduce(tl.where(lane == number, lanes, 0.0), 0, _add)  # of one lane and zeros: exact in any order
    tl.store(partials + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count"])
def sum_in_order(values: tl.tensor, total: tl.tensor, count: tl.tensor) -> None:
    """Write the sum of `count` fp64 numbers, added one after the other."""
    found = tl.load(values)
    for at in range(1, count):
        found += tl.load(values + at)
    tl.store(total, found)


IS_INTERPRETED = not isinstance(adamw, triton.JITFunction)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on tensors of the host."""
