"""A folder on the drive to be measured, that is gone afterwards whatever happens."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiered.units import MiB, format_size

SCRATCH_PREFIX = ".megatrain-tier-doctor-"

#: Least free space that a measurement is made with.
MIN_FREE_BYTES = 256 * MiB


class UnusablePathError(Exception):
    """A path cannot be measured: it is missing, not a folder, not writable, or full."""


def check_path(path: Path) -> int:
    """Return the bytes that are free on the drive of a folder that can be written.

    Raises:
        UnusablePathError: it cannot be measured; the text says why and what to do.
    """
    if not path.exists():
        raise UnusablePathError(f"{path} does not exist: make it, or name another folder on that drive")
    if not path.is_dir():
        raise UnusablePathError(f"{path} is not a folder: name the folder in which it lies")
    with scratch_folder(path):
        free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UnusablePathError(
            f"{path} has {format_size(free)} free, measuring needs {format_size(MIN_FREE_BYTES)}: "
            "free some, or name another folder"
        )
    return free


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder inside ``path`` and remove it with all it holds, also after an error or Ctrl-C.

    Raises:
        UnusablePathError: ``path`` cannot be written.
    """
    folder: Path | None = None
    try:
        with _uninterrupted():  # what arrives meanwhile is raised at its end, when the folder is known
            folder = _make_folder(path)
        yield folder
    finally:
        if folder is not None:
            with _uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(path: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=path))
    except OSError as error:
        reason = error.strerror or "refused"
        raise UnusablePathError(f"{path} cannot be written: {reason}. Name another folder") from error


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what runs inside the way Ctrl-C does, so that scratch folders go."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handled_by((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back what would end the process between making a folder and knowing of it, or while it is removed."""
    arrived: list[int] = []
    try:
        # Not by a signal mask: the kernel would give the signal to another thread, and Python's handler runs in the
        # main thread all the same.
        held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with _handled_by(held, lambda number, frame: arrived.append(number)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def _handled_by(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals by ``handler`` inside; ignored ones stay ignored. No-op in threads, to which no signal comes."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
