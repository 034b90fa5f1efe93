"""Logits computed one vocabulary part at a time give Hugging Face's losses and gradients.

The rounding of the results depends only on the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatrain.converters.spec import build_graph
from megatrain.engine import forward
from megatrain.engine.head.cross_entropy import CrossEntropy, RunningSoftmax
from megatrain.engine.head.head_model import HeadModel
from megatrain.engine.head.head_plan import HeadPlan, plan_head
from megatrain.engine.head.objective import Objective
from megatrain.engine.head.vocabulary import vocabulary_ranges
from megatrain.engine.program.visit_trace import unit_layouts
from megatrain.engine.tape.pieces import part_rows
from megatrain.models.graph import ModelGraph, Unit
from megatrain.plan.attempts import logit_parts_in_workspace
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, VOCAB, padded_batches, tiny_config
from oracles.huggingface import build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.planned_workspace import planned_workspace
from oracles.runners import StepRunner, layer_runner
from oracles.tiered_run import config_text, run_config

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11
ROWS, COLUMNS = 4, 16  # seven vocabulary parts: six with 15 entries, and the last with 11
PARTS = 7


def runner_of(
    config: Any,
    *,
    hook: Any = None,
    freeze: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    access: Any = MemoryAccess,
    **options: Any,
) -> tuple[StepRunner, MemoryAccess]:
    graph = build_graph(config, freeze=freeze, dtype=dtype)
    if hook is not None:
        graph.model.get_output_embeddings().register_forward_hook(hook)
    access = access(graph, dict(build_model(config, dtype, freeze).named_parameters()), dtype)
    options = {"head_rows": ROWS, "head_columns": COLUMNS, **options}
    return layer_runner(graph, access, device="cpu", **options), access


def step(config: Any, **options: Any) -> tuple[float, dict[str, Tensor]]:
    runner, access = runner_of(config, **options)
    return runner.forward_backward(padded_batches(), seed=SEED).loss, access.finish()


def assert_close(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], tolerance: float = 1e-5
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=max(1e-6, tolerance / 10))
    assert set(found[1]) == set(expected[1])
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).abs().max()
        assert error <= max(noise, tolerance * gradient.abs().max()), (name, float(error))


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == expected[0] and set(found[1]) == set(expected[1])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_turn", [False, True])
def test_product_logits_without_the_model_are_bitwise_equal(
    family: str, dtype: torch.dtype, in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = tiny_config(family), mock.Mock(wraps=HeadModel._call)
    monkeypatch.setattr(HeadModel, "_call", lambda self, *args: calls(self, *args))
    found = step(config, dtype=dtype, is_part_major=in_turn)
    num_calls = calls.call_count
    monkeypatch.setattr(forward, "plan_head", lambda graph: replace(plan_of(graph), is_product=False))
    assert_same(step(config, dtype=dtype, is_part_major=in_turn), found)
    assert num_calls == (calls.call_count - num_calls if family == "granite" else 0), "granite divides its logits"


def test_modified_logits_come_from_the_model() -> None:
    def half(module: Any, args: Any, logits: Tensor) -> Tensor:
        return logits.mul_(0.5)

    graph = build_graph(tiny_config("llama"), dtype=torch.float32)
    assert plan_of(graph).is_product
    graph.model.get_output_embeddings().register_forward_hook(half)
    assert not plan_of(graph).is_product
    biased = build_graph(tiny_config("phi3"), dtype=torch.float32)
    head = biased.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.empty(len(head.weight), device="meta"))
    assert plan_head(biased) is None or not plan_of(biased).is_product


def plan_of(graph: ModelGraph) -> HeadPlan:
    plan = plan_head(graph)
    assert plan is not None
    return plan


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_match_hugging_face(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    runner, _ = runner_of(config)
    assert (runner.head.columns, runner.head.parts) == (COLUMNS, PARTS)
    expected = train_step(build_model(config), padded_batches(), SEED)
    found = step(config)
    assert_close(found, (expected.loss, expected.gradients))
    assert_same(step(config, kept_parts=3), found)
    assert_same(step(config, kept_parts=PARTS, order="micro_batch"), found)
    assert_same(step(config, is_part_major=True), found)


class OnePartAtATime:
    """Matrix whose rows are leased one part at a time, and each part only once in a tick."""

    is_passing = True

    def __init__(self, matrix: Tensor, rows: list[range]) -> None:
        self.matrix, self.rows, self.shape = matrix, rows, tuple(matrix.shape)
        self.taken: list[int] = []

    @contextmanager
    def part(self, number: int) -> Iterator[Tensor]:
        assert number not in self.taken
        self.taken.append(number)
        rows = self.matrix[self.rows[number].start : self.rows[number].stop].clone()
        yield rows
        rows.fill_(torch.nan)  # so that a later use gives NaN


class AccessInParts(MemoryAccess):
    """In-memory access that leases a weight in parts if all its uses allow it."""

    def __init__(self, graph: ModelGraph, *args: Any) -> None:
        super().__init__(graph, *args)
        trace = trace_visits(graph, 2, 48, graph.dtype, head_rows=ROWS, head_columns=COLUMNS)
        self.cut: dict[str, list[range]] = {}
        self.handed_out: list[OnePartAtATime] = []
        for layout in graph.layouts.values():
            uses = [visit for visit in trace.visits if layout.name in unit_layouts(graph, visit.unit)]
            if len(layout.parts) > 1 and layout.first_rows:
                (entry,) = layout.entries
                if all(entry.name in visit.partwise_params for visit in uses):
                    self.cut[entry.name] = part_rows(layout)

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, Any]]:
        with super().weights(unit, visit) as whole:
            found: dict[str, Any] = dict(whole)
            for name in found.keys() & self.cut.keys():
                found[name] = OnePartAtATime(whole[name], self.cut[name])
                self.handed_out.append(found[name])
            yield found


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_weights_leased_in_parts_are_bit_identical(family: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every family, the embedding and the head can be leased in parts, with bit-identical results."""
    monkeypatch.setattr("megatrain.base.layout.PART_ELEMENTS", 1024)
    monkeypatch.setattr("megatrain.base.layout.PART_ALIGNMENT_ELEMENTS", 1024)
    monkeypatch.setattr("megatrain.base.layout.MAX_PARTS", 1 << 20)
    config = tiny_config(family, tied=tied)
    expected = train_step(build_model(config), padded_batches(), SEED)
    found = step(config, is_part_major=True)
    assert_close(found, (expected.loss, expected.gradients))
    runner, access = runner_of(config, access=AccessInParts, is_part_major=True)
    loss = runner.forward_backward(padded_batches(), seed=SEED).loss
    assert_same((loss, access.finish()), found)
    evaluated = runner.evaluate(padded_batches())
    assert evaluated.terms == runner_of(config)[0].evaluate(padded_batches()).terms
    assert isinstance(access, AccessInParts)
    vocabulary = {name for name, rows in access.cut.items() if rows[-1].stop == VOCAB}
    num_tables = (1 if tied else 2) + (family == "gemma3n_text")  # this family has one more embedding
    assert len(vocabulary) == num_tables, access.cut
    assert all(len(each.taken) in (0, len(each.rows)) for each in access.handed_out)


def test_chunked_logits_differ_from_whole_only_by_rounding() -> None:
    config = tiny_config("gemma2")  # caps its logits
    whole = step(config, head_columns=0)
    for columns in (1, 7, COLUMNS, VOCAB):
        assert_close(step(config, head_columns=columns), whole, tolerance=2e-6)


@pytest.mark.parametrize("freeze", [("lm_head.weight",), ("model.*",), ("model.layers.*", "model.norm.weight")])
def test_frozen_parameters(freeze: tuple[str, ...]) -> None:
    config = tiny_config("llama", tied=False)
    expected = train_step(build_model(config, freeze=freeze), padded_batches(), SEED)
    assert_close(step(config, freeze=freeze), (expected.loss, expected.gradients))


def test_half_precision() -> None:
    config = tiny_config("llama", tied=False)
    found = step(config, dtype=torch.bfloat16)
    assert_close(found, step(config, dtype=torch.bfloat16, head_columns=0), tolerance=2e-2)
    assert_same(step(config, dtype=torch.bfloat16, kept_parts=2), found)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])
def test_smoothed_labels_and_evaluation(family: str) -> None:
    config, objective = tiny_config(family), Objective(CrossEntropy(0.2))
    assert_close(step(config, objective=objective), step(config, objective=objective, head_columns=0))
    runners = [runner_of(config, objective=objective, head_columns=n)[0] for n in (0, COLUMNS)]
    losses = [runner.evaluate(padded_batches()) for runner in runners]
    assert losses[1].terms == pytest.approx(losses[0].terms, rel=1e-6)
    assert losses[1].num_tokens == losses[0].num_tokens


def test_router_loss_is_added_once() -> None:
    config = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.3)
    expected = train_step(build_model(config), padded_batches(), SEED)
    assert_close(step(config), (expected.loss, expected.gradients))
    assert_close(step(config, is_part_major=True), (expected.loss, expected.gradients))


def add_vocabulary_bias(module: Any, args: Any, logits: Tensor) -> Tensor:
    return logits + torch.linspace(0, 1, VOCAB, dtype=logits.dtype, device=logits.device)


def subtract_logsumexp(module: Any, args: Any, logits: Tensor) -> Tensor:
    return logits - 0.1 * logits.logsumexp(-1, keepdim=True)


def roll_vocabulary(module: Any, args: Any, logits: Tensor) -> Tensor:
    return torch.roll(logits, 1, -1)


def apply_logit_dropout(module: Any, args: Any, logits: Tensor) -> Tensor:
    return torch.nn.functional.dropout(logits, 0.5)


def add_weight_mean(module: Any, args: Any, logits: Tensor) -> Tensor:
    return logits + module.weight.mean()


@pytest.mark.parametrize(
    "hook", [add_vocabulary_bias, subtract_logsumexp, roll_vocabulary, apply_logit_dropout, add_weight_mean]
)
def test_non_elementwise_logit_hooks_disable_chunking(hook: Any) -> None:
    config = tiny_config("llama", tied=False)
    runner, _ = runner_of(config, hook=hook)
    assert runner.head.rows == ROWS and runner.head.columns == 0 and runner.head.parts == 1


def test_elementwise_logit_hooks_run_on_chunks() -> None:
    def capped(module: Any, args: Any, logits: Tensor) -> Tensor:
        return 3.0 * torch.tanh(logits.float() / 3.0) * (args[0].float().mean(-1, keepdim=True) + 1)

    config = tiny_config("llama", tied=False)
    runner, _ = runner_of(config, hook=capped)
    assert runner.head.columns == COLUMNS
    assert_close(step(config, hook=capped), step(config, hook=capped, head_columns=0))


def test_vocabulary_chunks_depend_only_on_the_model() -> None:
    small = plan_head(build_graph(tiny_config("llama")))
    assert small is not None and small.cut_weight == "lm_head.weight"
    assert (small.default_columns, small.default_rows(small.default_columns)) == (8192, 2048)
    assert small.default_rows(0) == 166080  # 64 MiB of full logits
    assert vocabulary_ranges(VOCAB, 8192) == [(0, VOCAB)]
    ranges = vocabulary_ranges(262_144 + 3, 8192)
    assert len(ranges) == 33 and ranges[0][0] == 0 and ranges[-1][1] == 262_147
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_partwise_softmax_matches_the_whole(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(9, 50, generator=generator)
    labels = torch.randint(0, 50, (9,), generator=generator)
    whole = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, labels, reduction="sum", label_smoothing=smoothing) / 7
    (gradient,) = torch.autograd.grad(loss, whole)
    softmax = RunningSoftmax(labels, 50, 7, smoothing)
    parts = list(zip(logits.split(13, 1), (0, 13, 26, 39), strict=True))
    for part, start in parts:
        softmax.add(part, start)
    assert float(softmax.loss()) == pytest.approx(float(loss.detach()), rel=1e-6)
    found = torch.cat([softmax.gradient(part, start) for part, start in parts], 1)
    torch.testing.assert_close(found.double(), gradient, rtol=2e-5, atol=1e-7)


# -- memory ---------------------------------------------------------------------------------------------------------


def trace_of(vocab_size: int, **options: Any) -> Any:
    config = tiny_config("llama", vocab_size=vocab_size, tied=False)
    return trace_visits(build_graph(config), 2, 48, torch.float32, head_rows=32, **options)


def test_memory_does_not_grow_with_the_vocabulary() -> None:
    small, large = trace_of(4 * 8192), trace_of(32 * 8192)
    assert (small.head_parts, large.head_parts) == (4, 32)
    assert small.head_part_nbytes == large.head_part_nbytes == 32 * 8192 * 4
    assert small.head_part_nbytes < large.head_nbytes == small.head_nbytes < 5 * small.head_part_nbytes
    assert large.head_nbytes < trace_of(32 * 8192, head_columns=0).head_nbytes / 4
    embedding = large.visits[0]
    assert 0 < embedding.memory.backward_nbytes < 1 << 20 < 32 * 8192 * 32 * 4  # no dense gradient


def test_workspace_includes_kept_logit_parts() -> None:
    graph, trace = build_graph(tiny_config("llama", vocab_size=8 * 8192, tied=False)), trace_of(8 * 8192)
    base = planned_workspace(graph, trace, 1)
    for parts in range(1, 9):
        assert 0 <= planned_workspace(graph, trace, 1, parts) - base <= (parts - 1) * trace.head_part_nbytes + 4096
    free = logit_parts_in_workspace(trace)
    assert planned_workspace(graph, trace, 1, free) == base


# -- placements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_every_placement(
    dtype: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.engine.head.head_plan._COLUMNS", 500)
    kinds = ("weights", "gradients", "optimizer", "activations")

    def run(name: str, **options: Any) -> Any:
        text = config_text(tmp_path / name, tiny_model, precision=f'compute_dtype = "{dtype}"', **options)
        return run_config(text, tmp_path / name, num_steps=2)

    in_ram = run("ram", nvme=0)
    assert in_ram.plan.program.recompute.kept_parts == in_ram.plan.trace.head_parts > 1
    on_nvme = run("nvme", ram="7MiB", placement="\n".join(f'{kind} = ["nvme"]' for kind in kinds))
    on_nvme.assert_as_planned()
    on_nvme.assert_same(in_ram)
    monkeypatch.setattr("megatrain.plan.attempts._fits_entirely", lambda *_: False)
    monkeypatch.setattr("megatrain.plan.attempts.logit_parts_in_workspace", lambda _: 1)
    recomputed = run("recomputed", nvme=0)
    assert recomputed.plan.program.recompute.kept_parts == 1
    recomputed.assert_same(in_ram)
