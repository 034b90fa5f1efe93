"""Which charts a report has, made from what a run recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from megatrain.report.figures import COMPUTING, Figures
from megatrain.report.history import RunHistory
from megatrain.report.svg import Area, Chart, Line, Point, gather
from megatrain.report.text import cause_name
from tiered.units import GB, GiB, MiB

__all__ = ["COLOR_OF_PART", "make_charts"]

#: Numbers of the style sheet's colours for the parts of a step; the same in all charts.
COLOR_OF_PART = {COMPUTING: 1, "fill": 2, "drain": 3, "space": 4, "lease": 5, "commit": 6}
_SMOOTHED_FROM = 40  # steps
_SMOOTHED_OVER = 0.03  # of the run


def make_charts(history: RunHistory, figures: Figures) -> Iterator[Chart]:
    """Yield the charts of a run in the order of the page. One without a point draws nothing."""
    steps = history.steps
    marks = [(float(step), f"continued after step {step}, {at}") for step, at in figures.restarts]
    yield _loss(steps, figures, marks)
    yield Chart("Learning rate", lines=[Line("", _curve(steps, "lr"), 1)], starts_at_zero=True, format_value=_rate)
    norms = _curve(steps, "grad_norm")
    is_wide = max((v for _, v in norms), default=0) > 30 * max(1e-30, min((v for _, v in norms if v > 0), default=1))
    yield Chart("Gradient norm", lines=[Line("", norms, 1)], marks=marks, is_log=is_wide, starts_at_zero=not is_wide)
    yield Chart(
        "Tokens per second",
        lines=[
            Line("real", _curve(steps, "real_tokens_per_s"), 1),
            Line("trained", _curve(steps, "trained_tokens_per_s"), 2),
        ],
        starts_at_zero=True,
        format_value=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.3g}",
    )
    yield _parts_of_a_step(steps, figures)
    for tier in figures.tiers:
        yield _occupancy(steps, tier, figures)
    yield _memory_of_process(steps)
    yield from _drives(steps, figures)


def _curve(steps: Sequence[Mapping[str, Any]], key: str, unit: float = 1.0) -> list[Point]:
    return gather([(step["step"], step[key] / unit) for step in steps if isinstance(step.get(key), int | float)])


def _loss(steps: Sequence[Mapping[str, Any]], figures: Figures, marks: Sequence[tuple[float, str]]) -> Chart:
    raw = [(float(step["step"]), float(step["loss"])) for step in steps]
    lines = [Line("training", gather(raw), 1)]
    if len(raw) >= _SMOOTHED_FROM:
        lines = [Line("each step", gather(raw), 1, "faint"), Line("smoothed", gather(_smoothed(raw)), 1)]
    lines += [
        Line(name, [(float(step), loss) for step, loss in losses], 2 + number % 5, dots=True)
        for number, (name, losses) in enumerate(figures.evaluations.items())
    ]
    return Chart("Loss", lines=lines, marks=marks)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return running means with exponential weights, without the pull of the start towards 0."""
    memory = 1 - 1 / (1 + _SMOOTHED_OVER * len(points))
    mean, weight, found = 0.0, 0.0, []
    for step, value in points:
        if value == value and abs(value) != float("inf"):
            mean, weight = memory * mean + (1 - memory) * value, memory * weight + (1 - memory)
        found.append((step, mean / weight if weight else float("nan")))
    return found


def _parts_of_a_step(steps: Sequence[Mapping[str, Any]], figures: Figures) -> Chart:
    areas = []
    for part in (COMPUTING, *(cause for cause in COLOR_OF_PART if cause in figures.time_s and cause != COMPUTING)):
        points = [(float(step["step"]), _seconds_of(step, part)) for step in steps]
        if part == COMPUTING or any(value for _, value in points):
            areas.append(Area(cause_name(part), gather(points), COLOR_OF_PART[part]))
    return Chart("Where the time of a step went", "s", areas=areas, format_value=_plain)


def _seconds_of(step: Mapping[str, Any], part: str) -> float:
    waits: Mapping[str, float] = step.get("stall_s", {})
    if part == COMPUTING:
        return max(0.0, float(step.get("step_s", 0.0)) - sum(waits.values()))
    return float(waits.get(part, 0.0))


def _occupancy(steps: Sequence[Mapping[str, Any]], tier: str, figures: Figures) -> Chart:
    used = [(step["step"], step["tier_used_bytes"][tier]) for step in steps if tier in step.get("tier_used_bytes", {})]
    limits = [
        (step["step"], step["tier_capacity_bytes"][tier])
        for step in steps
        if tier in step.get("tier_capacity_bytes", {})
    ]
    largest = max([nbytes for _, nbytes in (*used, *limits)], default=0)
    unit, name = (GiB, "GiB") if largest >= GiB else (MiB, "MiB")
    lines = [
        Line("in use after the step", gather([(step, nbytes / unit) for step, nbytes in used]), 1),
        Line("capacity", gather([(step, nbytes / unit) for step, nbytes in limits]), 6, "dashed"),
    ]
    planned = figures.tiers[tier].planned
    if planned is not None and used:
        ends = [(used[0][0], planned / unit), (used[-1][0], planned / unit)]
        lines.append(Line("planned: the least that it needs", ends, 3, "dashed"))
    return Chart(f"{tier.upper()} in use", name, lines=lines, starts_at_zero=True)


def _memory_of_process(steps: Sequence[Mapping[str, Any]]) -> Chart:
    largest = max((step.get("rss_bytes", 0) for step in steps), default=0)
    unit, name = (GiB, "GiB") if largest >= GiB else (MiB, "MiB")
    lines = [Line("", _curve(steps, "rss_bytes", unit), 1)]
    return Chart("Memory of the process", name, lines=lines, starts_at_zero=True)


def _drives(steps: Sequence[Mapping[str, Any]], figures: Figures) -> Iterator[Chart]:
    """Yield what was written to drives so far: in all steps up to each."""
    written = {path: drive for path, drive in figures.drives.items() if drive.nbytes}
    if not written:
        return
    lines = []
    for number, path in enumerate(written):
        sums = accumulate(step.get("written_bytes", {}).get(path, 0) for step in steps)
        points = [(float(step["step"]), nbytes / GB) for step, nbytes in zip(steps, sums, strict=True)]
        lines.append(Line(path, gather(points), 1 + number % 6))
    yield Chart("Written to drives", "GB", lines=lines, starts_at_zero=True)


def _rate(value: float) -> str:
    """Return a learning rate as people write it: 2.5e-5."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}" if value else "0"


def _plain(value: float) -> str:
    return f"{value:.3g}"
