"""Each element of a part has exactly one owner, for any length and number of ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.optim.kernels import NORM_BLOCK_ELEMENTS
from megatrain.ranks.lanes import total
from megatrain.ranks.shards import SHARD_BLOCK_ELEMENTS, RankLanes, RankShards, Sharding, peer_links


@given(blocks=st.integers(0, 300), length=st.integers(1, 30 * SHARD_BLOCK_ELEMENTS), size=st.integers(2, 40))
def test_every_element_has_one_owner(blocks: int, length: int, size: int) -> None:
    part = range(blocks * SHARD_BLOCK_ELEMENTS, blocks * SHARD_BLOCK_ELEMENTS + length)
    shards = [RankShards(rank, size) for rank in range(size)]
    owned = [each.owned_range(part) for each in shards]
    assert all(before.stop == after.start for before, after in pairwise(owned))
    assert owned[0].start == part.start and owned[-1].stop == part.stop
    assert owned == [shards[0].owned_range(part, rank) for rank in range(size)]
    # All blocks have equal, minimal length, and no partial sum of a norm spans two ranks.
    assert len({each.num_elements(part) for each in shards}) == 1
    shard = shards[0].num_elements(part)
    assert shard % SHARD_BLOCK_ELEMENTS == 0 and size * (shard - SHARD_BLOCK_ELEMENTS) < length <= size * shard
    assert all(len(each) <= shard and (each.start - part.start) % SHARD_BLOCK_ELEMENTS == 0 for each in owned if each)
    gathered = shards[0].gathered_range(part)
    assert gathered.start == part.start and len(gathered) == size * shard >= length


def test_links_to_other_ranks_have_names() -> None:
    assert peer_links("gpu", 1, 1) == []
    assert peer_links("gpu", 3, 1) == ["ranks->gpu", "gpu->ranks"]
    assert peer_links("ram", 3, 3) == ["hosts->ram", "ram->hosts"]
    alone = Sharding()
    assert (alone.shards.is_local, alone.lanes, alone.own_lanes.local_lanes) == (True, RankLanes(1, 1, 1), range(1))
    assert alone.gathers_ahead == 0


def test_shards_fit_parts_and_norms() -> None:
    assert SHARD_BLOCK_ELEMENTS == NORM_BLOCK_ELEMENTS == PART_ALIGNMENT_ELEMENTS


@given(length=st.integers(1, 1 << 20))
def test_one_rank_owns_everything_without_padding(length: int) -> None:
    part = range(7, 7 + length)
    assert (
        RankShards().is_local and RankShards().owned_range(part) == part and RankShards().num_elements(part) == length
    )


@given(size=st.integers(1, 8), more=st.integers(0, 8), num_micro_batches=st.integers(1, 40))
def test_lanes_and_micro_batches_of_ranks(size: int, more: int, num_micro_batches: int) -> None:
    lanes = RankLanes(size + more, size)
    sums = [each for rank in range(size) for each in lanes.rank_sums(rank)]
    assert len(sums) == lanes.num_sums
    assert [lane for first, stop in sums for lane in range(first, stop)] == list(range(size + more))

    def added(of_nodes: dict[tuple[int, int], str]) -> str:
        return total(0, lanes.count, of_nodes, lambda one, other: f"({one}+{other})")

    numbers = {(lane, lane + 1): str(lane) for lane in range(lanes.count)}
    of_sums = {
        (first, stop): total(first, stop, numbers, lambda one, other: f"({one}+{other})") for first, stop in sums
    }
    assert added(of_sums) == added(numbers), "each rank's sums are whole nodes of the tree"
    own = [number for rank in range(size) for number in lanes.rank_micro_batches(rank, num_micro_batches)]
    assert own == list(range(num_micro_batches))
