"""Charts: round ticks, few points however long the run, and drawings that any reader can parse."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.svg import MAX_COLUMNS, Area, Chart, Line, bar, draw_chart, gather, nice_ticks

FINITE = st.floats(-1e9, 1e9, allow_nan=False)
ANY = st.one_of(FINITE, st.sampled_from([math.nan, math.inf, -math.inf]))


def svg_of(figure: str) -> str:
    found = re.search(r"<svg.*</svg>", figure, re.DOTALL)
    assert found is not None, figure
    return found[0]


@given(st.lists(ANY, max_size=30), st.booleans(), st.booleans())
def test_any_values_give_a_drawing_or_nothing(values: list[float], is_log: bool, starts_at_zero: bool) -> None:
    points = [(float(step), value) for step, value in enumerate(values, 1)]
    figure = draw_chart(Chart("a <b> & c", lines=[Line("x", points)], is_log=is_log, starts_at_zero=starts_at_zero))
    if not any(math.isfinite(value) and (value > 0 or not is_log) for value in values):
        assert figure == "" or not is_log
        return
    drawing = svg_of(figure)
    assert ElementTree.fromstring(drawing).get("aria-label") == "a <b> & c"
    coordinates = " ".join(re.findall(r'(?:x1|y1|cx|cy|points)="([^"]*)"', drawing))
    assert "nan" not in coordinates and "inf" not in coordinates
    for number in re.findall(r"-?[\d.]+", coordinates):
        assert -1 <= float(number) <= 561


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
def test_gathering_keeps_the_ends_and_the_mean(count: int) -> None:
    points = [(float(step), float(step)) for step in range(1, count + 1)]
    found = gather(points)
    assert len(found) == min(count, MAX_COLUMNS) and found[-1][0] == count
    if count % MAX_COLUMNS == 0:
        assert sum(value for _, value in found) / len(found) == pytest.approx((count + 1) / 2)


def test_gathering_passes_over_what_is_not_finite() -> None:
    points = [(float(step), math.nan if step % 2 else 1.0) for step in range(1, 1001)]
    assert all(value == 1.0 for _, value in gather(points))
    assert all(math.isnan(value) for _, value in gather([(1.0, math.inf)] * 1000))


def test_bands_are_stacked() -> None:
    areas = [Area("a", [(1, 1.0), (2, 1.0)], 1), Area("b", [(1, 3.0), (2, 1.0)], 2)]
    drawing = ElementTree.fromstring(svg_of(draw_chart(Chart("t", areas=areas))))
    lower, upper = ([float(xy.split(",")[1]) for xy in p.attrib["points"].split()] for p in drawing.iter("polygon"))
    assert lower[:2] == upper[:1:-1]  # the floor of the second is the top of the first
    assert upper[0] < upper[1] < lower[0]


def test_a_bar_of_shares() -> None:
    drawing = ElementTree.fromstring(bar([("a", 3.0, 1), ("b<", 1.0, 2)]))
    widths = [float(rect.attrib["width"]) for rect in drawing.iter("rect")]
    assert widths == [750.0, 250.0] and "b<: 25.0%" in "".join(drawing.itertext())
    assert bar([("a", 0.0, 1)]) == ""
