"""Launcher of a run's ranks on this host. It forwards signals and returns the run's exit code.

torchrun's agent is not used: it gives a run only 30 s to save after SIGTERM, prints a report with its own format, and
replaces exit code 75 with 1. The launcher does not import torch, so that it needs little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatrain.ranks.affinity import rank_cores
from megatrain.ranks.watch import LAUNCHED_VARIABLE, Failure, LauncherConnection, describe_exit

__all__ = ["launch"]

_POLL_S = 0.05
#: Seconds within which ranks must exit after receiving a failure. Rank 0 uses them to write the run's status.
_EXIT_GRACE_S = 2.0
#: Seconds to wait for more ranks to fail for the same reason, because only the lowest rank's message is reported.
_GATHER_FAILURES_S = 0.5
#: Seconds from a second stop request until the ranks are killed, because they can be blocked in a collective.
_SECOND_STOP_S = 3.0
#: Seconds within which a second signal counts as the same stop, because a parent process can also forward the signal.
_SAME_STOP_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_FORWARDED_SIGNALS = (*_STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class _Rank:
    """A rank that has been started.

    Attributes:
        is_done: Whether the rank has announced that it ended normally.
        is_open: Whether the rank can still send messages.
    """

    rank: int
    process: subprocess.Popen[bytes]
    line: LauncherConnection
    failure: Failure | None = None
    is_done: bool = False
    is_open: bool = True

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None


def launch(
    command: Sequence[str],
    size: int,
    *,
    threads: int | None = None,
    on_failure: Callable[[Failure], None],
    on_message: Callable[[Mapping[str, Any]], None] = lambda message: None,
) -> int:
    """Run a command as the ranks of a run, in several processes on this host. Wait until all processes have ended.

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 are forwarded to rank 0, which informs the other ranks after the step. Each
    rank has a separate session, so that it does not receive Ctrl-C directly. If a rank fails, all ranks end. Ranks that
    do not exit in time are killed.

    Args:
        size: Number of ranks.
        threads: Number of threads for the libraries of each rank, or None to divide the cores equally.
        on_failure: Called once with the failure to report to the user.
        on_message: Called with each message of a rank that the launcher does not handle itself.

    Returns:
        Exit code of rank 0, or of the failure.
    """
    launcher = _Launcher(size, on_failure, on_message)
    with launcher.signals():
        try:
            launcher.start(command, threads)
            return launcher.wait()
        finally:
            launcher.kill()


class _Launcher:
    def __init__(
        self, size: int, on_failure: Callable[[Failure], None], on_message: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._size, self._on_failure, self._on_message = size, on_failure, on_message
        self._ranks: list[_Rank] = []
        self._stopped_s: float | None = None
        self._force_s: float | None = None
        self._was_interrupted = False

    @contextlib.contextmanager
    def signals(self) -> Any:
        """Forward signals within the context. If SIGHUP is already ignored (``nohup``), it stays ignored."""
        old_handlers = {
            signum: signal.signal(signum, self._forward_signal)
            for signum in _FORWARDED_SIGNALS
            if signal.getsignal(signum) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for signum, handler in old_handlers.items():
                signal.signal(signum, handler)

    def start(self, command: Sequence[str], threads: int | None) -> None:
        """Start the ranks."""
        # Use the same number of threads on all ranks, because it affects rounding on a CPU.
        threads = threads or min(len(rank_cores(rank, self._size)) for rank in range(self._size))
        for rank in range(self._size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self._size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self._size),
                "OMP_NUM_THREADS": str(threads),
                LAUNCHED_VARIABLE: "1",
            }
            launcher_socket, rank_socket = socket.socketpair()
            with rank_socket:
                process = subprocess.Popen(
                    command,
                    stdin=rank_socket.fileno(),
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            self._ranks.append(_Rank(rank, process, LauncherConnection(launcher_socket)))

    def wait(self) -> int:
        """Wait until all ranks have ended. Return the run's exit code."""
        while True:
            # First check which ranks have ended, then receive all messages that they sent before they ended.
            ended_ranks = [rank for rank in self._ranks if rank.has_ended]
            self._listen(0.0 if len(ended_ranks) == self._size else _POLL_S)
            has_died = any(rank.failure is None and not rank.is_done for rank in ended_ranks)
            if has_died or self._is_forced() or any(rank.failure is not None for rank in self._ranks):
                return self._end()
            if len(ended_ranks) == self._size:
                return self._ranks[0].process.returncode

    def kill(self) -> None:
        """Kill all ranks that are still running, and close the connections to all ranks."""
        for rank in self._ranks:
            if not rank.has_ended:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.line.close()

    def _listen(self, timeout_s: float) -> None:
        """Receive messages from ranks for at most ``timeout_s`` seconds."""
        ready, _, _ = select.select([rank.line for rank in self._ranks if rank.is_open], [], [], timeout_s)
        for rank in self._ranks:
            while rank.is_open and rank.line in ready:
                messages = rank.line.receive(0.0)
                rank.is_open = messages is not None
                for message in messages or ():
                    self._handle_message(rank, message)
                if not messages:
                    break

    def _handle_message(self, rank: _Rank, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            rank.failure = rank.failure or Failure.from_json(message["failed"])
        elif "done" in message:
            rank.is_done = True
        elif "port" in message:
            for receiver in self._ranks:
                receiver.line.send(port=message["port"])
        else:
            self._on_message(message)

    def _is_forced(self) -> bool:
        return self._force_s is not None and time.monotonic() > self._force_s

    def _end(self) -> int:
        """End all ranks after one has failed. Report the failure and return its exit code."""
        end_s = time.monotonic() + _GATHER_FAILURES_S
        while time.monotonic() < end_s and not all(rank.has_ended for rank in self._ranks):
            self._listen(_POLL_S)
        failure = self._failure()
        for rank in self._ranks:
            rank.line.send(failed=failure.to_json())
        end_s = time.monotonic() + _EXIT_GRACE_S
        while time.monotonic() < end_s and not all(rank.has_ended for rank in self._ranks):
            self._listen(_POLL_S)
        self.kill()
        self._on_failure(failure)
        return failure.exit_code

    def _failure(self) -> Failure:
        """Return the failure to report: a rank's own, else an interrupt or unexpected exit, else any received one."""
        host = socket.gethostname()
        failures = {rank.rank: rank.failure for rank in self._ranks if rank.failure and rank.failure.rank == rank.rank}
        if failures:
            return Failure.select_reported(failures, self._size)
        if self._is_forced():
            return Failure(-1, host, 1, "interrupted")
        for rank in self._ranks:
            code = rank.process.poll()
            if code is None or rank.failure is not None or rank.is_done:
                continue
            if self._was_interrupted and code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
                return Failure(-1, host, 1, "interrupted")
            return Failure(rank.rank, host, code if code > 0 else 1, describe_exit(code))
        return next(rank.failure for rank in self._ranks if rank.failure)

    def _forward_signal(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if signum in _STOP_SIGNALS:
            self._was_interrupted = True
            if self._stopped_s is None:
                self._stopped_s = now_s
            elif now_s - self._stopped_s < _SAME_STOP_S:
                return
            elif self._force_s is None:
                self._force_s = now_s + _SECOND_STOP_S
        if signum == signal.SIGHUP:
            self._was_interrupted = True
        if self._ranks and not self._ranks[0].has_ended:
            self._ranks[0].process.send_signal(signum)
