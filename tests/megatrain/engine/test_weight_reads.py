"""Model code may read a few rows of a weight, or a whole small weight, outside of the weight's own module."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaModel

from fakes.gpu_run import virtual_gpu
from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.unit import absent_weights
from megatrain.engine.unit.absent_weights import AbsentWeight
from megatrain.trace.trace import trace_visits
from oracles.families import padded_batches, tiny_config
from oracles.huggingface import assert_same_gradients, build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

#: Reads of weights whose results the model adds to its hidden states.
LOOKS = {
    "a row": lambda model, ids: model.embed_tokens.weight[5],
    "a row from the end, cut": lambda model, ids: model.embed_tokens.weight[-3, :].view(1, 1, -1),
    "rows": lambda model, ids: model.embed_tokens.weight[2:6].sum(0),
    "rows of tokens": lambda model, ids: model.embed_tokens.weight[ids],
    "select": lambda model, ids: model.embed_tokens.weight.select(0, 1),
    "index_select": lambda model, ids: model.embed_tokens.weight.index_select(0, ids.reshape(-1)).sum(0),
    "a small weight": lambda model, ids: torch.exp(model.layers[1].input_layernorm.weight),
    "two of them": lambda model, ids: model.embed_tokens.weight[0] * model.norm.weight,
}


def looking(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    plain = LlamaModel.forward

    def forward(self: Any, input_ids: Any = None, **options: Any) -> Any:
        extra = look(self, input_ids)
        output = plain(self, input_ids, **options)
        output.last_hidden_state = output.last_hidden_state + 0.1 * extra
        return output

    monkeypatch.setattr(LlamaModel, "forward", forward)


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
@pytest.mark.parametrize("name", LOOKS)
def test_loss_and_gradients_equal_hugging_face(monkeypatch: pytest.MonkeyPatch, name: str, order: Any) -> None:
    looking(monkeypatch, LOOKS[name])
    config = tiny_config("llama", tied=name == "rows")
    expected = train_step(build_model(config), padded_batches(), 0)
    graph = build_graph(config)
    trace = trace_visits(graph, 3, 8, torch.float32)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu", order=order, trace=trace)
    loss = runner.forward_backward(padded_batches())
    assert loss.loss == pytest.approx(expected.loss, rel=2e-6)
    found = access.finish()
    assert found.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["a row", "rows of tokens", "two of them"])
def test_weight_reads_on_a_device_with_mirrored_inputs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The model waits for the rows within an operation that the host mirror of the inputs handles."""
    looking(monkeypatch, LOOKS[name])
    config = tiny_config("llama")
    model = build_model(config)
    expected = train_step(model, padded_batches(), 0)

    def compare() -> None:
        weights = {key: parameter.detach().to("cuda") for key, parameter in model.named_parameters()}
        graph = build_graph(config)
        access = MemoryAccess(graph, weights, torch.float32, device="cuda")
        runner = layer_runner(graph, access, device="cuda")
        for _ in range(2):  # the second step shows that the first one restored all modes
            loss = runner.forward_backward(padded_batches())
            found = {key: gradient.cpu() for key, gradient in access.finish().items()}
            assert_same_gradients(expected, loss.loss, found)
        assert runner._micro_batches.mirror is not None and runner._micro_batches.mirror.num_answers > 0

    with virtual_gpu():
        compare()
        gc.collect()  # pinned buffers are freed before the device


def test_too_large_weight_reads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_weights, "_MAX_READ_ELEMENTS", 100)
    looking(monkeypatch, lambda model, ids: model.embed_tokens.weight.mean())
    with pytest.raises(UnsupportedModelError, match=r"uses model\.embed_tokens\.weight outside .* up to 100 elements"):
        trace_visits(build_graph(tiny_config("llama")), 1, 8, torch.float32)


def test_only_indexed_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(24.0).view(6, 4)
    rows_read: list[list[int] | None] = []

    def read_values(weight: AbsentWeight, func: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        rows_read.append(None if rows is None else rows.reshape(-1).tolist())
        return values if rows is None else values[rows]

    monkeypatch.setattr(AbsentWeight, "read_values", read_values)
    weight, ids = absent_weights.absent_weight(values, torch.device("cpu")), torch.tensor([[4, 0]])
    mask = torch.tensor([True, False] * 3)
    for read, rows in (
        (lambda w: w[2], [2]),
        (lambda w: w[-1], [5]),
        (lambda w: w[1, 2:], [1]),
        (lambda w: w[1:5:2], [1, 3]),
        (lambda w: w[1:3, 0], None),
        (lambda w: w[ids], [4, 0]),
        (lambda w: w[ids.int()], [4, 0]),
        (lambda w: w[ids, 0], None),
        (lambda w: w[mask], None),
        (lambda w: w[True], None),
        (lambda w: w.select(0, -2), [4]),
        (lambda w: w.select(-2, 1), [1]),
        (lambda w: w.select(1, 3), None),
        (lambda w: w.index_select(0, ids[0]), [4, 0]),
        (lambda w: w.narrow(0, 2, 3), [2, 3, 4]),
        (lambda w: w.narrow(1, 2, 2), None),
        (lambda w: w.narrow(dim=0, start=2, length=3), None),
        (lambda w: w.sum(0), None),
    ):
        assert torch.equal(read(weight), read(values)) and rows_read.pop() == rows and not rows_read


def test_out_of_range_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looking(monkeypatch, lambda model, ids: model.embed_tokens.weight[10**6])
    config = tiny_config("llama")
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    with pytest.raises(IndexError, match="out of bounds"):
        runner.forward_backward(padded_batches())
