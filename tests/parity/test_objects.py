"""Runs with a drive and an object tier, both linked to RAM, equal a run in RAM bit for bit. Traffic is as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.objects_tier import NAME, objects_tier
from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.simulate import SimulatedRates, simulate_step
from megatrain.training.resolve import resolve
from oracles.tiered_run import TieredRun, config_text, run_config
from tiered import MiB

NUM_STEPS = 3
FROZEN = 'freeze = ["model.embed_tokens.*", "model.layers.[123].*"]'


def text_of(folder: Path, model: Path, *, drive: str = "3MiB", frozen: bool = False, **tables: Any) -> str:
    text = config_text(folder, model, **tables).replace('drive0"\nsize = "256MiB"', f'drive0"\nsize = "{drive}"')
    return text.replace("[data]", f"{FROZEN}\n[data]", 1) if frozen else text


def run(folder: Path, model: Path, **tables: Any) -> TieredRun:
    with objects_tier((folder / NAME).as_uri(), 64 * MiB):
        return run_config(text_of(folder, model, **tables), folder, num_steps=NUM_STEPS)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"gpu": "9MiB"},
        {"gpu": "9MiB", "optimizer": 'max_grad_norm = 0\nnonfinite = "ignore"'},
        {"precision": 'compute_dtype = "bfloat16"'},
        {"frozen": True, "placement": 'weights = ["folder"]', "drive": "64KiB", "ram": "8MiB"},
    ],
    ids=["cpu", "gpu", "updates at once", "bf16", "folder"],
)
def test_same_bits_and_planned_traffic(tables: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "objects", tiny_model, **{"ram": "7MiB", **tables})
    others = {name: each for name, each in tables.items() if name not in ("gpu", "placement", "drive", "ram")}
    plain = text_of(tmp_path / "ram", tiny_model, nvme=0, **others)
    result.assert_same(run_config(plain, tmp_path / "ram", num_steps=NUM_STEPS))
    result.assert_as_planned()
    used = {tier for tier, kinds in result.plan.placement.home_bytes.items() if any(kinds.values())}
    assert used >= {"nvme", NAME} | ({"folder"} if "placement" in tables else set())
    assert result.moved is not None and f"nvme->{NAME}" not in result.moved.links


def test_too_small_object_tier_is_refused_and_replay_matches_the_plan(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text_of(tmp_path, tiny_model, ram="7MiB"))
    config = load_config(tmp_path / "run.toml").config
    with objects_tier((tmp_path / NAME).as_uri(), 64 * MiB):
        plan = plan_run(resolve(config))
    assert simulate_step(plan, 384, SimulatedRates(2e9, 1e12, 1e9)).moved_bytes == plan.traffic
    assert plan.estimate is not None and plan.estimate.step_s is None, "its links are unmeasured"
    with objects_tier((tmp_path / NAME).as_uri(), MiB), pytest.raises(DoesNotFitError, match="tier 'objects'"):
        plan_run(resolve(config))
    assert not (tmp_path / NAME).exists()
