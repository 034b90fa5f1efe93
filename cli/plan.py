"""``megatrain-tier plan``: placement of all bytes, traffic of a step, and length of a run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_DONE
from .main import describe as describe_error
from .options import ConfigSource, config_options, json_option
from .terminal import Spinner, echo_wrapped, without_garbage_collection

if TYPE_CHECKING:
    from megatrain.plan.estimate import RunLength
    from megatrain.plan.plan import Plan
    from megatrain.plan.run_spec import RunSpec
    from megatrain.plan.simulate import SimulatedStep
    from megatrain.tasks.evaluation import EvaluationSpec


def _list_machines(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value != "list" or ctx.resilient_parsing:
        return value
    from megatrain.machine.files import machine_names, read_machine

    for name in machine_names():
        echo_wrapped(f"{name:<20}{read_machine(name)[1].title}", indent=20)
    ctx.exit()


@click.command("plan")
@config_options
@json_option
@click.option(
    "--measure",
    is_flag=True,
    help="First measure this machine, as `doctor --quick` does. For a run on a CPU, also time steps of this model and "
    "batch with random weights. The predicted seconds are then an estimate instead of a bound.",
)
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE",
    is_eager=True,
    callback=_list_machines,
    help="Plan for another machine: a name, or a file from `doctor --save-profile`. Sizes that CONFIG does not set are "
    "the sizes of that machine. Times are predicted from published and estimated rates, so no measurement and no GPU "
    "are needed. `--machine list` lists the names.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Plan for one of N processes on a host, each with a separate GPU. Starts no processes. "
    "Default: distributed.processes of CONFIG.",
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Plan for N hosts like this machine (or --machine), with one process each.",
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Simulate a step at the rates of `doctor`, and show its seconds and stalls.",
)
@click.option(
    "--count-steps", is_flag=True, help="Read the data to count the steps of a run whose length is set in epochs."
)
def command(
    source: ConfigSource,
    as_json: bool,
    measure: bool,
    machine_name: str | None,
    processes: int | None,
    hosts: int,
    simulate: bool,
    count_steps: bool,
) -> int:
    """Show the placement of all bytes and the bytes that move per step.

    Also predicts the time of a step and of the run. Trains nothing. The last line states whether the run fits.
    """
    if measure and machine_name is not None:
        raise click.UsageError("--measure times this machine, and --machine plans for another one: use only one option")
    with Spinner("reading the config", is_shown=not as_json) as spinner:
        loaded = source.load(spinner)
        size = (processes or loaded.config.distributed.processes) * hosts
        if size > 1 and measure:
            raise click.UsageError("--processes and --hosts plan for several processes: use them without --measure")
        spinner.show_activity("importing torch")
        with without_garbage_collection():
            from megatrain.base.observer import RunObserver
            from megatrain.machine.planned_machine import find_machine
            from megatrain.plan.measure import with_timed_steps
            from megatrain.plan.planner import plan_run
            from megatrain.training.open_run import inspect_weights
            from megatrain.training.resolve import resolve, resolve_evaluation
            from megatrain.training.trainer import Trainer

            from .plan_text import print_plan

        run = resolve(loaded.config) if machine_name is None else resolve(loaded.config, find_machine(machine_name))
        if size > 1:
            run = run.as_busiest_rank(size, num_hosts=hosts)
        if measure:
            spinner.stop()  # Keep the lines about measurements visible.
            _measure_machine(run)
        spinner.show_activity("reading the model and planning")
        with without_garbage_collection():
            planned_run = None if machine_name is None and size == 1 else plan_run(run)
            trainer = Trainer(loaded.config, observer=RunObserver(), plan=planned_run)
        plan = with_timed_steps(trainer.plan, _print_progress, _warn) if measure else trainer.plan
        passthrough, error = inspect_weights(plan)
        num_steps = None
        if count_steps and error is None:
            spinner.show_activity("reading the data")
            num_steps = trainer.make_loader().num_steps(plan.run.num_epochs, plan.run.max_steps)
    if plan.traced.flash_note:
        echo_wrapped(plan.traced.flash_note, err=True)
    if plan.traced.packing_warning:
        echo_wrapped(f"warning: {plan.traced.packing_warning}", err=True)
    evaluation = resolve_evaluation(loaded.config)
    problem = "" if error is None else describe_error(error)
    lines, values = _describe_run(plan, evaluation, num_steps, simulate=simulate)
    print_plan(plan, as_json=as_json, problem=problem, passthrough=passthrough, run_lines=lines, run_values=values)
    return EXIT_CONFIG if problem else EXIT_DONE


def _measure_machine(run: RunSpec) -> None:
    """Measure the machine and the drives of a run, and store the rates for this plan and later plans."""
    from megatrain.extras.doctor.drives import interrupt_on_termination
    from megatrain.extras.doctor.examine import examine
    from megatrain.machine.file_systems import existing_parent
    from megatrain.machine.profiles import profile_path, store_profile

    paths = list(dict.fromkeys(existing_parent(drive.path) for drive in run.tiers.table.nvme))
    with interrupt_on_termination():
        results = examine(paths, quick=True, on_progress=_print_progress)
    try:
        store_profile(results.profile)
    except OSError as error:
        _warn(f"the measured rates cannot be stored and are not used: {profile_path()}: {error.strerror}")


def _print_progress(name: str) -> None:
    echo_wrapped(f"measuring {name} ...", err=True)


def _warn(text: str) -> None:
    echo_wrapped(f"warning: {text}", err=True)


def _describe_run(
    plan: Plan, evaluation: EvaluationSpec, num_steps: int | None, *, simulate: bool
) -> tuple[list[str], dict[str, Any]]:
    """Return lines and JSON values about the whole run."""
    from megatrain.plan.estimate import run_length
    from megatrain.plan.simulate import step_seconds

    simulation = _simulate_step(plan) if simulate else None
    step_s = step_seconds(plan)
    length = run_length(plan, num_steps, step_s)
    lines = [] if simulation is None else [simulation.line]
    lines += [*_run_lines(plan, length, step_s), *_evaluation_lines(evaluation, plan)]
    values: dict[str, Any] = {"run": dataclasses.asdict(length)}
    if simulation is not None:
        values["simulated"] = dataclasses.asdict(simulation)
    return lines, values


def _simulate_step(plan: Plan) -> SimulatedStep | None:
    from megatrain.plan.simulate import replay

    simulation = replay(plan)
    if simulation is None:
        _warn("there are no rates for the simulation: run megatrain-tier doctor first")
    return simulation


def _run_lines(plan: Plan, length: RunLength, step_s: float | None) -> list[str]:
    """Return lines with totals for the run, except written bytes that the lines about a step already show."""
    from tiered.units import format_decimal_size, format_duration, format_size

    if length.num_steps is None:
        if step_s is None:
            return ["run             one step per batch of the data: --count-steps counts them"]
        duration = format_duration(1000 * step_s)
        return [f"run             one step per batch of the data: --count-steps counts them; 1,000 take {duration}"]
    line = f"run             {length.num_steps:,} steps, {length.num_tokens:,} tokens"
    if length.seconds is not None:
        line += f", {format_duration(length.seconds)} without evaluations and saves"
    lines = [line]
    share = "" if length.share_of_limit is None else f", {length.share_of_limit:.2%} of max_written"
    if length.written_bytes and (share or plan.estimate.run_written_bytes is None):
        lines.append(f"                NVMe writes {format_decimal_size(length.written_bytes)}{share}")
    if length.num_saves:
        saves = f"{length.num_saves} checkpoint{'s' if length.num_saves > 1 else ''}"
        lines.append(f"                {saves}, {format_size(length.saved_bytes)} written to output_dir")
    return lines


def _evaluation_lines(spec: EvaluationSpec, plan: Plan) -> list[str]:
    """Return lines about evaluations: sets, frequency, and the bytes that an evaluation of averaged weights moves."""
    from megatrain.tasks.evaluation import count_pass_traffic, plan_evaluations
    from tiered.units import format_size

    sets, val_size = [source.name for source in spec.sources], plan.run.data.table.val_size
    if val_size is not None:
        share = f"{val_size:.4g} of the rows, held out from training"
        sets = [share if val_size < 1 else f"{val_size:,.0f} rows held out from training"]
    times = ["at the start"] if spec.table.eval_on_start else []
    if spec.table.eval_strategy != "no":
        cycle = "after each epoch" if spec.table.eval_strategy == "epoch" else f"every {spec.table.eval_steps:,} steps"
        times += [cycle, "at the end"]
    if not sets or not times:
        return []
    lines = [f"evaluated       {', '.join(sets)}: {', '.join(times)}"]
    for weights, pass_plan in plan_evaluations(spec, plan).items():
        if weights == "average":
            traffic = count_pass_traffic(pass_plan, 1).items()
            text = "  ".join(f"{link} {format_size(nbytes)}" for link, nbytes in traffic if nbytes)
            lines.append(f"                a pass over the average of the weights moves {text or 'nothing'}")
    return lines
