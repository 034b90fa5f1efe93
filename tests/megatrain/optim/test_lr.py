from __future__ import annotations

import pytest
import torch
from transformers.trainer_utils import SchedulerType

from megatrain.optim.lr import ScheduleError, learning_rate_schedule, make_schedule, schedule_warnings
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


def test_a_config_s_schedule_warms_up_and_takes_its_arguments() -> None:
    table = OptimizerConfig(
        learning_rate=8e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.25},
        warmup_steps=0.2,
    )
    schedule = make_schedule(table, 20)
    expected = [0.0, 2e-3, 4e-3, 6e-3, 8e-3, 5e-3, 2e-3]
    assert [schedule(step) for step in (0, 1, 2, 3, 4, 12, 20)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("warmup_steps", "kind", "is_refused"),
    [
        (20, "linear", True),
        (19, "linear", False),
        (1, "linear", False),
        (20, "constant", False),
        (0.99, "linear", False),
    ],
)
def test_warmup_steps_must_end_within_the_run(warmup_steps: float, kind: str, is_refused: bool) -> None:
    table = OptimizerConfig(warmup_steps=warmup_steps, lr_scheduler_type=kind)
    if not is_refused:
        assert callable(make_schedule(table, 20))
        return
    with pytest.raises(ScheduleError) as caught:
        make_schedule(table, 20)
    assert str(caught.value) == (
        "optimizer.warmup_steps: the warm-up of 20 steps does not end within the 20 steps of the run. Write fewer "
        "steps, or a fraction below 1 of all steps"
    )


def test_unusual_warmups_are_warned_about() -> None:
    def warned(warmup_steps: float, num_steps: int, kind: str = "linear") -> list[str]:
        table = OptimizerConfig(warmup_steps=warmup_steps, lr_scheduler_type=kind)
        return [text.removeprefix("optimizer.warmup_steps = ") for text in schedule_warnings(table, num_steps)]

    assert warned(50, 50) == [
        "50: the warm-up takes 50 of the 50 steps, so that the learning rate never reaches its peak. Use 0, or train "
        "for more steps"
    ]
    assert warned(0.51, 100) == [
        "0.51: the warm-up takes 51 of the 100 steps. Use less: a few percent of the steps are usual"
    ]
    assert warned(4, 201) == [
        "4: the warm-up takes 4 of the 201 steps, which has almost no effect. Use 0.03 for 3 % of the steps, or 0 for "
        "none"
    ]
    usual = ((50, 100, "linear"), (4, 200, "linear"), (5, 1000, "linear"), (0, 1000, "linear"), (50, 50, "constant"))
    assert [warned(*each) for each in usual] == [[]] * 5


SCHEDULES = ", ".join(
    sorted(kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy"))
)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cosin", {}, f'"cosin" is not a learning-rate schedule. Use one of: {SCHEDULES}'),
        ("reduce_lr_on_plateau", {}, f'"reduce_lr_on_plateau" follows a metric, not the step. Use one of: {SCHEDULES}'),
        ("constant", {"min_lr": 0.1, "a": 1.0}, '"constant" takes no lr_scheduler_kwargs, but got: a, min_lr'),
        ("constant_with_warmup", {"b": 1.0}, '"constant_with_warmup" takes no lr_scheduler_kwargs, but got: b'),
        ("cosine", {"min_lr": 0.1}, r'lr_scheduler_kwargs do not fit lr_scheduler_type "cosine": .*min_lr'),
        ("cosine_with_min_lr", {}, 'lr_scheduler_kwargs do not fit lr_scheduler_type "cosine_with_min_lr": '),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused_with_the_reason(
    name: str, arguments: dict[str, float], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        learning_rate_schedule(name, 1e-3, num_steps=10, arguments=arguments)
