"""Whole preference runs: a resumed run is bit-identical, and the reference is computed once and reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import load_config
from megatrain.data.rows_report import DataError
from megatrain.tasks.evaluation import count_pass_traffic
from megatrain.tasks.reference import FOLDER_NAME, Reference, num_reference_passes
from megatrain.training.trainer import Trainer
from oracles.tiered_run import ALL_NVME, EXAMPLES, write_tiny_model
from oracles.whole_run import WholeRun, train_whole
from tiered import checksum

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
PAIRS = EXAMPLES / "quickstart/preferences.jsonl"


def has_computed_reference(run: WholeRun) -> bool:
    return any("answers computed" in text for text in run.told.messages)


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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def in_ram(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("in_ram") / "run"
    return train_whole(folder, text_of(folder, tiny_model))


def test_run_reports_preference_metrics(in_ram: WholeRun) -> None:
    first, *_, last = in_ram.told.steps
    assert first.loss == pytest.approx(0.6931, abs=1e-4)  # the model still equals its reference
    assert first.preferences["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert last.preferences["logps/chosen"] < 0.0 and last.preferences["rewards/margins"] != 0.0
    assert 0.0 <= last.preferences["rewards/accuracies"] <= 1.0
    assert [each.step for each in in_ram.told.evaluations] == [3, 4]
    assert set(in_ram.told.evaluations[0].preferences) == set(last.preferences)
    assert (
        has_computed_reference(in_ram)
        and in_ram.plan.run.batch.micro_batch_rows == 4
        and in_ram.plan.run.data.table.packing is False
    )


def test_second_run_reuses_the_reference_scores(tiny_model: Path, in_ram: WholeRun) -> None:
    folder = in_ram.plan.run.output_dir.parent.with_name("again")
    again = train_whole(folder, text_of(folder, tiny_model))
    assert not has_computed_reference(again) and again.figures == in_ram.figures


def test_reference_traffic_matches_the_plan(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text_of(tmp_path / "run", tiny_model, more=f"[placement]\n{ALL_NVME}\n"))
    trainer = Trainer(load_config(path).config)
    with trainer.open() as opened:
        opened.load()
        loader = trainer.make_loader()
        opened.store.wait_idle()
        before = opened.store.stats()
        reference = Reference(
            trainer.plan,
            opened.store,
            activity=trainer.activity,
            on_message=lambda text: None,
            saved_checksums=None,
        )
        reference.fill_loaders([loader])
        moved = opened.store.stats() - before
    planned = count_pass_traffic(trainer.plan, num_reference_passes(trainer.plan, loader))
    assert {name: link.num_bytes for name, link in moved.links.items()} == planned
    assert sum(planned.values()) > 0
    for tier, stats in moved.tiers.items():
        assert stats.home_bytes <= stats.high_water_bytes <= trainer.plan.budgets[tier]


def test_resumed_run_keeps_its_reference(tiny_model: Path, tmp_path: Path, in_ram: WholeRun) -> None:
    folder = tmp_path / "run"
    text = text_of(folder, tiny_model)
    first = train_whole(folder, text, stop_after=2)
    for path in (tmp_path / "cache" / FOLDER_NAME).iterdir():
        path.unlink()
    (kept,) = (folder / "out" / FOLDER_NAME).iterdir()
    whole = kept.read_bytes()

    # A reference from other initial weights, a damaged reference and a missing reference stop the run before training.
    values = torch.zeros(json.loads(whole.partition(b"\n")[0])["count"]).numpy()
    body = values.tobytes()
    header = json.loads(whole.partition(b"\n")[0]) | {"checksum": checksum(body)}
    kept.write_bytes(json.dumps(header).encode() + b"\n" + body)
    with pytest.raises(DataError, match="it does not belong to this run's initial model"):
        train_whole(folder, text)
    kept.write_bytes(whole[:-4] + b"abcd")
    with pytest.raises(DataError, match="it is damaged"):
        train_whole(folder, text)
    kept.unlink()
    with pytest.raises(DataError, match="are missing"):
        train_whole(folder, text)
    kept.write_bytes(whole)
    second = train_whole(folder, text)
    assert not has_computed_reference(second)
    assert first.figures + second.figures == in_ram.figures and second.weights == in_ram.weights


def rows_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "orpo"])
def test_other_preference_losses_run_without_nan(loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": n % 3 > 0}
        for n, row in enumerate(rows)
    ]
    path = rows_of(tmp_path / "rows.jsonl", judged if loss_type == "kto" else rows)
    run = train_whole(
        tmp_path / "run", text_of(tmp_path / "run", tiny_model, path, preference=f'loss_type = "{loss_type}"')
    )
    assert has_computed_reference(run) == (loss_type == "kto")
    assert len(run.figures) == NUM_STEPS and all(loss == loss for loss, _, _ in run.figures)
    assert ("kl" if loss_type == "kto" else "nll_loss") in run.figures[-1][2]


@pytest.mark.slow
def test_adapters_start_as_their_reference(tiny_model: Path, tmp_path: Path) -> None:
    run = train_whole(tmp_path / "run", text_of(tmp_path / "run", tiny_model, more="[lora]\nr = 4\n"))
    assert run.told.steps[0].loss == pytest.approx(0.6931, abs=1e-4)
    assert run.told.steps[-1].loss != run.told.steps[0].loss
