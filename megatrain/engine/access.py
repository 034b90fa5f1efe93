"""Blocks of a store as the running model asks for them.

`StoreAccess` goes through the tape with the model (`execution.py`). What comes between a leased block and what a visit
sees is said by ``ShardingHooks``: nothing in a process that has everything (`leased.py`), the other ranks in one that
has shards (`ranked.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from megatrain.engine.execution import TapeExecution
from megatrain.engine.gradients import StepGradients
from megatrain.engine.leased import OneProcess
from megatrain.engine.pieces import PassingGradient, UseSiteGradients
from megatrain.engine.program import activation_key, cache_key, layouts_of_unit, results_key
from megatrain.engine.ranked import Ranks
from megatrain.engine.updates import PendingUpdate, UpdateOps
from megatrain.ranks.collectives import Alone

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.engine.background import BackgroundUpdates
    from megatrain.engine.leased import CountedTotal, ShardingHooks
    from megatrain.engine.program import GradientSink, MatrixParts, ModelPhase
    from megatrain.engine.streamed import StreamedModel
    from megatrain.engine.tape import Op
    from megatrain.engine.updates import LayerScales, Updater
    from megatrain.models.graph import Unit
    from megatrain.optim.base import Update
    from megatrain.optim.threads import KernelThreads
    from megatrain.ranks.collectives import Collectives
    from tiered import TieredStore

__all__ = ["StoreAccess"]

#: Phases of the ops that the running model announces.
_MODEL_PHASES = frozenset({"forward", "head", "backward"})


class StoreAccess:
    """The ``BlockAccess`` of a model that runs from the blocks of a store.

    Used by one thread, the one that runs the step.

    Attributes:
        updates_ahead: Whether a step can queue its own updates before the host knows their factor.
    """

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        threads: KernelThreads,
        collectives: Collectives | Alone,
        updater: Updater | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._graph, self._program = model.graph, model.program
        self._execution = TapeExecution(store, model, timeline, activity)
        self._gradients = StepGradients(model, threads)
        self._sharding: ShardingHooks
        if isinstance(collectives, Alone):
            self._sharding = OneProcess(self._execution, self._gradients)
        else:
            self._sharding = Ranks(collectives, self._execution, self._gradients)
        self._updates = None if updater is None else UpdateOps(self._execution, updater)
        is_alone = isinstance(collectives, Alone)
        self.updates_ahead = is_alone and self._updates is not None and self._updates.are_all_on_device()
        self._has_updated_ahead = False
        self._pending: PendingUpdate | None = None  # what the tape's updates are made with
        self._reused = [traced.reused for traced in model.trace.visits]
        self._shapes: dict[str, torch.Size] = {}

    @property
    def background(self) -> BackgroundUpdates:
        """Runs updates beside the layers. The caller of ``start_step`` leaves it when the step is over."""
        return self._execution.background

    @property
    def squared_norms(self) -> Mapping[str, float | torch.Tensor]:
        """Layout -> squared norm of its gradient; numbers once the results of ``agree`` are read."""
        return self._gradients.squared_norms

    @property
    def with_gradient(self) -> Mapping[str, set[str]]:
        """Layout -> parameters that got a gradient in this step."""
        return self._gradients.with_gradient

    @property
    def window_bytes(self) -> int:
        """The most that full copies of weights, sums of gradients and what was received took together."""
        return self._sharding.window_bytes

    # -- the tape ----------------------------------------------------------------------------------------------

    def start_step(
        self,
        step: int,
        pending: PendingUpdate | None = None,
        *,
        immediate: Update | None = None,
        scales: LayerScales | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Begin a step.

        Args:
            step: Counted from 0; numbers the ticks as the schedule does.
            pending: The update that the step before left, where updates are deferred.
            immediate: The update of this step, where they are not.
            scales: Judges the layers' gradients in an immediate update.
            num_tokens: Tokens of the step; None: they reach all experts.
        """
        # First of all: a step that failed may have left work on a device, and memory that this one is to have.
        self._sharding.start_step()
        if self._program.updates.are_deferred and pending is None and not self._has_updated_ahead:
            self.finish()  # pinned for updates that will not come: the plan of this step has no room for them
        self._has_updated_ahead = False
        self._execution.start(step, updates=pending is not None, passes=True)
        if num_tokens is not None:
            self._sharding.weights.hold_back(num_tokens)
        self._gradients.start_step(scales)
        # An immediate update reads `with_gradient` while the backward fills it, each layout after its last gradient.
        self._pending = pending if immediate is None else PendingUpdate(step, immediate, self.with_gradient, scales)

    def run_updates(self, pending: PendingUpdate) -> None:
        """Make the updates that a step left, without beginning another one."""
        with self.background:
            self._execution.start(pending.step + 1, updates=True, passes=False)
            self._pending = pending
            self.end_step()

    def update_ahead(self, pending: PendingUpdate) -> None:
        """Queue the updates of the step that has just ended; only with ``updates_ahead``."""
        assert self.updates_ahead
        self._execution.start_updates_ahead()
        self._pending, self._has_updated_ahead = pending, True
        while (op := self._execution.next_op()) is not None:
            self._run(op)

    def finish(self) -> None:
        """Evict the copies that are pinned for another step."""
        self._execution.finish()

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Go to the op of a visit, running those before it that the model does not announce."""
        # Before the next op is taken: what is dropped is that of the op which is still the present one, and a gather
        # that comes next may have its memory.
        self._sharding.after_visit()
        while (op := self._execution.next_op()) is not None and op.phase not in _MODEL_PHASES:
            self._run(op)
        assert op is not None, f"the step is over before {phase} {visit}"
        assert (op.phase, op.visit) == (phase, visit), f"planned {op.phase} {op.visit}, not {phase} {visit}"
        self._sharding.before_visit(op)

    def end_step(self) -> None:
        """Make the updates that come last; every other op must have run."""
        self._sharding.end_visits()
        while (op := self._execution.next_op()) is not None:
            assert op.phase not in _MODEL_PHASES, f"the step ended before {op}"
            self._run(op)
        self._sharding.end_step()

    def _run(self, op: Op) -> None:
        """Run an op that the model does not announce."""
        if op.phase != "update":
            self._sharding.run(op)
            return
        assert self._updates is not None and self._pending is not None, f"no update to make: {op}"
        if not self._program.updates.are_deferred:
            self._sharding.before_update(self._updates.layout_of(op))
        self._updates.run(op, self._pending)

    def agree(
        self, layouts: Sequence[UnitLayout], terms: Sequence[torch.Tensor], figures: Sequence[CountedTotal]
    ) -> Callable[[], tuple[list[float], list[tuple[str, float, int]]]]:
        """Return what reads the results of the step, of all ranks; see ``ShardingHooks``."""
        return self._sharding.agree(layouts, terms, figures)

    # -- weights and gradients ---------------------------------------------------------------------------------

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, torch.Tensor | MatrixParts]]:
        """Yield the unit's parameters by full name."""
        return self._sharding.weights.of_visit(self._layouts_of(unit), visit)

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Leave the unit's weights where they are: no token goes to it."""
        self._sharding.weights.skip(self._layouts_of(unit), visit)

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """Have nothing fetched for visits that will leave their weights where they are, and the weights of others."""
        self._sharding.weights.note_idle(visits, idle)

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientSink]:
        """Yield the accumulators of this use site; sum all sites of a layout when its last one is complete."""
        place = self._sharding.gradients
        layouts = [layout for layout in self._layouts_of(unit) if layout.trainable]
        by_part = [layout for layout in layouts if (visit, layout.name) in self._program.cuts.passing]
        held = [layout for layout in layouts if layout not in by_part]
        passing: dict[str, PassingGradient] = {}
        for layout in by_part:
            keys = self._program.gradient_keys(layout, self._gradients.use_of(layout.name, visit))
            passing[layout.entries[0].name] = PassingGradient(place, self._gradients, layout, visit, keys)
        with place.held(held, visit) as sums:
            sink = UseSiteGradients(sums if held else None, passing)
            del sums  # closed with their memory, which nothing here is to keep
            yield sink
            # Parts before what is held: the tape leases them within the visit, whose leases end with it.
            sink.close()
            del sink

    def _layouts_of(self, unit: Unit) -> list[UnitLayout]:
        return [self._graph.layouts[name] for name in layouts_of_unit(self._graph, unit.index)]

    # -- activations -------------------------------------------------------------------------------------------

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        """Copy a unit's input into its block, which may be offloaded until the backward."""
        key = self._activation(visit, micro_batch, index, tensor.numel())
        with self._execution.lease([key]) as tensors:
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
        with self._execution.lease([key]) as tensors:
            yield tensors[key][: shape.numel()].view(shape)

    @contextmanager
    def results_room(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor]:
        """Lease the block of saved results: to write in a forward, to read in its backward, dead afterwards."""
        key = results_key(visit, micro_batch)
        if key not in self._program.blocks:  # micro-batches one at a time have one set of blocks
            key = results_key(visit, 0)
        with self._execution.lease([key]) as tensors:
            yield tensors[key]

    @contextmanager
    def cache_room(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor | None]:
        """Lease the block of what a generation's cache holds of a visit and a micro-batch, if it holds anything."""
        key = cache_key(visit, micro_batch)
        if key not in self._program.blocks:
            yield None
            return
        with self._execution.lease([key]) as tensors:
            yield tensors[key]

    def _activation(self, visit: int, micro_batch: int, index: int, num_elements: int) -> str:
        key = activation_key(visit, micro_batch, index)
        block = self._program.blocks.get(key) or self._program.blocks[activation_key(visit, 0, index)]
        assert num_elements <= block.num_elements, f"{key}: {num_elements} elements, planned {block.num_elements}"
        return block.key
