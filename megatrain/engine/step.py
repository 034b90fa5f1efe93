"""One optimizer step over the blocks of a store.

`StepEngine.step` runs the model's forward and backward (`forward.py`). The running model requests weights, activation
blocks and gradient accumulators from `StoreAccess`. `StoreAccess` takes the next op from the tape and leases the op's
blocks from the store. It then pins, evicts or discards each copy as the tape specifies. The tape is compiled before the
step and lists all leases, fetches, pins and evictions, so the engine makes no decisions.

Clipping by the global norm is exact. The norm is known only after the whole backward, so the next step runs the
updates. Each update runs just before the forward that reads the updated weights. Without a global norm, updates run in
the same step. Each update then follows the backward that completes its gradient, with a factor from `LayerScales`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from megatrain.base.progress import Activity
from megatrain.engine.forward import LayerRunner, PassOrder, QueuedLoss
from megatrain.engine.head.loss import mean_metrics
from megatrain.engine.micro_batches import count_labels, shifted_labels
from megatrain.engine.tape.access import StoreAccess
from megatrain.engine.tape.updates import LayerScales, PendingUpdate, Updater
from megatrain.optim.base import Update
from megatrain.optim.clip import NonFiniteGradientError, decide_on_device, global_norm, gradient_scale
from megatrain.optim.matrices import DeviceOrthogonalizer
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.collectives import SingleRank

if TYPE_CHECKING:
    from megatrain.base.timeline import Timeline
    from megatrain.engine.tape.leased import HostResults
    from megatrain.engine.tape.streamed import StepRecipe, StreamedModel
    from megatrain.ranks.collectives import Collectives
    from tiered import TieredStore


_Result = TypeVar("_Result")

_ADVICE = 'Lower optimizer.learning_rate, check the data of this step, or write optimizer.nonfinite = "skip"'


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss, gradient norm and metrics of one optimizer step.

    Attributes:
        loss: Token-weighted mean over the step, before the update.
        grad_norm: Global gradient norm before clipping.
        skipped: Whether the step updates no weights, because gradients were not finite.
        skipped_layers: Layers that are not updated, because their gradients were not finite.
        metrics: Metrics of the loss, by name.
    """

    loss: float
    grad_norm: float
    num_trained_tokens: int
    skipped: bool = False
    skipped_layers: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepEngine:
    """Engine that runs optimizer steps over the blocks of a store. Used by one thread.

    All ranks call the same methods in the same order, with all micro-batches of a step. Each rank computes only its own
    micro-batches. Losses, norms and decisions are the same on all ranks.

    Args:
        store: Store with all blocks of the program. Weights and optimizer state must be loaded.
        threads: Threads for gradient sums and norms; None for torch's number of threads.

    Attributes:
        num_updates: Number of steps that updated weights. This is the optimizer's step count.
    """

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        recipe: StepRecipe,
        *,
        collectives: Collectives | SingleRank | None = None,
        threads: KernelThreads | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        program = model.program
        self._recipe, self._program = recipe, program
        self._collectives = collectives or SingleRank()
        self._updater = Updater(model, recipe)
        self._layouts = [layout for layout, _ in self._updater.trained.values()]
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
                is_part_major=any(model.trace.visits[visit].is_head for visit, _ in program.cuts.passing),
            ),
            trace=model.trace,
            objective=recipe.objective,
            recompute=program.recompute,
            compiler=recipe.compiler,
            activity=activity,
        )
        self._are_deferred = program.updates.are_deferred
        self._pending: PendingUpdate | None = None  # update of the last step, run by the next step
        self._failure = ""  # error text after a step with incomplete updates
        self.num_updates = 0

    def step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, step_index: int, lr: float) -> StepResult:
        """Run optimizer step ``step_index`` (from 0) on its micro-batches.

        A deferred update runs in the next step or in ``finish_updates``, whichever is called first. Do not read weights
        or optimizer state before then. If all blocks are in device memory, this step already queues the update.

        Raises:
            NonFiniteGradientError: If the gradient is not finite. Weights and state are unchanged, unless updates are
                not deferred and some layers are already updated. In that case weights and state are unusable, and every
                later call raises this error.
            NoTrainedTokensError: If no position of the step has a label.
        """
        self._raise_if_failed()
        scales = None if self._are_deferred else LayerScales(self._recipe.max_grad_norm, self._recipe.nonfinite)
        num_tokens = _num_tokens(micro_batches)
        with self._access.background:
            if scales is None:
                self._access.start_step(step_index, self._pending, num_tokens=num_tokens)
            else:
                update = self._next_update(lr, scale=1.0)
                self._access.start_step(step_index, immediate_update=update, scales=scales, num_tokens=num_tokens)
            queued_loss = self._queue(micro_batches, seed=self._recipe.seed + step_index)
            self._access.end_step()
            self._pending = None  # the step has run the pending update
            # Queue the transfer of loss, norms and metrics to the host.
            read_results = self._access.sharding.collect_results(self._layouts, queued_loss.terms, queued_loss.metrics)
            if self._access.can_update_ahead:
                # Queue updates before the host waits. The device then updates while the host begins the next step.
                self._access.update_ahead(
                    PendingUpdate(step_index, self._update_on_device(lr), self._access.step_gradients.with_gradient)
                )
        result = self._read(queued_loss, read_results)
        loss, norm = result.loss, result.grad_norm
        if scales is not None:
            return self._check_skipped_layers(scales, result, step_index)
        scale = gradient_scale(norm, self._recipe.max_grad_norm, self._recipe.nonfinite)
        if scale is not None:
            update = self._next_update(lr, scale=scale)
        elif self._recipe.nonfinite == "stop":
            raise NonFiniteGradientError(
                f"step {step_index + 1}: the gradient is not finite (loss {loss}); nothing was updated in this step. "
                f"{_ADVICE}"
            )
        else:
            return replace(result, skipped=True)
        if not self._access.can_update_ahead:
            self._pending = PendingUpdate(step_index, update, self._access.step_gradients.with_gradient)
        return result

    def _check_skipped_layers(self, scales: LayerScales, result: StepResult, step_index: int) -> StepResult:
        """Add skipped layers to a step's result, or raise an error if the recipe does not skip nonfinite gradients."""
        if not scales.skipped_layers:
            return result
        if not scales.num_used:
            self.num_updates -= 1
        if self._recipe.nonfinite == "skip":
            return replace(result, skipped=not scales.num_used, skipped_layers=tuple(scales.skipped_layers))
        effect = "nothing was updated in this step"
        if scales.num_used:
            effect = (
                f"{scales.num_used} layers closest to the loss were already updated in this step, so the run "
                "must resume from its last checkpoint"
            )
        failure = f"step {step_index + 1}: the gradient of {scales.skipped_layers[0]}"
        text = f"{failure} is not finite (loss {result.loss}); {effect}"
        self._failure = text if scales.num_used else ""
        raise NonFiniteGradientError(f"{text}. {_ADVICE}")

    def _raise_if_failed(self) -> None:
        if self._failure:
            raise NonFiniteGradientError(self._failure)

    def _queue(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, seed: int) -> QueuedLoss:
        """Queue forward and backward of this rank's micro-batches."""
        sharding = self._program.sharding
        indexes = sharding.lanes.rank_micro_batches(sharding.shards.rank, len(micro_batches))
        if len(indexes) == len(micro_batches):
            return self._runner.queue(micro_batches, seed=seed)
        targets = [shifted_labels(batch["labels"]).reshape(-1) for batch in micro_batches]
        counts = [count_labels(labels) for labels in targets]
        queued_loss = self._runner.queue(
            [micro_batches[index] for index in indexes],
            num_items=sum(counts),
            seed=seed,
            first_index=indexes.start,
            size=self._recipe.objective.loss.size_of_step(micro_batches, targets),
        )
        return replace(queued_loss, num_trained_tokens=sum(counts))

    def _read(self, queued_loss: QueuedLoss, read_results: Callable[[], HostResults]) -> StepResult:
        """Wait for all ranks, and return the step's result. With deferred updates, a step has no other host sync."""
        terms, metrics = read_results()
        return StepResult(
            float(sum(terms)),
            global_norm([float(self._access.step_gradients.squared_norms[layout.name]) for layout in self._layouts]),
            queued_loss.num_trained_tokens,
            metrics=self._recipe.objective.loss.step_metrics(mean_metrics(metrics)),
        )

    def _update_on_device(self, lr: float) -> Update:
        """Return the finished step's update. The device computes its factor, and cancels the update if necessary."""
        norms = [self._access.step_gradients.squared_norms[layout.name] for layout in self._layouts]
        squares = [norm for norm in norms if isinstance(norm, torch.Tensor)]
        assert len(squares) == len(norms), "a norm is on the host"
        decision = decide_on_device(squares, self._recipe.max_grad_norm, self._recipe.nonfinite)
        return Update(self.num_updates + 1, lr, decision=decision)

    def _next_update(self, lr: float, *, scale: float) -> Update:
        self.num_updates += 1
        return Update(self.num_updates, lr, scale)

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes moved in addition to blocks, by link: Muon's matrices, and traffic between ranks."""
        if not isinstance(self._updater.matrices, DeviceOrthogonalizer):
            return dict(self._collectives.moved_bytes)
        tier, nbytes = self._program.compute_tier, self._updater.matrices.moved_bytes
        return {f"ram->{tier}": nbytes, f"{tier}->ram": nbytes, **self._collectives.moved_bytes}

    @property
    def window_bytes(self) -> int:
        """Peak total bytes of full copies of weights, gradient sums and received data."""
        return self._access.sharding.window_bytes

    @property
    def moving_s(self) -> Mapping[str, float]:
        """Seconds spent transferring Muon's matrices, by link."""
        if not isinstance(matrices := self._updater.matrices, DeviceOrthogonalizer):
            return {}
        tier = self._program.compute_tier
        return {f"ram->{tier}": matrices.send_s, f"{tier}->ram": matrices.fetch_s}

    def finish_updates(self) -> None:
        """Run the pending update, if any, so that weights and state include the last step.

        Call this before a checkpoint, an export or an evaluation reads weights or state.

        Raises:
            NonFiniteGradientError: If weights and state are unusable after an earlier error; see ``step``.
        """
        self._raise_if_failed()
        if self._pending is not None:
            self._access.run_updates(self._pending)
            self._pending = None
        self._access.finish()


class EvaluationEngine:
    """Engine that runs evaluation passes over a store's blocks, on the training thread, after ``finish_updates``."""

    def __init__(
        self,
        store: TieredStore,
        model: StreamedModel,
        *,
        collectives: Collectives | SingleRank | None = None,
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.program = model.program
        self._access = StoreAccess(
            store, model, KernelThreads(1), collectives or SingleRank(), timeline=timeline, activity=activity
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
        pass_index: int,
    ) -> _Result:
        """Run evaluation pass ``pass_index`` (counted from 0) in the store's schedule, and return its results.

        Args:
            head: Method of ``LayerRunner`` that runs one forward and returns its results.

        Raises:
            VisitOrderError: If the model calls its units in a different order in eval mode.
        """
        self._access.start_step(pass_index, num_tokens=_num_tokens(micro_batches))
        results = head(self._runner, micro_batches)
        self._access.end_step()
        return results

    def finish(self) -> None:
        """Evict the copies that are still pinned for the next pass."""
        self._access.finish()


def _num_tokens(micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> int:
    return sum(batch["input_ids"].numel() for batch in micro_batches)
