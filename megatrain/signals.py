"""Signals of a living run: finish the step and stop, save and go on, or end at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["RunSignals"]

_STOP = (signal.SIGTERM, signal.SIGINT)
#: A stop often comes twice: to the process and to its group, from a terminal and from whoever started it there.
SAME_STOP_S = 0.5


class RunSignals:
    """Listens while training runs. A context manager; without effect outside the main thread.

    SIGTERM and SIGINT ask for a stop after the step, SIGUSR1 for a checkpoint after it. A second SIGTERM or SIGINT, or
    one while the step cannot end, raises ``KeyboardInterrupt`` where the main thread is.

    Args:
        stops_after_step: else the first SIGTERM or SIGINT raises at once.

    Attributes:
        stop_requested, save_requested: what was asked for; whoever serves a save resets it.
        is_stuck: set by the trainer: whether the step may wait for a person, e.g. on a full drive.
    """

    def __init__(self, *, stops_after_step: bool) -> None:
        self.stop_requested = False
        self.save_requested = False
        self._requested_s = 0.0
        self.is_stuck: Callable[[], bool] = lambda: False
        self._stops_after_step = stops_after_step
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP:
                self._before[number] = signal.signal(number, self._on_stop)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stops_after_step or self.is_stuck():
            raise KeyboardInterrupt
        if self.stop_requested:
            if time.monotonic() - self._requested_s < SAME_STOP_S:
                return
            raise KeyboardInterrupt
        self.stop_requested, self._requested_s = True, time.monotonic()
        # Past Python's streams: the signal may have come in the middle of a print.
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step, and saving; once more to stop at once without saving\n")

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save_requested = True
