"""Preference losses, which are functions of whole answers' log-probabilities, and their gradients per answer.

An example consists of two rows of a micro-batch. Rows 0 to P - 1 contain the first answers of P examples, and rows P to
2P - 1 their second answers. For a pair, these are the chosen and the rejected answer. For an unpaired example (KTO),
the first row contains the answer, and the second row the example's prompt with another example's answer. From the
second rows, KTO estimates the divergence from the reference model.

The losses depend on the logits only through each answer's summed log-probability. The gradient is therefore the
cross-entropy gradient multiplied by one weight per answer. The weight is known only after all rows of an example have
been read. The head therefore runs twice over a micro-batch's rows: for the sums and for the gradients (`engine/head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.base.batch_keys import DESIRABLE, IGNORED_LABEL, REFERENCE
from megatrain.engine.head.cross_entropy import PLAIN, RunningSoftmax
from megatrain.engine.head.loss import Loss, MicroBatchLoss, PartialMean, RowsLoss, mean_metrics

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatrain.tasks.table import LossType

__all__ = [
    "CollectedExamples",
    "Examples",
    "PartialMean",
    "PreferenceLoss",
    "StepSize",
]

_ROW_NBYTES = 32  # bytes per row of a micro-batch for the log-probability, its gradient and intermediate values

_REFERENCE_FREE = ("cpo", "orpo", "simpo")
_LENGTH_NORMALIZED = ("orpo", "simpo")  # losses that use the mean over an answer's tokens instead of the sum


@dataclass(frozen=True, slots=True)
class StepSize:
    """Divisors of the terms in a step's loss.

    Attributes:
        num_chosen_tokens: Total number of tokens in the first answers.
    """

    num_examples: int
    num_chosen_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """All P examples in a micro-batch. Empty rows are left out.

    Attributes:
        counts: Number of labelled tokens in each row of the micro-batch, including empty rows.
        rows: Row indices of the first and second answers, ``(2, P)``.
        lengths: Number of tokens in each answer, ``(2, P)``, fp32.
        reference: The reference model's log-probabilities of the answers, ``(2, P)``, fp32.
        desirable: Whether the first answer is good, ``(P,)``, bool.
        num_desirable: Number of good first answers.
        repeats: ``counts`` as a tensor, on the device of the gradients.
    """

    counts: tuple[int, ...]
    rows: Tensor
    lengths: Tensor
    reference: Tensor
    desirable: Tensor
    num_desirable: int
    repeats: Tensor

    @property
    def num_examples(self) -> int:
        return self.rows.shape[1]

    def sums(self, row_logps: Tensor) -> Tensor:
        """Return each row's sum of log-probabilities over its labelled tokens."""
        # Do not use `index_add_`, because its order of additions varies on a GPU.
        return torch.stack([part.sum() for part in torch.split(row_logps, list(self.counts))])


@dataclass(frozen=True, slots=True)
class PreferenceLoss(Loss):
    """A preference loss. Its attributes have the same names and meanings as in TRL.

    Attributes:
        loss_type: sigmoid (DPO), hinge, ipo and robust compare a pair relative to the reference model; kto judges
            single answers relative to the reference model; cpo, orpo and simpo do not use a reference model.
        beta: Strength of the pull toward the reference model. For orpo: weight of the odds ratio.
        label_smoothing: Assumed probability that the two answers of a pair are swapped.
        simpo_gamma: Target margin for simpo.
        rpo_alpha: Weight of the chosen answer's negative log-likelihood, which is a mean over its tokens.
        desirable_weight: Weight of good answers for kto.
        undesirable_weight: Weight of bad answers for kto.
    """

    loss_type: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    rpo_alpha: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def refusal(self) -> str:
        return 'which a loss over preferences (task = "dpo") cannot replace'

    @property
    def compares_rows(self) -> bool:
        return True

    @property
    def row_nbytes(self) -> int:
        return _ROW_NBYTES

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.loss_type not in _REFERENCE_FREE

    @property
    def is_paired(self) -> bool:
        """Whether each example has a chosen and a rejected answer."""
        return self.loss_type != "kto"

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which dropout is disabled, as in TRL."""
        return _disable_dropout(model)

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return a micro-batch's inputs for this loss, or an empty dict if the micro-batch has no examples."""
        return describe_examples(batch, shifted) if REFERENCE in batch else {}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> StepSize | None:
        """Return the divisors for the means over a step's examples, or None if there are no examples."""
        if REFERENCE not in micro_batches[0]:
            return None
        inputs = [describe_examples(*pair) for pair in zip(micro_batches, shifted, strict=True)]
        return StepSize(
            max(1, sum(entry["rows"].shape[1] for entry in inputs)),
            max(1, sum(int(entry["lengths"][0].numpy().sum()) for entry in inputs)),
        )

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss for a micro-batch. Without examples, it is plain cross entropy."""
        if not host:
            return PLAIN
        assert isinstance(size, StepSize), size
        return ComparedRows(self, make_examples(host, placed), size)

    def step_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return a step's metrics. For KTO, add the difference between the mean rewards of good and bad answers."""
        if "kl" in means and {"rewards/chosen", "rewards/rejected"} <= set(means):
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means

    def loss(self, logps: Tensor, examples: Examples, size: StepSize) -> tuple[Tensor, list[PartialMean]]:
        """Return a micro-batch's contribution to the step's mean loss, and the metrics of its examples.

        Args:
            logps: Log-probability of the answer in each row, including empty rows.
            examples: The micro-batch's examples. There must be at least one.
        """
        first_logps, second_logps = logps[examples.rows[0]], logps[examples.rows[1]]
        if not self.is_paired:
            return self._kto_loss(first_logps, second_logps, examples, size)
        if self.loss_type in _LENGTH_NORMALIZED:
            first_logps, second_logps = first_logps / examples.lengths[0], second_logps / examples.lengths[1]
        first_scores, second_scores = first_logps, second_logps
        if self.needs_reference:
            first_scores, second_scores = first_scores - examples.reference[0], second_scores - examples.reference[1]
        loss = self._pair_losses(first_scores, second_scores, examples).sum() / size.num_examples
        figures = self._pair_metrics((first_scores, second_scores), (first_logps, second_logps))
        weight = self.rpo_alpha + (self.loss_type == "orpo")
        if weight:
            likelihood = -logps[examples.rows[0]].sum()
            loss = loss + weight * likelihood / size.num_chosen_tokens
            num_tokens = sum(examples.counts[: len(examples.counts) // 2])
            figures.append(PartialMean("nll_loss", likelihood.detach(), num_tokens))
        return loss, figures

    def gradient(
        self, row_logps: Tensor, examples: Examples, size: StepSize
    ) -> tuple[Tensor, Tensor, list[PartialMean]]:
        """Return a micro-batch's loss, its gradient with respect to each token's log-probability, and metrics.

        Args:
            row_logps: Log-probabilities of all labelled tokens in the micro-batch, in order, 1-D.
        """
        if not examples.num_examples:
            return torch.zeros((), device=row_logps.device), torch.zeros_like(row_logps), []
        with torch.enable_grad():
            leaf = examples.sums(row_logps.detach()).requires_grad_()
            loss, figures = self.loss(leaf, examples, size)
        (gradient,) = torch.autograd.grad(loss, leaf)
        token_gradients = torch.repeat_interleave(gradient, examples.repeats, output_size=len(row_logps))
        return loss.detach(), token_gradients, figures

    def _pair_losses(self, first_scores: Tensor, second_scores: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each pair, given the scores of its two answers."""
        beta, smoothing, margin = self.beta, self.label_smoothing, first_scores - second_scores
        if self.loss_type == "ipo":
            # As in TRL, divide by the lengths, so that the meaning of beta does not depend on the lengths.
            difference = first_scores / examples.lengths[0] - second_scores / examples.lengths[1]
            return (difference - 1 / (2 * beta)) ** 2
        if self.loss_type == "hinge":
            return functional.relu(1 - beta * margin)
        if self.loss_type == "orpo":
            log_odds = margin - (_log_one_minus_exp(first_scores) - _log_one_minus_exp(second_scores))
            return -beta * functional.logsigmoid(log_odds)
        if self.loss_type == "simpo":
            margin = margin - self.simpo_gamma / beta
        loss, swapped_loss = -functional.logsigmoid(beta * margin), -functional.logsigmoid(-beta * margin)
        if self.loss_type == "robust":
            return ((1 - smoothing) * loss - smoothing * swapped_loss) / (1 - 2 * smoothing)
        return (1 - smoothing) * loss + smoothing * swapped_loss

    def _pair_metrics(self, scores: Sequence[Tensor], logps: Sequence[Tensor]) -> list[PartialMean]:
        chosen, rejected = (self.beta * score.detach() for score in scores)
        values = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": logps[0].detach(),
            "logps/rejected": logps[1].detach(),
        }
        return [PartialMean(name, value.sum(), len(value)) for name, value in values.items()]

    def _kto_loss(
        self, logps: Tensor, mismatched_logps: Tensor, examples: Examples, size: StepSize
    ) -> tuple[Tensor, list[PartialMean]]:
        ratios = logps - examples.reference[0]
        # KTO clamps this estimate of the KL divergence at 0. No gradient flows through the estimate.
        kl = (mismatched_logps - examples.reference[1]).mean().detach().clamp(min=0)
        is_good = examples.desirable
        weights = torch.where(is_good, self.desirable_weight, self.undesirable_weight)
        margins = torch.where(is_good, ratios - kl, kl - ratios)
        loss = (weights * (1 - torch.sigmoid(self.beta * margins))).sum() / size.num_examples
        num_good, num_bad = examples.num_desirable, examples.num_examples - examples.num_desirable
        rewards, answer_logps = self.beta * ratios.detach(), logps.detach()
        figures = [PartialMean("kl", kl * examples.num_examples, examples.num_examples)]
        for name, mask, count in (("chosen", is_good, num_good), ("rejected", ~is_good, num_bad)):
            if count:
                figures.append(PartialMean(f"rewards/{name}", (rewards * mask).sum(), count))
                figures.append(PartialMean(f"logps/{name}", (answer_logps * mask).sum(), count))
        return loss, figures


def _log_one_minus_exp(values: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for negative ``x``, accurately both near 0 and far from 0."""
    is_near = values > -0.693
    near_result = torch.log(-torch.expm1(torch.where(is_near, values, -1.0)))
    far_result = torch.log1p(-torch.exp(torch.where(is_near, -1.0, values)))
    return torch.where(is_near, near_result, far_result)


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRows(MicroBatchLoss):
    """Preference loss for one micro-batch."""

    loss: PreferenceLoss
    examples: Examples
    size: StepSize

    @property
    def compares_rows(self) -> bool:
        return True

    def for_rows(self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool) -> RowsLoss:
        """Return an accumulator for the rows' log-probabilities. ``compare`` later sets the rows' gradient weights."""
        return RunningSoftmax(labels, vocab_size, 1)

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        """Return the micro-batch's loss and metrics. Set the weights of its rows' gradients."""
        if not rows:
            return torch.zeros((), device=self.examples.repeats.device), ()
        softmaxes = [row for row in rows if isinstance(row, RunningSoftmax)]
        logps = [softmax.log_probs() for softmax in softmaxes]
        loss, gradient, figures = self.loss.gradient(torch.cat(logps), self.examples, self.size)
        for softmax, weights in zip(softmaxes, torch.split(gradient, list(map(len, logps))), strict=True):
            softmax.weigh(-weights)
        return loss, figures


@dataclass(eq=False)
class CollectedExamples:
    """Examples of an evaluation. Stores only a few numbers per example on the host, because ranks exchange them."""

    _batches: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)
    _pass_indices: list[int] = field(default_factory=list)

    def add(self, batch: Mapping[str, Tensor], labels: Tensor, logps: Sequence[float], *, pass_index: int = 0) -> None:
        """Add a micro-batch, its shifted labels, and its answers' log-probabilities.

        Args:
            batch: Micro-batch with ``REFERENCE`` and ``DESIRABLE``.
            labels: Labels of the next token.
            pass_index: Number of the pass that computed the log-probabilities.
        """
        inputs = describe_examples(batch, labels)
        self._batches.append((torch.tensor(logps, dtype=torch.float32)[inputs["rows"]], inputs))
        self._pass_indices.append(pass_index)

    @classmethod
    def join(cls, ranks: Sequence[CollectedExamples]) -> CollectedExamples:
        """Join the examples of all ranks in the order of a single process: by pass, then by rank."""
        result = cls()
        pairs = [(i, batch) for rank in ranks for i, batch in zip(rank._pass_indices, rank._batches, strict=True)]
        for i, batch in sorted(pairs, key=lambda pair: pair[0]):
            result._pass_indices.append(i)
            result._batches.append(batch)
        return result

    def compute(self, preference: PreferenceLoss) -> tuple[float, int, dict[str, float]]:
        """Return the mean loss over all examples, the number of tokens in their answers, and the metrics."""
        logps, lengths, reference = (
            torch.cat(parts, dim=1)
            for parts in (
                [logp for logp, _ in self._batches],
                [inputs["lengths"] for _, inputs in self._batches],
                [inputs["reference"] for _, inputs in self._batches],
            )
        )
        desirable = torch.cat([inputs["desirable"] for _, inputs in self._batches])
        count = len(desirable)
        counts = tuple(lengths.reshape(-1).long().tolist())
        rows = torch.arange(2 * count).view(2, count)
        num_desirable = int(desirable.sum())
        examples = Examples(counts, rows, lengths, reference, desirable, num_desirable, torch.tensor(counts))
        size = StepSize(max(1, count), max(1, sum(counts[:count])))
        if not count:
            return float("nan"), 0, {}
        loss, figures = preference.loss(logps.reshape(-1), examples, size)
        means = mean_metrics(figures)
        return float(loss), sum(counts), preference.step_metrics(means)


# -- examples of micro-batches -------------------------------------------------------------------------------------


def describe_examples(batch: Mapping[str, Tensor], shifted_labels: Tensor) -> dict[str, Tensor]:
    """Return a micro-batch's inputs for the loss, on the host.

    Args:
        batch: Micro-batch with ``REFERENCE`` and ``DESIRABLE``.
        shifted_labels: Labels of the next token, for all positions of all rows.
    """
    num_rows = len(batch["input_ids"])
    counts = (shifted_labels.reshape(num_rows, -1).numpy() != IGNORED_LABEL).sum(axis=1)
    half = num_rows // 2
    indices = np.flatnonzero((counts[:half] > 0) & (counts[half:] > 0))
    rows = np.stack([indices, indices + half])
    return {
        "counts": torch.from_numpy(counts.astype(np.int64)),
        "rows": torch.from_numpy(rows),
        "lengths": torch.from_numpy(counts[rows].astype(np.float32)),
        "reference": batch[REFERENCE][torch.from_numpy(rows)].float(),
        "desirable": batch[DESIRABLE][torch.from_numpy(indices)],
    }


def make_examples(host: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Examples:
    """Create examples from ``host``, the output of `describe_examples`. ``tensors`` is a copy on the loss's device."""
    return Examples(
        tuple(host["counts"].numpy().tolist()),
        tensors["rows"],
        tensors["lengths"],
        tensors["reference"],
        tensors["desirable"],
        int(np.count_nonzero(host["desirable"].numpy())),
        tensors["counts"],
    )


@contextmanager
def _disable_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout in the context."""
    layers = [(module, module.p) for module in model.modules() if isinstance(module, nn.Dropout)]
    try:
        for module, _ in layers:
            module.p = 0.0
        yield
    finally:
        for module, p in layers:
            module.p = p
