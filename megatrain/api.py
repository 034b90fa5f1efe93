"""What the tools beside the trainer, and the store embedded in other trainers, may know of it: its one named surface.

``megatrain.embed`` and the tools in ``megatrain.extras`` import this, what is below it (``megatrain.base``,
``tiered``), and each other. A wheel without them trains all the same. The few parts that one of them has of its own
from the inside are listed in ``tests/test_architecture.py``, with the reason.

A name is imported when it is first asked for: most need torch, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.checkpoint.state import NUM_LOSSES, now_text
    from megatrain.config.load import load_config
    from megatrain.config.resolved import config_from_toml, resolved_values
    from megatrain.data.loader import StepBatch
    from megatrain.engine.weight_gradients import GradientAccumulator
    from megatrain.machine.files import machine_toml
    from megatrain.machine.machine import (
        DriveProfile,
        FileSystem,
        GpuProfile,
        MachineProfile,
        Nature,
        available_ram_bytes,
        cpu_name,
        existing_parent,
        file_system_of,
        resolve_compute_dtype,
        resolve_device,
        total_ram_bytes,
    )
    from megatrain.models.folder import ModelFolder, read_config
    from megatrain.models.hub import fetch_weights
    from megatrain.models.internals import check_internals
    from megatrain.models.load import WeightLoader
    from megatrain.models.skeleton import build_skeleton
    from megatrain.models.small import no_progress_bars, write_small_model
    from megatrain.optim.adafactor import Adafactor
    from megatrain.optim.average import EMA, WeightAverage
    from megatrain.optim.base import GRADIENT_DTYPES, Optimizer, Segment, StateKind, Update
    from megatrain.optim.clip import NonFiniteGradientError
    from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
    from megatrain.optim.moments import STATE_DTYPES
    from megatrain.optim.muon import Muon
    from megatrain.optim.table import OptimizerConfig, StateDtype
    from megatrain.optim.threads import KernelThreads, default_num_threads
    from megatrain.plan.estimate import work_of_phases
    from megatrain.plan.measure import measure_ticks
    from megatrain.plan.placement import DoesNotFitError
    from megatrain.plan.plan import RunSpec
    from megatrain.plan.planner import plan_run
    from megatrain.ranks.collectives import Collectives, RanksDifferError, check_same
    from megatrain.ranks.shards import RankLanes, RankShards
    from megatrain.run.loggers import METRICS_NAME
    from megatrain.run.record import PLAN_NAME, SUMMARY_NAME, read_entries, read_record
    from megatrain.run.status import FINAL_STATES, RunStatus, read_status
    from megatrain.training.resolve import (
        resolve,
        resolve_model,
        resolve_tiers,
    )
    from megatrain.training.trainer import Trainer

__all__ = [
    # Configs, and what a run makes of one on this machine.
    "config_from_toml",
    "load_config",
    "resolve",
    "resolve_model",
    "resolve_tiers",
    "resolved_values",
    # The machine.
    "DriveProfile",
    "FileSystem",
    "GpuProfile",
    "MachineProfile",
    "Nature",
    "available_ram_bytes",
    "cpu_name",
    "existing_parent",
    "file_system_of",
    "machine_toml",
    "resolve_compute_dtype",
    "resolve_device",
    "total_ram_bytes",
    # Models.
    "ModelFolder",
    "WeightLoader",
    "build_skeleton",
    "check_internals",
    "fetch_weights",
    "no_progress_bars",
    "read_config",
    "write_small_model",
    # Rows.
    "StepBatch",
    # Plans.
    "DoesNotFitError",
    "RunSpec",
    "measure_ticks",
    "plan_run",
    "work_of_phases",
    # Optimizers and the threads of their kernels.
    "Adafactor",
    "AdamW",
    "EMA",
    "ElementwiseOptimizer",
    "GRADIENT_DTYPES",
    "GradientAccumulator",
    "KernelThreads",
    "Lion",
    "Muon",
    "NonFiniteGradientError",
    "Optimizer",
    "OptimizerConfig",
    "SGD",
    "STATE_DTYPES",
    "Segment",
    "StateDtype",
    "StateKind",
    "Update",
    "WeightAverage",
    "default_num_threads",
    # Ranks.
    "Collectives",
    "RankLanes",
    "RanksDifferError",
    "RankShards",
    "check_same",
    # A run, its checkpoints and its records.
    "FINAL_STATES",
    "METRICS_NAME",
    "NUM_LOSSES",
    "PLAN_NAME",
    "RunStatus",
    "SUMMARY_NAME",
    "Trainer",
    "now_text",
    "read_entries",
    "read_record",
    "read_status",
]

#: Module -> its names that are public here.
_NAMES = {
    "config.load": ("load_config",),
    "config.resolved": (
        "config_from_toml",
        "resolved_values",
    ),
    "training.resolve": (
        "resolve",
        "resolve_model",
        "resolve_tiers",
    ),
    "machine.files": ("machine_toml",),
    "machine.machine": (
        "DriveProfile",
        "FileSystem",
        "GpuProfile",
        "MachineProfile",
        "Nature",
        "available_ram_bytes",
        "cpu_name",
        "existing_parent",
        "file_system_of",
        "resolve_compute_dtype",
        "resolve_device",
        "total_ram_bytes",
    ),
    "models.folder": (
        "ModelFolder",
        "read_config",
    ),
    "models.hub": ("fetch_weights",),
    "models.internals": ("check_internals",),
    "models.load": ("WeightLoader",),
    "models.skeleton": ("build_skeleton",),
    "models.small": (
        "no_progress_bars",
        "write_small_model",
    ),
    "data.loader": ("StepBatch",),
    "plan.estimate": ("work_of_phases",),
    "plan.measure": ("measure_ticks",),
    "plan.placement": ("DoesNotFitError",),
    "plan.plan": ("RunSpec",),
    "plan.planner": ("plan_run",),
    "optim.adafactor": ("Adafactor",),
    "optim.average": (
        "EMA",
        "WeightAverage",
    ),
    "optim.base": (
        "GRADIENT_DTYPES",
        "Optimizer",
        "Segment",
        "StateKind",
        "Update",
    ),
    "optim.clip": ("NonFiniteGradientError",),
    "optim.elementwise": (
        "AdamW",
        "ElementwiseOptimizer",
        "Lion",
        "SGD",
    ),
    "engine.weight_gradients": ("GradientAccumulator",),
    "optim.moments": ("STATE_DTYPES",),
    "optim.table": (
        "OptimizerConfig",
        "StateDtype",
    ),
    "optim.muon": ("Muon",),
    "optim.threads": (
        "KernelThreads",
        "default_num_threads",
    ),
    "ranks.collectives": (
        "Collectives",
        "RanksDifferError",
        "check_same",
    ),
    "ranks.shards": (
        "RankLanes",
        "RankShards",
    ),
    "training.trainer": ("Trainer",),
    "checkpoint.state": (
        "NUM_LOSSES",
        "now_text",
    ),
    "run.loggers": ("METRICS_NAME",),
    "run.record": (
        "PLAN_NAME",
        "SUMMARY_NAME",
        "read_entries",
        "read_record",
    ),
    "run.status": (
        "FINAL_STATES",
        "RunStatus",
        "read_status",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"megatrain.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'megatrain.api' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return what is public, also where it is not imported yet: for tab completion and ``help``."""
    return sorted(__all__)
