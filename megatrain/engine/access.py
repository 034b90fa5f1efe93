"""Blocks of a store as the running model asks for them: `StoreAccess` takes the next op from the tape, leases the op's
blocks from the store, and does with each copy afterwards what the tape says. Nothing is decided here: what is leased
where, fetched, pinned or evicted is on the tape, compiled before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from megatrain.base.layout import InPieces, Piece, UnitLayout, views, views_of_parts
from megatrain.base.progress import Activity
from megatrain.engine.background import BackgroundUpdates
from megatrain.engine.host_io import read_numbers
from megatrain.engine.program import (
    activation_key,
    attention_key,
    cache_key,
    decoded_bytes,
    layouts_of_unit,
    uses_of_layouts,
)
from megatrain.engine.tape import Op, Pinned, Tape, TapeStore, Use, compile_step
from megatrain.engine.updates import PendingUpdate
from megatrain.engine.weight_gradients import GradientAccumulator, LaneAccumulator
from megatrain.optim.base import Update
from megatrain.optim.clip import (
    SquaredNorm,
    sum_gradients,
)

if TYPE_CHECKING:
    from megatrain.base.timeline import Timeline
    from megatrain.engine.program import GradientSink, MatrixParts, ModelPhase, Phase
    from megatrain.engine.streamed import StreamedModel
    from megatrain.engine.updates import LayerScales, Updater
    from megatrain.models.graph import Unit
    from megatrain.optim.threads import KernelThreads
    from megatrain.ranks.lanes import Lanes
    from tiered import Mode, TieredStore

__all__ = ["CountedTotal", "StoreAccess", "fp32_like", "zero_gaps"]

#: Name, total and count of a part of a mean: a total on a device has not been read yet.
CountedTotal = tuple[str, torch.Tensor | float, int]


class DecodedWeights:
    """Room for the weights that a visit makes of what their blocks hold. Used by one thread.

    It is one buffer for a whole step: from layer to layer the allocator of a device would be asked for large pieces of
    changing sizes between small ones, and take more than there is planned for.

    Args:
        nbytes: room for the visit that decodes most.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._taken = nbytes, 0
        self._buffer: torch.Tensor | None = None

    @contextmanager
    def room(self, nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield room for weights, uint8 [nbytes]. Last in, first out."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        before, self._taken = self._taken, self._taken + nbytes
        assert self._taken <= self._nbytes, (self._taken, self._nbytes)
        try:
            yield self._buffer[before : self._taken]
        finally:
            self._taken = before

    def free(self) -> None:
        """Give the room back until the next visit."""
        assert not self._taken, "weights are in use"
        self._buffer = None


class StoreAccess:
    """Executes the tape of a step on a store, op by op; the ``BlockAccess`` of the running model.

    Used by one thread, the one that runs the step.

    Args:
        store: holds the blocks.
        model: what runs, by the ticks of its program.
        threads: of gradient sums and norms.
        updater: makes the updates of the program; None: it has none.
        timeline: records every op; None: nothing is recorded.
        activity: progress within the step, for status.

    Attributes:
        own_phases: of the ops that the running model does not announce.
        squared_norms: of the gradients, by layout. On a device a scalar there: reading it would be a host sync in the
            middle of the step.
        with_gradient: layout -> parameters that got a gradient in this step.
        num_tokens: of the next step; None: they reach all experts.
        window_bytes: the most that full copies, sums and what was received took together; of one process none.
        update_window_bytes: the most that updates of shared matrices took beside their blocks.
        background: runs updates beside the layers. The caller of ``start_step`` leaves it when the step is over.
    """

    own_phases: frozenset[Phase] = frozenset({"update"})

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        threads: KernelThreads,
        updater: Updater | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        graph, trace, program, homes = model.graph, model.trace, model.program, model.homes
        self._store, self._graph, self._program, self._stays = store, graph, program, model.stays
        self._reused = [traced.reused for traced in trace.visits]
        self._homes, self._copies = homes, TapeStore(store, homes)
        self._uses_of_layouts = uses_of_layouts(graph, trace)
        self._unit_of_visit = [traced.unit for traced in trace.visits]
        self._ticks_of: dict[tuple[str, int], list[int]] = {}
        for number, tick in enumerate(program.ticks):
            self._ticks_of.setdefault((tick.phase, tick.visit), []).append(number)
        self._chances = {n: v.chance_of_no_token for n, v in enumerate(trace.visits) if v.chance_of_no_token}
        self.num_tokens: int | None = None
        self._threads = threads
        self._updater, self._timeline = updater, timeline
        self._activity = activity or Activity()
        layouts = tuple(graph.layouts)
        self._unit_names = {
            (tick.phase, tick.visit): layouts[tick.visit]
            if tick.phase == "update"
            else graph.units[trace.visits[tick.visit].unit].name
            for tick in program.ticks
        }
        self._tapes: dict[tuple[bool, bool, frozenset[tuple[str, Pinned]]], Tape] = {}  # a run has two or three
        self._pinned: Mapping[str, Pinned] = {}  # left by the tape before
        self._pending: PendingUpdate | None = None  # what the tape's updates are made with
        self._first_tick = 0
        self._ops: Iterator[Op] = iter(())
        self._op: Op | None = None
        self._uses: Mapping[str, Use] = {}  # of the present op, by key; a gradient's own where it shares a block
        self._filled: dict[str, dict[int, set[str]]] = {}  # layout -> use site -> parameters with a gradient
        self._norms: dict[str, SquaredNorm] = {}  # of layouts whose gradients are being summed
        self._shapes: dict[str, torch.Size] = {}
        self.background = BackgroundUpdates()
        self._decoded = DecodedWeights(decoded_bytes(graph, trace, program))
        self.squared_norms: dict[str, float | torch.Tensor] = {}
        self.window_bytes = self.update_window_bytes = 0
        self.with_gradient: dict[str, set[str]] = {}

    # -- the tape ----------------------------------------------------------------------------------------------

    def start_step(
        self,
        step: int,
        pending: PendingUpdate | None = None,
        *,
        immediate: Update | None = None,
        scales: LayerScales | None = None,
    ) -> None:
        """Begin a step.

        Args:
            step: counted from 0; numbers the ticks as the schedule does.
            pending: the update that the step before left, where updates are deferred.
            immediate: the update of this step, where they are not.
            scales: of the layers' gradients in an immediate update.
        """
        if self._program.updates.are_deferred and pending is None:
            self.finish()  # pinned for updates that will not come: the plan of this step has no room for them
        self._start(step, updates=pending is not None, passes=True)
        self._filled = {name: {use: set() for use in range(len(uses))} for name, uses in self._uses_of_layouts.items()}
        self.squared_norms, self.with_gradient = {}, {}
        # An immediate update reads `with_gradient` while the backward fills it, each layout after its last gradient.
        self._pending = pending if immediate is None else PendingUpdate(step, immediate, self.with_gradient, scales)

    def run_updates(self, pending: PendingUpdate) -> None:
        """Make the updates that a step left, without beginning another one."""
        with self.background:
            self._start(pending.step + 1, updates=True, passes=False)
            self._pending = pending
            self.end_step()

    def finish(self) -> None:
        """Evict the copies that are pinned for another step."""
        self._copies.evict_pinned()
        self._pinned = {}

    def end_step(self) -> None:
        """Make the updates that come last; every other op must have run."""
        while (op := self._next_op()) is not None:
            assert op.phase in self.own_phases, f"the step ended before {op}"
            self._decoded.free()
            self._run(op)
        self._decoded.free()

    def _start(self, step: int, *, updates: bool, passes: bool) -> None:
        self._first_tick = step * len(self._program.ticks)
        kind = (updates, passes, frozenset(self._pinned.items()))
        if kind not in self._tapes:
            self._tapes[kind] = compile_step(
                self._program, self._homes, self._stays, updates=updates, passes=passes, pinned=self._pinned
            )
        self._ops, self._pinned = iter(self._tapes[kind].ops), self._tapes[kind].pinned
        if self._chances and passes:
            self._hold_back(self._first_tick)
            self._hold_back(self._first_tick + len(self._program.ticks))  # what comes next is fetched ahead as well

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Go to the op of a visit, running those before it that the model does not announce."""
        while (op := self._next_op()) is not None and op.phase in self.own_phases:
            self._run(op)
        assert op is not None, f"the step is over before {phase} {visit}"
        assert (op.phase, op.visit) == (phase, visit), f"planned {op.phase} {op.visit}, not {phase} {visit}"

    def _next_op(self) -> Op | None:
        """Go to the next op; None after the last one."""
        self._op = next(self._ops, None)
        self._uses = {}
        if self._op is not None:
            tick = self._op.tick
            self._uses = {self._program.contents(tick, use.key).key: use for use in self._op.uses}
            self.background.wait_for([use.key for use in self._op.uses])
            # Before the leases of the op: the prefetcher looks ahead from this tick.
            self._store.advance(self._first_tick + self._op.tick)
            unit = self._unit_names[self._op.phase, self._op.visit]
            self._activity.come_to(self._op.tick, self._op.phase, unit)
        if self._timeline is not None:
            self._timeline.on_op(self._op)
        return self._op

    def _run(self, op: Op) -> None:
        """Run an op that the model does not announce."""
        self._update(op)

    def _update(self, op: Op) -> None:
        assert self._updater is not None and self._pending is not None, f"no update to make: {op}"
        name = self._updater.trained[op.visit][0].name
        update = self._pending.of_layout(name)
        parts = self._program.parts_of(self._updater.trained[op.visit][0])
        if update is not None and self._is_beside_device(op):
            self._update_in_background(op, update, len(parts), self._pending.with_gradient[name])
            return
        if op.tier == "ram":
            self.background.wait()  # room is planned for what one update on the host takes beside its blocks
        # Leased also where the gradient is not used: what moves in a step does not depend on the data.
        with self._leases(self._own_keys(op, op.held)) as held:
            for part, group in enumerate(op.passing or [()] * len(parts)):
                with self._leases(self._own_keys(op, group)) as passing:
                    if update is not None:
                        filled = self._pending.with_gradient[name]
                        self._updater.update(op.visit, part, op.tier, {**held, **passing}, update, filled)

    def _is_beside_device(self, op: Op) -> bool:
        """Return whether an update on the host may go on while a device computes the layers that follow it.

        Only where all its blocks are at home there: then leases that are held longer take no room from others. Products
        of matrices on the device are queued on streams of this thread.
        """
        assert self._updater is not None
        is_at_home = all(self._homes[use.key] == op.tier for use in op.uses)
        return op.tier == "ram" != self._program.compute_tier and is_at_home and self._updater.matrices is None

    def _update_in_background(self, op: Op, update: Update, num_parts: int, filled: Container[str]) -> None:
        """Start an update that waits for no room.

        Leased here, at its place in the tape: from here on nobody can fetch or change the blocks but the update. They
        are given back where it ends, so that the weights can set out for the device at once.
        """
        updater, leases = self._updater, ExitStack()
        assert updater is not None and not op.passing, op
        tensors = leases.enter_context(self._leases(self._own_keys(op, op.held)))

        def run() -> None:
            with leases:
                for part in range(num_parts):
                    updater.update(op.visit, part, op.tier, tensors, update, filled)

        self.background.start([use.key for use in op.held], run)

    def _own_keys(self, op: Op, uses: Iterable[Use]) -> list[str]:
        """Return the keys of what an op's blocks hold."""
        return [self._program.contents(op.tick, use.key).key for use in uses]

    @contextmanager
    def _leases(self, keys: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Lease blocks of the present op together, then release them as the tape says; yield tensors by key.

        Args:
            keys: of blocks; a gradient that shares one goes by its own key, and its tensor is as long as it is.
        """
        assert self._op is not None, "no op has begun, or the step is over"
        if not keys:
            yield {}
            return
        uses, tier, tick = [self._uses[key] for key in keys], self._op.tier, self._op.tick
        with self._store.acquire_many([(use.key, tier, use.mode) for use in uses]) as group:
            self._copies.leased(uses)
            tensors: dict[str, torch.Tensor] = {}
            for lease in group:
                contents, tensor = self._program.contents(tick, lease.key), lease.tensor
                is_whole = len(tensor) == contents.num_elements
                tensors[contents.key] = tensor if is_whole else tensor.narrow(0, 0, contents.num_elements)
            yield tensors
        # After the leases: an eviction writes back, and may read a copy only when nothing writes it any more.
        self._copies.released(uses, tier)

    # -- weights -----------------------------------------------------------------------------------------------

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, torch.Tensor | MatrixParts]]:
        """Yield the unit's parameters by full name: views of the leased slots, or of what is decoded from these."""
        program = self._program
        layouts = [self._graph.layouts[name] for name in layouts_of_unit(self._graph, unit.index)]
        passing = {layout.name for layout in layouts if program.passes_weight(visit, layout.name)}
        held = [key for layout in layouts if layout.name not in passing for key in program.weight_keys(layout)]
        with self._leases(held) as blocks, ExitStack() as decoded:
            tensors: dict[str, torch.Tensor | MatrixParts] = {}
            for layout in layouts:
                if program.decoded_bytes(visit, layout):
                    tensors.update(decoded.enter_context(self._decoded_weights(layout, visit, blocks)))
                elif layout.name in program.cuts.weights:
                    keys = program.weight_keys(layout)
                    tensors[layout.entries[0].name] = LeasedParts(layout, keys, blocks, self._leases)
                else:
                    (key,) = program.weight_keys(layout)
                    tensors.update(views(blocks[key], layout))
            yield tensors

    @contextmanager
    def _decoded_weights(
        self, layout: UnitLayout, visit: int, blocks: Mapping[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor | MatrixParts]]:
        """Yield the parameters of a layout whose blocks do not hold them as they are.

        Args:
            layout: Layout of the weights.
            visit: The visit that uses them.
            blocks: What is leased already, by key: all blocks of the layout, or none.
        """
        program, keys = self._program, self._program.weight_keys(layout)
        name, is_cut = layout.entries[0].name, layout.name in program.cuts.weights

        @contextmanager
        def lease(own: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
            (key,) = own
            with self._leases(own) as leased, self._decode(layout, visit, leased) as part:
                yield {key: part}

        if keys[0] not in blocks:
            yield {name: LeasedParts(layout, keys, {}, lease)}
            return
        with self._decode(layout, visit, {key: blocks[key] for key in keys}) as whole:
            if is_cut:
                parts = [whole[part.start : part.stop] for part in program.parts_of(layout)]
                yield {name: LeasedParts(layout, keys, dict(zip(keys, parts, strict=True)), lease)}
            else:
                yield dict(views(whole, layout))

    @contextmanager
    def _decode(self, layout: UnitLayout, visit: int, leased: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the weights of some leased blocks of a layout, one after the other in one flat tensor."""
        program, encoding = self._program, self._program.encodings[layout.name]
        lengths = dict(zip(program.weight_keys(layout), map(len, program.weight_parts_of(layout)), strict=True))
        device, stop = next(iter(leased.values())).device, 0
        with self._decoded.room(program.decoded_bytes(visit, layout), device) as room:
            weights = room.view(encoding.dtype)
            for key, block in leased.items():
                start, stop = stop, stop + lengths[key]
                encoding.decode(block, weights[start:stop])
            yield weights[:stop]

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Leave the unit's weights where they are: no token goes to it."""
        assert self._op is not None, "no op has begun, or the step is over"
        for key in self._whole_weights(unit.index):
            self._copies.skipped(self._uses[key], self._op.tier)

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Have nothing fetched for visits that will leave their weights where they are, and the weights of others."""
        assert self._op is not None, "no op has begun, or the step is over"
        unused: list[tuple[int, str]] = []
        used: list[tuple[int, str]] = []
        for visit in visits:
            keys = self._whole_weights(self._unit_of_visit[visit])
            for phase in ("forward", "backward"):
                ticks = self._ticks_of.get((phase, visit), ())
                tick = next((tick for tick in ticks if tick >= self._op.tick), None)  # of this group of micro-batches
                if tick is not None:
                    found = unused if visit in idle else used
                    found += [(self._first_tick + tick, key) for key in keys]
        self._store.pass_over(unused, but_not=used)

    def _hold_back(self, first_tick: int) -> None:
        """Have no weights fetched ahead, before their layer is reached, of experts that more likely get no token."""
        if self.num_tokens is None:
            return
        unlikely = [visit for visit, chance in self._chances.items() if chance**self.num_tokens > 1 / 2]
        held = [
            (first_tick + tick, key)
            for visit in unlikely
            for key in self._whole_weights(self._unit_of_visit[visit])
            for tick in self._ticks_of.get(("forward", visit), ())
        ]
        self._store.pass_over(held)

    def _whole_weights(self, unit: int) -> list[str]:
        """Return the keys of the weights of a unit whose parts are leased together."""
        layouts = [self._graph.layouts[name] for name in layouts_of_unit(self._graph, unit)]
        return [key for layout in layouts for key in self._program.weight_keys(layout)]

    # -- gradients ---------------------------------------------------------------------------------------------

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientSink]:
        """Yield the accumulators of this use site; sum all sites of a layout when its last one is complete."""
        names = [n for n in layouts_of_unit(self._graph, unit.index) if self._graph.layouts[n].trainable]
        layouts = {name: self._graph.layouts[name] for name in names}
        own = {
            name: self._program.gradient_keys(layout, self._uses_of_layouts[name].index(visit))
            for name, layout in layouts.items()
        }
        passing_names = {name for name in names if (visit, name) in self._program.cuts.passing}
        by_part = [layouts[name] for name in names if name in passing_names]
        names = [name for name in names if name not in passing_names]
        with self._leases([key for name in names for key in own[name]]) as tensors:
            sums = {name: [_fp32_sum(tensors[key], self._uses[key].mode) for key in own[name]] for name in names}
            added = set().union(*(self._filled_at(name, visit) for name in names))
            first = GradientAccumulator(self._targets(sums), added)

            def room() -> GradientAccumulator:
                return GradientAccumulator(
                    self._targets({name: [fp32_like(tensors[key]) for key in own[name]] for name in names}), set()
                )

            accumulator = LaneAccumulator(self._program.sharding.own_lanes, first, room)
            if by_part:
                passing = {
                    layout.entries[0].name: PassingGradient(self, layout, visit, own[layout.name]) for layout in by_part
                }
                sink = PartwiseAccumulator(accumulator if names else None, passing)
                yield sink
                sink.close()
            else:
                yield accumulator
            accumulator.close()
            del accumulator, first  # with the sums that are no blocks
            # Still inside the leases: this writes the blocks, and the norm reads them while they are here.
            for name in names:
                self._close_use(name, visit, sums.pop(name), [tensors[key] for key in own[name]], own[name], added)

    def _targets(self, sums: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor | InPieces]:
        """Return the views of parameters in the memory of gradients, by layout and part."""
        targets: dict[str, torch.Tensor | InPieces] = {}
        for name, parts in sums.items():
            layout = self._graph.layouts[name]
            targets.update(views_of_parts(parts, self._program.parts_of(layout), layout))
        return targets

    @property
    def lanes(self) -> Lanes:
        """In which gradients of micro-batches are added."""
        return self._program.sharding.own_lanes

    @contextmanager
    def gradient_part(self, layout: UnitLayout, visit: int, number: int, key: str) -> Iterator[list[torch.Tensor]]:
        """Yield memory for the fp32 sums of one part of a gradient; afterwards the block has that of all use sites.

        There is a sum for each node of the tree of lanes that is left to this process; of all lanes it is one.
        """
        uses, mode = self._uses_of_layouts[layout.name], self._uses[key].mode
        others = [self._program.gradient_keys(layout, use)[number] for use in range(1, len(uses))]
        is_summed = visit == uses[0] and all(other in self._uses for other in others)
        with self._leases([key, *(others if is_summed else ())]) as tensors:
            total = _fp32_sum(tensors[key], mode)
            if mode == "w":  # the block came without contents
                total.zero_()
            yield [total]
            if total is not tensors[key]:
                tensors[key].copy_(total)
                del total
            if is_summed:
                self._sum_part(layout, number, tensors[key], [tensors[other] for other in others])

    @contextmanager
    def open_sums(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield what makes memory for open sums of lanes that are not left in the end, each like a given one."""
        yield torch.empty_like

    def note_filled(self, layout: UnitLayout, visit: int, name: str) -> None:
        """Note that a parameter got a gradient at a use site."""
        self._filled_at(layout.name, visit).add(name)

    def sum_is_complete(self, layout: UnitLayout, visit: int) -> None:
        """Take the norm of a gradient whose parts have all been summed, if this is the use site that sums them."""
        if visit == self._uses_of_layouts[layout.name][0] and layout.name in self._norms:
            self.with_gradient[layout.name] = set().union(*self._filled[layout.name].values())
            self.squared_norms[layout.name] = self._norms.pop(layout.name).total()
            if self._pending is not None and self._pending.scales is not None:
                self._pending.scales.is_complete(layout.name, self.squared_norms[layout.name])

    def _filled_at(self, name: str, visit: int) -> set[str]:
        return self._filled[name][self._uses_of_layouts[name].index(visit)]

    def _close_use(
        self,
        name: str,
        visit: int,
        totals: list[torch.Tensor],
        blocks: Sequence[torch.Tensor],
        keys: Sequence[str],
        added: set[str],
    ) -> None:
        layout = self._graph.layouts[name]
        self._filled_at(name, visit).update(entry.name for entry in layout.entries if entry.name in added)
        if self._uses[keys[0]].mode == "w":  # the blocks came without contents
            zero_gaps(totals, self._program.parts_of(layout), layout, self._filled_at(name, visit))
        for total, block in zip(totals, blocks, strict=True):
            if total is not block:
                block.copy_(total)
        totals.clear()
        # The backward reaches the first use site last: now the sums of all of them are complete.
        if visit == self._uses_of_layouts[name][0]:
            self._sum_uses(layout, blocks)

    def _sum_uses(self, layout: UnitLayout, blocks: Sequence[torch.Tensor]) -> None:
        """Add the other use sites' gradients, in forward order, and take the norm of the sum."""
        name = layout.name
        others = [self._program.gradient_keys(layout, use) for use in range(1, len(self._uses_of_layouts[name]))]
        if others and others[0][0] not in self._uses:
            return  # micro-batches one at a time, and this is not the last one
        for part, block in enumerate(blocks):
            with self._leases([keys[part] for keys in others]) as tensors:
                self._sum_part(layout, part, block, [tensors[keys[part]] for keys in others])
        self.sum_is_complete(layout, self._uses_of_layouts[name][0])

    def _sum_part(self, layout: UnitLayout, part: int, block: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Add the other use sites' part of a gradient to the first one's, and take its norm."""
        for other in others:
            if block.is_cuda:
                block.add_(other)
            else:
                sum_gradients(block, other, self._threads)
        self._norms.setdefault(layout.name, SquaredNorm(self._threads)).add(part, block)

    def agree(
        self, layouts: Sequence[UnitLayout], terms: Sequence[torch.Tensor], figures: Sequence[CountedTotal]
    ) -> tuple[list[float], list[tuple[str, float, int]]]:
        """Read what a step has computed, with one host sync.

        Args:
            layouts: Those whose gradients are complete; afterwards their norms are numbers.
            terms: Scalars whose sum is the loss.
            figures: Totals of preferences.

        Returns:
            The terms, and the figures with their totals as numbers.
        """
        squares = [self.squared_norms[layout.name] for layout in layouts]
        numbers = iter(read_numbers([*terms, *(total for _, total, _ in figures), *squares]))
        read = [next(numbers) for _ in terms]
        found = [(name, next(numbers), count) for name, _, count in figures]
        self.squared_norms.update(zip([layout.name for layout in layouts], numbers, strict=True))
        return read, found

    # -- activations -------------------------------------------------------------------------------------------

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        """Copy a unit's input into its block, which may be offloaded until the backward."""
        key = self._activation(visit, micro_batch, index, tensor.numel())
        with self._leases([key]) as tensors:
            tensors[key][: tensor.numel()].copy_(tensor.detach().reshape(-1))
            self._shapes[key] = tensor.shape

    def reuse_activation(self, visit: int, micro_batch: int, index: int, place: tuple[int, int]) -> None:
        """Check that the plan has no block for an input that an earlier visit saved."""
        assert self._reused[visit].get(index) == place, (visit, index, place)

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[torch.Tensor]:
        """Yield what `put_activation` copied, same shape and bits; its contents are dead after its own visit."""
        key = self._activation(visit, micro_batch, index, 0)
        shape = self._shapes[key]
        with self._leases([key]) as tensors:
            yield tensors[key][: shape.numel()].view(shape)

    @contextmanager
    def attention_room(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor]:
        """Lease the block of attention's results: to write in a forward, to read in its backward, dead afterwards."""
        key = attention_key(visit, micro_batch)
        if key not in self._program.blocks:  # micro-batches one at a time have one set of blocks
            key = attention_key(visit, 0)
        with self._leases([key]) as tensors:
            yield tensors[key]

    @contextmanager
    def cache_room(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor | None]:
        """Lease the block of what a generation's cache holds of a visit and a micro-batch, if it holds anything."""
        key = cache_key(visit, micro_batch)
        if key not in self._program.blocks:
            yield None
            return
        with self._leases([key]) as tensors:
            yield tensors[key]

    def _activation(self, visit: int, micro_batch: int, index: int, num_elements: int) -> str:
        key = activation_key(visit, micro_batch, index)
        block = self._program.blocks.get(key) or self._program.blocks[activation_key(visit, 0, index)]
        assert num_elements <= block.num_elements, f"{key}: {num_elements} elements, planned {block.num_elements}"
        return block.key


class LeasedParts:
    """A weight that is cut; ``MatrixParts``.

    Args:
        layout: of the matrix alone.
        keys: of the parts.
        held: blocks that are leased already, by key: all of the parts or none.
        lease: leases others.
    """

    def __init__(
        self,
        layout: UnitLayout,
        keys: Sequence[str],
        held: Mapping[str, torch.Tensor],
        lease: Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]],
    ) -> None:
        self._keys, self._held, self._lease = keys, held, lease
        self.shape, self.rows = layout.entries[0].shape, rows_of_parts(layout)
        self.passes = keys[0] not in held

    @contextmanager
    def part(self, number: int) -> Iterator[torch.Tensor]:
        """Yield the rows of a part."""
        key, shape = self._keys[number], (len(self.rows[number]), self.shape[1])
        if not self.passes:
            yield _matrix(self._held[key], shape)
            return
        with self._lease([key]) as blocks:
            yield _matrix(blocks[key], shape)


def rows_of_parts(layout: UnitLayout) -> list[range]:
    """Return the rows of each part of a layout of one matrix."""
    first = layout.first_rows
    stops = (*first[1:], layout.entries[0].shape[0])
    return [range(start, stop) for start, stop in zip(first, stops, strict=True)]


def _matrix(block: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a part's rows; a block may end with padding."""
    return block[: shape[0] * shape[1]].view(shape)


class PassingGradient:
    """The gradient of one matrix at one use site, whose parts are leased one after the other.

    Args:
        access: leases them.
        layout: of the matrix alone.
        visit: of the use site.
        keys: of the parts.
    """

    def __init__(self, access: StoreAccess, layout: UnitLayout, visit: int, keys: Sequence[str]) -> None:
        self._access, self._layout, self._visit, self._keys = access, layout, visit, keys
        (self._entry,) = layout.entries
        self.rows = rows_of_parts(layout)
        self._micro_batch = 0
        self._recorded: list[tuple[int, torch.Tensor, torch.Tensor, int | None]] = []
        # That is leased, and the memory of its sums: the first zeroed or continued, the others zeroed.
        self._part: tuple[range, list[torch.Tensor]] | None = None
        self._open: LaneAccumulator | None = None
        self._num_closed = 0

    def at(self, micro_batch: int) -> None:
        """Go on to a micro-batch."""
        self._micro_batch = micro_batch
        if self._open is not None:
            self._open.at(micro_batch)

    def record(self, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None) -> None:
        """Keep rows that are added when their parts are there."""
        self._recorded.append((self._micro_batch, indexes, rows, ignored))

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Lease a part for what is added inside."""
        rows = self.rows[number]
        with self._access.gradient_part(self._layout, self._visit, number, self._keys[number]) as sums:
            self._part = rows, [_matrix(each, (len(rows), self._entry.shape[-1])) for each in sums]
            try:
                yield
            finally:
                self._part = None
                sums.clear()
        self._num_closed += 1

    @contextmanager
    def some_rows(self, start: int, stop: int) -> Iterator[LaneAccumulator]:
        """Sum gradients of some rows of the part that is there, for all micro-batches."""
        assert self._part is not None, f"no part of {self._entry.name} is there"
        held, matrices = self._part
        places = [matrix[start - held.start : stop - held.start] for matrix in matrices]
        name, left = self._entry.name, iter(places[1:])

        def sums(memory: torch.Tensor, added: set[str]) -> GradientAccumulator:
            target = InPieces([(Piece(0, 0, range(start, stop), None, tuple(memory.shape)), memory)])
            return GradientAccumulator({name: target}, added, begins_with_zero=True)

        with self._access.open_sums() as make:

            def room() -> GradientAccumulator:
                # Open sums are numbered: those that are left in the end are the first ones.
                place = next(left, None)
                return sums(make(places[0]) if place is None else place, set())

            self._open = LaneAccumulator(self._access.lanes, sums(places[0], {name}), room)
            try:
                yield self._open
                found = self._open.close()
            finally:
                self._open = None
        for place, (_, own) in zip(places, found, strict=True):
            if own is not None and not own.added:
                place.zero_()  # it was that of other lanes, which were added to those before

    def add_product(self, left: torch.Tensor, right: torch.Tensor, first_row: int) -> None:
        """Accumulate a product in rows of the part that is there."""
        assert self._open is not None, f"no part of {self._entry.name} is there"
        self._open.add_product(self._entry.name, left, right, first_row)
        self._access.note_filled(self._layout, self._visit, self._entry.name)

    def close(self) -> None:
        """Lease the parts that were not, adding the rows that were recorded; take the norm."""
        if not self._num_closed:
            for number, held in enumerate(self.rows):
                with self.part(number), self.some_rows(held.start, held.stop) as sums:
                    for micro_batch, indexes, rows, ignored in self._recorded:
                        sums.at(micro_batch)
                        sums.add_rows(self._entry.name, indexes, rows, ignored)
            if self._recorded:
                self._access.note_filled(self._layout, self._visit, self._entry.name)
            self._recorded.clear()
        self._access.sum_is_complete(self._layout, self._visit)


class PartwiseAccumulator:
    """The accumulators of a use site some of whose gradients pass part by part; a ``GradientSink``.

    Args:
        held: those that do not; None: all pass.
        passing: by parameter.
    """

    def __init__(self, held: LaneAccumulator | None, passing: Mapping[str, PassingGradient]) -> None:
        self._held, self._passing = held, passing

    def at(self, micro_batch: int) -> None:
        """Go on to a micro-batch."""
        if self._held is not None:
            self._held.at(micro_batch)
        for gradient in self._passing.values():
            gradient.at(micro_batch)

    def rows_of_parts(self, name: str) -> Sequence[range]:
        """Return the rows of each part; nothing for what is held."""
        return self._passing[name].rows if name in self._passing else ()

    def part(self, name: str, number: int) -> AbstractContextManager[None]:
        """Lease a part."""
        return self._passing[name].part(number)

    @contextmanager
    def rows(self, name: str, start: int, stop: int) -> Iterator[None]:
        """Accumulate in these rows of the part that is leased."""
        with self._passing[name].some_rows(start, stop):
            yield

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Accumulate a whole gradient."""
        assert name not in self._passing, f"the gradient of {name} was planned to come part by part"
        assert self._held is not None, name
        self._held.add(name, gradient)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor, first_row: int = 0) -> None:
        """Accumulate a product, in the part that is there."""
        if name in self._passing:
            self._passing[name].add_product(left, right, first_row)
        else:
            assert self._held is not None, name
            self._held.add_product(name, left, right, first_row)

    def add_rows(self, name: str, indexes: torch.Tensor, rows: torch.Tensor, ignored: int | None = None) -> None:
        """Accumulate rows, or keep them until their parts are there."""
        if name in self._passing:
            self._passing[name].record(indexes, rows, ignored)
        else:
            assert self._held is not None, name
            self._held.add_rows(name, indexes, rows, ignored)

    def close(self) -> None:
        """Fill the parts that are left."""
        for gradient in self._passing.values():
            gradient.close()


def _fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return the fp32 tensor that a use site's gradients are summed in: the block itself if it is fp32."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a sum that was rounded cannot be continued"
    return fp32_like(gradient)


def fp32_like(gradient: torch.Tensor) -> torch.Tensor:
    """Return memory for an fp32 sum of a gradient, which the plan counts as workspace."""
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(blocks: Sequence[torch.Tensor], parts: Sequence[range], layout: UnitLayout, filled: set[str]) -> None:
    """Zero what no gradient was copied into: padding between entries, and entries without a gradient.

    Args:
        blocks: the layout's gradient, a tensor for each part.
        parts: their ranges.
        layout: of the gradient.
        filled: parameters with a gradient.
    """
    position = 0
    ends = [(entry.offset, entry.offset + entry.numel) for entry in layout.entries if entry.name in filled]
    for start, stop in (*ends, (layout.num_elements, layout.num_elements)):
        for block, part in zip(blocks, parts, strict=True):
            first, last = max(position, part.start), min(start, part.stop)
            if first < last:
                block[first - part.start : last - part.start].zero_()
        position = stop
