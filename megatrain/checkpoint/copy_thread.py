"""Background threads that make copies, and a throttle that leaves half of a drive's bandwidth to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["CopyCancelledError", "Throttle", "run_on_thread"]

Result = TypeVar("Result")


class CopyCancelledError(Exception):
    """The copy was cancelled before it was complete."""


class Throttle:
    """Throttle that pauses a copy half the time, until a caller waits for the copy or cancels it. Thread-safe."""

    def __init__(self) -> None:
        self._disabled, self._cancelled = threading.Event(), threading.Event()

    def disable(self) -> None:
        """Disable the pauses, because a caller waits for the copy."""
        self._disabled.set()

    def cancel(self) -> None:
        """Make the next ``check`` of the copy raise ``CopyCancelledError``."""
        self._cancelled.set()
        self._disabled.set()

    def check(self) -> None:
        """Raise ``CopyCancelledError`` if the copy was cancelled."""
        if self._cancelled.is_set():
            raise CopyCancelledError

    def pause(self, start_s: float) -> float:
        """Pause for as long as the work since ``start_s`` took, then call ``check``. Return the current time."""
        self._disabled.wait(time.perf_counter() - start_s)
        self.check()
        return time.perf_counter()

    def delay(self, delay_s: float) -> None:
        """Wait before another try, then call ``check``. Only ``cancel`` shortens this wait."""
        self._cancelled.wait(delay_s)
        self.check()


def run_on_thread(function: Callable[[], Result], name: str, *, is_daemon: bool = False) -> Future[Result]:
    """Run a function on a new thread, and return a future for its result.

    Args:
        is_daemon: Whether the process may end before the function returns.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=is_daemon).start()
    return future
