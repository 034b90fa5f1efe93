"""Facts about the system, and findings with advice for the user."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from megatrain.api import Medium, cpu_name, default_num_threads, total_ram_bytes
from megatrain.extras.doctor.drives import DriveResult
from megatrain.extras.doctor.processors import GdsResult, GpuResult
from tiered.units import GB, format_rate, format_size


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """Facts about the machine that limit speed or space.

    Attributes:
        num_cpus: Number of CPUs that this process may use.
        load: Mean number of running processes in the last minute.
        cpu_quota: Number of CPUs that a cgroup grants; None without a limit.
        ram_limit_bytes: Total RAM, or the cgroup's limit if it is lower.
        memlock_bytes: Maximum pinned bytes of this user; None without a limit.
        has_nvidia_driver: Whether the machine has an NVIDIA driver, even if torch does not support CUDA.
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
    memlock_bytes: int | None
    has_nvidia_driver: bool


def read_system(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> SystemFacts:
    """Read the facts about this machine. A limit that the kernel does not report is treated as no limit."""
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
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
        memlock_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        has_nvidia_driver=(proc / "driver" / "nvidia" / "version").exists(),
    )


def _cpu_quota(cgroup: Path) -> float | None:
    match = re.fullmatch(r"(\d+) (\d+)", _read_text(cgroup / "cpu.max").strip())  # "max 100000" means no limit
    return int(match[1]) / int(match[2]) if match else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


Severity = Literal["ok", "note", "warn"]

#: A drive counts as slow under long writes if the rate falls below this share of the initial rate.
SUSTAINED_SHARE = 0.7

#: Advice for file systems that are not on a local drive.
_ADVICE: Mapping[Medium, str] = {
    "memory": "name a folder on a drive, and give that RAM to tiers.ram",
    "network": "use a local drive for [[tiers.nvme]]",
    "program": "use a local drive for [[tiers.nvme]]",
}
_SLOW_BYTES_PER_S = 0.5 * GB
_BUSY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact or problem that the examination found, with advice.

    Attributes:
        severity: "ok", "note" (worth knowing) or "warn" (slow, or will fail).
        advice: Remedy, or "".
    """

    severity: Severity
    subject: str
    seen: str
    advice: str = ""


def system_findings(facts: SystemFacts, gpu: GpuResult | None) -> Iterator[Finding]:
    """Yield findings about limits and load of the system."""
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_cpus:
        yield Finding(
            "warn",
            "CPU limit",
            f"a cgroup grants {facts.cpu_quota:.1f} CPUs of {facts.num_cpus} visible ones, so threads block each other",
            f"raise the limit, or bind the process: taskset -c 0-{max(0, int(facts.cpu_quota) - 1)} megatrain-tier ...",
        )
    if facts.num_torch_threads < facts.num_cpus:
        yield Finding(
            "note",
            "threads",
            f"torch computes with {facts.num_torch_threads} of {facts.num_cpus} usable CPUs, here and in runs",
            "unset OMP_NUM_THREADS to use all CPUs",
        )
    if facts.load > _BUSY_SHARE * facts.num_cpus:
        yield Finding(
            "note",
            "load",
            f"the machine was busy before the measurement, with load {facts.load:.1f} on {facts.num_cpus} CPUs",
            "measure again when nothing else runs, because these rates may be too low",
        )
    yield _page_locking_finding(facts, gpu)


def _page_locking_finding(facts: SystemFacts, gpu: GpuResult | None) -> Finding:
    limit = "no limit" if facts.memlock_bytes is None else f"a limit of {format_size(facts.memlock_bytes)}"
    if gpu is None:
        return Finding("ok", "page-locking", f"not needed without a GPU ({limit} for this user)")
    remedy = "ulimit -l unlimited (service: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)"
    if not gpu.is_pinned:
        return Finding(
            "warn",
            "page-locking",
            f"CUDA could not page-lock RAM ({limit}), so copies to the GPU are slow and block threads",
            remedy,
        )
    if facts.memlock_bytes is not None and facts.memlock_bytes < facts.ram_limit_bytes:
        return Finding("note", "page-locking", f"works, with {limit} for other page-locked memory", remedy)
    return Finding("ok", "page-locking", f"works, {limit}")


def gpu_findings(facts: SystemFacts, gpu: GpuResult | None, gds: GdsResult) -> Iterator[Finding]:
    """Yield findings about the GPU and GPUDirect Storage."""
    if gpu is None and facts.has_nvidia_driver:
        yield Finding(
            "warn",
            "GPU",
            "the machine has an NVIDIA driver, but torch sees no CUDA device",
            "install a torch built for CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    elif gpu is None:
        yield Finding("ok", "GPU", "none; layers run on the CPU, and the tiers are RAM and drives")
    else:
        yield Finding("ok", "GPU", f"{gpu.name}, {format_size(gpu.memory_bytes)}")
        if gds.missing:
            yield Finding(
                "note",
                "GPUDirect Storage",
                "not available, so blocks go from drives to the GPU through RAM; missing: " + "; ".join(gds.missing),
                "it is optional, and saves RAM bandwidth if drives are fast",
            )
        else:
            yield Finding("ok", "GPUDirect Storage", "kvikio and nvidia-fs are installed")


def drive_findings(drives: Sequence[DriveResult]) -> Iterator[Finding]:
    """Yield findings about each path, and about paths that share a file system."""
    by_file_system: dict[str, list[DriveResult]] = defaultdict(list)
    for drive in drives:
        by_file_system[drive.file_system.key].append(drive)
        yield from _drive_kind_findings(drive)
        yield from _drive_speed_findings(drive)
    for drive_group in by_file_system.values():
        if len(drive_group) > 1:
            paths = ", ".join(str(drive.path) for drive in drive_group)
            yield Finding(
                "warn",
                "paths",
                f"{paths} are on the same file system ({drive_group[0].file_system.source}), so striping adds no speed",
                "name one of them in [[tiers.nvme]], and add folders on other drives",
            )


def _drive_kind_findings(drive: DriveResult) -> Iterator[Finding]:
    path, kind = str(drive.path), drive.file_system.kind
    if drive.file_system.medium in _ADVICE:
        yield Finding("warn", path, drive.file_system.warning, _ADVICE[drive.file_system.medium])
    elif not drive.is_direct:
        yield Finding(
            "warn",
            path,
            f"{kind} does not support O_DIRECT, so the measured rates may be the rates of the kernel's page cache",
            "use ext4 or xfs for [[tiers.nvme]]; not overlay, an encrypted home or a network folder",
        )
    else:
        yield Finding("ok", path, f"{kind} with O_DIRECT, {format_size(drive.free_bytes)} free")


def _drive_speed_findings(drive: DriveResult) -> Iterator[Finding]:
    path = str(drive.path)
    if drive.tier.mixed < _SLOW_BYTES_PER_S:
        disk_note = " It is a hard disk." if drive.is_rotational else ""
        yield Finding(
            "warn",
            path,
            f"the drive is slow: {format_rate(drive.tier.mixed)} of concurrent reads and writes.{disk_note}",
            "use NVMe drives, which have 2 to 12 GB/s; several [[tiers.nvme]] are striped",
        )
    sustained = drive.sustained
    if sustained is None:
        return
    text = (
        f"{format_size(sustained.nbytes)} written in {sustained.seconds:.0f} s: {format_rate(sustained.first)} at the "
        f"start, {format_rate(sustained.last)} at the end"
    )
    if sustained.last < SUSTAINED_SHARE * sustained.first:
        advice = "plans use the rate at the end; fstrim, more free space or another drive may help"
        yield Finding("warn", path, f"slows down during a long write: {text}", advice)
    else:
        yield Finding("ok", path, f"does not slow down during a long write: {text}")
