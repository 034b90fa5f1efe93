"""Each task of the config is known everywhere."""

from __future__ import annotations

from typing import get_args

from megatrain.tasks.known import task_of
from megatrain.tasks.preference import PreferenceLoss
from megatrain.tasks.table import TASK_FACTS, TaskName


def test_all_tasks_are_made_and_have_a_first_config() -> None:
    assert set(TASK_FACTS) == set(get_args(TaskName))
    for name, facts in TASK_FACTS.items():
        loss = PreferenceLoss() if name == "dpo" else None
        assert type(task_of(name, loss)).__name__ == facts.made_by.partition(".")[2]
