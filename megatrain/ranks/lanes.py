"""Lanes: the order in which the gradients of a step's micro-batches are added, on any number of ranks.

Floating point sums depend on their order. So the micro-batches of a step are cut into contiguous lanes of nearly equal
size. Each lane is summed from its first micro-batch to its last. The lanes are added in a binary tree that depends only
on their number. A rank with some lanes of a step adds up the whole subtrees in them. The owner of an element then adds
the subtrees of all ranks (`total`). With one lane the sum is plain, in the order of micro-batches.

The tree is left-complete: a node is cut at the largest power of two that is less than its number of lanes.
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
    """Return the micro-batches of a lane; empty for some lanes if there are fewer micro-batches than lanes."""
    return range(num_micro_batches * lane // num_lanes, num_micro_batches * (lane + 1) // num_lanes)


def lane_of(micro_batch: int, num_lanes: int, num_micro_batches: int) -> int:
    """Return the lane of a micro-batch, the only one for which ``micro_batches_of_lane`` contains it."""
    assert 0 <= micro_batch < num_micro_batches, (micro_batch, num_micro_batches)
    return ((micro_batch + 1) * num_lanes - 1) // num_micro_batches


def lanes_of_rank(rank: int, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a rank: at least one, because there are never more ranks than lanes."""
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
    """Return the largest nodes below one, in order, whose lanes are all from ``own_first`` to ``own_stop``."""
    if own_stop <= first or stop <= own_first:
        return []
    if own_first <= first and stop <= own_stop:
        return [(first, stop)]
    middle = split(first, stop)
    return subtrees(first, middle, own_first, own_stop) + subtrees(middle, stop, own_first, own_stop)


def total(first: int, stop: int, sums: Mapping[Subtree, _Sum], add: Callable[[_Sum, _Sum], _Sum]) -> _Sum:
    """Return the sum of the lanes ``first`` to ``stop``.

    Args:
        first: First lane of the node.
        stop: End of its lanes, exclusive.
        sums: Sums of nodes that together contain every lane once.
        add: Returns the sum of two sums. It may change and return the left one, which is not used again.
    """
    if (first, stop) in sums:
        return sums[first, stop]
    middle = split(first, stop)
    return add(total(first, middle, sums, add), total(middle, stop, sums, add))


def num_merges(lane: int, num_lanes: int, own: range) -> int:
    """Return how often the last two open sums are added when a lane's sum is complete.

    A caller takes lanes in order, opens a sum for each, and merges like this after each. Finally it has the sums of
    ``subtrees``, and never more than ``most_open_sums`` open sums.

    Args:
        own: Lanes that the caller takes.
    """
    (found,) = ((first, stop) for first, stop in subtrees(0, num_lanes, own.start, own.stop) if first <= lane < stop)
    first, stop = found
    count = 0
    # Once for each node that ends with this lane and has other lanes.
    while stop - first > 1:
        middle = split(first, stop)
        if lane < middle:
            first, stop, count = first, middle, 0
        else:
            # The right half ends with its parent.
            count = count + 1 if stop == lane + 1 else 0
            first = middle
    return count


def most_open_sums(num_lanes: int, own: range | None = None) -> int:
    """Return the largest number of open sums when lanes are taken in order.

    Args:
        own: Lanes that are taken; None for all. The sums of its subtrees stay open.
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
    """Lanes of a step, and the lanes that this process sums.

    Attributes:
        own: Lanes that this process sums.
    """

    num_lanes: int
    num_micro_batches: int
    own: range

    @classmethod
    def single(cls) -> Lanes:
        """Return the single lane of any number of micro-batches."""
        return cls(1, 1, range(1))

    @classmethod
    def all_of(cls, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return the lanes of a step on a single process."""
        return cls(num_lanes, num_micro_batches, range(num_lanes))

    @classmethod
    def of_rank(cls, rank: int, num_ranks: int, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return the lanes of a rank."""
        return cls(num_lanes, num_micro_batches, lanes_of_rank(rank, num_ranks, num_lanes))

    @property
    def subtrees(self) -> list[Subtree]:
        """Nodes whose sums remain after all lanes, in order."""
        return subtrees(0, self.num_lanes, self.own.start, self.own.stop)

    @property
    def most_open_sums(self) -> int:
        """Largest number of open sums."""
        return most_open_sums(self.num_lanes, self.own)

    def lane_of(self, micro_batch: int) -> int:
        """Return the lane of a micro-batch, by its number among the micro-batches of this process."""
        if self.num_lanes == 1:
            return 0
        first = micro_batches_of_lane(self.own.start, self.num_lanes, self.num_micro_batches).start
        return lane_of(first + micro_batch, self.num_lanes, self.num_micro_batches)

    def num_merges(self, lane: int) -> int:
        """Return how often the last two open sums are added when a lane's sum is complete."""
        return num_merges(lane, self.num_lanes, self.own)
