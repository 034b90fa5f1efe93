"""Record files of a run: ``plan.json``, written at each start, and ``summary.json``, written at each end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.names import FINAL_NAME
from megatrain.base.observer import RunSummary
from megatrain.checkpoint.best import BestSpec
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.state import installed_versions, now_text

if TYPE_CHECKING:
    from megatrain.plan.plan import Plan
    from megatrain.plan.run_spec import RunSpec

__all__ = ["PLAN_NAME", "SUMMARY_NAME", "read_entries", "read_record", "summary_if_done", "write_plan", "write_summary"]


PLAN_NAME, SUMMARY_NAME = "plan.json", "summary.json"

_FORMAT = 1


def write_plan(plan: Plan, resume_step: int | None) -> Path:
    """Write the plan to ``output_dir`` at the start of a run, and return the path of the file.

    For a continued run, the file lists all starts of the run.

    Args:
        resume_step: Number of finished steps if the run continues. None for a new run, which replaces the record of
            an earlier run.

    Raises:
        OSError: The file cannot be written.
    """
    path = plan.run.output_dir / PLAN_NAME
    if resume_step is None:
        (plan.run.output_dir / SUMMARY_NAME).unlink(missing_ok=True)
    starts = [] if resume_step is None else read_entries(path, "starts")
    start = {
        "at": now_text(),
        "first_step": resume_step or 0,
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
    }
    return _write(path, {**_plan_values(plan), "starts": [*starts, start]})


def write_summary(summary: RunSummary, output_dir: Path) -> None:
    """Add a summary to ``summary.json``, ignoring errors, so that a full or broken drive does not fail the run."""
    path = output_dir / SUMMARY_NAME
    ends = [*read_entries(path, "ends"), {"at": now_text(), **summary.to_json()}]
    with contextlib.suppress(OSError):
        _write(path, {"ends": ends})


def summary_if_done(
    checkpoint: Checkpoint, num_steps: int, output_dir: Path, dtype: str, rule: BestSpec
) -> RunSummary | None:
    """Return the summary of a run if it has finished all steps and written its model, otherwise None.

    Args:
        num_steps: Total number of steps in the run.
        dtype: Dtype of the export, or "auto" for the compute dtype.
        rule: Rule for the best evaluation.
    """
    from megatrain.models.export import RECORD_FILE  # imported late, because it imports torch

    state, folder = checkpoint.state, output_dir / FINAL_NAME
    best = state.best
    if not checkpoint.belongs_to(output_dir) or (state.step < num_steps and not rule.is_over(best)):
        return None
    try:
        record = json.loads((folder / RECORD_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    export_dtype = state.model["dtype"] if dtype == "auto" else dtype
    exported_best = best if rule.is_kept else None
    step, is_average = (state.step, False) if exported_best is None else (exported_best.step, rule.is_average)
    if (record.get("step"), record.get("dtype"), record.get("ema", False)) != (step, export_dtype, is_average):
        return None
    return dataclasses.replace(state.summary(), export_dir=folder, saved_step=state.step)


def _plan_values(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON values, with sizes in bytes and times in seconds."""
    # Imported here because they import torch, which readers of records do not need.
    from megatrain.plan.show import headline, table_rows
    from megatrain.plan.simulate import replay

    simulation = replay(plan, plan.run.num_busiest_tokens)
    return {
        "headline": headline(plan),
        "num_parameters": plan.graph.num_parameters,
        "device": plan.device.type,
        "compute_dtype": str(plan.graph.dtype).removeprefix("torch."),
        "micro_batch_size": plan.run.batch.micro_batch_rows,
        "num_micro_batches": plan.run.batch.num_micro_batches,
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in table_rows(plan)],
        "peak_bytes": dict(plan.totals),
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
        "checkpoint_bytes_in_output_dir": plan.checkpoint.output_dir_bytes,
        "estimate": plan.estimate.to_json(),
        "replayed": None if simulation is None else dataclasses.asdict(simulation),
        "machine": _describe_machine(plan.run, plan.device.type),
        "versions": installed_versions(),
    }


def _describe_machine(run: RunSpec, device: str) -> dict[str, Any]:
    """Return facts about the run's machine: processor, RAM, GPU and drives."""
    from megatrain.machine.cgroups import total_ram_bytes
    from megatrain.machine.file_systems import file_system_of
    from megatrain.machine.profiles import cpu_name, load_profile

    profile = load_profile().machine
    paths = {"output_dir": run.output_dir, **{str(drive.path): drive.path for drive in run.tiers.table.nvme}}
    systems = {name: file_system_of(path) for name, path in paths.items()}
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
    partial_path = path.with_name(f".{path.name}.partial")
    partial_path.write_text(json.dumps({"format": _FORMAT, **values}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial_path, path)  # atomic, so readers never see a partial file
    return path


def read_record(path: Path) -> dict[str, Any]:
    """Return a record, or an empty dict if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and values.get("format") == _FORMAT else {}


def read_entries(path: Path, name: str) -> list[dict[str, Any]]:
    entries = read_record(path).get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
