"""The tree in which lanes are added depends only on their number, not on their assignment to ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.ranks.lanes import (
    Lanes,
    Subtree,
    has_work_for_all,
    lane_micro_batches,
    lane_of,
    max_open_sums,
    num_merges,
    rank_lanes,
    rank_micro_batches,
    split,
    subtrees,
    total,
)

ALL_WORLDS = [(num_ranks, num_lanes) for num_lanes in range(1, 17) for num_ranks in range(1, num_lanes + 1)]


@given(st.integers(1, 16), st.integers(1, 200))
def test_every_micro_batch_is_in_one_lane_and_on_one_rank(num_lanes: int, num_micro_batches: int) -> None:
    lanes = [lane_micro_batches(lane, num_lanes, num_micro_batches) for lane in range(num_lanes)]
    assert [number for lane in lanes for number in lane] == list(range(num_micro_batches))
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1
    for number in range(num_micro_batches):
        assert number in lanes[lane_of(number, num_lanes, num_micro_batches)]
    for num_ranks in range(1, num_lanes + 1):
        ranks = [rank_micro_batches(rank, num_ranks, num_lanes, num_micro_batches) for rank in range(num_ranks)]
        assert [number for rank in ranks for number in rank] == list(range(num_micro_batches))
        if num_micro_batches >= num_lanes:
            assert all(ranks)


@pytest.mark.parametrize(("num_lanes", "expected"), [(2, 1), (3, 2), (4, 2), (5, 4), (6, 4), (8, 4), (9, 8)])
def test_left_half_is_a_power_of_two(num_lanes: int, expected: int) -> None:
    assert split(0, num_lanes) == expected
    assert split(3, 3 + num_lanes) == 3 + expected


def test_adding_lanes_in_order_gives_the_sums_of_own_subtrees() -> None:
    """The sums are strings that record the order of additions, for all numbers of lanes and ranks."""

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    for num_ranks, num_lanes in ALL_WORLDS:
        sums: dict[Subtree, str] = {}
        for rank in range(num_ranks):
            own = rank_lanes(rank, num_ranks, num_lanes)
            opened: list[str] = []
            most = 0
            for lane in own:
                opened.append(str(lane))
                most = max(most, len(opened))
                for _ in range(num_merges(lane, num_lanes, own)):
                    right = opened.pop()
                    opened.append(add(opened.pop(), right))
            assert most == max_open_sums(num_lanes, own), (num_ranks, num_lanes, rank)
            sums.update(zip(subtrees(0, num_lanes, own.start, own.stop), opened, strict=True))
        by_one = total(0, num_lanes, {(lane, lane + 1): str(lane) for lane in range(num_lanes)}, add)
        assert total(0, num_lanes, sums, add) == by_one, (num_ranks, num_lanes)


@pytest.mark.parametrize(("num_lanes", "open_sums"), [(1, 1), (2, 2), (4, 3), (8, 4), (16, 5)])
def test_open_sums_of_one_rank_are_the_depth_of_the_tree(num_lanes: int, open_sums: int) -> None:
    assert max_open_sums(num_lanes) == open_sums
    # A rank with a whole subtree needs no more sums than a run with only that subtree's lanes.
    for num_ranks in (2, 4, 8):
        if num_ranks <= num_lanes:
            own = rank_lanes(num_ranks - 1, num_ranks, num_lanes)
            assert max_open_sums(num_lanes, own) == max_open_sums(num_lanes // num_ranks)


def test_lanes_of_a_rank() -> None:
    """There are 6 lanes with 13 micro-batches: 2 per lane, and 3 in the last."""
    all_lanes = Lanes.for_all(6, 13)
    assert all_lanes == Lanes(6, 13, range(6))
    assert [all_lanes.lane_of(number) for number in range(13)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert (all_lanes.subtrees, all_lanes.max_open_sums) == ([(0, 6)], 3)
    assert [all_lanes.num_merges(lane) for lane in range(6)] == [0, 1, 0, 2, 0, 2]
    second = Lanes.for_rank(1, 2, 6, 13)
    assert second == Lanes(6, 13, range(3, 6))
    assert [second.lane_of(number) for number in range(7)] == [3, 3, 4, 4, 5, 5, 5]
    assert (second.subtrees, second.max_open_sums) == ([(3, 4), (4, 6)], 3)
    assert [second.num_merges(lane) for lane in range(3, 6)] == [0, 0, 1]
    single = Lanes.single()
    assert [single.lane_of(number) for number in (0, 5, 100)] == [0, 0, 0] and single.num_merges(0) == 0
    assert [has_work_for_all(num_ranks, 4, 3) for num_ranks in (1, 2, 4)] == [True, True, False]


def test_numbers_are_the_same_for_every_number_of_ranks() -> None:
    numbers = np.random.default_rng(1).standard_normal((16, 500)).astype(np.float32)
    for num_lanes in (2, 5, 8, 12):
        expected = total(0, num_lanes, {(i, i + 1): numbers[i] for i in range(num_lanes)}, np.add)
        for num_ranks in range(1, num_lanes + 1):
            sums: dict[Subtree, np.ndarray] = {}
            for rank in range(num_ranks):
                own = rank_lanes(rank, num_ranks, num_lanes)
                leaves = {(i, i + 1): numbers[i] for i in own}
                for first, stop in subtrees(0, num_lanes, own.start, own.stop):
                    sums[first, stop] = total(first, stop, leaves, np.add)
            assert np.array_equal(total(0, num_lanes, sums, np.add), expected), (num_ranks, num_lanes)
