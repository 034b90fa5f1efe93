"""``megatrain-tier run``: train."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from .main import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED, RunFailedError
from .options import announced, config_options, json_option, load

if TYPE_CHECKING:
    from pathlib import Path


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
@json_option
def command(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    max_steps: int | None,
    resume: str | None,
    allow_config_change: bool,
    as_json: bool,
) -> int:
    """Train, and write a Hugging Face folder at the end.

    Where output_dir holds checkpoints, continues the newest. Ctrl-C or SIGTERM ends the run after its step, saved, with
    exit code 75: the same command continues it.
    """
    if max_steps is not None:
        overrides = (*overrides, f"training.max_steps={max_steps}")
    if resume is not None:
        overrides = (*overrides, f"checkpoint.resume_from_checkpoint={json.dumps(resume)}")
    loaded = load(config, extra_files, overrides)

    logging = loaded.config.logging
    as_json = as_json or logging.progress == "json"
    with announced("planning", as_json=as_json):
        from megatrain.plan.limits import refuse
        from megatrain.trainer import Trainer

        from .render import make_observer, print_plan

        observer = make_observer("json" if as_json else logging.progress, logging_steps=logging.logging_steps)
        trainer = Trainer(loaded.config, observer=observer, allow_config_change=allow_config_change)
    plan = trainer.plan
    print_plan(plan, as_json=as_json)
    if not plan.fits:
        return EXIT_DOES_NOT_FIT
    refuse(plan.objections)
    if dry_run:
        return 0
    try:
        summary = trainer.train()
    except KeyboardInterrupt:
        raise RunFailedError(_say_interrupted(loaded.config.output_dir), EXIT_FAILED) from None
    finally:
        observer.close()
    if summary.interrupted and summary.saved_step is not None:
        raise RunFailedError(
            f"interrupted at step {summary.saved_step}, saved: run the same command again to continue",
            EXIT_INTERRUPTED_AND_SAVED,
        )
    if summary.interrupted:
        raise RunFailedError("interrupted; nothing saved", EXIT_FAILED)
    return 0


def _say_interrupted(output_dir: Path) -> str:
    """Return what is left of a run that was ended at once."""
    from megatrain.run_folder import committed_step

    saved = committed_step(output_dir)
    if saved is None:
        return "interrupted; nothing saved"
    return f"interrupted; saved before, at step {saved}: run the same command again to continue from there"
