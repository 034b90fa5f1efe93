"""Plans with the times of their own steps: measured once for all plans that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.plan.estimate import estimate_step
from megatrain.plan.machine import load_profile
from megatrain.plan.measure import NotMeasurableError, measure_ticks, same_ticks
from megatrain.plan.plan import MeasuredTicks
from megatrain.plan.planner import step_shape
from megatrain.plan.simulate import measured_rates, simulate_step

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from megatrain.plan.plan import Plan


class PlanTimer:
    """Times the steps of plans. Plans that differ in homes and sizes of tiers alone are timed once.

    Args:
        measure: how a plan's steps are timed.
        on_progress: told what is measured, and why not.
        on_problem: told what is measured, and why not.

    Attributes:
        num_measured: plans whose steps were timed.
    """

    def __init__(
        self,
        on_progress: Callable[[str], None] = lambda text: None,
        on_problem: Callable[[str], None] = lambda text: None,
        measure: Callable[..., MeasuredTicks] = measure_ticks,
    ) -> None:
        self._on_progress, self._on_problem, self._measure = on_progress, on_problem, measure
        self._known: list[tuple[Plan, RunConfig, MeasuredTicks]] = []

    @property
    def num_measured(self) -> int:
        """Return how many plans were measured."""
        return len(self._known)

    def timed(self, plan: Plan, config: RunConfig) -> Plan:
        """Return the plan with its times; as it is where its steps cannot be timed."""
        for known, known_config, ticks in self._known:
            if same_ticks(known, known_config, plan, config):
                return with_ticks(plan, config, ticks)
        self._on_progress("steps of this model")
        machine = load_profile().machine
        dtype = str(plan.graph.dtype).removeprefix("torch.")
        rate = None if machine is None else machine.matmul_flops_per_s.get(f"cpu/{dtype}")
        try:
            ticks = self._measure(plan, config, flops_per_s=rate)
        except NotMeasurableError as error:
            self._on_problem(f"steps of this model are not timed: {error}")
            return plan
        self._known.append((plan, config, ticks))
        return with_ticks(plan, config, ticks)


def with_ticks(plan: Plan, config: RunConfig, ticks: MeasuredTicks) -> Plan:
    """Return a plan whose estimate is a replay of measured ticks, at the measured rates of drives and buses."""
    plan = replace(plan, ticks=ticks)
    shape = step_shape(config, plan.nvme_rates)
    estimate = estimate_step(plan, shape, load_profile())
    plan = replace(plan, estimate=estimate)
    rates = measured_rates(plan)
    if rates is None:
        return plan
    return replace(plan, estimate=replace(estimate, step_s=simulate_step(plan, estimate.tokens_per_step, rates).step_s))
