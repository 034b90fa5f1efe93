"""Each task of the config is supported everywhere."""

from __future__ import annotations

from typing import get_args

from megatrain.tasks.registry import task_class
from megatrain.tasks.table import TASK_FACTS, TaskName


def test_all_tasks_are_made_and_have_a_first_config() -> None:
    assert set(TASK_FACTS) == set(get_args(TaskName))
    for name, facts in TASK_FACTS.items():
        assert task_class(name).__name__ == facts.made_by.partition(".")[2]
