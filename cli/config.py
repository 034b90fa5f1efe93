"""``megatrain-tier config``: resolved values, the schema, differences, and explanations of keys."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, RunFailedError, Subcommands, write_file
from .options import ConfigSource, config_options, json_option
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.config.reference import KeyDescription

_ORIGIN_COLUMN = 64
_MAX_EXPLAINED = 4  # maximum number of keys to explain in full


@click.group("config", cls=Subcommands)
def command() -> None:
    """Show, compare and explain configs."""


@command.command("show")
@config_options
@click.option("--origin", "with_origin", is_flag=True, help="Show which file and line set each value.")
@json_option
def show_command(source: ConfigSource, with_origin: bool, as_json: bool) -> int:
    """Print CONFIG with all defaults filled in, as TOML.

    output_dir/config.resolved.toml has the same text, which reproduces the run.
    """
    loaded = source.load()

    from megatrain.config.resolved import DEFAULT, resolved_lines, to_toml

    lines = resolved_lines(loaded)
    if as_json:
        import tomllib

        origins = {line.key: line.origin for line in lines if line.key}
        click.echo(json.dumps({"values": tomllib.loads(to_toml(loaded.config)), "origins": origins}))
        return 0
    for line in lines:
        text = line.text
        if with_origin and line.key:
            text = f"{text:<{_ORIGIN_COLUMN}}  # {line.origin}"
        click.secho(text, dim=line.origin == DEFAULT, bold=text.startswith("["))
    return 0


@command.command("schema")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write to FILE.")
def schema_command(out: Path | None) -> int:
    """Print the JSON Schema of config files.

    Editors with taplo (VS Code: Even Better TOML) use it to complete and check a config whose first line is
    "#:schema ./megatrain-tier.schema.json".
    """
    from megatrain.config.keys import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        click.echo(text, nl=False)
        return 0
    write_file(out, text)
    click.echo(str(out))
    return 0


@command.command("diff")
@click.argument("old_path", metavar="A", type=click.Path(path_type=Path))
@click.argument("new_path", metavar="B", type=click.Path(path_type=Path))
@json_option
def diff_command(old_path: Path, new_path: Path, as_json: bool) -> int:
    """Show the differences between two configs, and whether they alter results.

    A and B are config files, or output_dirs of runs, whose resolved configs are compared.
    """
    from megatrain.config.resolved import difference, load_run_config

    diff = difference(load_run_config(old_path), load_run_config(new_path))
    if as_json:
        values = {
            name: list(map(dataclasses.asdict, getattr(diff, name))) for name in ("altering", "by_contents", "free")
        }
        click.echo(json.dumps(values, default=str))
        return 0
    groups = (
        ("alters results", diff.altering, "red"),
        ("alters results if the data or the model differs", diff.by_contents, "yellow"),
        ("does not alter results", diff.free, "green"),
    )
    for title, changes, color in groups:
        if changes:
            echo_wrapped(title, fg=color)
            for change in changes:
                echo_wrapped(f"  {change}", indent=4)
    if diff.is_empty:
        click.echo("no differences")
    return 0


@command.command("explain")
@click.argument("key")
@json_option
def explain_command(key: str, as_json: bool) -> int:
    """Explain the meaning, values and default of KEY, and whether it alters results.

    KEY is a key (data.max_length), its last name (max_length), a table (tiers.nvme), or the name in another tool
    (cutoff_len).
    """
    from megatrain.config import ConfigError
    from megatrain.config.reference import describe_key, find_keys

    try:
        names, note = find_keys(key)
    except ConfigError as error:
        raise RunFailedError(str(error.problems[0]), EXIT_CONFIG) from None
    descriptions = [describe_key(name) for name in names]
    if as_json:
        click.echo(json.dumps({"note": note, "keys": [description.to_json() for description in descriptions]}))
        return 0
    if note:
        echo_wrapped(note, indent=0)
        click.echo()
    if len(descriptions) > _MAX_EXPLAINED:
        _print_table(descriptions)
        return 0
    for index, description in enumerate(descriptions):
        if index:
            click.echo()
        _print(description)
    return 0


def _print_table(descriptions: Sequence[KeyDescription]) -> None:
    """Print the meanings of many keys, followed by one sentence about the keys that alter results."""
    width = min(110, max(40, shutil.get_terminal_size((100, 24)).columns))
    for description in descriptions:
        click.secho(description.key, bold=True, nl=False)
        click.echo(f"  {description.values}; default {description.default}"[: max(20, width - len(description.key))])
        click.echo(_wrap(description.meaning, width, "  ", "  "))
    free_names = [entry.key.rpartition(".")[2] for entry in descriptions if entry.alters == "no"]
    if len(free_names) < len(descriptions):
        subject = f"All keys except {', '.join(free_names)}" if free_names else "All keys"
        text = f"{subject} alter results: continuing a checkpoint with another value requires --allow-config-change."
        click.echo("\n" + _wrap(text, width, "", ""))
    click.echo(_wrap("Details of one key: megatrain-tier config explain KEY", width, "", ""))


def _print(description: KeyDescription) -> None:
    width = min(110, max(40, shutil.get_terminal_size((100, 24)).columns))

    def print_field(name: str, text: str) -> None:
        click.echo(_wrap(text, width, f"  {name:<9}", " " * 11))

    click.secho(description.key, bold=True)
    click.echo(_wrap(description.meaning, width, "  ", "  "))
    print_field("values", description.values)
    print_field("default", description.default)
    print_field("alters", _ALTERS[description.alters])
    for index, (tool, name, note) in enumerate(description.other_names):
        print_field("" if index else "called", f"{name} in {tool}" + (f" ({note})" if note else ""))
    for index, text in enumerate(description.example):
        click.echo(f"  {'write' if not index else '':<9}{text}")


def _wrap(text: str, width: int, indent: str, hanging: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False
    )


_ALTERS = {
    "yes": "results: continuing a checkpoint with another value requires --allow-config-change",
    "no": "no results: the value can change between starts of a run",
    "by contents": "the results of a new run. A continued run has its weights in the checkpoint, and refuses data with "
    "different rows",
}
