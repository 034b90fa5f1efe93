"""Snapshots of a tier's files: committed generations, stored as hard links without copies.

``snap/<generation>/<key>/`` mirrors ``live/<key>/``. A hard link freezes a file, because a file with several links is
never written (``Snapshots.replace_if_linked``). So a snapshot needs no journal and no copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tiered.durable.manifest import MANIFEST_NAME
from tiered.durable.ownership import StoreIdentity, remove_snapshot_folder
from tiered.errors import CapacityError, GenerationError, TransferError
from tiered.file_io import sync_path, sync_paths
from tiered.tiers.base import DescribingTier, Ledger, Slot
from tiered.tiers.directory import (
    TierDirectory,
    documents_and_folders,
    files_below,
    make_groups,
    read_document,
    remove_array,
    write_document,
)
from tiered.tiers.health import FullDrives
from tiered.tiers.layout import DOCUMENT_NAME, ChunkFile, HomeFiles, document_chunk_bytes, files_of, group_document
from tiered.units import PAGE_BYTES


@runtime_checkable
class DurableTier(DescribingTier, Protocol):
    """A tier whose files a commit can hard-link and a load can adopt: ``NvmeTier``, or any tier with ``Snapshots``.

    Attributes:
        full: rule for writes while a drive is full.
        snapshots: the tier's files, and the generations that link them.
    """

    full: FullDrives
    snapshots: Snapshots

    @property
    def paths(self) -> list[str]:
        """Absolute paths; the first one has the arrays."""
        ...

    def count_wear(self, nbytes_by_path: Mapping[int, int]) -> None:
        """Count bytes that are about to be written. ``nbytes_by_path`` maps the index of a path to its bytes.

        Raises:
            WearLimitError: the write would exceed a limit. Nothing is counted, and the caller must not write.
            OSError: a drive cannot save the count.
        """
        ...


class Snapshots:
    """The files of a tier: live files, files kept for reuse, and files that snapshots link. Thread-safe.

    Args:
        directories: one directory per path. The first directory has the arrays. The caller closes the directories.

    Attributes:
        lock: guards the directories and every rename in them. Not held while contents move.
        nbytes: total size of the files that only snapshots link.
    """

    def __init__(self, tier: str, directories: Sequence[TierDirectory], ledger: Ledger) -> None:
        self.lock = threading.RLock()
        self._tier = tier
        self._directories = directories
        self._ledger = ledger
        self.nbytes = sum(directory.frozen_bytes() for directory in directories)
        self.trim_pools()

    # -- live files; the caller holds the lock -----------------------------------------------------------------

    def make_files(self, home: HomeFiles) -> None:
        """Create the files and folders of a new slot. After an ``OSError``, no files are left behind."""
        root = self._directories[0].live
        try:
            make_groups(root, home.key)
            for file in home.files:
                self._create_file(file)
            self._link_to_first_path(home.files, "live", home.key)
        except BaseException:
            self.remove_files(home)
            raise

    def remove_files(self, home: HomeFiles) -> None:
        """Remove a slot's files and folders from ``live/``. Files that no snapshot links are kept for reuse."""
        self._detach_files(home)
        for directory in self._directories:
            remove_array(directory.live, home.key)

    def replace_if_linked(self, file: ChunkFile) -> None:
        """Replace a file that a snapshot links with another file of that name. The snapshot keeps the old file."""
        self.nbytes += file.nbytes
        try:
            self._create_file(file)
        except BaseException:
            self.nbytes -= file.nbytes  # The live file was not replaced.
            raise

    def trim_pools(self) -> None:
        """Delete files kept for reuse, largest first, until they fit in the capacity next to all charged bytes.

        Call this after charging the ledger and before creating files, so that the capacity is never exceeded.
        """
        charged_bytes = self._ledger.slot_bytes + max(self._ledger.reserved_bytes, self.nbytes)
        while charged_bytes + sum(d.pool_bytes for d in self._directories) > self._ledger.capacity_bytes:
            if not max(self._directories, key=TierDirectory.largest_pooled).drop_largest():
                return

    def _create_file(self, file: ChunkFile) -> None:
        """Replace ``file.path`` with a kept or new file of the right size."""
        directory = self._directories[file.path_index]
        file.path.parent.mkdir(parents=True, exist_ok=True)
        if not directory.take_pooled(file.nbytes, file.path):
            self.trim_pools()
            directory.create(file.nbytes, file.path)

    def _detach_files(self, home: HomeFiles) -> None:
        """Remove a slot's files, and the symbolic links to them, from ``live/``, but keep the folders."""
        for file in home.files:
            if file.path_index != 0:
                (self._directories[0].live / home.key / "c" / file.path.name).unlink(missing_ok=True)
            if not file.path.exists():
                continue  # The allocation failed before this file was created.
            if file.path.stat().st_nlink > 1:
                self.nbytes += file.nbytes
                file.path.unlink()
            else:
                self._directories[file.path_index].put_pooled(file.path, file.nbytes)

    # -- creation ----------------------------------------------------------------------------------------------

    def mark(self, generation: str, owner: StoreIdentity) -> None:
        """Create the folders of a snapshot on all paths, with notes that name the owner.

        Raises:
            LockedError: the LOCK file of a path was deleted or replaced.
            OSError: a drive returned an error.
        """
        for directory in self._directories:
            directory.check_lock()
            owner.mark(directory.snap / generation)

    def take(self, slot: Slot, generation: str) -> None:
        """Hard-link the slot's files into ``snap/<generation>/``. During the call, no transfer may use the slot.

        Raises:
            TransferError: a drive returned an error. The call can be repeated.
        """
        home = files_of(slot)
        array_directory = self._directories[0]
        root = array_directory.snap / generation
        with self.lock:
            try:
                write_document(array_directory.snap, group_document())
                make_groups(root, home.key)
                links = self._map_paths(home, f"snap/{generation}")
                _link(home.files, links)
                self._link_to_first_path(links, f"snap/{generation}", home.key)
                shutil.copyfile(array_directory.live / home.key / DOCUMENT_NAME, root / home.key / DOCUMENT_NAME)
            except OSError as error:
                with contextlib.suppress(OSError):  # Remove partial links, so that the call can be repeated.
                    for directory in self._directories:
                        remove_array(directory.snap / generation, home.key)
                raise TransferError(
                    f"block '{home.key}' cannot be linked into generation {generation}: {error.strerror}",
                    tier=self._tier,
                    path=str(error.filename2 or error.filename),
                    errno=error.errno,
                ) from error

    def sync(self, generation: str) -> None:
        """Flush a snapshot's links and documents, so that they survive a power cut. Does not flush contents."""
        paths: list[Path] = []
        for directory in self._directories:
            paths += documents_and_folders(directory.snap / generation)
            paths += [p for p in (directory.snap / DOCUMENT_NAME, directory.snap, directory.path) if p.exists()]
        sync_paths(paths, sync_path)

    def count(self, nbytes: int) -> None:
        """Add to ``self.nbytes`` the size of files that a commit wrote to a snapshot. ``drop`` removes these files."""
        with self.lock:
            self.nbytes += nbytes
            self.trim_pools()

    def _map_paths(self, home: HomeFiles, tree: str) -> tuple[ChunkFile, ...]:
        """Return the files with their paths in another tree, e.g. ``live``."""
        folders = [directory.path / tree / home.key / "c" for directory in self._directories]
        return tuple(replace(file, path=folders[file.path_index] / file.path.name) for file in home.files)

    def _link_to_first_path(self, files: Sequence[ChunkFile], tree: str, key: str) -> None:
        """In the array on the first path, create symbolic links to the files on other paths."""
        folder = self._directories[0].path / tree / key / "c"
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.path_index != 0:
                (folder / file.path.name).symlink_to(file.path)

    # -- removal -----------------------------------------------------------------------------------------------

    def release(self, generation: str, owner: StoreIdentity | None = None) -> list[Path]:
        """Remove a snapshot's files and return its folders. Files without other links are kept for reuse."""
        roots = []
        with self.lock:
            for directory in self._directories:
                root = directory.snap / generation
                if not root.exists() or (owner is not None and not owner.owns(root)):
                    continue
                roots.append(root)
                # Delete the manifest first, so that after a crash the generation does not exist.
                (root / MANIFEST_NAME).unlink(missing_ok=True)
                for path in list(files_below(root)):
                    status = path.lstat()
                    if status.st_nlink > 1:
                        path.unlink()
                        continue
                    self.nbytes -= status.st_size
                    directory.put_pooled(path, status.st_size)
            self.trim_pools()
        return roots

    def drop(self, generation: str, owner: StoreIdentity | None = None) -> None:
        """Remove a snapshot if ``owner`` owns it. Files without other links are kept for reuse while they fit."""
        for root in self.release(generation, owner):
            remove_snapshot_folder(root)  # Deleting folders takes a while, so do it without the lock.

    def drop_kept_files(self) -> bool:
        """Delete all files kept for reuse. Return False if there are none."""
        with self.lock:
            results = [directory.drop_largest() for directory in self._directories]
            while any(directory.drop_largest() for directory in self._directories):
                pass
        return any(results)

    # -- adoption ----------------------------------------------------------------------------------------------

    def adopt(
        self,
        slot: Slot,
        generation: str,
        owner: StoreIdentity | None = None,
        check: Callable[[HomeFiles], None] | None = None,
    ) -> None:
        """Use a snapshot's files as a block's home slot, through hard links.

        The slot also adopts the files' number and sizes, which differ from its own if paths or rates have changed. So
        ``slot.resource`` and ``slot.slot_bytes`` can change.

        Args:
            slot: home slot to fill. Its old files are removed.
            owner: store that must own the snapshot.
            check: called with the snapshot's files before they are adopted.

        Raises:
            GenerationError: the block or a part of it is missing in the snapshot, or its size differs.
            CapacityError: the snapshot's files are larger than the slot and do not fit.
        """
        old_files = files_of(slot)
        source, document = self._read(old_files.key, slot.nbytes, generation, owner)
        if check is not None:
            check(source)
        live = self._directories[0].live
        with self.lock:
            # Change the slot before the files on disk, so that freeing the slot undoes a partial adoption.
            self._resize(slot, source.nbytes)
            slot.resource = new_files = HomeFiles(old_files.key, source.chunk_bytes, self._map_paths(source, "live"))
            self._detach_files(old_files)
            make_groups(live, old_files.key)
            _link(source.files, new_files.files)
            self.nbytes -= new_files.nbytes  # The files are live again, not only in snapshots.
            self._link_to_first_path(new_files.files, "live", old_files.key)
            write_document(live / old_files.key, document)  # Keeps an existing document.
            self.trim_pools()

    def _resize(self, slot: Slot, slot_bytes: int) -> None:
        extra_bytes = slot_bytes - slot.slot_bytes
        if extra_bytes < 0:
            self._ledger.give(-extra_bytes)
        elif not self._ledger.take(extra_bytes):
            free_bytes = self._ledger.usage().free_bytes
            raise CapacityError(self._tier, extra_bytes, free_bytes, detail=f"for '{files_of(slot).key}'")
        slot.slot_bytes = slot_bytes

    def _read(
        self, key: str, nbytes: int, generation: str, owner: StoreIdentity | None
    ) -> tuple[HomeFiles, dict[str, Any]]:
        """Return a block's files and zarr document from a snapshot. Raises ``GenerationError`` if files are missing."""
        roots = {path_index: directory.snap / generation for path_index, directory in enumerate(self._directories)}
        if owner is not None:
            roots = {path_index: root for path_index, root in roots.items() if owner.owns(root)}
        folders = {path_index: root / key for path_index, root in roots.items()}
        documents = [read_document(folder) for folder in folders.values()]
        document, chunk_bytes = next(((d, size) for d in documents if (size := document_chunk_bytes(d))), (None, None))
        if document is None or chunk_bytes is None:
            paths = ", ".join(str(directory.path) for directory in self._directories)
            raise GenerationError(f"generation {generation} has no block '{key}' in {paths}")
        files = []
        for chunk_index, offset in enumerate(range(0, nbytes, chunk_bytes)):
            name = f"c/{chunk_index}"
            path_index = next((i for i, folder in folders.items() if _is_chunk(folder / name, chunk_bytes)), None)
            if path_index is None:
                raise GenerationError(
                    f"generation {generation} lacks a part of block '{key}': no file '{name}' of {chunk_bytes} "
                    f"bytes in {', '.join(map(str, folders.values()))}. Name the same paths as the run that wrote it"
                )
            files.append(ChunkFile(folders[path_index] / name, offset, chunk_bytes, path_index))
        if any(os.path.lexists(folder / "c" / str(len(files))) for folder in folders.values()):
            raise GenerationError(
                f"block '{key}' of generation {generation} is larger than the requested {nbytes} bytes"
            )
        return HomeFiles(key, chunk_bytes, tuple(files)), document


def _link(files: Sequence[ChunkFile], links: Sequence[ChunkFile]) -> None:
    for file, link in zip(files, links, strict=True):
        link.path.parent.mkdir(parents=True, exist_ok=True)
        os.link(file.path, link.path)


def _is_chunk(path: Path, nbytes: int) -> bool:
    assert nbytes % PAGE_BYTES == 0, nbytes
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes
