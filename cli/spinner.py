"""What a command is doing before it has anything to show: a line on the terminal that moves."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

__all__ = ["FRAMES", "Spinner", "frames_for", "without_collector"]

#: Braille dots, as most spinners are drawn; the second where the terminal has ASCII only.
FRAMES = ("\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f", "|/-\\")
_CLEAR = "\r\x1b[K"
_INTERVAL_S = 0.1
_SHOWN_FROM_S = 2.0  # before that, seconds would only flicker


class Spinner:
    """A line on stderr: what is being done, and for how long. A context manager that leaves nothing of it.

    The first line is there when the context is entered: nothing heavy is imported for it. It hides no cursor, so that
    nothing has to be put right when the process is killed.

    Args:
        text: what is being done.
        is_shown: else nothing is written; never on what is no terminal.
    """

    def __init__(self, text: str, *, is_shown: bool = True) -> None:
        self._stream = sys.stderr
        self._is_shown = is_shown and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._frames = frames_for(self._stream.encoding)
        self._text, self._start_s = text, time.monotonic()
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._is_shown:
            self._draw()
            self._thread = threading.Thread(target=self._turn, name="spinner", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Say something else; the seconds start again."""
        self._text, self._start_s = text, time.monotonic()
        if self._thread is not None:
            self._draw()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let something be printed: the line is gone inside, and comes back."""
        with self._drawing:
            if self._thread is not None:
                self._write(_CLEAR)
            yield

    def stop(self) -> None:
        """Take the line away for good. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._over.set()
        thread.join()
        self._write(_CLEAR)

    def _turn(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            self._draw()

    def _draw(self) -> None:
        now_s = time.monotonic()
        frame = self._frames[int(now_s / _INTERVAL_S) % len(self._frames)]
        passed_s = now_s - self._start_s
        seconds = f"  {passed_s:.0f} s" if passed_s >= _SHOWN_FROM_S else ""
        # A line that the terminal would break could not be taken away again.
        width = shutil.get_terminal_size().columns - 1
        with self._drawing:
            self._write(f"{_CLEAR}{frame} {self._text}{seconds}"[: width + len(_CLEAR)])

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; whoever has something to say will see
            self._over.set()


def frames_for(encoding: str | None) -> str:
    """Return the pictures of a spinner that an encoding has."""
    try:
        FRAMES[0].encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return FRAMES[1]
    return FRAMES[0]


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect no cycles inside: for imports and plans, which make a million objects that stay.

    To look at all of them again and again took a tenth of the processor time of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
