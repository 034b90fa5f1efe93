"""SVG picture of the traced steps in a timeline file (Trace Event Format)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from megatrain.base.timeline import COMPUTE, WAITING

__all__ = ["PASSES", "UPDATES", "WAITING", "Bar", "draw", "read_bars"]

PASSES, UPDATES = "layers", "updates"
WIDTH, LEFT, RIGHT, TOP = 1280, 150, 20, 84
BAR_HEIGHT, TRACK_HEIGHT, ROW_GAP = 22, 11, 14
_MIN_BAR_WIDTH = 0.25  # minimum distance between the ends of two bars of a track, in pixels
COLORS = {
    "forward": "#4c78a8",
    "head": "#b279a2",
    "backward": "#f58518",
    "update": "#54a24b",
    "waiting": "#e45756",
    "weights": "#72a1cf",
    "gradients": "#ffbf79",
    "optimizer state": "#88c580",
    "activations": "#bab0ac",
}
#: Prefixes of row names in the timeline file.
FETCHES, WRITES = "to ", "back to "


@dataclass(frozen=True)
class Bar:
    """A bar of the picture. Times are in seconds from the beginning of the picture."""

    row: str
    track: int
    kind: str
    label: str
    start_s: float
    end_s: float


def read_bars(trace: Path) -> list[Bar]:
    """Return the bars between the first and the last operation, or [] if the file has none or is truncated."""
    try:
        return list(_bars(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _bars(events: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X" and math.isfinite(event["ts"] + event["dur"])]
    ticks = [span for span in spans if names[span["tid"]] == COMPUTE]
    start = min(tick["ts"] for tick in ticks)
    end = max(tick["ts"] + tick["dur"] for tick in ticks)
    for span in spans:
        bar_start, bar_end = max(span["ts"], start), min(span["ts"] + span["dur"], end)
        if bar_start < bar_end:
            row, track = _split_row_name(names[span["tid"]])
            kind, label = _classify(row, span["name"])
            row = row if row != COMPUTE else UPDATES if kind == "update" else PASSES
            yield Bar(row, track, kind, label, (bar_start - start) / 1e6, (bar_end - start) / 1e6)


def _split_row_name(name: str) -> tuple[str, int]:
    """Split a row name of the timeline file into row and track. Names of tracks after the first end with a number."""
    row, _, track = name.rpartition(" ")
    return (row, int(track) - 1) if row and re.fullmatch("[1-9][0-9]{0,2}", track) else (name, 0)


def _classify(row: str, name: str) -> tuple[str, str]:
    if row == COMPUTE:
        phase, _, label = name.partition(" ")
        return phase, label
    if row.startswith(WAITING):
        return "waiting", ""
    suffix = name.rpartition("/")[2]
    if name.startswith("activations/"):
        return "activations", ""
    return ("weights" if suffix == "weight" else "gradients" if suffix.startswith("grad.") else "optimizer state"), ""


def draw(bars: Sequence[Bar], title: str, note: str) -> str:
    """Return an SVG element with rows for layers, updates and waiting, and a row for each direction of each link."""
    links = sorted({bar.row for bar in bars} - {PASSES, UPDATES, WAITING}, key=lambda row: (WRITES in row, row))
    span_s = max(bar.end_s for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / span_s
    y, parts = float(TOP), []
    for row in (PASSES, UPDATES, WAITING, *links):
        row_bars = [bar for bar in bars if bar.row == row]
        tracks = 1 + max((bar.track for bar in row_bars), default=0)
        height = TRACK_HEIGHT if row in links else BAR_HEIGHT
        parts.append(_label(LEFT - 10, y + tracks * height / 2 + 4, _row_label(row), anchor="end"))
        parts.append(_box(LEFT, y, WIDTH - LEFT - RIGHT, tracks * height, "#f4f4f4"))
        last_x = [0.0] * tracks
        for bar in row_bars:
            if (LEFT + bar.end_s * scale) - last_x[bar.track] < _MIN_BAR_WIDTH:
                continue  # skip bars that would be too narrow to see
            last_x[bar.track] = LEFT + bar.end_s * scale
            x, width = LEFT + bar.start_s * scale, max(0.6, (bar.end_s - bar.start_s) * scale)
            parts.append(
                _box(x, y + bar.track * height + 0.5, max(0.4, width - 0.6), height - 1, COLORS.get(bar.kind, "#999"))
            )
            if bar.label and width > 8 * len(bar.label):
                parts.append(_label(x + width / 2, y + height / 2 + 4, bar.label, size=11, fill="white"))
        y += tracks * height + ROW_GAP
    ruler = [*_ruler(span_s, scale, y), *_legend({bar.kind for bar in bars})]
    headings = [_label(LEFT, 22, title, anchor="start", size=15), _label(LEFT, 42, note, anchor="start", fill="#555")]
    size = f'width="{WIDTH}" height="{y + 24:.0f}" viewBox="0 0 {WIDTH} {y + 24:.0f}"'
    body = "\n".join([_box(0, 0, WIDTH, y + 24, "white"), *headings, *parts, *ruler])
    return f'<svg {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'


def _row_label(row: str) -> str:
    """Return the displayed label of a row, without the row's data path."""
    name = row.partition(" (")[0]
    if name.startswith(WRITES):
        return f"write to {name.removeprefix(WRITES)}"
    return f"fetch to {name.removeprefix(FETCHES)}" if name.startswith(FETCHES) else name


def _ruler(span_s: float, scale: float, bottom: float) -> Iterator[str]:
    steps = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 600)
    tick_s = next((step for step in steps if span_s / step <= 12), span_s / 12)
    for index in range(int(span_s / tick_s) + 1):
        x = LEFT + index * tick_s * scale
        yield f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#999" stroke-opacity="0.35"/>'
        yield _label(x, bottom + 12, f"{1000 * index * tick_s:g} ms", size=11, fill="#555")


def _legend(kinds: set[str]) -> Iterator[str]:
    x = float(LEFT)
    for kind, color in COLORS.items():
        if kind in kinds:
            yield _box(x, 55, 12, 12, color)
            yield _label(x + 17, 65, kind, anchor="start")
            x += 34 + 7 * len(kind)


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _label(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, fill: str = "#222") -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
    return f"<text {attributes}>{escape(text)}</text>"
