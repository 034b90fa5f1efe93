"""TieredStore: the public interface of a store. ``leasing``, ``movement`` and ``durable`` implement it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from tiered.block import BlockSpec, CopyState
from tiered.by_name import NamedAccess
from tiered.durable.commit import Commit
from tiered.durable.generations import Generations, default_path, refuse_clashes, refuse_committed
from tiered.durable.manifest import JSON, Manifest
from tiered.errors import GenerationError
from tiered.events import EventSink, StoreStats, TierStats
from tiered.leasing import Leasing, Request
from tiered.links.base import Link
from tiered.links.route import default_links
from tiered.mapping import BlockMapping, Writable, as_tensor
from tiered.movement import Movement, due_bytes
from tiered.policies import LRU, EvictionPolicy
from tiered.records import Block, Lease, LeaseGroup
from tiered.schedule import Mode, Schedule, Trace
from tiered.simulation import SimulatedClock
from tiered.tiers.base import Tier, WriteCountingTier
from tiered.tiers.health import FullDrives, OnFull
from tiered.transfer import Transfer
from tiered.units import GiB


class TieredStore(BlockMapping):
    """Store of named blocks in tiers of different speeds. Thread-safe. Also a context manager that closes the store.

    Only the process that created the store can use it: in a forked child, ``close`` does nothing and every other use
    raises ``TieredError``. A store is also a mapping from names to copies of tensors (see ``BlockMapping``).

    Every block owns a slot in one **home** tier for its whole life; faster tiers hold **copies**. So a write-back
    always has space at home. If a tier or disk is too small, registering a block raises an error.

    Args:
        tiers: tiers from fast to slow. The store never exceeds a tier's ``capacity_bytes``.
        policy: eviction policy; default ``LRU()``. ``Belady()`` uses the schedule.
        links: links between the tiers. By default, ``default_links`` links each tier with the next faster tier that it
            can reach.
        path: directory of committed generations; default: the first path of a durable tier.
        keep_generations: number of newest generations that a commit keeps.
        overwrite: whether to start empty even if ``path`` has committed generations. Later commits prune the old
            generations according to ``keep_generations``, unless ``load`` continues one of them.
        on_full: what to do if the drive of ``path`` is full: ``pause`` until there is space, or ``error``. Ignored if a
            tier owns ``path``.
        on_notice: called with a sentence for the user, on any thread. By default, the sentence is logged as a warning.
        max_inflight_bytes: number of bytes in flight at which no further prefetch starts.
        on_event: called with each ``Event`` while the store's lock is held. Must be fast and not call the store.
        clock: virtual clock, for simulated tiers and links.

    Raises:
        ValueError: there are no tiers, two tiers have the same name, or their folders overlap.
        GenerationError: ``path`` has a committed generation and ``overwrite`` is False. The tiers stay open.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policy: EvictionPolicy | None = None,
        links: Sequence[Link] | None = None,
        *,
        path: str | None = None,
        keep_generations: int = 2,
        overwrite: bool = False,
        on_full: OnFull = "error",
        on_notice: Callable[[str], None] | None = None,
        max_inflight_bytes: int = 2 * GiB,
        on_event: EventSink | None = None,
        clock: SimulatedClock | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a store needs tiers with different names, got {names}")
        path = path if path is not None else default_path(tiers)
        refuse_clashes(tiers, path)
        if not overwrite and path is not None:
            try:
                refuse_committed(path)
            except GenerationError:
                del tiers  # The traceback keeps this frame alive, and this variable would keep the tiers' locks.
                raise
        self._links = list(default_links(tiers) if links is None else links)
        self._movement = Movement(
            tiers, self._links, policy or LRU(), max_inflight_bytes=max_inflight_bytes, on_event=on_event, clock=clock
        )
        self._changed = self._movement.changed
        self._blocks = self._movement.blocks
        self._leasing = Leasing(self._movement)
        notice = on_notice or logging.getLogger(__name__).warning
        full_drives = FullDrives(on_full, notice)
        self._named_access = NamedAccess(self._movement, self._leasing)
        self._generations = Generations(self._movement, self._leasing, path, keep_generations, full_drives, notice)

    @classmethod
    def open(cls, path: str, tiers: Sequence[Tier], generation: int | None = None, **options: Any) -> TieredStore:
        """Return a store with the verified blocks of a committed generation (default: the newest undamaged one).

        ``on_notice`` reports damaged newer generations, and a top-level ``MANIFEST.json`` that does not name the newest
        generation (as in a copy of a live directory). If ``generation`` is set, it must be undamaged.

        A block keeps its recorded home if ``tiers`` has a tier with that name; otherwise its home is the slowest tier.

        Raises:
            GenerationError: no generation exists, a part is missing, or a newer version of this package wrote it.
            CorruptBlockError: a block is damaged.
        """
        if not os.path.isdir(path):  # Check before the new store creates the directory.
            for tier in tiers:
                tier.close()
            raise GenerationError(
                f"'{path}' is not a directory, so nothing was committed there. Name the store's directory"
            )
        store = cls(tiers, path=path, overwrite=True, **options)
        try:
            store._generations.open(generation, store.register, store.unregister)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._leasing.closed

    @property
    def is_paused(self) -> bool:
        """Whether a write is waiting for space on a full drive."""
        return self._generations.full.is_waiting or any(tier.is_waiting for tier in self._movement.pausing_tiers)

    @property
    def path(self) -> str | None:
        """Directory of committed generations, or None."""
        return self._generations.path

    @property
    def keep_generations(self) -> int:
        """Number of newest generations that a commit keeps, in addition to those that ``keep_also`` names."""
        return self._generations.num_kept

    def keep_also(self, get_generations: Callable[[], Collection[int]] | None) -> None:
        """Make commits also keep the generations that ``get_generations()`` returns, e.g. for other checkpoints.

        ``commit`` and the commit's thread both call it. The kept bytes do not count toward a file tier's capacity.
        """
        self._generations.keep_also = get_generations

    def keep_only(self, get_generations: Callable[[], Collection[int]]) -> None:
        """Make commits keep only the new generation and the generations that ``get_generations()`` returns.

        Use it for checkpoints across several stores, where only the caller knows which generations belong together.
        ``commit`` and the commit's thread both call ``get_generations``.
        """
        self._generations.keep_also = get_generations
        self._generations.num_kept = 0

    def tiers_between(self, src: str, dst: str) -> Sequence[str]:
        """Return the intermediate tiers on the route from one tier to another.

        Raises:
            ValueError: no links connect the tiers.
        """
        return self._movement.routes.tiers_between(src, dst)

    # -- registration ------------------------------------------------------------------------------------------

    def register(
        self, key: str, shape: Sequence[int], dtype: torch.dtype, *, home: str, durable: bool = True
    ) -> BlockSpec:
        """Declare a block and reserve its home slot. In a ``ReadOnlyTier``, the block has its contents immediately.

        Raises:
            CapacityError: the home tier is too small.
            TransferError: the machine has too little memory or disk space.
            ValueError: the key is in use or malformed, the tier is unknown, a durable block is in a read-only tier, or
                the home is more than two links away from an addressable tier.
        """
        spec = BlockSpec(key, tuple(shape), dtype, home, durable)
        with self._changed:
            self._leasing.check_open()
            if key in self._blocks:
                raise ValueError(f"block '{key}' is registered already")
            tier = self._leasing.tier(home)
            if durable and home in self._movement.read_only_tiers:
                raise ValueError(f"block '{key}': commits exclude the read-only tier '{home}'; set durable=False")
            names = [tier.name for tier in self._movement.tiers.values() if tier.device is not None]
            src = next((name for name in names if self._movement.routes.is_far(name, home)), None)
            if src is not None and home not in self._movement.read_only_tiers:
                raise ValueError(
                    f"block '{key}': a copy from tier '{src}' would pass two tiers on its way to '{home}': omit one"
                )
            block = Block(spec)
            slot = self._leasing.home_slot_locked(block, tier)
            block.home.slot = slot
            self._movement.occupancy.home_bytes[home] += slot.slot_bytes
            if home in self._movement.describing_tiers:
                self._movement.describing_tiers[home].describe(slot, spec.shape, dtype)
            if home in self._movement.read_only_tiers:
                block.home.move(CopyState.FILLING)
                block.home.move(CopyState.CLEAN)
            self._movement.add(block)
        return spec

    def discard(self, *keys: str) -> None:
        """Drop the contents of blocks without writing them back. The blocks stay registered.

        Committed generations keep their contents. Waits for the blocks' transfers in progress.

        Raises:
            LeaseError: one of the blocks is leased.
        """
        self._leasing.discard(keys)

    def unregister(self, *keys: str) -> None:
        """Remove blocks from the store and free their home slots.

        Raises:
            LeaseError: one of the blocks is leased.
        """
        with self._changed:
            self.discard(*keys)
            for key in keys:
                block = self._blocks.pop(key)
                assert block.home.slot is not None
                for copy in block.copies.values():
                    if copy.pins and not copy.is_home:
                        slot_bytes = self._movement.tiers[copy.tier].slot_bytes(block.spec.nbytes)
                        self._movement.occupancy.add_pinned(copy.tier, slot_bytes, -1)
                self._movement.occupancy.home_bytes[block.spec.home] -= block.home.slot_bytes
                self._movement.tiers[block.spec.home].free(block.home.slot)
            self._changed.notify_all()

    # -- leases ------------------------------------------------------------------------------------------------

    def acquire(
        self, key: str, tier: str, mode: Mode = "r", *, stream: Any = None, timeout_s: float | None = None
    ) -> Lease:
        """Return a lease on the block's copy in ``tier``. Fetches the copy first if needed.

        The host waits for space and for file reads, but not for the final copy to a device. That copy is only enqueued
        and *ordered* before ``stream`` (default: the current stream). ``r`` leases are shared; ``w`` and ``rw`` are
        exclusive and wait for all leases and transfers of the block. ``w`` does not fetch the old contents.

        Raises:
            CapacityError: the copy can never fit together with the homes, pins and the caller's own leases.
            UninitializedBlockError: ``mode`` reads a block that was never written.
            BlockNotFoundError: no block has this key.
            TransferError: a transfer failed.
            LeaseError: the call would wait for the caller's own lease.
            ValueError: the tier or mode is unknown, or the tier is not addressable.
            TimeoutError: the lease was not granted within ``timeout_s`` seconds.
        """
        return self._leasing.acquire(key, tier, mode, stream=stream, timeout_s=timeout_s)

    def acquire_many(
        self, requests: Sequence[Request], *, stream: Any = None, timeout_s: float | None = None
    ) -> LeaseGroup:
        """Return leases on several blocks, all or nothing, so that two callers cannot deadlock on each other's leases.

        Do not call it while holding a lease that another ``acquire_many`` may wait for.

        Raises:
            ValueError: a key occurs twice. Also raises the errors of ``acquire``.
        """
        return self._leasing.acquire_many(requests, stream=stream, timeout_s=timeout_s)

    def prefetch(self, key: str, tier: str) -> Transfer:
        """Start fetching a copy. Never blocks. If space is short, the returned transfer is ``skipped``."""
        return self._leasing.prefetch(key, tier)

    # -- rows and streams (BlockMapping has whole blocks by name) ----------------------------------------------

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return a copy of rows [``start``, ``stop``) of a block, in host memory outside all tiers.

        If only files have the newest bytes, the read covers only the pages (or 16 MiB pieces, with ``verify="always"``)
        that contain the rows. Such a read evicts nothing, and ``stats`` does not count it.

        Raises:
            ValueError: the rows are out of range. ``acquire`` can raise other errors.
        """
        return self._named_access.read_rows(self.spec(key), start, stop)

    def write_rows(self, key: str, start: int, tensor: Writable) -> None:
        """Replace rows of a block, beginning at row ``start``.

        The store fetches the whole block into the nearest addressable tier, and writes it back on eviction or commit.
        Several calls can therefore share one write-back.

        Raises:
            ValueError: the rows are out of range, or their shape or dtype differs. ``acquire`` can raise other errors.
            TypeError: see ``put``.
        """
        self._named_access.write(self.spec(key), as_tensor(key, tensor), start)

    def stream(self, keys: Iterable[str], tier: str, mode: Mode = "r") -> Iterator[Lease]:
        """Yield leases on blocks one at a time, and prefetch the next blocks as far as space allows.

        Each lease ends before the next one begins, and the last lease ends with the loop. The look-ahead needs no
        setting: the store fetches copies in order while all of them fit next to the homes, so no fetch evicts a copy
        that is needed earlier.

        Raises:
            ValueError: the caller has set a schedule. ``acquire`` can raise other errors.
        """
        return self._named_access.stream(list(keys), tier, mode)

    # -- placement ---------------------------------------------------------------------------------------------

    def pin(self, key: str, tier: str) -> None:
        """Keep the copy in ``tier`` (from its arrival, if not there yet) until every ``pin`` is undone by an ``unpin``.

        Raises:
            CapacityError: homes and pins together would exceed the tier.
        """
        self._leasing.pin(key, tier)

    def unpin(self, key: str, tier: str) -> None:
        """Undo one ``pin`` of the copy in ``tier``.

        Raises:
            LeaseError: the copy is not pinned.
        """
        self._leasing.unpin(key, tier)

    def reserve(self, tier: str, nbytes: int) -> None:
        """Charge bytes outside any block (workspace, staging) to a tier's ledger. A negative number returns bytes.

        Waits for transfers in progress, because copies still take space while they are being evicted.

        Raises:
            CapacityError: the tier is too small even after these transfers.
            TransferError: a write-back failed.
        """
        self._leasing.reserve(tier, nbytes)

    def keep_buffers(self, tier: str, counts: Mapping[int, int]) -> None:
        """Allocate buffers for a tier's copies now, so that later leases and fetches allocate nothing.

        Afterwards, copies use buffers of exactly their size. If no such buffer is free, the prefetcher does not fetch
        the copy yet. A lease waits until a copy of this size is evicted. If no copy can be evicted, the lease drops
        buffers of other sizes. Call this method after all homes are registered. Tiers can ignore it.

        Args:
            counts: number of simultaneous copies, by slot size in bytes. If empty, no buffers are kept.

        Raises:
            ValueError: the tier is unknown.
            TransferError: the machine has less memory than the tier's capacity.
        """
        with self._changed:
            self._leasing.check_open()
            self._leasing.tier(tier)
            self._movement.occupancy.keep_buffers(tier, counts)

    def evict(self, key: str, tier: str) -> Transfer:
        """Drop the copy in ``tier`` after writing it back if it is dirty. Return the write-back's transfer.

        A copy that is leased or in flight is dropped as soon as the lease or transfer ends. The home copy always stays.

        Raises:
            LeaseError: the copy is pinned.
        """
        return self._leasing.evict(key, tier)

    def set_schedule(self, schedule: Schedule | None, *, lookahead_bytes: int | None = None) -> None:
        """Set the schedule and the look-ahead. With None, only space limits the look-ahead; 0 disables prefetching."""
        with self._changed:
            self._movement.prefetcher.set_schedule(schedule, lookahead_bytes)
            self._movement.prefetcher.pump()

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record the accesses made inside the ``with`` block, for ``Schedule.from_trace``."""
        trace = Trace()
        self._leasing.trace = trace
        try:
            yield trace
        finally:
            self._leasing.trace = None

    def advance(self, tick: int) -> None:
        """Set the trainer's tick and start the next fetches. Accesses up to this tick count as past or current."""
        with self._changed:
            self._movement.prefetcher.advance(tick)
            self._movement.prefetcher.pump()

    def pass_over(self, accesses: Iterable[tuple[int, str]], *, but_not: Iterable[tuple[int, str]] = ()) -> None:
        """Skip prefetches for scheduled accesses that will probably not happen.

        If one of them happens after all, its copy is fetched on demand.

        Args:
            accesses: (tick, key) pairs of reads.
            but_not: accesses from earlier calls that will happen after all, so prefetching resumes for them.
        """
        with self._changed:
            self._movement.prefetcher.skip(accesses, but_not)
            self._movement.prefetcher.pump()

    def wait_idle(self) -> None:
        """Wait until all transfers end. Retries failed write-backs once; if that fails, raises ``TransferError``."""
        with self._changed:
            for finish in (self._movement.retry_failed_write_backs, self._movement.raise_write_back_error):
                while self._movement.is_moving():
                    self._changed.wait()
                finish()

    def verify(self, keys: Sequence[str] | None = None) -> int:
        """Compare the files of blocks with their checksums, and return the number of bytes compared.

        Skips a block if a faster tier has newer bytes, if its home is memory, or if it has no checksums. With
        ``verify="off"``, a block has none from a write until the next commit. Writers wait while their block is read.

        Args:
            keys: blocks to verify; default: all.

        Raises:
            CorruptBlockError: a block is damaged. The error describes the first difference, with its file and range.
            BlockNotFoundError: a key is not registered.
            TransferError: a file cannot be read.
            GenerationError: a file is missing.
        """
        return self._generations.verify_at_rest(keys)

    # -- generations -------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, JSON] | None = None) -> Commit:
        """Commit the current contents of all durable blocks as a generation that survives a crash.

        Returns as soon as a hard link or a read lease protects every block. A background thread then writes the leased
        blocks. If a block's home is neither a file tier nor addressable, the block is written before the call returns.

        Raises:
            GenerationError: the store has no directory for commits.
            TransferError: a write failed.
        """
        with self._changed:
            self._leasing.check_open()
        return self._generations.commit(dict(meta or {}))

    def load(self, generation: int | None = None, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Fill the registered durable blocks from a committed generation and return its manifest. Verifies contents.

        Homes can differ from the homes at the commit. If a block's files are on the paths of its home tier, the tier
        adopts them by hard links. Otherwise, the contents are copied into it. After an error, the caller can load an
        older generation. Later commits first prune the generations that are newer than the loaded one.

        Args:
            generation: number of the generation; default: the newest complete one.
            on_bytes: called with the size of each block after it is filled.

        Raises:
            GenerationError: no generation exists, a part is missing, or its blocks differ from the registered blocks.
            CorruptBlockError: a block is damaged.
            TransferError: a drive returned an error.
            LeaseError: a block is leased.
        """
        with self._changed:
            self._leasing.check_open()
        return self._generations.load(generation, on_bytes)

    # -- inspection --------------------------------------------------------------------------------------------

    def where(self, key: str) -> dict[str, CopyState]:
        """Return the states of the block's copies by tier. Includes only copies that have a slot."""
        with self._changed:
            return {c.tier: c.state for c in self._leasing.block(key).copies.values() if c.slot is not None}

    def blocks(self) -> Iterator[BlockSpec]:
        """Return the specs of all registered blocks, in order of registration."""
        with self._changed:
            return iter([block.spec for block in self._blocks.values()])

    def spec(self, key: str) -> BlockSpec:
        """Return the spec of a block. Raises ``BlockNotFoundError``."""
        with self._changed:
            return self._leasing.block(key).spec

    @property
    def tier_names(self) -> list[str]:
        """Names of the tiers, fast to slow."""
        return list(self._movement.order)

    def tier(self, name: str) -> Tier:
        """Return a tier by name, for example to call its ``reserve`` or ``usage``."""
        return self._leasing.tier(name)

    def stats(self) -> StoreStats:
        """Return the store's counters. Subtract an earlier result to get the counts since then."""
        with self._changed:
            counters, tiers, moved_bytes = self._movement.counters, self._movement.tiers, due_bytes(self._movement)
            written_bytes: dict[str, int] = {}
            for tier in tiers.values():
                if isinstance(tier, WriteCountingTier):
                    written_bytes.update(tier.bytes_written_by_path())
            return StoreStats(
                tiers={name: self._tier_stats(name) for name in tiers},
                links={f"{link.src}->{link.dst}": link.usage() for link in self._links},
                stall_s=dict(counters.stall_s),
                prefetch_on_time=counters.prefetch_on_time,
                prefetch_late=counters.prefetch_late,
                prefetch_wasted=counters.prefetch_wasted,
                evictions_clean=counters.evictions_clean,
                evictions_dirty=counters.evictions_dirty,
                schedule_misses=counters.schedule_misses,
                written_bytes=written_bytes,
                due_bytes={f"{link.src}->{link.dst}": moved_bytes.get((link.src, link.dst), 0) for link in self._links},
            )

    def _tier_stats(self, name: str) -> TierStats:
        usage = self._movement.tiers[name].usage()
        copies = [block.copies[name] for block in self._blocks.values() if name in block.copies]
        return TierStats(
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            home_bytes=sum(copy.slot_bytes for copy in copies if copy.is_home),
            pinned_bytes=sum(copy.slot_bytes for copy in copies if copy.pins),
            leased_bytes=self._leasing.leased_bytes_locked(name),
            high_water_bytes=usage.high_water_bytes,
        )

    def close(self) -> None:
        """Finish all transfers and any commit, then close links and tiers. Uncommitted contents are lost. Idempotent.

        Emits a ``RuntimeWarning`` if a commit failed and no caller waited for it. Does nothing in a forked child.
        """
        if self._changed.is_in_forked_child:
            return
        self._generations.join()
        with self._changed:
            if self._leasing.closed:
                return
            self._leasing.closed = True
            self._movement.prefetcher.set_schedule(None, 0)
            while any(block.num_transfers for block in self._blocks.values()):
                self._changed.wait()
            self._changed.notify_all()
        with ExitStack() as stack:  # Every callback runs, even if an earlier callback raises a device error.
            stack.callback(self._generations.close)
            for tier in reversed(list(self._movement.tiers.values())):
                stack.callback(tier.close)
            for link in self._links:
                stack.callback(link.close)

    def give_up_waiting(self) -> None:
        """Make current and future writes fail if a drive is full, instead of waiting. No-op in a forked child."""
        if self._changed.is_in_forked_child:
            return
        self._movement.give_up_waiting()
        self._generations.full.give_up()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.give_up_waiting()  # After an error, do not wait until a full drive has space.
        self.close()
