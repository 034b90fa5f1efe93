"""One commit: freezes blocks by links and leases, then writes and checks what it froze.

Blocks in a file tier are frozen by hard links. Other blocks are held by read leases, which a thread gives back one
by one as it writes them; so the work goes on, and waits at most where it would change a block not yet written.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tiered.block import BlockSpec, CopyState
from tiered.durable.arrays import array_bytes, flush_contents, read_contents, write_contents
from tiered.durable.loading import nearest_addressable
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
from tiered.transfer import Waiting
from tiered.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class CommitFigures:
    """What a commit took.

    Attributes:
        nbytes: contents of all its blocks.
        written_bytes: size of the files it wrote.
        linked_bytes: size of the files that it only linked.
        freeze_s: seconds in ``TieredStore.commit``.
        seconds: from its call to the end.
    """

    nbytes: int
    written_bytes: int
    linked_bytes: int
    freeze_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Frozen:
    """One block of a commit: held by a lease, or linked into ``folder`` (then ``version`` tells whether it changed)."""

    block: Block
    folder: Path
    version: int
    checksums: tuple[str, ...] | None
    is_flushed: bool
    lease: Lease | None
    linked_bytes: int = 0


class Commit:
    """A commit under way. Thread-safe.

    Attributes:
        generation: its number, one more than the last committed one.
    """

    def __init__(
        self, movement: Movement, owner: StoreIdentity, full: FullDrives, generation: int, meta: Mapping[str, JSON]
    ) -> None:
        self.generation = generation
        self.meta = meta
        self.owner = owner
        self.full = full  # of the drive of ``path``
        self.path = owner.path
        self.folder = generation_folder(owner.path, generation)
        self.frozen: list[_Frozen] = []
        self.start_s = time.perf_counter()
        self.frozen_s = self.start_s  # when everything was frozen
        self.error: BaseException | None = None
        self.error_was_raised = False
        self._movement = movement
        self._figures: CommitFigures | None = None
        self._staged = threading.Event()
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        """Return whether it ended, well or badly: ``wait`` would not wait."""
        return self._ended.is_set()

    @property
    def figures(self) -> CommitFigures:
        """Return what it took; only of a commit that ``wait`` returned from."""
        assert self._figures is not None, f"generation {self.generation} is not committed"
        return self._figures

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until no block is held any more, so that every block can be changed without waiting.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
        """
        self._wait_for(self._staged, timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the generation is the current one and survives a power cut.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
            TransferError: the drive refused; the generation before is still the current one.
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

    def tensor_of(self, frozen: _Frozen) -> torch.Tensor:
        """Return the contents of a leased block for the calling thread: its stream waits for those that wrote them."""
        spec, lease = frozen.block.spec, frozen.lease
        assert lease is not None, spec
        slot = frozen.block.copies[lease.tier].slot
        assert slot is not None, spec
        return self._movement.tiers[lease.tier].tensor(slot, spec.shape, spec.dtype)

    def end_staging(self) -> None:
        """Give back all leases that are still held."""
        for frozen in self.frozen:
            if frozen.lease is not None and not frozen.lease.is_released:
                frozen.lease.release()
        self._staged.set()

    def count(self, blocks: Sequence[BlockRecord]) -> None:
        """Take down the figures, now that the generation is the current one."""
        linked = [frozen for frozen in self.frozen if frozen.lease is None]
        self._figures = CommitFigures(
            nbytes=sum(record.nbytes for record in blocks),
            written_bytes=sum(array_bytes(frozen.block.spec) for frozen in self.frozen if frozen.lease is not None),
            linked_bytes=sum(frozen.linked_bytes for frozen in linked),
            freeze_s=self.frozen_s - self.start_s,
            seconds=time.perf_counter() - self.start_s,
        )

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


def freeze(movement: Movement, leasing: Leasing, commit: Commit, counted: DurableTier | None) -> None:
    """Hold the present contents of all durable blocks still: afterwards ``commit.frozen`` tells how.

    Blocks that pass through a faster tier to be read may be more than it holds: they are written here, one by one.

    Args:
        counted: the file tier that owns the directory, or None.
    """
    with movement.changed:
        blocks = [block for block in movement.blocks.values() if block.spec.durable]
        _check_keys(blocks)
        for block in blocks:
            _settle_home(movement, block)  # all write-backs at once: the drive sees a queue
    name = generation_name(commit.generation)
    for tier in movement.durable_tiers.values():
        tier.full.retry(tier.paths[0], PAGE_BYTES, partial(tier.snapshots.mark, name, commit.owner))
    commit.full.retry(str(commit.path), PAGE_BYTES, partial(_make_folder, commit))
    for block in blocks:
        frozen = _freeze_block(movement, leasing, block, commit)
        if frozen is not None and frozen.lease is not None and frozen.lease.tier != block.spec.home:
            with frozen.lease:
                frozen = dataclasses.replace(frozen, checksums=_write_leased(commit, frozen, counted))
        if frozen is not None:
            commit.frozen.append(frozen)
    commit.frozen_s = time.perf_counter()


def writes_before_return(movement: Movement) -> bool:
    """Return whether ``freeze`` will write blocks: those that no lease can be on in their home."""
    with movement.changed:
        homes = {block.spec.home for block in movement.blocks.values() if block.spec.durable}
    return any(movement.tiers[home].device is None and home not in movement.durable_tiers for home in homes)


def _make_folder(commit: Commit) -> None:
    commit.owner.mark(commit.folder)
    write_document(commit.folder.parent, group_document())
    write_document(commit.folder, group_document())


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
        return movement.write_back(block, newest) or movement.rest_of(newest, "drain")
    return Waiting("drain", block.home.transfer) if block.home.state is CopyState.FILLING else None


def _freeze_block(movement: Movement, leasing: Leasing, block: Block, commit: Commit) -> _Frozen | None:
    tier = movement.durable_tiers.get(block.spec.home)
    if tier is not None:
        link = partial(_link_block, movement, leasing, block, commit, tier)
        return tier.full.retry(tier.paths[0], PAGE_BYTES, link)
    spec = block.spec
    with movement.changed:
        if not _is_at_home_locked(movement, leasing, block):
            return None
        lease = leasing.acquire(spec.key, nearest_addressable(movement, spec.home), "r")
        lease.thread_id = NO_THREAD
        return _Frozen(block, commit.folder / spec.key, block.version, None, False, lease)


def _link_block(
    movement: Movement, leasing: Leasing, block: Block, commit: Commit, tier: DurableTier
) -> _Frozen | None:
    with movement.changed:
        if not _is_at_home_locked(movement, leasing, block):
            return None
        assert block.home.slot is not None
        name = generation_name(commit.generation)
        tier.snapshots.take(block.home.slot, name)
        folder = Path(tier.paths[0], SNAPSHOT_FOLDER, name, block.spec.key)
        home = files_of(block.home.slot)
        return _Frozen(block, folder, block.version, home.checksums, home.is_flushed, None, home.nbytes)


def _is_at_home_locked(movement: Movement, leasing: Leasing, block: Block) -> bool:
    """Wait until the newest bytes of a block are at home; False if it has none, or is gone."""
    while (waiting := _settle_home(movement, block)) is not None:
        leasing.wait_for_locked(waiting, block)
    return movement.blocks.get(block.spec.key) is block and block.home.state is CopyState.CLEAN


def write_leased(commit: Commit, counted: DurableTier | None) -> dict[str, BlockRecord]:
    """Write the leased blocks and give each back; ``counted``: the file tier that owns the directory, or None."""
    records = {}
    for frozen in commit.frozen:
        if frozen.lease is None:
            continue
        checksums = frozen.checksums
        if checksums is None:
            checksums = _write_leased(commit, frozen, counted)
            frozen.lease.release()
        records[frozen.block.spec.key] = _record(commit, frozen, checksums)
    return records


def _write_leased(commit: Commit, frozen: _Frozen, counted: DurableTier | None) -> tuple[str, ...]:
    spec = frozen.block.spec
    if counted is not None:
        counted.count_wear({counted.paths.index(str(commit.path)): array_bytes(spec)})
    write = partial(_write, commit, spec, commit.tensor_of(frozen), counted)
    return commit.full.retry(str(commit.path), array_bytes(spec), write)


def _write(commit: Commit, spec: BlockSpec, tensor: torch.Tensor, counted: DurableTier | None) -> tuple[str, ...]:
    if counted is not None:
        counted.snapshots.count(array_bytes(spec))  # files kept for reuse make way
    try:
        return write_contents(commit.folder, spec, tensor)
    except BaseException as error:
        shutil.rmtree(commit.folder / spec.key, ignore_errors=True)
        if counted is not None:
            counted.snapshots.count(-array_bytes(spec))
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and counted.snapshots.drop_kept_files():
                return _write(commit, spec, tensor, counted)
        raise


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


def tell(movement: Movement, commit: Commit) -> None:
    """Emit the event of a commit that succeeded."""
    if movement.on_event is not None:
        with movement.changed:
            detail, nbytes = generation_name(commit.generation), commit.figures.nbytes
            movement.on_event(Event("commit", "", "", nbytes, commit.frozen_s, time.perf_counter(), detail))
