"""The record of a run: ``plan.json``, written at each start, ``summary.json``, at each end, and its folder read back.

Reading leaves out what is missing or cut off: the run may have died at any byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.catalog import CheckpointInfo, list_checkpoints
from megatrain.checkpoint.state import CheckpointError, installed_versions, now_text
from megatrain.config.problems import ConfigError
from megatrain.config.resolved import FILE_NAME, config_from_toml
from megatrain.config.schema import RunConfig
from megatrain.run.folder import living_owner
from megatrain.run.loggers import METRICS_NAME
from megatrain.run.status import FINAL_STATES, RunStatus, read_status
from megatrain.run.timeline import FILE_NAME as TIMELINE_NAME
from megatrain.run.timeline import read_usage

if TYPE_CHECKING:
    from megatrain.plan.plan import Plan
    from megatrain.run.metrics import RunSummary

__all__ = ["NotARunError", "RunHistory", "read_history", "write_plan", "write_summary"]

PLAN_NAME, SUMMARY_NAME = "plan.json", "summary.json"
_FORMAT = 1
_NO_NUMBERS = {"nan", "inf", "-inf"}


class NotARunError(Exception):
    """A folder holds nothing that a run left."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What is known of a run.

    Attributes:
        path: ``output_dir``, absolute.
        state: As in ``status.json``; "died" where that is not final and no process has the folder.
        status: The last one written, None if there is none.
        steps: Lines of ``metrics.jsonl`` in order; of a step that comes twice the last one.
        evaluations: Lines of ``metrics.jsonl``, as written.
        checkpoints: Lines of ``metrics.jsonl``, as written.
        plan: ``plan.json``.
        ends: ``summary.json``: one entry for each start that ended well.
        saved: Checkpoints that are there now.
        config: As resolved; None where it cannot be read.
        timeline: The file of traced steps; None: there is none.
        usage: Tier -> (seconds, bytes in use) within the traced steps.
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
    timeline: Path | None = None
    usage: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name, else that of its folder."""
        return self.config.run_name if self.config is not None else self.path.name


def read_history(folder: Path | str) -> RunHistory:
    """Read what a run left, or leaves, in its ``output_dir``. Changes nothing.

    Raises:
        NotARunError: No run ever wrote there.
    """
    path = Path(folder).resolve()
    status, owner = read_status(path), living_owner(path)
    plan = _read(path / PLAN_NAME)
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
        ends=_entries(path / SUMMARY_NAME, "ends"),
        saved=_read_checkpoints(path),
        config=_read_config(path / FILE_NAME),
        timeline=timeline if timeline.is_file() else None,
        usage=read_usage(timeline),
    )


def write_plan(plan: Plan, config: RunConfig, continued_from: int | None) -> Path:
    """Write what is planned into ``output_dir``, at the start of a run; return the file.

    A run that is continued has several starts: the earlier ones are kept.

    Args:
        plan: Of this start.
        config: Of this start.
        continued_from: Steps done before, if the run is continued; None: it starts anew, and the record of an earlier
            run is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    path = config.output_dir / PLAN_NAME
    if continued_from is None:
        (config.output_dir / SUMMARY_NAME).unlink(missing_ok=True)
    starts = [] if continued_from is None else _entries(path, "starts")
    start = {
        "at": now_text(),
        "first_step": continued_from or 0,
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
    }
    return _write(path, {**_plan_values(plan, config), "starts": [*starts, start]})


def write_summary(summary: RunSummary, output_dir: Path) -> None:
    """Add the end of a start to ``summary.json``. A full or broken drive is no reason to fail the run."""
    path = output_dir / SUMMARY_NAME
    ends = [*_entries(path, "ends"), {"at": now_text(), **summary.to_json()}]
    with contextlib.suppress(OSError):
        _write(path, {"ends": ends})


def _plan_values(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """Return a plan as JSON values; sizes in bytes, times in seconds."""
    from megatrain.plan.show import headline, table_rows
    from megatrain.plan.simulate import measured_rates, simulate_step

    rates = measured_rates(plan)
    estimate = plan.estimate
    replayed = simulate_step(plan, plan.run.num_fullest_tokens, rates) if rates is not None and estimate else None
    return {
        "headline": headline(plan),
        "num_parameters": plan.graph.num_parameters,
        "device": plan.device.type,
        "compute_dtype": str(plan.graph.dtype).removeprefix("torch."),
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in table_rows(plan)],
        "peak_bytes": dict(plan.totals),
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
        "checkpoint_bytes_in_output_dir": plan.checkpoint_bytes_in_output_dir,
        "estimate": None if estimate is None else estimate.to_json(),
        "replayed": None if replayed is None else dataclasses.asdict(replayed),
        "machine": _describe_machine(config, plan.device.type),
        "versions": installed_versions(),
    }


def _describe_machine(config: RunConfig, device: str) -> dict[str, Any]:
    """Return what the run is on: processor, RAM, GPU, and the drives of the config."""
    from megatrain.plan.machine import cpu_name, file_system_of, load_profile, total_ram_bytes

    profile = load_profile().machine
    places = {"output_dir": config.output_dir, **{str(table.path): table.path for table in config.tiers.nvme}}
    systems = {name: file_system_of(path) for name, path in places.items()}
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "ram_bytes": total_ram_bytes(),
        "gpu": profile.gpu.name if device == "cuda" and profile is not None and profile.gpu is not None else None,
        "drives": {name: f"{system.kind} on {system.source}" for name, system in systems.items()},
    }


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"format": _FORMAT, **values}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)  # a reader sees the old record or the new one, never a part
    return path


def _read(path: Path) -> dict[str, Any]:
    """Return a record; empty if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) and values.get("format") == _FORMAT else {}


def _entries(path: Path, name: str) -> list[dict[str, Any]]:
    return [entry for entry in _read(path).get(name, []) if isinstance(entry, dict)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file that have a step; a line that is cut off or damaged is skipped."""
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
