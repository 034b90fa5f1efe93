"""The training objective: cross entropy or a loss over preferences, label smoothing, noise on the embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from megatrain.base.batch_keys import IGNORED_LABEL, TEACHER_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from megatrain.engine.preferences import PreferenceLoss

__all__ = [
    "Distillation",
    "Objective",
    "TeacherRows",
    "replaced_loss",
    "teacher_rows",
]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """What a teacher says of some rows, at the temperature of the distillation.

    Attributes:
        ids: [rows, k] words, each once in a row.
        log_probs: [rows, k] fp32, theirs.
        rest_log_probs: [rows] fp32, log of the probability of all other words together.
    """

    ids: Tensor
    log_probs: Tensor
    rest_log_probs: Tensor

    def between(self, start: int, stop: int) -> TeacherRows:
        """Return some of the rows."""
        return TeacherRows(self.ids[start:stop], self.log_probs[start:stop], self.rest_log_probs[start:stop])


def teacher_rows(batch: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return what a micro-batch has of a teacher, of some rows of it, flattened to [B * S]; else nothing."""
    return {key: batch[key].flatten(0, 1).index_select(0, rows) for key in TEACHER_KEYS if key in batch}


@dataclass(frozen=True, slots=True)
class Distillation:
    """Training on a teacher's scores: ``alpha * cross entropy + (1 - alpha) * temperature**2 * KL(teacher, student)``.

    Both are means over the tokens with a label. The divergence is the forward one, at the temperature, over the
    teacher's k likeliest words; ``rest`` says what becomes of the probability p that the teacher gives to all others.

    Attributes:
        temperature: that the scores were made at; the student's logits are divided by it.
        alpha: share of the cross entropy.
        rest: ``bucket``: all other words are one outcome, of probability p with the teacher and of their summed
            probability with the student. ``ignore``: there is no term for them. ``renormalize``: the teacher's k
            probabilities are scaled to a sum of 1.
    """

    temperature: float = 1.0
    alpha: float = 0.0
    rest: Literal["bucket", "ignore", "renormalize"] = "bucket"

    def targets(self, teacher: TeacherRows) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities that the student is compared with: of the words, and of all others."""
        log_probs = teacher.log_probs.float()
        if self.rest == "renormalize":
            log_probs = log_probs - log_probs.logsumexp(1, keepdim=True)
        return log_probs, teacher.rest_log_probs.float()


@dataclass(frozen=True, slots=True)
class Objective:
    """Changes of the training objective; evaluations use plain cross entropy.

    Attributes:
        label_smoothing_factor: share of every target that is spread evenly over the vocabulary; 0: none. Needs a
            chunked head.
        z_loss: ``z_loss * log(sum of the exponentials of the logits)**2``, mean over the tokens with a label, is added
            to the loss, which keeps logits from drifting (PaLM, arXiv 2204.02311); 0: none. Needs a chunked head.
        neftune_noise_alpha: uniform noise on the output of the input embedding, of at most alpha / sqrt(tokens in a row
            x width); 0: none. It comes from the micro-batch's random stream, as dropout does.
        distillation: trains on what micro-batches have of a teacher; None: on their labels alone. Needs a chunked head.
        teacher_k: words of a teacher for each token, in distillation.
        preference: in place of cross entropy, for micro-batches of preferences; nothing is dropped out then. Needs a
            chunked head.
    """

    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float = 0.0
    distillation: Distillation | None = None
    teacher_k: int = 0
    preference: PreferenceLoss | None = None
    z_loss: float = 0.0

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        """Have the model's own forward compute this objective inside the ``with`` block."""
        with ExitStack() as stack:
            if self.label_smoothing_factor:
                stack.enter_context(replaced_loss(model, _smoothed(self.label_smoothing_factor)))
            if self.preference is not None:
                stack.enter_context(_without_dropout(model))
            if self.neftune_noise_alpha:
                embedding = model.get_input_embeddings()
                handle = embedding.register_forward_hook(_noise(self.neftune_noise_alpha))
                stack.callback(handle.remove)
            yield


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, as TRL does: what the model says is compared with what its reference says."""
    layers = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    try:
        for module, _ in layers:
            module.p = 0.0
        yield
    finally:
        for module, p in layers:
            module.p = p


def _noise(alpha: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a forward hook that adds noise; a recompute draws the same noise, from the same random state."""

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        largest = float(np.float32(alpha) / np.sqrt(np.float32(output.shape[1] * output.shape[2])))  # as transformers
        return output + torch.zeros_like(output).uniform_(-largest, largest)

    return add_noise


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
