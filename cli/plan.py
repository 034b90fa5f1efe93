"""``megatrain-tier plan``: show where every byte goes. Trains nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .main import EXIT_DOES_NOT_FIT
from .options import config_options, json_option, load

if TYPE_CHECKING:
    from pathlib import Path


@click.command("plan")
@config_options
@json_option
def command(config: Path, extra_files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> int:
    """Show where every byte goes and what moves per step. Trains nothing."""
    loaded = load(config, extra_files, overrides)

    from megatrain.trainer import Trainer

    from .render import QuietObserver, print_plan

    plan = Trainer(loaded.config, observer=QuietObserver()).plan
    print_plan(plan, as_json=as_json)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT
