"""Which elements of a block belong to which rank.

Every rank owns one contiguous range of each part of a layout: its *shard*. The weight's shard, the state's and the
gradient's have the same range, so an update needs no other rank. All shards of a part are equally long, and begin at
multiples of `SHARD_BLOCK_ELEMENTS`: no partial sum of a norm lies on two ranks. What lies past the end of the part is
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.ranks.lanes import Lanes, lanes_of_rank, micro_batches_of_rank, subtrees

__all__ = ["NETWORK", "PEER", "SHARD_BLOCK_ELEMENTS", "RankLanes", "Sharding", "RankShards", "peer_links"]

#: Stand for the other ranks of a host, and for those of other hosts, in the names of links: ``"ranks->ram"``,
#: ``"gpu->hosts"``.
PEER, NETWORK = "ranks", "hosts"

SHARD_BLOCK_ELEMENTS = 65_536
"""Shards are multiples of this: the elements of one partial sum of a norm, and what parts begin at multiples of."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards of a rank. A run of one process owns everything, and its blocks are as long as the parts.

    Attributes:
        rank: whose blocks these are, from 0.
        size: number of ranks.
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
        """Return where in a full copy of a layout all shards of a part are, one after the other.

        It may end in the next part, or past the layout: the last shards hold what lies past the part.
        """
        return range(part.start, part.start + self.size * self.num_elements(part))

    def owned(self, part: range, rank: int | None = None) -> range:
        """Return the elements of a part that a rank owns, counted as the part is; none where its shard lies past it.

        Args:
            part: range of elements of a layout.
            rank: None: this one.
        """
        length = self.num_elements(part)
        start = part.start + (self.rank if rank is None else rank) * length
        return range(min(start, part.stop), min(start + length, part.stop))


def peer_links(tier: str, size: int, num_hosts: int) -> list[str]:
    """Return the links between a tier and other ranks.

    Args:
        size: number of ranks.
    """
    place = PEER if num_hosts == 1 else NETWORK
    return [] if size == 1 else [f"{place}->{tier}", f"{tier}->{place}"]


@dataclass(frozen=True, slots=True)
class RankLanes:
    """Which lanes of a step each rank computes (`lanes.py`).

    Attributes:
        count: lanes of a step, at least one for each rank.
        size: number of ranks.
        num_hosts: 1, or one host for each rank; `plan.planner.check_ranks` refuses anything else.
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
        """Sums of all ranks together."""
        return sum(len(self.sums_of_rank(rank)) for rank in range(self.size))

    def micro_batches_of_rank(self, rank: int, num_micro_batches: int) -> range:
        """Return the micro-batches of a step that a rank computes."""
        return micro_batches_of_rank(rank, self.size, self.count, num_micro_batches)


@dataclass(frozen=True, slots=True)
class Sharding:
    """What one rank has, and does, of a step that all ranks of a run make together. One process does all of it.

    Attributes:
        shards: The elements of each part that this rank's blocks hold.
        lanes: Which sums of gradients come from which rank.
        own_lanes: In which this rank adds the gradients of its micro-batches.
        gathers_ahead: How many visits before it is needed a weight is gathered.
    """

    shards: RankShards = field(default_factory=RankShards)
    lanes: RankLanes = field(default_factory=RankLanes)
    own_lanes: Lanes = field(default_factory=Lanes.single)
    gathers_ahead: int = 0
