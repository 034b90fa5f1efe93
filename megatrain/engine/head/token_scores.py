"""Log-probabilities of labels and of the likeliest tokens, computed from logits one vocabulary part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.engine.head.cross_entropy import column_of


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores that a model gives to some tokens.

    Attributes:
        log_probs: Log-probabilities of the labels, [rows] fp32.
        top_ids: Likeliest tokens in descending order, [rows, k] int64.
        top_log_probs: Log-probabilities of ``top_ids`` at the requested temperature, [rows, k] fp32.
        rest_log_probs: Log of the total probability of all tokens not in ``top_ids``, [rows] fp32.
    """

    log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    rest_log_probs: Tensor


class RunningTopK:
    """Accumulator that finds each row's likeliest tokens and sums the probabilities of all other tokens, in fp32.

    Args:
        labels: Token ids of the labels, [rows].
        k: Number of likeliest tokens per row, from 0 to the size of the vocabulary.
        temperature: Temperature for the likeliest tokens. Labels always use temperature 1.
    """

    def __init__(self, labels: Tensor, k: int, temperature: float = 1.0) -> None:
        self._labels, self._k, self._temperature = labels, k, temperature
        self._log_sum = torch.full((len(labels),), -torch.inf, device=labels.device)
        self._of_label = torch.zeros_like(self._log_sum)
        self._rest = torch.full_like(self._log_sum, -torch.inf)  # logsumexp over all other tokens
        self._top = torch.empty(len(labels), 0, device=labels.device)
        self._ids = torch.empty(len(labels), 0, dtype=torch.long, device=labels.device)

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the part that starts at column ``start``."""
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
        # Sum the probabilities of tokens as they leave the top k. Computing 1 minus the top k would lose precision.
        self._top, order = top.topk(min(self._k, top.shape[1]), dim=1)
        dropped = top.scatter(1, order, -torch.inf).logsumexp(1)
        self._ids = ids.gather(1, order)
        self._rest = torch.logaddexp(self._rest, torch.logaddexp(rest, dropped))

    def scores(self) -> TokenScores:
        """Return the scores. Call this after all parts have been added."""
        total = torch.logaddexp(self._rest, self._top.logsumexp(1)) if self._k else self._log_sum
        return TokenScores(
            self._of_label - self._log_sum, self._ids, self._top - total.unsqueeze(1), self._rest - total
        )


def joined_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Concatenate scores by rows, on the host."""
    return TokenScores(
        torch.cat([part.log_probs.cpu() for part in parts]),
        torch.cat([part.top_ids.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_ids.cpu()]),
        torch.cat([part.top_log_probs.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_log_probs.cpu()]),
        torch.cat([part.rest_log_probs.cpu() for part in parts]),
    )
