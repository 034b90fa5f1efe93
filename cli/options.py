"""Arguments and options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig

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


@contextmanager
def announced(text: str, *, as_json: bool) -> Iterator[None]:
    """Show what is being done on a terminal, for as long as the context is open."""
    is_shown = sys.stderr.isatty() and not as_json
    if is_shown:
        click.echo(f"{text} ...", nl=False, err=True)
    try:
        yield
    finally:
        if is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def load(config: Path, extra_files: Sequence[Path], overrides: Sequence[str]) -> LoadedConfig:
    """Read the config of a command and print its warnings on stderr."""
    from megatrain.config import load_config

    loaded = load_config(config, extra_files, overrides)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    return loaded
