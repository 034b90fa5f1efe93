"""The prefetcher's choice of blocks. It is a pure function, so a small example tests each rule."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered import (
    Access,
    CapacityError,
    GpuTier,
    LeaseError,
    RamTier,
    Schedule,
    TieredStore,
    UninitializedBlockError,
    prefetch,
)
from tiered.block import BlockSpec, CopyState
from tiered.hops import Routes, intermediate_tiers
from tiered.prefetch import next_fetches
from tiered.records import Block
from tiered.schedule import Mode
from tiered.testing.manual import ManualLink, MemoryTier
from tiered.tiers.base import Slot


def picks(text: str, room: int, lookahead: int | None = None, present: str = "", now: int = 0, size: int = 1) -> str:
    """Return the keys to fetch.

    Args:
        text: One character per tick: ``a`` reads block "a", ``A`` overwrites it, and ``.`` accesses nothing.
        room: Bytes of RAM that are available to copies.
        lookahead: Maximum bytes of distinct future copies. If None, only space limits them.
        present: Keys of the blocks that have a copy in RAM.
        now: Current tick.
        size: Size of each block in bytes.
    """
    accesses = []
    for tick, letter in enumerate(text):
        mode: Mode = "w" if letter.isupper() else "r"
        if letter != ".":
            accesses.append(Access(tick, letter.lower(), "ram", mode))
    fetches = next_fetches(
        Schedule(accesses), now, lookahead, {"ram": room}, lambda access: (access.key in present, size)
    )
    return "".join(access.key for access in fetches)


def test_nearest_deadline_first_while_all_fits_together() -> None:
    assert picks(".abcd", room=3) == "abc"
    assert picks(".abcd", room=9) == "abcd"
    assert picks(".abcd", room=5, size=2) == "ab"


def test_current_access_takes_space_but_is_not_fetched() -> None:
    assert picks("abcd", room=3) == "bc"


def test_block_in_use_needs_space_for_its_next_fetch() -> None:
    """The copy of a block in use may be evicted before the block's next use."""
    assert picks("abcda", room=4) == "bcd"
    assert picks("abcda", room=5) == "bcda"


def test_present_copies_take_space() -> None:
    assert picks(".abcd", room=3, present="ab") == "c"


def test_lookahead_bounds_distinct_bytes() -> None:
    assert picks(".abcd", room=9, lookahead=2) == "ab"
    assert picks(".aabcd", room=9, lookahead=2) == "ab"
    assert picks(".abcd", room=9, lookahead=0) == ""
    assert picks(".abcd", room=9, lookahead=2, present="a") == "b"


def test_a_block_written_before_its_read_is_not_fetched() -> None:
    assert picks(".aBb", room=9) == "a"
    assert picks("Aab", room=9) == "b"
    assert picks(".aA", room=9) == "a", "the read comes first"


def test_overwrite_takes_space_but_is_not_fetched() -> None:
    assert picks(".Abc", room=2) == "b"
    assert picks(".Abc", room=9, lookahead=1) == "b"


def test_no_prefetch_after_the_last_access() -> None:
    assert picks("abc", room=9, now=2) == ""


def fetches_with_three_tiers(
    accesses: list[Access], room: dict[str, int], middle: str = "ram"
) -> list[tuple[str, str]]:
    """Return (key, tier) of each fetch with three tiers.

    Blocks with uppercase keys have their home below the middle tier.
    """
    fetches = next_fetches(
        Schedule(accesses),
        0,
        None,
        room,
        lambda access: (False, 1),
        lambda access: {middle: 1} if access.key.isupper() and access.tier != middle else {},
    )
    return [(access.key, access.tier) for access in fetches]


def test_pass_through_copies_take_space() -> None:
    """A copy on its way to the GPU must not evict a copy that was fetched for a later use in RAM."""
    accesses = [Access(1, "A", "gpu", "r"), Access(2, "B", "gpu", "r"), Access(3, "C", "ram", "r")]
    assert fetches_with_three_tiers(accesses, {"gpu": 9, "ram": 3}) == [("A", "gpu"), ("B", "gpu"), ("C", "ram")]
    assert fetches_with_three_tiers(accesses, {"gpu": 9, "ram": 2}) == [("A", "gpu"), ("B", "gpu")]
    assert fetches_with_three_tiers(accesses, {"gpu": 9, "ram": 0}) == []


def test_modified_copy_takes_space_in_intermediate_tiers() -> None:
    """A copy that is only read is never written back, but a changed copy returns through the middle tier."""
    links = (("gpu", "ram"), ("ram", "gpu"), ("nvme", "ram"), ("ram", "nvme"))
    routes, block = Routes(links), Block(BlockSpec("a", (8,), torch.uint8, "nvme"))
    copy = block.copy_in("gpu")
    for state in (CopyState.FILLING, CopyState.CLEAN):
        copy.move(state)
    assert [*intermediate_tiers(routes, block, Access(1, "a", "gpu", "r"))] == []
    assert [*intermediate_tiers(routes, block, Access(1, "a", "gpu", "rw"))] == ["ram"]
    assert [*intermediate_tiers(routes, block, Access(1, "a", "gpu", "w"))] == ["ram"]
    assert [*intermediate_tiers(Routes((*links, ("nvme", "gpu"))), block, Access(1, "a", "gpu", "rw"))] == []
    middle = block.copy_in("ram")
    middle.slot = Slot("ram", 8, 8, None)
    assert [*intermediate_tiers(routes, block, Access(1, "a", "gpu", "r"))] == ["ram"]
    copy.move(CopyState.DIRTY)
    assert [*intermediate_tiers(routes, block, Access(1, "a", "gpu", "rw"))] == ["ram"]


def test_shortest_route_uses_the_earliest_links() -> None:
    links = (("a", "b"), ("a", "c"), ("c", "d"), ("b", "d"), ("d", "e"), ("e", "a"), ("x", "a"))
    routes = Routes(links)
    assert routes.between("a", "a") == ()
    assert routes.between("a", "d") == (("a", "b"), ("b", "d"))
    assert routes.between("a", "e") == (("a", "b"), ("b", "d"), ("d", "e"))
    assert Routes((links[1], links[0], *links[2:])).between("a", "d") == (("a", "c"), ("c", "d"))
    assert routes.tiers_between("a", "e") == ("b", "d") and routes.tiers_between("e", "a") == ()
    assert [routes.is_far("a", tier) for tier in "abdex"] == [False, False, False, True, False]
    with pytest.raises(ValueError, match=r"^no links lead from tier 'a' to tier 'x'$"):
        routes.between("a", "x")
    assert routes.between("a", "d") == (("a", "b"), ("b", "d")), "from the cache"
    assert routes == Routes(links) != Routes(links[1:]) and repr(Routes(links[:1])) == "Routes(links=(('a', 'b'),))"


def test_block_takes_space_in_every_tier_it_is_used_in() -> None:
    accesses = [Access(1, "a", "gpu", "w"), Access(2, "a", "ram", "r"), Access(3, "b", "ram", "r")]
    assert fetches_with_three_tiers(accesses, {"gpu": 1, "ram": 2}) == [("b", "ram")]
    assert fetches_with_three_tiers(accesses, {"gpu": 1, "ram": 1}) == []


def test_group_release_triggers_one_schedule_walk() -> None:
    with TieredStore([GpuTier(1 << 16, device="cpu"), RamTier(1 << 20)]) as store:
        for key in "abcd":
            store.register(key, (8,), torch.float32, home="ram")
        store.set_schedule(Schedule([Access(0, "a", "gpu", "w")], 1))  # nothing to fetch
        requests: list[tuple[str, str, Mode]] = [(key, "gpu", "w") for key in "abcd"]
        with mock.patch.object(prefetch, "next_fetches", wraps=next_fetches) as walk:
            leases = store.acquire_many(requests)
            with suppress(InterruptedError), leases:
                assert not walk.called
                raise InterruptedError  # the four written copies are dropped
            assert walk.call_count == 1 and all(lease.is_released for lease in leases)
            with store.acquire_many(requests):
                pass
            assert walk.call_count == 1, "arrived copies leave no space for others"
        store.acquire_many([]).release()


def test_walk_skips_blocks_used_in_their_home_tier() -> None:
    """Any lease may cause a walk of the schedule. Walks must cost nothing if all blocks stay at home."""
    with TieredStore([GpuTier(1 << 16, device="cpu", name="fast"), RamTier(1 << 16, name="slow")]) as store:
        for key, home in (("home", "fast"), ("away", "slow")):
            store.register(key, (8,), torch.float32, home=home)
            with store.acquire(key, home, "w"):
                pass
        store.set_schedule(
            Schedule([Access(tick, key, "fast") for tick, key in enumerate(("home", "away", "late"))], 3)
        )
        assert store._movement.prefetcher._fetch_schedule.select(store._blocks).keys == {"away"}
        store.register("other", (8,), torch.float32, home="slow")
        away = store._movement.prefetcher._fetch_schedule
        assert away.select(store._blocks).keys == {"away"}, "the schedule does not contain it"
        store.register("late", (8,), torch.float32, home="slow")
        assert store._movement.prefetcher._fetch_schedule.select(store._blocks).keys == {"away", "late"}
        store.set_schedule(Schedule([Access(0, "home", "fast")], 1))
        assert not store._movement.prefetcher._fetch_schedule.select(store._blocks).keys


KEYS, MODES = st.sampled_from("abc"), st.sampled_from(["r", "rw", "w"])
WORK = st.one_of(
    st.tuples(st.just("lease"), KEYS, MODES),
    st.tuples(st.sampled_from(["evict", "pin", "unpin", "discard", "pass_over"]), KEYS),
    st.tuples(st.just("complete")),
    st.tuples(st.just("reserve"), st.integers(0, 2)),
    st.tuples(st.just("advance")),
)


def complete(*links: ManualLink) -> None:
    while pending := [link for link in links if link.pending]:
        pending[0].complete()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(KEYS, MODES), min_size=1, max_size=5), st.lists(WORK, min_size=5, max_size=30))
def test_walk_is_skipped_only_if_nothing_changed(future: list[tuple[str, Mode]], work: list[Any]) -> None:
    """For all calls and their order, a walk of the schedule is skipped only if it would find nothing to fetch."""
    up, down = ManualLink("ram", "gpu"), ManualLink("gpu", "ram")
    store = TieredStore([MemoryTier("gpu", 4), MemoryTier("ram", 9)], links=[up, down])
    for size, key in enumerate("abc", start=1):
        store.register(key, (size,), torch.uint8, home="ram")
        store.acquire(key, "ram", "w").release()
    store.set_schedule(Schedule([Access(t, key, "gpu", mode) for t, (key, mode) in enumerate(future)], len(future)))
    prefetcher, tick, reserved = store._movement.prefetcher, 0, 0
    complete(up, down)
    for name, *what in work:
        with suppress(CapacityError, LeaseError, TimeoutError, UninitializedBlockError):
            if name == "lease":
                store.acquire(what[0], "gpu", what[1], timeout_s=0).release()
            elif name == "discard":
                if not up.pending and not down.pending:
                    store.discard(what[0])
            elif name == "complete":
                complete(up, down)
            elif name == "reserve":
                if not up.pending and not down.pending:
                    store.reserve("gpu", what[0] - reserved)
                    reserved = what[0]
            elif name == "advance":
                tick += 1
                store.advance(tick)
            elif name == "pass_over":
                store.pass_over([(tick + 1, what[0])])
            elif name == "unpin":
                store.unpin(what[0], "gpu")
            else:
                getattr(store, name)(what[0], "gpu")
        if prefetcher.idle_state == prefetcher.fetch_state():
            assert not list(prefetcher.missing_accesses()), (name, what)
        with store._movement.changed:
            prefetcher.pump()
