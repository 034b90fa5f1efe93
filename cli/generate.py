"""``megatrain-tier generate``: continue many prompts with a model that need not fit in memory."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, RunFailedError
from .options import ConfigSource
from .terminal import Spinner, without_garbage_collection

if TYPE_CHECKING:
    from megatrain.config import LoadedConfig
    from megatrain.extras.generation import Completion, Generator
    from megatrain.tasks.prompts import GenerationSettings


_BATCH_KEYS = tuple(
    f"training.{name}"
    for name in ("train_batch_tokens", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_lanes")
)


@click.command("generate")
@click.argument("model", type=click.Path(path_type=Path), metavar="CONFIG|FOLDER")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Read prompts from a .jsonl file with a "prompt" in each row, or from a text file with one prompt per line.',
)
@click.option("-p", "--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt. May be repeated.")
@click.option(
    "-i",
    "--interactive",
    "is_interactive",
    is_flag=True,
    help="Read a prompt from each line of stdin and print the reply. With a chat template, this is a conversation.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the completions to a .jsonl or .parquet file at the end. Default: JSON lines on stdout.",
)
@click.option("--system", default="", metavar="TEXT", help="System message before each prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, metavar="N")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Sampling temperature; 0 takes the likeliest token. Default: the value in the model's generation_config.json.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of sampling.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of prompts that share each read of a weight, a multiple of the micro-batch size. Default: four "
    "micro-batches.",
)
@click.option(
    "--micro-batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of prompts in one forward pass, padded to the same length. Default: at most 8.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key, e.g. tiers.ram.size=8GiB."
)
@click.option("--dry-run", is_flag=True, help="Print the plan of one token of a batch, then stop.")
def command(
    model: Path,
    file: Path | None,
    texts: tuple[str, ...],
    is_interactive: bool,
    out: Path | None,
    system: str,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
    batch_size: int | None,
    micro_batch_size: int | None,
    overrides: tuple[str, ...],
    dry_run: bool,
) -> int:
    """Continue prompts with a model that need not fit in memory.

    Generates the same tokens as transformers. For each new token, reads each weight once for all prompts of a batch,
    from the model's folder if the weight does not fit in RAM. Stores the KV cache in the tiers.

    With CONFIG, uses the model before training, and reads only the tables for model, tiers and precision. With FOLDER,
    uses the trained model in the output_dir of a run or in an exported folder. An adapter runs with its base model.
    """
    if out is not None and out.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(f"--out {out}: the file name must end with .jsonl or .parquet")
    if is_interactive and (texts or file or out or batch_size or micro_batch_size or dry_run):
        raise click.UsageError(
            "--interactive reads prompts from stdin and prints replies, so it does not work with --prompt, --prompts, "
            "--out, --batch-size, --micro-batch-size or --dry-run"
        )
    prompts = [*texts, *(_read_prompts(file) if file is not None else ())]
    if not prompts and not is_interactive:
        raise click.UsageError("there are no prompts: add a file with --prompts, or a text with --prompt")
    rows, num_prompts = _choose_batch(len(prompts), batch_size, micro_batch_size)
    with Spinner("reading the config") as spinner:
        loaded = _load_config(model, overrides, spinner)
        spinner.show_activity("importing torch")
        with without_garbage_collection():
            from megatrain.extras.generation import Generator, config_for_prompts
            from megatrain.tasks.prompts import GenerationSettings

            from .observers import MessageObserver
            from .plan_text import print_plan

            settings = GenerationSettings(max_new_tokens, temperature, seed, system)
            if prompts:
                spinner.show_activity("reading the model and planning")
                config = config_for_prompts(loaded.config, rows, num_prompts)
                generator = Generator(config, prompts, settings, observer=MessageObserver())
    if is_interactive:
        return _run_chat(loaded, settings)
    if dry_run:
        print_plan(generator.plan.plan)
        return EXIT_DONE
    _write_completions(_run(generator), out)
    return EXIT_DONE


def _choose_batch(num_prompts: int, batch_size: int | None, micro_batch_size: int | None) -> tuple[int, int]:
    """Return the number of prompts per micro-batch, and the number of prompts per batch."""
    max_rows = min(8, num_prompts)
    if batch_size is None:
        rows = micro_batch_size or max_rows
        return rows, max(rows, min(num_prompts, 4 * rows))
    rows = micro_batch_size or max(size for size in range(1, max_rows + 1) if batch_size % size == 0)
    if batch_size % rows:
        raise click.UsageError(f"--batch-size {batch_size} must be a multiple of --micro-batch-size {rows}")
    return rows, batch_size


def _run(generator: Generator) -> list[Completion]:
    """Check that the plan suits this machine, fetch the weights, run the generator, and return the completions."""
    from megatrain.plan.limits import refuse

    from .observers import fetch_weights

    plan = generator.plan.plan
    refuse(plan.objections)
    fetch_weights(plan)
    try:
        return generator.run()
    except KeyboardInterrupt:
        raise RunFailedError("interrupted; nothing written", EXIT_FAILED) from None


def _run_chat(loaded: LoadedConfig, settings: GenerationSettings) -> int:
    """Print a reply to each line of stdin. As the conversation grows, each turn plans again and reloads the model."""
    from megatrain.extras.generation import Generator, config_for_prompts
    from megatrain.tasks.prompts import PromptError

    config = config_for_prompts(loaded.config, 1, 1)
    history: list[dict[str, str]] = []
    while (prompt := _next_line()) is not None:
        if prompt.strip():
            try:
                with Spinner("replying"):
                    reply = _run(Generator(config, [prompt], settings, history=history))[0].completion
            except (PromptError, RunFailedError, KeyboardInterrupt) as error:
                if not sys.stdin.isatty():
                    raise
                click.echo(f"error: {str(error) or 'interrupted'}; the conversation is unchanged", err=True)
                continue
            click.echo(reply)
            history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return EXIT_DONE


def _next_line() -> str | None:
    """Return the next line of stdin, or None at the end or after Ctrl-C."""
    try:
        line = input("> " if sys.stdin.isatty() else "")
        line.encode()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeError:  # Python decodes an invalid byte to a surrogate, which tokenizers reject.
        raise RunFailedError("a line of stdin is not UTF-8: write the prompts as UTF-8", EXIT_CONFIG) from None
    return line


def _load_config(model: Path, overrides: tuple[str, ...], spinner: Spinner) -> LoadedConfig:
    """Return the config in a file, or a new config for the model in a folder."""
    if model.is_dir():
        from megatrain.extras.generation import tables_of_folder

        text = f'task = "sft"\noutput_dir = {_toml(str(model.absolute() / "generate"))}\n'
        for name, table in tables_of_folder(model).items():
            text += f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
        text += "[[data.train]]\npath = 'prompts'\n"
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            loaded = ConfigSource(Path(file.name), (), overrides).load(spinner)
    else:
        loaded = ConfigSource(model, (), overrides).load(spinner)
    batch_key = next((key for key in _BATCH_KEYS if loaded.origins.get(key, "").startswith("--set")), None)
    if batch_key is not None:
        raise click.UsageError(f"--set {batch_key} only applies to training: use --batch-size and --micro-batch-size")
    return loaded


def _toml(value: str | bool) -> str:
    """Return a value as TOML, whose strings and booleans have the same syntax as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def _read_prompts(file: Path) -> list[str]:
    """Return the prompts that a file contains."""
    from megatrain.data.rows_report import DataError

    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), f"cannot be read: {error}", "Name a file of text or JSON lines") from None
    prompts: list[str] = []
    for lineno, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            prompts.append(line)
            continue
        try:
            prompt: Any = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise DataError(f"{file}, line {lineno}", 'the row has no text under "prompt"', 'Write {"prompt": "..."}')
        prompts.append(prompt)
    return prompts


def _write_completions(completions: Sequence[Completion], out: Path | None) -> None:
    rows = [dataclasses.asdict(completion) for completion in completions]
    if out is None:
        for row in rows:
            click.echo(json.dumps(row))
        return
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".parquet":
            from megatrain.data.scores import write_rows

            write_rows(partial, rows)
        else:
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        for row in rows:  # Print the completions, so that hours of work are not lost.
            sys.stdout.write(json.dumps(row) + "\n")
        raise RunFailedError(f"{out}: {error.strerror}; the completions are on stdout", EXIT_FAILED) from None
    click.echo(f"completions  {out}")
