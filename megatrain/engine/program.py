"""The program of one training step: which blocks exist, and which are used at which tick.

The planner counts bytes with it, the prefetcher looks ahead with it, and the engine executes it, so that
the planned traffic and the moved traffic are one thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from tiered import Access, Mode, Schedule

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph
    from megatrain.models.layout import UnitLayout
    from megatrain.optim.base import StateKind


@dataclass(frozen=True, slots=True)
class TracedVisit:
    """One unit call of a forward; byte counts are those of one micro-batch, on the compute device.

    Attributes:
        unit: Index of the unit.
        is_head: Whether it runs in the head phase, piece by piece.
        has_backward: Whether the backward runs the unit again. False where nothing that is trained comes before its
            output, and where the loss does not depend on it: announced, but no weights are asked for.
        saved: `(shape, dtype)` of every activation that is put away for the backward.
        held_nbytes: Live besides weights and gradient accumulators when the visit begins: the stream of activations,
            masks, tables. In layer order every micro-batch holds this much, and as much again of the next visit's.
        forward_nbytes: Peak on top of that while the unit runs (and the model's own code up to the next visit).
        backward_nbytes: Peak of recompute and backward on top of what is held, gradients of the parameters included.
        forward_flops: Floating-point operations of the forward.
        backward_flops: Those of recompute and backward. Both are 0 for visits of the head.
        graph_nbytes: What the graph of the forward holds if it is kept for the backward: all that autograd saves, the
            inputs, and weights cast to other dtypes; not the weights themselves, nor what visits share.
    """

    unit: int
    is_head: bool
    has_backward: bool
    saved: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    held_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    forward_flops: int = 0
    backward_flops: int = 0
    graph_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class VisitTrace:
    """The visits of one forward in order, the head's last.

    Attributes:
        visits: All visits.
        shared_nbytes: What one micro-batch keeps by reference from forward to backward: masks, rotary tables, ids.
        head_nbytes: Peak of the head phase of one micro-batch on top of what is held: one piece of logits with its
            gradients, and the gradient of the trunk's output.
        head_rows: Rows of logits at a time; 0 if the head is not chunked.
        guesses: What had to be made up, where and why, a sentence each: counts are estimates then.
        uncounted: Operators whose FLOPs nobody knows, and why; byte counts do not depend on it.
        head_flops: Floating-point operations of the head phase, forward and backward, with a label for every token.
        num_tokens: Tokens of the micro-batch.
    """

    visits: tuple[TracedVisit, ...]
    shared_nbytes: int
    head_nbytes: int
    head_rows: int
    guesses: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    head_flops: int = 0
    num_tokens: int = 0

    @property
    def exact(self) -> bool:
        """Whether byte counts are those of the model, and not estimates."""
        return not self.guesses


Phase = Literal["forward", "head", "backward", "update"]
Kind = Literal["weights", "optimizer", "gradients", "activations"]

#: (tick, key) -> the tick of its next use, until which the copy stays; in the next step if it is not later.
Stays = Mapping[tuple[int, str], int]

#: Order in which kinds are shown, and preferred for the faster tier when they save equally much.
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A block that the run will register: a flat tensor of ``num_elements`` of ``dtype``."""

    key: str
    kind: Kind
    num_elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tick:
    """What the engine holds at one point of the step.

    Attributes:
        phase: forward, head, backward (on the compute tier) or update (where ``StepProgram.tier_of`` says).
        visit: ordinal of the unit call for the first three; index of the layout for ``update``.
        held: (key, mode) leased together for the whole tick.
        passing: (key, mode) leased one after the other within it (activations of the micro-batches).
        spent: keys whose contents are dead after the tick: dropped, never written back.
    """

    phase: Phase
    visit: int
    held: tuple[tuple[str, Mode], ...]
    passing: tuple[tuple[str, Mode], ...] = ()
    spent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepProgram:
    """All blocks and ticks of a step. Ticks are numbered by their position.

    Deferred ``update`` ticks finish the step before: a block group is updated just before the forward that needs it,
    when the global norm is long known. So the first step lacks them, and after the last one only they are left. No
    forward ever sees weights that are not updated. Updates that are not deferred follow the backward that fills their
    gradient.

    Attributes:
        compute_tier: where layers run.
        updates_in_compute_tier: whether the optimizer can update blocks there.
        kept: visits whose graphs wait for their backward; their inputs are no blocks.
    """

    blocks: Mapping[str, BlockPlan]
    ticks: tuple[Tick, ...]
    compute_tier: str
    defers_updates: bool = True
    updates_in_compute_tier: bool = False
    kept: frozenset[int] = frozenset()

    def chosen_ticks(self, *, updates: bool = True, passes: bool = True) -> dict[int, Tick]:
        """Return the ticks of a step in order, by position.

        Args:
            updates: with the ticks that finish the step before.
            passes: with its own, forward and backward.
        """
        return {n: tick for n, tick in enumerate(self.ticks) if (updates if self._is_deferred(tick) else passes)}

    def _is_deferred(self, tick: Tick) -> bool:
        return self.defers_updates and tick.phase == "update"

    def tier_of(self, tick: Tick, homes: Mapping[str, str]) -> str:
        """Return the tier whose copies a tick uses.

        An update runs where layers run if all that outlives it, weights and state, is at home there; else in RAM. So
        homes alone decide, and no copy of state ever goes up to be updated.
        """
        if tick.phase != "update":
            return self.compute_tier
        lasting = [key for key, _ in tick.held if key not in tick.spent]
        is_there = self.updates_in_compute_tier and all(homes[key] == self.compute_tier for key in lasting)
        return self.compute_tier if is_there else "ram"

    def accesses(self, homes: Mapping[str, str]) -> Iterator[Access]:
        """Yield every access of the step, in order."""
        for number, tick in enumerate(self.ticks):
            tier = self.tier_of(tick, homes)
            for key, mode in (*tick.held, *tick.passing):
                yield Access(number, key, tier, mode)

    def schedule(self, homes: Mapping[str, str], num_steps: int, *, first_step: int = 0) -> Schedule:
        """Return the schedule of ``num_steps`` steps from ``first_step`` on, and of the updates that end them.

        Reads at home need no foresight. Writes do, wherever they happen: a copy must not be fetched before them.
        """
        streamed = [access for access in self.accesses(homes) if homes[access.key] != access.tier or access.mode != "r"]
        period = len(self.ticks)
        deferred = [number for number, tick in enumerate(self.ticks) if self._is_deferred(tick)]
        start, end = first_step * period, (first_step + num_steps) * period
        return Schedule(streamed, period, end, start=start, deferred=deferred)


def activations_of(program: StepProgram) -> dict[int, set[str]]:
    """Return the activation blocks of every visit before the head."""
    keys: dict[int, set[str]] = {}
    for tick in program.ticks:
        if tick.phase == "forward":
            keys.setdefault(tick.visit, set()).update(key for key, _ in tick.passing)
    return keys


def keeping_graphs(program: StepProgram, visits: frozenset[int]) -> StepProgram:
    """Return the program in which these visits keep their graphs: no activations are written for them, or read."""
    dropped = {key for visit, keys in activations_of(program).items() if visit in visits for key in keys}
    ticks = tuple(
        replace(tick, passing=(), spent=tick.spent - dropped)
        if tick.phase in ("forward", "backward") and tick.visit in visits
        else tick
        for tick in program.ticks
    )
    blocks = {key: block for key, block in program.blocks.items() if key not in dropped}
    return replace(program, blocks=blocks, ticks=ticks, kept=program.kept | visits)


def evaluation_program(program: StepProgram) -> StepProgram:
    """Return the program of one pass of an evaluation: the forward and the head of a step, weights and nothing else.

    However many micro-batches pass, each unit's weights are leased once.
    """
    passes: dict[tuple[Phase, int], Tick] = {}
    for tick in program.ticks:
        if tick.phase in ("forward", "head"):
            held = tuple((key, mode) for key, mode in tick.held if program.blocks[key].kind == "weights")
            passes.setdefault((tick.phase, tick.visit), Tick(tick.phase, tick.visit, held))
    return replace(program, ticks=tuple(passes.values()), defers_updates=False)


class ProgramBuilder:
    """Builds the program of a step from a model's units and the order of their visits.

    Args:
        graph: units and layouts.
        trace: visits of one forward, with what each keeps for its backward.
        num_micro_batches: micro-batches per optimizer step.
        order: ``layer`` (all micro-batches of a layer before the next layer) or ``micro_batch``.
        compute_tier: name of the tier that layers run in.
        compute_dtype: of the weight blocks.
        state_kinds: what the optimizer keeps, the weight block too.
        grad_dtype: of gradients at rest.
        defer_updates: see ``StepProgram``.
        updates_in_compute_tier: see ``StepProgram``.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace,
        *,
        num_micro_batches: int,
        order: Literal["layer", "micro_batch"],
        compute_tier: str,
        compute_dtype: torch.dtype,
        state_kinds: Sequence[StateKind],
        grad_dtype: torch.dtype = torch.float32,
        defer_updates: bool = True,
        updates_in_compute_tier: bool = False,
    ) -> None:
        self._graph, self._trace = graph, trace
        self._num_micro_batches, self._order = num_micro_batches, order
        self._compute_tier, self._compute_dtype = compute_tier, compute_dtype
        self._state_kinds = [kind for kind in state_kinds if kind.name != "weight"]
        self._grad_dtype, self._defer_updates = grad_dtype, defer_updates
        self._updates_in_compute_tier = updates_in_compute_tier
        self._uses = uses_of_layouts(graph, trace)
        # A device computes while the host updates what comes next; on the CPU both take turns.
        self._lead = 0 if compute_tier == "ram" else 1

    def build(self) -> StepProgram:
        """Return the program."""
        blocks = {block.key: block for block in (*self._parameter_blocks(), *self._activation_blocks())}
        ticks = tuple(self._ticks())
        return StepProgram(blocks, ticks, self._compute_tier, self._defer_updates, self._updates_in_compute_tier)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _parameter_blocks(self) -> Iterator[BlockPlan]:
        for layout in self._graph.layouts.values():
            yield BlockPlan(weight_key(layout.name), "weights", layout.num_elements, self._compute_dtype)
            if not self._is_trained(layout):
                continue
            for kind in self._state_kinds:
                yield BlockPlan(state_key(layout.name, kind.name), "optimizer", kind.num_elements(layout), kind.dtype)
            for use in range(len(self._uses[layout.name])):
                yield BlockPlan(gradient_key(layout.name, use), "gradients", layout.num_elements, self._grad_dtype)

    def _activation_blocks(self) -> Iterator[BlockPlan]:
        for visit, traced in enumerate(self._trace.visits):
            for micro_batch in range(self._num_micro_batches):
                for index, (shape, dtype) in enumerate(traced.saved):
                    key = activation_key(visit, self._slot_of(micro_batch), index)
                    yield BlockPlan(key, "activations", torch.Size(shape).numel(), dtype)

    def _is_trained(self, layout: UnitLayout) -> bool:
        """Frozen parameters own no gradient and no state; nor do those whose module the model never calls."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_of(self, micro_batch: int) -> int:
        """Return which set of activation blocks a micro-batch uses: one at a time needs only one set."""
        return micro_batch if self._order == "layer" else 0

    # -- ticks -------------------------------------------------------------------------------------------------

    def _ticks(self) -> Iterator[Tick]:
        everything = list(range(self._num_micro_batches))
        groups = [everything] if self._order == "layer" else [[micro_batch] for micro_batch in everything]
        for number, group in enumerate(groups):
            is_first, is_last = number == 0, number == len(groups) - 1
            ticks: Iterable[Tick] = self._pass(group, is_first=is_first, is_last=is_last)
            if is_first and self._defer_updates:
                ticks = self._with_deferred_updates(list(ticks))
            if is_last and not self._defer_updates:
                ticks = self._with_updates(ticks)
            yield from ticks

    def _with_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the last pass, each followed by the updates whose gradients it completes."""
        for tick in ticks:
            yield tick
            filled = {key for key, mode in tick.held if mode != "r"}
            for index, layout in enumerate(self._graph.layouts.values()):
                # Of several use sites the first one is filled last: it takes up the sums of the others.
                if self._is_trained(layout) and gradient_key(layout.name, 0) in filled:
                    yield self._update(index, layout)

    def _with_deferred_updates(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Yield the ticks of the first pass, each preceded by the updates of what it or the next ones use first."""
        updates: dict[int, list[Tick]] = {}
        for index, layout in enumerate(self._graph.layouts.values()):
            if self._is_trained(layout):
                weight = weight_key(layout.name)
                first = next(n for n, tick in enumerate(ticks) if weight in dict(tick.held))
                updates.setdefault(max(0, first - self._lead), []).append(self._update(index, layout))
        for number, tick in enumerate(ticks):
            yield from updates.get(number, ())
            yield tick

    def _pass(self, group: Sequence[int], *, is_first: bool, is_last: bool) -> Iterator[Tick]:
        """Yield the ticks of forward, head and backward over one group of micro-batches."""
        trunk = [visit for visit in range(len(self._trace.visits)) if not self._trace.visits[visit].is_head]
        head = [visit for visit in range(len(self._trace.visits)) if self._trace.visits[visit].is_head]
        for visit in trunk:
            yield Tick("forward", visit, self._weights(visit), self._activations(visit, group, "w"))
        if head:
            held = [item for visit in head for item in self._weights(visit)]
            held += [item for visit in head for item in self._gradients(visit, is_first=is_first, is_last=is_last)]
            yield Tick("head", head[0], tuple(dict(held).items()), spent=self._merged_away(head, is_last=is_last))
        for visit in reversed(trunk):
            activations = self._activations(visit, group, "r")
            yield Tick(
                "backward",
                visit,
                (self._weights(visit) if self._trace.visits[visit].has_backward else ())
                + self._gradients(visit, is_first=is_first, is_last=is_last),
                activations,
                frozenset(key for key, _ in activations) | self._merged_away([visit], is_last=is_last),
            )

    def _update(self, index: int, layout: UnitLayout) -> Tick:
        held: list[tuple[str, Mode]] = [(weight_key(layout.name), "rw")]
        held += [(state_key(layout.name, kind.name), "rw") for kind in self._state_kinds]
        gradient = gradient_key(layout.name, 0)
        held.append((gradient, "r"))
        return Tick("update", index, tuple(held), spent=frozenset({gradient}))

    def _weights(self, visit: int) -> tuple[tuple[str, Mode], ...]:
        return tuple((weight_key(name), "r") for name in self._layouts_of(visit))

    def _gradients(self, visit: int, *, is_first: bool, is_last: bool) -> tuple[tuple[str, Mode], ...]:
        """Return the accumulators of a visit; the last one to be filled also takes up those of the other uses."""
        items: list[tuple[str, Mode]] = []
        for name in self._layouts_of(visit):
            if not self._graph.layouts[name].trainable:
                continue
            uses = self._uses[name]
            items.append((gradient_key(name, uses.index(visit)), "w" if is_first else "rw"))
            if is_last and visit == uses[0]:
                items += [(gradient_key(name, use), "r") for use in range(1, len(uses))]
        return tuple(items)

    def _merged_away(self, visits: Sequence[int], *, is_last: bool) -> frozenset[str]:
        if not is_last:
            return frozenset()
        return frozenset(
            gradient_key(name, use)
            for visit in visits
            for name in self._layouts_of(visit)
            if self._graph.layouts[name].trainable and self._uses[name][0] == visit
            for use in range(1, len(self._uses[name]))
        )

    def _activations(self, visit: int, group: Sequence[int], mode: Mode) -> tuple[tuple[str, Mode], ...]:
        count = len(self._trace.visits[visit].saved)
        return tuple((activation_key(visit, self._slot_of(m), index), mode) for m in group for index in range(count))

    def _layouts_of(self, visit: int) -> tuple[str, ...]:
        return layouts_of_unit(self._graph, self._trace.visits[visit].unit)


def layouts_of_unit(graph: ModelGraph, unit: int) -> tuple[str, ...]:
    """Return the names of the layouts whose parameters a unit uses, in order, without repeats."""
    return tuple(dict.fromkeys(layout for _, _, layout in graph.units[unit].params))


def uses_of_layouts(graph: ModelGraph, trace: VisitTrace) -> dict[str, list[int]]:
    """Return for every layout the visits that use it, in forward order: its use sites."""
    uses: dict[str, list[int]] = {name: [] for name in graph.layouts}
    for visit, traced in enumerate(trace.visits):
        for name in layouts_of_unit(graph, traced.unit):
            uses[name].append(visit)
    return uses


def weight_key(layout: str) -> str:
    return f"{layout}/weight"


def state_key(layout: str, state: str) -> str:
    return f"{layout}/{state}"


def gradient_key(layout: str, use: int) -> str:
    return f"{layout}/grad.{use}"


def activation_key(visit: int, micro_batch: int, index: int) -> str:
    return f"activations/{visit}/{micro_batch}.{index}"
