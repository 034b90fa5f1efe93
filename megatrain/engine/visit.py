"""One visit of a unit: its weights are leased and bound while its forward, its recompute and its backward run.

The engine's activation checkpointing, unit by unit. Forward: the unit runs once for every micro-batch that waits at it,
without saving anything for autograd; its inputs are offloaded. Backward: the inputs come back, the unit runs again, and
its graph gives the gradients. Outside of both its parameters are placeholders without memory. A visit whose graph is
kept (`Recompute.kept_graphs`) skips the offload and the recompute; one that saves results of attention, or of products
as well (`Recompute.saving`), does not compute these again. What no gradient needs is never computed again
(`TracedVisit.unneeded`).

`UnitVisit` is the mechanism; `BoundUnit` binds weights to an unmodified module and runs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge, increment_version
from torch.nn import functional

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.progress import Activity
from megatrain.engine import device_kernels
from megatrain.engine.arguments import CapturedArguments, CapturedResult, tree_map
from megatrain.engine.program import BlockAccess, GradientSink, MatrixParts
from megatrain.engine.saved_results import SavedResults
from megatrain.engine.state import without_saved_tensors
from megatrain.engine.suspend import UnitCall, is_suspendable, suspend
from megatrain.engine.unneeded import without_values
from megatrain.engine.weight_gradients import (
    GradientReceiver,
    GradientTarget,
    intercepting,
    looked_up,
    weight_leaf,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.graph import GradientEdge

    from megatrain.engine.state import RandomStates, ThreadModes
    from megatrain.engine.suspend import SuspendedForward
    from megatrain.models.graph import Unit

__all__ = [
    "METADATA_QUERIES",
    "AbsentWeight",
    "BoundUnit",
    "KeptGraph",
    "LayerCompiler",
    "PartedWeight",
    "UnitVisit",
    "VisitSequence",
    "WeightLook",
    "absent_weight",
    "installed_stubs",
    "optional_gradients",
    "placeholder",
    "version_probe",
]


class UnitVisit:
    """A use site of a unit in one pass over a group of micro-batches.

    Args:
        number: Ordinal of the visit in the forward.
        visits: The pass that this visit belongs to.
        anchor: A scalar that requires grad: ties the outputs of units without differentiable inputs to the graph.
        keeps_graph: Whether the graph of the forward is kept for the backward: nothing is offloaded or recomputed. The
            weights must then stay in place, unchanged, until that backward.
        saved_results: Makes what saves results in a block, for the recompute. None: it saves none.
        unused: (micro-batch, index) of activations that are planned, of micro-batches that leave the unit out: they are
            leased all the same. Index None: results.
        plans_backward: Whether a backward that does not take place leases the weights all the same.
        unneeded: Owner's names of the weights whose products the recompute leaves out.

    Attributes:
        pending_outputs: Outputs of the forward, on their way into the outer graph.
    """

    def __init__(
        self,
        number: int,
        bound: BoundUnit,
        visits: VisitSequence,
        anchor: Tensor,
        keeps_graph: bool = False,
        saved_results: Callable[[], SavedResults] | None = None,
        unused: Sequence[tuple[int, int | None]] = (),
        plans_backward: bool = False,
        unneeded: frozenset[str] = frozenset(),
    ) -> None:
        self.number = number
        self.bound = bound
        self._visits = visits
        self._access, self._random, self._activity = visits.access, visits.random, visits.activity
        self._anchor = anchor
        self._keeps_graph = keeps_graph
        self._saved_results = saved_results
        self._to_put, self._to_take = deque(unused), deque[tuple[int, int | None]]()
        self._plans_backward, self._unneeded = plans_backward, unneeded
        self._micro_batches: list[_MicroBatch | KeptGraph] = []
        self._first_micro_batch = 0
        self._is_idle = False  # no token goes to it
        self._leaves: dict[str, Tensor] = {}
        self._wanted: list[list[Tensor]] = []  # rows of the weights whose parts pass, by weight and micro-batch
        self.pending_outputs: list[Tensor] = []

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, forwards: Sequence[SuspendedForward]) -> list[Callable[[], Any]]:
        """Run the unit for every forward that waits at it; return what each of them resumes with."""
        self._access.begin("forward", self.number)
        self._note_idle([forward.call for forward in forwards if forward.call is not None])
        self._first_micro_batch = forwards[0].micro_batch if forwards else 0
        inputs: list[Tensor] = []
        results: list[tuple[CapturedResult, list[Tensor | None], SuspendedForward, slice, list[Any]]] = []
        with self._weights() as weights, self.bound.bound(weights) as leaves:
            if self._keeps_graph:
                self._leaves = leaves
            self._wanted = self.bound.look_up([forward.call for forward in forwards])
            for turn, forward in enumerate(forwards):
                self.bound.turn = turn
                self._activity.micro_batch = forward.micro_batch + 1
                self._put_unused(forward.micro_batch)
                call = forward.call
                assert call is not None
                captured = CapturedArguments(self.bound.unit.name, call.args, call.kwargs)
                tensors, originals = list(captured.tensors), captured.originals
                captured.forget_contents()
                result, differentiable = self._forward_one(forward, captured, tensors)
                start = len(self.pending_outputs)
                if differentiable:
                    inputs.extend(tensor for i in captured.activations if (tensor := tensors[i]) is not None)
                    # `.data` makes an alias that is no view, so that the model may change it in place.
                    self.pending_outputs.extend(output.data for output in result.outputs)
                    if isinstance(kept := self._micro_batches[-1], KeptGraph):
                        kept.note_aliases(self.pending_outputs[start:])
                stop = len(self.pending_outputs)
                result.outputs = []  # drops the inner graph, unless it is kept
                results.append((result, tensors, forward, slice(start, stop), originals))
            self._put_unused()
        outputs: tuple[Tensor, ...] = ()
        if self.pending_outputs:
            with torch.enable_grad():
                outputs = _UnitFunction.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
            self.pending_outputs = []
        return [
            _delivery(result, outputs[part], tensors, originals, forward)
            for result, tensors, forward, part, originals in results
        ]

    def _forward_one(
        self, forward: SuspendedForward, captured: CapturedArguments, tensors: list[Tensor | None]
    ) -> tuple[CapturedResult, bool]:
        """Run one micro-batch and save its inputs, or keep its graph; return also whether it has a backward."""
        call = forward.call
        assert call is not None
        streams = [tensors[i] for i in captured.activations]
        requires_grad = tuple(stream is not None and stream.requires_grad for stream in streams)
        differentiable = forward.modes.grad_enabled and (any(requires_grad) or bool(self.bound.trainable))
        # Beside its lists a collector may hold which of its items are wanted.
        keys = tuple(key for key, items in (call.collector or {}).items() if isinstance(items, list))
        keeps_graph = differentiable and self._keeps_graph
        places: list[tuple[int, int]] = []
        if differentiable and not keeps_graph:
            for index, stream in enumerate(streams):
                assert stream is not None
                places.append(self._put(forward, index, stream))  # before the run: a unit may change its input in place
        leaves = list(tensors)
        for i, requires in zip(captured.activations, requires_grad, strict=True):
            tensor = tensors[i]
            assert tensor is not None
            # Contiguous, as the recompute gets it from its block: kernels may round differently for other strides.
            leaves[i] = tensor.detach().contiguous().requires_grad_(requires and differentiable)
        random_state = forward.random_state
        results = self._saved_results() if differentiable and self._saved_results is not None else None
        # Without autocast's cache: a cached cast of a weight is one node of the graph for all its uses, and its
        # gradients are added in another order than in the recompute, which has no cache.
        with ExitStack() as stack:
            if results is not None:
                room = stack.enter_context(self._access.results_room(self.number, forward.micro_batch))
                stack.enter_context(results.saving(room, self._matrices(needed=True)))
            stack.enter_context(forward.modes.applied(cache_enabled=False if keeps_graph else None))
            self._random.set(random_state)
            result = self.bound.run(captured, leaves, keys, keep_graph=keeps_graph)
            forward.random_state = self._random.get()
        if keeps_graph:
            inputs = [leaf for i in captured.activations if (leaf := leaves[i]) is not None]
            self._micro_batches.append(KeptGraph(forward.micro_batch, inputs, result.outputs))
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
                    results,
                    places,
                )
            )
        return result, differentiable

    def _note_idle(self, calls: Sequence[UnitCall]) -> None:
        """Note whether no token of any call goes to the unit, and tell of the visits of which that is known now."""
        self._is_idle = self.bound.note_idle(calls, self.number, self._access)

    @contextmanager
    def _weights(self) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Lease the unit's weights; if no token goes to it, they are left where they are.

        Its forward and backward run all the same, on zeros: what it gives, and which gradients there are, are the same.
        """
        if self._is_idle:
            self._access.skip_weights(self.bound.unit, self.number)
            yield self.bound.zeros()
            return
        with self._access.weights(self.bound.unit, self.number) as weights:
            yield weights

    def _put(self, forward: SuspendedForward, index: int, stream: Tensor) -> tuple[int, int]:
        """Save an input, unless an earlier unit saved the same tensor; return the visit that did, and its index."""
        place = forward.place_of(stream) if self.bound.unit.shares_inputs else None
        if place is not None:
            self._access.reuse_activation(self.number, forward.micro_batch, index, place)
            return place
        self._access.put_activation(self.number, forward.micro_batch, index, stream.detach())
        if self.bound.unit.shares_inputs:
            forward.note_place(stream, (self.number, index))
        return self.number, index

    # -- backward ----------------------------------------------------------------------------------------------

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Recompute the unit unless its graphs were kept; accumulate its gradients, return those of its inputs."""
        self._visits.begin_backward(self.number)
        self._activity.micro_batch = self._first_micro_batch
        grad_inputs: list[Tensor | None] = []
        start = 0
        with ExitStack() as stack:
            weights = stack.enter_context(self._weights())
            leaves = stack.enter_context(self.bound.bound(weights))
            sink: GradientSink | None = None
            if leaves:
                sink = stack.enter_context(self._access.gradients(self.bound.unit, self.number))
                stack.enter_context(self.bound.receiver.into(sink))
            # Popped one by one, so that each graph is freed before the next one is built or used.
            waiting, self._micro_batches = self._micro_batches[::-1], []
            if not self._keeps_graph:
                self.bound.look_up_again(self._wanted)
            self._wanted, self.bound.turn = [], -1
            while waiting:
                item = waiting.pop()
                self.bound.turn += 1
                self._activity.micro_batch += 1
                grads = grad_outputs[start : start + item.num_outputs]
                start += item.num_outputs
                if sink is not None:
                    sink.at(item.number)
                if isinstance(item, KeptGraph):
                    grad_inputs.extend(self._backward_kept(item, grads, sink))
                else:
                    self._take_unused(item.number)
                    grad_inputs.extend(self._backward_one(item, grads, leaves, sink))
            self._take_unused()
        self._leaves = {}
        return grad_inputs

    def _matrices(self, *, needed: bool) -> dict[int, str]:
        """Return the bound matrices whose products the recompute needs, or those that it leaves out."""
        owners = self.bound.matrices()
        return {key: name for key, name in owners.items() if (name not in self._unneeded) == needed}

    def replaced_backward(self, instead: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
        """Have something else give the gradients of the inputs; lease nothing, run nothing."""
        self._visits.begin_backward(self.number)
        grad_inputs = instead()  # while all is held that the backward would find
        self._micro_batches, self._leaves, self._wanted = [], {}, []
        return grad_inputs

    def skip_backward(self) -> None:
        """Lease what the backward would, unused: this step's loss does not depend on the visit."""
        with ExitStack() as stack:
            if self._plans_backward or self._is_idle:
                for weight in stack.enter_context(self._weights()).values():
                    if not isinstance(weight, Tensor) and weight.passes:
                        for number in range(len(weight.rows)):
                            with weight.part(number):
                                pass
            if self.bound.trainable:
                stack.enter_context(self._access.gradients(self.bound.unit, self.number))
        for item in self._micro_batches:
            if isinstance(item, KeptGraph):
                continue
            self._take_unused(item.number)
            for visit, index in item.places:
                with self._access.get_activation(visit, item.number, index):
                    pass
            if item.results is not None:
                with self._access.results_room(self.number, item.number):
                    pass
        self._take_unused()
        self._micro_batches, self._leaves, self._wanted = [], {}, []

    # In the order of the plan: prefetch brings one after the other, into room for one.

    def _put_unused(self, before: float = math.inf) -> None:
        """Lease the unused activations of the micro-batches before one, as the forward would."""
        if not torch.is_grad_enabled():
            return
        while self._to_put and self._to_put[0][0] < before:
            micro_batch, index = self._to_put.popleft()
            self._to_take.append((micro_batch, index))
            if index is None:
                with self._access.results_room(self.number, micro_batch):
                    pass
            else:
                self._access.put_activation(self.number, micro_batch, index, self._anchor.detach()[None][:0])

    def _take_unused(self, before: float = math.inf) -> None:
        """Lease the unused activations of the micro-batches before one, as the backward would."""
        while self._to_take and self._to_take[0][0] < before:
            micro_batch, index = self._to_take.popleft()
            if index is None:
                room = self._access.results_room(self.number, micro_batch)
            else:
                room = self._access.get_activation(self.number, micro_batch, index)
            with room:
                pass

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
                visit, number = item.places[index]
                saved = stack.enter_context(self._access.get_activation(visit, item.number, number))
                streams.append(saved.detach().requires_grad_(item.requires_grad[index]))
                tensors[i] = streams[-1]
            room = None
            if item.results is not None:
                room = stack.enter_context(self._access.results_room(self.number, item.number))
            if all(gradient is None for gradient in grad_outputs):
                return [None] * len(streams)
            wanted = [stream for stream in streams if stream.requires_grad]
            with item.modes.applied(cache_enabled=False), ExitStack() as answering:
                left_out = self._matrices(needed=False) if self._unneeded else {}
                if left_out:  # compiled layers, which have none, would be compiled anew inside of a mode
                    answering.enter_context(without_values(left_out))
                if item.results is not None and room is not None:
                    answering.enter_context(item.results.answering(room, self._matrices(needed=True)))
                self._random.set(item.random_state)
                result = self.bound.run(captured, tensors, item.record_keys, keep_graph=True)
            outputs = result.outputs
            assert len(outputs) == item.num_outputs, (self.bound.unit.name, len(outputs), item.num_outputs)
            with self.bound.in_backward():
                found = optional_gradients(outputs, grad_outputs, [*wanted, *leaves.values()])
            _add_gradients(sink, leaves, found[len(wanted) :])
            grads = iter(found[: len(wanted)])
            return [next(grads) if stream.requires_grad else None for stream in streams]


class _UnitFunction(torch.autograd.Function):
    """One node per visit in the outer graph, from the inputs of all micro-batches to their outputs.

    The outer graph is the model's own code between units. Autograd runs this node's backward when the gradients of all
    micro-batches are there: that order makes the weights of a unit come once for all of them.
    """

    @staticmethod
    def forward(ctx: Any, visit: UnitVisit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        return tuple(visit.pending_outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        visit: UnitVisit = ctx.visit
        return (None, None, *visit.bound.backward(visit, grad_outputs))


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


def _add_gradients(sink: GradientSink | None, names: Iterable[str], gradients: Sequence[Tensor | None]) -> None:
    if sink is not None:
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                sink.add(name, gradient)


def optional_gradients(
    outputs: Sequence[Tensor | GradientEdge], grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of `inputs`; None for one that no output with a gradient depends on."""
    pairs = [(out, grad) for out, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
    if not inputs:
        return []
    # `torch.autograd.grad` without its detour over the leaves' own class: functions of torch are not intercepted in
    # there, and what a unit that checkpoints itself runs again must be what it ran before.
    found = _engine_run_backward(
        tuple(out for out, _ in pairs), tuple(grad for _, grad in pairs), False, False, tuple(inputs), True, False
    )
    return list(found)


class VisitSequence:
    """The visits of one pass over a group of micro-batches, in forward order, and what they share.

    Their backwards come in reverse. Autograd never calls a visit that the loss does not depend on. So each backward
    first closes those that are due before it: ticks come in the order of the program whatever autograd leaves out.

    Attributes:
        access: Weights, gradient accumulators and activations.
        random: Random state of the compute device.
        activity: Progress within the step, for status.
    """

    def __init__(self, access: BlockAccess, random: RandomStates, activity: Activity) -> None:
        self.access, self.random, self.activity = access, random, activity
        self._visits: list[UnitVisit] = []
        self._next = -1  # due in the backward

    def __len__(self) -> int:
        return len(self._visits)

    def __iter__(self) -> Iterator[UnitVisit]:
        return iter(self._visits)

    def append(self, visit: UnitVisit) -> None:
        """Add the next visit of the forward."""
        self._visits.append(visit)

    def clear(self) -> None:
        """Forget the visits of a pass. They refer to this object: without this, only the collector frees them."""
        self._visits.clear()

    def start_backward(self) -> None:
        """Begin with the last visit."""
        self._next = len(self._visits) - 1

    def begin_backward(self, visit: int) -> None:
        """Announce the backward of a visit, after closing those before it that the loss does not depend on."""
        self._close_until(visit)
        assert self._next == visit, (self._next, visit)
        self.access.begin("backward", visit)
        self._next -= 1

    def end_backward(self) -> None:
        """Close the visits that are left."""
        self._close_until(-1)

    def _close_until(self, visit: int) -> None:
        while self._next > visit:
            self.access.begin("backward", self._next)
            self._visits[self._next].skip_backward()
            self._next -= 1


@dataclass(slots=True)
class _MicroBatch:
    """What the recompute of one micro-batch needs besides its activations."""

    number: int
    captured: CapturedArguments
    record_keys: tuple[str, ...]
    random_state: tuple[Tensor, ...]
    modes: ThreadModes
    requires_grad: tuple[bool, ...]
    num_outputs: int
    results: SavedResults | None
    places: Sequence[tuple[int, int]]  # (visit, index) of the activations


class KeptGraph:
    """The graph of one micro-batch's run of a unit, kept from its forward to its backward.

    It holds what autograd saved, and the inputs that need a gradient. Outputs are held only if autograd saved them.

    Args:
        number: Number of the micro-batch in the step.
        streams: The activations among the inputs: leaves of this graph.
        outputs: Differentiable outputs of the run.
    """

    def __init__(self, number: int, streams: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.number = number
        self.requires_grad = tuple(stream.requires_grad for stream in streams)
        self.wanted = [stream for stream in streams if stream.requires_grad]
        self.edges = [get_gradient_edge(output) for output in outputs]
        self.num_outputs = len(self.edges)
        self._inside = [version_probe(output) for output in outputs]
        self._outside: list[Tensor] = []

    def note_aliases(self, aliases: Sequence[Tensor]) -> None:
        """Note the aliases of the outputs that the rest of the model gets, and may change in place."""
        self._outside = [version_probe(alias) for alias in aliases]

    def check(self) -> None:
        """Let autograd refuse the backward if the graph needs an output that was changed in place since.

        The graph and the rest of the model share the outputs' memory but not their version counters: bumping the
        inner ones makes autograd refuse what it refuses in plain PyTorch, and nothing else.
        """
        for inside, outside in zip(self._inside, self._outside, strict=True):
            if outside._version:
                increment_version(inside)


def version_probe(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose `_version` is that of `tensor`, now and after `tensor` is gone."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


class RoutedAccess(Protocol):
    """Receives the experts that got no token."""

    def note_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        """See ``BlockAccess``."""


class BoundUnit:
    """An unmodified module with slots for its parameters: binds weights to it and runs its `forward`.

    Args:
        unit: The unit; its module must not be stubbed yet.
        compiler: Compiles layers; None: they run eagerly.

    Attributes:
        forward: Its module's own forward, or the compiled one.
        backward: Runs the backward of a visit, given the gradients of its outputs; returns those of its inputs.
        trainable: Full names of its trainable parameters.
        receiver: Takes the gradients of its matrices in a backward.
        turn: Micro-batch that runs, of those whose rows were looked up together.
    """

    def __init__(self, unit: Unit, device: torch.device, compiler: LayerCompiler | None = None) -> None:
        self.unit = unit
        self.forward: Callable[..., Any] = self._own_parameters if unit.is_container else unit.module.forward
        self._is_compiled = compiler is not None and unit.is_layer
        if compiler is not None and unit.is_layer:
            self.forward = compiler.forward_of(unit)
        self.backward: Callable[[UnitVisit, Sequence[Tensor | None]], list[Tensor | None]] = UnitVisit.backward
        self.receiver = GradientReceiver()
        self.turn = 0
        self._passing: list[PartedWeight] = []
        self._modules = tuple(unit.module.modules())
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        self._trainable: dict[str, bool] = {}
        self._declared_dtype: dict[str, torch.dtype] = {}
        self._absent: dict[str, AbsentWeight] = {}
        for local, owner, _ in unit.params:
            path, _, leaf = local.rpartition(".")
            parameters = unit.module.get_submodule(path)._parameters
            parameter = parameters[leaf]
            assert parameter is not None, local
            self._slots.append((parameters, leaf, owner))
            self._trainable[owner] = parameter.requires_grad
            self._declared_dtype[owner] = parameter.dtype
            self._absent[owner] = absent_weight(parameter, device)
            self._absent[owner].site = (unit.index, owner)
        self.trainable = tuple(owner for owner, trains in self._trainable.items() if trains)

    def _look(self, look: WeightLook, rows: Tensor | None = None) -> Tensor:
        """Return what code outside of the module looks at: copies, which outlive the visit."""
        weight: Tensor = next(parameters[leaf] for parameters, leaf, owner in self._slots if owner == look.owner)
        if rows is None:
            return weight.clone()
        matrix = weight if weight.dim() == 2 else weight.reshape(len(weight), -1)
        return functional.embedding(rows, matrix).reshape(*rows.shape, *weight.shape[1:])

    def _own_parameters(self) -> dict[str, Tensor]:
        """Forward of a container: copies of its parameters, which outlive the visit."""
        return {leaf: parameters[leaf].clone() for parameters, leaf, _ in self._slots}

    def note_idle(self, calls: Sequence[UnitCall], visit: int, access: RoutedAccess) -> bool:
        """Return whether no token was routed to the unit; at the first part of a module, tell of all others.

        Args:
            visit: Ordinal of this visit; those of the module's other parts follow it.
            access: Is told which visits are idle.
        """
        own = self.unit.part
        if own is None or not calls:
            return False
        if own.siblings[0] is own and all(own.is_routed(call.args) for call in calls):
            visits = range(visit, visit + len(own.siblings))
            parts = zip(visits, own.siblings, strict=True)
            idle = {number for number, part in parts if all(part.is_idle(call.args) for call in calls)}
            access.note_idle(visits, idle)
        return all(own.is_idle(call.args) for call in calls)

    def zeros(self) -> dict[str, Tensor]:
        """Return what is bound in place of weights that nothing is multiplied with: zeros, in the memory of one."""
        return {
            owner: torch.zeros((), dtype=absent.dtype, device=absent.device).expand(absent.shape)
            for owner, absent in self._absent.items()
        }

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Replace the parameters by placeholders: right shape, dtype and device, no memory."""
        with self._in_slots(self._absent):
            yield

    @contextmanager
    def bound(self, weights: Mapping[str, Tensor | MatrixParts]) -> Iterator[dict[str, Tensor]]:
        """Bind `weights` (owner's name -> tensor) to the parameters; yield the trainable ones, leaves of the graph."""
        leaves = {owner: self._leaf(owner, weights[owner]) for owner in self._trainable}
        parted = [leaf for leaf in leaves.values() if isinstance(leaf, PartedWeight)]
        self._passing = [weight for weight in parted if weight.parts.passes]
        try:
            with self._in_slots(leaves), intercepting(leaves.values()):
                yield {owner: leaves[owner] for owner in self.trainable}
        finally:
            self._passing = []

    def look_up(self, calls: Sequence[UnitCall | None]) -> list[list[Tensor]]:
        """Look up the rows that calls of the bound unit will want of the weights whose parts pass, each part once.

        Each call begins to run for that, up to its look-up.

        Returns:
            The indexes of the rows, by weight and call.
        """
        wanted: list[list[Tensor]] = []
        for weight in self._passing:
            wanted.append([])
            for self.turn, call in enumerate(calls):
                assert call is not None
                with torch.no_grad(), self._attributes_restored():
                    try:
                        self.forward(*call.args, **call.kwargs)
                    except _RowsWanted as asked:
                        wanted[-1].append(asked.indexes)
            assert len(wanted[-1]) == len(calls), f"{self.unit.name} looks up no rows"
            weight.look_up(wanted[-1])
        return wanted

    def look_up_again(self, wanted: Sequence[Sequence[Tensor]]) -> None:
        """Look up rows for the recompute.

        Args:
            wanted: what ``look_up`` returned.
        """
        for weight, indexes in zip(self._passing, wanted, strict=True):
            weight.look_up(indexes)

    def _leaf(self, owner: str, weight: Tensor | MatrixParts) -> Tensor:
        """Return the leaf of a weight; those of compiled code are torch's own, which it can compile."""
        if not isinstance(weight, Tensor):
            target = GradientTarget(self.receiver, owner) if self._trainable[owner] else None
            return PartedWeight.in_place_of(self._absent[owner], weight, target, self)
        values = weight.detach().to(self._declared_dtype[owner])
        if self._trainable[owner] and values.dim() == 2 and not self._is_compiled:
            return weight_leaf(values, GradientTarget(self.receiver, owner))
        return values.requires_grad_(self._trainable[owner])

    @contextmanager
    def replaced(self, owner: str, weight: Tensor) -> Iterator[Tensor]:
        """Have another tensor in the slots of one parameter; yield what was there."""
        saved = [(parameters, leaf, parameters[leaf]) for parameters, leaf, name in self._slots if name == owner]
        try:
            for parameters, leaf, _ in saved:
                parameters[leaf] = weight
            yield saved[0][2]
        finally:
            for parameters, leaf, parameter in saved:
                parameters[leaf] = parameter

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is in the slots, by owner's name."""
        for parameters, leaf, owner in self._slots:
            yield owner, parameters[leaf]

    def matrices(self) -> dict[int, str]:
        """Return the owner's name of each bound weight that is there whole, by its id; of compiled layers none."""
        if self._is_compiled:
            return {}
        return {id(leaf): owner for owner, leaf in self.leaves() if not isinstance(leaf, PartedWeight)}

    def has(self, owner: str) -> bool:
        """Return whether a parameter, by its owner's name, is one of the unit's."""
        return owner in self._absent

    def absent(self, owner: str) -> AbsentWeight:
        """Return the placeholder of a parameter."""
        return self._absent[owner]

    @contextmanager
    def _in_slots(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Have tensors (owner's name -> tensor) in the module's parameter slots."""
        saved = [(parameters, leaf, parameters[leaf]) for parameters, leaf, _ in self._slots]
        try:
            for parameters, leaf, owner in self._slots:
                parameters[leaf] = tensors[owner]
            yield
        finally:
            for parameters, leaf, parameter in saved:
                parameters[leaf] = parameter

    def in_backward(self) -> AbstractContextManager[None]:
        """Return the context for the backward of a run, which `torch.compile` compiles when it first runs."""
        return _naming_failures(self.unit) if self._is_compiled else nullcontext()

    def run(
        self,
        captured: CapturedArguments,
        tensors: list[Tensor | None],
        record_keys: tuple[str, ...],
        *,
        keep_graph: bool,
    ) -> CapturedResult:
        """Run the unit once for one micro-batch, in the current grad mode.

        Args:
            tensors: Its tensors, with leaves for the activations.
            record_keys: Keys of the active output recorders.
            keep_graph: False where the unit is recomputed: autograd saves nothing then.
        """
        rebuilt = captured.rebuild(tensors)
        records: dict[str, list[Any]] = {key: [] for key in record_keys}
        saving = nullcontext() if keep_graph else without_saved_tensors()
        with self._attributes_restored(), _collected_records(records), saving:
            if rebuilt.args and isinstance(rebuilt.args[0], WeightLook):
                value = self._look(*rebuilt.args)
            else:
                value = self.forward(*rebuilt.args, **rebuilt.kwargs)
        captured.check_opaque()
        return CapturedResult(value, rebuilt, records)

    def call(self, call: UnitCall) -> Any:
        """Run the unit once as it was called, with nothing kept for a second run; for passes without a backward."""
        with self._attributes_restored(), _active_records(call.collector):
            if call.args and isinstance(call.args[0], WeightLook):
                return self._look(*call.args)
            return self.forward(*call.args, **call.kwargs)

    @contextmanager
    def _attributes_restored(self) -> Iterator[None]:
        """Undo attributes that the forward sets: they would leak into the next micro-batch and the recompute."""
        attributes = [dict(module.__dict__) for module in self._modules]
        buffers = [
            (module, leaf, buffer, buffer._version)
            for module in self._modules
            for leaf, buffer in module._buffers.items()
            if buffer is not None
        ]
        try:
            yield
        finally:
            for module, before in zip(self._modules, attributes, strict=True):
                now = module.__dict__
                if now.keys() != before.keys() or any(map(is_not, now.values(), before.values())):
                    now.clear()
                    now.update(before)
        for module, leaf, buffer, version in buffers:
            if module._buffers.get(leaf) is not buffer or buffer._version != version:
                raise UnsupportedModelError(
                    f"{self.unit.name} ({type(module).__name__})",
                    f"its forward changes the buffer '{leaf}', and would change it a second time when the layer is "
                    "run again for the backward",
                )


def _collected_records(records: dict[str, list[Any]]) -> AbstractContextManager[None]:
    """Let Hugging Face's output recorders (router logits and the like) write to `records`."""
    return _active_records(records or None)


@contextmanager
def _active_records(records: dict[str, list[Any]] | None) -> Iterator[None]:
    """Have Hugging Face's output recorders write to `records`; None: as they do."""
    if records is None:
        yield
        return
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set(records)
    try:
        yield
    finally:
        _active_collector.reset(token)


@contextmanager
def installed_stubs(stubs: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `forward` of modules, on the instances; the classes stay as they are."""
    own = {module: module.__dict__.get("forward") for module in stubs}
    try:
        for module, stub in stubs.items():
            module.__dict__["forward"] = stub
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


#: Tensor methods that need no values; ``embed`` answers the same of a parameter that is in the store.
METADATA_QUERIES = frozenset(
    {
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "ndimension",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_sparse",
        "__len__",
        "__hash__",
    }
)


@dataclass(frozen=True, slots=True)
class WeightLook:
    """A call of a unit that is a look at one of its weights from outside of its module, in place of the unit's forward.

    Args of the call after it: the rows that are looked at, integers of any shape; none: all of the weight.

    Attributes:
        owner: Full name of the parameter.
    """

    owner: str


#: Elements that a look outside of a weight's own module may take: 4 MiB of fp32. They stay as long as the model's code
#: wants them, in no tier.
_MOST_LOOKED_AT = 1 << 20


class AbsentWeight(Tensor):
    """Placeholder of a weight that is not bound: it has shape, dtype and device.

    Model code may ask for these at any time; values are there only while the engine runs the unit. A look at a small
    weight, or at a few rows of a large one, is a visit of the unit like any other: it is in the plan, its weights are
    leased for it, and its gradient is added to those of the unit's other visits. What would take more is refused.

    Attributes:
        site: Index of the unit, and the full name of the parameter.
    """

    site: tuple[int, str] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in METADATA_QUERIES | {"__get__", "__repr__"}:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _with_values(func, args, kwargs or {})

    def look(self, func: Callable[..., Any], rows: Tensor | None = None) -> Tensor:
        """Return some rows, or all of the weight, for the code of the model that called a function of torch.

        Raises:
            UnsupportedModelError: that is too much, or the model's code does not run in a pass.
        """
        num_elements = self.numel() if rows is None else rows.numel() * (self.numel() // len(self))
        if self.site is None or num_elements > _MOST_LOOKED_AT or not is_suspendable():
            name = "a weight" if self.site is None else self.site[1]
            raise UnsupportedModelError(
                "the model",
                f"its code uses {name} outside of the weight's own module ({getattr(func, '__name__', func)}); such a "
                f"weight cannot be streamed. Looks at up to {_MOST_LOOKED_AT:,} elements can",
            )
        unit, owner = self.site
        given = (WeightLook(owner),) if rows is None else (WeightLook(owner), rows)
        result: Tensor = suspend(UnitCall(unit, given, {}, None))
        return result


class PartedWeight(AbsentWeight):
    """Stands for a matrix whose rows are in several blocks. Its `F.embedding` looks rows up there; others are refused.

    Where all blocks are there, that is done at once. Where one is leased at a time, rows for all micro-batches are
    looked up beforehand (``BoundUnit.look_up``), so that each block comes once.

    Attributes:
        target: Takes the gradient; None: the weight is not trained.
    """

    parts: MatrixParts
    target: GradientTarget | None
    _bound: BoundUnit
    _found: list[Tensor | None]

    @classmethod
    def in_place_of(
        cls, absent: AbsentWeight, parts: MatrixParts, target: GradientTarget | None, bound: BoundUnit
    ) -> PartedWeight:
        """Return a stand-in, a leaf of graphs if there is a target."""
        weight: Any = Tensor._make_subclass(cls, absent, target is not None)
        weight.parts, weight.target, weight._bound, weight._found = parts, target, bound, []
        assert isinstance(weight, PartedWeight)
        return weight

    def look_up(self, wanted: Sequence[Tensor]) -> None:
        """Look up the rows of each micro-batch."""
        self._found = list(_rows_in_parts(self, wanted))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.embedding:
            with torch._C.DisableTorchFunctionSubclass():
                return _embedding_of_parts(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _RowsWanted(BaseException):
    """Leaves a unit's forward at the look-up of rows. Not an `Exception`, so that no model code catches it."""

    def __init__(self, weight: PartedWeight, indexes: Tensor) -> None:
        self.weight, self.indexes = weight, indexes
        super().__init__()


def _embedding_of_parts(indexes: Tensor, weight: PartedWeight, padding_idx: int | None = None, **_: Any) -> Tensor:
    """`F.embedding` without options that change the weight or scale its gradient: the trace found none."""
    rows: Tensor | None
    if weight.parts.passes:
        if not weight._found:
            raise _RowsWanted(weight, indexes)
        turn = weight._bound.turn
        rows, weight._found[turn] = weight._found[turn], None  # whoever gets it may change it in place
        assert rows is not None and rows.shape[:-1] == indexes.shape, "a second look-up of rows in one run"
    else:
        (rows,) = _rows_in_parts(weight, [indexes])
    if weight.target is None or not torch.is_grad_enabled():
        return rows
    return looked_up(indexes, rows, weight, padding_idx, weight.target)


#: What a look-up on a device takes beside its result.
_LOOK_UP_NBYTES = 16 << 20


def _rows_in_parts(weight: PartedWeight, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of a matrix, for several tensors of indexes; each part is leased once."""
    width, parts = weight.parts.shape[1], weight.parts
    made = [torch.full((*each.shape, width), torch.nan, dtype=weight.dtype, device=each.device) for each in wanted]
    num_found = 0
    for number, held in enumerate(parts.rows):
        with parts.part(number) as rows:
            for indexes, out in zip(wanted, made, strict=True):
                flat = indexes.reshape(-1)
                if device_kernels.are_for(out):
                    device_kernels.copy_rows(out.view(-1, width), held, rows, flat)
                    continue
                is_here = (flat >= held.start) & (flat < held.stop)
                if not out.is_cuda:
                    at = is_here.nonzero().squeeze(1)
                    num_found += len(at)
                    out.view(-1, width)[at] = rows.index_select(0, flat[at] - held.start).to(out.dtype)
                    continue
                # Masked, not chosen: the host need not know which rows are here.
                step = max(1, _LOOK_UP_NBYTES // (width * out.element_size()))
                for start in range(0, len(flat), step):
                    place = out.view(-1, width)[start : start + step]
                    at = (flat[start : start + step] - held.start).clamp_(0, len(held) - 1)
                    found = rows.index_select(0, at).to(out.dtype)
                    torch.where(is_here[start : start + step].unsqueeze(1), found, place, out=place)
    # On a device rows of indexes that are none stay NaN, which stops the step.
    if made and not made[0].is_cuda and num_found != sum(indexes.numel() for indexes in wanted):
        raise IndexError(f"an index is not in the range of {parts.shape[0]} rows")
    return made


def _with_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with the values that it needs of absent weights."""
    first = args[0] if args else None
    if isinstance(first, AbsentWeight):
        found = _rows_of(func, first, args[1:], kwargs)
        if found is not None:
            rows, rest = found
            values = first.look(func, rows)
            return values[rest] if rest else values
    return func(
        *tree_map(args, lambda item: item.look(func) if isinstance(item, AbsentWeight) else item),
        **tree_map(kwargs, lambda item: item.look(func) if isinstance(item, AbsentWeight) else item),
    )


def _rows_of(
    func: Callable[..., Any], weight: AbsentWeight, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Return the rows that a function takes of a weight, and how they are indexed further; None: it takes others."""
    name, count = getattr(func, "__name__", ""), len(weight)

    def row(index: int) -> Tensor:
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
        # Not `torch.tensor`: on a device that would be a copy that the host waits for.
        return torch.full((), index % count, dtype=torch.long, device=weight.device)

    if name == "__getitem__":
        index, *rest = args[0] if isinstance(args[0], tuple) else (args[0],)
        if isinstance(index, int) and not isinstance(index, bool):
            return row(index), tuple(rest)
        if isinstance(index, slice) and not rest:
            return torch.arange(*index.indices(count), device=weight.device), ()
        if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and not rest:
            return index, ()
    elif name in ("select", "index_select", "narrow") and not kwargs and args[0] in (0, -weight.dim()):
        if name == "select":
            return row(args[1]), ()
        if name == "index_select":
            return args[1], ()
        return torch.arange(args[1], args[1] + args[2], device=weight.device), ()
    return None


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of NaN in the memory of one element."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def absent_weight(parameter: Tensor, device: torch.device) -> AbsentWeight:
    """Return a placeholder with the shape and dtype of `parameter` on `device`, in the memory of one element."""
    absent = Tensor._make_subclass(AbsentWeight, placeholder(parameter.shape, parameter.dtype, device))
    assert isinstance(absent, AbsentWeight)
    return absent


#: Compiled variants of one class of layers: shapes of micro-batches, training and evaluation, windows. torch allows 8.
_MOST_KINDS = 64
_LONGEST_REASON = 300


class LayerCompiler:
    """Compiles the forwards of layers. The first call of each variant takes seconds to minutes.

    Forward and recompute run the same compiled code, under grad mode both, so they compute the same bits.

    Args:
        backend: Name of a backend of ``torch.compile``.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._by_class: dict[type, Callable[..., Any]] = {}

    @classmethod
    def of(cls, backend: str | None) -> LayerCompiler | None:
        """Return a compiler for a backend, or None."""
        return None if backend is None else cls(backend)

    def forward_of(self, unit: Unit) -> Callable[..., Any]:
        """Return the compiled forward of a layer.

        It raises ``UnsupportedModelError`` where it cannot be compiled as one graph.
        """
        module = unit.module
        compiled = self._by_class.get(type(module))
        if compiled is None:
            # One graph or an error: after a graph break, code would silently run eagerly.
            compiled = torch.compile(type(module).forward, fullgraph=True, dynamic=False, backend=self._backend)
            self._by_class[type(module)] = compiled

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Compiled code is specialised on autocast's cache, which is on in the forward and off in the recompute.
            is_cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                with _naming_failures(unit):
                    return compiled(module, *args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(is_cached)

        return forward


@contextmanager
def _naming_failures(unit: Unit) -> Iterator[None]:
    """Name the layer in errors of `torch.compile`: in a forward, and in a backward, compiled when it first runs."""
    import torch._dynamo as dynamo

    failures = (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit)
    try:
        with dynamo.config.patch(recompile_limit=_MOST_KINDS):
            yield
    except failures as error:
        text = " ".join(str(error).split()).partition(" Set TORCHDYNAMO_VERBOSE")[0]  # advice that does not help here
        reason = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
        raise UnsupportedModelError(
            f"{unit.name} ({type(unit.module).__name__})",
            f"torch.compile cannot compile its forward and backward as one graph ({type(error).__name__}: {reason}). "
            "Write model.compile = false",
        ) from error
