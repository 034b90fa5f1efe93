"""The whole picture of a small timeline, in which a millisecond is as wide as a pixel."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.extras.report.step_picture import PASSES, Bar, draw, read_bars

ROWS = ("compute", "waiting", "to gpu (cuda)", "to gpu (cuda) 2", "back to nvme", "to ram", "to ram 0x1")
#: (row, operation, start in milliseconds, duration in milliseconds)
SPANS = [
    (0, "forward abcdefghijklm", 2000, 100), (0, "forward <1>", 2100, 200), (0, "head lmhead", 2300, 50),
    (0, "backward layers.0", 2400, 300), (0, "update layers.1", 2700, 410), (1, "fill layers.0", 2350, 50),
    (2, "model.layers.0/weight", 1900, 150), (3, "model.layers.1/exp_avg", 2900, 500),
    (4, "model.layers.0/grad.0", 2500, 0.1), (4, "model.layers.0/grad.1", 2500.2, 20),
    (4, "model.layers.0/grad.2", 2520.3, 0.1), (5, "activations/3", 2200, 10), (5, "model/weight", 1000, 1000),
    (6, "x/weight", 3000, 50), (0, "forward 9", math.inf, 1),
]  # fmt: skip
BARS = [
    Bar("layers", 0, "forward", "abcdefghijklm", 0.0, 0.1),
    Bar("layers", 0, "forward", "<1>", 0.1, 0.3),
    Bar("layers", 0, "head", "lmhead", 0.3, 0.35),
    Bar("layers", 0, "backward", "layers.0", 0.4, 0.7),
    Bar("updates", 0, "update", "layers.1", 0.7, 1.11),
    Bar("waiting", 0, "waiting", "", 0.35, 0.4),
    Bar("to gpu (cuda)", 0, "weights", "", 0.0, 0.05),  # begins before the first operation
    Bar("to gpu (cuda)", 1, "optimizer state", "", 0.9, 1.11),  # ends after the last one
    Bar("back to nvme", 0, "gradients", "", 0.5, 0.5001),
    Bar("back to nvme", 0, "gradients", "", 0.5002, 0.5202),
    Bar("back to nvme", 0, "gradients", "", 0.5203, 0.5204),
    Bar("to ram", 0, "activations", "", 0.2, 0.21),
    Bar("to ram 0x1", 0, "weights", "", 1.0, 1.05),
]


def events() -> list[dict[str, Any]]:
    names = [{"ph": "M", "tid": tid, "args": {"name": name}} for tid, name in enumerate(ROWS)]
    spans = [
        {"ph": "X", "tid": tid, "name": name, "ts": 1000 * start, "dur": 1000 * duration}
        for tid, name, start, duration in SPANS
    ]
    return [*names, *spans, {"ph": "i", "tid": 0, "name": "mark", "ts": 0}]


def test_bars_of_a_timeline(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events()}))
    assert read_bars(tmp_path / "trace.json") == BARS


def test_every_element_of_the_picture() -> None:
    """The third gradient ends less than a quarter of a pixel after the second, so it has no box."""
    expected = Path(__file__).with_name("step_picture.svg").read_text()
    assert draw(BARS, "A title", "a <note>") == expected


@pytest.mark.parametrize(
    ("span_s", "tick_ms", "count"),
    [(0.012, 1, 13), (0.0121, 2, 7), (0.5, 50, 11), (50.0, 5000, 11), (721.0, 600_000, 2), (14400.0, 1_200_000, 13)],
)
def test_ruler_has_at_most_thirteen_marks(span_s: float, tick_ms: int, count: int) -> None:
    """The distance of the marks is a twelfth of the span if that is more than ten minutes."""
    picture = draw([Bar(PASSES, 0, "forward", "", 0.0, span_s)], "", "")
    labels = [float(label) for label in re.findall(r">([^<]+) ms<", picture)]
    assert labels == [tick_ms * index for index in range(count)]
