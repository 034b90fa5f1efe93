"""stdout and stderr of a run, which may outlive the terminal that it was started in."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

__all__ = ["RunOutput"]

#: What a write gives whose terminal was closed, or whose pipe nobody reads any more.
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO, errno.EBADF)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class RunOutput:
    """Takes the place of ``sys.stdout`` and ``sys.stderr`` while the context is open, where they are files.

    Once a write finds its terminal closed or its pipe broken, that and all that follows goes into a log file: the file
    descriptors themselves are turned there, so that what libraries print goes there, too. No error is raised. What is
    lost before ``log`` is known is kept until then.

    Attributes:
        is_lost: whether a terminal or pipe is gone. It never comes back.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._log: Path | None = None
        self._is_open = False
        self._kept: list[str] = []
        self._lock = threading.RLock()
        self._before: tuple[TextIO, TextIO] | None = None
        self._streams: list[_Stream] = []

    def __enter__(self) -> Self:
        self._before = sys.stdout, sys.stderr
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
            self.lose()  # whoever says how the command ended must not fail
        assert self._before is not None
        sys.stdout, sys.stderr = self._before

    def goes_to(self, log: Path) -> None:
        """Name the log file. Nothing is written there unless a terminal is lost."""
        with self._lock:
            self._log = log
            if self.is_lost:
                self._turn()

    def move_to(self, log: Path) -> None:
        """Go on in the log file from now on, whatever the output was before; a copy of what was there goes first.

        The output so far must be a file that can be read, if it is to be copied.
        """
        with self._lock:
            self._log = log
            for stream in self._streams:
                stream.flush()
            with contextlib.suppress(OSError):
                self._kept.insert(0, os.pread(self._streams[0].fileno(), 1 << 24, 0).decode(errors="replace"))
            self._turn(only_gone=False)

    def lose(self, text: str = "") -> None:
        """Turn what is gone to the log file.

        Args:
            text: what could not be written.
        """
        with self._lock:
            self.is_lost = True
            if plain := _CONTROL.sub("", text):
                self._kept.append(plain if plain.endswith("\n") else f"{plain}\n")
            self._turn()

    def _turn(self, *, only_gone: bool = True) -> None:
        """Point the descriptors at the log; where there is none yet, or it cannot be opened, at nothing."""
        try:
            path = os.devnull if self._log is None else self._log
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for stream in self._streams:
                if not only_gone or stream.is_gone or stream.is_turned:
                    os.dup2(log, stream.fileno())
                    stream.is_turned = True
            if self._log is not None:
                head = "" if self._is_open else f"-- output of process {os.getpid()} on {socket.gethostname()}\n"
                self._is_open = True
                kept, self._kept = "".join(self._kept), []
                with contextlib.suppress(OSError):
                    os.write(log, (head + kept).encode(errors="replace"))
        finally:
            os.close(log)

    def write(self, stream: _Stream, text: str) -> None:
        """Write to a stream's descriptor, or to the log once that is gone."""
        data = memoryview(text.encode(stream.encoding, errors="replace"))
        with self._lock:
            if stream.is_turned and self._log is None:
                self._kept.append(_CONTROL.sub("", text))
                return
            while data:
                try:
                    data = data[os.write(stream.fileno(), data) :]
                except OSError as error:
                    if error.errno in _GONE and not stream.is_turned:
                        stream.is_gone_by_error = True
                        self.lose(bytes(data).decode(stream.encoding, errors="replace"))
                    return  # a full drive under a log must not end a run


class _Stream(io.TextIOBase):
    """A text stream of ``RunOutput``. Written line by line, or at ``flush``."""

    def __init__(self, stream: TextIO, output: RunOutput) -> None:
        self._fd = stream.fileno()
        self._is_terminal = stream.isatty()
        self._encoding = stream.encoding or "utf-8"
        self._output = output
        self._waiting: list[str] = []
        self._adding = threading.Lock()  # not held while writing: a terminal that is stopped stops no other thread
        self.is_turned = self.is_gone_by_error = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def is_gone(self) -> bool:
        """Whether nobody is at the other end any more."""
        if self.is_turned:
            return False
        if self.is_gone_by_error:
            return True
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._is_terminal and not self.is_turned

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click asks with bytes whether this is a stream of bytes
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._adding:
            self._waiting.append(text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        with self._adding:
            waiting, self._waiting = self._waiting, []
        if waiting:
            self._output.write(self, "".join(waiting))
