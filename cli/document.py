"""The reference of the commands, made from the commands: ``python -m megatrain_tier_cli.document > docs/cli.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import click

from .main import (
    DEBUG_VARIABLE,
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_DOES_NOT_FIT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED_AND_SAVED,
    EXIT_VERIFY,
    command_group,
)

__all__ = ["commands", "to_markdown"]

PROGRAM = "megatrain-tier"
#: Codes that every command can end with: done, an error of the system or of storage, a mistake in the command line.
_USUAL = (EXIT_DONE, EXIT_FAILED, EXIT_CONFIG)

_INTRODUCTION = f"""\
# Commands

Made from the commands themselves by `python -m megatrain_tier_cli.document > docs/cli.md`; do not edit by hand.

`{PROGRAM} COMMAND --help` (or `-h`) says the same in the terminal, `{PROGRAM} --version` which version it is. CONFIG is
a TOML file ([its keys](config.md)), RUN the `output_dir` of a run. Colours are left out where the output is no
terminal, and where `NO_COLOR` is set. `{DEBUG_VARIABLE}=1` shows the traceback of an error.
"""

_EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed, or interrupted without a save",
    EXIT_CONFIG: "wrong config, model folder or usage; every problem of the config is listed at once",
    EXIT_DOES_NOT_FIT: "does not fit the tiers; the message names the capacity that would do",
    EXIT_DATA: "wrong data: file, line and what to do",
    EXIT_VERIFY: "`verify` found a difference",
    EXIT_INTERRUPTED_AND_SAVED: "interrupted and saved: run it again to continue",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What the page says of a command besides its help.

    Attributes:
        example: what follows the name of the command.
        codes: exit codes beside the usual ones.
    """

    example: str
    codes: tuple[int, ...] = ()


#: Every command once, in the order of their use. tests/docs runs the examples in this order.
_CHAPTERS: dict[str, dict[str, Entry]] = {
    "Write a config": {
        "init": Entry('my.toml --task sft --model models/base --data "data/*.jsonl"'),
        "import": Entry("ds_config.json --from deepspeed -o translated.toml"),
        "config show": Entry("run.toml --origin"),
        "config explain": Entry("cutoff_len"),
        "config diff": Entry("run.toml outputs/first"),
        "config schema": Entry("-o megatrain-tier.schema.json"),
    },
    "Before a run": {
        "doctor": Entry("--quick /mnt/nvme"),
        "plan": Entry("run.toml --what-if ram=64GiB --what-if batch=16,length=2048", (EXIT_DOES_NOT_FIT, EXIT_DATA)),
        "data preview": Entry("run.toml -n 2", (EXIT_DATA,)),
        "data stats": Entry("run.toml", (EXIT_DATA,)),
        "check": Entry("run.toml", (EXIT_DOES_NOT_FIT, EXIT_DATA)),
        "verify": Entry("run.toml", (EXIT_VERIFY,)),
    },
    "Train": {
        "run": Entry(
            "run.toml --set output_dir=outputs/second --set learning_rate=2e-5",
            (EXIT_DOES_NOT_FIT, EXIT_DATA, EXIT_INTERRUPTED_AND_SAVED),
        ),
        "score": Entry(
            "run.toml --set output_dir=outputs/scores", (EXIT_DOES_NOT_FIT, EXIT_DATA, EXIT_INTERRUPTED_AND_SAVED)
        ),
        "status": Entry("outputs/first", (EXIT_DOES_NOT_FIT, EXIT_DATA, EXIT_INTERRUPTED_AND_SAVED)),
        "save": Entry("outputs/first"),
        "stop": Entry("outputs/first"),
    },
    "After a run": {
        "report": Entry("outputs/first --html report.html"),
        "export": Entry("outputs/first model-400 --step 400 --dtype bfloat16"),
        "generate": Entry(
            'model-400 --prompt "Call me" --prompt "The sea" --max-new-tokens 8 -o said.jsonl',
            (EXIT_DOES_NOT_FIT, EXIT_DATA),
        ),
        "ckpt ls": Entry("outputs/first"),
        "ckpt verify": Entry("outputs/first"),
        "ckpt rm": Entry("outputs/first --step 200 --yes"),
        "clean": Entry("state --yes"),
    },
    "Shell": {"completion": Entry("bash")},
}


def to_markdown() -> str:
    """Return the reference as Markdown. It depends on no terminal."""
    found = {name.removeprefix(f"{PROGRAM} "): (command, ctx) for name, command, ctx in commands()}
    entries = [name for chapter in _CHAPTERS.values() for name in chapter]
    assert sorted(entries) == sorted(found), sorted(set(entries) ^ set(found))
    parts = [_INTRODUCTION, *_exit_codes(), "", "| command | what it does |", "|---|---|"]
    parts += [f"| [`{name}`](#{_anchor(name)}) | {_cell(_first_line(found[name][0]))} |" for name in entries]
    for title, chapter in _CHAPTERS.items():
        parts += ["", f"## {title}"]
        for name, entry in chapter.items():
            parts += _command(name, *found[name], entry)
    return "\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield (name with the program's, command, context) of every command that does something itself."""
    settings = command_group.context_settings
    yield from _below(command_group, click.Context(command_group, info_name=PROGRAM, **settings))


def _below(group: click.Group, ctx: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None, name
        inner = click.Context(command, info_name=name, parent=ctx)
        if isinstance(command, click.Group):
            yield from _below(command, inner)
        else:
            yield inner.command_path, command, inner


def _exit_codes() -> list[str]:
    rows = [f"| {code} | {meaning} |" for code, meaning in _EXIT_CODES.items()]
    return ["| exit code | meaning |", "|---|---|", *rows]


def _command(name: str, command: click.Command, ctx: click.Context, entry: Entry) -> list[str]:
    """Return the section of a command."""
    usage = " ".join([PROGRAM, name, *command.collect_usage_pieces(ctx)])
    codes = sorted({*_USUAL, *entry.codes})
    lines = ["", f"### `{PROGRAM} {name}`", "", *_paragraphs(command), "```text", usage, "```", ""]
    options = [_option(param, ctx) for param in command.params if isinstance(param, click.Option)]  # all but --help
    if options:
        lines += ["| option | takes | default | meaning |", "|---|---|---|---|", *options, ""]
    lines += [f"Exit codes: {', '.join(map(str, codes))}. Example:", ""]
    return [*lines, "```sh", f"{PROGRAM} {name} {entry.example}", "```"]


def _paragraphs(command: click.Command) -> list[str]:
    """Return the help text; paragraphs that click does not wrap become blocks."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines += ["```text", *paragraph.splitlines()[1:], "```", ""]
        else:
            lines += [_text(" ".join(paragraph.split())), ""]
    return lines


def _first_line(command: click.Command) -> str:
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())


def _option(option: click.Option, ctx: click.Context) -> str:
    """Return the row of an option: names, what it takes, default, meaning."""
    record = option.get_help_record(ctx)
    assert record is not None, option.name
    meaning, bound, default = record[1], "", "-"
    extra = re.search(r"  \[([^]]*)\]$", meaning)
    if extra is not None:
        meaning = meaning[: extra.start()]
        for fact in extra[1].split("; "):
            name, colon, value = fact.partition("default: ")
            if colon and not name:
                default = f"`{value}`"
            else:
                bound = fact.removeprefix("x").replace(">=", ">= ")
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    takes = "-" if option.is_flag else _takes(option, ctx, bound)
    return f"| {names} | {takes} | {default} | {_cell(meaning)} |"


def _takes(option: click.Option, ctx: click.Context, bound: str) -> str:
    metavar = option.make_metavar(ctx)
    if bound and metavar == "INTEGER RANGE":
        metavar = "N"
    names = ", ".join(f"`{name}`" for name in metavar.strip("[]").split("|"))
    return f"{names} {_text(bound)}".strip()


def _anchor(name: str) -> str:
    return f"{PROGRAM} {name}".replace(" ", "-")


def _text(text: str) -> str:
    """Return text in which Markdown sees no markup."""
    escaped = text.replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(\[\[[^]]*\]\])", r"`\1`", escaped)


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


if __name__ == "__main__":
    print(to_markdown(), end="")
