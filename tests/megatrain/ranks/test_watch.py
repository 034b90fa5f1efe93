"""Threads with which a rank watches the other ranks."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatrain.ranks import watch
from megatrain.ranks.watch import Failure, LauncherConnection, Watcher, describe_exit
from megatrain.ranks.world import World


def test_a_rank_may_appear_while_another_thread_looks_for_silent_ranks() -> None:
    watcher = Watcher(World(0, 3, 0, 3, "here", 1), HashStore(), timeout_s=60.0)

    class AddsRank(set[int]):
        """Set of finished ranks. A membership test records a heartbeat, as the heartbeat thread may do at any time."""

        def __contains__(self, rank: object) -> bool:
            watcher._last_beat_s[2] = time.monotonic()
            return False

    watcher._last_beat_s[1] = time.monotonic()
    watcher._finished_ranks = AddsRank()
    assert watcher._find_failure(time.monotonic()) is None
    assert set(watcher._last_beat_s) == {1, 2}


@pytest.mark.parametrize(("rank", "waits"), [(0, 3), (1, 0)])
def test_only_rank_0_waits_for_the_others_to_leave(rank: int, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may serve the store, so it leaves last. It does not wait for the failed rank, which may never leave."""
    store, slept = HashStore(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) <= waits
        if len(slept) == waits:
            store.set("gone/1", "1")

    monkeypatch.setattr("megatrain.ranks.watch.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    watcher = Watcher(World(rank, 3, rank, 3, "here", 1), store, timeout_s=60.0)
    watcher._announce_exit(Failure(2, "here", 1, "the rows are wrong"))
    assert len(slept) == waits and store.check([f"gone/{rank}"])


def test_large_message_arrives_whole_after_a_nonblocking_receive() -> None:
    here, there = map(LauncherConnection, socket.socketpair())
    assert here.receive(0.0) == []
    sender = threading.Thread(target=here.send, kwargs={"text": "x" * 4_000_000})  # more than the socket's buffer holds
    sender.start()
    found: list[dict[str, object]] = []
    while not found:
        messages = there.receive(10.0)
        assert messages is not None
        found += messages
    sender.join()
    assert found == [{"text": "x" * 4_000_000}]
    here.close()
    assert there.receive(10.0) is None
    there.close()


# -- descriptions of failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (Failure(2, "there", 4, "no rows"), "rank 2 (on there): no rows"),
        (Failure(2, "there", 4, "no rows", is_shared=True), "no rows"),
        (Failure(-1, "there", 1, "interrupted"), "interrupted"),
        *((Failure(0, "there", code, "no rows"), "no rows") for code in (2, 3, 4)),
        *((Failure(0, "there", code, "no rows"), "rank 0 (on there): no rows") for code in (1, 5)),
    ],
)
def test_a_failure_names_its_rank_unless_it_concerns_all(failure: Failure, text: str) -> None:
    assert str(failure) == text
    assert Failure.from_json(failure.to_json()) == failure == Failure.from_json(failure.to_json().encode())


def failure_of(rank: int, message: str = "no rows") -> Failure:
    return Failure(rank, f"host{rank}", 10 + rank, message)


@pytest.mark.parametrize(
    ("failures", "size", "reported", "is_shared"),
    [
        ({2: failure_of(2), 1: failure_of(1)}, 3, 1, False),
        ({2: failure_of(2), 1: failure_of(1)}, 2, 1, True),  # all ranks have the same message
        ({1: failure_of(1), 0: failure_of(0)}, 3, 0, True),  # rank 0 and another rank
        ({1: failure_of(1, "other"), 0: failure_of(0)}, 2, 0, False),
        ({0: failure_of(0)}, 2, 0, False),
        ({0: failure_of(0)}, 1, 0, True),
    ],
)
def test_the_lowest_rank_s_failure_is_reported(
    failures: dict[int, Failure], size: int, reported: int, is_shared: bool
) -> None:
    expected = Failure(reported, f"host{reported}", 10 + reported, "no rows", is_shared)
    assert Failure.select_reported(failures, size) == expected


def test_the_end_of_a_process_is_described() -> None:
    assert [describe_exit(code) for code in (7, 0, -9, -15, -99)] == [
        "ended with exit code 7, without a message",
        "ended with exit code 0, without a message",
        "was ended by SIGKILL. The kernel does so when memory is used up: see dmesg",
        "was ended by SIGTERM",
        "was ended by signal 99",
    ]


# -- detection of failures -----------------------------------------------------------------------------------------


def watcher_of(rank: int, store: HashStore | None = None, **options: Any) -> Watcher:
    """Return the watcher of one of four ranks, two on each of two hosts."""
    world = World(rank, 4, rank % 2, 2, f"host{rank // 2}", 2)
    return Watcher(world, HashStore() if store is None else store, timeout_s=60.0, **options)


GONE_STORE = "the store at which the ranks meet is gone, because the program that started them has ended"


def test_a_lost_store_is_a_failure_of_rank_0() -> None:
    store = HashStore()
    store.set("host/0", "elsewhere")
    for rank, expected in (
        (1, Failure(0, "host0", 1, "has ended without a message")),
        (2, Failure(0, "elsewhere", 1, "has ended without a message")),
        (0, Failure(-1, "", 1, GONE_STORE)),
    ):
        watcher = watcher_of(rank, store)
        now_s = watcher._last_answer_s
        assert watcher._find_failure(now_s + 60.0) is None
        late = watcher._find_failure(now_s + 61.0)
        assert late == (expected if rank == 0 else replace(expected, message="has not answered for 61 s"))
        watcher._store_error = OSError("connection reset")
        assert watcher._find_failure(now_s) == expected
    empty = HashStore()
    empty.set_timeout(timedelta(milliseconds=1))
    assert watcher_of(3, empty)._host_of(1) == "another host"


def test_a_silent_rank_is_found_and_announced() -> None:
    store = HashStore()
    watcher = watcher_of(1, store)
    now_s = watcher._last_answer_s = 1000.0
    watcher._last_beat_s = {2: now_s - 60.0, 3: now_s - 61.0, 0: now_s - 70.0}
    watcher._finished_ranks = {0}
    store.set("host/3", "host1")
    silence = "has sent no heartbeat for 61 s (distributed.timeout): its process is stopped or has ended"
    expected = Failure(3, "host1", 1, silence)
    assert watcher._find_failure(now_s) == expected
    assert store.get("failed") == expected.to_json().encode()
    watcher._limit_s = 2.5  # a collective broke
    store.set("host/2", "host1")
    assert watcher._find_failure(now_s) == Failure(2, "host1", 1, "has ended without a message")


def test_heartbeats_of_other_ranks_are_noted() -> None:
    store = HashStore()
    watcher = watcher_of(1, store)
    watcher._check_rank(2)
    assert not watcher._beats and not watcher._last_beat_s
    store.set("beat/2", "1")
    store.set("gone/2", "1")
    watcher._check_rank(2)
    assert watcher._beats == {2: b"1"} and watcher._last_beat_s.keys() == {2} and not watcher._finished_ranks
    watcher._last_beat_s[2] = 5.0
    watcher._check_rank(2)
    assert watcher._last_beat_s == {2: 5.0} and watcher._finished_ranks == {2}
    store.set("beat/2", "2")
    watcher._check_rank(2)
    assert watcher._beats == {2: b"2"} and watcher._last_beat_s[2] != 5.0


def test_a_beat_is_sent_until_a_failure_is_in_the_store() -> None:
    store, failure = HashStore(), failure_of(3)
    store.set("failed", failure.to_json())
    store.set("beat/2", "7")
    here, there = map(LauncherConnection, socket.socketpair())
    watcher = watcher_of(1, store, launcher=here)
    watcher._beat()
    assert watcher._failure == failure and watcher._store_error is None
    assert store.get("beat/1") == b"1" and watcher._beats == {2: b"7"}
    store.delete_key("failed")
    other, told = watcher_of(0, store, launcher=there), list[str]()
    other.on_notice = told.append
    watcher.notify("the drive is full")
    watcher.notify("it has space again")
    other.notify("own")
    other._take_notices()
    assert told == ["own", "rank 1: the drive is full", "rank 1: it has space again"]
    store.add("notices", 1)  # its text is still on the way
    other._take_notices()
    assert len(told) == 3
    store.set("notice/3", "third")
    other._take_notices()
    other._take_notices()
    assert told[3:] == ["third"]

    def fail(*_: object) -> None:
        raise OSError("connection reset")

    other._store = SimpleNamespace(set=fail)  # type: ignore[assignment]
    other._beat()
    assert str(other._store_error) == "connection reset" and other._failure is None
    here.close()
    there.close()


def test_the_launcher_sends_failures_and_its_end_is_one() -> None:
    here, there = map(LauncherConnection, socket.socketpair())
    watcher, failure = watcher_of(1, launcher=here), failure_of(2)
    there.send(port=5)
    there.send(failed=failure.to_json())
    listener = threading.Thread(target=watcher._listen)
    listener.start()
    while watcher._failure is None:
        time.sleep(0.001)
    assert watcher._failure == failure
    there.close()
    listener.join()
    assert watcher._failure == Failure(-1, "", 1, "the launcher of the ranks has ended")
    here.close()


def test_a_pause_of_this_process_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watcher_of(1)
    times_s = iter((100.0, 100.5, 170.5))
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    waits = iter((False, False, True))
    watcher._end_event = SimpleNamespace(wait=lambda seconds: next(waits))  # type: ignore[assignment]
    watcher._last_answer_s, watcher._last_beat_s = 99.0, {2: 98.0}
    watcher._watch()
    assert (watcher._last_answer_s, watcher._last_beat_s) == (169.0, {2: 168.0})


# -- ends of processes ---------------------------------------------------------------------------------------------


class Exited(BaseException):
    """Replaces the end of the process, which is ``os._exit``."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of exit codes, and drop all waits for other ranks."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(watch.os, "_exit", end)
    for name in ("_GATHER_FAILURES_S", "_SHARED_ERROR_S", "_REASON_S"):
        monkeypatch.setattr(watch, name, 0.0)
    return codes


def test_the_first_rank_to_fail_reports_for_all(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    store, seen = HashStore(), list[tuple[int, Failure]]()
    for rank in (1, 2):
        watcher = watcher_of(rank, store, on_failure=lambda failure, rank=rank: seen.append((rank, failure)))
        with pytest.raises(Exited):
            watcher.fail("the rows are wrong", 4, is_own=True)
        assert store.get(f"gone/{rank}") == b"1"
    own = [Failure(rank, f"host{rank // 2}", 4, "the rows are wrong") for rank in (1, 2)]
    assert [Failure.from_json(store.get(name)) for name in ("failed", "failed/1", "failed/2")] == [own[0], *own]
    assert seen == [(1, own[0]), (2, own[0])] and exits == [4, 4]
    assert capfd.readouterr().err == "error: rank 1 (on host0): the rows are wrong\n"


def test_the_launcher_reports_for_its_ranks(exits: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    here, there = map(LauncherConnection, socket.socketpair())
    store = HashStore()
    store.set("failed", failure_of(3).to_json())
    with pytest.raises(Exited):
        watcher_of(1, store, launcher=here).fail("no memory", 7, is_own=True)
    failure = Failure(1, "host0", 7, "no memory")
    assert there.receive(10.0) == [{"failed": failure.to_json()}]
    assert exits == [7] and capfd.readouterr().err == "" and not store.check(["gone/1"])
    here.close()
    there.close()


def test_a_broken_collective_waits_for_its_reason(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, waits = watcher_of(1), list[float]()
    watcher._end_event = SimpleNamespace(wait=waits.append)  # type: ignore[assignment]
    with pytest.raises(Exited):
        watcher.fail("connection reset", 1, is_own=False)
    assert waits == [3.5] and watcher._limit_s == 2.5 and watcher._timeout_s == 60.0
    watcher = watcher_of(2)
    watcher.set_timeout(1.5)
    watcher._end_event = SimpleNamespace(wait=waits.append)  # type: ignore[assignment]
    with pytest.raises(Exited):
        watcher.fail("connection reset", 1, is_own=False)
    assert (watcher._limit_s, watcher._timeout_s) == (1.5, 1.5)


@pytest.mark.parametrize(("failed_rank", "reporter"), [(0, 1), (2, 0), (3, 0), (-1, 0)])
def test_the_lowest_running_rank_reports_if_the_store_is_lost(failed_rank: int, reporter: int) -> None:
    watchers = [watcher_of(rank) for rank in range(4)]
    for watcher in watchers:
        watcher._store_error = OSError("connection reset")
    found = [watcher._should_report(failure_of(failed_rank)) for watcher in watchers]
    assert found == [rank == reporter for rank in range(4)]


def test_one_rank_claims_the_report() -> None:
    store = HashStore()
    watchers = [watcher_of(rank, store) for rank in (2, 1, 3)]
    assert [watcher._should_report(failure_of(0)) for watcher in watchers] == [True, False, False]
    assert [watcher._should_report(failure_of(0)) for watcher in watchers] == [True, False, False]


def test_rank_0_ends_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, slept = HashStore(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) <= 3:
            store.set(f"gone/{len(slept)}", "1")

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: float(len(slept)), sleep=sleep))
    for rank, num_waits in ((1, 0), (0, 3)):
        watcher = watcher_of(rank, store)
        watcher.finish()
        assert store.check([f"gone/{rank}"]) and watcher._end_event.is_set() and len(slept) == num_waits
    late = watcher_of(0, HashStore())
    late.set_timeout(5.0)
    late.finish()
    assert len(slept) == 3 + 5
