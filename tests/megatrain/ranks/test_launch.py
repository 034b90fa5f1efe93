"""The launcher describes the world to its ranks, forwards signals, and selects the failure to report."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.ranks import launch as launch_module
from megatrain.ranks.affinity import rank_cores
from megatrain.ranks.launch import _Launcher, _Rank, launch
from megatrain.ranks.watch import Failure, LauncherConnection

HOST = socket.gethostname()
CODE_7 = "ended with exit code 7, without a message"
PROGRAM = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MEGATRAIN_TIER_LAUNCHED")
environment = [os.environ[name] for name in names]
for message in ({"environment": environment, "leads": os.getsid(0) == os.getpid()}, {"done": 0}):
    os.write(0, json.dumps(message).encode() + b"\\n")
print("rank", os.environ["RANK"])
sys.exit(75 if os.environ["RANK"] == "0" else 0)
"""


@pytest.mark.parametrize("threads", [None, 3])
def test_ranks_get_places_and_rank_0_decides_the_exit_code(
    threads: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    messages: list[Any] = []
    code = launch(
        [sys.executable, "-c", PROGRAM], 2, threads=threads, on_failure=messages.append, on_message=messages.append
    )
    num_threads = str(threads or min(len(rank_cores(rank, 2)) for rank in range(2)))
    environments = [[str(rank), "2", str(rank), "2", num_threads, "1"] for rank in range(2)]
    assert sorted(messages, key=json.dumps) == [{"environment": each, "leads": True} for each in environments]
    assert code == 75 and capfd.readouterr().out == "rank 0\n"  # other ranks print nothing


class FakeProcess:
    """Process of a rank, running if its exit code is None."""

    def __init__(self, code: int | None) -> None:
        self.code, self.signals = code, list[int]()

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)


@contextmanager
def launcher_of(*codes: int | None) -> Iterator[tuple[Any, list[FakeProcess], list[LauncherConnection], list[Any]]]:
    """Yield a launcher, its processes, the ranks' ends of the connections, and the messages to the caller."""
    messages: list[Any] = []
    launcher = _Launcher(len(codes), messages.append, messages.append)
    ends: list[LauncherConnection] = []
    for rank, code in enumerate(codes):
        here, there = map(LauncherConnection, socket.socketpair())
        launcher._ranks.append(_Rank(rank, FakeProcess(code), here))  # type: ignore[arg-type]
        ends.append(there)
    yield launcher, [each.process for each in launcher._ranks], ends, messages
    for connection in (*ends, *(each.line for each in launcher._ranks)):
        connection.close()


def own(rank: int, message: str = "no rows") -> Failure:
    return Failure(rank, "there", 10 + rank, message)


@pytest.mark.parametrize(
    ("codes", "failures", "options", "expected"),
    [
        ((4, 4, None), {2: own(2), 1: own(1)}, {}, own(1)),
        ((4, 4, 4), {2: own(2), 1: own(1), 0: own(0)}, {}, Failure(0, "there", 10, "no rows", is_shared=True)),
        ((4, 4, 7), {0: own(2), 1: own(2)}, {}, Failure(2, HOST, 7, CODE_7)),
        ((4, None, None), {0: own(2)}, {}, own(2)),
        ((0, -11, None), {}, {"done": {0}}, Failure(1, HOST, 1, "was ended by SIGSEGV")),
        ((0, -15, None), {}, {"done": {0}}, Failure(1, HOST, 1, "was ended by SIGTERM")),
        ((0, -15, None), {}, {"done": {0}, "interrupted": True}, Failure(-1, HOST, 1, "interrupted")),
        ((0, -2, None), {}, {"done": {0}, "interrupted": True}, Failure(-1, HOST, 1, "interrupted")),
        ((0, -1, None), {}, {"done": {0}, "interrupted": True}, Failure(-1, HOST, 1, "interrupted")),
        ((0, 7, None), {}, {"done": {0}, "interrupted": True}, Failure(1, HOST, 7, CODE_7)),
        ((None, None, None), {}, {"forced": True}, Failure(-1, HOST, 1, "interrupted")),
        ((None, 4, None), {1: own(1)}, {"forced": True}, own(1)),
    ],
)  # fmt: skip
def test_a_rank_s_own_failure_comes_first(
    codes: tuple[int | None, ...], failures: dict[int, Failure], options: dict[str, Any], expected: Failure
) -> None:
    with launcher_of(*codes) as (launcher, *_):
        for rank in launcher._ranks:
            rank.failure, rank.is_done = failures.get(rank.rank), rank.rank in options.get("done", ())
        launcher._was_interrupted = options.get("interrupted", False)
        launcher._force_s = 0.0 if options.get("forced") else None
        assert launcher._failure() == expected


def test_messages_of_ranks_are_handled() -> None:
    with launcher_of(None, None, None) as (launcher, _, ends, messages):
        ends[0].send(port=29_500)
        ends[1].send(failed=own(1).to_json())
        ends[1].send(failed=own(2).to_json())
        ends[2].send(status="step 1")
        ends[2].send(done=75)
        ends[2].close()
        for _ in range(3):
            launcher._listen(0.0)
        assert [rank.failure for rank in launcher._ranks] == [None, own(1), None]
        assert [rank.is_done for rank in launcher._ranks] == [False, False, True]
        assert [rank.is_open for rank in launcher._ranks] == [True, True, False]
        assert messages == [{"status": "step 1"}]
        assert [each.receive(0.0) for each in ends[:2]] == [[{"port": 29_500}]] * 2


def test_signals_reach_rank_0_and_a_second_stop_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher_of(None, None) as (launcher, processes, *_):
        now_s = [0.0]
        monkeypatch.setattr(launch_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        states = []
        for at_s, signum in (
            (9.0, signal.SIGUSR1),
            (10.0, signal.SIGTERM),
            (10.4, signal.SIGINT),  # the same stop, forwarded by a parent process
            (10.5, signal.SIGINT),
            (11.0, signal.SIGTERM),
        ):
            now_s[0] = at_s
            launcher._forward_signal(signum, None)
            states.append((launcher._was_interrupted, launcher._stopped_s, launcher._force_s))
        assert states == [(False, None, None), *[(True, 10.0, None)] * 2, *[(True, 10.0, 13.5)] * 2]
        expected = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
        assert [process.signals for process in processes] == [expected, []]
        found = []
        for now_s[0] in (13.5, 13.6):
            found.append(launcher._is_forced())
        assert found == [False, True]
    with launcher_of(0, None) as (other, (process, _), *_):
        other._forward_signal(signal.SIGHUP, None)
        assert other._was_interrupted and not process.signals and not other._is_forced()
