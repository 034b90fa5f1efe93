"""``megatrain-tier init``: write a first config for this machine."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from dataclasses import replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, RunFailedError, write_file
from .options import json_option

if TYPE_CHECKING:
    from megatrain.config.starter import DataFacts

_NAME = "run.toml"
#: Row format -> task. All other formats use sft.
_TASKS = {"preference": "dpo", "text": "pretrain"}
_FIRST = "outputs/first"  # for run.toml; a config with another name gets a folder of that name
_EXAMPLE = "first.toml"
_EXAMPLE_FOLDER = "megatrain-example"


@click.command("init")
@click.argument("path", required=False, type=click.Path(path_type=Path), metavar="[PATH]")
@click.option(
    "--task",
    type=click.Choice(["sft", "pretrain", "distill", "dpo", "reward"]),
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
    help=f"Write a small run with all it needs, model and text too, into the folder PATH, default {_EXAMPLE_FOLDER}.",
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
    which editors complete and check the file. Names the columns of the first rows if the data is on this machine.
    """
    if is_example:
        if task is not None or has_lora or model is not None or data is not None:
            raise click.UsageError("--example has its own task, model and data")
        return _write_example(path or Path(_EXAMPLE_FOLDER), as_json=as_json)
    path = path or Path(_NAME)
    path = path / _NAME if path.is_dir() else path
    if path.exists():
        raise RunFailedError(f"{path}: already exists; nothing was written. Name another file", EXIT_CONFIG)
    if not path.absolute().parent.is_dir():
        raise RunFailedError(f"{path.parent}: there is no such folder", EXIT_CONFIG)
    _check_writable(path.absolute().parent)

    from megatrain.config.starter import starter_toml
    from megatrain.data.formats import TEMPLATED
    from megatrain.extras.translate.templates import own_template
    from megatrain.machine.facts import machine_facts
    from megatrain.models.folder import model_facts
    from megatrain.models.hub import cached_folder
    from megatrain.training.resolve import default_tiers

    folder = path.absolute().parent
    rows = None if data is None else _data_facts(data, folder, task)
    task = task or _TASKS.get("" if rows is None else rows.format, "sft")
    facts, needs_template = None, False
    if model is not None:
        place = Path(os.path.expandvars(os.path.expanduser(model))) if _is_path(model) else None
        facts = model_facts(_as_written(model, folder), place)
        source = place or cached_folder(model)
        needs_template = source is not None and source.is_dir() and not own_template(source)
        if rows is not None and needs_template:
            rows = _without_template(rows)
    text = starter_toml(
        machine_facts(folder, default_tiers()),
        task,
        facts,
        rows,
        has_lora=has_lora,
        output_dir=_FIRST if path.name == _NAME else f"outputs/{path.stem}",
    )
    schema = _write_schema(folder)
    write_file(path, text, is_exclusive=True)
    if as_json:
        click.echo(json.dumps({"path": str(path.resolve()), "schema": None if schema is None else str(schema)}))
        return 0
    click.echo(f"wrote  {path}" + ("" if schema is None else f" and {schema.name}"))
    to_fill_in = [line.split(" = ")[0] for line in text.split("\n") if "FILL IN" in line and not line.startswith("#")]
    if rows is not None and rows.problem:
        click.secho(f"data   {rows.problem}", fg="yellow")
    elif rows is not None and rows.format:
        columns = ", ".join(f"{ours} = their {theirs}" for ours, theirs in rows.columns.items())
        click.echo(f"data   rows are read as {rows.format}" + (f": {columns}" if columns else ""))
        if needs_template and rows.format in TEMPLATED:
            click.secho("model  it has no chat template, which such rows need: set model.chat_template", fg="yellow")
    if has_lora and find_spec("peft") is None:
        click.secho("needs  pip install 'megatrain-tier[lora]'", fg="yellow")
    if to_fill_in:
        click.echo(f"fill   {', '.join(to_fill_in)}")
    elif rows is not None and rows.format:
        click.echo(f"look   megatrain-tier data preview {shlex.quote(str(path))}")
    click.echo(f"next   megatrain-tier check {shlex.quote(str(path))}")
    return 0


def _check_writable(folder: Path) -> None:
    """Refuse a folder that is not writable. The error names the folder, not its first file."""
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
    click.echo(f"wrote  {config}, a model's config and tokenizer, and a text")
    click.echo(f"next   megatrain-tier run {shlex.quote(str(config))}")
    return 0


def _data_facts(data: str, folder: Path, task: str | None) -> DataFacts:
    """Read the first rows of data on this machine."""
    from megatrain.config.starter import DataFacts
    from megatrain.data.files import ARROW_SUFFIXES, TEXT_SUFFIXES, suffix_of
    from megatrain.data.rows_report import DataError
    from megatrain.data.sources import detect_format, is_hub_name

    written, place = _as_written(data, folder), os.path.expandvars(os.path.expanduser(data))
    if is_hub_name(place):
        if suffix_of(Path(place)) in (*TEXT_SUFFIXES, *ARROW_SUFFIXES):
            return DataFacts(written, problem=f"{written}: there is no such file yet")
        return DataFacts(written)  # nothing is fetched before `check`
    try:
        preview = detect_format(place, is_preference=None if task is None else task in ("dpo", "reward"))
    except DataError as error:
        return DataFacts(written, problem=str(error))
    return DataFacts(written, preview.format, preview.columns, preview.fields, preview.problem, preview.is_judged)


def _without_template(rows: DataFacts) -> DataFacts:
    """Return questions and answers as prompts and completions, for a model without a chat template."""
    if rows.format != "alpaca" or not rows.columns or "input" in rows.fields:
        return rows
    question, answer = (rows.columns.get(name, name) for name in ("instruction", "output"))
    return replace(rows, format="prompt_completion", columns={"prompt": question, "completion": answer})


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "$")) or Path(text).exists()


def _as_written(text: str, folder: Path) -> str:
    """Return a path for the config: relative to the config's folder if it is below that folder."""
    if text.startswith(("~", "$")) or not (_is_path(text) or any(char in text for char in "*?[")):
        return text
    whole = os.path.abspath(text)
    shorter = os.path.relpath(whole, folder)
    return whole if shorter.startswith(os.pardir) and os.path.isabs(text) else shorter


def _write_schema(folder: Path) -> Path | None:
    """Write the schema next to the config. If another file has that name, keep it and return None."""
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
