"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_FAILED, RunFailedError, exit_code_of

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig

    from .terminal import Spinner

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def records_of(run: Path) -> Iterator[None]:
    """Convert errors of a damaged record of a run, which a user may have edited, to an error with the run's folder."""
    try:
        yield
    except Exception as error:  # A malformed record can cause any exception.
        if exit_code_of(error) is not None or isinstance(error, click.ClickException | click.Abort):
            raise
        names = "status.json, plan.json, summary.json or metrics.jsonl"
        raise RunFailedError(
            f"{run}: one of {names} is damaged ({type(error).__name__}: {error}). Restore or remove it",
            EXIT_FAILED,
        ) from error


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add CONFIG, ``-c`` and ``--set`` to a command."""
    for decorate in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one key. A unique last name is enough: --set learning_rate=2e-5. May be repeated.",
        ),
        click.option(
            "-c",
            "--config",
            "extra_files",
            multiple=True,
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Another TOML file, whose keys override the keys of CONFIG. May be repeated.",
        ),
        click.argument("config", type=click.Path(path_type=Path)),
    ):
        function = decorate(function)
    return function


@contextmanager
def placed(loaded: LoadedConfig) -> Iterator[None]:
    """Prefix the error of a missing path with the config line that names the path."""
    try:
        yield
    except Exception as error:
        table = loaded.config.model
        paths = {"model.model_name_or_path": table.model_name_or_path}
        paths |= {f"data.train.{number}.path": each.path for number, each in enumerate(loaded.config.data.train)}
        paths |= {f"data.eval.{number}.path": each.path for number, each in enumerate(loaded.config.data.eval)}
        text, code = str(error), exit_code_of(error)
        key = next((key for key, path in paths.items() if text.startswith(f"{path}:")), None)
        origin = None if key is None else loaded.origins.get(key)
        if code is None or origin is None:
            raise
        raise RunFailedError(f"{origin}, {key}: {text}", code) from error


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def load(
    config: Path, extra_files: Sequence[Path], overrides: Sequence[str], spinner: Spinner | None = None
) -> LoadedConfig:
    """Load the config of a command, and print its warnings on stderr, above the spinner if there is one."""
    from megatrain.config import load_config

    loaded = load_config(config, extra_files, overrides)
    with nullcontext() if spinner is None else spinner.hidden():
        for warning in loaded.warnings:
            click.echo(f"warning: {warning}", err=True)
    return loaded
