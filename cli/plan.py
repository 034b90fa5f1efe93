"""``megatrain-tier plan``: show where every byte goes. Trains nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .main import EXIT_DOES_NOT_FIT
from .options import config_options, json_option, load

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.plan.planner import Plan
    from megatrain.plan.simulate import SimulatedStep


@click.command("plan")
@config_options
@json_option
@click.option("--simulate", is_flag=True, help="Replay a step at the rates that doctor measured: how long, what waits.")
def command(
    config: Path, extra_files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool, simulate: bool
) -> int:
    """Show where every byte goes and what moves per step. Trains nothing."""
    loaded = load(config, extra_files, overrides)

    from megatrain.trainer import Trainer

    from .render import QuietObserver, print_plan

    plan = Trainer(loaded.config, observer=QuietObserver()).plan
    print_plan(plan, as_json=as_json, simulated=_simulated(plan) if simulate else None)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _simulated(plan: Plan) -> SimulatedStep | None:
    from megatrain.plan.simulate import measured_rates, simulate_step

    rates = measured_rates(plan)
    if rates is None or plan.estimate is None:
        click.echo("warning: nothing to replay a step with: run megatrain-tier doctor first", err=True)
        return None
    return simulate_step(plan, plan.estimate.tokens_per_step, rates)
