"""Simulated time: transfer times follow the links' rates, and urgent transfers go first.

The real store makes the decisions.
"""

from __future__ import annotations

import pytest
import torch

from tiered import Access, Belady, MiB, Schedule, TieredStore
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
