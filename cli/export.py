"""``megatrain-tier export``: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import click

from .main import EXIT_CONFIG, RunFailedError
from .options import json_option
from .terminal import echo_wrapped

_BAR_COLUMNS = 24


@click.command("export")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="CKPT")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Export the checkpoint of this step. Default: the newest."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Data type of the weights. auto uses the type in the run's config; float32 keeps every bit.",
)
@click.option(
    "--max-shard-size", metavar="SIZE", help='Maximum file size, e.g. "5GB". Default: the size in the run\'s config.'
)
@click.option(
    "--model",
    "model_folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Another copy of the model's folder, if the original folder of the run is gone.",
)
@click.option("--push-to-hub", "hub_id", metavar="ID", help="Also upload the folder to this repository of the hub.")
@click.option("--private", "is_private", is_flag=True, help="Create a private repository.")
@click.option(
    "--merge",
    is_flag=True,
    help="For a run with [lora]: write the model with merged adapters. Default: the value in the run's config.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in OUT.")
@click.option("--ema", is_flag=True, help="For a run with optimizer.ema_decay: write the average of the weights.")
@json_option
def command(
    checkpoint: Path,
    out: Path,
    step: int | None,
    dtype: str,
    max_shard_size: str | None,
    model_folder: Path | None,
    hub_id: str | None,
    is_private: bool,
    merge: bool,
    ema: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write a checkpoint as a Hugging Face folder.

    CKPT is the output_dir of a run, its folder `final`, or the folder snap/<number> of one checkpoint. OUT is a new
    folder, or with --overwrite an earlier export. Needs little RAM and no GPU, and works during a run. The token for
    the hub comes from HF_TOKEN or `hf auth login`.
    """
    if is_private and hub_id is None:
        raise click.UsageError("--private needs --push-to-hub ID")
    nbytes = _parse_size(max_shard_size)

    import torch

    from megatrain.base.names import find_source_run
    from megatrain.checkpoint.inventory import find_checkpoint
    from megatrain.checkpoint.notices import moved_run_notices
    from megatrain.checkpoint.state import CheckpointError
    from megatrain.models.export import exported_step
    from megatrain.models.hub import push_folder
    from megatrain.training.export import export_checkpoint
    from tiered.units import format_size

    run = find_source_run(checkpoint)
    if run is not None:
        final, step = checkpoint, exported_step(checkpoint) if step is None else step
        try:
            find_checkpoint(run, step)
        except CheckpointError as error:
            copy = f"cp -r {shlex.quote(str(final))} {shlex.quote(str(out))}"
            raise CheckpointError(f"{error}. '{final}' is already the exported model of step {step}: {copy}") from error
        checkpoint = run
    is_shown = sys.stderr.isatty() and not as_json

    last_percent = -1

    def show_progress(activity: str, done: int, total: int) -> None:
        nonlocal last_percent
        percent = 100 * done // max(1, total)
        if percent == last_percent:
            return
        last_percent = percent
        bar = ("#" * (_BAR_COLUMNS * done // max(1, total))).ljust(_BAR_COLUMNS)
        text = f"{bar} {format_size(done)} of {format_size(total)}  {activity}"
        click.echo(f"\r\x1b[K{text}", nl=done == total, err=True)

    for notice in moved_run_notices([find_checkpoint(checkpoint, step)]):
        echo_wrapped(notice, err=True)
    folder = export_checkpoint(
        checkpoint,
        out,
        step=step,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        max_shard_size=nbytes,
        model_folder=model_folder,
        merge=merge or None,
        ema=ema,
        overwrite=overwrite,
        on_progress=show_progress if is_shown else None,
    )
    if not as_json:
        click.echo(f"model  {folder}")
        for line in next_lines(folder):
            click.echo(line)
    hub_url = None if hub_id is None else push_folder(folder, hub_id, is_private=is_private)
    if as_json:
        click.echo(json.dumps({"model": str(folder)} | ({} if hub_url is None else {"hub": hub_url})))
    elif hub_url is not None:
        click.echo(f"hub    {hub_url}")
    return 0


def next_lines(folder: Path) -> list[str]:
    """Return example command lines that use an exported folder."""
    relative = os.path.relpath(folder)
    path = shlex.quote(relative if len(relative) < len(str(folder)) else str(folder))
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = shlex.quote(str(json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")))
        commands = [
            f"vllm serve {base} --enable-lora --lora-modules tuned={path}",
            f"lm_eval --model hf --model_args pretrained={base},peft={path} --tasks hellaswag",
            f"python llama.cpp/convert_lora_to_gguf.py --base {base} {path}",
        ]
    else:
        commands = [
            f"vllm serve {path}",
            f"lm_eval --model hf --model_args pretrained={path} --tasks hellaswag",
            f"python llama.cpp/convert_hf_to_gguf.py {path}",
        ]
    first_command, *other_commands = [f"megatrain-tier generate {path} --interactive", *commands]
    return [f"next   {first_command}", *(f"   or  {line}" for line in other_commands)]


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    from tiered.units import parse_size

    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise RunFailedError(f"--max-shard-size: {error}", EXIT_CONFIG) from None
    if nbytes < 1:
        raise RunFailedError("--max-shard-size: must be at least 1 byte. Write for example 5GB", EXIT_CONFIG)
    return nbytes
