"""RAM that this process may use: the machine's RAM, within the limits of the process's cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from tiered.units import is_number

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def total_ram_bytes(root: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the machine's RAM, or the cgroup's limit if the limit is lower."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _cgroup_limits(root, own_cgroup))])


def available_ram_bytes(root: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the free RAM, within the cgroup's limit. Swap does not count."""
    free_bytes = (max(0, limit - used) for limit, used in _cgroup_limits(root, own_cgroup))
    available: int = psutil.virtual_memory().available
    return min([available, *free_bytes])


def _cgroup_limits(root: Path, own_cgroup: Path) -> list[tuple[int, int]]:
    """Return (limit, used bytes) for this process's cgroup and for each of its parents, if they have a limit.

    A container sees its own cgroup as the root. A batch job sees the whole tree and its position in the tree.
    """
    limits = []
    for folder, limit_name, used_name, cache_name in _cgroup_folders(root, own_cgroup):
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
        except OSError:
            continue
        if is_number(limit.strip()):
            limits.append((int(limit), max(0, int(used) - _memory_stat(folder, cache_name))))
    return limits


def _cgroup_folders(root: Path, own_cgroup: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield each cgroup's folder, the names of its limit and usage files, and its file-cache key in ``memory.stat``."""
    try:
        lines = [line.split(":", 2) for line in own_cgroup.read_text().split("\n") if line]
    except OSError:
        lines = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in lines}
    memory_path = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    for path in (Path(paths.get("", "")), *Path(paths.get("", "")).parents):
        yield root / path, "memory.max", "memory.current", "inactive_file"  # version 2
    for path in (Path(memory_path), *Path(memory_path).parents):  # version 1
        yield root / "memory" / path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _memory_stat(folder: Path, name: str) -> int:
    """Return a value from ``memory.stat``, such as the file cache, which counts as used but is freed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().split("\n")
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
