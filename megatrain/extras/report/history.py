"""The records in a run's folder, read back: its plan, its figures and its checkpoints.

The reader skips missing or truncated records, because the run may have died at any byte.
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
from megatrain.base.owner import living_owner
from megatrain.base.timeline import TIMELINE_NAME
from megatrain.config.schema import RunConfig

__all__ = ["NotARunError", "RunHistory", "read_history"]

_NO_NUMBERS = {"nan", "inf", "-inf"}


class NotARunError(Exception):
    """A folder has no records of a run."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The records of a run.

    Attributes:
        path: ``output_dir``, absolute.
        state: As in ``status.json``; "died" if that is not final and no process owns the folder.
        status: The last one written, None if there is none.
        steps: Lines of ``metrics.jsonl`` in order; the last one for a repeated step.
        evaluations: Lines of ``metrics.jsonl``, as written.
        checkpoints: Lines of ``metrics.jsonl``, as written.
        plan: ``plan.json``.
        ends: ``summary.json``: one entry for each start that ended normally.
        config: The resolved config; None if it cannot be read.
        timeline: File of traced steps; None if there is none.
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
        """The run's name, else the name of its folder."""
        return self.config.run_name if self.config is not None else self.path.name


def read_history(folder: Path | str) -> RunHistory:
    """Read the records of a run in its ``output_dir``, finished or not. Changes nothing.

    Raises:
        NotARunError: No run ever wrote there.
    """
    path = Path(folder).resolve()
    status, owner = read_status(path), living_owner(path)
    plan = read_record(path / PLAN_NAME)
    lines = _read_lines(path / METRICS_NAME)
    timeline = path / TIMELINE_NAME
    if status is None and not plan and not lines and owner is None:
        raise NotARunError(f"'{folder}' is not the folder of a run. Give the output_dir of one")
    state: str = status.state if status is not None else "not known"
    if owner is None and state not in FINAL_STATES:
        state = "died" if status is not None else "not known"
    steps = {line["step"]: line for line in lines if "event" not in line and "loss" in line}
    return RunHistory(
        path=path,
        state=state,
        status=status,
        steps=[steps[number] for number in sorted(steps)],
        evaluations=[line for line in lines if line.get("event") == "evaluation"],
        checkpoints=[line for line in lines if line.get("event") == "checkpoint"],
        plan=plan,
        ends=read_entries(path / SUMMARY_NAME, "ends"),
        config=_read_config(path / RESOLVED_NAME),
        timeline=timeline if timeline.is_file() else None,
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file that have a step; truncated or damaged lines are skipped."""
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
    """Return a number that was written as text, because strict JSON lacks it."""
    return float(value) if isinstance(value, str) and value in _NO_NUMBERS else value


def _read_config(path: Path) -> RunConfig | None:
    try:
        return config_from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, ConfigError):
        return None
