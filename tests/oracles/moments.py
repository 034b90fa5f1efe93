"""bf16 and 8-bit moments in numpy: random bits from a hash, the 8-bit code's definition, and rounding by search."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFFFFFF


def random_bits(seed: int, step: int, name: str, elements: range) -> NDArray[np.uint32]:
    """Return 32 random bits for each of the given elements of a parameter."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    key = [int.from_bytes(digest[at : at + 4], "little") for at in (0, 4)]

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & MASK
        x ^= x >> 15
        x = x * 0x846CA68B & MASK
        return x ^ x >> 16

    def bits(element: int) -> int:
        once = mix((element & MASK) + key[0] & MASK)
        return mix((once ^ key[1]) + (element >> 32) * 0x9E3779B9 & MASK)

    return np.array([bits(element) for element in elements], np.uint32)


def round_stochastically(values: NDArray[np.float32], bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Round stochastically to bf16: add 16 random bits below the last place, and truncate. The result is in fp32."""
    found = (values.view(np.uint32).astype(np.uint64) + bits).astype(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(np.where(np.isnan(values), np.float32(np.nan), found.view(np.float32)), np.float32)


def dynamic_code(signed: bool) -> NDArray[np.float32]:
    """Return the 256 values of the dynamic code: 0, 1, and fractions, whose number doubles from decade to decade."""
    numbers = {0.0, 1.0}
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        for number in range(count):
            middle = (0.1 + 0.9 * (number + 0.5) / count) * 10.0 ** (decade - 6)
            numbers |= {middle, -middle} if signed else {middle}
    return np.array(sorted(numbers), np.float32)


def encode_blocks(values: NDArray[np.float32], signed: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Encode finite numbers as bytes and block scales. Round to the nearest code value; ties go to the smaller one."""
    code = dynamic_code(signed)
    borders = (code[:-1] + code[1:]) / np.float32(2)
    if not signed:
        borders[0] = 0  # so that nonzero numbers never become zero
    found, scales = [], []
    for start in range(0, values.size, 256):
        block = values[start : start + 256]
        scale = np.abs(block).max()
        ratios = block / (scale if scale else np.float32(1))
        found.append((ratios[:, None] > borders[None, :]).sum(axis=1).astype(np.uint8))
        scales.append(scale)
    return np.concatenate(found), np.array(scales, np.float32)


def decode_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float32], signed: bool) -> NDArray[np.float32]:
    """Return the values that bytes and scales represent."""
    return dynamic_code(signed)[codes] * np.repeat(scales, 256)[: codes.size]
