"""Wake-ups and traffic of a store whose transfers the test completes by hand, in any order."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tiered import (
    LRU,
    Access,
    CapacityError,
    CopyState,
    Event,
    LeaseError,
    Schedule,
    StoreStats,
    TieredStore,
    TransferError,
    UninitializedBlockError,
)
from tiered.events import TierStats
from tiered.ext import EvictionPolicy, LinkUsage
from tiered.testing.manual import ManualLink, MemoryTier

TIMEOUT_S = 30


class Hand:
    """Store with one-byte blocks. Transfers complete only when a test calls ``move``, or completes them itself.

    Args:
        sizes: Capacities of the tiers in bytes, from fast to slow. The last tier is the home of all added blocks.
    """

    def __init__(self, *sizes: int, policy: EvictionPolicy | None = None, **options: Any) -> None:
        names = ["gpu", "ram", "disk"][-len(sizes) :]
        pairs = [pair for a, b in pairwise(names) for pair in ((a, b), (b, a))]
        self.links = {pair: ManualLink(*pair) for pair in pairs}
        tiers = [MemoryTier(name, size, addressable=name != "disk") for name, size in zip(names, sizes, strict=True)]
        self.fast, self.home = names[0], names[-1]
        self.store = TieredStore(tiers, policy or LRU(), list(self.links.values()), **options)

    def add(self, *keys: str, value: int = 0) -> None:
        """Register blocks and fill each with its index in ``keys`` plus ``value``.

        Only the copies in the home tier remain.
        """
        for number, key in enumerate(keys, start=value):
            self.store.register(key, (1,), torch.uint8, home=self.home)
            with self.store.acquire(key, "ram", "w", timeout_s=0) as lease:
                lease.tensor.fill_(number)
            self.store.evict(key, "ram")
            self.move()

    def under_way(self) -> list[tuple[str, str]]:
        return [pair for pair, link in self.links.items() for _ in link.pending]

    def move(self) -> None:
        """Complete all transfers in flight, and those that start as a result."""
        for _ in range(100):
            for link in self.links.values():
                for _ in list(link.pending):
                    link.complete()
            if not self.under_way():
                return
        raise AssertionError(f"transfers never stop: {self.under_way()}")

    def read(self, key: str, tier: str) -> int:
        """Return a block's value. Complete transfers until its lease is granted."""
        for _ in range(10):
            try:
                with self.store.acquire(key, tier, timeout_s=0) as lease:
                    return int(lease.tensor)
            except TimeoutError:
                self.move()
        raise AssertionError(f"{key} does not reach {tier}")

    def num_moved(self, before: StoreStats) -> dict[str, int]:
        window = self.store.stats() - before
        return {link: stats.num_bytes for link, stats in window.links.items() if stats.num_bytes}


@pytest.fixture
def make() -> Iterator[Callable[..., Hand]]:
    made: list[Hand] = []

    def make_one(*sizes: int, **options: Any) -> Hand:
        made.append(Hand(*sizes, **options))
        return made[-1]

    yield make_one
    for hand in made:
        hand.move()
        hand.store.close()


class Caller:
    """Thread that makes one request to the store and keeps the result."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.result: Any = None
        self._ask = ask
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._ask()
        except BaseException as error:
            self.result = error

    def is_waiting(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a caller never returns"
        return self.result


# -- leases and evictions ------------------------------------------------------------------------------------------


def test_failed_write_back_raises_in_its_waiter(make: Callable[..., Hand]) -> None:
    hand = make(4, 8)
    store = hand.store
    hand.add("a")
    with store.acquire("a", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(7)
    store.evict("a", "ram")
    caller = Caller(lambda: store.acquire("a", "ram", "w", timeout_s=TIMEOUT_S))
    assert caller.is_waiting()
    hand.links["ram", "disk"].fail()
    assert isinstance(caller.join(), TransferError)
    assert hand.read("a", "ram") == 7, "the newest bytes did not move"


def test_draining_copy_cannot_be_leased(make: Callable[..., Hand]) -> None:
    """A copy that is written back for an eviction cannot be leased.

    Otherwise, the traffic would depend on whether the write-back or the next request comes first.
    """
    hand = make(4, 8)
    store = hand.store
    hand.add("a")
    with store.acquire("a", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(7)
    before = store.stats()
    store.evict("a", "ram")
    with pytest.raises(TimeoutError, match="waiting for: drain"):
        store.acquire("a", "ram", timeout_s=0)
    assert store.prefetch("a", "ram").skipped
    hand.move()
    assert store.where("a") == {"disk": CopyState.CLEAN}
    assert hand.read("a", "ram") == 7
    assert hand.num_moved(before) == {"ram->disk": 1, "disk->ram": 1}


def test_requested_pinned_copy_is_not_missing_space(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("pinned", "other", "wanted")
    store.pin("pinned", "ram")
    hand.read("pinned", "ram")
    hand.read("other", "ram")
    lease = store.acquire("other", "ram", timeout_s=0)
    caller = Caller(lambda: store.acquire_many([("pinned", "ram", "r"), ("wanted", "ram", "w")], timeout_s=TIMEOUT_S))
    assert caller.is_waiting(), caller.result
    lease.release()
    assert [given.key for given in caller.join()] == ["pinned", "wanted"]
    caller.result.release()


def test_eviction_follows_its_lease_unless_the_copy_is_leased_again(
    make: Callable[..., Hand],
) -> None:
    hand = make(4, 8)
    store = hand.store
    hand.add("a")
    assert hand.read("a", "ram") == 0
    first = store.acquire("a", "ram", timeout_s=0)
    store.evict("a", "ram")
    first.release()
    assert store.where("a") == {"disk": CopyState.CLEAN}
    assert hand.read("a", "ram") == 0
    first = store.acquire("a", "ram", timeout_s=0)
    store.evict("a", "ram")
    with store.acquire("a", "ram", timeout_s=0):
        first.release()
    assert store.where("a")["ram"] is CopyState.CLEAN, "its last use was after the request to drop it"


def test_waiting_requests_evict_no_second_copy(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("a", "b", "c")
    for key in ("a", "b"):
        with store.acquire(key, "ram", "w", timeout_s=0) as lease:
            lease.tensor.fill_(9)
    for _ in range(3):  # retry as waiting callers do after each completed transfer
        with pytest.raises(TimeoutError):
            store.acquire("c", "ram", timeout_s=0)
    assert hand.under_way() == [("ram", "disk")]
    assert hand.read("c", "ram") == 2
    assert store.where("b")["ram"] is CopyState.DIRTY


def test_write_back_leaves_no_copies_in_intermediate_tiers(make: Callable[..., Hand]) -> None:
    hand = make(2, 2, 8)
    store = hand.store
    hand.add("a")
    with store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(5)
    before = store.stats()
    store.evict("a", "gpu")
    assert hand.under_way() == [("gpu", "ram")]
    hand.move()
    assert store.where("a") == {"disk": CopyState.CLEAN}
    assert store.stats().tiers["ram"].used_bytes == store.stats().tiers["gpu"].used_bytes == 0
    assert hand.num_moved(before) == {"gpu->ram": 1, "ram->disk": 1}
    assert hand.read("a", "ram") == 5


def _blocked(hand: Hand) -> Any:
    """Write ``a`` in GPU memory and evict it, while another thread's lease takes the space in RAM.

    Return that lease.
    """
    hand.add("a", "b")
    with hand.store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(5)
    hand.store.prefetch("b", "ram")
    hand.move()
    in_the_way = Caller(lambda: hand.store.acquire("b", "ram", timeout_s=0)).join()
    hand.store.evict("a", "gpu")
    assert hand.under_way() == []
    return in_the_way


def test_copy_awaiting_space_for_eviction_cannot_be_leased(make: Callable[..., Hand]) -> None:
    """A copy whose eviction waits for space in RAM cannot be leased.

    Otherwise, the traffic would depend on whether RAM gets free space before the next request comes.
    """
    hand = make(2, 1, 8)
    in_the_way = _blocked(hand)
    before = hand.store.stats()
    for mode in ("r", "rw"):
        with pytest.raises(TimeoutError, match="waiting for: space"):
            hand.store.acquire("a", "gpu", mode, timeout_s=0)
    in_the_way.release()
    assert hand.under_way() == [("gpu", "ram")], "without a new request"
    hand.move()
    assert hand.store.where("a") == {"disk": CopyState.CLEAN}
    assert hand.read("a", "gpu") == 5
    assert hand.num_moved(before) == {"gpu->ram": 1, "ram->disk": 1, "disk->ram": 1, "ram->gpu": 1}


def test_evicted_space_serves_blocked_requests(make: Callable[..., Hand]) -> None:
    hand = make(2, 1, 8)
    store = hand.store
    in_the_way = _blocked(hand)
    store.pin("b", "ram")
    in_the_way.release()
    assert hand.under_way() == []
    store.unpin("b", "ram")
    assert hand.under_way() == [("gpu", "ram")]
    caller = Caller(store.wait_idle)
    assert caller.is_waiting()
    hand.move()
    assert caller.join() is None
    assert store.where("a") == {"disk": CopyState.CLEAN}


def test_copy_blocked_by_the_callers_leases_stays(make: Callable[..., Hand]) -> None:
    hand = make(2, 1, 8)
    store = hand.store
    hand.add("a", "b")
    with store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(5)
    hand.read("b", "ram")
    with store.acquire("b", "ram", timeout_s=0):
        store.evict("a", "gpu")
        with store.acquire("a", "gpu", timeout_s=0) as again:
            assert again.tensor == 5
    assert store.where("a")["gpu"] is CopyState.DIRTY


def test_pin_cancels_a_pending_eviction(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("a")
    hand.read("a", "ram")
    with store.acquire("a", "ram", timeout_s=0):
        store.evict("a", "ram")
        store.pin("a", "ram")
    assert store.where("a")["ram"] is CopyState.CLEAN
    store.unpin("a", "ram")
    store.evict("a", "ram")
    assert store.where("a") == {"disk": CopyState.CLEAN}


def test_repeatedly_requested_eviction_counts_once(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("a", "b")
    hand.read("b", "ram")
    with store.acquire("a", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(9)
    before = store.stats()
    lease = store.acquire("b", "ram", timeout_s=0)
    for _ in range(3):
        store.evict("a", "ram")
        store.evict("b", "ram")
    lease.release()
    hand.move()
    window = store.stats() - before
    assert (window.evictions_dirty, window.evictions_clean) == (1, 1)


def test_awaited_copy_is_not_evicted(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("a", "b", "c")
    before = store.stats()
    writing = store.acquire("b", "ram", "w", timeout_s=0)
    caller = Caller(lambda: store.acquire_many([("a", "ram", "r"), ("b", "ram", "r")], timeout_s=TIMEOUT_S))
    assert caller.is_waiting()
    hand.move()
    with pytest.raises(TimeoutError, match="waiting for: space"):
        store.acquire("c", "ram", timeout_s=0)
    assert store.where("a")["ram"] is CopyState.CLEAN
    writing.release()
    caller.join().release()
    assert hand.num_moved(before) == {"disk->ram": 1}


def test_fetch_counts_as_a_recent_use(make: Callable[..., Hand]) -> None:
    hand = make(3, 8)
    store = hand.store
    hand.add("a", "b", "c", "d")
    for key in ("a", "b"):
        hand.read(key, "ram")
    store.prefetch("c", "ram")
    hand.move()
    hand.read("d", "ram")
    assert [key for key in "abcd" if "ram" in store.where(key)] == ["b", "c", "d"]


def test_failed_write_back_of_a_pinned_copy_is_retried(make: Callable[..., Hand]) -> None:
    hand = make(2, 2, 8)
    store = hand.store
    store.register("a", (1,), torch.uint8, home="ram")
    with store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(3)
    store.pin("a", "gpu")
    with pytest.raises(TimeoutError):
        store.acquire("a", "ram", timeout_s=0)
    link = hand.links["gpu", "ram"]
    link.fail()
    caller = Caller(store.wait_idle)
    assert caller.is_waiting() and len(link.pending) == 1
    link.complete()
    assert caller.join() is None
    assert store.where("a") == {"gpu": CopyState.CLEAN, "ram": CopyState.CLEAN}
    store.wait_idle()
    assert hand.read("a", "ram") == 3


def test_write_back_ends_at_the_failed_hop(make: Callable[..., Hand]) -> None:
    """After a failed hop, the bytes do not move on to the home tier."""
    hand = make(2, 2, 8)
    store = hand.store
    hand.add("a", value=1)
    with store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(2)
    for hop in (("gpu", "ram"), ("ram", "disk")):
        write = store.evict("a", "gpu")
        if hop == ("ram", "disk"):
            hand.links["gpu", "ram"].complete()
        hand.links[hop].fail()
        assert hand.under_way() == []
        with pytest.raises(TransferError):
            write.wait(TIMEOUT_S)
        assert store.where("a")["gpu"] is CopyState.DIRTY
    store.evict("a", "gpu")
    hand.move()
    assert store.where("a") == {"disk": CopyState.CLEAN}
    assert hand.read("a", "gpu") == 2


def test_block_under_a_write_lease_is_not_fetched(make: Callable[..., Hand]) -> None:
    """A fetch during a write would copy bytes that are older than the writer's."""
    hand = make(4, 4, 8)
    store = hand.store
    hand.add("a", value=1)
    hand.read("a", "ram")
    with store.acquire("a", "ram", "rw", timeout_s=0) as lease:
        assert store.prefetch("a", "gpu").skipped
        store.set_schedule(Schedule([Access(1, "a", "gpu")]))
        store.advance(0)
        assert hand.under_way() == []
        lease.tensor.fill_(2)
    assert hand.under_way() == [("ram", "gpu")], "the scheduled fetch, now that it fits"
    hand.move()
    assert hand.read("a", "gpu") == 2


def test_ended_lease_frees_space_for_scheduled_fetches(make: Callable[..., Hand]) -> None:
    hand = make(1, 8)
    store = hand.store
    hand.add("a", "b")
    hand.read("a", "ram")
    with store.acquire("a", "ram", timeout_s=0):
        store.set_schedule(Schedule([Access(1, "b", "ram")]))
        store.advance(0)
        assert hand.under_way() == []
    assert hand.under_way() == [("disk", "ram")], "without a new request"


# -- what the prefetcher counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_by", ["a home", "a reservation", "a pin", "a pin of a missing block"])
def test_write_before_use_finds_the_unreserved_space(taken_by: str, make: Callable[..., Hand]) -> None:
    """A prefetch into the space that the write needs would have to be evicted and fetched again."""
    hand = make(2, 8)
    store = hand.store
    hand.add("written", "used", "pinned")
    if taken_by == "a home":
        store.register("home", (1,), torch.uint8, home="ram")
    elif taken_by == "a reservation":
        store.reserve("ram", 1)
    else:
        store.pin("pinned", "ram")
        if taken_by == "a pin":
            hand.read("pinned", "ram")
    before = store.stats()
    store.set_schedule(Schedule([Access(1, "written", "ram", "w"), Access(2, "used", "ram")]))
    store.advance(0)
    assert hand.under_way() == []
    store.advance(1)
    with store.acquire("written", "ram", "w", timeout_s=0):
        pass
    store.evict("written", "ram")
    hand.move()
    store.advance(2)
    assert hand.read("used", "ram") == 1
    assert hand.num_moved(before) == {"ram->disk": 1, "disk->ram": 1}
    # When the taken space is free again, the prefetcher uses it.
    store.evict("used", "ram")
    if taken_by == "a home":
        store.unregister("home")
    elif taken_by == "a reservation":
        store.reserve("ram", -1)
    else:
        store.unregister("pinned")
    store.set_schedule(Schedule([Access(4, "written", "ram", "w"), Access(5, "used", "ram")]))
    store.advance(3)
    assert hand.under_way() == [("disk", "ram")]


def test_prefetch_respects_max_inflight_bytes(make: Callable[..., Hand]) -> None:
    hand = make(4, 8, max_inflight_bytes=2)
    store = hand.store
    hand.add("a", "b", "c", "d")
    link = hand.links["disk", "ram"]
    store.set_schedule(Schedule([Access(tick, key, "ram") for tick, key in enumerate("abcd", start=1)]))
    store.advance(0)
    for num_left in (3, 2, 1):
        assert len(link.pending) == min(2, num_left + 1)
        link.complete()
    hand.move()
    assert all("ram" in store.where(key) for key in "abcd")


def test_pinned_copy_space_is_counted_once(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("pinned", "other")
    store.pin("pinned", "ram")
    hand.read("pinned", "ram")
    store.set_schedule(Schedule([Access(1, "pinned", "ram"), Access(2, "other", "ram")]))
    store.advance(0)
    hand.move()
    assert "ram" in store.where("other")


def test_fetch_does_not_overtake_one_waiting_for_space(make: Callable[..., Hand]) -> None:
    """A fetch must not take the space that an earlier, waiting fetch needs."""
    hand = make(4, 16)
    store = hand.store
    hand.add("one", "two", "small")
    store.register("large", (3,), torch.uint8, home="disk")
    with store.acquire("large", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(8)
    store.evict("large", "ram")
    hand.move()
    for key in ("one", "two"):
        hand.read(key, "ram")
    one, two = (store.acquire(key, "ram", timeout_s=0) for key in ("one", "two"))
    store.set_schedule(Schedule([Access(1, "large", "ram"), Access(2, "small", "ram")]))
    store.advance(0)
    assert hand.under_way() == []
    one.release()
    assert [copy.nbytes for copy in hand.links["disk", "ram"].pending] == [3]
    two.release()
    assert [copy.nbytes for copy in hand.links["disk", "ram"].pending] == [3, 1]


def test_completed_pass_through_takes_no_space(make: Callable[..., Hand]) -> None:
    hand = make(2, 1, 8)
    store = hand.store
    hand.add("written", "used", "other")
    for _ in range(2):
        with store.acquire("other", "gpu", "w", timeout_s=0):
            pass
        store.evict("other", "gpu")
        hand.move()
    store.set_schedule(Schedule([Access(1, "written", "ram", "w"), Access(2, "used", "ram")]))
    store.advance(0)
    assert hand.under_way() == []
    store.set_schedule(Schedule([Access(1, "used", "ram")]))
    assert hand.under_way() == [("disk", "ram")]


def test_arrived_copy_takes_no_space_in_intermediate_tiers(make: Callable[..., Hand]) -> None:
    hand = make(4, 1, 8)
    store = hand.store
    hand.add("there", "next")
    assert hand.read("there", "gpu") == 0
    store.evict("there", "ram")
    store.set_schedule(Schedule([Access(1, "there", "gpu"), Access(2, "next", "gpu")]))
    store.advance(0)
    assert hand.under_way() == [("disk", "ram")]
    hand.move()
    assert "gpu" in store.where("next")


# -- what the store counts -----------------------------------------------------------------------------------------


def test_moved_bytes_count_from_the_tick_that_needs_them(make: Callable[..., Hand]) -> None:
    """Fetches begin ticks ahead. A failed fetch counts nothing until it is repeated."""
    hand = make(8, 16)
    store = hand.store
    hand.add("a", "b", "c", "d")
    before = store.stats()
    ticks = {"a": 1, "b": 3, "c": 3, "d": 4}
    store.set_schedule(Schedule([Access(tick, key, "ram") for key, tick in ticks.items()]))
    store.advance(0)
    assert hand.under_way() == [("disk", "ram")] * 4
    hand.links["disk", "ram"].fail(1)
    hand.move()
    found = []
    for tick in range(6):
        store.advance(tick)
        found.append((store.stats() - before).due_bytes)
    assert found == [{"ram->disk": 0, "disk->ram": nbytes} for nbytes in (0, 1, 1, 3, 4, 4)]
    assert hand.num_moved(before) == {"disk->ram": 4}


def test_failed_write_back_counts_no_needed_bytes(make: Callable[..., Hand]) -> None:
    hand = make(4, 4, 8)
    store = hand.store
    hand.add("a", value=1)
    with store.acquire("a", "gpu", "w", timeout_s=0) as lease:
        lease.tensor.fill_(2)
    before, nothing = store.stats(), dict.fromkeys(("gpu->ram", "ram->gpu", "ram->disk", "disk->ram"), 0)
    moved = {**nothing, "gpu->ram": 1, "ram->disk": 1}
    found = []
    store.evict("a", "gpu")
    found.append((store.stats() - before).due_bytes)
    hand.links["gpu", "ram"].fail()
    found.append((store.stats() - before).due_bytes)
    store.evict("a", "gpu")
    hand.move()
    found.append((store.stats() - before).due_bytes)
    assert found == [moved, nothing, moved]


def test_blocked_eviction_counts_the_bytes_of_all_its_links(make: Callable[..., Hand]) -> None:
    hand = make(2, 1, 8)
    before = hand.store.stats()
    in_the_way = _blocked(hand)
    expected = {"gpu->ram": 1, "ram->gpu": 0, "ram->disk": 3, "disk->ram": 1}  # two of the writes fill the blocks
    assert (hand.store.stats() - before).due_bytes == expected
    assert hand.num_moved(before) == {"ram->disk": 2, "disk->ram": 1}
    in_the_way.release()
    hand.move()
    assert (hand.store.stats() - before).due_bytes == hand.num_moved(before) | {"ram->gpu": 0} == expected


def test_statistics_and_events_are_exact(make: Callable[..., Hand]) -> None:
    """Two prefetched copies are used, on time and late. One is evicted unused, and two accesses are not scheduled."""
    events: list[Event] = []
    hand = make(10, 40, 100, on_event=events.append)
    store = hand.store
    store.register("base", (7,), torch.uint8, home="ram")
    sizes = {"a": 5, "b": 3, "c": 2, "d": 4}
    for key, nbytes in sizes.items():
        store.register(key, (nbytes,), torch.uint8, home="disk")
        with store.acquire(key, "ram", "w", timeout_s=0):
            pass
        store.evict(key, "ram")
        hand.move()
    before = store.stats()
    store.set_schedule(Schedule([Access(tick, key, "ram") for tick, key in enumerate("abc", start=1)]))
    store.advance(0)
    link = hand.links["disk", "ram"]
    link.complete(0)
    link.complete(1)
    store.evict("c", "ram")
    store.advance(1)
    first = store.acquire("a", "ram", timeout_s=0)
    caller = Caller(lambda: store.acquire("b", "ram", timeout_s=TIMEOUT_S))
    assert caller.is_waiting()
    link.complete()
    second = caller.join()
    link.complete()  # the prefetcher fetched "c" again
    store.pin("c", "ram")
    with store.acquire("d", "gpu", "w", timeout_s=0):
        store.pin("d", "gpu")
        held = store.stats().tiers
    store.unpin("d", "gpu")
    store.evict("d", "gpu")
    hand.links["gpu", "ram"].complete()
    window = store.stats() - before
    hand.move()
    first.release()
    second.release()
    assert held == {
        "gpu": TierStats(10, used_bytes=4, home_bytes=0, pinned_bytes=4, leased_bytes=4, high_water_bytes=4),
        "ram": TierStats(40, used_bytes=17, home_bytes=7, pinned_bytes=2, leased_bytes=8, high_water_bytes=17),
        "disk": TierStats(100, used_bytes=14, home_bytes=14, pinned_bytes=0, leased_bytes=0, high_water_bytes=14),
    }
    assert {cause: seconds > 0 for cause, seconds in window.stall_s.items()} == {
        "fill": True,
        **dict.fromkeys(("drain", "space", "lease", "commit"), False),
    }
    assert dataclasses.replace(window, stall_s={}) == StoreStats(
        tiers={
            "gpu": TierStats(10, used_bytes=4, home_bytes=0, pinned_bytes=0, leased_bytes=0, high_water_bytes=4),
            "ram": TierStats(40, used_bytes=21, home_bytes=7, pinned_bytes=2, leased_bytes=8, high_water_bytes=21),
            "disk": TierStats(100, used_bytes=14, home_bytes=14, pinned_bytes=0, leased_bytes=0, high_water_bytes=14),
        },
        links={
            "gpu->ram": LinkUsage(4, 0.0, inflight_bytes=0, num_transfers=0, path="manual"),
            "ram->gpu": LinkUsage(0, 0.0, inflight_bytes=0, num_transfers=0, path="manual"),
            "ram->disk": LinkUsage(0, 0.0, inflight_bytes=4, num_transfers=0, path="manual"),
            "disk->ram": LinkUsage(12, 0.0, inflight_bytes=0, num_transfers=0, path="manual"),
        },
        stall_s={},
        prefetch_on_time=1,
        prefetch_late=1,
        prefetch_wasted=1,
        evictions_clean=1,
        evictions_dirty=1,
        schedule_misses=2,
        due_bytes={"gpu->ram": 4, "ram->gpu": 0, "ram->disk": 4, "disk->ram": 5},
    )
    assert [(each.kind, each.key, each.tier, each.nbytes, each.detail) for each in events] == [
        *(("write_back", key, "disk", nbytes, "manual") for key, nbytes in sizes.items()),
        ("fetch", "a", "ram", 5, "manual"),
        ("fetch", "c", "ram", 2, "manual"),
        ("fetch", "b", "ram", 3, "manual"),
        ("stall", "b", "", 0, "fill"),
        ("fetch", "c", "ram", 2, "manual"),
        ("write_back", "d", "disk", 4, "staged"),
    ]
    assert all(0 < each.start_s <= each.end_s for each in events)


def test_difference_of_statistics_subtracts_every_counter() -> None:
    """Links, paths and causes that the earlier statistics lack count from 0."""
    link = LinkUsage(num_bytes=100, busy_s=8.0, inflight_bytes=3, num_transfers=20, path="posix")
    later = StoreStats(
        tiers={"ram": TierStats(1, 2, 3, 4, 5, 6)},
        links={"a->b": link, "b->a": link},
        stall_s={"fill": 9.0, "space": 4.0},
        prefetch_on_time=10,
        prefetch_late=20,
        prefetch_wasted=30,
        evictions_clean=40,
        evictions_dirty=50,
        schedule_misses=60,
        written_bytes={"/x": 700, "/y": 800},
        due_bytes={"a->b": 900, "b->a": 1000},
    )
    earlier = StoreStats(
        tiers={"ram": TierStats(7, 7, 7, 7, 7, 7)},
        links={"a->b": LinkUsage(num_bytes=60, busy_s=5.0, inflight_bytes=1, num_transfers=7, path="other")},
        stall_s={"fill": 2.5},
        prefetch_on_time=1,
        prefetch_late=2,
        prefetch_wasted=3,
        evictions_clean=4,
        evictions_dirty=5,
        schedule_misses=6,
        written_bytes={"/x": 70},
        due_bytes={"a->b": 90},
    )
    assert later - earlier == StoreStats(
        tiers=later.tiers,
        links={"a->b": LinkUsage(40, 3.0, inflight_bytes=3, num_transfers=13, path="posix"), "b->a": link},
        stall_s={"fill": 6.5, "space": 4.0},
        prefetch_on_time=9,
        prefetch_late=18,
        prefetch_wasted=27,
        evictions_clean=36,
        evictions_dirty=45,
        schedule_misses=54,
        written_bytes={"/x": 630, "/y": 800},
        due_bytes={"a->b": 810, "b->a": 1000},
    )


def test_capacity_error_names_sizes_and_largest_holders(make: Callable[..., Hand]) -> None:
    hand = make(20, 100)
    store = hand.store
    store.register("base", (3,), torch.uint8, home="ram")
    for key, nbytes in {"a": 2, "b": 6, "c": 1, "d": 5, "e": 4}.items():
        store.register(key, (nbytes,), torch.uint8, home="disk")
    for key in "abcd":
        with store.acquire(key, "ram", "w", timeout_s=0):
            pass
    store.pin("d", "ram")
    store.pin("a", "ram")
    with (
        store.acquire("b", "ram", timeout_s=0),
        store.acquire("c", "ram", timeout_s=0),
        pytest.raises(CapacityError) as caught,
    ):
        store.acquire("e", "ram", "w", timeout_s=0)
    error = caught.value
    assert str(error) == (
        "tier 'ram' is too small: 4 bytes (4 B) needed, 3 (3 B) free, 7 pinned, 7 leased; to acquire e; largest: "
        "b 6 B, d 5 B, base 3 B"
    )
    assert (error.tier, error.need_bytes, error.free_bytes, error.pinned_bytes, error.leased_bytes) == (
        "ram",
        4,
        3,
        7,
        7,
    )
    assert error.largest_holders == (("b", 6), ("d", 5), ("base", 3))


def test_abandoned_write_at_home_leaves_no_contents(make: Callable[..., Hand]) -> None:
    store = make(4, 8).store
    store.register("a", (1,), torch.uint8, home="ram")
    for _ in range(2):
        store.acquire("a", "ram", "w", timeout_s=0).abandon()
        assert store.where("a") == {"ram": CopyState.STALE}
        with pytest.raises(UninitializedBlockError):
            store.acquire("a", "ram", timeout_s=0)
    with store.acquire("a", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(3)
    assert store.where("a") == {"ram": CopyState.CLEAN}


def test_pin_of_a_home_takes_no_more_space(make: Callable[..., Hand]) -> None:
    hand = make(2, 8)
    store = hand.store
    hand.add("a", "b")
    store.register("home", (1,), torch.uint8, home="ram")
    store.acquire("home", "ram", "w", timeout_s=0).release()
    for _ in range(3):
        store.pin("home", "ram")
    for _ in range(3):
        store.unpin("home", "ram")
    store.pin("a", "ram")
    with pytest.raises(CapacityError) as caught:
        store.pin("b", "ram")
    assert (caught.value.need_bytes, caught.value.free_bytes, caught.value.pinned_bytes) == (1, 1, 0)


def test_resumed_access_is_fetched_at_once(make: Callable[..., Hand]) -> None:
    hand = make(4, 8)
    store = hand.store
    hand.add("a", "b")
    store.pass_over([(1, "a"), (2, "b")])
    store.set_schedule(Schedule([Access(1, "a", "ram"), Access(2, "b", "ram")]))
    assert len(hand.under_way()) == 2, "a new schedule forgets the skipped accesses"
    hand.move()
    for key in "ab":
        store.evict(key, "ram")
    store.set_schedule(None)
    store.set_schedule(Schedule([Access(3, "a", "ram"), Access(4, "b", "ram")]), lookahead_bytes=0)
    store.pass_over([(3, "a"), (4, "b")])
    store._movement.prefetcher.lookahead_bytes = None
    store.advance(2)
    assert hand.under_way() == []
    store.pass_over([], but_not=[(4, "b")])
    assert [copy.nbytes for copy in hand.links["disk", "ram"].pending] == [1]
    hand.move()
    assert [key for key in "ab" if "ram" in store.where(key)] == ["b"]


def test_released_group_has_no_tensors(make: Callable[..., Hand]) -> None:
    hand = make(4, 8)
    hand.add("a", "b", "c")
    for key in "abc":
        hand.read(key, "ram")
    group = hand.store.acquire_many([(key, "ram", "r") for key in "abc"], timeout_s=0)
    assert [lease.is_released for lease in group] == [False] * 3
    group.release()
    assert [lease.is_released for lease in group] == [True] * 3
    for lease in group:
        with pytest.raises(LeaseError, match="was released"):
            lease.tensor  # noqa: B018
    assert hand.store._leasing.leases == set()


def test_close_ends_links_before_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ManualLink, "close", lambda link: closed.append(f"{link.src}->{link.dst}"))
    monkeypatch.setattr(MemoryTier, "close", lambda tier: closed.append(tier.name))
    store = Hand(2, 4, 8).store
    store.close()
    links = ["disk->ram", "ram->disk", "ram->gpu", "gpu->ram"]
    assert closed == [*links, "gpu", "ram", "disk"]
    store.close()
    assert len(closed) == 7


def test_prefetch_evicts_no_copy_of_the_same_tick(make: Callable[..., Hand]) -> None:
    """The policy would evict the least recently used copy, but that copy is needed together with the fetched one."""
    hand = make(2, 8)
    store = hand.store
    hand.add("needed", "fetched", "unused")
    for key in ("needed", "unused"):
        hand.read(key, "ram")
    before = store.stats()
    store.set_schedule(Schedule([Access(1, "needed", "ram"), Access(1, "fetched", "ram")]))
    store.advance(0)
    hand.move()
    assert [key for key in ("needed", "fetched", "unused") if "ram" in store.where(key)] == ["needed", "fetched"]
    assert hand.num_moved(before) == {"disk->ram": 1}


def test_failed_write_back_raises_in_a_caller_that_waits_for_its_space(make: Callable[..., Hand]) -> None:
    hand = make(1, 8)
    store = hand.store
    hand.add("a", "b")
    with store.acquire("a", "ram", "w", timeout_s=0) as lease:
        lease.tensor.fill_(7)
    caller = Caller(lambda: store.acquire("b", "ram", "w", timeout_s=TIMEOUT_S))
    assert caller.is_waiting() and hand.under_way() == [("ram", "disk")]
    hand.links["ram", "disk"].fail()
    error = caller.join()
    assert isinstance(error, TransferError) and str(error) == "injected failure [disk]"
    assert store.where("a")["ram"] is CopyState.DIRTY and hand.read("a", "ram") == 7


def test_error_of_a_failed_fetch_is_not_raised_in_later_callers(make: Callable[..., Hand]) -> None:
    hand = make(1, 8)
    store, link = hand.store, hand.links["disk", "ram"]
    hand.add("a", value=7)
    first = Caller(lambda: store.acquire("a", "ram", timeout_s=TIMEOUT_S))
    assert first.is_waiting()
    link.pending[0].transfer.error = TransferError("injected failure", tier="ram")  # its callbacks have not run yet
    second = Caller(lambda: store.acquire("a", "ram", timeout_s=TIMEOUT_S))
    assert second.is_waiting()
    link.fail()
    error = first.join()
    assert isinstance(error, TransferError) and str(error) == "injected failure [ram]"
    assert second.is_waiting() and hand.under_way() == [("disk", "ram")]
    hand.move()
    with second.join() as lease:
        assert int(lease.tensor) == 7
