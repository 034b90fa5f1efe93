"""Forward and backward of one optimizer step, with weights streamed unit by unit.

Hugging Face's own forward decides everything but one thing: when a unit's weights are there. In layer order all
micro-batches pass a unit before any of them reaches the next.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.engine.head import (
    ChunkedHead,
    HeadPlan,
    TrunkOutput,
    accepts_use_cache,
    count_labels,
    plan_head,
    shifted_labels,
    without_auxiliary_loss,
    without_labels,
)
from megatrain.engine.host_io import MicroBatches, read_numbers
from megatrain.engine.objective import CrossEntropy, Objective, causal_lm_loss, replaced_loss
from megatrain.engine.state import RandomStates, micro_batch_seed
from megatrain.engine.suspend import SuspendedForward, UnitCall, suspend
from megatrain.engine.visit import BoundUnit, UnitVisit, installed_stubs
from megatrain.models.errors import UnsupportedModelError
from megatrain.run.activity import Activity

if TYPE_CHECKING:
    from megatrain.engine.host_io import HostMirror
    from megatrain.engine.program import BlockAccess, VisitTrace
    from megatrain.engine.visit import LayerCompiler
    from megatrain.models.graph import ModelGraph

__all__ = [
    "LayerRunner",
    "NoTrainedTokensError",
    "QueuedLoss",
    "StepLoss",
    "SummedLoss",
    "SuspendedOutput",
    "Trunk",
    "VisitOrderError",
    "shifted_labels",
]


class NoTrainedTokensError(Exception):
    """No token of the step has a label."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLoss:
    """Loss of one optimizer step that the device may not have computed yet.

    Attributes:
        terms: Scalars on the compute device; the loss is their sum in double precision, in this order.
        num_trained_tokens: Tokens that have a label after the shift.
    """

    terms: tuple[Tensor, ...]
    num_trained_tokens: int


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of one optimizer step.

    Attributes:
        loss: Mean over the trained tokens of the step, auxiliary terms of every micro-batch added.
        num_trained_tokens: Tokens that have a label after the shift.
    """

    loss: float
    num_trained_tokens: int


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """Cross entropy of some tokens.

    Attributes:
        terms: Sums over tokens that have a label; added exactly (`math.fsum`), their grouping does not matter.
        num_tokens: Number of these tokens.
    """

    terms: tuple[float, ...]
    num_tokens: int


class LayerRunner:
    """Computes loss and gradients of a step.

    Args:
        graph: The model; its buffers are moved to `device`.
        access: Weights in, gradients out, activations out and in.
        device: Compute device.
        compute_dtype: Must be the graph's.
        order: "layer": all micro-batches of a unit before the next unit; "micro_batch": one micro-batch at a time. Both
            give the same bits.
        head_rows: Rows of logits at a time; None takes the model's default. It changes bits of the head's weight
            gradient, so keep it between runs that are compared.
        trace: Expected visits; None checks nothing.
        objective: What is minimised beside cross entropy; None: nothing.
        random_enabled: False where nothing is really computed.
        kept: Visits whose graphs wait for their backward instead of being run again. It changes no bits; their weights
            must stay unchanged, at one place, from forward to backward.
        compiler: Of layers; None: they run as they are.
        cross_entropy: In the place of torch's, in heads that run in pieces; None: torch's.
        activity: Told of every micro-batch.

    Attributes:
        bounds: The runnable form of every unit, by index.

    Not thread-safe: one step at a time, on one thread.
    """

    def __init__(
        self,
        graph: ModelGraph,
        access: BlockAccess,
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        order: Literal["layer", "micro_batch"] = "layer",
        head_rows: int | None = None,
        trace: VisitTrace | None = None,
        objective: Objective | None = None,
        random_enabled: bool = True,
        kept: Container[int] = (),
        compiler: LayerCompiler | None = None,
        cross_entropy: CrossEntropy | None = None,
        activity: Activity | None = None,
    ) -> None:
        assert compute_dtype == graph.dtype, (compute_dtype, graph.dtype)
        self._graph = graph
        self._access = access
        self._device = torch.device(device)
        self._order = order
        self._objective = objective or Objective()
        self._random = RandomStates(self._device, enabled=random_enabled)
        self._micro_batches = MicroBatches(self._device)
        move_buffers(graph.model, self._device)
        self.bounds = [BoundUnit(unit, self._device, compiler) for unit in graph.units]
        self._plan: HeadPlan | None = plan_head(graph)
        if self._objective.label_smoothing_factor and self._plan is None:
            raise UnsupportedModelError(
                type(graph.model).__name__,
                "it computes its loss in a way of its own, with which training.label_smoothing_factor cannot be used",
            )
        self._head_rows = head_rows or (self._plan.default_rows if self._plan else 0)
        self._cross_entropy = cross_entropy
        self._activity = activity or Activity()
        self._trunk = Trunk(
            graph,
            access,
            self.bounds,
            self._random,
            self._device,
            self._plan,
            trace,
            self._announce_backward,
            self._micro_batches.mirror,
            kept,
            self._activity,
        )
        self._next_backward = -1

    @property
    def head_is_chunked(self) -> bool:
        """Whether the loss is computed in pieces; False for models that compute it in a way of their own."""
        return self._plan is not None

    @property
    def head_units(self) -> tuple[int, ...]:
        """Indexes of the units that run in the head phase; their visits come after all others."""
        return tuple(unit.index for unit in self._plan.units) if self._plan else ()

    @property
    def visits(self) -> Sequence[UnitVisit]:
        """The visits of the pass that is running, without the head's."""
        return self._trunk.visits

    @property
    def head_rows(self) -> int:
        """Rows of logits at a time; 0 if the head is not chunked."""
        return self._head_rows if self._plan else 0

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, num_items: int | None = None, seed: int = 0
    ) -> StepLoss:
        """Run forward and backward of all micro-batches; gradients are in the access's accumulators afterwards.

        Waits for the device at the end, to read the loss. Arguments and errors are those of `queue`.
        """
        queued = self.queue(micro_batches, num_items=num_items, seed=seed)
        return StepLoss(float(sum(read_numbers(queued.terms))), queued.num_trained_tokens)

    def queue(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, num_items: int | None = None, seed: int = 0
    ) -> QueuedLoss:
        """Queue forward and backward of all micro-batches on the current stream, without reading from the device.

        Args:
            micro_batches: `input_ids` and `labels` [B, S], optionally `attention_mask`, `position_ids`; CPU tensors.
            num_items: Trained tokens that the loss is the mean over; None counts those given.
            seed: Seed of the step; each micro-batch gets a random stream of its own (`micro_batch_seed`).

        Raises:
            NoTrainedTokensError: no position has a label.
            VisitOrderError: the model does not call its units as planned.
            UnsupportedModelError: a layer does something that streaming cannot reproduce.
        """
        shifted = [shifted_labels(batch["labels"]).reshape(-1) for batch in micro_batches]
        counts = [count_labels(labels) for labels in shifted]
        if sum(counts) == 0:
            raise NoTrainedTokensError(
                f"none of the {sum(len(labels) for labels in shifted)} tokens of this step has a label; "
                "check the loss mask (train_on) and the truncation of the data"
            )
        total = sum(counts) if num_items is None else num_items
        numbers = list(range(len(micro_batches)))
        groups = [numbers] if self._order == "layer" else [[number] for number in numbers]
        losses: list[Tensor] = []
        random_state = self._random.get()
        try:
            # All groups at once: a second use of the staging memory would wait for the first group's copies.
            batches, rows = self._micro_batches.place(dict(enumerate(micro_batches)), dict(enumerate(shifted)))
            for group in groups:
                own = {number: batches.pop(number) for number in group}
                losses += self.run_pass(own, rows, total, seed)
        finally:
            self._end_pass(random_state)
        return QueuedLoss(tuple(losses), sum(counts))

    def evaluate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> SummedLoss:
        """Run the forward of all micro-batches in eval mode, each unit for all of them before the next.

        The loss is plain cross entropy: no dropout, no objective, no auxiliary terms. Nothing is kept between units
        but the stream; no activation, gradient or random state of training is touched.

        Args:
            micro_batches: As in `forward_backward`.

        Raises:
            VisitOrderError: as in `forward_backward`.
            UnsupportedModelError: as in `forward_backward`.
        """
        model, random_state = self._graph.model, self._random.get()
        shifted = [shifted_labels(batch["labels"]).reshape(-1) for batch in micro_batches]
        counts = {number: count_labels(labels) for number, labels in enumerate(shifted)}
        # Those without a label add nothing; but some micro-batch has to come to the units that are planned.
        counts = {number: count for number, count in counts.items() if count} or {0: 0}
        model.eval()
        try:
            with torch.no_grad(), without_auxiliary_loss(model):
                chosen = {number: micro_batches[number] for number in counts}
                batches, rows = self._micro_batches.place(chosen, {number: shifted[number] for number in counts})
                losses = self._forward_pass(batches, rows, counts)
        finally:
            model.train()
            self._end_pass(random_state)
        return SummedLoss(tuple(read_numbers(losses)), sum(counts.values()))

    # -- one pass over a group of micro-batches ----------------------------------------------------------------

    def run_pass(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, tuple[Tensor, Tensor]],
        num_items: int,
        seed: int,
    ) -> list[Tensor]:
        """Run forward and backward over one group of micro-batches and return their loss terms.

        Args:
            batches: By number of the micro-batch, on the compute device.
            rows: Positions that have a label, and their shifted labels.
            num_items: Trained tokens that the loss is the mean over.
            seed: Seed of the step.
        """
        objective = self._objective.applied(self._graph.model)  # inside, as smoothed labels have a loss of their own
        with torch.enable_grad(), self._trunk.prepared(), self._loss(), objective, _single_threaded_backward():
            outputs = self._trunk.run(batches, num_items, seed)
            losses, roots, grads = self._run_heads(outputs, batches, rows, num_items)
            del outputs
            self._trunk.check_visit_count()
            self._next_backward = len(self.visits) - 1
            if roots:
                torch.autograd.backward(roots, grads)
            self._announce_backward(-1)
        return losses

    def _forward_pass(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, tuple[Tensor, Tensor]],
        counts: Mapping[int, int],
    ) -> list[Tensor]:
        """Run the forward alone and return loss terms that are sums over tokens."""
        with self._trunk.prepared(), self._loss():
            outputs = self._trunk.run(batches, None, 0)
            self._trunk.check_visit_count()
            if self._plan is None:  # the model's own loss, a mean: not every model's can be told a count
                return [output["loss"] * counts[number] for number, output, _ in outputs if counts[number]]
            with self._head_on(batches, rows, outputs) as (head, items):
                return head.evaluate(items)

    def _loss(self) -> AbstractContextManager[None]:
        if self._plan is None or self._cross_entropy is None:
            return nullcontext()
        function = causal_lm_loss(self._cross_entropy, keeps_logits=self._plan.keeps_logits)
        return replaced_loss(self._graph.model, function)

    def _run_heads(
        self,
        outputs: Sequence[SuspendedOutput],
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, tuple[Tensor, Tensor]],
        num_items: int,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return loss terms, and the tensors to start the backward from with their gradients."""
        losses: list[Tensor] = []
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if self._plan is None:
            for _, output, _ in outputs:
                losses.append(output["loss"].detach())
                roots.append(output["loss"])
                grads.append(torch.ones_like(output["loss"]))
            return losses, roots, grads
        with self._head_on(batches, rows, outputs) as (head, items):
            for _, terms, crossing, gradients in head.run(items, num_items):
                losses += terms
                roots += crossing
                grads += gradients
        return losses, roots, grads

    @contextmanager
    def _head_on(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, tuple[Tensor, Tensor]],
        outputs: Sequence[SuspendedOutput],
    ) -> Iterator[tuple[ChunkedHead, list[TrunkOutput]]]:
        """Yield the head, ready to run, and what it runs on."""
        assert self._plan is not None
        first = len(self.visits)
        bounds = [(self.bounds[unit.index], first + offset) for offset, unit in enumerate(self._plan.units)]
        head = ChunkedHead(
            self._graph.model, self._plan, bounds, self._access, self._random, self._head_rows, self._activity
        )
        items = [
            TrunkOutput(number, output, without_labels(batches[number]), *rows[number], random_state)
            for number, output, random_state in outputs
        ]
        with installed_stubs({bound.unit.module: bound.forward for bound, _ in bounds}):
            yield head, items

    def _announce_backward(self, visit: int) -> None:
        """Announce the backward of `visit`, after closing those before it that the loss does not depend on."""
        while self._next_backward > visit:
            self._access.begin("backward", self._next_backward)
            self.visits[self._next_backward].skip_backward()
            self._next_backward -= 1
        assert self._next_backward == visit, (self._next_backward, visit)
        if visit >= 0:
            self._access.begin("backward", visit)
        self._next_backward -= 1

    def _end_pass(self, random_state: tuple[Tensor, ...]) -> None:
        self._random.set(random_state)
        self._trunk.visits = []
        self._micro_batches.forget()


@contextmanager
def _single_threaded_backward() -> Iterator[None]:
    """Run autograd on the calling thread: the access, its leases and the order of visits belong to one thread."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Put a model's buffers on a device; those that were one tensor stay one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and not _is_on(buffer, device):
                moved.setdefault(id(buffer), buffer.to(device))
                module._buffers[leaf] = moved[id(buffer)]


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; one without a number is the device of its type that is in use."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


#: Number of a micro-batch, what its forward returned, and where its random stream stands then.
SuspendedOutput = tuple[int, Any, tuple[Tensor, ...]]


class VisitOrderError(Exception):
    """The model called its units in another order than planned, or than another micro-batch of the step."""


class _TrunkReached(BaseException):
    """Leaves a forward at the cut. Not an `Exception`, so that no model code catches it."""

    def __init__(self, output: Any) -> None:
        self.output = output
        super().__init__()


class Trunk:
    """Runs a model's forward from its input to the cut before the head, or to its end where there is no cut.

    Args:
        graph: The model.
        access: Where weights come from, and where activations go.
        bounds: The runnable form of every unit, by index.
        random: Random state of the compute device.
        device: Compute device.
        head: Where the model is cut; None: its forward runs to the end.
        trace: Expected visits; None checks nothing.
        announce_backward: Called with a visit's number before its backward asks for anything.
        mirror: Answers the model's questions about its inputs; None: it looks for itself.
        kept: Visits whose graphs wait for their backward.
        activity: Told of every micro-batch.

    Attributes:
        visits: Those of the pass that is running.
    """

    def __init__(
        self,
        graph: ModelGraph,
        access: BlockAccess,
        bounds: Sequence[BoundUnit],
        random: RandomStates,
        device: torch.device,
        head: HeadPlan | None,
        trace: VisitTrace | None,
        announce_backward: Callable[[int], None],
        mirror: HostMirror | None = None,
        kept: Container[int] = (),
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._mirror = mirror
        self._graph, self._access, self._bounds = graph, access, bounds
        self._random, self._device = random, device
        self._head, self._trace = head, trace
        self._announce_backward = announce_backward
        self._kept = kept
        self._accepts_use_cache = accepts_use_cache(graph.model)
        self.visits: list[UnitVisit] = []

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Put stand-ins in the place of all weights, and stubs in the place of all units."""
        with ExitStack() as stack:
            for bound in self._bounds:
                stack.enter_context(bound.standing_in())
            stack.enter_context(self._stubbed())
            yield

    def run(self, batches: Mapping[int, dict[str, Any]], num_items: int | None, seed: int) -> list[SuspendedOutput]:
        """Run the forward of every micro-batch, in the current grad mode, inside of `prepared`.

        Args:
            batches: By number of the micro-batch, on the compute device.
            num_items: Trained tokens that a loss behind no cut is the mean over; None: those of each micro-batch.
            seed: Seed of the step.

        Raises:
            VisitOrderError: the model does not call its units as planned.
        """
        self.visits = []
        anchor = torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
        forwards = [
            SuspendedForward(
                number,
                self._forward_of(batch, num_items),
                self._random,
                self._device,
                micro_batch_seed(seed, number),
                self._mirror,
            )
            for number, batch in batches.items()
        ]
        try:
            for forward in forwards:
                forward.start()
            while any(forward.call is not None for forward in forwards):
                visit = self._next_visit(forwards, anchor)
                results = visit.forward(forwards)
                for forward in forwards:
                    forward.resume(results.pop(0))
        finally:
            for forward in forwards:
                forward.close()
        return [(forward.micro_batch, forward.result, forward.random_state) for forward in forwards]

    def check_visit_count(self) -> None:
        """Raise `VisitOrderError` if the forward ended before all planned visits."""
        if self._trace is None:
            return
        planned = sum(not visit.is_head for visit in self._trace.visits)
        if planned != len(self.visits):
            raise VisitOrderError(f"the forward ended after {len(self.visits)} unit calls, planned were {planned}")

    def _next_visit(self, forwards: Sequence[SuspendedForward], anchor: Tensor) -> UnitVisit:
        wanted = {forward.call.unit_index if forward.call else None for forward in forwards}
        number = len(self.visits)
        units = self._graph.units
        if len(wanted) > 1:
            names = sorted("the end" if index is None else units[index].name for index in wanted)
            raise VisitOrderError(
                f"micro-batches reach different units at visit {number}: {', '.join(names)}. Which layers this model "
                'runs depends on the data; train it with order = "micro_batch" and no plan'
            )
        index = wanted.pop()
        assert index is not None
        if self._trace is not None:
            expected = self._trace.visits[number].unit if number < len(self._trace.visits) else None
            if expected != index:
                planned = "the end of the forward" if expected is None else units[expected].name
                raise VisitOrderError(f"visit {number} is {units[index].name}, planned was {planned}")
        bound, is_kept = self._bounds[index], number in self._kept
        visit = UnitVisit(
            number, bound, self._access, self._random, self._announce_backward, anchor, is_kept, self._activity
        )
        self.visits.append(visit)
        return visit

    # -- stubs -------------------------------------------------------------------------------------------------

    def _stubbed(self) -> Any:
        stubs: dict[torch.nn.Module, Callable[..., Any]] = {
            bound.unit.module: _unit_stub(bound.unit.index) for bound in self._bounds if not bound.unit.is_container
        }
        if self._head is not None:
            trunk_forward = self._head.trunk.forward

            def trunk_stub(*args: Any, **kwargs: Any) -> Any:
                raise _TrunkReached(trunk_forward(*args, **kwargs))

            stubs[self._head.trunk] = trunk_stub
        return installed_stubs(stubs)

    def _forward_of(self, batch: dict[str, Any], num_items: int | None) -> Callable[[SuspendedForward], Any]:
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}
        containers = [unit for unit in self._graph.units if unit.is_container]

        def forward(suspended: SuspendedForward) -> Any:
            try:
                for unit in containers:
                    values = suspend(UnitCall(unit.index, (), {}, None))
                    for leaf, value in values.items():
                        suspended.bind(unit.module._parameters, leaf, value)
                return self._graph.model(**batch, num_items_in_batch=num_items, **options)
            except _TrunkReached as reached:
                return reached.output

        return forward


def _unit_stub(index: int) -> Callable[..., Any]:
    from transformers.utils.output_capturing import _active_collector

    def stub(*args: Any, **kwargs: Any) -> Any:
        return suspend(UnitCall(index, args, kwargs, _active_collector.get()))

    return stub
