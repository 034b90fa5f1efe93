"""Ranks watch each other: when one fails, or falls silent, all end within seconds, with one message that names it.

A rank that waits in a collective waits forever for one that is gone, and a kernel of NCCL cannot be interrupted: so
threads watch, and leave by ``os._exit``. Nothing is lost by it: what a run continues from survives a ``SIGKILL``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from megatrain.ranks.world import World

__all__ = ["LAUNCHED_VARIABLE", "Failure", "LauncherLine", "Watcher", "describe_end"]

#: Environment variable of ranks whose stdin is a socket of their launcher.
LAUNCHED_VARIABLE = "MEGATRAIN_TIER_LAUNCHED"
_BEAT_S = 0.5
_LOOK_S = 0.1
#: A rank whose collective broke waits so long for the reason: it says more than "connection reset".
_REASON_S = 2.0
#: Beats that stay away for so long after a collective broke name the rank that broke it.
_BROKEN_S = 2.5
#: Ranks that fail for the same reason do so within this time; of these the lowest one's message is told.
_TOGETHER_S = 0.5
#: A store that is alive answers within this time.
_ANSWER_S = 0.5
#: Rank 0 waits so long for the others to end before it, as what they read may be in its memory.
_LEAVE_S = 3.0
#: A rank that finds a wrong config waits so long for rank 0 to find it too.
_ALIKE_S = 2.0
#: Exit codes of a wrong config, of what does not fit, and of unusable data.
_OF_ALL = (2, 3, 4)
_FAILED, _TOLD, _NOTICES = "failed", "told", "notices"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run of several ranks ends.

    Attributes:
        rank: the one that failed; -1: no single one.
        host: Host on which that rank ran.
        exit_code: Status with which all processes end.
        message: for the user, without the rank.
        is_shared: all ranks failed with this message.
    """

    rank: int
    host: str
    exit_code: int
    message: str
    is_shared: bool = False

    def __str__(self) -> str:
        """Return the message as it is told. What is wrong for rank 0 in config, model or data is so for all ranks."""
        if self.is_shared or self.rank < 0 or (self.rank == 0 and self.exit_code in _OF_ALL):
            return self.message
        return f"rank {self.rank} (on {self.host}): {self.message}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    @classmethod
    def told_of(cls, failures: Mapping[int, Failure], size: int) -> Failure:
        """Return which of the failures of several ranks is told: the lowest one's.

        Args:
            failures: by the rank that told of it.
            size: number of ranks.
        """
        first = failures[min(failures)]
        alike = [each for each in failures.values() if each.message == first.message]
        is_shared = len(alike) == size or (first.rank == 0 and len(alike) > 1)
        return cls(first.rank, first.host, first.exit_code, first.message, is_shared)


def describe_end(code: int) -> str:
    """Return how a process ended whose exit code is all that is known."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        advice = ". The kernel does so when memory is used up: dmesg says" if name == "SIGKILL" else ""
        return f"was ended by {name}{advice}"
    return f"ended with exit code {code}, without a message"


class LauncherLine:
    """The connection of a rank with the launcher that started it: lines of JSON in both directions. Thread-safe.

    It comes as the rank's stdin: a socket without a name that others could open, and which is closed when either ends.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._rest = b""

    @classmethod
    def of_environment(cls) -> LauncherLine | None:
        """Return the line of a rank that a launcher started, None elsewhere. Its stdin is empty from now on."""
        if os.environ.pop(LAUNCHED_VARIABLE, None) is None:
            return None
        connection = socket.socket(fileno=os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls(connection)

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message; one that has nobody left to read it is lost."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[dict[str, object]] | None:
        """Return the messages that have come, after waiting for some bytes; None: the other end is closed."""
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


class Watcher:
    """Watches the other ranks from threads of its own, and ends this process when one of them is gone.

    Args:
        world: Place of this rank among all.
        store: a connection of its own, at which ranks meet.
        timeout_s: a rank that has not been heard of for so long is taken for dead.
        line: to the launcher, which then tells of failures in place of the ranks.
        on_notice: called on rank 0, in a thread, with the notices of others.
        on_failure: called in a thread before this process ends for a failure, with its message and exit code.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        *,
        timeout_s: float,
        line: LauncherLine | None = None,
        on_notice: Callable[[str], None] = lambda text: None,
        on_failure: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        self._world, self._store, self._timeout_s, self._line = world, store, timeout_s, line
        self.on_notice, self.on_failure = on_notice, on_failure
        self._over = threading.Event()
        self._leaving = threading.Lock()
        self._beats: dict[int, bytes] = {}
        self._seen_s: dict[int, float] = {}
        self._gone: set[int] = set()  # ended as they should
        self._answered_s = time.monotonic()
        self._limit_s = timeout_s
        self._lost_store = False
        self._num_notices = 0
        self._failure: Failure | None = None
        self._tells: bool | None = None  # the message to the user, once it is decided
        self._threads = [
            threading.Thread(target=target, name=f"ranks-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("watch", self._watch))
        ]
        if line is not None:
            self._threads.append(threading.Thread(target=self._listen, name="ranks-launcher", daemon=True))

    def set_timeout(self, timeout_s: float) -> None:
        """Set after how long a silent rank is taken for dead."""
        self._timeout_s = self._limit_s = timeout_s

    def start(self) -> None:
        """Begin to watch. Ranks that have not started yet are waited for elsewhere."""
        for thread in self._threads:
            thread.start()

    # -- told by this rank ---------------------------------------------------------------------------------------

    def notify(self, text: str) -> None:
        """Have rank 0 tell the user something, with the name of this rank. From any thread."""
        if self._world.is_first:
            self.on_notice(text)
            return
        with contextlib.suppress(Exception):  # whoever cannot reach the store is about to end
            number = self._store.add(_NOTICES, 1)
            self._store.set(f"notice/{number}", f"rank {self._world.rank}: {text}")

    def fail(self, message: str, exit_code: int, *, is_own: bool) -> NoReturn:
        """End all ranks because this one failed.

        Args:
            exit_code: Status with which all processes end.
            is_own: the error is one of this rank's own. Else it may be what the end of another looks like from here, a
                collective that broke: then the reason is waited for.
        """
        if not is_own:
            self._limit_s = min(self._limit_s, _BROKEN_S)
            self._over.wait(max(_REASON_S, _BROKEN_S + 1.0))  # the watching thread ends this process if it finds one
        mine = Failure(self._world.rank, self._world.host, exit_code, message)
        with contextlib.suppress(Exception):
            self._store.set(f"{_FAILED}/{self._world.rank}", mine.to_json())
            # What is wrong in config, model or data is so for all ranks, mostly: rank 0 is about to fail as well, and
            # its message is told.
            end_s = time.monotonic() + (_ALIKE_S if exit_code in _OF_ALL else 0.0)
            while not self._store.check([f"{_FAILED}/0"]) and time.monotonic() < end_s:
                time.sleep(_LOOK_S / 2)
            self._store.compare_set(_FAILED, "", mine.to_json())
            mine = mine if self._line is not None else self._told()
        self._leave(mine)

    def finish(self) -> None:
        """End the watch, as this rank is done. Rank 0, which may serve the store, waits until all others are."""
        with contextlib.suppress(Exception):
            self._store.set(f"gone/{self._world.rank}", "1")
            if self._world.is_first:
                names = [f"gone/{rank}" for rank in range(self._world.size)]
                end_s = time.monotonic() + self._timeout_s
                while not self._store.check(names) and time.monotonic() < end_s:
                    time.sleep(_LOOK_S / 5)
        self._over.set()

    # -- the threads ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send heartbeats. The store may never answer if the process that serves it is stopped."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        number, next_s = 0, 0.0
        while not self._over.is_set():
            try:
                if time.monotonic() >= next_s:
                    number, next_s = number + 1, time.monotonic() + _BEAT_S
                    self._store.set(f"beat/{self._world.rank}", str(number))
                    for rank in others:
                        self._look_at(rank)
                if self._store.check([_FAILED]):
                    self._failure = self._told()
                    return
                if self._world.is_first:
                    self._take_notices()
            except Exception:
                self._lost_store = True
                return
            self._answered_s = time.monotonic()
            self._over.wait(_LOOK_S)

    def _look_at(self, rank: int) -> None:
        if not self._store.check([f"beat/{rank}"]):
            return
        beat = self._store.get(f"beat/{rank}")
        if beat != self._beats.get(rank):
            self._beats[rank], self._seen_s[rank] = beat, time.monotonic()
        elif rank not in self._gone and self._store.check([f"gone/{rank}"]):
            self._gone.add(rank)

    def _told(self) -> Failure:
        """Return the failure that is told, of all that ranks have written."""
        first = Failure.from_json(self._store.get(_FAILED))
        self._tells = self._claim()
        time.sleep(0.0 if self._line is not None else _TOGETHER_S)
        names = [f"{_FAILED}/{rank}" for rank in range(self._world.size)]
        written = [name for name in names if self._store.check([name])]
        failures = {each.rank: each for each in (Failure.from_json(self._store.get(name)) for name in written)}
        return Failure.told_of(failures, self._world.size) if failures else first

    def _take_notices(self) -> None:
        num_notices = self._store.add(_NOTICES, 0)
        while self._num_notices < num_notices and self._store.check([f"notice/{self._num_notices + 1}"]):
            self._num_notices += 1
            self.on_notice(self._store.get(f"notice/{self._num_notices}").decode())

    def _watch(self) -> None:
        """Judge what the other threads find."""
        before_s = time.monotonic()
        while not self._over.wait(_LOOK_S):
            now_s = time.monotonic()
            if now_s - before_s > 5 * _LOOK_S:
                # This process was stopped itself, or got no time: what it did not see is nobody's silence.
                self._answered_s += now_s - before_s
                self._seen_s = {rank: seen_s + now_s - before_s for rank, seen_s in self._seen_s.items()}
            before_s = now_s
            failure = self._failure or self._find(now_s)
            if failure is not None:
                self._leave(failure)

    def _find(self, now_s: float) -> Failure | None:
        """Return what is wrong with another rank."""
        if self._lost_store:
            return self._without_store("has ended without a message")
        if now_s - self._answered_s > self._limit_s:
            return self._without_store(f"has not answered for {now_s - self._answered_s:.0f} s")
        for rank, seen_s in self._seen_s.items():
            if rank not in self._gone and now_s - seen_s > self._limit_s:
                silent = Failure(rank, self._host_of(rank), 1, self._silence(now_s - seen_s))
                self._ask(partial(self._store.compare_set, _FAILED, "", silent.to_json()))
                return silent
        return None

    def _ask(self, question: Callable[[], bytes], timeout_s: float = _ANSWER_S) -> bytes | None:
        """Return the store's answer; None where none comes: it may be served by the rank that is stopped."""
        answers: list[bytes] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                answers.append(question())

        thread = threading.Thread(target=ask, name="ranks-ask", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return answers[0] if answers else None

    def _silence(self, seconds: float) -> str:
        if self._limit_s < self._timeout_s:
            return "has ended without a message"
        return f"has not been heard of for {seconds:.0f} s (distributed.timeout): its process is stopped, or is gone"

    def _without_store(self, what: str) -> Failure:
        if self._world.is_first:
            return Failure(
                -1, "", 1, "the store at which the ranks meet is gone: the program that started them has ended"
            )
        return Failure(0, self._host_of(0), 1, what)

    def _host_of(self, rank: int) -> str:
        if self._world.num_hosts == 1 or rank // self._world.local_size == self._world.host_number:
            return self._world.host
        name = self._ask(partial(self._store.get, f"host/{rank}"))
        return "another host" if name is None else name.decode()

    def _listen(self) -> None:
        """Take what the launcher says; leave where it has ended."""
        assert self._line is not None
        while not self._over.is_set():
            messages = self._line.receive(_LOOK_S)
            if messages is None:
                if not self._over.is_set():
                    self._failure = Failure(-1, "", 1, "the launcher of the ranks has ended")
                return
            for message in messages:
                if "failed" in message:
                    self._failure = Failure.from_json(str(message["failed"]))

    # -- the end -------------------------------------------------------------------------------------------------

    def _leave(self, failure: Failure) -> NoReturn:
        """End this process. Whichever thread comes second waits here until the first has."""
        with self._leaving:
            with contextlib.suppress(Exception):
                self.on_failure(failure)
            if self._line is not None:
                self._line.send(failed=failure.to_json())
            elif self._is_teller(failure):
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                with contextlib.suppress(OSError):
                    os.write(2, f"error: {failure}\n".encode(errors="replace"))
            if self._line is None:
                self._ask(partial(self._see_off, failure), _LEAVE_S)
            os._exit(failure.exit_code)

    def _see_off(self, failure: Failure) -> bytes:
        """On rank 0, which may serve the store, wait until the others have read in it why they end."""
        self._store.set(f"gone/{self._world.rank}", "1")
        others = set(range(self._world.size)) - {self._world.rank, failure.rank}
        while self._world.is_first and not self._store.check([f"gone/{rank}" for rank in others]):
            time.sleep(_LOOK_S / 5)
        return b""

    def _claim(self) -> bool:
        """Return whether this rank is the first that wants to tell the user."""
        mine = str(self._world.rank)
        return bool(self._store.compare_set(_TOLD, "", mine) == mine.encode())

    def _is_teller(self, failure: Failure) -> bool:
        """Return whether this rank tells the user: the first; without an answer of the store the lowest alive."""
        if self._tells is None and not self._lost_store:
            answer = self._ask(lambda: b"1" if self._claim() else b"")
            self._tells = None if answer is None else bool(answer)
        return self._world.rank == (1 if failure.rank == 0 else 0) if self._tells is None else self._tells
