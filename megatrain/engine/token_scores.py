"""Scores of tokens: log-probabilities of the tokens and of the likeliest tokens, from logits in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.engine.cross_entropy import column_of

__all__ = ["RunningTopK", "TokenScores", "joined_scores"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """A model's scores of some tokens.

    Attributes:
        log_probs: Log-probabilities of the tokens themselves, [rows] fp32.
        top_ids: Likeliest tokens, the likeliest first, [rows, k] int64.
        top_log_probs: Log-probabilities of ``top_ids`` at the requested temperature, [rows, k] fp32.
        rest_log_probs: Log of the total probability of all other tokens at that temperature, [rows] fp32.
    """

    log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    rest_log_probs: Tensor


class RunningTopK:
    """The likeliest tokens of some rows whose logits come in parts, and the probability of all others. In fp32.

    Args:
        labels: Vocabulary indexes of the labels, [rows].
        k: Number of likeliest tokens per row, at most the size of the vocabulary; 0 for none.
        temperature: Divisor of the logits for these tokens. Probabilities of labels use temperature 1.
    """

    def __init__(self, labels: Tensor, k: int, temperature: float = 1.0) -> None:
        self._labels, self._k, self._temperature = labels, k, temperature
        self._log_sum = torch.full((len(labels),), -torch.inf, device=labels.device)
        self._of_label = torch.zeros_like(self._log_sum)
        self._rest = torch.full_like(self._log_sum, -torch.inf)  # of all tokens that are not among the likeliest
        self._top = torch.empty(len(labels), 0, device=labels.device)
        self._ids = torch.empty(len(labels), 0, dtype=torch.long, device=labels.device)

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the vocabulary from ``start`` on."""
        values = logits.float()
        at, is_here = column_of(self._labels, start, values.shape[1])
        self._of_label = torch.where(is_here, values.gather(1, at).squeeze(1), self._of_label)
        self._log_sum = torch.logaddexp(self._log_sum, values.logsumexp(1))
        if not self._k:
            return
        if self._temperature != 1.0:
            values = values / self._temperature
        top, at = values.topk(min(self._k, values.shape[1]), dim=1)
        rest = values.scatter(1, at, -torch.inf).logsumexp(1)
        top, ids = torch.cat([self._top, top], 1), torch.cat([self._ids, at + start], 1)
        # Added up as they drop out: a final 1 minus the others would lose precision if the rest is small.
        self._top, order = top.topk(min(self._k, top.shape[1]), dim=1)
        dropped = top.scatter(1, order, -torch.inf).logsumexp(1)
        self._ids = ids.gather(1, order)
        self._rest = torch.logaddexp(self._rest, torch.logaddexp(rest, dropped))

    def scores(self) -> TokenScores:
        """Return the result, after all parts."""
        total = torch.logaddexp(self._rest, self._top.logsumexp(1)) if self._k else self._log_sum
        return TokenScores(
            self._of_label - self._log_sum, self._ids, self._top - total.unsqueeze(1), self._rest - total
        )


def joined_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Return several results as one, row after row, on the host."""
    return TokenScores(
        torch.cat([part.log_probs.cpu() for part in parts]),
        torch.cat([part.top_ids.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_ids.cpu()]),
        torch.cat([part.top_log_probs.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_log_probs.cpu()]),
        torch.cat([part.rest_log_probs.cpu() for part in parts]),
    )
