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
from megatrain.engine.program.visit_trace import layouts_of_unit
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
    first: StepPoint
    last: StepPoint

    @classmethod
    def for_tick(cls, name: str, nbytes: int, tick: int) -> Transient:
        """Return a transient that is live during a whole tick."""
        return cls(name, nbytes, (tick, 0), (tick, _END))


def peak_bytes(transients: Iterable[Transient]) -> int:
    """Return the largest sum of simultaneous transients, in bytes."""
    changes: list[tuple[StepPoint, bool, int]] = []
    for each in transients:
        changes += [(each.first, False, each.nbytes), (each.last, True, -each.nbytes)]
    live = most = 0
    for _, _, change in sorted(changes):  # at equal points, allocations come before frees
        live += change
        most = max(most, live)
    return most


def step_workspace_bytes(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int, device: torch.device
) -> int:
    """Return the peak workspace of the compute tier during a step in bytes, without kept graphs."""
    in_visits = peak_bytes(visit_transients(graph, trace, program, num_micro_batches, device))
    # Add both peaks. Collectives can have a separate stream, so neither can reuse memory that the other has freed.
    return round_up(in_visits, PAGE_BYTES) + peak_bytes(collective_transients(graph, program))


def visit_transients(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int, device: torch.device
) -> Iterator[Transient]:
    """Yield the workspace of visits: scratch memory, gradient sums that are not in blocks, and waiting rows.

    Between two units, each micro-batch holds its inputs, its outputs, and the tensors that stay until the backward. One
    micro-batch computes at a time. Weights are decoded into one buffer, which lives during the whole step.
    """
    step = (0, 0), (len(program.ticks), 0)
    moves = max((visit.memory.held_nbytes - visit.memory.stays_nbytes for visit in trace.visits), default=0)
    stays = max((visit.memory.stays_nbytes for visit in trace.visits), default=0)
    yield Transient("streams", num_micro_batches * (stays + 2 * moves), *step)
    decoding = decoding_bytes(program.encodings.values(), device)
    yield Transient("decoded weights", decoded_bytes(graph, trace, program) + decoding, *step)
    for number, tick in enumerate(program.ticks):
        nbytes = _computing_bytes(trace, program, tick)
        if nbytes:
            yield Transient.for_tick("computing", nbytes, number)
        if program.sharding.shards.is_local and tick.phase in ("head", "backward"):
            yield from _sum_transients(program, number)
    yield from waiting_rows(graph, trace, program, num_micro_batches)


def kept_graphs(
    trace: VisitTrace, program: StepProgram, visits: Collection[int], num_micro_batches: int
) -> Iterator[Transient]:
    """Yield the memory of kept graphs, without the graph that `visit_transients` counts while its visit runs.

    Args:
        program: Program of a step. It need not keep these graphs yet.
    """
    ticks = {(tick.phase, tick.visit): number for number, tick in enumerate(program.ticks)}
    for visit in visits:
        first, last = ticks["forward", visit], ticks["backward", visit]
        nbytes = num_micro_batches * trace.visits[visit].memory.graph_nbytes
        for number in (first, last):
            counted = min(
                trace.visits[visit].memory.graph_nbytes, _computing_bytes(trace, program, program.ticks[number])
            )
            yield Transient.for_tick("kept graph", nbytes - counted, number)
        yield Transient("kept graph", nbytes, (first + 1, 0), (last - 1, _END))


def computing_bytes(trace: VisitTrace, program: StepProgram) -> list[int]:
    """Return the peak memory that each tick needs for operator results and gradient sums.

    Ticks that keep a graph, and ticks that lease parts one at a time, get the maximum over all other ticks.
    """
    passing = {visit for visit, _ in program.cuts.passing}
    found: list[int | None] = []
    for number, tick in enumerate(program.ticks):
        keeps_graph = tick.phase == "forward" and tick.visit in program.recompute.kept_graphs
        if keeps_graph or tick.visit in passing:
            found.append(None)
            continue
        has_sums = program.sharding.shards.is_local and tick.phase in ("head", "backward")
        sums = sum(each.nbytes for each in _sum_transients(program, number)) if has_sums else 0
        found.append(_computing_bytes(trace, program, tick) + sums)
    most = max((_computing_bytes(trace, program, tick) for tick in program.ticks), default=0)
    most = max([most, *(nbytes for nbytes in found if nbytes is not None)])
    return [most if nbytes is None else nbytes for nbytes in found]


def _computing_bytes(trace: VisitTrace, program: StepProgram, tick: Tick) -> int:
    if tick.phase == "head":
        return trace.head_nbytes + (program.recompute.kept_parts - 1) * trace.head_part_nbytes
    if tick.phase == "forward":
        return trace.visits[tick.visit].memory.forward_nbytes
    return trace.visits[tick.visit].memory.backward_nbytes if tick.phase == "backward" else 0


def _sum_transients(program: StepProgram, number: int) -> Iterator[Transient]:
    """Yield the fp32 gradient sums of a visit, one per open sum. The first sum of an fp32 block is the block itself."""

    def nbytes(group: Group) -> int:
        blocks = [program.contents(number, key) for key, mode in group if mode != "r"]
        return sum(
            _FP32_BYTES
            * block.num_elements
            * (program.sharding.own_lanes.max_open_sums - (block.dtype == torch.float32))
            for block in blocks
            if block.kind == "gradients"
        )

    tick = program.ticks[number]
    yield Transient.for_tick("sums", nbytes(tick.held), number)
    for turn, group in enumerate(tick.passing):
        yield Transient("sums of a part", nbytes(group), (number, 2 * turn + 1), (number, 2 * turn + 2))


def waiting_rows(
    graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int
) -> Iterator[Transient]:
    """Yield the memory of all micro-batches' rows and gradients while weight or gradient parts are leased in turn.

    In the head, the rows are the inputs. In an embedding, they are the rows to look up or to add. They count as fp32.
    """
    widths: dict[int, int] = {}
    head = [number for number, visit in enumerate(trace.visits) if visit.is_head]
    for visit, layout in program.cuts.passing:
        announced = head[0] if visit in head else visit
        widths[announced] = max(widths.get(announced, 0), graph.layouts[layout].entries[0].shape[-1])
    for number, tick in enumerate(program.ticks):
        if tick.phase in ("forward", "head", "backward") and tick.visit in widths:
            width = widths[tick.visit] + _SOFTMAX_NUMBERS
            nbytes = 2 * _FP32_BYTES * num_micro_batches * trace.num_tokens * width
            yield Transient.for_tick("rows that wait", nbytes, number)


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
        self._lanes, self._shards, self._own_lanes = (
            program.sharding.lanes,
            program.sharding.shards,
            program.sharding.own_lanes,
        )
        self._num_sums = len(self._lanes.rank_sums(self._shards.rank))
        # If the program gathers ahead, a GPU sends sums while the next visit runs.
        self._sends_ahead = program.sharding.gathers_ahead > 0 and program.compute_tier != "ram"
        self._gathered: dict[tuple[Phase, int], deque[int]] = {}  # served tick -> positions of its gathers
        self._served: dict[tuple[Phase, int], int] = {}  # last tick of each visit

    def transients(self) -> Iterator[Transient]:
        for number, tick in enumerate(self._program.ticks):
            if tick.phase == "gather":
                assert tick.serves is not None
                self._gathered.setdefault((tick.serves, tick.visit), deque()).append(number)
            elif tick.phase == "exchange":
                yield from self._exchange_transients(number)
            elif tick.phase != "update":
                yield from self._visit_transients(number)

    def _visit_transients(self, number: int) -> Iterator[Transient]:
        tick = self._program.ticks[number]
        served = tick.phase, tick.visit
        self._served[served] = number
        if self._gathered.get(served):
            gather = self._gathered[served].popleft()
            for nbytes in self._full_bytes(gather).values():
                yield Transient("full copy", nbytes, (gather, 0), (number, _END))
        for turn, group in enumerate(tick.passing):
            yield from self._part_transients(number, turn, group)

    def _exchange_transients(self, number: int) -> Iterator[Transient]:
        """Yield a visit's gradient sums, and the received sums of each part."""
        tick = self._program.ticks[number]
        assert tick.serves is not None
        made = self._served[tick.serves, tick.visit]
        sums = self._full_bytes(number)
        open_sums = self._own_lanes.max_open_sums - self._num_sums
        yield Transient("open sums", sum(sums.values()) // self._num_sums * open_sums, (made, 0), (made, 0))
        last: dict[str, int] = {}  # turn of each layout's last part
        for turn, block in enumerate(self._exchanged(number)):
            last[block.whole] = turn
            nbytes = self._lanes.num_sums * _FP32_BYTES * block.num_elements
            yield Transient("received sums", nbytes, (number, 2 * turn + 1), (number, 2 * turn + 1))
        for whole, turn in last.items():
            until = (self._next_visit(number), _END) if self._sends_ahead else (number, 2 * turn + 1)
            yield Transient("sums", sums[whole], (made, 0), until)

    def _next_visit(self, number: int) -> int:
        """Return the position of the next visit's tick, or of the step's last tick."""
        ticks = self._program.ticks
        later = range(number + 1, len(ticks))
        return next((at for at in later if ticks[at].phase in ("forward", "head", "backward")), len(ticks) - 1)

    def _part_transients(self, number: int, turn: int, group: Group) -> Iterator[Transient]:
        """Yield the memory of one passing group: its gathered weight part and its exchanged gradient part."""
        # The weight is freed before the exchange.
        using, exchanging = (number, 2 * turn + 1), (number, 2 * turn + 2)
        open_sums = 0
        for key, mode in group:
            block = self._program.contents(number, key)
            if self._program.is_gathered(key):
                nbytes = self._program.gathered_bytes(key)
                yield Transient("full copy of a part", self._shards.size * nbytes, using, using)
            elif block.kind == "gradients" and mode != "r":
                num_sums = len(self._own_lanes.subtrees)
                nbytes = _FP32_BYTES * self._shards.size * block.num_elements
                yield Transient("sums of a part", num_sums * nbytes, using, exchanging)
                open_sums += (self._own_lanes.max_open_sums - num_sums) * nbytes
                received = self._lanes.num_sums * _FP32_BYTES * block.num_elements
                yield Transient("received sums", received, exchanging, exchanging)
        yield Transient("open sums", open_sums, using, using)

    def _exchanged(self, number: int) -> list[BlockPlan]:
        return [self._program.contents(number, group[0][0]) for group in self._program.ticks[number].passing]

    def _full_bytes(self, number: int) -> dict[str, int]:
        """Return the sizes of the full copies that a tick gathers, or of the sums that it exchanges, by key."""
        program, is_gather = self._program, self._program.ticks[number].phase == "gather"
        blocks = [program.blocks[key] for key, _ in program.ticks[number].held] + self._exchanged(number)
        return {
            block.whole: program.full_elements(self._graph.layouts[block.whole.rpartition("/")[0]])
            * (program.gathered_dtype(block.key).itemsize if is_gather else _FP32_BYTES * self._num_sums)
            for block in blocks
        }


def decoded_bytes(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the peak memory in bytes of decoded weights in one visit. The head counts as one visit."""

    def bytes_of_visit(visit: int, unit: int) -> int:
        return sum(program.decoded_bytes(visit, graph.layouts[name]) for name in layouts_of_unit(graph, unit))

    by_visit = [bytes_of_visit(number, visit.unit) for number, visit in enumerate(trace.visits)]
    head = sum(nbytes for nbytes, visit in zip(by_visit, trace.visits, strict=True) if visit.is_head)
    return max([head, *by_visit])
