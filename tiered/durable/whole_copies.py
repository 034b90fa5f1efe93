"""Whole copies of committed generations: all their bytes in one directory, whichever drives they lay on.

The directory is itself a directory of generations, so ``GenerationReader`` reads, checks and removes the copies. A
copy's manifest is written last: without one the copy is incomplete, and the next copy removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tiered.block import BlockSpec
from tiered.durable.arrays import array_bytes, array_chunk_bytes, chunk_files, page_aligned, sync_tree, write_array
from tiered.durable.manifest import (
    BlockRecord,
    Manifest,
    current_generation,
    forget_generation,
    generation_folder,
    newest_first,
    store_id_in_manifests,
    write_manifest,
)
from tiered.durable.ownership import (
    StoreIdentity,
    numbers_taken,
    read_owner,
    read_store_id,
    remove_if_empty,
    remove_snapshot_folder,
    snapshot_folders,
)
from tiered.durable.reader import GenerationReader
from tiered.durable.zarr_folder import list_members
from tiered.errors import GenerationError, TransferError
from tiered.file_io import PIECE_BYTES, pieces
from tiered.tiers.directory import TierDirectory, make_groups, read_document, write_document
from tiered.tiers.layout import array_document, group_document


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """Bytes of a copy.

    Attributes:
        copied_bytes: size of the files that were written.
        linked_bytes: size of the files that were linked, in the source's own directory on this drive.
    """

    generation: int
    copied_bytes: int
    linked_bytes: int


class WholeCopies:
    """The copies in one directory, which this object owns until ``close``. Not thread-safe. Memory: 20 MiB.

    Args:
        path: made if missing. Leftovers of an incomplete copy are removed.

    Raises:
        LockedError: another process uses it.
        TieredError: it holds foreign files.
        OSError: the drive refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._directory = TierDirectory(self.path)
        try:
            known_id = store_id_in_manifests(self.path) if read_store_id(self.path) is None else None
            self._identity = StoreIdentity.of(self.path, known_id)
            self._remove_unfinished()
        except BaseException:
            self.close()
            raise
        self._buffer = page_aligned(PIECE_BYTES)

    def close(self) -> None:
        """Give up the directory; the copies stay. Idempotent."""
        self._directory.close()

    @property
    def newest(self) -> int | None:
        """Return the number of the newest copy."""
        return next(iter(newest_first(self.path)), None)

    def prune(self, keep: int) -> None:
        """Remove the oldest copies but ``keep``, at least one. Raises ``OSError``; another call continues."""
        self.keep_only(sorted(newest_first(self.path))[-max(1, keep) :])

    def keep_only(self, numbers: Collection[int]) -> None:
        """Remove all copies but those with some numbers. Raises ``OSError``; another call continues."""
        for number in sorted(set(newest_first(self.path)) - set(numbers)):
            self._remove(number)

    def copy(self, source: GenerationReader, on_piece: Callable[[], None] = lambda: None) -> CopyFigures:
        """Copy a generation and make the copy the current one; return once it survives a power cut.

        Every byte is compared with its checksum when it is read, and again on the drive when it was written. The
        caller keeps the generation from being removed meanwhile. After an error nothing of the copy is left.

        Args:
            on_piece: called after each piece of at most 16 MiB was read, written or compared; an error of it ends the
                copy.

        Returns:
            Its figures. It has the number of the generation, or a larger one if a copy has that number.

        Raises:
            CorruptBlockError: a byte of the generation, or of the copy, is another than was written.
            GenerationError: a part is missing.
            TransferError: a drive refused.
        """
        self._remove_unfinished()
        number = max([source.generation, *(known + 1 for known in numbers_taken([self.path]))])
        folder = generation_folder(self.path, number)
        copied = linked = 0
        try:
            self._identity.mark(folder)
            if read_document(folder.parent) != group_document():  # a power cut may have torn it
                write_document(folder.parent, group_document(), replace=True, durable=True)
            write_document(folder, group_document())
            records = []
            for record in source.manifest.blocks:
                spec = source.spec(record.key)
                if self._link(source, record, folder):
                    linked += array_bytes(spec)
                else:
                    self._write(source, spec, folder, on_piece)
                    copied += array_bytes(spec)
                files = chunk_files(folder / record.key, spec)
                for piece in pieces(spec.nbytes):
                    source.read_piece(record.key, files, piece)
                    on_piece()
                location = os.path.relpath(folder / record.key, self.path)
                records.append(replace(record, location=location))
            # The order that makes it atomic: contents are flushed file by file above, then every document and folder
            # that leads to them, then the manifest, and last the file that names it. A power cut before the manifest
            # leaves a folder without one, which the next start removes; one after it leaves the whole copy.
            list_members(folder, [record.key for record in records])
            sync_tree(folder, self.path)
            write_manifest(self.path, Manifest(number, tuple(records), source.manifest.meta, store=self._identity.id))
        except BaseException as failure:
            # The next start removes files that the drive refuses to delete. A copy that the top file names is whole.
            with contextlib.suppress(OSError, GenerationError):
                if current_generation(self.path) != number:
                    self._remove(number)
            if isinstance(failure, OSError) and not isinstance(failure, TransferError):
                path = str(failure.filename or self.path)
                text = f"generation {source.generation} cannot be copied: {failure.strerror}"
                raise TransferError(text, tier="copies", path=path, errno=failure.errno) from failure
            raise
        return CopyFigures(number, copied, linked)

    def _link(self, source: GenerationReader, record: BlockRecord, folder: Path) -> bool:
        """Link a block in the source's own directory; return False if it is elsewhere, or cannot be linked.

        Such files are never written again. Files of a file tier are not linked, because it counts and reuses them.
        """
        if record.home in source.manifest.paths:
            return False
        spec, target = source.spec(record.key), folder / record.key
        chunk_bytes = array_chunk_bytes(source.place(record.key))
        assert chunk_bytes is not None, record.key
        make_groups(folder, record.key)
        (target / "c").mkdir(parents=True)
        try:
            for file in source.files(record.key):
                os.link(file.path, target / "c" / file.path.name)
        except OSError:  # another file system, or one without hard links
            shutil.rmtree(target)
            return False
        write_document(target, array_document(spec.key, spec.shape, spec.dtype, chunk_bytes))
        return True

    def _write(self, source: GenerationReader, spec: BlockSpec, folder: Path, on_piece: Callable[[], None]) -> None:
        """Write a block as the array ``<folder>/<key>`` and flush its files."""
        files = source.files(spec.key)

        def read(start: int, stop: int) -> torch.Tensor:
            piece = self._buffer[: stop - start]  # one for all: by one thread, each is written before the next is read
            source.read_piece(spec.key, files, (start, stop), piece)
            on_piece()
            return piece

        write_array(folder, spec, read, num_threads=1)

    def _remove_unfinished(self) -> None:
        known = set(newest_first(self.path))
        for number, folder in list(snapshot_folders([self.path])):
            owner = read_owner(folder)  # damaged if the power failed before its flush
            if number not in known and (owner is None or owner.id in (self._identity.id, "")):
                self._remove(number)
        for _, folder in snapshot_folders([self.path]):
            remove_if_empty(folder)

    def _remove(self, number: int) -> None:
        # The manifest first: after a crash half-way, the folder clearly is no generation.
        forget_generation(self.path, number)
        remove_snapshot_folder(generation_folder(self.path, number))
