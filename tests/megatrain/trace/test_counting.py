"""Counters of a trace: memory and work of operators, values that are known, and values that are guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.engine.device.work import NO_WORK, SavableResults, SkippedProducts, Work
from megatrain.engine.program.visit_trace import Recompute, TracedVisit, VisitMemory, VisitTrace
from megatrain.trace.counting import CountingMode, StepFlops, is_counted, step_flops
from megatrain.trace.repeated_layers import gradient_allocators
from megatrain.trace.trace import _scale_head, _support_scalar_lists
from megatrain.trace.visit_counts import PhaseCounts, RecomputeCounts, VisitCounts

KNOWN = torch.tensor([3, 0, 5, 2])


@pytest.fixture
def counts() -> Iterator[CountingMode]:
    with FakeTensorMode(allow_non_fake_inputs=True), CountingMode() as mode:
        yield mode


def test_live_bytes_follow_the_storages(counts: CountingMode) -> None:
    first = torch.empty(10)
    with counts.pause():
        hidden = torch.empty(1000)
    second, view = torch.empty(30, dtype=torch.bfloat16), first[3:]
    assert [counts.storage_index(tensor) for tensor in (first, hidden, second, view)] == [0, 1, 2, 0]
    assert (counts.num_storages, counts.live_nbytes, counts.peak_nbytes) == (3, 40 + 60, 40 + 60)
    assert [counts.live_nbytes_before(index) for index in range(4)] == [0, 40, 40, 100]
    assert sorted(counts.new_nbytes.values()) == [0, 40, 60]
    del first
    assert counts.live_nbytes == 100, "the view keeps the storage"
    del view
    assert (counts.live_nbytes, counts.peak_nbytes, counts.num_storages) == (60, 100, 3)
    assert sorted(counts.new_nbytes.values()) == [0, 60]
    third = torch.empty(5)
    assert (counts.storage_index(third), counts.live_nbytes, counts.peak_nbytes) == (3, 80, 100)
    assert counts.work == NO_WORK, "no kernel runs for an empty tensor"


def test_products_count_flops_and_other_operators_count_bytes(counts: CountingMode) -> None:
    left, right = torch.empty(3, 5), torch.empty(5, 7)
    product = left @ right
    assert counts.work == Work(product_flops=2 * 3 * 5 * 7, launches=1)
    product.add_(1)
    assert counts.work == Work(product_flops=210, moved_nbytes=2 * 4 * 21, launches=2)


def test_launches_are_reported_to_both_observers(counts: CountingMode) -> None:
    launched: list[Any] = []
    tensor, work = torch.empty(2), Work(moved_nbytes=8, launches=1)
    counts.add_launch(work, "", [tensor])
    counts.on_launch = lambda tensors: launched.append(("launch", *tensors))
    counts.recorder = lambda *call: launched.append(("record", *call))
    counts.add_launch(work, "kernel a", [tensor])
    counts.recorder = counts.on_launch = None
    counts.add_launch(work, "kernel b", [])
    counts.add_launch(work, "kernel a", [])
    assert counts.work == Work(moved_nbytes=32, launches=4)
    assert list(counts.uncounted_ops) == ["kernel a", "kernel b"]
    assert [(name, len(rest)) for name, *rest in launched] == [("launch", 1), ("record", 4)]
    assert launched[0][1] is tensor and launched[1][1] == work and launched[1][3:] == ({}, None)


def test_guesses_name_the_first_unit_and_count_the_others(counts: CountingMode) -> None:
    numbers, flags = torch.empty(2, 6), torch.empty(3, dtype=torch.bool)
    with counts.within_unit("layer 0"):
        assert numbers[0, 0].item() == 0.0
        assert flags[0].item() is True
        assert torch.empty(1, dtype=torch.long).item() == 0
        assert numbers.nonzero().shape == (6, 2), "the longest side"
    for name in ("layer 1", "layer 2", "layer 1"):
        with counts.within_unit(name):
            numbers[1, 2].item()
    assert flags.nonzero().shape == (3, 1)
    assert counts.num_guesses == 8
    assert counts.guesses == (
        "layer 0 and 2 more: it reads a value that is unknown before it runs; assumed to be 0 or true",
        "layer 0 and 1 more: the number of nonzero elements is unknown before it runs; assumed to be the longest side",
    )
    assert torch.rand([]).item() == 1.0, "no layer is dropped"
    assert counts.num_guesses == 8


def test_values_computed_from_known_values_are_known(counts: CountingMode) -> None:
    numbers = torch.empty(4, dtype=torch.long)
    counts.set_values(numbers, KNOWN)
    doubled = numbers * 2
    assert (doubled.tolist(), doubled.sum().item(), numbers.nonzero().shape) == ([6, 0, 10, 4], 20, (3, 1))
    rows = torch.empty(4, 7)
    assert rows[numbers > 2].shape == (2, 7), "a known mask selects a known number of unknown rows"
    assert rows[:, numbers[:3]].shape == (4, 3)
    assert counts.num_guesses == 0
    doubled.add_(1)
    assert doubled[2].item() == 11, "a change in place changes the values"
    doubled.copy_(rows[:, 0])
    assert doubled[2].item() == 0, "an unknown value replaces them"
    assert torch.zeros(2)[1].item() == 0.0
    assert counts.num_guesses == 1


def test_new_gradients_that_share_no_memory_can_be_allocated_again(counts: CountingMode) -> None:
    earlier = torch.empty(2)
    num_earlier = counts.num_storages
    one, two = torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(4)

    def shapes(*gradients: Tensor | None) -> list[Any] | None:
        allocators = gradient_allocators(gradients, num_earlier, counts)
        made = None if allocators is None else [allocate and allocate() for allocate in allocators]
        return (
            None if made is None else [tensor if tensor is None else (*tensor.shape, tensor.dtype) for tensor in made]
        )

    assert shapes(one, None, two) == [(2, 3, torch.bfloat16), None, (4, torch.float32)]
    for shared in ((one, one), (one, earlier), (two[:3],), (two[::2],), (one.t(),)):
        assert shapes(*shared) is None


def visit(index: int, *, is_head: bool = False, forward: Work = NO_WORK, **values: Any) -> TracedVisit:
    memory = VisitMemory(1, 2, 3, 4, 5)
    return TracedVisit(index, is_head, has_backward=True, saved_inputs=(), memory=memory, forward=forward, **values)


#: Visit 0 skips a product of 4 FLOPs in its recompute, visit 1 can save 7 or 30 FLOPs, and visit 2 is the head.
TRACE = VisitTrace(
    (
        visit(
            0,
            forward=Work(100),
            backward=Work(250),
            unneeded_products=SkippedProducts(frozenset({"w"}), Work(4)),
        ),
        visit(
            1,
            forward=Work(40, 10),
            backward=Work(90, 20),
            attention=SavableResults(1, Work(0, 7)),
            results=SavableResults(1, Work(30)),
        ),
        visit(2, is_head=True, forward=Work(1000)),
    ),
    head_nbytes=11,
    head_rows=4,
    head=Work(600, 0, 0, 0, 6),
    num_tokens=10,
    head_parts=3,
    logits_flops=150,
)


def test_flops_of_a_step_are_scaled_by_positions_tokens_and_labels() -> None:
    def flops(**choice: Any) -> StepFlops:
        given = {"num_positions": 40, "num_real_tokens": 30, "num_trained_tokens": 20}
        return step_flops(TRACE, **given, recompute=Recompute(**choice))

    trunk, recomputed, head, logits = 350 + 160, 96 + 50, 600 * 20, 150 * 20
    model = ((trunk - recomputed) * 30 + head) // 10
    assert flops() == StepFlops(model, (trunk * 40 + head + logits * 2 // 3) // 10)
    assert flops(kept_parts=2) == StepFlops(model, (trunk * 40 + head + logits // 3) // 10)
    assert flops(kept_parts=9) == StepFlops(model, (trunk * 40 + head) // 10)
    for choice, saved in (("kept_graphs", 50), ("saved_attention", 7), ("saved_results", 30)):
        expected = StepFlops(model, ((trunk - saved) * 40 + head + logits * 2 // 3) // 10)
        assert flops(**{choice: frozenset({1})}) == expected
    assert flops(kept_graphs=frozenset({0})).hardware == ((trunk - 96) * 40 + head + logits * 2 // 3) // 10


@pytest.mark.parametrize("missing", [{"guesses": ("a",)}, {"uncounted_ops": ("b",)}, {"num_tokens": 0}])
def test_flops_are_unknown_if_an_operator_or_a_value_is(missing: dict[str, Any]) -> None:
    assert is_counted(TRACE)
    trace = replace(TRACE, **missing)
    assert not is_counted(trace)
    assert step_flops(trace, num_positions=1, num_real_tokens=1, num_trained_tokens=1) == StepFlops(0, 0)


def test_head_is_scaled_from_the_traced_rows_to_all_tokens() -> None:
    """8 of 18 rows were traced, in pieces of 4: 2 pieces with 3 launches each. 3 more pieces keep their loss."""
    trace = replace(TRACE, num_tokens=0, head=Work(801, 41, 21, 1001, 6))
    scaled = _scale_head(trace, num_rows=8, num_tokens=18, row_nbytes=5)
    nbytes = 3 * 4 + 5 * 18
    recomputed = 150 * 18 * 2 // 3
    assert scaled.head == Work(801 * 18 // 8 - recomputed, 41 * 18 // 8, 21 * 18 // 8, 1001 * 18 // 8, 15)
    assert (scaled.num_tokens, scaled.head_nbytes, scaled.logits_flops) == (18, 11 + nbytes, 150 * 18)
    head = scaled.visits[2].memory
    assert scaled.visits[:2] == trace.visits[:2] and head == VisitMemory(1, 2, 3 + nbytes, 4 + nbytes, 5)


class OneUnit:
    """The parts of a unit that a traced visit needs."""

    index, part, share = 7, None, 0.5


def test_visit_has_the_counts_of_its_ticks() -> None:
    products = SkippedProducts(frozenset({"w"}), Work(8, launches=1))
    attention, results = SavableResults(64, Work(0, 5)), SavableResults(96, Work(3))
    counts = VisitCounts(
        unit=7,
        phases={
            "forward": PhaseCounts("forward", 2, 500, 3, 40, Work(100, 20, 10, 60, 4)),
            "backward": PhaseCounts("backward", 2, 900, 9, 80, Work(208, 40, 20, 120, 9)),
        },
        retained_nbytes=300,
        saved_inputs=[torch.empty(2, 3, dtype=torch.bfloat16)],
        looked_up_params={"a", "b"},
        row_params={"b", "c"},
        no_token_probability=0.25,
        has_backward=True,
        recompute=RecomputeCounts(70, attention, results, products),
    )
    unit: Any = OneUnit()
    saved = (((2, 3), torch.bfloat16),)
    expected = TracedVisit(
        7,
        False,
        has_backward=True,
        saved_inputs=saved,
        memory=VisitMemory(500, 300, 40, 80, 70),
        forward=Work(50, 10, 5, 30, 4),
        backward=Work(100, 20, 10, 60, 8),
        attention=attention,
        results=results,
        no_token_probability=0.25,
        unneeded_products=SkippedProducts(frozenset({"w"}), Work(4, launches=1)),
    )
    assert counts.to_visit(unit) == expected
    head = PhaseCounts("head", 2, 200, 1, 30)
    assert counts.to_head_visit(head, 250, frozenset({"p"})) == TracedVisit(
        7, True, True, saved, VisitMemory(200, 200, 30, 30, 0), partwise_params=frozenset({"p"})
    )
    assert counts.to_head_visit(head, 150, frozenset()).memory.retained_nbytes == 150
    # Later visits to equal parts use the counts of the first one, but their own memory at the start.
    own = {"forward": PhaseCounts("forward", 3, 250, 0, 1, Work(1))}
    later = VisitCounts(unit=7, phases=own, retained_nbytes=300, equal_part=counts, row_params={"b"})
    found = later.to_visit(unit)
    assert found.memory == VisitMemory(250, 250, 40, 80, 70) and found.forward == expected.forward
    assert (found.saved_inputs, found.has_backward, found.results, found.partwise_params) == (
        (), False, SavableResults(), frozenset(),
    )  # fmt: skip
    # Without saved inputs, rows of looked-up weights can be leased by part. Reused inputs have no savable results.
    counts.saved_inputs, alone = [], counts
    assert alone.to_visit(unit).partwise_params == {"b"}
    assert alone.to_visit(unit).results == alone.to_visit(unit).attention == SavableResults()
    counts.saved_inputs, counts.aliases = [torch.empty(1)], {0: (1, 0)}
    reused = counts.to_visit(unit)
    assert (reused.aliases, reused.results, reused.attention) == ({0: (1, 0)}, SavableResults(), SavableResults())
    del counts.phases["backward"]
    assert counts.to_visit(unit).memory.backward_nbytes == 0


def test_renamed_counts_name_the_weights_of_the_other_layer() -> None:
    counts = RecomputeCounts(5, unneeded_products=SkippedProducts(frozenset({"a", "b"}), Work(3)))
    renamed = counts.rename({"a": "x", "b": "y", "c": "z"})
    assert renamed == RecomputeCounts(5, unneeded_products=SkippedProducts(frozenset({"x", "y"}), Work(3)))


def test_lists_of_fake_numbers_become_tensors(counts: CountingMode) -> None:
    numbers = torch.empty(4, dtype=torch.long)
    counts.set_values(numbers, KNOWN)
    original = torch.tensor
    with _support_scalar_lists():
        assert torch.tensor([[4, numbers[0]], [7, numbers[1]]], dtype=torch.int32).shape == (2, 2)
        assert torch.tensor((numbers[1], 5)).dtype == torch.long
        assert torch.tensor(2.5).shape == ()
    assert counts.num_guesses == 0 and torch.tensor is original
