"""Resources that a run can use on a machine: the compute tier, and the capacities of all tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.base.errors import ConfigError, Problem
from megatrain.machine.machine import Machine
from megatrain.machine.table import TiersConfig
from tiered.units import GiB, format_size


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """Resources that a run can use on a machine.

    Attributes:
        table: ``[tiers]``. Without a drive, there is no NVMe tier.
        rates: Relative share of each drive in striped blocks.
        has_rates: Whether the config sets these shares.
        emulates_gpu: Whether a part of RAM emulates GPU memory.
        file_bytes: Maximum size of each file of a block, or None for the tier's default.
    """

    table: TiersConfig
    machine: Machine
    rates: tuple[float, ...] = ()
    has_rates: bool = False
    emulates_gpu: bool = False
    file_bytes: int | None = None

    def compute_tier(self, device: torch.device) -> str:
        """Return the tier in which layers run: GPU memory with CUDA or an emulated GPU, else RAM.

        If GPU and RAM are one memory, layers run in RAM unless the config sets the GPU tier's size.
        """
        if device.type == "cuda" and self.table.gpu.size.is_auto and self.machine.has_unified_memory:
            return "ram"
        return "gpu" if device.type == "cuda" or self.emulates_gpu else "ram"

    def can_bypass_ram(self, device: torch.device) -> bool:
        """Return whether blocks move directly between files and GPU memory.

        For an emulated GPU, this is simulated with plain system calls, and only if the config requests direct movement.

        Raises:
            ConfigError: The config requests direct movement, but it does not work here.
        """
        if self.table.direct == "off" or not self.table.nvme or self.compute_tier(device) != "gpu":
            return False
        return self.table.direct == "on" if self.emulates_gpu else self.machine.can_bypass_ram(self.table)

    def ram_capacity_bytes(self) -> int:
        """Return the RAM tier's capacity. "auto" is the free RAM, minus the margin and minus an emulated GPU tier.

        Raises:
            ConfigError: GPU and RAM are one memory, and the config leaves too little for the system.
        """
        (total, free), gpu_size = self.machine.ram, self.table.gpu.size
        margin, gpu_bytes, is_unified = self.table.safety_margin.resolve(total), 0, self.machine.has_unified_memory
        if is_unified:
            margin = max(margin, unified_reserve_bytes(total))
        if self.emulates_gpu or (is_unified and not gpu_size.is_auto):
            gpu_bytes = gpu_size.resolve(total)
        capacity = self.table.ram.size.resolve(total, auto_bytes=max(0, free - margin - gpu_bytes))
        if is_unified:
            _check_unified_memory(self.table, capacity + gpu_bytes, total)
        return capacity

    def gpu_capacity_bytes(self, device: torch.device) -> int:
        """Return the GPU tier's capacity. "auto" is the free memory minus the margin. An emulated GPU needs a size.

        The margin is at least the allowance for libraries. If GPU and RAM are one memory, return the RAM tier's
        capacity.
        """
        if self.emulates_gpu:
            return self.table.gpu.size.resolve(self.machine.ram.total)
        if self.compute_tier(device) == "ram":
            return self.ram_capacity_bytes()
        total, free = self.machine.gpu_memory(device)
        margin = max(self.table.safety_margin.resolve(total), library_bytes(total))
        return self.table.gpu.size.resolve(total, auto_bytes=max(0, free - margin))

    def nvme_capacity_bytes(self, output_dir: Path) -> int:
        """Return the NVMe tier's total capacity over all paths. "auto" is the free space minus the margin.

        Files that this run left count as free. Paths on the same file system share its free space.
        """
        capacity = 0
        for drive, space in zip(self.table.nvme, self.machine.drive_spaces(self.table, output_dir), strict=True):
            capacity += drive.size.resolve(space.total, auto_bytes=space.free)
        return capacity


def resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype of layers. auto: bf16 with CUDA, fp32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def stripe_rates(paths: Sequence[Path], shares: Sequence[float], machine: Machine) -> list[float]:
    """Return the NVMe paths' relative shares: as configured, else the drives' known rates, else equal shares."""
    if len(paths) <= 1 or len(shares) == len(paths):
        return list(shares) or [1.0] * len(paths)
    profile = machine.rates().machine
    drives = [] if profile is None else [profile.drives.get(key) for key in machine.drive_keys(paths)]
    rates = [drive.mixed_bytes_per_s for drive in drives if drive is not None]
    return rates if len(rates) == len(paths) else [1.0] * len(paths)


def unified_reserve_bytes(total_bytes: int) -> int:
    """Return the bytes that a run leaves free if GPU and CPU share one memory: a tenth, at least 2 GiB.

    When memory runs out, such a machine hangs before it kills a process: GPU allocations cannot be swapped out, so only
    the system's memory can be reclaimed (seen on GB10 with 112 of 119 GiB in use). The reserve includes libraries and
    the CUDA context.
    """
    return max(total_bytes // 10, min(2 * GiB, total_bytes // 2))


def _check_unified_memory(table: TiersConfig, requested_bytes: int, total_bytes: int) -> None:
    """Raise ``ConfigError`` if the tiers' sizes leave too little of the memory that GPU and CPU share."""
    limit = total_bytes - unified_reserve_bytes(total_bytes)
    if requested_bytes <= limit:
        return
    sizes = {"tiers.ram.size": table.ram.size, "tiers.gpu.size": table.gpu.size}
    texts = {key: f'{key} = "{size.text}"' for key, size in sizes.items() if not size.is_auto}
    text = (
        f"{' and '.join(texts.values())}: GPU and RAM are one memory here, of "
        f"{format_size(total_bytes)}, and with less than {format_size(total_bytes - limit)} left the system hangs "
        "instead of ending the run"
    )
    raise ConfigError("the config", [Problem(next(iter(texts)), text, f'Write at most "{limit // GiB}GiB", or "auto"')])


def library_bytes(total_bytes: int) -> int:
    """Return the bytes of GPU memory outside the tier that libraries may use. Plans do not include them.

    This is an estimate from the libraries' source code, not a measurement. It covers workspaces of cuBLAS and cuDNN,
    and kernels, which are loaded at their first use.
    """
    return min(GiB, total_bytes // 10)


def describe_library_memory(machine: Machine, capacity_bytes: int, device: torch.device) -> str:
    """Describe the GPU memory that a tier of this capacity leaves for libraries, or return "" if unknown."""
    if device.type != "cuda" or not machine.has_gpu or machine.has_unified_memory:
        return ""
    total, free = machine.gpu_memory(device)
    spare, limit = max(0, free - capacity_bytes), library_bytes(total)
    text = (
        f"{format_size(spare)} of free GPU memory are outside of the tier; libraries are allowed {format_size(limit)}"
    )
    if spare < limit:
        text += f" of it: with more than tiers.gpu.size = {format_size(max(0, free - limit))} they may find none"
    return text
