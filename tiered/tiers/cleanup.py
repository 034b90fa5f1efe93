"""Functions that find, measure and remove leftovers of dead processes in a tier's folders."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tiered.durable.manifest import list_generations
from tiered.durable.ownership import Owner, read_owner, read_store_id, remove_snapshot_folder, snapshot_folders
from tiered.locks import LOCK_NAME, holder_text, lock_directory
from tiered.tiers.directory import read_own_attributes
from tiered.tiers.layout import DOCUMENT_NAME
from tiered.units import is_number

_DOCUMENT_NAMES = (DOCUMENT_NAME, Path(DOCUMENT_NAME).with_suffix(".tmp").name)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Scratch files of dead processes in one directory.

    Attributes:
        nbytes: drive space freed by removing the files.
        num_foreign: number of files of other programs in the same folders. These files stay.
        owner: running process that uses the directory, or None. While it runs, nothing can be removed.
    """

    path: Path
    num_files: int
    nbytes: int
    num_foreign: int
    owner: str | None = None


def find_directories(root: Path) -> Iterator[Path]:
    """Yield all directories of file tiers at or below ``root``. Does not follow symbolic links."""
    for folder, names, files in os.walk(root):
        names.sort()
        if LOCK_NAME in files and _is_tier_directory(Path(folder)):
            names.clear()
            yield Path(folder)


def _is_tier_directory(folder: Path) -> bool:
    fields = read_own_attributes(folder)
    return fields is not None and "page_bytes" in fields  # Only the document of a tier's directory has this attribute.


def measure_leftovers(path: Path) -> Leftovers:
    """Measure the removable files in a file tier's directory. Changes nothing."""
    return replace(_measure(path), owner=holder_text(path))


def _measure(path: Path) -> Leftovers:
    num_files = nbytes = num_foreign = 0
    for file, is_own in _scratch_files(path):
        status = file.lstat()
        num_foreign += not is_own
        if is_own and stat.S_ISREG(status.st_mode) and file.name not in _DOCUMENT_NAMES:
            num_files += 1
            if status.st_nlink == 1:  # Removing a file frees no space if a generation links the same file.
                nbytes += status.st_blocks * 512
    return Leftovers(path, num_files, nbytes, num_foreign)


def remove_leftovers(path: Path) -> Leftovers:
    """Remove a directory's scratch files and return their counts and sizes. Locks the directory during the removal.

    Raises:
        LockedError: a running process uses the directory. Nothing was removed.
        OSError: a file cannot be removed.
    """
    lock = lock_directory(path)
    try:
        leftovers = _measure(path)
        for file, is_own in list(_scratch_files(path)):
            if is_own and not (file.name in _DOCUMENT_NAMES and _has_foreign_below(file.parent)):
                file.unlink()
        for root in (path / "live", path / ".pool"):
            for folder, _, _ in os.walk(root, topdown=False):
                if not os.path.islink(folder) and not os.listdir(folder):
                    os.rmdir(folder)
    finally:
        lock.release()
    return leftovers


def _has_foreign_below(folder: Path) -> bool:
    return any(not _is_live_file(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def _scratch_files(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (file, whether a tier created the file) for all files and symbolic links in the scratch folders."""
    for root, is_own in ((path / "live", _is_live_file), (path / ".pool", _is_pool_file)):
        if root.is_symlink():
            continue
        for folder, names, files in os.walk(root):
            for name in [*files, *(name for name in names if os.path.islink(os.path.join(folder, name)))]:
                file = Path(folder, name)
                yield file, is_own(file)


def _is_live_file(file: Path) -> bool:
    if file.parent.name == "c" and is_number(file.name):
        return True  # A chunk file, or a symbolic link to a chunk file on another path.
    return file.name in _DOCUMENT_NAMES and not file.is_symlink()


def _is_pool_file(file: Path) -> bool:
    return is_number(file.name) and is_number(file.parent.name) and file.parent.parent.name == ".pool"


@dataclass(frozen=True, slots=True)
class Orphan:
    """Files on one path that belong to a generation that its store no longer lists.

    Attributes:
        nbytes: this orphan's share of the space that would be freed by removing all orphans on the path.
        is_store_gone: whether the store is no longer at ``store_path``. It may have been moved, or its drive may be
            missing, so ask before removing the orphan. If False, the store exists but does not list the generation.
    """

    path: Path
    generation: int
    store_path: Path
    nbytes: int
    is_store_gone: bool


def find_orphans(path: Path) -> list[Orphan]:
    """Return the orphans on one path of a file tier, or [] while a process uses the path. Changes nothing."""
    return [] if holder_text(path) is not None else _find_orphans(path)


def remove_orphan(orphan: Orphan) -> Orphan:
    """Remove an orphan, unless its store now lists the generation. Locks the path during the removal.

    Raises:
        LockedError: a running process uses the path. Nothing was removed.
        OSError: a file cannot be removed.
    """
    lock = lock_directory(orphan.path.parent.parent)
    try:
        owner = read_owner(orphan.path)
        if owner is not None and not _is_listed(orphan.generation, owner):
            remove_snapshot_folder(orphan.path)
    finally:
        lock.release()
    return orphan


def _find_orphans(path: Path) -> list[Orphan]:
    candidates: list[tuple[int, Path, Owner]] = []
    for generation, folder in snapshot_folders([path]):
        owner = read_owner(folder)
        if owner is not None and owner.id and not _is_listed(generation, owner):
            candidates.append((generation, folder, owner))
    num_links = Counter(status.st_ino for _, folder, _ in candidates for status in _chunk_files(folder))
    counted_inodes: set[int] = set()
    orphans = []
    for generation, folder, owner in candidates:
        nbytes = 0
        for status in _chunk_files(folder):
            if status.st_nlink == num_links[status.st_ino] and status.st_ino not in counted_inodes:
                counted_inodes.add(status.st_ino)
                nbytes += status.st_blocks * 512
        is_gone = read_store_id(Path(owner.path)) != owner.id
        orphans.append(Orphan(folder, generation, Path(owner.path), nbytes, is_gone))
    return orphans


def _is_listed(generation: int, owner: Owner) -> bool:
    """Return whether the store lists the generation, or is in use and may soon list the generation."""
    directory = Path(owner.path)
    if read_store_id(directory) != owner.id:
        return False
    return generation in list_generations(directory) or holder_text(directory) is not None


def _chunk_files(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            if is_number(name) and stat.S_ISREG(status.st_mode):
                yield status
