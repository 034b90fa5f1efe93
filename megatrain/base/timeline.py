"""Timeline of traced steps for Perfetto, with computation, transfers and stalls. Does not import torch.

The file is in Chrome's Trace Event Format (JSON), for https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tiered import Event

TIMELINE_NAME = "trace.json"
#: The first two rows of a timeline. The rows for transfers follow.
COMPUTE, WAITING = "compute", "waiting"


@dataclass(frozen=True, slots=True)
class Span:
    """One bar in a row of the timeline. Times are in seconds, from ``time.perf_counter``."""

    row: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


class TimedOp(Protocol):
    """Protocol with the fields of a tape op that a timeline reads."""

    @property
    def tick(self) -> int: ...

    @property
    def phase(self) -> str: ...

    @property
    def visit(self) -> int: ...


class Timeline:
    """Collector of spans while ``is_recording`` is set. Thread-safe, because links report from their own threads.

    Attributes:
        is_recording: Whether spans are collected.
        read_usage: Function that returns the bytes in use, by tier. Called at each op. None to collect no usage.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.read_usage: Callable[[], Mapping[str, int]] | None = None
        self._usage: list[tuple[float, Mapping[str, int]]] = []
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._current_op: tuple[str, float] | None = None

    @property
    def spans(self) -> list[Span]:
        """The collected spans, sorted by start time."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start_s)

    def on_event(self, event: Event) -> None:
        """Add a stall or a transfer that a store reports (``TieredStore(on_event=...)``)."""
        if not self.is_recording:
            return
        if event.kind == "stall":
            self._add(Span(WAITING, f"{event.detail} {event.key}", event.start_s, event.end_s))
        elif event.kind in ("fetch", "write_back"):
            row = f"{'to' if event.kind == 'fetch' else 'back to'} {event.tier} ({event.detail})"
            self._add(Span(row, event.key, event.start_s, event.end_s, event.nbytes))

    def on_op(self, op: TimedOp | None) -> None:
        """Record the start of a tape op, or the end of a step if ``op`` is None."""
        now_s = time.perf_counter()
        if self._current_op is not None and self.is_recording:
            self._add(Span(COMPUTE, self._current_op[0], self._current_op[1], now_s))
        if self.is_recording and self.read_usage is not None:
            self._usage.append((now_s, self.read_usage()))
        self._current_op = None if op is None else (f"{op.phase} {op.visit}", now_s)

    def _add(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    def write(self, path: Path) -> Path:
        """Write the collected spans to a file, atomically.

        Returns:
            Path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        temporary_path = path.with_suffix(".tmp")
        temporary_path.write_text(json.dumps({"traceEvents": list(self._trace_events()), "displayTimeUnit": "ms"}))
        os.replace(temporary_path, path)
        return path

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        spans = self.spans
        start_s = spans[0].start_s if spans else 0.0
        rows = [COMPUTE, WAITING, *dict.fromkeys(span.row for span in spans if span.row not in (COMPUTE, WAITING))]
        threads: dict[tuple[str, int], int] = {}
        for row in rows:
            for lane, span in _lanes([span for span in spans if span.row == row]):
                if (row, lane) not in threads:
                    threads[row, lane] = len(threads)
                    yield _metadata(threads[row, lane], row if lane == 0 else f"{row} {lane + 1}")
                yield {
                    "ph": "X",
                    "pid": 0,
                    "tid": threads[row, lane],
                    "name": span.name,
                    "ts": (span.start_s - start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"bytes": span.nbytes} if span.nbytes else {},
                }
        for time_s, usage in self._usage:
            for tier, nbytes in usage.items():
                time_us = (time_s - start_s) * 1e6
                yield {"ph": "C", "pid": 0, "name": f"{tier} in use", "ts": time_us, "args": {"bytes": nbytes}}


def _lanes(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the index of the first sub-row in which it overlaps no other span."""
    ends_s: list[float] = []
    for span in spans:
        lane = next((index for index, end_s in enumerate(ends_s) if end_s <= span.start_s), len(ends_s))
        ends_s[lane : lane + 1] = [span.end_s]
        yield lane, span


def _metadata(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name, "sort_index": thread}}
