"""``megatrain-tier init``: write a first config for this machine."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from functools import cached_property
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, RunFailedError, write_file
from .options import json_option
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.base.facts import ModelFacts
    from megatrain.config.starter import DataFacts

_NAME = "run.toml"
#: Task for each row format. All other formats use sft.
_TASKS = {"preference": "dpo", "text": "pretrain"}
_DEFAULT_OUTPUT_DIR = "outputs/first"  # if the config is run.toml; otherwise named after the config
_EXAMPLE = "first.toml"
_EXAMPLE_FOLDER = "megatrain-example"


class TaskChoice(click.Choice):  # type: ignore[type-arg]
    """Click choice of task names. Imports them on first use, so that other commands start faster."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the tasks, in the order of the task table."""
        from megatrain.tasks.table import TASK_FACTS

        return tuple(TASK_FACTS)


@click.command("init")
@click.argument("path", required=False, type=click.Path(path_type=Path), metavar="[PATH]")
@click.option(
    "--task",
    type=TaskChoice(),
    help="Task of the run. Default: dpo for preferences, pretrain for plain text, else sft.",
)
@click.option(
    "--lora",
    "has_lora",
    is_flag=True,
    help="Train small adapters instead of the whole model. The model may then be quantized (QLoRA).",
)
@click.option("--model", metavar="FOLDER_OR_ID", help="A Hugging Face folder, or the name of a model on the hub.")
@click.option("--data", metavar="PATH", help="File, glob or folder of training data, or the hub name of a data set.")
@click.option(
    "--example",
    "is_example",
    is_flag=True,
    help=f"Write a small example, with its model and text, into the folder PATH. Default: {_EXAMPLE_FOLDER}.",
)
@json_option
def command(
    path: Path | None,
    task: str | None,
    has_lora: bool,
    model: str | None,
    data: str | None,
    is_example: bool,
    as_json: bool,
) -> int:
    """Write a commented starter config for this machine.

    PATH is the new file, or a folder for it. Default: run.toml. Overwrites nothing. Also writes the JSON Schema, with
    which editors complete and check the file. If the data is on this machine, fills in the columns of its first rows.
    """
    if is_example:
        if has_lora or any(option is not None for option in (task, model, data)):
            raise click.UsageError("--example has its own task, model and data")
        return _write_example(path or Path(_EXAMPLE_FOLDER), as_json=as_json)
    from megatrain.config.first_rows import first_rows
    from megatrain.config.starter import starter_toml
    from megatrain.machine.facts import machine_facts
    from megatrain.training.resolve import default_tiers

    path = _new_file(path or Path(_NAME))
    folder = path.absolute().parent
    rows = None if data is None else first_rows(_expand_path(data), _relative_path(data, folder), task)
    task = task or _TASKS.get("" if rows is None else rows.format, "sft")
    facts, needs_template = (None, False) if model is None else _model_facts(model, folder)
    if rows is not None and needs_template:
        rows = rows.without_template()
    text = starter_toml(
        machine_facts(folder, default_tiers()),
        task,
        facts,
        rows,
        has_lora=has_lora,
        output_dir=_DEFAULT_OUTPUT_DIR if path.name == _NAME else f"outputs/{path.stem}",
    )
    schema = _write_schema(folder)
    write_file(path, text, is_exclusive=True)
    if as_json:
        click.echo(json.dumps({"path": str(path.resolve()), "schema": None if schema is None else str(schema)}))
        return 0
    echo_wrapped(f"wrote  {path}" + ("" if schema is None else f" and {schema.name}"))
    for line, color in _remarks(path, text, rows, needs_template, has_lora):
        echo_wrapped(line, indent=7, fg=color or None)
    return 0


def _new_file(path: Path) -> Path:
    """Return the file to write. Refuse a file that exists, or whose folder is missing or not writable."""
    path = path / _NAME if path.is_dir() else path
    if path.exists():
        raise RunFailedError(f"{path}: already exists; nothing was written. Name another file", EXIT_CONFIG)
    if not path.absolute().parent.is_dir():
        raise RunFailedError(f"{path.parent}: there is no such folder", EXIT_CONFIG)
    _check_writable(path.absolute().parent)
    return path


def _model_facts(model: str, folder: Path) -> tuple[ModelFacts, bool]:
    """Return facts about a model, and whether its folder is on this machine and contains no chat template."""
    from megatrain.extras.translate.templates import read_template
    from megatrain.models.folder import model_facts
    from megatrain.models.hub import cached_folder

    local_path = Path(_expand_path(model)) if _is_path(model) else None
    source = local_path or cached_folder(model)
    needs_template = source is not None and source.is_dir() and not read_template(source)
    return model_facts(_relative_path(model, folder), local_path), needs_template


def _remarks(
    path: Path, text: str, rows: DataFacts | None, needs_template: bool, has_lora: bool
) -> Iterator[tuple[str, str]]:
    """Yield messages about data, model and next steps, each with its color, or "" for plain text."""
    from megatrain.data.formats import TEMPLATE_FORMATS
    from tiered.errors import install_command

    if rows is not None and rows.problem:
        yield f"data   {rows.problem}", "yellow"
    elif rows is not None and rows.format:
        columns = ", ".join(f"{field} = their {column}" for field, column in rows.columns.items())
        yield f"data   rows are read as {rows.format}" + (f": {columns}" if columns else ""), ""
        if needs_template and rows.format in TEMPLATE_FORMATS:
            yield "model  it has no chat template, which such rows need: set model.chat_template", "yellow"
    if has_lora and find_spec("peft") is None:
        yield f"needs  {install_command('lora')}", "yellow"
    unset_keys = [line.split(" = ")[0] for line in text.split("\n") if "FILL IN" in line and not line.startswith("#")]
    if unset_keys:
        yield f"fill   {', '.join(unset_keys)}", ""
    elif rows is not None and rows.format:
        yield f"look   megatrain-tier data preview {shlex.quote(str(path))}", ""
    yield f"next   megatrain-tier check {shlex.quote(str(path))}", ""


def _check_writable(folder: Path) -> None:
    """Refuse a folder that is not writable, with an error that names the folder instead of a file in it."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFailedError(
            f"{folder}: nothing can be written in this folder ({error.strerror}). Name a file in another one: "
            "megatrain-tier init FOLDER",
            EXIT_CONFIG,
        ) from None


def _write_example(folder: Path, *, as_json: bool) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFailedError(f"{folder}: already exists; nothing was written. Name another folder", EXIT_CONFIG)
    assert __package__ is not None
    source = resources.files(f"{__package__}.example")
    try:
        (folder / "model").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFailedError(
            f"{folder}: this folder cannot be made ({error.strerror}). Name another one: megatrain-tier init --example "
            "FOLDER",
            EXIT_CONFIG,
        ) from None
    _check_writable(folder)
    names = [_EXAMPLE, "loomings.txt", *(f"model/{file.name}" for file in (source / "model").iterdir())]
    for name in names:
        (folder / name).write_bytes((source / name).read_bytes())
    config = folder / _EXAMPLE
    if as_json:
        click.echo(json.dumps({"path": str(config.resolve())}))
        return 0
    echo_wrapped(f"wrote  {config}, a model's config and tokenizer, and a text", indent=7)
    click.echo(f"next   megatrain-tier run {shlex.quote(str(config))}")
    return 0


def _expand_path(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "$")) or Path(text).exists()


def _relative_path(text: str, folder: Path) -> str:
    """Return a path for the config: relative to its folder, except for absolute paths outside of it and hub names."""
    if text.startswith(("~", "$")) or not (_is_path(text) or any(char in text for char in "*?[")):
        return text
    absolute = os.path.abspath(text)
    relative = os.path.relpath(absolute, folder)
    return absolute if relative.startswith(os.pardir) and os.path.isabs(text) else relative


def _write_schema(folder: Path) -> Path | None:
    """Write the schema next to the config and return its path, or None if another file has that name."""
    from megatrain.config.keys import SCHEMA_FILE_NAME, SCHEMA_TITLE, json_schema

    path = folder / SCHEMA_FILE_NAME
    if path.exists():
        try:
            if json.loads(path.read_text(encoding="utf-8")).get("title") != SCHEMA_TITLE:
                return None
        except (OSError, ValueError, AttributeError):
            return None
    write_file(path, json.dumps(json_schema(), indent=2) + "\n")
    return path
