"""Generations of one store: its directory, numbers, commits one after the other, and opening one again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from tiered.block import BlockSpec, CopyState
from tiered.checksums import pieces
from tiered.commit import (
    Commit,
    check_meta,
    freeze,
    nearest_addressable,
    record_linked,
    tell,
    write_leased,
)
from tiered.contents import byte_view, place_in, read_contents, sync_tree
from tiered.errors import CorruptBlockError, GenerationError, TransferError
from tiered.grants import Grants
from tiered.manifest import (
    JSON,
    MANIFEST_NAME,
    SNAPSHOT_FOLDER,
    BlockRecord,
    Manifest,
    current_generation,
    generation_folder,
    generation_name,
    list_generations,
    read_manifest,
    remove_generation,
    unfinished_generations,
    write_manifest,
)
from tiered.movement import Movement
from tiered.tiers.directory import TierDirectory
from tiered.tiers.files import files_of
from tiered.zarr_layout import dtype_from_name

#: ``TieredStore.register``.
Register = Callable[..., BlockSpec]


class Generations:
    """Commits and opens generations. At most one commit is under way.

    Args:
        path: directory of the generations; None: the first path of a file tier, or nothing to commit to.
        keep: how many of the last generations a commit leaves, at least 1.
    """

    def __init__(self, movement: Movement, grants: Grants, path: str | None, keep: int = 2) -> None:
        self._movement = movement
        self._grants = grants
        self._tiers: list[Any] = list(movement.tiers.values())
        # Tiers that freeze blocks by links; their methods are those of NvmeTier.
        self._file_tiers = [tier for tier in self._tiers if hasattr(tier, "snapshot")]
        self.path = path if path is not None else next((tier.paths[0] for tier in self._file_tiers), None)
        self._keep = max(1, keep)
        self._committing = threading.Lock()
        self._last: Commit | None = None  # under way or ended
        self._directory: TierDirectory | None = None  # owns ``path`` where no tier does

    # -- committing --------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, JSON]) -> Commit:
        """Freeze the present contents of all durable blocks, and let a thread make them the next generation.

        First waits for the commit before this one. Blocks that hold nothing are left out.

        Raises:
            GenerationError: the store has no directory, or ``meta`` is not JSON. LeaseError: the caller holds a
                write lease. TransferError: a write-back failed, or the commit before failed and nobody was told.
        """
        check_meta(meta)
        with self._committing:
            if self._last is not None:
                self._last.wait_before_next()
            path = self._own_directory()
            self._remove_unfinished(path)
            commit = Commit(self._movement, path, self._next_number(path), meta)
            try:
                freeze(self._movement, self._grants, commit)
            except BaseException as failure:
                commit.end_staging()
                with contextlib.suppress(OSError):  # the next commit removes what the drive keeps now
                    self._remove(path, commit.generation)
                if (told := _told(failure, commit)) is not failure:
                    raise told from failure
                raise
            self._last = commit
            threading.Thread(target=self._finish, args=(commit,), name="tiered-commit").start()
            return commit

    def _finish(self, commit: Commit) -> None:
        """The commit's thread: write what is leased, check and flush everything, flip, drop old generations."""
        start_s = time.perf_counter()
        is_committed = False
        error: BaseException | None = None
        try:
            owner = next((tier for tier in self._file_tiers if str(commit.path) in tier.paths), None)
            records = write_leased(commit, owner)
            commit.end_staging()
            records |= record_linked(self._movement, commit)
            for tier in self._file_tiers:
                tier.sync_snapshot(generation_name(commit.generation))
            sync_tree(commit.folder, commit.path)
            blocks = tuple(records[frozen.block.spec.key] for frozen in commit.frozen)
            write_manifest(commit.path, Manifest(commit.generation, blocks, commit.meta))
            is_committed = True
            self._drop_old(commit)
            tell(self._movement, commit, sum(record.nbytes for record in blocks), start_s)
        except BaseException as failure:
            error = _told(failure, commit)
            commit.end_staging()
            if not is_committed:
                with contextlib.suppress(OSError):  # the next commit removes what the drive keeps now
                    self._remove(commit.path, commit.generation)
        finally:
            commit.frozen.clear()
            commit.end(error)

    def join(self) -> None:
        """Wait for the commit under way; warns of a failure that nobody was told."""
        with self._committing:
            if self._last is not None:
                self._last.join()

    def close(self) -> None:
        """Give up the directory; the files stay. Idempotent."""
        if self._directory is not None:
            self._directory.close()

    # -- the directory -----------------------------------------------------------------------------------------

    def _own_directory(self) -> Path:
        """Return the directory of generations; where no file tier owns it, lock it for this store."""
        if self.path is None:
            raise GenerationError("this store has no directory for generations: pass path=..., or give it an NvmeTier")
        path = Path(os.path.abspath(self.path))
        if self._directory is None and not any(str(path) in tier.paths for tier in self._file_tiers):
            self._directory = TierDirectory(path)
            while self._directory.drop_largest():
                pass  # files that a file tier once kept for reuse: nobody takes them now
        return path

    def _next_number(self, path: Path) -> int:
        """Return the next number; a file tier that also served another directory may be further on."""
        others = [number for tier in self._file_tiers for number in list_generations(tier.paths[0])]
        return 1 + max([current_generation(path) or 0, *others])

    def _drop_old(self, commit: Commit) -> None:
        known = [number for number in list_generations(commit.path) if number <= commit.generation]
        for number in known[: -self._keep]:
            self._remove(commit.path, number)

    def _remove_unfinished(self, path: Path) -> None:
        """Remove what a crash left half-written, on every path of every file tier too."""
        left = set(unfinished_generations(path))
        for tier in self._file_tiers:
            known = {*list_generations(path), *list_generations(tier.paths[0])} - left
            for root in tier.paths:
                snap = Path(root, SNAPSHOT_FOLDER)
                found = {int(f.name) for f in snap.iterdir() if f.name.isdigit()} if snap.is_dir() else set()
                left |= found - known
        for number in sorted(left):
            self._remove(path, number)

    def _remove(self, path: Path, generation: int) -> None:
        # The manifest first: a crash half-way leaves a generation that is plainly not there.
        (generation_folder(path, generation) / MANIFEST_NAME).unlink(missing_ok=True)
        for tier in self._file_tiers:
            tier.drop_snapshot(generation_name(generation))
        remove_generation(path, generation)

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self, generation: int | None, register: Register) -> None:
        """Register the blocks of a committed generation in an empty store, with verified contents.

        Raises:
            GenerationError: there is no such generation, or a part is missing. CorruptBlockError: damaged bytes.
            CapacityError: the tiers are too small.
        """
        assert self.path is not None
        manifest = read_manifest(self.path, generation)  # before anything is made: a wrong path stays untouched
        path = self._own_directory()
        self._remove_unfinished(path)
        for record in manifest.blocks:
            self._open_block(path, manifest.generation, record, register)

    def _open_block(self, path: Path, generation: int, record: BlockRecord, register: Register) -> None:
        home = record.home if record.home in self._movement.tiers else self._movement.order[-1]
        try:
            dtype = dtype_from_name(record.dtype)
        except ValueError as error:
            raise GenerationError(f"block '{record.key}' of generation {generation}: {error}") from error
        spec = register(record.key, record.shape, dtype, home=home)
        if spec.nbytes != record.nbytes:
            raise GenerationError(f"block '{spec.key}': {record.nbytes} bytes do not make {spec.shape} of {spec.dtype}")
        folder = Path(os.path.normpath(path / record.location))
        tier: Any = self._movement.tiers[home]
        name = generation_name(generation)
        if hasattr(tier, "adopt") and folder == Path(tier.paths[0], SNAPSHOT_FOLDER, name, spec.key):
            _check(record, generation, folder, spec, read_contents(folder, spec))
            self._adopt(tier, spec, name, record.xxh3_64)
        else:
            self._read_into_place(spec, folder, generation, record)

    def _adopt(self, tier: Any, spec: BlockSpec, name: str, checksums: tuple[str, ...]) -> None:
        """Take the snapshot's files for the home slot: no byte moves."""
        movement = self._movement
        with movement.changed:
            block = movement.blocks[spec.key]
            old_bytes = block.home.slot_bytes
            tier.adopt(block.home.slot, name)
            movement.home_bytes[spec.home] += block.home.slot_bytes - old_bytes
            block.home.move(CopyState.FILLING)
            block.home.move(CopyState.CLEAN)
            assert block.home.slot is not None
            home = files_of(block.home.slot)
            home.checksums, home.is_flushed = checksums, True

    def _read_into_place(self, spec: BlockSpec, folder: Path, generation: int, record: BlockRecord) -> None:
        tier = nearest_addressable(self._movement, spec.home)
        with self._grants.acquire([(spec.key, tier, "w")], None, None)[0] as lease:
            target = byte_view(lease.tensor)

            def put(offset: int, piece: bytearray) -> None:
                target[offset : offset + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))

            _check(record, generation, folder, spec, read_contents(folder, spec, put))


def _told(failure: BaseException, commit: Commit) -> BaseException:
    """Return a failure of a commit, the system's own as ``TransferError``."""
    if not isinstance(failure, OSError) or isinstance(failure, TransferError):
        return failure
    text = f"generation {commit.generation} cannot be written: {failure.strerror}"
    path = str(failure.filename or commit.path)
    return TransferError(text, tier="generations", path=path, errno=failure.errno)


def _check(record: BlockRecord, generation: int, folder: Path, spec: BlockSpec, found: tuple[str, ...]) -> None:
    """Raise ``CorruptBlockError`` naming the first piece whose checksum differs."""
    if found == record.xxh3_64:
        return
    for (start, stop), expected, actual in zip_longest(pieces(record.nbytes), record.xxh3_64, found):
        if expected != actual:
            place = place_in(folder, spec, start, stop)
            expected, actual = expected or "none", actual or "none"
            raise CorruptBlockError(record.key, expected, actual, place=place, generation=generation)
