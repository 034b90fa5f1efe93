"""A region that is clipped to a range becomes boxes with exactly the elements in the range."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatrain.models.regions import Region, region_of


def elements(shape: Sequence[int], strides: Sequence[int], start: int) -> Iterator[int]:
    for index in itertools.product(*map(range, shape)):
        yield start + sum(number * stride for number, stride in zip(index, strides, strict=True))


def pairs(region: Region) -> list[tuple[int, int]]:
    """Return the target and source positions of each element."""
    targets = elements(region.shape, region.target_strides, region.target_start)
    sources = elements(region.shape, region.source_strides, region.source_start)
    return list(zip(targets, sources, strict=True))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_boxes_within_a_range_have_exactly_its_elements(order: tuple[int, ...]) -> None:
    """In a transposed target, the rows are interleaved, so a range can begin and end inside many rows."""
    source = torch.empty(3, 4, 5)
    shape = tuple(source.shape[dimension] for dimension in order)
    target = torch.empty(2, *shape)[1].permute(*(order.index(dimension) for dimension in range(3)))
    region = region_of("source", source, target)
    expected = dict(pairs(region))
    assert sorted(expected) == list(range(60, 120))
    for start in range(55, 121, 3):
        for stop in range(start, 126, 4):
            found = [pair for box in region.clip(start, stop) for pair in pairs(box)]
            assert len(found) == len(dict(found)), (start, stop)
            assert dict(found) == {key: value for key, value in expected.items() if start <= key < stop}, (start, stop)
