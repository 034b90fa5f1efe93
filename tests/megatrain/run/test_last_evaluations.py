"""The last evaluation of each set: in the summary of a run, in ``status.json``, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.observer import EvaluationMetrics, RunObserver, RunSummary
from megatrain.config import load_config
from megatrain.run.status import read_status
from megatrain.training.trainer import Trainer
from oracles.tiered_run import write_tiny_model

CONFIG = """
task = "pretrain"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
[data]
max_length = 32
val_size = 0.2
cache_dir = "none"
[[data.train]]
path = "rows.jsonl"
[training]
per_device_train_batch_size = 2
max_steps = 4
[optimizer]
lr_scheduler_type = "constant"
[evaluation]
eval_steps = 3
eval_on_start = true
[checkpoint]
min_free_disk = "0MiB"
[tiers.ram]
size = "64MiB"
"""


class Listener(RunObserver):
    def __init__(self) -> None:
        self.evaluations: list[EvaluationMetrics] = []
        self.messages: list[str] = []

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def run(folder: Path, *overrides: str) -> tuple[RunSummary, Listener]:
    listener = Listener()
    return Trainer(load_config(folder / "run.toml", (), overrides).config, observer=listener).train(), listener


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    rows = [json.dumps({"text": f"{number} times {number} is {number * number}"}) for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def test_held_out_rows_are_evaluated_and_reported(folder: Path) -> None:
    summary, listener = run(folder)
    assert [(each.name, each.step) for each in listener.evaluations] == [("val", 0), ("val", 3), ("val", 4)]
    assert any(text.startswith("val: 6 rows held out from training (data.val_size), ") for text in listener.messages)
    assert summary.evaluations == {"val": listener.evaluations[-1]}
    values = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert values["evaluations"]["val"]["perplexity"] == listener.evaluations[-1].perplexity
    status = read_status(folder / "out")
    assert status is not None
    last = listener.evaluations[-1]
    assert status.evaluations == {"val": {"step": 4, "loss": last.loss, "perplexity": last.perplexity}}
    again, silent = run(folder)  # no steps are left
    assert again.evaluations == summary.evaluations and not silent.evaluations


def test_resumed_run_keeps_earlier_evaluations(folder: Path) -> None:
    first, _ = run(folder)
    rest = ("training.max_steps=5", "evaluation.eval_strategy=no")
    second, listener = run(folder, *rest)
    assert second.num_steps == 5 and not listener.evaluations
    assert second.evaluations == first.evaluations
    status = read_status(folder / "out")
    assert status is not None and status.evaluations["val"]["step"] == 4


def test_changed_val_size_counts_as_changed_data(folder: Path) -> None:
    run(folder)
    from megatrain.checkpoint.resume import ConfigChangedError

    more: list[Any] = ["training.max_steps=5", "data.val_size=0.4"]
    with pytest.raises(ConfigChangedError, match="data"):
        run(folder, *more)
