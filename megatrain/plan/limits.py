"""Checks of a config against the machine: oversized tiers, paths that are not on a drive, missing mounts.

A config that fails these checks cannot run here. It can be planned, because the plan may be for a different machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.sizes import Size
from megatrain.machine import file_systems
from megatrain.machine.file_systems import FileSystem, Space, disk_of, file_system_of, missing_mount
from megatrain.machine.planned_machine import PlannedMachine
from megatrain.machine.resources import TierSpecs
from megatrain.machine.table import NvmeTierConfig
from tiered.units import GiB, MiB, format_size


class BeyondMachineError(Exception):
    """Error for a config that requests more than this machine has. Raised before anything is allocated."""


@dataclass(frozen=True, slots=True)
class Objection:
    """Reason against running a config on this machine.

    Attributes:
        key: Config key that causes the objection.
        text: Reason, as a sentence without a full stop.
        kind: "size" (the config requests more than this machine has) and "place" (a path is not on the expected drive,
            or no size can be chosen) prevent a run. "note" is only a warning.
    """

    key: str
    text: str
    advice: str
    kind: Literal["size", "place", "note"]

    @property
    def refuses(self) -> bool:
        """Whether the objection prevents a run."""
        return self.kind != "note"

    def __str__(self) -> str:
        return f"{self.text}. {self.advice}"


@dataclass(frozen=True, slots=True)
class DrivePath:
    """Path of a ``[[tiers.nvme]]`` entry, with the free and total bytes of its file system.

    Attributes:
        key: Config key, for example ``tiers.nvme.0``.
        file_system: File system that contains the path, or will contain it.
    """

    key: str
    spec: NvmeTierConfig
    file_system: FileSystem
    free_bytes: int
    total_bytes: int

    @property
    def size_bytes(self) -> int:
        """Configured size, or 0 for "auto", which never exceeds the drive."""
        return 0 if self.spec.size.is_auto else self.spec.size.resolve(self.total_bytes)

    @property
    def space_text(self) -> str:
        """Total and free bytes of the file system, as text."""
        return f"{format_size(self.total_bytes)}, {format_size(self.free_bytes)} of it free"

    def __str__(self) -> str:
        return f"{self.key}: {self.spec.path}: {self.file_system}, {self.space_text}"


def drive_paths(drives: Sequence[NvmeTierConfig]) -> list[DrivePath]:
    """Return each NVMe path with its file system. Nothing is created or written."""
    paths = []
    for index, drive in enumerate(drives):
        disk = file_systems.disk_usage(drive.path)
        paths.append(DrivePath(f"tiers.nvme.{index}", drive, file_system_of(drive.path), disk.free, disk.total))
    return paths


def refuse(objections: Sequence[Objection]) -> None:
    """Raise an error if any of the objections prevents the run.

    Raises:
        ConfigError: If a path is not on the expected drive, or no size can be chosen.
        BeyondMachineError: If the config requests more than this machine has.
    """
    problems = [Problem(item.key, item.text, item.advice) for item in objections if item.kind == "place"]
    if problems:
        raise ConfigError("the config", problems)
    sizes = [str(item) for item in objections if item.kind == "size"]
    if sizes:
        raise BeyondMachineError("beyond this machine: " + "\n".join(sizes))


def find_objections(
    tiers: TierSpecs, device: torch.device, needs: Mapping[str, int] | None = None
) -> tuple[Objection, ...]:
    """Compare what a run needs with what its machine has. Return the objections, with notes last.

    Args:
        needs: Smallest capacity that the plan needs, by tier, or None without a plan.
    """
    machine, nvme = tiers.machine, tiers.table.nvme
    needs = needs if needs is not None and machine.is_here else {}
    drive_objections = _compare_drives(nvme, machine) if isinstance(machine, PlannedMachine) else _check_drives(tiers)
    objections = [*_compare_ram(tiers, needs), *_compare_gpu(tiers, device, needs), *drive_objections]
    return tuple(sorted(objections, key=lambda item: not item.refuses))


def _compare_ram(tiers: TierSpecs, needs: Mapping[str, int]) -> Iterator[Objection]:
    """Compare the RAM tier, and a GPU tier emulated in RAM, with the RAM available to this process."""
    sizes = {"tiers.ram.size": tiers.table.ram.size}
    names = ["ram"]
    if tiers.emulates_gpu:
        sizes["tiers.gpu.size"] = tiers.table.gpu.size
        names.append("gpu")
    machine, ram = tiers.machine, tiers.machine.ram
    memory_clause = f"{machine.name} has {ram} of RAM"
    if machine.is_here and ram.total < psutil.virtual_memory().total:
        memory_clause = f"a cgroup (of a container or a job) allows this process {ram} of RAM"
    yield from _compare_memory(sizes, sum(needs.get(tier, 0) for tier in names), ram, memory_clause)


def _compare_gpu(tiers: TierSpecs, device: torch.device, needs: Mapping[str, int]) -> Iterator[Objection]:
    if device.type != "cuda" or tiers.table.gpu.size.is_auto:
        return
    machine, memory = tiers.machine, tiers.machine.gpu_memory(device)
    gpu = f"this GPU, {machine.gpu_name(device)}," if machine.is_here else f"a GPU of {machine.name}"
    sizes = {"tiers.gpu.size": tiers.table.gpu.size}
    yield from _compare_memory(sizes, needs.get("gpu", 0), memory, f"{gpu} has {memory} of memory")


def _compare_memory(sizes: Mapping[str, Size], need: int, memory: Space, capacity_text: str) -> Iterator[Objection]:
    """Compare the total size of tiers in the same memory with the size of that memory.

    Args:
        sizes: Tier sizes by config key.
        need: Minimum total bytes that the plan needs in these tiers.
    """
    settings = [f'{key} = "{size.text}"' for key, size in sizes.items() if not size.is_auto]
    if not settings:
        return
    key = next(key for key, size in sizes.items() if not size.is_auto)
    requested_bytes = sum(size.resolve(memory.total) for size in sizes.values() if not size.is_auto)
    settings_text = " and ".join(settings)
    verb = "is" if len(settings) == 1 else "together are"
    limit = f'Write at most "{_round_down(memory.free)}"{" together" if len(settings) > 1 else ""}'
    if requested_bytes > memory.total:
        advice = f'{limit}, or "auto"' if len(settings) == 1 else limit
        yield Objection(key, f"{settings_text} {verb} too large: {capacity_text}", advice, "size")
    elif need > memory.free:
        text = f"{settings_text}: this run takes at least {format_size(need)} of it, but {capacity_text}"
        yield Objection(key, text, "Free memory, or write a smaller size so that more blocks go to drives", "size")
    elif requested_bytes > memory.free:
        text = f"{settings_text} {verb} more than is free now: {capacity_text}; the run may use all of this size"
        yield Objection(key, text, limit, "note")


def _compare_drives(paths: Sequence[NvmeTierConfig], planned: PlannedMachine) -> Iterator[Objection]:
    """Compare the number and the sizes of NVMe paths with the drives of a planned machine."""
    count_text = f"{planned.name} has {len(planned.drives)} drives"
    if len(paths) > len(planned.drives):
        text = f"{len(paths)} paths in [[tiers.nvme]], but {count_text}"
        yield Objection("tiers.nvme", text, "Name no more paths than drives", "place")
    for index, (path, (_, drive)) in enumerate(zip(paths, planned.drives, strict=False)):
        total = drive.size.nbytes
        if not path.size.is_auto and path.size.resolve(total) > total:
            key = f"tiers.nvme.{index}.size"
            drive_text = f"{planned.name} has {format_size(total)} there ({drive.name})"
            text = f'{key} = "{path.size.text}" is too large: {drive_text}'
            yield Objection(key, text, f'Write at most "{_round_down(total)}", or "auto"', "size")
    if len(paths) < len(planned.drives):
        text = f"{count_text}, but {len(planned.drives) - len(paths)} of them are not in [[tiers.nvme]]"
        yield Objection("tiers.nvme", text, "More drives are faster if the plan is bound by nvme", "note")


def _check_drives(tiers: TierSpecs) -> Iterator[Objection]:
    """Check the sizes and the file systems of NVMe paths on this machine."""
    paths = drive_paths(tiers.table.nvme)
    yield from _check_drive_sizes(paths)
    for path in paths:
        yield from _check_place(path, allows_tmpfs=tiers.table.allow_tmpfs)
    yield from _check_same_disk(paths)


def _check_drive_sizes(paths: Sequence[DrivePath]) -> Iterator[Objection]:
    groups: dict[int, list[DrivePath]] = {}
    for path in paths:
        if path.size_bytes and path.total_bytes:  # /proc and the like report 0 bytes and allow no folders
            groups.setdefault(file_systems.file_system_number(path.spec.path), []).append(path)
    for group in groups.values():
        first = group[0]
        requested_bytes = sum(path.size_bytes for path in group)
        if requested_bytes <= first.total_bytes:
            continue
        settings = " and ".join(f'{path.key}.size = "{path.spec.size.text}"' for path in group)
        verb = "is" if len(group) == 1 else "together are"
        place = f"the file system of {first.spec.path} ({first.file_system})"
        text = f"{settings} {verb} too large: {place} has {first.space_text}"
        advice = f'Write at most "{_round_down(first.free_bytes)}"{" together" if len(group) > 1 else ""}, or "auto"'
        yield Objection(f"{first.key}.size", text, advice, "size")


def _check_place(path: DrivePath, *, allows_tmpfs: bool) -> Iterator[Objection]:
    """Check a path's kind of file system, and whether the path is on the expected mount."""
    key, folder, file_system = f"{path.key}.path", path.spec.path, path.file_system
    if file_system.medium == "memory" and not allows_tmpfs:
        text = f"{key}: {folder} is on {file_system.kind}, which {file_system.warning.partition(' ')[2]}, and are gone "
        advice = "Name a folder on a drive, or write allow_tmpfs = true in [tiers]"
        yield Objection(key, f"{text}after a restart", advice, "place")
    elif file_system.warning:
        advice = "Name a folder on a drive of this machine for speed, and for checkpoints that stay"
        yield Objection(key, f"{key}: {folder}: {file_system.warning}", advice, "note")
    configured_mount = path.spec.mount_point
    if configured_mount is not None:
        mount_point = os.path.realpath(configured_mount)
        if file_system.mount_point != mount_point:
            is_mounted = Path(mount_point).exists() and file_system_of(Path(mount_point)).mount_point == mount_point
            reason = f"{folder} is not on it" if is_mounted else "nothing is mounted there"
            text = f'{path.key}.mount_point = "{configured_mount}", but {reason}: blocks would go to {file_system}'
            advice = "Mount the drive, or write the path of a folder on it"
            yield Objection(f"{path.key}.mount_point", text, advice, "place")
    elif mount := missing_mount(folder):
        text = f"{key}: /etc/fstab has a drive for {mount}, but it is not mounted: blocks would go to {file_system}"
        yield Objection(key, text, f'Mount it; mount_point = "{mount}" refuses a run without it', "note")


def _check_same_disk(paths: Sequence[DrivePath]) -> Iterator[Objection]:
    disks: dict[str, list[DrivePath]] = {}
    for path in paths:
        disks.setdefault(disk_of(path.file_system), []).append(path)
    for disk, group in disks.items():
        if len(group) > 1:
            names = ", ".join(str(path.spec.path) for path in group)
            text = f"{names} are on one drive ({disk}): blocks striped over them share its speed and its space"
            advice = "Name only one of them in [[tiers.nvme]], and folders on other drives"
            yield Objection(f"{group[1].key}.path", text, advice, "note")


def _round_down(nbytes: int) -> str:
    """Return a size in the config's notation, rounded down."""
    return f"{nbytes // GiB}GiB" if nbytes >= GiB else f"{max(1, nbytes // MiB)}MiB"
