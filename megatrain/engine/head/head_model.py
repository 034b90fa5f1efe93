"""Head of a model: its logits, loss and auxiliary loss, computed by the model's own forward.

In this forward, a stub replaces the trunk, so Hugging Face's code computes norms, scaling and soft caps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.engine.head.cross_entropy import PLAIN, replace_loss
from megatrain.engine.head.vocabulary import PartWeight, VocabularyPart
from megatrain.engine.unit.arguments import tree_map
from megatrain.engine.unit.bound_unit import install_stubs
from megatrain.engine.unit.unit_run import optional_gradients

if TYPE_CHECKING:
    from megatrain.engine.head.loss import MicroBatchLoss, RowsLoss


_AUXILIARY_FLAG = "output_router_logits"


@dataclass(slots=True, eq=False)
class TrunkOutput:
    """Input that one micro-batch provides to the head.

    Attributes:
        batch: Micro-batch on the compute device, without labels.
        rows: Indexes of the labelled rows in `last_hidden_state`, flattened to [B * S, H].
        random_state: State of the micro-batch's random stream at the cut.
    """

    micro_batch: int
    output: Any
    batch: dict[str, Any]
    rows: Tensor
    labels: Tensor
    random_state: tuple[Tensor, ...]
    loss: MicroBatchLoss = PLAIN


@dataclass(slots=True, eq=False)
class HeadRows:
    """Piece of a micro-batch: some rows of the trunk's output.

    Attributes:
        output: Output of the trunk, with only these rows.
        leaf: Hidden states of the rows, [1, rows, H].
        loss: Loss of the rows; None if the model's own loss function computes it.
        kept_logits: Logits that are kept for the second pass, one tensor per part.
        gradient: Gradient of the leaf so far. One part's gradient has the leaf's dtype; a sum of parts is in fp32.
    """

    item: TrunkOutput
    output: Any
    rows: Tensor
    labels: Tensor
    leaf: Tensor
    loss: RowsLoss | None
    kept_logits: list[Tensor] = field(default_factory=list)
    gradient: Tensor | None = None

    def store_gradient(self, hidden_grad: Tensor | None) -> None:
        """Write the leaf's gradient into the gradient of the trunk's output [B * S, H]."""
        if hidden_grad is not None:
            assert self.gradient is not None
            hidden_grad.index_copy_(0, self.rows, self.gradient[0].to(hidden_grad.dtype))
            self.gradient = None


class HeadModel:
    """Part of a model that follows its trunk.

    Args:
        part_weight: Placeholder for the weight that computes logits in parts; None if the vocabulary is not split.

    Attributes:
        has_auxiliary_loss: Whether the loss includes the routers' auxiliary loss.
    """

    def __init__(self, model: nn.Module, trunk: nn.Module, part_weight: PartWeight | None, *, is_product: bool) -> None:
        self._model, self._trunk, self._part_weight, self._is_product = model, trunk, part_weight, is_product
        self.has_auxiliary_loss = any(getattr(config, _AUXILIARY_FLAG, False) for config in _configs(model))
        self._has_use_cache_argument = has_use_cache_argument(model)

    def without_auxiliary_loss(self) -> AbstractContextManager[None]:
        """Disable the routers' auxiliary loss within the context, because `auxiliary_loss` computes it separately."""
        return without_auxiliary_loss(self._model)

    def logits(self, item: TrunkOutput, output: Any, part: VocabularyPart | None) -> Tensor:
        """Return the logits [rows, columns] for one part of the vocabulary, or for the whole vocabulary."""
        if part is not None and self._is_product:
            assert self._part_weight is not None
            with self._part_weight.use_part(part):
                logits = torch.nn.functional.linear(output["last_hidden_state"], self._part_weight)
            return logits.reshape(-1, logits.shape[-1])
        outputs: list[Tensor] = []
        self._call_part(part, item, output, outputs)
        return outputs[0].reshape(-1, outputs[0].shape[-1])

    def loss(self, item: TrunkOutput, trunk_output: Any, shift_labels: Tensor, num_items: int) -> Tensor:
        loss: Tensor = self._call(item, trunk_output, shift_labels.unsqueeze(0), num_items)["loss"]
        return loss

    def auxiliary_loss(self, item: TrunkOutput, num_items: int, roots: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Return a micro-batch's auxiliary router loss, multiplied by the micro-batch's share of the step's labels.

        Append the differentiable tensors of the trunk's output to ``roots``, and their gradients to ``grads``. The head
        runs once, on a single token without a label. Sequences without any label are masked out.
        """
        originals: list[Tensor] = []
        leaves: list[Tensor] = []

        def make_leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            originals.append(value)
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        states: Tensor = item.output["last_hidden_state"]
        item = replace(item, batch={**item.batch, **_labelled_rows_mask(item, states)})
        values = {key: tree_map(value, make_leaf) for key, value in item.output.items() if key != "last_hidden_state"}
        output = copy.copy(item.output)
        output["last_hidden_state"] = states.detach().reshape(-1, states.shape[-1])[:1].unsqueeze(0)
        for key, value in values.items():
            output[key] = value
        if self._part_weight is not None:
            # The logits are not used, so one column of zeros is sufficient and no lease is needed.
            zero_row = torch.zeros(1, self._part_weight.shape[1], dtype=self._part_weight.dtype, device=states.device)
            loss: Tensor = self._call_part(VocabularyPart(0, 1, zero_row), item, output, [])["loss"]
        else:
            ignored_label = torch.full((1,), IGNORED_LABEL, dtype=torch.long, device=states.device)
            loss = self.loss(item, output, ignored_label, num_items)
        share = len(item.rows) / num_items
        if loss.requires_grad and leaves:
            gradients = optional_gradients([loss], [torch.full_like(loss, share)], leaves)
            for tensor, gradient in zip(originals, gradients, strict=True):
                if gradient is not None:
                    roots.append(tensor)
                    grads.append(gradient)
        return loss.detach() * share

    def _call_part(self, part: VocabularyPart | None, item: TrunkOutput, output: Any, logits: list[Tensor]) -> Any:
        """Run the model's own forward for a part of the logits, or for all logits. Append the logits to ``logits``.

        In the forward's loss, zero replaces the cross entropy.
        """
        assert part is None or self._part_weight is not None
        part_context = nullcontext() if part is None or self._part_weight is None else self._part_weight.use_part(part)

        def capture_logits(*args: Any, **kwargs: Any) -> Tensor:
            logits.append(kwargs["logits"] if "logits" in kwargs else args[0])
            return torch.zeros((), device=logits[-1].device)

        states = output["last_hidden_state"]
        labels = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        with part_context, replace_loss(self._model, capture_logits):
            result = self._call(item, output, labels, 1)
        assert len(logits) == 1 and logits[0].shape[:-1].numel() == labels.numel(), [each.shape for each in logits]
        return result

    def _call(self, item: TrunkOutput, trunk_output: Any, labels: Tensor, num_items: int) -> Any:
        """Run the model's own forward, with a given output of the trunk. Labels [1, rows] are already shifted."""
        options: dict[str, Any] = {"use_cache": False} if self._has_use_cache_argument else {}
        with install_stubs({self._trunk: lambda *args, **kwargs: trunk_output}):
            return self._model(
                **item.batch, labels=labels, shift_labels=labels, num_items_in_batch=num_items, **options
            )


def _labelled_rows_mask(item: TrunkOutput, states: Tensor) -> dict[str, Tensor]:
    """Return an `attention_mask` that excludes rows without labels; {} for a single row or a mask that is not 2-D."""
    num_rows, length = states.shape[:2]
    mask = item.batch.get("attention_mask")
    if num_rows == 1 or (mask is not None and mask.dim() != 2):
        return {}
    is_labelled = torch.zeros(num_rows, dtype=torch.long, device=states.device)
    is_labelled.index_fill_(0, item.rows // length, 1)
    full_mask = torch.ones(num_rows, length, dtype=torch.long, device=states.device) if mask is None else mask
    return {"attention_mask": full_mask * is_labelled.unsqueeze(1).to(full_mask.dtype)}


@contextmanager
def without_auxiliary_loss(model: nn.Module) -> Iterator[None]:
    """Disable the routers' auxiliary loss within the context."""
    configs = {id(config): config for config in _configs(model) if getattr(config, _AUXILIARY_FLAG, False)}
    try:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, False)
        yield
    finally:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, True)


def has_use_cache_argument(model: nn.Module) -> bool:
    """Return whether the model's forward accepts `use_cache`."""
    parameters = inspect.signature(type(model).forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _configs(model: nn.Module) -> list[Any]:
    config: Any = model.config
    return [config, config.get_text_config()]
