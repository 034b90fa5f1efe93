"""What ``status``, ``save`` and ``stop`` share: finding runs, reaching the living, times and sizes as text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .main import EXIT_CONFIG, EXIT_FAILED, RunFailedError

if TYPE_CHECKING:
    from megatrain.run_folder import Owner, RunStatus

POLL_S = 0.1
_NOT_ENTERED = ("snap", "live")  # folders of blocks: many files, no runs

run_argument = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN")
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait at most.",
)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield ``root`` and the folders below it that a run wrote its status into. Follows no symbolic links."""
    from megatrain.run_folder import STATUS_NAME

    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_ENTERED)
        if STATUS_NAME in files:
            names.clear()
            yield Path(folder)


def require_owner(run: Path) -> Owner:
    """Return the living process of a run, or end the command: what it was last seen doing."""
    from megatrain.run_folder import living_owner, read_status

    owner = living_owner(run)
    if owner is None:
        if read_status(run) is None:
            raise RunFailedError(f"'{run}' is not the folder of a run. Give the output_dir of one", EXIT_CONFIG)
        raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED)
    return owner


def own_status(run: Path, owner: Owner) -> RunStatus | None:
    """Return what the living process wrote, None if nothing yet: a file of the run before is not its."""
    from megatrain.run_folder import read_status

    status = read_status(run)
    return status if status is not None and status.pid == owner.pid and status.host == owner.host else None


def wait_for(is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether it was over in time."""
    end_s = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() >= end_s:
            return False
        time.sleep(POLL_S)
    return True


def describe_ended(run: Path) -> str:
    """Return how a run that is not running ended, and what to do."""
    from megatrain.run_folder import read_status

    status = read_status(run)
    if status is None:
        return "not running"
    goes_on = _what_next(run)
    seen = f"{age(status.updated_at)} ago"
    if status.state == "done":
        lost = _lost(run)
        return f"done, {status.step} steps, {seen}" + (f"\n{lost}" if lost else "")
    if status.state == "stopped":
        return f"stopped at step {status.step}, {seen}; {goes_on}"
    if status.state == "failed":
        return f"failed at step {status.step}, {seen}: {status.message}\n{goes_on}"
    return f"not running; last seen at step {status.step}, {seen}; {goes_on}"


def _what_next(run: Path) -> str:
    """Return from where a run would continue, and what of it is gone with a drive."""
    from megatrain.checkpoint.whereabouts import usable_checkpoint

    found, lost = usable_checkpoint(run), _lost(run)
    if found is not None:
        where = "the copy of step" if found.is_copy else "step"
        return f"run it again to continue from {where} {found.step}" + (f"\n{lost}" if lost else "")
    if lost:
        return (
            f"it cannot continue\n{lost}\nbring that folder back and run it again; or give up what was trained: "
            f"megatrain-tier ckpt rm {run} --all"
        )
    return "nothing was saved; run it again to start over"


def _lost(run: Path) -> str:
    """Return which checkpoints of a run are gone with a drive, "" if none is."""
    from megatrain.checkpoint.whereabouts import Lost, saved_checkpoints

    lost = Lost.of(saved_checkpoints(run))
    return "" if lost is None else str(lost)


def age(moment: str) -> str:
    """Return how long ago a date and time was, in the two largest units at most: "40 s", "3 min", "2 h 5 min"."""
    try:
        seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    except (ValueError, TypeError):
        return "some time"
    return duration(seconds)


def duration(seconds: float) -> str:
    """Return a duration in the two largest units at most."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
