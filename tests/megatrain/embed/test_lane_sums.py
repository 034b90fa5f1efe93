"""Ranks add their lanes in the order of one tree, even if the ranks have different numbers of subtrees."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megatrain
from megatrain.embed import shared
from megatrain.ranks.lanes import total

NUM_RANKS, NUM_LANES = 2, 10  # lanes 0 to 4 form two subtrees, and lanes 5 to 9 form three
SHARD_ELEMENTS = 5


class ThreadCollectives:
    """Collectives of one rank, where each rank is a thread of this process."""

    size = NUM_RANKS

    def __init__(self, rank: int, barrier: threading.Barrier, payloads: dict[int, Sequence[Tensor]]) -> None:
        self.rank, self._barrier, self._payloads = rank, barrier, payloads

    def supports_device(self, kind: str) -> bool:
        return kind == "cpu"

    def exchange(
        self, received: Tensor, sent: Tensor, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> None:
        self._payloads[self.rank] = sent.split(list(sent_lengths))
        self._barrier.wait(30)
        for peer, part in enumerate(received.split(list(received_lengths))):
            part.copy_(self._payloads[peer][self.rank])
        self._barrier.wait(30)


def test_ranks_with_different_numbers_of_subtrees_add_like_one_rank() -> None:
    generator = torch.Generator().manual_seed(3)
    lanes = torch.randn(NUM_LANES, NUM_RANKS * SHARD_ELEMENTS, generator=generator)
    whole = total(0, NUM_LANES, {(lane, lane + 1): lanes[lane].clone() for lane in range(NUM_LANES)}, Tensor.add_)
    barrier, payloads = threading.Barrier(NUM_RANKS), dict[int, Sequence[Tensor]]()

    def shard_of(rank: int) -> tuple[int, Tensor]:
        group: Any = ThreadCollectives(rank, barrier, payloads)
        ranks = shared.ModuleRanks(group, megatrain.open_store(ram="1MiB"), NUM_LANES)
        own_lanes = {lane: lanes[lane].clone() for lane in ranks.own_lanes}
        return len(ranks.lanes.rank_sums(rank)), ranks.sum_lanes(own_lanes)

    with mock.patch.object(shared, "Collectives", lambda group: group), ThreadPoolExecutor(NUM_RANKS) as threads:
        found = list(threads.map(shard_of, range(NUM_RANKS)))
    assert [num_sums for num_sums, _ in found] == [2, 3]
    torch.testing.assert_close(torch.cat([shard for _, shard in found]), whole, rtol=0, atol=0)
