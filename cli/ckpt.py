"""``megatrain-tier ckpt``: list, verify and remove checkpoints."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_FAILED, RunFailedError, Subcommands
from .options import confirm, json_option, run_argument

if TYPE_CHECKING:
    from megatrain.checkpoint.document import Checkpoint


class _RunOrUrl(click.Path):
    """Click type of an argument that is a run's folder (a path) or the URL of its copies (text)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


run_or_url = click.argument("run", type=_RunOrUrl(exists=True, file_okay=False, path_type=Path), metavar="RUN")
step_option = click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only the checkpoint of this step.")


@click.group("ckpt", cls=Subcommands)
def command() -> None:
    """List, verify and remove the checkpoints of a run."""


@command.command("ls")
@run_or_url
@json_option
def list_command(run: Path | str, as_json: bool) -> int:
    """List the checkpoints of RUN.

    RUN is the output_dir of a run, or the URL of its copies (checkpoint.save_copy).
    """
    from megatrain.checkpoint.catalog import list_checkpoints, list_notices

    notices: list[str] = []
    if isinstance(run, str):
        from megatrain.checkpoint.remote_folder import list_at_url

        infos = list_at_url(run)
    else:
        infos = list_checkpoints(run)
        notices = list_notices(run, infos)
    if as_json:
        click.echo(json.dumps({"checkpoints": [_fields(info) for info in infos], "notices": notices}))
    else:
        _print(infos, notices)
    return 0


@command.command("verify")
@run_or_url
@step_option
@json_option
def verify_command(run: Path | str, step: int | None, as_json: bool) -> int:
    """Read every byte of the checkpoints of RUN and compare the checksums.

    RUN is the output_dir of a run, or the URL of its copies.
    """
    from megatrain.checkpoint.catalog import list_notices, next_start, verify_checkpoints

    is_shown = sys.stderr.isatty() and not as_json

    def show(generation: int, key: str) -> None:
        click.echo(f"\r\x1b[Kreading {key}", nl=False, err=True)

    results = []
    if isinstance(run, str):
        from megatrain.checkpoint.remote_folder import verify_at_url

        found = verify_at_url(run, step)
    else:
        found = verify_checkpoints(run, step, show if is_shown else None)
    for info, problems in found:
        results.append((info, problems))
        if is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)
        if not as_json:
            count = "sound" if not problems else "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            click.echo(f"{_format_name(info)} (generation {info.number}): {count}")
            for problem in problems:
                click.echo(f"  {problem}")
            if info.note is not None:
                click.echo(f"  note: {info.note}")
    notices = list_notices(run, [info for info, _ in results]) if isinstance(run, Path) else []
    newest = next_start([info for info, problems in results if not problems])
    if as_json:
        values = [{**_fields(info), "problems": problems} for info, problems in results]
        click.echo(json.dumps({"checkpoints": values, "notices": notices}))
    else:
        _print_notices(notices)
        if step is None and isinstance(run, Path):
            click.echo(_next_start(newest))
    num_damaged = sum(bool(problems) for _, problems in results)
    if num_damaged:
        them = "it" if num_damaged == 1 else "them"
        advice = f"; remove {them} with megatrain-tier ckpt rm {run} --generation N" if isinstance(run, Path) else ""
        if not all(part.is_there for info, _ in results for part in info.lost):
            advice = ". To restore the missing folders, mount their drives"
        raise RunFailedError(
            f"{num_damaged} of {len(results)} checkpoints cannot be used. A run skips {them}{advice}", EXIT_FAILED
        )
    return 0


@command.command("rm")
@run_argument
@step_option
@click.option(
    "--generation", type=click.IntRange(min=1), metavar="N", help="Only the checkpoint with this number in `ckpt ls`."
)
@click.option("--all", "remove_all", is_flag=True, help="Remove all checkpoints, including the last usable one.")
@click.option("--yes", "-y", is_flag=True, help="Remove without asking.")
@json_option
def remove_command(
    run: Path, step: int | None, generation: int | None, remove_all: bool, yes: bool, as_json: bool
) -> int:
    """Remove checkpoints of RUN by --step, by --generation, or --all.

    Only --all removes the last usable checkpoint. Fails while the run is alive.
    """
    from megatrain.checkpoint.catalog import check_not_in_use, checkpoints_folder, remove_checkpoint

    if (step is not None) + (generation is not None) + remove_all != 1:
        raise RunFailedError("choose one option: --step N, --generation N or --all", EXIT_CONFIG)
    check_not_in_use(checkpoints_folder(run))
    infos = _select_checkpoints(run, step, generation)
    if infos and not yes and not confirm(f"Remove {', '.join(map(_format_name, infos))}?", as_json=as_json):
        raise RunFailedError("nothing was removed. Add --yes to remove without asking", EXIT_CONFIG)
    if not remove_all:
        _check_one_remains(run, infos)
    for info in infos:
        remove_checkpoint(run, info, force=remove_all)
        if not as_json:
            click.echo(f"removed {_format_name(info)} (generation {info.number})")
    if as_json:
        click.echo(json.dumps({"removed": [_fields(info) for info in infos]}))
    elif not infos:
        click.echo(f"no checkpoint in '{run}'")
    return 0


def _fields(info: Checkpoint) -> dict[str, Any]:
    """Return the fields of a checkpoint for `--json`."""
    return {
        "step": info.step,
        "generation": info.number,
        "saved_at": info.saved_at or None,
        "nbytes": info.nbytes,
        "loss": info.loss,
        "is_newest": info.is_newest,
        "problem": info.problem,
        "is_copy": info.is_copy,
        "note": info.note,
        "lost": [dataclasses.asdict(part) for part in info.lost],
        "num_ranks": info.world,
    }


def _select_checkpoints(run: Path, step: int | None, generation: int | None) -> list[Checkpoint]:
    """Return the checkpoints to remove. If ``step`` and ``generation`` are None, return all checkpoints."""
    from megatrain.checkpoint.catalog import find_checkpoint, list_checkpoints

    infos = list_checkpoints(run)
    if step is not None:
        chosen = [info for info in infos if info.step == step]
        if not chosen:
            find_checkpoint(run, step)  # Raises an error that lists the existing steps.
        return chosen
    if generation is not None:
        chosen = [info for info in infos if info.number == generation]
        if not chosen:
            known = ", ".join(str(info.number) for info in infos) or "none"
            raise RunFailedError(f"no generation {generation} in '{run}'. Existing generations: {known}", EXIT_FAILED)
        return chosen
    return infos


def _check_one_remains(run: Path, chosen: list[Checkpoint]) -> None:
    """Raise an error if the removal would leave no usable checkpoint. Called before anything is removed."""
    from megatrain.checkpoint.catalog import list_checkpoints

    usable = [info for info in list_checkpoints(run) if info.problem is None]
    if len(usable) > 1 and all(info in chosen for info in usable):
        names = ", ".join(map(_format_name, usable))
        raise RunFailedError(f"no other checkpoint in '{run}' is usable: {names}. Remove them with --all", EXIT_FAILED)


def _format_name(info: Checkpoint) -> str:
    name = "step ?" if info.step is None else f"step {info.step}"
    return f"copy of {name}" if info.is_copy else name


def _print_notices(notices: list[str]) -> None:
    for text in notices:
        click.echo(text if text.startswith("warning: ") else f"note: {text}")


def _next_start(newest: Checkpoint | None) -> str:
    return "a run cannot continue from here" if newest is None else f"a run continues from {_format_name(newest)}"


def _print(infos: list[Checkpoint], notices: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from tiered.units import format_size

    from .console import plain_table, print_line, set_text_width

    console = set_text_width(Console(highlight=False))
    if not infos:
        console.print("no checkpoints: all were removed")
        _print_notices(notices)
        return
    table = plain_table()
    for name in ("step", "saved", "size", "loss", "generation"):
        table.add_column(name, justify="left" if name == "saved" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for info in infos:
        state = ["lost"] if info.lost else ["unusable"] if info.problem else []
        ranks = [f"{info.world} ranks"] * (info.world > 1)
        notes = ["copy"] * info.is_copy + ranks + ["newest"] * info.is_newest + state
        table.add_row(
            "?" if info.step is None else str(info.step),
            info.saved_at and f"{info.saved_at[: len('2026-11-28T10:00:00')]}Z",
            format_size(info.nbytes),
            "" if (loss := info.loss) is None else f"{loss:.4f}",
            str(info.number),
            Text(", ".join(notes), style="red" if info.problem else "green"),
        )
    console.print(table)
    for info in infos:
        if info.problem is not None:
            print_line(console, f"{_format_name(info)}: {info.problem}", indent=2, style="red")
    newest = next((info for info in infos if info.is_newest), None)
    _print_notices(notices)
    print_line(console, _next_start(newest))
