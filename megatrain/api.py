"""What the tools beside the trainer, and the store embedded in other trainers, may know of it: its one named surface.

``megatrain.embed``, ``doctor``, ``report``, ``verify``, ``translate``, ``checkup`` and ``what_if`` import this, what is
below it (``megatrain.base``, ``tiered``), and each other. A wheel without them trains all the same. The few parts that
one of them has of its own from the inside are listed in ``tests/test_architecture.py``, with the reason.

A name is imported when it is first asked for: most need torch, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.checkpoint.drive_folders import describe_drives
    from megatrain.checkpoint.resume import (
        ConfigChangedError,
        LostCheckpointsError,
        already_done,
        check_changes,
        find_candidates,
    )
    from megatrain.checkpoint.state import NUM_LOSSES, CheckpointError, now_text
    from megatrain.config import ConfigError
    from megatrain.config.load import load_config, salvage
    from megatrain.config.resolved import config_from_toml, resolved_values, to_toml
    from megatrain.converters.adapters import AdapterError
    from megatrain.data.dataset import TokenDataset
    from megatrain.data.loader import StepBatch
    from megatrain.data.rows_report import DataError, DataReport
    from megatrain.data.sources import is_hub_name, source_files
    from megatrain.data.stream import changed_sources, open_dataset
    from megatrain.engine.weight_gradients import GradientAccumulator
    from megatrain.machine import machine
    from megatrain.machine.files import machine_toml
    from megatrain.machine.machine import (
        DriveProfile,
        FileSystem,
        GpuProfile,
        MachineProfile,
        Nature,
        PlannedMachine,
        available_ram_bytes,
        cpu_name,
        existing_parent,
        file_system_of,
        resolve_compute_dtype,
        resolve_device,
        total_ram_bytes,
    )
    from megatrain.models.checkpoint_names import ConversionError
    from megatrain.models.export import ExportError
    from megatrain.models.folder import ModelFolder, ModelFolderError, read_config
    from megatrain.models.graph import FreezeError, ModelGraph
    from megatrain.models.hub import fetch_weights, missing_weights
    from megatrain.models.initialize import InitializationError
    from megatrain.models.internals import TransformersVersionError, check_internals
    from megatrain.models.load import WeightLoader, open_loader
    from megatrain.models.skeleton import build_skeleton
    from megatrain.models.small import SmallModel, no_progress_bars, write_small_model
    from megatrain.optim.adafactor import Adafactor
    from megatrain.optim.average import EMA, WeightAverage
    from megatrain.optim.base import GRADIENT_DTYPES, Optimizer, Segment, StateKind, Update
    from megatrain.optim.clip import NonFiniteGradientError
    from megatrain.optim.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion
    from megatrain.optim.lr import ScheduleError, make_schedule
    from megatrain.optim.moments import STATE_DTYPES
    from megatrain.optim.muon import Muon
    from megatrain.optim.plugins import OptimizerError
    from megatrain.optim.table import OptimizerConfig, StateDtype
    from megatrain.optim.threads import KernelThreads, default_num_threads
    from megatrain.plan.estimate import work_of_phases
    from megatrain.plan.limits import drive_paths, find_objections
    from megatrain.plan.measure import PlanTimer, measure_ticks
    from megatrain.plan.placement import DoesNotFitError
    from megatrain.plan.plan import Plan, RunSpec
    from megatrain.plan.planner import check_positions, check_ranks, plan_run
    from megatrain.plan.simulate import measured_rates, simulate_step
    from megatrain.plan.tiers import check_drives
    from megatrain.ranks.affinity import cores_of_rank
    from megatrain.ranks.collectives import Collectives, RanksDifferError, check_same
    from megatrain.ranks.shards import RankLanes, RankShards
    from megatrain.ranks.world import World, init_by_file
    from megatrain.run.loggers import METRICS_NAME, check_loggers
    from megatrain.run.record import PLAN_NAME, SUMMARY_NAME, read_entries, read_record
    from megatrain.run.status import FINAL_STATES, RunStatus, read_status
    from megatrain.tasks.advice import model_warnings, schedule_warnings
    from megatrain.tasks.evaluation import load_evaluation_sets, make_samplers, plans_of_evaluations
    from megatrain.tasks.known import task_of
    from megatrain.training.resolve import (
        resolve,
        resolve_best,
        resolve_checkpoint,
        resolve_data,
        resolve_evaluation,
        resolve_logging,
        resolve_model,
        resolve_preference,
        resolve_tiers,
    )
    from megatrain.training.rows import check_token_ids, make_loader, tokenizer_of
    from megatrain.training.start import describe_model, with_decays, with_kept_rules
    from megatrain.training.trainer import Trainer

__all__ = [
    # Configs, and what a run makes of one on this machine.
    "ConfigError",
    "config_from_toml",
    "load_config",
    "model_warnings",
    "resolve",
    "resolve_best",
    "resolve_checkpoint",
    "resolve_data",
    "resolve_evaluation",
    "resolve_logging",
    "resolve_model",
    "resolve_preference",
    "resolve_tiers",
    "resolved_values",
    "salvage",
    "schedule_warnings",
    "to_toml",
    # The machine.
    "DriveProfile",
    "FileSystem",
    "GpuProfile",
    "MachineProfile",
    "Nature",
    "PlannedMachine",
    "available_ram_bytes",
    "cpu_name",
    "existing_parent",
    "file_system_of",
    "machine",
    "machine_toml",
    "resolve_compute_dtype",
    "resolve_device",
    "total_ram_bytes",
    # Models.
    "AdapterError",
    "ConversionError",
    "ExportError",
    "FreezeError",
    "InitializationError",
    "ModelFolder",
    "ModelFolderError",
    "ModelGraph",
    "SmallModel",
    "TransformersVersionError",
    "WeightLoader",
    "build_skeleton",
    "check_internals",
    "fetch_weights",
    "missing_weights",
    "no_progress_bars",
    "open_loader",
    "read_config",
    "write_small_model",
    # Rows.
    "DataError",
    "DataReport",
    "StepBatch",
    "TokenDataset",
    "changed_sources",
    "is_hub_name",
    "load_evaluation_sets",
    "make_samplers",
    "open_dataset",
    "plans_of_evaluations",
    "source_files",
    # Plans.
    "DoesNotFitError",
    "Plan",
    "PlanTimer",
    "RunSpec",
    "check_drives",
    "check_ranks",
    "drive_paths",
    "find_objections",
    "measure_ticks",
    "measured_rates",
    "plan_run",
    "simulate_step",
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
    "OptimizerError",
    "SGD",
    "STATE_DTYPES",
    "ScheduleError",
    "Segment",
    "StateDtype",
    "StateKind",
    "Update",
    "WeightAverage",
    "default_num_threads",
    "make_schedule",
    # Ranks.
    "Collectives",
    "RankLanes",
    "RanksDifferError",
    "RankShards",
    "check_same",
    "World",
    "cores_of_rank",
    "init_by_file",
    # A run, its checkpoints and its records.
    "CheckpointError",
    "ConfigChangedError",
    "FINAL_STATES",
    "LostCheckpointsError",
    "METRICS_NAME",
    "NUM_LOSSES",
    "PLAN_NAME",
    "RunStatus",
    "SUMMARY_NAME",
    "Trainer",
    "already_done",
    "check_changes",
    "check_loggers",
    "check_positions",
    "check_token_ids",
    "describe_drives",
    "describe_model",
    "find_candidates",
    "make_loader",
    "now_text",
    "read_entries",
    "read_record",
    "read_status",
    "task_of",
    "tokenizer_of",
    "with_decays",
    "with_kept_rules",
]

#: Module -> its names that are public here.
_NAMES = {
    "config.load": (
        "load_config",
        "salvage",
    ),
    "config": ("ConfigError",),
    "config.resolved": (
        "config_from_toml",
        "resolved_values",
        "to_toml",
    ),
    "training.resolve": (
        "resolve",
        "resolve_best",
        "resolve_checkpoint",
        "resolve_data",
        "resolve_evaluation",
        "resolve_logging",
        "resolve_model",
        "resolve_preference",
        "resolve_tiers",
    ),
    "tasks.advice": (
        "model_warnings",
        "schedule_warnings",
    ),
    "machine": ("machine",),
    "machine.files": ("machine_toml",),
    "machine.machine": (
        "DriveProfile",
        "FileSystem",
        "GpuProfile",
        "MachineProfile",
        "Nature",
        "PlannedMachine",
        "available_ram_bytes",
        "cpu_name",
        "existing_parent",
        "file_system_of",
        "resolve_compute_dtype",
        "resolve_device",
        "total_ram_bytes",
    ),
    "converters.adapters": ("AdapterError",),
    "models.checkpoint_names": ("ConversionError",),
    "models.export": ("ExportError",),
    "models.folder": (
        "ModelFolder",
        "ModelFolderError",
        "read_config",
    ),
    "models.graph": (
        "FreezeError",
        "ModelGraph",
    ),
    "models.hub": (
        "fetch_weights",
        "missing_weights",
    ),
    "models.initialize": ("InitializationError",),
    "models.internals": (
        "TransformersVersionError",
        "check_internals",
    ),
    "models.load": (
        "WeightLoader",
        "open_loader",
    ),
    "models.skeleton": ("build_skeleton",),
    "models.small": (
        "SmallModel",
        "no_progress_bars",
        "write_small_model",
    ),
    "data.dataset": ("TokenDataset",),
    "data.loader": ("StepBatch",),
    "data.rows_report": (
        "DataError",
        "DataReport",
    ),
    "data.sources": (
        "is_hub_name",
        "source_files",
    ),
    "data.stream": (
        "changed_sources",
        "open_dataset",
    ),
    "tasks.evaluation": (
        "load_evaluation_sets",
        "make_samplers",
        "plans_of_evaluations",
    ),
    "plan.estimate": ("work_of_phases",),
    "plan.limits": (
        "drive_paths",
        "find_objections",
    ),
    "plan.measure": (
        "PlanTimer",
        "measure_ticks",
    ),
    "plan.placement": ("DoesNotFitError",),
    "plan.plan": (
        "Plan",
        "RunSpec",
    ),
    "plan.planner": (
        "check_positions",
        "check_ranks",
        "plan_run",
    ),
    "plan.simulate": (
        "measured_rates",
        "simulate_step",
    ),
    "plan.tiers": ("check_drives",),
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
    "optim.lr": (
        "ScheduleError",
        "make_schedule",
    ),
    "engine.weight_gradients": ("GradientAccumulator",),
    "optim.moments": ("STATE_DTYPES",),
    "optim.table": (
        "OptimizerConfig",
        "StateDtype",
    ),
    "optim.muon": ("Muon",),
    "optim.plugins": ("OptimizerError",),
    "optim.threads": (
        "KernelThreads",
        "default_num_threads",
    ),
    "ranks.affinity": ("cores_of_rank",),
    "ranks.collectives": (
        "Collectives",
        "RanksDifferError",
        "check_same",
    ),
    "ranks.shards": (
        "RankLanes",
        "RankShards",
    ),
    "ranks.world": (
        "World",
        "init_by_file",
    ),
    "training.rows": (
        "check_token_ids",
        "make_loader",
        "tokenizer_of",
    ),
    "training.start": (
        "describe_model",
        "with_decays",
        "with_kept_rules",
    ),
    "tasks.known": ("task_of",),
    "training.trainer": ("Trainer",),
    "checkpoint.drive_folders": ("describe_drives",),
    "checkpoint.resume": (
        "ConfigChangedError",
        "LostCheckpointsError",
        "already_done",
        "check_changes",
        "find_candidates",
    ),
    "checkpoint.state": (
        "CheckpointError",
        "NUM_LOSSES",
        "now_text",
    ),
    "run.loggers": (
        "METRICS_NAME",
        "check_loggers",
    ),
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
