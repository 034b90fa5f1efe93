"""``megatrain-tier import``: translate a config or a command line of another tool."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, RunFailedError, write_file
from .options import json_option
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.base.other_tools import Tool
    from megatrain.extras.translate.draft import Translation


# Unknown options belong to the imported command line, even if the "--" before it is missing.
@click.command("import", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="FILE|COMMAND...")
@click.option(
    "--from",
    "tool",
    type=click.Choice(["llamafactory", "axolotl", "trl", "deepspeed", "megatrain"]),
    help="Tool of the config. Default: detected from its keys.",
)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT", help="Write the TOML to OUT."
)
@json_option
def command(arguments: tuple[str, ...], tool: Tool | None, out: Path | None, as_json: bool) -> int:
    """Translate a config or a command line of another tool.

    Reads YAML and JSON files of LLaMA-Factory, Axolotl, TRL, DeepSpeed and MegaTrain, shell scripts that start a
    training run, and commands after "--", including launchers (accelerate, torchrun, deepspeed). Prints TOML, or
    writes it to OUT. Lists keys without an equivalent here, and unneeded keys. Resolves relative paths from the current
    folder, like the tool itself. Runs nothing.
    """
    from megatrain.extras.translate.translate import translate_command_line, translate_file

    file = Path(arguments[0])
    if len(arguments) == 1 and " " in arguments[0] and not file.exists():
        arguments = tuple(arguments[0].split())  # The user quoted the whole command.
    if len(arguments) > 1 and file.suffix and file.is_file():
        raise click.UsageError(f'import reads only one FILE; unexpected argument "{arguments[1]}"')
    if len(arguments) == 1 and arguments[0].startswith("-"):
        raise click.NoSuchOption(arguments[0])

    if out is not None and out.exists():
        raise RunFailedError(f"{out}: already exists; nothing was written. Name another file", EXIT_CONFIG)
    folder = None if out is None else out.absolute().parent
    if len(arguments) == 1:
        translation = translate_file(file, tool, folder=folder)
    else:
        translation = translate_command_line(arguments, tool, folder=folder)
    if out is not None:
        _write(out, translation.toml)
    if as_json:
        click.echo(json.dumps({**translation.to_json(), "out": None if out is None else str(out)}, default=str))
        return 0
    if out is None:
        click.echo(translation.toml, nl=False)
    _print_summary(translation, out)
    return 0


def _write(out: Path, text: str) -> None:
    if not out.absolute().parent.is_dir():
        raise RunFailedError(f"{out.parent}: this folder does not exist", EXIT_CONFIG)
    write_file(out, text, is_exclusive=True)


def _print_summary(translation: Translation, out: Path | None) -> None:
    """Print a summary and the keys that need the user's attention on stderr."""
    from megatrain.base.other_tools import TOOL_TITLES
    from megatrain.extras.translate.translate import format_omitted_key

    count = sum(bool(entry.tool_key) for entry in translation.entries.values())
    summary = f"translated {count} value{'' if count == 1 else 's'} of {TOOL_TITLES[translation.tool]}"
    echo_wrapped(summary if out is None else f"{summary}, written to {out}", err=True)
    is_on_screen = out is None and sys.stdout.isatty()  # Comments in the printed TOML list the same keys.
    for title, omitted_keys, color in (
        ("no equivalent here", translation.lost_keys, "yellow"),
        ("not needed here", translation.unneeded_keys, None),
    ):
        if omitted_keys and not is_on_screen:
            click.secho(f"{title}:", fg=color, err=True)
            for omitted in omitted_keys:
                echo_wrapped(f"  {format_omitted_key(omitted)}", indent=4, err=True)
    if translation.placeholders:
        click.secho("to fill in:", fg="red", err=True)
        for key, entry in translation.placeholders.items():
            echo_wrapped(f"  {key}: {entry.note}", indent=4, err=True)
    if out is not None:
        click.echo(f"next: megatrain-tier check {shlex.quote(str(out))}", err=True)
