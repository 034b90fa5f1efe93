"""Which evaluation of a run was the best one, and when a run that no longer gets better ends.

Names and rules are those of transformers: ``metric_for_best_model``, ``greater_is_better``, ``load_best_model_at_end``
and its ``EarlyStoppingCallback``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megatrain.base.observer import EvaluationMetrics

__all__ = ["Best", "BestSpec"]


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far.

    Attributes:
        num_worse: evaluations since then, none of which was better by more than the threshold.
    """

    metric: str
    value: float
    step: int
    num_worse: int = 0

    @classmethod
    def of_state(cls, values: Mapping[str, Any] | None) -> Best | None:
        """Return what ``to_state`` was called on."""
        return None if values is None else cls(**values)

    def to_state(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BestSpec:
    """What decides which evaluation is the best, and what follows from it.

    Attributes:
        metric: a figure of an evaluation: "loss", or "NAME_loss" where there are several sets; "eval_" may precede it.
        is_greater_better: Whether the greater one of two values is the better one.
        is_kept: the checkpoint of the best evaluation is kept, and is the model of the run.
        patience: evaluations in a row without an improvement that end the run; 0: none do.
        is_average: the metric is of the averages of the weights, which then are what is best.
    """

    metric: str
    is_greater_better: bool
    is_kept: bool
    patience: int
    threshold: float
    is_average: bool = False

    @property
    def described(self) -> str:
        """The figure, and which end of it is good."""
        of_average = " of the average of the weights" if self.is_average else ""
        return f"the {'largest' if self.is_greater_better else 'least'} {self.metric}{of_average}"

    @property
    def is_on(self) -> bool:
        """Whether anything follows from which one is the best."""
        return self.is_kept or self.patience > 0

    def check(self, names: Iterable[str]) -> None:
        """Look whether the metric is one of a set.

        Raises:
            ConfigError: it names none of them.
        """
        names = list(names)
        metric = self.metric.removeprefix("eval_")
        if self.is_on and "loss" in metric and metric != "loss" and metric not in [f"{name}_loss" for name in names]:
            known = ", ".join(["loss", *(f"{name}_loss" for name in names)])
            raise self._unknown(known)

    def value_of(self, evaluations: Mapping[str, EvaluationMetrics]) -> float:
        """Return the figure that decides; without the name of a set it is the first one's.

        Args:
            evaluations: Those of one step, by the name of the set.

        Raises:
            ConfigError: there is no such figure.
        """
        metric = self.metric.removeprefix("eval_")
        known: dict[str, float] = {}
        for name, each in evaluations.items():
            figures = {"loss": each.loss, "perplexity": each.perplexity, **each.preferences}
            known |= {f"{name}_{figure}": value for figure, value in figures.items()}
            known = {**figures, **known}  # what the first set has is not replaced
        if metric not in known:
            raise self._unknown(", ".join(sorted(known)))
        return known[metric]

    def _unknown(self, known: str) -> ConfigError:
        key = "evaluation.metric_for_best_model"
        message = f'{key} = "{self.metric}", but no evaluation has this figure. There are {known}'
        return ConfigError("the config", [Problem(key, message, "Write one of them")])

    def after(self, best: Best | None, step: int, value: float) -> Best:
        """Return the best evaluation, now that there is one more. A value that is NaN is never better."""
        if best is None or best.value != best.value:
            return Best(self.metric, value, step)
        gain = value - best.value if self.is_greater_better else best.value - value
        num_worse = 0 if gain > self.threshold else best.num_worse + 1
        if gain > 0:
            return Best(self.metric, value, step, num_worse)
        return Best(self.metric, best.value, best.step, num_worse)

    def is_over(self, best: Best | None) -> bool:
        """Return whether the run ends here, although it has steps left."""
        return self.patience > 0 and best is not None and best.num_worse >= self.patience
