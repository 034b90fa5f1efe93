from __future__ import annotations

import pytest
import torch

from megatrain.optim.lr import ScheduleError, learning_rate_schedule
from megatrain.optim.table import OptimizerConfig


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("polynomial", {"lr_end": 1e-7}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
    ],
)
def test_every_step_has_the_learning_rate_of_transformers(name: str, arguments: dict[str, float]) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-4)
    scheduler = get_scheduler(name, optimizer, 3, 20, dict(arguments))
    expected = []
    for _ in range(20):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    schedule = learning_rate_schedule(name, 2e-4, num_steps=20, warmup_steps=3, arguments=arguments)
    assert [schedule(step) for step in range(20)] == expected
    assert schedule(7) == expected[7]  # the schedule has no state, so steps can come in any order, as after a resume


def test_warmup_is_a_number_of_steps_or_a_fraction_rounded_up() -> None:
    tables = [OptimizerConfig(warmup_steps=value) for value in (0.0, 0.03, 1.0, 7.0)]
    assert [table.num_warmup_steps(101) for table in tables] == [0, 4, 1, 7]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosin", {}, "cosine"),
        ("reduce_lr_on_plateau", {}, "follows a metric"),
        ("constant", {"min_lr": 0.1}, "takes no lr_scheduler_kwargs"),
        ("cosine", {"min_lr": 0.1}, "min_lr"),
        ("cosine_with_min_lr", {}, "do not fit"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused_with_the_reason(
    name: str, arguments: dict[str, float], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        learning_rate_schedule(name, 1e-3, num_steps=10, arguments=arguments)
