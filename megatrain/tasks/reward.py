"""Reward task (``task = "reward"``): trains a model that scores texts, using pairs with a preferred text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatrain.base.batch_keys import IGNORED_LABEL, MARGIN
from megatrain.tasks.task import Gather, MetricAccumulator, MicroBatches, RowFinding, SetMetrics
from megatrain.tasks.text import TextTask

if TYPE_CHECKING:
    import numpy.typing as npt

    from megatrain.data.token_dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner

__all__ = ["RewardTask"]


class RewardTask(TextTask):
    """Task that trains a reward model. Evaluations measure how often, and by how much, the chosen text scores higher.

    The model itself computes the loss of the training steps (`megatrain/converters/heads.py`).
    """

    @staticmethod
    def findings(table: Any, dataset: TokenDataset) -> Sequence[RowFinding]:
        """Return a finding with the number of pairs."""
        return [RowFinding("ok", dataset.kind.summary(dataset.roles))]

    def accumulator(self) -> MetricAccumulator:
        """Return an accumulator for pair metrics."""
        return RewardMetrics()


class RewardMetrics:
    """``MetricAccumulator`` for the rewards of a set's pairs."""

    def __init__(self) -> None:
        self._results: list[npt.NDArray[np.float64]] = []

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> list[npt.NDArray[np.float64]]:
        """Return the rewards and margins of the pairs in each micro-batch of a pass."""
        outputs = runner.outputs(micro_batches)
        return [rewards(batch, logits) for batch, logits in zip(micro_batches, outputs, strict=True)]

    def add(self, result: list[npt.NDArray[np.float64]]) -> None:
        """Add the result of ``head`` for one pass."""
        self._results += result

    def compute(self, gather: Gather[list[npt.NDArray[np.float64]]]) -> SetMetrics:
        """Return the loss over the pairs of all ranks, without the centering term, and TRL's metrics."""
        results = np.concatenate([piece for rank_results in gather(self._results) for piece in rank_results], axis=1)
        chosen, rejected, margins = results
        count = len(chosen)
        if not count:
            return SetMetrics(math.nan, 0)
        difference = torch.from_numpy(chosen - rejected - margins)
        losses = -torch.nn.functional.logsigmoid(difference)
        all_rewards = np.concatenate([chosen, rejected])
        # Use exact sums, so that results do not depend on the order of the terms or on the number of ranks.
        metrics = {
            "accuracy": int((chosen > rejected).sum()) / count,
            "margin": math.fsum((chosen - rejected).tolist()) / count,
            "mean_reward": math.fsum(all_rewards.tolist()) / len(all_rewards),
            "min_reward": float(all_rewards.min()),
            "max_reward": float(all_rewards.max()),
        }
        return SetMetrics(math.fsum(losses.tolist()) / count, count, metrics)


def rewards(batch: Mapping[str, torch.Tensor], logits: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return a micro-batch's chosen rewards, rejected rewards and margins, ``(3, pairs)``, fp64.

    Args:
        batch: Micro-batch of P pairs. It has ``labels``, ``(2 P, 2)``, and ``MARGIN``, ``(P,)``.
        logits: Rewards, ``(2 P, 1)``. All chosen texts come first, then all rejected texts.
    """
    half = len(logits) // 2
    is_present = batch["labels"][:half, 1] != IGNORED_LABEL
    values = torch.stack([*logits.squeeze(-1).double().chunk(2), batch[MARGIN].double()])
    return values[:, is_present].numpy()
