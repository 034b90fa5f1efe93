"""Generations on the paths of file tiers that their store does not know any more: found, measured, removed.

They come about where a store's directory of generations was deleted or restored from a backup, or where one of its
drives was away while it pruned. Generations that are known, and those of living stores, are never listed.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiered.manifest import list_generations
from tiered.tiers.directory import lock_directory, unlock_directory
from tiered.tiers.leftovers import living_owner
from tiered.tiers.ownership import Owner, read_owner, read_store_id, remove_snapshot_folder, snapshot_folders


@dataclass(frozen=True, slots=True)
class Orphan:
    """A generation on one path that its store does not know.

    Attributes:
        folder: ``<path>/snap/<generation>``.
        generation: its number.
        store_path: the directory of its store.
        nbytes: space that removing all orphans of this path frees, as far as it is this one's.
        is_store_gone: no such store is in ``store_path`` any more. It may have been moved, or its drive may be away:
            ask before removing; otherwise the store is there and does not name the generation.
    """

    folder: Path
    generation: int
    store_path: Path
    nbytes: int
    is_store_gone: bool


def find_orphans(path: Path) -> list[Orphan]:
    """Return the orphans on one path of a file tier; none while a living process uses the path. Changes nothing."""
    return [] if living_owner(path) is not None else _find(path)


def remove_orphans(path: Path, *, of_stores_that_are_gone: bool = False) -> list[Orphan]:
    """Remove the orphans of one path and return them; holds the path's lock meanwhile.

    Args:
        of_stores_that_are_gone: also those whose store is not where it was.

    Raises:
        LockedError: a living process uses the path; nothing was removed.
        OSError: a file cannot be removed.
    """
    fd, _ = lock_directory(path)
    try:
        found = [orphan for orphan in _find(path) if of_stores_that_are_gone or not orphan.is_store_gone]
        for orphan in found:
            remove_snapshot_folder(orphan.folder)
    finally:
        unlock_directory(fd)
    return found


def _find(path: Path) -> list[Orphan]:
    found: list[tuple[int, Path, Owner]] = []
    for number, folder in snapshot_folders([path]):
        owner = read_owner(folder)
        if owner is not None and owner.id and not _is_known(number, owner):
            found.append((number, folder, owner))
    num_links = Counter(status.st_ino for _, folder, _ in found for status in _chunk_files(folder))
    counted: set[int] = set()
    orphans = []
    for number, folder, owner in found:
        nbytes = 0
        for status in _chunk_files(folder):
            if status.st_nlink == num_links[status.st_ino] and status.st_ino not in counted:
                counted.add(status.st_ino)
                nbytes += status.st_blocks * 512
        is_gone = read_store_id(Path(owner.path)) != owner.id
        orphans.append(Orphan(folder, number, Path(owner.path), nbytes, is_gone))
    return orphans


def _is_known(number: int, owner: Owner) -> bool:
    """Return whether the store names the generation, or is at work and may be about to."""
    directory = Path(owner.path)
    if read_store_id(directory) != owner.id:
        return False
    return number in list_generations(directory) or living_owner(directory) is not None


def _chunk_files(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            if name.isdigit() and stat.S_ISREG(status.st_mode):
                yield status
