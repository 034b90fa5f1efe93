"""Facts about this machine from which ``init`` writes a first config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatrain.base.facts import Drive, MachineFacts
from megatrain.machine.file_systems import FileSystem, disk_usage, file_system_of
from megatrain.machine.resources import TierSpecs
from tiered.units import GiB

#: Name of the folder on a drive for training state and its checkpoints.
_STATE_FOLDER = "state"

_EXCLUDED_KINDS = frozenset({"squashfs", "iso9660", "vfat", "efivarfs", "autofs"})

_MIN_FREE_BYTES = 4 * GiB


def machine_facts(folder: Path, tiers: TierSpecs) -> MachineFacts:
    """Return facts about this machine, without allocating or writing anything.

    Args:
        folder: Folder in which the config will be. The folder's drive comes first, with a path relative to the folder.
        tiers: Resources of this machine, with all sizes set to "auto".
    """
    device = tiers.machine.resolve_device("auto")
    return MachineFacts(
        ram_bytes=tiers.machine.ram.total,
        free_ram_bytes=tiers.ram_capacity_bytes(),
        gpu_bytes=tiers.gpu_capacity_bytes(device) if device.type == "cuda" else None,
        drives=tuple(_drives(folder)),
    )


def _drives(folder: Path) -> Iterator[Drive]:
    """Yield the drive of ``folder``, then the other writable drives: recommended ones first, then by free space."""
    own_file_system, free_bytes = file_system_of(folder), disk_usage(folder).free
    yield Drive(_STATE_FOLDER, free_bytes, own_file_system.kind, _objection(own_file_system, free_bytes))
    drives: list[Drive] = []
    devices = {own_file_system.device}
    for partition in psutil.disk_partitions(all=False):
        point = Path(partition.mountpoint)
        is_writable = "rw" in partition.opts.split(",") and os.access(point, os.W_OK)
        if not is_writable or not point.is_dir() or partition.fstype in _EXCLUDED_KINDS:
            continue
        file_system = file_system_of(point)
        free_bytes = disk_usage(point).free
        if file_system.device in devices or free_bytes < _MIN_FREE_BYTES:
            continue
        devices.add(file_system.device)
        path, objection = str(point / "megatrain-tier" / _STATE_FOLDER), _objection(file_system, free_bytes)
        drives.append(Drive(path, free_bytes, file_system.kind, objection))
    yield from sorted(drives, key=lambda drive: (bool(drive.objection), -drive.free_bytes))


def _objection(file_system: FileSystem, free_bytes: int) -> str:
    kind, medium = file_system.kind, file_system.medium
    if medium == "memory":
        return f"not a drive: {kind} is RAM"
    if medium in ("network", "program"):
        return f"{kind} may be slow: measure it with `megatrain-tier doctor PATH` first"
    if free_bytes < _MIN_FREE_BYTES:
        return "little free space"
    return ""
