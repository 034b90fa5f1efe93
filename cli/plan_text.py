"""Output of a plan as text or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.machine.planned_machine import PlannedMachine
from megatrain.plan import process, show
from tiered.units import GiB, MiB, format_size

from .console import nonzero_sizes, plain_table, print_line, set_text_width

if TYPE_CHECKING:
    from megatrain.plan.plan import Plan

_MIN_TABLE_COLUMNS = 50  # minimum columns of a table of tiers


def print_plan(
    plan: Plan,
    *,
    as_json: bool = False,
    problem: str = "",
    passthrough: str = "",
    run_lines: Sequence[str] = (),
    run_values: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> None:
    """Print a plan as a table or as one JSON object. The last line of the text is the verdict.

    Args:
        problem: Reason why a run would be refused although its blocks fit in the tiers, or "".
        passthrough: Description of the pass-through tensors in the model's folder, or "".
        run_lines: Lines about the whole run, printed after the lines about a step.
        run_values: JSON values about the whole run, used instead of ``run_lines`` with ``as_json``.
        console: Console for text. Default: stdout.
    """
    if as_json:
        values = {**plan_to_json(plan, passthrough), **(run_values or {}), **({"problem": problem} if problem else {})}
        click.echo(json.dumps(values))
        return
    console = set_text_width(console or Console())
    console.print(Text(show.headline(plan), style="bold"))
    if console.width < _MIN_TABLE_COLUMNS:
        for line in _narrow_plan_lines(plan):
            print_line(console, line, indent=2)
    else:
        console.print(plan_table(plan))
    for line in (*_step_lines(plan), *run_lines):
        print_line(console, line, indent=16)
    for message in show.messages(plan, passthrough):
        print_line(console, message, indent=0)
    for objection in plan.objections:
        name, style = ("problem", "red") if objection.refuses else ("warning", "yellow")
        print_line(console, f"{name:<7} {objection}", indent=8, style=style)
    if problem:
        print_line(console, f"problem {problem}", indent=8, style="red")
    _print_verdict(console, plan, problem)


def _step_lines(plan: Plan) -> Iterator[str]:
    """Yield lines about the memory of the process, and about a step's traffic and estimated time."""
    yield show.process_line(process.process_memory(plan))
    if traffic := "  ".join(f"{link} {format_size(nbytes)}" for link, nbytes in nonzero_sizes(plan.traffic).items()):
        yield f"moved per step  {traffic}"
    yield from show.estimate_lines(plan.estimate)


def _print_verdict(console: Console, plan: Plan, problem: str) -> None:
    machine = plan.run.tiers.machine
    if problem:
        print_line(console, "fits the tiers, but `run` would refuse it here.", indent=0, style="red")
    elif any(objection.refuses for objection in plan.objections):
        reason = f"{machine.name}: `run` would refuse it here." if machine.is_here else f"{machine.name}."
        print_line(console, f"fits, but not on {reason}", indent=0, style="red")
    else:
        suffix = "." if machine.is_here else f" on {machine.name} (predicted)."
        print_line(console, f"fits{suffix}", indent=0, style="green")


def _narrow_plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the rows of ``plan_table`` as lines that can be wrapped."""

    def format_sizes(sizes: Mapping[str, int]) -> str:
        return ", ".join(f"{tier} {format_size(sizes[tier])}" for tier in plan.tiers if sizes.get(tier))

    for kind, sizes, note in show.table_rows(plan):
        if any(sizes.values()):
            yield f"{kind}: {format_sizes(sizes)}; {note}"
    yield f"total: {format_sizes(plan.totals)}"
    yield f"budget: {format_sizes({tier: plan.budgets.get(tier, 0) for tier in plan.tiers if plan.totals.get(tier)})}"


def plan_to_json(plan: Plan, passthrough: str) -> dict[str, Any]:
    """Return a plan as JSON values, with sizes in bytes."""
    memory = process.process_memory(plan)
    objections, machine = plan.objections, plan.run.tiers.machine
    return {
        "headline": show.headline(plan),
        "fits": True,  # planning refuses a run that does not fit
        "machine": {"name": machine.name, "title": machine.file.title} if isinstance(machine, PlannedMachine) else None,
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in show.table_rows(plan)],
        "totals": dict(plan.totals),
        "process_bytes": memory.total_bytes,
        "process": dataclasses.asdict(memory),
        "budgets": dict(plan.budgets),
        "traffic_per_step": dict(plan.traffic),
        "workspace_is_exact": plan.trace.exact,
        "guesses": list(plan.trace.guesses),
        "messages": list(show.messages(plan, passthrough)),
        "estimate": plan.estimate.to_json(),
        "fits_this_machine": not any(objection.refuses for objection in objections),
        "objections": [dataclasses.asdict(objection) for objection in objections],
    }


def plan_table(plan: Plan) -> Table:
    """Return a table with the bytes of each kind in each tier, totals and budgets, in GiB, or MiB if all are small."""
    max_size = max([*plan.totals.values(), *plan.budgets.values()], default=0)
    unit, unit_name = (GiB, "GiB") if max(plan.totals.values(), default=max_size) >= 4 * GiB else (MiB, "MiB")

    def cell(sizes: Mapping[str, int], tier: str) -> str:
        nbytes = sizes.get(tier, 0)
        return "-" if nbytes == 0 else f"{nbytes / unit:,.1f}" if nbytes >= unit / 20 else "<0.1"

    tiers = [tier for tier in plan.tiers if plan.totals.get(tier)]
    table = plain_table()
    table.add_column("", no_wrap=True)
    for tier in tiers:
        table.add_column(tier.upper(), justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for kind, sizes, note in show.table_rows(plan):
        if any(sizes.values()):
            table.add_row(kind, *(cell(sizes, tier) for tier in tiers), note)
    table.add_row(f"total {unit_name}", *(cell(plan.totals, tier) for tier in tiers), "", style="bold")
    exceeded = [tier for tier in plan.tiers if tier in plan.budgets and plan.totals.get(tier, 0) > plan.budgets[tier]]
    table.add_row("budget", *(cell(plan.budgets, tier) for tier in tiers), "", style="red" if exceeded else "")
    return table
