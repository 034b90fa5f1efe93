"""The plans of tests share traces, but any change to a trace's inputs makes a new trace."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from megatrain.config import load_config
from megatrain.engine.head import head_plan
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.plan import planner, traced
from megatrain.training.resolve import resolve
from oracles import traces
from oracles.tiered_run import config_text, write_tiny_model
from oracles.traces import is_keeping
from processes import warm


@pytest.fixture
def num_traces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the number of traces made so far."""
    kept = traced.trace_visits
    assert isinstance(kept, functools.partial) and is_keeping(kept)  # set by conftest
    traces: list[VisitTrace] = []
    (trace,) = kept.args

    def noting(*args: object, **options: object) -> VisitTrace:
        traces.append(trace(*args, **options))
        return traces[-1]

    monkeypatch.setattr(traced, "trace_visits", functools.partial(kept.func, noting))
    return lambda: len(traces)


def test_trace_cache_distinguishes_all_its_inputs(
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
    for number in (5, 6):  # each patch is a separate function
        with monkeypatch.context() as patches:
            patches.setattr(LlamaMLP, "forward", lambda self, x: forward(self, torch.relu(x)))
            assert plan() is not first
        assert num_traces() == number
    assert plan() is first and num_traces() == 6


PLAN = """
from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
plan_run(resolve(load_config("run.toml").config))
"""


@pytest.mark.slow
def test_unpatched_process_reuses_the_stored_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    monkeypatch.setenv(traces.FOLDER, str(folder))
    path = tmp_path / "run.toml"
    path.write_text(config_text(tmp_path, write_tiny_model(tmp_path / "model")))

    def plan() -> VisitTrace:
        monkeypatch.setattr(traces, "_KEPT", {})  # like a process that has not planned yet
        return planner.plan_run(resolve(load_config(path).config)).trace

    done = warm.run([sys.executable, "-c", PLAN], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (made,) = folder.iterdir()
    assert pickle.loads(made.read_bytes()) == plan()
    of_child = replace(plan(), num_tokens=12_345)  # distinguishes it from a trace made here
    made.write_bytes(pickle.dumps(of_child))
    assert plan() == of_child and len(list(folder.iterdir())) == 1

    with monkeypatch.context() as patches:
        patches.setattr(head_plan, "_COLUMNS", 500)
        assert plan() != of_child and len(list(folder.iterdir())) == 2, "another name"
    with monkeypatch.context() as patches:
        patches.setattr(LlamaMLP, "forward", lambda self, x: x)
        assert plan() != of_child and len(list(folder.iterdir())) == 2, "none: this object has no stable name"
    assert plan() == of_child
