"""Runs that save attention's results for the recompute: the bits of runs that compute it again, the planned traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.plan.kept import num_layers_of
from megatrain.plan.placement import Traffic
from oracles.tiered_run import TieredRun, config_text, run_config

NUM_STEPS = 4
ALL = 'recompute = "selective"'
FULL = 'recompute = "full"'
ON_GPU = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'
#: Layers that save attention, whether their results move, and the options of the run.
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "by default, beside a graph": (3, False, {"nvme": 0, "ram": "26MiB"}),
    "in RAM": (4, False, {"nvme": 0, "training": ALL}),
    "micro-batch-major": (4, False, {"nvme": 0, "training": ALL, "advanced": 'micro_batch_order = "micro_batch"'}),
    "on NVMe": (
        4,
        True,
        {"placement": 'activations = ["nvme"]', "ram": "16200KiB", "training": ALL},
    ),
    "two layers, everything on NVMe, micro-batch-major": (
        2,
        False,
        {
            "placement": 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]',
            "training": 'recompute = "selective:2"',
            "advanced": 'micro_batch_order = "micro_batch"',
        },
    ),
    "beside a device tier": (4, True, {"nvme": 0, "gpu": "9MiB", "placement": ON_GPU, "training": ALL}),
}


def run(folder: Path, model: Path, *, precision: str = "", **options: Any) -> TieredRun:
    return run_config(config_text(folder, model, precision=precision, **options), folder, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def again(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TieredRun:
    """A run in RAM that computes everything again."""
    result = run(tmp_path_factory.mktemp("again"), tiny_model, nvme=0, training=FULL)
    assert not result.plan.program.recompute.saving
    return result


def layers_saving(result: TieredRun) -> int:
    return num_layers_of(result.plan.graph, result.plan.trace, result.plan.program.recompute.saved_results)


def check(result: TieredRun, expected: TieredRun) -> None:
    assert result.losses == expected.losses and result.grad_norms == expected.grad_norms
    assert result.digests == expected.digests
    assert result.moved is not None
    moved = {link: stats.num_bytes for link, stats in result.moved.links.items()}
    assert moved == result.plan.placement.run_traffic_bytes(NUM_STEPS)
    assert result.moved.schedule_misses == 0
    for tier, stats in result.moved.tiers.items():
        assert stats.home_bytes == sum(result.plan.placement.home_bytes[tier].values()), tier
        assert stats.home_bytes <= stats.high_water_bytes <= stats.capacity_bytes == result.plan.budgets[tier]


@pytest.mark.parametrize("name", CASES)
def test_same_bits_and_planned_traffic(name: str, tiny_model: Path, tmp_path: Path, again: TieredRun) -> None:
    num_layers, moves, options = CASES[name]
    result = run(tmp_path, tiny_model, **options)
    assert layers_saving(result) == num_layers
    plan = result.plan
    traffic = Traffic(plan.program, plan.tiers, plan.placement.homes, plan.placement.stays)
    assert any(traffic.of_step(lambda key: key.endswith(".results")).values()) == moves
    check(result, again)


def test_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    precision = 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'
    options: dict[str, Any] = {"nvme": 0, "precision": precision}
    expected = run(tmp_path / "again", tiny_model, training=FULL, **options)
    saved = run(tmp_path / "saved", tiny_model, training=ALL, **options)
    assert layers_saving(saved) == 4
    check(saved, expected)
