"""Drives that are full in the middle of the work: wait for room, or fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from tiered.units import format_size

#: Seconds between two looks at a drive that is full.
RETRY_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

OnFull = Literal["pause", "error"]
Result = TypeVar("Result")


class FullDrives:
    """What a tier, or a store for its generations, does when a drive has no room. Thread-safe.

    Args:
        on_full: ``pause`` until there is room, or ``error``.
        notice: tells a person.
    """

    def __init__(self, on_full: OnFull, notice: Callable[[str], None]) -> None:
        self._on_full = on_full
        self._notice = notice
        self._lock = threading.Lock()
        self._full_paths: set[str] = set()
        self._is_giving_up = threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for room now."""
        return bool(self._full_paths)

    def wait(self, path: str, need_bytes: int, cause: OSError) -> None:
        """Wait a moment after a write failed, so that it can be tried again; the first time say so.

        Raises:
            OSError: ``cause``, if it is something else than missing room, or nobody wants to wait.
        """
        if cause.errno not in _NO_SPACE or self._on_full != "pause":
            raise cause
        with self._lock:
            is_news = path not in self._full_paths
            self._full_paths.add(path)
        if is_news:
            self._notice(
                f"the drive of '{path}' is full ({cause.strerror or cause}): paused, nothing is lost. Free at least "
                f"{format_size(need_bytes)} there and the run goes on by itself"
            )
        if self._is_giving_up.wait(RETRY_S):
            raise cause

    def retry(self, path: str, need_bytes: int, act: Callable[[], Result]) -> Result:
        """Return what ``act`` returns; as long as it fails for lack of room, wait and call it again.

        Args:
            act: leaves nothing behind where it fails.

        Raises:
            OSError: it failed for another reason, or nobody wants to wait (any more).
        """
        while True:
            try:
                result = act()
            except OSError as error:
                self.wait(path, need_bytes, error)
            else:
                self.wrote(path)
                return result

    def wrote(self, path: str) -> None:
        """Note that a write succeeded; says so if the path was full."""
        if path not in self._full_paths:
            return
        with self._lock:
            is_news = path in self._full_paths
            self._full_paths.discard(path)
        if is_news:
            self._notice(f"there is room again on the drive of '{path}': the run goes on")

    def give_up(self) -> None:
        """Let everybody who waits fail, now and from now on."""
        self._is_giving_up.set()
