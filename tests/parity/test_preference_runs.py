"""Whole runs over preferences: the same bits wherever blocks live and after a stop, and one reference."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.base.observer import EvaluationMetrics, RunObserver, RunSummary, StepMetrics
from megatrain.config import load_config
from megatrain.data.rows_report import DataError
from megatrain.plan.plan import Plan
from megatrain.tasks.evaluation import traffic_of_passes
from megatrain.tasks.reference import FOLDER_NAME, Reference, num_reference_passes
from megatrain.training.trainer import Trainer
from oracles.tiered_run import EXAMPLES, write_tiny_model
from tiered import checksum

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
PAIRS = EXAMPLES / "quickstart/preferences.jsonl"
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
PLACEMENTS = {
    "drive": f"[placement]\n{ALL_NVME}\n",
    "GPU": '[tiers.gpu]\nsize = "48MiB"\n[advanced]\nemulate_gpu = true\n',
    "one micro-batch at a time": '[advanced]\nmicro_batch_order = "micro_batch"\n',
}


class Watcher(RunObserver):
    """Keeps what a run tells, and stops it after a step."""

    def __init__(self, stop_after: int | None) -> None:
        self._stop_after = stop_after
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvaluationMetrics] = []
        self.messages: list[str] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        if metrics.step == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)

    def on_message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Run:
    plan: Plan
    summary: RunSummary
    told: Watcher
    weights: bytes

    @property
    def figures(self) -> list[tuple[float, float, dict[str, float]]]:
        return [(step.loss, step.grad_norm, dict(step.preferences)) for step in self.told.steps]

    @property
    def evaluated(self) -> list[tuple[int, float, dict[str, float]]]:
        return [(each.step, each.loss, dict(each.preferences)) for each in self.told.evaluations]

    @property
    def asked(self) -> bool:
        return any("answers computed" in text for text in self.told.messages)


def text_of(folder: Path, model: Path, rows: Path = PAIRS, more: str = "", preference: str = "") -> str:
    return f"""
task = "dpo"
output_dir = "{folder / "out"}"
device = "cpu"
[model]
model_name_or_path = "{model}"
[data]
max_length = 80
val_size = 6
cache_dir = "{folder.parent / "cache"}"
[[data.train]]
path = "{rows}"
[preference]
{preference}
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 2
max_steps = {NUM_STEPS}
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
warmup_steps = 0
[evaluation]
eval_steps = 3
[checkpoint]
save_steps = 2
min_free_disk = "0MiB"
[tiers.ram]
size = "256MiB"
[[tiers.nvme]]
path = "{folder / "drive"}"
size = "256MiB"
{more}"""


def train(folder: Path, text: str, *, stop_after: int | None = None) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(text)
    watcher = Watcher(stop_after)
    trainer = Trainer(load_config(folder / "run.toml").config, observer=watcher)
    summary = trainer.train()
    assert summary.interrupted == (stop_after is not None)
    weights = folder / "out/final/model.safetensors"
    return Run(trainer.plan, summary, watcher, weights.read_bytes() if weights.exists() else b"")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def in_ram(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("in_ram") / "run"
    return train(folder, text_of(folder, tiny_model))


def test_a_run_tells_what_it_prefers(in_ram: Run) -> None:
    first, *_, last = in_ram.told.steps
    assert first.loss == pytest.approx(0.6931, abs=1e-4)  # the model is its own reference still
    assert first.preferences["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert last.preferences["logps/chosen"] < 0.0 and last.preferences["rewards/margins"] != 0.0
    assert 0.0 <= last.preferences["rewards/accuracies"] <= 1.0
    assert [step for step, _, _ in in_ram.evaluated] == [3, 4]
    assert set(in_ram.evaluated[0][2]) == set(last.preferences)
    assert in_ram.asked and in_ram.plan.micro_batch_size == 4 and in_ram.plan.run.data.table.packing is False


@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=[] if name == "drive" else [pytest.mark.slow]) for name in PLACEMENTS]
)
def test_same_bits_wherever_blocks_live(placement: str, tiny_model: Path, tmp_path: Path, in_ram: Run) -> None:
    text = text_of(tmp_path / "run", tiny_model, more=PLACEMENTS[placement])
    run = train(tmp_path / "run", text)
    assert run.asked
    assert run.figures == in_ram.figures and run.evaluated == in_ram.evaluated and run.weights == in_ram.weights
    planned = Counter[str]()
    for num_steps in (2, 1, 1):  # a save, an evaluation, the end
        planned.update(run.plan.placement.run_traffic_bytes(num_steps))
    planned.update(traffic_of_passes(run.plan, 2))  # 6 pairs are 12 rows, one pass of 8 and one of 4
    planned.update(traffic_of_passes(run.plan, 2))
    assert run.summary.link_bytes == dict(planned)

    # Another run of the same model over the same rows asks nobody.
    again = train(tmp_path / "again", text_of(tmp_path / "again", tiny_model, more=PLACEMENTS[placement]))
    assert not again.asked and again.figures == run.figures


def test_the_reference_moves_what_is_planned(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text_of(tmp_path / "run", tiny_model, more=PLACEMENTS["drive"]))
    trainer = Trainer(load_config(path).config)
    with trainer.open() as opened:
        opened.load()
        loader = trainer.make_loader()
        opened.store.wait_idle()
        before = opened.store.stats()
        reference = Reference(
            trainer.plan,
            opened.store,
            timeline=opened.timeline,
            activity=trainer.activity,
            on_message=lambda text: None,
            known=None,
        )
        reference.give([loader])
        moved = opened.store.stats() - before
    planned = traffic_of_passes(trainer.plan, num_reference_passes(trainer.plan, loader))
    assert {name: link.num_bytes for name, link in moved.links.items()} == planned
    assert sum(planned.values()) > 0
    for tier, stats in moved.tiers.items():
        assert stats.home_bytes <= stats.high_water_bytes <= trainer.plan.budgets[tier]


def test_a_run_that_goes_on_has_its_reference(tiny_model: Path, tmp_path: Path, in_ram: Run) -> None:
    folder = tmp_path / "run"
    text = text_of(folder, tiny_model)
    first = train(folder, text, stop_after=2)
    for path in (tmp_path / "cache" / FOLDER_NAME).iterdir():
        path.unlink()
    (kept,) = (folder / "out" / FOLDER_NAME).iterdir()
    whole = kept.read_bytes()

    # Not what the run began with, damaged, gone: each is said, and nothing is trained.
    values = torch.zeros(json.loads(whole.partition(b"\n")[0])["count"]).numpy()
    body = values.tobytes()
    header = json.loads(whole.partition(b"\n")[0]) | {"checksum": checksum(body)}
    kept.write_bytes(json.dumps(header).encode() + b"\n" + body)
    with pytest.raises(DataError, match="another model than the one that this run started from"):
        train(folder, text)
    kept.write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(DataError, match="it is damaged"):
        train(folder, text)
    kept.unlink()
    with pytest.raises(DataError, match="is gone"):
        train(folder, text)
    kept.write_bytes(whole)
    second = train(folder, text)
    assert not second.asked
    assert first.figures + second.figures == in_ram.figures and second.weights == in_ram.weights


def rows_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "orpo"])
def test_other_losses_train(loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": n % 3 > 0}
        for n, row in enumerate(rows)
    ]
    path = rows_of(tmp_path / "rows.jsonl", judged if loss_type == "kto" else rows)
    run = train(tmp_path / "run", text_of(tmp_path / "run", tiny_model, path, preference=f'loss_type = "{loss_type}"'))
    assert run.asked == (loss_type == "kto")
    assert len(run.figures) == NUM_STEPS and all(loss == loss for loss, _, _ in run.figures)
    assert ("kl" if loss_type == "kto" else "nll_loss") in run.figures[-1][2]


@pytest.mark.slow
def test_adapters_start_as_their_reference(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", text_of(tmp_path / "run", tiny_model, more="[lora]\nr = 4\n"))
    assert run.told.steps[0].loss == pytest.approx(0.6931, abs=1e-4)
    assert run.told.steps[-1].loss != run.told.steps[0].loss
