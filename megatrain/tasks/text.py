"""Texts and their labels: ``task = "pretrain"`` and ``"sft"``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatrain.engine.cross_entropy import CrossEntropy
from megatrain.tasks.task import Gather, MetricAccumulator, MicroBatches, PrepareContext, RowFinding, SetFigures

if TYPE_CHECKING:
    from megatrain.data.dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner, SummedLoss
    from megatrain.engine.loss import Loss
    from megatrain.engine.table import TrainingConfig

__all__ = ["TextTask"]


class TextTask:
    """Task that evaluates held-out rows by plain cross entropy, whatever loss the steps minimize; a ``Task``.

    Args:
        loss: Loss of the steps. Unused.
    """

    def __init__(self, loss: object = None) -> None:
        pass

    @staticmethod
    def loss_of(training: TrainingConfig, table: Any) -> Loss:
        """Return cross entropy."""
        return CrossEntropy(training.label_smoothing_factor, training.z_loss)

    @staticmethod
    def findings(table: Any, dataset: TokenDataset) -> Sequence[RowFinding]:
        """Return nothing, because the report of the rows covers everything."""
        return ()

    def accumulator(self) -> MetricAccumulator:
        """Return a mean over tokens."""
        return MeanLoss()

    def prepare(self, context: PrepareContext) -> Mapping[str, Any]:
        """Return nothing, because steps read only rows."""
        return {}


class MeanLoss:
    """Accumulator of the mean cross entropy over all tokens with a label; a ``MetricAccumulator``."""

    def __init__(self) -> None:
        self._terms: list[float] = []
        self._num_tokens = 0

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> SummedLoss:
        """Return the sum over the tokens of a pass."""
        return runner.evaluate(micro_batches)

    def add(self, found: SummedLoss) -> None:
        """Add a pass."""
        self._terms += found.terms
        self._num_tokens += found.num_tokens

    def judge(self, gather: Gather[tuple[list[float], int]]) -> SetFigures:
        """Return the mean over the tokens of all ranks."""
        found = gather((self._terms, self._num_tokens))
        terms = [term for of_rank, _ in found for term in of_rank]
        num_tokens = sum(count for _, count in found)
        # Exactly rounded, so that neither the order of terms nor their ranks matter.
        return SetFigures(math.fsum(terms) / num_tokens if num_tokens else math.nan, num_tokens)
