"""Step metrics are written as JSON lines and as a console line, and observers are called in order."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.base.observer import (
    CheckpointMetrics,
    EvaluationMetrics,
    Observers,
    RunInfo,
    RunSummary,
    Sample,
    StepMetrics,
    format_checkpoint,
    format_eta,
    format_evaluation,
    format_lr,
    format_preferences,
    format_rank,
    format_samples,
    format_stalls,
    format_step,
    format_tiers,
)
from megatrain.run.loggers import MetricsLog
from tiered import GiB, MiB

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


def test_step_line_omits_what_is_0_and_shows_preferences_and_the_warm_up() -> None:
    metrics = replace(
        STEP, step=7, lr=0.0, warmup_steps=9, tier_used_bytes={"gpu": 0, "ram": 3 * GiB}, stall_s={}, eta_s=59.4,
        preferences={"rewards/accuracies": 0.75},
    )  # fmt: skip
    assert format_step(metrics) == (
        "step    7/1230 0.6% | loss 1.2841 | accuracy 0.75 | gnorm 0.83 | lr 0 (warm-up 7/9)"
        " | 1,348 tok/s (trained 999) | ram 3.00 GiB | eta 59 s"
    )
    assert format_step(replace(metrics, step_s=0.0, tier_used_bytes={}, warmup_steps=6, preferences={})) == (
        "step    7/1230 0.6% | loss 1.2841 | gnorm 0.83 | lr 0 | 0 tok/s (trained 0) | eta 59 s"
    )


SAVE = CheckpointMetrics(6, Path("out"), 3 * MiB, 2 * MiB, 0, 1.25, 0.04)
EVALUATION = EvaluationMetrics(4, 9, "held", 1.5, 12_345, 0.25)
RANK = {
    "tier_used_bytes": {"ram": 5 * MiB}, "rss_bytes": 7 * MiB, "stall_s": {"fill": 1.5}, "is_paused": True,
    "link_bytes": {"ram->ranks": MiB, "ram->hosts": 2 * MiB, "nvme->ram": 4 * MiB},
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_checkpoint(SAVE), "saved  checkpoint at step 6: 3.00 MiB in 1.2 s"),
        (
            format_checkpoint(replace(SAVE, linked_bytes=MiB, stall_s=0.05)),
            "saved  checkpoint at step 6: 3.00 MiB (2.00 MiB written, 1.00 MiB linked) in 1.2 s, training waited 0.1 s",
        ),
        (
            format_checkpoint(replace(SAVE, written_bytes=0, linked_bytes=3 * MiB)),
            "saved  checkpoint at step 6: 3.00 MiB (3.00 MiB linked) in 1.2 s",
        ),
        (
            format_evaluation(EVALUATION),
            "eval  held at step 4: loss 1.5000, perplexity 4.48 (12,345 tokens in 0.2 s)",
        ),
        (
            format_evaluation(replace(EVALUATION, preferences={"rewards/margins": 0.5})),
            "eval  held at step 4: loss 1.5000, margin 0.500 (12,345 tokens in 0.2 s)",
        ),
        (
            format_preferences(
                {
                    "margin": 3.0,
                    "accuracy": 0.5,
                    "kl": 0.25,
                    "rewards/margins": 2.0,
                    "rewards/accuracies": 1.0,
                    "x": 9.0,
                }
            ),
            "accuracy 1.00, margin 2.000, kl 0.250, accuracy 0.500, margin 3.000",
        ),
        (format_lr(replace(STEP, step=3, warmup_steps=3)), "9.1e-06 (warm-up 3/3)"),
        (format_lr(replace(STEP, step=4, warmup_steps=3)), "9.1e-06"),
        (format_eta(59.4), "59 s"),
        (format_eta(59.6), "1m00s"),
        (
            format_tiers(
                {"gpu": 0, "ram": MiB // 20 - 1, "a": MiB // 20 + 1, "nvme": GiB, "x": 3 * GiB},
                {"gpu": MiB, "ram": GiB - MiB, "a": MiB, "nvme": 2 * GiB, "b": GiB},
            ),
            "gpu 0.0/1.0 MiB ram <0.1/1023.0 MiB a 0.1/1.0 MiB nvme 1.0/2.0 GiB x 3.00 GiB",
        ),
        (format_tiers({"ram": 512 * MiB}, {"ram": GiB}), "ram 0.5/1.0 GiB"),
        (
            format_rank(RANK),
            "ram 5.00 MiB  moved 7.00 MiB, 3.00 MiB of it to other ranks  wait fill 1.5s  process 7.00 MiB"
            "  waits for space on a drive",
        ),
        (format_rank({}), "moved 0 B, 0 B of it to other ranks  process 0 B"),
        (format_stalls({"a": 0.05, "b": 0.049, "c": 2.0}), "wait a 0.1s c 2.0s"),
        (format_stalls({"b": 0.049}), ""),
    ],
)
def test_text_of_metrics(text: str, expected: str) -> None:
    assert text == expected


def test_samples_are_shown_in_part() -> None:
    """The end of the prompt, and the beginnings of both continuations, each with at most 60 characters."""
    whole, text = "ab " * 19 + "xyz", "<" + "ab\n" * 30 + ">"
    assert len(whole) == 60
    assert format_samples([Sample(whole, whole + "\n", "r"), Sample(text, text, text)]) == [
        f"      ...{whole} >> {whole} (reference: r)",
        f"      ...b {'ab ' * 19}> >> <{'ab ' * 19}ab (reference: <{'ab ' * 19}ab)",
    ]


def test_records_become_json_values() -> None:
    values = replace(STEP, model_flops=97_000, hardware_flops=194_000, loss=math.inf, written_bytes={"d": 1}).to_json()
    assert values == {
        "step": 412, "max_steps": 1230, "epoch": 0.33, "loss": "inf", "grad_norm": 0.834, "lr": 9.12e-6,
        "num_real_tokens": 65_400, "num_trained_tokens": 48_450, "step_s": 48.5, "eta_s": 39_673.0,
        "tier_used_bytes": {"gpu": int(21.3 * GiB), "nvme": 71 * GiB}, "tier_capacity_bytes": {"gpu": 22 * GiB},
        "stall_s": {"io": 0.41, "cpu": 9.3, "gpu": 0.01}, "rss_bytes": 3, "written_bytes": {"d": 1}, "link_bytes": {},
        "model_flops": 97_000, "hardware_flops": 194_000, "mean_step_s": 0.0, "warmup_steps": 0, "link_busy_s": {},
        "preferences": {}, "process_usage": {}, "real_tokens_per_s": 1348.454, "trained_tokens_per_s": 998.969,
        "model_flops_per_s": 2000.0, "hardware_flops_per_s": 4000.0,
    }  # fmt: skip
    assert replace(STEP, ranks=[{"step_s": 1.5}]).to_json()["ranks"] == [{"step_s": 1.5}]
    evaluation = {"step": 4, "max_steps": 9, "name": "held", "loss": 1.5, "num_tokens": 12_345, "seconds": 0.25}
    assert EVALUATION.to_json() == {**evaluation, "preferences": {}, "perplexity": math.exp(1.5)}
    sampled = replace(EVALUATION, loss=1e4, samples=(Sample("p", "g", "r"),))
    sample = {"prompt": "p", "generated": "g", "reference": "r"}
    text = {**evaluation, "loss": 1e4, "preferences": {}, "samples": [sample], "perplexity": "inf"}
    assert sampled.to_json() == text and EvaluationMetrics.from_json(text) == sampled
    assert SAVE.to_json()["path"] == "out"


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
