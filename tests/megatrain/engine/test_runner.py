"""How the engine calls its access, and which models and steps it refuses."""

from __future__ import annotations

import gc
from collections import UserDict
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.forward import NoTrainedTokensError
from megatrain.engine.lockstep import VisitOrderError
from megatrain.engine.micro_batches import shifted_labels
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit.arguments import CapturedArguments, CapturedResult
from megatrain.engine.unit.state import micro_batch_seed
from megatrain.models.graph import ModelGraph
from megatrain.trace.trace import trace_visits
from oracles.families import VOCAB, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner


def make(family: str = "llama", order: Any = "layer", trace: VisitTrace | None = None, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu", order=order, trace=trace)
    return graph, access, runner


def test_layer_order_announces_each_visit_once() -> None:
    _, access, runner = make()
    runner.forward_backward(padded_batches())
    forward = [("forward", visit) for visit in range(5)]
    backward = [("backward", visit) for visit in reversed(range(5))]
    assert access.log == [*forward, ("head", 5), *backward]
    assert access.largest_num_activations == 3 * 4  # the embedding keeps ids by reference


def test_micro_batch_order_repeats_the_program_per_micro_batch() -> None:
    _, access, runner = make(order="micro_batch")
    runner.forward_backward(padded_batches())
    assert access.log[:11] * 3 == access.log
    assert access.largest_num_activations == 4


def test_frozen_layers_keep_no_activations_but_are_announced() -> None:
    config = tiny_config("llama", tied=False)
    graph = build_graph(config, freeze=["model.*"])
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    runner.forward_backward(padded_batches())
    assert access.largest_num_activations == 0
    assert [visit for phase, visit in access.log if phase == "backward"] == [4, 3, 2, 1, 0]
    assert set(access.finish()) == {"lm_head.weight"}


def test_unused_visits_are_announced_and_released() -> None:
    graph, access, runner = make(tied=False)
    first = next(unit.module for unit in graph.units if unit.is_layer)
    first.register_forward_hook(lambda module, args, output: output.detach())
    runner.forward_backward(padded_batches())
    assert access.largest_num_activations == 3 * 4, "the forward could not know"
    assert [visit for phase, visit in access.log if phase == "backward"] == [4, 3, 2, 1, 0]
    gradients = access.finish()  # raises if an activation is left
    assert not [name for name in gradients if "layers.0." in name or "embed" in name]
    assert any("layers.1." in name for name in gradients)


def test_no_tensors_leak_after_a_step() -> None:
    graph, access, runner = make("gemma3n_text")
    runner.forward_backward(padded_batches())
    access.finish()
    gc.collect()
    before = _num_tensors()
    runner.forward_backward(padded_batches())
    access.finish()
    gc.collect()
    assert _num_tensors() == before
    assert "forward" not in graph.units[0].module.__dict__
    assert all(parameter.is_meta for parameter in graph.model.parameters())


def _num_tensors() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_a_failing_unit_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _, runner = make()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(runner.bounds[2], "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward_backward(padded_batches())
    assert torch.is_grad_enabled()
    assert all(parameter.is_meta for parameter in graph.model.parameters())
    assert not any("forward" in unit.module.__dict__ for unit in graph.units)


def test_a_step_without_labels_is_refused() -> None:
    _, _, runner = make()
    batch = padded_batches()[0]
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.raises(NoTrainedTokensError, match="24 tokens"):
        runner.forward_backward([batch])


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    _, access, runner = make()
    empty = padded_batches()[0]
    empty["labels"] = torch.full_like(empty["labels"], -100)
    plain = runner.forward_backward(padded_batches()[1:])
    gradients = access.finish()
    with_empty = runner.forward_backward([*padded_batches()[1:], empty])
    others = access.finish()
    assert with_empty == plain
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)


def test_loss_is_the_mean_over_the_given_token_count() -> None:
    _, access, runner = make()
    batches = padded_batches()
    alone = runner.forward_backward(batches)
    gradients = access.finish()
    among_others = runner.forward_backward(batches, num_items=2 * alone.num_trained_tokens)
    assert among_others.num_trained_tokens == alone.num_trained_tokens
    assert among_others.loss == alone.loss / 2, "a power of two rounds nothing"
    for name, gradient in access.finish().items():
        assert torch.equal(gradient, gradients[name] / 2), name


def test_shared_buffer_is_copied_to_the_device_once() -> None:
    graph = build_graph(tiny_config("llama"))
    first, *others = [unit.module for unit in graph.units if unit.is_layer]
    table = torch.arange(4.0)
    for module in (first, *others):
        module.register_buffer("table", table)
    access = MemoryAccess(graph, dict(build_model(tiny_config("llama")).named_parameters()), torch.float32)
    layer_runner(graph, access, device="meta")
    assert first.table.is_meta and others and all(module.table is first.table for module in others)


def test_mismatched_trace_is_refused() -> None:
    shorter = trace_visits(build_graph(tiny_config("llama", num_hidden_layers=2)), 1, 8, torch.float32)
    _, _, runner = make(trace=shorter)
    with pytest.raises(VisitOrderError, match="planned"):
        runner.forward_backward(padded_batches())
    matching = trace_visits(build_graph(tiny_config("llama")), 1, 8, torch.float32)
    first, second, third, *rest = matching.visits
    one_more = (first, second, third, *rest[:-1], replace(rest[-2], unit=rest[-1].unit), rest[-1])
    longer = replace(matching, visits=one_more)
    _, _, runner = make(trace=longer)
    with pytest.raises(VisitOrderError, match="ended after 5 unit calls, but 6 were planned"):
        runner.forward_backward(padded_batches())
    _, _, runner = make(trace=replace(matching, visits=(first, third, second, *rest)))
    with pytest.raises(VisitOrderError, match=r"visit 1 is model\.layers\.0, but model\.layers\.1 was planned"):
        runner.forward_backward(padded_batches())
    _, _, runner = make(trace=matching)
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in padded_batches())
    assert runner.forward_backward(padded_batches()).num_trained_tokens == num_labels


def test_a_buffer_changed_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("deepseek_v3")
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    bound = runner.bounds[3]
    forward, bias = bound.forward, bound.unit.module.mlp.gate.e_score_correction_bias

    def updating(*args: Any, **kwargs: Any) -> Any:
        bias.add_(1.0)
        return forward(*args, **kwargs)

    monkeypatch.setattr(bound, "forward", updating)
    with pytest.raises(UnsupportedModelError, match="e_score_correction_bias"):
        runner.forward_backward(padded_batches())


def test_a_stashed_attribute_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    _, access, runner = make()
    expected = runner.forward_backward(padded_batches())
    gradients = access.finish()
    bound = runner.bounds[2]
    module, forward = bound.unit.module, bound.forward

    def stashing(hidden: torch.Tensor, **kwargs: Any) -> Any:
        assert not hasattr(module, "stash")
        module.stash = hidden
        return forward(hidden, **kwargs)

    monkeypatch.setattr(bound, "forward", stashing)
    assert runner.forward_backward(padded_batches()) == expected
    others = access.finish()
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)


def test_weights_used_outside_of_their_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _, runner = make()
    bound = runner.bounds[1]
    embedding = graph.model.get_input_embeddings()
    forward = bound.forward
    monkeypatch.setattr(bound, "forward", lambda hidden, **kw: forward(hidden + embedding.weight[0], **kw))
    with pytest.raises(UnsupportedModelError, match="outside of the weight's own module"):
        runner.forward_backward(padded_batches())


def test_labels_are_shifted_and_micro_batch_seeds_are_distinct() -> None:
    assert shifted_labels(torch.tensor([[1, 2, -100, 3]])).tolist() == [[2, -100, 3, -100]]
    seeds = {micro_batch_seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)


# -- arguments -------------------------------------------------------------------------------------------------


def test_arguments_keep_identity_and_carry_mutations_back() -> None:
    hidden, mask = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3)
    shared: UserDict[str, Any] = UserDict()
    layers: list[Any] = [hidden]
    captured = CapturedArguments("unit", (hidden, (mask, mask)), {"shared": shared, "layers": layers, "flag": 3})
    assert [tensor is not None for tensor in captured.tensors] == [True, True]
    assert captured.activations == (0,)
    leaves = [hidden.detach().requires_grad_(), mask]
    rebuilt = captured.rebuild(leaves)
    assert rebuilt.args[0] is leaves[0] and rebuilt.args[1][0] is rebuilt.args[1][1] is mask
    assert rebuilt.kwargs["layers"][0] is leaves[0] and rebuilt.kwargs["shared"] is not shared
    rebuilt.kwargs["shared"]["kv"] = (leaves[0] * 2, leaves[0])
    result = CapturedResult((leaves[0] * 3, mask, None), rebuilt, {"router": [leaves[0] * 4]})
    assert len(result.outputs) == 3
    outer = [torch.tensor(float(number)) for number in range(3)]
    collector: dict[str, list[Any]] = {"router": [1]}
    value = result.deliver(outer, [hidden, mask], captured.originals, collector)
    assert value[0] is outer[0] and value[1] is mask and value[2] is None
    assert shared["kv"][0] is outer[1] and shared["kv"][1] is hidden
    assert layers == [hidden]
    assert collector["router"][1] is outer[2]


def test_replaced_container_items_are_returned() -> None:
    """A unit may replace items of a container without changing the container's length or keys."""
    hidden, other = torch.ones(2, requires_grad=True), torch.zeros(2)
    states: list[Any] = [hidden, other]
    table = {"first": hidden, "second": other}
    captured = CapturedArguments("unit", (hidden,), {"states": states, "table": table})
    leaves = [hidden.detach().requires_grad_(), other]
    rebuilt = captured.rebuild(leaves)
    rebuilt.kwargs["states"][1] = leaves[0] * 2
    rebuilt.kwargs["table"]["second"] = leaves[0] * 3
    result = CapturedResult(leaves[0] * 4, rebuilt, {})
    outer = [torch.tensor(float(number)) for number in range(3)]
    assert result.deliver(outer, [hidden, other], captured.originals, None) is outer[0]
    assert states[0] is hidden and states[1] is outer[1]
    assert table["first"] is hidden and table["second"] is outer[2]


def test_caches_are_dropped_and_opaque_objects_are_refused() -> None:
    from transformers import DynamicCache

    class Opaque:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.state = {"nested": [tensor]}

    hidden = torch.ones(2, requires_grad=True)
    captured = CapturedArguments("unit", (hidden,), {"past_key_values": DynamicCache()})
    assert captured.rebuild([hidden]).kwargs["past_key_values"] is None
    with pytest.raises(UnsupportedModelError, match="Opaque whose attribute 'state'"):
        CapturedArguments("layer 3", (hidden, Opaque(hidden)), {})
    quiet = Opaque(hidden.detach())
    assert CapturedArguments("layer 3", (hidden, quiet), {}).rebuild([hidden]).args[1] is quiet


def graph_with_trace(family: str, **changes: Any) -> tuple[ModelGraph, VisitTrace]:
    graph = build_graph(tiny_config(family, **changes))
    return graph, trace_visits(graph, 2, 16, torch.float32)


def test_trace_records_saved_and_held_bytes() -> None:
    graph, trace = graph_with_trace("llama", tied=True)
    assert [visit.unit for visit in trace.visits] == [0, 1, 2, 3, 4, 5]
    assert [visit.is_head for visit in trace.visits] == [False] * 5 + [True]
    assert trace.visits[0].saved_inputs == ()
    assert all(visit.saved_inputs == (((2, 16, 32), torch.float32),) for visit in trace.visits[1:5])
    layers = trace.visits[2:4]
    assert layers[0] == layers[1] or layers[0].memory.held_nbytes == layers[1].memory.held_nbytes
    workspace_nbytes = 2 * 16 * 32 * 4
    assert trace.visits[2].memory.held_nbytes == 2 * workspace_nbytes + trace.visits[2].memory.retained_nbytes
    assert all(0 < visit.memory.forward_nbytes <= visit.memory.backward_nbytes for visit in layers)
    logits_nbytes = 2 * 16 * VOCAB * 4  # the loss makes more tensors of this size
    assert 2 * logits_nbytes < trace.head_nbytes < 4 * logits_nbytes and trace.exact
    assert 0 < layers[0].memory.retained_nbytes < layers[0].memory.held_nbytes
    assert all(parameter.is_meta for parameter in graph.model.parameters())
    assert torch.zeros(1).device.type == "cpu"


def test_trace_marks_visits_without_backward() -> None:
    graph = build_graph(tiny_config("llama", tied=False), freeze=["model.embed_tokens.*", "model.layers.0.*"])
    trace = trace_visits(graph, 2, 16, torch.float32)
    assert [visit.has_backward for visit in trace.visits] == [False, False, True, True, True, True]
    # The input of layer 1 needs no gradient, but the recompute needs it.
    assert [len(visit.saved_inputs) for visit in trace.visits] == [0, 0, 1, 1, 1, 0]


def test_held_memory_does_not_grow_with_depth() -> None:
    gc.disable()  # no tensor may depend on the garbage collector to be freed
    try:
        _, trace = graph_with_trace("llama", num_hidden_layers=9)
    finally:
        gc.enable()
    held = [visit.memory.held_nbytes for visit in trace.visits[2:9]]
    assert held == [held[0]] * len(held)


def test_trace_matches_bytes_saved_by_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here, the validation of distributions reads values. torch.compile in other tests turns it off for the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    graph, trace = graph_with_trace("gemma3n_text")
    access = MemoryAccess(graph, dict(build_model(tiny_config("gemma3n_text")).named_parameters()), torch.float32)
    seen: dict[int, list[Any]] = {}
    put = access.put_activation

    def noting(visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        seen.setdefault(visit, []).append((tuple(tensor.shape), tensor.dtype))
        put(visit, micro_batch, index, tensor)

    access.put_activation = noting  # type: ignore[method-assign]
    ids = torch.randint(3, 90, (2, 16))
    runner = layer_runner(graph, access, device="cpu", trace=trace)
    runner.forward_backward([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}])
    assert [tuple(seen.get(number, ())) for number in range(len(trace.visits))] == [
        v.saved_inputs for v in trace.visits
    ]
    assert trace.exact, "the value that it reads is a constant"


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_randomly_skipped_layers_are_planned(rate: float) -> None:
    """A rate of 0 skips no layer, but some releases of transformers still draw a random number."""
    graph, trace = graph_with_trace("opt", layerdrop=rate)
    planned = {visit.unit for visit in trace.visits}
    assert {unit.index for unit in graph.units if unit.is_layer} <= planned


def test_forward_that_draws_a_random_number_is_traced_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_graph(tiny_config("opt", layerdrop=0.0))
    forward, drawn = graph.model.model.decoder.forward, []

    def drawing(*args: Any, **kwargs: Any) -> Any:
        drawn.append(bool(torch.rand([]) < 0.0))
        return forward(*args, **kwargs)

    monkeypatch.setattr(graph.model.model.decoder, "forward", drawing)
    trace = trace_visits(graph, 2, 16, torch.float32)
    assert drawn == [False] and trace.exact
