"""A run in one process, from the config to the exit code. This module imports torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from megatrain.base.observer import Observers, RunInfo, RunObserver, RunSummary
from megatrain.base.progress import Activity
from megatrain.config import LoadedConfig
from megatrain.plan.limits import refuse
from megatrain.plan.plan import Plan
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.tiers import check_drives, check_folders
from megatrain.ranks.group import RankGroup
from megatrain.run.folder import LOG_NAME
from megatrain.training.open_run import inspect_weights
from megatrain.training.run_check import plan_one_rank, refuse_early
from megatrain.training.trainer import Trainer, plan_for_rank
from tiered.errors import UnusableDirectoryError

from .main import (
    EXIT_CONFIG,
    EXIT_DOES_NOT_FIT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED_AND_SAVED,
    RunFailedError,
    describe,
    exit_code_of,
)
from .observers import ConsoleObserver, PlanObserver, fetch_weights, make_observer
from .options import RunOptions, locate_missing_paths
from .plan_text import print_plan
from .run_state import describe_interrupted
from .terminal import RunOutput, Spinner, echo_wrapped, without_garbage_collection


@dataclass(frozen=True)
class Session:
    """A run in this process, and where its output goes.

    Attributes:
        group: All processes of the run.
        output: Output that continues in a log file if the terminal closes.
    """

    options: RunOptions
    loaded: LoadedConfig
    group: RankGroup
    output: RunOutput
    spinner: Spinner

    @property
    def as_json(self) -> bool:
        """Whether the options or the config request JSON."""
        return self.options.as_json or self.loaded.config.logging.progress == "json"

    @property
    def is_printing(self) -> bool:
        """Whether this process prints. Only the first of several processes does."""
        return self.group.world.is_first

    @property
    def is_printing_text(self) -> bool:
        """Whether this process prints text instead of JSON."""
        return self.is_printing and not self.as_json


class LogFileObserver(RunObserver):
    """Observer that sets the log file at the start of training, because the run owns ``output_dir`` from then on."""

    def __init__(self, output: RunOutput, group: RankGroup) -> None:
        self._output, self._group = output, group

    def on_start(self, info: RunInfo) -> None:
        log = info.output_dir / LOG_NAME
        self._output.set_log_file(log)
        self._group.send_to_launcher(log=str(log))


def run(session: Session) -> int:
    """Plan and train, or print the plan of a dry run. Return the exit code.

    Raises:
        RunFailedError: A signal ended the run.
        Exception: The config, the data or the machine is unsuitable. ``EXPECTED_ERRORS`` lists the types.
    """
    with without_garbage_collection():
        plan = _make_plan(session)
    session.spinner.stop()
    note = _schedule_note(session, plan)
    if session.options.dry_run:
        code = _print_dry_run(plan, as_json=session.as_json)
        echo_wrapped(note, err=True)
        return code
    if session.is_printing and session.as_json:
        print_plan(plan, as_json=True)
    refuse(plan.objections)
    is_shown = session.is_printing_text
    session.group.run_host_leaders_first(lambda: fetch_weights(plan, show_files=is_shown, show_bar=is_shown))
    return _train(session, plan, note)


def _make_plan(session: Session) -> Plan:
    """Plan the run, after checks that need no plan."""
    config, group = session.loaded.config, session.group
    if session.is_printing:
        with locate_missing_paths(session.loaded):
            refuse_early(config, allow_config_change=session.options.allow_config_change)
    group.join(config.device, config.distributed)
    session.spinner.show_activity("reading the model and planning")
    with locate_missing_paths(session.loaded):
        return plan_one_rank(config) if group.world.is_single else plan_for_rank(config, group)


def _schedule_note(session: Session, plan: Plan) -> str:
    """Return a note if the learning rates depend on --max-steps, so that a longer run differs, otherwise ""."""
    max_steps, optimizer = session.loaded.config.training.max_steps, plan.run.optimizer
    if f"training.max_steps={max_steps}" not in session.options.source.overrides or not optimizer.depends_on_length:
        return ""
    return (
        f"note: the learning rate completes its whole schedule ({optimizer.lr_scheduler_type}) in these {max_steps} "
        "steps, so they differ from the first steps of a longer run"
    )


def _print_dry_run(plan: Plan, *, as_json: bool) -> int:
    """Print a plan, and return the exit code of the error that a run would raise before its first step."""
    _, error = inspect_weights(plan)
    try:
        check_folders(plan.run.checkpoint)
        check_drives(plan)
    except (DoesNotFitError, UnusableDirectoryError) as drive_error:
        error = error or drive_error
    print_plan(plan, as_json=as_json, problem="" if error is None else describe(error))
    if any(objection.kind == "place" for objection in plan.objections):
        return EXIT_CONFIG
    if error is not None:
        return exit_code_of(error) or EXIT_FAILED
    is_too_large = any(objection.kind == "size" for objection in plan.objections)
    return EXIT_DOES_NOT_FIT if is_too_large else EXIT_DONE


def _train(session: Session, plan: Plan, note: str) -> int:
    config, group, activity = session.loaded.config, session.group, Activity()
    console = make_observer(
        config.logging.progress if session.is_printing_text else "json" if session.is_printing else "none",
        logging_steps=config.logging.logging_steps,
        activity=activity,
        is_lost=lambda: session.output.is_lost,
    )
    trainer = Trainer(
        config,
        plan=plan,
        observer=Observers(_observers(session, plan, console, note)),
        activity=activity,
        allow_config_change=session.options.allow_config_change,
        exit_code_of=_exit_code_of,
        group=group,
    )
    try:
        with console:
            summary = trainer.train()
    except KeyboardInterrupt as error:
        raise RunFailedError(describe_interrupted(config.output_dir), _exit_code_of(error)) from None
    if summary.interrupted:
        saved = f" at step {summary.saved_step}, saved: run the same command again to continue"
        text = "; nothing saved" if summary.saved_step is None else saved
        raise RunFailedError(f"interrupted{text}", _exit_code_of(summary))
    return EXIT_DONE


def _observers(session: Session, plan: Plan, console: ConsoleObserver, note: str) -> list[RunObserver]:
    """Return the observers of this process, in the order in which they are called."""
    if not session.is_printing:
        return []
    observers: list[RunObserver] = [LogFileObserver(session.output, session.group)]
    if session.is_printing_text:
        observers.append(PlanObserver(console, plan, shlex.quote(str(session.loaded.source)), note))
    return [*observers, console]


def _exit_code_of(outcome: BaseException | RunSummary) -> int:
    """Return the exit code for the summary or exception with which a run ended."""
    if isinstance(outcome, BaseException):
        return exit_code_of(outcome) or EXIT_FAILED
    if not outcome.interrupted:
        return EXIT_DONE
    return EXIT_FAILED if outcome.saved_step is None else EXIT_INTERRUPTED_AND_SAVED
