"""``megatrain-tier status``: show the state of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click

from .main import EXIT_CONFIG, EXIT_DONE, RunFailedError
from .options import explain_damaged_records, json_option
from .terminal import echo_wrapped

_SKIPPED_FOLDERS = ("snap", "live")  # Folders of blocks contain many files and no runs.


@click.command("status")
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[RUN]")
@click.option(
    "--follow",
    "is_followed",
    is_flag=True,
    help="Show the live view of a run until it ends, and return its exit code (0 if it is already done). Ctrl-C "
    "closes only the view; the run continues.",
)
@json_option
def command(run: Path | None, is_followed: bool, as_json: bool) -> int:
    """Show the state of runs.

    RUN is the output_dir of a run, or a folder with several runs below it. Default: the current folder.
    """
    from .run_state import RunFolderState
    from .status_text import print_run, run_to_json

    if is_followed:
        from .follow import follow

        return follow(_select_run(run or Path()), as_json=as_json)
    states = list(map(RunFolderState.inspect, _find_runs(run or Path())))
    if run is not None and not states and (state := RunFolderState.inspect(run)).owner is not None:
        states = [state]
    values = []
    for run_state in states:
        with explain_damaged_records(run_state.path):
            if as_json:
                values.append(run_to_json(run_state))
            else:
                print_run(run_state)
    if as_json:
        click.echo(json.dumps({"runs": values}))
    if not states:
        if run is not None:
            raise RunFailedError(f"no run in '{run}' or below. Pass the output_dir of a run", EXIT_CONFIG)
        if not as_json:
            echo_wrapped("no runs in the current folder or below")
    return EXIT_DONE


def _find_runs(root: Path) -> Iterator[Path]:
    """Yield ``root`` and the folders below it that contain a run's status. Symbolic links are not followed."""
    from megatrain.run.status import STATUS_NAME

    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        if STATUS_NAME in files:
            names.clear()
            yield Path(folder)


def _select_run(root: Path) -> Path:
    """Return the run to follow: the folder itself, or the only running one below it."""
    from megatrain.base.owner import find_owner

    if find_owner(root) is not None:
        return root
    paths = [path for path in _find_runs(root) if find_owner(path) is not None]
    if len(paths) > 1:
        raise RunFailedError(
            f"{len(paths)} runs are active in '{root}': choose one of {', '.join(map(str, paths))}", EXIT_CONFIG
        )
    return paths[0] if paths else root
