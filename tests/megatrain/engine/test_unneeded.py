"""Products that a recompute skips: which products, that results stay bit-identical, and that a mistake gives NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.converters.spec import build_graph
from megatrain.engine.device.work import SkippedProducts
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit.unneeded import ProductUses, without_values
from megatrain.models.graph import ModelGraph
from megatrain.trace.counting import count_flops
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

#: For each family: endings of the names of weights whose products no gradient needs.
LEFT_OUT: dict[str, set[str]] = {
    "llama": {"mlp.down_proj.weight"},
    "qwen2": {"mlp.down_proj.weight"},
    "qwen3": {"mlp.down_proj.weight"},
    "phi3": {"mlp.down_proj.weight"},
    "smollm3": {"mlp.down_proj.weight"},
    "granite": {"mlp.down_proj.weight"},
    "gpt2": {"mlp.c_proj.weight"},
    "opt": {"fc2.weight", "project_in.weight", "project_out.weight"},
    # Attention and MLP run in parallel, and both results are added to the stream.
    "gpt_neox": {"attention.dense.weight", "mlp.dense_4h_to_h.weight"},
    "cohere2": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},
    # Results of routed experts are multiplied by the router's output, so the router's gradient needs them.
    "qwen3_moe": {"mlp.down_proj.weight"},  # only in the dense layer
    "deepseek_v3": {"mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"},
    "glm4_moe": {"mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"},
    # This family multiplies the experts' inputs by the router's output, not their results.
    "llama4_text": {
        "feed_forward.shared_expert.down_proj.weight",
        "feed_forward.experts.down_proj",
    },
    "mixtral": set(),
    "gpt_oss": set(),
    "qwen3_next": set(),
    "zaya": set(),
    # A norm follows each product, and the norm's gradient needs the result.
    "gemma2": set(),
    "gemma3_text": set(),
    "olmo2": set(),
    # Each of these units is a single product, and its result is used outside of the unit.
    "gemma3n_text": {
        "per_layer_model_projection.weight",
        "altup_projections.0.weight",
        "altup_unembed_projections.0.weight",
    },
    "zamba2": {"mamba.out_proj.weight"},
}


def traced(family: str, **options: Any) -> tuple[Any, ModelGraph, VisitTrace]:
    config = tiny_config(family)
    graph = build_graph(config, **options)
    rows, length = padded_batches()[0]["input_ids"].shape
    return config, graph, trace_visits(graph, rows, length, torch.float32)


def run_twice(
    config: Any, graph: ModelGraph, *traces: VisitTrace | None
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    model = build_model(config)
    buffers = dict(model.named_buffers())
    for name, buffer in graph.model.named_buffers():
        if name in graph.persistent_buffers():
            buffer.copy_(buffers[name])
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    found = []
    for trace in traces:
        runner = layer_runner(graph, access, trace=trace)
        found.append((runner.forward_backward(padded_batches(), seed=3).loss, access.finish()))
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_skipped_products_change_no_result(family: str) -> None:
    config, graph, trace = traced(family)
    left_out = {name for visit in trace.visits for name in visit.unneeded_products.weights}
    matching = {end: [name for name in left_out if name.endswith(end)] for end in LEFT_OUT[family]}
    assert all(matching.values()), (matching, sorted(left_out))
    assert left_out == {name for names in matching.values() for name in names}
    (loss, gradients), (plain_loss, plain) = run_twice(config, graph, trace, None)
    assert loss == plain_loss and gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name


def test_skipping_a_needed_product_changes_gradients() -> None:
    config, graph, trace = traced("llama")
    wrong = tuple(
        replace(visit, unneeded_products=SkippedProducts(frozenset({name})))
        if (name := "model.layers.1.mlp.up_proj.weight") in {owner for _, owner, _ in graph.units[visit.unit].params}
        else visit
        for visit in trace.visits
    )
    ((_, gradients),) = run_twice(config, graph, replace(trace, visits=wrong))
    assert not gradients["model.layers.1.mlp.down_proj.weight"].isfinite().any()
    assert not gradients["model.layers.0.mlp.up_proj.weight"].isfinite().any()


def test_frozen_product_is_needed_before_a_norm_but_not_before_a_sum() -> None:
    _, graph, trace = traced("llama", freeze=("*.mlp.*", "*.self_attn.*"))
    layers = [visit for visit in trace.visits if graph.units[visit.unit].is_layer]
    # Autograd saves no inputs of frozen matrices, but attention saves queries and keys. The product with o_proj is
    # needed, because its result goes into the stream that a norm saves. Only the product with down_proj is unneeded.
    assert [sorted(name.split(".", 3)[3] for name in visit.unneeded_products.weights) for visit in layers] == (
        [["mlp.down_proj.weight"]] * 3
    )


def test_counted_work_matches_the_products() -> None:
    config, graph, trace = traced("llama")
    rows, length = padded_batches()[0]["input_ids"].shape
    for visit in trace.visits:
        expected = 2 * rows * length * config.hidden_size * config.intermediate_size
        expected *= graph.units[visit.unit].is_layer
        assert visit.unneeded_products.work.flops == expected
        if visit.has_backward and not visit.is_head:
            assert visit.recompute.flops == visit.forward.flops - expected


def test_compiled_layers_run_whole() -> None:
    graph = build_graph(tiny_config("llama"))
    trace = trace_visits(graph, 2, 16, torch.float32, is_compiled=True)
    assert not any(visit.unneeded_products.weights for visit in trace.visits)


# -- by hand ---------------------------------------------------------------------------------------------------

X = torch.randn(5, 4)


class Scale(torch.autograd.Function):
    """Autograd function that keeps a tensor in its context, not in autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.value = value
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.value


def unneeded_of(unit: Callable[[Tensor, Tensor], Tensor], stream: Tensor | None = None) -> set[str]:
    weight = nn.Parameter(torch.randn(4, 4))
    uses = ProductUses({id(weight): "weight"}, count_flops)

    def pack(tensor: Tensor) -> Tensor:
        uses.record_saved(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), uses.track():
        result = unit(X.clone().requires_grad_() if stream is None else stream, weight)
    return set(uses.find_unneeded([result]).weights)


KEPT: list[Tensor] = []

UNITS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "added": (lambda x, w: x + functional.linear(x, w), True),
    "transposed": (lambda x, w: x + torch.addmm(x, x, w), True),
    "batched": (lambda x, w: x + torch.bmm(x[None], w[None])[0], True),  # a view of the weight
    "of a row": (lambda x, w: x + torch.mm(x, w[:, :1].expand(4, 4)), True),
    "scaled by a number": (lambda x, w: x + 3 * functional.linear(x, w), True),
    "reshaped": (lambda x, w: x + functional.linear(x[None], w).reshape(5, 4), True),
    "added in place": (lambda x, w: functional.linear(x, w).add_(x), True),
    "multiplied": (lambda x, w: x * functional.linear(x, w), False),
    "squared": (lambda x, w: x + functional.linear(x, w).square(), False),
    "its sign": (lambda x, w: x + functional.relu(functional.linear(x, w)), False),
    "dropped": (lambda x, w: x + functional.dropout(functional.linear(x, w), 0.5), True),  # only the mask is saved
    "the next product's": (lambda x, w: x + functional.linear(functional.linear(x, w), w), False),
    "read": (lambda x, w: x + functional.linear(x, w) * float(functional.linear(x, w).sum() > 0), False),
    "kept elsewhere": (lambda x, w: x + (KEPT.append(y := functional.linear(x, w)), y)[1], False),
    "held by a function": (lambda x, w: x + Scale.apply(functional.linear(x, w)), False),  # type: ignore[no-untyped-call]
    "written into an existing tensor": (lambda x, w: X.copy_(functional.linear(x, w).detach()) + x, False),
    "of the shape alone": (lambda x, w: x * torch.ones_like(functional.linear(x, w)), True),
}


@pytest.mark.parametrize("name", UNITS)
def test_use_of_a_result_decides_if_its_product_is_skipped(name: str) -> None:
    unit, is_unneeded = UNITS[name]
    before = X.clone()
    assert unneeded_of(unit) == ({"weight"} if is_unneeded else set()), name
    KEPT.clear()
    X.copy_(before)


def test_skipped_results_are_nan_of_the_same_shape() -> None:
    weight, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    with without_values({id(weight): "weight", id(bias): "bias"}):
        left_out = functional.linear(X.half()[None], weight.half(), bias.half())
        result = functional.linear(X[None], weight, bias)
    assert left_out.isfinite().all(), "a cast weight is another tensor"
    assert result.shape == (1, 5, 3) and result.dtype == torch.float32 and result.isnan().all()
    result.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, X.sum(0).expand(3, 4)), "its gradient needs the input"
