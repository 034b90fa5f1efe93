"""Watchers that end all ranks within seconds, with one message, if a rank fails or stops responding.

A rank in a collective waits forever for a rank that has ended, and NCCL kernels cannot be interrupted. Therefore,
threads watch the other ranks and end the process with ``os._exit``. This is safe, because checkpoints survive SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
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

__all__ = ["LAUNCHED_VARIABLE", "Failure", "LauncherConnection", "Watcher", "describe_exit"]

_log = logging.getLogger(__name__)
#: Environment variable that marks ranks whose stdin is a socket to their launcher.
LAUNCHED_VARIABLE = "MEGATRAIN_TIER_LAUNCHED"
_BEAT_S = 0.5
_POLL_S = 0.1
#: Seconds to wait for the reason why a collective broke, which is clearer than "connection reset".
_REASON_S = 2.0
#: Seconds without heartbeats after which a rank is reported as the cause of a broken collective.
_BROKEN_S = 2.5
#: Seconds to wait for more ranks to fail for the same reason, because only the lowest rank's message is reported.
_GATHER_FAILURES_S = 0.5
#: Seconds within which the store answers if its process is running.
_ANSWER_S = 0.5
#: Seconds that rank 0 waits for all other ranks to end first, because it may serve the store that they read.
_EXIT_GRACE_S = 3.0
#: Seconds to wait for rank 0 to find the same error in the config, the model or the data.
_SHARED_ERROR_S = 2.0
#: Exit codes for an invalid config, for a model that does not fit, and for unusable data.
_SHARED_EXIT_CODES = (2, 3, 4)
_FAILED, _REPORTED, _NOTICES = "failed", "reported", "notices"


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure that ends all ranks of a run.

    Attributes:
        rank: Number of the failed rank, or -1 if no particular rank failed.
        host: Host of the failed rank.
        exit_code: Exit code of all processes.
        message: Message for the user, without the rank.
        is_shared: Whether the failure applies to all ranks.
    """

    rank: int
    host: str
    exit_code: int
    message: str
    is_shared: bool = False

    def __str__(self) -> str:
        """Return the message to report. It names the rank, unless the failure applies to all ranks."""
        if self.is_shared or self.rank < 0 or (self.rank == 0 and self.exit_code in _SHARED_EXIT_CODES):
            return self.message
        return f"rank {self.rank} (on {self.host}): {self.message}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    @classmethod
    def select_reported(cls, failures: Mapping[int, Failure], size: int) -> Failure:
        """Return the failure to report: the lowest rank's. Mark it as shared if it seems to apply to all ranks.

        Args:
            failures: Failures, by the rank that reported each failure.
            size: Number of ranks.
        """
        lowest = failures[min(failures)]
        matches = [failure for failure in failures.values() if failure.message == lowest.message]
        is_shared = len(matches) == size or (lowest.rank == 0 and len(matches) > 1)
        return cls(lowest.rank, lowest.host, lowest.exit_code, lowest.message, is_shared)


def describe_exit(code: int) -> str:
    """Return text that describes how a process ended, given its exit code."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        advice = ". The kernel does so when memory is used up: see dmesg" if name == "SIGKILL" else ""
        return f"was ended by {name}{advice}"
    return f"ended with exit code {code}, without a message"


class LauncherConnection:
    """Connection between a rank and its launcher. Both send lines of JSON. Thread-safe.

    The connection is the rank's stdin, which is an unnamed socket. No other process can open it. It is closed when
    either side ends.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._buffer = b""

    @classmethod
    def from_environment(cls) -> LauncherConnection | None:
        """Return the connection to the launcher, or None if there is none. Replace stdin with an empty file."""
        if os.environ.pop(LAUNCHED_VARIABLE, None) is None:
            return None
        connection = socket.socket(fileno=os.dup(0))
        null_fd = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null_fd, 0)
        os.close(null_fd)
        return cls(connection)

    def fileno(self) -> int:
        """Return the file descriptor, for ``select``."""
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message. The message is lost if the other end is closed."""
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[dict[str, object]] | None:
        """Wait for data. Return the messages that have arrived, or None if the other end is closed."""
        try:  # use select, because a socket timeout would also apply to other threads' sends
            if not select.select([self._connection], [], [], timeout_s)[0]:
                return []
            data = self._connection.recv(1 << 16)
        except (OSError, ValueError):  # ValueError: this end is closed
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end of the connection."""
        self._connection.close()


class Watcher:
    """Threads that watch the other ranks and end this process if another rank fails.

    Args:
        world: Position of this rank among all ranks.
        store: Connection to the store at which the ranks meet. Must not be used for anything else.
        timeout_s: Time without a heartbeat after which a rank is considered dead.
        launcher: Connection to the launcher. If it is given, the launcher reports failures instead of the ranks.
        on_notice: Called on rank 0 with notices from other ranks, on one of the watcher's threads.
        on_failure: Called with the failure before it ends this process, on one of the watcher's threads.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        *,
        timeout_s: float,
        launcher: LauncherConnection | None = None,
        on_notice: Callable[[str], None] = lambda text: None,
        on_failure: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        self._world, self._store, self._timeout_s, self._launcher = world, store, timeout_s, launcher
        self.on_notice, self.on_failure = on_notice, on_failure
        self._end_event = threading.Event()
        self._exit_lock = threading.Lock()
        self._beats: dict[int, bytes] = {}
        self._last_beat_s: dict[int, float] = {}
        self._finished_ranks: set[int] = set()  # ranks that ended normally
        self._last_answer_s = time.monotonic()
        self._limit_s = timeout_s
        self._store_error: Exception | None = None  # error after which the store is unusable
        self._num_notices = 0
        self._failure: Failure | None = None
        self._is_reporter: bool | None = None  # whether this rank reports to the user, or None if undecided
        self._threads = [
            threading.Thread(target=target, name=f"ranks-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("watch", self._watch))
        ]
        if launcher is not None:
            self._threads.append(threading.Thread(target=self._listen, name="ranks-launcher", daemon=True))

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time without a heartbeat after which a rank is considered dead."""
        self._timeout_s = self._limit_s = timeout_s

    def start(self) -> None:
        """Start the threads. The watcher does not detect ranks that never start; the caller must wait for them."""
        for thread in self._threads:
            thread.start()

    # -- reports of this rank ------------------------------------------------------------------------------------

    def notify(self, text: str) -> None:
        """Show a message to the user through rank 0, with this rank's number unless it is 0. Thread-safe."""
        if self._world.is_first:
            self.on_notice(text)
            return
        with contextlib.suppress(Exception):  # if the store is unreachable, this rank is about to end
            index = self._store.add(_NOTICES, 1)
            self._store.set(f"notice/{index}", f"rank {self._world.rank}: {text}")

    def fail(self, message: str, exit_code: int, *, is_own: bool) -> NoReturn:
        """End all ranks because this rank failed. Never returns.

        Args:
            exit_code: Exit code of all processes.
            is_own: Whether the error certainly arose on this rank. If False, it may come from a collective that broke
                when another rank ended, so this rank first waits for the reason.
        """
        if not is_own:
            self._limit_s = min(self._limit_s, _BROKEN_S)
            self._end_event.wait(max(_REASON_S, _BROKEN_S + 1.0))  # the watch thread may end the process first
        failure = Failure(self._world.rank, self._world.host, exit_code, message)
        with contextlib.suppress(Exception):
            self._store.set(f"{_FAILED}/{self._world.rank}", failure.to_json())
            # An error in config, model or data usually occurs on all ranks. Wait for rank 0, whose message is reported.
            end_s = time.monotonic() + (_SHARED_ERROR_S if exit_code in _SHARED_EXIT_CODES else 0.0)
            while not self._store.check([f"{_FAILED}/0"]) and time.monotonic() < end_s:
                time.sleep(_POLL_S / 2)
            self._store.compare_set(_FAILED, "", failure.to_json())
            failure = failure if self._launcher is not None else self._reported_failure()
        self._end_process(failure)

    def finish(self) -> None:
        """Stop watching because the run ended normally. Rank 0 may serve the store, so it waits for all other ranks."""
        with contextlib.suppress(Exception):
            self._store.set(f"gone/{self._world.rank}", "1")
            if self._world.is_first:
                names = [f"gone/{rank}" for rank in range(self._world.size)]
                end_s = time.monotonic() + self._timeout_s
                while not self._store.check(names) and time.monotonic() < end_s:
                    time.sleep(_POLL_S / 5)
        self._end_event.set()

    # -- threads -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send and read heartbeats. Store calls can block forever if the process that serves the store is stopped."""
        other_ranks = [rank for rank in range(self._world.size) if rank != self._world.rank]
        count, next_beat_s = 0, 0.0
        while not self._end_event.is_set():
            try:
                if time.monotonic() >= next_beat_s:
                    count, next_beat_s = count + 1, time.monotonic() + _BEAT_S
                    self._store.set(f"beat/{self._world.rank}", str(count))
                    for rank in other_ranks:
                        self._check_rank(rank)
                if self._store.check([_FAILED]):
                    self._failure = self._reported_failure()
                    return
                if self._world.is_first:
                    self._take_notices()
            except Exception as error:
                self._store_error = error
                _log.debug("rank %d has lost the store", self._world.rank, exc_info=error)
                return
            self._last_answer_s = time.monotonic()
            self._end_event.wait(_POLL_S)

    def _check_rank(self, rank: int) -> None:
        if not self._store.check([f"beat/{rank}"]):
            return
        beat = self._store.get(f"beat/{rank}")
        if beat != self._beats.get(rank):
            self._beats[rank], self._last_beat_s[rank] = beat, time.monotonic()
        elif rank not in self._finished_ranks and self._store.check([f"gone/{rank}"]):
            self._finished_ranks.add(rank)

    def _reported_failure(self) -> Failure:
        """Select the failure to report from all failures in the store."""
        first_failure = Failure.from_json(self._store.get(_FAILED))
        self._is_reporter = self._claim_report()
        time.sleep(0.0 if self._launcher is not None else _GATHER_FAILURES_S)
        names = [f"{_FAILED}/{rank}" for rank in range(self._world.size)]
        reports = [Failure.from_json(self._store.get(name)) for name in names if self._store.check([name])]
        failures = {failure.rank: failure for failure in reports}
        return Failure.select_reported(failures, self._world.size) if failures else first_failure

    def _take_notices(self) -> None:
        num_notices = self._store.add(_NOTICES, 0)
        while self._num_notices < num_notices and self._store.check([f"notice/{self._num_notices + 1}"]):
            self._num_notices += 1
            self.on_notice(self._store.get(f"notice/{self._num_notices}").decode())

    def _watch(self) -> None:
        """End this process if the other threads have found a failure, or if a rank is silent for too long."""
        last_s = time.monotonic()
        while not self._end_event.wait(_POLL_S):
            now_s = time.monotonic()
            if now_s - last_s > 5 * _POLL_S:
                # This process was paused. Ignore the pause, because other ranks may have sent heartbeats meanwhile.
                self._last_answer_s += now_s - last_s
                self._last_beat_s = {rank: seen_s + now_s - last_s for rank, seen_s in dict(self._last_beat_s).items()}
            last_s = now_s
            failure = self._failure or self._find_failure(now_s)
            if failure is not None:
                self._end_process(failure)

    def _find_failure(self, now_s: float) -> Failure | None:
        """Return a failure if another rank is silent for too long or the store is lost, else None."""
        if self._store_error is not None:
            return self._store_lost_failure("has ended without a message")
        if now_s - self._last_answer_s > self._limit_s:
            return self._store_lost_failure(f"has not answered for {now_s - self._last_answer_s:.0f} s")
        for rank, seen_s in dict(self._last_beat_s).items():  # a copy, because the beat thread adds ranks
            if rank not in self._finished_ranks and now_s - seen_s > self._limit_s:
                failure = Failure(rank, self._host_of(rank), 1, self._silence_text(now_s - seen_s))
                self._query_store(partial(self._store.compare_set, _FAILED, "", failure.to_json()))
                return failure
        return None

    def _query_store(self, query: Callable[[], bytes], timeout_s: float = _ANSWER_S) -> bytes | None:
        """Return the store's answer, or None if it fails or does not answer in time."""
        answers: list[bytes] = []

        def run_query() -> None:
            with contextlib.suppress(Exception):
                answers.append(query())

        thread = threading.Thread(target=run_query, name="ranks-ask", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return answers[0] if answers else None

    def _silence_text(self, seconds: float) -> str:
        if self._limit_s < self._timeout_s:
            return "has ended without a message"
        return f"has sent no heartbeat for {seconds:.0f} s (distributed.timeout): its process is stopped or has ended"

    def _store_lost_failure(self, message: str) -> Failure:
        if self._world.is_first:
            return Failure(
                -1, "", 1, "the store at which the ranks meet is gone, because the program that started them has ended"
            )
        return Failure(0, self._host_of(0), 1, message)

    def _host_of(self, rank: int) -> str:
        if self._world.num_hosts == 1 or rank // self._world.local_size == self._world.host_index:
            return self._world.host
        name = self._query_store(partial(self._store.get, f"host/{rank}"))
        return "another host" if name is None else name.decode()

    def _listen(self) -> None:
        """Receive messages from the launcher. If the launcher has ended, record this as a failure."""
        assert self._launcher is not None
        while not self._end_event.is_set():
            messages = self._launcher.receive(_POLL_S)
            if messages is None:
                if not self._end_event.is_set():
                    self._failure = Failure(-1, "", 1, "the launcher of the ranks has ended")
                return
            for message in messages:
                if "failed" in message:
                    self._failure = Failure.from_json(str(message["failed"]))

    # -- end of the process --------------------------------------------------------------------------------------

    def _end_process(self, failure: Failure) -> NoReturn:
        """Report the failure if this rank has to, and end this process. If a second thread calls this, it blocks."""
        with self._exit_lock:
            with contextlib.suppress(Exception):
                self.on_failure(failure)
            if self._launcher is not None:
                self._launcher.send(failed=failure.to_json())
            elif self._should_report(failure):
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                with contextlib.suppress(OSError):
                    os.write(2, f"error: {failure}\n".encode(errors="replace"))
            if self._launcher is None:
                self._query_store(partial(self._announce_exit, failure), _EXIT_GRACE_S)
            os._exit(failure.exit_code)

    def _announce_exit(self, failure: Failure) -> bytes:
        """Mark this rank as gone. Rank 0 may serve the store, so it waits until all others have read the failure."""
        self._store.set(f"gone/{self._world.rank}", "1")
        other_ranks = set(range(self._world.size)) - {self._world.rank, failure.rank}
        while self._world.is_first and not self._store.check([f"gone/{rank}" for rank in other_ranks]):
            time.sleep(_POLL_S / 5)
        return b""

    def _claim_report(self) -> bool:
        """Claim the task of reporting to the user. Return whether this rank is the first to claim it."""
        rank = str(self._world.rank)
        return bool(self._store.compare_set(_REPORTED, "", rank) == rank.encode())

    def _should_report(self, failure: Failure) -> bool:
        """Return whether this rank reports a failure: the first to claim it or, if unknown, the lowest running one."""
        if self._is_reporter is None and self._store_error is None:
            answer = self._query_store(lambda: b"1" if self._claim_report() else b"")
            self._is_reporter = None if answer is None else bool(answer)
        return self._world.rank == (1 if failure.rank == 0 else 0) if self._is_reporter is None else self._is_reporter
