"""Transients: how much memory outside of blocks a step needs at each turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.converters import experts
from megatrain.converters.spec import build_graph
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.keeping import keep_graphs
from megatrain.engine.program.step_program import LayoutSplits, StepProgram, Tick
from megatrain.engine.program.workspace import (
    Transient,
    collective_transients,
    computing_bytes,
    kept_graphs,
    peak_bytes,
    step_workspace_bytes,
    visit_transients,
)
from megatrain.optim.elementwise import AdamW
from megatrain.ranks.lanes import Lanes
from megatrain.ranks.shards import SHARD_BLOCK_ELEMENTS, RankLanes, RankShards, Sharding
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config
from oracles.planned_workspace import planned_workspace
from tiered.units import PAGE_BYTES

CPU = torch.device("cpu")


def test_workspace_peak_counts_concurrent_bytes() -> None:
    whole = Transient.for_tick("whole tick", 10, 3)
    first, second = Transient("first part", 5, (3, 1), (3, 1)), Transient("second part", 7, (3, 2), (3, 2))
    assert peak_bytes([]) == 0
    assert peak_bytes([whole, first, second]) == 17  # one part after the other
    assert peak_bytes([first, replace(second, start=(3, 1))]) == 12
    # A transient that begins in the last turn of another overlaps it; in the next tick it does not.
    assert peak_bytes([first, Transient("meets", 1, (3, 1), (9, 0))]) == 6
    assert peak_bytes([whole, Transient.for_tick("later", 10, 4)]) == 10


def program_of(num_lanes: int, dtype: torch.dtype = torch.float32) -> tuple[StepProgram, int, int]:
    """Return the program of a tiny model, the number of elements of its largest unit, and its workspace in bytes."""
    graph = build_graph(tiny_config("llama", tied=False))
    trace = trace_visits(graph, 2, 16, torch.float32)
    lanes = Lanes.for_all(num_lanes, 8)
    program = ProgramBuilder(
        graph,
        trace,
        num_micro_batches=8,
        order="layer",
        compute_tier="ram",
        optimizer=AdamW(),
        grad_dtype=dtype,
        sharding=Sharding(own_lanes=lanes),
    ).build()
    largest = max(layout.num_elements for layout in graph.layouts.values())
    return program, largest, step_workspace_bytes(graph, trace, program, 8, CPU)


@pytest.mark.parametrize(("num_lanes", "dtype", "num_sums"), [(1, torch.bfloat16, 1), (8, torch.float32, 3)])
def test_gradient_sums_are_counted_per_visit(num_lanes: int, dtype: torch.dtype, num_sums: int) -> None:
    """An fp32 gradient block is itself the sum. Otherwise, sums have the size of the visit's gradients."""
    _, largest, plain = program_of(1)
    _, _, with_sums = program_of(num_lanes, dtype)
    assert 0 < with_sums - plain < 4 * num_sums * largest + PAGE_BYTES


def test_tensors_saved_between_visits_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hyper-connections mix their streams between units of a split layer, and autograd saves tensors for this."""
    monkeypatch.setattr(experts, "EXPERTS_ELEMENTS", 2048)

    def bytes_of(num_layers: int) -> tuple[int, int]:
        """Return the largest number of bytes that a micro-batch holds, and the workspace that each further one adds."""
        layers = {"layer_types": ["sliding_attention"] * num_layers, "mlp_layer_types": ["moe"] * num_layers}
        config = tiny_config("deepseek_v4", num_hidden_layers=num_layers, **layers)
        graph = build_graph(config, split_experts=True)
        assert any(unit.part is not None for unit in graph.units)
        trace = trace_visits(graph, 4, 64, torch.float32)
        few, many = (planned_workspace(graph, trace, count) for count in (1, 101))
        return max(visit.memory.held_nbytes for visit in trace.visits), (many - few) // 100

    (held, own), (more_held, more_own) = bytes_of(2), bytes_of(4)
    # Each further layer adds at least one hidden state, and fewer than eight.
    assert 2 * 4 * 64 * 32 * 4 < more_held - held < 8 * 2 * 4 * 64 * 32 * 4
    assert more_own - own == pytest.approx(more_held - held, rel=0.02)


def test_kept_graphs_are_counted_until_their_backward() -> None:
    graph = build_graph(tiny_config("llama"))
    trace = trace_visits(graph, 2, 16, torch.float32)
    plain = ProgramBuilder(
        graph, trace, num_micro_batches=3, order="layer", compute_tier="ram", optimizer=AdamW()
    ).build()
    program = keep_graphs(plain, frozenset({2, 3}))
    waiting = list(kept_graphs(trace, program, {2, 3}, 3))
    assert peak_bytes(waiting) == 3 * (trace.visits[2].memory.graph_nbytes + trace.visits[3].memory.graph_nbytes)
    visits = list(visit_transients(graph, trace, program, 3, CPU))
    assert peak_bytes(visits) < peak_bytes([*visits, *waiting]) <= peak_bytes(visits) + peak_bytes(waiting)


def test_each_tick_counts_the_transient_bytes_of_its_visit() -> None:
    """A visit that keeps its graphs counts as the largest, because its tick makes the graphs of all micro-batches."""
    graph = build_graph(tiny_config("llama"))
    trace = trace_visits(graph, 2, 16, torch.float32)
    plain = ProgramBuilder(
        graph, trace, num_micro_batches=3, order="layer", compute_tier="ram", optimizer=AdamW()
    ).build()
    by_phase = {
        "forward": lambda visit: trace.visits[visit].memory.forward_nbytes,
        "backward": lambda visit: trace.visits[visit].memory.backward_nbytes,
        "head": lambda visit: trace.head_nbytes,
        "update": lambda visit: 0,
    }
    found = computing_bytes(trace, plain)
    assert found == [by_phase[tick.phase](tick.visit) for tick in plain.ticks]
    assert len({*found}) > 2
    kept = dict(zip(plain.ticks, computing_bytes(trace, keep_graphs(plain, frozenset({2}))), strict=True))
    (forward,) = (nbytes for tick, nbytes in kept.items() if (tick.phase, tick.visit) == ("forward", 2))
    assert forward == max(kept.values()) > trace.visits[2].memory.forward_nbytes


def test_gathered_copies_and_sums_are_counted_for_their_lifetime() -> None:
    """Each of two ranks owns one shard of a layout. With two gathers ahead, two full copies exist at the same time."""
    graph = build_graph(tiny_config("llama"))
    layout = next(iter(graph.layouts.values()))
    length = SHARD_BLOCK_ELEMENTS  # of each rank's shard
    weight, gradient = f"{layout.name}/weight", f"{layout.name}/grad.0"
    blocks = {
        weight: BlockPlan(weight, "weights", length, torch.float32),
        gradient: BlockPlan(gradient, "gradients", length, torch.float32),
    }
    held, summed = ((weight, "r"),), (((gradient, "w"),),)
    ticks = (
        Tick("gather", 0, held, served_phase="forward"),  # type: ignore[arg-type]
        Tick("gather", 0, held, served_phase="backward"),  # type: ignore[arg-type]
        Tick("forward", 0, ()),
        Tick("backward", 0, ()),
        Tick("exchange", 0, (), summed, served_phase="backward"),  # type: ignore[arg-type]
    )
    sharding = Sharding(RankShards(0, 2), RankLanes(2, 2), Lanes.for_rank(0, 2, 2, 2))
    program = StepProgram(blocks, ticks, "ram", cuts=LayoutSplits(), sharding=sharding)
    found = list(collective_transients(graph, program))
    full = 4 * 2 * length
    copies = [each for each in found if each.name == "full copy"]
    assert [(each.nbytes, each.start[0], each.end[0]) for each in copies] == [(full, 0, 2), (full, 1, 3)]
    (sums,) = (each for each in found if each.name == "sums")
    assert (sums.nbytes, sums.start[0], sums.end[0]) == (full, 3, 4)
    (received,) = (each for each in found if each.name == "received sums")
    assert received.nbytes == 2 * 4 * length  # both ranks' sums of the shard
    assert peak_bytes(found) == 2 * full
    alone = replace(program, sharding=Sharding())
    assert not list(collective_transients(graph, alone))
    sent = replace(
        program,
        ticks=(
            Tick("backward", 1, ()),
            Tick("exchange", 1, (), summed, served_phase="backward"),  # type: ignore[arg-type]
            Tick("backward", 0, ()),
            Tick("exchange", 0, (), summed, served_phase="backward"),  # type: ignore[arg-type]
            Tick("update", 0, ()),
        ),
        compute_tier="gpu",
        sharding=replace(sharding, gathers_ahead=1),
    )
    sums_of_visits = [each for each in collective_transients(graph, sent) if each.name == "sums"]
    # A GPU sends the sums of visit 1 while visit 0 runs, and the sums of visit 0 until the step ends.
    assert [(each.start[0], each.end[0]) for each in sums_of_visits] == [(0, 2), (2, 4)]
