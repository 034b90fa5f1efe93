"""What the kernel says of this machine: limits, huge pages, load. Reads files, measures nothing."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatrain.optim.threads import default_num_threads
from megatrain.plan.machine import total_ram_bytes
from megatrain.plan.profile import cpu_name
from tiered.units import KiB


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """Facts of the machine that decide speed or room.

    Attributes:
        num_cpus: that this process may use.
        num_torch_threads: that torch uses.
        load: processes that ran before us.
        cpu_quota: CPUs that a cgroup grants; None without a limit.
        ram_bytes: of the machine, and what a cgroup leaves of it.
        ram_limit_bytes: of the machine, and what a cgroup leaves of it.
        huge_pages: setting of transparent huge pages, e.g. "madvise"; "" where the kernel has none.
        reserved_huge_page_bytes: the pool of explicit huge pages, which only takes RAM away from us.
        memlock_bytes: most that may be page-locked by this user; None without a limit.
        has_nvidia_driver: the machine has one, whatever torch was built for.
    """

    host: str
    kernel: str
    cpu: str
    num_cpus: int
    num_torch_threads: int
    cpu_quota: float | None
    load: float
    ram_bytes: int
    ram_limit_bytes: int
    huge_pages: str
    reserved_huge_page_bytes: int
    memlock_bytes: int | None
    has_nvidia_driver: bool


def read_system(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> SystemFacts:
    """Return the facts; what the kernel does not say counts as no limit."""
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    setting = re.search(r"\[(\w+)\]", _text(sys / "kernel" / "mm" / "transparent_hugepage" / "enabled"))
    return SystemFacts(
        host=platform.node(),
        kernel=platform.release(),
        cpu=cpu_name(),
        num_cpus=default_num_threads(),
        num_torch_threads=torch.get_num_threads(),
        cpu_quota=_cpu_quota(sys / "fs" / "cgroup"),
        load=os.getloadavg()[0],
        ram_bytes=psutil.virtual_memory().total,
        ram_limit_bytes=total_ram_bytes(sys / "fs" / "cgroup"),
        huge_pages=setting[1] if setting else "",
        reserved_huge_page_bytes=_reserved_huge_pages(_text(proc / "meminfo")),
        memlock_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        has_nvidia_driver=(proc / "driver" / "nvidia" / "version").exists(),
    )


def _cpu_quota(cgroup: Path) -> float | None:
    match = re.fullmatch(r"(\d+) (\d+)", _text(cgroup / "cpu.max").strip())  # "max 100000" without a limit
    return int(match[1]) / int(match[2]) if match else None


def _reserved_huge_pages(meminfo: str) -> int:
    found = {name: int(value) for name, value in re.findall(r"^(HugePages_Total|Hugepagesize):\s+(\d+)", meminfo, re.M)}
    return found.get("HugePages_Total", 0) * found.get("Hugepagesize", 0) * KiB


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
