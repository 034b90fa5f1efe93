"""Schedule-aware: what is needed last goes first (Belady, IBM Systems Journal 5(2), 1966)."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.policies.base import Candidate
from tiered.schedule import NEVER


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
