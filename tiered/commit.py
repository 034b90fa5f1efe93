"""One commit: freezes blocks by links and leases, then writes and checks what it froze.

Blocks in a file tier are frozen by hard links. Other blocks are held by read leases, which a thread gives back one
by one as it writes them; so the work goes on, and waits at most where it would change a block not yet written.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiered.block import BlockSpec, CopyState
from tiered.contents import array_bytes, flush_contents, read_contents, write_contents
from tiered.copies import Block
from tiered.errors import GenerationError, TransferError
from tiered.events import Event
from tiered.grants import Grants
from tiered.lease import NO_THREAD, Lease
from tiered.manifest import JSON, SNAPSHOT_FOLDER, BlockRecord, generation_folder, generation_name
from tiered.movement import Movement, Waiting
from tiered.tiers.directory import write_document
from tiered.tiers.files import files_of
from tiered.zarr_layout import dtype_name, group_document


@dataclass(frozen=True, slots=True)
class _Frozen:
    """One block of a commit: held by a lease, or linked into ``folder`` (then ``version`` tells whether it changed)."""

    block: Block
    folder: Path
    version: int
    checksums: tuple[str, ...] | None
    is_flushed: bool
    lease: Lease | None


class Commit:
    """A commit under way. Thread-safe.

    Attributes:
        generation: its number, one more than the last committed one.
    """

    def __init__(self, movement: Movement, path: Path, generation: int, meta: Mapping[str, JSON]) -> None:
        self.generation = generation
        self.meta = meta
        self.path = path
        self.folder = generation_folder(path, generation)
        self.frozen: list[_Frozen] = []
        self.error: BaseException | None = None
        self.error_was_raised = False
        self._movement = movement
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
        with self._movement.changed:
            self._movement.counters.stall_s["commit"] += time.perf_counter() - start_s
        if not is_set:
            raise TimeoutError(f"generation {self.generation} not done after {timeout_s} s")


def check_meta(meta: Mapping[str, JSON]) -> None:
    """Raise ``GenerationError`` for a ``meta`` that JSON cannot hold."""
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise GenerationError(f"meta of a commit must be JSON: {error}") from error


def freeze(movement: Movement, grants: Grants, commit: Commit) -> None:
    """Hold the present contents of all durable blocks still: afterwards ``commit.frozen`` tells how."""
    with movement.changed:
        blocks = [block for block in movement.blocks.values() if block.spec.durable]
        _check_keys(blocks)
        for block in blocks:
            _settle_home(movement, block)  # all write-backs at once: the drive sees a queue
    commit.folder.mkdir(parents=True)
    write_document(commit.folder.parent, group_document())
    write_document(commit.folder, group_document())
    for block in blocks:
        frozen = _freeze_block(movement, grants, block, commit)
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


def _freeze_block(movement: Movement, grants: Grants, block: Block, commit: Commit) -> _Frozen | None:
    spec = block.spec
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
            home = files_of(block.home.slot)
            return _Frozen(block, folder, block.version, home.checksums, home.is_flushed, None)
        lease = grants.acquire([(spec.key, nearest_addressable(movement, spec.home), "r")], None, None)[0]
        lease.thread_id = NO_THREAD
        return _Frozen(block, commit.folder / spec.key, block.version, None, False, lease)


def nearest_addressable(movement: Movement, home: str) -> str:
    """Return the tier nearest to ``home``, on the fast side, that a lease can be in."""
    names = movement.order[: movement.order.index(home) + 1]
    return next(name for name in reversed(names) if movement.tiers[name].device is not None)


def write_leased(commit: Commit, counted: Any) -> dict[str, BlockRecord]:
    """Write the leased blocks and give each back; ``counted``: the file tier that owns the directory, or None."""
    records = {}
    for frozen in commit.frozen:
        if frozen.lease is None:
            continue
        spec = frozen.block.spec
        if counted is not None:
            counted.count_wear({counted.paths.index(str(commit.path)): array_bytes(spec)})
        checksums = _write_when_there_is_room(commit, spec, frozen.lease.tensor, counted)
        if counted is not None:
            counted.count_snapshot(array_bytes(spec))
        frozen.lease.release()
        records[frozen.block.spec.key] = _record(commit, frozen, checksums)
    return records


def _write_when_there_is_room(commit: Commit, spec: BlockSpec, tensor: torch.Tensor, counted: Any) -> tuple[str, ...]:
    while True:
        try:
            checksums = write_contents(commit.folder, spec, tensor)
        except TransferError as error:
            if counted is None:
                raise
            counted.full.wait(str(commit.path), array_bytes(spec), error)
            shutil.rmtree(commit.folder / spec.key)
        else:
            if counted is not None:
                counted.full.wrote(str(commit.path))
            return checksums


def record_linked(movement: Movement, commit: Commit) -> dict[str, BlockRecord]:
    """Flush the linked files that are not yet, and return their checksums: those of writing them, else read back."""
    linked = [frozen for frozen in commit.frozen if frozen.lease is None]
    flush_contents([(frozen.folder, frozen.block.spec) for frozen in linked if not frozen.is_flushed])
    records = {}
    for frozen in linked:
        checksums = frozen.checksums
        if checksums is None:
            checksums = read_contents(frozen.folder, frozen.block.spec)
        with movement.changed:
            # Else the block was written again meanwhile: then its home files are others than the linked ones.
            slot = frozen.block.home.slot
            if (
                frozen.block.version == frozen.version
                and frozen.block.home.state is CopyState.CLEAN
                and slot is not None
            ):
                home = files_of(slot)
                home.checksums, home.is_flushed = checksums, True
        records[frozen.block.spec.key] = _record(commit, frozen, checksums)
    return records


def _record(commit: Commit, frozen: _Frozen, checksums: tuple[str, ...]) -> BlockRecord:
    spec = frozen.block.spec
    location = os.path.relpath(frozen.folder, commit.path)
    return BlockRecord(spec.key, spec.shape, dtype_name(spec.dtype), spec.home, spec.nbytes, checksums, location)


def tell(movement: Movement, commit: Commit, nbytes: int, start_s: float) -> None:
    """Emit the event of a commit that succeeded."""
    if movement.on_event is not None:
        with movement.changed:
            detail = generation_name(commit.generation)
            movement.on_event(Event("commit", "", "", nbytes, start_s, time.perf_counter(), detail))
