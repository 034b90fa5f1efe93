"""Construction of a training step's program from a model's units and a trace of their visits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.program.block_keys import (
    activation_key,
    gradient_key,
    kind_of_key,
    part_keys,
    state_key,
    weight_key,
)
from megatrain.engine.program.block_plan import BlockPlan, FrozenWeights, Kind, weight_block
from megatrain.engine.program.step_program import Group, GroupUpdates, LayoutSplits, ModelPhase, StepProgram, Tick
from megatrain.engine.program.visit_trace import VisitTrace, layouts_of_unit, uses_of_layouts
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.matrices import matrix_elements
from megatrain.ranks.shards import Sharding
from tiered import Mode

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.base import Optimizer


class ProgramBuilder:
    """Builder of a step's program, from a model's units and a trace of their visits.

    Args:
        order: ``layer`` runs all micro-batches of a layer before the next layer; ``micro_batch`` runs them one by one.
        optimizer: Optimizer that defines the kinds of state; None if no weights are updated.
        grad_dtype: Dtype of stored gradients.
        updates: Settings for weight updates. The builder fills in ``sent_elements``.
        sharding: This rank's share of the step. Several ranks require the order ``layer``.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace,
        *,
        num_micro_batches: int,
        order: Literal["layer", "micro_batch"],
        compute_tier: str,
        optimizer: Optimizer | None,
        grad_dtype: torch.dtype = torch.float32,
        updates: GroupUpdates | None = None,
        frozen: FrozenWeights | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._sharding, self._frozen = sharding or Sharding(), frozen or FrozenWeights()
        self._shards, own_lanes = self._sharding.shards, self._sharding.own_lanes
        assert self._shards.is_local or (order == "layer" and not self._frozen.in_place), self._shards
        assert order == "layer" or own_lanes.num_lanes == 1, "open sums belong to only one visit at a time"
        self._graph, self._trace = graph, trace
        self._num_micro_batches, self._order = num_micro_batches, order
        self._compute_tier, self._grad_dtype = compute_tier, grad_dtype
        state_kinds = () if optimizer is None else optimizer.state_kinds(graph.dtype.itemsize == 2)
        self._state_kinds = [kind for kind in state_kinds if kind.name != "weight"]
        self._uses = uses_of_layouts(graph, trace)

        # State that is not elementwise needs whole parameters, so its layout cannot be cut into parts.
        def is_elementwise(layout: UnitLayout) -> bool:
            return all(kind.has_weight_layout(layout) for kind in state_kinds)

        self._parts = {
            layout.name: layout.parts
            for layout in graph.layouts.values()
            if is_elementwise(layout) and len(layout.parts) > 1 and self._is_trained(layout)
        }
        self._updates = self._with_traffic(updates or GroupUpdates(), optimizer, is_elementwise)
        # Shard each part, so that a rank's blocks of weight, state and gradient hold the same elements.
        self._cut_weights = frozenset(
            name
            for name in self._parts
            if not self._shards.is_local or all(self._accepts_parts(visit, name) for visit in self._uses[name])
        )
        # While a device computes, the host updates the weights of the next forward visit. During the backward, it
        # updates the weights of the visit whose backward has just ended.
        self._lead = int(compute_tier != "ram" and self._updates.overlaps_device)
        self._passing: frozenset[tuple[int, str]] = frozenset()

    def build(self, *, passing_parts: bool = False) -> StepProgram:
        """Build the step's program.

        Args:
            passing_parts: Whether to lease parts of gradients and cut weights one at a time where possible. Results
                are bit-identical either way, but the head then recomputes more logits.
        """
        self._passing = frozenset(
            (visit, layout)
            for layout in (self._parts if passing_parts else ())
            for visit in self._uses[layout]
            if self._accepts_parts(visit, layout)
        )
        blocks = {block.key: block for block in (*self._parameter_blocks(), *self._activation_blocks())}
        return StepProgram(
            blocks,
            tuple(self._ticks()),
            self._compute_tier,
            cuts=LayoutSplits(self._parts, self._cut_weights, self._passing),
            updates=self._updates,
            sharding=self._sharding,
            encodings=self._frozen.encodings,
        )

    def _with_traffic(
        self, updates: GroupUpdates, optimizer: Optimizer | None, is_elementwise: Callable[[UnitLayout], bool]
    ) -> GroupUpdates:
        """Return ``updates`` with the number of matrix elements that each update sends to the device."""
        trained = {
            index: layout for index, layout in enumerate(self._graph.layouts.values()) if self._is_trained(layout)
        }
        assert self._shards.is_local or all(map(is_elementwise, trained.values())), "shards suffice only elementwise"
        if not isinstance(optimizer, MatrixOptimizer) or self._compute_tier == "ram":
            return updates
        sent = {index: matrix_elements(optimizer, layout) for index, layout in trained.items()}
        return replace(updates, sent_elements=sent)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _parameter_blocks(self) -> Iterator[BlockPlan]:
        for layout in self._graph.layouts.values():
            in_folder = self._frozen.in_folder and not layout.trainable
            if layout.name in self._cut_weights:
                key = weight_key(layout.name)
                yield from self._blocks_of(layout, key, "weights", layout.num_elements, self._graph.dtype)
            else:
                yield weight_block(
                    layout,
                    self._shards.num_elements(range(layout.num_elements)),
                    self._graph.dtype,
                    self._frozen.encodings.get(layout.name),
                    in_folder=in_folder,
                    in_place=layout.name in self._frozen.in_place,
                )
            if not self._is_trained(layout):
                continue
            for kind in self._state_kinds:
                key = state_key(layout.name, kind.name)
                length = layout.num_elements if kind.elements_of is None else kind.num_elements(layout)
                for block in self._blocks_of(layout, key, "optimizer", length, kind.dtype):
                    yield replace(block, num_elements=kind.elements_for(block.num_elements))
            for use in range(len(self._uses[layout.name])):
                key = gradient_key(layout.name, use)
                yield from self._blocks_of(layout, key, "gradients", layout.num_elements, self._grad_dtype)

    def _blocks_of(
        self, layout: UnitLayout, key: str, kind: Kind, num_elements: int, dtype: torch.dtype
    ) -> Iterator[BlockPlan]:
        parts = self._parts.get(layout.name) or (range(num_elements),)
        sizes = [self._shards.num_elements(part) for part in parts]
        for part, size in zip(part_keys(key, len(sizes)), sizes, strict=True):
            yield BlockPlan(part, kind, size, dtype, key if len(sizes) > 1 else "")

    def _part_keys(self, key: str, layout: str) -> list[str]:
        return part_keys(key, len(self._parts.get(layout, ())) or 1)

    def _activation_blocks(self) -> Iterator[BlockPlan]:
        for visit, traced in enumerate(self._trace.visits):
            for micro_batch in range(self._num_micro_batches):
                for index, (shape, dtype) in enumerate(traced.saved):
                    if index in traced.reused:
                        continue
                    key = activation_key(visit, self._slot_of(micro_batch), index)
                    yield BlockPlan(key, "activations", torch.Size(shape).numel(), dtype)

    def _is_trained(self, layout: UnitLayout) -> bool:
        """Return whether a layout is trainable and used by a visit. Only such layouts have gradients and state."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_of(self, micro_batch: int) -> int:
        """Return which set of activation blocks a micro-batch uses; 0 if micro-batches run one at a time."""
        return micro_batch if self._order == "layer" else 0

    # -- ticks -------------------------------------------------------------------------------------------------

    def _ticks(self) -> Iterator[Tick]:
        everything = list(range(self._num_micro_batches))
        groups = [everything] if self._order == "layer" else [[micro_batch] for micro_batch in everything]
        for number, group in enumerate(groups):
            is_first, is_last = number == 0, number == len(groups) - 1
            ticks: Iterable[Tick] = self._pass_ticks(group, is_first=is_first, is_last=is_last)
            if not self._shards.is_local:
                ticks = self._with_collectives(list(ticks))
            if is_first and self._updates.are_deferred:
                ticks = self._with_deferred_updates(list(ticks))
            if is_last and not self._updates.are_deferred:
                ticks = self._with_updates(ticks)
            yield from ticks

    def _with_collectives(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Add gather and exchange ticks, which take over the held blocks of the given ticks.

        The given ticks keep their passing blocks: activations, and parts that they gather and exchange themselves.
        """
        weights = [_blocks_of_kind("weight", tick.held) for tick in ticks]
        for gathers, tick in zip(gathers_before(ticks, weights, self._sharding.gathers_ahead), ticks, strict=True):
            yield from gathers
            passing = tuple(group for group in tick.passing if not _is_added_to_held(group))
            yield replace(tick, held=(), passing=passing, spent=self._spent_keys(passing) & tick.spent)
            if gradients := _blocks_of_kind("grad", tick.held):
                summed = tuple(self._exchange_groups(gradients))
                yield Tick("exchange", tick.visit, (), summed, self._spent_keys(summed), _model_phase(tick))

    def _exchange_groups(self, gradients: Group) -> Iterator[Group]:
        """Yield one group per accumulator. The first use site's groups also list other sites' accumulators to add."""
        others: dict[str, Group] = {}
        for name, uses in self._uses.items():
            keys = [self._part_keys(gradient_key(name, use), name) for use in range(len(uses))]
            others.update((own, tuple((key, "r") for key in rest)) for own, *rest in zip(*keys, strict=True))
        for key, mode in gradients:
            yield ((key, mode), *others.get(key, ()))

    def _with_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Insert each update into the ticks of the last pass, after the tick that completes its gradient."""
        waiting: deque[list[Tick]] = deque([] for _ in range(self._lead))
        for tick in ticks:
            yield tick
            filled = {key for key, mode in tick.uses if mode != "r"}
            # The backward reaches the first use site of a shared layout last, and adds the other gradients there.
            updates = [
                self._update_tick(index, layout)
                for index, layout in enumerate(self._graph.layouts.values())
                if self._is_trained(layout) and self._part_keys(gradient_key(layout.name, 0), layout.name)[0] in filled
            ]
            waiting.append(updates)
            yield from waiting.popleft()
        for updates in waiting:
            yield from updates

    def _with_deferred_updates(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Insert deferred updates into the ticks of the first pass, ``_lead`` ticks before a weight's first use."""
        updates: dict[int, list[Tick]] = {}
        for index, layout in enumerate(self._graph.layouts.values()):
            if self._is_trained(layout):
                weight = self._weight_keys(layout.name)[0]
                first = next(n for n, tick in enumerate(ticks) if weight in dict(tick.uses))
                updates.setdefault(max(0, first - self._lead), []).append(self._update_tick(index, layout))
        for number, tick in enumerate(ticks):
            yield from updates.get(number, ())
            yield tick

    def _pass_ticks(self, group: Sequence[int], *, is_first: bool, is_last: bool) -> Iterator[Tick]:
        """Yield the ticks of forward, head and backward over one group of micro-batches."""
        trunk = [visit for visit in range(len(self._trace.visits)) if not self._trace.visits[visit].is_head]
        head = [visit for visit in range(len(self._trace.visits)) if self._trace.visits[visit].is_head]
        for visit in trunk:
            passing = (*self._passing_weights(visit), *self._activations(visit, group, "w"))
            yield Tick("forward", visit, self._held_weights(visit), passing)
        if head:
            held = [item for visit in head for item in self._held_weights(visit)]
            weights = [item for visit in head for item in self._passing_weights(visit)]
            if weights:  # two passes over the parts, for the loss and for the gradients
                yield Tick("head", head[0], tuple(dict(held).items()), tuple(weights))
            held += [item for visit in head for item in self._held_gradients(visit, is_first=is_first)]
            summed = self._passing_gradients(head, is_first=is_first, is_last=is_last)
            spent = self._spent_keys(summed)
            if weights:
                summed = tuple((*weight, *group) for weight, group in zip(reversed(weights), summed, strict=True))
            yield Tick("head", head[0], tuple(dict(held).items()), summed, spent)
        for visit in reversed(trunk):
            activations = self._activations(visit, group, "r")
            has_backward = self._trace.visits[visit].has_backward
            weights = list(self._passing_weights(visit)) if has_backward else []
            summed = self._passing_gradients([visit], is_first=is_first, is_last=is_last)
            yield Tick(
                "backward",
                visit,
                (self._held_weights(visit) if has_backward else ()) + self._held_gradients(visit, is_first=is_first),
                (*weights, *activations, *summed),
                self._spent_keys((*activations, *summed)) - self._reused(visit, group),
            )

    @staticmethod
    def _spent_keys(passing: Iterable[Group]) -> frozenset[str]:
        """Return the keys of activations and added gradients, which are not needed after they are read."""
        return frozenset(key for group in passing for key, mode in group if mode == "r")

    def _update_tick(self, index: int, layout: UnitLayout) -> Tick:
        weights: Group = tuple((key, "rw") for key in self._weight_keys(layout.name))
        gradients = self._part_keys(gradient_key(layout.name, 0), layout.name)
        states = [self._part_keys(state_key(layout.name, kind.name), layout.name) for kind in self._state_kinds]
        groups: list[Group] = [
            (*((key, "rw") for key in keys), (gradient, "r"))
            for gradient, *keys in zip(gradients, *states, strict=True)
        ]
        spent = frozenset(gradients)
        if len(groups) == 1:
            return Tick("update", index, (*weights, *groups[0]), spent=spent)
        if layout.name in self._cut_weights:
            groups = [(weight, *group) for weight, group in zip(weights, groups, strict=True)]
            return Tick("update", index, (), tuple(groups), spent)
        return Tick("update", index, weights, tuple(groups), spent)

    def _held_weights(self, visit: int) -> Group:
        """Return the weights that a visit leases for its whole tick."""
        return tuple(
            (key, "r")
            for name in self._layouts_of(visit)
            if not self._passes_weight(visit, name)
            for key in self._weight_keys(name)
        )

    def _passing_weights(self, visit: int) -> tuple[Group, ...]:
        """Return the parts of weights that a visit leases one at a time."""
        names = [name for name in self._layouts_of(visit) if self._passes_weight(visit, name)]
        return tuple(((key, "r"),) for name in names for key in self._weight_keys(name))

    def _passes_weight(self, visit: int, layout: str) -> bool:
        return layout in self._cut_weights and self._leases_by_part(visit, layout)

    def _weight_keys(self, layout: str) -> list[str]:
        key = weight_key(layout)
        return self._part_keys(key, layout) if layout in self._cut_weights else [key]

    def _held_gradients(self, visit: int, *, is_first: bool) -> Group:
        """Return the accumulators that a visit leases for its whole tick."""
        return tuple(
            (key, "w" if is_first else "rw")
            for name in self._trained_layouts_of(visit)
            if not self._leases_by_part(visit, name)
            for key in self._part_keys(gradient_key(name, self._uses[name].index(visit)), name)
        )

    def _passing_gradients(self, visits: Sequence[int], *, is_first: bool, is_last: bool) -> tuple[Group, ...]:
        """Return the accumulators that visits lease one part at a time, with other use sites' accumulators to add.

        The backward fills the first use site's accumulator last, and then adds all other sites' accumulators to it.
        """
        groups: list[Group] = []
        for visit in visits:
            for name in self._trained_layouts_of(visit):
                uses = self._uses[name]
                others = range(1, len(uses)) if is_last and uses[0] == visit else ()
                of_parts = zip(*(self._part_keys(gradient_key(name, use), name) for use in others), strict=True)
                summed: list[Group] = [tuple((key, "r") for key in keys) for keys in of_parts]
                if self._leases_by_part(visit, name):
                    own = self._part_keys(gradient_key(name, uses.index(visit)), name)
                    summed = [
                        ((key, "w" if is_first else "rw"), *group)
                        for key, group in zip(own, summed or [()] * len(own), strict=True)
                    ]
                    if self._trace.visits[visit].is_head:  # its second pass runs in reverse
                        summed.reverse()
                groups += summed
        return tuple(groups)

    def _leases_by_part(self, visit: int, layout: str) -> bool:
        """Return whether a visit leases the parts of a layout one at a time."""
        return (visit, layout) in self._passing

    def _accepts_parts(self, visit: int, layout: str) -> bool:
        if layout not in self._parts or not self._graph.layouts[layout].first_rows:
            return False
        return self._graph.layouts[layout].entries[0].name in self._trace.visits[visit].by_part

    def _trained_layouts_of(self, visit: int) -> list[str]:
        return [name for name in self._layouts_of(visit) if self._graph.layouts[name].trainable]

    def _activations(self, visit: int, group: Sequence[int], mode: Mode) -> tuple[Group, ...]:
        """Return the activations that a visit writes or reads. Reused tensors are stored in blocks of earlier visits.

        The forward leases each activation separately. A recompute leases all activations of its micro-batch together.
        """
        traced = self._trace.visits[visit]
        places = [
            traced.reused.get(index, (visit, index))
            for index in range(len(traced.saved))
            if mode == "r" or index not in traced.reused
        ]
        keys = [[activation_key(at, self._slot_of(m), index) for at, index in places] for m in group if places]
        if mode == "r":
            return tuple(tuple((key, mode) for key in own) for own in keys)
        return tuple(((key, mode),) for own in keys for key in own)

    def _reused(self, visit: int, group: Sequence[int]) -> frozenset[str]:
        """Return the activations that earlier visits still need in their backward after this visit has read them."""
        places = self._trace.visits[visit].reused.values()
        return frozenset(activation_key(at, self._slot_of(m), index) for m in group for at, index in places)

    def _layouts_of(self, visit: int) -> tuple[str, ...]:
        return layouts_of_unit(self._graph, self._trace.visits[visit].unit)


def gathers_before(ticks: Sequence[Tick], weights: Sequence[Group], ahead: int) -> Iterator[list[Tick]]:
    """For each tick of a pass, yield a list of the gather ticks that run before it.

    Args:
        ticks: Forward, head and backward ticks in order.
        ahead: Number of ticks by which gathers run early; 0 to gather a weight just before the tick that needs it.
    """
    waiting = deque(
        Tick("gather", tick.visit, own, serves=_model_phase(tick)) for tick, own in zip(ticks, weights, strict=True)
    )
    for number in range(len(ticks)):
        due: list[Tick] = []
        while waiting and len(ticks) - len(waiting) <= number + ahead:
            gather = waiting.popleft()
            if gather.held:
                due.append(gather)
        yield due


def _blocks_of_kind(kind: str, group: Group) -> Group:
    """Return the group's blocks of one kind, ``weight`` or ``grad``."""
    return tuple((key, mode) for key, mode in group if kind_of_key(key) == kind)


def _is_added_to_held(group: Group) -> bool:
    """Return whether a group contains other use sites' gradients, which are added to a held gradient."""
    gradients = _blocks_of_kind("grad", group)
    return bool(gradients) and all(mode == "r" for _, mode in gradients)


def _model_phase(tick: Tick) -> ModelPhase:
    assert tick.phase in ("forward", "head", "backward"), tick
    return tick.phase
