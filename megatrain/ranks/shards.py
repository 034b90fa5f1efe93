"""Shards: the division of each part of a layout among the ranks.

Every rank owns one contiguous range of each part: its *shard*. Weight, state and gradient have the same shard, so an
update needs no data from other ranks. All shards of a part have the same length and start at multiples of
`SHARD_BLOCK_ELEMENTS`, so that no partial sum of a norm is split between ranks. Elements past the end of the part are
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.ranks.lanes import Lanes, rank_lanes, rank_micro_batches, subtrees

__all__ = ["NETWORK", "PEER", "SHARD_BLOCK_ELEMENTS", "RankLanes", "RankShards", "Sharding", "peer_links"]

#: Names of other ranks in links, on the same host and on other hosts, as in ``"ranks->ram"`` and ``"gpu->hosts"``.
PEER, NETWORK = "ranks", "hosts"

SHARD_BLOCK_ELEMENTS = 65_536
"""Every shard's length is a multiple of this number, which is the length of one partial sum of a norm."""


@dataclass(frozen=True, slots=True)
class RankShards:
    """Shards that one rank owns. A single process owns all elements, and its blocks are as long as the parts."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self

    @property
    def is_local(self) -> bool:
        """Whether a single rank owns all elements."""
        return self.size == 1

    def num_elements(self, part: range) -> int:
        """Return the length of each shard of a part, including padding. It is the same on all ranks."""
        if self.is_local:
            return len(part)
        blocks = -(-len(part) // SHARD_BLOCK_ELEMENTS)
        return -(-blocks // self.size) * SHARD_BLOCK_ELEMENTS

    def gathered_range(self, part: range) -> range:
        """Return the range that a part's concatenated shards occupy in a full copy of the layout.

        Because the last shards include padding, the range can end in the next part or past the end of the layout.
        """
        return range(part.start, part.start + self.size * self.num_elements(part))

    def owned_range(self, part: range, rank: int | None = None) -> range:
        """Return the range of a part that a rank owns. It is empty if the rank's shard contains only padding.

        Args:
            part: Range of elements in a layout.
            rank: Number of the rank, or None for this rank.
        """
        length = self.num_elements(part)
        start = part.start + (self.rank if rank is None else rank) * length
        return range(min(start, part.stop), min(start + length, part.stop))


def peer_links(tier: str, size: int, num_hosts: int) -> list[str]:
    """Return the names of the links between a tier and other ranks. The list is empty if there is only one rank."""
    peer = PEER if num_hosts == 1 else NETWORK
    return [] if size == 1 else [f"{peer}->{tier}", f"{tier}->{peer}"]


@dataclass(frozen=True, slots=True)
class RankLanes:
    """Distribution of a step's lanes among the ranks (`lanes.py`).

    Attributes:
        count: Number of lanes in a step. Must be at least the number of ranks.
        size: Number of ranks.
        num_hosts: 1, or the number of ranks. `plan.rank_checks.check_ranks` rejects all other numbers.
    """

    count: int = 1
    size: int = 1
    num_hosts: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.size <= self.count and self.num_hosts in (1, self.size), self

    def rank_sums(self, rank: int) -> list[tuple[int, int]]:
        """Return, in order, the subtrees of the lane tree that a rank sums without data from other ranks."""
        lanes = rank_lanes(rank, self.size, self.count)
        return subtrees(0, self.count, lanes.start, lanes.stop)

    @property
    def num_sums(self) -> int:
        """Total number of subtrees in ``rank_sums`` over all ranks."""
        return sum(len(self.rank_sums(rank)) for rank in range(self.size))

    def rank_micro_batches(self, rank: int, num_micro_batches: int) -> range:
        """Return the micro-batches of a step that a rank computes."""
        return rank_micro_batches(rank, self.size, self.count, num_micro_batches)


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's share of the parameters and of a step's micro-batches.

    Attributes:
        shards: Shards in this rank's blocks.
        lanes: Distribution of the lanes among all ranks.
        own_lanes: Lanes that this rank sums.
        gathers_ahead: Number of visits by which a weight is gathered ahead of the visit that needs it.
    """

    shards: RankShards = field(default_factory=RankShards)
    lanes: RankLanes = field(default_factory=RankLanes)
    own_lanes: Lanes = field(default_factory=Lanes.single)
    gathers_ahead: int = 0
