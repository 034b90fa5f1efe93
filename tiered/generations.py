"""Generations: a commit freezes the present contents, writes them beside the work, and flips to them at once.

Blocks in a file tier are frozen by hard links. Other blocks are held by read leases, which a thread gives back one
by one as it writes them; so the work goes on, and waits at most where it would change a block not yet written.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiered.block import BlockSpec, CopyState
from tiered.contents import byte_view, read_contents, sync_tree, write_contents
from tiered.copies import Block
from tiered.errors import CorruptBlockError, GenerationError
from tiered.events import Event
from tiered.lease import NO_THREAD, Lease
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
from tiered.movement import Movement, Waiting
from tiered.tiers.directory import TierDirectory, write_document
from tiered.zarr_layout import dtype_from_name, dtype_name, group_document

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["JSON", "Commit", "commit_generation", "open_generation"]


@dataclass(frozen=True, slots=True)
class _Frozen:
    """One block of a commit: held by a lease, or linked into ``folder`` (then ``version`` tells whether it changed)."""

    block: Block
    folder: Path
    version: int
    checksum: str | None
    lease: Lease | None


class Commit:
    """A commit under way. Thread-safe.

    Attributes:
        generation: its number, one more than the last committed one.
    """

    def __init__(self, store: TieredStore, path: Path, generation: int, meta: Mapping[str, JSON]) -> None:
        self.generation = generation
        self.meta = meta
        self.path = path
        self.folder = generation_folder(path, generation)
        self.frozen: list[_Frozen] = []
        self.error: BaseException | None = None
        self.error_was_raised = False
        self._store = store
        self._staged = threading.Event()
        self._ended = threading.Event()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until no block is held any more, so that every block can be changed without waiting.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
        """
        self._wait_for(self._staged, timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the generation is the current one and survives a power cut.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds. TransferError: the drive refused; the generation before
                is still the current one.
        """
        self._wait_for(self._ended, timeout_s)
        if self.error is not None:
            self.error_was_raised = True
            raise self.error

    def wait_before_next(self) -> None:
        """Wait for the end; raises what went wrong if nobody was told."""
        if self.error_was_raised:
            return
        self.wait()

    def join(self) -> None:
        """Wait for the end without raising; warn of a failure that nobody was told."""
        self._wait_for(self._ended, None)
        if self.error is not None and not self.error_was_raised:
            self.error_was_raised = True
            warnings.warn(f"generation {self.generation} was not committed: {self.error}", RuntimeWarning, stacklevel=3)

    def end_staging(self) -> None:
        """Give back all leases that are still held."""
        for frozen in self.frozen:
            if frozen.lease is not None and not frozen.lease.is_released:
                frozen.lease.release()
        self._staged.set()

    def end(self, error: BaseException | None) -> None:
        """Mark the end, well or badly."""
        self.error = error
        self._ended.set()

    def _wait_for(self, event: threading.Event, timeout_s: float | None) -> None:
        if event.is_set():
            return
        start_s = time.perf_counter()
        is_set = event.wait(timeout_s)
        movement = self._store._movement
        with movement.changed:
            movement.counters.stall_s["commit"] += time.perf_counter() - start_s
        if not is_set:
            raise TimeoutError(f"generation {self.generation} not done after {timeout_s} s")


# -- committing ------------------------------------------------------------------------------------------------


def commit_generation(store: TieredStore, meta: Mapping[str, JSON]) -> Commit:
    """Freeze the present contents of all durable blocks, and let a thread make them the next generation.

    At most one commit is under way: this one first waits for the one before. Blocks that hold nothing are left out.

    Raises:
        GenerationError: the store has no directory, or ``meta`` is not JSON. TransferError: a write-back failed, or
            the commit before failed and nobody was told. LeaseError: the caller holds a write lease.
    """
    _check_meta(meta)
    with store._committing:
        if store._commit is not None:
            store._commit.wait_before_next()
        path = own_directory(store)
        _remove_unfinished(store, path)
        commit = Commit(store, path, _next_generation(store, path), meta)
        try:
            _freeze(store, commit)
        except BaseException:
            commit.end_staging()
            _remove(store, path, commit.generation)
            raise
        store._commit = commit
        threading.Thread(target=_finish, args=(store, commit), name="tiered-commit").start()
        return commit


def _check_meta(meta: Mapping[str, JSON]) -> None:
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise GenerationError(f"meta of a commit must be JSON: {error}") from error


def own_directory(store: TieredStore) -> Path:
    """Return the directory of generations; a store without a file tier there locks it for itself.

    Raises:
        GenerationError: the store has none. LockedError, TieredError: it is somebody else's.
    """
    if store.path is None:
        raise GenerationError("this store has no directory for generations: pass path=..., or give it an NvmeTier")
    path = Path(os.path.abspath(store.path))
    if store._directory is None and not any(str(path) in getattr(t, "paths", ()) for t in _tiers(store)):
        store._directory = TierDirectory(path)
        while store._directory.drop_largest():
            pass  # files kept for reuse by a file tier that was here once: nobody takes them now
    return path


def _tiers(store: TieredStore) -> list[Any]:
    return list(store._movement.tiers.values())


def _file_tiers(store: TieredStore) -> list[Any]:
    """Return the tiers that freeze blocks by links. Their methods are those of ``NvmeTier``."""
    return [tier for tier in _tiers(store) if hasattr(tier, "snapshot")]


def _next_generation(store: TieredStore, path: Path) -> int:
    """Return the next number; a file tier that also served another directory of generations may be further on."""
    others = [number for tier in _file_tiers(store) for number in list_generations(tier.paths[0])]
    return 1 + max([current_generation(path) or 0, *others])


def _freeze(store: TieredStore, commit: Commit) -> None:
    movement = store._movement
    with movement.changed:
        blocks = [block for block in movement.blocks.values() if block.spec.durable]
        _check_keys(blocks)
        for block in blocks:
            _settle_home(movement, block)  # all write-backs at once: the drive sees a queue
    commit.folder.mkdir(parents=True)
    write_document(commit.folder.parent, group_document())
    write_document(commit.folder, group_document())
    for block in blocks:
        frozen = _freeze_block(store, block, commit)
        if frozen is not None:
            commit.frozen.append(frozen)


def _check_keys(blocks: list[Block]) -> None:
    keys = {block.spec.key for block in blocks}
    for key in keys:
        parts = key.split("/")
        outer = next((o for end in range(1, len(parts)) if (o := "/".join(parts[:end])) in keys), None)
        if outer is not None:
            raise GenerationError(f"block '{key}' lies inside block '{outer}' and cannot be committed: rename one")


def _settle_home(movement: Movement, block: Block) -> Waiting | None:
    """Take the next step towards the newest bytes at home; return what to wait for, None when they are there."""
    if block.writer is not None:
        return Waiting("lease")
    newest = block.newest()
    if newest is not None:
        return movement.write_back(block, newest) or Waiting("drain", newest.transfer)
    return Waiting("drain", block.home.transfer) if block.home.state is CopyState.FILLING else None


def _freeze_block(store: TieredStore, block: Block, commit: Commit) -> _Frozen | None:
    movement, grants, spec = store._movement, store._grants, block.spec
    with movement.changed:
        while (waiting := _settle_home(movement, block)) is not None:
            grants.wait_for_locked(waiting, block)
        if movement.blocks.get(spec.key) is not block or block.home.state is not CopyState.CLEAN:
            return None  # unregistered meanwhile; or never written, or discarded
        tier: Any = movement.tiers[spec.home]
        if hasattr(tier, "snapshot"):
            assert block.home.slot is not None
            name = generation_name(commit.generation)
            tier.snapshot(block.home.slot, name)
            folder = Path(tier.paths[0], SNAPSHOT_FOLDER, name, spec.key)
            return _Frozen(block, folder, block.version, block.checksum, None)
        lease = grants.acquire([(spec.key, _addressable(movement, spec.home), "r")], None, None)[0]
        lease.thread_id = NO_THREAD
        return _Frozen(block, commit.folder / spec.key, block.version, None, lease)


def _addressable(movement: Movement, home: str) -> str:
    """Return the tier nearest to ``home``, on the fast side, that a lease can be in."""
    names = movement.order[: movement.order.index(home) + 1]
    return next(name for name in reversed(names) if movement.tiers[name].device is not None)


def _finish(store: TieredStore, commit: Commit) -> None:
    """The commit's thread: write what is leased, check and flush everything, flip, drop old generations."""
    start_s = time.perf_counter()
    is_committed = False
    error: BaseException | None = None
    try:
        records = _write_leased(store, commit)
        commit.end_staging()
        records |= _record_linked(store, commit)
        for tier in _file_tiers(store):
            tier.sync_snapshot(generation_name(commit.generation))
        sync_tree(commit.folder, commit.path)
        blocks = tuple(records[frozen.block.spec.key] for frozen in commit.frozen)
        write_manifest(commit.path, Manifest(commit.generation, blocks, commit.meta))
        is_committed = True
        _drop_old(store, commit)
        _tell(store, commit, sum(record.nbytes for record in blocks), start_s)
    except BaseException as failure:
        error = failure
        commit.end_staging()
        if not is_committed:
            _remove(store, commit.path, commit.generation)
    finally:
        commit.frozen.clear()
        commit.end(error)


def _tell(store: TieredStore, commit: Commit, nbytes: int, start_s: float) -> None:
    movement = store._movement
    if movement.on_event is not None:
        with movement.changed:
            detail = generation_name(commit.generation)
            movement.on_event(Event("commit", "", "", nbytes, start_s, time.perf_counter(), detail))


def _write_leased(store: TieredStore, commit: Commit) -> dict[str, BlockRecord]:
    counted = next((t for t in _file_tiers(store) if str(commit.path) in t.paths), None)
    records = {}
    for frozen in commit.frozen:
        if frozen.lease is None:
            continue
        text, file_bytes = write_contents(commit.folder, frozen.block.spec, frozen.lease.tensor)
        if counted is not None:
            counted.count_snapshot(file_bytes)
        frozen.lease.release()
        records[frozen.block.spec.key] = _record(commit, frozen, text)
    return records


def _record_linked(store: TieredStore, commit: Commit) -> dict[str, BlockRecord]:
    """Flush the linked files and add up their checksums; a block unchanged since the last time has both."""
    records = {}
    for frozen in commit.frozen:
        if frozen.lease is not None:
            continue
        text = frozen.checksum
        if text is None:
            text = read_contents(frozen.folder, frozen.block.spec, flush=True)
            with store._movement.changed:
                if frozen.block.version == frozen.version and frozen.block.home.state is CopyState.CLEAN:
                    frozen.block.checksum = text
        records[frozen.block.spec.key] = _record(commit, frozen, text)
    return records


def _record(commit: Commit, frozen: _Frozen, text: str) -> BlockRecord:
    spec = frozen.block.spec
    location = os.path.relpath(frozen.folder, commit.path)
    return BlockRecord(spec.key, spec.shape, dtype_name(spec.dtype), spec.home, spec.nbytes, text, location)


# -- removing --------------------------------------------------------------------------------------------------


def _drop_old(store: TieredStore, commit: Commit) -> None:
    known = [number for number in list_generations(commit.path) if number <= commit.generation]
    for number in known[: -max(1, store.keep_generations)]:
        _remove(store, commit.path, number)


def _remove_unfinished(store: TieredStore, path: Path) -> None:
    """Remove what a crash left half-written, on every path of every file tier too."""
    left = set(unfinished_generations(path))
    for tier in _file_tiers(store):
        known = {*list_generations(path), *list_generations(tier.paths[0])} - left
        for root in tier.paths:
            snap = Path(root, SNAPSHOT_FOLDER)
            found = {int(f.name) for f in snap.iterdir() if f.name.isdigit()} if snap.is_dir() else set()
            left |= found - known
    for number in sorted(left):
        _remove(store, path, number)


def _remove(store: TieredStore, path: Path, generation: int) -> None:
    # The manifest first: a crash half-way leaves a generation that is plainly not there.
    (generation_folder(path, generation) / MANIFEST_NAME).unlink(missing_ok=True)
    for tier in _file_tiers(store):
        tier.drop_snapshot(generation_name(generation))
    remove_generation(path, generation)


# -- opening ---------------------------------------------------------------------------------------------------


def open_generation(store: TieredStore, path: str, generation: int | None) -> None:
    """Register the blocks of a committed generation in an empty store, with verified contents.

    Raises:
        GenerationError: there is no such generation, or a part of it is missing. CorruptBlockError: damaged bytes.
        CapacityError: the tiers are too small.
    """
    directory = own_directory(store)
    manifest = read_manifest(path, generation)  # before anything is removed: a wrong path stays untouched
    _remove_unfinished(store, directory)
    for record in manifest.blocks:
        _open_block(store, directory, manifest.generation, record)


def _open_block(store: TieredStore, path: Path, generation: int, record: BlockRecord) -> None:
    movement = store._movement
    home = record.home if record.home in movement.tiers else movement.order[-1]
    try:
        dtype = dtype_from_name(record.dtype)
    except ValueError as error:
        raise GenerationError(f"block '{record.key}' of generation {generation}: {error}") from error
    spec = store.register(record.key, record.shape, dtype, home=home)
    if spec.nbytes != record.nbytes:
        raise GenerationError(f"block '{record.key}': {record.nbytes} bytes do not make {spec.shape} of {spec.dtype}")
    folder = Path(os.path.normpath(path / record.location))
    name = generation_name(generation)
    tier: Any = movement.tiers[home]
    if hasattr(tier, "adopt") and folder == Path(tier.paths[0], SNAPSHOT_FOLDER, name, record.key):
        _check(record, generation, folder, read_contents(folder, spec))
        block = movement.blocks[record.key]
        with movement.changed:
            old_bytes = block.home.slot_bytes
            tier.adopt(block.home.slot, name)
            movement.home_bytes[home] += block.home.slot_bytes - old_bytes
            block.home.move(CopyState.FILLING)
            block.home.move(CopyState.CLEAN)
            block.checksum = record.xxh3_64
        return
    _read_into_place(store, spec, folder, generation, record)


def _read_into_place(store: TieredStore, spec: BlockSpec, folder: Path, generation: int, record: BlockRecord) -> None:
    with store.acquire(spec.key, _addressable(store._movement, spec.home), "w") as lease:
        target = byte_view(lease.tensor)

        def put(offset: int, piece: bytearray) -> None:
            target[offset : offset + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))

        _check(record, generation, folder, read_contents(folder, spec, put))


def _check(record: BlockRecord, generation: int, folder: Path, found: str) -> None:
    if found != record.xxh3_64:
        raise CorruptBlockError(record.key, generation, record.xxh3_64, found, str(folder))
