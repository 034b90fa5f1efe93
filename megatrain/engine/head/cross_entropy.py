"""Cross entropy with label smoothing and z-loss, computed from logits one vocabulary part at a time.

A row's loss depends on the maximum of its logits, the sum of their exponentials, and the label's logit. One pass over
the parts of the vocabulary computes these values, and the gradient of each part can then be computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.engine.device import device_kernels
from megatrain.engine.head.loss import Loss, MicroBatchLoss, RowsLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class CrossEntropy(Loss, MicroBatchLoss):
    """Mean cross entropy over all labelled tokens of a step.

    Attributes:
        label_smoothing_factor: Share of each target that is spread evenly over the vocabulary; 0 to disable.
        z_loss: Factor of an additional loss term, the mean of ``logsumexp(logits)**2`` over all labelled tokens; 0 to
            disable. The term keeps logits from drifting (PaLM, arXiv 2204.02311).
    """

    label_smoothing_factor: float = 0.0
    z_loss: float = 0.0

    @property
    def compares_rows(self) -> bool:
        return False

    @property
    def refusal(self) -> str:
        """End of an error message, or ""; see ``Loss``. Models' own loss functions ignore smoothing and z-loss."""
        for name in ("label_smoothing_factor", "z_loss"):
            if getattr(self, name):
                return f"with which training.{name} cannot be used"
        return ""

    def applied(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """If smoothing is on, replace the model's loss function with a smoothed one within the context."""
        factor = self.label_smoothing_factor
        return replace_loss(model, _smoothed_loss(factor)) if factor else nullcontext()

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> CrossEntropy:
        """Return ``self``, because the loss needs no data from a micro-batch except its labels."""
        return self

    def for_rows(
        self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool
    ) -> RowsLoss | None:
        """Return the loss of some rows, or None if the model computes it with its loss function (see ``applied``)."""
        if not in_parts and not self.z_loss:
            return None
        return RunningSoftmax(labels, vocab_size, num_items, self.label_smoothing_factor, self.z_loss)


#: Plain cross entropy: the loss of evaluations and the default loss of training.
PLAIN = CrossEntropy()


class RunningSoftmax:
    """Cross entropy of rows whose logits are computed one vocabulary part at a time.

    All computation is in fp32. The loss is the sum over the rows of ``-log softmax(logits)[label] / num_items``.
    Smoothing spreads the share ``smoothing`` of each target evenly over the vocabulary. A z-loss adds ``z_loss *
    logsumexp(logits)**2`` to the loss of each row, before the division.

    Args:
        labels: Token ids of the labels, [rows].
        smoothing: Share of each target to spread; 0 to disable.
        z_loss: Factor of the z-loss; 0 to disable.
    """

    def __init__(
        self, labels: Tensor, vocab_size: int, num_items: int, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        self._labels, self._vocab_size, self._num_items = labels, vocab_size, num_items
        self._smoothing, self._z_loss = smoothing, z_loss
        zeros = torch.zeros(len(labels), dtype=torch.float32, device=labels.device)
        self._max_logits = torch.full_like(zeros, -torch.inf)
        self._exp_sums = zeros  # exponentials relative to the largest logit so far
        self._label_logits = torch.zeros_like(zeros)
        self._logit_sums = torch.zeros_like(zeros) if smoothing else None  # only for smoothing
        self._weights: Tensor | None = None
        self._log_sums: Tensor | None = None  # cached logsumexp, because each part's gradient needs it

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the part that starts at column ``start``."""
        self._log_sums = None
        if device_kernels.are_usable(logits):
            device_kernels.add_logits(
                logits,
                self._labels,
                start,
                max_logits=self._max_logits,
                exp_sums=self._exp_sums,
                label_logits=self._label_logits,
                logit_sums=self._logit_sums,
            )
            return
        values = logits.float()
        columns, is_in_part = label_columns(self._labels, start, values.shape[1])
        self._label_logits = torch.where(is_in_part, values.gather(1, columns).squeeze(1), self._label_logits)
        if self._logit_sums is not None:
            self._logit_sums = self._logit_sums + values.sum(1)
        max_logits = torch.maximum(self._max_logits, values.amax(1))
        part_sums = (values - max_logits.unsqueeze(1)).exp_().sum(1)
        self._exp_sums = self._exp_sums * torch.exp(self._max_logits - max_logits) + part_sums
        self._max_logits = max_logits

    def log_probs(self) -> Tensor:
        """Return the log-probability of each row's label [rows]. Call this after all parts have been added."""
        return self._label_logits - self._log_sum()

    def weigh(self, weights: Tensor) -> None:
        """Set the weights [rows] of the rows' gradients, which replace the factor ``1 / num_items``."""
        self._weights = weights

    def loss(self) -> Tensor:
        """Return the loss. Call this after all parts have been added."""
        log_sum = self._log_sum()
        losses = log_sum - self._label_logits
        if self._logit_sums is not None:
            uniform_losses = log_sum - self._logit_sums / self._vocab_size
            losses = (1 - self._smoothing) * losses + self._smoothing * uniform_losses
        if self._z_loss:
            losses = losses + self._z_loss * log_sum.square()
        return losses.sum() / self._num_items

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the gradient with respect to a part's logits, in their dtype. Call this after adding all parts."""
        if device_kernels.are_usable(logits):
            return device_kernels.logits_gradient(
                logits,
                self._labels,
                start,
                self._log_sum(),
                weights=self._weights,
                num_items=self._num_items,
                z_loss=self._z_loss,
                share=self._smoothing / self._vocab_size,
                label_weight=1 - self._smoothing,
            )
        log_sum = self._log_sum().unsqueeze(1)
        gradient = (logits.float() - log_sum).exp_()
        if self._z_loss:
            gradient.mul_(1 + 2 * self._z_loss * log_sum)
        if self._smoothing:
            gradient.sub_(self._smoothing / self._vocab_size)
        columns, is_in_part = label_columns(self._labels, start, gradient.shape[1])
        # Scatter values instead of adding them. Each row has one label, so the order of writes has no effect.
        gradient.scatter_(1, columns, gradient.gather(1, columns) - is_in_part.unsqueeze(1) * (1 - self._smoothing))
        if self._weights is not None:
            return gradient.mul_(self._weights.unsqueeze(1)).to(logits.dtype)
        return gradient.div_(self._num_items).to(logits.dtype)

    def _log_sum(self) -> Tensor:
        if self._log_sums is None:
            self._log_sums = self._max_logits + self._exp_sums.log()
        return self._log_sums


def label_columns(labels: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in a part, clamped to the part, as [rows, 1], and whether the label is in the part."""
    columns = labels - start
    return columns.clamp(0, num_columns - 1).unsqueeze(1), (columns >= 0) & (columns < num_columns)


def _smoothed_loss(factor: float) -> Callable[..., Tensor]:
    """Return a loss function with label smoothing. It has the signature of transformers' causal LM loss."""

    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: int, shift_labels: Tensor, **options: Any
    ) -> Tensor:
        total = nn.functional.cross_entropy(
            logits.float().view(-1, vocab_size),
            shift_labels.view(-1),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=factor,
        )
        return total / num_items_in_batch

    return loss


@contextmanager
def replace_loss(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a model's loss function within the context."""
    original = model.__dict__.get("_loss_function")
    model.__dict__["_loss_function"] = function
    try:
        yield
    finally:
        del model.__dict__["_loss_function"]
        if original is not None:
            model.__dict__["_loss_function"] = original
