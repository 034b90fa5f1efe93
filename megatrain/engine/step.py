"""One optimizer step: forward and backward layer by layer, exact clipping, the update just before the next forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatrain.activity import Activity
from megatrain.engine.program import Stays, StepProgram
from megatrain.engine.residency import PendingUpdate, StoreAccess, Updater
from megatrain.engine.runner import LayerRunner, QueuedLoss
from megatrain.engine.staging import read_numbers
from megatrain.optim.base import Optimizer, Segment, Update
from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    import torch

    from megatrain.engine.compiled import LayerCompiler
    from megatrain.engine.objective import CrossEntropy, Objective
    from megatrain.engine.trace import VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.models.layout import UnitLayout
    from megatrain.timeline import Timeline
    from tiered.store import TieredStore


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
