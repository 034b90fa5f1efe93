"""Shards: the elements of a block that belong to each rank.

Every rank owns one contiguous range of each part of a layout: its *shard*. Weight, state and gradient have shards with
the same range, so an update needs no other rank. All shards of a part have equal lengths, and begin at multiples of
`SHARD_BLOCK_ELEMENTS`, so that no partial sum of a norm is split between ranks. Elements past the end of the part are
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.ranks.lanes import Lanes, lanes_of_rank, micro_batches_of_rank, subtrees

__all__ = ["NETWORK", "PEER", "SHARD_BLOCK_ELEMENTS", "RankLanes", "Sharding", "RankShards", "peer_links"]

#: Names of the other ranks on a host, and on other hosts, in the names of links: ``"ranks->ram"``, ``"gpu->hosts"``.
PEER, NETWORK = "ranks", "hosts"

SHARD_BLOCK_ELEMENTS = 65_536
"""Shards are multiples of this. It is the length of one partial sum of a norm, and parts begin at its multiples."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """Shards of a rank. A single process owns everything, and its blocks are as long as the parts.

    Attributes:
        rank: Number of the blocks' rank, from 0.
        size: Number of ranks.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self

    @property
    def are_whole(self) -> bool:
        """Whether there is one rank, which owns everything."""
        return self.size == 1

    def num_elements(self, part: range) -> int:
        """Return the length of a block that holds a shard of a part: the same on all ranks."""
        if self.are_whole:
            return len(part)
        blocks = -(-len(part) // SHARD_BLOCK_ELEMENTS)
        return -(-blocks // self.size) * SHARD_BLOCK_ELEMENTS

    def gathered(self, part: range) -> range:
        """Return the range of all shards of a part, one after the other, in a full copy of a layout.

        It may end in the next part, or past the layout, because the last shards include padding.
        """
        return range(part.start, part.start + self.size * self.num_elements(part))

    def owned(self, part: range, rank: int | None = None) -> range:
        """Return the elements of a part that a rank owns, in the part's numbering; empty if its shard is all padding.

        Args:
            part: Range of elements of a layout.
            rank: Number of the rank; None for this one.
        """
        length = self.num_elements(part)
        start = part.start + (self.rank if rank is None else rank) * length
        return range(min(start, part.stop), min(start + length, part.stop))


def peer_links(tier: str, size: int, num_hosts: int) -> list[str]:
    """Return the links between a tier and other ranks.

    Args:
        size: Number of ranks.
    """
    place = PEER if num_hosts == 1 else NETWORK
    return [] if size == 1 else [f"{place}->{tier}", f"{tier}->{place}"]


@dataclass(frozen=True, slots=True)
class RankLanes:
    """Lanes of a step that each rank computes (`lanes.py`).

    Attributes:
        count: Lanes of a step, at least one for each rank.
        size: Number of ranks.
        num_hosts: 1, or one host for each rank; `plan.planner.check_ranks` refuses other numbers.
    """

    count: int = 1
    size: int = 1
    num_hosts: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.size <= self.count and self.num_hosts in (1, self.size), self

    def sums_of_rank(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of lanes whose gradients a rank adds up by itself, in order."""
        own = lanes_of_rank(rank, self.size, self.count)
        return subtrees(0, self.count, own.start, own.stop)

    @property
    def num_sums(self) -> int:
        """Number of sums of all ranks together."""
        return sum(len(self.sums_of_rank(rank)) for rank in range(self.size))

    def micro_batches_of_rank(self, rank: int, num_micro_batches: int) -> range:
        """Return the micro-batches of a step that a rank computes."""
        return micro_batches_of_rank(rank, self.size, self.count, num_micro_batches)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Share of one rank in a step that all ranks of a run make together. A single process makes all of it.

    Attributes:
        shards: Elements of each part in this rank's blocks.
        lanes: Sums of gradients that come from each rank.
        own_lanes: Lanes in which this rank adds the gradients of its micro-batches.
        gathers_ahead: Number of visits between a gather and the visit that needs the weight.
    """

    shards: RankShards = field(default_factory=RankShards)
    lanes: RankLanes = field(default_factory=RankLanes)
    own_lanes: Lanes = field(default_factory=Lanes.single)
    gathers_ahead: int = 0
