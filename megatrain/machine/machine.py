"""Resources of this machine or a planned one, and the part that a config lets a run use."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import psutil
import torch
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.machine.table import TiersConfig
from tiered.ext import (
    KvikioProbe,
    may_open_driver,
    mount_of,
    probe_kvikio,
    read_owner,
    read_store_id,
    reusable_bytes,
    snapshot_folders,
    statuses_below,
    unescape,
)
from tiered.units import GiB, format_size, is_number

#: Older figures are still used, but reported as old.
STALE_DAYS = 30

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

#: Rates that earlier versions stored and that no plan reads.
_ENDED_RATES = frozenset(
    f"{name}_bytes_per_s" for name in ("bare_read", "bare_write", "bare_mixed", "ram_read", "ram_copy")
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_ended_rates(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _ENDED_RATES}


class DriveProfile(_Record):
    """Rates that the tier reached on one file system, in bytes per second.

    Attributes:
        path: Measured path.
        is_direct: Whether O_DIRECT was used.
        mixed_bytes_per_s: Total rate of simultaneous reads and writes.
        sustained_write_bytes_per_s: Rate at the end of a long write, or None if not measured.
        computing_s_per_byte: Compute slowdown per moved byte, or None if not measured.
        seconds_per_copy: Time of the step's thread per moved block, or None if not measured.
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
    """Measured rates of one CUDA device and between it and page-locked RAM, in bytes per second.

    Attributes:
        update_bytes_per_s: Two reads and a write per element in its memory, or None if not measured.
        peer_bytes_per_s: Each direction while all GPUs of a host gather or exchange, or None if unknown.
        network_bytes_per_s: Each direction between hosts, per GPU while all of them use it, or None if unknown.
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
        num_threads: Number of compute threads.
        ram_update_bytes_per_s: Two reads and a write per element, in place, with one addition.
        adamw_params_per_s: Dtype of the weights -> parameters that the AdamW kernel updates per second.
        matmul_flops_per_s: ``"cpu/float32"`` -> FLOP/s of matrix products: as in layers of a step on a CPU, of large
            ones on a GPU.
        attention_flops_per_s: Same keys -> FLOP/s of fused attention, counting the work of a causal kernel. Empty if
            not measured.
        elementwise_bytes_per_s: Same keys -> bytes/s of other layer operators, reads and writes. Empty if not measured.
        launches_per_s: Operator calls per second of a CPU thread, with a step's Python code. None if not measured.
        drives: Device of a file system -> its rates.
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
        """Return the identifier of this machine."""
        return _key_of(self.host, self.cpu, self.ram_bytes)

    def drive_of(self, path: Path) -> DriveProfile | None:
        """Return the rates of the drive that holds ``path``, or will hold it, or None if not measured."""
        return self.drives.get(file_system_of(path).key)


class _ProfileFile(_Record):
    format: Literal["megatrain-tier profile"] = "megatrain-tier profile"
    version: Literal[1] = 1
    machines: dict[str, MachineProfile] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedDrive:
    """A drive of a planned machine. The machine's profile has its rates under the same key.

    Attributes:
        key: Name of its rates in the profile.
        total_bytes: Size of its file system.
        max_written_bytes: Endurance that its maker promises, or None if unknown.
    """

    key: str
    name: str
    total_bytes: int
    max_written_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine that runs are planned for, from its figures. Planning for it reads nothing of this machine.

    Attributes:
        name: Name of its file, without the suffix.
        note: Note for the user, or "".
        free_ram_bytes: RAM that the system leaves free.
        gpu_bytes: Memory of one GPU, or None without a GPU.
        num_gpus: Number of GPUs of that kind; each process uses one.
        unified_bytes: Size of the memory that GPU and RAM share, or None if they are separate.
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
        """The source of its rates, as a line of a plan."""
        made = f"{self.num_published} of its figures are published ones, {self.num_estimated} estimated"
        if not self.num_published and not self.num_estimated:
            made = "measured there by doctor"
        return f"rates           predicted for {self.name} ({self.title}): {made}; no rate was measured for this plan"


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """Resources that a run may use on a machine.

    Attributes:
        table: ``[tiers]``. Without a drive there is no NVMe tier.
        rates: Relative weight of each drive in a stripe.
        has_rates: Whether the config sets these weights.
        emulates_gpu: Whether a part of RAM is used instead of GPU memory.
        file_bytes: Largest file of a block, or None for the tier's default.
        machine: Machine to plan for, or None for this one.
        profile: Rates to plan with, or None for the rates of the machine.
    """

    table: TiersConfig
    rates: tuple[float, ...] = ()
    has_rates: bool = False
    emulates_gpu: bool = False
    file_bytes: int | None = None
    machine: PlannedMachine | None = None
    profile: LoadedProfile | None = None


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """The profile of a machine, or None.

    Attributes:
        note: Why an existing file of profiles gives no rates, or None.
        origin: A line on their source, or "" if doctor measured them on this machine.
        ranks: Lines on the ranks that determine these rates. Empty if all ranks have equal rates.
    """

    machine: MachineProfile | None
    note: str | None = None
    origin: str = ""
    ranks: tuple[str, ...] = ()


#: Location of a file system's bytes: a drive, RAM, another machine, a FUSE program, or a container's layers.
Nature = Literal["drive", "memory", "network", "program", "layers"]
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERS = ("overlay", "aufs", "fuse.fuse-overlayfs", "fuse.unionfs")
_NETWORK = (
    "nfs", "cifs", "smb", "9p", "drvfs", "virtiofs", "ceph", "lustre", "gpfs", "beegfs", "afs", "gluster", "ocfs2",
    "gfs2", "fuse.sshfs", "fuse.gluster", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs",
)  # fmt: skip
#: WSL mounts of a Windows drive: ``C:\\`` over 9p or virtiofs, ``C:`` as drvfs.
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:(\\.*)?")
_WINDOWS_CAUTION = (
    "is a drive of Windows, and every read and write passes through Windows: many times slower than the disk of WSL, "
    "and O_DIRECT, locks and links may not work. A folder in the home directory of Linux is on the disk of WSL"
)
_CAUTIONS: Mapping[Nature, str] = {
    "drive": "",
    "memory": "is RAM, not a drive: blocks there use RAM outside all configured limits",
    "network": "is not on a drive of this machine: others share its speed, and locks may not hold",
    "program": "goes through a program (FUSE): slow, and perhaps not on a drive of this machine",
    "layers": "is the layers of a container: slow, and its files are lost with the container",
}


@dataclass(frozen=True, slots=True)
class FileSystem:
    """File system of a path. ``device`` is ``major:minor``, ``source`` the mounted device, ``kind`` e.g. ``ext4``."""

    device: str
    kind: str
    source: str
    mount_point: str

    def __str__(self) -> str:
        return f"{self.kind} on {self.source}, mounted at {self.mount_point}"

    @property
    def nature(self) -> Nature:
        """Return the location of its bytes, derived from its kind."""
        if self.kind in _IN_MEMORY:
            return "memory"
        if self.kind.startswith(_LAYERS):
            return "layers"
        if self.kind.startswith(_NETWORK):
            return "network"
        return "program" if self.kind.startswith("fuse") else "drive"

    @property
    def caution(self) -> str:
        """Return a warning about this file system, as a clause that begins with the kind, or "" for a drive."""
        if self.nature == "network" and _WINDOWS_DRIVE.fullmatch(self.source):
            return f"{self.kind} {_WINDOWS_CAUTION}"
        return f"{self.kind} {_CAUTIONS[self.nature]}" if _CAUTIONS[self.nature] else ""

    @property
    def key(self) -> str:
        """Return the identifier of this file system on the machine."""
        return f"{self.device} {self.source}"


def profile_path() -> Path:
    """Return the file of profiles: ``$XDG_CACHE_HOME/megatrain-tier/profile.json``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "megatrain-tier" / "profile.json"


def load_profile(path: Path | None = None) -> LoadedProfile:
    """Return the profile of this machine. Never raises: the note names an unusable file."""
    path = profile_path() if path is None else path
    try:
        machines = _read(path).machines
    except FileNotFoundError:
        return LoadedProfile(None)
    except (OSError, ValueError) as error:
        return LoadedProfile(None, f"{path} is not used: {_reason(error)}. `megatrain-tier doctor` writes a new one")
    machine = machines.get(machine_key())
    if machine is None and machines:
        return LoadedProfile(None, f"{path} has no figures of this machine, only of {', '.join(sorted(machines))}")
    return LoadedProfile(machine)


def profile_of(tiers: TierSpecs) -> LoadedProfile:
    """Return the rates to plan with: of several ranks, of the planned machine, or of this one."""
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


def store_profile(machine: MachineProfile, path: Path | None = None) -> Path:
    """Write the profile of one machine atomically; return the file.

    The file keeps figures of other machines, and figures of this machine's drives that were not measured now.

    Raises:
        OSError: The file cannot be written.
    """
    path = profile_path() if path is None else path
    try:
        machines = dict(_read(path).machines)
    except (OSError, ValueError):
        machines = {}
    before = machines.get(machine.key)
    if before is not None:
        machine = machine.model_copy(update={"drives": {**before.drives, **machine.drives}})
    machines[machine.key] = machine
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(_ProfileFile(machines=machines).model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


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


def measured_drive_rates(paths: Sequence[Path], machine: MachineProfile | None) -> list[float] | None:
    """Return the mixed rate of each path's drive, in bytes per second, or None unless all were measured."""
    drives = [machine.drive_of(path) for path in paths] if machine is not None else []
    rates = [drive.mixed_bytes_per_s for drive in drives if drive is not None]
    return rates if rates and len(rates) == len(paths) else None


def age_days(measured_at: datetime) -> float:
    """Return the age of a measurement in days; 0 for a time in the future."""
    return max(0.0, (datetime.now(UTC) - measured_at).total_seconds() / 86400)


def machine_key() -> str:
    """Return the identifier of this machine: host name, processor and RAM."""
    return _key_of(platform.node(), cpu_name(), psutil.virtual_memory().total)


def cpu_name() -> str:
    """Return the processor's name from the kernel."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
    """Return the file system that holds ``path``, or its nearest existing parent folder."""
    real = Path(os.path.realpath(existing_parent(path)))
    number = real.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mount = mount_of(real, mounts)
    return FileSystem(device, mount.kind, mount.source, mount.point)


def missing_mount(path: Path, table: Path = Path("/etc/fstab")) -> str | None:
    """Return the folder above ``path`` that /etc/fstab mounts a drive on but that is not mounted, else None."""
    try:
        lines = table.read_bytes().decode(errors="surrogateescape").split("\n")
    except OSError:
        return None
    fields = [re.split("[ \t]+", line.strip(" \t")) for line in lines if not line.lstrip().startswith("#")]
    points = [os.path.realpath(unescape(each[1])) for each in fields if len(each) > 1 and each[1].startswith("/")]
    real = Path(os.path.realpath(path))
    above = [point for point in points if point != "/" and real.is_relative_to(point)]
    if not above:
        return None
    expected = max(above, key=len)
    return None if Path(file_system_of(path).mount_point).is_relative_to(expected) else expected


def disk_of(file_system: FileSystem, root: Path = Path("/sys/dev/block")) -> str:
    """Return the disk that holds a file system, e.g. ``nvme0n1`` for its first partition; else its key."""
    number = file_system.device
    if number.startswith("0:") and file_system.source.startswith("/dev/"):  # btrfs: an anonymous device number
        with contextlib.suppress(OSError):
            device = os.stat(file_system.source).st_rdev
            number = f"{os.major(device)}:{os.minor(device)}"
    folder = (root / number).resolve()
    if not folder.is_dir():
        return file_system.key
    return folder.parent.name if (folder / "partition").exists() else folder.name


def _read(path: Path) -> _ProfileFile:
    return _ProfileFile.model_validate_json(path.read_bytes())


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return str(error)


def _key_of(host: str, cpu: str, ram_bytes: int) -> str:
    return f"{host}, {cpu}, {round(ram_bytes / GiB)} GiB"  # kernels report sizes that differ by some MiB


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_LIBRARY_BYTES = GiB


def resolve_device(name: str, planned: PlannedMachine | None = None) -> torch.device:
    """Return the compute device of a config. "auto" is CUDA if available.

    Raises:
        ConfigError: The config requests a GPU, but torch or the planned machine has none.
    """
    if planned is not None:
        if name == "cuda" and not planned.has_gpu:
            text = f'device = "cuda", but the machine {planned.name} has no GPU'
            raise ConfigError("the config", [Problem("device", text, 'Write "auto" or "cpu"')])
        return torch.device("cuda" if planned.has_gpu and name != "cpu" else "cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        problem = Problem("device", 'device = "cuda", but torch finds no GPU that it can use', 'Write "auto" or "cpu"')
        raise ConfigError("the config", [problem])
    return torch.device(name)


def bus_of_gpu() -> str:
    """Return the PCI address of the current GPU as in sysfs, or "" if this version of torch does not provide it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, number = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or number is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype of layers. auto: bf16 with CUDA, fp32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def compute_tier(tiers: TierSpecs, device: torch.device) -> str:
    """Return the tier that layers run in: GPU memory with CUDA or an emulated GPU, else RAM.

    If GPU and RAM are one memory, it is also RAM, unless the config sets a size of the GPU tier.
    """
    if device.type == "cuda" and tiers.table.gpu.size.is_auto and is_one_memory(tiers.machine):
        return "ram"
    return "gpu" if device.type == "cuda" or tiers.emulates_gpu else "ram"


def is_one_memory(planned: PlannedMachine | None = None) -> bool:
    """Return whether GPU and RAM are one memory: CUDA reports an integrated GPU, as on GB10, Jetson or an APU.

    GPUs with separate memory next to coherent RAM, such as GH200, return False, because RAM is slower for them.

    Args:
        planned: Machine to plan for, or None for this one.
    """
    if planned is not None:
        return planned.unified_bytes is not None
    if not torch.cuda.is_available():
        return False
    return bool(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "is_integrated", False))


def one_memory_reserve_bytes(total_bytes: int) -> int:
    """Return the bytes that a run leaves free if GPU and RAM share a memory: a tenth, at least 2 GiB.

    Such a machine hangs before it kills a process. GPU allocations cannot be swapped out, so only the system's memory
    can be reclaimed (seen on GB10 with 112 of 119 GiB in use). The reserve includes libraries and the CUDA context.
    """
    return max(total_bytes // 10, min(2 * GiB, total_bytes // 2))


def moves_past_ram(tiers: TierSpecs, device: torch.device) -> bool:
    """Return whether blocks move directly between files and GPU memory, if kvikio has confirmed that this works.

    With an emulated GPU, files are read by plain system calls, but only if the config requests it.

    Raises:
        ConfigError: The config requests it, but it does not work here.
    """
    if tiers.table.direct == "off" or not tiers.table.nvme or compute_tier(tiers, device) != "gpu":
        return False
    if tiers.emulates_gpu or tiers.machine is not None:
        return tiers.table.direct == "on"
    if tiers.table.direct == "auto" and (tiers.table.verify == "always" or not may_open_driver()):
        return False
    for drive in tiers.table.nvme:
        if reason := _probed(existing_parent(drive.path)).reason:
            if tiers.table.direct == "auto":
                return False
            text = f'tiers.direct = "on", but GPUDirect Storage does not work on {drive.path}: {reason}'
            raise ConfigError("the config", [Problem("tiers.direct", text, 'Write "auto" or "off"')])
    return True


@functools.cache
def _probed(folder: Path) -> KvikioProbe:
    """Probe once per process, because the probe takes a second and the result does not change."""
    return probe_kvikio(folder)


def total_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the RAM of the machine, or the limit of the cgroup if it is lower."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _cgroup_limits(root, own))])


def available_ram_bytes(root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the RAM that is free now, within the cgroup's limit. Swap does not count."""
    left = (max(0, limit - used) for limit, used in _cgroup_limits(root, own))
    available: int = psutil.virtual_memory().available
    return min([available, *left])


def _cgroup_limits(root: Path, own: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of this process's cgroup and of each parent with a limit.

    A container sees its cgroup as the root. A batch job sees the whole tree, with its position in it.
    """
    found = []
    for folder, limit_name, used_name, cache_name in _cgroup_folders(root, own):
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
        except OSError:
            continue
        if is_number(limit.strip()):
            found.append((int(limit), max(0, int(used) - _stat_of(folder, cache_name))))
    return found


def _cgroup_folders(root: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield folders of cgroups, with their file names for the limit, the usage, and the file cache in the usage."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().split("\n") if line]
    except OSError:
        lines = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in lines}
    of_memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    for at in (Path(paths.get("", "")), *Path(paths.get("", "")).parents):
        yield root / at, "memory.max", "memory.current", "inactive_file"  # version 2
    for at in (Path(of_memory), *Path(of_memory).parents):  # version 1
        yield root / "memory" / at, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _stat_of(folder: Path, name: str) -> int:
    """Return a value of ``memory.stat``. A cgroup is charged for the file cache, which is freed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().split("\n")
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def ram_capacity_bytes(tiers: TierSpecs) -> int:
    """Return the capacity of the RAM tier. auto: the free RAM minus the margin and a GPU tier in RAM.

    Raises:
        ConfigError: GPU and RAM are one memory, and the config leaves too little for the system.
    """
    planned, gpu_size = tiers.machine, tiers.table.gpu.size
    total = total_ram_bytes() if planned is None else planned.ram_bytes
    margin, of_gpu, is_one = tiers.table.safety_margin.resolve(total), 0, is_one_memory(planned)
    if is_one:
        margin = max(margin, one_memory_reserve_bytes(total))
    if tiers.emulates_gpu or (is_one and not gpu_size.is_auto):
        of_gpu = gpu_size.resolve(total)
    free = available_ram_bytes() if planned is None else planned.free_ram_bytes
    capacity = tiers.table.ram.size.resolve(total, auto_bytes=max(0, free - margin - of_gpu))
    if is_one:
        _check_one_memory(tiers, capacity + of_gpu, total)
    return capacity


def _check_one_memory(tiers: TierSpecs, wanted_bytes: int, total_bytes: int) -> None:
    """Refuse sizes that leave too little of a memory shared by GPU and RAM."""
    most = total_bytes - one_memory_reserve_bytes(total_bytes)
    if wanted_bytes <= most:
        return
    sizes = {"tiers.ram.size": tiers.table.ram.size, "tiers.gpu.size": tiers.table.gpu.size}
    given = {key: f'{key} = "{size.text}"' for key, size in sizes.items() if not size.is_auto}
    text = (
        f"{' and '.join(given.values())}: GPU and RAM are one memory here, of "
        f"{format_size(total_bytes)}, and with less than {format_size(total_bytes - most)} left the system hangs "
        "instead of ending the run"
    )
    raise ConfigError("the config", [Problem(next(iter(given)), text, f'Write at most "{most // GiB}GiB", or "auto"')])


def gpu_capacity_bytes(tiers: TierSpecs, device: torch.device) -> int:
    """Return the capacity of the GPU tier. auto: the free memory minus the margin. Emulated: as configured.

    The margin is at least the allowance for libraries. If GPU and RAM are one memory, return the RAM tier's capacity.
    """
    if tiers.emulates_gpu:
        return tiers.table.gpu.size.resolve(total_ram_bytes() if tiers.machine is None else tiers.machine.ram_bytes)
    if compute_tier(tiers, device) == "ram":
        return ram_capacity_bytes(tiers)
    free, total = _gpu_memory(tiers.machine, device)
    margin = max(tiers.table.safety_margin.resolve(total), library_bytes(total))
    return tiers.table.gpu.size.resolve(total, auto_bytes=max(0, free - margin))


def library_bytes(total_bytes: int) -> int:
    """Return the allowance for libraries in a GPU's memory outside the tier, which no plan includes.

    It is estimated from the sources of libraries, not measured: workspaces of cuBLAS and cuDNN, and kernels, which are
    loaded at their first use.
    """
    return min(_LIBRARY_BYTES, total_bytes // 10)


def describe_library_memory(capacity_bytes: int, device: torch.device, planned: PlannedMachine | None = None) -> str:
    """Return a sentence on the GPU memory that a tier of this capacity leaves to libraries, or "" if unknown."""
    if device.type != "cuda" or (planned is None and not torch.cuda.is_available()) or is_one_memory(planned):
        return ""
    free, total = _gpu_memory(planned, device)
    left, allowed = max(0, free - capacity_bytes), library_bytes(total)
    text = (
        f"{format_size(left)} of free GPU memory are outside of the tier; libraries are allowed {format_size(allowed)}"
    )
    if left < allowed:
        text += f" of it: with more than tiers.gpu.size = {format_size(max(0, free - allowed))} they may find none"
    return text


def _gpu_memory(planned: PlannedMachine | None, device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of a GPU."""
    if planned is None:
        return gpu_memory_bytes(device)
    return planned.gpu_bytes or 0, planned.gpu_bytes or 0


def gpu_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    return free, total


def gpu_name(device: torch.device) -> str:
    """Return the name of a CUDA device."""
    return torch.cuda.get_device_name(device)


def nvme_capacity_bytes(tiers: TierSpecs, output_dir: Path) -> int:
    """Return the capacity of the NVMe tier over all its paths. auto: free space minus the margin.

    Files left by this run count as free. Paths on one file system share its free space.

    Args:
        tiers: Resources with at least one drive.
    """
    if tiers.machine is not None:
        return _planned_nvme_bytes(tiers, tiers.machine)
    capacity = 0
    num_sharing = Counter(file_system_number(drive.path) for drive in tiers.table.nvme if drive.size.is_auto)
    for drive in tiers.table.nvme:
        disk = disk_usage(drive.path)
        margin = tiers.table.safety_margin.resolve(disk.total)
        share = max(0, disk.free - margin) // max(1, num_sharing[file_system_number(drive.path)])
        own = own_drive_bytes(drive.path, output_dir / CHECKPOINTS_NAME)
        capacity += drive.size.resolve(disk.total, auto_bytes=share + own)
    return capacity


def _planned_nvme_bytes(tiers: TierSpecs, planned: PlannedMachine) -> int:
    """Return the capacity over the empty drives of a planned machine. "auto" without a drive is 0."""
    totals = [drive.total_bytes for drive in planned.drives]
    totals += [0] * (len(tiers.table.nvme) - len(totals))
    capacity = 0
    for drive, total in zip(tiers.table.nvme, totals, strict=False):
        capacity += drive.size.resolve(total, auto_bytes=max(0, total - tiers.table.safety_margin.resolve(total)))
    return capacity


def file_system_number(path: Path) -> int:
    """Return the device number of a path's file system."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # another process may remove the folder in between
            return existing_parent(path).stat().st_dev


class DiskUsage(NamedTuple):
    """Total and free bytes of a file system."""

    total: int
    free: int


def disk_usage(path: Path) -> DiskUsage:
    """Return total and free bytes of the file system that holds a path, or would hold it."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # as above
            usage = shutil.disk_usage(existing_parent(path))
            return DiskUsage(usage.total, usage.free)


def own_drive_bytes(path: Path, checkpoints: Path) -> int:
    """Return the bytes on an NVMe path that a run can use: its checkpoints, and files of dead runs.

    Args:
        checkpoints: Directory of the run's generations. Other runs' checkpoints on the path do not count.
    """
    store_id = read_store_id(checkpoints)
    owned = reusable_bytes(path)
    seen = {status.st_ino for status in statuses_below(path / "live")}
    for _, folder in snapshot_folders([path]):
        owner = read_owner(folder)
        for status in statuses_below(folder) if owner is not None and owner.id == store_id else ():
            owned += status.st_size if status.st_ino not in seen else 0
            seen.add(status.st_ino)
    return owned


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest existing parent folder."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
