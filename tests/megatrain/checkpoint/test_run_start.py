"""The start of a run: its settings, its position in the data, and what it reports if the run is already finished."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.base.observer import RunSummary
from megatrain.checkpoint.best import BestSpec
from megatrain.checkpoint.table import CheckpointSpec
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.data.row_order import LoaderPosition
from megatrain.engine.table import RecomputeChoice
from megatrain.plan.placement import PlacementSpec
from megatrain.plan.run_spec import BatchSpec
from megatrain.training.resolve import (
    resolve,
    resolve_batch,
    resolve_best,
    resolve_checkpoint,
    resolve_evaluation,
    resolve_tiers,
)
from megatrain.training.start import RunStart, _resumed_position, with_checkpoint_settings
from oracles.run_state import make_state
from processes.saved_run import QUICKSTART
from tiered.durable.manifest import Manifest, write_manifest

CONFIG = f"""
task = "pretrain"
output_dir = "out"
run_name = "mine"
seed = 3
data_seed = 4
device = "cpu"
full_determinism = true
[model]
model_name_or_path = "{QUICKSTART / "model"}"
train_from_scratch = true
[data]
max_length = 64
[[data.train]]
path = "x.txt"
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 3
num_train_epochs = 2.5
"""


def config(folder: Path, *overrides: str) -> RunConfig:
    (folder / "run.toml").write_text(CONFIG)
    return load_config(folder / "run.toml", overrides=overrides).config


def test_run_has_the_values_of_its_config(tmp_path: Path) -> None:
    values = config(
        tmp_path, "compute_dtype=bfloat16", "grad_dtype=bfloat16", "recompute=none:4", "trace_steps=[2]",
        "neftune_noise_alpha=5", "max_steps=9", "file_size=64KiB", "on_disk_full=error",
        f'tiers.nvme=[{{path="{tmp_path}/a",rate="3GB/s"}},{{path="{tmp_path}/b",rate="1GB/s"}}]',
    )  # fmt: skip
    run = resolve(values)
    expected: dict[str, Any] = {
        "name": "mine", "task": "pretrain", "output_dir": tmp_path / "out", "seed": 3, "device": torch.device("cpu"),
        "dtype": torch.bfloat16, "grad_dtype": torch.bfloat16, "is_deterministic": True, "num_epochs": 2.5,
        "max_steps": 9, "recompute": RecomputeChoice.parse("none:4"), "advanced": values.advanced,
        "trace_steps": (2,), "optimizer": values.optimizer, "export": values.export,
        "checkpoint": CheckpointSpec(values.checkpoint, tmp_path / "out", (tmp_path / "a", tmp_path / "b"), "error"),
    }  # fmt: skip
    assert {name: getattr(run, name) for name in expected} == expected
    assert run.data.seed == 4 and run.objective.neftune_noise_alpha == 5
    assert (run.tiers.table, run.tiers.rates, run.tiers.has_rates, run.tiers.emulates_gpu, run.tiers.file_bytes) == (
        values.tiers, (3e9, 1e9), True, False, 64 << 10,
    )  # fmt: skip
    assert resolve(config(tmp_path)).max_steps is None


def test_tiers_without_rates_get_equal_shares(tmp_path: Path) -> None:
    emulated = ("advanced.emulate_gpu=true", "tiers.gpu.size=1GiB", 'tiers.nvme=[{path="a"},{path="b"}]')
    tiers = resolve_tiers(config(tmp_path, *emulated))
    assert (tiers.rates, tiers.has_rates, tiers.emulates_gpu, tiers.file_bytes) == ((1.0, 1.0), False, True, None)


@pytest.mark.parametrize(
    ("overrides", "device", "changes"),
    [
        ((), "cpu", {}),
        ((), "cuda", {"target_tokens": 8192}),
        (("gradient_lanes=2",), "cpu", {"num_lanes": 2}),
        (("micro_batch_order=micro_batch",), "cpu", {"order": "micro_batch"}),
    ],
)
def test_batch_of_a_config(tmp_path: Path, overrides: tuple[str, ...], device: str, changes: dict[str, Any]) -> None:
    plain = BatchSpec(
        num_rows=6, max_length=64, configured_rows=2, single_rows=False, order="layer", rows_per_example=1,
        target_tokens=2048, num_lanes=None,
    )  # fmt: skip
    assert resolve_batch(config(tmp_path, *overrides), device) == replace(plain, **changes)


@pytest.mark.parametrize(
    ("placement", "homes", "choices"),
    [
        (
            (),
            {"weights": ["gpu", "ram", "nvme"], "optimizer": ["ram", "nvme"], "in place": ["ram", "folder"]},
            {"weights", "activations", "gradients", "optimizer"},
        ),
        (
            (
                'placement.weights=["nvme","folder"]',
                'placement.optimizer=["nvme"]',
                'placement.gradients=["gpu","ram"]',
            ),
            {"weights": ["nvme"], "optimizer": ["nvme"], "gradients": ["gpu", "ram"], "in place": ["nvme", "folder"]},
            {"activations", "gradients"},
        ),
    ],
)
def test_allowed_homes_of_blocks(
    tmp_path: Path, placement: tuple[str, ...], homes: dict[str, list[str]], choices: set[str]
) -> None:
    extra = ("advanced.emulate_gpu=true", "tiers.gpu.size=1GiB", 'tiers.nvme=[{path="a"}]', "train_from_scratch=false")
    found = resolve(config(tmp_path, "lora.r=2", *extra, *placement)).placement
    default = ["ram", "nvme"]
    expected = {kind: default for kind in ("weights", "activations", "gradients", "optimizer")} | homes
    if not placement:
        expected["weights"] = default
    assert found == PlacementSpec(expected, frozenset(choices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ((), {}),
        (("metric_for_best_model=accuracy",), {"metric": "accuracy", "is_greater_better": True}),
        (("metric_for_best_model=eval_perplexity",), {"metric": "eval_perplexity"}),
        (("greater_is_better=true",), {"is_greater_better": True}),
        (
            ("load_best_model_at_end=true", "early_stopping_patience=3", "early_stopping_threshold=0.5"),
            {"is_kept": True, "patience": 3, "threshold": 0.5},
        ),
        (("evaluation.weights=average",), {"is_average": True}),
        (("evaluation.weights=both",), {}),
        (
            ("evaluation.weights=both", "metric_for_best_model=eval_held_average_loss"),
            {"metric": "eval_held_average_loss", "is_average": True},
        ),
    ],
)
def test_rule_for_the_best_evaluation(tmp_path: Path, overrides: tuple[str, ...], changes: dict[str, Any]) -> None:
    values = config(tmp_path, 'data.eval=[{path="held.txt"}]', "optimizer.ema_decay=0.9", *overrides)
    assert resolve_best(values) == replace(BestSpec("loss", False, False, 0, 0.0), **changes)


def test_evaluation_sets_of_a_config(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    sets = f'data.eval=[{{path="{paths[0]}"}},{{path="{paths[1]}",name="two"}}]'
    rows = ("per_device_eval_batch_size=5", "eval_max_samples=7")
    found = resolve_evaluation(config(tmp_path, sets, *rows))
    assert (found.rows, resolve_evaluation(config(tmp_path)).rows) == (5, None)
    sources = [(each.name, each.label, each.data.table.train[0]) for each in found.sources]
    assert [(name, label) for name, label, _ in sources] == [
        ("a", f"data.eval.0 ({paths[0]})"), ("two", f"data.eval.1 ({paths[1]})")
    ]  # fmt: skip
    assert [(source.path, source.max_samples) for *_, source in sources] == [(path, 7) for path in paths]


TOML = """
[training]
gradient_lanes = 4
[model]
use_liger_kernel = true
flash_attention = "FA3"
[optimizer]
optim = "muon"
muon_fused = "whole"
"""


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (("flash_attention=auto",), (4, 77, "auto", True, "FA3")),
        (("optim=muon",), (4, 77, "whole", True, "FA2")),
        (
            (
                "optim=muon", "optimizer.muon_fused=parts", "gradient_lanes=2", "use_liger_kernel=false",
                "flash_attention=FA2",
            ),
            (2, 77, "parts", False, "FA2"),
        ),
        (("resume_from_checkpoint=no", "optim=muon"), (None, 2048, "parts", "auto", "FA2")),
    ],
)  # fmt: skip
def test_unset_settings_come_from_the_checkpoint(
    tmp_path: Path, overrides: tuple[str, ...], kept: tuple[Any, ...]
) -> None:
    meta = make_state(step=2, config_toml=TOML, model={"micro_batch_tokens": 77}).to_meta()
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    write_manifest(tmp_path / "out/checkpoints", Manifest(1, (), meta))
    run = with_checkpoint_settings(resolve(config(tmp_path, *overrides)))
    table = run.model.table
    assert (
        run.batch.num_lanes, run.batch.target_tokens, run.optimizer.muon_fused, table.use_liger_kernel,
        table.flash_attention,
    ) == kept  # fmt: skip


@pytest.mark.parametrize(
    ("old_rows", "rows", "steps_per_epoch", "position"),
    [
        (4, 4, 10, (3, 6)),
        (4, 8, 10, (3, 3)),
        (4, 5, 10, (3, 4)),
        (8, 4, 13, (3, 12)),
        (8, 4, 12, (4, 0)),
        (4, 4, 6, (4, 0)),
    ],
)
def test_data_position_after_a_change_of_the_batch(
    old_rows: int, rows: int, steps_per_epoch: int, position: tuple[int, int]
) -> None:
    state = make_state(epoch=3, epoch_step=6)
    assert _resumed_position(state, old_rows, rows, steps_per_epoch) == LoaderPosition(*position)


@pytest.mark.parametrize(
    ("num_steps", "done", "schedule", "length", "note"),
    [
        (6, 6, "constant", "all 6 steps", ""),
        (6, 8, "constant", "8 steps, but the config requests 6", ""),
        (
            6, 4, "cosine", "4 steps of 6, and stopped early",
            ": its learning rate (cosine) depends on the length, so it differs from one run of N steps",
        ),
    ],
)  # fmt: skip
def test_finished_run_is_explained(
    tmp_path: Path, num_steps: int, done: int, schedule: str, length: str, note: str
) -> None:
    run = resolve(config(tmp_path, f"lr_scheduler_type={schedule}"))
    told: list[str] = []
    nothing: Any = None
    plan: Any = SimpleNamespace(run=run)
    start = RunStart(plan, nothing, nothing, num_steps, False, told.append)
    start._report_end(RunSummary(done, 1.0, 1.0, 1.0, 1, 1))
    assert told == [
        f"nothing to do: this run is done, {length}. To train on, start it with --max-steps N --allow-config-change, "
        f"N above {done}{note}. To start again, name another output_dir"
    ]


def test_all_fields_of_a_checkpoint_spec_are_resolved(tmp_path: Path) -> None:
    spec = resolve_checkpoint(config(tmp_path))
    assert {item.name for item in fields(spec)} == {"table", "output_dir", "drives", "on_full"}
    assert (spec.output_dir, spec.drives, spec.on_full) == (tmp_path / "out", (), "pause")
