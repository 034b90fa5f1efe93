"""Step metrics are written as JSON lines and as a console line, and observers are called in order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from megatrain.base.observer import CheckpointMetrics, Observers, RunInfo, RunSummary, StepMetrics, format_step
from megatrain.run.loggers import MetricsLog
from tiered import GiB

STEP = StepMetrics(
    step=412, max_steps=1230, epoch=0.33, loss=1.28412, grad_norm=0.834, lr=9.12e-6, num_real_tokens=65_400,
    num_trained_tokens=48_450, step_s=48.5, eta_s=39_673.0, tier_used_bytes={"gpu": int(21.3 * GiB), "nvme": 71 * GiB},
    tier_capacity_bytes={"gpu": 22 * GiB}, stall_s={"io": 0.41, "cpu": 9.3, "gpu": 0.01}, rss_bytes=3,
)  # fmt: skip


def test_step_line_has_the_documented_format() -> None:
    assert format_step(STEP) == (
        "step  412/1230 33.5% | loss 1.2841 | gnorm 0.83 | lr 9.1e-06 | 1,348 tok/s (trained 999)"
        " | gpu 21.3/22.0 GiB nvme 71.00 GiB | wait io 0.4s cpu 9.3s | eta 11h01m"
    )


def test_log_is_flushed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.on_step(STEP)
        (first,) = path.read_text().splitlines()
        assert json.loads(first)["loss"] == 1.28412
        assert json.loads(first)["real_tokens_per_s"] == 1348.454
        log.on_step(replace(STEP, step=413, loss=math.nan))
    assert json.loads(path.read_text().splitlines()[1])["loss"] == "nan"


def test_metrics_log_continues_at_the_resumed_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3):
            log.on_step(replace(STEP, step=step))
            log.on_checkpoint(CheckpointMetrics(step, tmp_path, 3, 1, 2, 0.5, 0.1))
    with path.open("a") as torn:
        torn.write('{"step": 2, "los')
    with MetricsLog(path, resume_step=2) as log:
        log.on_step(replace(STEP, step=3))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line.get("event")) for line in lines] == [
        (1, None), (1, "checkpoint"), (2, None), (2, "checkpoint"), (3, None),
    ]  # fmt: skip
    with MetricsLog(path):
        assert path.read_text() == ""
    assert len((tmp_path / "metrics.old.jsonl").read_text().splitlines()) == 5


def test_unterminated_log_line_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}')
    with MetricsLog(path, resume_step=2) as log:
        log.on_step(replace(STEP, step=3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_observers_are_called_in_order(tmp_path: Path) -> None:
    seen: list[str] = []

    class RecordingObserver:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_start(self, info: RunInfo) -> None:
            seen.append(f"{self.name} start {info.run_name}")

        def on_step(self, metrics: StepMetrics) -> None:
            seen.append(f"{self.name} step {metrics.step}")

        def on_message(self, text: str) -> None:
            seen.append(f"{self.name} says {text}")

        def on_end(self, summary: RunSummary) -> None:
            seen.append(f"{self.name} end {summary.num_steps}")

    observers = Observers([RecordingObserver("a"), MetricsLog(tmp_path / "metrics.jsonl"), RecordingObserver("b")])
    observers.on_start(RunInfo("run", "sft", "cpu", tmp_path, 1, 1))
    observers.on_step(STEP)
    observers.on_message("x")
    observers.on_end(RunSummary(1, 2.0, 1.0, 1.0, 1, 1))
    told = ["a start run", "b start run", "a step 412", "b step 412", "a says x", "b says x", "a end 1", "b end 1"]
    assert seen == told
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
