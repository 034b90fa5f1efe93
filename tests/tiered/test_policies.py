"""Eviction policies: the order in which they rank copies."""

from __future__ import annotations

import itertools

from tiered import LRU, NEVER, Belady
from tiered.ext import Candidate, EvictionPolicy


def ranked(policy: EvictionPolicy, *candidates: Candidate) -> list[str]:
    """Return the keys in the order of eviction. Assert that it does not depend on the order of the arguments."""
    orders = {
        tuple(candidate.key for candidate in policy.rank(list(order), now=10))
        for order in itertools.permutations(candidates)
    }
    assert len(orders) == 1, orders
    return list(orders.pop())


def test_lru_evicts_the_least_recently_used() -> None:
    a, b = Candidate("a", 1, True, 5, 11), Candidate("b", 9, False, 3, 12)
    assert ranked(LRU(), a, b, Candidate("c", 1, False, 3, 20)) == ["b", "c", "a"]


def test_belady_evicts_the_furthest_next_use() -> None:
    soon, late = Candidate("soon", 9, False, 1, 11), Candidate("late", 1, True, 9, 30)
    assert ranked(Belady(), soon, late, Candidate("unforeseen", 1, True, 9, NEVER)) == ["unforeseen", "late", "soon"]


def test_belady_breaks_ties_by_clean_then_size_then_key() -> None:
    dirty, clean = Candidate("dirty", 9, True, 1, 20), Candidate("clean", 1, False, 1, 20)
    large, same = Candidate("large", 5, False, 1, 20), Candidate("also", 5, False, 9, 20)
    assert ranked(Belady(), dirty, clean, large, same) == ["also", "large", "clean", "dirty"]


def test_belady_falls_back_to_recency_outside_the_schedule() -> None:
    old, new = Candidate("old", 1, False, 2, NEVER), Candidate("new", 9, False, 8, NEVER)
    assert ranked(Belady(), old, new) == ["old", "new"]
