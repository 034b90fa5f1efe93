"""Charts of a report: loss, tokens per second, and memory per tier with its budget.

The module computes geometry in the units of an SVG view box, which ``page.html.j2`` draws. Curves of step metrics
have at most ``MAX_COLUMNS`` points. In longer runs, these are means over several steps, which limits the page's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from megatrain.extras.report.figures import Figures
from megatrain.extras.report.history import RunHistory
from megatrain.extras.report.text import binary_unit

__all__ = ["FRAME", "NUM_COLORS", "Chart", "Curve", "Drawing", "lay_out", "make_charts"]

NUM_COLORS = 6
#: Maximum number of points per curve.
MAX_COLUMNS = 240
_SMOOTHED_FROM = 40  # minimum number of steps for a smoothed curve
_SMOOTHED_OVER = 0.03  # time constant of smoothing, as a fraction of the run

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a chart.

    Attributes:
        name: Text in the legend; "" if the legend omits the curve.
        points: (step, value) pairs; a non-finite value leaves a gap.
        color: Number of a color in the style sheet, from 1.
        style: "", "faint" or "dashed".
        has_dots: Whether to mark every point.
    """

    name: str
    points: Sequence[Point]
    color: int = 1
    style: str = ""
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Contents of one chart.

    Attributes:
        unit: Unit of the values, printed next to the title.
        lines: Curves in drawing order.
        marks: (step, event) pairs, drawn as vertical lines.
        starts_at_zero: Whether the value axis begins at 0.
        format_value: Function that formats a value as text.
    """

    title: str
    unit: str = ""
    lines: Sequence[Curve] = ()
    marks: Sequence[tuple[float, str]] = ()
    starts_at_zero: bool = False
    format_value: Callable[[float], str] = "{:.4g}".format


class PlotFrame(NamedTuple):
    """Size of a chart's view box, and the position of the plot inside it."""

    width: int = 560
    height: int = 220
    left: int = 58
    right: int = 548
    top: int = 10
    bottom: int = 190


FRAME = PlotFrame()


@dataclass(frozen=True, slots=True)
class Drawing:
    """Geometry of a chart in ``FRAME``.

    Attributes:
        legend: (name, color number, style) of each curve.
        y_labels: (y, text) of each horizontal grid line.
        marks: (x, event) of each vertical line.
        curves: (color number, style, points of a polyline) of each curve without gaps.
        dots: (color number, x, y) of each marked point.
        tips: (x, width, text) of a strip per step, whose text is displayed on hover.
    """

    title: str
    unit: str
    legend: Sequence[tuple[str, int, str]]
    y_labels: Sequence[tuple[float, str]]
    x_labels: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, str]]
    curves: Sequence[tuple[int, str, str]]
    dots: Sequence[tuple[int, float, float]]
    tips: Sequence[tuple[float, float, str]]


def make_charts(history: RunHistory, figures: Figures) -> Iterator[Chart]:
    """Yield the charts of a run in the order of the page. ``lay_out`` returns None for charts without values."""
    steps = history.steps
    marks = [(float(step), f"continued after step {step}, {at}") for step, at in figures.restarts]
    if figures.loss_name:  # training and evaluation have different losses, which cannot share an axis
        yield Chart(f"Loss of training ({figures.loss_name})", lines=_losses(steps), marks=marks)
        yield Chart("Cross entropy of evaluations", lines=_evaluation_losses(figures), marks=marks)
    else:
        yield Chart("Loss", lines=[*_losses(steps), *_evaluation_losses(figures)], marks=marks)
    yield Chart(
        "Tokens per second",
        lines=[
            Curve("real", _curve(steps, "real_tokens_per_s"), 1),
            Curve("trained", _curve(steps, "trained_tokens_per_s"), 2),
        ],
        starts_at_zero=True,
        format_value=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.3g}",
    )
    for tier in figures.tiers:
        if any(step.get("tier_used_bytes", {}).get(tier) for step in steps):
            yield _occupancy(steps, tier, figures)


def lay_out(chart: Chart) -> Drawing | None:
    """Return a chart's geometry. Return None without values, or if its axis starts at zero and all values are zero."""
    scale = _Scale.from_chart(chart)
    if scale is None or (chart.starts_at_zero and not any(_values(chart))):
        return None
    y_labels = []
    for tick in nice_ticks(scale.low, scale.high):
        label = chart.format_value(0.0 if abs(tick) < 1e-12 * abs(scale.high) else tick)
        y_labels.append((scale.y(tick), label))
    pieces = [(line, piece) for line in chart.lines for piece in _pieces(line.points)]
    return Drawing(
        title=chart.title,
        unit=chart.unit,
        legend=[(line.name, line.color, line.style) for line in chart.lines if line.name],
        y_labels=y_labels,
        x_labels=[
            (scale.x(tick), f"{int(tick):,}") for tick in nice_ticks(scale.start, scale.stop, 6) if tick == int(tick)
        ],
        marks=[(scale.x(step), event) for step, event in chart.marks if scale.start <= step <= scale.stop],
        curves=[(line.color, line.style, scale.polyline(piece)) for line, piece in pieces if len(piece) > 1],
        dots=[
            (line.color, scale.x(step), scale.y(value))
            for line, piece in pieces
            if line.has_dots or len(piece) == 1
            for step, value in piece
        ],
        tips=list(_tips(chart, scale)),
    )


def column_means(points: Sequence[Point], num_columns: int = MAX_COLUMNS) -> list[Point]:
    """Reduce points to at most ``num_columns`` means of adjacent points, each placed at the last of its steps."""
    if len(points) <= num_columns:
        return list(points)
    edges = [round(index * len(points) / num_columns) for index in range(num_columns + 1)]
    means = []
    for start, stop in pairwise(edges):
        finite_values = [value for _, value in points[start:stop] if math.isfinite(value)]
        means.append((points[stop - 1][0], sum(finite_values) / len(finite_values) if finite_values else math.nan))
    return means


def nice_ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return at most ``max_ticks`` + 1 round numbers between ``low`` and ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw_width = span / max_ticks
    power = 10.0 ** math.floor(math.log10(raw_width))
    width = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw_width * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [index * width for index in range(first, last + 1)]


def _curve(steps: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    return column_means([(step["step"], step[key]) for step in steps if isinstance(step.get(key), int | float)])


def _losses(steps: Sequence[Mapping[str, Any]]) -> list[Curve]:
    data = [(float(step["step"]), float(step["loss"])) for step in steps]
    lines = [Curve("training", column_means(data))]
    if len(data) >= _SMOOTHED_FROM:
        lines = [Curve("each step", column_means(data), style="faint"), Curve("smoothed", column_means(_smooth(data)))]
    return lines


def _evaluation_losses(figures: Figures) -> list[Curve]:
    lines = []
    for index, (name, losses) in enumerate(figures.evaluations.items()):
        points = [(float(step), loss) for step, loss in losses]
        lines.append(Curve(name, points, 2 + index % (NUM_COLORS - 1), has_dots=True))
    return lines


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Return exponentially smoothed points, corrected for the initial bias towards 0."""
    decay = 1 - 1 / (1 + _SMOOTHED_OVER * len(points))
    mean, weight, smoothed = 0.0, 0.0, []
    for step, value in points:
        if math.isfinite(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append((step, mean / weight if weight else math.nan))
    return smoothed


def _occupancy(steps: Sequence[Mapping[str, Any]], tier: str, figures: Figures) -> Chart:
    def curve(key: str) -> list[Point]:
        return [(step["step"], step[key][tier]) for step in steps if tier in step.get(key, {})]

    used_bytes, limits = curve("tier_used_bytes"), curve("tier_capacity_bytes")
    unit, name = binary_unit(max([nbytes for _, nbytes in (*used_bytes, *limits)], default=0))
    lines = [
        Curve("in use after the step", column_means([(step, nbytes / unit) for step, nbytes in used_bytes]), 1),
        Curve("capacity", column_means([(step, nbytes / unit) for step, nbytes in limits]), 6, "dashed"),
    ]
    planned_bytes = figures.tiers[tier].planned
    if planned_bytes is not None and used_bytes:
        endpoints = [(used_bytes[0][0], planned_bytes / unit), (used_bytes[-1][0], planned_bytes / unit)]
        lines.append(Curve("planned minimum", endpoints, 3, "dashed"))
    return Chart(f"{tier.upper()} in use", name, lines=lines, starts_at_zero=True)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Mapping from steps and values to coordinates of the plot."""

    start: float
    stop: float
    low: float
    high: float

    @classmethod
    def from_chart(cls, chart: Chart) -> _Scale | None:
        steps = [step for line in chart.lines for step, _ in line.points]
        values = _values(chart)
        if not steps or not values:
            return None
        start, stop, low, high = min(steps), max(steps), min(values), max(values)
        if high - low <= 1e-12 * max(1.0, abs(high)):
            pad = abs(high) * 0.1 or 1.0
            low, high = (0.0 if chart.starts_at_zero and low >= 0 else low - pad), high + pad
        margin = 0.04 * (high - low)
        # An axis that starts at 0 has no margin below 0, so it starts at the frame.
        return cls(start, max(stop, start + 1), low if low == 0 else low - margin, high + margin)

    def x(self, step: float) -> float:
        return round(FRAME.left + (FRAME.right - FRAME.left) * (step - self.start) / (self.stop - self.start), 1)

    def y(self, value: float) -> float:
        return round(FRAME.top + (FRAME.bottom - FRAME.top) * (self.high - value) / (self.high - self.low), 1)

    def polyline(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in points)


def _values(chart: Chart) -> list[float]:
    """Return the finite values that the value axis must include."""
    values = [value for line in chart.lines for _, value in line.points if math.isfinite(value)]
    return [*values, 0.0] if chart.starts_at_zero else values


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the points of a curve, split at non-finite values."""
    piece: list[Point] = []
    for step, value in points:
        if math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _tips(chart: Chart, scale: _Scale) -> Iterator[tuple[float, float, str]]:
    texts: dict[float, list[str]] = {}
    for line in chart.lines:
        for step, value in line.points:
            value_text = chart.format_value(value) if math.isfinite(value) else str(value)
            texts.setdefault(step, []).append(f"{line.name or chart.title}: {value_text} {chart.unit}".rstrip())
    steps = sorted(texts)
    if len(steps) > 2 * MAX_COLUMNS:
        steps = steps[:: len(steps) // MAX_COLUMNS]
    edges = [FRAME.left, *((scale.x(a) + scale.x(b)) / 2 for a, b in pairwise(steps)), FRAME.right]
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        text = "\n".join([f"step {step:,.0f}", *texts[step]])
        yield round(left, 1), round(max(0.1, right - left), 1), text
