"""Signal handling during a run: stop after the step, save and continue, or end at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from megatrain.base.progress import Activity

__all__ = ["RunSignals"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP_NOTICE = "stopping after this step, and saving; signal again to stop immediately without saving"
#: A second signal within this time may repeat the first: a terminal signals the whole group, and parents forward it.
SAME_STOP_S = 0.5


class RunSignals:
    """Context manager that handles signals during training. It has no effect outside the main thread.

    SIGTERM, SIGINT and SIGHUP (the terminal was closed) request a stop after the step. SIGUSR1 requests a checkpoint. A
    second SIGTERM or SIGINT raises ``KeyboardInterrupt`` in the main thread, and so does the first if the step cannot
    end. A second SIGHUP does not raise, because closing a terminal is not a request to discard work. An ignored SIGHUP
    (``nohup``) stays ignored.

    Args:
        stops_after_step: Whether a stop waits for the end of the step. If not, the first SIGTERM, SIGINT or SIGHUP
            raises at once.
        is_stuck: Function that returns whether the step waits for space on a drive, and may therefore never end.
        activity: Receives the notice for the user. If None or not displayed, the notice goes to stderr.

    Attributes:
        stop_requested: Whether the run must end after its step.
        save_requested: Whether the run must save after its step. The caller resets this flag after saving.
        is_hung_up: Whether the terminal was closed.
    """

    def __init__(
        self,
        *,
        stops_after_step: bool,
        is_stuck: Callable[[], bool] = lambda: False,
        activity: Activity | None = None,
    ) -> None:
        self.stop_requested = False
        self.save_requested = False
        self.is_hung_up = False
        self._request_s = 0.0
        self._is_stuck = is_stuck
        self._stops_after_step = stops_after_step
        self._has_steps_left = True
        self._has_raised = False
        self._activity = activity or Activity()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _STOP_SIGNALS:
                self._previous_handlers[signum] = signal.signal(signum, self._on_stop)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
            self._previous_handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()
        self._activity.notice = ""

    def end_steps(self) -> None:
        """Make the next SIGTERM or SIGINT raise at once, because no steps follow."""
        self._has_steps_left = False

    def reraise_interrupt(self) -> None:
        """Raise ``KeyboardInterrupt`` again if a signal handler raised it but the step still finished.

        The handler may run inside a destructor or weakref callback, in which Python drops exceptions.
        """
        if self._has_raised:
            raise KeyboardInterrupt

    def _raise(self) -> NoReturn:
        self._has_raised = True
        raise KeyboardInterrupt

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        if not self._stops_after_step or not self._has_steps_left or self._is_stuck():
            self._raise()
        if self.stop_requested:
            if time.monotonic() - self._request_s < SAME_STOP_S:
                return
            self._raise()
        self.stop_requested, self._request_s = True, time.monotonic()
        self._activity.notice = _STOP_NOTICE
        if not self._activity.is_watched:
            # Bypass Python's streams, because the signal may have interrupted a print.
            with contextlib.suppress(OSError):
                os.write(2, f"{_STOP_NOTICE}\n".encode())

    def _on_hangup(self, signum: int, frame: FrameType | None) -> None:
        if not self._stops_after_step:
            self._raise()
        self.is_hung_up = True
        if not self.stop_requested:
            self._activity.notice = _STOP_NOTICE
            # Print no notice, because the terminal is gone. A SIGTERM or SIGINT after SAME_STOP_S is a second request.
            self.stop_requested, self._request_s = True, time.monotonic()

    def _on_save(self, signum: int, frame: FrameType | None) -> None:
        self.save_requested = True
