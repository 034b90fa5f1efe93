"""One visit of a unit: lease and bind its weights, and run its forward, its recompute and its backward.

`UnitVisit` leaves some of its work to other files:

- `idle.py` fetches no weights if no token is routed to the unit.
- `passing.py` looks up embedding rows for all micro-batches at once if the weight's parts are leased one at a time.
- `graph_keeping.py` keeps graphs for the backward, or `input_saving.py` keeps inputs for the recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.unit.idle import RoutedWeights
from megatrain.engine.unit.passing import lease_passing_parts
from megatrain.engine.unit.unit_run import UnitRun

if TYPE_CHECKING:
    from megatrain.base.progress import Activity
    from megatrain.engine.program.block_access import BlockAccess, GradientSink
    from megatrain.engine.unit.arguments import CapturedResult
    from megatrain.engine.unit.bound_unit import BoundUnit
    from megatrain.engine.unit.graph_keeping import GraphKeeping
    from megatrain.engine.unit.input_saving import AbsentMicroBatches, InputSaving
    from megatrain.engine.unit.state import RandomStates
    from megatrain.engine.unit.suspend import SuspendedForward
    from megatrain.engine.unit.unit_run import KeptRun


class UnitVisit:
    """Visit of a unit in one pass over a group of micro-batches.

    Args:
        strategy: Strategy that runs the unit in the forward and keeps either graphs or inputs.
        anchor: Scalar that requires grad. It connects units without differentiable inputs to the outer graph.
        is_backward_planned: Whether the program plans a backward of this visit. If so, a skipped backward also leases
            the weights.

    Attributes:
        pending_outputs: Outputs of the forward that are not yet part of the outer graph.
    """

    def __init__(
        self,
        index: int,
        bound: BoundUnit,
        visits: VisitSequence,
        strategy: GraphKeeping | InputSaving,
        absent_micro_batches: AbsentMicroBatches,
        anchor: Tensor,
        is_backward_planned: bool = False,
    ) -> None:
        self.index, self.bound, self.visits = index, bound, visits
        self._access, self._activity = visits.access, visits.activity
        self._weights = RoutedWeights(bound, index, visits.access)
        self._strategy, self._absent_micro_batches = strategy, absent_micro_batches
        self._anchor, self._is_backward_planned = anchor, is_backward_planned
        self._kept_runs: list[KeptRun] = []
        self._row_indexes: list[list[Tensor]] = []  # indexes of the rows to look up, by weight and call
        self.pending_outputs: list[Tensor] = []

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, forwards: Sequence[SuspendedForward]) -> list[Callable[[], Any]]:
        """Run the unit for every waiting forward. Return functions that build the results of the calls."""
        self._access.begin("forward", self.index)
        calls = [forward.call for forward in forwards if forward.call is not None]
        self._weights.record_calls(calls)
        runs: list[_FirstRun] = []
        # Lease the weights once for all micro-batches.
        with self._weights.lease() as weights, self.bound.bind(weights) as leaves:
            self._row_indexes = self.bound.look_up(calls)
            # Run the unit for each micro-batch, and save the tensors that its backward needs.
            for call_index, forward in enumerate(forwards):
                self._activity.micro_batch = forward.micro_batch + 1
                self._absent_micro_batches.put(stop=forward.micro_batch)
                runs.append(self._run_forward(UnitRun.from_call(self.bound, forward, call_index), forward, leaves))
            self._absent_micro_batches.put()
        # The leases of the weights have ended. Add the unit to the outer graph as one node.
        inputs = [tensor for run in runs for tensor in run.inputs]
        outputs: tuple[Tensor, ...] = ()
        if self.pending_outputs:
            with torch.enable_grad():
                outputs = _UnitFunction.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
            self.pending_outputs = []
        return [run.result_builder(outputs) for run in runs]

    def _run_forward(self, run: UnitRun, forward: SuspendedForward, leaves: dict[str, Tensor]) -> _FirstRun:
        """Run one micro-batch. If it needs a backward, keep its graph or its inputs."""
        tensors, originals = list(run.captured.tensors), run.captured.originals
        run.captured.forget_contents()
        start, inputs = len(self.pending_outputs), list[Tensor]()
        if run.is_differentiable:
            inputs = run.activations
            result, kept_run = self._strategy.run(run, forward, leaves)
            # The model can change outputs in place, which autograd forbids for views. `.data` is an alias, not a view.
            self.pending_outputs += [output.data for output in result.outputs]
            kept_run.record_aliases(self.pending_outputs[start:])
            self._kept_runs.append(kept_run)
        else:
            result = run.compute(run.with_activations(run.leaves()), self.visits.random, keep_graph=False)
        forward.random_state = self.visits.random.get()
        result.outputs = []  # frees the unit's graph if it is not kept
        return _FirstRun(result, inputs, slice(start, len(self.pending_outputs)), tensors, originals, forward)

    # -- backward ----------------------------------------------------------------------------------------------

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward of all micro-batches. Accumulate the weight gradients, and return the input gradients."""
        self.visits.begin_backward(self.index)
        grad_inputs: list[Tensor | None] = []
        sink: GradientSink | None = None
        start = 0
        with ExitStack() as stack:
            # Lease the weights, and the accumulators of their gradients.
            weights = stack.enter_context(self._weights.lease())
            leaves = stack.enter_context(self.bound.bind(weights))
            if leaves:
                sink = stack.enter_context(self._access.gradients(self.bound.unit, self.index))
                stack.enter_context(self.bound.receiver.use_sink(sink))
            if self._strategy.has_recompute:
                self.bound.rows.look_up_again(self._row_indexes)
            # Recompute, run the backward and reduce the gradients, one micro-batch at a time.
            pending, self._kept_runs, self._row_indexes = self._kept_runs[::-1], [], []
            while pending:
                kept_run = pending.pop()  # frees each graph before the next one is built or used
                self._activity.micro_batch = kept_run.micro_batch + 1
                if sink is not None:
                    sink.set_micro_batch(kept_run.micro_batch)
                self._absent_micro_batches.take(stop=kept_run.micro_batch)
                grads = grad_outputs[start : start + kept_run.num_outputs]
                start += kept_run.num_outputs
                grad_inputs += self._run_backward(kept_run, grads, leaves, sink)
            self._absent_micro_batches.take()
        # All leases of the visit have ended.
        return grad_inputs

    def _run_backward(
        self, run: KeptRun, grad_outputs: Sequence[Tensor | None], leaves: dict[str, Tensor], sink: GradientSink | None
    ) -> list[Tensor | None]:
        """Run the backward of one micro-batch on its kept or recomputed graph."""
        if all(gradient is None for gradient in grad_outputs):
            run.skip()
            return [None] * len(run.requires_grad)
        with run.graph(leaves) as graph:
            with self.bound.backward_context():
                input_grads, weight_grads = graph.gradients(grad_outputs)
            if sink is not None:
                for name, gradient in zip(graph.weights, weight_grads, strict=True):
                    if gradient is not None:
                        sink.add(name, gradient)
            grads = iter(input_grads)
            return [next(grads) if requires_grad else None for requires_grad in run.requires_grad]

    def replace_backward(self, compute: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
        """Return the input gradients that `compute()` computes. This visit's backward does not run."""
        self.visits.begin_backward(self.index)
        grad_inputs = compute()  # runs while graphs and inputs still exist
        self._kept_runs, self._row_indexes = [], []
        return grad_inputs

    def skip_backward(self) -> None:
        """Take this visit's planned leases without computing, because the loss does not depend on the visit."""
        with ExitStack() as stack:
            if self._is_backward_planned or self._weights.is_idle:
                lease_passing_parts(stack.enter_context(self._weights.lease()))
            if self.bound.trainable:
                stack.enter_context(self._access.gradients(self.bound.unit, self.index))
        for kept_run in self._kept_runs:
            self._absent_micro_batches.take(stop=kept_run.micro_batch)
            kept_run.skip()
        self._absent_micro_batches.take()
        self._kept_runs, self._row_indexes = [], []


@dataclass(slots=True)
class _FirstRun:
    """Run of one micro-batch in a visit's forward.

    Attributes:
        inputs: Activations among the arguments, as tensors of the outer graph.
        part: Positions of this run's outputs among the outputs of all micro-batches.
    """

    result: CapturedResult
    inputs: list[Tensor]
    part: slice
    tensors: list[Tensor | None]
    originals: list[Any]
    forward: SuspendedForward

    def result_builder(self, outputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Return a function that builds the result of the call, given the outputs of all micro-batches."""
        assert self.forward.call is not None
        run_outputs, collector = outputs[self.part], self.forward.call.collector
        return lambda: self.result.deliver(run_outputs, self.tensors, self.originals, collector)


class _UnitFunction(torch.autograd.Function):
    """Node that represents a visit in the outer graph. It maps all micro-batches' inputs to their outputs.

    The outer graph records the model's own code between units. Autograd runs the node's backward after the gradients of
    all micro-batches have arrived. The visit can therefore lease its weights once for all micro-batches.
    """

    @staticmethod
    def forward(ctx: Any, visit: UnitVisit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        return tuple(visit.pending_outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        visit: UnitVisit = ctx.visit
        return (None, None, *visit.visits.run_backward(visit, grad_outputs))


class VisitSequence:
    """Visits of one pass over a group of micro-batches, in forward order.

    Backwards run in reverse order. Autograd skips visits that the loss does not depend on. To follow the program's
    ticks, each backward first closes the visits that autograd has skipped since the previous backward.

    Attributes:
        run_backward: Function that runs a visit's backward, given output gradients, and returns input gradients.
    """

    def __init__(self, access: BlockAccess, random: RandomStates, activity: Activity) -> None:
        self.access, self.random, self.activity = access, random, activity
        self.run_backward: Callable[[UnitVisit, Sequence[Tensor | None]], list[Tensor | None]] = UnitVisit.backward
        self._visits: list[UnitVisit] = []
        self._next_visit = -1  # visit whose backward comes next

    def __len__(self) -> int:
        return len(self._visits)

    def __iter__(self) -> Iterator[UnitVisit]:
        return iter(self._visits)

    def append(self, visit: UnitVisit) -> None:
        """Add the next visit of the forward."""
        self._visits.append(visit)

    def clear(self) -> None:
        """Drop the visits of a pass, which breaks the reference cycles between the visits and this object."""
        self._visits.clear()

    def start_backward(self) -> None:
        """Begin the backward pass at the last visit."""
        self._next_visit = len(self._visits) - 1

    def begin_backward(self, visit: int) -> None:
        """Close the visits that autograd has skipped, then announce the backward of a visit."""
        self._close_until(visit)
        assert self._next_visit == visit, (self._next_visit, visit)
        self.access.begin("backward", visit)
        self._next_visit -= 1

    def end_backward(self) -> None:
        """Close the remaining visits, which autograd has skipped."""
        self._close_until(-1)

    def _close_until(self, visit: int) -> None:
        while self._next_visit > visit:
            self.access.begin("backward", self._next_visit)
            self._visits[self._next_visit].skip_backward()
            self._next_visit -= 1
