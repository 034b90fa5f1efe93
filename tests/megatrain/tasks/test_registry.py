"""Each task has a class and valid facts, and refuses keys that it does not support."""

from __future__ import annotations

from typing import cast, get_args

import pytest

from megatrain.config.combinations import find_bad_combinations
from megatrain.config.keys import KEYS, TABLES
from megatrain.config.load import validate_values
from megatrain.tasks.registry import task_class
from megatrain.tasks.table import TASK_FACTS, TaskFacts, TaskName


def test_every_task_name_has_its_class() -> None:
    assert set(TASK_FACTS) == set(get_args(TaskName))
    for name, facts in TASK_FACTS.items():
        assert task_class(name).__name__ == facts.class_path.partition(".")[2]


def test_refused_keys_exist() -> None:
    for facts in TASK_FACTS.values():
        for refusal in (*facts.refusals, *filter(None, [facts.refusal_elsewhere])):
            assert refusal.key in KEYS or refusal.key in TABLES
            default = KEYS.get(refusal.key, {}).get("default", refusal.allowed[0])
            assert {default, facts.train_on} & {*refusal.allowed}, "a task must not refuse its defaults"


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("training", {"label_smoothing_factor": 0.1}, "training.label_smoothing_factor changes the cross entropy"),
        ("training", {"z_loss": 1e-4}, "training.z_loss changes the cross entropy"),
        ("model", {"images": "frozen"}, 'model.images = "frozen", but task = "sft" reads only text'),
    ],
)
def test_a_new_task_refuses_keys_of_other_losses(
    monkeypatch: pytest.MonkeyPatch, table: str, values: dict[str, object], message: str
) -> None:
    new = TaskFacts("rows of a new task", "new.jsonl", 1e-5, 1e-4)
    monkeypatch.setitem(cast("dict[str, TaskFacts]", TASK_FACTS), "sft", new)
    tables: dict[str, dict[str, object]] = {
        "model": {"model_name_or_path": "/model"},
        "data": {"train": [{"path": "/new.jsonl"}]},
    }
    tables[table] = tables.get(table, {}) | values
    config, problems = validate_values({"task": "sft", "output_dir": "/out", **tables})
    assert config is not None, problems
    (problem,) = find_bad_combinations(config)
    assert problem.message.startswith(message)
