"""Live views of a run, for ``status --follow``."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console, RenderableType

from megatrain.base.observer import EvaluationMetrics, format_step
from megatrain.base.owner import LockHolder, find_owner
from megatrain.base.progress import ActivitySnapshot
from megatrain.run.status import RunStatus, read_status

from .live_view import LiveView, live_view
from .main import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, RunFailedError
from .run_state import describe_ended, missing_run_message, status_exit_code, status_of_owner
from .terminal import echo_wrapped

_POLL_S = 0.25


def follow(run: Path, *, as_json: bool) -> int:
    """Show a run until it ends. For a run that has ended, print how it ended. Ctrl-C closes the view.

    Returns:
        The exit code of the run; 0 after Ctrl-C; 1 if the run died.
    """
    owner = find_owner(run)
    if owner is None:
        status = read_status(run)
        if status is None:
            raise RunFailedError(missing_run_message(run), EXIT_CONFIG)
        if as_json:
            click.echo(json.dumps(status.to_json()))
        else:
            echo_wrapped(describe_ended(run))
        return status_exit_code(status)
    try:
        with closing(_JsonLines() if as_json else _TerminalView() if sys.stdout.isatty() else _Lines()) as view:
            last_status = _watch(run, owner, view)
    except KeyboardInterrupt:
        echo_wrapped(f"the run continues in process {owner.pid}", err=True)
        return EXIT_DONE
    if not as_json:
        echo_wrapped(describe_ended(run))
    return EXIT_FAILED if last_status is None else status_exit_code(last_status)


def _watch(run: Path, owner: LockHolder, view: _Lines) -> RunStatus | None:
    """Show a run until its process ends. Return the last status that the process wrote, or None if it wrote none."""
    while (current_owner := find_owner(run)) is not None and current_owner.pid == owner.pid:
        if (status := status_of_owner(run, owner)) is not None:
            view.show(status)
        time.sleep(_POLL_S)
    status = read_status(run)  # Read the final status, which the run writes before it unlocks the folder.
    if status is None or status.pid != owner.pid:
        return None
    view.show(status)
    return status


class _Lines:
    """View that prints a line for each step and each message."""

    def __init__(self) -> None:
        self._step, self._message = -1, ""

    def show(self, status: RunStatus) -> None:
        """Show the changes since the last status."""
        if status.metrics is not None and status.metrics.step != self._step:
            self._step = status.metrics.step
            self.print_message(format_step(status.metrics))
        self._show_message(status.message)

    def _show_message(self, message: str) -> None:
        if message and message != self._message:
            self._message = message
            self.print_message(message)

    def print_message(self, text: str) -> None:
        """Print a message."""
        echo_wrapped(text, indent=7)

    def close(self) -> None:
        """Restore the terminal."""


class _JsonLines(_Lines):
    """View that prints a JSON object whenever the status changes."""

    def show(self, status: RunStatus) -> None:
        if status.updated_at + str(status.step) != self._message:
            self._message = status.updated_at + str(status.step)
            click.echo(json.dumps(status.to_json()))


class _TerminalView(_Lines):
    """View that draws on a terminal what the run itself would draw there."""

    def __init__(self) -> None:
        super().__init__()
        self._status: RunStatus | None = None
        self._snapshot, self._snapshot_s = ActivitySnapshot(doing="starting"), time.monotonic()
        self._console = Console(highlight=False)
        self._live = LiveView(self._console, self._picture)

    def show(self, status: RunStatus) -> None:
        snapshot = ActivitySnapshot.from_json(status.activity)
        # The status is written once a second, so the view's own clock runs while the activity is unchanged.
        if snapshot != self._snapshot:
            self._snapshot, self._snapshot_s = snapshot, time.monotonic()
        self._status = status
        self._show_message(status.message)

    def print_message(self, text: str) -> None:
        self._live.print_message(text)

    def close(self) -> None:
        self._snapshot = replace(self._snapshot, doing="", notice="")
        self._live.close(keep_picture=self._status is not None and self._status.metrics is not None)

    def _picture(self) -> RenderableType:
        status, snapshot = self._status, self._snapshot
        if snapshot.doing:
            snapshot = replace(snapshot, seconds=snapshot.seconds + time.monotonic() - self._snapshot_s)
        if status is None:
            return live_view(None, snapshot, width=self._console.width)
        evaluations = {
            name: EvaluationMetrics(int(figures["step"]), status.max_steps, name, float(figures["loss"]), 0, 0.0)
            for name, figures in status.evaluations.items()
        }
        return live_view(status.metrics, snapshot, evaluations, width=self._console.width)
