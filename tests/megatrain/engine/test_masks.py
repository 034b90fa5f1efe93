"""Rows that are one document each need no mask; the trace of a step knows that if it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.config.resolve import resolve
from megatrain.engine.trace import trace_visits
from megatrain.models.graph import build_graph
from megatrain.plan.planner import plan_run
from oracles.families import tiny_config
from oracles.tiered_run import config_text, write_tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_masks_memory_is_linear_in_the_length_of_a_row(family: str) -> None:
    """In layers that attend to all that is before; a window takes a mask whatever the rows are."""

    def most(length: int, *, padded: bool) -> int:
        graph = build_graph(tiny_config(family), attn_implementation="sdpa", dtype=torch.float32)
        trace = trace_visits(graph, 1, length, torch.float32, padded=padded)
        return max(visit.held_nbytes for visit in trace.visits)

    assert most(8192, padded=False) < 2.5 * most(4096, padded=False)
    assert most(8192, padded=True) > 3.5 * most(4096, padded=True)
    assert most(8192, padded=False) < 8192 * 8192 < most(8192, padded=True)


@pytest.mark.parametrize(("rows", "packing", "has_mask"), [(1, "false", False), (2, "false", True), (1, "true", True)])
def test_a_plan_has_masks_where_the_data_may_have_them(rows: int, packing: str, has_mask: bool, tmp_path: Path) -> None:
    """A micro-batch of one row that is not packed is as long as the row: nothing in it is padding."""
    model = write_tiny_model(tmp_path / "model")
    text = config_text(tmp_path, model, nvme=0, ram="2GiB", data=f"packing = {packing}")
    text = text.replace("max_length = 64", "max_length = 4096").replace("batch_size = 2", f"batch_size = {rows}")
    (tmp_path / "run.toml").write_text(text)
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
    assert plan.micro_batch_size == rows
    assert (plan.trace.shared_nbytes > 4096 * 4096) == has_mask
