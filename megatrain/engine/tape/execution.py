"""Execution of a step's tape: lease each op's blocks from the store, then pin, evict or discard the copies.

A step processes a layer in this order (docs/reading.md explains each stage):

    forward     lease       `StoreAccess.weights`, by `TapeExecution.lease`
                run         `UnitRun.compute`, called in `UnitVisit.forward`
                save        `InputSaving.run`, or `GraphKeeping.run`
    backward    lease       `StoreAccess.weights` and `StoreAccess.gradients`
                recompute   `SavedInputs.graph`, or no work in `KeptGraph.graph`
                backward    `UnitGraph.gradients`, called in `UnitVisit.backward`
                reduce      `GradientAccumulator.add_product`, for each micro-batch
                release     `TapeStore.release_copies`

This file makes no decisions: the tape is compiled before the step and lists all leases, fetches, pins and evictions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from megatrain.base.progress import Activity
from megatrain.engine.device.freed_memory import return_excess_memory
from megatrain.engine.program.workspace import computing_bytes
from megatrain.engine.tape.background import BackgroundUpdates
from megatrain.engine.tape.tape import Op, PinnedCopy, Tape, TapeStore, Use, compile_step

if TYPE_CHECKING:
    from megatrain.base.timeline import Timeline
    from megatrain.engine.tape.streamed import StreamedModel
    from tiered import TieredStore


class TapeExecution:
    """Iterator over the ops of a step, which also leases their blocks. Used only by the thread that runs the step.

    Attributes:
        op: Current op; None before the first op and after the step.
        background: Context for updates that run concurrently with the layers. Entered by the caller of ``start``.
    """

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.model = model
        self._store, self._copies = store, TapeStore(store, model.homes)
        self._timeline, self._activity = timeline, activity or Activity()
        layouts, units = tuple(model.graph.layouts), model.graph.units
        self._unit_names = {
            (tick.phase, tick.visit): layouts[tick.visit]
            if tick.phase == "update"
            else units[model.trace.visits[tick.visit].unit].name
            for tick in model.program.ticks
        }
        self._op_bytes = computing_bytes(model.trace, model.program)  # peak memory of each op, by tick
        self._tapes: dict[tuple[bool, bool, frozenset[tuple[str, PinnedCopy]]], Tape] = {}  # two or three, cached
        self._pinned: Mapping[str, PinnedCopy] = {}  # copies that the previous tape kept pinned
        self._first_tick = 0
        self._is_ahead = False  # whether the ops are updates that the schedule places in the next step
        self._ops: Iterator[Op] = iter(())
        self._uses: Mapping[str, Use] = {}  # by key of the contents, for the current op
        self.op: Op | None = None
        self.background = BackgroundUpdates()

    def start(self, step: int, *, updates: bool, passes: bool) -> None:
        """Start executing the tape of a step.

        Args:
            step: Step number, counted from 0. It determines the tick numbers in the schedule.
            updates: Whether to include the deferred updates of the previous step.
            passes: Whether to include forward, head and backward.
        """
        self._first_tick, self._is_ahead = step * len(self.model.program.ticks), False
        tape = self._tape(updates, passes, self._pinned)
        self._ops, self._pinned = iter(tape.ops), tape.pinned

    def start_updates_ahead(self) -> None:
        """Begin deferred updates within the step that computed their gradients.

        All blocks of the updates must be at home. The schedule does not advance, because the updates fetch nothing.
        """
        self._is_ahead = True
        self._ops = iter(self._tape(True, False, {}).ops)

    def _tape(self, updates: bool, passes: bool, pinned: Mapping[str, PinnedCopy]) -> Tape:
        tape_key = (updates, passes, frozenset(pinned.items()))
        if tape_key not in self._tapes:
            self._tapes[tape_key] = compile_step(
                self.model.program, self.model.homes, self.model.stays, updates=updates, passes=passes, pinned=pinned
            )
        return self._tapes[tape_key]

    def finish(self) -> None:
        """Evict the copies that are pinned for the next step."""
        self._copies.evict_pinned()
        self._pinned = {}

    def next_op(self) -> Op | None:
        """Advance to the next op. Return None after the last op."""
        self.op = next(self._ops, None)
        return_excess_memory(self._store, 0 if self.op is None else self._op_bytes[self.op.tick])
        self._uses = {}
        if self.op is not None:
            tick, uses = self.op.tick, self.op.uses
            self._uses = dict(zip(self.content_keys(self.op, uses), uses, strict=True))
            # Wait before any lease, because a running background update may still be writing these blocks.
            self.background.wait_for([use.key for use in uses])
            if not self._is_ahead:
                # Advance before the op's leases, because the prefetcher looks ahead from the current tick.
                self._store.advance(self._first_tick + tick)
                self._activity.begin_part(tick, self.op.phase, self._unit_names[self.op.phase, self.op.visit])
        if self._timeline is not None:
            self._timeline.on_op(self.op)
        return self.op

    @property
    def current_op(self) -> Op:
        """Current op. Fails if there is none."""
        assert self.op is not None, "no op has begun, or the step is over"
        return self.op

    def use(self, key: str) -> Use:
        """Return the current op's use of a block, given the key of the block's contents."""
        return self._uses[key]

    def has_use(self, key: str) -> bool:
        """Return whether the current op uses a block, given the key of the block's contents."""
        return key in self._uses

    def content_keys(self, op: Op, uses: Iterable[Use]) -> list[str]:
        """Return the keys of the blocks' contents. For a shared block, this is the key of the gradient in the block."""
        program = self.model.program
        if not program.occupants:  # a shortcut, because a layer has hundreds of blocks
            return [use.key for use in uses]
        return [program.contents(op.tick, use.key).key for use in uses]

    @contextmanager
    def lease(self, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Lease blocks of the current op together, and yield their tensors by key. Release them as the tape specifies.

        Args:
            keys: Keys of the blocks' contents. In a shared block, the gradient can be shorter than the block.
        """
        op = self.current_op
        if not keys:
            yield {}
            return
        uses = [self._uses[key] for key in keys]
        with self._store.acquire_many([(use.key, op.tier, use.mode) for use in uses]) as group:
            self._copies.unpin_copies(uses)
            tensors: dict[str, Tensor] = {}
            for key, lease in zip(keys, group, strict=True):
                tensor = lease.tensor
                if key != lease.key:  # a shared block, which may be longer than this gradient
                    tensor = tensor.narrow(0, 0, self.model.program.contents(op.tick, lease.key).num_elements)
                tensors[key] = tensor
            yield tensors
        # Release after the leases end, because an eviction must not write back a copy that is still being written.
        self._copies.release_copies(uses, op.tier)

    def skip(self, keys: Iterable[str]) -> None:
        """Skip planned leases of the current op."""
        op = self.current_op
        for key in keys:
            self._copies.skip_lease(self._uses[key], op.tier)

    def skip_prefetch(self, uses: Iterable[tuple[int, str]], *, resumed_uses: Collection[tuple[int, str]] = ()) -> None:
        """Cancel prefetches for ``uses``, and resume prefetches for ``resumed_uses``. A use is (tick in step, key)."""
        start = self._first_tick
        self._store.pass_over(
            [(start + tick, key) for tick, key in uses], but_not=[(start + tick, key) for tick, key in resumed_uses]
        )
