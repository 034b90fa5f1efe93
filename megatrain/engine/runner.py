"""Forward and backward of one optimizer step, with weights streamed unit by unit.

Hugging Face's own forward decides everything but one thing: when a unit's weights are there. In layer order all
micro-batches pass a unit before any of them reaches the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.engine.head import ChunkedHead, HeadPlan, TrunkOutput, accepts_use_cache, plan_head
from megatrain.engine.suspend import RandomStates, SuspendedForward, UnitCall, micro_batch_seed, suspend
from megatrain.engine.units import BoundUnit, installed_stubs
from megatrain.engine.visit import UnitVisit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.engine.access import BlockAccess
    from megatrain.engine.trace import VisitTrace
    from megatrain.models.graph import ModelGraph

__all__ = ["LayerRunner", "NoTrainedTokensError", "StepLoss", "VisitOrderError", "shifted_labels"]

_IGNORED = -100


class NoTrainedTokensError(Exception):
    """No token of the step has a label."""


class VisitOrderError(Exception):
    """The model called its units in another order than planned, or than another micro-batch of the step."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of one optimizer step.

    Attributes:
        loss: Mean over the trained tokens of the step, auxiliary terms of every micro-batch added.
        num_trained_tokens: Tokens that have a label after the shift.
    """

    loss: float
    num_trained_tokens: int


class _TrunkReached(BaseException):
    """Leaves a forward at the cut. Not an `Exception`, so that no model code catches it."""

    def __init__(self, output: Any) -> None:
        self.output = output
        super().__init__()


def shifted_labels(labels: Tensor) -> Tensor:
    """Return for every position the label of the next token, -100 at the end, as transformers shifts them."""
    return torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


class LayerRunner:
    """Computes loss and gradients of a step.

    Args:
        graph: The model; its buffers are moved to `device`.
        access: Weights in, gradients out, activations out and in.
        device: Compute device.
        compute_dtype: Must be the graph's.
        order: "layer": all micro-batches of a unit before the next unit; "micro_batch": one micro-batch at a time.
            Both give the same bits.
        head_rows: Rows of logits at a time; None takes the model's default. It changes bits of the head's weight
            gradient, so keep it between runs that are compared.
        trace: Expected visits; None checks nothing.
        random_enabled: False where nothing is really computed.

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
        random_enabled: bool = True,
    ) -> None:
        assert compute_dtype == graph.dtype, (compute_dtype, graph.dtype)
        self._graph = graph
        self._access = access
        self._device = torch.device(device)
        self._order = order
        self._trace = trace
        self._random = RandomStates(self._device, enabled=random_enabled)
        _move_buffers(graph.model, self._device)
        self.bounds = [BoundUnit(unit, self._device) for unit in graph.units]
        self._plan: HeadPlan | None = plan_head(graph)
        self._head_rows = head_rows or (self._plan.default_rows if self._plan else 0)
        self._accepts_use_cache = accepts_use_cache(graph.model)
        self._visits: list[UnitVisit] = []
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
        return self._visits

    @property
    def head_rows(self) -> int:
        """Rows of logits at a time; 0 if the head is not chunked."""
        return self._head_rows if self._plan else 0

    def forward_backward(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, num_items: int | None = None, seed: int = 0
    ) -> StepLoss:
        """Run forward and backward of all micro-batches; gradients are in the access's accumulators afterwards.

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
        counts = [int((labels != _IGNORED).sum()) for labels in shifted]
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
            for group in groups:
                batches = {number: self._on_device(micro_batches[number]) for number in group}
                rows = {number: _labelled_rows(shifted[number], self._device) for number in group}
                losses += self.run_pass(batches, rows, total, seed)
        finally:
            self._random.set(random_state)
            self._visits = []
        return StepLoss(_sum(losses), sum(counts))

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
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        self._visits = []
        forwards = [
            SuspendedForward(
                number, self._forward_of(batch, num_items), self._random, self._device, micro_batch_seed(seed, number)
            )
            for number, batch in batches.items()
        ]
        with ExitStack() as stack:
            for bound in self.bounds:
                stack.enter_context(bound.standing_in())
            stack.enter_context(self._stubbed())
            stack.enter_context(_single_threaded_backward())
            self._run_trunks(forwards, anchor)
            outputs = [(forward.micro_batch, forward.result, forward.random_state) for forward in forwards]
            del forwards
            losses, roots, grads = self._run_heads(outputs, batches, rows, num_items)
            del outputs
            self._check_visit_count()
            self._next_backward = len(self._visits) - 1
            if roots:
                torch.autograd.backward(roots, grads)
            self._announce_backward(-1)
        return losses

    def _run_trunks(self, forwards: Sequence[SuspendedForward], anchor: Tensor) -> None:
        """Run all forwards to their end, one unit after the other."""
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

    def _next_visit(self, forwards: Sequence[SuspendedForward], anchor: Tensor) -> UnitVisit:
        wanted = {forward.call.unit_index if forward.call else None for forward in forwards}
        number = len(self._visits)
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
        visit = UnitVisit(number, self.bounds[index], self._access, self._random, self._announce_backward, anchor)
        self._visits.append(visit)
        return visit

    def _check_visit_count(self) -> None:
        if self._trace is None:
            return
        planned = sum(not visit.is_head for visit in self._trace.visits)
        if planned != len(self._visits):
            raise VisitOrderError(f"the forward ended after {len(self._visits)} unit calls, planned were {planned}")

    def _run_heads(
        self,
        outputs: list[tuple[int, Any, tuple[Tensor, ...]]],
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
        first = len(self._visits)
        bounds = [(self.bounds[unit.index], first + offset) for offset, unit in enumerate(self._plan.units)]
        head = ChunkedHead(self._graph.model, self._plan, bounds, self._access, self._random, self._head_rows)
        items = [
            TrunkOutput(number, output, _without_labels(batches[number]), *rows[number], random_state)
            for number, output, random_state in outputs
        ]
        with installed_stubs({bound.unit.module: bound.forward for bound, _ in bounds}):
            for _, terms, crossing, gradients in head.run(items, num_items):
                losses += terms
                roots += crossing
                grads += gradients
        return losses, roots, grads

    def _announce_backward(self, visit: int) -> None:
        """Announce the backward of `visit`, after closing those before it that the loss does not depend on."""
        while self._next_backward > visit:
            self._access.begin("backward", self._next_backward)
            self._visits[self._next_backward].skip_backward()
            self._next_backward -= 1
        assert self._next_backward == visit, (self._next_backward, visit)
        if visit >= 0:
            self._access.begin("backward", visit)
        self._next_backward -= 1

    # -- stubs -------------------------------------------------------------------------------------------------

    def _stubbed(self) -> Any:
        stubs: dict[torch.nn.Module, Callable[..., Any]] = {
            bound.unit.module: _unit_stub(bound.unit.index) for bound in self.bounds if not bound.unit.is_container
        }
        if self._plan is not None:
            trunk_forward = self._plan.trunk.forward

            def trunk_stub(*args: Any, **kwargs: Any) -> Any:
                raise _TrunkReached(trunk_forward(*args, **kwargs))

            stubs[self._plan.trunk] = trunk_stub
        return installed_stubs(stubs)

    def _forward_of(self, batch: dict[str, Any], num_items: int) -> Callable[[SuspendedForward], Any]:
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}
        containers = [unit for unit in self._graph.units if unit.is_container]

        def forward(suspended: SuspendedForward) -> Any:
            try:
                with torch.enable_grad():
                    for unit in containers:
                        values = suspend(UnitCall(unit.index, (), {}, None))
                        for leaf, value in values.items():
                            suspended.bind(unit.module._parameters, leaf, value)
                    return self._graph.model(**batch, num_items_in_batch=num_items, **options)
            except _TrunkReached as reached:
                return reached.output

        return forward

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {key: value.to(self._device, non_blocking=True) for key, value in batch.items()}


def _unit_stub(index: int) -> Callable[..., Any]:
    from transformers.utils.output_capturing import _active_collector

    def stub(*args: Any, **kwargs: Any) -> Any:
        return suspend(UnitCall(index, args, kwargs, _active_collector.get()))

    return stub


@contextmanager
def _single_threaded_backward() -> Iterator[None]:
    """Run autograd on the calling thread: the access, its leases and the order of visits belong to one thread."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def _labelled_rows(shifted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = (shifted != _IGNORED).nonzero().squeeze(1)
    return rows.to(device), shifted[rows].to(device)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "labels"}


def _sum(losses: Sequence[Tensor]) -> float:
    """Add loss terms in double precision, in order, with one synchronisation."""
    return float(sum(torch.stack([loss.to(torch.float64) for loss in losses]).tolist()))


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                moved.setdefault(id(buffer), buffer.to(device))
                module._buffers[leaf] = moved[id(buffer)]
