"""Snapshots of a tier's files: committed generations as hard links, without copying a byte.

``snap/<generation>/<key>/`` mirrors ``live/<key>/``. A file is frozen by being linked: a file with more than one link
is never written (``Snapshots.before_write``), so a snapshot needs no journal and no copy.
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
    """A tier whose files a commit keeps by links, and a load adopts: ``NvmeTier``, or one built on ``Snapshots``.

    Attributes:
        full: waits for room on a full drive.
        snapshots: the generations that keep its files by links.
    """

    full: FullDrives
    snapshots: Snapshots

    @property
    def paths(self) -> list[str]:
        """Return the absolute paths, the one with the arrays first."""
        ...

    def count_wear(self, nbytes_by_path: Mapping[int, int]) -> None:
        """Count bytes that are about to be written, by index of the path.

        Raises:
            WearLimitError: nothing is counted and nothing may be written.
            OSError: a drive refused to keep the count.
        """
        ...


class Snapshots:
    """The files of a tier's home slots in its directories: live, kept for reuse, and linked by snapshots. Thread-safe.

    Args:
        directories: one per path; the first has the arrays. Their owner closes them.

    Attributes:
        lock: guards the directories and every rename in them; never held while contents move.
        nbytes: size of the files that only snapshots hold.
    """

    def __init__(self, tier: str, directories: Sequence[TierDirectory], ledger: Ledger) -> None:
        self.lock = threading.RLock()
        self._tier = tier
        self._directories = directories
        self._ledger = ledger
        self.nbytes = sum(directory.frozen_bytes() for directory in directories)
        self.trim_pools()

    # -- live files; call with the lock held -------------------------------------------------------------------

    def make_files(self, home: HomeFiles) -> None:
        """Make the files of a new slot, and its folders. After an error (``OSError``) nothing is left behind."""
        first = self._directories[0].live
        try:
            make_groups(first, home.key)
            for file in home.files:
                self._place(file)
            self._link_to_first_path(home.files, "live", home.key)
        except BaseException:
            self.remove_files(home)
            raise

    def remove_files(self, home: HomeFiles) -> None:
        """Remove the files and folders of a slot from ``live/``; files that no snapshot holds are kept for reuse."""
        self._give_up(home)
        for directory in self._directories:
            remove_array(directory.live, home.key)

    def before_write(self, file: ChunkFile) -> None:
        """Replace a file that a snapshot links with another one of the same name; the snapshot keeps the old one."""
        self.nbytes += file.nbytes
        try:
            self._place(file)
        except BaseException:
            self.nbytes -= file.nbytes  # it is linked from live still
            raise

    def trim_pools(self) -> None:
        """Delete kept files, largest first, until all present and coming files fit the capacity.

        Call it after the ledger was charged and before files are made: then the disk never holds more.
        """
        others = self._ledger.slot_bytes + max(self._ledger.reserved_bytes, self.nbytes)
        while others + sum(directory.pool_bytes for directory in self._directories) > self._ledger.capacity_bytes:
            if not max(self._directories, key=TierDirectory.largest_pooled).drop_largest():
                return

    def _place(self, file: ChunkFile) -> None:
        """Put a kept or new file of the right size at ``file.path``, replacing any old one."""
        directory = self._directories[file.path_index]
        file.path.parent.mkdir(parents=True, exist_ok=True)
        if not directory.take_pooled(file.nbytes, file.path):
            self.trim_pools()
            directory.create(file.nbytes, file.path)

    def _give_up(self, home: HomeFiles) -> None:
        """Take the files of a slot out of ``live/``, and the links to them; its folders stay."""
        for file in home.files:
            if file.path_index != 0:
                (self._directories[0].live / home.key / "c" / file.path.name).unlink(missing_ok=True)
            if not file.path.exists():
                continue  # an allocation that failed half-way
            if file.path.stat().st_nlink > 1:
                self.nbytes += file.nbytes
                file.path.unlink()
            else:
                self._directories[file.path_index].put_pooled(file.path, file.nbytes)

    # -- taking a snapshot -------------------------------------------------------------------------------------

    def mark(self, generation: str, owner: StoreIdentity) -> None:
        """Make the folders of a snapshot on all paths, with a note of its owner.

        Raises:
            LockedError: the LOCK file of a path was deleted or replaced.
            OSError: a drive refused.
        """
        for directory in self._directories:
            directory.check_lock()
            owner.mark(directory.snap / generation)

    def take(self, slot: Slot, generation: str) -> None:
        """Link the slot's files into ``snap/<generation>/``; no byte is copied. The slot must be quiet meanwhile.

        Raises:
            TransferError: a drive refused; it can be tried again.
        """
        home = files_of(slot)
        first = self._directories[0]
        root = first.snap / generation
        with self.lock:
            try:
                write_document(first.snap, group_document())
                make_groups(root, home.key)
                linked = self._in_tree(home, f"snap/{generation}")
                _link(home.files, linked)
                self._link_to_first_path(linked, f"snap/{generation}", home.key)
                shutil.copyfile(first.live / home.key / DOCUMENT_NAME, root / home.key / DOCUMENT_NAME)
            except OSError as error:
                with contextlib.suppress(OSError):  # so that it can be tried again
                    for directory in self._directories:
                        remove_array(directory.snap / generation, home.key)
                raise TransferError(
                    f"block '{home.key}' cannot be linked into generation {generation}: {error.strerror}",
                    tier=self._tier,
                    path=str(error.filename2 or error.filename),
                    errno=error.errno,
                ) from error

    def sync(self, generation: str) -> None:
        """Return once the links and documents of a snapshot survive a power cut; contents are flushed by themselves."""
        paths: list[Path] = []
        for directory in self._directories:
            paths += documents_and_folders(directory.snap / generation)
            paths += [p for p in (directory.snap / DOCUMENT_NAME, directory.snap, directory.path) if p.exists()]
        sync_paths(paths, sync_path)

    def count(self, nbytes: int) -> None:
        """Count files that a commit wrote into a snapshot of the first path; ``drop`` removes them."""
        with self.lock:
            self.nbytes += nbytes
            self.trim_pools()

    def _in_tree(self, home: HomeFiles, tree: str) -> tuple[ChunkFile, ...]:
        """Return the places of the files in another tree of their paths, such as ``live``."""
        folders = [directory.path / tree / home.key / "c" for directory in self._directories]
        return tuple(replace(file, path=folders[file.path_index] / file.path.name) for file in home.files)

    def _link_to_first_path(self, files: Sequence[ChunkFile], tree: str, key: str) -> None:
        """Make symbolic links in the first path's array for files that live on other paths."""
        folder = self._directories[0].path / tree / key / "c"
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.path_index != 0:
                (folder / file.path.name).symlink_to(file.path)

    # -- dropping one ------------------------------------------------------------------------------------------

    def release(self, generation: str, owner: StoreIdentity | None = None) -> list[Path]:
        """Do the quick part of ``drop``: files that only it linked are kept for reuse; return its emptied folders."""
        roots = []
        with self.lock:
            for directory in self._directories:
                root = directory.snap / generation
                if not root.exists() or (owner is not None and not owner.owns(root)):
                    continue
                roots.append(root)
                # The manifest first: a crash half-way leaves a generation that is plainly not there.
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
        """Remove a snapshot, if it is ``owner``'s; files that only it linked are kept for reuse while they fit."""
        for root in self.release(generation, owner):
            remove_snapshot_folder(root)  # without the lock: deleting folders takes a while

    def drop_kept_files(self) -> bool:
        """Delete the files kept for reuse, so that others get their room; False if there are none."""
        with self.lock:
            dropped = [directory.drop_largest() for directory in self._directories]
            while any(directory.drop_largest() for directory in self._directories):
                pass
        return any(dropped)

    # -- adopting one ------------------------------------------------------------------------------------------

    def adopt(
        self,
        slot: Slot,
        generation: str,
        owner: StoreIdentity | None = None,
        check: Callable[[HomeFiles], None] | None = None,
    ) -> None:
        """Give a home slot the contents and the document that its key has in a snapshot; no byte is copied.

        The slot takes over the snapshot's cut into files (other paths or rates may have been set then), so
        ``slot.resource`` and ``slot.slot_bytes`` may change.

        Args:
            slot: to be filled; its own files are given up.
            owner: store that must own the snapshot.
            check: called with the files before they are taken.

        Raises:
            GenerationError: the snapshot lacks the block or a part of it, or has it in another size.
            CapacityError: the snapshot's files are larger and do not fit.
        """
        own = files_of(slot)
        source, document = self._read(own.key, slot.nbytes, generation, owner)
        if check is not None:
            check(source)
        live = self._directories[0].live
        with self.lock:
            # The slot first, while nothing has changed on disk: freeing it then undoes a failure half-way.
            self._resize(slot, source.nbytes)
            slot.resource = adopted = HomeFiles(own.key, source.chunk_bytes, self._in_tree(source, "live"))
            self._give_up(own)
            make_groups(live, own.key)
            _link(source.files, adopted.files)
            self.nbytes -= adopted.nbytes  # linked from live again: no longer held by snapshots alone
            self._link_to_first_path(adopted.files, "live", own.key)
            write_document(live / own.key, document)  # unless the slot has been described
            self.trim_pools()

    def _resize(self, slot: Slot, slot_bytes: int) -> None:
        more_bytes = slot_bytes - slot.slot_bytes
        if more_bytes < 0:
            self._ledger.give(-more_bytes)
        elif not self._ledger.take(more_bytes):
            free_bytes = self._ledger.usage().free_bytes
            raise CapacityError(self._tier, more_bytes, free_bytes, detail=f"for '{files_of(slot).key}'")
        slot.slot_bytes = slot_bytes

    def _read(
        self, key: str, nbytes: int, generation: str, owner: StoreIdentity | None
    ) -> tuple[HomeFiles, dict[str, Any]]:
        """Return the files and the document of a block in a snapshot, after checking that nothing is missing."""
        roots = {index: directory.snap / generation for index, directory in enumerate(self._directories)}
        if owner is not None:
            roots = {index: root for index, root in roots.items() if owner.owns(root)}
        folders = {index: root / key for index, root in roots.items()}
        documents = [read_document(folder) for folder in folders.values()]
        document, chunk_bytes = next(((d, size) for d in documents if (size := document_chunk_bytes(d))), (None, None))
        if document is None or chunk_bytes is None:
            paths = ", ".join(str(directory.path) for directory in self._directories)
            raise GenerationError(f"generation {generation} has no block '{key}' in {paths}")
        files = []
        for number, offset in enumerate(range(0, nbytes, chunk_bytes)):
            index = next((i for i, f in folders.items() if _is_chunk(f / "c" / str(number), chunk_bytes)), None)
            if index is None:
                raise GenerationError(
                    f"generation {generation} lacks a part of block '{key}': no file 'c/{number}' of {chunk_bytes} "
                    f"bytes in {', '.join(map(str, folders.values()))}. Name the same paths as the run that wrote it"
                )
            files.append(ChunkFile(folders[index] / "c" / str(number), offset, chunk_bytes, index))
        if any(os.path.lexists(folder / "c" / str(len(files))) for folder in folders.values()):
            raise GenerationError(
                f"block '{key}' of generation {generation} is larger than the {nbytes} bytes asked for"
            )
        return HomeFiles(key, chunk_bytes, tuple(files)), document


def _link(files: Sequence[ChunkFile], links: Sequence[ChunkFile]) -> None:
    for file, link in zip(files, links, strict=True):
        link.path.parent.mkdir(parents=True, exist_ok=True)
        os.link(file.path, link.path)


def _is_chunk(path: Path, nbytes: int) -> bool:
    assert nbytes % PAGE_BYTES == 0, nbytes
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes
