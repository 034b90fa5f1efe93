"""``megatrain-tier run``: train."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from .detach import run_detached, tell_started
from .main import (
    EXIT_DOES_NOT_FIT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED_AND_SAVED,
    RunFailedError,
    exit_code_of,
)
from .options import config_options, json_option, load
from .output import RunOutput
from .spinner import Spinner, without_collector

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.metrics import RunInfo, RunSummary


@click.command("run")
@config_options
@click.option("--dry-run", is_flag=True, help="Check the config and print the plan, then stop.")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Short for --set training.max_steps=N.")
@click.option(
    "--resume",
    metavar="auto|no|PATH",
    help="Continue the checkpoints in output_dir (auto, the default), refuse to (no), or start from those of another "
    "run's folder (PATH). Short for --set checkpoint.resume_from_checkpoint=...",
)
@click.option(
    "--allow-config-change",
    is_flag=True,
    help="Continue a checkpoint although the config or the data now gives other results.",
)
@click.option(
    "--detach",
    is_flag=True,
    help="Let the run go on without this terminal, in a session of its own. Returns once it has begun to train, or has "
    "failed to, with its exit code then; its output goes into output_dir/run.log.",
)
@json_option
def command(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    max_steps: int | None,
    resume: str | None,
    allow_config_change: bool,
    detach: bool,
    as_json: bool,
) -> int:
    """Train, and write a Hugging Face folder at the end.

    Where output_dir holds checkpoints, continues the newest. Ctrl-C, SIGTERM or a closed terminal (SIGHUP) ends the run
    after its step, saved, with exit code 75: the same command continues it. Without its terminal, what it says goes on
    in output_dir/run.log.
    """
    if max_steps is not None:
        overrides = (*overrides, f"training.max_steps={max_steps}")
    if resume is not None:
        overrides = (*overrides, f"checkpoint.resume_from_checkpoint={json.dumps(resume)}")
    if detach:
        if dry_run:
            raise click.UsageError("--detach and --dry-run exclude each other: a dry run ends by itself")
        words = [str(config), *(word for file in extra_files for word in ("-c", str(file)))]
        words += [word for override in overrides for word in ("--set", override)]
        words += ["--allow-config-change"] * allow_config_change + ["--json"] * as_json
        return run_detached(words, as_json=as_json)
    with RunOutput() as output:
        return _run(config, extra_files, overrides, dry_run, allow_config_change, as_json, output)


def _run(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    allow_config_change: bool,
    as_json: bool,
    output: RunOutput,
) -> int:
    with Spinner("reading the config", is_shown=not as_json) as spinner:
        loaded = load(config, extra_files, overrides, spinner)
        logging = loaded.config.logging
        as_json = as_json or logging.progress == "json"
        if as_json:
            spinner.stop()
        spinner.say("importing torch")
        with without_collector():
            from megatrain.metrics import Observers
            from megatrain.plan.limits import refuse
            from megatrain.trainer import Trainer

            from .render import LiveObserver, QuietObserver, make_observer, print_plan

            spinner.say("reading the model and planning")
            observer = make_observer(
                "json" if as_json else logging.progress,
                logging_steps=logging.logging_steps,
                is_lost=lambda: output.is_lost,
            )

            class Starting(QuietObserver):
                """Told first that training starts: output_dir is the run's own from then on."""

                def on_start(self, info: RunInfo) -> None:
                    tell_started(output, info.output_dir)

            trainer = Trainer(
                loaded.config,
                observer=Observers([Starting(), observer]),
                allow_config_change=allow_config_change,
                exit_code_of=_exit_code_of,
            )
    plan = trainer.plan
    print_plan(plan, as_json=as_json)
    if not plan.fits:
        return EXIT_DOES_NOT_FIT
    refuse(plan.objections)
    if dry_run:
        return 0
    try:
        if isinstance(observer, LiveObserver):
            observer.watch(trainer.activity)
        summary = trainer.train()
    except KeyboardInterrupt as error:
        observer.close()
        raise RunFailedError(_say_interrupted(loaded.config.output_dir), _exit_code_of(error)) from None
    finally:
        observer.close()
    code = _exit_code_of(summary)
    if code == EXIT_INTERRUPTED_AND_SAVED:
        raise RunFailedError(
            f"interrupted at step {summary.saved_step}, saved: run the same command again to continue", code
        )
    if code:
        raise RunFailedError("interrupted; nothing saved", code)
    return code


def _exit_code_of(ending: BaseException | RunSummary) -> int:
    """Return what the command ends with after an error, or after a run that came to its end or was stopped."""
    if isinstance(ending, BaseException):
        return exit_code_of(ending) or EXIT_FAILED
    if not ending.interrupted:
        return EXIT_DONE
    return EXIT_FAILED if ending.saved_step is None else EXIT_INTERRUPTED_AND_SAVED


def _say_interrupted(output_dir: Path) -> str:
    """Return what is left of a run that was ended at once."""
    from megatrain.run_folder import committed_step

    saved = committed_step(output_dir)
    if saved is None:
        return "interrupted; nothing saved"
    return f"interrupted; saved before, at step {saved}: run the same command again to continue from there"
