"""Looks at this machine, and at a model's folder, before there is a config: for a first one, and for what plans say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatrain.base.facts import Drive, MachineFacts, ModelFacts
from megatrain.machine.machine import (
    disk_usage,
    file_system_of,
    gpu_capacity_bytes,
    ram_capacity_bytes,
    resolve_device,
    total_ram_bytes,
)
from megatrain.models.folder import ModelFolder, ModelFolderError
from tiered.units import GiB

if TYPE_CHECKING:
    from megatrain.machine.machine import FileSystem, TierSpecs

__all__ = [
    "machine_facts",
    "model_facts",
    "weight_file_bytes",
]


#: The folder on a drive, named for what it holds: training state, and checkpoints made of it.
_FOLDER = "state"

_NOT_FOR_DATA = frozenset({"squashfs", "iso9660", "vfat", "efivarfs", "autofs"})

_LEAST_FREE_BYTES = 4 * GiB


def machine_facts(folder: Path, tiers: TierSpecs) -> MachineFacts:
    """Look at the machine; allocates and writes nothing.

    Args:
        folder: where the config will lie; its drive comes first, as a path relative to it.
        tiers: whose sizes are "auto".
    """
    device = resolve_device("auto")
    return MachineFacts(
        ram_bytes=total_ram_bytes(),
        free_ram_bytes=ram_capacity_bytes(tiers),
        gpu_bytes=gpu_capacity_bytes(tiers, device) if device.type == "cuda" else None,
        drives=tuple(_drives(folder)),
    )


def _drives(folder: Path) -> Iterator[Drive]:
    """Yield the drive of ``folder``, then the others of this machine that can be written, the emptiest first."""
    own = file_system_of(folder)
    yield Drive(_FOLDER, _free(folder), own.kind, _objection(own, _free(folder)))
    found: list[Drive] = []
    seen = {own.device}
    for partition in psutil.disk_partitions(all=False):
        point = Path(partition.mountpoint)
        is_writable = "rw" in partition.opts.split(",") and os.access(point, os.W_OK)
        if not is_writable or not point.is_dir() or partition.fstype in _NOT_FOR_DATA:
            continue
        file_system = file_system_of(point)
        if file_system.device in seen or _free(point) < _LEAST_FREE_BYTES:
            continue
        seen.add(file_system.device)
        objection = _objection(file_system, _free(point))
        found.append(Drive(str(point / "megatrain-tier" / _FOLDER), _free(point), file_system.kind, objection))
    yield from sorted(found, key=lambda drive: (bool(drive.objection), -drive.free_bytes))


def _free(path: Path) -> int:
    return disk_usage(path).free


def _objection(file_system: FileSystem, free_bytes: int) -> str:
    kind, nature = file_system.kind, file_system.nature
    if nature == "memory":
        return f"not a drive: {kind} is RAM"
    if nature in ("network", "program"):
        return f"{kind} may be far away: measure it with `megatrain-tier doctor PATH` first"
    if free_bytes < _LEAST_FREE_BYTES:
        return "little room"
    return ""


def weight_file_bytes(folder: str) -> int:
    """Return the size of a model folder's weights on disk; 0 where there are none."""
    try:
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    except OSError:
        return 0


def model_facts(name: str, folder: Path | None) -> ModelFacts:
    """Return what a model folder says of itself; a folder that cannot be used says nothing.

    Args:
        name: how it is written in the config.
        folder: where it is; None: not on this machine.
    """
    if folder is None or not folder.is_dir():
        return ModelFacts(name)
    try:
        records = ModelFolder(folder).records
        num_parameters = sum(record.numel for record in records.values() if record.dtype.is_floating_point)
    except (ModelFolderError, OSError):
        num_parameters = 0
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        positions = values.get("max_position_embeddings", values.get("n_positions", 0))
    except (OSError, ValueError, AttributeError):
        positions = 0
    return ModelFacts(name, num_parameters, positions if isinstance(positions, int) and positions > 1 else 0)
