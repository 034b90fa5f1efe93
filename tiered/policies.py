"""Eviction policies: pure ranking functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiered.schedule import NEVER


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that may be evicted now (not leased, not pinned, not in flight, not a home).

    Attributes:
        nbytes: bytes freed by evicting the copy.
        last_use: counter value at the copy's last use or arrival. The store's counter increases with every use and
            arrival.
        next_use: tick of the next scheduled use, or ``NEVER``.
    """

    key: str
    nbytes: int
    dirty: bool
    last_use: int
    next_use: int


class EvictionPolicy(Protocol):
    """Policy that orders candidates for eviction. ``rank`` is a pure function of its arguments."""

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        """Return the candidates in the order of eviction."""
        ...


class LRU:
    """Policy that evicts the least recently used copy first; ties are ordered by key."""

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=lambda candidate: (candidate.last_use, candidate.key))


class Belady:
    """Policy that evicts the copy with the farthest next use first. Ties: clean before dirty, then large before small.

    Copies outside the schedule have ``next_use == NEVER`` and are ordered by recency. A prefetch never evicts a copy
    that is needed sooner than the fetched copy. So cyclic scans (as in training) behave as if some copies were pinned.
    """

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=self._rank_key)

    @staticmethod
    def _rank_key(candidate: Candidate) -> tuple[int, bool, int, int, str]:
        recency = candidate.last_use if candidate.next_use == NEVER else 0
        return (-candidate.next_use, candidate.dirty, recency, -candidate.nbytes, candidate.key)
