"""Lanes: the order in which the gradients of a step's micro-batches are added, whatever computes them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["micro_batches_of_lanes", "split", "subtrees", "total"]


def split(start: int, stop: int) -> int:
    """Return where the tree over lanes is cut: a left-complete tree, which depends on their number alone."""
    half = 1
    while 2 * half < stop - start:
        half *= 2
    return start + half


def subtrees(start: int, stop: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return what of the tree over [start, stop) can be added up with the lanes [first, last) alone."""
    if last <= start or stop <= first:
        return []
    if first <= start and stop <= last:
        return [(start, stop)]
    middle = split(start, stop)
    return subtrees(start, middle, first, last) + subtrees(middle, stop, first, last)


def total(start: int, stop: int, sums: Mapping[tuple[int, int], Tensor]) -> Tensor:
    """Return the sum over lanes [start, stop), written over one of ``sums``: those of subtrees."""
    if (start, stop) in sums:
        return sums[start, stop]
    middle = split(start, stop)
    return total(start, middle, sums).add_(total(middle, stop, sums))


def micro_batches_of_lanes(first: int, last: int, num_lanes: int, num_micro_batches: int) -> range:
    """Return the micro-batches of lanes [first, last)."""
    return range(num_micro_batches * first // num_lanes, num_micro_batches * last // num_lanes)
