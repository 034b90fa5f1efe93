"""Meter: the counters of one direction of one link."""

from __future__ import annotations

import threading
import time

from tiered.links.base import LinkUsage


class Meter:
    """Counts transfers as they start and end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_transfers = 0
        self._num_active = 0
        self._inflight_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    def start(self, nbytes: int) -> None:
        """Count a transfer as under way."""
        with self._lock:
            if self._num_active == 0:
                self._busy_since_s = time.perf_counter()
            self._num_active += 1
            self._inflight_bytes += nbytes

    def end(self, nbytes: int, *, moved: bool) -> None:
        """Count a transfer as ended; ``moved`` is False when it failed. Call it before ``Transfer.finish``."""
        with self._lock:
            self._num_active -= 1
            self._inflight_bytes -= nbytes
            if moved:
                self._num_bytes += nbytes
                self._num_transfers += 1
            if self._num_active == 0:
                self._busy_s += time.perf_counter() - self._busy_since_s

    def usage(self, path: str) -> LinkUsage:
        """Return the counters now, the present busy time included."""
        with self._lock:
            busy_s = self._busy_s + (time.perf_counter() - self._busy_since_s if self._num_active else 0.0)
            return LinkUsage(self._num_bytes, busy_s, self._inflight_bytes, self._num_transfers, path)
