"""What a run leaves for its report: ``plan.json`` at each start, ``summary.json`` at each end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.state import installed_versions, now_text

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from megatrain.metrics import RunSummary
    from megatrain.plan.plan import Plan

__all__ = ["PLAN_NAME", "SUMMARY_NAME", "plan_values", "read_record", "write_plan", "write_summary"]

PLAN_NAME, SUMMARY_NAME = "plan.json", "summary.json"
_FORMAT = 1


def write_plan(plan: Plan, config: RunConfig, continued_from: int | None) -> Path:
    """Write what is planned into ``output_dir``, at the start of a run; return the file.

    Starts of the same run are kept: a run that was continued has several.

    Args:
        continued_from: steps done before, if this run goes on; None: it starts anew, and what an earlier run left is
            replaced.

    Raises:
        OSError: the file cannot be written.
    """
    path = config.output_dir / PLAN_NAME
    starts: list[Any] = []
    if continued_from is None:
        (config.output_dir / SUMMARY_NAME).unlink(missing_ok=True)
    else:
        starts = [start for start in (read_record(path) or {}).get("starts", []) if isinstance(start, dict)]
    start = {
        "at": now_text(),
        "first_step": continued_from or 0,
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
    }
    return _write(path, {**plan_values(plan, config), "starts": [*starts, start]})


def plan_values(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """Return a plan as JSON values; sizes in bytes, times in seconds."""
    from megatrain.plan.simulate import measured_rates, simulate_step

    rates = measured_rates(plan)
    estimate = plan.estimate
    replayed = simulate_step(plan, estimate.tokens_per_step, rates) if rates is not None and estimate else None
    return {
        "format": _FORMAT,
        "headline": plan.headline,
        "num_parameters": plan.graph.num_parameters,
        "device": plan.device.type,
        "compute_dtype": str(plan.graph.dtype).removeprefix("torch."),
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in plan.rows],
        "peak_bytes": dict(plan.totals),
        "budget_bytes": dict(plan.budgets),
        "link_bytes_per_step": dict(plan.traffic),
        "checkpoint_bytes_in_output_dir": plan.checkpoint_bytes_in_output_dir,
        "estimate": None if estimate is None else estimate.to_json(),
        "replayed": None if replayed is None else dataclasses.asdict(replayed),
        "machine": describe_machine(config, plan.device.type),
        "versions": installed_versions(),
    }


def describe_machine(config: RunConfig, device: str) -> dict[str, Any]:
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


def write_summary(summary: RunSummary, output_dir: Path) -> None:
    """Add what a start of the run did to ``summary.json``. A drive that is full or broken is no reason to fail."""
    path = output_dir / SUMMARY_NAME
    ends = [end for end in (read_record(path) or {}).get("ends", []) if isinstance(end, dict)]
    with contextlib.suppress(OSError):
        _write(path, {"format": _FORMAT, "ends": [*ends, {"at": now_text(), **summary.to_json()}]})


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what was written there, or None if nothing can be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and values.get("format") == _FORMAT else None


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path
