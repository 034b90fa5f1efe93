"""What this machine has, and what of it a config lets a run use."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from megatrain.config.problems import ConfigError, Problem
from megatrain.run_folder import CHECKPOINTS_NAME
from tiered.links.probe import KvikioProbe, may_open_driver, probe_kvikio
from tiered.tiers.directory import files_below, reusable_bytes
from tiered.tiers.ownership import read_owner, read_store_id, snapshot_folders
from tiered.units import GiB, format_size

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_LIBRARY_BYTES = GiB


def resolve_device(config: RunConfig) -> torch.device:
    """Return the compute device: what ``device`` says, or CUDA where there is one.

    Raises:
        ConfigError: the config asks for a GPU and torch finds none.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        problem = Problem("device", 'device = "cuda", but torch finds no GPU that it can use', 'Write "auto" or "cpu"')
        raise ConfigError("the config", [problem])
    return torch.device(config.device)


def resolve_compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return what layers multiply in; auto: bf16 with CUDA, fp32 on the CPU."""
    if config.precision.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.precision.compute_dtype == "bfloat16" else torch.float32


def compute_tier(config: RunConfig, device: torch.device) -> str:
    """Return the tier that layers run in: GPU memory with CUDA, or what takes its place, else RAM itself."""
    return "gpu" if device.type == "cuda" or config.advanced.emulate_gpu else "ram"


def moves_past_ram(config: RunConfig, device: torch.device) -> bool:
    """Return whether blocks go straight between files and GPU memory: where kvikio has shown that it does that.

    In the memory that takes a GPU's place files are read by plain system calls, but only if the config says so.

    Raises:
        ConfigError: the config wants it, and it does not work here.
    """
    tiers = config.tiers
    if tiers.direct == "off" or not tiers.nvme or compute_tier(config, device) != "gpu":
        return False
    if config.advanced.emulate_gpu:
        return tiers.direct == "on"
    if tiers.direct == "auto" and (tiers.verify == "always" or not may_open_driver()):
        return False
    for table in tiers.nvme:
        if reason := _probed(existing_parent(table.path)).reason:
            if tiers.direct == "auto":
                return False
            text = f'tiers.direct = "on", but GPUDirect Storage does not work on {table.path}: {reason}'
            raise ConfigError("the config", [Problem("tiers.direct", text, 'Write "auto" or "off"')])
    return True


@functools.cache
def _probed(folder: Path) -> KvikioProbe:
    """Ask once in a process: the answer takes a second, and is the machine's."""
    return probe_kvikio(folder)


def total_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the RAM of the machine, or of the cgroup where that is less."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _cgroup_limits(root, own))])


def available_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the RAM that is free now, within the cgroup's limit. Memory on disk (swap) does not count."""
    left = (max(0, limit - used) for limit, used in _cgroup_limits(root, own))
    available: int = psutil.virtual_memory().available
    return min([available, *left])


def _cgroup_limits(root: Path, own: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of the cgroup of this process and of each around it that has a limit.

    A container sees its own cgroup as the root; a job of a batch system sees the whole tree, and where it is in it.
    """
    found = []
    for folder, limit_name, used_name, cache_name in _cgroup_folders(root, own):
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
        except OSError:
            continue
        if limit.strip().isdigit():
            found.append((int(limit), max(0, int(used) - _stat_of(folder, cache_name))))
    return found


def _cgroup_folders(root: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield folders of cgroups, and the names there of the limit, of what is used, and of the file cache in that."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in lines}
    of_memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    for at in (Path(paths.get("", "")), *Path(paths.get("", "")).parents):
        yield root / at, "memory.max", "memory.current", "inactive_file"  # version 2
    for at in (Path(of_memory), *Path(of_memory).parents):  # version 1
        yield root / "memory" / at, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _stat_of(folder: Path, name: str) -> int:
    """Return a line of ``memory.stat``. The cache of files is charged to a cgroup, and goes when RAM is asked for."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def ram_capacity_bytes(config: RunConfig) -> int:
    """Return the capacity of the RAM tier; auto: what is free now less the margin and an emulated GPU."""
    total = total_ram_bytes()
    margin = config.tiers.safety_margin.resolve(total)
    if config.advanced.emulate_gpu:
        margin += config.tiers.gpu.size.resolve(total)
    return config.tiers.ram.size.resolve(total, auto_bytes=max(0, available_ram_bytes() - margin))


def gpu_capacity_bytes(config: RunConfig, device: torch.device) -> int:
    """Return the capacity of the GPU tier; auto: what is free now less the margin. Emulated: as configured.

    The margin is at least what libraries take.
    """
    if config.advanced.emulate_gpu:
        return config.tiers.gpu.size.resolve(total_ram_bytes())
    free, total = gpu_memory_bytes(device)
    margin = max(config.tiers.safety_margin.resolve(total), library_bytes(total))
    return config.tiers.gpu.size.resolve(total, auto_bytes=max(0, free - margin))


def library_bytes(total_bytes: int) -> int:
    """Return what libraries may take of a GPU's memory beside the tier, in which no plan has it.

    An allowance, estimated from the sources of libraries and not measured: workspaces of cuBLAS and cuDNN, and kernels,
    which are loaded when they are first used.
    """
    return min(_LIBRARY_BYTES, total_bytes // 10)


def gpu_room_beside_tier(capacity_bytes: int, device: torch.device) -> str:
    """Return, for a person, how much GPU memory a tier of this capacity leaves to libraries; "": nobody can tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    free, total = gpu_memory_bytes(device)
    left, allowed = max(0, free - capacity_bytes), library_bytes(total)
    text = (
        f"{format_size(left)} of free GPU memory are outside of the tier; libraries are allowed {format_size(allowed)}"
    )
    if left < allowed:
        text += f" of it: with more than tiers.gpu.size = {format_size(max(0, free - allowed))} they may find none"
    return text


def gpu_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return what is free now of a CUDA device's memory, and all of it."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def gpu_name(device: torch.device) -> str:
    """Return what a CUDA device calls itself."""
    return torch.cuda.get_device_name(device)


def nvme_capacity_bytes(config: RunConfig) -> int:
    """Return the capacity of the NVMe tier over all its paths; auto: free space less the margin.

    What this run left there before counts as free. Paths on one file system share what is free there.
    """
    capacity = 0
    num_sharing = Counter(file_system_number(table.path) for table in config.tiers.nvme if table.size.is_auto)
    for table in config.tiers.nvme:
        disk = shutil.disk_usage(existing_parent(table.path))
        margin = config.tiers.safety_margin.resolve(disk.total)
        share = max(0, disk.free - margin) // max(1, num_sharing[file_system_number(table.path)])
        own = own_drive_bytes(table.path, config.output_dir / CHECKPOINTS_NAME)
        capacity += table.size.resolve(disk.total, auto_bytes=share + own)
    return capacity


def file_system_number(path: Path) -> int:
    """Return what two paths have in common that lie on one file system."""
    return existing_parent(path).stat().st_dev


def own_drive_bytes(path: Path, checkpoints: Path) -> int:
    """Return the bytes on an NVMe path that a run has the use of: its own checkpoints, and files of dead runs.

    Args:
        checkpoints: the run's directory of generations. Other runs' checkpoints on the path do not count.
    """
    store_id = read_store_id(checkpoints)
    owned = reusable_bytes(path)
    seen = {file.lstat().st_ino for file in files_below(path / "live")}
    for _, folder in snapshot_folders([path]):
        owner = read_owner(folder)
        for file in files_below(folder) if owner is not None and owner.id == store_id else ():
            status = file.lstat()
            owned += status.st_size if status.st_ino not in seen else 0
            seen.add(status.st_ino)
    return owned


def existing_parent(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
