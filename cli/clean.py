"""``megatrain-tier clean``: remove the block files that ended runs left on drives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_FAILED, RunFailedError
from .options import confirm, json_option
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from tiered.ext import Leftovers, Orphan


@click.command("clean")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--yes", "-y", is_flag=True, help="Remove without asking.")
@click.option(
    "--generations",
    type=click.Choice(["forgotten", "all"]),
    help="Also remove checkpoint data that the run's checkpoint folder no longer lists. forgotten: only if that "
    "folder exists; all: also if it is missing, for example because it was moved or its drive is not mounted.",
)
@json_option
def command(paths: tuple[Path, ...], yes: bool, generations: str | None, as_json: bool) -> int:
    """Remove block files left on drives by runs that have ended.

    Searches each PATH and the folders below it for folders of [[tiers.nvme]]. Default: the current folder. Never
    removes other files or files that a run uses. Removes data of checkpoints only with --generations.
    """
    from tiered.ext import find_directories, find_orphans, measure_leftovers
    from tiered.units import format_size

    folders = dict.fromkeys(folder.resolve() for path in paths or (Path(),) for folder in find_directories(path))
    leftovers = [measure_leftovers(folder) for folder in folders]
    orphans = [orphan for folder in folders for orphan in find_orphans(folder)] if generations else []
    selected = [orphan for orphan in orphans if generations == "all" or not orphan.is_store_gone]
    removable = [leftover for leftover in leftovers if leftover.owner is None and leftover.num_files]
    sizes = {leftover.path: leftover.nbytes for leftover in removable}
    sizes |= {orphan.path: orphan.nbytes for orphan in selected}
    if not as_json:
        _print_found(leftovers, paths)
        _print_orphans(orphans, generations)
    question = f"Remove {format_size(sum(sizes.values()))} in {len(sizes)} folders?"
    if sizes and not yes and not confirm(question, as_json=as_json):
        if as_json:
            _print_json(leftovers, orphans, {})
        raise RunFailedError("nothing was removed. Add --yes to remove the listed files", EXIT_CONFIG)
    removed_paths, failures = _remove(removable, selected)
    freed_sizes = {path: sizes[path] for path in removed_paths}
    if as_json:
        _print_json(leftovers, orphans, freed_sizes)
    elif freed_sizes:
        click.echo(f"freed {format_size(sum(freed_sizes.values()))}")
    if failures:
        raise RunFailedError("; ".join(failures), EXIT_FAILED)
    return 0


def _remove(removable: list[Leftovers], selected: list[Orphan]) -> tuple[list[Path], list[str]]:
    """Remove leftover files and orphaned folders. Return the cleaned folders, and a message for each failure."""
    from tiered.errors import LockedError
    from tiered.ext import remove_leftovers, remove_orphan

    actions: list[tuple[Path, Callable[[], object]]] = []
    actions += [(leftover.path, partial(remove_leftovers, leftover.path)) for leftover in removable]
    actions += [(orphan.path, partial(remove_orphan, orphan)) for orphan in selected]
    removed_paths, failures = [], []
    for path, action in actions:
        try:
            action()
            removed_paths.append(path)
        except LockedError as error:  # A run has started in the meantime.
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{error.filename or path}: {error.strerror}")
    return removed_paths, failures


def _print_found(leftovers: list[Leftovers], paths: tuple[Path, ...]) -> None:
    from tiered.units import format_size

    for leftover in leftovers:
        if leftover.owner is not None:
            text = f"in use by {leftover.owner}: left unchanged"
        elif leftover.num_files:
            text = f"{format_size(leftover.nbytes)} in {leftover.num_files} files"
        else:
            text = "nothing to remove"
        foreign_note = f", {leftover.num_foreign} files of other programs stay" if leftover.num_foreign else ""
        echo_wrapped(f"{leftover.path}  {text}{foreign_note}")
    if not leftovers:
        locations = ", ".join(map(str, paths)) or "the current folder"
        echo_wrapped(f"no folders of [[tiers.nvme]] in {locations} or below")


def _print_orphans(orphans: list[Orphan], generations: str | None) -> None:
    from tiered.units import format_size

    kept_note = "" if generations == "all" else ": kept without --generations all"
    for orphan in orphans:
        if orphan.is_store_gone:
            reason = f"'{orphan.store_path}' is missing{kept_note}"
        else:
            reason = f"'{orphan.store_path}' does not list it"
        echo_wrapped(f"{orphan.path}  {format_size(orphan.nbytes)}, data of a checkpoint: {reason}")


def _print_json(leftovers: list[Leftovers], orphans: list[Orphan], freed_sizes: Mapping[Path, int]) -> None:
    stores: list[dict[str, Any]] = [
        {
            "path": str(leftover.path),
            "nbytes": leftover.nbytes,
            "num_files": leftover.num_files,
            "num_foreign": leftover.num_foreign,
            "in_use_by": leftover.owner,
            "removed": leftover.path in freed_sizes,
        }
        for leftover in leftovers
    ]
    generations: list[dict[str, Any]] = [
        {
            "path": str(orphan.path),
            "nbytes": orphan.nbytes,
            "checkpoints": str(orphan.store_path),
            "checkpoints_gone": orphan.is_store_gone,
            "removed": orphan.path in freed_sizes,
        }
        for orphan in orphans
    ]
    click.echo(json.dumps({"stores": stores, "generations": generations, "freed_bytes": sum(freed_sizes.values())}))
