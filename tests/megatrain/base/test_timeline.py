"""Timelines: the spans of profiled steps, separate rows for overlapping transfers, and files in Trace Event Format."""

from __future__ import annotations

import json
from pathlib import Path

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
