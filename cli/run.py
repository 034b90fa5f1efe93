"""``megatrain-tier run``: train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .main import EXIT_DOES_NOT_FIT, EXIT_FAILED, RunFailedError
from .options import config_options, json_option, load

if TYPE_CHECKING:
    from pathlib import Path


@click.command("run")
@config_options
@click.option("--dry-run", is_flag=True, help="Check the config and print the plan, then stop.")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Short for --set training.max_steps=N.")
@json_option
def command(
    config: Path,
    extra_files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    max_steps: int | None,
    as_json: bool,
) -> int:
    """Train, and write a Hugging Face folder at the end."""
    if max_steps is not None:
        overrides = (*overrides, f"training.max_steps={max_steps}")
    loaded = load(config, extra_files, overrides)

    from megatrain.trainer import Trainer

    from .render import make_observer, print_plan

    logging = loaded.config.logging
    as_json = as_json or logging.progress == "json"
    observer = make_observer("json" if as_json else logging.progress, logging_steps=logging.logging_steps)
    trainer = Trainer(loaded.config, observer=observer)
    plan = trainer.plan
    print_plan(plan, as_json=as_json)
    if not plan.fits:
        return EXIT_DOES_NOT_FIT
    if dry_run:
        return 0
    try:
        summary = trainer.train()
    finally:
        observer.close()
    if summary.interrupted:
        raise RunFailedError("interrupted; nothing saved", EXIT_FAILED)
    return 0
