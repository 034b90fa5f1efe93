"""An examination of the machine that measures all rates, finds problems, and creates the machine profile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatrain.api import DriveProfile, GpuProfile, MachineProfile, available_ram_bytes, machine_toml
from megatrain.extras.doctor.drives import FULL, QUICK, DriveResult, check_path, measure_drive
from megatrain.extras.doctor.findings import (
    Finding,
    SystemFacts,
    drive_findings,
    gpu_findings,
    read_system,
    system_findings,
)
from megatrain.extras.doctor.layers import LayerRates, measure_layers
from megatrain.extras.doctor.processors import (
    GdsResult,
    GpuResult,
    ProcessorResult,
    check_gds,
    measure_gpu,
    measure_processor,
)
from tiered.units import MiB

#: Bytes of RAM to use and seconds per measurement, for a quick and for a full examination.
_QUICK_PROCESSOR = (256 * MiB, 0.3)
_FULL_PROCESSOR = (2048 * MiB, 1.5)


@dataclass(frozen=True, slots=True)
class DoctorResults:
    """All results of one `doctor` command."""

    measured_at: datetime
    is_quick: bool
    system: SystemFacts
    processor: ProcessorResult
    layers: LayerRates
    gpu: GpuResult | None
    gds: GdsResult
    drives: tuple[DriveResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings with remedies, first about the machine, then about each path."""
        return (
            *system_findings(self.system, self.gpu),
            *gpu_findings(self.system, self.gpu, self.gds),
            *drive_findings(self.drives),
        )

    @property
    def profile(self) -> MachineProfile:
        """The measured rates as a machine profile, which is the stored format."""
        processor, layers, gpu = self.processor, self.layers, self.gpu

        def rates_by_device(name: str) -> dict[str, float]:
            rates = {f"cpu/{dtype}": rate for dtype, rate in getattr(layers, name).items()}
            return rates | ({f"cuda/{dtype}": rate for dtype, rate in getattr(gpu, name).items()} if gpu else {})

        return MachineProfile(
            host=self.system.host,
            cpu=self.system.cpu,
            ram_bytes=self.system.ram_bytes,
            measured_at=self.measured_at,
            is_quick=self.is_quick,
            num_threads=processor.num_threads,
            ram_update_bytes_per_s=processor.ram_update,
            adamw_params_per_s=dict(processor.adamw_params),
            matmul_flops_per_s=rates_by_device("matmul_flops"),
            attention_flops_per_s=rates_by_device("attention_flops"),
            elementwise_bytes_per_s=rates_by_device("elementwise"),
            launches_per_s=layers.launches_per_s or None,
            gpu=GpuProfile(
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                h2d_bytes_per_s=gpu.h2d,
                d2h_bytes_per_s=gpu.d2h,
                update_bytes_per_s=gpu.update,
            )
            if gpu
            else None,
            drives={drive.file_system.key: self._drive_profile(drive) for drive in self.drives},
        )

    def _drive_profile(self, drive: DriveResult) -> DriveProfile:
        return DriveProfile(
            path=str(drive.path),
            filesystem=drive.file_system.kind,
            measured_at=self.measured_at,
            is_quick=self.is_quick,
            is_direct=drive.is_direct,
            read_bytes_per_s=drive.tier.read,
            write_bytes_per_s=drive.tier.write,
            mixed_bytes_per_s=drive.tier.mixed,
            sustained_write_bytes_per_s=drive.sustained.last if drive.sustained else None,
            computing_s_per_byte=drive.computing_s_per_byte,
            seconds_per_copy=drive.seconds_per_copy,
        )

    def machine_toml(self) -> str:
        """Return the TOML file that describes this machine, so that runs on it can be planned on other machines."""
        sizes = {drive.file_system.key: shutil.disk_usage(drive.path).total for drive in self.drives}
        used_bytes = max(0, self.system.ram_limit_bytes - available_ram_bytes())
        return machine_toml(self.profile, used_bytes, sizes)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values: rates in bytes, parameters or FLOPs per second, sizes in bytes."""
        drives = [{**asdict(drive), "path": str(drive.path)} for drive in self.drives]
        return {
            "measured_at": self.measured_at.isoformat(),
            "quick": self.is_quick,
            "system": asdict(self.system),
            "processor": asdict(self.processor),
            "layers": asdict(self.layers),
            "gpu": asdict(self.gpu) if self.gpu else None,
            "gds": asdict(self.gds),
            "drives": drives,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(
    paths: Sequence[Path],
    *,
    quick: bool,
    on_progress: Callable[[str], None] = lambda text: None,
) -> DoctorResults:
    """Measure this machine and the drives of some folders.

    With one path, this takes about 30 s if ``quick`` is set and 90 s otherwise. It uses up to 512 MiB on each drive.

    Raises:
        UnusablePathError: A folder cannot be measured. All folders are checked before the first measurement.
        TieredError: A drive failed.
        OSError: A drive failed.
    """
    for path in paths:
        check_path(path)
    system = read_system()  # must come first, because the measurements add load
    span_bytes, seconds = _QUICK_PROCESSOR if quick else _FULL_PROCESSOR
    on_progress("the optimizer")
    processor = measure_processor(span_bytes=span_bytes, seconds=seconds)
    on_progress("GPU")
    gpu = measure_gpu(seconds=seconds)
    on_progress("layers on the CPU")
    layers = measure_layers(seconds=seconds)
    drives = []
    for path in paths:
        on_progress(str(path))
        drives.append(measure_drive(path, QUICK if quick else FULL))
    return DoctorResults(
        measured_at=datetime.now(UTC).replace(microsecond=0),
        is_quick=quick,
        system=system,
        processor=processor,
        layers=layers,
        gpu=gpu,
        gds=check_gds(),
        drives=tuple(drives),
    )
