"""Lookup of tasks by the names that configs use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from megatrain.tasks.table import TASK_FACTS

if TYPE_CHECKING:
    from megatrain.tasks.task import Task

__all__ = ["task_class"]


def task_class(name: str) -> type[Task]:
    """Return the class of a task. Only that task's module is imported."""
    module_name, _, class_name = TASK_FACTS[name].class_path.partition(".")
    return cast("type[Task]", getattr(import_module(f"megatrain.tasks.{module_name}"), class_name))
