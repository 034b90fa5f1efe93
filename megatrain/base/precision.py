"""Exact fp32 master weights, stored as a bf16 high half and an int16 low half.

The high half is the master rounded to bf16, with ties away from zero. A bf16 device computes with this half. The low
half is the low 16 bits of the master. In integer arithmetic modulo 2**32::

    high = (bits + 0x8000) >> 16        low = bits & 0xFFFF, read as int16
    bits = (high << 16) + low           # a negative low half subtracts the carry that rounding added to high

The pair therefore represents all 2**32 bit patterns exactly, including NaN payloads. Round-to-nearest-even cannot be
stored this way, because an even high half would have to represent 65,537 masters.

The *high half as a bf16 value* differs from the rounded master in two cases. A finite master that exceeds the largest
bf16 by half a step or more (0x7F7F8000, 3.3961775e38, and up) has an infinite high half. The high half of some NaNs is
not a NaN, because rounding changes the payload (0x7FFFFFFF gives -0.0, 0x7F800001 gives +inf). Training refuses
non-finite gradients before they reach a master, so no NaN is ever encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASTER_ELEMENTS", "decode", "encode", "encode_high_half"]

#: Number of fp32 weights that are in memory at a time while blocks are filled (64 MiB).
MASTER_ELEMENTS = 16 << 20
_CONVERT_ELEMENTS = 1 << 18
"""Elements converted at a time, so that temporaries fit into the cache and are much smaller than the block."""


def _require(name: str, tensor: Tensor, dtype: torch.dtype, num_elements: int) -> None:
    assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
    assert tensor.dim() == 1 and tensor.is_contiguous(), (name, tuple(tensor.shape), tensor.stride())
    assert tensor.numel() == num_elements, (name, tensor.numel(), num_elements)


def encode(master: Tensor, high_half: Tensor, low_half: Tensor) -> None:
    """Split fp32 masters into their two halves.

    Args:
        master: 1-D contiguous fp32, any device; unchanged.
        high_half: 1-D contiguous bf16 of the same length and device; written.
        low_half: 1-D contiguous int16 of the same length and device; written.
    """
    encode_high_half(master, high_half)
    _require("low", low_half, torch.int16, master.numel())
    bits = master.view(torch.int32)
    for start in range(0, master.numel(), _CONVERT_ELEMENTS):
        part = slice(start, start + _CONVERT_ELEMENTS)
        low_half[part] = bits[part]  # the conversion keeps the low 16 bits


def encode_high_half(master: Tensor, high_half: Tensor) -> None:
    """Write only the high half, the bf16 weight used for computing in every placement.

    Args:
        master: 1-D contiguous fp32, any device; unchanged.
        high_half: 1-D contiguous bf16 of the same length and device; written.
    """
    _require("master", master, torch.float32, master.numel())
    _require("high", high_half, torch.bfloat16, master.numel())
    bits, high_bits = master.view(torch.int32), high_half.view(torch.int16)
    # On a device, the caller's pieces are small, and one kernel launch per 256 Ki elements would dominate the time.
    step = _CONVERT_ELEMENTS if master.device.type == "cpu" else max(1, master.numel())
    for start in range(0, master.numel(), step):
        part = slice(start, start + step)
        high_bits[part] = (bits[part] + 0x8000).bitwise_right_shift_(16)


def decode(high_half: Tensor, low_half: Tensor, master: Tensor) -> None:
    """Join two halves into the original fp32 masters, bit for bit.

    Args:
        high_half: 1-D contiguous bf16, any device; unchanged.
        low_half: 1-D contiguous int16 of the same length and device; unchanged.
        master: 1-D contiguous fp32 of the same length and device; written.
    """
    _require("high", high_half, torch.bfloat16, master.numel())
    _require("low", low_half, torch.int16, master.numel())
    _require("master", master, torch.float32, master.numel())
    bits, high_bits = master.view(torch.int32), high_half.view(torch.int16)
    for start in range(0, master.numel(), _CONVERT_ELEMENTS):
        part = slice(start, start + _CONVERT_ELEMENTS)
        bits[part] = high_bits[part].to(torch.int32).bitwise_left_shift_(16).add_(low_half[part])
