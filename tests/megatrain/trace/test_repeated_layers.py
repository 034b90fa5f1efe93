"""Layers that repeat an earlier one: the trace equals one that runs every layer, although most layers do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fakes.fake_cuda import fake_cuda
from megatrain.converters.liger import apply_liger_kernels
from megatrain.converters.spec import build_graph
from megatrain.data.encoding import load_tokenizer
from megatrain.data.images import ImageProcessor
from megatrain.data.rows_report import DataError
from megatrain.engine.device import attention
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit.visit import UnitVisit
from megatrain.models.table import LoraConfig
from megatrain.trace.repeated_layers import RepeatedLayers, _autograd_graph
from megatrain.trace.trace import trace_visits
from oracles.families import MODEL_TYPES, shrunk_config, tiny_config
from oracles.image_models import FAMILIES, make_folder


@contextmanager
def record_backwards() -> Iterator[list[int]]:
    """Yield a list that records the index of each visit whose backward runs."""
    found: list[int] = []
    backward = UnitVisit.backward

    def counted(visit: UnitVisit, gradients: Any) -> Any:
        found.append(visit.index)
        return backward(visit, gradients)

    with mock.patch.object(UnitVisit, "backward", counted):
        yield found


def traced(
    graph: Any, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = (2, 12), **options: Any
) -> tuple[VisitTrace, VisitTrace, int]:
    """Return the trace, the trace that runs every layer, and the number of backwards that the first one skipped."""
    with record_backwards() as some:
        trace = trace_visits(graph, *shape, dtype, **options)
    with mock.patch.object(RepeatedLayers, "find", return_value=None), record_backwards() as every:
        whole = trace_visits(graph, *shape, dtype, **options)
    assert set(some) <= set(every)
    return trace, whole, len(every) - len(some)


def check(config: Any, left_out: int, **options: Any) -> None:
    trace, whole, num = traced(build_graph(config, **options))
    assert trace == whole
    assert num == left_out


def test_a_graph_names_the_next_nodes_of_each_node() -> None:
    weight, data = torch.ones(2, requires_grad=True), torch.ones(2)
    graph: Any = _autograd_graph((weight * data).sin())
    assert [(number, kind.__name__) for number, kind, _ in graph] == [
        (0, "SinBackward0"),
        (1, "MulBackward0"),
        (2, "AccumulateGrad"),
    ]
    assert [next_ones for _, _, next_ones in graph] == [((1, 0),), ((2, 0), (-1, 0)), ()], "-1: data has no gradient"


# The layers of these families are equal (the first two), or differ in attention, experts, or a state that is passed on.
@pytest.mark.parametrize(
    ("family", "dtype", "left_out"),
    [
        ("llama", torch.float32, 2),
        ("gpt2", torch.bfloat16, 2),
        ("gemma3_text", torch.bfloat16, 1),
        ("qwen3_moe", torch.bfloat16, 1),
        ("gemma3n_text", torch.float32, 0),
    ],
)
def test_trace_of_repeated_layers_matches_all_layers(family: str, dtype: torch.dtype, left_out: int) -> None:
    trace, whole, num = traced(build_graph(tiny_config(family), dtype=dtype), dtype)
    assert trace == whole
    assert num == left_out


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_repeated_layers_match_for_any_model_type(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 132)
    with fake_cuda() if device == "cuda" else nullcontext():
        try:
            graph = build_graph(shrunk_config(family), dtype=torch.bfloat16)
            with mock.patch.object(RepeatedLayers, "find", return_value=None):
                # A warm-up trace: torch's caches of fake results shrink some later backwards by 8 bytes.
                trace_visits(graph, 2, 12, torch.bfloat16, device=device)
        except Exception as error:
            pytest.skip(f"none that is small, or it does not run: {error}")
        trace, whole, _ = traced(graph, torch.bfloat16, device=device)
    assert trace == whole


OTHER_FAMILIES = [pytest.param(name, 0, marks=pytest.mark.slow) for name in FAMILIES if name != "internvl"]


# The trace knows the number and sizes of images, which determine the operations in the vision tower's layers.
@pytest.mark.parametrize("images", ["trained", pytest.param("frozen", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "left_out"), [("internvl", 4), *OTHER_FAMILIES])
def test_repeated_layers_match_for_image_models(
    family: str, left_out: int, images: Literal["trained", "frozen"], tmp_path: Path
) -> None:
    folder = make_folder(family, tmp_path)
    try:
        example = ImageProcessor(str(folder), load_tokenizer(str(folder)), 192).make_example(1)
    except DataError as error:
        pytest.skip(str(error))
    trace, whole, num = traced(build_graph(folder, images=images), example=example, shape=(1, 192))
    assert trace == whole and trace.exact
    assert num >= left_out or images == "frozen"


def test_only_one_of_many_equal_layers_is_run() -> None:
    config = tiny_config("llama", num_hidden_layers=6)
    check(config, 5)
    # The first layer also runs, because it computes no gradient for the embedding.
    check(config, 4, lora=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def test_unneeded_products_are_named_per_layer() -> None:
    trace, _, num = traced(build_graph(tiny_config("llama")))
    assert num == 2
    layers = [visit for visit in trace.visits if visit.has_backward and visit.unneeded_products.weights]
    assert [visit.unneeded_products.weights for visit in layers] == [
        {f"model.layers.{number}.mlp.down_proj.weight"} for number in range(3)
    ]


class GivenMLP(nn.Module):
    """MLP with the weights of a layer's MLP and a given forward."""

    def __init__(self, mlp: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self._forward = forward

    def forward(self, hidden: Tensor) -> Tensor:
        return self._forward(self, hidden)


def mlp(module: Any, hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(module.act_fn(module.gate_proj(hidden)) * module.up_proj(hidden))
    return result


class Wasteful(torch.autograd.Function):
    """Function with an addition as its forward and a matrix product as its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ torch.eye(gradient.shape[-1], device=gradient.device)


def swapped(module: Any, hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(module.act_fn(module.up_proj(hidden)) * module.gate_proj(hidden))
    return result


#: The MLP forward of each layer in a model. All MLPs have the same class, so the class does not show which differ.
FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the first": mlp,
    "one more operator": lambda m, x: mlp(m, x) + 0,
    "the same operator with another backward": lambda m, x: Wasteful.apply(mlp(m, x)),
    "another number": lambda m, x: mlp(m, x) + 1,
    "other strides": lambda m, x: mlp(m, x.mT.contiguous().mT),
    "cut off from the graph": lambda m, x: mlp(m, x.detach()),
    "other weights": swapped,
    "a value made up": lambda m, x: mlp(m, x) * (x > 0).any().item(),
    "a value made up again": lambda m, x: mlp(m, x) * (x > 0).any().item(),
    "the last": mlp,
}


def test_a_layer_that_differs_is_run() -> None:
    graph = build_graph(tiny_config("llama", num_hidden_layers=len(FORWARDS)))
    for layer, forward in zip(graph.model.model.layers, FORWARDS.values(), strict=True):
        layer.mlp = GivenMLP(layer.mlp, forward)
    trace, whole, num = traced(graph)
    assert trace == whole
    assert num == 1, "the first layer equals the last one"


def test_launches_of_kernels_are_compared_as_operators_are() -> None:
    """All layers launch another package's kernels. Later, one layer launches fewer kernels than the others."""
    pytest.importorskip("liger_kernel")
    graph = build_graph(tiny_config("llama", num_hidden_layers=4), dtype=torch.bfloat16)
    plain = type(graph.model.model.layers[0].input_layernorm).forward
    apply_liger_kernels(graph.model, include_mlps=True)
    trace, whole, num = traced(graph, torch.bfloat16)
    assert trace == whole and num == 3
    norm = graph.model.model.layers[1].input_layernorm
    norm.forward = partial(plain, norm)
    trace, whole, num = traced(graph, torch.bfloat16)
    assert trace == whole and num == 2


@pytest.mark.slow
def test_frozen_weights_split_repeated_layers() -> None:
    config = tiny_config("llama", num_hidden_layers=4)
    check(config, 2, freeze=("model.layers.1.mlp.*",))
    check(config, 1, freeze=("model.layers.0.*", "model.layers.1.mlp.*"))
    assert not traced(build_graph(config, freeze=("model.*",)))[2], "only the head has a backward"
