"""Task that trains on texts with labels (``task = "pretrain"`` and ``"sft"``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatrain.engine.head.cross_entropy import CrossEntropy
from megatrain.tasks.task import Gather, MetricAccumulator, MicroBatches, PrepareContext, RowFinding, SetMetrics

if TYPE_CHECKING:
    from megatrain.data.token_dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner, SummedLoss
    from megatrain.engine.head.loss import Loss
    from megatrain.engine.table import TrainingConfig

__all__ = ["TextTask"]


class TextTask:
    """``Task`` that trains on texts. Evaluations always use plain cross entropy."""

    def __init__(self, loss: object = None) -> None:
        pass

    @staticmethod
    def make_loss(training: TrainingConfig, table: Any) -> Loss:
        """Return cross entropy, with the config's label smoothing and z-loss."""
        return CrossEntropy(training.label_smoothing_factor, training.z_loss)

    @staticmethod
    def findings(table: Any, dataset: TokenDataset) -> Sequence[RowFinding]:
        """Return no findings, because the report on the rows already covers plain texts."""
        return ()

    def accumulator(self) -> MetricAccumulator:
        """Return an accumulator for the mean loss over tokens."""
        return MeanLoss()

    def prepare(self, context: PrepareContext) -> Mapping[str, Any]:
        """Return an empty record, because this task needs no preparation."""
        return {}


class MeanLoss:
    """``MetricAccumulator`` for the mean cross entropy over all tokens with a label."""

    def __init__(self) -> None:
        self._terms: list[float] = []
        self._num_tokens = 0

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> SummedLoss:
        """Return the summed loss of one pass."""
        return runner.evaluate(micro_batches)

    def add(self, result: SummedLoss) -> None:
        """Add the result of ``head`` for one pass."""
        self._terms += result.terms
        self._num_tokens += result.num_tokens

    def compute(self, gather: Gather[tuple[list[float], int]]) -> SetMetrics:
        """Return the mean loss over the tokens of all ranks."""
        results = gather((self._terms, self._num_tokens))
        terms = [term for rank_terms, _ in results for term in rank_terms]
        num_tokens = sum(count for _, count in results)
        # Use an exact sum, so that the result does not depend on the order of the terms or on the number of ranks.
        return SetMetrics(math.fsum(terms) / num_tokens if num_tokens else math.nan, num_tokens)
