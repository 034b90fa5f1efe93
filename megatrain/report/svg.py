"""Charts as SVG text, drawn here: no library, no script; colours come from the page's style sheet.

A chart has a fixed number of columns: longer runs are gathered, so that the size of a page does not grow with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

__all__ = ["Area", "Chart", "Line", "bar", "draw_chart", "gather", "nice_ticks"]

_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 30
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
#: Columns of a chart; more points than these are gathered.
MAX_COLUMNS = 240
_DOT_RADIUS = 2.6

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve.

    Attributes:
        name: in the legend.
        points: (step, value); values that are not finite leave a gap.
        color: number of a colour of the style sheet, from 1.
        style: further classes: ``faint``, ``dashed``.
        dots: whether every point is marked.
    """

    name: str
    points: Sequence[Point]
    color: int = 1
    style: str = ""
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """A band of a stack, on top of those before it; the points of all bands have the same steps."""

    name: str
    points: Sequence[Point]
    color: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn in one frame.

    Attributes:
        title: above it.
        unit: of the values, in the title.
        marks: (step, what) as vertical lines.
        is_log: whether the axis of values is logarithmic.
        starts_at_zero: whether it begins at 0.
        format_value: value -> text.
    """

    title: str
    unit: str = ""
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    is_log: bool = False
    starts_at_zero: bool = False
    format_value: Callable[[float], str] = lambda value: f"{value:.4g}"


def draw_chart(chart: Chart) -> str:
    """Return a chart as a ``figure`` element; empty where no point can be shown."""
    values = [value for value in _values(chart) if not chart.is_log or value > 0]
    steps = [step for line in chart.lines for step, _ in line.points]
    steps += [step for area in chart.areas for step, _ in area.points]
    if not values or not steps:
        return ""
    frame = _Frame(chart, min(steps), max(steps), min(values), max(values))
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    keys = [(area.name, f"k{area.color}") for area in chart.areas]
    keys += [(line.name, f"k{line.color} {line.style}") for line in chart.lines]
    legend = "".join(f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>' for name, kind in keys if name)
    body = "".join(frame.parts())
    return (
        f"<figure><figcaption><b>{escape(chart.title)}</b>{unit}<span class=legend>{legend}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">{body}</svg>'
        "</figure>"
    )


def bar(parts: Sequence[tuple[str, float, int]]) -> str:
    """Return one horizontal bar cut into shares: (name, amount, number of a colour)."""
    total = sum(amount for _, amount, _ in parts)
    if total <= 0:
        return ""
    pieces, x = [], 0.0
    for name, amount, color in parts:
        width = 1000 * amount / total
        label = f"<title>{escape(name)}: {amount / total:.1%}</title>"
        pieces.append(f'<rect class="f{color}" x="{x:.1f}" y="0" width="{width:.1f}" height="26">{label}</rect>')
        x += width
    return f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img">{"".join(pieces)}</svg>'


def gather(points: Sequence[Point], num_columns: int = MAX_COLUMNS) -> list[Point]:
    """Return at most so many points: runs of neighbours become their last step and their mean."""
    if len(points) <= num_columns:
        return list(points)
    edges = [round(number * len(points) / num_columns) for number in range(num_columns + 1)]
    gathered = []
    for first, last in pairwise(edges):
        finite = [value for _, value in points[first:last] if math.isfinite(value)]
        gathered.append((points[last - 1][0], sum(finite) / len(finite) if finite else math.nan))
    return gathered


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``most`` + 1 of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [number * width for number in range(first, last + 1)]


def _values(chart: Chart) -> list[float]:
    """Return the finite values that the axis must hold: of lines, and the sums of stacked bands."""
    found = [value for line in chart.lines for _, value in line.points]
    columns = zip(*(area.points for area in chart.areas), strict=True)
    found += [sum(value for _, value in column if math.isfinite(value)) for column in columns]
    if chart.areas or chart.starts_at_zero:
        found.append(0.0)
    return [value for value in found if math.isfinite(value)]


class _Frame:
    """The plot of one chart: its scales, and everything that is drawn in it."""

    def __init__(self, chart: Chart, first: float, last: float, low: float, high: float) -> None:
        self._chart = chart
        self._first, self._last = first, last if last > first else first + 1
        if chart.is_log:
            low, high = math.log10(low), math.log10(high)
        if high - low <= 1e-12 * max(1.0, abs(high)):
            pad = abs(high) * 0.1 or 1.0
            low, high = (0.0 if chart.starts_at_zero and low >= 0 and not chart.is_log else low - pad), high + pad
        margin = 0.04 * (high - low)
        self._low = low if low == 0 and not chart.is_log else low - margin
        self._high = high + margin

    def _x(self, step: float) -> float:
        return _LEFT + _PLOT_WIDTH * (step - self._first) / (self._last - self._first)

    def _y(self, value: float) -> float:
        if self._chart.is_log:
            value = math.log10(value)
        return _TOP + _PLOT_HEIGHT * (self._high - value) / (self._high - self._low)

    def parts(self) -> Iterator[str]:
        yield from self._grid()
        floor: list[float] = []
        for area in self._chart.areas:
            points = [value if math.isfinite(value) else 0.0 for _, value in area.points]
            floor = floor or [0.0] * len(points)
            top = [below + value for below, value in zip(floor, points, strict=True)]
            yield self._band(area, floor, top)
            floor = top
        for step, what in self._chart.marks:
            if self._first <= step <= self._last:
                x = self._x(step)
                line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _PLOT_HEIGHT}"/>'
                yield f'<g class="mark">{line}<title>{escape(what)}</title></g>'
        for curve in self._chart.lines:
            yield from self._curve(curve)
        yield from self._tips()

    def _grid(self) -> Iterator[str]:
        if self._chart.is_log:
            low, high = math.floor(self._low), math.ceil(self._high)
            every = max(1, (high - low) // 6)
            ticks = [10.0**power for power in range(low, high + 1, every) if self._low <= power <= self._high]
            if len(ticks) < 2:
                ticks = [tick for tick in nice_ticks(10**self._low, 10**self._high, 4) if tick > 0]
        else:
            ticks = nice_ticks(self._low, self._high)
        for tick in ticks:
            y = self._y(tick)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            label = escape(self._chart.format_value(0.0 if abs(tick) < 1e-12 * abs(self._high) else tick))
            yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
        for tick in nice_ticks(self._first, self._last, 6):
            if tick == int(tick):
                x = self._x(tick)
                yield f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{int(tick):,}</text>'
        yield f'<text class="tick" x="{_LEFT - 12}" y="{_HEIGHT - 12}" text-anchor="end">step</text>'
        y = _TOP + _PLOT_HEIGHT
        yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'

    def _band(self, area: Area, floor: Sequence[float], top: Sequence[float]) -> str:
        steps = [self._x(step) for step, _ in area.points]
        if len(steps) == 1:
            steps, floor, top = [_LEFT, _WIDTH - _RIGHT], [*floor] * 2, [*top] * 2
        there = [f"{x:.1f},{self._y(value):.1f}" for x, value in zip(steps, top, strict=True)]
        back = [f"{x:.1f},{self._y(value):.1f}" for x, value in zip(steps, floor, strict=True)]
        return f'<polygon class="f{area.color}" points="{" ".join([*there, *reversed(back)])}"/>'

    def _curve(self, line: Line) -> Iterator[str]:
        pieces: list[list[str]] = [[]]
        for step, value in line.points:
            if not math.isfinite(value) or (self._chart.is_log and value <= 0):
                pieces.append([])
                continue
            pieces[-1].append(f"{self._x(step):.1f},{self._y(value):.1f}")
        for piece in pieces:
            if len(piece) > 1:
                yield f'<polyline class="s{line.color} {line.style}" points="{" ".join(piece)}"/>'
            for at in piece if line.dots or len(piece) == 1 else ():
                x, y = at.split(",")
                yield f'<circle class="f{line.color}" cx="{x}" cy="{y}" r="{_DOT_RADIUS}"/>'

    def _tips(self) -> Iterator[str]:
        """Yield a strip for each step that shows its values when the pointer is on it."""
        texts: dict[float, list[str]] = {}
        curves = [(area.name, area.points) for area in self._chart.areas]
        for name, points in (*curves, *((line.name, line.points) for line in self._chart.lines)):
            for step, value in points:
                shown = self._chart.format_value(value) if math.isfinite(value) else str(value)
                texts.setdefault(step, []).append(f"{name or self._chart.title}: {shown} {self._chart.unit}")
        steps = sorted(texts)
        if len(steps) > 2 * MAX_COLUMNS:
            steps = steps[:: len(steps) // MAX_COLUMNS]
        edges = [_LEFT, *((self._x(a) + self._x(b)) / 2 for a, b in pairwise(steps)), _WIDTH - _RIGHT]
        for step, (left, right) in zip(steps, pairwise(edges), strict=True):
            text = escape("\n".join([f"step {step:,.0f}", *texts[step]]))
            where = f'x="{left:.1f}" y="{_TOP}" width="{max(0.1, right - left):.1f}" height="{_PLOT_HEIGHT}"'
            yield f'<rect class="tip" {where}><title>{text}</title></rect>'
