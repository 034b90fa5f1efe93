"""Kept graphs are bit-identical to a recompute, run nothing twice, and use the traced memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatrain.converters.spec import build_graph
from megatrain.engine.head.cross_entropy import CrossEntropy
from megatrain.engine.head.objective import Objective
from megatrain.engine.program.block_keys import results_key
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.keeping import activation_keys, keep_graphs, save_results
from megatrain.engine.program.step_program import GroupUpdates, StepProgram
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit.graph_keeping import KeptGraph
from megatrain.models.graph import ModelGraph, Unit
from megatrain.optim.elementwise import AdamW
from megatrain.trace.counting import CountingMode
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.planned_workspace import max_workspace_bytes, planned_workspace
from oracles.runners import StepLoss, layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = range(1000)
SEED = 11
DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout"), 0.2)
Gradients = dict[str, torch.Tensor]


class Side:
    """Runner with its own model and weights."""

    def __init__(
        self,
        config: Any,
        *,
        kept: Any = (),
        freeze: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
        access: type[MemoryAccess] = MemoryAccess,
        **options: Any,
    ) -> None:
        self.graph = build_graph(config, freeze=freeze, dtype=dtype)
        parameters = dict(build_model(config, dtype, freeze).named_parameters())
        self.access = access(self.graph, parameters, dtype)
        self.runner = layer_runner(self.graph, self.access, device="cpu", kept=kept, head_rows=4, **options)

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]] | None = None) -> tuple[StepLoss, Gradients]:
        loss = self.runner.forward_backward(batches or padded_batches(), seed=SEED)
        return loss, self.access.finish()


def assert_same(one: tuple[StepLoss, Gradients], other: tuple[StepLoss, Gradients]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


def compare(config: Any, kept: Any = ALL, **options: Any) -> None:
    again = Side(config, **options).step()
    for order in ("layer", "micro_batch"):
        side = Side(config, kept=kept, order=order, **options)
        assert_same(side.step(), again)
        if kept is ALL:
            assert side.access.largest_num_activations == 0


# -- bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_kept_and_recomputed_results_are_bit_identical(family: str) -> None:
    changes = DROPOUT if family in ("gpt2", "opt") else {}
    compare(tiny_config(family, tied=False, **changes))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "cohere2"])
def test_tied_weights(family: str) -> None:
    compare(tiny_config(family, tied=True))


@pytest.mark.parametrize("kept", [{4}, {2, 3}, {0, 3}, {1, 2, 3, 4}])
@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "zamba2"])
def test_some_visits_are_kept(family: str, kept: set[int]) -> None:
    """The visits between the kept ones are recomputed. Layers may share keys and values, or be visited twice."""
    compare(tiny_config(family), kept=kept)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_recorded_router_outputs_match(family: str) -> None:
    compare(tiny_config(family, output_router_logits=True, router_aux_loss_coef=0.3))


@pytest.mark.parametrize(
    "freeze", [["model.embed_tokens.*", "model.layers.0.*"], ["*norm*"], ["lm_head.weight"], ["model.*"]]
)
def test_frozen_parameters(freeze: list[str]) -> None:
    compare(tiny_config("llama", tied=False), freeze=freeze)


def test_bfloat16() -> None:
    compare(tiny_config("llama", tied=False), dtype=torch.bfloat16)


def test_noise_and_label_smoothing() -> None:
    compare(
        tiny_config("llama", tied=True),
        objective=Objective(CrossEntropy(label_smoothing_factor=0.1), neftune_noise_alpha=5.0),
    )


def test_autocast() -> None:
    """With autocast's cache, a weight used twice would be cast once, and its gradients summed in bf16."""
    config = tiny_config("gpt2", **DROPOUT)

    def step(kept: Any) -> tuple[StepLoss, Gradients]:
        side = Side(config, kept=kept)
        module = side.graph.units[3].module
        bound = side.runner.bounds[3]
        forward, weight = bound.forward, module.mlp.c_proj

        def twice(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            output = forward(hidden, *args, **kwargs)
            stream = output[0] if isinstance(output, tuple) else output
            more = stream + 0.1 * weight(
                torch.nn.functional.pad(stream, (0, weight.weight.shape[0] - stream.shape[-1]))
            )
            return (more, *output[1:]) if isinstance(output, tuple) else more

        bound.forward = twice
        with torch.autocast("cpu", torch.bfloat16):
            return side.step()

    assert_same(step(ALL), step(()))


def test_a_unit_that_checkpoints_itself() -> None:
    """In the backward, the unit's own checkpoint runs modules again, and their weights are bound."""
    config = tiny_config("llama", tied=False)

    def step(kept: Any) -> tuple[StepLoss, Gradients]:
        side = Side(config, kept=kept)
        mlp = side.graph.units[2].module.mlp
        forward = mlp.forward
        mlp.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
        return side.step()

    assert_same(step(ALL), step(()))


def test_unsaved_outputs_may_be_changed_in_place() -> None:
    config = tiny_config("llama", tied=False)

    def step(kept: Any) -> tuple[StepLoss, Gradients]:
        side = Side(config, kept=kept)
        bound = side.runner.bounds[2]
        change_outputs_outside(side, bound)
        return side.step()

    changed = step(())
    assert_same(step(ALL), changed)
    assert changed[0] != Side(config).step()[0]


def test_in_place_change_of_a_saved_tensor_is_refused_as_in_pytorch() -> None:
    side = Side(tiny_config("llama", tied=False), kept=ALL)
    bound = side.runner.bounds[2]
    forward = bound.forward
    bound.forward = lambda *args, **kwargs: forward(*args, **kwargs).exp()  # the backward of exp needs its result
    change_outputs_outside(side, bound)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        side.step()


def change_outputs_outside(side: Side, bound: Any) -> None:
    """Double a unit's output in place between two units, as a model's own code could."""
    trunk = side.runner._trunk
    make = trunk._visit

    def changing(*args: Any) -> Any:
        visit = make(*args)
        if visit.bound is bound:
            forward = visit.forward
            visit.forward = lambda forwards: [lambda give=give: give().mul_(2) for give in forward(forwards)]
        return visit

    trunk._visit = changing


# -- excluded tensors, and tensors that stay -------------------------------------------------------------------


def test_kept_units_run_once_for_every_micro_batch() -> None:
    side = Side(tiny_config("llama"), kept={2, 4})
    calls = {number: 0 for number in range(5)}
    for number, bound in enumerate(side.runner.bounds[:5]):
        bound.forward = counting(bound.forward, calls, number)
    side.step()
    assert calls == {0: 6, 1: 6, 2: 3, 3: 6, 4: 3}
    assert side.access.largest_num_activations == 3 * 2  # of visits 1 and 3; the embedding (visit 0) saves none


def counting(forward: Any, calls: dict[int, int], number: int) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[number] += 1
        return forward(*args, **kwargs)

    return counted


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "zamba2"])
def test_no_tensors_leak_after_a_step(family: str) -> None:
    side = Side(tiny_config(family), kept=ALL)
    side.step()
    gc.collect()
    before = num_tensors()
    side.step()
    gc.collect()
    assert num_tensors() <= before


def num_tensors() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def num_graphs() -> int:
    return sum(issubclass(type(item), KeptGraph) for item in gc.get_objects())


class GraphCounter(MemoryAccess):
    """Access that counts the kept graphs at the start of each visit's backward."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_graphs: list[int] = []

    def begin(self, phase: str, visit: int) -> None:
        super().begin(phase, visit)
        if phase == "backward":
            self.num_graphs.append(num_graphs())


def test_each_backward_frees_the_graphs_of_its_visit() -> None:
    side = Side(tiny_config("llama"), kept=ALL, access=GraphCounter)
    side.step()
    assert side.access.num_graphs == [15, 12, 9, 6, 3]  # three micro-batches in each of five visits


def test_failed_step_leaves_no_graph_and_the_next_is_correct() -> None:
    config = tiny_config("llama")
    expected = Side(config).step()
    side = Side(config, kept=ALL)
    forward = side.runner.bounds[4].forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory, say")

    side.runner.bounds[4].forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        side.step()
    side.runner.bounds[4].forward = forward
    gc.collect()
    assert not num_graphs()
    side.access.finish()
    assert_same(side.step(), expected)


def test_an_evaluation_keeps_nothing() -> None:
    kept, again = (Side(tiny_config("llama"), kept=visits) for visits in (ALL, ()))
    assert kept.runner.evaluate(padded_batches()) == again.runner.evaluate(padded_batches())
    assert not num_graphs()


# -- memory ----------------------------------------------------------------------------------------------------


class RealStorageCounter(CountingMode):
    """Mode that only counts the bytes of real storages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self._count_storage(item)
        return result


class CountedAccess(MemoryAccess):
    """Access that records the live memory at the start of the head, not counting the blocks of the access."""

    ledger: RealStorageCounter
    live_at_head = 0

    def begin(self, phase: str, visit: int) -> None:
        super().begin(phase, visit)
        if phase == "head":
            gc.collect()
            self.live_at_head = self.ledger.live_nbytes

    def watched(self) -> RealStorageCounter:
        """Return a new ledger that counts allocations from now on."""
        self.ledger = RealStorageCounter()
        with self.ledger.pause():
            for weight in self._weights.values():
                self.ledger._count_storage(weight)
        return self.ledger

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        with self.ledger.pause():
            super().put_activation(visit, micro_batch, index, tensor)

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[Any]:
        with ExitStack() as stack:
            with self.ledger.pause():
                sink = stack.enter_context(super().gradients(unit, visit))
            yield _PausedSink(sink, self.ledger)


class _PausedSink:
    def __init__(self, sink: Any, ledger: RealStorageCounter) -> None:
        self._sink, self._ledger = sink, ledger

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sink, name)

        def paused(*args: Any) -> None:
            with self._ledger.pause():
                method(*args)

        return paused


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "zaya"])
def test_graph_memory_matches_the_trace(family: str, order: str) -> None:
    config = tiny_config(family, **(DROPOUT if family == "gpt2" else {}))
    graph = build_graph(config)
    trace = trace_visits(graph, 4, 48, torch.float32, head_rows=4)
    assert trace.exact
    trunk = [visit for visit in trace.visits if not visit.is_head]
    num_batches, together = 3, 3 if order == "layer" else 1
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (4, 48), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    live: dict[bool, int] = {}
    peak: dict[bool, int] = {}
    for keeps in (False, True):
        side = Side(config, kept=ALL if keeps else (), access=CountedAccess, order=order)
        with side.access.watched() as ledger:
            side.step([batch] * num_batches)
        live[keeps], peak[keeps] = side.access.live_at_head, ledger.peak_nbytes
    planned = together * sum(visit.memory.graph_nbytes for visit in trunk)
    workspace = planned_workspace(graph, trace, together)
    assert 0.8 * workspace < peak[False] <= workspace
    assert (
        peak[True]
        <= max_workspace_bytes(graph, trace, program_of(graph, trace, order), together)
        <= workspace + planned
    )
    # A unit's input is often the previous unit's output. The plan counts this tensor for both units.
    assert 0.8 * planned < live[True] - live[False] <= planned


# -- the program -----------------------------------------------------------------------------------------------


def program_of(graph: ModelGraph, trace: VisitTrace, order: Any) -> StepProgram:
    return ProgramBuilder(
        graph,
        trace,
        num_micro_batches=3,
        order=order,
        compute_tier="ram",
        optimizer=AdamW(),
    ).build()


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_the_program_of_kept_visits_has_no_activations(order: str) -> None:
    graph = build_graph(tiny_config("llama"))
    program = program_of(graph, trace_visits(graph, 2, 16, torch.float32), order)
    kept = keep_graphs(program, frozenset({3, 4}))
    assert kept.recompute.kept_graphs == {3, 4} and len(kept.ticks) == len(program.ticks)
    activations = activation_keys(program)
    assert program.blocks.keys() - kept.blocks.keys() == activations[3] | activations[4] != set()
    for before, after in zip(program.ticks, kept.ticks, strict=True):
        assert (before.phase, before.visit, before.held) == (after.phase, after.visit, after.held)
        if after.phase in ("forward", "backward") and after.visit in (3, 4):
            assert not after.passing and after.spent == before.spent - activations[after.visit]
        else:
            assert after == before
    assert keep_graphs(program, frozenset()) == program


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_saved_attention_adds_result_blocks_to_the_program(order: str) -> None:
    graph = build_graph(tiny_config("llama"))
    trace = trace_visits(graph, 2, 16, torch.float32)
    program = program_of(graph, trace, order)
    saved = save_results(program, trace, frozenset({2, 3}))
    num_slots = 3 if order == "layer" else 1
    keys = {results_key(visit, slot) for visit in (2, 3) for slot in range(num_slots)}
    assert saved.recompute.saved_attention == {2, 3} and saved.blocks.keys() - program.blocks.keys() == keys
    for before, after in zip(program.ticks, saved.ticks, strict=True):
        if after.phase not in ("forward", "backward") or after.visit not in (2, 3):
            assert after == before
            continue
        own = [results_key(after.visit, slot) for slot in range(num_slots)]
        assert [key for key, _ in after.uses if key in keys] == own
        assert [use for use in after.uses if use[0] not in keys] == list(before.uses)
        if after.phase == "forward":  # inputs are written one after the other, results while the unit runs
            assert all(len(group) == 1 for group in after.passing) and after.spent == before.spent
        else:
            assert after.spent == before.spent | set(own)
            assert all(group[-1] == (key, "r") for group, key in zip(after.passing, own, strict=True))
    kept = keep_graphs(saved, frozenset({3, 4}))
    assert (kept.recompute.saved_attention, kept.recompute.kept_graphs) == ({2}, {3, 4})
    assert kept.blocks.keys() & keys == {key for key in keys if key.startswith("activations/2/")}


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("family", ["llama", "zamba2"])
def test_no_update_comes_between_a_forward_and_its_backward(family: str, defers: bool, order: str) -> None:
    """Kept graphs rely on this, because they hold views of the weights."""
    graph = build_graph(tiny_config(family, tied=True))
    trace = trace_visits(graph, 2, 16, torch.float32)
    program = ProgramBuilder(
        graph,
        trace,
        num_micro_batches=3,
        order=order,  # type: ignore[arg-type]
        compute_tier="gpu",
        optimizer=AdamW(),
        updates=GroupUpdates(are_deferred=defers),
    ).build()
    open_weights: dict[int, set[str]] = {}
    num_updates = 0
    for tick in program.ticks:
        weights = {key for key, _ in tick.held if program.blocks[key].kind == "weights"}
        if tick.phase == "forward":
            open_weights[tick.visit] = weights
        elif tick.phase == "backward":
            open_weights.pop(tick.visit)
        elif tick.phase == "update":
            num_updates += 1
            assert not any(weights & others for others in open_weights.values())
    assert num_updates == sum(layout.trainable for layout in graph.layouts.values())


def compute_unused_sines(module: Any, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
    sums = [args[0] + number for number in range(8)]
    for each in sums:
        each.sin()


def test_result_in_reused_memory_is_not_part_of_the_graph() -> None:
    """The allocator reuses memory that autograd has freed, often for the layer's result."""
    config = tiny_config("llama")
    plain, dropping = build_graph(config), build_graph(config)
    for layer in dropping.model.model.layers:
        layer.mlp.register_forward_hook(compute_unused_sines)
    (one, other) = (trace_visits(graph, 2, 16, torch.float32) for graph in (plain, dropping))
    assert [visit.memory.graph_nbytes for visit in one.visits] == [visit.memory.graph_nbytes for visit in other.visits]
    assert [visit.unneeded_products.weights for visit in one.visits] == [
        visit.unneeded_products.weights for visit in other.visits
    ]
