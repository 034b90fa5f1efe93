"""Names of the trainer that the tools in ``megatrain.extras`` use: report, doctor, verify and others.

The tools import only this module, ``megatrain.base``, ``tiered`` and each other. ``tests/test_architecture.py`` lists
the exceptions with their reasons. The trainer also works in a wheel without the tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.checkpoint.state import NUM_LOSSES as NUM_LOSSES
    from megatrain.checkpoint.state import now_text as now_text
    from megatrain.config.load import load_config as load_config
    from megatrain.config.resolved import config_from_toml as config_from_toml
    from megatrain.config.resolved import resolved_values as resolved_values
    from megatrain.data.loader import StepBatch as StepBatch
    from megatrain.engine.unit.weight_gradients import GradientAccumulator as GradientAccumulator
    from megatrain.machine.cgroups import available_ram_bytes as available_ram_bytes
    from megatrain.machine.cgroups import total_ram_bytes as total_ram_bytes
    from megatrain.machine.file_systems import FileSystem as FileSystem
    from megatrain.machine.file_systems import Medium as Medium
    from megatrain.machine.file_systems import existing_parent as existing_parent
    from megatrain.machine.file_systems import file_system_of as file_system_of
    from megatrain.machine.files import machine_toml as machine_toml
    from megatrain.machine.profiles import DriveProfile as DriveProfile
    from megatrain.machine.profiles import GpuProfile as GpuProfile
    from megatrain.machine.profiles import MachineProfile as MachineProfile
    from megatrain.machine.profiles import cpu_name as cpu_name
    from megatrain.machine.resources import resolve_compute_dtype as resolve_compute_dtype
    from megatrain.machine.this_machine import THIS_MACHINE as THIS_MACHINE
    from megatrain.models.folder import ModelFolder as ModelFolder
    from megatrain.models.folder import read_config as read_config
    from megatrain.models.small import no_progress_bars as no_progress_bars
    from megatrain.models.small import write_small_model as write_small_model
    from megatrain.optim.base import Segment as Segment
    from megatrain.optim.base import Update as Update
    from megatrain.optim.elementwise import AdamW as AdamW
    from megatrain.optim.table import OptimizerConfig as OptimizerConfig
    from megatrain.optim.threads import KernelThreads as KernelThreads
    from megatrain.optim.threads import default_num_threads as default_num_threads
    from megatrain.plan.flops import work_of_phases as work_of_phases
    from megatrain.plan.measure import measure_ticks as measure_ticks
    from megatrain.plan.planner import plan_run as plan_run
    from megatrain.plan.run_spec import RunSpec as RunSpec
    from megatrain.plan.shortfall import DoesNotFitError as DoesNotFitError
    from megatrain.run.loggers import METRICS_NAME as METRICS_NAME
    from megatrain.run.record import PLAN_NAME as PLAN_NAME
    from megatrain.run.record import SUMMARY_NAME as SUMMARY_NAME
    from megatrain.run.record import read_entries as read_entries
    from megatrain.run.record import read_record as read_record
    from megatrain.run.status import FINAL_STATES as FINAL_STATES
    from megatrain.run.status import RunStatus as RunStatus
    from megatrain.run.status import read_status as read_status
    from megatrain.training.resolve import resolve as resolve
    from megatrain.training.resolve import resolve_model as resolve_model
    from megatrain.training.resolve import resolve_tiers as resolve_tiers
    from megatrain.training.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
