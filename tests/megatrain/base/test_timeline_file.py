"""A timeline read again: figures of its rows, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.base.timeline import NoTimelineError, RowSummary, Timeline, TimelineError, find_timeline, summarize
from tiered import Event


def test_rows_of_a_timeline_that_was_written(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.is_on = True
    for start_s in (1.0, 1.5, 2.5):
        timeline.on_event(Event("fetch", f"block{start_s}", "ram", 10, start_s, start_s + 1, "posix"))
    timeline.on_event(Event("stall", "block", "ram", 0, 1.0, 1.25, "read"))
    summary = summarize(timeline.write(tmp_path / "trace.json"))
    assert (summary.num_spans, round(summary.seconds, 6)) == (4, 2.5)
    rows = {row.name: (row.num_spans, round(row.busy_s, 6), row.nbytes) for row in summary.rows}
    assert rows == {"waiting": (1, 0.25, 0), "to ram (posix)": (3, 2.5, 30)}
    assert summary.to_json()["rows"][0]["name"] == "waiting"
    assert isinstance(summary.rows[0], RowSummary)


def test_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(NoTimelineError, match="trace_steps"):
        find_timeline(tmp_path)
    (tmp_path / "trace.json").write_text("{}")
    assert find_timeline(tmp_path) == find_timeline(tmp_path / "trace.json") == tmp_path / "trace.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no traceEvents"),
        ('{"traceEvents": 3}', "no traceEvents"),
        ('{"traceEvents": []}', "empty"),
        ('{"traceEvents": [3]}', "event 0 has no phase"),
        ('{"traceEvents": [{"ph": "X", "ts": 1}]}', "event 0 has no time"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": NaN}]}', "event 0 has no time"),
    ],
)
def test_what_is_no_timeline(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TimelineError, match=message):
        summarize(path)


def test_a_row_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 0, "tid": 7, "ts": 0, "dur": 5}]}))
    assert summarize(path).rows == (RowSummary("7", 1, 5e-6, 0),)
