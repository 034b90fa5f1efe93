"""Fixtures for real drives: small file systems that a test mounts, and can fill, make read-only or kill.

They need root privileges and loop devices. Without them, the test is skipped with a reason.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered import KiB, MiB, NvmeTier, RamTier
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PosixMover
from tiered.testing.faults import Fault, FaultyMover

EXT4_IOC_SHUTDOWN = 0x8004587D


class Drive:
    """Mounted ext4 file system in an image file."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.path, self._image = folder / "mounted", folder / "image"
        self.path.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(nbytes)
        self._filler = self.path / "filler"
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", str(self._image)],
            ["mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path)],
        ):
            if shutil.which(command[0]) is None:
                pytest.skip(f"no {command[0]} here")
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command[0]} failed here: {done.stderr.strip()}")

    @property
    def store(self) -> Path:
        return self.path / "store"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def fill(self, *, leave_bytes: int = MiB // 2) -> None:
        """Take all free space except ``leave_bytes``, as another program might."""
        self._filler.touch()
        with self._filler.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self._filler.stat().st_size + self.free_bytes() - leave_bytes)

    def make_room(self, nbytes: int | None = None) -> None:
        """Free ``nbytes`` of the space that ``fill`` took, or all of it by default."""
        if nbytes is None:
            self._filler.unlink()
        else:
            os.truncate(self._filler, max(0, self._filler.stat().st_size - nbytes))

    def make_read_only(self) -> None:
        """Trigger a file system error, so that ext4 refuses writes, as after an error of a real drive."""
        device = next(
            line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(self.path) in line
        )
        trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel cannot trigger an error of ext4")
        trigger.write_text("injected by a test")

    def die(self) -> None:
        """Make every access fail with EIO from now on."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", 2))
        except OSError as error:
            pytest.skip(f"ext4 cannot be shut down here: {error}")
        finally:
            os.close(fd)

    def start_again(self) -> None:
        """Mount the drive after ``die``. As after a power cut, unflushed data is lost and the journal is replayed.

        Raises:
            AssertionError: A process still has a file on the drive open, or the file system is beyond repair.
        """
        for command in (
            ["umount", str(self.path)],
            ["mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{command[0]}: {done.stderr.strip()}"

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        self._image.unlink()


@pytest.fixture
def make_drive(tmp_path: Path) -> Iterator[Callable[[int], Drive]]:
    drives: list[Drive] = []

    def make(nbytes: int) -> Drive:
        drives.append(Drive(tmp_path / f"drive{len(drives)}", nbytes))
        return drives[-1]

    yield make
    for drive in drives:
        drive.unmount()


@pytest.fixture
def folder_in_memory() -> Iterator[Path]:
    """Return a folder for tests that create thousands of files. It is in memory, if /dev/shm can be used."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def small_drive(make_drive: Callable[[int], Drive]) -> Drive:
    """Return a drive of 64 MiB."""
    return make_drive(64 * MiB)


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiers check a full drive for free space every 20 ms."""
    monkeypatch.setattr("tiered.tiers.health.RETRY_S", 0.02)


FaultyLinks = Callable[..., tuple[FileReadLink, FileWriteLink, FaultyMover]]


@pytest.fixture
def faulty_links() -> FaultyLinks:
    """Return a function that links a drive with injected faults to RAM. The links transfer parts of 64 KiB."""

    def make(
        nvme: NvmeTier, ram: RamTier, *faults: Fault, num_threads: int | None = None
    ) -> tuple[FileReadLink, FileWriteLink, FaultyMover]:
        mover = FaultyMover(PosixMover(nvme), faults)
        engine = FileEngine(nvme, mover, part_bytes=64 * KiB, num_threads=num_threads)
        return FileReadLink(nvme, ram, engine), FileWriteLink(ram, nvme, engine), mover

    return make
