"""Threads with which a rank watches the other ranks."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from megatrain.ranks.watch import Failure, LauncherConnection, Watcher
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
