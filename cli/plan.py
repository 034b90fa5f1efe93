"""``megatrain-tier plan``: the placement of every byte, the traffic of a step, the length of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import click

from .control import echo_wrapped
from .main import EXIT_CONFIG, EXIT_DOES_NOT_FIT, RunFailedError
from .main import describe as describe_error
from .options import config_options, json_option, load
from .terminal import Spinner, without_collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from megatrain.extras.what_if import Alternative, RunLength
    from megatrain.plan.measure import PlanTimer
    from megatrain.plan.plan import Plan, RunSpec
    from megatrain.plan.simulate import SimulatedStep
    from megatrain.tasks.evaluation import EvaluationSpec


_NEXT_CHANGE = re.compile(r",(?=\s*[A-Za-z_][\w.]*\s*=)")
_SHORT = "ram, gpu, nvme, batch, length"


@click.command("plan")
@config_options
@json_option
@click.option(
    "--what-if",
    "alternatives",
    multiple=True,
    metavar="CHANGES",
    help="Also plan with other sizes, a line each: ram=64GiB, nvme=1TB, gpu=40GiB, batch=16 (rows, or tokens), "
    "length=8192, or any key; several changes with commas between them. May be repeated.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Measure this machine first, as `doctor --quick` does, and time steps of this very model and batch (random "
    "weights, on a CPU): the predicted step is then what a run should take, not a bound.",
)
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE",
    help="Plan for another machine, from its figures: sizes that the config leaves to the machine are that machine's, "
    "given ones are compared with it, and times are predicted from published and estimated rates. Nothing is measured "
    "here, and no GPU is needed. An unknown name lists the machines; `doctor --save-profile` makes a file of one.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Plan for one of N processes of a host that train together, each with a GPU of its own; none is started. "
    "Default: distributed.processes of the config.",
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Plan for N hosts that are like this one, or like --machine, each with one process.",
)
@click.option("--simulate", is_flag=True, help="Replay a step at the rates that doctor measured: how long, what waits.")
@click.option("--count-steps", is_flag=True, help="Read the data, to know the steps of a run that is given in epochs.")
def command(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    as_json: bool,
    alternatives: tuple[str, ...],
    measure: bool,
    machine_name: str | None,
    processes: int | None,
    hosts: int,
    simulate: bool,
    count_steps: bool,
) -> int:
    """Show where every byte goes, what moves per step, and what the whole run comes to. Trains nothing."""
    if measure and machine_name is not None:
        raise click.UsageError("--measure times this machine, --machine plans for another one: use one of them")
    with Spinner("reading the config", is_shown=not as_json) as spinner:
        loaded = load(config, extra_files, overrides, spinner)
        size = (processes or loaded.config.distributed.processes) * hosts
        if size > 1 and (measure or alternatives):
            raise click.UsageError(
                "--processes and --hosts plan for one of several: use them without --measure and --what-if"
            )
        spinner.say("importing torch")
        with without_collector():
            from megatrain.base.observer import RunObserver
            from megatrain.extras.what_if import plan_alternative
            from megatrain.machine.files import find_machine
            from megatrain.plan.placement import DoesNotFitError
            from megatrain.plan.planner import plan_run
            from megatrain.training.open_run import look_at_weights
            from megatrain.training.resolve import resolve, resolve_evaluation
            from megatrain.training.trainer import Trainer

        machine = None if machine_name is None else find_machine(machine_name)
        run = resolve(loaded.config, machine)
        if size > 1:
            run = run.as_fullest_rank(size, hosts)
        try:
            changes = {text: overrides_of(text, run) for text in alternatives}
        except ValueError as error:
            raise RunFailedError(f"--what-if: {error}", EXIT_CONFIG) from None
        timer = None
        if measure:
            spinner.stop()  # what is measured is said in lines that stay
            timer = _measure([run, *_runs_of(changes.values(), config, extra_files, overrides)])
        spinner.say("reading the model and planning")
        others = [
            plan_alternative(text, config, extra_files, overrides, sets, timer, machine)
            for text, sets in changes.items()
        ]
        try:
            with without_collector():
                planned = None if machine is None and size == 1 else plan_run(run)
                trainer = Trainer(loaded.config, observer=RunObserver(), plan=planned)
        except DoesNotFitError as error:
            if not others:
                raise
            spinner.stop()
            _print_misfit(error, others, as_json=as_json)
            return EXIT_DOES_NOT_FIT
        plan = trainer.plan if timer is None else timer.timed(trainer.plan)
        carried, refusal = look_at_weights(plan)
        plan = dataclasses.replace(plan, carried_tensors=carried)
        num_steps = None
        if count_steps and refusal is None:
            spinner.say("reading the data")
            num_steps = trainer.make_loader().num_steps(plan.run.num_epochs, plan.run.max_steps)
    if plan.flash_note:
        click.echo(plan.flash_note, err=True)
    if plan.packing_warning:
        click.echo(f"warning: {plan.packing_warning}", err=True)
    evaluation = resolve_evaluation(loaded.config)
    problem = "" if refusal is None else describe_error(refusal)
    _print(plan, evaluation, others, problem, as_json=as_json, simulate=simulate, num_steps=num_steps)
    return (EXIT_CONFIG if problem else 0) if plan.fits else EXIT_DOES_NOT_FIT


def overrides_of(text: str, run: RunSpec) -> list[str]:
    """Return what ``--set`` would be for ``"ram=64GiB,batch=16"``.

    Besides any key of the config: ``ram``, ``gpu`` and ``nvme`` (all drives together, or "none") are sizes, ``length``
    is ``data.max_length``, and ``batch`` the key of the batch that the config uses: of tokens, or rows of them.

    Raises:
        ValueError: a part is not ``NAME=VALUE``, or the size of the drives is none.
    """
    found: list[str] = []
    lengths = re.findall(r"(?:^|,)\s*(?:length|(?:data\.)?max_length)\s*=\s*(\d+)", text)
    length = int(lengths[-1]) if lengths else run.batch.max_length
    for part in _NEXT_CHANGE.split(text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(f'"{part}" is not NAME=VALUE. Write for example ram=64GiB; names: {_SHORT}, or any key')
        if name in ("ram", "gpu"):
            found.append(f"tiers.{name}.size={value}")
        elif name == "nvme":
            found.extend(_drives(value, run))
        elif name == "length":
            found.append(f"data.max_length={value}")
        elif name == "batch":
            if run.batch.given_rows is not None:
                found.append(f"training.per_device_train_batch_size={value}")
            else:
                is_rows = value.isdecimal() and int(value) % length
                found.append(f"training.train_batch_tokens={int(value) * length if is_rows else value}")
        else:
            found.append(f"{name}={value}")
    return found


def _drives(value: str, run: RunSpec) -> list[str]:
    """Return the changes that give all drives together a size; without any, one below ``output_dir``."""
    from tiered.units import parse_size

    if value in ("none", "0"):
        return ["tiers.nvme=[]"]
    count = len(run.tiers.table.nvme)
    if not count:
        return [f'tiers.nvme=[{{ path = "{run.output_dir / "nvme"}", size = "{value}" }}]']
    is_share = value == "auto" or value.endswith("%")
    each = value if is_share else f"{parse_size(value) // count}B"
    return [f"tiers.nvme.{number}.size={each}" for number in range(count)]


def _runs_of(
    alternatives: Iterable[Sequence[str]], path: Path, extra_files: Sequence[Path], overrides: Sequence[str]
) -> Iterator[RunSpec]:
    """Yield the runs of the valid alternatives, which may name other drives."""
    from megatrain.base.errors import ConfigError
    from megatrain.config import load_config
    from megatrain.training.resolve import resolve

    for changes in alternatives:
        with contextlib.suppress(ConfigError):
            yield resolve(load_config(path, extra_files, [*overrides, *changes]).config)


def _measure(runs: Iterable[RunSpec]) -> PlanTimer:
    """Measure the machine and the drives of some runs, and keep the rates for this plan and later ones.

    Returns:
        What times the steps of plans.
    """
    from megatrain.extras.doctor.drives import terminated_as_interrupted
    from megatrain.extras.doctor.examine import examine
    from megatrain.machine.machine import existing_parent, profile_path, store_profile
    from megatrain.plan.measure import PlanTimer

    def say(what: str) -> None:
        click.echo(f"measuring {what} ...", err=True)

    drives = [drive for run in runs for drive in run.tiers.table.nvme]
    paths = list(dict.fromkeys(existing_parent(drive.path) for drive in drives))
    with terminated_as_interrupted():
        found = examine(paths, quick=True, on_progress=say)
    try:
        store_profile(found.profile)
    except OSError as error:
        click.echo(f"warning: the rates are not used: {profile_path()}: {error.strerror}", err=True)
    return PlanTimer(say, lambda text: click.echo(f"warning: {text}", err=True))


def _print(
    plan: Plan,
    evaluation: EvaluationSpec,
    others: Sequence[Alternative],
    problem: str,
    *,
    as_json: bool,
    simulate: bool,
    num_steps: int | None,
) -> None:
    from megatrain.extras.what_if import GIVEN, describe, run_length

    from .render import plan_to_json, print_plan

    simulated = _simulated(plan) if simulate else None
    given = describe(GIVEN, plan) if plan.estimate is not None else None
    length = None if given is None else run_length(plan, num_steps, given.step_s)
    lines = [one for one in (given, *others) if one is not None] if others else []
    if as_json:
        values: dict[str, Any] = {**plan_to_json(plan), "run": None if length is None else length.to_json()}
        if simulated is not None:
            values["simulated"] = dataclasses.asdict(simulated)
        if problem:
            values["problem"] = problem
        if lines:
            values["what_if"] = [one.to_json() for one in lines]
        click.echo(json.dumps(values))
        return
    print_plan(plan, simulated=simulated, problem=problem)
    if length is not None and given is not None:
        for line in [*_run_lines(length, given.step_s), *_evaluation_lines(evaluation, plan)]:
            echo_wrapped(line, indent=16)
    if lines:
        _print_alternatives(lines)


def _print_misfit(error: Exception, others: Sequence[Alternative], *, as_json: bool) -> None:
    """Print the alternatives to a config that does not fit."""
    if as_json:
        values = {"fits": False, "problem": describe_error(error), "what_if": [one.to_json() for one in others]}
        click.echo(json.dumps(values))
        return
    click.echo(f"error: {describe_error(error)}", err=True)
    _print_alternatives(others)


def _simulated(plan: Plan) -> SimulatedStep | None:
    from megatrain.plan.simulate import measured_rates, simulate_step

    rates = measured_rates(plan)
    if rates is None or plan.estimate is None:
        click.echo("warning: nothing to replay a step with: run megatrain-tier doctor first", err=True)
        return None
    return simulate_step(plan, plan.estimate.tokens_per_step, rates)


def _run_lines(length: RunLength, step_s: float | None) -> list[str]:
    """Return what the whole run comes to."""
    from tiered.units import format_decimal_size, format_duration, format_size

    if length.num_steps is None:
        if step_s is None:
            return ["run             as many steps as the data has: --count-steps reads it"]
        thousand = format_duration(1000 * step_s)
        return [f"run             as many steps as the data has: --count-steps reads it; 1,000 take {thousand}"]
    line = f"run             {length.num_steps:,} steps, {length.num_tokens:,} tokens"
    if length.seconds is not None:
        line += f", {format_duration(length.seconds)} without evaluations and saves"
    lines = [line]
    if length.written_bytes:
        nbytes = length.written_bytes
        share = "" if length.share_of_limit is None else f", {length.share_of_limit:.2%} of max_written"
        lines.append(f"                NVMe writes {format_decimal_size(nbytes)}{share}")
    if length.num_saves:
        saves = f"{length.num_saves} checkpoint{'s' if length.num_saves > 1 else ''}"
        lines.append(f"                {saves}, {format_size(length.saved_bytes)} written to output_dir")
    return lines


def _evaluation_lines(spec: EvaluationSpec, plan: Plan) -> list[str]:
    """Return what is evaluated, and when; of averages, which are more bytes than weights, what a pass moves."""
    from megatrain.tasks.evaluation import plans_of_evaluations, traffic_of_passes
    from tiered.units import format_size

    sets, val_size = [source.name for source in spec.sources], plan.run.data.table.val_size
    if val_size is not None:
        share = f"{val_size:.4g} of the rows, kept from training"
        sets = [share if val_size < 1 else f"{val_size:,.0f} rows kept from training"]
    moments = ["at the start"] if spec.table.eval_on_start else []
    if spec.table.eval_strategy != "no":
        every = "after each epoch" if spec.table.eval_strategy == "epoch" else f"every {spec.table.eval_steps:,} steps"
        moments += [every, "at the end"]
    if not sets or not moments:
        return []
    lines = [f"evaluated       {', '.join(sets)}: {', '.join(moments)}"]
    for weights, each in plans_of_evaluations(spec, plan).items():
        if weights == "average":
            moved = traffic_of_passes(each, 1).items()
            text = "  ".join(f"{link} {format_size(nbytes)}" for link, nbytes in moved if nbytes)
            lines.append(f"                a pass over the average of the weights moves {text or 'nothing'}")
    return lines


def _print_alternatives(lines: Sequence[Alternative]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiered.units import format_duration, format_size

    from .render import PLAIN_WIDTH

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what if", overflow="fold")
    for name in ("step", "tok/s", "bound by", "moved/step", "NVMe writes/step"):
        table.add_column(name, justify="left" if name == "bound by" else "right", no_wrap=True)
    table.add_column("needs at least", overflow="fold")
    for one in lines:
        if not one.fits:
            table.add_row(Text(one.what), "", "", "", "", "", Text(f"cannot run: {one.problem}", style="red"))
            continue
        needs = "  ".join(f"{tier} {format_size(nbytes)}" for tier, nbytes in one.peak_bytes.items())
        beyond = f"  beyond this machine: {', '.join(one.beyond_machine)}" if one.beyond_machine else ""
        table.add_row(
            Text(one.what),
            "-" if one.step_s is None else format_duration(one.step_s),
            "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
            one.bound_by or "-",
            format_size(one.moved_bytes),
            format_size(one.written_bytes),
            Text.assemble(needs, (beyond, "red")),
        )
    console.print(table)
