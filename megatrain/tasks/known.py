"""The tasks that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.tasks.dpo import PreferenceTask
from megatrain.tasks.text import TextTask

if TYPE_CHECKING:
    from megatrain.engine.preferences import PreferenceLoss
    from megatrain.tasks.task import Task

__all__ = ["task_of"]


def task_of(preference: PreferenceLoss | None) -> Task:
    """Return the task that a run has, by the loss over preferences that it trains on; None: there is none."""
    return TextTask() if preference is None else PreferenceTask(preference)
