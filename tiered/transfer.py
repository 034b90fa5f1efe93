"""Transfer: a copy of bytes on its way, to be waited for by host or by stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Transfer:
    """One movement of bytes between two tiers, completed by a link's thread.

    The link keeps it alive; callers may drop it. ``done`` and ``wait`` may be called from any thread.
    After ``wait`` returned, the destination holds the bytes for the host; for a device destination
    they are ordered before ``wait_stream``'s stream (the host need not have waited for the device).

    Attributes:
        src: name of the tier that is read.
        dst: name of the tier that is written.
        path: path of the bytes, e.g. ``posix-direct``.
        skipped: a prefetch that had no room, or nothing to do; it is done and moved nothing.
        event: a recorded device event that ends after the copy, or None. Its ``query()`` says whether it has ended.
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
        self._arrived = threading.Event()  # the link ended; the callbacks may still run
        self._done = threading.Event()
        self._callbacks: list[Callable[[Transfer], None]] = []
        if skipped:
            self._arrived.set()
            self._done.set()

    def done(self) -> bool:
        """Return whether the transfer ended, well or badly, and all its callbacks returned."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end, including the store's callbacks: afterwards an evicted copy is gone.

        Raises:
            TimeoutError: not ended within ``timeout_s`` seconds.
            TransferError: the bytes did not arrive.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"transfer {self.src} -> {self.dst} of {self.nbytes} bytes not done after {timeout_s} s")
        if self.error is not None:
            raise self.error

    def wait_stream(self, stream: Any) -> None:
        """Order the arrived bytes before later work of ``stream``; waits until the copy is enqueued.

        A stream cannot wait for an event that is not recorded yet (it would silently not wait), hence the host wait.
        """
        self._arrived.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` once done: on the link's thread, or here and now if it is done already."""
        with self._lock:
            if not self._arrived.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: BaseException | None = None) -> None:
        """For links: mark the end and run the callbacks. Called exactly once."""
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
class Waiting:
    """Reason why a copy is not available yet.

    Attributes:
        cause: one of ``STALL_CAUSES``.
        transfer: the movement whose failure concerns the waiter.
        tier: for ``space``: the tier without room.
        need_bytes: for ``space``: size of the slot.
    """

    cause: str
    transfer: Transfer | None = None
    tier: str = ""
    need_bytes: int = 0
