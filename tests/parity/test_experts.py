"""Experts in parts: fused experts of a layer that are larger than a part are units of some of them each."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.engine.forward import LayerRunner
from megatrain.models import experts
from megatrain.models.experts import ExpertsPart
from megatrain.models.graph import ModelGraph, build_graph
from oracles.families import MODEL_TYPES, padded_batches, shrunk_config, tiny_config
from oracles.huggingface import assert_same_gradients, build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.tiered_run import QUICKSTART, TieredRun, config_text, run_config

SEED = 3
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")


@pytest.fixture(autouse=True)
def single_experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut the experts of the tiny models: each is a part."""
    monkeypatch.setattr(experts, "EXPERTS_ELEMENTS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def _parts(graph: ModelGraph) -> list[ExpertsPart]:
    return [unit.module for unit in graph.units if isinstance(unit.module, ExpertsPart)]


def _cut_like(graph: ModelGraph, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the model under the names of the graph's, cut like these."""
    entries = [entry for layout in graph.layouts.values() for entry in layout.entries]
    return {
        entry.name: whole[entry.parameter]
        .detach()
        .reshape(-1)[entry.first : entry.first + entry.numel]
        .view(entry.shape)
        for entry in entries
        if entry.parameter in whole
    }


def _joined(graph: ModelGraph, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for layout in graph.layouts.values():
        for entry in layout.entries:
            if entry.name in parts:
                found.setdefault(entry.parameter, []).append(parts[entry.name])
    return {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in found.items()}


def _compare_with_hugging_face(config: Any) -> ModelGraph:
    batches = padded_batches()
    model = build_model(config)
    expected = train_step(model, batches, SEED)
    graph = build_graph(config)
    buffers = dict(model.named_buffers())
    for name, buffer in graph.model.named_buffers():
        if name in graph.persistent_buffers():
            buffer.copy_(buffers[name])
    access = MemoryAccess(graph, _cut_like(graph, dict(model.named_parameters())), torch.float32)
    runner = LayerRunner(graph, access, device="cpu", compute_dtype=torch.float32)
    loss = runner.forward_backward(batches, seed=SEED)
    gradients = access.finish()
    assert_same_gradients(expected, loss.loss, _joined(graph, gradients))
    kept_runner = LayerRunner(graph, access, device="cpu", compute_dtype=torch.float32, kept=range(1000))
    assert kept_runner.forward_backward(batches, seed=SEED) == loss
    kept = access.finish()
    assert kept.keys() == gradients.keys()
    assert all(torch.equal(kept[name], gradient) for name, gradient in gradients.items())
    return graph


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_hugging_face(family: str) -> None:
    graph = _compare_with_hugging_face(tiny_config(family))
    assert _parts(graph)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family_with_fused_experts(model_type: str) -> None:
    try:
        config = shrunk_config(model_type)
        train_step(build_model(config), padded_batches(), SEED)
        graph = build_graph(config)
    except Exception as error:
        pytest.skip(f"no tiny text model of this type: {type(error).__name__}: {str(error)[:80]}")
    if not _parts(graph):
        pytest.skip("no fused experts")
    _compare_with_hugging_face(config)


def write_mixture(folder: Path, model_type: str = "qwen3_moe") -> Path:
    """Write a mixture of 8 experts, with the tokenizer of the quickstart."""
    words = AutoConfig.from_pretrained(QUICKSTART).vocab_size
    values = {"vocab_size": words, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    values |= {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_config(model_type, **values)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder / name)
    return folder


PLACEMENTS: dict[str, dict[str, Any]] = {
    "in RAM": {"nvme": 0},
    "on NVMe": {
        "placement": 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]',
        "ram": "3MiB",
    },
    "on NVMe, one micro-batch at a time": {
        "placement": 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]',
        "ram": "3MiB",
        "advanced": 'micro_batch_order = "micro_batch"',
    },
    "partly on a GPU": {"gpu": "5MiB", "ram": "3MiB"},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small mixture of experts, with the tokenizer of the quickstart."""
    return write_mixture(tmp_path_factory.mktemp("mixture"))


def test_all_placements_have_the_same_bits(mixture: Path, tmp_path: Path) -> None:
    runs: dict[str, TieredRun] = {}
    for number, (name, options) in enumerate(PLACEMENTS.items()):
        folder = tmp_path / str(number)
        text = config_text(folder, mixture, precision='compute_dtype = "bfloat16"', **options)
        runs[name] = run_config(text, folder, num_steps=3)
        runs[name].assert_as_planned()
    first = runs.pop("in RAM")
    assert len(_parts(first.plan.graph)) == 8  # the first layer is dense
    for run in runs.values():
        run.assert_same(first)
