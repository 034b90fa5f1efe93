"""Terminal output of commands: a spinner, escaping of untrusted text, and a log file in case the terminal closes."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import re
import select
import shutil
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TextIO, cast

import click

#: ``obj`` of the root click context if the process runs only one command.
OWN_PROCESS = object()
#: Frames of the spinner: Braille dots, or ASCII for terminals without Unicode.
FRAMES = ("\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f", "|/-\\")
_CLEAR = "\r\x1b[K"
_INTERVAL_S = 0.1
#: Minimum columns of text in a continuation line; below this, the indentation is reduced.
_MIN_WRAPPED_COLUMNS = 20
_FIRST_LINE_DELAY_S = 1.0  # delay of the first line if stderr is not a terminal
_MIN_SHOWN_S = 2.0  # Shorter times would only flicker.
_MIN_NEW_SHARE, _MIN_LINE_S = 0.1, 10.0  # minimum progress and time between two lines if stderr is not a terminal
#: Error numbers of writes to a closed terminal or a broken pipe.
_CLOSED_ERRORS = (errno.EIO, errno.EPIPE, errno.ENXIO, errno.EBADF)
#: Cursor sequences at the start of writes by the spinner and rich's live views.
_CURSOR_SEQUENCES = re.compile(r"(?:\r|\n|\x1b\[(?:\?25[lh]|[0-9]*A|2?K))*")
#: Harmless sequences: colors, links, cursor visibility, line breaks.
_HARMLESS_SEQUENCE = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh])|\r\n|[\n\t]|\x1b\]8;[^\x00-\x1f\x7f]*\x1b\\")
#: Characters that terminals execute: C0 and C1 controls, DEL, and characters that change the text direction.
_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def env_columns() -> int:
    """Return the value of ``COLUMNS``, or 0 if it is not a number."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdigit() else 0


def wrap_words(text: str, width: int, *, indent: int) -> list[str]:
    """Wrap each line of a text between words, and return the lines.

    Args:
        indent: Indentation of continuation lines, in columns; at most 2 if too few columns would be left.
    """
    is_narrow = width - indent < _MIN_WRAPPED_COLUMNS
    other_indent = " " * (min(indent, 2) if is_narrow else indent)
    lines = []
    for line in text.splitlines():
        first_indent = line[: len(line) - len(line.lstrip())]
        first_indent = first_indent[:2] if is_narrow else first_indent
        lines += textwrap.wrap(
            line.lstrip(), width, initial_indent=first_indent, subsequent_indent=other_indent,
            break_long_words=False, break_on_hyphens=False,
        ) or [""]  # fmt: skip
    return lines


def echo_wrapped(text: str, *, indent: int = 2, err: bool = False, **style: Any) -> None:
    """Print text, with wrapped and indented lines on a terminal or if ``COLUMNS`` is set.

    Args:
        indent: Indentation of continuation lines, in columns.
        style: Arguments of ``click.style``.
    """
    if env_columns() or (sys.stderr if err else sys.stdout).isatty():
        text = "\n".join(wrap_words(text, shutil.get_terminal_size().columns, indent=indent))
    for line in text.splitlines():
        click.secho(line, err=err, **style)


class Spinner:
    """Context manager that shows the current activity and its seconds in a line on stderr, and clears it on exit.

    This class imports nothing heavy. The cursor stays visible, so a killed process leaves nothing to restore. If stderr
    is not a terminal, each activity after the first second prints a line, and its progress one per 10 % and 10 s.

    Args:
        is_shown: Whether to draw or print anything.
    """

    def __init__(self, text: str, *, is_shown: bool = True) -> None:
        self._stream = sys.stderr
        self._is_shown = is_shown and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_plain = is_shown and not self._is_shown and _is_own_process()
        self._printed, self._printed_share, self._printed_s, self._share = "", 0.0, 0.0, 0.0
        self._first_line = threading.Timer(_FIRST_LINE_DELAY_S, self._print)
        self._frames = frames_for(self._stream.encoding)
        self._text, self._start_s = text, time.monotonic()
        self._draw_lock = threading.Lock()
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._is_shown:
            self._draw()
            self._thread = threading.Thread(target=self._spin, name="spinner", daemon=True)
            self._thread.start()
        elif self._is_plain:
            self._first_line.daemon = True
            self._first_line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def show_activity(self, text: str, share: float = 0.0) -> None:
        """Show a new activity and restart its timer. A ``share`` above 0 is the progress of the previous activity."""
        self._text, self._share, self._start_s = text, share, time.monotonic()
        if self._thread is not None:
            self._draw()
        elif self._is_plain and self._first_line.finished.is_set():
            self._print()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Clear the line during the ``with`` block, so that the caller can print."""
        with self._draw_lock:
            if self._thread is not None:
                self._write(_CLEAR)
            yield

    def stop(self) -> None:
        """Clear the line permanently. Idempotent."""
        self._first_line.cancel()
        self._is_plain = False
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop_event.set()
            thread.join()
            self._write(_CLEAR)

    def _print(self) -> None:
        """Print the activity unless it is already printed."""
        with self._draw_lock:
            now_s, new_share = time.monotonic(), self._share - self._printed_share
            is_due = new_share >= _MIN_NEW_SHARE and now_s - self._printed_s >= _MIN_LINE_S
            if self._is_plain and self._text != self._printed and (is_due or not self._share):
                self._printed, self._printed_share, self._printed_s = self._text, self._share, now_s
                self._write(f"{self._text} ...\n")

    def _spin(self) -> None:
        while not self._stop_event.wait(_INTERVAL_S):
            self._draw()

    def _draw(self) -> None:
        now_s = time.monotonic()
        frame = self._frames[int(now_s / _INTERVAL_S) % len(self._frames)]
        elapsed_s = now_s - self._start_s
        seconds = f"  {elapsed_s:.0f} s" if elapsed_s >= _MIN_SHOWN_S else ""
        # Shorten the line to the terminal's width, because clearing a wrapped line would leave its first part.
        width = shutil.get_terminal_size().columns - 1
        with self._draw_lock:
            self._write(f"{_CLEAR}{frame} {self._text}{seconds}"[: width + len(_CLEAR)])

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # The terminal is gone, which RunOutput handles.
            self._stop_event.set()


def frames_for(encoding: str | None) -> str:
    """Return the spinner's frames in characters that an encoding supports."""
    try:
        FRAMES[0].encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return FRAMES[1]
    return FRAMES[0]


def escape_controls(text: str) -> str:
    """Escape control characters in names, rows and messages, so that the terminal does not execute them.

    An untrusted file name or row can contain sequences that clear the screen, send keystrokes, or hide text.
    Colors, and this program's own sequences at the start of a write, are not escaped.
    """
    if not _CONTROL_CHARACTER.search(text):
        return text
    start = _CURSOR_SEQUENCES.match(text)
    position = start.end() if start is not None else 0
    parts = [text[:position]]
    while position < len(text):
        sequence = _HARMLESS_SEQUENCE.match(text, position)
        if sequence is not None:
            parts.append(sequence[0])
            position = sequence.end()
            continue
        char = text[position]
        parts.append(char.encode("unicode_escape").decode() if _CONTROL_CHARACTER.match(char) else char)
        position += 1
    return "".join(parts)


class SafeStream:
    """A text stream that escapes control characters; all other methods delegate to the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text and return its length. For other types, the wrapped stream raises its own error."""
        self._stream.write(escape_controls(text) if isinstance(text, str) else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Wrap ``sys.stdout`` and ``sys.stderr`` in ``SafeStream`` during the ``with`` block."""
    original_streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", tuple(map(SafeStream, original_streams)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original_streams


def _is_own_process() -> bool:
    """Return whether the current command is the only one that this process runs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().obj is OWN_PROCESS


def block_torch_import() -> None:
    """Make transformers work without torch, whose import takes seconds, if this process runs only one command.

    Tokenizers and chat templates do not need torch, but transformers imports it if it is installed.
    """
    if _is_own_process() and not {"torch", "transformers"} & sys.modules.keys():
        sys.modules["torch"] = cast("ModuleType", None)  # Importing torch then raises ImportError.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # Suppress the warning that torch is missing.


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector during the ``with`` block.

    Imports and plans create a million permanent objects, and scanning them repeatedly took a tenth of the startup time.
    In a process with only one command, later collections also skip these objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _is_own_process():
            gc.freeze()
        if was_enabled:
            gc.enable()


class RunOutput:
    """Context manager that replaces ``sys.stdout`` and ``sys.stderr``, if they have file descriptors.

    If a write fails because the terminal is closed or the pipe is broken, this text and all later output goes to a log
    file, without an error. The file descriptors are redirected, so the output of libraries also goes there. Until the
    log file is known, output is kept in memory.

    Attributes:
        is_lost: Whether a terminal or pipe is gone permanently.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._log: Path | None = None
        self._has_header = False
        self._unwritten: list[str] = []
        self._lock = threading.RLock()
        self._original_streams: tuple[TextIO, TextIO] | None = None
        self._streams: list[_Stream] = []

    def __enter__(self) -> Self:
        self._original_streams = sys.stdout, sys.stderr
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
                self._streams.append(_Stream(stream, self))
                setattr(sys, name, self._streams[-1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.flush()
        if any(stream.is_gone for stream in self._streams):
            self.redirect_lost()  # Redirect now, so that the last message of the command does not fail.
        assert self._original_streams is not None
        sys.stdout, sys.stderr = self._original_streams

    def set_log_file(self, log: Path) -> None:
        """Set the log file, which is written only after a terminal is lost."""
        with self._lock:
            self._log = log
            if self.is_lost:
                self._redirect()

    def redirect_lost(self, text: str = "") -> None:
        """Redirect lost streams to the log file, starting with ``text``, which could not be written."""
        with self._lock:
            self.is_lost = True
            if plain_text := _CONTROL_SEQUENCE.sub("", text):
                self._unwritten.append(plain_text if plain_text.endswith("\n") else f"{plain_text}\n")
            self._redirect()

    def _redirect(self) -> None:
        """Redirect descriptors to the log file, or to /dev/null if the log file is unknown or cannot be opened."""
        try:
            path = os.devnull if self._log is None else self._log
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for stream in self._streams:
                if stream.is_gone or stream.is_redirected:
                    os.dup2(log, stream.fileno())
                    stream.is_redirected = True
            if self._log is not None:
                header = "" if self._has_header else f"-- output of process {os.getpid()} on {socket.gethostname()}\n"
                self._has_header = True
                text, self._unwritten = "".join(self._unwritten), []
                with contextlib.suppress(OSError):
                    os.write(log, (header + text).encode(errors="replace"))
        finally:
            os.close(log)

    def write(self, stream: _Stream, text: str) -> None:
        """Write to the descriptor of a stream, or to the log file if the descriptor is gone."""
        data = memoryview(text.encode(stream.encoding, errors="replace"))
        with self._lock:
            if stream.is_redirected and self._log is None:
                self._unwritten.append(_CONTROL_SEQUENCE.sub("", text))
                return
            while data:
                try:
                    data = data[os.write(stream.fileno(), data) :]
                except OSError as error:
                    if error.errno in _CLOSED_ERRORS and not stream.is_redirected:
                        stream.is_gone_by_error = True
                        self.redirect_lost(bytes(data).decode(stream.encoding, errors="replace"))
                    return  # Drop the text: a full drive must not end the run.


class _Stream(io.TextIOBase):
    """A text stream of ``RunOutput``, which writes after each line or at ``flush``."""

    def __init__(self, stream: TextIO, output: RunOutput) -> None:
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._encoding = stream.encoding or "utf-8"
        self._output = output
        self._buffer: list[str] = []
        # Do not hold this lock during writes, because a stopped terminal (Ctrl-S) must not block other threads.
        self._buffer_lock = threading.Lock()
        self.is_redirected = self.is_gone_by_error = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def is_gone(self) -> bool:
        """Whether the terminal or the reader of the pipe is gone."""
        if self.is_redirected:
            return False
        if self.is_gone_by_error:
            return True
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._is_terminal and not self.is_redirected

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click writes bytes to find out whether a stream is binary.
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._buffer_lock:
            self._buffer.append(escape_controls(text))
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        with self._buffer_lock:
            text, self._buffer = self._buffer, []
        if text:
            self._output.write(self, "".join(text))
