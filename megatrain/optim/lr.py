"""Learning-rate schedules from transformers as functions of the step, and messages about their warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatrain.models.internals import check_internals

if TYPE_CHECKING:
    from megatrain.optim.table import OptimizerConfig

__all__ = ["ScheduleError", "learning_rate_schedule", "make_schedule", "schedule_warnings", "warmup_notice"]

#: Bounds outside of which a warm-up causes a warning: rules of thumb that accept the warm-ups of published recipes.
_FEW_WARMUP_STEPS, _FEW_WARMUP_SHARE = 5, 0.02
_LONG_WARMUP_SHARE = 0.5


class ScheduleError(ValueError):
    """Error for a learning-rate schedule that does not exist, or that rejects its arguments."""


def make_schedule(table: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """Return the schedule for a run of `num_steps`; see `learning_rate_schedule`.

    Raises:
        ScheduleError: The warm-up is longer than the run, or the schedule does not exist or rejects the arguments.
    """
    warmup = table.num_warmup_steps(num_steps)
    if table.warmup_steps >= 1 and warmup >= num_steps and table.has_warmup:
        raise ScheduleError(
            f"optimizer.warmup_steps: the warm-up of {warmup} steps does not end within the {num_steps} steps of "
            "the run. Write fewer steps, or a fraction below 1 of all steps"
        )
    arguments = table.lr_scheduler_kwargs
    return learning_rate_schedule(table.lr_scheduler_type, table.learning_rate, num_steps, warmup, arguments)


def learning_rate_schedule(
    name: str,
    lr: float,
    num_steps: int,
    warmup_steps: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> Callable[[int], float]:
    """Build a schedule with transformers' `get_scheduler`.

    Args:
        name: `lr_scheduler_type` of transformers: linear, cosine, constant, warmup_stable_decay, ...
        arguments: `lr_scheduler_kwargs` of transformers, such as `{"min_lr_rate": 0.1}`.

    Returns:
        A function from the number of finished steps (0 before the first update) to the next learning rate. The function
        has no state, so a resume needs only the step. With warm-up, the first learning rate is 0, as in transformers.

    Raises:
        ScheduleError: The schedule does not exist, follows a metric, or rejects the arguments.
    """
    check_internals(with_schedules=True)
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    metric_schedules = {SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value}
    names = sorted({kind.value for kind in SchedulerType} - metric_schedules)
    if name not in names:
        reason = "follows a metric, not the step" if name in metric_schedules else "is not a learning-rate schedule"
        raise ScheduleError(f'lr_scheduler_type "{name}" {reason}. Use one of: {", ".join(names)}')
    kwargs = dict(arguments or {})
    # get_scheduler silently drops the arguments of these two schedules.
    if kwargs and name in {SchedulerType.CONSTANT.value, SchedulerType.CONSTANT_WITH_WARMUP.value}:
        raise ScheduleError(
            f'lr_scheduler_type "{name}" takes no lr_scheduler_kwargs, but got: {", ".join(sorted(kwargs))}'
        )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)  # get_scheduler needs an optimizer, which is never stepped
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ScheduleError(f'lr_scheduler_kwargs do not fit lr_scheduler_type "{name}": {error}') from error
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda step: lr * float(factor(step))


def schedule_warnings(optimizer: OptimizerConfig, num_steps: int) -> Iterator[str]:
    """Yield a warning if the warm-up is too long or too short for a run of ``num_steps`` steps."""
    warmup = optimizer.num_warmup_steps(num_steps)
    if not warmup or not optimizer.has_warmup:
        return
    text = f"optimizer.warmup_steps = {optimizer.warmup_steps:g}: the warm-up takes {warmup} of the {num_steps} steps"
    if warmup >= num_steps:
        yield f"{text}, so that the learning rate never reaches its peak. Use 0, or train for more steps"
    elif warmup > _LONG_WARMUP_SHARE * num_steps:
        yield f"{text}. Use less: a few percent of the steps are usual"
    elif warmup < _FEW_WARMUP_STEPS and warmup < _FEW_WARMUP_SHARE * num_steps:
        yield f"{text}, which has almost no effect. Use 0.03 for 3 % of the steps, or 0 for none"


def warmup_notice(first_lr: float, peak_lr: float, num_steps: int, *, is_start: bool) -> str:
    """Return the notice about a warm-up. It mentions a first learning rate of 0, because users do not expect it.

    Args:
        first_lr: Learning rate of the first step.
        peak_lr: Learning rate at the end of the warm-up.
        is_start: Whether the first step has not run yet.
    """
    text = f"warm-up: the learning rate rises from {first_lr:.3g} to {peak_lr:.3g} over "
    text += f"{num_steps} step{'s' if num_steps != 1 else ''}"
    if first_lr == 0.0 and is_start:
        text += "; the first step does not change the weights, as in transformers"
    return text
