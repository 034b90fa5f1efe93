"""Tests of the store with real tiers, in memory and in files."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import (
    LRU,
    Access,
    Belady,
    BlockNotFoundError,
    CapacityError,
    CopyState,
    Event,
    KiB,
    LeaseError,
    MiB,
    NvmeTier,
    RamTier,
    Schedule,
    TieredError,
    TieredStore,
    TransferError,
    UninitializedBlockError,
)
from tiered.ext import EvictionPolicy
from tiered.schedule import Mode
from tiered.tiers import health

BLOCK_BYTES = 64 * KiB
SHAPE = (128, 128)  # float32: 64 KiB


def make_store(
    path: Path, ram_blocks: int = 4, nvme_blocks: int = 16, policy: EvictionPolicy | None = None, **options: object
) -> TieredStore:
    tiers = [RamTier(ram_blocks * BLOCK_BYTES, pin_memory=False), NvmeTier([path], nvme_blocks * BLOCK_BYTES)]
    return TieredStore(tiers, policy, **options)  # type: ignore[arg-type]


def add(store: TieredStore, *keys: str, home: str = "nvme", value: float | None = None) -> None:
    for number, key in enumerate(keys):
        store.register(key, SHAPE, torch.float32, home=home)
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(number if value is None else value)


def read(store: TieredStore, key: str) -> float:
    with store.acquire(key, "ram", timeout_s=60) as lease:
        return float(lease.tensor[0, 0])


def flush(store: TieredStore, *keys: str) -> None:
    """Evict the blocks from RAM, and wait until their contents are in their home tiers."""
    for key in keys:
        store.evict(key, "ram").wait(60)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with make_store(tmp_path) as made:
        yield made


def test_block_holds_its_last_write(store: TieredStore) -> None:
    spec = store.register("a", SHAPE, torch.float32, home="nvme")
    assert spec.nbytes == BLOCK_BYTES and list(store.blocks()) == [spec]
    assert store.where("a") == {"nvme": CopyState.STALE}
    with pytest.raises(UninitializedBlockError, match="'a' has no contents"):
        store.acquire("a", "ram")
    with store.acquire("a", "ram", "w") as lease:
        assert (lease.key, lease.tier, lease.mode, lease.version) == ("a", "ram", "w", 0)
        assert lease.tensor.shape == SHAPE and lease.tensor.is_contiguous()
        lease.tensor.fill_(3)
    assert store.where("a") == {"ram": CopyState.DIRTY, "nvme": CopyState.STALE}
    with store.acquire("a", "ram", "rw") as lease:
        assert lease.version == 1
        lease.tensor.add_(1)
    store.evict("a", "ram").wait(60)
    assert store.where("a") == {"nvme": CopyState.CLEAN}
    assert read(store, "a") == 4
    assert store.where("a") == {"ram": CopyState.CLEAN, "nvme": CopyState.CLEAN}


def test_eviction_writes_back_only_dirty_copies(store: TieredStore) -> None:
    add(store, "a", "b")
    flush(store, "a", "b")
    before = store.stats()
    assert read(store, "a") == 0
    flush(store, "a", "b")
    window = store.stats() - before
    assert window.links["ram->nvme"].num_bytes == 0 and window.links["nvme->ram"].num_bytes == BLOCK_BYTES
    assert (window.evictions_clean, window.evictions_dirty) == (1, 0)
    with store.acquire("b", "ram", "rw") as lease:
        lease.tensor.fill_(8)
    flush(store, "b")
    window = store.stats() - before
    assert window.links["ram->nvme"].num_bytes == BLOCK_BYTES
    assert (window.evictions_clean, window.evictions_dirty) == (1, 1)
    assert sum(window.written_bytes.values()) == BLOCK_BYTES


def test_blocks_exceeding_ram_keep_their_contents(store: TieredStore) -> None:
    keys = [f"b{i}" for i in range(16)]
    add(store, *keys)
    assert [read(store, key) for key in keys] == list(range(16))
    ram = store.stats().tiers["ram"]
    assert ram.high_water_bytes <= ram.capacity_bytes == 4 * BLOCK_BYTES
    assert store.stats().tiers["nvme"].home_bytes == 16 * BLOCK_BYTES


def test_least_recently_used_copy_is_evicted_without_ticks(store: TieredStore) -> None:
    add(store, *"dcba")
    read(store, "d")
    add(store, "e")
    assert "ram" not in store.where("c")
    assert all("ram" in store.where(key) for key in "dbae")


def test_home_capacity_error_reports_sizes_and_holders(store: TieredStore) -> None:
    store.register("big", (15 * BLOCK_BYTES,), torch.uint8, home="nvme")
    with pytest.raises(CapacityError, match="largest: big") as caught:
        store.register("more", (2 * BLOCK_BYTES,), torch.uint8, home="nvme")
    error = caught.value
    assert (error.tier, error.need_bytes, error.free_bytes) == ("nvme", 2 * BLOCK_BYTES, BLOCK_BYTES)
    assert error.largest_holders == (("big", 15 * BLOCK_BYTES),)
    store.register("more", (BLOCK_BYTES,), torch.uint8, home="nvme")


def test_copies_make_way_for_a_home(store: TieredStore) -> None:
    add(store, "a", "b", "c", "d")  # dirty copies, which fill RAM
    store.register("home", (3 * BLOCK_BYTES,), torch.uint8, home="ram")
    assert [read(store, key) for key in "abcd"] == [0, 1, 2, 3]
    with pytest.raises(CapacityError):
        store.register("home2", (2 * BLOCK_BYTES,), torch.uint8, home="ram")


def test_block_larger_than_the_tier_is_refused_at_once(store: TieredStore) -> None:
    store.register("big", (5 * BLOCK_BYTES,), torch.uint8, home="nvme")
    with pytest.raises(CapacityError, match="to acquire big"):
        store.acquire("big", "ram", "w")
    add(store, "a", "b", "c", "d", "e")
    held = [store.acquire(key, "ram") for key in "abcd"]
    with pytest.raises(CapacityError) as caught:
        store.acquire("e", "ram")
    found = (caught.value.free_bytes, caught.value.leased_bytes, caught.value.pinned_bytes)
    assert found == (0, 4 * BLOCK_BYTES, 0)
    held.pop().release()
    assert read(store, "e") == 4
    for lease in held:
        lease.release()


def test_acquire_waits_for_the_lease_of_another_thread(store: TieredStore) -> None:
    add(store, *"abcde")
    held = [store.acquire(key, "ram") for key in "abcd"]
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(read(store, "e")))
    before, begin_s = store.stats(), time.perf_counter()
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not found
    held.pop().release()
    thread.join(60)
    assert found == [4]
    assert 0 < (store.stats() - before).stall_s["space"] < time.perf_counter() - begin_s
    for lease in held:
        lease.release()


def test_acquire_many_gives_all_or_nothing(store: TieredStore) -> None:
    add(store, *"abcde")
    with store.acquire_many([("a", "ram", "r"), ("b", "ram", "rw"), ("c", "ram", "w")]) as group:
        assert len(group) == 3 and [lease.key for lease in group] == ["a", "b", "c"]
        assert group[0].tensor[0, 0] == 0 and group.of("b").tensor[0, 0] == 1
        group.of("b").tensor.fill_(21)
        group.of("c").tensor.fill_(22)
    assert [read(store, key) for key in "abcde"] == [0, 21, 22, 3, 4]
    with pytest.raises(CapacityError, match="to acquire a, b, c, d, e"):
        store.acquire_many([(key, "ram", "r") for key in "abcde"])
    assert store.stats().tiers["ram"].leased_bytes == 0
    with pytest.raises(ValueError, match="same block twice"):
        store.acquire_many([("a", "ram", "r"), ("a", "ram", "w")])
    store.register("new", SHAPE, torch.float32, home="nvme")
    for key in ("new", "a"):  # a block that was never moved, and one that was
        flush(store, *"abcde")
        with store.acquire("b", "ram", "r"), pytest.raises(LeaseError):
            store.acquire_many([(key, "ram", "w"), ("b", "ram", "w")])
        assert store.stats().tiers["ram"].used_bytes == BLOCK_BYTES, "only b may be in RAM"
    assert read(store, "a") == 0


def test_concurrent_acquire_many_calls_do_not_deadlock(tmp_path: Path) -> None:
    """There is space for one call at a time. If two calls each got half of the space, both would wait forever."""
    keys = [f"b{i}" for i in range(8)]
    num_rounds = 25
    errors: list[BaseException] = []
    with make_store(tmp_path, ram_blocks=2) as store:
        add(store, *keys, value=0)

        def work(first: int) -> None:
            try:
                for _ in range(num_rounds):
                    requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in keys[first : first + 2]]
                    with store.acquire_many(requests, timeout_s=10) as group:
                        for lease in group:
                            lease.tensor.add_(1)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, len(keys), 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and not any(thread.is_alive() for thread in threads)
        assert [read(store, key) for key in keys] == [num_rounds] * len(keys)


def test_waiting_for_the_threads_own_lease_raises(store: TieredStore) -> None:
    add(store, "a")
    with store.acquire("a", "ram") as first, store.acquire("a", "ram") as second:
        assert first.tensor.data_ptr() == second.tensor.data_ptr(), "readers share"
        with pytest.raises(LeaseError, match=r"leased \('r'\) by this thread"):
            store.acquire("a", "ram", "rw")
        with pytest.raises(LeaseError, match="release it first"):
            store.discard("a")
    lease = store.acquire("a", "ram", "rw")
    with pytest.raises(LeaseError):
        store.acquire("a", "ram")
    lease.release()
    with pytest.raises(LeaseError, match="released before"):
        lease.release()
    with pytest.raises(LeaseError, match="only a 'w' lease"):
        store.acquire("a", "ram").abandon()


@pytest.mark.parametrize("home", ["nvme", "ram"])
def test_release_detects_writes_under_a_read_lease(store: TieredStore, home: str) -> None:
    add(store, "a", "b", home=home, value=5.0)

    def write(error: Exception | None = None) -> None:
        with store.acquire("a", "ram") as lease:
            lease.tensor.view(-1)[3:].add_(5)
            if error is not None:
                raise error

    with pytest.raises(LeaseError, match=r"read lease was changed in place: 'a'.*mode 'rw'"):
        write()
    with pytest.raises(KeyError, match="of the caller"):
        write(KeyError("of the caller"))
    group = store.acquire_many([("a", "ram", "r"), ("b", "ram", "r")])
    group.of("b").tensor.zero_()
    with pytest.raises(LeaseError, match=r"in place: 'b'\. "):
        group.release()
    changed, other = store.acquire("a", "ram"), store.acquire("a", "ram")
    changed.tensor.zero_()
    other.release()
    with pytest.raises(LeaseError, match=r"in place: 'a'\. "):
        changed.release()
    # All leases have ended despite the errors. Writes by other leases before or after a read lease are not errors.
    modes: tuple[Mode, ...] = ("rw", "r", "w", "r")
    for mode in modes:
        with store.acquire("a", "ram", mode) as lease:
            if mode != "r":
                lease.tensor.fill_(7)
            else:
                assert float(lease.tensor.sum()) == 7 * lease.tensor.numel()
    with torch.inference_mode(), store.acquire("a", "ram") as lease:
        assert float(lease.tensor.max()) == 7


def test_an_exception_abandons_a_write(store: TieredStore) -> None:
    add(store, "a", value=5)
    flush(store, "a")

    def write_half() -> None:
        with store.acquire("a", "ram", "w") as lease:
            lease.tensor.fill_(6)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert read(store, "a") == 5, "the home still has the old contents"


def test_discard_and_unregister(store: TieredStore) -> None:
    add(store, "a", "b")
    store.discard("a")
    assert store.where("a") == {"nvme": CopyState.STALE}
    with pytest.raises(UninitializedBlockError):
        store.acquire("a", "ram", "rw")
    store.unregister("a", "b")
    assert list(store.blocks()) == []
    assert store.stats().tiers["nvme"].used_bytes == store.stats().tiers["ram"].used_bytes == 0
    with pytest.raises(BlockNotFoundError, match="no block named 'a'"):
        store.acquire("a", "ram")


def test_pinned_copy_is_not_evicted(store: TieredStore) -> None:
    add(store, *"abcdef")
    store.pin("a", "ram")
    assert read(store, "a") == 0
    for key in "bcdef":
        read(store, key)
    assert store.where("a")["ram"].is_valid
    assert store.stats().tiers["ram"].pinned_bytes == BLOCK_BYTES
    with pytest.raises(LeaseError, match="is pinned"):
        store.evict("a", "ram")
    for key in "bcd":
        store.pin(key, "ram")
    with pytest.raises(CapacityError, match="to pin 'e'"):
        store.pin("e", "ram")
    for key in "bcd":
        read(store, key)
    with pytest.raises(CapacityError, match="to acquire e") as caught:
        store.acquire("e", "ram", timeout_s=20)
    assert (caught.value.pinned_bytes, caught.value.leased_bytes) == (4 * BLOCK_BYTES, 0)
    for key in "abcd":
        store.unpin(key, "ram")
    with pytest.raises(LeaseError, match="is not pinned"):
        store.unpin("a", "ram")
    flush(store, "a")
    assert store.where("a") == {"nvme": CopyState.CLEAN}


def test_reserved_bytes_are_unavailable_to_copies(store: TieredStore) -> None:
    store.reserve("ram", 3 * BLOCK_BYTES)
    add(store, "a", "b")
    with store.acquire("a", "ram"), pytest.raises(CapacityError):
        store.acquire("b", "ram")
    with pytest.raises(CapacityError):
        store.reserve("ram", 4 * BLOCK_BYTES)
    store.reserve("ram", -3 * BLOCK_BYTES)
    with store.acquire("a", "ram"):
        assert read(store, "b") == 1


def test_unneeded_or_impossible_prefetch_is_skipped(store: TieredStore) -> None:
    add(store, *"abcd")
    flush(store, *"abcd")
    transfer = store.prefetch("a", "ram")
    transfer.wait(60)
    assert not transfer.skipped and store.where("a")["ram"] is CopyState.CLEAN
    assert store.prefetch("a", "ram").skipped, "it exists"
    store.register("never", SHAPE, torch.float32, home="nvme")
    assert store.prefetch("never", "ram").skipped
    held = [store.acquire(key, "ram") for key in "abcd"]
    store.register("full", (BLOCK_BYTES,), torch.uint8, home="nvme")
    assert store.prefetch("full", "ram").skipped
    assert store.stats().prefetch_on_time == 1
    for lease in held:
        lease.release()


@pytest.mark.parametrize("policy", [LRU(), Belady()], ids=["lru", "belady"])
@pytest.mark.parametrize("lookahead_bytes", [0, BLOCK_BYTES, 2 * BLOCK_BYTES, None])
def test_traffic_does_not_depend_on_lookahead(
    tmp_path: Path, policy: EvictionPolicy, lookahead_bytes: int | None
) -> None:
    """Six layers run forward and backward. Two are pinned and the others evicted after use, so the traffic is known."""
    keys = [f"layer.{i}" for i in range(6)]
    order = keys + keys[::-1]
    with make_store(tmp_path, ram_blocks=5, policy=policy) as store:
        add(store, *keys)
        flush(store, *keys)
        for key in keys[:2]:
            store.pin(key, "ram")
        accesses = [Access(tick, key, "ram", "r") for tick, key in enumerate(order, start=1)]
        period = len(order) + 1
        before = store.stats()
        store.set_schedule(Schedule(accesses, period=period, end=3 * period), lookahead_bytes=lookahead_bytes)
        for step in range(3):
            for access in accesses:
                store.advance(step * period + access.tick)
                assert read(store, access.key) == keys.index(access.key)
                if access.key not in keys[:2]:
                    store.evict(access.key, "ram")
        store.set_schedule(None)
        window = store.stats() - before
    # The two pinned layers are read once, and the other four for every use. None of these four stays in RAM from one
    # step to the next.
    assert window.links["nvme->ram"].num_bytes == (2 + 3 * 2 * 4) * BLOCK_BYTES
    assert window.links["ram->nvme"].num_bytes == 0
    assert window.prefetch_wasted == 0 and window.schedule_misses == 0
    # All fetches are ahead of use, except for the last layer's second use, which directly follows its first use.
    num_ahead = 2 + 3 * (2 * 4 - 1) if lookahead_bytes != 0 else 0
    assert window.prefetch_on_time + window.prefetch_late == num_ahead


@pytest.mark.parametrize("policy", [LRU(), Belady()], ids=["lru", "belady"])
def test_prefetch_evicts_no_copy_needed_sooner(tmp_path: Path, policy: EvictionPolicy) -> None:
    """Recency alone would evict the next tick's copy. The schedule alone would evict the current tick's copy."""
    keys = ["a", "b", "c", "d"]
    with make_store(tmp_path, ram_blocks=3, policy=policy) as store:
        add(store, *keys)
        flush(store, *keys)
        num_steps, period = 5, len(keys)
        accesses = [Access(tick, key, "ram") for tick, key in enumerate(keys)]
        before = store.stats()
        store.set_schedule(Schedule(accesses, period=period, end=num_steps * period))
        for tick in range(num_steps * period):
            store.advance(tick)
            store.wait_idle()  # lets prefetches arrive before this tick's block is requested
            assert read(store, keys[tick % period]) == tick % period
        window = store.stats() - before
    num_uses = num_steps * period
    assert window.links["nvme->ram"].num_bytes == num_uses * BLOCK_BYTES, "once for each use"
    assert (window.prefetch_wasted, window.prefetch_late) == (0, 0) and window.prefetch_on_time == num_uses - 1


def test_a_recorded_trace_becomes_a_schedule(store: TieredStore) -> None:
    add(store, *"abc")
    flush(store, *"abc")
    with store.record() as trace:
        for tick, key in enumerate("abc"):
            store.advance(tick)
            read(store, key)
    schedule = Schedule.from_trace(trace, period=3)
    assert [(access.tick, access.key) for access in schedule.accesses] == [(0, "a"), (1, "b"), (2, "c")]
    flush(store, *"abc")
    store.set_schedule(schedule)
    store.advance(3)
    read(store, "a")
    read(store, "b")
    assert store.stats().schedule_misses == 1, "b belongs to the next tick"
    assert len(trace.accesses) == 3, "later events are not in the record"


def test_events_report_every_movement(tmp_path: Path) -> None:
    events: list[Event] = []
    with make_store(tmp_path, on_event=events.append) as store:
        add(store, "a")
        flush(store, "a")
        read(store, "a")
        store.commit().wait(60)
    assert [event.kind for event in events if event.kind != "stall"] == ["write_back", "fetch", "commit"]
    fetch = next(event for event in events if event.kind == "fetch")
    assert (fetch.key, fetch.tier, fetch.nbytes) == ("a", "ram", BLOCK_BYTES)
    assert fetch.end_s >= fetch.start_s and fetch.detail.startswith("posix")


def test_invalid_store_calls_raise_specific_errors(store: TieredStore, tmp_path: Path) -> None:
    add(store, "a")
    with pytest.raises(ValueError, match="registered already"):
        store.register("a", (1,), torch.float32, home="ram")
    with pytest.raises(ValueError, match="no tier named 'gpu'; this store has ram, nvme"):
        store.acquire("a", "gpu")
    with pytest.raises(ValueError, match="not addressable"):
        store.acquire("a", "nvme")
    with pytest.raises(ValueError, match="use letters"):
        store.register("a b", (1,), torch.float32, home="ram")
    with pytest.raises(ValueError, match="different names"):
        TieredStore([RamTier(MiB, pin_memory=False), RamTier(MiB, pin_memory=False)])


def test_closed_store_refuses_calls_but_closes_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    add(store, "a")
    store.close()
    store.close()
    with pytest.raises(TieredError, match="closed"):
        store.acquire("a", "ram")
    with pytest.raises(TieredError, match="closed"):
        store.register("b", (1,), torch.float32, home="ram")
    for call in (
        store.commit,
        store.load,
        store.verify,
        lambda: store.keep_buffers("ram", {}),
        lambda: next(store.stream("a", "ram")),
    ):
        with pytest.raises(TieredError, match=r"^the store is closed$"):
            call()
    assert store.is_closed
    with make_store(tmp_path) as again:
        assert list(again.blocks()) == []


def test_a_failed_write_back_keeps_the_contents(
    store: TieredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "a", value=4)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "open_for_write", refuse)
        with pytest.raises(TransferError, match="No space left"):
            store.evict("a", "ram").wait(60)
    assert read(store, "a") == 4
    flush(store, "a")
    assert read(store, "a") == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["drive", "quota"])
def test_write_waits_for_space_with_one_notice(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    nvme = NvmeTier([tmp_path], MiB, on_full="pause", on_notice=notices.append)
    write, refusals = os.pwritev, [3]

    def pwritev(*arguments: Any) -> int:
        if refusals[0]:
            refusals[0] -= 1
            raise OSError(number, os.strerror(number))
        return write(*arguments)

    monkeypatch.setattr(health, "RETRY_S", 0.01)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with TieredStore([RamTier(MiB, pin_memory=False), nvme]) as store:
        for value in (1, 2):
            store.register(f"block.{value}", SHAPE, torch.float32, home="nvme")
            with store.acquire(f"block.{value}", "ram", "w") as lease:
                lease.tensor.fill_(value)
            flush(store, f"block.{value}")
            assert not store.is_paused
        assert [read(store, f"block.{value}") for value in (1, 2)] == [1, 2]
    assert [("paused" in text, "free space again" in text) for text in notices] == [(True, False), (False, True)]


def test_concurrent_threads_lose_no_increment(tmp_path: Path) -> None:
    keys = [f"b{i}" for i in range(8)]
    num_threads, num_rounds = 6, 40
    errors: list[BaseException] = []
    with make_store(tmp_path, ram_blocks=num_threads + 2) as store:
        add(store, *keys, value=0)

        def work(seed: int) -> None:
            choose = random.Random(seed)
            try:
                for _ in range(num_rounds):
                    key = choose.choice(keys)
                    with store.acquire(key, "ram", "rw", timeout_s=60) as lease:
                        assert bool((lease.tensor == lease.tensor[0, 0]).all())
                        lease.tensor.add_(1)
                    store.prefetch(choose.choice(keys), "ram")
                    if choose.random() < 0.3:
                        store.evict(choose.choice(keys), "ram")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        commits = [store.commit() for _ in range(3)]
        for thread in threads:
            thread.join(120)
        assert not errors and not any(thread.is_alive() for thread in threads)
        for commit in commits:
            commit.wait(60)
        assert sum(read(store, key) for key in keys) == num_threads * num_rounds
        ram = store.stats().tiers["ram"]
        assert BLOCK_BYTES <= ram.high_water_bytes <= ram.capacity_bytes and ram.leased_bytes == 0
