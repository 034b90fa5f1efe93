"""A timeline that was written, read again: is it whole, and what is in it. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "trace.json"


class NoTimelineError(Exception):
    """There is no timeline; the text says how to get one."""


class TimelineError(Exception):
    """A file is not a timeline that a viewer could show."""


@dataclass(frozen=True, slots=True)
class RowSummary:
    """One row: how many spans, how long at least one of them was open, and the bytes that they moved."""

    name: str
    num_spans: int
    busy_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class TimelineSummary:
    """What a timeline holds.

    Attributes:
        seconds: from the first start to the last end.
        rows: in the order of the file, lanes of one row together.
    """

    num_spans: int
    seconds: float
    rows: tuple[RowSummary, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def find_timeline(run: Path) -> Path:
    """Return the timeline of a run's folder; a file is one itself.

    Raises:
        NoTimelineError: the run has written none.
    """
    path = run / FILE_NAME if run.is_dir() else run
    if not path.is_file():
        raise NoTimelineError(
            f"'{run}' holds no {FILE_NAME}. Name steps in the config and run them:\n  [profile]\n  trace_steps = [3, 4]"
        )
    return path


def summarize(path: Path) -> TimelineSummary:
    """Read a timeline and check it: an object with ``traceEvents``, each span with a start, a length and a row.

    Raises:
        TimelineError: it is not one, or is cut off.
        OSError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TimelineError(f"{path}: this is not JSON: {error}. Run the traced steps again") from None
    events = values.get("traceEvents") if isinstance(values, dict) else None
    if not isinstance(events, list):
        raise TimelineError(f"{path}: this is no timeline: it has no traceEvents")
    names: dict[Any, str] = {}
    spans: dict[Any, list[tuple[float, float, int]]] = {}
    for number, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise TimelineError(f"{path}: event {number} has no phase `ph`")
        row = (event.get("pid"), event.get("tid"))
        if event["ph"] == "M" and event.get("name") == "thread_name":
            names[row] = str(event.get("args", {}).get("name", row))
        elif event["ph"] == "X":
            spans.setdefault(row, []).append(_span(path, number, event))
    if not spans:
        raise TimelineError(f"{path}: the timeline is empty: no traced step was run")
    return _summary(names, spans)


def _span(path: Path, number: int, event: dict[str, Any]) -> tuple[float, float, int]:
    start, length = event.get("ts"), event.get("dur")
    for value in (start, length):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TimelineError(f"{path}: event {number} has no time: ts = {start!r}, dur = {length!r}")
    assert start is not None and length is not None
    nbytes = event.get("args", {}).get("bytes", 0)
    return float(start) / 1e6, float(start + length) / 1e6, int(nbytes)


def _summary(names: dict[Any, str], spans: dict[Any, list[tuple[float, float, int]]]) -> TimelineSummary:
    rows: dict[str, list[tuple[float, float, int]]] = {}
    for row, found in spans.items():
        name = names.get(row, str(row[1]))
        base, _, lane = name.rpartition(" ")
        rows.setdefault(base if lane.isdecimal() and base in names.values() else name, []).extend(found)
    everything = [span for found in rows.values() for span in found]
    seconds = max(end for _, end, _ in everything) - min(start for start, _, _ in everything)
    summaries = [
        RowSummary(name, len(found), sum(_busy(found)), sum(nbytes for _, _, nbytes in found))
        for name, found in rows.items()
    ]
    return TimelineSummary(len(everything), seconds, tuple(summaries))


def _busy(spans: list[tuple[float, float, int]]) -> Iterator[float]:
    """Yield lengths that add up to the time during which at least one span was open."""
    until = -math.inf
    for start, end, _ in sorted(spans):
        yield max(0.0, end - max(start, until))
        until = max(until, end)
