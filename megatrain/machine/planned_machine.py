"""A machine that a machine file describes. Plans for it use no memory sizes, drives or rates of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatrain.machine.file_systems import Space
from megatrain.machine.files import DriveTable, GpuTable, MachineFile, read_machine
from megatrain.machine.machine import Machine
from megatrain.machine.profiles import DriveProfile, GpuProfile, LoadedProfile, MachineProfile
from megatrain.machine.table import TiersConfig

#: Placeholder date, because profiles require a measurement date and planned machines have none.
_UNKNOWN_DATE = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class PlannedMachine(Machine):
    """A machine that a machine file describes.

    Attributes:
        name: Name of the file, without the suffix.
    """

    name: str
    file: MachineFile

    is_here = False

    @property
    def has_gpu(self) -> bool:
        return self.file.gpu is not None

    @property
    def has_unified_memory(self) -> bool:
        return self.file.unified_memory is not None

    @property
    def ram(self) -> Space:
        size, in_use = self.file.ram.size, self.file.ram.in_use
        return Space(size.nbytes, max(0, int(size.value - in_use.value)))

    def gpu_memory(self, device: torch.device) -> Space:
        size = 0 if self.file.gpu is None else self.file.gpu.memory.nbytes
        return Space(size, size)

    def gpu_name(self, device: torch.device) -> str:
        return "" if self.file.gpu is None else self.file.gpu.name

    @cached_property
    def drives(self) -> Sequence[tuple[str, DriveTable]]:
        """(key in the profile, figures) of each drive, in the order of a config's ``[[tiers.nvme]]``."""
        return [(f"{table.name} {index}", table) for table in self.file.drives for index in range(table.count)]

    def drive_spaces(self, table: TiersConfig, output_dir: Path) -> list[Space]:
        """Return the space of empty drives. A path beyond the last drive has none."""
        sizes = [drive.size.nbytes for _, drive in self.drives] + [0] * len(table.nvme)
        return [Space(size, max(0, size - table.safety_margin.resolve(size))) for size in sizes[: len(table.nvme)]]

    def drive_keys(self, paths: Sequence[Path]) -> list[str]:
        """Return the keys of the drives in order. A path beyond the last drive gets a key without rates."""
        keys = [key for key, _ in self.drives] + [f"beyond {index}" for index in range(len(paths))]
        return keys[: len(paths)]

    def can_bypass_ram(self, table: TiersConfig) -> bool:
        return table.direct == "on"

    def rates(self) -> LoadedProfile:
        """Return the file's rates, and a line that states their origin."""
        origins = [figure for _, figure in self.file.figures()]
        num_published = sum(figure.source is not None for figure in origins)
        num_estimated = sum(figure.estimate is not None for figure in origins)
        origin_text = f"{num_published} of its figures are published ones, {num_estimated} estimated"
        if not num_published and not num_estimated:
            origin_text = "measured there by doctor"
        subject = f"predicted for {self.name} ({self.file.title})"
        return LoadedProfile(
            self.profile, origin=f"rates           {subject}: {origin_text}; no rate was measured for this plan"
        )

    @cached_property
    def profile(self) -> MachineProfile:
        """The file's figures, in the same form as a profile that doctor measures."""
        gpu, cpu, ram = self.file.gpu, self.file.cpu, self.file.ram

        def rates_by_device(prefix: str = "") -> dict[str, float]:
            """Return the rates whose names have this prefix, by device and dtype."""
            return {
                f"{device}/{dtype}": figure.value
                for device, table in (("cpu", cpu), ("cuda", gpu))
                for dtype in ("bfloat16", "float32")
                if (figure := getattr(table, prefix + dtype, None)) is not None
            }

        return MachineProfile(
            host=self.name,
            cpu=cpu.name,
            ram_bytes=ram.size.nbytes,
            measured_at=_UNKNOWN_DATE,
            is_quick=False,
            num_threads=cpu.cores.value,
            ram_update_bytes_per_s=ram.update.value,
            adamw_params_per_s={"bfloat16": cpu.adamw_bfloat16.value, "float32": cpu.adamw_float32.value},
            matmul_flops_per_s=rates_by_device(),
            attention_flops_per_s=rates_by_device("attention_"),
            elementwise_bytes_per_s=rates_by_device("elementwise_"),
            launches_per_s=None if cpu.launches is None else cpu.launches.value,
            gpu=None
            if gpu is None
            else GpuProfile(
                name=gpu.name,
                memory_bytes=gpu.memory.nbytes,
                h2d_bytes_per_s=gpu.from_ram.value,
                d2h_bytes_per_s=gpu.to_ram.value,
                **_rates(gpu, "update", "peer", "network"),
            ),
            drives={
                key: DriveProfile(
                    path=table.name,
                    filesystem="unknown",
                    measured_at=_UNKNOWN_DATE,
                    is_quick=False,
                    is_direct=True,
                    **_rates(table, "read", "write", "mixed", "sustained_write"),
                )
                for key, table in self.drives
            },
        )


def find_machine(name: str) -> PlannedMachine:
    """Return a machine, given its name or the path of its file.

    Raises:
        MachineFileError: The machine does not exist, or its file cannot be used.
    """
    return PlannedMachine(*read_machine(name))


def _rates(table: GpuTable | DriveTable, *names: str) -> dict[str, Any]:
    """Return the rates that a table contains, by their names in a profile."""
    figures = {name: getattr(table, name) for name in names}
    return {f"{name}_bytes_per_s": figure.value for name, figure in figures.items() if figure is not None}
