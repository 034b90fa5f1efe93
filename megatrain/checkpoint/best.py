"""The best evaluation of a run, and early stopping.

Names and rules follow transformers: ``metric_for_best_model``, ``greater_is_better``, ``load_best_model_at_end``
and ``EarlyStoppingCallback``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatrain.base.observer import EvaluationMetrics

__all__ = ["BestEvaluation", "BestSpec"]


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The best evaluation so far.

    Attributes:
        num_worse: Number of consecutive evaluations, up to the latest, that did not improve by more than the threshold.
    """

    metric: str
    value: float
    step: int
    num_worse: int = 0


@dataclass(frozen=True, slots=True)
class BestSpec:
    """Rule that selects the best evaluation, and how a run uses it.

    Attributes:
        metric: Name of the metric: "loss", or "NAME_loss" with several sets. The prefix "eval_" is optional.
        is_greater_better: Whether greater values are better.
        is_kept: Whether the best evaluation's checkpoint is kept and becomes the model of the run.
        patience: Number of consecutive evaluations without improvement after which the run ends; 0 disables this.
        is_average: Whether the metric is measured with averaged weights, which then also become the best model.
    """

    metric: str
    is_greater_better: bool
    is_kept: bool
    patience: int
    threshold: float
    is_average: bool = False

    @property
    def description(self) -> str:
        """Description of the metric and of whether larger or smaller values are better, for messages."""
        suffix = " of the average of the weights" if self.is_average else ""
        return f"the {'largest' if self.is_greater_better else 'least'} {self.metric}{suffix}"

    @property
    def is_on(self) -> bool:
        """Whether the best evaluation affects the run."""
        return self.is_kept or self.patience > 0

    def check(self, names: Iterable[str]) -> None:
        """Check that a loss metric belongs to one of the evaluation sets. ``value_of`` checks other metrics.

        Raises:
            ConfigError: The metric is a loss that no set has.
        """
        names = list(names)
        metric = self.metric.removeprefix("eval_")
        if self.is_on and "loss" in metric and metric != "loss" and metric not in [f"{name}_loss" for name in names]:
            metrics = ", ".join(["loss", *(f"{name}_loss" for name in names)])
            raise self._unknown_metric(metrics)

    def value_of(self, evaluations: Mapping[str, EvaluationMetrics]) -> float:
        """Return the metric's value. A metric without a set name is read from the first set.

        Args:
            evaluations: Evaluations of one step, by set name.

        Raises:
            ConfigError: No evaluation has the metric.
        """
        metric = self.metric.removeprefix("eval_")
        values: dict[str, float] = {}
        for name, evaluation in evaluations.items():
            set_values = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, **evaluation.preferences}
            values |= {f"{name}_{figure}": value for figure, value in set_values.items()}
            values = {**set_values, **values}  # earlier sets take precedence for metrics without a set name
        if metric not in values:
            raise self._unknown_metric(", ".join(sorted(values)))
        return values[metric]

    def _unknown_metric(self, metrics: str) -> ConfigError:
        key = "evaluation.metric_for_best_model"
        message = f'{key} = "{self.metric}", but no evaluation has this metric. Known metrics: {metrics}'
        return ConfigError("the config", [Problem(key, message, "Write one of them")])

    def after(self, best: BestEvaluation | None, step: int, value: float) -> BestEvaluation:
        """Return the best evaluation after one more evaluation. A NaN never counts as an improvement."""
        if best is None or best.value != best.value:
            return BestEvaluation(self.metric, value, step)
        gain = value - best.value if self.is_greater_better else best.value - value
        num_worse = 0 if gain > self.threshold else best.num_worse + 1
        value, step = (value, step) if gain > 0 else (best.value, best.step)
        return BestEvaluation(self.metric, value, step, num_worse)

    def is_over(self, best: BestEvaluation | None) -> bool:
        """Return whether to stop the run early, after ``patience`` evaluations in a row without an improvement."""
        return self.patience > 0 and best is not None and best.num_worse >= self.patience
