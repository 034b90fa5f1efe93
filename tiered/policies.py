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
        nbytes: bytes its slot would give back.
        last_use: counter of the store, larger for a later use or arrival.
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


class LRU:
    """Least recently used first; ties by key, so that the order never depends on a dict."""

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=lambda candidate: (candidate.last_use, candidate.key))


class Belady:
    """Farthest next use first; clean before dirty, then large before small.

    Copies outside the schedule have ``next_use == NEVER`` and fall back to recency among themselves.
    For the cyclic scans of training this equals pinning: the gain is that a fetch never displaces a
    copy that is needed sooner than the one it brings.
    """

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=self._rank_key)

    @staticmethod
    def _rank_key(candidate: Candidate) -> tuple[int, bool, int, int, str]:
        recency = candidate.last_use if candidate.next_use == NEVER else 0
        return (-candidate.next_use, candidate.dirty, recency, -candidate.nbytes, candidate.key)
