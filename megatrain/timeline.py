"""The timeline of traced steps: what computed, what moved and what waited, as a file that Perfetto opens.

The format is the Trace Event Format (JSON) of Chrome, read by https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.engine.tape import Op
    from tiered import Event

#: Rows in the order in which they are shown; links follow as they appear.
COMPUTE, WAITING = "compute", "waiting"


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: ``row`` says where, ``name`` what; seconds of ``time.perf_counter``."""

    row: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


class Timeline:
    """Collects spans while it is on. Thread-safe: links tell from their own threads.

    Attributes:
        is_on: whether spans are kept. Switching costs nothing; a timeline that is off keeps nothing.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._op: tuple[str, float] | None = None

    @property
    def spans(self) -> list[Span]:
        """Return what was collected, in order of the start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start_s)

    def on_event(self, event: Event) -> None:
        """Take an event of a store (``TieredStore(on_event=...)``)."""
        if not self.is_on:
            return
        if event.kind == "stall":
            self._add(Span(WAITING, f"{event.detail} {event.key}", event.start_s, event.end_s))
        elif event.kind in ("fetch", "write_back"):
            row = f"{'to' if event.kind == 'fetch' else 'back to'} {event.tier} ({event.detail})"
            self._add(Span(row, event.key, event.start_s, event.end_s, event.nbytes))

    def on_op(self, op: Op | None) -> None:
        """Note that the engine comes to an op of the tape, or to the end of a step (None)."""
        now_s = time.perf_counter()
        if self._op is not None and self.is_on:
            self._add(Span(COMPUTE, self._op[0], self._op[1], now_s))
        self._op = None if op is None else (f"{op.phase} {op.visit}", now_s)

    def _add(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    def write(self, path: Path) -> Path:
        """Write everything collected so far, at once or not at all; return the path. Raises ``OSError``."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"traceEvents": list(self._trace_events()), "displayTimeUnit": "ms"}))
        os.replace(temporary, path)
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


def _lanes(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the first lane in which it overlaps no other."""
    ends_s: list[float] = []
    for span in spans:
        lane = next((number for number, end_s in enumerate(ends_s) if end_s <= span.start_s), len(ends_s))
        ends_s[lane : lane + 1] = [span.end_s]
        yield lane, span


def _metadata(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name, "sort_index": thread}}
