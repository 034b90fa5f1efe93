"""``megatrain-tier stop``: let a living run finish its step, save and end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import click

from .control import describe_ended, require_owner, run_argument, timeout_option, wait_for
from .main import EXIT_FAILED, RunFailedError
from .options import json_option


@click.command("stop")
@run_argument
@timeout_option
@json_option
def command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Let a living run finish its step, save and end.

    RUN is the run's output_dir. Returns once the run has ended. A second stop ends the run at once, without saving.
    """
    from megatrain.run_folder import committed_step, living_owner, read_status, send_signal

    owner = require_owner(run)
    try:
        send_signal(run, owner, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it ended just now, by itself
    else:
        if not as_json:
            click.echo(f"asked process {owner.pid}: it finishes its step, saves and ends", err=True)
    if not wait_for(lambda: living_owner(run) != owner, timeout_s):
        raise RunFailedError(
            f"process {owner.pid} has not ended within {timeout_s:g} s; it still will, after its step. "
            "Another stop ends it at once, without saving",
            EXIT_FAILED,
        )
    status, saved_step = read_status(run), committed_step(run)
    if as_json:
        state = None if status is None else status.state
        step = None if status is None else status.step
        click.echo(json.dumps({"state": state, "step": step, "saved_step": saved_step}))
    else:
        click.echo(describe_ended(run))
    return 0
