"""The planner runs micro-batches one at a time if more of the forward can then be kept for the backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.plan.flops import flops_per_token
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.show import headline
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text

MODEL = EXAMPLES / "quickstart" / "model"


def make_plan(folder: Path, *, nvme: int = 0, **tables: str) -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(config_text(folder, MODEL, nvme=nvme, **tables))
    return plan_run(resolve(load_config(folder / "run.toml").config))


@pytest.fixture(scope="module")
def ram(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a RAM size that can keep all graphs of one micro-batch, but only some graphs of three."""
    folder = tmp_path_factory.mktemp("sizes")
    least = make_plan(folder, training='recompute = "full"').totals["ram"]
    one = make_plan(folder, advanced='micro_batch_order = "micro_batch"', training='recompute = "none"')
    assert one.totals["ram"] < least + (make_plan(folder).totals["ram"] - least) // 2
    return f"{max(least, one.totals['ram'])}B"


def test_micro_batch_order_is_chosen_if_it_keeps_more_graphs(ram: str, tmp_path: Path) -> None:
    by_layer = make_plan(tmp_path, ram=ram, advanced='micro_batch_order = "layer"')
    plan = make_plan(tmp_path, ram=ram)
    assert (by_layer.run.batch.order, plan.run.batch.order) == ("layer", "micro_batch")
    assert plan.totals["ram"] == plan.budgets["ram"] and not any(plan.traffic.values())
    assert [len(each.program.recompute.kept_graphs) for each in (plan, by_layer)] == [6, 1]
    # A forward is a quarter of the work of a step that recomputes everything.
    assert 0.75 * flops_per_token(by_layer) < flops_per_token(plan) < 0.99 * flops_per_token(by_layer)
    assert "one micro-batch at a time" in headline(plan) and "at a time" not in headline(by_layer)


@pytest.mark.parametrize(
    "tables",
    [
        {"training": 'recompute = "full"'},
        {"training": "gradient_lanes = 3"},
        {"precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'},
        {"nvme": 1, "placement": 'optimizer = ["nvme"]'},
        {"ram": "256MiB"},
    ],
    ids=["nothing is kept", "lanes", "rounded gradients", "something moves", "all is kept"],
)
def test_other_placements_use_layer_order(tables: dict[str, str], ram: str, tmp_path: Path) -> None:
    assert make_plan(tmp_path, **{"ram": ram, **tables}).run.batch.order == "layer"  # type: ignore[arg-type]
