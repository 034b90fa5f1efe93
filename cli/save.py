"""``megatrain-tier save``: let a living run save itself now."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .control import describe_ended, own_status, require_owner, run_argument, timeout_option, wait_for
from .main import EXIT_FAILED, RunFailedError
from .options import json_option

if TYPE_CHECKING:
    from megatrain.run_folder import Owner, RunStatus


@click.command("save")
@run_argument
@timeout_option
@json_option
def command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Let a living run save itself after its present step, and go on.

    RUN is the run's output_dir. Returns once the checkpoint is on disk.
    """
    from megatrain.run_folder import check_reachable, living_owner, send_signal

    owner = require_owner(run)
    try:
        check_reachable(run, owner)
        before = _wait_until_it_listens(run, owner, timeout_s)
        send_signal(run, owner, signal.SIGUSR1)
    except ProcessLookupError:
        raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED) from None
    if not as_json:
        click.echo(f"asked process {owner.pid}: it saves after its present step", err=True)
    saved: list[int] = []

    def is_over() -> bool:
        has_ended = living_owner(run) != owner  # looked at first: its last words come before
        status = own_status(run, owner)
        if status is not None and (step := _newer_checkpoint(before, status)) is not None:
            saved.append(step)
        return bool(saved) or has_ended

    is_in_time = wait_for(is_over, timeout_s)
    if saved:
        path = str((run / "checkpoints").resolve())
        text = (
            json.dumps({"saved_step": saved[0], "path": path}) if as_json else f"saved  checkpoint at step {saved[0]}"
        )
        click.echo(text)
        return 0
    if is_in_time:
        raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED)
    raise RunFailedError(
        f"no checkpoint within {timeout_s:g} s{_why(run, owner)}. The run still saves after its step: see "
        f"megatrain-tier status {run}",
        EXIT_FAILED,
    )


def _wait_until_it_listens(run: Path, owner: Owner, timeout_s: float) -> RunStatus:
    """Return the status of a run that handles the signal; one that does not would die of it.

    Raises:
        ProcessLookupError: it has ended.
    """
    from megatrain.run_folder import catches_signal, living_owner

    seen: list[RunStatus] = []

    def listens() -> bool:
        if living_owner(run) != owner:
            raise ProcessLookupError
        status = own_status(run, owner)
        if status is not None and status.state not in ("starting", "training", "paused"):
            raise RunFailedError(f"{run}: its steps are done ({status.state}): it saves no more", EXIT_FAILED)
        if status is None or not catches_signal(owner.pid or 0, signal.SIGUSR1):
            return False
        seen.append(status)
        return True

    if not wait_for(listens, timeout_s):
        raise RunFailedError(f"{run}: still starting after {timeout_s:g} s; it was not asked", EXIT_FAILED)
    return seen[-1]


def _newer_checkpoint(before: RunStatus, now: RunStatus) -> int | None:
    """Return the step of a checkpoint that holds at least what was done when the run was asked."""
    is_new = (now.checkpoint_step, now.checkpoint_at) != (before.checkpoint_step, before.checkpoint_at)
    if now.checkpoint_step is None or not is_new or now.checkpoint_step < before.step:
        return None
    return now.checkpoint_step


def _why(run: Path, owner: Owner) -> str:
    status = own_status(run, owner)
    return f": {status.message}" if status is not None and status.state == "paused" else ""
