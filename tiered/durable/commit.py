"""A commit. It freezes blocks with hard links and leases, then writes the leased blocks and checks the linked ones.

Hard links freeze the blocks of a file tier. Read leases freeze other blocks. A thread writes the leased blocks and
releases the leases one by one. The caller continues, and waits only if it changes a block that is not written yet.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tiered.block import BlockSpec, CopyState
from tiered.durable.arrays import array_bytes, chunk_files, contents_of, flush_arrays, read_array, write_array
from tiered.durable.manifest import JSON, SNAPSHOT_FOLDER, BlockRecord, generation_folder, generation_name
from tiered.durable.ownership import StoreIdentity
from tiered.errors import GenerationError
from tiered.events import Event
from tiered.leasing import Leasing
from tiered.movement import Movement
from tiered.records import NO_THREAD, Block, Lease
from tiered.tiers.directory import write_document
from tiered.tiers.health import FullDrives
from tiered.tiers.layout import dtype_name, files_of, group_document
from tiered.tiers.snapshots import DurableTier
from tiered.transfer import WaitReason
from tiered.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """Sizes and durations of a commit.

    Attributes:
        written_bytes: size of the files that the commit wrote.
        linked_bytes: size of the files that the commit only linked.
        freeze_s: seconds spent in the call to ``TieredStore.commit``.
        seconds: seconds from the start of that call to the end of the commit.
    """

    nbytes: int
    written_bytes: int
    linked_bytes: int
    freeze_s: float
    seconds: float


class Commit:
    """A commit in progress. Thread-safe.

    Attributes:
        generation: number of the new generation, higher than all existing numbers.
        num_bytes: total size of all blocks. 0 until all blocks are frozen.
        done_bytes: total size of the blocks that are already written, or linked and checked.
    """

    def __init__(self, movement: Movement, generation: int) -> None:
        self.generation = generation
        self.num_bytes = self.done_bytes = 0
        self.error: BaseException | None = None
        self._error_was_raised = False
        self._movement = movement
        self._figures: CommitFigures | None = None
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether the commit has succeeded or failed. If so, ``wait`` does not block."""
        return self._ended.is_set()

    @property
    def figures(self) -> CommitFigures:
        """Sizes and durations of the commit, available after ``wait`` has returned."""
        assert self._figures is not None, f"generation {self.generation} is not committed"
        return self._figures

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the new generation is current and survives a power cut.

        Raises:
            TimeoutError: the commit did not end within ``timeout_s`` seconds.
            TransferError: the drive returned an error. Afterwards, either the previous generation is still the newest,
                or the new generation is complete.
        """
        self._wait_for_end(timeout_s)
        if self.error is not None:
            self._error_was_raised = True
            raise self.error

    def wait_before_next(self) -> None:
        """Wait until the commit ends. Raise its error unless ``wait`` has already raised it."""
        if not self._error_was_raised:
            self.wait()

    def join(self) -> None:
        """Wait until the commit ends. If it failed and no call has raised its error, warn instead of raising."""
        self._wait_for_end(None)
        if self.error is not None and not self._error_was_raised:
            self._error_was_raised = True
            warnings.warn(f"generation {self.generation} was not committed: {self.error}", RuntimeWarning, stacklevel=3)

    def count(self, nbytes: int) -> None:
        """Add bytes to ``done_bytes``. The commit's thread calls this."""
        self.done_bytes += nbytes

    def end(self, error: BaseException | None, figures: CommitFigures | None) -> None:
        """Mark the commit as succeeded or failed. The commit's thread calls this once."""
        self.error, self._figures = error, figures
        self._ended.set()

    def _wait_for_end(self, timeout_s: float | None) -> None:
        if self._ended.is_set():
            return
        start_s = time.perf_counter()
        is_set = self._ended.wait(timeout_s)
        with self._movement.changed:
            self._movement.counters.stall_s["commit"] += time.perf_counter() - start_s
        if not is_set:
            raise TimeoutError(f"generation {self.generation} not done after {timeout_s} s")


@dataclass(frozen=True, slots=True)
class _FrozenCopy:
    """Frozen contents of one block. A lease protects them, or their files are linked into ``folder``.

    Attributes:
        version: the block's version when it was frozen, to detect later changes.
        is_fetched: whether the lease had to fetch the copy.
    """

    block: Block
    folder: Path
    version: int
    checksums: tuple[str, ...] | None
    is_flushed: bool
    lease: Lease | None
    linked_bytes: int = 0
    is_fetched: bool = False


class FrozenBlocks:
    """Frozen contents of all durable blocks, to be written or linked into a generation's folders.

    ``has_blocking_writes`` and ``freeze`` run in the caller's thread, and ``write`` runs in the commit's thread.

    Args:
        full_drives: rule for writes while the drive of the store's directory is full.
        owner_tier: tier that owns the store's directory and counts the bytes written there, or None.
    """

    def __init__(
        self,
        movement: Movement,
        leasing: Leasing,
        identity: StoreIdentity,
        generation: int,
        full_drives: FullDrives,
        owner_tier: DurableTier | None,
    ) -> None:
        self.folder = generation_folder(identity.path, generation)
        self._movement = movement
        self._leasing = leasing
        self._identity = identity
        self._name = generation_name(generation)
        self._full_drives = full_drives
        self._owner_tier = owner_tier
        self._copies: list[_FrozenCopy] = []
        self._start_s = self._freeze_end_s = time.perf_counter()

    # -- in the caller's thread --------------------------------------------------------------------------------

    def has_blocking_writes(self) -> bool:
        """Return whether ``freeze`` itself will write blocks, because a home is neither addressable nor a file tier."""
        movement = self._movement
        with movement.changed:
            homes = {block.spec.home for block in movement.blocks.values() if block.spec.durable}
        return any(movement.tiers[home].device is None and home not in movement.durable_tiers for home in homes)

    def freeze(self) -> None:
        """Freeze the current contents of all durable blocks.

        Blocks that must pass through a faster tier are written immediately, one at a time, because that tier may not
        hold all of them.
        """
        with self._movement.changed:
            blocks = [block for block in self._movement.blocks.values() if block.spec.durable]
            _check_keys(blocks)
            for block in blocks:
                self._advance_write_back(block)  # Start all write-backs first, to keep the drive's queue full.
        # Write the ownership notes before any link. If this process crashes, the notes show that this store owns the
        # files.
        for tier in self._movement.durable_tiers.values():
            tier.full.retry(tier.paths[0], PAGE_BYTES, partial(tier.snapshots.mark, self._name, self._identity))
        specs = [block.spec for block in blocks if block.spec.home not in self._movement.durable_tiers]
        self._full_drives.retry(str(self._identity.path), PAGE_BYTES + sum(map(array_bytes, specs)), self._make_folder)
        leased_bytes = 0
        for block in blocks:
            copy = self._freeze_block(block)
            if copy is None:
                continue
            if (lease := copy.lease) is not None:
                leased_bytes += array_bytes(block.spec)
                if lease.tier != block.spec.home:
                    with lease:
                        copy = replace(copy, checksums=self._write(copy, leased_bytes))
                    leased_bytes -= array_bytes(block.spec)
                    with self._movement.changed:  # Another thread may have unregistered or pinned the block.
                        should_evict = self._movement.blocks.get(block.spec.key) is block and copy.is_fetched
                        if should_evict and not block.copy_in(lease.tier).pins:
                            self._leasing.evict(block.spec.key, lease.tier)
            self._copies.append(copy)
        self._freeze_end_s = time.perf_counter()

    def _make_folder(self) -> None:
        self._identity.mark(self.folder)
        write_document(self.folder.parent, group_document())
        write_document(self.folder, group_document())

    def _advance_write_back(self, block: Block) -> WaitReason | None:
        """Take the next step to write a block's newest bytes home. Return the reason to wait, or None when done."""
        if block.writer is not None:
            return WaitReason("lease")
        copy = block.newest()
        if copy is not None:
            return self._movement.write_back(block, copy) or self._movement.transfer_wait_reason(copy, "drain")
        is_filling = block.home.state is CopyState.FILLING
        return self._movement.transfer_wait_reason(block.home, "drain") if is_filling else None

    def _freeze_block(self, block: Block) -> _FrozenCopy | None:
        tier = self._movement.durable_tiers.get(block.spec.home)
        if tier is not None:
            return tier.full.retry(tier.paths[0], PAGE_BYTES, partial(self._link, block, tier))
        spec = block.spec
        with self._movement.changed:
            if not self._wait_until_home_locked(block):
                return None
            addressable_tier = self._movement.nearest_addressable(spec.home)
            is_fetched = block.copy_in(addressable_tier).slot is None
            lease = self._leasing.acquire(spec.key, addressable_tier, "r")
            lease.thread_id = NO_THREAD
            return _FrozenCopy(block, self.folder / spec.key, block.version, None, False, lease, is_fetched=is_fetched)

    def _link(self, block: Block, tier: DurableTier) -> _FrozenCopy | None:
        with self._movement.changed:  # Hold the lock, so that no write happens between the wait and the link.
            if not self._wait_until_home_locked(block):
                return None
            assert block.home.slot is not None
            tier.snapshots.take(block.home.slot, self._name)
            folder = Path(tier.paths[0], SNAPSHOT_FOLDER, self._name, block.spec.key)
            home = files_of(block.home.slot)
            return _FrozenCopy(block, folder, block.version, home.checksums, home.is_flushed, None, home.nbytes)

    def _wait_until_home_locked(self, block: Block) -> bool:
        """Wait until the newest bytes of a block are home. Return False if the block is empty or unregistered."""
        while (reason := self._advance_write_back(block)) is not None:
            self._leasing.wait_for_home_locked(reason, block)
        return self._movement.blocks.get(block.spec.key) is block and block.home.state is CopyState.CLEAN

    # -- in the commit's thread --------------------------------------------------------------------------------

    def write(self, on_bytes: Callable[[int], None] = lambda nbytes: None) -> tuple[BlockRecord, ...]:
        """Write the leased blocks, and flush and check the linked blocks. Return the records of all blocks.

        Args:
            on_bytes: called with the number of bytes completed since the last call.
        """
        checksums_by_key: dict[str, tuple[str, ...]] = {}
        leased_copies = [copy for copy in self._copies if copy.lease is not None and not copy.lease.is_released]
        leased_bytes = sum(array_bytes(copy.block.spec) for copy in leased_copies)
        for copy in self._copies:
            if copy.lease is not None:
                spec, checksums = copy.block.spec, copy.checksums
                if checksums is None:
                    checksums = self._write(copy, leased_bytes)
                    leased_bytes -= array_bytes(spec)
                    copy.lease.release()
                checksums_by_key[spec.key] = checksums
                on_bytes(spec.nbytes)
        linked_copies = [copy for copy in self._copies if copy.lease is None]
        flush_arrays([(copy.folder, copy.block.spec) for copy in linked_copies if not copy.is_flushed])
        for copy in linked_copies:
            checksums_by_key[copy.block.spec.key] = self._linked_checksums(copy)
            on_bytes(copy.block.spec.nbytes)
        return tuple(self._record(copy, checksums_by_key[copy.block.spec.key]) for copy in self._copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frozen blocks."""
        return sum(copy.block.spec.nbytes for copy in self._copies)

    def release(self) -> None:
        """Release all remaining leases. Idempotent."""
        for copy in self._copies:
            if copy.lease is not None and not copy.lease.is_released:
                copy.lease.release()

    def figures(self) -> CommitFigures:
        """Return the commit's sizes and durations so far."""
        written_specs = [copy.block.spec for copy in self._copies if copy.lease is not None]
        return CommitFigures(
            nbytes=self.num_bytes,
            written_bytes=sum(map(array_bytes, written_specs)),
            linked_bytes=sum(copy.linked_bytes for copy in self._copies),
            freeze_s=self._freeze_end_s - self._start_s,
            seconds=time.perf_counter() - self._start_s,
        )

    def emit(self) -> None:
        """Emit the event that reports a successful commit."""
        if self._movement.on_event is not None:
            with self._movement.changed:
                self._movement.on_event(
                    Event("commit", "", "", self.num_bytes, self._freeze_end_s, time.perf_counter(), self._name)
                )

    def _write(self, copy: _FrozenCopy, need_bytes: int) -> tuple[str, ...]:
        """Write a leased block. If the drive is full, wait or fail. A message then asks for ``need_bytes``."""
        spec, path, owner_tier = copy.block.spec, str(self._identity.path), self._owner_tier
        if owner_tier is not None:
            owner_tier.count_wear({owner_tier.paths.index(path): array_bytes(spec)})
        return self._full_drives.retry(path, need_bytes, partial(self._write_once, spec, self._leased_tensor(copy)))

    def _write_once(self, spec: BlockSpec, tensor: torch.Tensor) -> tuple[str, ...]:
        owner_tier = self._owner_tier
        if owner_tier is not None:
            owner_tier.snapshots.count(array_bytes(spec))  # Count first: counting deletes kept files to make space.
        try:
            return write_array(self.folder, spec, contents_of(tensor))
        except BaseException as error:
            shutil.rmtree(self.folder / spec.key, ignore_errors=True)
            if owner_tier is not None:
                owner_tier.snapshots.count(-array_bytes(spec))
                is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                if is_full and owner_tier.snapshots.drop_kept_files():
                    return self._write_once(spec, tensor)
            raise

    def _leased_tensor(self, copy: _FrozenCopy) -> torch.Tensor:
        """Return a leased block's tensor. The calling thread's stream waits for the streams that wrote the tensor."""
        spec, lease = copy.block.spec, copy.lease
        assert lease is not None, spec
        slot = copy.block.copies[lease.tier].slot
        assert slot is not None, spec
        if (tier := self._movement.stream_tiers.get(lease.tier)) is not None:
            tier.order_before(slot, tier.current_stream())
        return self._movement.tiers[lease.tier].tensor(slot, spec.shape, spec.dtype)

    def _linked_checksums(self, copy: _FrozenCopy) -> tuple[str, ...]:
        """Return the checksums of linked, flushed files. Reads the files unless their writes computed checksums."""
        spec, checksums = copy.block.spec, copy.checksums
        if checksums is None:
            checksums = read_array(chunk_files(copy.folder, spec), spec)
        with self._movement.changed:
            home = copy.block.home
            # If the block has been written again, its home files are no longer the linked files.
            is_unchanged = copy.block.version == copy.version and home.state is CopyState.CLEAN
            if is_unchanged and home.slot is not None:
                files = files_of(home.slot)
                files.checksums, files.is_flushed = checksums, True
        return checksums

    def _record(self, copy: _FrozenCopy, checksums: tuple[str, ...]) -> BlockRecord:
        spec = copy.block.spec
        location = os.path.relpath(copy.folder, self._identity.path)
        return BlockRecord(spec.key, spec.shape, dtype_name(spec.dtype), spec.home, spec.nbytes, checksums, location)


def check_meta(meta: Mapping[str, JSON]) -> None:
    """Raise ``GenerationError`` if ``meta`` cannot be stored as JSON."""
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise GenerationError(f"meta of a commit must be JSON: {error}") from error


def _check_keys(blocks: Sequence[Block]) -> None:
    keys = {block.spec.key for block in blocks}
    for key in keys:
        parts = key.split("/")
        outer_key = next((o for end in range(1, len(parts)) if (o := "/".join(parts[:end])) in keys), None)
        if outer_key is not None:
            raise GenerationError(f"block '{key}' is inside block '{outer_key}' and cannot be committed: rename one")
