"""Everything that a run has left in its folder, read once: what is missing or cut off is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.checkpoint.catalog import CheckpointInfo, list_checkpoints
from megatrain.checkpoint.state import CheckpointError
from megatrain.config.problems import ConfigError
from megatrain.config.resolved import FILE_NAME, config_from_toml
from megatrain.config.schema import RunConfig
from megatrain.loggers import METRICS_NAME
from megatrain.report.record import PLAN_NAME, SUMMARY_NAME, read_record
from megatrain.run_folder import FINAL_STATES, RunStatus, living_owner, read_status

__all__ = ["NotARunError", "RunHistory", "read_history"]

_NO_NUMBERS = {"nan", "inf", "-inf"}


class NotARunError(Exception):
    """A folder holds nothing that a run left."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What is known of a run.

    Attributes:
        path: its ``output_dir``, absolute.
        state: as in ``status.json``; "died" where that is not final and no process has the folder.
        status: what it wrote last, None if nothing.
        steps: lines of ``metrics.jsonl``, in order; of a step that comes twice the last one.
        evaluations: lines of ``metrics.jsonl``, in order; of a step that comes twice the last one.
        checkpoints: lines of ``metrics.jsonl``, in order; of a step that comes twice the last one.
        plan: ``plan.json``.
        ends: what each start of the run that ended well said of itself.
        saved: checkpoints that are there now.
        config: as it was resolved; None where it cannot be read.
    """

    path: Path
    state: str
    status: RunStatus | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    checkpoints: Sequence[Mapping[str, Any]] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    ends: Sequence[Mapping[str, Any]] = ()
    saved: Sequence[CheckpointInfo] = ()
    config: RunConfig | None = None

    @property
    def name(self) -> str:
        """The run's name, else that of its folder."""
        return self.config.run_name if self.config is not None else self.path.name


def read_history(folder: Path | str) -> RunHistory:
    """Read what a run left, or leaves, in its ``output_dir``. Changes nothing.

    Raises:
        NotARunError: no run ever wrote there.
    """
    path = Path(folder).resolve()
    status, owner = read_status(path), living_owner(path)
    plan = read_record(path / PLAN_NAME) or {}
    lines = _read_lines(path / METRICS_NAME)
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
        ends=[end for end in (read_record(path / SUMMARY_NAME) or {}).get("ends", []) if isinstance(end, dict)],
        saved=_read_checkpoints(path),
        config=_read_config(path / FILE_NAME),
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file that have a step; a line that is cut off or damaged is passed over."""
    found = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    values = json.loads(line)
                except ValueError:
                    continue
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    found.append({name: _number(value) for name, value in values.items()})
    except OSError:
        return []
    return found


def _number(value: Any) -> Any:
    """Return a number that strict JSON had to write as text."""
    return float(value) if isinstance(value, str) and value in _NO_NUMBERS else value


def _read_checkpoints(path: Path) -> Sequence[CheckpointInfo]:
    try:
        return list_checkpoints(path)
    except (CheckpointError, OSError):
        return ()


def _read_config(path: Path) -> RunConfig | None:
    try:
        return config_from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, ConfigError):
        return None
