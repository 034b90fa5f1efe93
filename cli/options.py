"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig

    from .terminal import Spinner

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add CONFIG, ``-c`` and ``--set``."""
    for decorate in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one key; a unique last name is enough: --set learning_rate=2e-5. May be repeated.",
        ),
        click.option(
            "-c",
            "--config",
            "extra_files",
            multiple=True,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Another TOML file laid over CONFIG. May be repeated.",
        ),
        click.argument("config", type=click.Path(path_type=Path)),
    ):
        function = decorate(function)
    return function


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def load(
    config: Path, extra_files: Sequence[Path], overrides: Sequence[str], spinner: Spinner | None = None
) -> LoadedConfig:
    """Read the config of a command; print its warnings on stderr, above the spinner if there is one."""
    from megatrain.config import load_config

    loaded = load_config(config, extra_files, overrides)
    with nullcontext() if spinner is None else spinner.hidden():
        for warning in loaded.warnings:
            click.echo(f"warning: {warning}", err=True)
    return loaded
