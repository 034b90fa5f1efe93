"""Reader of the records in a run's folder: the plan, the metrics and the checkpoints.

The reader skips missing or truncated records, because the run may have died during any write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.api import (
    FINAL_STATES,
    METRICS_NAME,
    PLAN_NAME,
    SUMMARY_NAME,
    RunStatus,
    config_from_toml,
    read_entries,
    read_record,
    read_status,
)
from megatrain.base.errors import ConfigError
from megatrain.base.names import RESOLVED_NAME
from megatrain.base.owner import find_owner
from megatrain.base.timeline import TIMELINE_NAME
from megatrain.config.schema import RunConfig

__all__ = ["NoRunRecordsError", "RunHistory", "read_history"]

_NO_NUMBERS = {"nan", "inf", "-inf"}


class NoRunRecordsError(Exception):
    """A folder contains no records of a run."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The records of a run.

    Attributes:
        path: Absolute path of ``output_dir``.
        state: State in ``status.json``, or "died" if this state is not final and no process owns the folder.
        status: Contents of ``status.json``; None if it cannot be read.
        steps: Step lines of ``metrics.jsonl``, in order of steps; only the last line of a repeated step.
        evaluations: Evaluation lines of ``metrics.jsonl``, as written.
        checkpoints: Checkpoint lines of ``metrics.jsonl``, as written.
        plan: Contents of ``plan.json``.
        ends: Entries of ``summary.json``, one for each start that ended normally.
        config: Resolved config; None if it cannot be read.
        timeline: File of traced steps; None if the run traced none.
    """

    path: Path
    state: str
    status: RunStatus | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    checkpoints: Sequence[Mapping[str, Any]] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    ends: Sequence[Mapping[str, Any]] = ()
    config: RunConfig | None = None
    timeline: Path | None = None

    @property
    def name(self) -> str:
        """The run's name, or the name of its folder if the config cannot be read."""
        return self.config.run_name if self.config is not None else self.path.name


def read_history(folder: Path | str) -> RunHistory:
    """Read the records of a finished or unfinished run in its ``output_dir``.

    Raises:
        NoRunRecordsError: The folder contains no records of a run.
    """
    path = Path(folder).resolve()
    status, owner = read_status(path), find_owner(path)
    plan = read_record(path / PLAN_NAME)
    lines = _read_lines(path / METRICS_NAME)
    timeline = path / TIMELINE_NAME
    if status is None and not plan and not lines and owner is None:
        raise NoRunRecordsError(f"'{folder}' is not the folder of a run. Pass the output_dir of a run")
    state: str = status.state if status is not None else "not known"
    if owner is None and state not in FINAL_STATES:
        state = "died" if status is not None else "not known"
    steps = {line["step"]: line for line in lines if "event" not in line and "loss" in line}
    return RunHistory(
        path=path,
        state=state,
        status=status,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[line for line in lines if line.get("event") == "evaluation"],
        checkpoints=[line for line in lines if line.get("event") == "checkpoint"],
        plan=plan,
        ends=read_entries(path / SUMMARY_NAME, "ends"),
        config=_read_config(path / RESOLVED_NAME),
        timeline=timeline if timeline.is_file() else None,
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a metrics file that have a step. Truncated or damaged lines are skipped."""
    objects = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    values = json.loads(line)
                except ValueError:
                    continue
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    objects.append({name: _number(value) for name, value in values.items()})
    except OSError:
        return []
    return objects


def _number(value: Any) -> Any:
    """Convert "nan", "inf" and "-inf" to numbers; they are stored as text, because strict JSON has no such numbers."""
    return float(value) if isinstance(value, str) and value in _NO_NUMBERS else value


def _read_config(path: Path) -> RunConfig | None:
    try:
        return config_from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, ConfigError):
        return None
