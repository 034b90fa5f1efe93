"""Devices and memory of this machine or a planned machine, and how much of them a config lets a run use."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.machine.file_systems import disk_usage, existing_parent, file_system_number, own_drive_bytes
from megatrain.machine.target import PlannedMachine, TierSpecs
from tiered.ext import KvikioProbe, may_open_driver, probe_kvikio
from tiered.units import GiB, format_size, is_number

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_LIBRARY_BYTES = GiB


def resolve_device(name: str, planned: PlannedMachine | None = None) -> torch.device:
    """Return a config's compute device. "auto" is CUDA if available.

    Raises:
        ConfigError: The config requests a GPU, but torch or the planned machine has none.
    """
    if planned is not None:
        if name == "cuda" and not planned.has_gpu:
            text = f'device = "cuda", but the machine {planned.name} has no GPU'
            raise ConfigError("the config", [Problem("device", text, 'Write "auto" or "cpu"')])
        return torch.device("cuda" if planned.has_gpu and name != "cpu" else "cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        problem = Problem("device", 'device = "cuda", but torch finds no GPU that it can use', 'Write "auto" or "cpu"')
        raise ConfigError("the config", [problem])
    return torch.device(name)


def bus_of_gpu() -> str:
    """Return the current GPU's PCI address in the form of sysfs, or "" if this version of torch does not have it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, number = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or number is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype of layers. auto: bf16 with CUDA, fp32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def compute_tier(tiers: TierSpecs, device: torch.device) -> str:
    """Return the tier in which layers run: GPU memory with CUDA or an emulated GPU, else RAM.

    If GPU and RAM are one memory, layers run in RAM unless the config sets the GPU tier's size.
    """
    if device.type == "cuda" and tiers.table.gpu.size.is_auto and is_one_memory(tiers.machine):
        return "ram"
    return "gpu" if device.type == "cuda" or tiers.emulates_gpu else "ram"


def is_one_memory(planned: PlannedMachine | None = None) -> bool:
    """Return whether GPU and RAM are one memory: CUDA reports an integrated GPU, as on GB10, Jetson or an APU.

    Returns False for GPUs that have separate memory and coherent access to RAM, such as GH200, because RAM is slower.

    Args:
        planned: Machine to plan for, or None for this one.
    """
    if planned is not None:
        return planned.unified_bytes is not None
    if not torch.cuda.is_available():
        return False
    return bool(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "is_integrated", False))


def one_memory_reserve_bytes(total_bytes: int) -> int:
    """Return the bytes that a run leaves free if GPU and RAM share a memory: a tenth, at least 2 GiB.

    When memory runs out, such a machine hangs before it kills a process: GPU allocations cannot be swapped out, so only
    the system's memory can be reclaimed (seen on GB10 with 112 of 119 GiB in use). The reserve includes libraries and
    the CUDA context.
    """
    return max(total_bytes // 10, min(2 * GiB, total_bytes // 2))


def moves_past_ram(tiers: TierSpecs, device: torch.device) -> bool:
    """Return whether blocks move directly between files and GPU memory. kvikio must have shown that this works.

    With an emulated GPU, plain system calls read the files, and only if the config requests direct movement.

    Raises:
        ConfigError: The config requests direct movement, but it does not work here.
    """
    if tiers.table.direct == "off" or not tiers.table.nvme or compute_tier(tiers, device) != "gpu":
        return False
    if tiers.emulates_gpu or tiers.machine is not None:
        return tiers.table.direct == "on"
    if tiers.table.direct == "auto" and (tiers.table.verify == "always" or not may_open_driver()):
        return False
    for drive in tiers.table.nvme:
        if reason := _probed(existing_parent(drive.path)).reason:
            if tiers.table.direct == "auto":
                return False
            text = f'tiers.direct = "on", but GPUDirect Storage does not work on {drive.path}: {reason}'
            raise ConfigError("the config", [Problem("tiers.direct", text, 'Write "auto" or "off"')])
    return True


@functools.cache
def _probed(folder: Path) -> KvikioProbe:
    """Probe once per process, because a probe takes a second and the result does not change."""
    return probe_kvikio(folder)


def total_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the machine's RAM, or the cgroup's limit if the limit is lower."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _cgroup_limits(root, own))])


def available_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the free RAM, within the cgroup's limit. Swap does not count."""
    left = (max(0, limit - used) for limit, used in _cgroup_limits(root, own))
    available: int = psutil.virtual_memory().available
    return min([available, *left])


def _cgroup_limits(root: Path, own: Path) -> list[tuple[int, int]]:
    """Return (limit, used bytes) for this process's cgroup and each parent with a limit.

    A container sees its own cgroup as the root. A batch job sees the whole tree and its position in the tree.
    """
    found = []
    for folder, limit_name, used_name, cache_name in _cgroup_folders(root, own):
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
        except OSError:
            continue
        if is_number(limit.strip()):
            found.append((int(limit), max(0, int(used) - _stat_of(folder, cache_name))))
    return found


def _cgroup_folders(root: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield folders of cgroups, with the names of the limit, the usage, and the file cache within the usage."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().split("\n") if line]
    except OSError:
        lines = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in lines}
    of_memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    for at in (Path(paths.get("", "")), *Path(paths.get("", "")).parents):
        yield root / at, "memory.max", "memory.current", "inactive_file"  # version 2
    for at in (Path(of_memory), *Path(of_memory).parents):  # version 1
        yield root / "memory" / at, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _stat_of(folder: Path, name: str) -> int:
    """Return a value in ``memory.stat``. A cgroup is charged for file cache, although it is freed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().split("\n")
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def ram_capacity_bytes(tiers: TierSpecs) -> int:
    """Return the RAM tier's capacity. "auto" is the free RAM minus the margin and minus an emulated GPU tier.

    Raises:
        ConfigError: GPU and RAM are one memory, and the config leaves too little for the system.
    """
    planned, gpu_size = tiers.machine, tiers.table.gpu.size
    total = total_ram_bytes() if planned is None else planned.ram_bytes
    margin, of_gpu, is_one = tiers.table.safety_margin.resolve(total), 0, is_one_memory(planned)
    if is_one:
        margin = max(margin, one_memory_reserve_bytes(total))
    if tiers.emulates_gpu or (is_one and not gpu_size.is_auto):
        of_gpu = gpu_size.resolve(total)
    free = available_ram_bytes() if planned is None else planned.free_ram_bytes
    capacity = tiers.table.ram.size.resolve(total, auto_bytes=max(0, free - margin - of_gpu))
    if is_one:
        _check_one_memory(tiers, capacity + of_gpu, total)
    return capacity


def _check_one_memory(tiers: TierSpecs, wanted_bytes: int, total_bytes: int) -> None:
    """Refuse sizes that leave too little of a memory shared by GPU and RAM."""
    most = total_bytes - one_memory_reserve_bytes(total_bytes)
    if wanted_bytes <= most:
        return
    sizes = {"tiers.ram.size": tiers.table.ram.size, "tiers.gpu.size": tiers.table.gpu.size}
    given = {key: f'{key} = "{size.text}"' for key, size in sizes.items() if not size.is_auto}
    text = (
        f"{' and '.join(given.values())}: GPU and RAM are one memory here, of "
        f"{format_size(total_bytes)}, and with less than {format_size(total_bytes - most)} left the system hangs "
        "instead of ending the run"
    )
    raise ConfigError("the config", [Problem(next(iter(given)), text, f'Write at most "{most // GiB}GiB", or "auto"')])


def gpu_capacity_bytes(tiers: TierSpecs, device: torch.device) -> int:
    """Return the GPU tier's capacity. "auto" is the free memory minus the margin. An emulated GPU needs a size.

    The margin is at least the allowance for libraries. If GPU and RAM are one memory, return the RAM tier's capacity.
    """
    if tiers.emulates_gpu:
        return tiers.table.gpu.size.resolve(total_ram_bytes() if tiers.machine is None else tiers.machine.ram_bytes)
    if compute_tier(tiers, device) == "ram":
        return ram_capacity_bytes(tiers)
    free, total = _gpu_memory(tiers.machine, device)
    margin = max(tiers.table.safety_margin.resolve(total), library_bytes(total))
    return tiers.table.gpu.size.resolve(total, auto_bytes=max(0, free - margin))


def library_bytes(total_bytes: int) -> int:
    """Return the GPU memory outside the tier that is allowed for libraries. Plans do not include it.

    An estimate from the libraries' source code, not a measurement. It covers workspaces of cuBLAS and cuDNN, and
    kernels, which are loaded at their first use.
    """
    return min(_LIBRARY_BYTES, total_bytes // 10)


def describe_library_memory(capacity_bytes: int, device: torch.device, planned: PlannedMachine | None = None) -> str:
    """Describe the GPU memory that a tier of this capacity leaves for libraries, or return "" if unknown."""
    if device.type != "cuda" or (planned is None and not torch.cuda.is_available()) or is_one_memory(planned):
        return ""
    free, total = _gpu_memory(planned, device)
    left, allowed = max(0, free - capacity_bytes), library_bytes(total)
    text = (
        f"{format_size(left)} of free GPU memory are outside of the tier; libraries are allowed {format_size(allowed)}"
    )
    if left < allowed:
        text += f" of it: with more than tiers.gpu.size = {format_size(max(0, free - allowed))} they may find none"
    return text


def _gpu_memory(planned: PlannedMachine | None, device: torch.device) -> tuple[int, int]:
    """Return a GPU's free and total memory."""
    if planned is None:
        return gpu_memory_bytes(device)
    return planned.gpu_bytes or 0, planned.gpu_bytes or 0


def gpu_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return a CUDA device's free and total memory."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def gpu_name(device: torch.device) -> str:
    """Return the name of a CUDA device."""
    return torch.cuda.get_device_name(device)


def nvme_capacity_bytes(tiers: TierSpecs, output_dir: Path) -> int:
    """Return the NVMe tier's total capacity over all paths. "auto" is the free space minus the margin.

    Files that this run left count as free. Paths on the same file system share its free space.

    Args:
        tiers: Resources with at least one drive.
    """
    if tiers.machine is not None:
        return _planned_nvme_bytes(tiers, tiers.machine)
    capacity = 0
    num_sharing = Counter(file_system_number(drive.path) for drive in tiers.table.nvme if drive.size.is_auto)
    for drive in tiers.table.nvme:
        disk = disk_usage(drive.path)
        margin = tiers.table.safety_margin.resolve(disk.total)
        share = max(0, disk.free - margin) // max(1, num_sharing[file_system_number(drive.path)])
        own = own_drive_bytes(drive.path, output_dir / CHECKPOINTS_NAME)
        capacity += drive.size.resolve(disk.total, auto_bytes=share + own)
    return capacity


def _planned_nvme_bytes(tiers: TierSpecs, planned: PlannedMachine) -> int:
    """Return the NVMe tier's capacity on a planned machine with empty drives. "auto" without a drive is 0."""
    totals = [drive.total_bytes for drive in planned.drives]
    totals += [0] * (len(tiers.table.nvme) - len(totals))
    capacity = 0
    for drive, total in zip(tiers.table.nvme, totals, strict=False):
        capacity += drive.size.resolve(total, auto_bytes=max(0, total - tiers.table.safety_margin.resolve(total)))
    return capacity
