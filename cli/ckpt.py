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
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.checkpoint.inspection import InventoryEntry
    from megatrain.checkpoint.inventory import RunInventory, Verified
    from megatrain.checkpoint.remote_folder import UrlInventory


class _RunOrUrl(click.Path):
    """Click type for an argument that is a run's folder (a path) or the URL of its copies (text)."""

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
    from megatrain.checkpoint.inventory import next_start

    inventory = _take_inventory(run)
    entries = inventory.entries
    newest, notices = next_start(entries), inventory.notices(entries)
    if as_json:
        click.echo(json.dumps({"checkpoints": [_fields(entry, newest) for entry in entries], "notices": notices}))
    else:
        _print(entries, newest, notices)
    return 0


@command.command("verify")
@run_or_url
@step_option
@json_option
def verify_command(run: Path | str, step: int | None, as_json: bool) -> int:
    """Read every byte of the checkpoints of RUN and compare the checksums.

    RUN is the output_dir of a run, or the URL of its copies.
    """
    from megatrain.checkpoint.inventory import next_start

    inventory = _take_inventory(run)
    results = _verify(inventory, step, as_json=as_json)
    notices = inventory.notices([entry for entry, _ in results])
    if as_json:
        newest = next_start(inventory.entries)
        values = [{**_fields(entry, newest), "problems": problems} for entry, problems in results]
        click.echo(json.dumps({"checkpoints": values, "notices": notices}))
    else:
        _print_notices(notices)
        if step is None and isinstance(run, Path):
            echo_wrapped(_next_start(next_start([entry for entry, problems in results if not problems])))
    damaged = [entry for entry, problems in results if problems]
    if damaged:
        raise RunFailedError(_damage_text(run, damaged, len(results)), EXIT_FAILED)
    return 0


def _take_inventory(run: Path | str) -> RunInventory | UrlInventory:
    from megatrain.checkpoint.inventory import RunInventory
    from megatrain.checkpoint.remote_folder import UrlInventory

    return RunInventory(run) if isinstance(run, Path) else UrlInventory(run)


def _verify(inventory: RunInventory | UrlInventory, step: int | None, *, as_json: bool) -> list[Verified]:
    """Verify checkpoints. Unless ``as_json``, print each with its problems. Return checkpoints and problems."""

    def show_progress(text: str) -> None:
        if sys.stderr.isatty() and not as_json:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    results = []
    for entry, problems in inventory.verify(step, lambda key: show_progress(f"reading {key}")):
        show_progress("")
        results.append((entry, problems))
        if as_json:
            continue
        count = "sound" if not problems else "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        echo_wrapped(f"{_format_name(entry)} (generation {entry.checkpoint.number}): {count}")
        for problem in problems:
            echo_wrapped(f"  {problem}", indent=4)
        if entry.checkpoint.export_note is not None:
            echo_wrapped(f"  note: {entry.checkpoint.export_note}", indent=4)
    return results


def _damage_text(run: Path | str, damaged: Sequence[InventoryEntry], num_verified: int) -> str:
    """Return the text of an error about damaged checkpoints, with advice on what to do."""
    pronoun = "it" if len(damaged) == 1 else "them"
    advice = f"; remove {pronoun} with megatrain-tier ckpt rm {run} --generation N" if isinstance(run, Path) else ""
    if not all(part.is_there for entry in damaged for part in entry.lost):
        advice = ". To restore the missing folders, mount their drives"
    return f"{len(damaged)} of {num_verified} checkpoints cannot be used. A run skips {pronoun}{advice}"


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
    from megatrain.checkpoint.inventory import RunInventory, checkpoint_folders, next_start
    from megatrain.checkpoint.removal import check_not_in_use, remove_checkpoint

    if (step is not None) + (generation is not None) + remove_all != 1:
        raise RunFailedError("choose one option: --step N, --generation N or --all", EXIT_CONFIG)
    check_not_in_use(checkpoint_folders(run)[0])
    inventory = RunInventory(run)
    selected = _select_checkpoints(inventory, run, step, generation)
    if selected and not yes and not confirm(f"Remove {', '.join(map(_format_name, selected))}?", as_json=as_json):
        raise RunFailedError("nothing was removed. Add --yes to remove without asking", EXIT_CONFIG)
    if not remove_all:
        _check_one_remains(run, selected)
    for entry in selected:
        remove_checkpoint(run, entry.checkpoint, force=remove_all)
        if not as_json:
            echo_wrapped(f"removed {_format_name(entry)} (generation {entry.checkpoint.number})")
    if as_json:
        newest = next_start(inventory.entries)
        click.echo(json.dumps({"removed": [_fields(entry, newest) for entry in selected]}))
    elif not selected:
        echo_wrapped(f"no checkpoint in '{run}'")
    return 0


def _fields(entry: InventoryEntry, newest: InventoryEntry | None) -> dict[str, Any]:
    """Return the fields that `--json` prints for a checkpoint."""
    checkpoint = entry.checkpoint
    return {
        "step": checkpoint.step,
        "generation": checkpoint.number,
        "saved_at": checkpoint.saved_at or None,
        "nbytes": entry.nbytes,
        "loss": checkpoint.loss,
        "is_newest": entry is newest,
        "problem": entry.problem,
        "is_copy": checkpoint.is_copy,
        "note": checkpoint.export_note,
        "lost": [dataclasses.asdict(part) for part in entry.lost],
        "num_ranks": checkpoint.world,
    }


def _select_checkpoints(
    inventory: RunInventory, run: Path, step: int | None, generation: int | None
) -> list[InventoryEntry]:
    """Return the checkpoints to remove. If ``step`` and ``generation`` are None, return all checkpoints."""
    if step is not None:
        return inventory.of_step(step)
    if generation is None:
        return inventory.entries
    selected = [entry for entry in inventory.entries if entry.checkpoint.number == generation]
    if not selected:
        generations = ", ".join(str(entry.checkpoint.number) for entry in inventory.entries) or "none"
        raise RunFailedError(f"no generation {generation} in '{run}'. Existing generations: {generations}", EXIT_FAILED)
    return selected


def _check_one_remains(run: Path, selected: list[InventoryEntry]) -> None:
    """Raise an error if a removal would leave no usable checkpoint. Call this before anything is removed."""
    from megatrain.checkpoint.inventory import RunInventory

    usable = [entry for entry in RunInventory(run).entries if entry.problem is None]
    if len(usable) > 1 and all(entry in selected for entry in usable):
        names = ", ".join(map(_format_name, usable))
        raise RunFailedError(f"no other checkpoint in '{run}' is usable: {names}. Remove them with --all", EXIT_FAILED)


def _format_name(entry: InventoryEntry) -> str:
    name = "step ?" if entry.checkpoint.step is None else f"step {entry.checkpoint.step}"
    return f"copy of {name}" if entry.checkpoint.is_copy else name


def _print_notices(notices: list[str]) -> None:
    for text in notices:
        echo_wrapped(text if text.startswith("warning: ") else f"note: {text}")


def _next_start(newest: InventoryEntry | None) -> str:
    return "a run cannot continue from here" if newest is None else f"a run continues from {_format_name(newest)}"


def _print(entries: list[InventoryEntry], newest: InventoryEntry | None, notices: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from tiered.units import format_size

    from .console import plain_table, print_line, set_text_width

    console = set_text_width(Console(highlight=False))
    if not entries:
        console.print("no checkpoints: all were removed")
        _print_notices(notices)
        return
    table = plain_table()
    for name in ("step", "saved", "size", "loss", "generation"):
        table.add_column(name, justify="left" if name == "saved" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for entry in entries:
        checkpoint = entry.checkpoint
        state = ["lost"] if entry.lost else ["unusable"] if entry.problem else []
        ranks = [f"{checkpoint.world} ranks"] * (checkpoint.world > 1)
        notes = ["copy"] * checkpoint.is_copy + ranks + ["newest"] * (entry is newest) + state
        table.add_row(
            "?" if checkpoint.step is None else str(checkpoint.step),
            checkpoint.saved_at and f"{checkpoint.saved_at[: len('2026-11-28T10:00:00')]}Z",
            format_size(entry.nbytes),
            "" if (loss := checkpoint.loss) is None else f"{loss:.4f}",
            str(checkpoint.number),
            Text(", ".join(notes), style="red" if entry.problem else "green"),
        )
    console.print(table)
    for entry in entries:
        if entry.problem is not None:
            print_line(console, f"{_format_name(entry)}: {entry.problem}", indent=2, style="red")
    _print_notices(notices)
    print_line(console, _next_start(newest))
