"""What the conformance suites try: the sizes, the order and the number of their calls."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tiered import LRU, Tier, TieredStore, Transfer
from tiered.ext import Candidate, Link, Slot
from tiered.links.base import HostLink
from tiered.schedule import NEVER
from tiered.testing import LinkSuite, PolicySuite, StoreSuite, TierSuite
from tiered.testing.faults import Fault, FaultyMover, flip_bit
from tiered.testing.manual import MemoryTier
from tiered.testing.store_suite import RandomOperations
from tiered.tiers.layout import ChunkFile

UNIT = 65536
#: Empty, odd, and next to the alignment of one byte and to the size of a block.
SIZES = [0, 1, 2, 3, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 5]

# -- tiers -----------------------------------------------------------------------------------------------------


class Recorded(MemoryTier):
    """A sound tier that records its calls."""

    def __init__(self, capacity_bytes: int, calls: list[tuple[Any, ...]]) -> None:
        super().__init__("memory", capacity_bytes)
        self.calls = calls
        calls.append(("make", capacity_bytes))

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        slot = super().allocate(nbytes, name=name, home=home)
        self.calls.append(("take" if slot is not None else "refuse", nbytes))
        return slot

    def free(self, slot: Slot) -> None:
        self.calls.append(("free", slot.nbytes))
        super().free(slot)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.calls.append(("tensor", tuple(shape), dtype))
        return super().tensor(slot, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        self.calls.append(("reserve", nbytes))
        super().reserve(nbytes)

    def sync(self) -> None:
        self.calls.append(("sync",))

    def close(self) -> None:
        self.calls.append(("close",))


class Tiers(TierSuite):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def make_tier(self, capacity_bytes: int) -> Tier:
        return Recorded(capacity_bytes, self.calls)

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        from tiered import TransferError

        error = TransferError("no memory", tier="memory")
        return mock.patch.object(tier, "allocate", side_effect=error)


def calls_of(test: str) -> list[tuple[Any, ...]]:
    """Run one test of the suite. Return its calls, without the creation and the closing of the tier."""
    suite = Tiers()
    getattr(suite, f"test_{test}")()
    assert suite.calls[0] == ("make", 8 * UNIT) and suite.calls[-1] == ("close",)
    return suite.calls[1:-1]


def test_ledger_test_tries_sizes_at_the_edges() -> None:
    freed = [("free", nbytes) for nbytes in SIZES[1::2]]
    taken = [("take", nbytes) for nbytes in SIZES]
    assert calls_of("the_ledger_counts_whole_slots") == [
        call for pair in zip(taken[::2], taken[1::2], freed, strict=True) for call in pair
    ]


BYTES, UNIT_TENSOR = torch.uint8, ("tensor", (UNIT,), torch.uint8)


@pytest.mark.parametrize(
    ("test", "calls"),
    [
        ("tier_implements_the_protocol", []),
        (
            "allocation_without_space_returns_none_at_no_cost",
            [("refuse", 8 * UNIT + 1), *[("take", UNIT)] * 8, ("refuse", UNIT), ("free", UNIT), ("take", UNIT)],
        ),
        ("freeing_a_slot_twice_raises", [("take", UNIT), ("take", UNIT), ("free", UNIT), ("free", UNIT)]),
        (
            "freed_names_can_be_reused",
            [(action, nbytes) for nbytes in (UNIT, 1, 2 * UNIT) for action in ("take", "take", "free", "free")],
        ),
        (
            "reservations_share_the_ledger",
            [
                ("take", UNIT),
                ("reserve", 0),
                ("reserve", 7 * UNIT),
                ("refuse", 1),
                ("reserve", 1),
                ("reserve", -7 * UNIT),
                ("free", UNIT),
                ("take", UNIT),
            ],
        ),
        ("lack_of_machine_memory_raises_transfer_error", [("take", UNIT)]),
        (
            "tensors_are_views_of_the_slot",
            [
                call
                for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint8, torch.float64)
                for shape, count in (((3, 5), 15), ((7,), 7), ((2, 1, 4), 8), ((), 1), ((0,), 0), ((0, 4), 0))
                for call in (
                    ("take", count * dtype.itemsize),
                    ("tensor", shape, dtype),
                    ("tensor", shape, dtype),
                    ("free", count * dtype.itemsize),
                )
            ],
        ),
        (
            "slots_do_not_overlap",
            [
                *(
                    call
                    for nbytes in (1, 5000, UNIT, 3, UNIT + 1)
                    for call in (("take", nbytes), ("tensor", (nbytes,), BYTES))
                ),
                *[("take", UNIT), UNIT_TENSOR, ("free", UNIT)] * 10,
                *(("tensor", (nbytes,), BYTES) for nbytes in (1, 5000, UNIT, 3, UNIT + 1)),
            ],
        ),
        (
            "tensor_cannot_exceed_the_slot",
            [("take", UNIT), UNIT_TENSOR, ("tensor", (100,), BYTES), ("tensor", (UNIT + 1,), BYTES)],
        ),
        ("sync_returns", [("sync",), ("take", UNIT), ("sync",)]),
        ("close_is_idempotent", [("take", UNIT), ("close",), ("free", UNIT)]),
    ],
)
def test_tier_test_makes_these_calls(test: str, calls: list[tuple[Any, ...]]) -> None:
    assert calls_of(test) == calls


def test_tier_that_is_not_addressable_is_asked_for_one_tensor() -> None:
    class Files(Tiers):
        def make_tier(self, capacity_bytes: int) -> Tier:
            tier = super().make_tier(capacity_bytes)
            tier.device = None
            return tier

    for test, calls in {
        "tensors_are_views_of_the_slot": [("take", 4), ("tensor", (1,), torch.float32)],
        "slots_do_not_overlap": [],
        "tensor_cannot_exceed_the_slot": [],
    }.items():
        suite = Files()
        getattr(suite, f"test_{test}")()
        assert suite.calls[1:-1] == calls
    suite = Files()
    suite.test_concurrent_threads_keep_the_ledger_exact()
    assert not any(call[0] == "tensor" for call in suite.calls)


def test_random_tests_of_a_tier_fill_and_empty_it() -> None:
    calls = calls_of("requests_within_the_free_bytes_are_granted")
    counts = Counter(call[0] for call in calls)
    assert counts["take"] + counts["refuse"] == 120 and counts["refuse"] >= 10 and counts["free"] >= 50
    assert {call[1] for call in calls} >= set(SIZES) and max(call[1] for call in calls) == 3 * UNIT
    assert any(call[1] not in (*SIZES, 3 * UNIT) for call in calls)
    calls = calls_of("concurrent_threads_keep_the_ledger_exact")
    counts = Counter(call[0] for call in calls)
    assert counts["take"] + counts["refuse"] == 4 * 60
    assert counts["free"] == counts["take"] and counts["tensor"] == 2 * counts["take"], "filled, then compared"
    assert {call[1] for call in calls if call[0] == "take"} == {100, UNIT // 2, UNIT, 2 * UNIT}


# -- links -----------------------------------------------------------------------------------------------------


class Links(LinkSuite):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.tiers: list[Tier] = []

    def make_tier(self, capacity_bytes: int) -> Tier:
        assert capacity_bytes == 64 * UNIT
        self.tiers.append(MemoryTier("slow", capacity_bytes))
        return self.tiers[-1]

    def make_neighbour(self, capacity_bytes: int) -> Tier:
        assert capacity_bytes == 64 * UNIT
        self.tiers.append(MemoryTier("fast", capacity_bytes))
        return self.tiers[-1]

    def make_links(self, fast_tier: Tier, slow_tier: Tier) -> list[Link]:
        calls = self.calls

        class RecordedLink(HostLink):
            def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
                assert nbytes == src_slot.nbytes == dst_slot.nbytes
                assert (src_slot.tier, dst_slot.tier) == (self.src, self.dst)
                calls.append(("write" if self.src == "fast" else "read", nbytes))
                return super().submit(src_slot, dst_slot, nbytes)

            def close(self) -> None:
                calls.append(("close " + ("write" if self.src == "fast" else "read"),))
                super().close()

        return [RecordedLink(fast_tier, slow_tier), RecordedLink(slow_tier, fast_tier)]


LINK_SIZES = [0, 1, 2, 3, 511, 513, 4095, 4096, 4097, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 7]
PADDED = [UNIT + 13 * number for number in range(12)]
CLOSE_WRITE, CLOSE_READ = ("close write",), ("close read",)


def submitted(test: str) -> list[tuple[Any, ...]]:
    suite = Links()
    getattr(suite, f"test_{test}")()
    assert suite.calls[-2:] == [CLOSE_WRITE, CLOSE_READ]
    return suite.calls[:-2]


@pytest.mark.parametrize(
    ("test", "calls"),
    [
        ("links_implement_the_protocol", []),
        (
            "round_trip_keeps_bytes_of_every_size",
            [(way, nbytes) for nbytes in LINK_SIZES for way in ("write", "read", "read")],
        ),
        ("last_write_wins", [*[("write", UNIT + 1)] * 4, ("read", UNIT + 1)]),
        ("transfer_leaves_other_slots_unchanged", [*[("write", 2 * UNIT + 3)] * 4, *[("read", 2 * UNIT + 3)] * 3]),
        ("counters_count_contents", [(way, nbytes) for nbytes in LINK_SIZES for way in ("write", "read")]),
        (
            "submit_and_usage_do_not_wait_for_callbacks",
            [(way, nbytes) for way in ("write", "read") for nbytes in PADDED[:6]],
        ),
        ("failures_end_in_the_transfer", [(way, UNIT) for way in ("write", "write", "read", "read", "write", "read")]),
        ("close_leaves_the_other_direction_open", [("write", UNIT), CLOSE_WRITE, ("read", UNIT)]),
        (
            "close_finishes_pending_transfers",
            [
                *((way, nbytes) for way in ("write", "read") for nbytes in PADDED[:8]),
                CLOSE_READ,
                CLOSE_WRITE,
                CLOSE_READ,
            ],
        ),
    ],
)
def test_link_test_makes_these_transfers(test: str, calls: list[tuple[Any, ...]]) -> None:
    assert submitted(test) == calls


@pytest.mark.parametrize(
    ("test", "fast_bytes", "slow_bytes"),
    [
        ("round_trip_keeps_bytes_of_every_size", 0, 0),
        ("counters_count_contents", sum(LINK_SIZES), sum(LINK_SIZES)),
        ("last_write_wins", UNIT + 1, UNIT + 1),
        ("transfer_leaves_other_slots_unchanged", 6 * UNIT + 9, 6 * UNIT + 9),
        ("concurrent_transfers_in_both_directions", 2 * sum(PADDED), 2 * sum(PADDED)),
        ("submit_and_usage_do_not_wait_for_callbacks", sum(PADDED[:6]), sum(PADDED[:6])),
        ("failures_end_in_the_transfer", 2 * UNIT, 2 * UNIT),
        ("close_finishes_pending_transfers", sum(PADDED[:8]), sum(PADDED[:8])),
    ],
)
def test_link_test_keeps_only_the_slots_it_uses(test: str, fast_bytes: int, slow_bytes: int) -> None:
    suite = Links()
    getattr(suite, f"test_{test}")()
    assert {tier.name: tier.usage().used_bytes for tier in suite.tiers} == {"fast": fast_bytes, "slow": slow_bytes}


def test_concurrent_link_test_moves_all_blocks_both_ways() -> None:
    calls = submitted("concurrent_transfers_in_both_directions")
    assert calls[:12] == [("write", nbytes) for nbytes in PADDED]
    assert Counter(calls[12:36]) == Counter([(way, nbytes) for way in ("write", "read") for nbytes in PADDED])
    assert calls[36:] == [("read", nbytes) for nbytes in PADDED]


# -- policies and stores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "count"),
    [
        ("empty_candidates_have_an_empty_rank", 1),
        ("all_candidates_are_ranked_once", 50),
        ("the_arguments_are_not_changed", 100),
        ("rank_is_repeatable", 150),
        ("rank_ignores_the_order_of_candidates", 100),
    ],
)
def test_policy_test_ranks_varied_candidates(test: str, count: int) -> None:
    calls: list[tuple[list[Candidate], int]] = []

    class RecordedPolicy(LRU):
        def rank(self, candidates: Sequence[Candidate], now: int) -> Sequence[Candidate]:
            calls.append((list(candidates), now))
            return super().rank(candidates, now)

    class Policies(PolicySuite):
        def make_policy(self) -> LRU:
            return RecordedPolicy()

    getattr(Policies(), f"test_{test}")()
    assert len(calls) == count
    if count == 1:
        assert calls == [([], 0)]
        return
    assert {len(candidates) for candidates, _ in calls} == set(range(1, 12))
    assert {now for _, now in calls} <= set(range(20)) and len({now for _, now in calls}) > 10
    candidates = [(candidate, now) for candidates, now in calls for candidate in candidates]
    assert {candidate.nbytes for candidate, _ in candidates} == {0, 1, 4096, 10_000}
    assert {candidate.dirty for candidate, _ in candidates} == {False, True}
    assert {candidate.last_use for candidate, _ in candidates} == set(range(-1, 6))
    ahead = {NEVER if candidate.next_use == NEVER else candidate.next_use - now for candidate, now in candidates}
    assert ahead == {NEVER, 1, 2, 50}
    assert {candidate.key for candidate, _ in candidates} == {f"block.{index}" for index in range(30)}


class Stores(StoreSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        assert capacity_bytes == 24 * UNIT
        return MemoryTier("slow", capacity_bytes)


def test_random_store_test_works_before_and_after_it_reopens_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(name: str, short: Callable[..., tuple[Any, ...]]) -> None:
        real = getattr(RandomOperations, name)

        def recorded(self: RandomOperations, *arguments: Any, **options: Any) -> None:
            calls.append(short(*arguments, **options))
            real(self, *arguments, **options)

        monkeypatch.setattr(RandomOperations, name, recorded)

    record("run", lambda count, commits=True: ("run", count, commits))
    record("check_at_rest", lambda: ("check",))
    Stores().test_random_work_keeps_every_byte()
    assert calls == [("run", 150, True), ("run", 50, False), ("check",), ("run", 50, True), ("check",)] * 2


@pytest.mark.parametrize(
    ("test", "leases", "blocks"),
    [
        ("threads_keep_their_bytes", 3 * 50, 3 * 4),
        ("a_failed_write_back_keeps_the_newest_bytes", 5, 1),
        ("commit_can_exceed_the_fast_tier", 2 * 15, 2 * 15),
    ],
)
def test_store_test_makes_all_its_leases(test: str, leases: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for name in ("acquire", "register"):
        real = getattr(TieredStore, name)

        def counted(*arguments: Any, name: str = name, real: Callable[..., Any] = real, **options: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(TieredStore, name, counted)
    getattr(Stores(), f"test_{test}")()
    assert counts == {"acquire": leases, "register": blocks}


def test_random_operations_choose_each_kind_in_proportion(tmp_path: Path) -> None:
    counts, fast_homes = Counter[str](), list[int]()
    names = ("register", "write", "change", "read", "evict", "prefetch", "discard", "unregister", "pin", "commit")
    with Stores()._store(str(tmp_path / "generations")) as store:
        operations = RandomOperations(store, random.Random(5), UNIT)
        for name in names:
            real = getattr(operations, name)

            def counted(*arguments: Any, name: str = name, real: Callable[..., None] = real) -> None:
                counts[name] += 1
                real(*arguments)
                fast_homes.append(sum(spec.home == "ram" for spec in store.blocks()))

            setattr(operations, name, counted)
        for commits in (True, False):
            operations.run(240, commits=commits)
            assert operations.store.tier_names == ["ram", "slow"]
        shares = {"register": 2, "write": 4, "change": 2, "read": 6, "evict": 3, "prefetch": 3}
        shares |= dict.fromkeys(("discard", "unregister", "pin"), 1)
        num_forced = counts.total() - 480
        assert 0 <= num_forced <= 40, "a block is registered if there is none"
        for name, share in shares.items():
            assert 0.4 * share * 20 <= counts[name] - num_forced * (name == "register") <= 1.8 * share * 20, counts
        assert 1 <= counts["commit"] <= 25
        assert set(fast_homes) == {0, 1}, "at most one home takes space from copies"


# -- faults ----------------------------------------------------------------------------------------------------


class Memory:
    """A mover of parts whose files are in memory."""

    path = "memory"

    def __init__(self) -> None:
        self.contents = bytearray(b"\xaa" * 32768)
        self.is_closed = False

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        view[:] = self.contents[offset : offset + len(view)]

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        self.contents[offset : offset + len(view)] = view

    def close(self) -> None:
        self.is_closed = True


def test_fault_affects_the_chosen_calls() -> None:
    files = {name: ChunkFile(Path(f"/drive/{name}/c/0"), 0, 4096) for name in ("a", "b")}
    fault = Fault("error", "read", errno=errno.EIO, path="/a/", skip=2, times=3)
    operations = [("read", "a"), ("write", "a"), ("read", "b"), *[("read", "a")] * 6]
    found = [fault.affects(operation, files[name]) for operation, name in operations]
    assert found == [False, False, False, False, True, True, True, False, False] and fault.num_calls == 7
    always = Fault("error", "write", skip=1)
    assert [always.affects("write", files["b"]) for _ in range(4)] == [False, True, True, True]


def test_faults_fail_shorten_flip_and_delay() -> None:
    file, inner, slept = ChunkFile(Path("/drive/c/0"), 0, 32768), Memory(), list[float]()
    mover = FaultyMover(inner, sleep=slept.append)
    assert mover.path == "memory"

    def read(*faults: Fault, nbytes: int = 16384) -> bytes:
        mover.faults = list(faults)
        buffer = bytearray(nbytes)
        mover.read(file, 4096, memoryview(buffer))
        return bytes(buffer)

    inner.contents[4096:20480] = bytes(range(256)) * 64
    contents = bytes(range(256)) * 64
    assert read() == contents
    assert read(Fault("short", "read")) == contents[:8192] + bytes(8192)
    assert read(Fault("short", "read"), nbytes=12288) == contents[:4096] + bytes(8192)
    flipped = bytearray(contents)
    flipped[2] ^= 1 << 5
    assert read(Fault("flip", "read", bit=21)) == read(Fault("flip", "read", bit=21 + 8 * 16384)) == bytes(flipped)
    assert read(Fault("late", "read", latency_s=0.5), Fault("late", "read", latency_s=2)) == contents
    assert slept == [0.5, 2]
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(Fault("late", "read", latency_s=3), Fault("error", "read", errno=errno.EIO))
    assert caught.value.errno == errno.EIO and slept == [0.5, 2, 3]
    mover.faults = [Fault("short", "write"), Fault("error", "read", errno=errno.EIO)]
    mover.write(file, 8192, memoryview(b"\1" * 16384))
    assert inner.contents[8192:16384] == b"\1" * 8192 and inner.contents[16384:20480] == contents[12288:]
    mover.faults = [Fault("error", "write", errno=errno.ENOSPC)]
    with pytest.raises(OSError, match="No space left"):
        mover.write(file, 0, memoryview(bytes(4096)))
    mover.close()
    assert inner.is_closed


def test_flipped_bit_is_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5))
    file = ChunkFile(path, 0, 5)
    flip_bit(file, 8 * 3 + 6)
    assert path.read_bytes() == bytes([0, 0, 0, 64, 0])

    class Writer(Memory):
        def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
            with file.path.open("r+b") as opened:
                opened.seek(offset)
                opened.write(view)

    FaultyMover(Writer(), [Fault("flip", "write", bit=9)]).write(file, 2, memoryview(b"\xff\xff\xff"))
    assert path.read_bytes() == bytes([0, 0, 255, 253, 255])
