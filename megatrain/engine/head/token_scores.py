"""Log-probabilities of labels and of the likeliest tokens, computed from logits one vocabulary part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.engine.head.cross_entropy import label_columns


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores that a model assigns to some tokens.

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
        self._label_logits = torch.zeros_like(self._log_sum)
        self._rest_log_sum = torch.full_like(self._log_sum, -torch.inf)  # logsumexp over all other tokens
        self._top_values = torch.empty(len(labels), 0, device=labels.device)
        self._ids = torch.empty(len(labels), 0, dtype=torch.long, device=labels.device)

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the part that starts at column ``start``."""
        values = logits.float()
        columns, is_in_part = label_columns(self._labels, start, values.shape[1])
        self._label_logits = torch.where(is_in_part, values.gather(1, columns).squeeze(1), self._label_logits)
        self._log_sum = torch.logaddexp(self._log_sum, values.logsumexp(1))
        if not self._k:
            return
        if self._temperature != 1.0:
            values = values / self._temperature
        top_values, columns = values.topk(min(self._k, values.shape[1]), dim=1)
        rest_log_sum = values.scatter(1, columns, -torch.inf).logsumexp(1)
        top_values, ids = torch.cat([self._top_values, top_values], 1), torch.cat([self._ids, columns + start], 1)
        # Sum the probabilities of tokens as they leave the top k. Subtracting the top k from 1 would lose precision.
        self._top_values, order = top_values.topk(min(self._k, top_values.shape[1]), dim=1)
        dropped_log_sum = top_values.scatter(1, order, -torch.inf).logsumexp(1)
        self._ids = ids.gather(1, order)
        self._rest_log_sum = torch.logaddexp(self._rest_log_sum, torch.logaddexp(rest_log_sum, dropped_log_sum))

    def scores(self) -> TokenScores:
        """Return the scores. Call this after all parts have been added."""
        total = torch.logaddexp(self._rest_log_sum, self._top_values.logsumexp(1)) if self._k else self._log_sum
        label_log_probs, top_log_probs = self._label_logits - self._log_sum, self._top_values - total.unsqueeze(1)
        return TokenScores(label_log_probs, self._ids, top_log_probs, self._rest_log_sum - total)


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Concatenate scores by rows, on the host."""
    return TokenScores(
        torch.cat([part.log_probs.cpu() for part in parts]),
        torch.cat([part.top_ids.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_ids.cpu()]),
        torch.cat([part.top_log_probs.cpu() for part in parts if len(part.top_ids)] or [parts[0].top_log_probs.cpu()]),
        torch.cat([part.rest_log_probs.cpu() for part in parts]),
    )
