"""LoRA: loss and every gradient match peft on the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from megatrain.converters.adapters import adapters_of
from megatrain.converters.spec import build_graph
from megatrain.converters.tiled import tile_mlps
from megatrain.models.table import LoraConfig
from oracles.families import padded_batches, tiny_config
from oracles.huggingface import Reference, build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.peft_model import parameters_by_name, peft_model, plain_name
from oracles.runners import StepLoss, layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11
LINEAR = ("q_proj", "v_proj", "down_proj")


def streamed(
    config: Any,
    spec: LoraConfig,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    order: Any,
    mlp_rows: int = 0,
) -> tuple[StepLoss, dict[str, torch.Tensor]]:
    graph = build_graph(config, lora=spec, dtype=dtype)
    if mlp_rows:
        assert tile_mlps(graph, mlp_rows)
    access = MemoryAccess(graph, dict(weights), dtype)
    runner = layer_runner(graph, access, device="cpu", order=order)
    loss = runner.forward_backward(padded_batches(), seed=SEED)
    return loss, access.finish()


def compare(
    family: str, spec: LoraConfig, dtype: torch.dtype = torch.float32, *, mlp_rows: int = 0, **values: Any
) -> None:
    """Compare a step in layer order with peft, and bit for bit with a step in micro-batch order."""
    config, modules = tiny_config(family, **values), spec.target_modules
    settings = {
        "r": spec.r,
        "lora_alpha": spec.lora_alpha,
        "lora_dropout": spec.lora_dropout,
        "target_modules": None if modules == "auto" else list(modules) if isinstance(modules, tuple) else modules,
        "modules_to_save": list(spec.modules_to_save) or None,
        "use_rslora": spec.use_rslora,
        "use_dora": spec.use_dora,
        "rank_pattern": dict(spec.rank_pattern),
        "target_parameters": list(spec.target_parameters) or None,
    }
    model = peft_model(config, settings, dtype)
    expected = train_step(model, padded_batches(), SEED)
    gradients = {plain_name(name): gradient for name, gradient in expected.gradients.items()}
    loss, found = streamed(config, spec, parameters_by_name(model), dtype, "layer", mlp_rows)
    _assert_equal(Reference(expected.loss, gradients), loss, found, 1e-5 if dtype == torch.float32 else 3e-2)
    again, others = streamed(config, spec, parameters_by_name(model), dtype, "micro_batch", mlp_rows)
    assert again == loss
    assert all(torch.equal(others[name], found[name]) for name in found)


def _assert_equal(expected: Reference, loss: StepLoss, found: Mapping[str, torch.Tensor], tolerance: float) -> None:
    assert loss.loss == pytest.approx(expected.loss, rel=min(1e-6, tolerance) if tolerance < 1e-4 else 1e-3)
    assert set(found) == set(expected.gradients)
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = (found[name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), (name, float(error), float(gradient.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_adapters_of_all_linear_layers(family: str) -> None:
    compare(family, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), tied=False)


def test_conv1d_of_gpt2() -> None:
    compare("gpt2", LoraConfig(r=4, lora_alpha=8, target_modules=("c_attn", "c_fc")))


def test_default_target_modules_match_peft() -> None:
    compare("llama", LoraConfig(r=4, lora_alpha=8))


def test_lora_dropout_matches_peft() -> None:
    compare("llama", LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules=LINEAR))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(tied: bool) -> None:
    modules = ("embed_tokens", "q_proj", "lm_head")
    compare("llama", LoraConfig(r=4, lora_alpha=8, target_modules=modules), tied=tied)


def test_modules_to_save_are_fully_trained() -> None:
    compare(
        "llama", LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, modules_to_save=("lm_head", "norm")), tied=False
    )


def test_rslora_with_rank_pattern() -> None:
    compare("llama", LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, use_rslora=True, rank_pattern={"q_proj": 2}))


@pytest.mark.parametrize(("family", "modules"), [("llama", LINEAR), ("gpt2", ("c_attn", "c_fc"))])
def test_dora(family: str, modules: tuple[str, ...]) -> None:
    compare(family, LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=True))


@pytest.mark.filterwarnings("ignore")  # warnings from peft and transformers
@pytest.mark.parametrize(("family", "modules"), [("gpt2", ("c_attn", "c_fc")), ("llama", ("q_proj", "down_proj"))])
def test_dora_magnitudes_start_at_the_norms_of_peft(family: str, modules: tuple[str, ...]) -> None:
    """Conv1D stores its weight transposed. In peft and this project, each norm covers one output feature's weights."""
    config = tiny_config(family)
    plain = build_model(config)
    for name, weight in plain.named_parameters():  # gives all rows and columns different norms
        with torch.no_grad():
            weight.mul_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    base = {name.removesuffix(".weight"): weight.detach().clone() for name, weight in plain.named_parameters()}
    model = get_peft_model(plain, PeftConfig(task_type="CAUSAL_LM", r=4, target_modules=list(modules), use_dora=True))
    expected = {
        plain_name(name): weight for name, weight in model.named_parameters() if "lora_magnitude_vector" in name
    }
    adapters = adapters_of(
        build_graph(config, lora=LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=True))
    )
    assert adapters is not None and expected
    found = {name: torch.full_like(weight, torch.nan) for name, weight in expected.items()}
    adapters.initialize(found, {path: base[path] for path in adapters.dora_modules(list(found))}, 7)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("family", "modules"), [("llama", LINEAR), ("gpt2", ("c_attn", "c_fc"))])
def test_adapters_with_tiled_mlps(family: str, modules: tuple[str, ...], use_dora: bool) -> None:
    """A layer with adapters still runs its MLP in pieces. Adapters in the MLP get the gradient sums of all pieces."""
    compare(family, LoraConfig(r=4, lora_alpha=8, target_modules=modules, use_dora=use_dora), mlp_rows=5)


def test_bfloat16() -> None:
    compare("llama", LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR), torch.bfloat16)


def test_adapters_of_fused_experts() -> None:
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    compare("qwen3_moe", LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj",), target_parameters=names), tied=False)
