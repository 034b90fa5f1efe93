"""The machine on which this process runs. Its free memory and free space can change between two calls."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.machine import file_systems
from megatrain.machine.cgroups import available_ram_bytes, total_ram_bytes
from megatrain.machine.file_systems import Space, existing_parent, file_system_of
from megatrain.machine.machine import Machine
from megatrain.machine.profiles import LoadedProfile, load_profile
from megatrain.machine.table import TiersConfig
from tiered.ext import KvikioProbe, may_open_driver, probe_kvikio


class ThisMachine(Machine):
    """The machine on which this process runs."""

    name = "this machine"
    is_here = True

    @property
    def has_gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def has_unified_memory(self) -> bool:
        """Whether CUDA reports an integrated GPU, as on GB10, Jetson or an APU."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device()) if self.has_gpu else None
        return bool(getattr(properties, "is_integrated", False))

    @property
    def ram(self) -> Space:
        return Space(total_ram_bytes(), available_ram_bytes())

    def gpu_memory(self, device: torch.device) -> Space:
        free, total = torch.cuda.mem_get_info(device)
        return Space(total, free)

    def gpu_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def drive_spaces(self, table: TiersConfig, output_dir: Path) -> list[Space]:
        """Return the space of the paths' file systems. Files that this run left count as free."""
        devices = [file_systems.file_system_number(drive.path) for drive in table.nvme]
        num_paths = Counter(device for device, drive in zip(devices, table.nvme, strict=True) if drive.size.is_auto)
        spaces = []
        for device, drive in zip(devices, table.nvme, strict=True):
            disk = file_systems.disk_usage(drive.path)
            share = max(0, disk.free - table.safety_margin.resolve(disk.total)) // max(1, num_paths[device])
            own_bytes = file_systems.own_drive_bytes(drive.path, output_dir / CHECKPOINTS_NAME)
            spaces.append(Space(disk.total, share + own_bytes))
        return spaces

    def drive_keys(self, paths: Sequence[Path]) -> list[str]:
        return [file_system_of(path).key for path in paths]

    def can_bypass_ram(self, table: TiersConfig) -> bool:
        """Return whether a test with kvikio has shown that GPUDirect Storage works on all drives."""
        if table.direct == "auto" and (table.verify == "always" or not may_open_driver()):
            return False
        for drive in table.nvme:
            if reason := _probe_once(existing_parent(drive.path)).reason:
                if table.direct == "auto":
                    return False
                text = f'tiers.direct = "on", but GPUDirect Storage does not work on {drive.path}: {reason}'
                raise ConfigError("the config", [Problem("tiers.direct", text, 'Write "auto" or "off"')])
        return True

    def rates(self) -> LoadedProfile:
        """Return the rates that doctor measured."""
        return load_profile()


THIS_MACHINE = ThisMachine()


@functools.cache
def _probe_once(folder: Path) -> KvikioProbe:
    """Probe once per process, because a probe takes a second and the result does not change."""
    return probe_kvikio(folder)
