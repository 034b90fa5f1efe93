"""``megatrain-tier clean``: remove what dead runs left on drives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_FAILED, RunFailedError
from .options import json_option

if TYPE_CHECKING:
    from tiered.tiers.cleanup import Leftovers


@click.command("clean")
@click.argument("paths", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--yes", "-y", is_flag=True, help="Remove without asking.")
@json_option
def command(paths: tuple[Path, ...], yes: bool, as_json: bool) -> int:
    """Remove the block files that ended runs left in the folders of [[tiers.nvme]].

    Looks into each PATH and the folders below it, default: the current one. Committed generations, files of others,
    and folders that a run is using are never touched.
    """
    from tiered.tiers.cleanup import find_directories, measure

    folders = dict.fromkeys(folder.resolve() for path in paths or (Path(),) for folder in find_directories(path))
    found = [measure(folder) for folder in folders]
    removable = [left for left in found if left.owner is None and left.num_files]
    if not as_json:
        _print_found(found, paths)
    if removable and not yes and not _is_agreed(removable, as_json=as_json):
        if as_json:
            _print_json(found, [])
        raise RunFailedError("nothing was removed. Add --yes to remove what is listed", EXIT_CONFIG)
    removed, failures = _remove(removable)
    if as_json:
        _print_json(found, removed)
    elif removed:
        from tiered.units import format_size

        click.echo(f"freed {format_size(sum(left.nbytes for left in removed))}")
    if failures:
        raise RunFailedError("; ".join(failures), EXIT_FAILED)
    return 0


def _is_agreed(removable: list[Leftovers], *, as_json: bool) -> bool:
    from tiered.units import format_size

    if as_json or not sys.stdin.isatty():
        return False
    nbytes = sum(left.nbytes for left in removable)
    return click.confirm(f"Remove {format_size(nbytes)} in {len(removable)} folders?")


def _remove(removable: list[Leftovers]) -> tuple[list[Leftovers], list[str]]:
    """Return what was removed, and why the rest was not."""
    from tiered.errors import LockedError
    from tiered.tiers.cleanup import remove

    removed, failures = [], []
    for left in removable:
        try:
            removed.append(remove(left.path))
        except LockedError as error:  # a run started meanwhile
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{error.filename or left.path}: {error.strerror}")
    return removed, failures


def _print_found(found: list[Leftovers], paths: tuple[Path, ...]) -> None:
    from tiered.units import format_size

    for left in found:
        if left.owner is not None:
            what = f"in use by {left.owner}: not touched"
        elif left.num_files:
            what = f"{format_size(left.nbytes)} in {left.num_files} files"
        else:
            what = "nothing to remove"
        foreign = f", {left.num_foreign} files of others stay" if left.num_foreign else ""
        click.echo(f"{left.path}  {what}{foreign}")
    if not found:
        where = ", ".join(map(str, paths)) or "the current folder"
        click.echo(f"no folder of a [[tiers.nvme]] in {where} or below")


def _print_json(found: list[Leftovers], removed: list[Leftovers]) -> None:
    gone = {left.path for left in removed}
    stores: list[dict[str, Any]] = [
        {
            "path": str(left.path),
            "nbytes": left.nbytes,
            "num_files": left.num_files,
            "num_foreign": left.num_foreign,
            "in_use_by": left.owner,
            "removed": left.path in gone,
        }
        for left in found
    ]
    click.echo(json.dumps({"stores": stores, "freed_bytes": sum(left.nbytes for left in removed)}))
