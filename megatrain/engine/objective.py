"""The training objective: cross entropy, label smoothing, and noise on the embeddings (NEFTune)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

__all__ = ["IGNORED_LABEL", "CrossEntropy", "Objective", "causal_lm_loss", "replaced_loss"]

IGNORED_LABEL = -100
"""Label of a position that is not trained, as in transformers."""


class CrossEntropy(Protocol):
    """Cross entropy by another kernel than torch's."""

    def __call__(self, logits: Tensor, labels: Tensor, num_items: int, ignored: int, /) -> Tensor:
        """Return the sum over rows of ``-log softmax(logits)[label] / num_items``; it may overwrite ``logits``.

        Args:
            logits: [rows, columns].
            labels: [rows]; a row with the label ``ignored`` adds nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Objective:
    """Changes of the training objective; evaluations use plain cross entropy.

    Attributes:
        label_smoothing_factor: share of every target that is spread evenly over the vocabulary; 0: none. Needs a
            chunked head.
        neftune_noise_alpha: uniform noise on the output of the input embedding, of at most alpha / sqrt(tokens in a row
            x width); 0: none. It comes from the micro-batch's random stream, as dropout does.
    """

    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float = 0.0

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Have the model's own forward compute this objective inside the ``with`` block."""
        with ExitStack() as stack:
            if self.label_smoothing_factor:
                stack.enter_context(replaced_loss(model, _smoothed(self.label_smoothing_factor)))
            if self.neftune_noise_alpha:
                embedding = model.get_input_embeddings()
                handle = embedding.register_forward_hook(_noise(self.neftune_noise_alpha))
                stack.callback(handle.remove)
            yield


def _noise(alpha: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a forward hook that adds noise; a recompute draws the same noise, from the same random state."""

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        largest = float(np.float32(alpha) / np.sqrt(np.float32(output.shape[1] * output.shape[2])))  # as transformers
        return output + torch.zeros_like(output).uniform_(-largest, largest)

    return add_noise


def causal_lm_loss(cross_entropy: CrossEntropy, *, keeps_logits: bool) -> Callable[..., Tensor]:
    """Return a replacement of transformers' ``ForCausalLMLoss`` for labels that are shifted already.

    Args:
        cross_entropy: may overwrite its logits.
        keeps_logits: pass it a copy of the logits, as the model reads them again.
    """

    def loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: int,
        shift_labels: Tensor,
        ignore_index: int = IGNORED_LABEL,
        **rest: Any,
    ) -> Tensor:
        rows = logits.reshape(-1, vocab_size)
        return cross_entropy(
            rows.clone() if keeps_logits else rows, shift_labels.reshape(-1), num_items_in_batch, ignore_index
        )

    return loss


def _smoothed(factor: float) -> Callable[..., Tensor]:
    """Return a loss of shifted labels: ``(1 - factor)`` of theirs, ``factor`` of the mean over the vocabulary."""

    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: int, shift_labels: Tensor, **rest: Any
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
def replaced_loss(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the loss function that transformers chose for a model."""
    own = model.__dict__.get("_loss_function")
    model.__dict__["_loss_function"] = function
    try:
        yield
    finally:
        del model.__dict__["_loss_function"]
        if own is not None:
            model.__dict__["_loss_function"] = own
