"""Measured rates of machines, and the file that stores the rates. ``doctor`` writes the file, and plans read it."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatrain.machine.file_systems import file_system_of
from tiered.units import GiB

#: Age in days above which plans advise measuring the rates again. Plans still use older rates.
STALE_DAYS = 30

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

#: Names of rates that earlier versions stored and that no plan reads any more.
_OBSOLETE_RATES = frozenset(
    f"{name}_bytes_per_s" for name in ("bare_read", "bare_write", "bare_mixed", "ram_read", "ram_copy")
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_obsolete_rates(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _OBSOLETE_RATES}


class DriveProfile(_Record):
    """Measured rates of a tier on one file system, in bytes per second.

    Attributes:
        is_direct: Whether O_DIRECT was used.
        mixed_bytes_per_s: Combined rate of simultaneous reads and writes.
        sustained_write_bytes_per_s: Rate at the end of a long write. None if not measured.
        computing_s_per_byte: Seconds by which each moved byte delays computation. None if not measured.
        seconds_per_copy: Time that the step's thread spends per moved block. None if not measured.
    """

    path: str
    filesystem: str
    measured_at: AwareDatetime
    is_quick: bool
    is_direct: bool
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    mixed_bytes_per_s: Rate
    sustained_write_bytes_per_s: Rate | None = None
    computing_s_per_byte: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seconds_per_copy: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class GpuProfile(_Record):
    """Measured rates of one CUDA device, and of copies to and from page-locked RAM, in bytes per second.

    Attributes:
        update_bytes_per_s: Rate in device memory with two reads and a write per element. None if not measured.
        peer_bytes_per_s: Rate in each direction while all GPUs of a host gather or exchange. None if unknown.
        network_bytes_per_s: Rate between hosts in each direction, per GPU while all GPUs use the network. None if
            unknown.
    """

    name: str
    memory_bytes: int
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    update_bytes_per_s: Rate | None = None
    peer_bytes_per_s: Rate | None = None
    network_bytes_per_s: Rate | None = None


class MachineProfile(_Record):
    """All measurements of one machine.

    Attributes:
        ram_update_bytes_per_s: Rate of in-place additions, with two reads and a write per element.
        adamw_params_per_s: Parameters per second that the AdamW kernel updates, by dtype of the weights.
        matmul_flops_per_s: ``"cpu/float32"`` -> FLOP/s of matmuls. On a CPU, measured in the layers of steps; on a GPU,
            with large matrices.
        attention_flops_per_s: Same keys -> FLOP/s of fused attention, without work that causal kernels skip. Empty if
            not measured.
        elementwise_bytes_per_s: Same keys -> bytes/s that other layer operators read and write. Empty if not measured.
        launches_per_s: Operator calls per second of a CPU thread, including a step's Python code. None if not measured.
        drives: Rates of each drive, by the drive's key (see ``Machine.drive_keys``).
    """

    host: str
    cpu: str
    ram_bytes: int
    measured_at: AwareDatetime
    is_quick: bool
    num_threads: int
    ram_update_bytes_per_s: Rate
    adamw_params_per_s: dict[str, Rate]
    matmul_flops_per_s: dict[str, Rate]
    attention_flops_per_s: dict[str, Rate] = Field(default_factory=dict)
    elementwise_bytes_per_s: dict[str, Rate] = Field(default_factory=dict)
    launches_per_s: Rate | None = None
    gpu: GpuProfile | None = None
    drives: dict[str, DriveProfile] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identifier of this machine in the file of profiles."""
        return _machine_key(self.host, self.cpu, self.ram_bytes)

    def drive_of(self, path: Path) -> DriveProfile | None:
        """Return the rates of a path's drive, or None if not measured. The path need not exist."""
        return self.drives.get(file_system_of(path).key)


class _ProfileFile(_Record):
    format: Literal["megatrain-tier profile"] = "megatrain-tier profile"
    version: Literal[1] = 1
    machines: dict[str, MachineProfile] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """Known rates of a machine, and their origin.

    Attributes:
        note: Reason why an existing file of profiles provides no rates, or None.
        origin: Line that states the source of the rates, or "" if doctor measured them on this machine.
        ranks: Lines about the ranks that determine the rates. Empty if all ranks have the same rates.
    """

    machine: MachineProfile | None
    note: str | None = None
    origin: str = ""
    ranks: tuple[str, ...] = ()


def profile_path() -> Path:
    """Return the path of the file of profiles: ``$XDG_CACHE_HOME/megatrain-tier/profile.json``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "megatrain-tier" / "profile.json"


def load_profile(path: Path | None = None) -> LoadedProfile:
    """Return this machine's profile. Never raises an error: ``note`` explains an unusable file."""
    path = profile_path() if path is None else path
    try:
        machines = _ProfileFile.model_validate_json(path.read_bytes()).machines
    except FileNotFoundError:
        return LoadedProfile(None)
    except (OSError, ValueError) as error:
        return LoadedProfile(None, f"{path} is not used: {_reason(error)}. `megatrain-tier doctor` writes a new one")
    machine = machines.get(_machine_key(platform.node(), cpu_name(), psutil.virtual_memory().total))
    if machine is None and machines:
        return LoadedProfile(None, f"{path} has no figures of this machine, only of {', '.join(sorted(machines))}")
    return LoadedProfile(machine)


def store_profile(machine: MachineProfile, path: Path | None = None) -> Path:
    """Write a machine's profile atomically, and return the file's path.

    The file keeps the figures of other machines, and of drives that this measurement did not include.

    Raises:
        OSError: The file cannot be written.
    """
    path = profile_path() if path is None else path
    try:
        machines = dict(_ProfileFile.model_validate_json(path.read_bytes()).machines)
    except (OSError, ValueError):
        machines = {}
    old_profile = machines.get(machine.key)
    if old_profile is not None:
        machine = machine.model_copy(update={"drives": {**old_profile.drives, **machine.drives}})
    machines[machine.key] = machine
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(_ProfileFile(machines=machines).model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except BaseException:
        os.unlink(temporary_path)
        raise
    return path


def age_days(measured_at: datetime) -> float:
    """Return the age of a measurement in days, or 0 for a time in the future."""
    return max(0.0, (datetime.now(UTC) - measured_at).total_seconds() / 86400)


def cpu_name() -> str:
    """Return the processor's name as the kernel reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in problem["loc"])
        return f"{location}: {problem['msg']}" if location else str(problem["msg"])
    return str(error)


def _machine_key(host: str, cpu: str, ram_bytes: int) -> str:
    """Return the identifier of a machine: host name, processor and RAM."""
    return f"{host}, {cpu}, {round(ram_bytes / GiB)} GiB"  # sizes differ by a few MiB between kernels
