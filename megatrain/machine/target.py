"""The machine for which a run is planned, and the resources that the run can use there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import LoadedProfile, MachineProfile, load_profile, measured_drive_rates
from megatrain.machine.table import TiersConfig


@dataclass(frozen=True, slots=True)
class PlannedDrive:
    """A drive of a planned machine. The machine's profile has the drive's rates under the same key.

    Attributes:
        key: Name of the drive's rates in the profile.
        total_bytes: Size of the file system.
        max_written_bytes: Endurance that the manufacturer guarantees, or None if unknown.
    """

    key: str
    name: str
    total_bytes: int
    max_written_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine for which runs are planned from figures alone. Such plans read nothing on the current machine.

    Attributes:
        name: Name of the machine's file, without the suffix.
        note: Note for the user, or "".
        free_ram_bytes: RAM that the system does not use.
        gpu_bytes: Memory of one GPU, or None without a GPU.
        num_gpus: Number of GPUs of this kind. Each process uses one GPU.
        unified_bytes: Size of the memory that GPU and CPU share, or None if they have separate memory.
        drives: Drives, in the order of a config's ``[[tiers.nvme]]``.
        num_published: Number of figures with a source.
        num_estimated: Number of estimated figures.
    """

    name: str
    title: str
    note: str
    ram_bytes: int
    free_ram_bytes: int
    gpu_bytes: int | None
    num_gpus: int
    unified_bytes: int | None
    drives: tuple[PlannedDrive, ...]
    profile: MachineProfile
    num_published: int
    num_estimated: int

    @property
    def has_gpu(self) -> bool:
        """Whether layers run on a GPU."""
        return self.gpu_bytes is not None

    @property
    def origin(self) -> str:
        """Source of the machine's rates, as a line for plans."""
        made = f"{self.num_published} of its figures are published ones, {self.num_estimated} estimated"
        if not self.num_published and not self.num_estimated:
            made = "measured there by doctor"
        return f"rates           predicted for {self.name} ({self.title}): {made}; no rate was measured for this plan"


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """Resources that a run can use on a machine.

    Attributes:
        table: ``[tiers]``. Without a drive, there is no NVMe tier.
        rates: Relative weight of each drive in a stripe.
        has_rates: Whether the config sets these weights.
        emulates_gpu: Whether a part of RAM emulates GPU memory.
        file_bytes: Largest file of a block, or None for the tier's default.
        machine: Machine to plan for, or None for this one.
        profile: Rates to plan with, or None for the machine's rates.
    """

    table: TiersConfig
    rates: tuple[float, ...] = ()
    has_rates: bool = False
    emulates_gpu: bool = False
    file_bytes: int | None = None
    machine: PlannedMachine | None = None
    profile: LoadedProfile | None = None


def profile_of(tiers: TierSpecs) -> LoadedProfile:
    """Return the rates to plan with: the given ones, else the rates of the planned machine, else of this one."""
    if tiers.profile is not None:
        return tiers.profile
    if tiers.machine is None:
        return load_profile()
    return LoadedProfile(tiers.machine.profile, origin=tiers.machine.origin)


def drive_keys(paths: Sequence[Path], planned: PlannedMachine | None) -> list[str]:
    """Return the identifier of each NVMe path's drive in the profile.

    Args:
        paths: Folders of the NVMe tier, in order.
        planned: Machine to plan for, or None for this one.
    """
    if planned is None:
        return [file_system_of(path).key for path in paths]
    keys = [drive.key for drive in planned.drives]
    return [*keys, *(f"beyond {number}" for number in range(len(keys), len(paths)))][: len(paths)]


def stripe_rates(paths: Sequence[Path], given: Sequence[float], planned: PlannedMachine | None = None) -> list[float]:
    """Return the relative weights of NVMe paths: as given, else the known rates of the drives, else equal.

    Args:
        paths: Folders of the NVMe tier, in order.
        planned: Machine to plan for, or None for this one, as measured.
    """
    if len(paths) <= 1 or len(given) == len(paths):
        return list(given) or [1.0] * len(paths)
    if planned is not None:
        there = [planned.profile.drives[drive.key].mixed_bytes_per_s for drive in planned.drives[: len(paths)]]
        return there if len(there) == len(paths) else [1.0] * len(paths)
    return measured_drive_rates(paths, load_profile().machine) or [1.0] * len(paths)
