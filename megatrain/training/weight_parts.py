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
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            yield key, slice(first - part.start, last - part.start), slice(first - start, last - start)


def decode_master(
    high: Tensor,
    lows: Iterable[tuple[range, str | None]],
    start: int,
    read_low: Callable[[str, slice], Tensor],
) -> Tensor:
    """Return the fp32 masters of consecutive elements.

    Args:
        high: High halves of the elements from ``start`` on.
        lows: Ranges of low halves, each with its block, or with None for frozen elements without low halves.
        read_low: Returns a range of a block.
    """
    master = torch.empty(len(high))
    for low, inside, place in overlaps(lows, start, start + len(high)):
        if low is None:
            master[place] = high[place]
        else:
            decode(high[place], read_low(low, inside), master[place])
    return master
