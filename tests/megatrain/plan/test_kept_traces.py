"""What the tests of plans share: a trace is made again wherever anything that it depends on is another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from megatrain.config import load_config
from megatrain.engine import head_plan
from megatrain.engine.program import VisitTrace
from megatrain.plan import planner
from megatrain.resolve import resolve
from oracles.tiered_run import config_text, write_tiny_model
from oracles.traces import is_keeping


@pytest.fixture
def num_traces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what gives the number of traces that were made."""
    kept = planner.trace_visits
    assert isinstance(kept, functools.partial) and is_keeping(kept)  # by conftest
    traces: list[VisitTrace] = []
    (trace,) = kept.args

    def noting(*args: object, **options: object) -> VisitTrace:
        traces.append(trace(*args, **options))
        return traces[-1]

    monkeypatch.setattr(planner, "trace_visits", functools.partial(kept.func, noting))
    return lambda: len(traces)


def test_a_trace_is_made_for_each_of_what_it_depends_on(
    tmp_path: Path, num_traces: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")

    deeper = write_tiny_model(tmp_path / "deeper", num_hidden_layers=5)

    def plan(model: Path = model, **tables: str) -> VisitTrace:
        path = tmp_path / "run.toml"
        path.write_text(config_text(tmp_path, model, **tables))
        return planner.plan_run(resolve(load_config(path).config)).trace

    first = plan()
    assert plan() is plan(ram="128MiB") is plan(optimizer='optim = "lion"') is first and num_traces() == 1
    assert plan(deeper) is not first
    assert plan(precision='compute_dtype = "bfloat16"') is not first
    assert num_traces() == 3
    with monkeypatch.context() as patches:
        patches.setattr(head_plan, "_COLUMNS", 500)
        assert plan() is not first
    forward = LlamaMLP.forward
    for number in (5, 6):  # each a function of its own
        with monkeypatch.context() as patches:
            patches.setattr(LlamaMLP, "forward", lambda self, x: forward(self, torch.relu(x)))
            assert plan() is not first
        assert num_traces() == number
    assert plan() is first and num_traces() == 6
