"""Interface between the running model and the blocks of a store.

`StoreAccess` advances the tape (`execution.py`) as the model runs. ``ShardingHooks`` convert leased blocks to the
tensors that a visit uses. In a single process this needs no communication (`leased.py`). With several ranks, blocks
hold shards, and the hooks communicate with the other ranks (`ranked.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from megatrain.engine.program.block_keys import activation_key, cache_key, results_key
from megatrain.engine.program.visit_trace import unit_layouts
from megatrain.engine.tape.execution import TapeExecution
from megatrain.engine.tape.gradients import StepGradients
from megatrain.engine.tape.leased import OneProcess
from megatrain.engine.tape.pieces import PassingGradient, UseSiteGradients
from megatrain.engine.tape.ranked import Ranks
from megatrain.engine.tape.updates import PendingUpdate, UpdateOps
from megatrain.ranks.collectives import SingleRank

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.engine.program.block_access import GradientSink, MatrixParts
    from megatrain.engine.program.step_program import ModelPhase
    from megatrain.engine.tape.background import BackgroundUpdates
    from megatrain.engine.tape.leased import ShardingHooks
    from megatrain.engine.tape.streamed import StreamedModel
    from megatrain.engine.tape.tape import Op
    from megatrain.engine.tape.updates import LayerScales, Updater
    from megatrain.models.graph import Unit
    from megatrain.optim.base import Update
    from megatrain.optim.threads import KernelThreads
    from megatrain.ranks.collectives import Collectives
    from tiered import TieredStore


#: Phases that the running model announces.
_MODEL_PHASES = frozenset({"forward", "head", "backward"})


class StoreAccess:
    """``BlockAccess`` for a model whose blocks are in a store.

    Used only by the thread that runs the step.

    Attributes:
        step_gradients: Records of the running step's gradients.
        sharding: Hooks for all behavior that depends on the number of ranks.
        can_update_ahead: Whether a step can queue its own updates before the host knows the clipping factor.
    """

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        threads: KernelThreads,
        collectives: Collectives | SingleRank,
        updater: Updater | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._graph, self._program = model.graph, model.program
        self._execution = TapeExecution(store, model, timeline, activity)
        self.step_gradients = StepGradients(model, threads)
        self.sharding: ShardingHooks
        if isinstance(collectives, SingleRank):
            self.sharding = OneProcess(self._execution, self.step_gradients)
        else:
            self.sharding = Ranks(collectives, self._execution, self.step_gradients)
        self._updates = None if updater is None else UpdateOps(self._execution, updater)
        is_single_rank = isinstance(collectives, SingleRank)
        self.can_update_ahead = is_single_rank and self._updates is not None and self._updates.are_all_on_device()
        self._has_updated_ahead = False
        self._pending: PendingUpdate | None = None  # update to apply in the update ops of the tape
        self._aliases = [visit_trace.aliases for visit_trace in model.trace.visits]
        self._shapes: dict[str, torch.Size] = {}

    @property
    def background(self) -> BackgroundUpdates:
        """Context for updates that run concurrently with the layers. Entered by the caller of ``start_step``."""
        return self._execution.background

    # -- the tape ----------------------------------------------------------------------------------------------

    def start_step(
        self,
        step: int,
        pending: PendingUpdate | None = None,
        *,
        immediate_update: Update | None = None,
        scales: LayerScales | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Begin a training step or an evaluation pass.

        Args:
            step: Step number, counted from 0. It determines the tick numbers in the schedule.
            pending: Deferred update of the previous step.
            immediate_update: Update of this step, if updates are not deferred.
            scales: Factors for the layers' gradients, if updates are not deferred.
            num_tokens: Number of tokens in the step; None to assume that tokens reach all experts.
        """
        # Clean up first, because a failed step may have left work on a device and may still hold memory.
        self.sharding.start_step()
        if self._program.updates.are_deferred and pending is None and not self._has_updated_ahead:
            self.finish()  # evict copies pinned for cancelled updates, because the plan has no memory for them
        self._has_updated_ahead = False
        self._execution.start(step, updates=pending is not None, passes=True)
        if num_tokens is not None:
            self.sharding.weights.skip_unlikely(num_tokens)
        self.step_gradients.start_step(scales)
        # The backward fills `with_gradient`. An immediate update reads a layout's entry when the gradient is complete.
        if immediate_update is not None:
            pending = PendingUpdate(step, immediate_update, self.step_gradients.with_gradient, scales)
        self._pending = pending

    def run_updates(self, pending: PendingUpdate) -> None:
        """Run the updates of a finished step without starting another step."""
        with self.background:
            self._execution.start(pending.step + 1, updates=True, passes=False)
            self._pending = pending
            self.end_step()

    def update_ahead(self, pending: PendingUpdate) -> None:
        """Queue the updates of the step that has just ended. Call this only if ``can_update_ahead`` is true."""
        assert self.can_update_ahead
        self._execution.start_updates_ahead()
        self._pending, self._has_updated_ahead = pending, True
        while (op := self._execution.next_op()) is not None:
            self._run(op)

    def finish(self) -> None:
        """Evict the copies that are still pinned for a later step."""
        self._execution.finish()

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Advance to a visit's op. First run the preceding ops, which the model does not announce."""
        # Drop the current op's tensors before the next op begins, so that the next gather can reuse their memory.
        self.sharding.after_visit()
        while (op := self._execution.next_op()) is not None and op.phase not in _MODEL_PHASES:
            self._run(op)
        assert op is not None, f"the step is over before {phase} {visit}"
        assert (op.phase, op.visit) == (phase, visit), f"planned {op.phase} {op.visit}, not {phase} {visit}"
        self.sharding.before_visit(op)

    def end_step(self) -> None:
        """Run the ops that remain after the last visit."""
        self.sharding.after_visit()
        self.sharding.end_visits()
        while (op := self._execution.next_op()) is not None:
            assert op.phase not in _MODEL_PHASES, f"the step ended before {op}"
            self._run(op)
        self.sharding.end_step()

    def _run(self, op: Op) -> None:
        """Run an op that the model does not announce."""
        if op.phase != "update":
            self.sharding.run(op)
            return
        assert self._updates is not None and self._pending is not None, f"no pending update: {op}"
        if not self._program.updates.are_deferred:
            self.sharding.before_update(self._updates.op_layout(op))
        self._updates.run(op, self._pending)

    # -- weights and gradients ---------------------------------------------------------------------------------

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, torch.Tensor | MatrixParts]]:
        """Lease the unit's parameters, by full name."""
        return self.sharding.weights.for_visit(self._unit_layouts(unit), visit)

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Skip the unit's weights, because no token is routed to it."""
        self.sharding.weights.skip(self._unit_layouts(unit), visit)

    def announce_idle(self, visits: Sequence[int], idle_visits: Collection[int]) -> None:
        """Cancel the prefetch of weights that only idle visits need."""
        self.sharding.weights.announce_idle(visits, idle_visits)

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientSink]:
        """Yield the gradient accumulators of a visit. The last use site to run adds up the gradients of all sites."""
        memory = self.sharding.gradients
        layouts = [layout for layout in self._unit_layouts(unit) if layout.trainable]
        passing_layouts = [layout for layout in layouts if (visit, layout.name) in self._program.cuts.passing]
        held_layouts = [layout for layout in layouts if layout not in passing_layouts]
        part_sums: dict[str, PassingGradient] = {}
        for layout in passing_layouts:
            keys = self._program.gradient_keys(layout, self.step_gradients.use_site(layout.name, visit))
            part_sums[layout.entries[0].name] = PassingGradient(memory, self.step_gradients, layout, visit, keys)
        with memory.lease_sums(held_layouts, visit) as sums:
            sink = UseSiteGradients(sums if held_layouts else None, part_sums)
            del sums  # drop the reference, so that closing the sink frees the memory
            yield sink
            # Close the parts here, because the tape leases them while the visit still holds all other sums.
            sink.close()
            del sink

    def _unit_layouts(self, unit: Unit) -> list[UnitLayout]:
        return [self._graph.layouts[name] for name in unit_layouts(self._graph, unit.index)]

    # -- activations -------------------------------------------------------------------------------------------

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        """Copy a unit's input into its block, which the tape can offload until the backward."""
        key = self._activation_key(visit, micro_batch, index, tensor.numel())
        with self._execution.lease([key]) as tensors:
            tensors[key][: tensor.numel()].copy_(tensor.detach().reshape(-1))
            self._shapes[key] = tensor.shape

    def reuse_activation(self, visit: int, micro_batch: int, index: int, source: tuple[int, int]) -> None:
        """Check that the plan also stores this input in the block at ``source``."""
        assert self._aliases[visit].get(index) == source, (visit, index, source)

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[torch.Tensor]:
        """Lease the copy that `put_activation` made, with the same shape. The visit that stored it reads it last."""
        key = self._activation_key(visit, micro_batch, index, 0)
        shape = self._shapes[key]
        with self._execution.lease([key]) as tensors:
            yield tensors[key][: shape.numel()].view(shape)

    @contextmanager
    def results_block(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor]:
        """Lease the block of a visit's results, which the forward writes and the backward reads once."""
        key = results_key(visit, micro_batch)
        if key not in self._program.blocks:  # micro-batches that run one at a time share one set of blocks
            key = results_key(visit, 0)
        with self._execution.lease([key]) as tensors:
            yield tensors[key]

    @contextmanager
    def cache_block(self, visit: int, micro_batch: int) -> Iterator[torch.Tensor | None]:
        """Lease the cache block of a visit and micro-batch, or yield None if the program has no such block."""
        key = cache_key(visit, micro_batch)
        if key not in self._program.blocks:
            yield None
            return
        with self._execution.lease([key]) as tensors:
            yield tensors[key]

    def _activation_key(self, visit: int, micro_batch: int, index: int, num_elements: int) -> str:
        key = activation_key(visit, micro_batch, index)
        block = self._program.blocks.get(key) or self._program.blocks[activation_key(visit, 0, index)]
        assert num_elements <= block.num_elements, f"{key}: {num_elements} elements, planned {block.num_elements}"
        return block.key
