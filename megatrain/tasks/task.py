"""What a task of the config brings to a run beside the loss of its steps.

A task is a file of its own. Whatever holds for all of them (steps, checkpoints, schedules of passes) asks it, and none
of that knows which task it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.base.progress import Activity
    from megatrain.base.timeline import Timeline
    from megatrain.data.dataset import TokenDataset
    from megatrain.data.loader import BatchLoader
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.loss import Loss
    from megatrain.engine.table import TrainingConfig
    from megatrain.plan.plan import Plan
    from megatrain.ranks.group import RankGroup
    from tiered import TieredStore

__all__ = ["Before", "Note", "Tally", "Task", "SetFigures"]

MicroBatches = Sequence[Mapping[str, "Tensor"]]
Item = TypeVar("Item")
#: Returns what each rank gave, in their order; a collective. Of one process it is what that one gave.
Gather = Callable[[Item], Sequence[Item]]


@dataclass(frozen=True, slots=True)
class SetFigures:
    """What an evaluation says of a set of rows.

    Attributes:
        loss: Mean over what the loss is the mean of: tokens with a label, or examples.
        num_tokens: Tokens with a label.
        figures: Further means, by name.
    """

    loss: float
    num_tokens: int
    figures: Mapping[str, float] = field(default_factory=dict)


class Tally(Protocol):
    """Takes in the passes of an evaluation, and judges the rows of all of them."""

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> Any:
        """Have the layers run a pass, and return what ``add`` takes in of it."""

    def add(self, found: Any) -> None:
        """Take in what ``head`` returned of a pass."""

    def judge(self, gather: Gather[Any]) -> SetFigures:
        """Return what is said of the rows of all ranks: the same on each, whoever had which row."""


@dataclass(frozen=True, slots=True)
class Before:
    """What there is before the first step of a run, for a task that has to look at all rows first.

    Attributes:
        store: With the weights that the run goes on from.
        loaders: Those of the rows to train on, and of all sets that are evaluated.
        kept: What the checkpoint that the run goes on from keeps for the task; None: the run starts from the model.
        timeline: Records ops while it is on.
        activity: What is being done, for status.
        tell: Called with messages for the user.
    """

    plan: Plan
    store: TieredStore
    loaders: Sequence[BatchLoader]
    kept: Mapping[str, Any] | None
    timeline: Timeline
    activity: Activity
    tell: Callable[[str], None]
    group: RankGroup


@dataclass(frozen=True, slots=True)
class Note:
    """What `check` says of the rows of a task.

    Attributes:
        severity: "ok", "note" (worth knowing) or "warning" (seldom meant).
    """

    severity: Literal["ok", "note", "warning"]
    text: str


class Task(Protocol):
    """What a run trains for.

    Args:
        loss: Loss of the steps, as ``loss_of`` returned it.
    """

    def __init__(self, loss: Loss) -> None: ...

    @staticmethod
    def loss_of(training: TrainingConfig, table: Any) -> Loss:
        """Return the loss that the steps of a run minimize.

        Args:
            table: The task's own table. None if it has none.

        Raises:
            ConfigError: Files that the loss depends on do not exist, or are not what the config says.
        """

    @staticmethod
    def notes(table: Any, dataset: TokenDataset) -> Sequence[Note]:
        """Return facts about the rows to train on that a user should know before the run."""

    def tally(self) -> Tally:
        """Return what judges the rows of one set."""

    def prepare(self, before: Before) -> Mapping[str, Any]:
        """Make what must exist before the first step.

        Returns:
            What checkpoints keep of it, by key of ``RunState.model``; a run that goes on is handed that as ``kept``.
        """
