"""Timelines: the spans of profiled steps, separate rows for overlapping transfers, and files in Trace Event Format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.base.observer import Observers
from megatrain.base.timeline import COMPUTE, Timeline
from megatrain.config import load_config
from megatrain.engine.tape.tape import Op
from megatrain.training.trainer import Trainer
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text
from tiered import Event


def test_disabled_timeline_records_no_events(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.on_event(Event("fetch", "a", "ram", 10, 1.0, 2.0, "posix-direct"))
    timeline.on_op(Op(0, "forward", 0, "ram", (), ()))
    timeline.on_op(None)
    assert timeline.spans == []
    assert json.loads(timeline.write(tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_overlapping_transfers_get_separate_rows(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.is_recording = True
    for start_s in (1.0, 1.5, 2.5):
        timeline.on_event(Event("fetch", f"block{start_s}", "ram", 10, start_s, start_s + 1, "posix-direct"))
    events = json.loads(timeline.write(tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    bars = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert bars == [
        ("to ram (posix-direct)", "block1.0", 0.0, 1e6),
        ("to ram (posix-direct) 2", "block1.5", 0.5e6, 1e6),
        ("to ram (posix-direct)", "block2.5", 1.5e6, 1e6),
    ]


def test_stalls_transfers_operations_and_usage_are_drawn(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.on_op(Op(0, "forward", 0, "ram", (), ()))  # still recorded at its end
    timeline.is_recording = True
    usage = iter(({"ram": 1}, {"ram": 2, "nvme": 3}, {"ram": 4}))
    timeline.read_usage = lambda: next(usage)
    timeline.on_op(Op(1, "head", 7, "ram", (), ()))
    timeline.on_op(Op(2, "backward", 5, "ram", (), ()))
    timeline.on_op(None)
    end_s = timeline.spans[-1].end_s
    for kind, start_s, nbytes in (("stall", 1.0, 0), ("write_back", 2.0, 9), ("fetch", 3.0, 8), ("other", 4.0, 7)):
        timeline.on_event(Event(kind, f"of {kind}", "ram", nbytes, end_s + start_s, end_s + start_s + 0.25, "cpu"))  # type: ignore[arg-type]
    assert timeline.spans == sorted(timeline.spans, key=lambda span: span.start_s)
    path = timeline.write(tmp_path / "trace.json")
    assert path == tmp_path / "trace.json" and [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    found = json.loads(path.read_text())
    assert found.pop("displayTimeUnit") == "ms"
    events = found["traceEvents"]
    names = ["compute", "waiting", "back to ram (cpu)", "to ram (cpu)"]
    assert [event for event in events if event["ph"] == "M"] == [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name, "sort_index": tid}}
        for tid, name in enumerate(names)
    ]
    bars = [(event["tid"], event["name"], event["args"]) for event in events if event["ph"] == "X"]
    assert bars == [
        (0, "forward 0", {}), (0, "head 7", {}), (0, "backward 5", {}), (1, "cpu of stall", {}),
        (2, "of write_back", {"bytes": 9}), (3, "of fetch", {"bytes": 8}),
    ]  # fmt: skip
    by_name = {event["name"]: event for event in events if event["ph"] == "X"}
    first, last = by_name["forward 0"], by_name["backward 5"]
    ends = [event["ts"] + event["dur"] for event in (first, by_name["head 7"], last)]
    assert first["ts"] == 0.0 and ends[:2] == pytest.approx([by_name["head 7"]["ts"], last["ts"]])
    used = [event for event in events if event["ph"] == "C"]
    assert [(event["pid"], event["name"], event["args"]) for event in used] == [
        (0, "ram in use", {"bytes": 1}), (0, "ram in use", {"bytes": 2}), (0, "nvme in use", {"bytes": 3}),
        (0, "ram in use", {"bytes": 4}),
    ]  # fmt: skip
    assert [event["ts"] for event in used] == pytest.approx([ends[0], ends[1], ends[1], ends[2]])


def test_requested_steps_are_profiled(tmp_path: Path) -> None:
    model = EXAMPLES / "quickstart" / "model"
    text = config_text(tmp_path, model, placement=ALL_NVME) + "[profile]\ntrace_steps = [2]\n"
    text = text.replace(f'"{model}"', f'"{model}"\ntrain_from_scratch = true')
    text = text.replace("[training]", "[training]\nmax_steps = 3")
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml").config
    trainer = Trainer(config, observer=Observers([]))
    trainer.train()
    events = json.loads((config.output_dir / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    computed = [event["name"] for event in events if event["ph"] == "X" and rows[event["tid"]] == COMPUTE]
    ticks = [f"{tick.phase} {tick.visit}" for tick in trainer.plan.program.ticks]
    assert computed[: len(ticks) - 1] == ticks[: len(ticks) - 1]
    assert any(name.startswith("to ram") for name in rows.values())
    assert any(name.startswith("back to nvme") for name in rows.values())
