"""`model.mlp_rows`: which submodules run in pieces, their gradients, and the memory that this saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.multimodal import Images
from megatrain.converters.spec import build_graph
from megatrain.converters.tiled import TiledForward, find_position_wise, is_position_wise, tile_mlps
from megatrain.engine.device import freed_memory
from megatrain.plan.process import HEAP_BYTES
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config, tiny_image_text_config
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from processes import memory_of_mlp

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Mixing(nn.Module):
    """Module that looks like an MLP but is not position-wise, because it centers each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden - hidden.mean(dim=-2, keepdim=True))))


def test_position_wise_modules_are_detected_by_trial() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    assert is_position_wise(mlp, 8)
    assert not is_position_wise(Mixing(), 8)
    assert not is_position_wise(nn.Sequential(nn.Linear(8, 8), nn.Conv1d(2, 2, 1)), 8)  # fails on pieces


@pytest.mark.parametrize(
    ("family", "path"),
    [("llama", "mlp"), ("gpt2", "mlp"), ("gemma3_text", "mlp"), ("phi3", "mlp"), ("gpt_neox", "mlp")],
)
def test_mlps_are_found_by_behavior(family: str, path: str) -> None:
    graph = build_graph(tiny_config(family))
    layers = [unit.name for unit in graph.units if unit.is_layer]
    assert find_position_wise(graph) == tuple(f"{layer}.{path}" for layer in layers)


@pytest.mark.parametrize("images", ["off", "trained"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_text_mlps_of_image_models_are_found(family: str, images: Images) -> None:
    graph = build_graph(tiny_image_text_config(family), images=images)
    text = [unit.name for unit in graph.units if unit.is_layer and unit.index not in graph.optional_units]
    assert text and find_position_wise(graph) == tuple(f"{layer}.mlp" for layer in text)


def gradients(family: str, rows: int, **values: Any) -> tuple[float, dict[str, torch.Tensor]]:
    config = tiny_config(family)
    for name, value in values.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    graph = build_graph(config)
    if rows:
        assert tile_mlps(graph, rows)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    trace = trace_visits(graph, 2, 16, torch.float32)
    runner = layer_runner(graph, access, device="cpu", trace=trace)
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    loss = runner.forward_backward([batch, {**batch, "input_ids": ids.flip(0)}])
    evaluated = runner.evaluate([batch])
    return loss.loss + sum(evaluated.terms) / evaluated.num_tokens, access.finish()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3_moe", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("rows", [5, 16])
def test_tiled_gradients_match_the_whole(family: str, rows: int) -> None:
    loss, whole = gradients(family, 0)
    tiled_loss, tiled = gradients(family, rows)
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    assert tiled.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(tiled[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_tiled_recompute_repeats_dropout() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    hidden = torch.randn(1, 12, 8, requires_grad=True)
    out = TiledForward("mlp", mlp, 5)(hidden)
    torch.rand(7)  # other code may draw random numbers between forward and backward
    found = torch.autograd.grad(out.sum(), [hidden, *mlp.parameters()])
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    hidden = torch.randn(1, 12, 8, requires_grad=True)
    expected = torch.cat([mlp(piece) for piece in hidden.split(5, dim=1)], dim=1)
    assert torch.equal(out, expected)
    for ours, plain in zip(found, torch.autograd.grad(expected.sum(), [hidden, *mlp.parameters()]), strict=True):
        torch.testing.assert_close(ours, plain)


def test_untileable_model_is_refused_with_a_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no submodule of its layers .* Write mlp_rows = 0"):
        tile_mlps(build_graph(tiny_config("opt")), 4)
    config = tiny_config("mixtral")
    config.output_router_logits = True
    graph = build_graph(config)
    tile_mlps(graph, 4)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\..*records what it computes"):
        trace_visits(graph, 1, 16, torch.float32)


@pytest.mark.slow
def test_tiled_mlp_memory_is_planned_for_one_piece(tmp_path: Path) -> None:
    """The plan counts one piece instead of the whole MLP, and the process stays within the plan.

    On the CPU, a process keeps freed memory up to its planned heap plus some spare bytes (decisions 0085 and 0112).
    """
    found = {rows: memory(tmp_path, rows) for rows in (0, 256)}
    planned = found[0]["planned"] - found[256]["planned"]
    assert 160 * MIB < planned < 161 * MIB, found
    assert found[0]["peak"] == pytest.approx(found[0]["planned"], rel=0.25), found
    kept = HEAP_BYTES + freed_memory._SPARE_BYTES
    assert found[256]["planned"] / 2 < found[256]["peak"] < found[256]["planned"] + kept, found


def memory(folder: Path, rows: int) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MALLOC_ARENA_MAX": "1"}
    # A fixed threshold does not grow when memory is freed. Freed memory of large tensors then returns to the system.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    command = [sys.executable, str(Path(memory_of_mlp.__file__)), str(folder / str(rows)), str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    figures: dict[str, int] = json.loads(done.stdout)
    return figures
