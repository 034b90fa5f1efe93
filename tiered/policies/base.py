"""Eviction policies rank; they touch no storage and see no store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that may be evicted now (not leased, not pinned, not in flight, not a home).

    Attributes:
        nbytes: bytes its slot would give back.
        dirty: it must be written back first.
        last_use: a count of the store's, larger for a later use or arrival.
        next_use: tick of its next scheduled use, or ``NEVER``.
    """

    key: str
    nbytes: int
    dirty: bool
    last_use: int
    next_use: int


class EvictionPolicy(Protocol):
    """Orders candidates. Pure: the same arguments give the same answer, and nothing is changed."""

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        """Return the candidates, the one to evict first at the front."""
        ...
