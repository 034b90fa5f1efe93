"""One optimizer step: forward and backward layer by layer, exact clipping, the update just before the next forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.forward import LayerRunner, QueuedLoss, SummedLoss
from megatrain.engine.host_io import read_numbers
from megatrain.engine.program import (
    Stays,
    StepProgram,
    activation_key,
    evaluation_program,
    gradient_key,
    layouts_of_unit,
    state_key,
    uses_of_layouts,
    weight_key,
)
from megatrain.engine.tape import Kept, Op, Tape, TapeStore, Use, compile_step
from megatrain.models.layout import UnitLayout, views
from megatrain.optim.base import Optimizer, Segment, Update
from megatrain.optim.clip import clip_coefficient, device_squared_norm, global_norm, squared_norm, sum_gradients
from megatrain.optim.threads import KernelThreads
from megatrain.run.activity import Activity

if TYPE_CHECKING:
    from megatrain.engine.objective import CrossEntropy, Objective
    from megatrain.engine.program import VisitTrace
    from megatrain.engine.visit import LayerCompiler
    from megatrain.models.graph import ModelGraph, Unit
    from megatrain.run.timeline import Timeline
    from tiered import Mode, TieredStore


class GradientAccumulator:
    """fp32 accumulators of one use site, open for one visit. ``add`` copies at first, then adds."""

    def __init__(self, targets: Mapping[str, torch.Tensor], added: set[str]) -> None:
        self._targets = targets
        self._added = added

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of one micro-batch (any float dtype, same shape) to the parameter's accumulator."""
        if name in self._added:
            self._targets[name].add_(gradient)
        else:
            self._targets[name].copy_(gradient)
            self._added.add(name)


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """The update of a step, made by the next one or, if it is not deferred, during its backward.

    Attributes:
        step: number of the step that left it.
        update: step, learning rate, scale of the gradient.
        with_gradient: layout -> parameters that got a gradient.
    """

    step: int
    update: Update
    with_gradient: Mapping[str, set[str]]


class Updater:
    """Updates the block group of a layout where it lives, when the tape comes to it.

    Args:
        optimizers: by tier.
        segments: what of a layout is updated with which decay.

    Attributes:
        trained: index of a layout -> it and its segments.
        pending: what to update with; None: nothing to do.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace,
        optimizers: Mapping[str, Optimizer],
        segments: Callable[[UnitLayout], Sequence[Segment]],
    ) -> None:
        uses = uses_of_layouts(graph, trace)
        self.trained = {
            index: (layout, tuple(segments(layout)))
            for index, layout in enumerate(graph.layouts.values())
            if layout.trainable and uses[layout.name]
        }
        self.pending: PendingUpdate | None = None
        self._optimizers = optimizers
        # The master weight itself, "weight", is a kind of the optimizer like its state.
        is_split = graph.dtype.itemsize == 2
        self._kinds = [kind.name for kind in optimizers["ram"].state_kinds(is_split)]

    def update(self, index: int, tier: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Update one layout.

        Args:
            tensors: its weight, state and gradient by block key, in ``tier``.
        """
        assert self.pending is not None
        layout, segments = self.trained[index]
        blocks = {kind: tensors[state_key(layout.name, kind)] for kind in self._kinds}
        # As in torch, a parameter that got no gradient in this step is left alone: no decay, no moments.
        filled = self.pending.with_gradient[layout.name]
        starts = {entry.offset for entry in layout.entries if entry.name in filled}
        chosen = [segment for segment in segments if segment.start in starts]
        self._optimizers[tier].update(blocks, tensors[gradient_key(layout.name, 0)], chosen, self.pending.update)


class StoreAccess:
    """``BlockAccess`` over a ``TieredStore``. Used by one thread, the one that runs the step.

    Args:
        homes: block key -> tier, as planned and registered.
        stays: copies that wait for their next use, as planned.
        updater: makes the updates of the program; None: it has none.
        timeline: told of every tick.
        activity: told of every tick.
    """

    def __init__(
        self,
        store: TieredStore,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        homes: Mapping[str, str],
        stays: Stays,
        threads: KernelThreads,
        updater: Updater | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._store, self._graph, self._program, self._stays = store, graph, program, stays
        self._homes, self._copies = homes, TapeStore(store, homes)
        self._uses_of_layouts = uses_of_layouts(graph, trace)
        self._tier = program.compute_tier
        self._threads = threads
        self._updater, self._timeline = updater, timeline
        self._tapes: dict[tuple[bool, bool, frozenset[tuple[str, Kept]]], Tape] = {}
        self._kept: Mapping[str, Kept] = {}  # copies that wait for the next tape
        self._activity = activity or Activity()
        layouts = tuple(graph.layouts)
        self._unit_names = {
            (tick.phase, tick.visit): layouts[tick.visit]
            if tick.phase == "update"
            else graph.units[trace.visits[tick.visit].unit].name
            for tick in program.ticks
        }
        self._first_tick = 0
        self._ops: Iterator[Op] = iter(())
        self._op: Op | None = None
        self._uses: Mapping[str, Use] = {}  # of the present op, by key
        self._merges: dict[str, dict[int, set[str]]] = {}
        self._shapes: dict[str, torch.Size] = {}
        #: By layout; on a device as a scalar there: reading it would make the host wait in the middle of the step.
        self.squared_norms: dict[str, float | torch.Tensor] = {}
        self.with_gradient: dict[str, set[str]] = {}

    # -- the tape ----------------------------------------------------------------------------------------------

    def start_step(self, step: int, *, updates: bool) -> None:
        """Begin a step: ``step`` counts from 0 and numbers the ticks that the schedule speaks of.

        Args:
            updates: whether the step before left updates to be made on the way.
        """
        if self._program.defers_updates and not updates:
            self.finish()  # what waits for them: the plan of this step does not count its room
        self._start(step, updates=updates, passes=True)
        self._merges = {name: {use: set() for use in range(len(uses))} for name, uses in self._uses_of_layouts.items()}
        self.squared_norms, self.with_gradient = {}, {}

    def run_updates(self, step: int) -> None:
        """Make the updates that the step before ``step`` left, without beginning another one."""
        self._start(step, updates=True, passes=False)
        self.end_step()

    def finish(self) -> None:
        """Let go of everything that waits for another step."""
        self._copies.evict_kept()
        self._kept = {}

    def end_step(self) -> None:
        """Make the updates that come last, and note that the step is over: all its ticks must have come."""
        while (op := self._next_op()) is not None:
            assert op.phase == "update", f"the step ended before {op}"
            self._update(op)

    def _start(self, step: int, *, updates: bool, passes: bool) -> None:
        self._first_tick = step * len(self._program.ticks)
        kind = (updates, passes, frozenset(self._kept.items()))
        if kind not in self._tapes:
            self._tapes[kind] = compile_step(
                self._program, self._homes, self._stays, updates=updates, passes=passes, kept=self._kept
            )
        self._ops, self._kept = iter(self._tapes[kind].ops), self._tapes[kind].kept

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        """Move to the next pass of the tape, making the updates that come before it."""
        while (op := self._next_op()) is not None and op.phase == "update":
            self._update(op)
        assert op is not None, f"the step is over before {phase} {visit}"
        assert (op.phase, op.visit) == (phase, visit), f"planned {op.phase} {op.visit}, not {phase} {visit}"

    def _next_op(self) -> Op | None:
        """Move to the next op, and tell the prefetcher; None after the last one."""
        self._op = next(self._ops, None)
        self._uses = {} if self._op is None else {use.key: use for use in self._op.uses}
        if self._op is not None:
            self._store.advance(self._first_tick + self._op.tick)
            unit = self._unit_names[self._op.phase, self._op.visit]
            self._activity.come_to(self._op.tick, self._op.phase, unit)
        if self._timeline is not None:
            self._timeline.on_op(self._op)
        return self._op

    def _update(self, op: Op) -> None:
        assert self._updater is not None, f"nothing makes updates here: {op}"
        with self._leases([use.key for use in op.held]) as tensors:
            self._updater.update(op.visit, op.tier, tensors)

    # -- weights -----------------------------------------------------------------------------------------------

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the unit's parameters by full name: views of the slots, in the compute dtype, on the compute device."""
        names = layouts_of_unit(self._graph, unit.index)
        with self._leases([weight_key(name) for name in names]) as blocks:
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                tensors.update(views(blocks[weight_key(name)], self._graph.layouts[name]))
            yield tensors

    @contextmanager
    def _leases(self, keys: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Lease blocks of the present op together, and let go of them as the tape says; yield tensors by key.

        A copy that changed goes home, if it does, only after all leases have ended: the write-back may read it then.
        """
        assert self._op is not None, "no op has begun, or the step is over"
        uses, tier = [self._uses[key] for key in keys], self._op.tier
        with self._store.acquire_many([(use.key, tier, use.mode) for use in uses]) as group:
            self._copies.leased(uses)
            yield {lease.key: lease.tensor for lease in group}
        for use in uses:
            self._copies.released(use, tier)

    # -- gradients ---------------------------------------------------------------------------------------------

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientAccumulator]:
        """Yield the accumulators of this use site. The last use site to be filled takes up the others' sums."""
        names = [n for n in layouts_of_unit(self._graph, unit.index) if self._graph.layouts[n].trainable]
        own = {name: gradient_key(name, self._uses_of_layouts[name].index(visit)) for name in names}
        others = [
            key
            for name in names
            for use in range(len(self._uses_of_layouts[name]))
            if (key := gradient_key(name, use)) in self._uses and key != own[name]
        ]
        modes = {key: self._uses[key].mode for key in own.values()}
        with self._leases([*own.values(), *others]) as tensors:
            sums = {name: _fp32_sum(tensors[own[name]], modes[own[name]]) for name in names}
            targets: dict[str, torch.Tensor] = {}
            added: set[str] = set()
            for name in names:
                targets.update(views(sums[name], self._graph.layouts[name]))
                added |= self._added(name, visit)
            yield GradientAccumulator(targets, added)
            for name in names:
                self._close_use(name, visit, sums.pop(name), tensors, own[name], added, modes[own[name]])

    def _added(self, name: str, visit: int) -> set[str]:
        return self._merges[name][self._uses_of_layouts[name].index(visit)]

    def _close_use(
        self,
        name: str,
        visit: int,
        total: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        key: str,
        added: set[str],
        mode: Mode,
    ) -> None:
        layout = self._graph.layouts[name]
        self._added(name, visit).update(entry.name for entry in layout.entries if entry.name in added)
        if mode == "w":
            zero_gaps(total, layout, self._added(name, visit))
        if total is not tensors[key]:
            tensors[key].copy_(total)
        # Only the first use site, which backward reaches last, is followed by no other use of the layout.
        if visit == self._uses_of_layouts[name][0]:
            self._merge(name, tensors, key, layout)

    def _merge(self, name: str, tensors: Mapping[str, torch.Tensor], key: str, layout: UnitLayout) -> None:
        """Add the other use sites' sums in use order, and take the norm while the bytes are here."""
        total = set(self._merges[name][0])
        for use in range(1, len(self._uses_of_layouts[name])):
            other = gradient_key(name, use)
            if other not in tensors:
                return  # micro-batch-major order: more micro-batches follow
            if tensors[key].is_cuda:
                tensors[key].add_(tensors[other])
            else:
                sum_gradients(tensors[key], tensors[other], self._threads)
            total |= self._merges[name][use]
        self.with_gradient[name] = total
        self.squared_norms[name] = self._squared_norm(tensors[key])

    def _squared_norm(self, gradient: torch.Tensor) -> float | torch.Tensor:
        return device_squared_norm(gradient) if gradient.is_cuda else squared_norm(gradient, self._threads)

    # -- activations -------------------------------------------------------------------------------------------

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        """Copy a unit's input into its block; the block may go to a slower tier until the backward."""
        key = self._activation(visit, micro_batch, index, tensor.numel())
        with self._leases([key]) as tensors:
            tensors[key][: tensor.numel()].copy_(tensor.detach().reshape(-1))
            self._shapes[key] = tensor.shape

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[torch.Tensor]:
        """Yield what was put there, same shape and bits; the contents are dead afterwards."""
        key = self._activation(visit, micro_batch, index, 0)
        shape = self._shapes[key]
        with self._leases([key]) as tensors:
            yield tensors[key][: shape.numel()].view(shape)

    def _activation(self, visit: int, micro_batch: int, index: int, num_elements: int) -> str:
        key = activation_key(visit, micro_batch, index)
        block = self._program.blocks.get(key) or self._program.blocks[activation_key(visit, 0, index)]
        assert num_elements <= block.num_elements, f"{key}: {num_elements} elements, planned {block.num_elements}"
        return block.key


def _fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return what a use site's gradients are summed in: the block itself if it is fp32, else room of its own."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a sum that was rounded cannot go on"
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(flat: torch.Tensor, layout: UnitLayout, filled: set[str]) -> None:
    """Zero what no gradient was copied into: padding between entries, and entries without a gradient."""
    position = 0
    for entry in layout.entries:
        if entry.name not in filled:
            continue
        flat[position : entry.offset].zero_()
        position = entry.offset + entry.numel
    flat[position:].zero_()


class NonFiniteGradientError(Exception):
    """The gradient of a step is NaN or infinite. No parameter was changed by that step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: token-weighted mean over the step, before the update.
        grad_norm: global norm before clipping.
        num_trained_tokens: tokens that had a label.
        skipped: the gradient was not finite and is not used.
    """

    loss: float
    grad_norm: float
    num_trained_tokens: int
    skipped: bool = False


class StepEngine:
    """Runs optimizer steps on blocks of a store. Used by one thread.

    Args:
        store: holds every block of ``program``, with contents for weights and state.
        homes: of the placement.
        stays: of the placement.
        segments: what of a layout is updated with which decay.
        optimizer: makes updates in RAM.
        device_optimizer: those in the compute tier, if the program has any.
        max_grad_norm: largest global norm that is let through; 0: no clipping.
        nonfinite: what a gradient that is NaN or infinite does: ``stop`` raises, ``skip`` leaves that update out,
            ``ignore`` uses it.
        seed: of dropout and noise.
        objective: what is minimised beside cross entropy; None: nothing.
        compiler: of layers; None: they run as they are.
        cross_entropy: in the place of torch's; None: torch's.
        timeline: told of every tick.
        activity: told of every tick and micro-batch.

    Attributes:
        num_updates: steps whose gradient was used, what the optimizer counts as its steps; skipped ones are not.
    """

    def __init__(
        self,
        store: TieredStore,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        homes: Mapping[str, str],
        stays: Stays,
        optimizer: Optimizer,
        *,
        device: torch.device | str,
        order: Literal["layer", "micro_batch"] = "layer",
        segments: Callable[[UnitLayout], Sequence[Segment]],
        max_grad_norm: float,
        nonfinite: Literal["stop", "skip", "ignore"] = "stop",
        seed: int = 0,
        objective: Objective | None = None,
        compiler: LayerCompiler | None = None,
        cross_entropy: CrossEntropy | None = None,
        threads: KernelThreads | None = None,
        timeline: Timeline | None = None,
        device_optimizer: Optimizer | None = None,
        activity: Activity | None = None,
    ) -> None:
        assert device_optimizer is not None or not program.updates_in_compute_tier, program.compute_tier
        self._max_grad_norm, self._nonfinite, self._seed = max_grad_norm, nonfinite, seed
        optimizers = {program.compute_tier: device_optimizer or optimizer, "ram": optimizer}
        self._updater = Updater(graph, trace, optimizers, segments)
        self._access = StoreAccess(
            store, graph, trace, program, homes, stays, threads or KernelThreads(), self._updater, timeline, activity
        )
        self._runner = LayerRunner(
            graph,
            self._access,
            device=device,
            compute_dtype=graph.dtype,
            order=order,
            head_rows=trace.head_rows or None,
            trace=trace,
            objective=objective,
            kept=program.kept,
            compiler=compiler,
            cross_entropy=cross_entropy,
            activity=activity,
        )
        self._defers = program.defers_updates
        self.num_updates = 0

    def step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, number: int, lr: float) -> StepResult:
        """Run optimizer step ``number`` (from 0) on its micro-batches.

        Its update is made by the next step, block group by block group, each just before the forward that needs it;
        ``finish_updates`` makes it now. Nobody but the next step may read weights or state before.

        Raises:
            NonFiniteGradientError: the gradient is not finite; weights and state are as before the step.
            NoTrainedTokensError: no position of the step has a label.
        """
        self._access.start_step(number, updates=self._updater.pending is not None)
        if not self._defers:  # no norm decides about the update: each part is made as soon as its gradient is there
            self._updater.pending = self._next_update(number, lr, scale=1.0)
        queued = self._runner.queue(micro_batches, seed=self._seed + number)
        self._access.end_step()
        self._updater.pending = None  # its last part was made on the way
        loss, norm = self._read(queued)
        if not self._defers:
            return StepResult(loss, norm, queued.num_trained_tokens)
        if math.isfinite(norm):
            self._updater.pending = self._next_update(number, lr, scale=clip_coefficient(norm, self._max_grad_norm))
        elif self._nonfinite == "ignore":
            self._updater.pending = self._next_update(number, lr, scale=self._max_grad_norm / norm)  # as in torch
        elif self._nonfinite == "stop":
            raise NonFiniteGradientError(
                f"step {number + 1}: the gradient is not finite (loss {loss}); nothing was updated in this step. "
                'Lower optimizer.learning_rate, look at the data of this step, or write optimizer.nonfinite = "skip"'
            )
        return StepResult(loss, norm, queued.num_trained_tokens, skipped=self._updater.pending is None)

    def _read(self, queued: QueuedLoss) -> tuple[float, float]:
        """Return loss and global norm: the only wait of a step for all that the device has to do."""
        squares = [self._access.squared_norms[layout.name] for layout, _ in self._updater.trained.values()]
        numbers = read_numbers([*queued.terms, *squares])
        num_terms = len(queued.terms)
        return float(sum(numbers[:num_terms])), global_norm(numbers[num_terms:])

    def _next_update(self, number: int, lr: float, *, scale: float) -> PendingUpdate:
        self.num_updates += 1
        return PendingUpdate(number, Update(self.num_updates, lr, scale), self._access.with_gradient)

    def finish_updates(self) -> None:
        """Make the update that the last step left; afterwards weights and state are those after the step.

        Costs nothing when none is left. To be called before anybody else reads them: checkpoint, export, evaluation.
        """
        pending = self._updater.pending
        if pending is not None:
            self._access.run_updates(pending.step + 1)
            self._updater.pending = None
        self._access.finish()


def weight_is_split(graph: ModelGraph) -> bool:
    """Return whether weights are bf16 high halves whose fp32 master continues in a ``low`` block."""
    return graph.dtype.itemsize == 2


__all__ = ["EvaluationEngine"]


class EvaluationEngine:
    """Runs forwards on blocks of a store, between steps that left no update. Used by the thread that trains.

    Args:
        store: holds the weights.
        program: of a training step.
        homes: of the placement.
        timeline: told of every tick.
        cross_entropy: in the place of torch's; None: torch's.
        activity: told of every tick and micro-batch.

    Attributes:
        program: of one pass.
    """

    def __init__(
        self,
        store: TieredStore,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        homes: Mapping[str, str],
        *,
        device: torch.device | str,
        timeline: Timeline | None = None,
        cross_entropy: CrossEntropy | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.program = evaluation_program(program)
        self._access = StoreAccess(
            store, graph, trace, self.program, homes, {}, KernelThreads(1), timeline=timeline, activity=activity
        )
        self._runner = LayerRunner(
            graph,
            self._access,
            device=device,
            compute_dtype=graph.dtype,
            head_rows=trace.head_rows or None,
            trace=trace,
            cross_entropy=cross_entropy,
            activity=activity,
        )

    def run_pass(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, number: int) -> SummedLoss:
        """Run pass ``number`` (from 0) of the evaluation that the store has the schedule of.

        Raises:
            VisitOrderError: in eval mode the model calls its units in another order.
        """
        self._access.start_step(number, updates=False)
        loss = self._runner.evaluate(micro_batches)
        self._access.end_step()
        return loss
