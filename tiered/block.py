"""Block specs, and the states of a block's copies."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

import torch

from tiered.errors import shorten_key

_MAX_KEY, _MAX_SEGMENT = 2000, 255
_SEGMENT = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9_.\-]+"  # The lookahead rejects '.' and '..'.
_KEY = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One named tensor with a home tier. A store places and transfers each block as a unit.

    Attributes:
        key: path-like name of segments joined by ``/``. A segment consists of letters, digits, ``_``, ``.`` and ``-``.
        durable: whether commits include the block. False for scratch blocks such as gradients and activations.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    home: str
    durable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f"the key of a block is text, not {type(self.key).__name__}: {self.key!r:.40}")
        # Most keys are shorter than the limit for one segment, so splitting them is unnecessary.
        is_long = len(self.key) > _MAX_SEGMENT and any(len(part) > _MAX_SEGMENT for part in self.key.split("/"))
        if is_long or len(self.key) > _MAX_KEY:
            raise ValueError(
                f"block key '{shorten_key(self.key)}' has {len(self.key)} characters: use at most {_MAX_KEY}, and "
                f"at most {_MAX_SEGMENT} between two '/' (the limit of file names)"
            )
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"block key '{shorten_key(self.key)}': use letters, digits, '_', '.', '-', joined by '/'")
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

    Only a copy outside the home can be ABSENT, and only a home copy can be STALE. Leases and pins are counted
    separately.
    """

    ABSENT = "absent"  # The copy has no slot.
    FILLING = "filling"  # A transfer or the first write is filling the slot.
    CLEAN = "clean"  # Equal to the home copy, so it can be evicted without a write-back. Also an up-to-date home copy.
    DIRTY = "dirty"  # Only this copy has the newest bytes, so it is written back before its slot is reused.
    DRAINING = "draining"  # A write-back is in progress, and the copy is readable.
    STALE = "stale"  # A home slot that was never written, or a home copy that is older than a copy in another tier.

    @property
    def is_valid(self) -> bool:
        # Hashing a member for a set lookup takes longer than these comparisons.
        return self is CopyState.CLEAN or self is CopyState.DIRTY or self is CopyState.DRAINING


#: Allowed state changes of a copy. An assertion checks each change, because any other change is a bug in the store.
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
