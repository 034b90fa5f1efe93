"""One visit of a unit by all micro-batches: run, keep the inputs (or the graph), and run again for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.activity import Activity
from megatrain.engine.arguments import CapturedArguments, CapturedResult
from megatrain.engine.kept import KeptGraph

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from megatrain.engine.access import BlockAccess, GradientSink
    from megatrain.engine.suspend import RandomStates, SuspendedForward, ThreadModes
    from megatrain.engine.units import BoundUnit

__all__ = ["UnitVisit", "optional_gradients"]


@dataclass(slots=True)
class _MicroBatch:
    """What the backward of one micro-batch needs to run the unit again, besides its activations."""

    number: int
    captured: CapturedArguments
    record_keys: tuple[str, ...]
    random_state: tuple[Tensor, ...]
    modes: ThreadModes
    requires_grad: tuple[bool, ...]
    num_outputs: int


class UnitVisit:
    """A use site of a unit in one pass over a group of micro-batches.

    Args:
        number: Ordinal of the visit in the forward.
        bound: The unit.
        access: Where weights come from, and where gradients and activations go.
        random: Random state of the compute device.
        announce_backward: Called with the visit's number before its backward asks for anything.
        anchor: A scalar that requires grad: ties outputs of units without differentiable inputs to the graph.
        keeps_graph: Whether the graph of the forward waits for the backward, so that nothing is put away and run again.
            The weights must then stay where they are, unchanged, until that backward.
        activity: Told of every micro-batch.
    """

    def __init__(
        self,
        number: int,
        bound: BoundUnit,
        access: BlockAccess,
        random: RandomStates,
        announce_backward: Callable[[int], None],
        anchor: Tensor,
        keeps_graph: bool = False,
        activity: Activity | None = None,
    ) -> None:
        self.number = number
        self.bound = bound
        self._access = access
        self._random = random
        self._announce_backward = announce_backward
        self._anchor = anchor
        self._keeps_graph = keeps_graph
        self._activity = activity or Activity()
        self._micro_batches: list[_MicroBatch | KeptGraph] = []
        self._first_micro_batch = 0
        self._leaves: dict[str, Tensor] = {}
        self.pending_outputs: list[Tensor] = []

    def shared_tensors(self) -> list[Tensor]:
        """Return what the backward keeps by reference: masks, rotary tables, ids."""
        again = [item for item in self._micro_batches if isinstance(item, _MicroBatch)]
        return [tensor for item in again for tensor in item.captured.tensors if tensor is not None]

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, forwards: Sequence[SuspendedForward]) -> list[Callable[[], Any]]:
        """Run the unit for every waiting forward; return what each of them resumes with."""
        self._access.begin("forward", self.number)
        self._first_micro_batch = forwards[0].micro_batch
        inputs: list[Tensor] = []
        results: list[tuple[CapturedResult, list[Tensor | None], SuspendedForward, slice, list[Any]]] = []
        with self._access.weights(self.bound.unit, self.number) as weights, self.bound.bound(weights) as leaves:
            if self._keeps_graph:
                self._leaves = leaves
            for forward in forwards:
                self._activity.micro_batch = forward.micro_batch + 1
                call = forward.call
                assert call is not None
                captured = CapturedArguments(self.bound.unit.name, call.args, call.kwargs)
                tensors, originals = list(captured.tensors), captured.originals
                captured.forget_contents()
                result, differentiable = self._run_first(forward, captured, tensors)
                start = len(self.pending_outputs)
                if differentiable:
                    inputs.extend(tensor for i in captured.activations if (tensor := tensors[i]) is not None)
                    # `.data` makes an alias that is no view, so that the model may change it in place.
                    self.pending_outputs.extend(output.data for output in result.outputs)
                    if isinstance(kept := self._micro_batches[-1], KeptGraph):
                        kept.handed_out(self.pending_outputs[start:])
                stop = len(self.pending_outputs)
                result.outputs = []
                results.append((result, tensors, forward, slice(start, stop), originals))
        outputs: tuple[Tensor, ...] = ()
        if self.pending_outputs:
            with torch.enable_grad():
                outputs = _UnitFunction.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
            self.pending_outputs = []
        return [
            _delivery(result, outputs[part], tensors, originals, forward)
            for result, tensors, forward, part, originals in results
        ]

    def _run_first(
        self, forward: SuspendedForward, captured: CapturedArguments, tensors: list[Tensor | None]
    ) -> tuple[CapturedResult, bool]:
        """Run one micro-batch, keeping its inputs or its graph."""
        call = forward.call
        assert call is not None
        streams = [tensors[i] for i in captured.activations]
        requires_grad = tuple(stream is not None and stream.requires_grad for stream in streams)
        differentiable = forward.modes.grad_enabled and (any(requires_grad) or bool(self.bound.trainable))
        keys = tuple(call.collector) if call.collector else ()
        keeps_graph = differentiable and self._keeps_graph
        if differentiable and not keeps_graph:
            for index, stream in enumerate(streams):
                assert stream is not None
                self._access.put_activation(self.number, forward.micro_batch, index, stream.detach())
        leaves = list(tensors)
        for i, requires in zip(captured.activations, requires_grad, strict=True):
            tensor = tensors[i]
            assert tensor is not None
            # Contiguous, as it will come back for the recompute: kernels may round differently for other strides.
            leaves[i] = tensor.detach().contiguous().requires_grad_(requires and differentiable)
        random_state = forward.random_state
        # A cast of a weight that autocast remembers would be one node of the graph for several uses: other sums.
        with _modes(forward.modes, cache_enabled=False if keeps_graph else None):
            self._random.set(random_state)
            result = self.bound.run(captured, leaves, keys, keep_graph=keeps_graph)
            forward.random_state = self._random.get()
        if keeps_graph:
            inputs = [leaf for i in captured.activations if (leaf := leaves[i]) is not None]
            self._micro_batches.append(KeptGraph(inputs, result.outputs))
        elif differentiable:
            for i in captured.activations:
                captured.tensors[i] = None
            self._micro_batches.append(
                _MicroBatch(
                    forward.micro_batch,
                    captured,
                    keys,
                    random_state,
                    forward.modes,
                    requires_grad,
                    len(result.outputs),
                )
            )
        return result, differentiable

    # -- backward ----------------------------------------------------------------------------------------------

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the unit again unless its graphs were kept; send parameter gradients out, return those of the inputs."""
        self._announce_backward(self.number)
        self._activity.micro_batch = self._first_micro_batch
        grad_inputs: list[Tensor | None] = []
        start = 0
        with ExitStack() as stack:
            weights = stack.enter_context(self._access.weights(self.bound.unit, self.number))
            leaves = stack.enter_context(self.bound.bound(weights))
            sink: GradientSink | None = None
            if leaves:
                sink = stack.enter_context(self._access.gradients(self.bound.unit, self.number))
            # One after the other out of the list, so that each graph is gone before the next one is used.
            waiting, self._micro_batches = self._micro_batches[::-1], []
            while waiting:
                item = waiting.pop()
                self._activity.micro_batch += 1
                grads = grad_outputs[start : start + item.num_outputs]
                start += item.num_outputs
                if isinstance(item, KeptGraph):
                    grad_inputs.extend(self._backward_kept(item, grads, sink))
                else:
                    grad_inputs.extend(self._backward_one(item, grads, leaves, sink))
        self._leaves = {}
        return grad_inputs

    def skip_backward(self) -> None:
        """Close accumulators and activations that this step's loss does not depend on."""
        if self.bound.trainable:
            with self._access.gradients(self.bound.unit, self.number):
                pass
        for item in self._micro_batches:
            if isinstance(item, KeptGraph):
                continue
            for index in range(len(item.captured.activations)):
                with self._access.get_activation(self.number, item.number, index):
                    pass
        self._micro_batches, self._leaves = [], {}

    def _backward_kept(
        self, item: KeptGraph, grad_outputs: Sequence[Tensor | None], sink: GradientSink | None
    ) -> list[Tensor | None]:
        if all(gradient is None for gradient in grad_outputs):
            return [None] * len(item.requires_grad)
        item.check()
        with self.bound.in_backward():
            found = optional_gradients(item.edges, grad_outputs, [*item.wanted, *self._leaves.values()])
        _add_gradients(sink, self._leaves, found[len(item.wanted) :])
        grads = iter(found[: len(item.wanted)])
        return [next(grads) if requires else None for requires in item.requires_grad]

    def _backward_one(
        self,
        item: _MicroBatch,
        grad_outputs: Sequence[Tensor | None],
        leaves: dict[str, Tensor],
        sink: GradientSink | None,
    ) -> list[Tensor | None]:
        captured = item.captured
        with ExitStack() as stack:
            tensors = list(captured.tensors)
            streams: list[Tensor] = []
            for index, i in enumerate(captured.activations):
                kept = stack.enter_context(self._access.get_activation(self.number, item.number, index))
                streams.append(kept.detach().requires_grad_(item.requires_grad[index]))
                tensors[i] = streams[-1]
            if all(gradient is None for gradient in grad_outputs):
                return [None] * len(streams)
            wanted = [stream for stream in streams if stream.requires_grad]
            with _modes(item.modes, cache_enabled=False):
                self._random.set(item.random_state)
                result = self.bound.run(captured, tensors, item.record_keys, keep_graph=True)
            outputs = result.outputs
            assert len(outputs) == item.num_outputs, (self.bound.unit.name, len(outputs), item.num_outputs)
            with self.bound.in_backward():
                found = optional_gradients(outputs, grad_outputs, [*wanted, *leaves.values()])
            _add_gradients(sink, leaves, found[len(wanted) :])
            grads = iter(found[: len(wanted)])
            return [next(grads) if stream.requires_grad else None for stream in streams]


def _add_gradients(sink: GradientSink | None, names: Iterable[str], gradients: Sequence[Tensor | None]) -> None:
    if sink is not None:
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                sink.add(name, gradient)


def optional_gradients(
    outputs: Sequence[Tensor | GradientEdge], grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of `inputs`: None where no output with a gradient depends on one."""
    pairs = [(out, grad) for out, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
    if not inputs:
        return []
    roots: list[Any] = [out for out, _ in pairs]  # torch takes tensors and edges
    found = torch.autograd.grad(roots, list(inputs), [grad for _, grad in pairs], allow_unused=True)
    return list(found)


def _delivery(
    result: CapturedResult,
    outputs: Sequence[Tensor],
    tensors: list[Tensor | None],
    originals: list[Any],
    forward: SuspendedForward,
) -> Callable[[], Any]:
    call = forward.call
    assert call is not None
    collector = call.collector
    return lambda: result.deliver(outputs, tensors, originals, collector)


@contextmanager
def _modes(modes: ThreadModes, *, cache_enabled: bool | None = None) -> Iterator[None]:
    """Run under a suspended forward's grad mode and autocast."""
    outer = type(modes).current(modes.autocast[-1][0])
    modes.restore()
    if cache_enabled is not None:
        torch.set_autocast_cache_enabled(cache_enabled)
    try:
        yield
    finally:
        outer.restore()


class _UnitFunction(torch.autograd.Function):
    """Ties a visit's outputs to its inputs in the outer graph."""

    @staticmethod
    def forward(ctx: Any, visit: UnitVisit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        return tuple(visit.pending_outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        visit: UnitVisit = ctx.visit
        return (None, None, *visit.backward(grad_outputs))
