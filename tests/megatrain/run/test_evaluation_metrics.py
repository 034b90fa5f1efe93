"""Evaluations are printed, written as JSON, and read back from a resumed log. Step metrics include FLOPs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain.base.observer import EvaluationMetrics, Observers, StepMetrics, format_evaluation
from megatrain.run.loggers import MetricsLog, last_evaluations
from processes.saved_run import cli_module


def metrics(step: int = 400, name: str = "held_out", loss: float = 1.27341) -> EvaluationMetrics:
    return EvaluationMetrics(step, 1230, name, loss, num_tokens=12_345, seconds=8.14)


def observers() -> Any:
    return cli_module("observers")


def test_evaluation_line_has_the_documented_format() -> None:
    line = "eval  held_out at step 400: loss 1.2734, perplexity 3.57 (12,345 tokens in 8.1 s)"
    assert format_evaluation(metrics()) == line
    stream = io.StringIO()
    observers().make_observer("plain", console=Console(file=stream)).on_evaluation(metrics())
    assert stream.getvalue() == line + "\n"


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(0.0, 1.0), (math.nan, math.nan), (math.inf, math.inf), (1e6, math.inf)]
)
def test_nonfinite_metrics_are_text_in_json(loss: float, perplexity: float, tmp_path: Path) -> None:
    found = metrics(loss=loss)
    assert found.perplexity == perplexity or math.isnan(found.perplexity)
    assert "at step 400" in format_evaluation(found)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.on_evaluation(found)
    stream = io.StringIO()
    observers().make_observer("json", console=Console(file=stream)).on_evaluation(found)
    for text in ((tmp_path / "metrics.jsonl").read_text(), stream.getvalue()):
        values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON"))
        assert values["event"] == "evaluation" and values["name"] == "held_out"
        assert values["loss"] == (loss if math.isfinite(loss) else str(loss))
        assert values["perplexity"] == (perplexity if math.isfinite(perplexity) else str(perplexity))


def test_resumed_log_returns_earlier_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_evaluations(path, 3) == {}
    with MetricsLog(path) as log:
        everybody = Observers([log])
        for step in (0, 3, 6):
            everybody.on_evaluation(metrics(step))
            everybody.on_evaluation(metrics(step, "book"))
    last = {"held_out": metrics(3), "book": metrics(3, "book")}
    assert last_evaluations(path, 3) == last_evaluations(path, 4) == last
    assert last_evaluations(path, 0)["book"] == metrics(0, "book")
    with MetricsLog(path, resume_step=3):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 3, 3]


def test_flops_of_a_step_and_their_rates() -> None:
    step = StepMetrics(1, 2, 0.1, 1.0, 1.0, 1e-5, 100, 50, step_s=2.0, eta_s=1.0, model_flops=600, hardware_flops=800)
    values = step.to_json()
    assert (values["model_flops"], values["hardware_flops"]) == (600, 800)
    assert (values["model_flops_per_s"], values["hardware_flops_per_s"]) == (300.0, 400.0)
    assert StepMetrics(1, 2, 0.1, 1.0, 1.0, 1e-5, 100, 50, 0.0, 1.0).to_json()["model_flops_per_s"] == 0.0
