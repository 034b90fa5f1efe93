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
    key_kind,
    part_keys,
    state_key,
    weight_key,
)
from megatrain.engine.program.block_plan import BlockPlan, FrozenWeights, Kind, weight_block
from megatrain.engine.program.step_program import Group, GroupUpdates, LayoutSplits, ModelPhase, StepProgram, Tick
from megatrain.engine.program.visit_trace import VisitTrace, layout_uses, unit_layouts
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
        self._uses = layout_uses(graph, trace)

        # State that is not elementwise needs whole parameters, so a layout with such state cannot be cut into parts.
        def is_elementwise(layout: UnitLayout) -> bool:
            return all(kind.has_weight_layout(layout) for kind in state_kinds)

        self._parts = {
            layout.name: layout.parts
            for layout in graph.layouts.values()
            if is_elementwise(layout) and len(layout.parts) > 1 and self._is_trained(layout)
        }
        self._updates = self._add_traffic(updates or GroupUpdates(), optimizer, is_elementwise)
        # With ranks, cut all weights, so that a rank's shards of weight, state and gradient have the same elements.
        self._cut_weights = frozenset(
            name
            for name in self._parts
            if not self._shards.is_local or all(self._can_use_parts(visit, name) for visit in self._uses[name])
        )
        # If the host updates weights while a device computes, each update overlaps a neighboring visit: deferred
        # updates run one tick earlier, and all other updates run one tick later.
        self._lead_ticks = int(compute_tier != "ram" and self._updates.overlaps_device)
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
            if self._can_use_parts(visit, layout)
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

    def _add_traffic(
        self, updates: GroupUpdates, optimizer: Optimizer | None, is_elementwise: Callable[[UnitLayout], bool]
    ) -> GroupUpdates:
        """Return ``updates`` with the number of matrix elements that each update sends to the device."""
        layouts = {
            index: layout for index, layout in enumerate(self._graph.layouts.values()) if self._is_trained(layout)
        }
        assert self._shards.is_local or all(map(is_elementwise, layouts.values())), "shards suffice only elementwise"
        if not isinstance(optimizer, MatrixOptimizer) or self._compute_tier == "ram":
            return updates
        sent_elements = {index: matrix_elements(optimizer, layout) for index, layout in layouts.items()}
        return replace(updates, sent_elements=sent_elements)

    # -- blocks ------------------------------------------------------------------------------------------------

    def _parameter_blocks(self) -> Iterator[BlockPlan]:
        for layout in self._graph.layouts.values():
            in_folder = self._frozen.in_folder and not layout.trainable
            if layout.name in self._cut_weights:
                key = weight_key(layout.name)
                yield from self._part_blocks(layout, key, "weights", layout.num_elements, self._graph.dtype)
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
                num_elements = layout.num_elements if kind.elements_of is None else kind.num_elements(layout)
                for block in self._part_blocks(layout, key, "optimizer", num_elements, kind.dtype):
                    yield replace(block, num_elements=kind.elements_for(block.num_elements))
            for use_site in range(len(self._uses[layout.name])):
                key = gradient_key(layout.name, use_site)
                yield from self._part_blocks(layout, key, "gradients", layout.num_elements, self._grad_dtype)

    def _part_blocks(
        self, layout: UnitLayout, key: str, kind: Kind, num_elements: int, dtype: torch.dtype
    ) -> Iterator[BlockPlan]:
        parts = self._parts.get(layout.name) or (range(num_elements),)
        sizes = [self._shards.num_elements(part) for part in parts]
        for part, size in zip(part_keys(key, len(sizes)), sizes, strict=True):
            yield BlockPlan(part, kind, size, dtype, key if len(sizes) > 1 else "")

    def _part_keys(self, key: str, layout: str) -> list[str]:
        return part_keys(key, len(self._parts.get(layout, ())) or 1)

    def _gradient_keys(self, layout: str, use_site: int) -> list[str]:
        return self._part_keys(gradient_key(layout, use_site), layout)

    def _activation_blocks(self) -> Iterator[BlockPlan]:
        for visit, visit_trace in enumerate(self._trace.visits):
            for micro_batch in range(self._num_micro_batches):
                for index, (shape, dtype) in enumerate(visit_trace.saved_inputs):
                    if index in visit_trace.aliases:
                        continue
                    key = activation_key(visit, self._slot_index(micro_batch), index)
                    yield BlockPlan(key, "activations", torch.Size(shape).numel(), dtype)

    def _is_trained(self, layout: UnitLayout) -> bool:
        """Return whether a layout is trainable and used by a visit. Only such layouts have gradients and state."""
        return layout.trainable and bool(self._uses[layout.name])

    def _slot_index(self, micro_batch: int) -> int:
        """Return which set of activation blocks a micro-batch uses; 0 if micro-batches run one at a time."""
        return micro_batch if self._order == "layer" else 0

    # -- ticks -------------------------------------------------------------------------------------------------

    def _ticks(self) -> Iterator[Tick]:
        micro_batches = list(range(self._num_micro_batches))
        groups = [micro_batches] if self._order == "layer" else [[micro_batch] for micro_batch in micro_batches]
        for index, group in enumerate(groups):
            is_first, is_last = index == 0, index == len(groups) - 1
            ticks: Iterable[Tick] = self._pass_ticks(group, is_first=is_first, is_last=is_last)
            if not self._shards.is_local:
                ticks = self._add_collectives(list(ticks))
            if is_first and self._updates.are_deferred:
                ticks = self._insert_deferred_updates(list(ticks))
            if is_last and not self._updates.are_deferred:
                ticks = self._insert_updates(ticks)
            yield from ticks

    def _add_collectives(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Add gather and exchange ticks, which take over the held blocks of the given ticks.

        The given ticks keep their passing blocks: activations, and parts that they gather and exchange themselves.
        """
        weights = [_filter_kind("weight", tick.held) for tick in ticks]
        for gathers, tick in zip(preceding_gathers(ticks, weights, self._sharding.gathers_ahead), ticks, strict=True):
            yield from gathers
            groups = tuple(group for group in tick.passing if not _is_added_to_held(group))
            yield replace(tick, held=(), passing=groups, spent=self._spent_keys(groups) & tick.spent)
            if gradients := _filter_kind("grad", tick.held):
                sums = tuple(self._exchange_groups(gradients))
                yield Tick("exchange", tick.visit, (), sums, self._spent_keys(sums), _model_phase(tick))

    def _exchange_groups(self, gradients: Group) -> Iterator[Group]:
        """Yield one group per accumulator. The first use site's groups also list other sites' accumulators to add."""
        sums: dict[str, Group] = {}
        for name, uses in self._uses.items():
            keys = [self._gradient_keys(name, use_site) for use_site in range(len(uses))]
            sums.update((target, tuple((key, "r") for key in addends)) for target, *addends in zip(*keys, strict=True))
        for key, mode in gradients:
            yield ((key, mode), *sums.get(key, ()))

    def _insert_updates(self, ticks: Iterable[Tick]) -> Iterator[Tick]:
        """Insert each update into the ticks of the last pass, after the tick that completes its gradient."""
        pending: deque[list[Tick]] = deque([] for _ in range(self._lead_ticks))
        for tick in ticks:
            yield tick
            written_keys = {key for key, mode in tick.uses if mode != "r"}
            # The backward reaches the first use site of a shared layout last, and adds the other gradients there.
            updates = [
                self._update_tick(index, layout)
                for index, layout in enumerate(self._graph.layouts.values())
                if self._is_trained(layout) and self._gradient_keys(layout.name, 0)[0] in written_keys
            ]
            pending.append(updates)
            yield from pending.popleft()
        for updates in pending:
            yield from updates

    def _insert_deferred_updates(self, ticks: Sequence[Tick]) -> Iterator[Tick]:
        """Insert deferred updates into the ticks of the first pass, ``_lead_ticks`` before a weight's first use."""
        updates: dict[int, list[Tick]] = {}
        for index, layout in enumerate(self._graph.layouts.values()):
            if self._is_trained(layout):
                weight = self._weight_keys(layout.name)[0]
                first_use = next(i for i, tick in enumerate(ticks) if weight in dict(tick.uses))
                updates.setdefault(max(0, first_use - self._lead_ticks), []).append(self._update_tick(index, layout))
        for position, tick in enumerate(ticks):
            yield from updates.get(position, ())
            yield tick

    def _pass_ticks(self, group: Sequence[int], *, is_first: bool, is_last: bool) -> Iterator[Tick]:
        """Yield the ticks of forward, head and backward over one group of micro-batches."""
        trunk = [visit for visit in range(len(self._trace.visits)) if not self._trace.visits[visit].is_head]
        head = [visit for visit in range(len(self._trace.visits)) if self._trace.visits[visit].is_head]
        for visit in trunk:
            groups = (*self._passing_weights(visit), *self._activations(visit, group, "w"))
            yield Tick("forward", visit, self._held_weights(visit), groups)
        if head:
            held_blocks = [item for visit in head for item in self._held_weights(visit)]
            weights = [item for visit in head for item in self._passing_weights(visit)]
            if weights:  # two passes over the parts, for the loss and for the gradients
                yield Tick("head", head[0], tuple(dict(held_blocks).items()), tuple(weights))
            held_blocks += [item for visit in head for item in self._held_gradients(visit, is_first=is_first)]
            sums = self._passing_gradients(head, is_first=is_first, is_last=is_last)
            spent_keys = self._spent_keys(sums)
            if weights:
                sums = tuple((*weight, *group) for weight, group in zip(reversed(weights), sums, strict=True))
            yield Tick("head", head[0], tuple(dict(held_blocks).items()), sums, spent_keys)
        for visit in reversed(trunk):
            activations = self._activations(visit, group, "r")
            has_backward = self._trace.visits[visit].has_backward
            weights = list(self._passing_weights(visit)) if has_backward else []
            sums = self._passing_gradients([visit], is_first=is_first, is_last=is_last)
            yield Tick(
                "backward",
                visit,
                (self._held_weights(visit) if has_backward else ()) + self._held_gradients(visit, is_first=is_first),
                (*weights, *activations, *sums),
                self._spent_keys((*activations, *sums)) - self._shared_keys(visit, group),
            )

    @staticmethod
    def _spent_keys(groups: Iterable[Group]) -> frozenset[str]:
        """Return the keys of activations and added gradients, which are not needed after they are read."""
        return frozenset(key for group in groups for key, mode in group if mode == "r")

    def _update_tick(self, index: int, layout: UnitLayout) -> Tick:
        weights: Group = tuple((key, "rw") for key in self._weight_keys(layout.name))
        gradients = self._gradient_keys(layout.name, 0)
        states = [self._part_keys(state_key(layout.name, kind.name), layout.name) for kind in self._state_kinds]
        groups: list[Group] = [
            (*((key, "rw") for key in keys), (gradient, "r"))
            for gradient, *keys in zip(gradients, *states, strict=True)
        ]
        spent_keys = frozenset(gradients)
        if len(groups) == 1:
            return Tick("update", index, (*weights, *groups[0]), spent=spent_keys)
        if layout.name in self._cut_weights:
            groups = [(weight, *group) for weight, group in zip(weights, groups, strict=True)]
            return Tick("update", index, (), tuple(groups), spent_keys)
        return Tick("update", index, weights, tuple(groups), spent_keys)

    def _held_weights(self, visit: int) -> Group:
        """Return the weights that a visit leases for its whole tick."""
        return tuple(
            (key, "r")
            for name in self._visit_layouts(visit)
            if not self._is_passing_weight(visit, name)
            for key in self._weight_keys(name)
        )

    def _passing_weights(self, visit: int) -> tuple[Group, ...]:
        """Return the parts of weights that a visit leases one at a time."""
        names = [name for name in self._visit_layouts(visit) if self._is_passing_weight(visit, name)]
        return tuple(((key, "r"),) for name in names for key in self._weight_keys(name))

    def _is_passing_weight(self, visit: int, layout: str) -> bool:
        return layout in self._cut_weights and self._is_passing(visit, layout)

    def _weight_keys(self, layout: str) -> list[str]:
        key = weight_key(layout)
        return self._part_keys(key, layout) if layout in self._cut_weights else [key]

    def _held_gradients(self, visit: int, *, is_first: bool) -> Group:
        """Return the accumulators that a visit leases for its whole tick."""
        return tuple(
            (key, "w" if is_first else "rw")
            for name in self._trained_layouts(visit)
            if not self._is_passing(visit, name)
            for key in self._gradient_keys(name, self._uses[name].index(visit))
        )

    def _passing_gradients(self, visits: Sequence[int], *, is_first: bool, is_last: bool) -> tuple[Group, ...]:
        """Return the accumulators that visits lease one part at a time, with other use sites' accumulators to add.

        The backward fills the first use site's accumulator last, and then adds all other sites' accumulators to it.
        """
        groups: list[Group] = []
        for visit in visits:
            for name in self._trained_layouts(visit):
                uses = self._uses[name]
                other_uses = range(1, len(uses)) if is_last and uses[0] == visit else ()
                keys_by_part = zip(*(self._gradient_keys(name, use_site) for use_site in other_uses), strict=True)
                sums: list[Group] = [tuple((key, "r") for key in keys) for keys in keys_by_part]
                if self._is_passing(visit, name):
                    site_keys = self._gradient_keys(name, uses.index(visit))
                    sums = [
                        ((key, "w" if is_first else "rw"), *group)
                        for key, group in zip(site_keys, sums or [()] * len(site_keys), strict=True)
                    ]
                    if self._trace.visits[visit].is_head:  # the head's second pass runs in reverse
                        sums.reverse()
                groups += sums
        return tuple(groups)

    def _is_passing(self, visit: int, layout: str) -> bool:
        """Return whether a visit leases the parts of a layout one at a time."""
        return (visit, layout) in self._passing

    def _can_use_parts(self, visit: int, layout: str) -> bool:
        if layout not in self._parts or not self._graph.layouts[layout].first_rows:
            return False
        return self._graph.layouts[layout].entries[0].name in self._trace.visits[visit].partwise_params

    def _trained_layouts(self, visit: int) -> list[str]:
        return [name for name in self._visit_layouts(visit) if self._graph.layouts[name].trainable]

    def _activations(self, visit: int, group: Sequence[int], mode: Mode) -> tuple[Group, ...]:
        """Return the activations that a visit writes or reads. Reused tensors are stored in blocks of earlier visits.

        The forward leases each activation separately. A recompute leases all activations of its micro-batch together.
        """
        inputs, aliases = self._trace.visits[visit].saved_inputs, self._trace.visits[visit].aliases
        sources = [
            aliases.get(index, (visit, index)) for index in range(len(inputs)) if mode == "r" or index not in aliases
        ]
        keys = [
            [activation_key(owner, self._slot_index(m), index) for owner, index in sources] for m in group if sources
        ]
        if mode == "r":
            return tuple(tuple((key, mode) for key in group_keys) for group_keys in keys)
        return tuple(((key, mode),) for group_keys in keys for key in group_keys)

    def _shared_keys(self, visit: int, group: Sequence[int]) -> frozenset[str]:
        """Return the activations that earlier visits still need in their backward after this visit has read them."""
        sources = self._trace.visits[visit].aliases.values()
        return frozenset(activation_key(owner, self._slot_index(m), index) for m in group for owner, index in sources)

    def _visit_layouts(self, visit: int) -> tuple[str, ...]:
        return unit_layouts(self._graph, self._trace.visits[visit].unit)


def preceding_gathers(ticks: Sequence[Tick], weights: Sequence[Group], num_ahead: int) -> Iterator[list[Tick]]:
    """For each tick of a pass, yield a list of the gather ticks that run before it.

    Args:
        ticks: Forward, head and backward ticks in order.
        num_ahead: Number of ticks by which gathers run early; 0 to gather a weight just before the tick that needs it.
    """
    pending = deque(
        Tick("gather", tick.visit, group, served_phase=_model_phase(tick))
        for tick, group in zip(ticks, weights, strict=True)
    )
    for index in range(len(ticks)):
        gathers: list[Tick] = []
        while pending and len(ticks) - len(pending) <= index + num_ahead:
            gather = pending.popleft()
            if gather.held:
                gathers.append(gather)
        yield gathers


def _filter_kind(kind: str, group: Group) -> Group:
    """Return the group's blocks of one kind, ``weight`` or ``grad``."""
    return tuple((key, mode) for key, mode in group if key_kind(key) == kind)


def _is_added_to_held(group: Group) -> bool:
    """Return whether a group contains other use sites' gradients, which are added to a held gradient."""
    gradients = _filter_kind("grad", group)
    return bool(gradients) and all(mode == "r" for _, mode in gradients)


def _model_phase(tick: Tick) -> ModelPhase:
    assert tick.phase in ("forward", "head", "backward"), tick
    return tick.phase
