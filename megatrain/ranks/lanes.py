"""Lanes: an order for adding the micro-batches' gradients that does not depend on the number of ranks.

Floating-point sums depend on their order. The micro-batches of a step are therefore divided into contiguous lanes of
nearly equal size. Each lane is summed from its first micro-batch to its last. The lanes' sums are added in a binary
tree that depends only on the number of lanes. Each rank sums the subtrees that contain only its own lanes. The owner of
an element then adds the ranks' sums (`total`). With one lane, gradients are added one micro-batch after another.

The tree is left-complete: a node is split at the largest power of two below its number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Lanes",
    "Subtree",
    "lane_micro_batches",
    "lane_of",
    "max_open_sums",
    "num_merges",
    "rank_lanes",
    "rank_micro_batches",
    "split",
    "subtrees",
    "total",
]

#: A node of the tree: its first lane, and the end (exclusive) of its lanes.
Subtree = tuple[int, int]
_Sum = TypeVar("_Sum")


def lane_micro_batches(lane: int, num_lanes: int, num_micro_batches: int) -> range:
    """Return a lane's micro-batches. A lane can be empty if there are fewer micro-batches than lanes."""
    return range(num_micro_batches * lane // num_lanes, num_micro_batches * (lane + 1) // num_lanes)


def lane_of(micro_batch: int, num_lanes: int, num_micro_batches: int) -> int:
    """Return the lane that contains a micro-batch."""
    assert 0 <= micro_batch < num_micro_batches, (micro_batch, num_micro_batches)
    return ((micro_batch + 1) * num_lanes - 1) // num_micro_batches


def rank_lanes(rank: int, num_ranks: int, num_lanes: int) -> range:
    """Return a rank's lanes. Each rank has at least one lane, because there are never more ranks than lanes."""
    assert 0 <= rank < num_ranks <= num_lanes, (rank, num_ranks, num_lanes)
    return range(num_lanes * rank // num_ranks, num_lanes * (rank + 1) // num_ranks)


def rank_micro_batches(rank: int, num_ranks: int, num_lanes: int, num_micro_batches: int) -> range:
    """Return the micro-batches in a rank's lanes."""
    lanes = rank_lanes(rank, num_ranks, num_lanes)
    first = lane_micro_batches(lanes[0], num_lanes, num_micro_batches)
    last = lane_micro_batches(lanes[-1], num_lanes, num_micro_batches)
    return range(first.start, last.stop)


def has_work_for_all(num_ranks: int, num_lanes: int, num_micro_batches: int) -> bool:
    """Return whether every rank has a micro-batch in a step."""
    return all(rank_micro_batches(rank, num_ranks, num_lanes, num_micro_batches) for rank in range(num_ranks))


def split(first: int, stop: int) -> int:
    """Return the first lane of a node's right half. The node must have at least two lanes."""
    assert stop - first > 1, (first, stop)
    half = 1
    while 2 * half < stop - first:
        half *= 2
    return first + half


def subtrees(first: int, stop: int, own_first: int, own_stop: int) -> list[Subtree]:
    """Return, in order, the largest subtrees of a node whose lanes are all within [``own_first``, ``own_stop``)."""
    if own_stop <= first or stop <= own_first:
        return []
    if own_first <= first and stop <= own_stop:
        return [(first, stop)]
    middle = split(first, stop)
    return subtrees(first, middle, own_first, own_stop) + subtrees(middle, stop, own_first, own_stop)


def total(first: int, stop: int, sums: Mapping[Subtree, _Sum], add: Callable[[_Sum, _Sum], _Sum]) -> _Sum:
    """Return the sum of a node's lanes.

    Args:
        first: First lane of the node.
        stop: End (exclusive) of the node's lanes.
        sums: Sum of each node. Every lane must be in exactly one of these nodes.
        add: Function that adds two sums. It can modify and return the left sum, because that sum is not used again.
    """
    if (first, stop) in sums:
        return sums[first, stop]
    middle = split(first, stop)
    return add(total(first, middle, sums, add), total(middle, stop, sums, add))


def num_merges(lane: int, num_lanes: int, own_lanes: range) -> int:
    """Return how many times the two latest open sums must be merged after a lane has been summed.

    A caller that sums its lanes in order and merges sums accordingly ends with the sums of ``subtrees``. It never has
    more than ``max_open_sums`` open sums.

    Args:
        own_lanes: Lanes that the caller processes.
    """
    nodes = subtrees(0, num_lanes, own_lanes.start, own_lanes.stop)
    ((first, stop),) = (node for node in nodes if node[0] <= lane < node[1])
    count = 0
    # Count the nodes that end with this lane and have at least two lanes.
    while stop - first > 1:
        middle = split(first, stop)
        if lane < middle:
            first, stop, count = first, middle, 0
        else:
            # A node's right half ends with the same lane as the node.
            count = count + 1 if stop == lane + 1 else 0
            first = middle
    return count


def max_open_sums(num_lanes: int, own_lanes: range | None = None) -> int:
    """Return the maximum number of sums that are open at the same time if lanes are processed in order.

    Args:
        own_lanes: Lanes to process, or None for all lanes. The sums of their subtrees count as open until the end.
    """
    own_lanes = range(num_lanes) if own_lanes is None else own_lanes
    num_open = max_open = 0
    for lane in own_lanes:
        num_open += 1
        max_open = max(max_open, num_open)
        num_open -= num_merges(lane, num_lanes, own_lanes)
    return max_open


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a step. This rank sums only ``local_lanes``."""

    num_lanes: int
    num_micro_batches: int
    local_lanes: range

    @classmethod
    def single(cls) -> Lanes:
        """Return a single lane for any number of micro-batches."""
        return cls(1, 1, range(1))

    @classmethod
    def for_all(cls, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return a step's lanes in a single process."""
        return cls(num_lanes, num_micro_batches, range(num_lanes))

    @classmethod
    def for_rank(cls, rank: int, num_ranks: int, num_lanes: int, num_micro_batches: int) -> Lanes:
        """Return a step's lanes on one of several ranks."""
        return cls(num_lanes, num_micro_batches, rank_lanes(rank, num_ranks, num_lanes))

    @property
    def subtrees(self) -> list[Subtree]:
        """Tree nodes, in order, whose sums this rank has after it has summed its lanes."""
        return subtrees(0, self.num_lanes, self.local_lanes.start, self.local_lanes.stop)

    @property
    def max_open_sums(self) -> int:
        """Maximum number of sums that are open at the same time on this rank."""
        return max_open_sums(self.num_lanes, self.local_lanes)

    def lane_of(self, micro_batch: int) -> int:
        """Return the lane of a micro-batch. ``micro_batch`` is its index among this rank's micro-batches."""
        if self.num_lanes == 1:
            return 0
        first = lane_micro_batches(self.local_lanes.start, self.num_lanes, self.num_micro_batches).start
        return lane_of(first + micro_batch, self.num_lanes, self.num_micro_batches)

    def num_merges(self, lane: int) -> int:
        """Return how many times the two latest open sums must be merged after a lane has been summed."""
        return num_merges(lane, self.num_lanes, self.local_lanes)
