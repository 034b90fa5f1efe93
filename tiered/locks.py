"""Locks of files and directories, and who holds one. Imports no torch."""

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
_ATTEMPTS = 100  # to lock a file that another process deletes as often


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: the folder that it is mounted at.
        kind: its type, such as ``ext4`` or ``nfs4``.
        source: the device or server.
    """

    point: str
    kind: str
    source: str


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount:
    """Return the mount that holds a resolved path; ``unknown`` without a readable table of mounts."""
    try:
        # Not ``splitlines``: the kernel ends a line with "\n" alone, and a folder's name may contain any other sign.
        lines = mounts.read_bytes().decode(errors="surrogateescape").split("\n")
    except OSError:
        lines = []
    best = Mount("/", "unknown", "unknown")
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        point, after = unescape(fields[4]), fields.index("-", 6) + 1
        # The last of several mounts on one point is the one that is seen.
        if path.is_relative_to(point) and len(point) >= len(best.point):
            best = Mount(point, fields[after], unescape(fields[after + 1]))
    return best


def unescape(text: str) -> str:
    """Return a field of a table of mounts with its octal escapes (of space, tab, newline, backslash) resolved."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def lock(fd: int, path: Path | str, *, shared: bool = False, waits: bool = False) -> None:
    """Lock an open file with ``flock``. Closing the last descriptor of the file ends the lock.

    Args:
        path: name of the file, for the message.
        shared: several processes may hold the lock.
        waits: wait until the lock is free.

    Raises:
        BlockingIOError: another process holds the lock.
        LockingError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno == errno.EACCES:  # some file systems report a held lock so
            raise BlockingIOError(error.errno, error.strerror, str(path)) from None
        mount = mount_of(Path(os.path.realpath(path)))
        raise LockingError(str(path), error, f"{mount.kind} of {mount.source}, mounted at {mount.point}") from error


@dataclass(frozen=True, slots=True)
class DirectoryLock:
    """The lock of a directory, held by this process.

    Attributes:
        dead_owner: the process that locked it last, if that died without unlocking.
    """

    path: Path
    dead_owner: str | None
    _fd: int
    _directory_fd: int  # locked too, so that the lock survives a deleted LOCK file; -1: not possible here

    def check(self) -> None:
        """Raise ``LockedError`` if the LOCK file was deleted or replaced: another process may use the directory."""
        if not _is_named(self._fd, self.path / LOCK_NAME):
            text = f"an unknown process: the file '{self.path / LOCK_NAME}' was deleted or replaced while in use"
            raise LockedError(str(self.path), text)

    def release(self) -> None:
        """Unlock the directory and remove the owner's name: a name that stays is the name of a dead process."""
        with contextlib.suppress(OSError):  # a drive that died, or became read-only
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        if self._directory_fd >= 0:
            os.close(self._directory_fd)


def lock_directory(path: Path) -> DirectoryLock:
    """Lock a directory for this process.

    Raises:
        LockedError: another user of the directory, here or in another process, holds the lock.
        LockingError: the file system has no locks.
        OSError: the LOCK file cannot be opened or written.
    """
    collected = False
    for _ in range(_ATTEMPTS):
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        directory_fd = -1
        try:
            try:
                lock(fd, path / LOCK_NAME)
                directory_fd = _lock_folder_itself(path)
            except BlockingIOError:
                holder = _text(fd)
                if collected or not holder.startswith(_own_name()):
                    raise LockedError(str(path), holder or "another process") from None
                # A tier of this process holds it. One that was dropped, as by a refused store, gives the lock up when
                # Python collects it; a tier is part of a cycle of references.
                collected = True
                gc.collect()
                os.close(fd)
                continue
            if not _is_named(fd, path / LOCK_NAME):
                os.close(fd)  # deleted between the two calls: lock the file that has the name now
                if directory_fd >= 0:
                    os.close(directory_fd)
                continue
            dead_owner = _text(fd) or None
            _write_owner(fd)
            return DirectoryLock(path, dead_owner, fd, directory_fd)
        except BaseException:
            os.close(fd)
            if directory_fd >= 0:
                os.close(directory_fd)
            raise
    raise LockedError(str(path), f"a process that deletes '{path / LOCK_NAME}' again and again")


def holder_text(path: Path | str) -> str | None:
    """Return the LOCK file's text about its living holder, or None if no process holds the lock.

    If the file system has no locks, the process that the file names is looked up instead.

    Raises:
        OSError: the LOCK file cannot be read.
    """
    file = Path(path, LOCK_NAME)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        text = _text(fd)
        try:
            lock(fd, file, shared=True)
        except BlockingIOError:
            return text or "another process"
        except LockingError:
            pass
        else:
            return None
    finally:
        os.close(fd)  # before this process may search the files that it has open itself
    return text if text and _may_live(text, file) else None


def owner_in(text: str) -> tuple[int | None, str | None]:
    """Return process and host that a LOCK file names, or None for each."""
    match = _OWNER.match(text)
    return (int(match[1]), match[2]) if match else (None, None)


def has_open(pid: int, file: Path) -> bool:
    """Return whether a process of this machine has a file open.

    Raises:
        PermissionError: the process belongs to another user.
        FileNotFoundError: there is no such process, or no such file.
    """
    status = os.stat(file)
    entries = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.samestat(os.stat(entry), status) for entry in entries if entry.exists())


def _may_live(text: str, file: Path) -> bool:
    pid, host = owner_in(text)
    if pid is None or host != socket.gethostname():
        return True
    try:
        return has_open(pid, file)
    except PermissionError:
        return True
    except OSError:
        return False


def _lock_folder_itself(path: Path) -> int:
    """Also lock the folder if its file system can; else return -1. Raises ``BlockingIOError`` if it is held."""
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


def _is_named(fd: int, path: Path) -> bool:
    """Return whether a name leads to the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _text(fd: int) -> str:
    return os.pread(fd, 4096, 0).decode(errors="replace").strip()


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()},"


def _write_owner(fd: int) -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_own_name()} since {started}\n".encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then the lock holds without its owner's name
            raise
