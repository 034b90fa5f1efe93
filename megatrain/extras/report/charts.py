"""The charts of a report: which there are, and where their lines, bands and labels lie.

Only geometry, in the units of an SVG view box: ``page.html.j2`` draws it. A chart has a fixed number of columns, and
the steps of a longer run are averaged: a page does not grow with its run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from megatrain.extras.report.figures import COMPUTING, Figures
from megatrain.extras.report.history import RunHistory
from megatrain.extras.report.text import binary_unit, cause_name
from tiered.units import GB

__all__ = ["COLOR_OF_PART", "FRAME", "Area", "Chart", "Curve", "Drawing", "laid_over", "lay_out", "make_charts"]

#: Colours of the parts of a step, by their numbers in the style sheet; the same in all charts.
COLOR_OF_PART = {COMPUTING: 1, "fill": 2, "drain": 3, "space": 4, "lease": 5, "commit": 6}
NUM_COLORS = 6
#: Most points of a line.
MAX_COLUMNS = 240
_SMOOTHED_FROM = 40  # steps
_SMOOTHED_OVER = 0.03  # of the run
_WIDE_RANGE = 30  # largest gradient norm / smallest: from here on the axis is logarithmic

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve.

    Attributes:
        name: In the legend; "" for none.
        points: (step, value); a value that is not finite leaves a gap.
        color: Number of a colour of the style sheet, from 1.
        style: "", "faint" or "dashed".
        dots: Whether every point is marked.
    """

    name: str
    points: Sequence[Point]
    color: int = 1
    style: str = ""
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """A band of a stack, on top of those before it; all bands of a chart have the same steps."""

    name: str
    points: Sequence[Point]
    color: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """What one chart shows.

    Attributes:
        title: Its heading.
        unit: Of the values, beside the heading.
        lines: Curves, in the order of drawing.
        areas: Bands, from the bottom up.
        marks: (step, what happened) as vertical lines.
        is_log: Whether the axis of values is logarithmic.
        starts_at_zero: Whether it begins at 0.
        format_value: value -> text.
        x_name: What the horizontal axis counts.
    """

    title: str
    unit: str = ""
    lines: Sequence[Curve] = ()
    areas: Sequence[Area] = ()
    marks: Sequence[tuple[float, str]] = ()
    is_log: bool = False
    starts_at_zero: bool = False
    format_value: Callable[[float], str] = "{:.4g}".format
    x_name: str = "step"

    @property
    def shapes(self) -> list[Area | Curve]:
        """Bands and lines, in the order of drawing."""
        return [*self.areas, *self.lines]


class Frame(NamedTuple):
    """The view box of a chart, and the plot in it."""

    width: int = 560
    height: int = 220
    left: int = 58
    right: int = 548
    top: int = 10
    bottom: int = 190


FRAME = Frame()


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart laid out in ``FRAME``.

    Attributes:
        title: Its heading.
        unit: Of the values.
        legend: (name, number of a colour, style).
        y_labels: (y, text) of each line of the grid.
        x_labels: (x, text).
        bands: (number of a colour, points of a polygon).
        marks: (x, what happened).
        curves: (number of a colour, style, points of a polyline).
        dots: (number of a colour, x, y).
        tips: (x, width, text) of a strip for each step: its values, shown when the pointer is on it.
        x_name: What the horizontal axis counts.
    """

    title: str
    unit: str
    legend: Sequence[tuple[str, int, str]]
    y_labels: Sequence[tuple[float, str]]
    x_labels: Sequence[tuple[float, str]]
    bands: Sequence[tuple[int, str]]
    marks: Sequence[tuple[float, str]]
    curves: Sequence[tuple[int, str, str]]
    dots: Sequence[tuple[int, float, float]]
    tips: Sequence[tuple[float, float, str]]
    x_name: str = "step"


def make_charts(history: RunHistory, figures: Figures) -> Iterator[Chart]:
    """Yield the charts of a run in the order of the page; ``lay_out`` returns None for those with nothing to show."""
    steps = history.steps
    marks = [(float(step), f"continued after step {step}, {at}") for step, at in figures.restarts]
    if figures.loss_name:  # of two kinds: they have no axis in common
        yield Chart(f"Loss of training ({figures.loss_name})", lines=_losses(steps), marks=marks)
        yield Chart("Cross entropy of evaluations", lines=_evaluation_losses(figures), marks=marks)
    else:
        yield Chart("Loss", lines=[*_losses(steps), *_evaluation_losses(figures)], marks=marks)
    yield Chart("Learning rate", lines=[Curve("", _curve(steps, "lr"))], starts_at_zero=True, format_value=_format_rate)
    norms = _curve(steps, "grad_norm")
    positive = [norm for _, norm in norms if norm > 0]
    is_wide = max(positive, default=0) > _WIDE_RANGE * min(positive, default=1)
    yield Chart("Gradient norm", lines=[Curve("", norms)], marks=marks, is_log=is_wide, starts_at_zero=not is_wide)
    yield Chart(
        "Tokens per second",
        lines=[
            Curve("real", _curve(steps, "real_tokens_per_s"), 1),
            Curve("trained", _curve(steps, "trained_tokens_per_s"), 2),
        ],
        starts_at_zero=True,
        format_value=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.3g}",
    )
    parts = list(_parts_of_a_step(steps, figures))
    yield Chart("Where the time of a step went", "s", areas=parts, format_value="{:.3g}".format)
    for tier in figures.tiers:
        if any(step.get("tier_used_bytes", {}).get(tier) for step in steps):
            yield _occupancy(steps, tier, figures)
    for tier, samples in history.usage.items():
        if any(nbytes for _, nbytes in samples):
            yield _within_steps(tier, samples, figures.capacity_bytes.get(tier, 0))
    yield Chart("Bandwidth of links while they move", "GB/s", lines=list(_bandwidths(steps)), starts_at_zero=True)
    unit, name = binary_unit(max((step.get("rss_bytes", 0) for step in steps), default=0))
    in_tier = [(step["step"], step.get("tier_used_bytes", {}).get("ram", 0) / unit) for step in steps]
    memory = [Curve("process", _curve(steps, "rss_bytes", unit)), Curve("of it in the RAM tier", average(in_tier), 2)]
    yield Chart("Memory of the process", name, lines=memory, starts_at_zero=True)
    yield Chart("Written to drives", "GB", lines=list(_written(steps, figures)), starts_at_zero=True)


def lay_out(chart: Chart) -> Drawing | None:
    """Return where the parts of a chart lie; None where there is no point to show, or what it counts from 0 stays 0."""
    scale = _Scale.of(chart)
    if scale is None or ((chart.starts_at_zero or chart.areas) and not any(_values(chart))):
        return None
    legend = [(area.name, area.color, "") for area in chart.areas]
    legend += [(line.name, line.color, line.style) for line in chart.lines]
    y_ticks = _log_ticks(scale) if chart.is_log else nice_ticks(scale.low, scale.high)
    y_labels = []
    for tick in y_ticks:
        label = chart.format_value(0.0 if abs(tick) < 1e-12 * abs(scale.high) else tick)
        y_labels.append((scale.y(tick), label))
    pieces = [(line, piece) for line in chart.lines for piece in _pieces(line.points, chart.is_log)]
    return Drawing(
        title=chart.title,
        unit=chart.unit,
        legend=[key for key in legend if key[0]],
        y_labels=y_labels,
        x_labels=[
            (scale.x(tick), f"{int(tick):,}") for tick in nice_ticks(scale.first, scale.last, 6) if tick == int(tick)
        ],
        bands=list(_bands(chart.areas, scale)),
        marks=[(scale.x(step), what) for step, what in chart.marks if scale.first <= step <= scale.last],
        curves=[(line.color, line.style, scale.polyline(piece)) for line, piece in pieces if len(piece) > 1],
        dots=[
            (line.color, scale.x(step), scale.y(value))
            for line, piece in pieces
            if line.dots or len(piece) == 1
            for step, value in piece
        ],
        tips=list(_tips(chart, scale)),
        x_name=chart.x_name,
    )


def average(points: Sequence[Point], num_columns: int = MAX_COLUMNS) -> list[Point]:
    """Return at most ``num_columns`` points: runs of neighbours become the mean of their values at their last step."""
    if len(points) <= num_columns:
        return list(points)
    edges = [round(number * len(points) / num_columns) for number in range(num_columns + 1)]
    means = []
    for first, last in pairwise(edges):
        finite = [value for _, value in points[first:last] if math.isfinite(value)]
        means.append((points[last - 1][0], sum(finite) / len(finite) if finite else math.nan))
    return means


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


def _curve(steps: Sequence[Mapping[str, Any]], key: str, unit: float = 1.0) -> list[Point]:
    return average([(step["step"], step[key] / unit) for step in steps if isinstance(step.get(key), int | float)])


def _losses(steps: Sequence[Mapping[str, Any]]) -> list[Curve]:
    raw = [(float(step["step"]), float(step["loss"])) for step in steps]
    lines = [Curve("training", average(raw))]
    if len(raw) >= _SMOOTHED_FROM:
        lines = [Curve("each step", average(raw), style="faint"), Curve("smoothed", average(_smooth(raw)))]
    return lines


def _evaluation_losses(figures: Figures) -> list[Curve]:
    lines = []
    for number, (name, losses) in enumerate(figures.evaluations.items()):
        points = [(float(step), loss) for step, loss in losses]
        lines.append(Curve(name, points, 2 + number % (NUM_COLORS - 1), dots=True))
    return lines


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Return exponential moving averages, corrected for the bias of their start towards 0."""
    memory = 1 - 1 / (1 + _SMOOTHED_OVER * len(points))
    mean, weight, smooth = 0.0, 0.0, []
    for step, value in points:
        if math.isfinite(value):
            mean, weight = memory * mean + (1 - memory) * value, memory * weight + (1 - memory)
        smooth.append((step, mean / weight if weight else math.nan))
    return smooth


def _parts_of_a_step(steps: Sequence[Mapping[str, Any]], figures: Figures) -> Iterator[Area]:
    for part, color in COLOR_OF_PART.items():
        seconds = [_seconds_of(step, part) for step in steps]
        if part == COMPUTING or (part in figures.time_s and any(seconds)):
            points = [(float(step["step"]), value) for step, value in zip(steps, seconds, strict=True)]
            yield Area(cause_name(part), average(points), color)


def _seconds_of(step: Mapping[str, Any], part: str) -> float:
    waits: Mapping[str, float] = step.get("stall_s", {})
    if part == COMPUTING:
        return max(0.0, float(step.get("step_s", 0.0)) - sum(waits.values()))
    return float(waits.get(part, 0.0))


def _occupancy(steps: Sequence[Mapping[str, Any]], tier: str, figures: Figures) -> Chart:
    def curve(key: str) -> list[Point]:
        return [(step["step"], step[key][tier]) for step in steps if tier in step.get(key, {})]

    used, limits = curve("tier_used_bytes"), curve("tier_capacity_bytes")
    unit, name = binary_unit(max([nbytes for _, nbytes in (*used, *limits)], default=0))
    lines = [
        Curve("in use after the step", average([(step, nbytes / unit) for step, nbytes in used]), 1),
        Curve("capacity", average([(step, nbytes / unit) for step, nbytes in limits]), 6, "dashed"),
    ]
    planned = figures.tiers[tier].planned
    if planned is not None and used:
        ends = [(used[0][0], planned / unit), (used[-1][0], planned / unit)]
        lines.append(Curve("planned: the least that it needs", ends, 3, "dashed"))
    return Chart(f"{tier.upper()} in use", name, lines=lines, starts_at_zero=True)


def _within_steps(tier: str, samples: Sequence[Point], capacity_bytes: int) -> Chart:
    """Return how full a tier was from op to op of the traced steps."""
    unit, name = binary_unit(max(capacity_bytes, *(nbytes for _, nbytes in samples)))
    start_s = samples[0][0]
    points = [((at_s - start_s) * 1000, nbytes / unit) for at_s, nbytes in samples]
    edges = [round(number * len(points) / MAX_COLUMNS) for number in range(MAX_COLUMNS + 1)]
    if len(points) > MAX_COLUMNS:  # the fullest moment of each column, not its mean: the ledger's limit is on that
        points = [(points[last - 1][0], max(v for _, v in points[first:last])) for first, last in pairwise(edges)]
    lines = [Curve("in use", points)]
    if capacity_bytes:
        lines.append(Curve("capacity", [(x, capacity_bytes / unit) for x, _ in (points[0], points[-1])], 6, "dashed"))
    return Chart(f"{tier.upper()} within the traced steps", name, lines=lines, starts_at_zero=True, x_name="ms")


def _bandwidths(steps: Sequence[Mapping[str, Any]]) -> Iterator[Curve]:
    """Yield for each link the bytes of a step over the seconds in which any of them moved."""
    for number, link in enumerate(dict.fromkeys(link for step in steps for link in step.get("link_busy_s", {}))):
        rates = [
            (float(step["step"]), step["link_bytes"].get(link, 0) / busy_s / GB)
            for step in steps
            if (busy_s := step.get("link_busy_s", {}).get(link, 0.0)) > 0
        ]
        if rates:
            yield Curve(link, average(rates), 1 + number % NUM_COLORS)


def laid_over(charts: Iterable[Chart], name: str, others: Iterable[Chart], other_name: str) -> Iterator[Chart]:
    """Yield charts with the lines of another run's charts of the same titles over them, dashed."""
    theirs = {chart.title: chart for chart in others}
    for chart in charts:
        other = theirs.get(chart.title)
        if other is None or chart.areas or chart.x_name != "step" or chart.title.endswith("in use"):
            yield chart
            continue
        mine = [replace(line, name=_joined(line.name, name)) for line in chart.lines]
        added = [
            replace(line, name=_joined(line.name, other_name), style="dashed", color=(line.color + 1) % NUM_COLORS + 1)
            for line in other.lines
            if line.style != "faint"
        ]
        yield replace(chart, lines=[*mine, *added])


def _joined(line: str, run: str) -> str:
    return f"{line} ({run})" if line else run


def _written(steps: Sequence[Mapping[str, Any]], figures: Figures) -> Iterator[Curve]:
    """Yield what was written to each drive in all steps up to each."""
    for number, path in enumerate(path for path, drive in figures.drives.items() if drive.nbytes):
        sums = accumulate(step.get("written_bytes", {}).get(path, 0) for step in steps)
        points = [(float(step["step"]), nbytes / GB) for step, nbytes in zip(steps, sums, strict=True)]
        yield Curve(path, average(points), 1 + number % NUM_COLORS)


def _format_rate(value: float) -> str:
    """Return a learning rate in the usual form: 2.5e-5."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}" if value else "0"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps steps and values to the plot; of a logarithmic axis ``low`` and ``high`` are powers of 10."""

    first: float
    last: float
    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, chart: Chart) -> _Scale | None:
        steps = [step for shape in chart.shapes for step, _ in shape.points]
        values = [value for value in _values(chart) if value > 0 or not chart.is_log]
        if not steps or not values:
            return None
        first, last, low, high = min(steps), max(steps), min(values), max(values)
        if chart.is_log:
            low, high = math.log10(low), math.log10(high)
        if high - low <= 1e-12 * max(1.0, abs(high)):
            pad = abs(high) * 0.1 or 1.0
            low, high = (0.0 if chart.starts_at_zero and low >= 0 and not chart.is_log else low - pad), high + pad
        margin = 0.04 * (high - low)
        is_zero = low == 0 and not chart.is_log  # an axis that begins at 0 begins on the frame
        return cls(first, max(last, first + 1), low if is_zero else low - margin, high + margin, chart.is_log)

    def x(self, step: float) -> float:
        return round(FRAME.left + (FRAME.right - FRAME.left) * (step - self.first) / (self.last - self.first), 1)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.is_log else value
        return round(FRAME.top + (FRAME.bottom - FRAME.top) * (self.high - value) / (self.high - self.low), 1)

    def polyline(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in points)


def _values(chart: Chart) -> list[float]:
    """Return the finite values that the axis must hold: of lines, and the sums of stacked bands."""
    values = [value for line in chart.lines for _, value in line.points]
    columns = zip(*(area.points for area in chart.areas), strict=True)
    values += [sum(value for _, value in column if math.isfinite(value)) for column in columns]
    if chart.starts_at_zero or chart.areas:
        values.append(0.0)
    return [value for value in values if math.isfinite(value)]


def _log_ticks(scale: _Scale) -> list[float]:
    low, high = math.ceil(scale.low), math.floor(scale.high)
    powers = [10.0**power for power in range(low, high + 1, max(1, (high - low + 2) // 6))]
    return powers if len(powers) > 1 else [tick for tick in nice_ticks(10**scale.low, 10**scale.high, 4) if tick > 0]


def _pieces(points: Sequence[Point], is_log: bool) -> Iterator[list[Point]]:
    """Yield a line's points cut at those that cannot be drawn."""
    piece: list[Point] = []
    for step, value in points:
        if math.isfinite(value) and (value > 0 or not is_log):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _bands(areas: Sequence[Area], scale: _Scale) -> Iterator[tuple[int, str]]:
    floor: list[float] = []
    for area in areas:
        steps = [step for step, _ in area.points]
        values = [value if math.isfinite(value) else 0.0 for _, value in area.points]
        if len(steps) == 1:  # a band needs a width
            steps, values = [scale.first, scale.last], values * 2
        floor = floor or [0.0] * len(steps)
        top = [below + value for below, value in zip(floor, values, strict=True)]
        there, back = list(zip(steps, top, strict=True)), list(zip(steps, floor, strict=True))
        yield area.color, scale.polyline([*there, *reversed(back)])
        floor = top


def _tips(chart: Chart, scale: _Scale) -> Iterator[tuple[float, float, str]]:
    texts: dict[float, list[str]] = {}
    for shape in chart.shapes:
        for step, value in shape.points:
            shown = chart.format_value(value) if math.isfinite(value) else str(value)
            texts.setdefault(step, []).append(f"{shape.name or chart.title}: {shown} {chart.unit}".rstrip())
    steps = sorted(texts)
    if len(steps) > 2 * MAX_COLUMNS:
        steps = steps[:: len(steps) // MAX_COLUMNS]
    edges = [FRAME.left, *((scale.x(a) + scale.x(b)) / 2 for a, b in pairwise(steps)), FRAME.right]
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        text = "\n".join([f"{chart.x_name} {step:,.0f}", *texts[step]])
        yield round(left, 1), round(max(0.1, right - left), 1), text
