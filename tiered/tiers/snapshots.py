"""Snapshots of an NvmeTier: committed generations as hard links, without copying a byte.

``snap/<generation>/<key>/`` mirrors ``live/<key>/``. A file is frozen by being linked: the tier never writes a file
with more than one link (``NvmeTier.open_for_write``), so a snapshot needs no journal and no copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.durable.manifest import MANIFEST_NAME
from tiered.durable.ownership import StoreIdentity, remove_snapshot_folder
from tiered.errors import GenerationError, TransferError
from tiered.tiers.base import Slot
from tiered.tiers.directory import (
    documents_and_folders,
    files_below,
    make_groups,
    read_document,
    remove_array,
    sync_paths,
    write_document,
)
from tiered.tiers.layout import DOCUMENT_NAME, ChunkFile, HomeFiles, document_chunk_bytes, files_of, group_document
from tiered.units import PAGE_BYTES

if TYPE_CHECKING:
    from tiered.tiers.nvme import NvmeTier

_NUM_SYNC_THREADS = 4  # a drive flushes several files at once for the price of one


def sync_files(tier: NvmeTier, slots: Sequence[Slot]) -> None:
    """Flush the contents of all files of ``slots``."""
    files = [file for slot in slots for file in files_of(slot).files]
    with ThreadPoolExecutor(_NUM_SYNC_THREADS, thread_name_prefix="tiered-sync") as threads:
        for _ in threads.map(lambda file: _flush(tier, file), files):
            pass


def _flush(tier: NvmeTier, file: ChunkFile) -> None:
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise TransferError(
            f"flush failed: {error.strerror}", tier=tier.name, path=str(file.path), errno=error.errno
        ) from error


def snapshot(tier: NvmeTier, slot: Slot, generation: str) -> None:
    """Link the files of ``slot`` and copy its document into the snapshot."""
    home = files_of(slot)
    root = tier.directories[0].snap / generation
    with tier.lock:
        try:
            write_document(tier.directories[0].snap, group_document())
            make_groups(root, home.key)
            linked = _link(tier, home, tree=f"snap/{generation}")
            link_to_first_path(tier, linked.files, f"snap/{generation}", home.key)
            shutil.copyfile(tier.directories[0].live / home.key / DOCUMENT_NAME, root / home.key / DOCUMENT_NAME)
        except OSError as error:
            with contextlib.suppress(OSError):  # so that it can be tried again
                for directory in tier.directories:
                    remove_array(directory.snap / generation, home.key)
            raise TransferError(
                f"block '{home.key}' cannot be linked into generation {generation}: {error.strerror}",
                tier=tier.name,
                path=str(error.filename2 or error.filename),
                errno=error.errno,
            ) from error


def _link(tier: NvmeTier, source: HomeFiles, *, tree: str) -> HomeFiles:
    """Hard-link every file of ``source`` into another tree of its path; return the links."""
    folders = [directory.path / tree / source.key / "c" for directory in tier.directories]
    for index in {0, *(file.path_index for file in source.files)}:
        os.makedirs(folders[index], exist_ok=True)
    links = []
    for file in source.files:
        path = folders[file.path_index] / file.path.name
        os.link(file.path, path)
        links.append(ChunkFile(file.path_index, path, file.offset, file.nbytes))
    return HomeFiles(source.key, source.chunk_bytes, tuple(links))


def link_to_first_path(tier: NvmeTier, files: Sequence[ChunkFile], tree: str, key: str) -> None:
    """Make symbolic links in the first path's array for files that live on other paths."""
    folder = tier.directories[0].path / tree / key / "c"
    for file in files:
        if file.path_index != 0:
            (folder / file.path.name).symlink_to(file.path)


def give_up_files(tier: NvmeTier, home: HomeFiles) -> None:
    """Take the files of a slot out of ``live/``, and the links to them; its folders stay."""
    for file in home.files:
        if file.path_index != 0:
            (tier.directories[0].live / home.key / "c" / file.path.name).unlink(missing_ok=True)
        if not file.path.exists():
            continue  # an allocation that failed half-way
        if file.path.stat().st_nlink > 1:
            tier.snapshot_bytes += file.nbytes
            file.path.unlink()
        else:
            tier.directories[file.path_index].put_pooled(file.path, file.nbytes)


def mark_snapshot(tier: NvmeTier, generation: str, owner: StoreIdentity) -> None:
    """Make the folders of a snapshot on all paths, and say whose it is."""
    for directory in tier.directories:
        owner.mark(directory.snap / generation)


def sync_snapshot(tier: NvmeTier, generation: str) -> None:
    """Flush the documents and folders of a snapshot on all paths."""
    paths: list[Path] = []
    for directory in tier.directories:
        paths += documents_and_folders(directory.snap / generation)
        paths += [p for p in (directory.snap / DOCUMENT_NAME, directory.snap, directory.path) if p.exists()]
    sync_paths(paths)


def release_snapshot(tier: NvmeTier, generation: str, owner: StoreIdentity | None) -> list[Path]:
    """Take the files out of a snapshot, those that only it linked for reuse; return its folders, without files now."""
    roots = []
    with tier.lock:
        for directory in tier.directories:
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
                tier.snapshot_bytes -= status.st_size
                directory.put_pooled(path, status.st_size)
        tier.trim_pools()
    return roots


def drop_snapshot(tier: NvmeTier, generation: str, owner: StoreIdentity | None) -> None:
    """Remove a snapshot; files that only it linked are kept for reuse while they fit."""
    for root in release_snapshot(tier, generation, owner):
        remove_snapshot_folder(root)  # without the lock: deleting folders takes a while


def drop_kept_files(tier: NvmeTier) -> bool:
    """Delete the files that are kept for reuse, for somebody who needs their room; False if there are none."""
    with tier.lock:
        dropped = [directory.drop_largest() for directory in tier.directories]
        while any(directory.drop_largest() for directory in tier.directories):
            pass
    return any(dropped)


def adopt(
    tier: NvmeTier,
    slot: Slot,
    generation: str,
    owner: StoreIdentity | None,
    check: Callable[[HomeFiles], None] | None,
) -> None:
    """Replace the files of ``slot`` by links to those of a snapshot."""
    own = files_of(slot)
    source, document = _read_snapshot(tier, own.key, slot.nbytes, generation, owner)
    if check is not None:
        check(source)
    with tier.lock:
        links = HomeFiles(own.key, source.chunk_bytes, tuple(_in_live(tier, own.key, file) for file in source.files))
        tier.replace_files(slot, links)
        give_up_files(tier, own)
        make_groups(tier.directories[0].live, own.key)
        _link(tier, source, tree="live")
        # Linked from live again: no longer held by snapshots alone.
        tier.snapshot_bytes -= sum(file.nbytes for file in links.files)
        link_to_first_path(tier, links.files, "live", own.key)
        write_document(tier.directories[0].live / own.key, document)  # unless the slot has been described
        tier.trim_pools()


def _in_live(tier: NvmeTier, key: str, file: ChunkFile) -> ChunkFile:
    path = tier.directories[file.path_index].live / key / "c" / file.path.name
    return ChunkFile(file.path_index, path, file.offset, file.nbytes)


def _read_snapshot(
    tier: NvmeTier, key: str, nbytes: int, generation: str, owner: StoreIdentity | None
) -> tuple[HomeFiles, dict[str, Any]]:
    """Return the files and the document of a block in a snapshot, after checking that nothing is missing."""
    roots = {index: directory.snap / generation for index, directory in enumerate(tier.directories)}
    if owner is not None:
        roots = {index: root for index, root in roots.items() if owner.owns(root)}
    folders = {index: root / key for index, root in roots.items()}
    documents = [read_document(folder) for folder in folders.values()]
    document, chunk_bytes = next(((d, size) for d in documents if (size := document_chunk_bytes(d))), (None, None))
    if document is None or chunk_bytes is None:
        raise GenerationError(f"generation {generation} has no block '{key}' in {', '.join(tier.paths)}")
    files = []
    for number, offset in enumerate(range(0, nbytes, chunk_bytes)):
        index = next((i for i, f in folders.items() if _is_chunk(f / "c" / str(number), chunk_bytes)), None)
        if index is None:
            raise GenerationError(
                f"generation {generation} lacks a part of block '{key}': no file 'c/{number}' of {chunk_bytes} bytes "
                f"in {', '.join(map(str, folders.values()))}. Name the same paths as the run that wrote it"
            )
        files.append(ChunkFile(index, folders[index] / "c" / str(number), offset, chunk_bytes))
    if any(os.path.lexists(folder / "c" / str(len(files))) for folder in folders.values()):
        raise GenerationError(f"block '{key}' of generation {generation} is larger than the {nbytes} bytes asked for")
    return HomeFiles(key, chunk_bytes, tuple(files)), document


def _is_chunk(path: Path, nbytes: int) -> bool:
    assert nbytes % PAGE_BYTES == 0, nbytes
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes
