"""The Triton kernels of the optimizers. Importing this file imports triton; kernels are compiled at first launch.

The same operations as in `megatrain.optim.kernels`, in the same order, each one rounded to fp32:

* every launch has `enable_fp_fusion=False` (`LAUNCH_OPTIONS`): no product and sum are fused;
* division and square root are those that round to nearest: `/` and `tl.sqrt` on fp32 are approximations;
* nothing flushes denormal numbers to zero, and scalars arrive in fp32, rounded once from fp64 by the caller.

As on the CPU, bf16 is passed as its 16 bits: a bf16 gradient and the high half of a split master are int16 tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK_ELEMENTS", "IS_INTERPRETED", "LAUNCH_OPTIONS", "adamw", "lion", "sgd"]

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
    """Return gradients in fp32, scaled; bf16 bits are widened exactly."""
    g = tl.load(grad + at, mask=inside)
    if grad.dtype.element_ty == tl.int16:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return g * grad_scale


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


IS_INTERPRETED = not isinstance(adamw, triton.JITFunction)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on tensors of the host."""
