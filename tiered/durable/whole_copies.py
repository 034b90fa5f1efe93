"""Complete copies of committed generations. A copy has all bytes of a generation, from all drives, in one directory.

The directory has the format of a directory of generations, so ``GenerationReader`` reads and checks the copies. A
copy's manifest is written last. A copy without a manifest is incomplete, so the next call to ``copy`` removes it.
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
    write_manifest,
)
from tiered.durable.ownership import (
    StoreIdentity,
    read_owner,
    remove_snapshot_folder,
    snapshot_folders,
    used_numbers,
)
from tiered.durable.reader import GenerationReader
from tiered.durable.zarr_folder import write_members
from tiered.errors import GenerationError, TransferError
from tiered.file_io import PIECE_BYTES, pieces
from tiered.tiers.directory import TierDirectory, make_groups, read_document, write_document
from tiered.tiers.layout import array_document, group_document


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """Generation number and byte counts of a copy.

    Attributes:
        copied_bytes: size of the written files.
        linked_bytes: size of the files that were hard-linked, because the source is on the same drive.
    """

    generation: int
    copied_bytes: int
    linked_bytes: int


class WholeCopies:
    """Complete copies in one directory, which is locked until ``close``. Not thread-safe. Uses 20 MiB of memory.

    Args:
        path: directory of the copies, created if missing. Incomplete copies are removed.

    Raises:
        LockedError: another process uses the directory.
        TieredError: the directory contains files of other programs.
        OSError: the drive returned an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._directory = TierDirectory(self.path)
        try:
            self._identity = StoreIdentity.of(self.path)
            self._remove_unfinished()
        except BaseException:
            self.close()
            raise
        self._buffer = page_aligned(PIECE_BYTES)

    def close(self) -> None:
        """Release the directory and keep the copies. Idempotent."""
        self._directory.close()

    def keep_only(self, generations: Collection[int]) -> None:
        """Remove all copies except ``generations``. After an ``OSError``, the next ``copy`` removes the rest."""
        for generation in sorted(set(newest_first(self.path)) - set(generations)):
            self._remove(generation)

    def copy(self, source: GenerationReader, on_piece: Callable[[], None] = lambda: None) -> CopyFigures:
        """Copy a generation and make the copy current. When the method returns, the copy survives a power cut.

        Verifies checksums when reading, and again after writing to the drive. During the call, the caller must prevent
        the removal of the generation. After an error, the incomplete copy is removed.

        Args:
            on_piece: called after each piece (at most 16 MiB) is read or compared. An exception aborts the copy.

        Returns:
            Number and sizes of the copy. The number exceeds all earlier numbers here, and is at least the source's.

        Raises:
            CorruptBlockError: the generation or the copy is damaged.
            GenerationError: a part is missing.
            TransferError: a drive returned an error.
        """
        self._remove_unfinished()
        generation = max([source.generation, *(number + 1 for number in used_numbers([self.path]))])
        folder = generation_folder(self.path, generation)
        copied_bytes = linked_bytes = 0
        try:
            self._identity.mark(folder)
            if read_document(folder.parent) != group_document():  # A power cut may have damaged the document.
                write_document(folder.parent, group_document(), replace=True, durable=True)
            write_document(folder, group_document())
            records = []
            for record in source.manifest.blocks:
                spec = source.spec(record.key)
                if self._link(source, record, folder):
                    linked_bytes += array_bytes(spec)
                else:
                    self._write(source, spec, folder, on_piece)
                    copied_bytes += array_bytes(spec)
                files = chunk_files(folder / record.key, spec)
                for piece in pieces(spec.nbytes):
                    source.read_piece(record.key, files, piece)
                    on_piece()
                location = os.path.relpath(folder / record.key, self.path)
                records.append(replace(record, location=location))
            # This order makes the copy atomic: first the contents (flushed above, file by file), then all documents and
            # folders, then the manifest, then the top-level one. If the power fails before the manifest is written, the
            # next ``WholeCopies`` removes the folder. If the power fails later, the copy is complete.
            write_members(folder, [record.key for record in records])
            sync_tree(folder, self.path)
            manifest = Manifest(generation, tuple(records), source.manifest.meta, store=self._identity.id)
            write_manifest(self.path, manifest)
        except BaseException as failure:
            # The next copy removes files that cannot be deleted now. If the top-level ``MANIFEST.json`` names this
            # copy, the copy is complete.
            with contextlib.suppress(OSError, GenerationError):
                if current_generation(self.path) != generation:
                    self._remove(generation)
            if isinstance(failure, OSError) and not isinstance(failure, TransferError):
                path = str(failure.filename or self.path)
                text = f"generation {source.generation} cannot be copied: {failure.strerror}"
                raise TransferError(text, tier="copies", path=path, errno=failure.errno) from failure
            raise
        return CopyFigures(generation, copied_bytes, linked_bytes)

    def _link(self, source: GenerationReader, record: BlockRecord, folder: Path) -> bool:
        """Hard-link a block from the source's directory. Return False if the block is elsewhere or linking fails.

        No program writes these files again, so linking is safe. A file tier reuses its files, so they are not linked.
        """
        if record.home in source.manifest.paths:
            return False
        spec, array_folder = source.spec(record.key), folder / record.key
        chunk_bytes = array_chunk_bytes(source.place(record.key))
        assert chunk_bytes is not None, record.key
        make_groups(folder, record.key)
        (array_folder / "c").mkdir(parents=True)
        try:
            for file in source.files(record.key):
                os.link(file.path, array_folder / "c" / file.path.name)
        except OSError:  # The source is on another file system, or the file system does not support hard links.
            shutil.rmtree(array_folder)
            return False
        write_document(array_folder, array_document(spec.key, spec.shape, spec.dtype, chunk_bytes))
        return True

    def _write(self, source: GenerationReader, spec: BlockSpec, folder: Path, on_piece: Callable[[], None]) -> None:
        """Write a block as the array ``<folder>/<key>`` and flush its files."""
        files = source.files(spec.key)

        def read(start: int, stop: int) -> torch.Tensor:
            piece = self._buffer[: stop - start]  # One buffer is enough: pieces are processed one at a time.
            source.read_piece(spec.key, files, (start, stop), piece)
            on_piece()
            return piece

        write_array(folder, spec, read, num_threads=1)

    def _remove_unfinished(self) -> None:
        generations = set(newest_first(self.path))
        for generation, folder in list(snapshot_folders([self.path])):
            owner = read_owner(folder)  # If the power failed before the note was flushed, the note may be damaged.
            if generation not in generations and (owner is None or owner.id in (self._identity.id, "")):
                self._remove(generation)

    def _remove(self, generation: int) -> None:
        # Delete the manifest first, so that after a crash the folder is not a generation.
        forget_generation(self.path, generation)
        remove_snapshot_folder(generation_folder(self.path, generation))
