"""Simulated time: transfer times follow the links' rates, and urgent transfers go first.

The real store makes the decisions.
"""

from __future__ import annotations

import pytest
import torch

from tiered import Access, Belady, MiB, Schedule, TieredStore
from tiered.ext import LinkUsage, TierUsage
from tiered.simulation import PART_BYTES, SimulatedChannel, SimulatedClock, SimulatedLink, SimulatedTier

RATE = 64 * MiB


def make_store(clock: SimulatedClock, ram_bytes: int) -> TieredStore:
    drive = SimulatedChannel(clock, RATE)
    tiers = [
        SimulatedTier("ram", ram_bytes, lambda nbytes: nbytes),
        SimulatedTier("nvme", 1 << 40, lambda nbytes: nbytes, addressable=False),
    ]
    links = [SimulatedLink("nvme", "ram", drive), SimulatedLink("ram", "nvme", drive, priority=1)]
    return TieredStore(tiers, Belady(), links, clock=clock)


def fill(store: TieredStore, *keys: str, nbytes: int = 64 * MiB) -> None:
    for key in keys:
        store.register(key, (nbytes,), torch.uint8, home="nvme")
        with store.acquire(key, "ram", "w"):
            pass
        store.evict(key, "ram")
    store.wait_idle()


def test_simulated_fetch_time_matches_the_link_rate() -> None:
    clock = SimulatedClock()
    with make_store(clock, 256 * MiB) as store:
        fill(store, "a")
        start_s = clock.now_s
        with store.acquire("a", "ram"):
            assert clock.now_s - start_s == pytest.approx(1.0)
        assert store.stats().stall_s["fill"] == pytest.approx(1.0)


def test_prefetch_overlaps_with_compute() -> None:
    clock = SimulatedClock()
    with make_store(clock, 256 * MiB) as store:
        fill(store, "a", "b")
        store.set_schedule(Schedule([Access(1, "a", "ram"), Access(2, "b", "ram")]))
        store.advance(0)
        clock.advance(2.5)
        start_s = clock.now_s
        for tick, key in ((1, "a"), (2, "b")):
            store.advance(tick)
            with store.acquire(key, "ram"):
                pass
        assert clock.now_s == start_s
        assert store.stats().prefetch_on_time == 2


def test_reads_overtake_writes_between_parts() -> None:
    clock = SimulatedClock()
    channel = SimulatedChannel(clock, PART_BYTES)
    slots = SimulatedTier("any", 1 << 40, lambda nbytes: nbytes)
    slot = slots.allocate(4 * PART_BYTES, name="x", home=True)
    assert slot is not None
    write = SimulatedLink("ram", "nvme", channel, priority=1).submit(slot, slot, 4 * PART_BYTES)
    clock.advance(0.5)
    read = SimulatedLink("nvme", "ram", channel).submit(slot, slot, PART_BYTES)
    clock.advance(1.5)
    assert read.done() and not write.done()
    clock.advance(3.0)
    assert write.done() and channel.busy_s == pytest.approx(5.0)


def test_waiting_without_pending_work_raises() -> None:
    clock = SimulatedClock()
    with clock, pytest.raises(AssertionError, match="no event is pending"):
        clock.wait()


def test_channel_ends_transfers_at_exact_times() -> None:
    """A smaller priority goes first, after the current part. Transfers of one link end in the order of submission."""
    clock = SimulatedClock()
    channel = SimulatedChannel(clock, PART_BYTES)
    slot = SimulatedTier("any", 1 << 40, lambda nbytes: nbytes).allocate(4 * PART_BYTES, name="x", home=True)
    assert slot is not None
    write, read = SimulatedLink("a", "b", channel, priority=1), SimulatedLink("b", "a", channel)
    ended: list[tuple[str, float]] = []

    def submit(name: str, link: SimulatedLink, num_parts: float) -> None:
        transfer = link.submit(slot, slot, int(num_parts * PART_BYTES))
        assert (transfer.src, transfer.dst, transfer.path) == (link.src, link.dst, "simulated")
        transfer.add_done_callback(lambda _: ended.append((name, clock.now_s)))

    submit("long write", write, 2.5)
    submit("short write", write, 0.25)
    clock.at(0.5, lambda: submit("long read", read, 1.5))
    clock.at(0.5, lambda: submit("short read", read, 0.5))
    clock.advance(3)
    assert ended == [("long read", 2.5), ("short read", 3.0)] and clock.now_s == 3
    clock.advance(10)
    assert ended[2:] == [("long write", 4.5), ("short write", 4.75)] and clock.now_s == 13
    assert channel.busy_s == 4.75 and channel.num_submitted == 4
    assert [link.usage() for link in (write, read)] == [
        LinkUsage(int(2.75 * PART_BYTES), 4.75, 0, 0, "simulated"),
        LinkUsage(2 * PART_BYTES, 4.75, 0, 0, "simulated"),
    ]


def test_clock_runs_events_in_order_of_time_and_scheduling() -> None:
    clock, ran = SimulatedClock(), list[tuple[str, float]]()

    def note(name: str) -> None:
        ran.append((name, clock.now_s))

    for time_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (3.0, "end"), (7.0, "never")):
        clock.at(time_s, lambda name=name: note(name))  # type: ignore[misc]
    clock.at(1.0, lambda: clock.at(0.5, lambda: note("overdue")))
    with clock:
        assert clock.wait(0.1)
    assert ran == [("first", 1.0)]
    clock.advance(2)
    assert ran[1:] == [("second", 1.0), ("overdue", 1.0), ("late", 2.0), ("end", 3.0)] and clock.now_s == 3.0


def test_simulated_tier_counts_bytes_and_dropped_buffers() -> None:
    for addressable in (True, False):
        tier = SimulatedTier("t", 100, lambda nbytes: -(-nbytes // 10) * 10, addressable=addressable)
        assert (tier.device is None, tier.is_read_only, tier.slot_bytes(11)) == (not addressable, False, 20)
        first, second = (tier.allocate(nbytes, name="x", home=False) for nbytes in (31, 25))
        assert first is not None and second is not None
        assert (first.tier, first.nbytes, first.slot_bytes) == ("t", 31, 40)
        assert tier.allocate(31, name="x", home=False) is None
        tier.free(first)
        assert tier.usage() == TierUsage(100, 30, 70) and tier.has_buffer(38)
        other = tier.allocate(60, name="x", home=False)  # needs the space of the freed buffer
        assert other is not None and tier.num_drops == addressable
        assert tier.tensor(other, (3, 5), torch.float32).shape == (3, 5)
        tier.reserve(10)
        assert tier.usage() == TierUsage(100, 100, 100)
        tier.free(second)
        tier.keep_buffers({30: 2})
        assert tier.usage() == TierUsage(100, 70, 100)
