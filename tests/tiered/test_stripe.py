from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered import GiB, KiB, MiB
from tiered.tiers.stripe import assign_chunks, check_rates, plan_chunks

RATES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6).map(tuple)


@given(rates=RATES, num_chunks=st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_every_prefix_is_within_one_chunk_of_proportional(rates: tuple[float, ...], num_chunks: int) -> None:
    total = sum(Fraction(rate) for rate in rates)
    counts = [0] * len(rates)
    for position, path in enumerate(assign_chunks(num_chunks, rates), start=1):
        counts[path] += 1
        for rate, count in zip(rates, counts, strict=True):
            assert abs(count - position * Fraction(rate) / total) < 1


@given(rates=RATES, nbytes=st.integers(0, 1 << 40), max_chunk=st.none() | st.sampled_from([16 * MiB, GiB]))
@settings(deadline=None, max_examples=100)
def test_chunks_cover_the_contents_with_little_padding(
    rates: tuple[float, ...], nbytes: int, max_chunk: int | None
) -> None:
    nbytes %= 1 << 34
    plan = plan_chunks(nbytes, rates, max_chunk)
    num_chunks = len(plan.path_indices)
    assert plan.chunk_bytes % 4096 == 0 and plan.chunk_bytes > 0
    assert nbytes <= plan.slot_bytes < nbytes + 4096 * num_chunks + (num_chunks == 0)
    assert num_chunks == 0 or (num_chunks - 1) * plan.chunk_bytes < nbytes, "a last chunk without contents"
    assert plan.chunk_bytes <= (max_chunk or (512 * MiB if len(rates) == 1 else 16 * MiB))


def test_one_path_makes_one_file_of_a_block() -> None:
    assert plan_chunks(437 * MiB + 5, (1.0,)).path_indices == (0,)
    assert plan_chunks(437 * MiB + 5, (1.0,)).chunk_bytes == 437 * MiB + 4096
    assert len(plan_chunks(600 * MiB, (1.0,)).path_indices) == 2
    assert plan_chunks(600 * MiB, (1.0,)).slot_bytes == 600 * MiB


def test_chunk_plans_are_exact() -> None:
    """Small blocks have a file for each share of the rates, up to 16. Files of large blocks have a limited size."""
    page = 4096
    assert {
        (nbytes, rates, max_chunk): (plan.chunk_bytes // page, plan.path_indices, plan.slot_bytes // page)
        for nbytes, rates, max_chunk in (
            (0, (2.0, 1.0), None),
            (1, (2.0, 1.0), None),
            (2 * page, (2.0, 1.0), None),
            (2 * page + 1, (2.0, 1.0), None),
            (7 * page, (2.0, 1.0), None),
            (7 * page, (2.0, 1.0), 2 * page),
            (8 * page, (1.0, 1.0, 2.0), None),
            (64 * page, (1.0, 40.0), None),
            (5 * page, (3.0,), 2 * page),
        )
        for plan in [plan_chunks(nbytes, rates, max_chunk)]
    } == {
        (0, (2.0, 1.0), None): (1, (), 0),
        (1, (2.0, 1.0), None): (1, (0,), 1),
        (2 * page, (2.0, 1.0), None): (1, (0, 1), 2),
        (2 * page + 1, (2.0, 1.0), None): (1, (0, 1, 0), 3),
        (7 * page, (2.0, 1.0), None): (3, (0, 1, 0), 9),
        (7 * page, (2.0, 1.0), 2 * page): (2, (0, 1, 0, 0), 8),
        (8 * page, (1.0, 1.0, 2.0), None): (2, (2, 0, 1, 2), 8),
        (64 * page, (1.0, 40.0), None): (4, (1,) * 16, 64),
        (5 * page, (3.0,), 2 * page): (2, (0, 0, 0), 6),
    }
    assert assign_chunks(12, (1.0, 2.0, 3.0)) == (2, 1, 2, 0, 1, 2, 2, 1, 2, 0, 1, 2)
    assert len(plan_chunks(100 * MiB, (1.0, 1.0)).path_indices) == 7, "at most 16 MiB each"


def test_small_blocks_reach_every_path_in_proportion() -> None:
    assert sorted(plan_chunks(64 * KiB, (1.0, 1.0)).path_indices) == [0, 1]
    assert sorted(plan_chunks(64 * KiB, (3.0, 1.0)).path_indices) == [0, 0, 0, 1]
    assert plan_chunks(100, (1.0, 1.0)).slot_bytes == 4096
    assert plan_chunks(0, (1.0, 1.0)).path_indices == ()


@pytest.mark.parametrize("rates", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_invalid_rates_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError) as caught:
        check_rates(rates, 2)
    assert str(caught.value) == f"need one positive rate for each of the 2 paths, got {rates}"
    assert check_rates([2, 0.5], 2) == (2, 0.5)
