"""``keep_buffers`` makes buffers for copies in advance.

Steps reuse them instead of replacing them with buffers of other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiered import Access, Belady, MiB, Schedule, TieredStore
from tiered.simulation import SimulatedChannel, SimulatedClock, SimulatedLink, SimulatedTier

SMALL, LARGE = MiB, 4 * MiB
DRIVE_BYTES_PER_S = 1e12
LAYERS = [f"layer.{number}" for number in range(6)]


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def ram() -> SimulatedTier:
    return SimulatedTier("ram", 8 * MiB, lambda nbytes: nbytes)


@pytest.fixture
def store(clock: SimulatedClock, ram: SimulatedTier) -> Iterator[TieredStore]:
    """Yield a store with six small blocks and a large one. Their home is a drive, and no copies are in RAM."""
    drive = SimulatedTier("nvme", 1 << 40, lambda nbytes: nbytes, addressable=False)
    channel = SimulatedChannel(clock, DRIVE_BYTES_PER_S)
    links = [SimulatedLink("nvme", "ram", channel), SimulatedLink("ram", "nvme", channel, priority=1)]
    with TieredStore([ram, drive], Belady(), links, clock=clock) as store:
        for key in (*LAYERS, "head"):
            store.register(key, (LARGE if key == "head" else SMALL,), torch.uint8, home="nvme")
            with store.acquire(key, "ram", "w"):
                pass
            store.evict(key, "ram")
        store.wait_idle()
        yield store


def run_steps(store: TieredStore, clock: SimulatedClock, num_steps: int) -> None:
    """Run steps that use all layers and then the head, with as much prefetching as memory allows."""
    keys = [*LAYERS, "head"]
    store.set_schedule(Schedule([Access(n, key, "ram", "rw") for n, key in enumerate(keys)], 7, 7 * (num_steps + 1)))
    for tick in range(7 * num_steps):
        store.advance(tick)
        clock.advance(1.0)
        with store.acquire(keys[tick % 7], "ram", "rw"):
            clock.advance(1.0)
        store.evict(keys[tick % 7], "ram")
    store.set_schedule(None)
    store.wait_idle()


def test_fetches_keep_to_buffers_of_their_size(store: TieredStore, ram: SimulatedTier, clock: SimulatedClock) -> None:
    run_steps(store, clock, 2)
    before = ram.num_drops
    run_steps(store, clock, 3)
    assert ram.num_drops == before + 3 * 3, "six small buffers and the large one do not fit together"
    store.keep_buffers("ram", {SMALL: 3, LARGE: 1})
    before, stats = ram.num_drops, store.stats()
    run_steps(store, clock, 3)
    assert ram.num_drops == before
    window = store.stats() - stats
    assert window.prefetch_wasted == 0 and window.prefetch_on_time == 3 * 7


def test_lease_waits_for_a_draining_buffer(store: TieredStore, ram: SimulatedTier) -> None:
    store.keep_buffers("ram", {SMALL: 1, LARGE: 1})
    store.reserve("ram", 3 * MiB)
    before = ram.num_drops
    with store.acquire(LAYERS[0], "ram", "rw"):
        pass
    store.evict(LAYERS[0], "ram")
    with store.acquire(LAYERS[1], "ram", timeout_s=10):
        assert ram.num_drops == before
        assert store.stats().stall_s["drain"] == pytest.approx(SMALL / DRIVE_BYTES_PER_S)


def test_a_lease_evicts_a_copy_of_its_own_size(store: TieredStore, ram: SimulatedTier) -> None:
    store.keep_buffers("ram", {SMALL: 1, LARGE: 1})
    store.reserve("ram", 3 * MiB)
    before = ram.num_drops
    for key in ("head", LAYERS[0], LAYERS[1]):  # at the last request, the head is the least recently used block
        with store.acquire(key, "ram", timeout_s=10):
            pass
    assert [key for key in (*LAYERS, "head") if "ram" in store.where(key)] == [LAYERS[1], "head"]
    assert ram.num_drops == before


def test_request_within_the_free_bytes_is_granted(store: TieredStore, ram: SimulatedTier) -> None:
    store.keep_buffers("ram", {SMALL: 1, LARGE: 1})
    store.reserve("ram", 3 * MiB)
    before = ram.num_drops
    with store.acquire(LAYERS[0], "ram"), store.acquire(LAYERS[1], "ram", timeout_s=10):
        assert ram.num_drops == before + 1, "of the large one, which has no lease"
    with store.acquire("head", "ram", timeout_s=10):
        assert ram.usage().used_bytes == ram.capacity_bytes == 2 * LARGE


def test_store_works_after_buffers_are_removed(store: TieredStore, ram: SimulatedTier, clock: SimulatedClock) -> None:
    store.keep_buffers("ram", {SMALL: 3, LARGE: 1})
    store.keep_buffers("ram", {})
    run_steps(store, clock, 2)
    before = ram.num_drops
    run_steps(store, clock, 2)
    assert ram.num_drops == before + 2 * 3


def test_unknown_tier_is_refused(store: TieredStore) -> None:
    with pytest.raises(ValueError, match="no tier named 'gpu'"):
        store.keep_buffers("gpu", {SMALL: 1})
