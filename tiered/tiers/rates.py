"""Rates of a tier's paths, measured while it works, and the news that one has slowed down."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiered.units import MiB, format_size

#: Bytes after which the rate of a path is looked at: 32 parts of a large transfer.
WINDOW_BYTES = 512 * MiB
#: Windows that must be known before one can be called slow, and slow ones in a row before somebody is told.
_NUM_USUAL, _NUM_SLOW = 4, 2
_SLOW_SHARE = 1 / 3
_NUM_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class PathRates:
    """What a path did so far. Rates are bytes per second over the time that a part was under way; 0.0: not known.

    Attributes:
        read_bytes_per_s: over the whole time, each direction for itself.
        write_bytes_per_s: over the whole time, each direction for itself.
        recent_bytes_per_s: both directions together, in the last window of ``WINDOW_BYTES``; the median of the windows
            before that were not slow.
        usual_bytes_per_s: both directions together, in the last window of ``WINDOW_BYTES``; the median of the windows
            before that were not slow.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    recent_bytes_per_s: float
    usual_bytes_per_s: float


class _Busy:
    """Bytes, and the time during which at least one part was under way."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._num_active = 0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        self.look(now_s)
        self._num_active += 1

    def end(self, now_s: float, nbytes: int) -> None:
        self.look(now_s)
        self._num_active -= 1
        self.nbytes += nbytes

    def look(self, now_s: float) -> None:
        """Count the time up to now."""
        if self._num_active:
            self.busy_s += now_s - self._since_s
        self._since_s = now_s

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


class PathMeter:
    """Measures one path. Thread-safe.

    Not the time of single parts: that depends on how many are under way at once. Reads and writes share a drive, so
    only both together tell whether it has slowed down.

    Args:
        window_bytes: bytes between two looks.
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
                news = self._look()
            if news is not None:
                on_slow(news)

    def _look(self) -> str | None:
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
