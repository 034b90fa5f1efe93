"""The doctor's findings: one case for each problem, and a good machine without problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.extras.doctor.drives import DriveResult, Rates, SustainedWrite
from megatrain.extras.doctor.findings import (
    Finding,
    SystemFacts,
    drive_findings,
    gpu_findings,
    read_system,
    system_findings,
)
from megatrain.extras.doctor.processors import GdsResult, GpuResult, check_gds
from megatrain.machine.file_systems import FileSystem
from tiered import GB, GiB, MiB

FACTS = SystemFacts(
    host="h", kernel="6", cpu="c", num_cpus=8, num_torch_threads=8, cpu_quota=None, load=0.1, ram_bytes=64 * GiB,
    ram_limit_bytes=64 * GiB, memlock_bytes=None,
    has_nvidia_driver=False,
)  # fmt: skip
GPU = GpuResult("G", 24 * GiB, True, 25e9, 25e9, {"float32": 5e13, "bfloat16": 2e14})
DRIVE = DriveResult(
    path=Path("/fast"), file_system=FileSystem("1:2", "xfs", "/dev/nvme0n1", "/fast"), free_bytes=500 * GiB,
    is_direct=True, is_rotational=False, span_bytes=512 * MiB, tier=Rates(5e9, 4e9, 4.5e9),
    sustained=SustainedWrite(4e9, 3.9e9, 32 * GiB, 9.0),
)  # fmt: skip


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "ok"]


def only(findings: list[Finding]) -> Finding:
    found = bad(findings)
    assert len(found) == 1, found
    return found[0]


def test_nothing_is_wrong_with_a_good_machine() -> None:
    findings = [
        *system_findings(FACTS, GPU),
        *gpu_findings(FACTS, GPU, GdsResult(True, True, ())),
        *drive_findings([DRIVE]),
    ]
    assert bad(findings) == []
    assert all(not finding.advice for finding in findings)
    assert {finding.subject for finding in findings} >= {"page-locking", "GPU", "/fast"}


SYSTEM_CASES = {
    "cpu limit": ({"cpu_quota": 2.0}, "warn", "CPU limit", "taskset -c 0-1"),
    "threads": ({"num_torch_threads": 1}, "note", "threads", "OMP_NUM_THREADS"),
    "load": ({"load": 7.0}, "note", "load", "measure again"),
    "memlock": ({"memlock_bytes": 8 * MiB}, "note", "page-locking", "ulimit -l unlimited"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "severity", "subject", "advice"), SYSTEM_CASES.values(), ids=SYSTEM_CASES)
def test_settings_of_the_machine(changes: dict[str, object], severity: str, subject: str, advice: str) -> None:
    finding = only(list(system_findings(replace(FACTS, **changes), GPU)))
    assert (finding.severity, finding.subject) == (severity, subject)
    assert advice in finding.advice


def test_memory_that_cannot_be_page_locked() -> None:
    finding = only(list(system_findings(FACTS, replace(GPU, is_pinned=False))))
    assert finding.severity == "warn"
    assert "ulimit" in finding.advice
    without = list(system_findings(replace(FACTS, memlock_bytes=8 * MiB), None))
    assert bad(without) == []


def test_gpu_and_gds() -> None:
    assert bad(list(gpu_findings(FACTS, None, GdsResult(False, False, ("kvikio",))))) == []
    hidden = only(list(gpu_findings(replace(FACTS, has_nvidia_driver=True), None, GdsResult(False, False, ()))))
    assert hidden.severity == "warn" and "CUDA" in hidden.advice
    missing = only(list(gpu_findings(FACTS, GPU, GdsResult(True, False, ("nvidia-fs",)))))
    assert missing.severity == "note" and "nvidia-fs" in missing.seen


def test_missing_gds_requirements_are_listed(tmp_path: Path) -> None:
    nothing = check_gds(tmp_path / "proc", tmp_path / "run")
    assert any("nvidia-fs" in text for text in nothing.missing) and any("udev" in text for text in nothing.missing)
    (tmp_path / "proc" / "driver" / "nvidia-fs").mkdir(parents=True)
    (tmp_path / "run" / "udev").mkdir(parents=True)
    found = check_gds(tmp_path / "proc", tmp_path / "run")
    assert found.has_driver
    assert len(found.missing) == (0 if found.has_kvikio else 1)


def on(kind: str) -> dict[str, object]:
    return {"file_system": replace(DRIVE.file_system, kind=kind)}


DRIVE_CASES = {
    "no O_DIRECT": ({"is_direct": False}, "warn", "does not support O_DIRECT", "ext4 or xfs"),
    "memory": (on("tmpfs"), "warn", "is RAM", "tiers.ram"),
    "network": (on("nfs4"), "warn", "not on a drive of this machine", "local drive"),
    "slow drive": ({"tier": Rates(0.2e9, 0.2e9, 0.2e9)}, "warn", "the drive is slow", "2 to 12 GB/s"),
    "cache": ({"sustained": SustainedWrite(4e9, 1e9, 32 * GiB, 20.0)}, "warn", "slows down during", "rate at the end"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "severity", "seen", "advice"), DRIVE_CASES.values(), ids=DRIVE_CASES)
def test_drives(changes: dict[str, object], severity: str, seen: str, advice: str) -> None:
    finding = only(list(drive_findings([replace(DRIVE, **changes)])))
    assert (finding.severity, finding.subject) == (severity, "/fast")
    assert seen in finding.seen
    assert advice in finding.advice


def test_slow_rotational_drive_is_called_a_hard_disk() -> None:
    slow = replace(DRIVE, tier=Rates(0.1 * GB, 0.1 * GB, 0.1 * GB))
    assert "hard disk" in only(list(drive_findings([replace(slow, is_rotational=True)]))).seen
    # virtual disks also claim to rotate, so a fast one is no problem
    assert bad(list(drive_findings([replace(DRIVE, is_rotational=True)]))) == []


def test_two_paths_on_one_drive() -> None:
    finding = only(list(drive_findings([DRIVE, replace(DRIVE, path=Path("/fast/too"))])))
    assert finding.severity == "warn"
    assert "/fast, /fast/too" in finding.seen
    other = replace(DRIVE, file_system=replace(DRIVE.file_system, device="3:4"))
    assert bad(list(drive_findings([DRIVE, other]))) == []


def test_kernel_limits_are_read(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.max").write_text("150000 100000\n")
    (cgroup / "memory.max").write_text(f"{MiB}\n")
    (cgroup / "memory.current").write_text("0\n")
    facts = read_system(tmp_path / "sys", tmp_path / "proc")
    assert (facts.cpu_quota, facts.ram_limit_bytes) == (1.5, MiB)
    assert not facts.has_nvidia_driver
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert read_system(tmp_path / "sys", tmp_path / "proc").cpu_quota is None
    nothing = read_system(tmp_path / "none", tmp_path / "none")
    assert nothing.ram_limit_bytes == nothing.ram_bytes > 0
