"""The head: logits and loss in pieces of a few rows, so that no tensor of tokens x vocabulary is ever whole.

Behind the cut (`megatrain.engine.head_plan`) the model's own `forward` runs again for every piece, with the trunk
replaced by rows of its output. Only rows with a label are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.activity import Activity
from megatrain.engine.arguments import tree_map
from megatrain.engine.head_plan import accepts_use_cache, has_auxiliary_loss, without_auxiliary_loss
from megatrain.engine.units import BoundUnit, installed_stubs
from megatrain.engine.visit import optional_gradients

if TYPE_CHECKING:
    from megatrain.engine.access import BlockAccess, GradientSink
    from megatrain.engine.head_plan import HeadPlan
    from megatrain.engine.suspend import RandomStates

__all__ = ["ChunkedHead", "TrunkOutput"]


@dataclass(slots=True, eq=False)
class TrunkOutput:
    """What one micro-batch hands from the trunk to the head.

    Attributes:
        micro_batch: Number of the micro-batch in the step.
        output: The trunk's `ModelOutput`.
        batch: The micro-batch on the compute device, without labels.
        rows: Which rows of `last_hidden_state` (flattened to [B * S, H]) have a label.
        labels: Their labels, same length.
        random_state: The micro-batch's random stream at the cut.
    """

    micro_batch: int
    output: Any
    batch: dict[str, Any]
    rows: Tensor
    labels: Tensor
    random_state: tuple[Tensor, ...]


class ChunkedHead:
    """Runs the head of all micro-batches of a pass and yields the gradient of each trunk's output.

    Args:
        model: The model.
        plan: Where it is cut.
        bounds: The head's units and the number of each one's visit.
        access: Blocks.
        random: Random state of the compute device.
        rows: Rows per piece.
        activity: Told of every micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: HeadPlan,
        bounds: Sequence[tuple[BoundUnit, int]],
        access: BlockAccess,
        random: RandomStates,
        rows: int,
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._model = model
        self._plan = plan
        self._bounds = bounds
        self._access = access
        self._random = random
        self._rows = rows
        self._has_auxiliary_loss = has_auxiliary_loss(model)
        self._accepts_use_cache = accepts_use_cache(model)

    def run(
        self, outputs: Sequence[TrunkOutput], num_items: int
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield `(micro-batch, loss terms, tensors that cross the cut, their gradients)` for each output, in order.

        Weights and gradient accumulators of the head are held from the first to the last.
        """
        if self._bounds:
            self._access.begin("head", self._bounds[0][1])
        with ExitStack() as stack:
            leaves: dict[tuple[int, str], Tensor] = {}
            sinks: dict[int, GradientSink] = {}
            for bound, visit in self._bounds:
                weights = stack.enter_context(self._access.weights(bound.unit, visit))
                own = stack.enter_context(bound.bound(weights))
                leaves.update(((visit, name), leaf) for name, leaf in own.items())
                if own:
                    sinks[visit] = stack.enter_context(self._access.gradients(bound.unit, visit))
            for item in outputs:
                self._activity.micro_batch = item.micro_batch + 1
                self._random.set(item.random_state)
                with torch.enable_grad():
                    found = self._run_one(item, num_items, leaves, sinks)
                yield (item.micro_batch, *found)

    def evaluate(self, outputs: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return summed losses of the pieces of all outputs, in order, without gradients.

        Weights are held from the first to the last. To be called without grad mode.
        """
        losses: list[Tensor] = []
        if self._bounds:
            self._access.begin("head", self._bounds[0][1])
        with ExitStack() as stack:
            for bound, visit in self._bounds:
                weights = stack.enter_context(self._access.weights(bound.unit, visit))
                stack.enter_context(bound.bound(weights))
            for item in outputs:
                self._activity.micro_batch = item.micro_batch + 1
                self._random.set(item.random_state)
                hidden: Tensor = item.output["last_hidden_state"]
                flat, output = hidden.reshape(-1, hidden.shape[-1]), copy.copy(item.output)
                for start in range(0, len(item.rows), self._rows):
                    part = slice(start, start + self._rows)
                    output["last_hidden_state"] = flat.index_select(0, item.rows[part]).unsqueeze(0)
                    losses.append(self._loss(item, output, item.labels[part], 1))
        return losses

    def _run_one(
        self,
        item: TrunkOutput,
        num_items: int,
        leaves: Mapping[tuple[int, str], Tensor],
        sinks: Mapping[int, GradientSink],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        hidden: Tensor = item.output["last_hidden_state"]
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        crossing: list[Tensor] = []
        grads: list[Tensor] = []
        losses: list[Tensor] = []
        hidden_grad = torch.zeros_like(flat) if hidden.requires_grad and len(item.rows) else None
        with without_auxiliary_loss(self._model):
            bare = _bare_output(item.output)
            for start in range(0, len(item.rows), self._rows):
                rows = item.rows[start : start + self._rows]
                piece = flat.index_select(0, rows).unsqueeze(0).requires_grad_(hidden.requires_grad)
                bare["last_hidden_state"] = piece
                loss = self._loss(item, bare, item.labels[start : start + self._rows], num_items)
                wanted = [piece, *leaves.values()] if hidden.requires_grad else list(leaves.values())
                found = optional_gradients([loss], [torch.ones_like(loss)], wanted)
                losses.append(loss.detach())
                del loss
                if hidden_grad is not None:
                    gradient = found.pop(0)
                    assert gradient is not None
                    hidden_grad.index_copy_(0, rows, gradient[0])
                for (visit, name), gradient in zip(leaves, found, strict=True):
                    if gradient is not None:
                        sinks[visit].add(name, gradient)
        if hidden_grad is not None:
            crossing.append(hidden)
            grads.append(hidden_grad.view(hidden.shape))
        if self._has_auxiliary_loss:
            losses.append(self._auxiliary(item, num_items, crossing, grads))
        return losses, crossing, grads

    def _auxiliary(self, item: TrunkOutput, num_items: int, crossing: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Run the head once on a row without a label: what is left of the loss is the auxiliary term."""
        outer: list[Tensor] = []
        inner: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            outer.append(value)
            inner.append(value.detach().requires_grad_())
            return inner[-1]

        hidden: Tensor = item.output["last_hidden_state"]
        rest = {key: tree_map(value, leaf) for key, value in item.output.items() if key != "last_hidden_state"}
        full = copy.copy(item.output)
        full["last_hidden_state"] = hidden.detach().reshape(-1, hidden.shape[-1])[:1].unsqueeze(0)
        for key, value in rest.items():
            full[key] = value
        nothing = torch.full((1,), -100, dtype=torch.long, device=hidden.device)
        loss = self._loss(item, full, nothing, num_items)
        if loss.requires_grad and inner:
            found = optional_gradients([loss], [torch.ones_like(loss)], inner)
            for tensor, gradient in zip(outer, found, strict=True):
                if gradient is not None:
                    crossing.append(tensor)
                    grads.append(gradient)
        return loss.detach()

    def _loss(self, item: TrunkOutput, trunk_output: Any, shift_labels: Tensor, num_items: int) -> Tensor:
        labels = shift_labels.unsqueeze(0)
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}
        with installed_stubs({self._plan.trunk: lambda *args, **kwargs: trunk_output}):
            output = self._model(
                **item.batch, labels=labels, shift_labels=labels, num_items_in_batch=num_items, **options
            )
        loss: Tensor = output["loss"]
        return loss


def _bare_output(output: Any) -> Any:
    """Return a copy of a trunk's output without what only the auxiliary loss uses."""
    bare = copy.copy(output)
    for key, value in output.items():
        differentiable = False

        def look(leaf: Any) -> Any:
            nonlocal differentiable
            differentiable = differentiable or (isinstance(leaf, Tensor) and leaf.requires_grad)
            return leaf

        tree_map(value, look)
        if differentiable and key != "last_hidden_state":
            bare[key] = None
    return bare
