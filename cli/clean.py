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
    found = [measure_leftovers(folder) for folder in folders]
    orphans = [orphan for folder in folders for orphan in find_orphans(folder)] if generations else []
    selected = [orphan for orphan in orphans if generations == "all" or not orphan.is_store_gone]
    removable = [left for left in found if left.owner is None and left.num_files]
    sizes = {**{left.path: left.nbytes for left in removable}, **{orphan.path: orphan.nbytes for orphan in selected}}
    if not as_json:
        _print_found(found, paths)
        _print_orphans(orphans, generations)
    question = f"Remove {format_size(sum(sizes.values()))} in {len(sizes)} folders?"
    if sizes and not yes and not confirm(question, as_json=as_json):
        if as_json:
            _print_json(found, orphans, {})
        raise RunFailedError("nothing was removed. Add --yes to remove the listed files", EXIT_CONFIG)
    removed, failures = _remove(removable, selected)
    freed = {path: sizes[path] for path in removed}
    if as_json:
        _print_json(found, orphans, freed)
    elif freed:
        click.echo(f"freed {format_size(sum(freed.values()))}")
    if failures:
        raise RunFailedError("; ".join(failures), EXIT_FAILED)
    return 0


def _remove(removable: list[Leftovers], selected: list[Orphan]) -> tuple[list[Path], list[str]]:
    """Remove leftover files and orphaned folders. Return the cleaned folders, and a message for each failure."""
    from tiered.errors import LockedError
    from tiered.ext import remove_leftovers, remove_orphan

    todo: list[tuple[Path, Callable[[], object]]] = []
    todo += [(left.path, partial(remove_leftovers, left.path)) for left in removable]
    todo += [(orphan.path, partial(remove_orphan, orphan)) for orphan in selected]
    removed, failures = [], []
    for path, act in todo:
        try:
            act()
            removed.append(path)
        except LockedError as error:  # A run has started in the meantime.
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{error.filename or path}: {error.strerror}")
    return removed, failures


def _print_found(found: list[Leftovers], paths: tuple[Path, ...]) -> None:
    from tiered.units import format_size

    for left in found:
        if left.owner is not None:
            what = f"in use by {left.owner}: left unchanged"
        elif left.num_files:
            what = f"{format_size(left.nbytes)} in {left.num_files} files"
        else:
            what = "nothing to remove"
        foreign = f", {left.num_foreign} files of other programs stay" if left.num_foreign else ""
        click.echo(f"{left.path}  {what}{foreign}")
    if not found:
        where = ", ".join(map(str, paths)) or "the current folder"
        click.echo(f"no folders of [[tiers.nvme]] in {where} or below")


def _print_orphans(orphans: list[Orphan], generations: str | None) -> None:
    from tiered.units import format_size

    for orphan in orphans:
        if not orphan.is_store_gone:
            why = f"'{orphan.store_path}' does not list it"
        else:
            why = f"'{orphan.store_path}' is missing" + (
                "" if generations == "all" else ": kept without --generations all"
            )
        click.echo(f"{orphan.path}  {format_size(orphan.nbytes)}, data of a checkpoint: {why}")


def _print_json(found: list[Leftovers], orphans: list[Orphan], freed: Mapping[Path, int]) -> None:
    stores: list[dict[str, Any]] = [
        {
            "path": str(left.path),
            "nbytes": left.nbytes,
            "num_files": left.num_files,
            "num_foreign": left.num_foreign,
            "in_use_by": left.owner,
            "removed": left.path in freed,
        }
        for left in found
    ]
    generations: list[dict[str, Any]] = [
        {
            "path": str(orphan.path),
            "nbytes": orphan.nbytes,
            "checkpoints": str(orphan.store_path),
            "checkpoints_gone": orphan.is_store_gone,
            "removed": orphan.path in freed,
        }
        for orphan in orphans
    ]
    click.echo(json.dumps({"stores": stores, "generations": generations, "freed_bytes": sum(freed.values())}))
