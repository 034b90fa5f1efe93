"""Moments in fewer than 4 bytes: storage formats, the int8 code, and random keys for rounding to bf16."""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.optim.base import StateKind
from megatrain.optim.table import StateDtype

__all__ = [
    "BLOCK_ELEMENTS",
    "STATE_DTYPES",
    "decode_moments",
    "encode_moments",
    "is_signed",
    "moment_code",
    "moment_kinds",
    "rounding_key",
]

STATE_DTYPES: dict[StateDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
}
"""Dtype of the blocks, by the format of moments in a config. An int8 moment is stored as an index into a code."""

BLOCK_ELEMENTS = 256
"""Number of one-byte moments that share an fp32 scale, as in bitsandbytes and torchao."""

Array = np.ndarray[Any, Any]
Code = tuple[Array, Array, Array]


def moment_kinds(name: str, state_dtype: StateDtype) -> tuple[StateKind, ...]:
    """Return the state kinds of one moment, e.g. `m`, and for int8 also `m_scale`."""
    moment = StateKind(name, STATE_DTYPES[state_dtype])
    if state_dtype != "int8":
        return (moment,)
    return moment, StateKind(f"{name}_scale", torch.float32, granularity=BLOCK_ELEMENTS)


def is_signed(name: str) -> bool:
    """Return whether a moment is signed. Only `v`, the mean of squares, is unsigned."""
    return name != "v"


@lru_cache(maxsize=1 << 16)
def rounding_key(seed: int, step: int, name: str) -> tuple[np.uint32, np.uint32]:
    """Return the key of the random bits for rounding a parameter's moments in one step.

    Rounding depends only on this key and on an element's index in its parameter. The block's tier and parts, the rank
    and the number of threads have no effect.
    """
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    first_key, second_key = np.frombuffer(digest, "<u4")
    return np.uint32(first_key), np.uint32(second_key)


@cache
def moment_code(signed: bool) -> Code:
    """Return the dynamic 8-bit code of Dettmers et al. (2021), as in bitsandbytes and torchao.

    The code covers the seven decades from 1e-7 to 1. Each decade has twice the number of values of the decade below.

    Returns:
        The 256 values in ascending order; the rounding boundary above each value (infinity for the last); and a lookup
        table. For each value of the upper 16 bits of an fp32 number, the table has the number of boundaries below all
        numbers with these bits. At most one more boundary lies between these numbers.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        borders = np.linspace(0.1, 1.0, (1 << exponent if signed else 2 << exponent) + 1)
        midpoints = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*midpoints, *(-midpoints if signed else ())]
    table = np.sort(np.array(values)).astype(np.float32)
    assert table.size == 256, table.size
    boundaries = np.append((table[:-1] + table[1:]) / np.float32(2.0), np.float32(np.inf)).astype(np.float32)
    if not signed:
        # A nonzero second moment is never rounded to 0, because dividing by almost 0 would give a huge update. Second
        # moments are this small in blocks with embedding rows of both rare and frequent tokens.
        boundaries[0] = 0.0
    first_values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    last_values = ((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(0xFFFF)).view(np.float32)
    with np.errstate(invalid="ignore"):
        lower, upper = np.fmin(first_values, last_values), np.fmax(first_values, last_values)
        cells = np.searchsorted(boundaries, np.nan_to_num(lower, nan=0.0), side="left")
        upper_cells = np.searchsorted(boundaries, np.nan_to_num(upper, nan=0.0), side="left")
    assert int((upper_cells - cells)[np.isfinite(upper) & np.isfinite(lower)].max()) <= 1
    return table, boundaries, cells.clip(0, 255).astype(np.uint8)


def encode_moments(moments: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode 1-D fp32 moments in host memory as bytes and scales, rounded as in the kernels."""
    _, boundaries, _ = moment_code(signed)
    blocks = np.zeros((-(-moments.numel() // BLOCK_ELEMENTS), BLOCK_ELEMENTS), np.float32)
    blocks.reshape(-1)[: moments.numel()] = moments.detach().numpy()
    scales = np.abs(blocks).max(axis=1, initial=0.0).astype(np.float32)
    with np.errstate(all="ignore"):
        ratios = blocks / np.where(scales == 0, np.float32(1.0), scales)[:, None]
    codes = np.searchsorted(boundaries, np.nan_to_num(ratios, nan=0.0, posinf=1.0, neginf=-1.0), side="left")
    return torch.from_numpy(codes.astype(np.uint8).reshape(-1)[: moments.numel()]), torch.from_numpy(scales)


def decode_moments(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Decode bytes and scales to fp32 moments."""
    values = torch.from_numpy(moment_code(signed)[0])
    return values[codes.long()] * scales.repeat_interleave(BLOCK_ELEMENTS)[: codes.numel()]
