"""TierDirectory: an NvmeTier's directory on one drive. Handles its ownership, its lock, and files kept for reuse."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tiered.errors import UnusableDirectoryError
from tiered.file_io import make_folder, read_document_file, write_json
from tiered.locks import LOCK_NAME, DirectoryLock, lock_directory, mount_of
from tiered.tiers.health import WEAR_NAME, WearCounter
from tiered.tiers.layout import DOCUMENT_NAME, FORMAT_VERSION, group_document, own_attributes
from tiered.units import PAGE_BYTES, format_size, is_number

#: File with the store's id in a directory of generations (``durable/ownership.py``).
STORE_NAME = "STORE.json"
_LATEST_NAME = "latest"  # same as LATEST_NAME in tiered.durable.zarr_folder
_OWN_FOLDERS = ("live", "snap", ".pool")
_MEMBERS_PREFIX = b', "consolidated_metadata": '
_UNFINISHED_DOCUMENT = Path(DOCUMENT_NAME).with_suffix(".tmp").name  # A crash during the first write leaves this file.


def check_claimable(path: Path) -> None:
    """Refuse a directory that contains files of other programs or of a newer format. Writes nothing."""
    refuse_links(path)
    attributes = read_own_attributes(path)
    if attributes is None:
        if _holds_more_than(path, LOCK_NAME, _UNFINISHED_DOCUMENT) and not _has_tier_files(path):
            raise UnusableDirectoryError(
                f"'{path}' is not empty and was not made by tiered, so nothing in it was changed. "
                "Name an empty or a new directory"
            )
    elif int(attributes.get("format", 0)) > FORMAT_VERSION:
        raise UnusableDirectoryError(
            f"'{path}' has format {attributes['format']}, this version reads up to {FORMAT_VERSION}: upgrade, "
            "or name another directory"
        )


def refuse_links(path: Path, patterns: Sequence[str] = ("*",)) -> None:
    """Refuse a directory in which a name that matches ``patterns`` is a link to a file: writes would follow the link.

    An untrusted folder can contain such links. Users keep checkpoints on other drives through links to folders, so
    links to folders are allowed, except with the names of a tier's folders.

    Args:
        path: directory to check. It can be a link, and need not exist.
        patterns: shell patterns of the names to check.

    Raises:
        UnusableDirectoryError: the directory contains such a link.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_symlink() or entry.name == _LATEST_NAME:
                continue
            if not any(fnmatch(entry.name, pattern) for pattern in patterns):
                continue
            if entry.name in _OWN_FOLDERS or not os.path.isdir(entry.path):  # A circular link is not a folder.
                raise UnusableDirectoryError(
                    f"'{path / entry.name}' is a symbolic link under a name that this program uses, so nothing in "
                    f"'{path}' was changed. Remove the link, or name another directory"
                )


def claim_directory(path: str | os.PathLike[str]) -> None:
    """Claim a directory whose subfolders will be claimed later. Deletes files kept for reuse in the directory.

    Raises:
        LockedError: another tier, in this or another process, uses the directory.
        UnusableDirectoryError: the directory contains files of other programs or of a newer format.
    """
    directory = TierDirectory(path)
    try:
        while directory.drop_largest():
            pass
    finally:
        directory.close()


class TierDirectory:
    """A directory that this process owns until ``close``. Not thread-safe; the caller holds the tier's lock.

    ``live/`` has the files of home slots. ``snap/<generation>/`` has hard links to committed files. ``.pool/<size>/``
    keeps unused files, because overwriting a file is much cheaper than deleting it and creating a new one.

    Args:
        path: directory, created if missing. It must be empty or claimed earlier. A dead process's files under ``live/``
            go to the pool.
        max_written_bytes: limit on the bytes written to the directory in its lifetime, or None.

    Attributes:
        wear: counter of the bytes written to the directory in its lifetime.
        dead_owner: last process that used the directory, if it died without unlocking the directory.

    Raises:
        LockedError: another tier, in this or another process, uses the directory.
        UnusableDirectoryError: the file system does not count a file's hard links.
        TieredError: the directory contains files of other programs or of a newer format, or its ``WEAR.json`` is
            unreadable.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_written_bytes: int | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self.live = self.path / "live"
        self.snap = self.path / "snap"
        self.pool_bytes = 0
        self._pool = self.path / ".pool"
        self._pool_files: dict[int, list[Path]] = {}
        self._next_id = 0
        try:
            make_folder(self.path)
        except OSError as error:
            problem = f"directory '{self.path}' cannot be created: {error.strerror}. Name another directory"
            raise UnusableDirectoryError(problem) from error
        check_claimable(self.path)
        lock = lock_directory(self.path)
        self.dead_owner = lock.dead_owner
        try:
            self.wear = WearCounter(self.path, max_written_bytes)
        except BaseException:
            lock.release()
            raise
        self._lock: DirectoryLock | None = lock
        self._pid = os.getpid()
        try:
            check_claimable(self.path)  # Check again, because other processes are excluded only under the lock.
            self._write_own_document()
            self._check_link_counts()
            self._recover_pool()
            self._recycle_live()
        except BaseException:
            self.close()
            raise

    # -- ownership ---------------------------------------------------------------------------------------------

    def _write_own_document(self) -> None:
        """Write and flush the document that claims the directory. Tiers refuse a non-empty directory without it."""
        document = group_document({"page_bytes": PAGE_BYTES})
        if read_own_attributes(self.path) != own_attributes(document):  # Ignore a list of members in the document.
            write_document(self.path, document, replace=True, durable=True)

    def close(self) -> None:
        """Release the lock, but keep the files. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self.wear.close()
            lock.release()

    def __del__(self) -> None:
        """Release the lock of a tier that was dropped without ``close``, e.g. after an error in a store's constructor.

        A forked child does not release its parent's lock. At exit, the LOCK file keeps the owner, as after a crash.
        """
        if getattr(self, "_pid", None) == os.getpid() and not sys.is_finalizing():
            self.close()

    def check_lock(self) -> None:
        """Raise ``LockedError`` if the LOCK file was deleted or replaced. Another process could lock the new file."""
        assert self._lock is not None, "directory used after close"
        self._lock.check()

    def _check_link_counts(self) -> None:
        """Refuse a file system without link counts, because the counts show which files commits have linked.

        A file system without hard links is accepted here, but the first commit fails.
        """
        probe = self._pool / "1" / "1"  # If this process dies here, the next process deletes the file.
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.unlink(missing_ok=True)
            os.link(self.path / LOCK_NAME, probe)
        except OSError:
            return
        num_links = os.stat(probe).st_nlink
        probe.unlink()
        probe.parent.rmdir()
        if num_links < 2:
            mount = mount_of(Path(os.path.realpath(self.path)))
            raise UnusableDirectoryError(
                f"'{self.path}': the file system ({mount.kind} of {mount.source}, mounted at {mount.point}) does not "
                "count the links of a file, so a later write would change committed data. "
                "Name a directory on another drive"
            )

    def leftovers(self) -> str | None:
        """Return a sentence about files that this process took over from a dead process, or None."""
        if self.dead_owner is None or not self.pool_bytes:
            return None
        return f"'{self.path}': took over {format_size(self.pool_bytes)} that a dead run left ({self.dead_owner})"

    # -- pooled files ------------------------------------------------------------------------------------------

    def take_pooled(self, nbytes: int, target: Path) -> bool:
        """Replace ``target`` with a pooled file of exactly this size. Return False if there is no such file."""
        files = self._pool_files.get(nbytes)
        if not files:
            return False
        os.replace(files[-1], target)
        files.pop()
        self.pool_bytes -= nbytes
        return True

    def create(self, nbytes: int, target: Path) -> None:
        """Create a preallocated file, and replace ``target`` with it.

        Raises:
            OSError: the drive returned an error (ENOSPC only after deleting all pooled files). No new file remains.
        """
        folder = self._pool / str(nbytes)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / str(self._new_id())
        try:
            try:
                _preallocate(path, nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self.pool_bytes:
                    raise
                while self.drop_largest():
                    pass
                _preallocate(path, nbytes)
            os.replace(path, target)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def put_pooled(self, path: Path, nbytes: int) -> None:
        """Move a file to the pool. The file must have no other links."""
        folder = self._pool / str(nbytes)
        folder.mkdir(parents=True, exist_ok=True)
        pool_path = folder / str(self._new_id())
        os.rename(path, pool_path)
        self._pool_files.setdefault(nbytes, []).append(pool_path)
        self.pool_bytes += nbytes

    def largest_pooled(self) -> int:
        """Return the size of the largest pooled file, or 0 if there is none."""
        return max((size for size, files in self._pool_files.items() if files), default=0)

    def drop_largest(self) -> bool:
        """Delete the largest pooled file; return False if there is none."""
        nbytes = self.largest_pooled()
        if nbytes == 0:
            return False
        self._pool_files[nbytes].pop(0).unlink()
        self.pool_bytes -= nbytes
        return True

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # -- recovery ----------------------------------------------------------------------------------------------

    def _recover_pool(self) -> None:
        for folder in self._pool.iterdir() if self._pool.is_dir() else ():
            if folder.is_symlink() or not folder.is_dir():  # Tiers create only folders here, so delete other entries.
                folder.unlink()
                continue
            for path in folder.iterdir():
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):  # Leave folders of other programs, and do not use their names.
                    self._next_id = max(self._next_id, int(path.name) if is_number(path.name) else 0)
                    continue
                if folder.name == str(status.st_size) and is_number(path.name) and _is_reusable(status):
                    self._pool_files.setdefault(status.st_size, []).append(path)
                    self.pool_bytes += status.st_size
                    self._next_id = max(self._next_id, int(path.name))
                else:
                    path.unlink()

    def _recycle_live(self) -> None:
        """Empty the ``live/`` folder of an earlier process, because its contents were never committed."""
        for path in files_below(self.live):
            status = path.lstat()
            if _is_reusable(status):
                self.put_pooled(path, status.st_size)
        if self.live.exists():
            shutil.rmtree(self.live)

    def frozen_bytes(self) -> int:
        """Return the bytes of all files under ``snap/``. A file with several links counts once."""
        return _total_bytes(self.snap)

    def disk_bytes(self) -> int:
        """Return the bytes of all live, frozen and pooled files. A file with several links counts once."""
        return self.pool_bytes + _total_bytes(self.live, self.snap)


def open_directories(
    paths: Sequence[str | os.PathLike[str]], max_written_bytes: Sequence[int | None] | None = None
) -> list[TierDirectory]:
    """Open all directories of a tier. If one fails, close the others. Raises the errors of ``TierDirectory``."""
    directories: list[TierDirectory] = []
    try:
        for path, limit in zip(paths, max_written_bytes or [None] * len(paths), strict=True):
            directories.append(TierDirectory(path, max_written_bytes=limit))
    except BaseException:
        for directory in directories:
            directory.close()
        raise
    return directories


def reusable_bytes(path: Path) -> int:
    """Return the bytes of files on this path that a new tier would reuse instead of allocating space."""
    if read_own_attributes(path) is None:
        return 0
    pool_bytes = sum(status.st_size for status in _statuses((path / ".pool").glob("*/*")))
    return pool_bytes + sum(status.st_size for status in statuses_below(path / "live"))


def files_below(root: Path) -> Iterator[Path]:
    """Yield the chunk files below ``root``: files in ``c/`` folders, except symbolic links."""
    for folder, _, names in os.walk(root):
        if os.path.basename(folder) == "c":
            for name in names:
                path = Path(folder, name)
                if is_number(name) and not path.is_symlink():
                    yield path


def statuses_below(root: Path) -> Iterator[os.stat_result]:
    """Yield the status of each chunk file below ``root``. Skips files that another process has just removed."""
    yield from _statuses(files_below(root))


def _total_bytes(*roots: Path) -> int:
    """Return the total bytes of the chunk files below all roots. A file with several links counts once."""
    return sum({status.st_ino: status.st_size for root in roots for status in statuses_below(root)}.values())


def _statuses(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        yield status


def read_document(folder: Path) -> Any:
    """Return the zarr document of a folder, or None if it is missing or unreadable."""
    try:
        return json.loads(read_document_file(folder / DOCUMENT_NAME))
    except (OSError, ValueError, RecursionError):
        return None


def read_own_attributes(folder: Path) -> dict[str, Any] | None:
    """Return a folder's ``attributes.megatrain``, or None if no tier wrote the folder's document.

    Skips the list of members at the end of the document, because the list may have 100,000 entries.
    """
    try:
        content = read_document_file(folder / DOCUMENT_NAME)
        head, separator, _ = content.partition(_MEMBERS_PREFIX)
        attributes = own_attributes(json.loads(head + b"}")) if separator else None
        return own_attributes(json.loads(content)) if attributes is None else attributes
    except (OSError, ValueError, RecursionError):
        return None


def write_document(folder: Path, document: dict[str, Any], *, replace: bool = False, durable: bool = False) -> None:
    """Create a folder and its zarr document. Keeps an existing document unless ``replace`` is True.

    Args:
        durable: whether the document must survive a power cut as soon as the function returns.
    """
    path = folder / DOCUMENT_NAME
    if path.exists() and not replace:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, document, durable=durable)


def make_groups(root: Path, key: str) -> None:
    """Write group documents for ``root`` and all folders down to the array ``key``, because zarr v3 requires them."""
    folder = root
    write_document(folder, group_document())
    for segment in key.split("/")[:-1]:
        folder = folder / segment
        write_document(folder, group_document())


def remove_array(root: Path, key: str) -> None:
    """Remove the folder of the array ``key``, and parent groups that become empty."""
    folder = root / key
    if folder.exists():
        shutil.rmtree(folder)
    for parent in folder.parents:
        if parent == root or not parent.exists() or _holds_more_than(parent, DOCUMENT_NAME):
            return
        (parent / DOCUMENT_NAME).unlink(missing_ok=True)
        parent.rmdir()


def _has_tier_files(path: Path) -> bool:
    """Return whether a directory without a readable document has other files that only a tier creates."""
    for name, field, value_type in ((STORE_NAME, "id", str), (WEAR_NAME, "written_bytes", int)):
        try:
            document = json.loads(read_document_file(path / name))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(document, dict) and isinstance(document.get(field), value_type):
            return True
    return False


def _holds_more_than(folder: Path, *names: str) -> bool:
    """Return whether a folder has entries that are not in ``names``. Reads as few entries as possible."""
    with os.scandir(folder) as entries:
        return any(entry.name not in names for entry in entries)


def documents_and_folders(root: Path) -> Iterator[Path]:
    """Yield ``root``, all folders below it, and all their files except chunk files."""
    for folder, _, names in os.walk(root):
        yield Path(folder)
        yield from (Path(folder, name) for name in names if not is_number(name))


def _preallocate(path: Path, nbytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None  # fallocate's error has no path.
    finally:
        os.close(fd)


def _is_reusable(status: os.stat_result) -> bool:
    """Return whether a file is a complete, preallocated chunk file that no snapshot links."""
    is_complete = status.st_size > 0 and status.st_size % PAGE_BYTES == 0 and status.st_blocks * 512 >= status.st_size
    return is_complete and status.st_nlink == 1
