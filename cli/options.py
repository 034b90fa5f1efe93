"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_FAILED, RunFailedError, exit_code_of
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig

    from .terminal import Spinner

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class ConfigSource:
    """The config files and overrides of a command line.

    Attributes:
        path: Main file.
        extra_files: Files whose keys override the keys of the main file, in order.
        overrides: ``KEY=VALUE`` texts, which override the keys of all files.
    """

    path: Path
    extra_files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments that select this config."""
        files = [word for file in self.extra_files for word in ("-c", str(file))]
        return [str(self.path), *files, *(word for override in self.overrides for word in ("--set", override))]

    def read(self) -> LoadedConfig:
        """Read the config. Print nothing."""
        from megatrain.config import load_config

        return load_config(self.path, self.extra_files, self.overrides)

    def load(self, spinner: Spinner | None = None) -> LoadedConfig:
        """Read the config, and print its warnings on stderr, above the spinner if there is one."""
        loaded = self.read()
        with nullcontext() if spinner is None else spinner.hidden():
            for warning in loaded.warnings:
                echo_wrapped(f"warning: {warning}", err=True)
        return loaded


def confirm(question: str, *, as_json: bool) -> bool:
    """Ask a question on a terminal, and return the answer. Elsewhere, and with ``--json``, the answer is no."""
    return not as_json and sys.stdin.isatty() and click.confirm(question)


def writable_folder() -> Path:
    """Return the current folder if it is writable, otherwise the folder for temporary files."""
    current = Path.cwd()
    return current if os.access(current, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def explain_damaged_records(run: Path) -> Iterator[None]:
    """Name the run in unexpected errors from reading its records, which users may have edited."""
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


@dataclass(frozen=True)
class RunOptions:
    """The options of ``run``.

    Attributes:
        source: Config files and overrides, including options that are shorthand for an override.
        dry_run: Whether to print the plan instead of training.
        allow_config_change: Whether to continue a checkpoint even if config changes alter the results.
        as_json: Whether to print JSON instead of text.
    """

    source: ConfigSource
    dry_run: bool = False
    allow_config_change: bool = False
    as_json: bool = False

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments for ``run`` in each of several processes."""
        flags = ["--allow-config-change"] * self.allow_config_change + ["--json"] * self.as_json
        return [*self.source.arguments, *flags]


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add CONFIG, ``-c`` and ``--set`` to a command, which receives them as ``source``, a ``ConfigSource``."""

    @functools.wraps(function)
    def wrapper(config: Path, extra_files: tuple[Path, ...], overrides: tuple[str, ...], **options: Any) -> Any:
        return function(source=ConfigSource(config, extra_files, overrides), **options)

    decorated_function: Callable[..., Any] = wrapper
    for decorate in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one key. Its last part is enough if unique: --set learning_rate=2e-5. May be repeated.",
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
        decorated_function = decorate(decorated_function)
    return decorated_function


@contextmanager
def locate_missing_paths(loaded: LoadedConfig) -> Iterator[None]:
    """Prefix the error about a missing path with the config line that names the path."""
    try:
        yield
    except Exception as error:
        table = loaded.config.model
        paths = {"model.model_name_or_path": table.model_name_or_path}
        paths |= {f"data.train.{index}.path": dataset.path for index, dataset in enumerate(loaded.config.data.train)}
        paths |= {f"data.eval.{index}.path": dataset.path for index, dataset in enumerate(loaded.config.data.eval)}
        text, code = str(error), exit_code_of(error)
        key = next((key for key, path in paths.items() if text.startswith(f"{path}:")), None)
        origin = None if key is None else loaded.origins.get(key)
        if code is None or origin is None:
            raise
        raise RunFailedError(f"{origin}, {key}: {text}", code) from error


json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
run_argument: Decorator = click.argument(
    "run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN"
)
