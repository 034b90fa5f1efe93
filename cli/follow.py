"""``status --follow``: the live view of a run in another process, until that ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .control import describe_ended, own_status, require_owner
from .main import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatrain.metrics import StepMetrics
    from megatrain.run_folder import Owner, RunStatus

__all__ = ["follow"]

_POLL_S = 0.25


def follow(run: Path, *, as_json: bool) -> int:
    """Show what a living run does until it ends; Ctrl-C only leaves.

    Returns:
        The exit code of the run; 0 if it was left. 1: it died.
    """
    from megatrain.run_folder import FINAL_STATES, read_status

    owner = require_owner(run)
    view = _Json() if as_json else _View() if sys.stdout.isatty() else _Lines()
    try:
        view.open()
        while _is_alive(run, owner):
            status = own_status(run, owner)
            if status is not None:
                view.show(status)
            time.sleep(_POLL_S)
        status = read_status(run)
        if status is not None and status.pid == owner.pid:
            view.show(status)
    except KeyboardInterrupt:
        view.close()
        click.echo(f"the run goes on, process {owner.pid}", err=True)
        return EXIT_DONE
    finally:
        view.close()
    if not as_json:
        click.echo(describe_ended(run))
    if status is None or status.pid != owner.pid or status.state not in FINAL_STATES:
        return EXIT_FAILED
    if status.exit_code is not None:
        return status.exit_code
    return {"done": EXIT_DONE, "stopped": EXIT_INTERRUPTED_AND_SAVED}.get(status.state, EXIT_FAILED)


def _is_alive(run: Path, owner: Owner) -> bool:
    from megatrain.run_folder import living_owner

    now = living_owner(run)
    return now is not None and now.pid == owner.pid


def _metrics_of(status: RunStatus) -> StepMetrics | None:
    from megatrain.metrics import StepMetrics

    try:
        return StepMetrics.from_json(status.metrics)
    except (TypeError, ValueError):  # before the first step, or of an older version
        return None


class _Lines:
    """A line for each step that is seen, and each message."""

    def __init__(self) -> None:
        self._step, self._message = -1, ""

    def open(self) -> None:
        """Nothing yet."""

    def show(self, status: RunStatus) -> None:
        """Print what is new."""
        from megatrain.metrics import format_step

        metrics = _metrics_of(status)
        if metrics is not None and metrics.step != self._step:
            self._step = metrics.step
            self.say(format_step(metrics))
        if status.message and status.message != self._message:
            self._message = status.message
            self.say(status.message)

    def say(self, text: str) -> None:
        """Print a message."""
        click.echo(text)

    def close(self) -> None:
        """Put the terminal right."""


class _Json(_Lines):
    """An object for each change of what the run wrote."""

    def show(self, status: RunStatus) -> None:
        """Print the status if it is another one."""
        if status.updated_at + str(status.step) != self._message:
            self._message = status.updated_at + str(status.step)
            click.echo(json.dumps(status.to_json()))


class _View(_Lines):
    """The view that the run itself shows on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        from megatrain.activity import Moment

        super().__init__()
        self._console = Console(highlight=False)
        self._status: RunStatus | None = None
        self._moment, self._seen_s = Moment(doing="starting"), time.monotonic()

    def open(self) -> None:
        """Begin to draw."""
        from .render import LiveView

        self._live = LiveView(self._console, self._picture)

    def show(self, status: RunStatus) -> None:
        """Take what is drawn next; print a message that is new."""
        from megatrain.activity import Moment

        moment = Moment.from_json(status.activity)
        # Written once a second: between two of them the time goes on, where the same is still done.
        if moment != self._moment:
            self._moment, self._seen_s = moment, time.monotonic()
        self._status = status
        if status.message and status.message != self._message:
            self._message = status.message
            self.say(status.message)

    def say(self, text: str) -> None:
        self._live.say(text)

    def close(self) -> None:
        self._moment = replace(self._moment, doing="", notice="")
        self._live.close(stays=self._status is not None and _metrics_of(self._status) is not None)

    def _picture(self) -> RenderableType:
        from megatrain.metrics import EvaluationMetrics

        from .render import live_view

        status, moment = self._status, self._moment
        if moment.doing:
            moment = replace(moment, seconds=moment.seconds + time.monotonic() - self._seen_s)
        if status is None:
            return live_view(None, moment, width=self._console.width)
        evaluations = {
            name: EvaluationMetrics(int(each["step"]), status.max_steps, name, float(each["loss"]), 0, 0.0)
            for name, each in status.evaluations.items()
        }
        return live_view(_metrics_of(status), moment, evaluations, width=self._console.width)
