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
    Drawing,
    column_means,
    lay_out,
    make_charts,
    nice_ticks,
)
from megatrain.extras.report.figures import compute_figures
from megatrain.extras.report.history import RunHistory
from tiered import MiB

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


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "ticks"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]), (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1.6, 12.4, 5, [2.5, 5, 7.5, 10]),
        (0, 7, 6, [0, 2, 4, 6]), (-3, 3, 5, [-2, 0, 2]), (0, 2.5, 5, [0, 0.5, 1, 1.5, 2, 2.5]),
        (0, 21, 5, [0, 5, 10, 15, 20]),
        (0, 5000, 5, [0, 1000, 2000, 3000, 4000, 5000]), (0, 45, 5, [0, 10, 20, 30, 40]),
        (3, 3, 5, [3]), (4, 3, 5, [4]),
        (2, math.inf, 5, [2]),
    ],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, max_ticks: int, ticks: list[float]) -> None:
    assert nice_ticks(low, high, max_ticks) == pytest.approx(ticks)


@given(st.integers(1, 5000))
def test_averages_keep_the_last_step_and_the_mean(count: int) -> None:
    points = [(float(step), float(step)) for step in range(1, count + 1)]
    found = column_means(points)
    assert len(found) == min(count, MAX_COLUMNS) and found[-1][0] == count
    if count % MAX_COLUMNS == 0:
        assert sum(value for _, value in found) / len(found) == pytest.approx((count + 1) / 2)


def test_averages_are_placed_at_the_last_of_their_steps() -> None:
    points = [(2.0, 1.0), (3.0, 5.0), (5.0, 7.0), (6.0, math.nan), (9.0, 10.0)]
    assert column_means(points, 2) == [(3.0, 3.0), (9.0, 8.5)]
    assert column_means(points, 4) == [(2.0, 1.0), (3.0, 5.0), (6.0, 7.0), (9.0, 10.0)]
    assert column_means(points, 5) == points


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


def test_every_coordinate_of_a_drawing() -> None:
    """A step is 70 wide, from 58 to 548. The axis from 1.6 to 12.4 has a margin of 4 % of the values' span."""
    one = Curve("one", [(1, 2.0), (2, 12.0), (4, math.nan), (6, 7.0)])
    two = Curve("", [(6, 7.0), (8, 2.0)], 3, "dashed", has_dots=True)
    marks = [(0.5, "before"), (1, "at the start"), (8, "at the end"), (8.5, "after")]
    assert lay_out(Chart("title", "u", lines=[one, two], marks=marks)) == Drawing(
        title="title",
        unit="u",
        legend=[("one", 1, "")],
        y_labels=[(175.0, "2.5"), (133.3, "5"), (91.7, "7.5"), (50.0, "10")],
        x_labels=[(128.0, "2"), (268.0, "4"), (408.0, "6"), (548.0, "8")],
        marks=[(58.0, "at the start"), (548.0, "at the end")],
        curves=[(1, "", "58.0,183.3 128.0,16.7"), (3, "dashed", "408.0,100.0 548.0,183.3")],
        dots=[(1, 408.0, 100.0), (3, 408.0, 100.0), (3, 548.0, 183.3)],
        tips=[
            (58, 35.0, "step 1\none: 2 u"),
            (93.0, 105.0, "step 2\none: 12 u"),
            (198.0, 140.0, "step 4\none: nan u"),
            (338.0, 140.0, "step 6\none: 7 u\ntitle: 7 u"),
            (478.0, 70.0, "step 8\ntitle: 2 u"),
        ],
    )


@pytest.mark.parametrize(
    ("values", "starts_at_zero", "y", "labels"),
    [
        ([5.0, 5.0], False, [100.0, 100.0], ["4.5", "4.75", "5", "5.25", "5.5"]),  # 4.5 to 5.5, and margins
        ([0.0, 0.0], False, [100.0, 100.0], ["-1", "-0.5", "0", "0.5", "1"]),
        ([1e-13, 1e-13], True, [32.7, 32.7], ["0", "2.5e-14", "5e-14", "7.5e-14", "1e-13"]),
        ([3.0, 9.0], True, [132.3, 16.9], ["0", "2", "4", "6", "8"]),  # 0 to 9.36
        ([-2.0, 8.0], True, [183.3, 16.7], ["0", "2.5", "5", "7.5"]),
        ([0.3, 0.6], False, [183.3, 16.7], ["0.3", "0.4", "0.5", "0.6"]),
    ],
)
def test_value_axis(values: list[float], starts_at_zero: bool, y: list[float], labels: list[str]) -> None:
    drawing = lay_out(Chart("t", lines=[Curve("x", list(enumerate(values)))], starts_at_zero=starts_at_zero))
    assert drawing is not None
    assert [point[1] for point in numbers_of(drawing.curves[0][2])] == y
    assert [label for _, label in drawing.y_labels] == labels


@pytest.mark.parametrize(("count", "num_tips"), [(1, 1), (480, 480), (481, 241), (1000, 250)])
def test_long_charts_have_few_tips(count: int, num_tips: int) -> None:
    drawing = lay_out(Chart("t", lines=[Curve("x", [(step, 1.0) for step in range(1000, 1000 + count)])]))
    assert drawing is not None
    assert len(drawing.tips) == num_tips and drawing.tips[0] == (58, drawing.tips[0][1], "step 1,000\nx: 1")
    assert sum(width for _, width, _ in drawing.tips) == pytest.approx(490, abs=0.05 * num_tips)


def test_every_chart_of_a_run(tmp_path: Path) -> None:
    """Memory has the unit of its largest value. The colors of evaluation sets repeat after the fifth."""
    steps = [
        {"step": step, "loss": loss, "step_s": 1.0, "real_tokens_per_s": 10 * step, "trained_tokens_per_s": rate,
         "tier_used_bytes": {"ram": used * MiB, "nvme": 0}, "tier_capacity_bytes": {"ram": capacity * MiB}}
        for step, loss, rate, used, capacity in [
            (2, 4.0, 0.5, 512, 1024), (3, 3.0, None, 768, 1024), (5, 1.0, 7.25, 256, 512),
        ]
    ]  # fmt: skip
    steps.insert(0, {"step": 1, "loss": 5.0, "step_s": 1.0})
    plan = {"peak_bytes": {"ram": 384 * MiB, "nvme": 7}, "starts": [{}, {"first_step": 3, "at": "Tuesday"}]}
    evaluations = [{"step": step, "name": name, "loss": float(step)} for name in "abcdef" for step in (2, 5)]
    history = RunHistory(tmp_path, "done", steps=steps, plan=plan, evaluations=evaluations)
    charts = list(make_charts(history, compute_figures(history)))
    training = Curve("training", [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0), (5.0, 1.0)])
    sets = [
        Curve(name, [(2.0, 2.0), (5.0, 5.0)], color, has_dots=True)
        for name, color in zip("abcdef", (2, 3, 4, 5, 6, 2), strict=True)
    ]
    marks = [(3.0, "continued after step 3, Tuesday")]
    assert [dataclasses.replace(chart, format_value=str) for chart in charts] == [
        Chart("Loss", lines=[training, *sets], marks=marks, format_value=str),
        Chart(
            "Tokens per second",
            lines=[Curve("real", [(2, 20), (3, 30), (5, 50)]), Curve("trained", [(2, 0.5), (5, 7.25)], 2)],
            starts_at_zero=True,
            format_value=str,
        ),
        Chart(
            "RAM in use",
            "GiB",
            lines=[
                Curve("in use after the step", [(2, 0.5), (3, 0.75), (5, 0.25)]),
                Curve("capacity", [(2, 1.0), (3, 1.0), (5, 0.5)], 6, "dashed"),
                Curve("planned minimum", [(2, 0.375), (5, 0.375)], 3, "dashed"),
            ],
            starts_at_zero=True,
            format_value=str,
        ),
    ]
    assert [charts[1].format_value(value) for value in (12345.6, 10, 9.996, 0.12345)] == ["12,346", "10", "10", "0.123"]
    assert charts[2].format_value(0.123456) == "0.1235"
    figures = dataclasses.replace(compute_figures(history), loss_name="distillation", tiers={})
    assert [(chart.title, chart.lines, chart.marks) for chart in make_charts(history, figures)][:2] == [
        ("Loss of training (distillation)", [training], marks),
        ("Cross entropy of evaluations", sets, marks),
    ]


@pytest.mark.parametrize("count", [39, 40])
def test_losses_of_forty_steps_are_also_smoothed(tmp_path: Path, count: int) -> None:
    """Each step adds 5/11 of its loss to 6/11 of the earlier ones, divided by the same sum of weights."""
    losses = [11.0, 0.0, math.nan, *[1.0] * (count - 3)]
    history = RunHistory(
        tmp_path, "done", steps=[{"step": n, "loss": loss, "step_s": 1.0} for n, loss in enumerate(losses)]
    )
    chart = next(make_charts(history, compute_figures(history)))
    lines = [(line.name, line.style, len(line.points)) for line in chart.lines]
    if count < 40:
        assert lines == [("training", "", 39)]
        return
    assert lines == [("each step", "faint", 40), ("smoothed", "", 40)]
    smoothed = [value for _, value in chart.lines[1].points]
    assert smoothed[:3] == pytest.approx([11, 66 / 17, 66 / 17])
    assert smoothed[3] == pytest.approx((6 / 11 * 30 / 11 + 5 / 11) / (6 / 11 * 85 / 121 + 5 / 11))


def test_marks_outside_the_steps_are_omitted() -> None:
    chart = Chart("t", lines=[Curve("x", [(1, 1.0), (9, 2.0)])], marks=[(0, "before"), (5, "continued")])
    drawing = lay_out(chart)
    assert drawing is not None
    assert drawing.marks == [((FRAME.left + FRAME.right) / 2, "continued")]
