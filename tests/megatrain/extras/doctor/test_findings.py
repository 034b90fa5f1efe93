"""The doctor's findings: one case for each problem, and a good machine without problems."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from megatrain.extras.doctor.drives import DriveResult, Rates, SustainedWrite
from megatrain.extras.doctor.examine import DoctorResults
from megatrain.extras.doctor.findings import (
    Finding,
    SystemFacts,
    drive_findings,
    gpu_findings,
    read_system,
    system_findings,
)
from megatrain.extras.doctor.layers import LayerRates
from megatrain.extras.doctor.processors import GdsResult, GpuResult, ProcessorResult, check_gds
from megatrain.machine.file_systems import FileSystem
from megatrain.machine.profiles import DriveProfile, GpuProfile, MachineProfile
from tiered import GiB, MiB

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


LIMIT = "ulimit -l unlimited (service: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)"
NO_GDS, WITH_GDS = GdsResult(False, False, ("this", "that")), GdsResult(True, True, ())
LOCKED = Finding("ok", "page-locking", "works, no limit")
UNUSED = Finding("ok", "page-locking", "not needed without a GPU (no limit for this user)")
FAST = Finding("ok", "/fast", "xfs with O_DIRECT, 500.00 GiB free")
STEADY = Finding(
    "ok",
    "/fast",
    "does not slow down during a long write: 32.00 GiB written in 9 s: 4.00 GB/s at the start, 3.90 GB/s at the end",
)

SYSTEM_CASES: dict[str, tuple[dict[str, Any], list[Finding]]] = {
    "good": ({"cpu_quota": 8.0, "load": 4.0, "memlock_bytes": 64 * GiB},
             [Finding("ok", "page-locking", "works, a limit of 64.00 GiB")]),
    "cpu limit": ({"cpu_quota": 2.5}, [
        Finding(
            "warn", "CPU limit", "a cgroup grants 2.5 CPUs of 8 visible ones, so threads block each other",
            "raise the limit, or bind the process: taskset -c 0-1 megatrain-tier ...",
        ),
        LOCKED,
    ]),
    "less than one CPU": ({"cpu_quota": 0.5}, [
        Finding(
            "warn", "CPU limit", "a cgroup grants 0.5 CPUs of 8 visible ones, so threads block each other",
            "raise the limit, or bind the process: taskset -c 0-0 megatrain-tier ...",
        ),
        LOCKED,
    ]),
    "threads": ({"num_torch_threads": 7}, [
        Finding(
            "note", "threads", "torch computes with 7 of 8 usable CPUs, here and in runs",
            "unset OMP_NUM_THREADS to use all CPUs",
        ),
        LOCKED,
    ]),
    "load": ({"load": 4.1}, [
        Finding(
            "note", "load", "the machine was busy before the measurement, with load 4.1 on 8 CPUs",
            "measure again when nothing else runs, because these rates may be too low",
        ),
        LOCKED,
    ]),
    "memlock": ({"memlock_bytes": 8 * MiB}, [
        Finding("note", "page-locking", "works, with a limit of 8.00 MiB for other page-locked memory", LIMIT),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", SYSTEM_CASES)
def test_settings_of_the_machine(case: str) -> None:
    changes, findings = SYSTEM_CASES[case]
    assert list(system_findings(replace(FACTS, **changes), GPU)) == findings


def test_memory_that_cannot_be_page_locked() -> None:
    seen = "CUDA could not page-lock RAM (no limit), so copies to the GPU are slow and block threads"
    unpinned = [Finding("warn", "page-locking", seen, LIMIT)]
    assert list(system_findings(FACTS, replace(GPU, is_pinned=False))) == unpinned
    limited = replace(FACTS, memlock_bytes=8 * MiB)
    seen = "not needed without a GPU (a limit of 8.00 MiB for this user)"
    assert list(system_findings(limited, None)) == [Finding("ok", "page-locking", seen)]


def test_gpu_and_gds() -> None:
    gpu = Finding("ok", "GPU", "G, 24.00 GiB")
    installed = Finding("ok", "GPUDirect Storage", "kvikio and nvidia-fs are installed")
    assert list(gpu_findings(replace(FACTS, has_nvidia_driver=True), GPU, WITH_GDS)) == [gpu, installed]
    missing = Finding(
        "note",
        "GPUDirect Storage",
        "not available, so blocks go from drives to the GPU through RAM; missing: this; that",
        "it is optional, and saves RAM bandwidth if drives are fast",
    )
    assert list(gpu_findings(FACTS, GPU, NO_GDS)) == [gpu, missing]
    none = Finding("ok", "GPU", "none; layers run on the CPU, and the tiers are RAM and drives")
    assert list(gpu_findings(FACTS, None, NO_GDS)) == [none]
    hidden = Finding(
        "warn",
        "GPU",
        "the machine has an NVIDIA driver, but torch sees no CUDA device",
        "install a torch built for CUDA, and check CUDA_VISIBLE_DEVICES",
    )
    assert list(gpu_findings(replace(FACTS, has_nvidia_driver=True), None, WITH_GDS)) == [hidden]


def test_all_findings_of_an_examination() -> None:
    layers = LayerRates({"float32": 1e11}, {"float32": 2e11, "bfloat16": 3e11}, {"float32": 4e9}, 5e4)
    day = datetime(2026, 5, 4, tzinfo=UTC)
    processor = ProcessorResult(6, 7e9, {"float32": 8e8, "bfloat16": 9e8})
    slowed = replace(DRIVE, computing_s_per_byte=1e-11, seconds_per_copy=2e-5)
    results = DoctorResults(day, False, FACTS, processor, layers, None, NO_GDS, (slowed,))
    none = Finding("ok", "GPU", "none; layers run on the CPU, and the tiers are RAM and drives")
    assert results.findings == (UNUSED, none, FAST, STEADY)
    drive = DriveProfile(
        path="/fast", filesystem="xfs", measured_at=day, is_quick=False, is_direct=True, read_bytes_per_s=5e9,
        write_bytes_per_s=4e9, mixed_bytes_per_s=4.5e9, sustained_write_bytes_per_s=3.9e9, computing_s_per_byte=1e-11,
        seconds_per_copy=2e-5,
    )  # fmt: skip
    profile = MachineProfile(
        host="h", cpu="c", ram_bytes=64 * GiB, measured_at=day, is_quick=False, num_threads=6,
        ram_update_bytes_per_s=7e9, adamw_params_per_s={"float32": 8e8, "bfloat16": 9e8},
        matmul_flops_per_s={"cpu/float32": 1e11},
        attention_flops_per_s={"cpu/float32": 2e11, "cpu/bfloat16": 3e11},
        elementwise_bytes_per_s={"cpu/float32": 4e9}, launches_per_s=5e4, drives={"1:2 /dev/nvme0n1": drive},
    )  # fmt: skip
    assert results.profile == profile
    gpu = replace(GPU, update=1e12, attention_flops={"bfloat16": 6e13}, elementwise={"float32": 7e11}, d2h=24e9)
    brief = replace(DRIVE, sustained=None)
    quick = replace(
        results, is_quick=True, gpu=gpu, gds=WITH_GDS, drives=(brief,), layers=replace(layers, launches_per_s=0.0)
    )
    assert quick.profile == profile.model_copy(
        update={
            "is_quick": True,
            "launches_per_s": None,
            "matmul_flops_per_s": {"cpu/float32": 1e11, "cuda/float32": 5e13, "cuda/bfloat16": 2e14},
            "attention_flops_per_s": {"cpu/float32": 2e11, "cpu/bfloat16": 3e11, "cuda/bfloat16": 6e13},
            "elementwise_bytes_per_s": {"cpu/float32": 4e9, "cuda/float32": 7e11},
            "gpu": GpuProfile(
                name="G", memory_bytes=24 * GiB, h2d_bytes_per_s=25e9, d2h_bytes_per_s=24e9, update_bytes_per_s=1e12
            ),
            "drives": {
                "1:2 /dev/nvme0n1": drive.model_copy(
                    update={
                        "is_quick": True,
                        "sustained_write_bytes_per_s": None,
                        "computing_s_per_byte": None,
                        "seconds_per_copy": None,
                    }
                )
            },
        }
    )
    assert quick.to_json() == {
        "measured_at": "2026-05-04T00:00:00+00:00",
        "quick": True,
        "system": asdict(FACTS),
        "processor": {"num_threads": 6, "ram_update": 7e9, "adamw_params": {"float32": 8e8, "bfloat16": 9e8}},
        "layers": asdict(replace(layers, launches_per_s=0.0)),
        "gpu": asdict(gpu),
        "gds": {"has_kvikio": True, "has_driver": True, "missing": ()},
        "drives": [{**asdict(brief), "path": "/fast"}],
        "findings": [asdict(finding) for finding in quick.findings],
    }
    assert results.to_json()["gpu"] is None


def test_missing_gds_requirements_are_listed(tmp_path: Path) -> None:
    nothing = check_gds(tmp_path / "proc", tmp_path / "run")
    modules = [
        "the kernel module nvidia-fs (package nvidia-fs or nvidia-gds, then modprobe nvidia-fs)",
        "/run/udev, which cuFile needs to find the drive of a path (in a container: mount it)",
    ]
    assert not nothing.has_driver and list(nothing.missing[-2:]) == modules
    assert [text.split(" (")[0] for text in nothing.missing[:-2]] == ["the package kvikio"] * (not nothing.has_kvikio)
    (tmp_path / "proc" / "driver" / "nvidia-fs").mkdir(parents=True)
    (tmp_path / "run" / "udev").mkdir(parents=True)
    found = check_gds(tmp_path / "proc", tmp_path / "run")
    assert found.has_driver
    assert len(found.missing) == (0 if found.has_kvikio else 1)


def on(kind: str) -> dict[str, object]:
    return {"file_system": replace(DRIVE.file_system, kind=kind)}


def slow(rate: float, *, is_rotational: bool) -> dict[str, object]:
    return {"tier": Rates(rate, rate, rate), "is_rotational": is_rotational, "sustained": None}


NVME = "use NVMe drives, which have 2 to 12 GB/s; several [[tiers.nvme]] are striped"
DRIVE_CASES: dict[str, tuple[dict[str, Any], list[Finding]]] = {
    "good": ({"is_rotational": True}, [FAST, STEADY]),  # virtual disks also claim to rotate
    "no O_DIRECT": ({"is_direct": False, "sustained": None}, [Finding(
        "warn", "/fast",
        "xfs does not support O_DIRECT, so the measured rates may be the rates of the kernel's page cache",
        "use ext4 or xfs for [[tiers.nvme]]; not overlay, an encrypted home or a network folder",
    )]),
    "memory": (on("tmpfs"), [Finding(
        "warn", "/fast", replace(DRIVE.file_system, kind="tmpfs").warning,
        "name a folder on a drive, and give that RAM to tiers.ram",
    ), STEADY]),
    "network": (on("nfs4"), [Finding(
        "warn", "/fast", replace(DRIVE.file_system, kind="nfs4").warning, "use a local drive for [[tiers.nvme]]",
    ), STEADY]),
    "program": (on("fuse.sshfs"), [Finding(
        "warn", "/fast", replace(DRIVE.file_system, kind="fuse.sshfs").warning, "use a local drive for [[tiers.nvme]]",
    ), STEADY]),
    "slow drive": (slow(0.499e9, is_rotational=False), [FAST, Finding(
        "warn", "/fast", "the drive is slow: 0.50 GB/s of concurrent reads and writes.", NVME,
    )]),
    "hard disk": (slow(0.1e9, is_rotational=True), [FAST, Finding(
        "warn", "/fast", "the drive is slow: 0.10 GB/s of concurrent reads and writes. It is a hard disk.", NVME,
    )]),
    "fast enough": (slow(0.5e9, is_rotational=True), [FAST]),
    "cache": ({"sustained": SustainedWrite(4e9, 2.79e9, 32 * GiB, 20.0)}, [FAST, Finding(
        "warn", "/fast", "slows down during a long write: 32.00 GiB written in 20 s: 4.00 GB/s at the start, "
        "2.79 GB/s at the end", "plans use the rate at the end; fstrim, more free space or another drive may help",
    )]),
}  # fmt: skip


@pytest.mark.parametrize("case", DRIVE_CASES)
def test_drives(case: str) -> None:
    changes, findings = DRIVE_CASES[case]
    assert list(drive_findings([replace(DRIVE, **changes)])) == findings


def test_a_write_may_slow_down_by_three_tenths() -> None:
    drive = replace(DRIVE, sustained=SustainedWrite(10.0, 7.0, MiB, 1.0))
    assert [finding.severity for finding in drive_findings([drive])] == ["ok", "ok"]


def test_two_paths_on_one_drive() -> None:
    other = replace(DRIVE, path=Path("/else"), file_system=replace(DRIVE.file_system, device="3:4"))
    findings = list(drive_findings([DRIVE, replace(DRIVE, path=Path("/fast/too")), other]))
    assert [finding.subject for finding in findings] == ["/fast"] * 2 + ["/fast/too"] * 2 + ["/else"] * 2 + ["paths"]
    assert findings[-1] == Finding(
        "warn",
        "paths",
        "/fast, /fast/too are on the same file system (/dev/nvme0n1), so striping adds no speed",
        "name one of them in [[tiers.nvme]], and add folders on other drives",
    )


def test_kernel_limits_are_read(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.max").write_text("150000 100000\n")
    (cgroup / "memory.max").write_text(f"{MiB}\n")
    (cgroup / "memory.current").write_text("0\n")
    facts = read_system(tmp_path / "sys", tmp_path / "proc")
    assert (facts.cpu_quota, facts.ram_limit_bytes) == (1.5, MiB)
    assert not facts.has_nvidia_driver
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert read_system(tmp_path / "sys", tmp_path / "proc").has_nvidia_driver
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert read_system(tmp_path / "sys", tmp_path / "proc").cpu_quota is None
    nothing = read_system(tmp_path / "none", tmp_path / "none")
    assert nothing.ram_limit_bytes == nothing.ram_bytes > 0
