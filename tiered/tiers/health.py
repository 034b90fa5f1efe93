"""Detection and handling of drives that are full, slow or worn."""

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

#: Seconds between retries on a full drive.
RETRY_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

OnFull = Literal["pause", "error"]
Result = TypeVar("Result")


class FullDrives:
    """Rule for a tier's or store's writes while a drive is full: wait or fail. Thread-safe.

    Args:
        on_full: ``pause`` until there is space, or ``error``.
        outstanding_bytes: function that returns the bytes that the owner may still write to a path. Called when a
            pause begins.
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
        self._give_up_event = threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether a write is waiting for space."""
        return bool(self._full_paths)

    def wait(self, path: str, need_bytes: int, cause: OSError) -> None:
        """Wait a moment after a failed write; the caller then retries. The first call in a pause notifies the user.

        Raises:
            OSError: the drive is not full, or waiting is disabled. The error is ``cause``.
        """
        if cause.errno not in _NO_SPACE or self._on_full != "pause":
            raise cause
        with self._lock:
            is_first = path not in self._full_paths
            self._full_paths.add(path)
        if is_first:
            # The failed write may be one file of many. Ask for enough space for all of them, because otherwise the next
            # file would cause another pause.
            need_bytes = max(need_bytes, self._outstanding_bytes(path))
            self._notice(
                f"the drive of '{path}' is full ({os.strerror(cause.errno)}): paused, nothing is lost. Free at least "
                f"{format_size(need_bytes)} there and the run resumes automatically"
            )
        if self._give_up_event.wait(RETRY_S):
            raise cause

    def retry(self, path: str, need_bytes: int, operation: Callable[[], Result]) -> Result:
        """Call ``operation`` and return its result. While the drive is full, wait and call ``operation`` again.

        Args:
            operation: function that leaves no files behind when it fails.

        Raises:
            OSError: the function failed for another reason, or waiting is disabled.
        """
        while True:
            try:
                result = operation()
            except OSError as error:
                self.wait(path, need_bytes, error)
            else:
                self.mark_writable(path)
                return result

    def mark_writable(self, path: str) -> None:
        """Record a successful write. If the path was full, notify the user."""
        if path not in self._full_paths:
            return
        with self._lock:
            was_full = path in self._full_paths
            self._full_paths.discard(path)
        if was_full:
            self._notice(f"the drive of '{path}' has free space again: the run resumes")

    def give_up(self) -> None:
        """Make current and future writes fail instead of waiting for space."""
        self._give_up_event.set()


#: Number of bytes between two checks of a path's rate: 32 parts of a large transfer.
WINDOW_BYTES = 512 * MiB
#: Number of windows before one can count as slow, and number of consecutive slow windows before a report.
_MIN_WINDOWS, _NUM_SLOW_WINDOWS = 4, 2
_SLOW_SHARE = 1 / 3
_MAX_WINDOWS = 64


@dataclass(frozen=True, slots=True)
class PathRates:
    """Rates of a path in bytes per second of busy time; 0.0 if unknown.

    Attributes:
        read_bytes_per_s: mean rate of all reads.
        write_bytes_per_s: mean rate of all writes.
        recent_bytes_per_s: mean rate of reads and writes together in the last window.
        usual_bytes_per_s: median rate of reads and writes together in earlier windows that were not slow.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    recent_bytes_per_s: float
    usual_bytes_per_s: float


class _BusyMeter:
    """Counter of moved bytes, and of the seconds with at least one part in progress."""

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
        """Add the busy time up to ``now_s``."""
        if self._num_active:
            self.busy_s += now_s - self._since_s
        self._since_s = now_s

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


class PathMeter:
    """Meter for the rates of one path. Thread-safe.

    Individual parts are not timed, because their time depends on the number of parts in progress. Reads and writes
    share a drive, so only their total rate shows whether the drive has slowed down.

    Args:
        window_bytes: bytes between two checks.
        clock_s: monotonic clock in seconds.
    """

    def __init__(self, *, window_bytes: int = WINDOW_BYTES, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._window_bytes = window_bytes
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._read_meter, self._write_meter, self._total_meter = _BusyMeter(), _BusyMeter(), _BusyMeter()
        self._window_start = (0, 0.0)  # (bytes, busy seconds) at the start of the window
        self._usual_rates: deque[float] = deque(maxlen=_MAX_WINDOWS)
        self._recent_rate = 0.0
        self._num_slow_windows = 0

    @contextmanager
    def measure(self, nbytes: int, *, is_write: bool, on_slow: Callable[[str], None]) -> Iterator[None]:
        """Measure the ``with`` block, which moves ``nbytes`` unless it raises an error.

        Args:
            on_slow: called with a description of the rates after the second consecutive slow window.
        """
        direction_meter = self._write_meter if is_write else self._read_meter
        with self._lock:
            now_s = self._clock_s()
            for meter in (direction_meter, self._total_meter):
                meter.start(now_s)
        moved_bytes = 0
        try:
            yield
            moved_bytes = nbytes
        finally:
            with self._lock:
                now_s = self._clock_s()
                for meter in (direction_meter, self._total_meter):
                    meter.end(now_s, moved_bytes)
                report = self._close_window()
            if report is not None:
                on_slow(report)

    def _close_window(self) -> str | None:
        """End the window if it is full. Return a description of the rates if the path has slowed down."""
        start_bytes, start_s = self._window_start
        nbytes, busy_s = self._total_meter.nbytes - start_bytes, self._total_meter.busy_s - start_s
        if nbytes < self._window_bytes or busy_s <= 0:
            return None
        self._window_start = (self._total_meter.nbytes, self._total_meter.busy_s)
        rate = self._recent_rate = nbytes / busy_s
        if len(self._usual_rates) < _MIN_WINDOWS or rate >= _SLOW_SHARE * statistics.median(self._usual_rates):
            self._usual_rates.append(rate)
            self._num_slow_windows = 0
            return None
        self._num_slow_windows += 1
        if self._num_slow_windows != _NUM_SLOW_WINDOWS:
            return None
        usual_rate = format_size(round(statistics.median(self._usual_rates)))
        return f"{format_size(round(rate))}/s over the last {format_size(nbytes)}, usually {usual_rate}/s"

    def rates(self) -> PathRates:
        """Return the path's current rates."""
        with self._lock:
            return PathRates(
                self._read_meter.bytes_per_s,
                self._write_meter.bytes_per_s,
                self._recent_rate,
                statistics.median(self._usual_rates) if self._usual_rates else 0.0,
            )


WEAR_NAME = "WEAR.json"
#: The count on disk exceeds the actual count by up to this number of bytes, so that it is never too low after a crash.
AHEAD_BYTES = GiB


class WearLimitError(TieredError):
    """Error for a write that would exceed a path's lifetime limit. Nothing was written.

    Attributes:
        limit_bytes: limit on the bytes written to the path in its lifetime.
        need_bytes: size of the refused write.
    """

    def __init__(self, path: str, limit_bytes: int, written_bytes: int, need_bytes: int) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self.written_bytes, self.need_bytes = written_bytes, need_bytes
        super().__init__(
            f"'{path}' has a lifetime limit of {limit_bytes} bytes written ({format_size(limit_bytes)}, max_written), "
            f"and {written_bytes} ({format_size(written_bytes)}) are used: {format_size(need_bytes)} more would exceed "
            f"it. Nothing was written. Raise max_written of this path, or name a path on another drive; "
            f"{WEAR_NAME} in the path has the count"
        )


class WearCounter:
    """Count of the bytes written to a directory, stored in ``WEAR.json``. The caller holds the owner's lock.

    The count in the file is raised before bytes are written, in large steps. So it is never too low, and after a crash
    it is at most ``ahead_bytes`` too high. ``close`` writes the exact count.

    Args:
        directory: folder of the file. The caller holds the folder's lock.
        limit_bytes: limit on the bytes written in the directory's lifetime, or None.

    Raises:
        TieredError: the file cannot be read.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._path = directory / WEAR_NAME
        self.limit_bytes = limit_bytes
        self._ahead_bytes = ahead_bytes
        self.written_bytes = self._saved_bytes = self._read()

    def _read(self) -> int:
        try:
            count = json.loads(self._path.read_bytes())["written_bytes"]
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TieredError(
                f"'{self._path}' cannot be read ({error}): it counts the bytes written to this drive. "
                "Repair it, or delete it to count from zero"
            ) from error
        if not isinstance(count, int) or count < 0:
            raise TieredError(f"'{self._path}' counts {count!r} bytes. Repair it, or delete it to count from zero")
        return count

    def check(self, nbytes: int) -> None:
        """Raise ``WearLimitError`` if writing ``nbytes`` would exceed the limit."""
        if self.limit_bytes is not None and self.written_bytes + nbytes > self.limit_bytes:
            raise WearLimitError(str(self._path.parent), self.limit_bytes, self.written_bytes, nbytes)

    def add(self, nbytes: int) -> None:
        """Count bytes before they are written. If the drive returns an ``OSError``, no bytes are counted."""
        written_bytes = self.written_bytes + nbytes
        if written_bytes > self._saved_bytes:
            self._save(written_bytes + self._ahead_bytes)
        self.written_bytes = written_bytes

    def close(self) -> None:
        """Write the exact count to the file. If this fails, the count stays too high. Idempotent."""
        if self._saved_bytes != self.written_bytes:
            try:
                self._save(self.written_bytes)
            except OSError:
                return

    def _save(self, written_bytes: int) -> None:
        write_json(self._path, {"format": 1, "written_bytes": written_bytes}, durable=True)
        self._saved_bytes = written_bytes


def count_writes(counters: Sequence[WearCounter], nbytes_by_path: Mapping[int, int]) -> None:
    """Check all limits, then count a write to several paths. The caller holds the owner's lock.

    Raises:
        WearLimitError: the write would exceed a limit. Nothing is counted.
        OSError: a drive returned an error.
    """
    for index, nbytes in nbytes_by_path.items():
        counters[index].check(nbytes)
    for index, nbytes in nbytes_by_path.items():
        counters[index].add(nbytes)
