"""Settings that a config leaves open. A resumed run keeps the choices of its first start, even in a later version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.resume import settings_of_newest
from megatrain.checkpoint.state import DecidedSettings
from megatrain.config import load_config
from megatrain.plan.plan import Plan
from megatrain.plan.run_spec import MICRO_BATCH_TOKENS
from megatrain.ranks.world import World
from megatrain.training import start
from megatrain.training.trainer import Trainer
from oracles.tiered_run import config_text

SIX_ROWS = "train_batch_tokens = 384"


def trainer(folder: Path, model: Path, steps: int, batch: str = SIX_ROWS, **tables: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    text = config_text(folder, model, **{"nvme": 0, **tables})
    given = "per_device_train_batch_size = 2\ngradient_accumulation_steps = 3"
    (folder / "run.toml").write_text(text.replace(given, f"{batch}\nmax_steps = {steps}"))
    return Trainer(load_config(folder / "run.toml").config)


def recorded_micro_batch_tokens(folder: Path) -> int | None:
    kept = settings_of_newest(folder / "out", "auto")
    assert kept is not None
    return kept.micro_batch_tokens


def weights(folder: Path) -> bytes:
    return (folder / "out" / "final" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_resumed_run_keeps_its_micro_batch_size(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming in other tiers, by a version with another token target, gives the weights of an uninterrupted run."""
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 128)
    unbroken = trainer(tmp_path / "unbroken", tiny_model, 2)
    assert (unbroken.plan.run.batch.micro_batch_rows, unbroken.plan.run.batch.num_micro_batches) == (2, 3)
    unbroken.train()
    folder = tmp_path / "resumed"
    trainer(folder, tiny_model, 1).train()
    assert recorded_micro_batch_tokens(folder) == 128
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 2048)
    assert trainer(tmp_path / "new", tiny_model, 1).plan.run.batch.micro_batch_rows == 6
    resumed = trainer(folder, tiny_model, 2, nvme=1, placement='optimizer = ["nvme"]', ram="24MiB")
    assert resumed.plan.run.batch.micro_batch_rows == 2 and resumed.plan.traffic["nvme->ram"]
    resumed.train()
    assert weights(folder) == weights(tmp_path / "unbroken")
    ranks = replace(resumed.run, world=World.local(0, 3))
    assert ranks.batch.micro_batch_rows == 2
    assert recorded_micro_batch_tokens(folder) == 128
    given = trainer(folder, tiny_model, 3, "per_device_train_batch_size = 3\ngradient_accumulation_steps = 2")
    assert given.plan.run.batch.micro_batch_rows == 3


def test_checkpoint_without_recorded_tokens_uses_old_default(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = start.describe_model

    def describe_without_tokens(plan: Plan) -> Mapping[str, Any]:
        return {key: value for key, value in describe(plan).items() if key != "micro_batch_tokens"}

    with monkeypatch.context() as older:
        older.setattr(start, "describe_model", describe_without_tokens)
        trainer(tmp_path / "run", tiny_model, 1).train()
    assert recorded_micro_batch_tokens(tmp_path / "run") == 2048
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 128)
    resumed = trainer(tmp_path / "run", tiny_model, 2)
    assert resumed.plan.run.batch.micro_batch_rows == 6
    resumed.train()
    assert recorded_micro_batch_tokens(tmp_path / "run") == 2048


def test_micro_batch_tokens_are_read_from_checkpoint_meta() -> None:
    """Older versions did not record this number. Their target was 8,192 tokens on a GPU and 2,048 on a CPU."""
    cases: tuple[tuple[object, int | None], ...] = (
        ({"device": "cuda"}, 8192),
        ({"device": "cpu"}, 2048),
        ({"device": "cuda", "micro_batch_tokens": 4096}, 4096),
        ({"device": "cuda", "micro_batch_tokens": "many"}, None),
        ({}, None),
        (None, None),
    )
    for model, tokens in cases:
        meta = {"config_toml": "[training]\ngradient_lanes = 4\n", "model": model}
        assert DecidedSettings.of_meta(meta) == DecidedSettings(4, tokens), model
        assert DecidedSettings.of_meta({"config_toml": "=", "model": model}) is None
