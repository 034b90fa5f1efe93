"""Machine and drive profiles in the format of the ``doctor`` command, with round numbers as rates."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil

from megatrain.machine import file_systems, profiles
from megatrain.machine.profiles import DriveProfile, MachineProfile

NOW = datetime.now(UTC)


def drive(read: float, write: float, mixed: float, **more: object) -> DriveProfile:
    """Return a drive profile with these rates in bytes per second."""
    return DriveProfile.model_validate(
        {
            "path": "/drive",
            "filesystem": "ext4",
            "measured_at": NOW,
            "is_quick": False,
            "is_direct": True,
            "read_bytes_per_s": read,
            "write_bytes_per_s": write,
            "mixed_bytes_per_s": mixed,
        }
        | more
    )


def make_machine(folder: Path, **changes: object) -> MachineProfile:
    """Return a profile of this machine as ``doctor`` stores it, with the drive that contains ``folder``."""
    return MachineProfile.model_validate(
        {
            "host": platform.node(),
            "cpu": profiles.cpu_name(),
            "ram_bytes": psutil.virtual_memory().total,
            "measured_at": NOW,
            "is_quick": False,
            "num_threads": 2,
            "ram_update_bytes_per_s": 1e10,
            "adamw_params_per_s": {"float32": 1e8, "bfloat16": 1e8},
            "matmul_flops_per_s": {"cpu/float32": 1e11},
            "drives": {file_systems.file_system_of(folder).key: drive(2e9, 1e9, 1.5e9)},
        }
        | changes
    )
