"""Whole programs of a model with one layer: every tick in order, with the blocks that it leases and discards.

In the texts, E is the embedding, which is tied to the head, L the layer and N the last norm. `a1/0.0` is an activation
of visit 1, `c1/0` a cache. Groups that are leased one after the other are separated by commas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.converters.spec import build_graph
from megatrain.engine.device.work import SavableResults
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.encoding import AveragedWeight
from megatrain.engine.program.forward_programs import (
    evaluation_program,
    generation_program,
    substitute_averages,
    whole_head_bytes,
)
from megatrain.engine.program.keeping import keep_graphs, save_results
from megatrain.engine.program.step_program import GroupUpdates, StepProgram
from megatrain.engine.program.visit_trace import Recompute, VisitMemory, VisitTrace
from megatrain.engine.program.workspace import (
    Transient,
    collective_transients,
    computing_bytes,
    kept_graphs,
    visit_transients,
)
from megatrain.models.graph import ModelGraph
from megatrain.optim.elementwise import AdamW
from megatrain.ranks.lanes import Lanes
from megatrain.ranks.shards import SHARD_BLOCK_ELEMENTS, RankLanes, RankShards, Sharding
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config

NAMES = {"model.embed_tokens": "E", "model.layers.0": "L", "model.norm": "N", "activations/": "a", "cache/": "c"}
#: The last of three ranks, with 4 of 11 lanes. It sums 2 subtrees in up to 3 open sums; all ranks together send 7 sums.
LAST_RANK = Sharding(RankShards(2, 3), RankLanes(11, 3), Lanes.for_rank(2, 3, 11, 11), gathers_ahead=1)
SHARD = 4 * SHARD_BLOCK_ELEMENTS  # bytes
END = Transient.for_tick("", 0, 0).end[1]


@cache
def traced(vocab_size: int, *, has_parts: bool) -> tuple[ModelGraph, VisitTrace]:
    with pytest.MonkeyPatch.context() as patch:
        if has_parts:
            patch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
        graph = build_graph(tiny_config("llama", num_hidden_layers=1, tied=True, vocab_size=vocab_size))
    head: dict[str, Any] = {"head_rows": 4, "head_columns": 512} if has_parts else {}
    return graph, trace_visits(graph, 2, 8, torch.float32, **head)


def built(vocab_size: int = 8000, *, passing_parts: bool = False, **options: Any) -> StepProgram:
    graph, trace = traced(vocab_size, has_parts=passing_parts)
    given = {"num_micro_batches": 2, "order": "layer", "compute_tier": "ram", "optimizer": AdamW(), **options}
    return ProgramBuilder(graph, trace, **given).build(passing_parts=passing_parts)


def short(key: str) -> str:
    for name, letter in NAMES.items():
        key = key.replace(name, letter)
    return key


def texts(program: StepProgram) -> list[str]:
    found = []
    for tick in program.ticks:
        groups = [" ".join(f"{short(key)}:{mode}" for key, mode in group) for group in (tick.held, *tick.passing)]
        served = "" if tick.served_phase is None else f" for {tick.served_phase}"
        spent = f"; spent {' '.join(sorted(map(short, tick.spent)))}" if tick.spent else ""
        found.append(f"{tick.phase} {tick.visit}{served}: {', '.join(group or '-' for group in groups)}{spent}")
    return found


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def sizes(program: StepProgram) -> dict[str, tuple[str, int, str]]:
    """Return the kind, the number of elements and the whole tensor of each block."""
    return {
        short(key): (block.kind, block.num_elements, short(block.parent_key)) for key, block in program.blocks.items()
    }


def present(transients: Iterable[Transient]) -> list[tuple[str, int, tuple[int, int], tuple[int, int]]]:
    return [(each.name, each.nbytes, each.start, each.end) for each in transients if each.nbytes]


def test_deferred_updates_come_before_the_first_use_of_their_weight() -> None:
    program = built()
    assert texts(program) == lines("""
        update 0: E/weight:rw E/m:rw E/v:rw E/grad.0:r; spent E/grad.0
        forward 0: E/weight:r
        update 1: L/weight:rw L/m:rw L/v:rw L/grad.0:r; spent L/grad.0
        forward 1: L/weight:r, a1/0.0:w, a1/1.0:w
        update 2: N/weight:rw N/m:rw N/v:rw N/grad.0:r; spent N/grad.0
        forward 2: N/weight:r, a2/0.0:w, a2/1.0:w
        head 3: E/weight:r E/grad.1:w
        backward 2: N/weight:r N/grad.0:w, a2/0.0:r, a2/1.0:r; spent a2/0.0 a2/1.0
        backward 1: L/weight:r L/grad.0:w, a1/0.0:r, a1/1.0:r; spent a1/0.0 a1/1.0
        backward 0: E/weight:r E/grad.0:w, E/grad.1:r; spent E/grad.1
    """)
    elements = {"E": 256_000, "L": 12_288, "N": 1024}
    expected: dict[str, tuple[str, int, str]] = {}
    for name, count in elements.items():
        expected |= {f"{name}/weight": ("weights", count, "")}
        expected |= {f"{name}/{state}": ("optimizer", count, "") for state in ("m", "v")}
        expected |= {f"{name}/grad.{site}": ("gradients", count, "") for site in range(2 if name == "E" else 1)}
    expected |= {f"a{visit}/{number}.0": ("activations", 2 * 8 * 32, "") for visit in (1, 2) for number in (0, 1)}
    assert sizes(program) == expected


def test_updates_follow_the_last_backward_by_one_tick_on_a_device() -> None:
    program = built(order="micro_batch", compute_tier="gpu", updates=GroupUpdates(are_deferred=False))
    assert texts(program) == lines("""
        forward 0: E/weight:r
        forward 1: L/weight:r, a1/0.0:w
        forward 2: N/weight:r, a2/0.0:w
        head 3: E/weight:r E/grad.1:w
        backward 2: N/weight:r N/grad.0:w, a2/0.0:r; spent a2/0.0
        backward 1: L/weight:r L/grad.0:w, a1/0.0:r; spent a1/0.0
        backward 0: E/weight:r E/grad.0:w
        forward 0: E/weight:r
        forward 1: L/weight:r, a1/0.0:w
        forward 2: N/weight:r, a2/0.0:w
        head 3: E/weight:r E/grad.1:rw
        backward 2: N/weight:r N/grad.0:rw, a2/0.0:r; spent a2/0.0
        backward 1: L/weight:r L/grad.0:rw, a1/0.0:r; spent a1/0.0
        update 2: N/weight:rw N/m:rw N/v:rw N/grad.0:r; spent N/grad.0
        backward 0: E/weight:r E/grad.0:rw, E/grad.1:r; spent E/grad.1
        update 1: L/weight:rw L/m:rw L/v:rw L/grad.0:r; spent L/grad.0
        update 0: E/weight:rw E/m:rw E/v:rw E/grad.0:r; spent E/grad.0
    """)
    without_overlap = GroupUpdates(are_deferred=False, overlaps_device=False)
    at_once = built(order="micro_batch", compute_tier="gpu", updates=without_overlap)
    assert [text.partition(":")[0] for text in texts(at_once)[-6:]] == [
        "backward 2", "update 2", "backward 1", "update 1", "backward 0", "update 0",
    ]  # fmt: skip


def test_ranks_gather_one_visit_ahead_and_exchange_after_it() -> None:
    """All sizes are multiples of one shard block: a shard of E has two, the other layouts have one."""
    program = built(sharding=LAST_RANK)
    assert texts(program) == lines("""
        update 0: E/weight:rw E/m:rw E/v:rw E/grad.0:r; spent E/grad.0
        gather 0 for forward: E/weight:r
        update 1: L/weight:rw L/m:rw L/v:rw L/grad.0:r; spent L/grad.0
        gather 1 for forward: L/weight:r
        forward 0: -
        update 2: N/weight:rw N/m:rw N/v:rw N/grad.0:r; spent N/grad.0
        gather 2 for forward: N/weight:r
        forward 1: -, a1/0.0:w, a1/1.0:w
        gather 3 for head: E/weight:r
        forward 2: -, a2/0.0:w, a2/1.0:w
        gather 2 for backward: N/weight:r
        head 3: -
        exchange 3 for head: -, E/grad.1:w
        gather 1 for backward: L/weight:r
        backward 2: -, a2/0.0:r, a2/1.0:r; spent a2/0.0 a2/1.0
        exchange 2 for backward: -, N/grad.0:w
        gather 0 for backward: E/weight:r
        backward 1: -, a1/0.0:r, a1/1.0:r; spent a1/0.0 a1/1.0
        exchange 1 for backward: -, L/grad.0:w
        backward 0: -
        exchange 0 for backward: -, E/grad.0:w E/grad.1:r; spent E/grad.1
    """)
    counts = {name: size for name, (kind, size, _) in sizes(program).items() if kind != "activations"}
    assert counts == {name: (2 if name[0] == "E" else 1) * SHARD_BLOCK_ELEMENTS for name in counts}
    # A rank sends its shard of a weight to both others, and gets theirs. It sends two sums to both, and gets five.
    sent = {1: 4, 3: 2, 6: 2, 8: 4, 10: 2, 13: 2, 16: 4, 12: 8, 20: 8, 15: 4, 18: 4}
    received = {**sent, 12: 10, 20: 10, 15: 5, 18: 5}
    for index in range(len(program.ticks)):
        outgoing, incoming = sent.get(index, 0) * SHARD, received.get(index, 0) * SHARD
        assert program.bytes_outside_blocks(index) == {"ram->ranks": outgoing, "ranks->ram": incoming}, index
    graph, _ = traced(8000, has_parts=False)

    def memory(ends: Sequence[tuple[int, int]]) -> list[tuple[str, int, tuple[int, int], tuple[int, int]]]:
        """Return the expected memory, for given ends of the sums of the head and the three backwards."""
        head, norm, layer, embedding = ends
        return [
            ("full copy", 6 * SHARD, (1, 0), (4, END)),
            ("full copy", 3 * SHARD, (3, 0), (7, END)),
            ("full copy", 3 * SHARD, (6, 0), (9, END)),
            ("full copy", 6 * SHARD, (8, 0), (11, END)),
            ("open sums", 6 * SHARD, (11, 0), (11, 0)),
            ("received sums", 14 * SHARD, (12, 1), (12, 1)),
            ("sums", 12 * SHARD, (11, 0), head),
            ("full copy", 3 * SHARD, (10, 0), (14, END)),
            ("open sums", 3 * SHARD, (14, 0), (14, 0)),
            ("received sums", 7 * SHARD, (15, 1), (15, 1)),
            ("sums", 6 * SHARD, (14, 0), norm),
            ("full copy", 3 * SHARD, (13, 0), (17, END)),
            ("open sums", 3 * SHARD, (17, 0), (17, 0)),
            ("received sums", 7 * SHARD, (18, 1), (18, 1)),
            ("sums", 6 * SHARD, (17, 0), layer),
            ("full copy", 6 * SHARD, (16, 0), (19, END)),
            ("open sums", 6 * SHARD, (19, 0), (19, 0)),
            ("received sums", 14 * SHARD, (20, 1), (20, 1)),
            ("sums", 12 * SHARD, (19, 0), embedding),
        ]

    assert present(collective_transients(graph, program)) == memory([(12, 1), (15, 1), (18, 1), (20, 1)])
    on_device = replace(program, compute_tier="gpu")  # it sends sums while the next visit runs
    assert present(collective_transients(graph, on_device)) == memory([(14, END), (17, END), (19, END), (20, END)])
    assert texts(evaluation_program(program)) == lines("""
        gather 0 for forward: E/weight:r
        gather 1 for forward: L/weight:r
        forward 0: -
        gather 2 for forward: N/weight:r
        forward 1: -
        gather 3 for head: E/weight:r
        forward 2: -
        head 3: -
    """)


def test_parts_of_the_vocabulary_are_leased_one_by_one() -> None:
    program = built(4512, passing_parts=True)
    assert texts(program) == lines("""
        update 0: -, E/weight.0:rw E/m.0:rw E/v.0:rw E/grad.0.0:r, E/weight.1:rw E/m.1:rw E/v.1:rw E/grad.0.1:r, \
E/weight.2:rw E/m.2:rw E/v.2:rw E/grad.0.2:r; spent E/grad.0.0 E/grad.0.1 E/grad.0.2
        forward 0: -, E/weight.0:r, E/weight.1:r, E/weight.2:r
        update 1: L/weight:rw L/m:rw L/v:rw L/grad.0:r; spent L/grad.0
        forward 1: L/weight:r, a1/0.0:w, a1/1.0:w
        update 2: N/weight:rw N/m:rw N/v:rw N/grad.0:r; spent N/grad.0
        forward 2: N/weight:r, a2/0.0:w, a2/1.0:w
        head 3: -, E/weight.0:r, E/weight.1:r, E/weight.2:r
        head 3: -, E/weight.2:r E/grad.1.2:w, E/weight.1:r E/grad.1.1:w, E/weight.0:r E/grad.1.0:w
        backward 2: N/weight:r N/grad.0:w, a2/0.0:r, a2/1.0:r; spent a2/0.0 a2/1.0
        backward 1: L/weight:r L/grad.0:w, a1/0.0:r, a1/1.0:r; spent a1/0.0 a1/1.0
        backward 0: -, E/weight.0:r, E/weight.1:r, E/weight.2:r, E/grad.0.0:w E/grad.1.0:r, \
E/grad.0.1:w E/grad.1.1:r, E/grad.0.2:w E/grad.1.2:r; spent E/grad.1.0 E/grad.1.1 E/grad.1.2
    """)
    parts = {"E/weight": "weights", "E/m": "optimizer", "E/v": "optimizer", "E/grad.0": "gradients"}
    for tensor, kind in {**parts, "E/grad.1": "gradients"}.items():
        own = {key: found for key, found in sizes(program).items() if found[2] == tensor}
        lengths = (65_536, 65_536, 4512 * 32 - 2 * 65_536)
        assert own == {f"{tensor}.{number}": (kind, length, tensor) for number, length in enumerate(lengths)}
    embedding = "model.embed_tokens"
    assert program.cuts.passing == {(0, embedding), (3, embedding)} and program.cuts.weights == {embedding}
    graph, trace = traced(4512, has_parts=True)
    assert whole_head_bytes(program, graph) == 4512 * 32 * 4
    assert whole_head_bytes(replace(program, sharding=LAST_RANK), graph) == 0
    assert texts(evaluation_program(substitute_averages(program, graph, "m"))) == lines("""
        forward 0: -, E/m.0:r, E/m.1:r, E/m.2:r
        forward 1: L/m:r
        forward 2: N/m:r
        head 3: -, E/m.0:r, E/m.1:r, E/m.2:r
    """)
    assert substitute_averages(program, graph, "m").encodings == {
        embedding: AveragedWeight(tuple(f"{embedding}/m.{part}" for part in range(3)), 577_536, torch.float32),
        "model.layers.0": AveragedWeight(("model.layers.0/m",), 49_152, torch.float32),
        "model.norm": AveragedWeight(("model.norm/m",), 4096, torch.float32),
    }
    first, later = (
        generation_program(program, graph, trace, {1: 640, 2: 0}, num_micro_batches=2, is_first=is_first)
        for is_first in (True, False)
    )
    assert texts(later) == lines("""
        forward 0: -, E/weight.0:r, E/weight.1:r, E/weight.2:r
        forward 1: L/weight:r, c1/0:rw, c1/1:rw
        forward 2: N/weight:r
        forward 3: -, E/weight.0:r, E/weight.1:r, E/weight.2:r
    """)
    assert texts(first) == [text.replace("0:rw, c1/1:rw", "0:w, c1/1:w") for text in texts(later)]
    assert later.cuts.passing == program.cuts.passing and not later.updates.are_deferred
    caches = {key: size for key, size in sizes(later).items() if key[0] in "ac"}
    assert caches == {"c1/0": ("activations", 640, ""), "c1/1": ("activations", 640, "")}
    assert {key for key in sizes(later) if "grad" in key} == set()


def test_ranks_exchange_parts_within_the_tick_that_uses_them() -> None:
    """Each of the three parts has one shard block on each rank."""
    program = built(4512, passing_parts=True, sharding=LAST_RANK)
    phases = [text.partition(":")[0] for text in texts(program)]
    assert phases == [
        "update 1", "gather 1 for forward", "update 0", "forward 0", "update 2", "gather 2 for forward", "forward 1",
        "forward 2", "head 3", "gather 2 for backward", "head 3", "gather 1 for backward", "backward 2",
        "exchange 2 for backward", "backward 1", "exchange 1 for backward", "backward 0",
    ]  # fmt: skip
    graph, _ = traced(4512, has_parts=True)
    expected: list[tuple[str, int, tuple[int, int], tuple[int, int]]] = []

    def add_copies(tick: int) -> None:
        points = [(tick, 2 * turn + 1) for turn in range(3)]
        expected.extend(("full copy of a part", 3 * SHARD, point, point) for point in points)

    def add_sums(tick: int, turn: int, *, has_weight: bool) -> None:
        use, exchange = (tick, 2 * turn + 1), (tick, 2 * turn + 2)
        expected.extend([("full copy of a part", 3 * SHARD, use, use)] if has_weight else [])
        expected.append(("sums of a part", 6 * SHARD, use, exchange))
        expected.append(("received sums", 7 * SHARD, exchange, exchange))
        expected.append(("open sums", 3 * SHARD, use, use))

    add_copies(3)
    expected += [("full copy", 3 * SHARD, (1, 0), (6, END)), ("full copy", 3 * SHARD, (5, 0), (7, END))]
    add_copies(8)
    for turn in range(3):
        add_sums(10, turn, has_weight=True)
    for gather, backward in ((9, 12), (11, 14)):
        expected += [
            ("full copy", 3 * SHARD, (gather, 0), (backward, END)),
            ("open sums", 3 * SHARD, (backward, 0), (backward, 0)),
            ("received sums", 7 * SHARD, (backward + 1, 1), (backward + 1, 1)),
            ("sums", 6 * SHARD, (backward, 0), (backward + 1, 1)),
        ]
    add_copies(16)
    for turn in range(3, 6):
        add_sums(16, turn, has_weight=False)
    assert present(collective_transients(graph, program)) == expected
    # Three parts are gathered. In the head's second pass and in the last backward, their sums are also exchanged.
    outside = [program.bytes_outside_blocks(index)["ranks->ram"] // SHARD for index in (3, 8, 10, 16)]
    assert outside == [3 * 2, 3 * 2, 3 * (2 + 5), 3 * (2 + 5)]


def numbered(trace: VisitTrace) -> VisitTrace:
    """Return the trace with different sizes in each visit and phase."""
    memories = (
        VisitMemory(1100, 100, 11_000, 21_000, 31_000),
        VisitMemory(2300, 300, 12_000, 22_000, 15_000),
        VisitMemory(1700, 500, 13_000, 23_000, 33_000),
        VisitMemory(1900, 200, 14_000, 24_000, 34_000),
    )
    visits = tuple(replace(visit, memory=memory) for visit, memory in zip(trace.visits, memories, strict=True))
    return replace(trace, visits=visits, head_nbytes=7000, head_part_nbytes=500)


def test_every_allocation_of_a_step_is_counted() -> None:
    """Two micro-batches of 16 tokens, three kept parts, up to three open sums, and weights decoded to bf16."""
    graph, traced_visits = traced(4512, has_parts=True)
    trace, norm, embedding = numbered(traced_visits), "model.norm", "model.embed_tokens"
    keys = {name: tuple(f"{name}/m.{part}" for part in range(3)) for name in (embedding,)} | {norm: (f"{norm}/m",)}
    program = replace(
        built(4512, passing_parts=True, sharding=Sharding(own_lanes=Lanes.for_all(7, 7))),
        recompute=Recompute(kept_parts=3),
        encodings={name: AveragedWeight(own, 0, torch.bfloat16) for name, own in keys.items()},
    )
    layouts = graph.layouts
    decoded = [
        program.decoded_bytes(visit, layouts[name]) for visit, name in ((0, embedding), (2, norm), (5, embedding))
    ]
    assert decoded == [2 * 65_536, 2 * 1024, 2 * 4512 * 32], "visit 5 would lease all parts together"
    assert program.decoded_bytes(1, layouts["model.layers.0"]) == 0
    computing = {1: 11_000, 3: 12_000, 5: 13_000, 6: 8000, 7: 8000, 8: 23_000, 9: 22_000, 10: 21_000}
    sums: dict[int, list[tuple[str, int, tuple[int, int], tuple[int, int]]]] = {
        8: [("sums", 2 * 4 * 1024, (8, 0), (8, END))],
        9: [("sums", 2 * 4 * 12_288, (9, 0), (9, END))],
    }
    part_nbytes = [2 * 4 * count for count in (65_536, 65_536, 13_312)]
    turns = {7: enumerate(reversed(part_nbytes)), 10: enumerate(part_nbytes, 3)}
    for tick, parts in turns.items():
        sums[tick] = [("sums of a part", size, (tick, 2 * turn + 1), (tick, 2 * turn + 2)) for turn, size in parts]
    by_tick = [
        each
        for tick, nbytes in computing.items()
        for each in (("computing", nbytes, (tick, 0), (tick, END)), *sums.get(tick, []))
    ]
    rows = 2 * 4 * 2 * 16 * (32 + 16)  # values and gradients in fp32 of a width of 32, and 16 numbers of the softmax
    assert present(visit_transients(graph, trace, program, 2, torch.device("cpu"))) == [
        ("streams", 2 * (500 + 2 * 2000), (0, 0), (11, 0)),
        ("decoded weights", 2 * 65_536, (0, 0), (11, 0)),
        *by_tick,
        *(("rows that wait", rows, (tick, 0), (tick, END)) for tick in (1, 6, 7, 10)),
    ]
    largest = 22_000 + 2 * 4 * 12_288  # counted for the visits that lease parts one at a time
    assert computing_bytes(trace, program) == [
        0, largest, 0, 12_000, 0, 13_000, largest, largest, 23_000 + 2 * 4 * 1024, largest, largest,
    ]  # fmt: skip
    assert present(kept_graphs(trace, program, [1, 2], 2)) == [
        ("kept graph", 30_000 - 12_000, (3, 0), (3, END)),
        ("kept graph", 30_000 - 15_000, (9, 0), (9, END)),
        ("kept graph", 30_000, (4, 0), (8, END)),
        ("kept graph", 66_000 - 13_000, (5, 0), (5, END)),
        ("kept graph", 66_000 - 23_000, (8, 0), (8, END)),
        ("kept graph", 66_000, (6, 0), (7, END)),
    ]


def test_kept_graphs_have_no_inputs_and_saved_results_have_one_block_more() -> None:
    program, (_, trace) = built(), traced(8000, has_parts=False)
    before = texts(program)
    kept = keep_graphs(program, frozenset({1}))
    changed = {3: "forward 1: L/weight:r", 8: "backward 1: L/weight:r L/grad.0:w"}
    assert texts(kept) == [changed.get(number, text) for number, text in enumerate(before)]
    assert program.blocks.keys() - kept.blocks.keys() == {"activations/1/0.0", "activations/1/1.0"}
    assert kept.recompute == Recompute(kept_graphs=frozenset({1}))
    visits = list(trace.visits)
    visits[1] = replace(visits[1], attention=SavableResults(70), results=SavableResults(90))
    with_results = replace(trace, visits=tuple(visits))
    changed = {
        3: "forward 1: L/weight:r, a1/0.0:w, a1/0.results:w, a1/1.0:w, a1/1.results:w",
        8: "backward 1: L/weight:r L/grad.0:w, a1/0.0:r a1/0.results:r, a1/1.0:r a1/1.results:r; "
        "spent a1/0.0 a1/0.results a1/1.0 a1/1.results",
    }
    for with_products, nbytes in ((False, 70), (True, 90)):
        saved = save_results(program, with_results, frozenset({1}), with_products=with_products)
        assert texts(saved) == [changed.get(number, text) for number, text in enumerate(before)]
        added = {key: block for key, block in saved.blocks.items() if key not in program.blocks}
        assert list(added) == ["activations/1/0.results", "activations/1/1.results"]
        assert {(block.kind, block.num_elements, block.dtype) for block in added.values()} == {
            ("activations", nbytes, torch.uint8)
        }
        choice: dict[str, Any] = {"saved_results" if with_products else "saved_attention": frozenset({1})}
        assert saved.recompute == Recompute(**choice)
        assert keep_graphs(program, frozenset({2})).recompute.saving_visits == frozenset()
