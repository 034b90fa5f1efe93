"""Ranges of weights that are stored in several consecutive blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.base.precision import decode

__all__ = ["decode_master", "overlaps"]

Key = TypeVar("Key")


def overlaps(parts: Iterable[tuple[range, Key]], start: int, stop: int) -> Iterator[tuple[Key, slice, slice]]:
    """Yield each part that overlaps ``start`` to ``stop``, with the overlap as slices of the part and of the range."""
    for part, key in parts:
        begin, end = max(start, part.start), min(stop, part.stop)
        if begin < end:
            yield key, slice(begin - part.start, end - part.start), slice(begin - start, end - start)


def decode_master(
    high: Tensor,
    low_parts: Iterable[tuple[range, str | None]],
    start: int,
    read_low: Callable[[str, slice], Tensor],
) -> Tensor:
    """Return the fp32 masters of consecutive elements.

    Args:
        high: High halves of the elements from ``start`` on.
        low_parts: Ranges of low halves, each with its block, or with None for frozen elements without low halves.
        read_low: Function that returns a range of a block.
    """
    master = torch.empty(len(high))
    for low, source, target in overlaps(low_parts, start, start + len(high)):
        if low is None:
            master[target] = high[target]
        else:
            decode(high[target], read_low(low, source), master[target])
    return master
