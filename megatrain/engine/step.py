"""One optimizer step over the blocks of a store.

`StepEngine.step` runs the model's forward and backward (`forward.py`). Whenever the running model needs weights, a
place for an activation or a gradient accumulator, it asks `StoreAccess`, which takes the next op from the tape, leases
the op's blocks from the store, and does with each copy afterwards what the tape says. Nothing is decided here: what is
leased where, fetched, pinned or evicted is on the tape, compiled before the step.

Gradients are clipped exactly: the global norm is known after the whole backward, so the update of a step is made by
the next one, block group by block group, each just before the forward that reads its weights. Where no global norm is
asked for, each group is updated during the backward that completes its gradient, and `LayerScales` decides about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from megatrain.base.progress import Activity
from megatrain.engine.access import StoreAccess
from megatrain.engine.forward import LayerRunner, PassOrder, QueuedLoss
from megatrain.engine.labels import count_labels, shifted_labels
from megatrain.engine.loss import PartialMean, mean_figures
from megatrain.engine.updates import LayerScales, PendingUpdate, Updater
from megatrain.optim.base import Update
from megatrain.optim.clip import NonFiniteGradientError, decide_on_device, global_norm, gradient_scale
from megatrain.optim.matrices import DeviceMatrices
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.collectives import Alone

if TYPE_CHECKING:
    from megatrain.base.timeline import Timeline
    from megatrain.engine.streamed import StepRecipe, StreamedModel
    from megatrain.ranks.collectives import Collectives
    from tiered import TieredStore

__all__ = ["EvaluationEngine", "StepEngine", "StepResult"]


_Result = TypeVar("_Result")

_ADVICE = 'Lower optimizer.learning_rate, look at the data of this step, or write optimizer.nonfinite = "skip"'


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step.

    Attributes:
        loss: token-weighted mean over the step, before the update.
        grad_norm: global norm before clipping.
        skipped: the gradient was not finite and is not used.
        left_out: layers whose gradients alone were not finite and are not used.
        figures: means that the loss tells of the step, by name.
    """

    loss: float
    grad_norm: float
    num_trained_tokens: int
    skipped: bool = False
    left_out: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


class StepEngine:
    """Runs optimizer steps on blocks of a store. Used by one thread.

    Of several ranks each calls the same methods in the same order, and gives all micro-batches of a step, of which it
    computes its own. Losses, norms and decisions are the same on all of them.

    Args:
        store: Holds every block of the model's program, with contents for weights and optimizer state.
        threads: Threads of gradient sums and norms; None: as many as torch has.

    Attributes:
        num_updates: Steps whose gradient was used, which is what the optimizer counts; skipped ones are left out.
    """

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        recipe: StepRecipe,
        *,
        collectives: Collectives | Alone | None = None,
        threads: KernelThreads | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        program = model.program
        self._recipe, self._program = recipe, program
        self._collectives = collectives or Alone()
        self._updater = Updater(model, recipe)
        self._access = StoreAccess(
            store, model, threads or KernelThreads(), self._collectives, self._updater, timeline, activity
        )
        self._runner = LayerRunner(
            model.graph,
            self._access,
            device=model.device,
            order=PassOrder(
                recipe.order,
                model.trace.head_rows or None,
                model.trace.head_columns,
                parts_in_turn=any(model.trace.visits[visit].is_head for visit, _ in program.cuts.passing),
            ),
            trace=model.trace,
            objective=recipe.objective,
            recompute=program.recompute,
            compiler=recipe.compiler,
            activity=activity,
        )
        self._defers = program.updates.are_deferred
        self._pending: PendingUpdate | None = None  # update of the last step, to be made by the next
        self._spoiled = ""  # why weights and state are those of no step
        self.num_updates = 0

    def step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, number: int, lr: float) -> StepResult:
        """Run optimizer step ``number`` (from 0) on its micro-batches.

        Its update is made by the next step, or now by ``finish_updates``. Until then nothing else may read weights or
        optimizer state. Where all of them are in the memory of a device, this step queues its update itself.

        Raises:
            NonFiniteGradientError: the gradient is not finite. Weights and state are as before the step; but where
                updates are not deferred and other layers were updated already, they are those of no step, and this is
                raised by every further call.
            NoTrainedTokensError: no position of the step has a label.
        """
        self._refuse_if_spoiled()
        scales = None if self._defers else LayerScales(self._recipe.max_grad_norm, self._recipe.nonfinite)
        num_tokens = _num_tokens(micro_batches)
        with self._access.background:
            if scales is None:
                self._access.start_step(number, self._pending, num_tokens=num_tokens)
            else:
                update = self._next_update(lr, scale=1.0)
                self._access.start_step(number, immediate=update, scales=scales, num_tokens=num_tokens)
            queued = self._queue(micro_batches, seed=self._recipe.seed + number)
            self._access.end_step()
            self._pending = None  # its last group was updated on the way
            arriving = self._send(queued)
            if self._access.updates_ahead:
                # Before the host waits: the device updates while the host begins the next step.
                self._access.update_ahead(PendingUpdate(number, self._undecided(lr), self._access.with_gradient))
        result = self._read(queued, arriving)
        loss, norm = result.loss, result.grad_norm
        if scales is not None:
            return self._judged(scales, result, number)
        scale = gradient_scale(norm, self._recipe.max_grad_norm, self._recipe.nonfinite)
        if scale is not None:
            update = self._next_update(lr, scale=scale)
        elif self._recipe.nonfinite == "stop":
            raise NonFiniteGradientError(
                f"step {number + 1}: the gradient is not finite (loss {loss}); nothing was updated in this step. "
                f"{_ADVICE}"
            )
        else:
            return replace(result, skipped=True)
        if not self._access.updates_ahead:
            self._pending = PendingUpdate(number, update, self._access.with_gradient)
        return result

    def _judged(self, scales: LayerScales, result: StepResult, number: int) -> StepResult:
        """Return the result of a step whose layers were updated, or not, in its backward."""
        if not scales.left_out:
            return result
        if not scales.num_used:
            self.num_updates -= 1
        if self._recipe.nonfinite == "skip":
            return replace(result, skipped=not scales.num_used, left_out=tuple(scales.left_out))
        what = "nothing was updated in this step"
        if scales.num_used:
            what = (
                f"{scales.num_used} layers, those nearer to the loss, were updated in this step already, so the run "
                "has to go on from its last checkpoint"
            )
        text = f"step {number + 1}: the gradient of {scales.left_out[0]} is not finite (loss {result.loss}); {what}"
        self._spoiled = text if scales.num_used else ""
        raise NonFiniteGradientError(f"{text}. {_ADVICE}")

    def _refuse_if_spoiled(self) -> None:
        if self._spoiled:
            raise NonFiniteGradientError(self._spoiled)

    def _queue(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, seed: int) -> QueuedLoss:
        """Queue forward and backward of this rank's micro-batches of a step."""
        own = self._program.sharding.lanes.micro_batches_of_rank(self._program.sharding.shards.rank, len(micro_batches))
        if len(own) == len(micro_batches):
            return self._runner.queue(micro_batches, seed=seed)
        shifted = [shifted_labels(each["labels"]).reshape(-1) for each in micro_batches]
        counts = [count_labels(labels) for labels in shifted]
        queued = self._runner.queue(
            [micro_batches[number] for number in own],
            num_items=sum(counts),
            seed=seed,
            first_number=own.start,
            size=self._recipe.objective.loss.size_of_step(micro_batches, shifted),
        )
        return replace(queued, num_trained_tokens=sum(counts))

    def _send(self, queued: QueuedLoss) -> Callable[[], tuple[list[float], list[tuple[str, float, int]]]]:
        """Send loss, norms and figures to the host; return what waits for them."""
        layouts = [layout for layout, _ in self._updater.trained.values()]
        own = [(figure.name, figure.total, figure.count) for figure in queued.figures]
        return self._access.agree(layouts, queued.terms, own)

    def _read(
        self, queued: QueuedLoss, arriving: Callable[[], tuple[list[float], list[tuple[str, float, int]]]]
    ) -> StepResult:
        """Return loss, global norm and figures of all ranks: the only host sync of a step."""
        layouts = [layout for layout, _ in self._updater.trained.values()]
        terms, figures = arriving()
        means = mean_figures([PartialMean(*each) for each in figures], [total for _, total, _ in figures])
        return StepResult(
            float(sum(terms)),
            global_norm([float(self._access.squared_norms[layout.name]) for layout in layouts]),
            queued.num_trained_tokens,
            figures=self._recipe.objective.loss.told(means),
        )

    def _undecided(self, lr: float) -> Update:
        """Return the update of the step that has just ended, whose factor the device knows: it may turn out unused."""
        norms = [self._access.squared_norms[layout.name] for layout, _ in self._updater.trained.values()]
        squares = [norm for norm in norms if isinstance(norm, torch.Tensor)]
        assert len(squares) == len(norms), "a norm on the host"
        decision = decide_on_device(squares, self._recipe.max_grad_norm, self._recipe.nonfinite)
        return Update(self.num_updates + 1, lr, decision=decision)

    def _next_update(self, lr: float, *, scale: float) -> Update:
        self.num_updates += 1
        return Update(self.num_updates, lr, scale)

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes per link outside of blocks: Muon's matrices between RAM and device, and what went between ranks."""
        if not isinstance(self._updater.matrices, DeviceMatrices):
            return dict(self._collectives.moved_bytes)
        tier, nbytes = self._program.compute_tier, self._updater.matrices.moved_bytes
        return {f"ram->{tier}": nbytes, f"{tier}->ram": nbytes, **self._collectives.moved_bytes}

    @property
    def window_bytes(self) -> int:
        """The most that full copies of weights, sums of gradients and what was received have taken together."""
        return self._access.window_bytes

    @property
    def moving_s(self) -> Mapping[str, float]:
        """By link, the seconds in which directions of matrices were on their way."""
        if not isinstance(matrices := self._updater.matrices, DeviceMatrices):
            return {}
        tier = self._program.compute_tier
        return {f"ram->{tier}": matrices.sent_s, f"{tier}->ram": matrices.fetched_s}

    def finish_updates(self) -> None:
        """Make the update that the last step left; afterwards weights and state are those after that step.

        Call it before anything else reads them: checkpoint, export, evaluation. Does nothing where no update is left.

        Raises:
            NonFiniteGradientError: weights and state are those of no step, see ``step``.
        """
        self._refuse_if_spoiled()
        if self._pending is not None:
            self._access.run_updates(self._pending)
            self._pending = None
        self._access.finish()


class EvaluationEngine:
    """Runs forwards on blocks of a store, between steps with no update pending. Used by the thread that trains."""

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        *,
        collectives: Collectives | Alone | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.program = model.program
        self._access = StoreAccess(
            store, model, KernelThreads(1), collectives or Alone(), timeline=timeline, activity=activity
        )
        self._runner = LayerRunner(
            model.graph,
            self._access,
            device=model.device,
            order=PassOrder(head_rows=model.trace.head_rows or None, head_columns=model.trace.head_columns),
            trace=model.trace,
            activity=activity,
        )

    def run_pass(
        self,
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        head: Callable[[LayerRunner, Sequence[Mapping[str, torch.Tensor]]], _Result],
        *,
        number: int,
    ) -> _Result:
        """Run pass ``number`` (from 0) of those whose schedule the store has.

        Args:
            head: Has the layers run them, once, and returns what is asked of them: a method of ``LayerRunner``.

        Raises:
            VisitOrderError: in eval mode the model calls its units in another order.
        """
        self._access.start_step(number, num_tokens=_num_tokens(micro_batches))
        found = head(self._runner, micro_batches)
        self._access.end_step()
        return found

    def finish(self) -> None:
        """Evict the copies that stayed for another pass."""
        self._access.finish()


def _num_tokens(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    return sum(each["input_ids"].numel() for each in micro_batches)
