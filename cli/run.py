"""``megatrain-tier run``: train in one process or in several processes (ranks)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .main import DEBUG_VARIABLE, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED, RunFailedError, describe, exit_code_of
from .options import ConfigSource, RunOptions, config_options, json_option
from .terminal import RunOutput, Spinner, echo_wrapped, without_garbage_collection

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig
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
    source: ConfigSource,
    max_steps: int | None,
    processes: int | None,
    resume: str | None,
    **flags: bool,
) -> int:
    """Train, and write a Hugging Face folder at the end.

    Continues from the newest checkpoint in output_dir. After Ctrl-C, SIGTERM or a closed terminal (SIGHUP), the run
    finishes its current step, saves, and ends with exit code 75; the same command continues it. If the terminal closes
    or the pipe breaks, output continues in output_dir/run.log.
    """
    shortcuts = {
        "training.max_steps": max_steps,
        "distributed.processes": processes,
        "checkpoint.resume_from_checkpoint": None if resume is None else json.dumps(resume),
    }
    overrides = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    options = RunOptions(replace(source, overrides=(*source.overrides, *overrides)), **flags)
    # Import here, because --help must not import megatrain.
    from megatrain.ranks.group import RankGroup

    group = RankGroup.from_environment()
    if not group.world.is_single:
        _run_as_rank(options, group)
    with RunOutput() as output:
        with Spinner("reading the config", is_shown=not options.as_json) as spinner:
            loaded = options.source.load(spinner)
            if loaded.config.distributed.processes == 1 or options.dry_run:
                return _run(options, loaded, group, output, spinner)
        return _launch(options, loaded, output)


def _run(options: RunOptions, loaded: LoadedConfig, group: RankGroup, output: RunOutput, spinner: Spinner) -> int:
    """Run in this process, and return the exit code."""
    if options.as_json or loaded.config.logging.progress == "json":
        spinner.stop()
    spinner.show_activity("importing torch")
    with without_garbage_collection():
        from .session import Session, run
    return run(Session(options, loaded, group, output, spinner))


# -- several processes -----------------------------------------------------------------------------------------------


def _launch(options: RunOptions, loaded: LoadedConfig, output: RunOutput) -> int:
    """Run in several processes on this machine, and return the exit code of the run."""
    from megatrain.ranks.launch import launch

    from .run_state import describe_interrupted

    assert __package__ is not None
    table = loaded.config.distributed
    failures: list[Failure] = []

    def handle_message(message: Mapping[str, Any]) -> None:
        if "log" in message:
            output.set_log_file(Path(message["log"]))

    code = launch(
        [sys.executable, "-m", __package__, "run", *options.arguments],
        table.processes,
        threads=None if table.threads == "auto" else table.threads,
        on_failure=failures.append,
        on_message=handle_message,
    )
    for failure in failures:
        is_interrupted = failure.rank < 0 and failure.message == "interrupted"
        text = describe_interrupted(loaded.config.output_dir) if is_interrupted else str(failure)
        raise RunFailedError(text, code)
    return code


def _run_as_rank(options: RunOptions, group: RankGroup) -> NoReturn:
    """Run as one of several processes. If one ends, all end."""
    is_first = group.world.is_first
    try:
        with RunOutput() as output, Spinner("reading the config", is_shown=is_first and not options.as_json) as spinner:
            spinner.show_activity("waiting for the other processes")
            group.rendezvous()
            loaded = options.source.load(spinner) if is_first else options.source.read()
            code = _run(options, loaded, group, output, spinner)
    except BaseException as error:
        code = exit_code_of(error) or EXIT_FAILED
        if code != EXIT_INTERRUPTED_AND_SAVED:
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            is_known = exit_code_of(error) is not None
            text = "interrupted; nothing saved" if isinstance(error, KeyboardInterrupt) else describe(error)
            group.fail(text, code, is_own=is_known or not isinstance(error, RuntimeError))
        if is_first:
            echo_wrapped(describe(error), err=True)
    group.end(code)
