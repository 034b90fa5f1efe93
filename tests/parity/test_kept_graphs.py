"""Runs that keep graphs where memory is left: the same bits as runs that recompute, and the planned traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracles.tiered_run import TieredRun, config_text, run_config

NUM_STEPS = 4
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "all layers, in RAM": (4, {"nvme": 0}),
    "one layer, all that fits beside results": (1, {"nvme": 0, "ram": "26MiB"}),
    "all layers, micro-batch-major": (4, {"nvme": 0, "advanced": 'micro_batch_order = "micro_batch"'}),
    "updates during the backward": (4, {"nvme": 0, "optimizer": 'max_grad_norm = 0\nnonfinite = "ignore"'}),
    "two layers, gradients and activations on NVMe": (
        2,
        {"placement": 'gradients = ["nvme"]\nactivations = ["nvme"]', "training": 'recompute = "none:2"'},
    ),
    "two layers, state on NVMe, micro-batch-major": (
        2,
        {
            "placement": 'optimizer = ["nvme"]',
            "training": 'recompute = "none:2"',
            "advanced": 'micro_batch_order = "micro_batch"',
        },
    ),
    "no layer whose weights are on NVMe": (0, {"placement": 'weights = ["nvme"]', "training": 'recompute = "none:3"'}),
}


def run(folder: Path, model: Path, *, precision: str = "", **options: Any) -> TieredRun:
    return run_config(config_text(folder, model, precision=precision, **options), folder, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def baselines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TieredRun]:
    """Runs in RAM that recompute every layer, by the text of their optimizer."""
    return {
        optimizer: run(
            tmp_path_factory.mktemp("again"), tiny_model, nvme=0, optimizer=optimizer, training='recompute = "full"'
        )
        for optimizer in ("", 'max_grad_norm = 0\nnonfinite = "ignore"')
    }


def check(result: TieredRun, expected: TieredRun) -> None:
    assert result.losses == expected.losses and result.grad_norms == expected.grad_norms
    assert result.digests == expected.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
    assert result.moved.prefetch_wasted == 0 and result.moved.schedule_misses == 0
    for tier, stats in result.moved.tiers.items():
        assert stats.home_bytes == sum(result.plan.placement.home_bytes[tier].values()), tier
        assert stats.home_bytes <= stats.high_water_bytes <= stats.capacity_bytes == result.plan.budgets[tier]


def layers_kept(result: TieredRun) -> int:
    plan = result.plan
    return sum(plan.graph.units[plan.trace.visits[visit].unit].is_layer for visit in plan.program.recompute.kept_graphs)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_and_planned_traffic(
    name: str, tiny_model: Path, tmp_path: Path, baselines: dict[str, TieredRun]
) -> None:
    num_layers, options = CASES[name]
    result = run(tmp_path, tiny_model, **options)
    assert layers_kept(result) == num_layers
    expected = baselines[options.get("optimizer", "")]
    assert not expected.plan.program.recompute.kept_graphs
    check(result, expected)


def test_bfloat16_with_rounded_gradients(tiny_model: Path, tmp_path: Path) -> None:
    precision = 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'
    again = run(tmp_path / "again", tiny_model, nvme=0, precision=precision, training='recompute = "full"')
    kept = run(tmp_path / "kept", tiny_model, nvme=0, precision=precision)
    assert layers_kept(kept) == 4
    check(kept, again)


@pytest.mark.parametrize(("gpu", "num_layers"), [("48MiB", 4), ("12MiB", 2)])
def test_a_device_tier_keeps_graphs_of_weights_at_home_there(
    gpu: str, num_layers: int, tiny_model: Path, tmp_path: Path
) -> None:
    """With updates in RAM, so that weights leave their homes and come back, between the steps' forwards."""
    optimizer = 'optim = "adafactor"'  # which has no kernel for a GPU
    placement = 'weights = ["gpu"]\ngradients = ["gpu"]\nactivations = ["gpu"]\noptimizer = ["ram"]'
    again = run(tmp_path / "again", tiny_model, nvme=0, optimizer=optimizer, training='recompute = "full"')
    result = run(tmp_path / "kept", tiny_model, nvme=0, optimizer=optimizer, gpu=gpu, placement=placement)
    # Each update reads weights and gradients there.
    of_weights = sum(block.nbytes for block in result.plan.program.blocks.values() if block.kind == "weights")
    assert result.plan.traffic["gpu->ram"] == 2 * of_weights
    assert layers_kept(result) == num_layers
    check(result, again)
