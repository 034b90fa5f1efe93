"""Recency alone: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.policies.base import Candidate


class LRU:
    """Least recently used first; ties by key, so that the order never depends on a dict."""

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=lambda candidate: (candidate.last_use, candidate.key))
