"""The task of a run, by its name in the config."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from megatrain.tasks.table import TASK_FACTS

if TYPE_CHECKING:
    from megatrain.engine.loss import Loss
    from megatrain.tasks.task import Task

__all__ = ["task_of"]


def task_of(name: str, loss: Loss | None) -> Task:
    """Return the task of a run; of the files that have tasks its own alone is imported.

    Args:
        loss: What the steps minimise; None: cross entropy.
    """
    file, _, made = TASK_FACTS[name].made_by.partition(".")
    return cast("Task", getattr(import_module(f"megatrain.tasks.{file}"), made)(loss))
