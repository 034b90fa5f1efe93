"""Distillation: training on a teacher's scores of every token. Logits are computed one vocabulary range at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.base.errors import ConfigError, Problem
from megatrain.data.scores import ScoresError, read_kind
from megatrain.engine.head.cross_entropy import PLAIN, RunningSoftmax
from megatrain.engine.head.loss import Loss, MicroBatchLoss, RowsLoss
from megatrain.engine.table import TrainingConfig
from megatrain.tasks.table import DistillConfig
from megatrain.tasks.text import TextTask

__all__ = ["DistillTask", "Distillation", "RunningDistillation", "TeacherRows"]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """A teacher's scores for rows of logits, at the distillation temperature.

    Attributes:
        ids: Token ids, ``(rows, k)``. They are distinct within a row.
        log_probs: Log-probabilities of these tokens, ``(rows, k)``, fp32.
        rest_log_probs: Logarithm of the total probability of all other tokens, ``(rows,)``, fp32.
    """

    ids: Tensor
    log_probs: Tensor
    rest_log_probs: Tensor

    def slice_rows(self, start: int, stop: int) -> TeacherRows:
        """Return the rows from ``start`` to ``stop``."""
        return TeacherRows(self.ids[start:stop], self.log_probs[start:stop], self.rest_log_probs[start:stop])


@dataclass(frozen=True, slots=True)
class Distillation(Loss):
    """Loss on a teacher's scores: ``alpha * cross entropy + (1 - alpha) * temperature**2 * KL(teacher, student)``.

    Both terms are means over the tokens with a label. The forward KL divergence is computed at the temperature, over
    the teacher's k most likely tokens. ``rest`` determines how all other tokens are treated.

    Attributes:
        temperature: Temperature of the scores. The student's logits are also divided by it.
        alpha: Weight of the cross entropy.
        rest: Treatment of all other tokens. ``bucket``: one outcome with their total probability. ``ignore``: no term
            in the loss. ``renormalize``: also no term, and the teacher's k probabilities are scaled to a sum of 1.
        k: Number of the teacher's tokens per position.
    """

    temperature: float = 1.0
    alpha: float = 0.0
    rest: Literal["bucket", "ignore", "renormalize"] = "bucket"
    k: int = 0

    @property
    def refusal(self) -> str:
        return 'with which task = "distill" cannot be used'

    @property
    def token_nbytes(self) -> int:
        """Bytes of teacher scores per token: ids, log-probabilities, and the log-probability of all other tokens."""
        return 8 * self.k + 4

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return the teacher's scores for the rows with a label, or an empty dict if the micro-batch has no scores."""
        return {key: batch[key].flatten(0, 1).index_select(0, positions) for key in TEACHER_KEYS if key in batch}

    def synthetic_inputs(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        ids = torch.zeros(num_rows, self.k, dtype=torch.int32, device=device)
        return dict(zip(TEACHER_KEYS, (ids, ids.float(), torch.zeros(num_rows, device=device)), strict=True))

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss for a micro-batch. Without scores, it is plain cross entropy."""
        return DistillationRows(self, TeacherRows(*(placed[key] for key in TEACHER_KEYS))) if placed else PLAIN

    def targets(self, teacher: TeacherRows) -> tuple[Tensor, Tensor]:
        """Return the student's targets: the teacher's log-probabilities of the k tokens, and of all other tokens."""
        log_probs = teacher.log_probs.float()
        if self.rest == "renormalize":
            log_probs = log_probs - log_probs.logsumexp(1, keepdim=True)
        return log_probs, teacher.rest_log_probs.float()


@dataclass(frozen=True, slots=True, eq=False)
class DistillationRows(MicroBatchLoss):
    """Distillation loss for one micro-batch.

    Attributes:
        teacher: Scores for the rows with a label.
    """

    loss: Distillation
    teacher: TeacherRows

    def for_rows(self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool) -> RowsLoss:
        teacher = self.teacher.slice_rows(first, first + len(labels))
        return RunningDistillation(labels, teacher, vocab_size, num_items, self.loss)


class DistillTask(TextTask):
    """Task that trains on texts with a teacher's scores for every label."""

    @staticmethod
    def make_loss(training: TrainingConfig, table: DistillConfig) -> Loss:
        """Return the distillation loss, or cross entropy if the config names no scores. The scores are not read.

        Raises:
            ConfigError: The scores do not exist or do not match the config.
        """
        if table.scores is None:
            return TextTask.make_loss(training, table)
        try:
            kind = read_kind(table.scores)
        except ScoresError as error:
            advice = "Create them with megatrain-tier score TEACHER.toml"
            raise ConfigError("[distill]", [Problem("distill.scores", str(error), advice)]) from error
        problems = []
        if table.top_k is not None and table.top_k > kind.top_k:
            text = f"distill.top_k = {table.top_k}, but the scores in {table.scores} have {kind.top_k} per position"
            advice = f"Use at most {kind.top_k}, or score with a larger top_k"
            problems.append(Problem("distill.top_k", text, advice))
        if not kind.top_k:
            text = f"the scores in {table.scores} have no most likely tokens (score.top_k = 0)"
            problems.append(Problem("distill.scores", text, "Score with a larger top_k"))
        if table.temperature != kind.temperature:
            text = f"distill.temperature = {table.temperature:g}, but the scores in {table.scores} have temperature"
            text += f" {kind.temperature:g}"
            problems.append(Problem("distill.temperature", text, f"Use {kind.temperature:g}, or score again"))
        if problems:
            raise ConfigError("[distill]", problems)
        return Distillation(table.temperature, table.alpha, table.rest, table.top_k or kind.top_k)


class RunningDistillation:
    """Distillation loss, computed in fp32 from one range of logits at a time, like ``RunningSoftmax``.

    Args:
        labels: Token ids, ``(rows,)``. Every row has a label.
        vocab_size: Size of the vocabulary over all ranges.
        num_items: Divisor of the sum over all rows.
    """

    def __init__(
        self, labels: Tensor, teacher: TeacherRows, vocab_size: int, num_items: int, spec: Distillation
    ) -> None:
        self._spec, self._num_items = spec, num_items
        self._cross_entropy = RunningSoftmax(labels, vocab_size, num_items) if spec.alpha else None
        self._ids = teacher.ids.long()
        self._log_p, self._log_rest_p = spec.targets(teacher)
        self._top_scores = torch.zeros_like(self._log_p)
        self._other_scores = torch.full_like(self._log_rest_p, -torch.inf)

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits of a vocabulary range, ``(rows, columns)``. The range starts at token ``start``."""
        if self._cross_entropy is not None:
            self._cross_entropy.add(logits, start)
        values, columns, is_in_range = self._scale_logits(logits, start)
        self._top_scores = torch.where(is_in_range, values.gather(1, columns), self._top_scores)
        self._other_scores = torch.logaddexp(self._other_scores, values.scatter_(1, columns, -torch.inf).logsumexp(1))

    def loss(self) -> Tensor:
        """Return the loss. Call this after all ranges have been added."""
        log_sum = self._log_sum()
        terms = _weight_values(self._log_p, self._log_p - (self._top_scores - log_sum.unsqueeze(1))).sum(1)
        if self._spec.rest == "bucket":
            terms = terms + _weight_values(self._log_rest_p, self._log_rest_p - (self._other_scores - log_sum))
        soft_loss = terms.sum() * ((1 - self._spec.alpha) * self._spec.temperature**2 / self._num_items)
        return soft_loss if self._cross_entropy is None else soft_loss + self._spec.alpha * self._cross_entropy.loss()

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the gradient for a range of logits, in their dtype. Call this after all ranges have been added."""
        spec, log_sum = self._spec, self._log_sum().unsqueeze(1)
        values, columns, _ = self._scale_logits(logits, start)
        grad = values.sub_(log_sum).exp_()  # the student's probabilities; the padding column has probability 0
        top_probs = grad.gather(1, columns)
        if spec.rest == "bucket":
            # For every token outside the teacher's k tokens, subtract its share of the bucket from its probability.
            share = torch.exp(self._log_rest_p - (self._other_scores - log_sum.squeeze(1)))
            grad.mul_((1 - torch.where(self._other_scores.isneginf(), 0, share)).unsqueeze(1))
        elif spec.rest == "ignore":
            mass = self._log_p.exp().sum(1, keepdim=True)
            grad.mul_(mass)
            top_probs = top_probs * mass
        # Scatter without adding, because each token has its own column. Tokens of other ranges use the padding column.
        grad = grad.scatter_(1, columns, top_probs - self._log_p.exp())[:, :-1]
        grad = grad.mul_((1 - spec.alpha) * spec.temperature / self._num_items)
        if self._cross_entropy is not None:
            grad = grad + spec.alpha * self._cross_entropy.gradient(logits.float(), start)
        return grad.to(logits.dtype)

    def _log_sum(self) -> Tensor:
        return torch.logaddexp(self._other_scores, self._top_scores.logsumexp(1))

    def _scale_logits(self, logits: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled logits, the column of each teacher token, and whether the token is in this range.

        An additional padding column represents the tokens outside this range of the vocabulary.
        """
        num_columns = logits.shape[1]
        values = functional.pad(logits.float() / self._spec.temperature, (0, 1), value=-torch.inf)
        columns = self._ids - start
        is_in_range = (columns >= 0) & (columns < num_columns)
        return values, torch.where(is_in_range, columns, num_columns), is_in_range


def _weight_values(log_p: Tensor, values: Tensor) -> Tensor:
    """Return ``exp(log_p) * values``. If the probability is 0, the result is 0, even for infinite values."""
    p = log_p.exp()
    return torch.where(p > 0, p * values, 0)
