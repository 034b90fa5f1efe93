"""``megatrain-tier save`` and ``stop``: save and stop runs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from .main import EXIT_DONE, EXIT_FAILED, RunFailedError
from .options import json_option, run_argument
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from megatrain.base.owner import LockHolder
    from megatrain.run.status import RunStatus

_POLL_S = 0.1
_T = TypeVar("_T")

_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait.",
)


@click.command("save")
@run_argument
@_timeout_option
@json_option
def save_command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Ask a run to save a checkpoint after its current step.

    RUN is the run's output_dir. The command returns when the checkpoint is on disk.
    """
    from megatrain.base.owner import check_reachable, find_owner, send_signal

    from .run_state import describe_ended, require_owner, status_of_owner

    owner = require_owner(run)
    try:
        check_reachable(run, owner)
        old_status = _wait_for_handler(run, owner, timeout_s)
        send_signal(run, owner, signal.SIGUSR1)
    except ProcessLookupError:
        raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED) from None
    if not as_json:
        echo_wrapped(f"asked process {owner.pid} to save after its current step", err=True)

    def find_saved_step() -> int | None:
        has_ended = find_owner(run) != owner  # Check first, so that an ended run's status is final.
        status = status_of_owner(run, owner)
        if status is not None and (step := _newer_checkpoint(old_status, status)) is not None:
            return step
        if has_ended:
            raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED)
        return None

    step = _poll(find_saved_step, timeout_s)
    if step is not None:
        path = str((run / "checkpoints").resolve())
        text = f"saved  checkpoint at step {step}"
        click.echo(json.dumps({"saved_step": step, "path": path}) if as_json else text)
        return EXIT_DONE
    status = status_of_owner(run, owner)
    reason = f": {status.message}" if status is not None and status.state == "paused" else ""
    raise RunFailedError(
        f"no checkpoint within {timeout_s:g} s{reason}. The run will still save after its step: see "
        f"megatrain-tier status {run}",
        EXIT_FAILED,
    )


def _wait_for_handler(run: Path, owner: LockHolder, timeout_s: float) -> RunStatus:
    """Wait until a run handles SIGUSR1, because the signal would otherwise kill the run. Return the run's status.

    Raises:
        ProcessLookupError: The run has ended.
    """
    from megatrain.base.owner import find_owner, has_signal_handler

    from .run_state import status_of_owner

    def find_ready_status() -> RunStatus | None:
        if find_owner(run) != owner:
            raise ProcessLookupError
        status = status_of_owner(run, owner)
        if status is not None and status.state not in ("starting", "training", "paused"):
            raise RunFailedError(f"{run}: all steps are done ({status.state}), so it will not save again", EXIT_FAILED)
        return status if has_signal_handler(owner.pid or 0, signal.SIGUSR1) else None

    status = _poll(find_ready_status, timeout_s)
    if status is None:
        raise RunFailedError(f"{run}: still starting after {timeout_s:g} s; no request was sent", EXIT_FAILED)
    return status


def _newer_checkpoint(old: RunStatus, new: RunStatus) -> int | None:
    """Return the step of a new checkpoint that includes all steps finished before the request, or None."""
    is_new = (new.checkpoint_step, new.checkpoint_at) != (old.checkpoint_step, old.checkpoint_at)
    if new.checkpoint_step is None or not is_new or new.checkpoint_step < old.step:
        return None
    return new.checkpoint_step


@click.command("stop")
@run_argument
@_timeout_option
@json_option
def stop_command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Ask a run to finish its current step, save and end.

    RUN is the run's output_dir. The command returns when the run has ended. A second stop ends the run immediately,
    without saving.
    """
    from megatrain.base.owner import find_owner, send_signal
    from megatrain.run.folder import committed_step
    from megatrain.run.status import read_status

    from .run_state import describe_ended, require_owner

    owner = require_owner(run)
    try:
        send_signal(run, owner, signal.SIGTERM)
    except ProcessLookupError:
        pass  # The run has just ended.
    else:
        if not as_json:
            echo_wrapped(f"asked process {owner.pid} to finish its step, save and end", err=True)
    if _poll(lambda: find_owner(run) != owner or None, timeout_s) is None:
        raise RunFailedError(
            f"process {owner.pid} has not ended within {timeout_s:g} s; it will still end after its step. "
            "Another stop ends it immediately, without saving",
            EXIT_FAILED,
        )
    status, saved_step = read_status(run), committed_step(run)
    if as_json:
        state, step = (None, None) if status is None else (status.state, status.step)
        click.echo(json.dumps({"state": state, "step": step, "saved_step": saved_step}))
    else:
        echo_wrapped(describe_ended(run))
    return EXIT_DONE


def _poll(probe: Callable[[], _T | None], timeout_s: float) -> _T | None:
    """Call ``probe`` until it returns a value. Return the value, or None after ``timeout_s``."""
    end_s = time.monotonic() + timeout_s
    while (value := probe()) is None and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return value
