"""Memory is quadratic in the row length only if a model needs dense masks, and the plan reports such masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.plan.planner import plan_run
from megatrain.plan.show import messages
from megatrain.trace.trace import trace_visits
from megatrain.training.resolve import resolve
from oracles.families import tiny_config
from oracles.tiered_run import config_text, write_tiny_model


def max_held_nbytes(family: str, length: int, attention: str = "sdpa", **options: bool) -> int:
    graph = build_graph(tiny_config(family), attn_implementation=attention, dtype=torch.float32)
    trace = trace_visits(graph, 1, length, torch.float32, **options)
    assert bool(trace.dense_masks) == (options != {"padded": False} and (attention == "eager" or len(options) == 2))
    return max(visit.memory.held_nbytes for visit in trace.visits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("padded", [True, False])
def test_memory_is_linear_in_the_length_of_a_row(family: str, padded: bool) -> None:
    """This holds for rows with and without padding, and for models with and without sliding windows."""
    half = max_held_nbytes(family, 2048, padded=padded)
    assert 1.9 * half < max_held_nbytes(family, 4096, padded=padded) < 2.1 * half < 4096 * 4096


@pytest.mark.parametrize(("attention", "by_documents"), [("eager", True), ("sdpa", False)])
def test_attention_memory_is_quadratic_if_a_mask_is_needed(attention: str, by_documents: bool) -> None:
    """Eager attention computes with dense masks, and compiled layers expect masks of one shape."""
    options = {} if by_documents else {"padded": True, "is_compiled": True}
    half = max_held_nbytes("llama", 4096, attention, **options)
    assert 3.5 * half < max_held_nbytes("llama", 8192, attention, **options) <= 4 * half


@pytest.mark.parametrize(("rows", "packing"), [(1, "false"), (2, "false"), (1, "true")])
@pytest.mark.parametrize("keys", ["", 'attn_implementation = "eager"', "compile = true"])
def test_plan_reports_masks(rows: int, packing: str, keys: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    text = config_text(tmp_path, model, nvme=0, ram="24GiB", data=f"packing = {packing}")
    text = text.replace("max_length = 64", "max_length = 4096").replace("batch_size = 2", f"batch_size = {rows}")
    (tmp_path / "run.toml").write_text(text.replace("[data]", f"{keys}\n[data]", 1))
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
    has_mask = bool(keys) and (packing == "true" or rows > 1 or "eager" in keys)
    assert plan.run.batch.micro_batch_rows == rows
    assert (max(visit.memory.retained_nbytes for visit in plan.trace.visits) > 4096 * 4096) == has_mask
    assert any("square of data.max_length" in message for message in messages(plan)) == has_mask
