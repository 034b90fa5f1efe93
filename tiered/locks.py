"""Locks on files and directories, and their holders. Does not import torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from tiered.errors import LockedError, LockingError

LOCK_NAME = "LOCK"
_OWNER = re.compile(r"process ([0-9]+) on ([^,\s]+)")
_MOUNTS = Path("/proc/self/mountinfo")
_ATTEMPTS = 100  # maximum number of tries to lock a file that other processes keep deleting


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: folder at which the file system is mounted.
        kind: type of the file system, such as ``ext4`` or ``nfs4``.
        source: device or server.
    """

    point: str
    kind: str
    source: str


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount:
    """Return the mount that contains a resolved path. Its kind is ``unknown`` if the mount table is unreadable."""
    try:
        # Do not use ``splitlines``: only "\n" ends a line, and a folder's name can contain other line separators.
        lines = mounts.read_bytes().decode(errors="surrogateescape").split("\n")
    except OSError:
        lines = []
    result = Mount("/", "unknown", "unknown")
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        point, kind_index = unescape(fields[4]), fields.index("-", 6) + 1
        # If several file systems are mounted at one point, only the last one is visible.
        if path.is_relative_to(point) and len(point) >= len(result.point):
            result = Mount(point, fields[kind_index], unescape(fields[kind_index + 1]))
    return result


def unescape(text: str) -> str:
    """Decode the octal escapes (space, tab, newline, backslash) in a field of the mount table."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def lock(fd: int, path: Path | str, *, shared: bool = False, blocking: bool = False) -> None:
    """Lock an open file with ``flock``. The lock ends when the file's last descriptor is closed.

    Args:
        path: name of the file, for the message.
        shared: whether several processes can hold the lock at the same time.
        blocking: whether to wait until the lock is free.

    Raises:
        BlockingIOError: another process holds the lock.
        LockingError: the file system does not support locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno == errno.EACCES:  # Some file systems report a held lock with EACCES.
            raise BlockingIOError(error.errno, error.strerror, str(path)) from None
        mount = mount_of(Path(os.path.realpath(path)))
        raise LockingError(str(path), error, f"{mount.kind} of {mount.source}, mounted at {mount.point}") from error


@dataclass(frozen=True, slots=True)
class DirectoryLock:
    """Lock on a directory, held by this process.

    Attributes:
        dead_owner: process that last locked the directory, if it died without unlocking.
    """

    path: Path
    dead_owner: str | None
    _fd: int
    _directory_fd: int  # the directory is also locked, in case the LOCK file is deleted; -1 if unsupported

    def check(self) -> None:
        """Raise ``LockedError`` if the LOCK file was deleted or replaced. Another process could lock the new file."""
        if not _is_file_at(self._fd, self.path / LOCK_NAME):
            text = f"an unknown process: the file '{self.path / LOCK_NAME}' was deleted or replaced while in use"
            raise LockedError(str(self.path), text)

    def release(self) -> None:
        """Unlock the directory and clear the LOCK file, because a name left in it would mean that the owner died."""
        with contextlib.suppress(OSError):  # the drive may have died or become read-only
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        if self._directory_fd >= 0:
            os.close(self._directory_fd)


def lock_directory(path: Path) -> DirectoryLock:
    """Lock a directory for this process.

    Raises:
        LockedError: this or another process already holds the lock.
        LockingError: the file system does not support locks.
        OSError: the LOCK file cannot be opened or written.
    """
    has_collected = False
    for _ in range(_ATTEMPTS):
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        directory_fd = -1
        try:
            try:
                lock(fd, path / LOCK_NAME)
                directory_fd = _lock_folder(path)
            except BlockingIOError:
                holder = _read_text(fd)
                if has_collected or not holder.startswith(_process_text()):
                    raise LockedError(str(path), holder or "another process") from None
                # A tier of this process holds the lock. If the tier is garbage (for example because a store refused
                # it), collecting it releases the lock. Tiers are in reference cycles, so they are not freed at once.
                has_collected = True
                gc.collect()
                os.close(fd)
                continue
            if not _is_file_at(fd, path / LOCK_NAME):
                os.close(fd)  # The file was deleted before it was locked, so try again with a new file.
                if directory_fd >= 0:
                    os.close(directory_fd)
                continue
            dead_owner = _read_text(fd) or None
            _write_owner(fd)
            return DirectoryLock(path, dead_owner, fd, directory_fd)
        except BaseException:
            os.close(fd)
            if directory_fd >= 0:
                os.close(directory_fd)
            raise
    raise LockedError(str(path), f"a process that deletes '{path / LOCK_NAME}' again and again")


def holder_text(path: Path | str) -> str | None:
    """Return the LOCK file's text, which describes the holder, or None if no process holds the lock.

    If the file system has no locks, check instead whether the process named in the file is running.

    Raises:
        OSError: the LOCK file cannot be read.
    """
    file = Path(path, LOCK_NAME)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        text = _read_text(fd)
        try:
            lock(fd, file, shared=True)
        except BlockingIOError:
            return text or "another process"
        except LockingError:
            pass
        else:
            return None
    finally:
        os.close(fd)  # Close the file first, because the search below may cover this process's own open files.
    return text if text and _may_be_running(text, file) else None


def owner_in(text: str) -> tuple[int | None, str | None]:
    """Return the process id and the host from the text of a LOCK file; None for a missing value."""
    match = _OWNER.match(text)
    return (int(match[1]), match[2]) if match else (None, None)


def has_open(pid: int, file: Path) -> bool:
    """Return whether a process on this machine has a file open.

    Raises:
        PermissionError: the process belongs to another user.
        FileNotFoundError: the process or the file does not exist.
    """
    status = os.stat(file)
    entries = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.samestat(os.stat(entry), status) for entry in entries if entry.exists())


def _may_be_running(text: str, file: Path) -> bool:
    pid, host = owner_in(text)
    if pid is None or host != socket.gethostname():
        return True
    try:
        return has_open(pid, file)
    except PermissionError:
        return True
    except OSError:
        return False


def _lock_folder(path: Path) -> int:
    """Lock a folder. Return its descriptor, or -1 if unsupported. Raises ``BlockingIOError`` if it is locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        lock(fd, path)
    except BlockingIOError:
        os.close(fd)
        raise
    except LockingError:
        os.close(fd)
        return -1
    return fd


def _is_file_at(fd: int, path: Path) -> bool:
    """Return whether a path still refers to the file of an open descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _read_text(fd: int) -> str:
    return os.pread(fd, 4096, 0).decode(errors="replace").strip()


def _process_text() -> str:
    return f"process {os.getpid()} on {socket.gethostname()},"


def _write_owner(fd: int) -> None:
    start_time = time.strftime("%Y-%m-%d %H:%M:%S %z")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_process_text()} since {start_time}\n".encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # On a full drive, the lock works without the owner's name.
            raise
