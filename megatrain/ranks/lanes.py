"""Lanes: in which order the gradients of a step's micro-batches are added, whoever computes them.

Floating point sums depend on their order. So the micro-batches of a step are cut into lanes, contiguous and as equal
as can be. Each lane is summed from its first micro-batch to its last, and the lanes are added in a binary tree that
depends on their number alone. A rank that has some lanes of a step can add up the whole subtrees in them; whoever owns
an element adds those of all ranks (`total`). With one lane the sum is the plain one, in the order of micro-batches.

The tree is left-complete: what is below a node is cut at the largest power of two that is less than its lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Lanes",
    "Subtree",
    "lane_of",
    "lanes_of_rank",
    "micro_batches_of_lane",
    "micro_batches_of_rank",
    "most_open_sums",
    "num_merges",
    "split",
    "subtrees",
    "total",
]

#: Lanes [first, past the last) below a node of the tree.
Subtree = tuple[int, int]
_Sum = TypeVar("_Sum")


def micro_batches_of_lane(lane: int, num_lanes: int, num_micro_batches: int) -> range:
    """Return the micro-batches of a lane: none, where there are fewer of them than lanes."""
    return range(num_micro_batches * lane // num_lanes, num_micro_batches * (lane + 1) // num_lanes)


def lane_of(micro_batch: int, num_lanes: int, num_micro_batches: int) -> int:
    """Return the lane of a micro-batch, which is the only one that ``micro_batches_of_lane`` has it in."""
    assert 0 <= micro_batch < num_micro_batches, (micro_batch, num_micro_batches)
    return ((micro_batch + 1) * num_lanes - 1) // num_micro_batches


def lanes_of_rank(rank: int, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a rank: at least one, as there are no more ranks than lanes."""
    assert 0 <= rank < num_ranks <= num_lanes, (rank, num_ranks, num_lanes)
    return range(num_lanes * rank // num_ranks, num_lanes * (rank + 1) // num_ranks)


def micro_batches_of_rank(rank: int, num_ranks: int, num_lanes: int, num_micro_batches: int) -> range:
    """Return the micro-batches of a rank's lanes."""
    lanes = lanes_of_rank(rank, num_ranks, num_lanes)
    first = micro_batches_of_lane(lanes[0], num_lanes, num_micro_batches)
    last = micro_batches_of_lane(lanes[-1], num_lanes, num_micro_batches)
    return range(first.start, last.stop)


def split(first: int, stop: int) -> int:
    """Return the lane at which a node of at least two lanes is cut."""
    assert stop - first > 1, (first, stop)
    half = 1
    while 2 * half < stop - first:
        half *= 2
    return first + half


def subtrees(first: int, stop: int, own_first: int, own_stop: int) -> list[Subtree]:
    """Return the largest nodes below one, in order, whose lanes are all among ``own_first`` to ``own_stop``."""
    if own_stop <= first or stop <= own_first:
        return []
    if own_first <= first and stop <= own_stop:
        return [(first, stop)]
    middle = split(first, stop)
    return subtrees(first, middle, own_first, own_stop) + subtrees(middle, stop, own_first, own_stop)


def total(first: int, stop: int, sums: Mapping[Subtree, _Sum], add: Callable[[_Sum, _Sum], _Sum]) -> _Sum:
    """Return the sum of the lanes ``first`` to ``stop``.

    Args:
        first: lane of the node.
        stop: past its last lane.
        sums: Sums of nodes that together have every lane once.
        add: returns the sum of two; it may change and return the left one, which is not used again.
    """
    if (first, stop) in sums:
        return sums[first, stop]
    middle = split(first, stop)
    return add(total(first, middle, sums, add), total(middle, stop, sums, add))


def num_merges(lane: int, num_lanes: int, own: range) -> int:
    """Return how often the last two open sums are added when a lane's sum is complete.

    Who takes lanes in order, opens a sum for each and does this after each has the sums of ``subtrees`` in the end, and
    never more than ``most_open_sums`` at a time.

    Args:
        own: the lanes that are taken.
    """
    (found,) = ((first, stop) for first, stop in subtrees(0, num_lanes, own.start, own.stop) if first <= lane < stop)
    first, stop = found
    count = 0
    # As often as a node ends with this lane, other than as its only one.
    while stop - first > 1:
        middle = split(first, stop)
        if lane < middle:
            first, stop, count = first, middle, 0
        else:
            # The right half ends where its parent does.
            count = count + 1 if stop == lane + 1 else 0
            first = middle
    return count


def most_open_sums(num_lanes: int, own: range | None = None) -> int:
    """Return how many sums are open at once when lanes are taken in order.

    Args:
        own: the lanes that are taken; None: all. The sums of its subtrees stay open to the end.
    """
    own = range(num_lanes) if own is None else own
    now = most = 0
    for lane in own:
        now += 1
        most = max(most, now)
        now -= num_merges(lane, num_lanes, own)
    return most


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a step, and those of them that are summed here.

    Attributes:
        own: the lanes that are summed here.
    """

    num_lanes: int
    num_micro_batches: int
    own: range

    @classmethod
    def single(cls) -> Lanes:
        """Return the one lane of any number of micro-batches."""
        return cls(1, 1, range(1))

    @classmethod
    def all_of(cls, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return the lanes of a step that one process runs."""
        return cls(num_lanes, num_micro_batches, range(num_lanes))

    @classmethod
    def of_rank(cls, rank: int, num_ranks: int, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return the lanes of a rank."""
        return cls(num_lanes, num_micro_batches, lanes_of_rank(rank, num_ranks, num_lanes))

    @property
    def subtrees(self) -> list[Subtree]:
        """The nodes whose sums are left in the end, in order."""
        return subtrees(0, self.num_lanes, self.own.start, self.own.stop)

    @property
    def most_open_sums(self) -> int:
        """Sums that are open at once."""
        return most_open_sums(self.num_lanes, self.own)

    def lane_of(self, micro_batch: int) -> int:
        """Return the lane of a micro-batch, by its number among those that are summed here."""
        if self.num_lanes == 1:
            return 0
        first = micro_batches_of_lane(self.own.start, self.num_lanes, self.num_micro_batches).start
        return lane_of(first + micro_batch, self.num_lanes, self.num_micro_batches)

    def num_merges(self, lane: int) -> int:
        """Return how often the last two open sums are added when a lane's sum is complete."""
        return num_merges(lane, self.num_lanes, self.own)
