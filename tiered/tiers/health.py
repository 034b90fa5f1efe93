"""The state of drives: full, slow, worn."""

from __future__ import annotations

import errno
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tiered.errors import TieredError
from tiered.file_io import write_json
from tiered.units import GiB, MiB, format_size

#: Seconds between two checks of a full drive.
RETRY_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

OnFull = Literal["pause", "error"]
Result = TypeVar("Result")


class FullDrives:
    """Behaviour of a tier, or of a store's generations, on a full drive. Thread-safe.

    Args:
        on_full: ``pause`` until there is room, or ``error``.
        outstanding_bytes: path -> bytes that its owner may still add there; only called when a pause begins.
    """

    def __init__(
        self,
        on_full: OnFull,
        notice: Callable[[str], None],
        outstanding_bytes: Callable[[str], int] = lambda path: 0,
    ) -> None:
        self._on_full = on_full
        self._notice = notice
        self._outstanding_bytes = outstanding_bytes
        self._lock = threading.Lock()
        self._full_paths: set[str] = set()
        self._is_giving_up = threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether a write waits for room now."""
        return bool(self._full_paths)

    def wait(self, path: str, need_bytes: int, cause: OSError) -> None:
        """Wait a moment after a failed write, so that it can be retried. The first call of a pause reports it.

        Raises:
            OSError: ``cause``, if it is something else than missing room, or there is no waiting.
        """
        if cause.errno not in _NO_SPACE or self._on_full != "pause":
            raise cause
        with self._lock:
            is_news = path not in self._full_paths
            self._full_paths.add(path)
        if is_news:
            # The failed write may be one file of many: room for that alone would end in the next pause.
            need_bytes = max(need_bytes, self._outstanding_bytes(path))
            self._notice(
                f"the drive of '{path}' is full ({os.strerror(cause.errno)}): paused, nothing is lost. Free at least "
                f"{format_size(need_bytes)} there and the run resumes by itself"
            )
        if self._is_giving_up.wait(RETRY_S):
            raise cause

    def retry(self, path: str, need_bytes: int, act: Callable[[], Result]) -> Result:
        """Call ``act`` and return its result; while it fails for lack of room, wait and call it again.

        Args:
            act: leaves nothing behind if it fails.

        Raises:
            OSError: it failed for another reason, or there is no waiting (any more).
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
            self._notice(f"there is room again on the drive of '{path}': the run resumes")

    def give_up(self) -> None:
        """Make writes that wait for room fail, now and from now on."""
        self._is_giving_up.set()


#: Bytes after which the rate of a path is checked: 32 parts of a large transfer.
WINDOW_BYTES = 512 * MiB
#: Windows that must be known before one can be called slow, and slow ones in a row before it is reported.
_NUM_USUAL, _NUM_SLOW = 4, 2
_SLOW_SHARE = 1 / 3
_NUM_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class PathRates:
    """Rates of a path so far, in bytes per second over the time with a part in progress; 0.0: not known.

    Attributes:
        read_bytes_per_s: mean of reads, over the whole time.
        write_bytes_per_s: mean of writes, over the whole time.
        recent_bytes_per_s: mean of both together, in the last window of ``WINDOW_BYTES``.
        usual_bytes_per_s: both together: the median of the windows before that were not slow.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    recent_bytes_per_s: float
    usual_bytes_per_s: float


class _Busy:
    """Bytes, and the time during which at least one part was in progress."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._num_active = 0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        self.advance(now_s)
        self._num_active += 1

    def end(self, now_s: float, nbytes: int) -> None:
        self.advance(now_s)
        self._num_active -= 1
        self.nbytes += nbytes

    def advance(self, now_s: float) -> None:
        """Count the time up to now."""
        if self._num_active:
            self.busy_s += now_s - self._since_s
        self._since_s = now_s

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


class PathMeter:
    """Measures one path. Thread-safe.

    It does not time single parts, because their time depends on how many are in progress at once. Reads and writes
    share a drive, so only both together show whether it has slowed down.

    Args:
        window_bytes: bytes between two checks.
        clock_s: seconds that only grow.
    """

    def __init__(self, *, window_bytes: int = WINDOW_BYTES, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._window_bytes = window_bytes
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._reads, self._writes, self._both = _Busy(), _Busy(), _Busy()
        self._window_start = (0, 0.0)  # bytes and busy seconds when the window began
        self._usual: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._recent = 0.0
        self._num_slow = 0

    @contextmanager
    def moving(self, nbytes: int, *, is_write: bool, on_slow: Callable[[str], None]) -> Iterator[None]:
        """Measure the body, which moves ``nbytes``; a body that raises has moved none.

        Args:
            on_slow: called with the figures when the path was slow for the second window in a row.
        """
        direction = self._writes if is_write else self._reads
        with self._lock:
            now_s = self._clock_s()
            for busy in (direction, self._both):
                busy.start(now_s)
        moved_bytes = 0
        try:
            yield
            moved_bytes = nbytes
        finally:
            with self._lock:
                now_s = self._clock_s()
                for busy in (direction, self._both):
                    busy.end(now_s, moved_bytes)
                news = self._close_window()
            if news is not None:
                on_slow(news)

    def _close_window(self) -> str | None:
        """End the window if it is full; return the figures when the path has slowed down."""
        start_bytes, start_s = self._window_start
        nbytes, busy_s = self._both.nbytes - start_bytes, self._both.busy_s - start_s
        if nbytes < self._window_bytes or busy_s <= 0:
            return None
        self._window_start = (self._both.nbytes, self._both.busy_s)
        self._recent = nbytes / busy_s
        if len(self._usual) < _NUM_USUAL or self._recent >= _SLOW_SHARE * statistics.median(self._usual):
            self._usual.append(self._recent)
            self._num_slow = 0
            return None
        self._num_slow += 1
        if self._num_slow != _NUM_SLOW:
            return None
        usual = format_size(round(statistics.median(self._usual)))
        return f"{format_size(round(self._recent))}/s over the last {format_size(nbytes)}, usually {usual}/s"

    def rates(self) -> PathRates:
        """Return the rates so far."""
        with self._lock:
            return PathRates(
                self._reads.bytes_per_s,
                self._writes.bytes_per_s,
                self._recent,
                statistics.median(self._usual) if self._usual else 0.0,
            )


WEAR_NAME = "WEAR.json"
#: How far the figure on disk runs ahead of the truth, so that a crash never makes it too low.
AHEAD_BYTES = GiB


class WearLimitError(TieredError):
    """A write would pass the limit that was set for a path. Nothing of it was written.

    Attributes:
        limit_bytes: bytes that may be written in its whole life.
        need_bytes: size of the write that was refused.
    """

    def __init__(self, path: str, limit_bytes: int, written_bytes: int, need_bytes: int) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self.written_bytes, self.need_bytes = written_bytes, need_bytes
        super().__init__(
            f"'{path}' may be written {limit_bytes} bytes ({format_size(limit_bytes)}, max_written) in its whole life, "
            f"and {written_bytes} ({format_size(written_bytes)}) are: {format_size(need_bytes)} more would pass that. "
            f"Nothing of it was written. Raise max_written of this path, or name a path on another drive; "
            f"{WEAR_NAME} there holds the count"
        )


class WearCounter:
    """Counts the bytes written below one directory, in its ``WEAR.json``. Guarded by the lock of its owner.

    The file runs ahead of the count in steps, before bytes are written, and ``close`` corrects it. So it is never too
    low, and after a crash at most ``ahead_bytes`` too high.

    Args:
        directory: folder of the file; the caller holds its lock.
        limit_bytes: most bytes of the directory's whole life, or None for no limit.

    Raises:
        TieredError: the file cannot be read.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._path = directory / WEAR_NAME
        self.limit_bytes = limit_bytes
        self._ahead_bytes = ahead_bytes
        self.written_bytes = self._on_disk_bytes = self._read()

    def _read(self) -> int:
        try:
            written = json.loads(self._path.read_bytes())["written_bytes"]
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TieredError(
                f"'{self._path}' cannot be read ({error}): it counts the bytes written to this drive. "
                "Mend it, or delete it to count from zero"
            ) from error
        if not isinstance(written, int) or written < 0:
            raise TieredError(f"'{self._path}' counts {written!r} bytes. Mend it, or delete it to count from zero")
        return written

    def check(self, nbytes: int) -> None:
        """Raise ``WearLimitError`` if ``nbytes`` more would pass the limit."""
        if self.limit_bytes is not None and self.written_bytes + nbytes > self.limit_bytes:
            raise WearLimitError(str(self._path.parent), self.limit_bytes, self.written_bytes, nbytes)

    def add(self, nbytes: int) -> None:
        """Count bytes that are about to be written. Raises ``OSError``: the drive refused; then nothing is counted."""
        needed_bytes = self.written_bytes + nbytes
        if needed_bytes > self._on_disk_bytes:
            self._save(needed_bytes + self._ahead_bytes)
        self.written_bytes = needed_bytes

    def close(self) -> None:
        """Write the exact count to the file. If the drive refuses, it stays too high. Idempotent."""
        if self._on_disk_bytes != self.written_bytes:
            try:
                self._save(self.written_bytes)
            except OSError:
                return

    def _save(self, written_bytes: int) -> None:
        write_json(self._path, {"format": 1, "written_bytes": written_bytes}, durable=True)
        self._on_disk_bytes = written_bytes


def count_writes(counters: Sequence[WearCounter], nbytes_by_path: Mapping[int, int]) -> None:
    """Count a write to several paths, all or nothing as far as limits go. Call with their owner's lock held.

    Raises:
        WearLimitError: it would pass a limit; nothing is counted.
        OSError: a drive refused.
    """
    for index, nbytes in nbytes_by_path.items():
        counters[index].check(nbytes)
    for index, nbytes in nbytes_by_path.items():
        counters[index].add(nbytes)
