"""``megatrain-tier run``: train in one process or in several processes (ranks)."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .main import (
    DEBUG_VARIABLE,
    EXIT_CONFIG,
    EXIT_DOES_NOT_FIT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED_AND_SAVED,
    RunFailedError,
    describe,
    exit_code_of,
)
from .options import config_options, json_option, load, placed
from .terminal import RunOutput, Spinner, without_collector

if TYPE_CHECKING:
    from megatrain.base.observer import RunInfo, RunSummary
    from megatrain.config import LoadedConfig
    from megatrain.models.hub import FetchedFile
    from megatrain.plan.plan import Plan
    from megatrain.ranks.group import RankGroup
    from megatrain.ranks.watch import Failure


@click.command("run")
@config_options
@click.option("--dry-run", is_flag=True, help="Check the config and print the plan, then stop.")
@click.option(
    "--max-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Short for --set training.max_steps=N. The learning rate completes its whole schedule in these N steps.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Short for --set distributed.processes=N: number of processes on this machine, one for each GPU. Omit it with "
    "torchrun or srun, which start the processes themselves.",
)
@click.option(
    "--resume",
    metavar="auto|no|PATH",
    help="auto (default): continue from the checkpoints in output_dir. no: fail if there are any. PATH: start from the "
    "checkpoints of another run. Short for --set checkpoint.resume_from_checkpoint=...",
)
@click.option(
    "--allow-config-change",
    is_flag=True,
    help="Continue a checkpoint even if a change of the config or the data alters the results.",
)
@json_option
def command(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    max_steps: int | None,
    processes: int | None,
    resume: str | None,
    allow_config_change: bool,
    as_json: bool,
) -> int:
    """Train, and write a Hugging Face folder at the end.

    Continues from the newest checkpoint in output_dir. Ctrl-C, SIGTERM or a closed terminal (SIGHUP) makes the run save
    after the current step and end with exit code 75; the same command continues. If the terminal closes or the pipe
    breaks, output continues in output_dir/run.log.
    """
    if max_steps is not None:
        overrides = (*overrides, f"training.max_steps={max_steps}")
    if processes is not None:
        overrides = (*overrides, f"distributed.processes={processes}")
    if resume is not None:
        overrides = (*overrides, f"checkpoint.resume_from_checkpoint={json.dumps(resume)}")
    words = [str(config), *(word for file in extra_files for word in ("-c", str(file)))]
    words += [word for override in overrides for word in ("--set", override)]
    words += ["--allow-config-change"] * allow_config_change + ["--json"] * as_json
    # Import here, because --help must not import megatrain.
    from megatrain.ranks.group import RankGroup

    group = RankGroup.of_environment()
    run = partial(_run, dry_run=dry_run, allow_config_change=allow_config_change, as_json=as_json)
    if not group.world.is_single:
        _run_as_rank(group, config, extra_files, overrides, run, as_json=as_json)
    with RunOutput() as output:
        with Spinner("reading the config", is_shown=not as_json) as spinner:
            loaded = load(config, extra_files, overrides, spinner)
            if loaded.config.distributed.processes == 1 or dry_run:
                return run(loaded, overrides, output, group, spinner)
        return _launch(loaded, words, output)


def _run(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    output: RunOutput,
    group: RankGroup,
    spinner: Spinner,
    *,
    dry_run: bool,
    allow_config_change: bool,
    as_json: bool,
) -> int:
    logging, is_first = loaded.config.logging, group.world.is_first
    as_json = as_json or logging.progress == "json"
    if as_json:
        spinner.stop()
    spinner.say("importing torch")
    with without_collector():
        from megatrain.base.observer import Observers, RunObserver
        from megatrain.base.progress import Activity
        from megatrain.models.hub import fetch_weights
        from megatrain.plan.limits import refuse
        from megatrain.run.folder import LOG_NAME
        from megatrain.training.prepare import refuse_early
        from megatrain.training.trainer import Trainer

        from .render import PlanObserver, make_observer, print_plan

        activity = Activity()
        console = make_observer(
            "none" if not is_first else "json" if as_json else logging.progress,
            logging_steps=logging.logging_steps,
            activity=activity,
            is_lost=lambda: output.is_lost,
        )

        shown = PlanObserver(console)

        class Starting(RunObserver):
            """Sets the log file when training starts, because the run owns output_dir from then on."""

            def on_start(self, info: RunInfo) -> None:
                log = info.output_dir / LOG_NAME
                output.goes_to(log)
                group.send_to_launcher(log=str(log))

        if is_first:
            with placed(loaded):
                refuse_early(loaded.config, allow_config_change=allow_config_change)
        if not group.world.is_single:
            group.join(loaded.config.device, loaded.config.distributed)
        spinner.say("reading the model and planning")
        with placed(loaded):
            trainer = Trainer(
                loaded.config,
                plan=_plan_of_one(loaded) if dry_run and group.world.is_single else None,
                observer=Observers([Starting(), shown, console]) if is_first else RunObserver(),
                activity=activity,
                allow_config_change=allow_config_change,
                exit_code_of=_exit_code_of,
                group=group,
            )
    spinner.stop()
    plan = trainer.plan
    max_steps = loaded.config.training.max_steps
    is_short = f"training.max_steps={max_steps}" in overrides and trainer.run.optimizer.depends_on_length
    note = _describe_schedule(trainer.run.optimizer.lr_scheduler_type, max_steps) if is_short else ""
    if dry_run:
        code = _print_dry_run(plan, as_json=as_json)
        click.echo(note, err=True, nl=bool(note))
        return code
    if is_first and (as_json or not plan.fits):
        print_plan(plan, as_json=as_json)
    if not plan.fits:
        return EXIT_DOES_NOT_FIT
    refuse(plan.objections)
    if not as_json:
        shown.will_show(plan, shlex.quote(str(loaded.source)), note)
    model = trainer.run.model
    if model.hub is not None and not model.table.train_from_scratch:
        hub = model.hub
        shows = is_first and not as_json
        group.one_after_the_other(lambda: fetch_weights(hub, _print_fetched if shows else None, shows_bar=shows))
    try:
        with console:
            summary = trainer.train()
    except KeyboardInterrupt as error:
        raise RunFailedError(_describe_interrupted(loaded.config.output_dir), _exit_code_of(error)) from None
    code = _exit_code_of(summary)
    if code == EXIT_INTERRUPTED_AND_SAVED:
        raise RunFailedError(
            f"interrupted at step {summary.saved_step}, saved: run the same command again to continue", code
        )
    if code:
        raise RunFailedError("interrupted; nothing saved", code)
    return code


def _print_dry_run(plan: Plan, *, as_json: bool) -> int:
    """Print a plan, and return the exit code of the error that a run would raise before its first step."""
    from megatrain.plan.shortfall import DoesNotFitError
    from megatrain.plan.tiers import check_drives, check_folders
    from megatrain.training.open_run import inspect_weights
    from tiered.errors import UnusableDirectoryError

    from .render import print_plan

    _, error = inspect_weights(plan)
    try:
        check_folders(plan.run.checkpoint)
        check_drives(plan)
    except (DoesNotFitError, UnusableDirectoryError) as found:
        error = error or found
    print_plan(plan, as_json=as_json, problem="" if error is None else describe(error))
    if any(each.kind == "place" for each in plan.objections):
        return EXIT_CONFIG
    if error is not None and plan.fits:
        return exit_code_of(error) or EXIT_FAILED
    is_too_large = not plan.fits or any(each.kind == "size" for each in plan.objections)
    return EXIT_DOES_NOT_FIT if is_too_large else EXIT_DONE


def _plan_of_one(loaded: LoadedConfig) -> Plan | None:
    """Return the plan of one of several processes without starting them, or None if the config has one process."""
    if loaded.config.distributed.processes == 1:
        return None
    from megatrain.training.prepare import plan_one_rank

    return plan_one_rank(loaded.config)


def _print_fetched(file: FetchedFile) -> None:
    click.echo(str(file), err=True)


def _exit_code_of(ending: BaseException | RunSummary) -> int:
    """Return the exit code of a run that ended."""
    if isinstance(ending, BaseException):
        return exit_code_of(ending) or EXIT_FAILED
    if not ending.interrupted:
        return EXIT_DONE
    return EXIT_FAILED if ending.saved_step is None else EXIT_INTERRUPTED_AND_SAVED


def _describe_interrupted(output_dir: Path) -> str:
    """Describe the last checkpoint of a run that was interrupted without saving."""
    from megatrain.run.folder import committed_step

    saved = committed_step(output_dir)
    if saved is None:
        return "interrupted; nothing saved"
    return f"interrupted; last saved at step {saved}: run the same command again to continue from there"


def _describe_schedule(name: str, max_steps: int) -> str:
    """Return a note that with --max-steps the learning rate differs from the first N steps of the whole run."""
    return (
        f"note: the learning rate completes its whole schedule ({name}) in these {max_steps} steps, so they differ "
        "from the first steps of a longer run"
    )


# -- several processes -----------------------------------------------------------------------------------------------


def _launch(loaded: LoadedConfig, words: Sequence[str], output: RunOutput) -> int:
    """Run in several processes on this machine, and return the exit code of the run."""
    from megatrain.ranks.launch import launch

    assert __package__ is not None
    table = loaded.config.distributed
    failures: list[Failure] = []

    def take(message: Mapping[str, Any]) -> None:
        if "log" in message:
            output.goes_to(Path(message["log"]))

    code = launch(
        [sys.executable, "-m", __package__, "run", *words],
        table.processes,
        threads=None if table.threads == "auto" else table.threads,
        on_failure=failures.append,
        on_message=take,
    )
    for failure in failures:
        interrupted = failure.rank < 0 and failure.message == "interrupted"
        text = _describe_interrupted(loaded.config.output_dir) if interrupted else str(failure)
        raise RunFailedError(text, code)
    return code


def _run_as_rank(
    group: RankGroup,
    config: Path,
    extra_files: Sequence[Path],
    overrides: Sequence[str],
    run: Callable[[LoadedConfig, Sequence[str], RunOutput, RankGroup, Spinner], int],
    *,
    as_json: bool,
) -> NoReturn:
    """Run as one of several processes, which all end together."""
    try:
        with (
            RunOutput() as output,
            Spinner("reading the config", is_shown=group.world.is_first and not as_json) as spinner,
        ):
            spinner.say("waiting for the other processes")
            group.meet()
            if group.world.is_first:
                loaded = load(config, extra_files, overrides, spinner)
            else:
                from megatrain.config import load_config

                loaded = load_config(config, extra_files, overrides)
            code = run(loaded, overrides, output, group, spinner)
    except BaseException as error:
        code = exit_code_of(error) or EXIT_FAILED
        if code != EXIT_INTERRUPTED_AND_SAVED:
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            is_known = exit_code_of(error) is not None
            text = "interrupted; nothing saved" if isinstance(error, KeyboardInterrupt) else describe(error)
            group.fail(text, code, is_own=is_known or not isinstance(error, RuntimeError))
        if group.world.is_first:
            click.echo(describe(error), err=True)
    group.end(code)
