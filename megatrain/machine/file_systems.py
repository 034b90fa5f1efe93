"""File systems of this machine: their kinds, disks and space."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tiered.ext import mount_of, read_owner, read_store_id, reusable_bytes, snapshot_folders, statuses_below, unescape
from tiered.units import format_size

#: Place in which a file system keeps its bytes: a drive, RAM, another machine, a FUSE program, container layers.
Medium = Literal["drive", "memory", "network", "program", "layers"]
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERS = ("overlay", "aufs", "fuse.fuse-overlayfs", "fuse.unionfs")
_NETWORK = (
    "nfs", "cifs", "smb", "9p", "drvfs", "virtiofs", "ceph", "lustre", "gpfs", "beegfs", "afs", "gluster", "ocfs2",
    "gfs2", "fuse.sshfs", "fuse.gluster", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs",
)  # fmt: skip
#: WSL mounts of a Windows drive: ``C:\\`` over 9p or virtiofs, ``C:`` as drvfs.
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:(\\.*)?")
_WINDOWS_WARNING = (
    "is a drive of Windows, and every read and write passes through Windows: many times slower than the disk of WSL, "
    "and O_DIRECT, locks and links may not work. A folder in the home directory of Linux is on the disk of WSL"
)
_WARNINGS: Mapping[Medium, str] = {
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
    def medium(self) -> Medium:
        """Place in which the file system keeps its bytes, derived from the file system's kind."""
        if self.kind in _IN_MEMORY:
            return "memory"
        if self.kind.startswith(_LAYERS):
            return "layers"
        if self.kind.startswith(_NETWORK):
            return "network"
        return "program" if self.kind.startswith("fuse") else "drive"

    @property
    def warning(self) -> str:
        """Warning about this file system, as a clause that begins with its kind. "" for a drive."""
        if self.medium == "network" and _WINDOWS_DRIVE.fullmatch(self.source):
            return f"{self.kind} {_WINDOWS_WARNING}"
        return f"{self.kind} {_WARNINGS[self.medium]}" if _WARNINGS[self.medium] else ""

    @property
    def key(self) -> str:
        """Identifier that distinguishes this file system from the machine's other file systems."""
        return f"{self.device} {self.source}"


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
    """Return the file system of ``path``, or of its nearest existing parent folder."""
    resolved_path = Path(os.path.realpath(existing_parent(path)))
    device_number = resolved_path.stat().st_dev
    device = f"{os.major(device_number)}:{os.minor(device_number)}"
    mount = mount_of(resolved_path, mounts)
    return FileSystem(device, mount.kind, mount.source, mount.point)


def missing_mount(path: Path, table: Path = Path("/etc/fstab")) -> str | None:
    """Return the parent folder of ``path`` at which /etc/fstab lists a drive that is not mounted, or None."""
    try:
        lines = table.read_bytes().decode(errors="surrogateescape").split("\n")
    except OSError:
        return None
    rows = [re.split("[ \t]+", line.strip(" \t")) for line in lines if not line.lstrip().startswith("#")]
    points = [os.path.realpath(unescape(row[1])) for row in rows if len(row) > 1 and row[1].startswith("/")]
    resolved_path = Path(os.path.realpath(path))
    mount_points = [point for point in points if point != "/" and resolved_path.is_relative_to(point)]
    if not mount_points:
        return None
    expected = max(mount_points, key=len)
    return None if Path(file_system_of(path).mount_point).is_relative_to(expected) else expected


def disk_of(file_system: FileSystem, root: Path = Path("/sys/dev/block")) -> str:
    """Return a file system's disk, such as ``nvme0n1``, or the file system's key if the disk is unknown."""
    device_number = file_system.device
    if device_number.startswith("0:") and file_system.source.startswith("/dev/"):  # btrfs has anonymous device numbers
        with contextlib.suppress(OSError):
            device = os.stat(file_system.source).st_rdev
            device_number = f"{os.major(device)}:{os.minor(device)}"
    folder = (root / device_number).resolve()
    if not folder.is_dir():
        return file_system.key
    return folder.parent.name if (folder / "partition").exists() else folder.name


def file_system_number(path: Path) -> int:
    """Return the device number of a path's file system."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed the folder
            return existing_parent(path).stat().st_dev


class Space(NamedTuple):
    """Total and free bytes of RAM, GPU memory or a file system."""

    total: int
    free: int

    def __str__(self) -> str:
        return format_size(self.total) + (f" ({format_size(self.free)} free now)" if self.free < self.total else "")


def disk_usage(path: Path) -> Space:
    """Return the total and free bytes of the file system of a path. The path need not exist."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed the folder
            usage = shutil.disk_usage(existing_parent(path))
            return Space(usage.total, usage.free)


def own_drive_bytes(path: Path, checkpoints: Path) -> int:
    """Return how many bytes on an NVMe path a run can reuse: its own checkpoints, and files that dead runs left.

    Args:
        checkpoints: Directory of the run's generations. Checkpoints of other runs do not count.
    """
    store_id = read_store_id(checkpoints)
    nbytes = reusable_bytes(path)
    inodes = {status.st_ino for status in statuses_below(path / "live")}
    for _, folder in snapshot_folders([path]):
        owner = read_owner(folder)
        for status in statuses_below(folder) if owner is not None and owner.id == store_id else ():
            nbytes += status.st_size if status.st_ino not in inodes else 0
            inodes.add(status.st_ino)
    return nbytes


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest existing parent folder."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
