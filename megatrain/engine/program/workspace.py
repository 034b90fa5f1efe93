"""Workspace of a step: memory that counts toward a tier's capacity but belongs to no block.

The engine allocates and frees workspace as ticks run: scratch memory of visits, gradient sums that are not in blocks,
and full copies that are gathered. Each allocation is a `Transient`, derived from the ticks of the program. A tier needs
memory for the largest sum of simultaneous transients (`peak_bytes`). This file computes all planned workspace.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatrain.engine.program.encoding import decoding_bytes
from megatrain.engine.program.visit_trace import unit_layouts
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from megatrain.engine.program.block_plan import BlockPlan
    from megatrain.engine.program.step_program import Group, Phase, StepProgram, Tick
    from megatrain.engine.program.visit_trace import VisitTrace
    from megatrain.models.graph import ModelGraph

#: Tick and position within the tick. The position is 0 before all passing groups, and 2n + 1 or 2n + 2 during group n.
StepPoint = tuple[int, int]
_END = sys.maxsize

_FP32_BYTES = 4
#: Number of values per row, including the label, that the loss keeps while it computes parts of the vocabulary.
_SOFTMAX_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class Transient:
    """Workspace of the compute tier that is live between two points of a step."""

    name: str
    nbytes: int
    start: StepPoint
    end: StepPoint

    @classmethod
    def for_tick(cls, name: str, nbytes: int, tick: int) -> Transient:
        """Return a transient that is live during a whole tick."""
        return cls(name, nbytes, (tick, 0), (tick, _END))


def peak_bytes(transients: Iterable[Transient]) -> int:
    """Return the largest sum of simultaneous transients, in bytes."""
    changes: list[tuple[StepPoint, bool, int]] = []
    for transient in transients:
        changes += [(transient.start, False, transient.nbytes), (transient.end, True, -transient.nbytes)]
    live = peak = 0
    for _, _, change in sorted(changes):  # at equal points, allocations come before frees
        live += change
        peak = max(peak, live)
    return peak


def step_workspace_bytes(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int, device: torch.device
) -> int:
    """Return the peak workspace of the compute tier during a step in bytes, without kept graphs."""
    visit_peak = peak_bytes(visit_transients(graph, trace, program, num_micro_batches, device))
    # Add both peaks, because collectives can use a separate stream, and streams do not reuse each other's freed memory.
    return round_up(visit_peak, PAGE_BYTES) + peak_bytes(collective_transients(graph, program))


def visit_transients(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int, device: torch.device
) -> Iterator[Transient]:
    """Yield the workspace of visits: scratch memory, gradient sums that are not in blocks, and waiting rows.

    Between two units, each micro-batch holds its inputs, its outputs, and the tensors that stay until the backward. One
    micro-batch computes at a time. Weights are decoded into one buffer, which lives during the whole step.
    """
    step = (0, 0), (len(program.ticks), 0)
    moved_nbytes = max((visit.memory.held_nbytes - visit.memory.retained_nbytes for visit in trace.visits), default=0)
    retained_nbytes = max((visit.memory.retained_nbytes for visit in trace.visits), default=0)
    yield Transient("streams", num_micro_batches * (retained_nbytes + 2 * moved_nbytes), *step)
    scratch_nbytes = decoding_bytes(program.encodings.values(), device)
    yield Transient("decoded weights", decoded_bytes(graph, trace, program) + scratch_nbytes, *step)
    for index, tick in enumerate(program.ticks):
        nbytes = _computing_bytes(trace, program, tick)
        if nbytes:
            yield Transient.for_tick("computing", nbytes, index)
        if program.sharding.shards.is_local and tick.phase in ("head", "backward"):
            yield from _sum_transients(program, index)
    yield from waiting_rows(graph, trace, program, num_micro_batches)


def kept_graphs(
    trace: VisitTrace, program: StepProgram, visits: Collection[int], num_micro_batches: int
) -> Iterator[Transient]:
    """Yield the memory of kept graphs, except for the graph that `visit_transients` already counts in a visit's tick.

    Args:
        program: Program of a step. It need not keep these graphs yet.
    """
    ticks = {(tick.phase, tick.visit): index for index, tick in enumerate(program.ticks)}
    for visit in visits:
        forward_index, backward_index = ticks["forward", visit], ticks["backward", visit]
        graph_nbytes = trace.visits[visit].memory.graph_nbytes
        nbytes = num_micro_batches * graph_nbytes
        for index in (forward_index, backward_index):
            counted_nbytes = min(graph_nbytes, _computing_bytes(trace, program, program.ticks[index]))
            yield Transient.for_tick("kept graph", nbytes - counted_nbytes, index)
        yield Transient("kept graph", nbytes, (forward_index + 1, 0), (backward_index - 1, _END))


def computing_bytes(trace: VisitTrace, program: StepProgram) -> list[int]:
    """Return the peak memory that each tick needs for operator results and gradient sums.

    Ticks that keep a graph, and ticks that lease parts one at a time, get the maximum over all ticks.
    """
    passing_visits = {visit for visit, _ in program.cuts.passing}
    tick_bytes: list[int | None] = []
    for index, tick in enumerate(program.ticks):
        keeps_graph = tick.phase == "forward" and tick.visit in program.recompute.kept_graphs
        is_in_parts = tick.phase in ("forward", "head", "backward") and tick.visit in passing_visits
        if keeps_graph or is_in_parts:
            tick_bytes.append(None)
            continue
        has_sums = program.sharding.shards.is_local and tick.phase in ("head", "backward")
        sum_bytes = sum(transient.nbytes for transient in _sum_transients(program, index)) if has_sums else 0
        tick_bytes.append(_computing_bytes(trace, program, tick) + sum_bytes)
    peak = max((_computing_bytes(trace, program, tick) for tick in program.ticks), default=0)
    peak = max([peak, *(nbytes for nbytes in tick_bytes if nbytes is not None)])
    return [peak if nbytes is None else nbytes for nbytes in tick_bytes]


def _computing_bytes(trace: VisitTrace, program: StepProgram, tick: Tick) -> int:
    if tick.phase == "head":
        return trace.head_nbytes + (program.recompute.kept_parts - 1) * trace.head_part_nbytes
    if tick.phase == "forward":
        return trace.visits[tick.visit].memory.forward_nbytes
    return trace.visits[tick.visit].memory.backward_nbytes if tick.phase == "backward" else 0


def _sum_transients(program: StepProgram, tick_index: int) -> Iterator[Transient]:
    """Yield the fp32 gradient sums of a visit, one per open sum. The first sum of an fp32 block is the block itself."""

    max_open_sums = program.sharding.own_lanes.max_open_sums

    def sum_nbytes(group: Group) -> int:
        blocks = [program.contents(tick_index, key) for key, mode in group if mode != "r"]
        return sum(
            _FP32_BYTES * block.num_elements * (max_open_sums - (block.dtype == torch.float32))
            for block in blocks
            if block.kind == "gradients"
        )

    tick = program.ticks[tick_index]
    yield Transient.for_tick("sums", sum_nbytes(tick.held), tick_index)
    for turn, group in enumerate(tick.passing):
        yield Transient("sums of a part", sum_nbytes(group), (tick_index, 2 * turn + 1), (tick_index, 2 * turn + 2))


def waiting_rows(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int
) -> Iterator[Transient]:
    """Yield the memory of all micro-batches' rows and gradients while weight or gradient parts are leased one by one.

    In the head, the rows are the inputs. In an embedding, they are the rows to look up or to add. Rows count as fp32.
    """
    widths: dict[int, int] = {}
    head = [index for index, visit in enumerate(trace.visits) if visit.is_head]
    for visit, layout in program.cuts.passing:
        announced_visit = head[0] if visit in head else visit
        widths[announced_visit] = max(widths.get(announced_visit, 0), graph.layouts[layout].entries[0].shape[-1])
    for index, tick in enumerate(program.ticks):
        if tick.phase in ("forward", "head", "backward") and tick.visit in widths:
            width = widths[tick.visit] + _SOFTMAX_NUMBERS
            nbytes = 2 * _FP32_BYTES * num_micro_batches * trace.num_tokens * width
            yield Transient.for_tick("rows that wait", nbytes, index)


def collective_transients(graph: ModelGraph, program: StepProgram) -> Iterator[Transient]:
    """Yield full copies of weights, gradient sums and received sums. A single process has none of these.

    A full copy lives from its gather to the end of the visit's tick. A gradient sum lives from the visit's tick to the
    exchange of the last part. If parts are leased one at a time, the memory of a part lives only within the tick.
    """
    if not program.sharding.shards.is_local:
        yield from _CollectiveMemory(graph, program).transients()


class _CollectiveMemory:
    """Memory of a program's collectives, derived from the ticks in order."""

    def __init__(self, graph: ModelGraph, program: StepProgram) -> None:
        self._graph, self._program = graph, program
        sharding = program.sharding
        self._lanes, self._shards, self._own_lanes = sharding.lanes, sharding.shards, sharding.own_lanes
        self._num_sums = len(self._lanes.rank_sums(self._shards.rank))
        # If the program gathers ahead, a GPU sends sums while the next visit runs.
        self._sends_ahead = program.sharding.gathers_ahead > 0 and program.compute_tier != "ram"
        self._gather_indexes: dict[tuple[Phase, int], deque[int]] = {}  # phase, visit -> positions of its gathers
        self._visit_indexes: dict[tuple[Phase, int], int] = {}  # position of each visit's last tick

    def transients(self) -> Iterator[Transient]:
        for index, tick in enumerate(self._program.ticks):
            if tick.phase == "gather":
                assert tick.served_phase is not None
                self._gather_indexes.setdefault((tick.served_phase, tick.visit), deque()).append(index)
            elif tick.phase == "exchange":
                yield from self._exchange_transients(index)
            elif tick.phase != "update":
                yield from self._visit_transients(index)

    def _visit_transients(self, index: int) -> Iterator[Transient]:
        tick = self._program.ticks[index]
        visit_key = tick.phase, tick.visit
        self._visit_indexes[visit_key] = index
        if self._gather_indexes.get(visit_key):
            gather_index = self._gather_indexes[visit_key].popleft()
            for nbytes in self._full_bytes(gather_index).values():
                yield Transient("full copy", nbytes, (gather_index, 0), (index, _END))
        for turn, group in enumerate(tick.passing):
            yield from self._part_transients(index, turn, group)

    def _exchange_transients(self, index: int) -> Iterator[Transient]:
        """Yield a visit's gradient sums, and the received sums of each part."""
        tick = self._program.ticks[index]
        assert tick.served_phase is not None
        start = self._visit_indexes[tick.served_phase, tick.visit]
        sum_bytes = self._full_bytes(index)
        open_sums = self._own_lanes.max_open_sums - self._num_sums
        yield Transient("open sums", sum(sum_bytes.values()) // self._num_sums * open_sums, (start, 0), (start, 0))
        last_turns: dict[str, int] = {}  # turn of each layout's last part
        for turn, block in enumerate(self._exchanged_blocks(index)):
            last_turns[block.tensor_key] = turn
            nbytes = self._lanes.num_sums * _FP32_BYTES * block.num_elements
            yield Transient("received sums", nbytes, (index, 2 * turn + 1), (index, 2 * turn + 1))
        for key, turn in last_turns.items():
            end = (self._next_visit(index), _END) if self._sends_ahead else (index, 2 * turn + 1)
            yield Transient("sums", sum_bytes[key], (start, 0), end)

    def _next_visit(self, index: int) -> int:
        """Return the position of the next visit's tick, or of the step's last tick."""
        ticks = self._program.ticks
        indexes = range(index + 1, len(ticks))
        return next((i for i in indexes if ticks[i].phase in ("forward", "head", "backward")), len(ticks) - 1)

    def _part_transients(self, index: int, turn: int, group: Group) -> Iterator[Transient]:
        """Yield the memory of one passing group: its gathered weight part and its exchanged gradient part."""
        # The weight is freed before the exchange.
        use_point, exchange_point = (index, 2 * turn + 1), (index, 2 * turn + 2)
        open_sums = 0
        for key, mode in group:
            block = self._program.contents(index, key)
            if self._program.is_gathered(key):
                nbytes = self._program.gathered_bytes(key)
                yield Transient("full copy of a part", self._shards.size * nbytes, use_point, use_point)
            elif block.kind == "gradients" and mode != "r":
                num_sums = len(self._own_lanes.subtrees)
                nbytes = _FP32_BYTES * self._shards.size * block.num_elements
                yield Transient("sums of a part", num_sums * nbytes, use_point, exchange_point)
                open_sums += (self._own_lanes.max_open_sums - num_sums) * nbytes
                nbytes_received = self._lanes.num_sums * _FP32_BYTES * block.num_elements
                yield Transient("received sums", nbytes_received, exchange_point, exchange_point)
        yield Transient("open sums", open_sums, use_point, use_point)

    def _exchanged_blocks(self, index: int) -> list[BlockPlan]:
        return [self._program.contents(index, group[0][0]) for group in self._program.ticks[index].passing]

    def _full_bytes(self, index: int) -> dict[str, int]:
        """Return the sizes of the full copies that a tick gathers, or of the sums that it exchanges, by key."""
        program, is_gather = self._program, self._program.ticks[index].phase == "gather"
        blocks = [program.blocks[key] for key, _ in program.ticks[index].held] + self._exchanged_blocks(index)
        return {
            block.tensor_key: program.full_elements(self._graph.layouts[block.tensor_key.rpartition("/")[0]])
            * (program.gathered_dtype(block.key).itemsize if is_gather else _FP32_BYTES * self._num_sums)
            for block in blocks
        }


def decoded_bytes(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the peak memory in bytes of decoded weights in one visit. The head counts as one visit."""

    def visit_bytes(visit: int, unit: int) -> int:
        return sum(program.decoded_bytes(visit, graph.layouts[name]) for name in unit_layouts(graph, unit))

    bytes_by_visit = [visit_bytes(index, visit.unit) for index, visit in enumerate(trace.visits)]
    head_bytes = sum(nbytes for nbytes, visit in zip(bytes_by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head_bytes, *bytes_by_visit])
