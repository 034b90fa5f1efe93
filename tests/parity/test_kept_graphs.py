"""The GPU tier keeps graphs although their weights move to RAM for updates and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.tiered_run import config_text, run_config

NUM_STEPS = 4
#: Adafactor has no GPU kernel, so updates run in RAM.
OPTIMIZER = 'optim = "adafactor"'


@pytest.mark.parametrize(("gpu", "num_layers"), [("48MiB", 4), ("12MiB", 2)])
def test_gpu_tier_keeps_graphs_of_layers_with_gpu_weights(
    gpu: str, num_layers: int, tiny_model: Path, tmp_path: Path
) -> None:
    """Updates run in RAM, between the backward and the next forward."""
    placement = 'weights = ["gpu"]\ngradients = ["gpu"]\nactivations = ["gpu"]\noptimizer = ["ram"]'
    text = config_text(tmp_path, tiny_model, nvme=0, optimizer=OPTIMIZER, training='recompute = "full"')
    again = run_config(text, tmp_path / "again", num_steps=NUM_STEPS)
    text = config_text(tmp_path, tiny_model, nvme=0, optimizer=OPTIMIZER, gpu=gpu, placement=placement)
    result = run_config(text, tmp_path / "kept", num_steps=NUM_STEPS)
    plan = result.plan
    # Updates move weights and gradients to RAM.
    of_weights = sum(block.nbytes for block in plan.program.blocks.values() if block.kind == "weights")
    assert plan.traffic["gpu->ram"] == 2 * of_weights
    kept = plan.program.recompute.kept_graphs
    assert sum(plan.graph.units[plan.trace.visits[visit].unit].is_layer for visit in kept) == num_layers
    assert not again.plan.program.recompute.kept_graphs
    result.assert_same(again)
    result.assert_as_planned()
