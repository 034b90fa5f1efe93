"""Snapshots of an NvmeTier: committed generations as hard links, without copying a byte.

``snap/<generation>/<key>/`` mirrors ``live/<key>/``. A file is frozen by being linked: the tier never writes a file
with more than one link (``NvmeTier.open_for_write``), so a snapshot needs no journal and no copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.errors import GenerationError, TransferError
from tiered.manifest import MANIFEST_NAME
from tiered.tiers.base import Slot
from tiered.tiers.directory import files_below, make_groups, read_document, sync_path, write_document
from tiered.tiers.files import ChunkFile, HomeFiles, files_of
from tiered.units import PAGE_BYTES
from tiered.zarr_layout import DOCUMENT_NAME, document_chunk_bytes, group_document, own_attributes

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
            tier.link_to_first_path(linked.files, f"snap/{generation}", home.key)
            shutil.copyfile(tier.directories[0].live / home.key / DOCUMENT_NAME, root / home.key / DOCUMENT_NAME)
        except OSError as error:
            raise TransferError(
                f"block '{home.key}' cannot be linked into generation {generation}: {error.strerror}",
                tier=tier.name,
                path=str(error.filename2 or error.filename),
                errno=error.errno,
            ) from error


def _link(tier: NvmeTier, source: HomeFiles, *, tree: str) -> HomeFiles:
    """Hard-link every file of ``source`` into another tree of its path; return the links."""
    (tier.directories[0].path / tree / source.key / "c").mkdir(parents=True, exist_ok=True)
    links = []
    for file in source.files:
        path = tier.directories[file.path_index].path / tree / source.key / "c" / file.path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(file.path, path)
        links.append(ChunkFile(file.path_index, path, file.offset, file.nbytes))
    return HomeFiles(source.key, source.chunk_bytes, tuple(links))


def sync_snapshot(tier: NvmeTier, generation: str) -> None:
    """Flush the documents and folders of a snapshot, innermost first."""
    for directory in tier.directories:
        root = directory.snap / generation
        for folder, _, names in os.walk(root, topdown=False):
            for name in (DOCUMENT_NAME, MANIFEST_NAME):
                if name in names:
                    sync_path(Path(folder, name))
            sync_path(Path(folder))
        for folder_path in (directory.snap, directory.path):
            if folder_path.exists():
                sync_path(folder_path)


def drop_snapshot(tier: NvmeTier, generation: str) -> None:
    """Remove a snapshot; files that only it linked are kept for reuse while they fit."""
    with tier.lock:
        # The manifest first: a crash half-way leaves a generation that is plainly not there.
        (tier.directories[0].snap / generation / MANIFEST_NAME).unlink(missing_ok=True)
        for directory in tier.directories:
            root = directory.snap / generation
            for path in list(files_below(root)):
                status = path.lstat()
                if status.st_nlink > 1:
                    continue
                tier.snapshot_bytes -= status.st_size
                directory.put_pooled(path, status.st_size)
            if root.exists():
                shutil.rmtree(root)
        tier.trim_pools()


def adopt(tier: NvmeTier, slot: Slot, generation: str) -> None:
    """Replace the files of ``slot`` by links to those of a snapshot."""
    own = files_of(slot)
    with tier.lock:
        source, document = _read_snapshot(tier, own.key, slot.nbytes, generation)
        links = HomeFiles(own.key, source.chunk_bytes, tuple(_in_live(tier, own.key, file) for file in source.files))
        tier.replace_files(slot, links)
        tier.remove_files(own)
        make_groups(tier.directories[0].live, own.key)
        _link(tier, source, tree="live")
        # Linked from live again: no longer held by snapshots alone.
        tier.snapshot_bytes -= sum(file.nbytes for file in links.files)
        tier.link_to_first_path(links.files, "live", own.key)
        write_document(tier.directories[0].live / own.key, document, replace=True)
        tier.trim_pools()


def _in_live(tier: NvmeTier, key: str, file: ChunkFile) -> ChunkFile:
    path = tier.directories[file.path_index].live / key / "c" / file.path.name
    return ChunkFile(file.path_index, path, file.offset, file.nbytes)


def _read_snapshot(tier: NvmeTier, key: str, nbytes: int, generation: str) -> tuple[HomeFiles, dict[str, Any]]:
    """Return the files and the document of a block in a snapshot, after checking that nothing is missing."""
    folder = tier.directories[0].snap / generation / key
    document = read_document(folder)
    own = own_attributes(document)
    if own is None:
        raise GenerationError(f"generation {generation} has no block '{key}' ({folder})")
    chunk_bytes = document_chunk_bytes(document)
    files = []
    for number, offset in enumerate(range(0, nbytes, chunk_bytes)):
        relative = Path("snap", generation, key, "c", str(number))
        found = [i for i, d in enumerate(tier.directories) if _is_chunk(d.path / relative, chunk_bytes)]
        if not found:
            raise GenerationError(
                f"generation {generation} lacks a part of block '{key}': no file '{relative}' of {chunk_bytes} bytes "
                f"in {', '.join(tier.paths)}. Name the same paths as the run that wrote it"
            )
        files.append(ChunkFile(found[0], tier.directories[found[0]].path / relative, offset, chunk_bytes))
    if (folder / "c" / str(len(files))).is_symlink() or (folder / "c" / str(len(files))).exists():
        raise GenerationError(f"block '{key}' of generation {generation} is larger than the {nbytes} bytes asked for")
    return HomeFiles(key, chunk_bytes, tuple(files)), document


def _is_chunk(path: Path, nbytes: int) -> bool:
    assert nbytes % PAGE_BYTES == 0, nbytes
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes
