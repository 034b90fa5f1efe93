"""State of a run, read from its files and its process, and how to continue an ended run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.owner import LockHolder, find_owner
from megatrain.checkpoint.inventory import saved_checkpoints, usable_checkpoint
from megatrain.checkpoint.locations import bytes_on_drives, refused_drives
from megatrain.checkpoint.notices import LostPartsNotice, moved_run_notices
from megatrain.run.folder import committed_step
from megatrain.run.status import FINAL_STATES, RunStatus, read_status

from .main import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED_AND_SAVED, RunFailedError

if TYPE_CHECKING:
    from megatrain.checkpoint.inspection import InventoryEntry


@dataclass(frozen=True)
class RunFolderState:
    """State of a run's folder.

    Attributes:
        owner: Process of the run, or None if the run has ended.
        status: Status that the run's current or last process wrote.
        saved_step: Step of the checkpoint from which the run would continue.
        drive_bytes: Bytes of the run's checkpoints, by path of the drive.
        copied_steps: Steps of the complete copies in output_dir.
        lost_steps: Steps of the checkpoints whose parts on a drive are lost.
    """

    path: Path
    owner: LockHolder | None
    status: RunStatus | None
    saved_step: int | None
    drive_bytes: dict[Path, int]
    copied_steps: list[int]
    lost_steps: list[int]

    @classmethod
    def inspect(cls, path: Path) -> RunFolderState:
        """Return the state of the run in a folder."""
        owner = find_owner(path)
        entries = saved_checkpoints(path)
        return cls(
            path,
            owner,
            read_status(path) if owner is None else status_of_owner(path, owner),
            next((entry.checkpoint.step for entry in entries if not entry.is_gone), None),
            bytes_on_drives(path),
            _steps(entry for entry in entries if entry.checkpoint.is_copy and not entry.is_gone),
            _steps(entry for entry in entries if entry.is_gone),
        )


def _steps(entries: Iterable[InventoryEntry]) -> list[int]:
    return sorted({step for entry in entries if (step := entry.checkpoint.step) is not None})


def status_of_owner(run: Path, owner: LockHolder) -> RunStatus | None:
    """Return the status that the owner wrote, or None if only an earlier process wrote a status."""
    status = read_status(run)
    return status if status is not None and status.pid == owner.pid and status.host == owner.host else None


def require_owner(run: Path) -> LockHolder:
    """Return the process that executes a run. If the run has ended, raise an error that states how it ended."""
    owner = find_owner(run)
    if owner is None:
        if read_status(run) is None:
            raise RunFailedError(missing_run_message(run), EXIT_CONFIG)
        raise RunFailedError(f"{run}: {describe_ended(run)}", EXIT_FAILED)
    return owner


def missing_run_message(run: Path) -> str:
    """Return the error message for a folder without a run."""
    return f"'{run}' is not the folder of a run. Pass the output_dir of a run"


def status_exit_code(status: RunStatus) -> int:
    """Return the exit code of a run that has ended. If its status has no final state, its process died."""
    if status.state not in FINAL_STATES:
        return EXIT_FAILED
    if status.exit_code is not None:
        return status.exit_code
    return {"done": EXIT_DONE, "stopped": EXIT_INTERRUPTED_AND_SAVED}.get(status.state, EXIT_FAILED)


def describe_ended(run: Path) -> str:
    """Describe how a run ended and what the user can do."""
    status = read_status(run)
    if status is None:
        return "not running"
    next_step = _next_step_text(run)
    age = f"{format_age(status.updated_at)} ago"
    if status.state == "done":
        lost = _lost_text(run)
        return f"done, {status.step:,} step{'s' if status.step != 1 else ''}, {age}" + (f"\n{lost}" if lost else "")
    if status.state == "stopped":
        return f"stopped at step {status.step}, {age}; {next_step}"
    if status.state == "failed":
        return f"failed at step {status.step}, {age}: {status.message}\n{next_step}"
    return f"not running; last seen at step {status.step}, {age}; {next_step}"


def describe_interrupted(run: Path) -> str:
    """Describe the last checkpoint of a run that was interrupted before it could save."""
    step = committed_step(run)
    if step is None:
        return "interrupted; nothing saved"
    return f"interrupted; last saved at step {step}: run the same command again to continue from there"


def _next_step_text(run: Path) -> str:
    """Describe the step from which a run would continue, and the checkpoints that were lost with a drive."""
    checkpoint, lost = usable_checkpoint(run), _lost_text(run)
    if refusals := refused_drives(run):
        return "\n".join(["it cannot continue", *refusals, *[lost] * bool(lost)])
    if checkpoint is not None:
        origin = "the copy of step" if checkpoint.is_copy else "step"
        return f"run it again to continue from {origin} {checkpoint.step}" + (f"\n{lost}" if lost else "")
    if lost:
        return f"it cannot continue\n{_lost_text(run, with_remedy=True)}"
    return "nothing was saved; run it again to start from the beginning"


def _lost_text(run: Path, *, with_remedy: bool = False) -> str:
    """Describe checkpoints that were lost with a drive or are read from another place. Return "" if none exist."""
    checkpoints = saved_checkpoints(run)
    notice = LostPartsNotice.among(checkpoints)
    lines = [] if notice is None else [f"{notice}\n{notice.remedy(run)}" if with_remedy else str(notice)]
    return "\n".join([*lines, *moved_run_notices(checkpoints)])


def format_age(timestamp: str) -> str:
    """Format the time since a date, such as "40 s", "3 min" or "2 h 5 min"."""
    seconds = seconds_since(timestamp)
    return "some time" if seconds is None else format_seconds(seconds)


def seconds_since(timestamp: str) -> float | None:
    """Return the seconds since a date, or None if the text is not a date."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds())
    except (ValueError, TypeError):
        return None


def format_seconds(seconds: float) -> str:
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
