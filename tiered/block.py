"""Blocks, and the states that one copy of a block can be in."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

import torch

from tiered.errors import shortened

_MAX_KEY, _MAX_SEGMENT = 2000, 255
_SEGMENT = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9_.\-]+"  # not '.' or '..'
_KEY = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The unit of placement and of transfer: one named tensor with a home.

    Attributes:
        key: name, path-like: segments of letters, digits, ``_ . -`` joined by ``/``.
        home: name of the tier that owns the block's slot for life.
        durable: part of a commit. Scratch blocks (gradients, activations) are not.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    home: str
    durable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f"the key of a block is text, not {type(self.key).__name__}: {self.key!r:.40}")
        # Most keys are shorter than a segment may be.
        is_long = len(self.key) > _MAX_SEGMENT and any(len(part) > _MAX_SEGMENT for part in self.key.split("/"))
        if is_long or len(self.key) > _MAX_KEY:
            raise ValueError(
                f"block key '{shortened(self.key)}' has {len(self.key)} characters: use at most {_MAX_KEY}, and "
                f"{_MAX_SEGMENT} between two '/', as names of files"
            )
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"block key '{shortened(self.key)}': use letters, digits, '_', '.', '-', joined by '/'")
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"block '{self.key}': negative size in shape {self.shape}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class CopyState(enum.Enum):
    """State of one copy of one block in one tier.

    ABSENT occurs only away from home, STALE only at home. Leases and pins are counted separately.
    """

    ABSENT = "absent"  # No slot.
    FILLING = "filling"  # A slot that a transfer or the first write is filling.
    CLEAN = "clean"  # Equal to the home copy, or the home copy: the store may drop it for free.
    DIRTY = "dirty"  # The only newest bytes: written back before the slot is reused.
    DRAINING = "draining"  # A write-back is in progress; readable.
    STALE = "stale"  # Home slot whose newer version is in another tier, or that was never written.

    @property
    def is_valid(self) -> bool:
        # Not a set: hashing a member takes longer than the comparisons.
        return self is CopyState.CLEAN or self is CopyState.DIRTY or self is CopyState.DRAINING


#: The moves a copy may make. Anything else is a bug in the store (asserted on every move).
LEGAL_MOVES: frozenset[tuple[CopyState, CopyState]] = frozenset(
    {
        (CopyState.ABSENT, CopyState.FILLING),
        (CopyState.FILLING, CopyState.CLEAN),
        (CopyState.FILLING, CopyState.DIRTY),
        (CopyState.FILLING, CopyState.ABSENT),
        (CopyState.FILLING, CopyState.STALE),
        (CopyState.CLEAN, CopyState.DIRTY),
        (CopyState.CLEAN, CopyState.ABSENT),
        (CopyState.CLEAN, CopyState.STALE),
        (CopyState.DIRTY, CopyState.DRAINING),
        (CopyState.DIRTY, CopyState.ABSENT),
        (CopyState.DRAINING, CopyState.CLEAN),
        (CopyState.DRAINING, CopyState.DIRTY),
        (CopyState.STALE, CopyState.FILLING),
    }
)
