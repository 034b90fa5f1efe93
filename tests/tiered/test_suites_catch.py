"""The conformance suites can fail: for each promise, a test detects an implementation that breaks it."""

from __future__ import annotations

import itertools
import random
import threading
import unittest
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tiered import LRU, CapacityError, Tier, Transfer
from tiered.ext import Candidate, EvictionPolicy, Link, Slot, TierUsage
from tiered.links.base import HostLink
from tiered.testing import LinkSuite, PolicySuite, StoreSuite, TierSuite, link_suite
from tiered.testing.manual import MemoryTier
from tiered.testing.store_suite import RandomOperations


def failed_tests(suite: object) -> set[str]:
    """Run all tests of a suite. Return the names of the tests that fail."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except unittest.SkipTest:
                continue
            except Exception:
                failed.add(name.removeprefix("test_"))
    return failed


# -- tiers -----------------------------------------------------------------------------------------------------


class Tiers(TierSuite):
    def __init__(self, make: Callable[[int], Tier]) -> None:
        self.make = make

    def make_tier(self, capacity_bytes: int) -> Tier:
        return self.make(capacity_bytes)


class Sound(MemoryTier):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("memory", capacity_bytes)


class KeepsEveryRecord(Sound):
    def free(self, slot: Slot) -> None:
        slot.resource = None


class FreesTwice(Sound):
    def free(self, slot: Slot) -> None:
        self._ledger._slot_bytes -= slot.slot_bytes


class CountsContentsOnly(Sound):
    alignment_bytes = 512

    def slot_bytes(self, nbytes: int) -> int:
        return -(-nbytes // 512) * 512


class AcceptsTwiceItsCapacity(Sound):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(2 * capacity_bytes)
        self.capacity_bytes = capacity_bytes


class WithholdsSomeBytes(Sound):
    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        return None if nbytes > self.usage().free_bytes - 100 else super().allocate(nbytes, name=name, home=home)


class RaisesWhenFull(Sound):
    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        slot = super().allocate(nbytes, name=name, home=home)
        if slot is None:
            raise CapacityError(self.name, nbytes, 0)
        return slot


class IgnoresReservations(Sound):
    def reserve(self, nbytes: int) -> None:
        pass


class ReservesWithoutLimit(Sound):
    def reserve(self, nbytes: int) -> None:
        self._ledger._reserved_bytes += nbytes


class ReportsNoHighWater(Sound):
    def usage(self) -> TierUsage:
        usage = super().usage()
        return TierUsage(usage.capacity_bytes, usage.used_bytes, usage.used_bytes)


class GivesCopies(Sound):
    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return super().tensor(slot, shape, dtype).clone()


class SharesBytes(Sound):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.all = torch.zeros(capacity_bytes, dtype=torch.uint8)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        slot = super().allocate(nbytes, name=name, home=home)
        if slot is not None:
            slot.resource = self.all[:nbytes]
        return slot


class ClosesOnce(Sound):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class CountsWithoutLock(Sound):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.used_bytes = 0

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        used_bytes = self.used_bytes
        threading.Event().wait(0.0001)
        self.used_bytes = used_bytes + nbytes
        return super().allocate(nbytes, name=name, home=home)

    def usage(self) -> TierUsage:
        usage = super().usage()
        return TierUsage(usage.capacity_bytes, max(0, self.used_bytes), usage.high_water_bytes)

    def free(self, slot: Slot) -> None:
        self.used_bytes -= slot.nbytes
        super().free(slot)


def test_a_sound_tier_passes() -> None:
    assert failed_tests(Tiers(Sound)) == set()


@pytest.mark.parametrize(
    ("broken", "failing_test"),
    [
        (KeepsEveryRecord, "the_ledger_counts_whole_slots"),
        (FreesTwice, "freeing_a_slot_twice_raises"),
        (CountsContentsOnly, "the_ledger_counts_whole_slots"),
        (AcceptsTwiceItsCapacity, "allocation_without_space_returns_none_at_no_cost"),
        (WithholdsSomeBytes, "requests_within_the_free_bytes_are_granted"),
        (RaisesWhenFull, "allocation_without_space_returns_none_at_no_cost"),
        (IgnoresReservations, "reservations_share_the_ledger"),
        (ReservesWithoutLimit, "reservations_share_the_ledger"),
        (ReportsNoHighWater, "the_ledger_counts_whole_slots"),
        (GivesCopies, "tensors_are_views_of_the_slot"),
        (SharesBytes, "slots_do_not_overlap"),
        (ClosesOnce, "close_is_idempotent"),
        (CountsWithoutLock, "concurrent_threads_keep_the_ledger_exact"),
    ],
)
def test_suite_detects_a_broken_tier(broken: type[Sound], failing_test: str) -> None:
    assert failing_test in failed_tests(Tiers(broken))


# -- links -----------------------------------------------------------------------------------------------------


class Links(LinkSuite):
    def __init__(self, make: Callable[[Tier, Tier], Link]) -> None:
        self.make = make

    def make_tier(self, capacity_bytes: int) -> Tier:
        return MemoryTier("slow", capacity_bytes)

    def make_neighbour(self, capacity_bytes: int) -> Tier:
        return MemoryTier("fast", capacity_bytes)

    def make_links(self, fast: Tier, slow: Tier) -> list[Link]:
        return [self.make(fast, slow), self.make(slow, fast)]


class DropsLastBytes(HostLink):
    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
        super()._copy(src_slot, dst_slot, nbytes // 512 * 512)


class ZeroesSource(HostLink):
    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
        super()._copy(src_slot, dst_slot, nbytes)
        self._src_tier.tensor(src_slot, (nbytes,), torch.uint8).zero_()


class IgnoresLaterWrites(HostLink):
    def __init__(self, src_tier: Tier, dst_tier: Tier) -> None:
        super().__init__(src_tier, dst_tier)
        self.seen: set[Slot] = set()

    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
        if self.src == "slow" or dst_slot not in self.seen:
            super()._copy(src_slot, dst_slot, nbytes)
        self.seen.add(dst_slot)


class UsesOneBuffer(HostLink):
    """Link whose concurrent transfers corrupt each other."""

    buffer = torch.zeros(1 << 20, dtype=torch.uint8)

    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
        self.buffer[:nbytes] = self._src_tier.tensor(src_slot, (nbytes,), torch.uint8)
        threading.Event().wait(0.002)
        self._dst_tier.tensor(dst_slot, (nbytes,), torch.uint8).copy_(self.buffer[:nbytes])


class CountsPages(HostLink):
    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        self._meter.start(4096)
        self._meter.end(4096, moved=True)
        return super().submit(src_slot, dst_slot, nbytes)


class RaisesInSubmit(HostLink):
    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        self._src_tier.tensor(src_slot, (nbytes,), torch.uint8)
        self._dst_tier.tensor(dst_slot, (nbytes,), torch.uint8)
        return super().submit(src_slot, dst_slot, nbytes)


class ReportsOwnErrors(HostLink):
    def _run(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        error: Exception | None = None
        try:
            self._copy(src_slot, dst_slot, nbytes)
        except OSError as cause:
            error = cause
        self._meter.end(nbytes, moved=error is None)
        transfer.finish(error)


class HoldsALock(HostLink):
    """Link that runs callbacks while it holds the lock that ``submit`` takes."""

    def __init__(self, src_tier: Tier, dst_tier: Tier) -> None:
        super().__init__(src_tier, dst_tier)
        self._lock = threading.Lock()

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        assert self._lock.acquire(timeout=2), "otherwise the test would leave threads that never end"
        try:
            return super().submit(src_slot, dst_slot, nbytes)
        finally:
            self._lock.release()

    def _run(self, *arguments: Any) -> None:
        with self._lock:
            super()._run(*arguments)


class LeavesItsEventOpen(HostLink):
    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        transfer = super().submit(src_slot, dst_slot, nbytes)
        transfer.event = SimpleNamespace(query=lambda: False)
        return transfer


class DropsPendingJobsOnClose(HostLink):
    def close(self) -> None:
        with self._workers._changed:
            self._workers._urgent_jobs.clear()
        super().close()


def test_sound_links_pass() -> None:
    assert failed_tests(Links(HostLink)) == set()


@pytest.mark.parametrize(
    ("broken", "failing_test"),
    [
        (DropsLastBytes, "round_trip_keeps_bytes_of_every_size"),
        (ZeroesSource, "round_trip_keeps_bytes_of_every_size"),
        (IgnoresLaterWrites, "last_write_wins"),
        (UsesOneBuffer, "concurrent_transfers_in_both_directions"),
        (CountsPages, "counters_count_contents"),
        (RaisesInSubmit, "failures_end_in_the_transfer"),
        (ReportsOwnErrors, "failures_end_in_the_transfer"),
        (HoldsALock, "submit_and_usage_do_not_wait_for_callbacks"),
        (LeavesItsEventOpen, "round_trip_keeps_bytes_of_every_size"),
        (DropsPendingJobsOnClose, "close_finishes_pending_transfers"),
    ],
)
def test_suite_detects_a_broken_link(
    broken: type[HostLink], failing_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is HoldsALock:
        monkeypatch.setattr(link_suite, "TIMEOUT_S", 0.5)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)  # hides the error of the thread that gives up
    with pytest.raises((AssertionError, TimeoutError, OSError)):
        getattr(Links(broken), f"test_{failing_test}")()


# -- policies --------------------------------------------------------------------------------------------------


class Policies(PolicySuite):
    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.make = make

    def make_policy(self) -> EvictionPolicy:
        return self.make()


class SkipsDirtyCandidates(LRU):
    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return [candidate for candidate in super().rank(candidates, now) if not candidate.dirty]


class SortsInPlace(LRU):
    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        assert isinstance(candidates, list)
        candidates.sort(key=lambda candidate: candidate.key)
        return candidates


class TakesTurns(LRU):
    def __init__(self) -> None:
        self.turns = itertools.count()

    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return super().rank(candidates, now)[:: 1 if next(self.turns) % 2 else -1]


class IgnoresTies(LRU):
    def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
        return sorted(candidates, key=lambda candidate: candidate.last_use)


@pytest.mark.parametrize(
    ("broken", "failing_test"),
    [
        (SkipsDirtyCandidates, "all_candidates_are_ranked_once"),
        (SortsInPlace, "the_arguments_are_not_changed"),
        (TakesTurns, "rank_is_repeatable"),
        (IgnoresTies, "rank_ignores_the_order_of_candidates"),
    ],
)
def test_suite_detects_a_broken_policy(broken: type[LRU], failing_test: str) -> None:
    assert failing_test in failed_tests(Policies(broken))


# -- stores ----------------------------------------------------------------------------------------------------


class Stores(StoreSuite):
    seeds = (0,)

    def __init__(self, make: Callable[[Tier, Tier], Link]) -> None:
        self.make = make

    def make_tier(self, capacity_bytes: int) -> Tier:
        return MemoryTier("slow", capacity_bytes)

    def make_links(self, fast: Tier, slow: Tier) -> list[Link]:
        return [self.make(fast, slow), self.make(slow, fast)]


def test_store_suite_detects_links_that_lose_bytes() -> None:
    assert failed_tests(Stores(HostLink)) == set()
    assert "random_work_keeps_every_byte" in failed_tests(Stores(DropsLastBytes))
    assert "threads_keep_their_bytes" in failed_tests(Stores(IgnoresLaterWrites))


def test_random_work_includes_every_operation(tmp_path: Path) -> None:
    store = Stores(HostLink)._store(str(tmp_path / "generations"))
    with store, ExitStack() as stack:
        names = ("acquire", "commit", "discard", "evict", "pin", "prefetch", "register", "unregister")
        spies = {
            name: stack.enter_context(mock.patch.object(store, name, wraps=getattr(store, name))) for name in names
        }
        RandomOperations(store, random.Random(0), Stores.unit_bytes).run(Stores.num_operations)
        assert min(spy.call_count for spy in spies.values()) > 1
        assert {call.args[2] if len(call.args) > 2 else "r" for call in spies["acquire"].mock_calls} == {"r", "w", "rw"}


def test_store_suite_detects_silently_failed_write_backs() -> None:
    class HidesCopyErrors(HostLink):
        def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
            try:
                super()._copy(src_slot, dst_slot, nbytes)
            except OSError:
                return

    assert "a_failed_write_back_keeps_the_newest_bytes" in failed_tests(Stores(HidesCopyErrors))
