"""State that bypasses the arguments of a layer is refused, because a step would compute wrong gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.models.graph import ModelGraph
from megatrain.trace.trace import trace_visits
from oracles.families import padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner


def graph_with_buffer(change: Any, *, persistent: bool) -> ModelGraph:
    """Return the graph of a model whose forward changes a buffer after its layers."""
    graph = build_graph(tiny_config("llama"))
    model = graph.model.model
    model.register_buffer("running", torch.zeros(3), persistent=persistent)
    forward = model.forward

    def changing(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        change(model)
        return result

    model.forward = changing
    return graph


def changed_in_place(model: Any) -> None:
    model.running += 1


def replaced(model: Any) -> None:
    model.running = model.running + 1


@pytest.mark.parametrize(
    ("change", "persistent"), [(changed_in_place, True), (changed_in_place, False), (replaced, True)]
)
def test_changed_buffer_of_the_model_is_refused(change: Any, persistent: bool) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"the model \(LlamaModel\) .* its forward changes the buffer 'running'"
    ):
        trace_visits(graph_with_buffer(change, persistent=persistent), 2, 12, torch.float32)


def test_replaced_buffer_that_is_not_saved_is_accepted() -> None:
    assert trace_visits(graph_with_buffer(replaced, persistent=False), 2, 12, torch.float32).visits


def test_buffer_that_changes_only_on_real_values_is_refused_in_the_step() -> None:
    def change_later(model: Any) -> None:
        if not torch._guards.detect_fake_mode():
            model.running += 1

    graph = graph_with_buffer(change_later, persistent=True)
    trace = trace_visits(graph, 2, 12, torch.float32)
    access = MemoryAccess(graph, dict(build_model(tiny_config("llama")).named_parameters()), torch.float32)
    with pytest.raises(UnsupportedModelError, match="changes the buffer 'running'"):
        layer_runner(graph, access, trace=trace).forward_backward(padded_batches())


def test_buffer_that_a_layer_gets_as_an_argument_may_not_change() -> None:
    graph = graph_with_buffer(lambda model: None, persistent=True)
    model = graph.model.model
    layer = model.layers[0]
    forward = layer.forward

    def updating(*args: Any, **kwargs: Any) -> Any:
        model.running.lerp_(torch.ones(3), 0.5)
        return forward(*args, **kwargs)

    layer.forward = updating
    with pytest.raises(UnsupportedModelError, match="changes the buffer 'running'"):
        trace_visits(graph, 2, 12, torch.float32)


def test_tensor_of_another_layer_is_refused_unless_it_is_an_argument() -> None:
    graph = build_graph(tiny_config("llama"))
    shared = SimpleNamespace(last=None)
    for layer in graph.model.model.layers:

        def adding(hidden_states: Any, *args: Any, forward: Any = layer.forward, **kwargs: Any) -> Any:
            result = forward(hidden_states, *args, **kwargs)
            result = result if shared.last is None else result + shared.last
            shared.last = result * 2
            return result

        layer.forward = adding
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 .*a tensor of .*layers\.0 that is not an argument"):
        trace_visits(graph, 2, 12, torch.float32)
