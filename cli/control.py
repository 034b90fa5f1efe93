"""``megatrain-tier status``, ``save`` and ``stop``: show, save and stop runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED, RunFailedError
from .options import json_option, records_of
from .terminal import given_columns, wrap_words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatrain.base.owner import LockHolder
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.run.status import RunStatus

_POLL_S = 0.1
_VIEW_POLL_S = 0.25
_NOT_ENTERED = ("snap", "live")  # Folders of blocks contain many files and no runs.

run_argument = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN")
_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait.",
)


# -- status --------------------------------------------------------------------------------------------------------


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
def status_command(run: Path | None, is_followed: bool, as_json: bool) -> int:
    """Show the state of runs.

    RUN is the output_dir of a run, or a folder with several runs below it. Default: the current folder.
    """
    if is_followed:
        return _follow(_one_of(run or Path()), as_json=as_json)
    seen = list(map(_inspect_run, _find_runs(run or Path())))
    if run is not None and not seen and (alone := _inspect_run(run)).owner is not None:
        seen = [alone]
    shown = []
    for one in seen:
        with records_of(one.path):
            if as_json:
                shown.append(_to_json(one))
            else:
                _print(one)
    if as_json:
        click.echo(json.dumps({"runs": shown}))
    if not seen:
        if run is not None:
            raise RunFailedError(f"no run in '{run}' or below. Pass the output_dir of a run", EXIT_CONFIG)
        if not as_json:
            click.echo("no runs in the current folder or below")
    return EXIT_DONE


@dataclass(frozen=True)
class _Seen:
    """State of a run.

    Attributes:
        owner: process of the run, or None if it has ended.
        status: status that the current or last process wrote.
        saved_step: step of the checkpoint from which the run would continue.
        drive_bytes: bytes of the run's checkpoints, by path of the drive.
        copied_steps: steps of the whole copies in output_dir.
        lost_steps: steps of the checkpoints whose parts on a drive are gone.
    """

    path: Path
    owner: LockHolder | None
    status: RunStatus | None
    saved_step: int | None
    drive_bytes: dict[Path, int]
    copied_steps: list[int]
    lost_steps: list[int]


def _find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders with a status, in ``root`` and below. Follows no symbolic links."""
    from megatrain.run.status import STATUS_NAME

    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_ENTERED)
        if STATUS_NAME in files:
            names.clear()
            yield Path(folder)


def _one_of(root: Path) -> Path:
    """Return the run to follow: the folder itself, or the only running one below it."""
    from megatrain.base.owner import living_owner

    if living_owner(root) is not None:
        return root
    alive = [path for path in _find_runs(root) if living_owner(path) is not None]
    if len(alive) > 1:
        raise RunFailedError(
            f"{len(alive)} runs are active in '{root}': choose one of {', '.join(map(str, alive))}", EXIT_CONFIG
        )
    return alive[0] if alive else root


def _inspect_run(path: Path) -> _Seen:
    from megatrain.base.owner import living_owner
    from megatrain.checkpoint.locations import bytes_on_drives
    from megatrain.checkpoint.scan import saved_checkpoints
    from megatrain.run.status import read_status

    owner = living_owner(path)
    status = read_status(path) if owner is None else _own_status(path, owner)
    saved = saved_checkpoints(path)
    return _Seen(
        path,
        owner,
        status,
        next((checkpoint.step for checkpoint in saved if not checkpoint.is_gone), None),
        bytes_on_drives(path),
        _steps(checkpoint for checkpoint in saved if checkpoint.is_copy and not checkpoint.is_gone),
        _steps(checkpoint for checkpoint in saved if checkpoint.is_gone),
    )


def _steps(checkpoints: Iterable[Checkpoint]) -> list[int]:
    return sorted({checkpoint.step for checkpoint in checkpoints if checkpoint.step is not None})


def _print(seen: _Seen) -> None:
    click.secho(str(seen.path), bold=True)
    for name, text in _lines(seen):
        echo_wrapped(f"  {name:<9}{text}" if name else f"  {text}", indent=11 if name else 4)


def echo_wrapped(text: str, *, indent: int = 2) -> None:
    """Print text, with wrapped and indented lines on a terminal or if ``COLUMNS`` is set."""
    if sys.stdout.isatty() or given_columns():
        text = "\n".join(wrap_words(text, shutil.get_terminal_size().columns, indent=indent))
    for line in text.splitlines():
        click.echo(line)


def _lines(seen: _Seen) -> list[tuple[str, str]]:
    status, owner = seen.status, seen.owner
    if owner is None:
        lines = [("", line) for line in _describe_ended(seen.path).splitlines()]
        lines += [*_evaluations(status), *_places(seen)]
        if status is not None and status.state == "done" and (seen.path / "final").is_dir():
            lines.append(("model", str(seen.path / "final")))
        return lines
    if status is None:
        return [("starting", owner.text)]
    from megatrain.base.observer import format_rank

    lines = [(status.state, _progress(status))]
    if silence := _silence(status):
        lines.append(("silent", silence))
    lines += _evaluations(status)
    if status.metrics is not None and any(status.metrics.tier_used_bytes.values()):
        lines.append(("memory", _memory(status)))
        lines += [(f"rank {number}", format_rank(each)) for number, each in enumerate(status.metrics.ranks)]
    if seen.saved_step is not None:
        when = f", {_age(status.checkpoint_at)} ago" if status.checkpoint_at is not None else ""
        lines.append(("saved", f"step {seen.saved_step}{when}"))
    lines += _places(seen)
    lines.append(("process", f"{owner.pid} on {owner.host}, last wrote {_age(status.updated_at)} ago"))
    if status.message:
        lines.append(("message", status.message))
    return lines


def _silence(status: RunStatus) -> str:
    """Return a text with the likely reason if a run has not updated its status for some time, or ""."""
    from megatrain.run.status import SILENT_S

    seconds = _seconds_since(status.updated_at)
    if seconds is None or seconds < SILENT_S:
        return ""
    pace = ""
    if status.metrics is not None:
        pace = f"; a step usually takes {max(status.metrics.mean_step_s, status.metrics.step_s):.3g} s"
    return (
        f"no status for {duration(seconds)}, although the run writes one every second{pace}. A drive may be full, or "
        "the process suspended: see the output of the run"
    )


def _places(seen: _Seen) -> list[tuple[str, str]]:
    """Return a line for each drive with parts of checkpoints, and a line for the copies in output_dir."""
    from tiered.units import format_size

    lines = [
        ("drive", f"{format_size(nbytes)} of the checkpoints are in {path}: deleting this folder destroys them")
        for path, nbytes in seen.drive_bytes.items()
    ]
    if seen.copied_steps:
        steps = ", ".join(map(str, seen.copied_steps))
        lines.append(("copies", f"step{'s' if len(seen.copied_steps) > 1 else ''} {steps}, complete in output_dir"))
    return lines


def _evaluations(status: RunStatus | None) -> list[tuple[str, str]]:
    """Return a line for each evaluation set. The status has non-finite figures as text, so convert them to float."""
    from megatrain.base.observer import format_preferences

    lines = []
    for name, each in (status.evaluations if status is not None else {}).items():
        said = f"perplexity {float(each['perplexity']):.2f}"
        if each.get("preferences"):
            said = format_preferences({key: float(value) for key, value in each["preferences"].items()})
        lines.append(("eval", f"{name}: loss {float(each['loss']):.4f}, {said} at step {each['step']}"))
    return lines


def _progress(status: RunStatus) -> str:
    if not status.max_steps:
        return status.run_name
    parts = [f"step {status.step}/{status.max_steps} {100.0 * status.step / status.max_steps:.1f}%"]
    if (metrics := status.metrics) is not None:
        parts += [
            f"loss {metrics.loss:z.4f}",
            f"gnorm {metrics.grad_norm:.2f}",
            f"lr {metrics.lr:.1e}",
            f"{metrics.real_tokens_per_s:,.0f} tok/s",
        ]
        parts += [f"eta {duration(metrics.eta_s)}"] if status.state != "paused" else []
    return " | ".join(parts)


def _memory(status: RunStatus) -> str:
    from megatrain.base.observer import format_tiers
    from tiered.units import format_size

    metrics = status.metrics
    assert metrics is not None
    used = {tier: nbytes for tier, nbytes in metrics.tier_used_bytes.items() if nbytes}
    tiers = [format_tiers({tier: nbytes}, metrics.tier_capacity_bytes) for tier, nbytes in used.items()]
    return "  ".join([*tiers, f"process {format_size(metrics.rss_bytes)}"])


def _to_json(seen: _Seen) -> dict[str, Any]:
    return {
        "path": str(seen.path.resolve()),
        "running": seen.owner is not None,
        "owner": None if seen.owner is None else seen.owner.text,
        "saved_step": seen.saved_step,
        "checkpoint_bytes_on_drives": {str(path): nbytes for path, nbytes in seen.drive_bytes.items()},
        "copied_steps": seen.copied_steps,
        "lost_steps": seen.lost_steps,
        "status": None if seen.status is None else seen.status.to_json(),
    }


# -- status --follow -----------------------------------------------------------------------------------------------


def _follow(run: Path, *, as_json: bool) -> int:
    """Show a run until it ends, or how it ended. Ctrl-C closes the view.

    Returns:
        The exit code of the run; 0 after Ctrl-C; 1 if the run died.
    """
    from megatrain.base.owner import living_owner
    from megatrain.run.status import read_status

    owner = living_owner(run)
    if owner is None:
        status = read_status(run)
        if status is None:
            raise RunFailedError(_not_a_run(run), EXIT_CONFIG)
        if as_json:
            click.echo(json.dumps(status.to_json()))
        else:
            echo_wrapped(_describe_ended(run))
        return _exit_code_of(status)
    view = _JsonLines() if as_json else _View() if sys.stdout.isatty() else _Lines()
    try:
        view.open()
        while (now := living_owner(run)) is not None and now.pid == owner.pid:
            if (status := _own_status(run, owner)) is not None:
                view.show(status)
            time.sleep(_VIEW_POLL_S)
        status = read_status(run)  # The last status, which was written before the folder was unlocked.
        if status is not None and status.pid == owner.pid:
            view.show(status)
    except KeyboardInterrupt:
        view.close()
        click.echo(f"the run continues in process {owner.pid}", err=True)
        return EXIT_DONE
    finally:
        view.close()
    if not as_json:
        echo_wrapped(_describe_ended(run))
    return EXIT_FAILED if status is None or status.pid != owner.pid else _exit_code_of(status)


def _exit_code_of(status: RunStatus) -> int:
    """Return the exit code of an ended run. A run without a final state died."""
    from megatrain.run.status import FINAL_STATES

    if status.state not in FINAL_STATES:
        return EXIT_FAILED
    if status.exit_code is not None:
        return status.exit_code
    return {"done": EXIT_DONE, "stopped": EXIT_INTERRUPTED_AND_SAVED}.get(status.state, EXIT_FAILED)


class _Lines:
    """View that prints a line for each step and each message."""

    def __init__(self) -> None:
        self._step, self._message = -1, ""

    def open(self) -> None:
        """Start drawing."""

    def show(self, status: RunStatus) -> None:
        """Show the changes since the last status."""
        from megatrain.base.observer import format_step

        if status.metrics is not None and status.metrics.step != self._step:
            self._step = status.metrics.step
            self.say(format_step(status.metrics))
        if status.message and status.message != self._message:
            self._message = status.message
            self.say(status.message)

    def say(self, text: str) -> None:
        """Print a message."""
        click.echo(text)

    def close(self) -> None:
        """Restore the terminal. Idempotent."""


class _JsonLines(_Lines):
    """View that prints a JSON object for each change of the status."""

    def show(self, status: RunStatus) -> None:
        if status.updated_at + str(status.step) != self._message:
            self._message = status.updated_at + str(status.step)
            self.say(json.dumps(status.to_json()))


class _View(_Lines):
    """The same live view that the run draws on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        from megatrain.base.progress import Moment

        super().__init__()
        self._console = Console(highlight=False)
        self._status: RunStatus | None = None
        self._moment, self._seen_s = Moment(doing="starting"), time.monotonic()

    def open(self) -> None:
        from .render import LiveView

        self._live = LiveView(self._console, self._picture)

    def show(self, status: RunStatus) -> None:
        from megatrain.base.progress import Moment

        moment = Moment.from_json(status.activity)
        # The run writes its status once a second, so count the seconds of the same activity in between.
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
        self._live.close(stays=self._status is not None and self._status.metrics is not None)

    def _picture(self) -> RenderableType:
        from megatrain.base.observer import EvaluationMetrics

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
        return live_view(status.metrics, moment, evaluations, width=self._console.width)


# -- save ----------------------------------------------------------------------------------------------------------


@click.command("save")
@run_argument
@_timeout_option
@json_option
def save_command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Ask a run to save a checkpoint after its current step.

    RUN is the run's output_dir. The command returns when the checkpoint is on disk.
    """
    from megatrain.base.owner import check_reachable, living_owner, send_signal

    owner = _require_owner(run)
    try:
        check_reachable(run, owner)
        before = _wait_for_handler(run, owner, timeout_s)
        send_signal(run, owner, signal.SIGUSR1)
    except ProcessLookupError:
        raise RunFailedError(f"{run}: {_describe_ended(run)}", EXIT_FAILED) from None
    if not as_json:
        click.echo(f"asked process {owner.pid} to save after its current step", err=True)
    saved: list[int] = []

    def is_over() -> bool:
        has_ended = living_owner(run) != owner  # Check before reading the status, which a run writes before it ends.
        status = _own_status(run, owner)
        if status is not None and (step := _newer_checkpoint(before, status)) is not None:
            saved.append(step)
        return bool(saved) or has_ended

    is_in_time = _wait_for(is_over, timeout_s)
    if saved:
        path = str((run / "checkpoints").resolve())
        text = f"saved  checkpoint at step {saved[0]}"
        click.echo(json.dumps({"saved_step": saved[0], "path": path}) if as_json else text)
        return EXIT_DONE
    if is_in_time:
        raise RunFailedError(f"{run}: {_describe_ended(run)}", EXIT_FAILED)
    status = _own_status(run, owner)
    why = f": {status.message}" if status is not None and status.state == "paused" else ""
    raise RunFailedError(
        f"no checkpoint within {timeout_s:g} s{why}. The run will still save after its step: see "
        f"megatrain-tier status {run}",
        EXIT_FAILED,
    )


def _wait_for_handler(run: Path, owner: LockHolder, timeout_s: float) -> RunStatus:
    """Wait until a run handles SIGUSR1, which would otherwise kill it; return its status.

    Raises:
        ProcessLookupError: the run has ended.
    """
    from megatrain.base.owner import catches_signal, living_owner

    seen: list[RunStatus] = []

    def is_ready() -> bool:
        if living_owner(run) != owner:
            raise ProcessLookupError
        status = _own_status(run, owner)
        if status is not None and status.state not in ("starting", "training", "paused"):
            raise RunFailedError(f"{run}: all steps are done ({status.state}), so it will not save again", EXIT_FAILED)
        if status is None or not catches_signal(owner.pid or 0, signal.SIGUSR1):
            return False
        seen.append(status)
        return True

    if not _wait_for(is_ready, timeout_s):
        raise RunFailedError(f"{run}: still starting after {timeout_s:g} s; no request was sent", EXIT_FAILED)
    return seen[-1]


def _newer_checkpoint(before: RunStatus, now: RunStatus) -> int | None:
    """Return the step of a new checkpoint that includes all steps finished before the request, or None."""
    is_new = (now.checkpoint_step, now.checkpoint_at) != (before.checkpoint_step, before.checkpoint_at)
    if now.checkpoint_step is None or not is_new or now.checkpoint_step < before.step:
        return None
    return now.checkpoint_step


# -- stop ----------------------------------------------------------------------------------------------------------


@click.command("stop")
@run_argument
@_timeout_option
@json_option
def stop_command(run: Path, timeout_s: float, as_json: bool) -> int:
    """Ask a run to finish its current step, save and end.

    RUN is the run's output_dir. The command returns when the run has ended. A second stop ends the run immediately,
    without saving.
    """
    from megatrain.base.owner import living_owner, send_signal
    from megatrain.run.folder import committed_step
    from megatrain.run.status import read_status

    owner = _require_owner(run)
    try:
        send_signal(run, owner, signal.SIGTERM)
    except ProcessLookupError:
        pass  # The run has just ended.
    else:
        if not as_json:
            click.echo(f"asked process {owner.pid} to finish its step, save and end", err=True)
    if not _wait_for(lambda: living_owner(run) != owner, timeout_s):
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
        echo_wrapped(_describe_ended(run))
    return EXIT_DONE


# -- shared --------------------------------------------------------------------------------------------------------


def _require_owner(run: Path) -> LockHolder:
    """Return the process of a run. If the run has ended, raise an error that describes how."""
    from megatrain.base.owner import living_owner
    from megatrain.run.status import read_status

    owner = living_owner(run)
    if owner is None:
        if read_status(run) is None:
            raise RunFailedError(_not_a_run(run), EXIT_CONFIG)
        raise RunFailedError(f"{run}: {_describe_ended(run)}", EXIT_FAILED)
    return owner


def _not_a_run(run: Path) -> str:
    return f"'{run}' is not the folder of a run. Pass the output_dir of a run"


def _own_status(run: Path, owner: LockHolder) -> RunStatus | None:
    """Return the status that this process wrote, or None if only an earlier process wrote one."""
    from megatrain.run.status import read_status

    status = read_status(run)
    return status if status is not None and status.pid == owner.pid and status.host == owner.host else None


def _wait_for(is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until ``is_over`` returns True; return False after ``timeout_s``."""
    end_s = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _describe_ended(run: Path) -> str:
    """Describe how a run ended and what the user can do."""
    from megatrain.run.status import read_status

    status = read_status(run)
    if status is None:
        return "not running"
    what_next = _what_next(run)
    seen = f"{_age(status.updated_at)} ago"
    if status.state == "done":
        lost = _lost(run)
        return f"done, {status.step:,} step{'s' if status.step != 1 else ''}, {seen}" + (f"\n{lost}" if lost else "")
    if status.state == "stopped":
        return f"stopped at step {status.step}, {seen}; {what_next}"
    if status.state == "failed":
        return f"failed at step {status.step}, {seen}: {status.message}\n{what_next}"
    return f"not running; last seen at step {status.step}, {seen}; {what_next}"


def _what_next(run: Path) -> str:
    """Describe the step from which a run would continue, and the checkpoints that were lost with a drive."""
    from megatrain.checkpoint.locations import refused_drives
    from megatrain.checkpoint.scan import usable_checkpoint

    found, lost = usable_checkpoint(run), _lost(run)
    if foreign := refused_drives(run):
        return "\n".join(["it cannot continue", *foreign, *[lost] * bool(lost)])
    if found is not None:
        where = "the copy of step" if found.is_copy else "step"
        return f"run it again to continue from {where} {found.step}" + (f"\n{lost}" if lost else "")
    if lost:
        return f"it cannot continue\n{_lost(run, with_remedy=True)}"
    return "nothing was saved; run it again to start from the beginning"


def _lost(run: Path, *, with_remedy: bool = False) -> str:
    """Describe checkpoints that were lost with a drive or are read from another place; "" if there are none."""
    from megatrain.checkpoint.scan import Lost, outside_notices, saved_checkpoints

    found = saved_checkpoints(run)
    lost = Lost.among(found)
    lines = [] if lost is None else [f"{lost}\n{lost.remedy(run)}" if with_remedy else str(lost)]
    return "\n".join([*lines, *outside_notices(found)])


def _age(moment: str) -> str:
    """Format the time since a date, such as "40 s", "3 min" or "2 h 5 min"."""
    seconds = _seconds_since(moment)
    return "some time" if seconds is None else duration(seconds)


def _seconds_since(moment: str) -> float | None:
    """Return the seconds since a date, or None if the text is not a date."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    except (ValueError, TypeError):
        return None


def duration(seconds: float) -> str:
    """Format a duration in at most two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
