"""The tasks that there are, by their names in the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatrain.tasks.classify import ClassifyTask
from megatrain.tasks.dpo import PreferenceTask
from megatrain.tasks.reward import RewardTask
from megatrain.tasks.text import TextTask

if TYPE_CHECKING:
    from megatrain.engine.loss import Loss
    from megatrain.tasks.task import Task

__all__ = ["TASKS", "task_of"]

#: Name -> what makes the task, given what its steps minimise; None: cross entropy.
TASKS: Mapping[str, Callable[[Loss | None], Task]] = {
    "pretrain": TextTask,
    "sft": TextTask,
    "distill": TextTask,
    "dpo": PreferenceTask,
    "reward": RewardTask,
    "classify": ClassifyTask,
}


def task_of(name: str, loss: Loss | None) -> Task:
    """Return the task of a run.

    Args:
        name: As in the config.
        loss: What the steps minimise; None: cross entropy.
    """
    return TASKS[name](loss)
