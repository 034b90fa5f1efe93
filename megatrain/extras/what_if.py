"""The plan with other sizes: what fits, and how long a step would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.api import DoesNotFitError, load_config, measured_rates, plan_run, resolve, simulate_step
from megatrain.base.errors import ConfigError
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.api import Plan, PlannedMachine, PlanTimer

__all__ = ["Alternative", "RunLength", "describe", "plan_alternative", "run_length"]

GIVEN = "as configured"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One line: a plan with other sizes, or why there is none.

    Attributes:
        what: the changes, as they were given.
        problem: why it cannot run, or "".
        step_s: seconds of a step, with its waits where rates are measured; None: not measured.
        moved_bytes: over all links, and to drives, in a step.
        written_bytes: over all links, and to drives, in a step.
        peak_bytes: tier -> the least that it needs, and what it has.
        capacity_bytes: tier -> the least that it needs, and what it has.
        num_tokens: in a step.
        beyond_machine: keys that give it more than this machine has, or a place that is no drive.
    """

    what: str
    problem: str = ""
    step_s: float | None = None
    bound_by: str | None = None
    num_tokens: int = 0
    moved_bytes: int = 0
    written_bytes: int = 0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    beyond_machine: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not self.problem

    @property
    def tokens_per_s(self) -> float | None:
        """Places for tokens per second, padding included."""
        return self.num_tokens / self.step_s if self.step_s else None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "fits": self.fits, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True)
class RunLength:
    """A whole run, without evaluations and saves.

    Attributes:
        num_steps: None and 0 where only the data tells.
        num_tokens: None and 0 where only the data tells.
        seconds: None: not measured.
        moved_bytes: by link, the updates after the last step included.
        written_bytes: to all drives of ``[[tiers.nvme]]``.
        share_of_limit: Share of the most that may still be written there.
        num_saves: checkpoints, and what they write to ``output_dir``.
        saved_bytes: checkpoints, and what they write to ``output_dir``.
    """

    num_steps: int | None
    num_tokens: int = 0
    seconds: float | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    share_of_limit: float | None = None
    num_saves: int = 0
    saved_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def plan_alternative(
    what: str,
    path: Path,
    extra_files: Sequence[Path],
    overrides: Sequence[str],
    changes: Sequence[str],
    timer: PlanTimer | None = None,
    machine: PlannedMachine | None = None,
) -> Alternative:
    """Plan a config with changes, and say what became of it. Nothing is written.

    Args:
        timer: times steps; None: times are those of the rates that were measured on this machine, if any.
        machine: that is planned for; None: this one.
    """
    try:
        config = load_config(path, extra_files, [*overrides, *changes]).config
        plan = plan_run(resolve(config, machine), names_ways_out=False)
    except DoesNotFitError as error:
        need, have = format_size(error.need_bytes), format_size(error.have_bytes)
        return Alternative(what, f"{error.tier} needs {need}, has {have}")
    except ConfigError as error:
        return Alternative(what, error.problems[0].message)
    return describe(what, plan if timer is None else timer.timed(plan))


def describe(what: str, plan: Plan) -> Alternative:
    """Return the line of a plan."""
    estimate = plan.estimate
    assert estimate is not None, what
    return Alternative(
        what,
        step_s=step_seconds(plan),
        bound_by=estimate.bound_by,
        num_tokens=estimate.tokens_per_step,
        moved_bytes=sum(plan.traffic.values()),
        written_bytes=sum(nbytes for link, nbytes in plan.traffic.items() if link.endswith("->nvme")),
        peak_bytes=dict(plan.totals),
        capacity_bytes=dict(plan.budgets),
        beyond_machine=[each.key for each in plan.objections if each.refuses],
    )


def step_seconds(plan: Plan) -> float | None:
    """Return how long a step should take: replayed with its waits; None where this machine was not measured.

    For another machine it is the bound: what a replay would add is less than what its rates leave open.
    """
    if plan.run.tiers.machine is not None:
        return None if plan.estimate is None else plan.estimate.step_s
    rates = measured_rates(plan)
    if rates is None or plan.estimate is None:
        return None
    return simulate_step(plan, plan.estimate.tokens_per_step, rates).step_s


def run_length(plan: Plan, num_steps: int | None, step_s: float | None) -> RunLength:
    """Return what the whole run comes to.

    Args:
        num_steps: as counted in the data; None: as the config says.
        step_s: seconds of a step, None if not known.
    """
    if num_steps is None:
        num_steps = plan.run.max_steps
    if num_steps is None:
        return RunLength(None)
    moved = plan.placement.run_traffic_bytes(num_steps)
    written = sum(nbytes for link, nbytes in moved.items() if link.endswith("->nvme"))
    limits = [drive.max_written for drive in plan.run.tiers.table.nvme]
    table = plan.run.checkpoint.table
    saves = 0 if table.save_strategy == "no" else 1
    if table.save_strategy == "steps":
        saves = -(-num_steps // table.save_steps)
    return RunLength(
        num_steps=num_steps,
        num_tokens=num_steps * plan.run.batch.num_tokens,
        seconds=None if step_s is None else num_steps * step_s,
        moved_bytes=moved,
        written_bytes=written,
        share_of_limit=written / sum(limit for limit in limits if limit) if limits and all(limits) else None,
        num_saves=saves,
        saved_bytes=saves * plan.checkpoint_bytes_in_output_dir,
    )
