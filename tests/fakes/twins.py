"""Simulated collectives in one process.

All ranks have the same micro-batches, so every peer sends a copy of the caller's data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatrain.ranks.world import World


class Twins:
    """Collectives of rank 0. Like NCCL's, they run on the current stream, if there is one.

    They only test how the engine calls collectives, not communication between processes.

    Args:
        size: Number of ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.moved_bytes = size, Counter[str]()

    @classmethod
    def of(cls, world: World) -> Any:
        """Return a factory that replaces the class ``Collectives`` for a world of the same size."""
        return lambda tier, num_hosts: cls(world.size)

    def gather(self, full: Tensor, share: Tensor, *, is_async: bool = False) -> None:
        for row in full.view(self.size, -1)[1:]:
            row.copy_(share)

    def exchange(
        self, received: Tensor, sent: Tensor, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> None:
        for part in received.split(list(received_lengths)):
            if len(part) == sent_lengths[self.rank]:
                part.copy_(sent[: len(part)])
            else:
                part.zero_()  # a peer may send more sums than this rank

    def gather_objects(self, item: Any) -> list[Any]:
        return [item] * self.size
