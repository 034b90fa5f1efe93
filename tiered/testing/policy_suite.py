"""PolicySuite: inheritable tests for an eviction policy."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tiered.policies import Candidate, EvictionPolicy
from tiered.schedule import NEVER

_NUM_CASES = 50


class PolicySuite(ABC):
    """Tests for a policy. Subclass this suite and define ``make_policy``; pytest collects the tests::

        class TestMyPolicy(PolicySuite):
            def make_policy(self) -> EvictionPolicy:
                return MyPolicy()

    Every test creates new policies.
    """

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a new policy."""

    def test_empty_candidates_have_an_empty_rank(self) -> None:
        assert list(self.make_policy().rank([], 0)) == []

    def test_all_candidates_are_ranked_once(self) -> None:
        for candidates, tick in _cases():
            ranked = self.make_policy().rank(candidates, tick)
            missing_keys = {candidate.key for candidate in candidates} - {candidate.key for candidate in ranked}
            assert not missing_keys, f"{sorted(missing_keys)} could never be evicted"
            assert sorted(ranked, key=_key) == sorted(candidates, key=_key), (ranked, candidates)

    def test_the_arguments_are_not_changed(self) -> None:
        for candidates, tick in _cases():
            original = list(candidates)
            self.make_policy().rank(candidates, tick)
            assert candidates == original, "rank sorted its argument in place"
            self.make_policy().rank(tuple(candidates), tick)  # A policy must accept any sequence.

    def test_rank_is_repeatable(self) -> None:
        """The store ranks again after every wait, so a changing rank would make the moved bytes depend on timing."""
        policy, cases = self.make_policy(), _cases()
        rankings = [list(policy.rank(candidates, tick)) for candidates, tick in cases]
        for (candidates, tick), ranking in zip(cases, rankings, strict=True):
            assert list(policy.rank(candidates, tick)) == ranking, "the ranking depends on earlier calls"
            assert list(self.make_policy().rank(candidates, tick)) == ranking, "two policies rank differently"

    def test_rank_ignores_the_order_of_candidates(self) -> None:
        """The store passes candidates in the order of its dict, so a policy needs a rule for ties, such as the key."""
        policy, rng = self.make_policy(), random.Random(1)
        for candidates, tick in _cases():
            ranking = list(policy.rank(candidates, tick))
            permutation = rng.sample(candidates, len(candidates))
            assert list(policy.rank(permutation, tick)) == ranking, (ranking, permutation)


def _cases() -> Sequence[tuple[list[Candidate], int]]:
    """Return test cases: (candidates with many ties, current tick)."""
    rng = random.Random(0)
    cases = []
    for _ in range(_NUM_CASES):
        tick = rng.randrange(20)
        candidates = [
            Candidate(
                key=f"block.{index}",
                nbytes=rng.choice([0, 1, 4096, 10_000]),
                dirty=rng.random() < 0.5,
                last_use=rng.randrange(-1, 6),
                next_use=rng.choice([NEVER, tick + 1, tick + 2, tick + 50]),
            )
            for index in rng.sample(range(30), rng.randrange(1, 12))
        ]
        cases.append((candidates, tick))
    return cases


def _key(candidate: Candidate) -> str:
    return candidate.key
