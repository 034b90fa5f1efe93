"""Interface of tasks. A task defines a run's loss, its evaluation, and its preparation before the first step.

Each task is one file. Code that all tasks share (steps, checkpoints, passes) uses tasks only through this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.base.progress import Activity
    from megatrain.data.loader import BatchLoader
    from megatrain.data.token_dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.head.loss import Loss
    from megatrain.engine.table import TrainingConfig
    from megatrain.plan.plan import Plan
    from megatrain.ranks.group import RankGroup
    from tiered import TieredStore

__all__ = ["MetricAccumulator", "PrepareContext", "RowFinding", "SetMetrics", "Task"]

MicroBatches = Sequence[Mapping[str, "Tensor"]]
Item = TypeVar("Item")
#: Collective that returns the values of all ranks, in rank order. A single process gets only its value.
Gather = Callable[[Item], Sequence[Item]]


@dataclass(frozen=True, slots=True)
class SetMetrics:
    """Metrics from the evaluation of a set.

    Attributes:
        loss: Mean loss per token with a label, or per example.
        num_tokens: Number of tokens with a label.
        metrics: Additional metrics by name.
    """

    loss: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class MetricAccumulator(Protocol):
    """Accumulator for the results of an evaluation's passes."""

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> Any:
        """Run the layers for one pass, and return the result for ``add``."""

    def add(self, result: Any) -> None:
        """Add the result of ``head`` for one pass."""

    def compute(self, gather: Gather[Any]) -> SetMetrics:
        """Return the metrics over all ranks' rows. They are the same on all ranks and for any division of the rows."""


@dataclass(frozen=True, slots=True)
class PrepareContext:
    """Objects that a task can use to prepare for a run's first step.

    Attributes:
        store: Store with the weights from which the run starts.
        loaders: Loaders of the training rows and of all evaluation sets.
        resumed_record: The task's record in the resumed checkpoint, or None for a new run.
        activity: Progress shared with a live view.
    """

    plan: Plan
    store: TieredStore
    loaders: Sequence[BatchLoader]
    resumed_record: Mapping[str, Any] | None
    activity: Activity
    on_message: Callable[[str], None]
    group: RankGroup


@dataclass(frozen=True, slots=True)
class RowFinding:
    """Finding about a task's rows that the command `check` reports.

    Attributes:
        severity: "ok", "note" (useful to know) or "warning" (rarely intended).
    """

    severity: Literal["ok", "note", "warning"]
    text: str


class Task(Protocol):
    """The training task of a run.

    Args:
        loss: Loss of the steps, from ``make_loss``.
    """

    def __init__(self, loss: Loss) -> None: ...

    @staticmethod
    def make_loss(training: TrainingConfig, table: Any) -> Loss:
        """Return the loss that a run's steps minimize.

        Args:
            table: The task's config table, or None if the task has none.

        Raises:
            ConfigError: Files that the loss needs do not exist or do not match the config.
        """

    @staticmethod
    def findings(table: Any, dataset: TokenDataset) -> Sequence[RowFinding]:
        """Return facts about the training rows that a user should know before the run."""

    def accumulator(self) -> MetricAccumulator:
        """Return an accumulator for one set's metrics."""

    def prepare(self, context: PrepareContext) -> Mapping[str, Any]:
        """Prepare the task before the first step.

        Returns:
            Record to store in checkpoints, by key of ``RunState.model``. A resumed run gets it in ``context``.
        """
