"""Charts: round ticks, few points for any length of run, and coordinates within the frame."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.observer import StepMetrics
from megatrain.extras.report.charts import (
    FRAME,
    MAX_COLUMNS,
    Chart,
    Curve,
    column_means,
    lay_out,
    make_charts,
    nice_ticks,
)
from megatrain.extras.report.figures import compute_figures
from megatrain.extras.report.history import RunHistory

FINITE = st.floats(-1e9, 1e9, allow_nan=False)
ANY = st.one_of(FINITE, st.sampled_from([math.nan, math.inf, -math.inf]))


def numbers_of(points: str) -> list[tuple[float, float]]:
    """Return the (x, y) points of a polyline."""
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points.split())]


@given(st.lists(ANY, max_size=30), st.booleans())
def test_any_values_are_drawn_inside_the_frame_or_not_at_all(values: list[float], starts_at_zero: bool) -> None:
    points = [(float(step), value) for step, value in enumerate(values, 1)]
    drawing = lay_out(Chart("t", lines=[Curve("x", points)], starts_at_zero=starts_at_zero))
    shown = [value for value in values if math.isfinite(value)]
    if not any(shown) and (starts_at_zero or not shown):
        assert drawing is None or not (drawing.curves or drawing.dots)
        return
    assert drawing is not None
    drawn = [point for _, _, curve in drawing.curves for point in numbers_of(curve)]
    drawn += [(x, y) for _, x, y in drawing.dots]
    assert len(drawn) == len(shown)
    for x, y in (*drawn, *((FRAME.left, y) for y, _ in drawing.y_labels)):
        assert FRAME.left <= x <= FRAME.right and FRAME.top <= y <= FRAME.bottom
    assert all(FRAME.left <= x <= FRAME.right for x, _ in drawing.x_labels)
    assert len(drawing.tips) == len(values)
    for x, width, _ in drawing.tips:
        assert FRAME.left <= x and x + width <= FRAME.right + 0.2


@given(FINITE, st.floats(1e-9, 1e9))
def test_ticks_are_inside_and_few(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert len(ticks) <= 7
    slack = 1e-6 * (abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


def test_ticks_are_round() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(3, 3) == [3]


@given(st.integers(1, 5000))
def test_averages_keep_the_last_step_and_the_mean(count: int) -> None:
    points = [(float(step), float(step)) for step in range(1, count + 1)]
    found = column_means(points)
    assert len(found) == min(count, MAX_COLUMNS) and found[-1][0] == count
    if count % MAX_COLUMNS == 0:
        assert sum(value for _, value in found) / len(found) == pytest.approx((count + 1) / 2)


def test_averages_skip_nonfinite_values() -> None:
    points = [(float(step), math.nan if step % 2 else 1.0) for step in range(1, 1001)]
    assert all(value == 1.0 for _, value in column_means(points))
    assert all(math.isnan(value) for _, value in column_means([(1.0, math.inf)] * 1000))


def test_constant_zero_curves_are_not_drawn() -> None:
    zero = [(1.0, 0.0), (2.0, 0.0)]
    assert lay_out(Chart("t", lines=[Curve("", zero)], starts_at_zero=True)) is None
    assert lay_out(Chart("a loss", lines=[Curve("", zero)])) is not None, "a figure may be 0; a count of 0 is omitted"
    lines = [Curve("a", zero), Curve("b", [(1.0, 0.0), (2.0, 3.0)])]
    assert lay_out(Chart("t", lines=lines, starts_at_zero=True)) is not None


def test_empty_tier_has_no_chart(tmp_path: Path) -> None:
    """The tier has a capacity, but a chart that shows only the capacity would be useless."""
    used, capacity = {"ram": 9, "nvme": 0}, {"ram": 9, "nvme": 9}
    steps = [
        dataclasses.asdict(StepMetrics(step, 2, 1.0, 2.0, 1.0, 1e-3, 9, 9, 1.0, 0.0, used, capacity)) for step in (1, 2)
    ]
    history = RunHistory(tmp_path, "done", steps=steps)
    titles = [chart.title for chart in make_charts(history, compute_figures(history))]
    assert "RAM in use" in titles and not any(title.startswith("NVME") for title in titles), titles


def test_nonfinite_values_split_lines_and_single_points_are_dots() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0), (7, 1.0)]
    drawing = lay_out(Chart("t", lines=[Curve("x", points)]))
    assert drawing is not None
    assert [len(numbers_of(curve)) for _, _, curve in drawing.curves] == [2, 2] and len(drawing.dots) == 1
    assert [re.sub(r"\n", " ", text) for _, _, text in drawing.tips][2:4] == ["step 3 x: nan", "step 4 x: 3"]


def test_marks_outside_the_steps_are_omitted() -> None:
    chart = Chart("t", lines=[Curve("x", [(1, 1.0), (9, 2.0)])], marks=[(0, "before"), (5, "continued")])
    drawing = lay_out(chart)
    assert drawing is not None
    assert drawing.marks == [((FRAME.left + FRAME.right) / 2, "continued")]
