"""The profile: rates that `megatrain-tier doctor` measured on this machine, kept as JSON for plans to use."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from megatrain.plan.machine import existing_parent
from tiered.units import GiB

#: Older figures are still used, and said to be old.
STALE_DAYS = 30

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DriveProfile(_Record):
    """What one file system did, in bytes per second. ``bare`` rates are those of plain I/O without the tier.

    Attributes:
        path: where it was measured.
        filesystem: its type.
        is_direct: O_DIRECT was used.
        mixed_bytes_per_s: reads and writes together, at the same time.
        sustained_write_bytes_per_s: at the end of a long write; None where that was not measured.
        computing_s_per_byte: seconds that computing loses while a byte moves; None where that was not measured.
        seconds_per_copy: of the thread that runs the step, for each block that moves; None where not measured.
    """

    path: str
    filesystem: str
    measured_at: AwareDatetime
    is_quick: bool
    is_direct: bool
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    mixed_bytes_per_s: Rate
    bare_read_bytes_per_s: Rate
    bare_write_bytes_per_s: Rate
    bare_mixed_bytes_per_s: Rate
    sustained_write_bytes_per_s: Rate | None = None
    computing_s_per_byte: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seconds_per_copy: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class GpuProfile(_Record):
    """What one CUDA device did; rates between page-locked RAM and the device, in bytes per second.

    Attributes:
        update_bytes_per_s: two reads and a write per element in its own memory; None where that was not measured.
    """

    name: str
    memory_bytes: int
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    update_bytes_per_s: Rate | None = None


class MachineProfile(_Record):
    """All that was measured on one machine.

    Attributes:
        host: which machine.
        cpu: which machine.
        ram_bytes: which machine.
        num_threads: how many computed.
        ram_read_bytes_per_s: reads alone; bytes read and written by a copy.
        ram_copy_bytes_per_s: reads alone; bytes read and written by a copy.
        ram_update_bytes_per_s: two reads and a write per element, in place, with one addition.
        adamw_params_per_s: dtype of the weights -> parameters that the AdamW kernel updates per second.
        matmul_flops_per_s: ``"cpu/float32"`` -> FLOP/s of large matrix products.
        drives: device of a file system -> its rates.
    """

    host: str
    cpu: str
    ram_bytes: int
    measured_at: AwareDatetime
    is_quick: bool
    num_threads: int
    ram_read_bytes_per_s: Rate
    ram_copy_bytes_per_s: Rate
    ram_update_bytes_per_s: Rate
    adamw_params_per_s: dict[str, Rate]
    matmul_flops_per_s: dict[str, Rate]
    gpu: GpuProfile | None = None
    drives: dict[str, DriveProfile] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return what tells this machine from others."""
        return _key_of(self.host, self.cpu, self.ram_bytes)

    def drive_of(self, path: Path) -> DriveProfile | None:
        """Return what is known of the drive that holds ``path`` (or will, once it is made)."""
        return self.drives.get(file_system_of(path).key)


class _ProfileFile(_Record):
    format: Literal["megatrain-tier profile"] = "megatrain-tier profile"
    version: Literal[1] = 1
    machines: dict[str, MachineProfile] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """The profile of this machine, or None; and why it is None although there is a file, or None."""

    machine: MachineProfile | None
    note: str | None = None


#: What a file system is that is none of a drive's own: RAM; of another machine; a program's; a container's layers.
Nature = Literal["drive", "memory", "network", "program", "layers"]
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERS = ("overlay", "aufs", "fuse.fuse-overlayfs", "fuse.unionfs")
_NETWORK = (
    "nfs", "cifs", "smb", "9p", "virtiofs", "ceph", "lustre", "gpfs", "beegfs", "afs", "gluster", "ocfs2", "gfs2",
    "fuse.sshfs", "fuse.gluster", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs",
)  # fmt: skip
_CAUTIONS: Mapping[Nature, str] = {
    "drive": "",
    "memory": "is RAM, not a drive: blocks there take RAM that no limit of ours counts",
    "network": "is not on a drive of this machine: others share its speed, and locks may not hold",
    "program": "goes through a program (FUSE): slow, and perhaps not on a drive of this machine",
    "layers": "is the layers of a container: slow, and what is written there goes with the container",
}


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Where a path lies: ``device`` is ``major:minor``, ``source`` what was mounted there, ``kind`` e.g. ``ext4``."""

    device: str
    kind: str
    source: str
    mount_point: str

    def __str__(self) -> str:
        return f"{self.kind} on {self.source}, mounted at {self.mount_point}"

    @property
    def nature(self) -> Nature:
        """Return what its kind says of where bytes really are."""
        if self.kind in _IN_MEMORY:
            return "memory"
        if self.kind.startswith(_LAYERS):
            return "layers"
        if self.kind.startswith(_NETWORK):
            return "network"
        return "program" if self.kind.startswith("fuse") else "drive"

    @property
    def caution(self) -> str:
        """Return why blocks are better put elsewhere, as a clause that begins with the kind; "": no reason."""
        return f"{self.kind} {_CAUTIONS[self.nature]}" if _CAUTIONS[self.nature] else ""

    @property
    def key(self) -> str:
        """Return what tells this file system from others of the machine."""
        return f"{self.device} {self.source}"


def profile_path() -> Path:
    """Return the file of profiles: ``$XDG_CACHE_HOME/megatrain-tier/profile.json``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "megatrain-tier" / "profile.json"


def load_profile(path: Path | None = None) -> LoadedProfile:
    """Return the profile of this machine. Never raises: a file that cannot be used is named in the note."""
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


def store_profile(machine: MachineProfile, path: Path | None = None) -> Path:
    """Write the profile of one machine, at once or not at all; return the file.

    Other machines' figures in the file stay, and this one's figures of drives that were not measured now.

    Raises:
        OSError: the file cannot be written.
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


def age_days(measured_at: datetime) -> float:
    """Return how many days ago that was; 0 for a time that has not come yet."""
    return max(0.0, (datetime.now(UTC) - measured_at).total_seconds() / 86400)


def machine_key() -> str:
    """Return what tells this machine from others: host name, processor and RAM."""
    return _key_of(platform.node(), cpu_name(), psutil.virtual_memory().total)


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
    """Return the file system that holds ``path``, or the nearest folder above it that exists."""
    real = Path(os.path.realpath(existing_parent(path)))
    number = real.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    best = FileSystem(device, "unknown", "unknown", "/")
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        point, after = _unescape(fields[4]), fields.index("-", 6) + 1
        # The last of several mounts on one point is the one that is seen.
        if real.is_relative_to(point) and len(point) >= len(best.mount_point):
            best = FileSystem(device, fields[after], _unescape(fields[after + 1]), point)
    return best


def missing_mount(path: Path, table: Path = Path("/etc/fstab")) -> str | None:
    """Return the folder above ``path`` that the system's table mounts a drive on, where none is mounted; else None."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    points = [os.path.realpath(_unescape(each[1])) for each in fields if len(each) > 1 and each[1].startswith("/")]
    real = Path(os.path.realpath(path))
    above = [point for point in points if point != "/" and real.is_relative_to(point)]
    if not above:
        return None
    expected = max(above, key=len)
    return None if Path(file_system_of(path).mount_point).is_relative_to(expected) else expected


def disk_of(file_system: FileSystem, root: Path = Path("/sys/dev/block")) -> str:
    """Return the disk that holds a file system, e.g. ``nvme0n1`` for its first partition; else its own key."""
    number = file_system.device
    if number.startswith("0:") and file_system.source.startswith("/dev/"):  # btrfs: a number of no device
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
    return f"{host}, {cpu}, {round(ram_bytes / GiB)} GiB"  # kernels differ by some MiB in what they report


def _unescape(text: str) -> str:
    """Return a field of mountinfo with its octal escapes (of space, tab, newline, backslash) resolved."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
