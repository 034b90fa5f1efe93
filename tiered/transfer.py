"""Transfer: bytes in flight. The host or a stream can wait for their arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Transfer:
    """One copy of bytes from one tier to another. A link's thread completes the transfer.

    The link keeps the transfer alive, so callers need not hold a reference. ``done`` and ``wait`` can be called from
    any thread. After ``wait`` returns, the host can use the bytes. After ``wait_stream(stream)`` returns, later work on
    ``stream`` can use the bytes; the host does not wait for the device.

    Attributes:
        skipped: whether there was no space or nothing to move. A skipped transfer is done and has moved nothing.
        event: device event recorded after the copy, or None. ``event.query()`` returns whether the copy has ended.
    """

    __slots__ = (
        "_arrived",
        "_callbacks",
        "_done",
        "_lock",
        "dst",
        "end_s",
        "error",
        "event",
        "nbytes",
        "path",
        "skipped",
        "src",
        "start_s",
    )

    def __init__(self, src: str, dst: str, nbytes: int, path: str = "", *, skipped: bool = False) -> None:
        self.src, self.dst, self.nbytes, self.path, self.skipped = src, dst, nbytes, path, skipped
        self.error: BaseException | None = None
        self.event: Any = None
        self.start_s = time.perf_counter()
        self.end_s = self.start_s
        self._lock = threading.Lock()
        self._arrived = threading.Event()  # Set when the link has finished; callbacks may still be running.
        self._done = threading.Event()
        self._callbacks: list[Callable[[Transfer], None]] = []
        if skipped:
            self._arrived.set()
            self._done.set()

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not, and all its callbacks have returned."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the transfer and its callbacks have ended. An evicted copy is then gone.

        Raises:
            TimeoutError: the transfer did not end within ``timeout_s`` seconds.
            TransferError: the transfer failed.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"transfer {self.src} -> {self.dst} of {self.nbytes} bytes not done after {timeout_s} s")
        if self.error is not None:
            raise self.error

    def wait_stream(self, stream: Any) -> None:
        """Make later work on ``stream`` wait for the bytes. The host waits until the copy is enqueued.

        The host must wait, because a stream silently ignores an event that is not yet recorded.
        """
        self._arrived.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` on the link's thread when the transfer ends, or at once if it has already ended."""
        with self._lock:
            if not self._arrived.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as ended and run the callbacks. A link calls this exactly once."""
        with self._lock:
            assert not self._arrived.is_set(), "a transfer ends once"
            self.error = error
            self.end_s = time.perf_counter()
            self._arrived.set()
            callbacks, self._callbacks = self._callbacks, []
        try:
            for callback in callbacks:
                callback(self)
        finally:
            self._done.set()


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Reason why a copy is not available yet.

    Attributes:
        cause: one of ``STALL_CAUSES``.
        transfer: transfer whose error the waiting caller raises, or None.
        tier: for cause ``space``, the tier that is full.
        need_bytes: for cause ``space``, the size of the slot.
    """

    cause: str
    transfer: Transfer | None = None
    tier: str = ""
    need_bytes: int = 0
