"""TieredStore: the contract of a store of blocks. How it is kept: ``leasing``, ``movement``, ``durable``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from tiered.block import BlockSpec, CopyState
from tiered.by_name import ByName
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
    """Named blocks in tiers of different speed. Thread-safe; a context manager (``close`` at the end).

    Only for the process that made it: a forked child gets ``TieredError`` from every use; there ``close`` does nothing.

    Also a mapping from names to copies of tensors, see ``BlockMapping``.

    Every block owns a slot in one **home** tier for life; faster tiers hold **copies**. So eviction never
    allocates, and a full tier or disk is refused when a block is registered, not in the middle of the work.

    Args:
        tiers: fast to slow; a tier's ``capacity_bytes`` is never exceeded.
        policy: ranks copies for eviction; default ``LRU()``. ``Belady()`` uses the schedule.
        links: Default: ``default_links``, which link each tier with the next faster one that it can reach.
        path: directory of committed generations; default: the first path of a durable tier.
        keep_generations: number of latest generations that a commit keeps.
        overwrite: start empty although ``path`` holds committed generations. Commits of this store then prune them, as
            ``keep_generations`` says, unless ``load`` continues one.
        on_full: if the drive of ``path`` is full and no tier owns it: ``pause`` until there is room, or ``error``.
        on_notice: called with a sentence for the user, from any thread; default: logged as a warning.
        max_inflight_bytes: most bytes that prefetches have in progress at once.
        on_event: called for every movement and stall, under the store's lock: be quick, never call the store.
        clock: virtual time, for stores of simulated tiers and links.

    Raises:
        ValueError: tiers with equal names, or with paths that contain each other.
        GenerationError: ``path`` holds a committed generation, and ``overwrite`` is not set. The tiers stay open.
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
                del tiers  # the error's traceback keeps this frame, which would keep dropped tiers and their locks
                raise
        self._links = list(default_links(tiers) if links is None else links)
        self._movement = Movement(
            tiers, self._links, policy or LRU(), max_inflight_bytes=max_inflight_bytes, on_event=on_event, clock=clock
        )
        self._changed = self._movement.changed
        self._blocks = self._movement.blocks
        self._leasing = Leasing(self._movement)
        notice = on_notice or logging.getLogger(__name__).warning
        full = FullDrives(on_full, notice)
        self._by_name = ByName(self._movement, self._leasing)
        self._generations = Generations(self._movement, self._leasing, path, keep_generations, full, notice)

    @classmethod
    def open(cls, path: str, tiers: Sequence[Tier], generation: int | None = None, **options: Any) -> TieredStore:
        """Return a store with the blocks of a committed generation (default: the newest), contents verified.

        The newest is the newest whole one. ``on_notice`` reports newer damaged ones, and a top file that is older than
        the generations, as in a copy of a live directory. A given generation must be whole.

        A block keeps its recorded home if ``tiers`` has a tier of that name; otherwise it gets the slowest tier.

        Raises:
            GenerationError: nothing committed there, or written by a newer format; or a part is missing.
            CorruptBlockError: damaged bytes.
        """
        if not os.path.isdir(path):  # before a new store makes the directory
            for tier in tiers:
                tier.close()
            raise GenerationError(
                f"'{path}' is no directory, so nothing was committed there. Name the store's directory"
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
        """Whether something waits for room on a full drive."""
        return self._generations.full.is_waiting or any(tier.is_waiting for tier in self._movement.pausing_tiers)

    @property
    def path(self) -> str | None:
        """Return the directory of committed generations, or None."""
        return self._generations.path

    @property
    def keep_generations(self) -> int:
        """Number of latest generations that a commit keeps, in addition to the ones of ``keep_also``."""
        return self._generations.num_kept

    def keep_also(self, named: Callable[[], Collection[int]] | None) -> None:
        """Make commits also keep the generations that ``named()`` returns, because other checkpoints refer to them.

        Called at every commit, from its thread. Their bytes come on top of the capacity of a file tier.
        """
        self._generations.keep_also = named

    def keep_only(self, named: Callable[[], Collection[int]]) -> None:
        """Make commits keep only the generations that ``named()`` returns, and the one that they make.

        For checkpoints across several stores, where only the caller knows which generations belong together.
        Called at every commit, from its thread.
        """
        self._generations.keep_also = named
        self._generations.num_kept = 0

    def tiers_between(self, src: str, dst: str) -> Sequence[str]:
        """Return the tiers that a copy passes on its way from one tier to another.

        Raises:
            ValueError: no links lead there.
        """
        return self._movement.routes.passed(src, dst)

    # -- declare -----------------------------------------------------------------------------------------------

    def register(
        self, key: str, shape: Sequence[int], dtype: torch.dtype, *, home: str, durable: bool = True
    ) -> BlockSpec:
        """Declare a block and reserve its home slot now. In a ``ReadOnlyTier`` it has its contents already.

        Raises:
            CapacityError: the home tier has no room for it.
            TransferError: the machine refused the space (disk full).
            ValueError: a key in use or malformed, an unknown tier, a durable block in a read-only one, or a home
                that is more than two links from an addressable tier.
        """
        spec = BlockSpec(key, tuple(shape), dtype, home, durable)
        with self._changed:
            self._leasing.check_open()
            if key in self._blocks:
                raise ValueError(f"block '{key}' is registered already")
            tier = self._leasing.tier(home)
            if durable and home in self._movement.read_only_tiers:
                raise ValueError(f"block '{key}': commits do not hold what is at home in '{home}'; write durable=False")
            addressable = (name for name, each in self._movement.tiers.items() if each.device is not None)
            far = next((name for name in addressable if self._movement.routes.is_far(name, home)), None)
            if far is not None and home not in self._movement.read_only_tiers:
                raise ValueError(
                    f"block '{key}': a copy from tier '{far}' would pass two tiers on its way to '{home}': omit one"
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
        """Declare contents dead: copies are dropped and never written back. The blocks stay registered.

        Committed generations keep their contents. Waits for transfers of the blocks in progress.

        Raises:
            LeaseError: one of the blocks is leased.
        """
        self._leasing.discard(keys)

    def unregister(self, *keys: str) -> None:
        """Forget blocks and give their home slots back.

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
                        need = self._movement.tiers[copy.tier].slot_bytes(block.spec.nbytes)
                        self._movement.occupancy.add_pinned(copy.tier, need, -1)
                self._movement.occupancy.home_bytes[block.spec.home] -= block.home.slot_bytes
                self._movement.tiers[block.spec.home].free(block.home.slot)
            self._changed.notify_all()

    # -- use ---------------------------------------------------------------------------------------------------

    def acquire(
        self, key: str, tier: str, mode: Mode = "r", *, stream: Any = None, timeout_s: float | None = None
    ) -> Lease:
        """Return a lease on the block's copy in ``tier``, fetching the copy first if needed.

        The host waits for room and for file reads. A last copy to a device is only *ordered* before ``stream``
        (default: the current one), after it was enqueued. ``r`` leases are shared; ``w`` and ``rw`` are exclusive
        and wait for all leases and movements of the block. ``w`` does not bring the old contents.

        Raises:
            CapacityError: it can never fit together with the homes, pins and the caller's own leases.
            UninitializedBlockError: it was never written, and ``mode`` reads.
            BlockNotFoundError: there is no such block.
            TransferError: its bytes could not be moved.
            LeaseError: it would wait for the caller's own lease.
            ValueError: there is no such tier or mode, or the tier is not addressable.
            TimeoutError: not granted within ``timeout_s`` seconds.
        """
        return self._leasing.acquire(key, tier, mode, stream=stream, timeout_s=timeout_s)

    def acquire_many(
        self, requests: Sequence[Request], *, stream: Any = None, timeout_s: float | None = None
    ) -> LeaseGroup:
        """Return leases on several blocks, all or nothing, so that two callers never wait for each other's share.

        Do not call it while holding a lease that another ``acquire_many`` may wait for.

        Raises:
            ValueError: one key twice. Otherwise as ``acquire``.
        """
        return self._leasing.acquire_many(requests, stream=stream, timeout_s=timeout_s)

    def prefetch(self, key: str, tier: str) -> Transfer:
        """Start bringing a copy in. A hint: never blocks, never raises for lack of room (``.skipped`` then)."""
        return self._leasing.prefetch(key, tier)

    # -- rows and streams; whole blocks by name: BlockMapping ------------------------------------------------------

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return a copy of rows ``start`` to ``stop`` of a block, in memory of the process that no tier counts.

        If only files have the newest bytes, only the pages of these rows are read, or the 16 MiB that share a checksum
        with ``verify="always"``. Such a read bypasses all tiers: it evicts nothing, and ``stats`` does not count it.

        Raises:
            ValueError: there are no such rows. Otherwise as ``acquire``.
        """
        return self._by_name.read_rows(self.spec(key), start, stop)

    def write_rows(self, key: str, start: int, tensor: Writable) -> None:
        """Replace the rows of a block from ``start`` on.

        The whole block is fetched into the nearest tier, and written back when it is evicted or committed: many
        calls cause one write.

        Raises:
            ValueError: there are no such rows, or of another shape or dtype. Otherwise as ``acquire``.
            TypeError: as ``put``.
        """
        self._by_name.write(self.spec(key), as_tensor(key, tensor), start)

    def stream(self, keys: Iterable[str], tier: str, mode: Mode = "r") -> Iterator[Lease]:
        """Yield leases on blocks one after the other, and fetch ahead as far as the tier has room.

        Each lease ends before the next begins, and the last with the loop. The look-ahead needs no setting: copies are
        fetched in order while all of them fit next to the homes, so that none evicts another.

        Raises:
            ValueError: the caller has set a schedule. Otherwise as ``acquire``.
        """
        return self._by_name.stream(list(keys), tier, mode)

    # -- place -------------------------------------------------------------------------------------------------

    def pin(self, key: str, tier: str) -> None:
        """Keep a copy in ``tier`` from its next arrival on, until ``unpin``. Counted.

        Raises:
            CapacityError: homes and pins together would not fit the tier.
        """
        self._leasing.pin(key, tier)

    def unpin(self, key: str, tier: str) -> None:
        """Reverse one ``pin``.

        Raises:
            LeaseError: not pinned there.
        """
        self._leasing.unpin(key, tier)

    def reserve(self, tier: str, nbytes: int) -> None:
        """Charge bytes outside any block (workspace, staging) to a tier's ledger; negative gives back.

        Waits for transfers in progress, because leaving copies still take room.

        Raises:
            CapacityError: the tier has no such room even then.
            TransferError: a write-back failed.
        """
        self._leasing.reserve(tier, nbytes)

    def keep_buffers(self, tier: str, counts: Mapping[int, int]) -> None:
        """Make buffers for the copies of a tier now, so that no later lease or fetch allocates; a tier may ignore it.

        Copies then use only buffers of their size. The prefetcher skips a copy without one. A lease waits for one
        that is leaving, and does not drop a buffer of another size. If nothing else helps, one is dropped after all: a
        request that fits the free bytes always succeeds. Call it when all homes are registered.

        Args:
            counts: bytes of a slot -> number of copies of that size at the same time. Empty: no buffers are kept.

        Raises:
            ValueError: there is no such tier.
            TransferError: the machine has less memory than the tier's capacity.
        """
        with self._changed:
            self._leasing.check_open()
            self._leasing.tier(tier)
            self._movement.occupancy.keep_buffers(tier, counts)

    def evict(self, key: str, tier: str) -> Transfer:
        """Drop the copy in ``tier``, writing it back first if it is dirty; returns the write-back.

        A copy that is leased or in flight goes as soon as that ends. The home copy always stays.

        Raises:
            LeaseError: the copy is pinned.
        """
        return self._leasing.evict(key, tier)

    def set_schedule(self, schedule: Schedule | None, *, lookahead_bytes: int | None = None) -> None:
        """Set the access schedule and the look-ahead of the prefetcher (None = as much as fits, 0 = none)."""
        with self._changed:
            self._movement.prefetcher.follow(schedule, lookahead_bytes)
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
        """Set the trainer's tick: accesses up to it are past or are made now. Drives the prefetcher."""
        with self._changed:
            self._movement.prefetcher.advance(tick)
            self._movement.prefetcher.pump()

    def pass_over(self, accesses: Iterable[tuple[int, str]], *, but_not: Iterable[tuple[int, str]] = ()) -> None:
        """Do not prefetch for scheduled accesses that will not, or will probably not, take place.

        An access that takes place after all is served on demand.

        Args:
            accesses: (tick, key) of reads.
            but_not: accesses of earlier calls that will take place after all.
        """
        with self._changed:
            self._movement.prefetcher.skip(accesses, but_not)
            self._movement.prefetcher.pump()

    def wait_idle(self) -> None:
        """Wait until no transfer is in progress, retrying failed write-backs once. Raises ``TransferError`` in vain."""
        with self._changed:
            for what_next in (self._movement.retry_unsaved, self._movement.raise_unsaved):
                while self._movement.is_moving():
                    self._changed.wait()
                what_next()

    def verify(self, keys: Sequence[str] | None = None) -> int:
        """Read the files of blocks whose newest bytes are at home, compare them, and return the bytes compared.

        Left out: blocks with newer bytes in a faster tier, those whose home is memory, and those without checksums
        (``verify="off"`` and not committed since). Writers of a block wait while it is read.

        Args:
            keys: which blocks; default all.

        Raises:
            CorruptBlockError: the first difference, with its file and range.
            BlockNotFoundError: a key names no block.
            TransferError: a file cannot be read.
            GenerationError: a file is gone.
        """
        return self._generations.verify_at_rest(keys)

    # -- keep --------------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, JSON] | None = None) -> Commit:
        """Make the present contents of all durable blocks a generation that survives a crash.

        Returns once every block is frozen by a link or a read lease, or written if its home is neither files nor
        addressable. A thread writes the rest.

        Raises:
            GenerationError: the store has no directory to commit to.
            TransferError: bytes could not be written.
        """
        with self._changed:
            self._leasing.check_open()
        return self._generations.commit(dict(meta or {}))

    def load(self, generation: int | None = None, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> Manifest:
        """Fill the registered durable blocks from a committed generation (default: the current one); return its record.

        Homes may differ from the homes at the commit. Files on the paths of a block's home tier are adopted by links;
        everything else is read into place. Contents are verified. After an error it can be called again, with an older
        generation. Generations newer than the loaded one are pruned when a commit needs their room.

        Args:
            generation: its number; default: the current one.
            on_bytes: called with the size of each block once it is filled.

        Raises:
            GenerationError: there is none, a part is missing, or its blocks are not those that are registered.
            CorruptBlockError: damaged.
            TransferError: a drive refused.
            LeaseError: a block is leased.
        """
        with self._changed:
            self._leasing.check_open()
        return self._generations.load(generation, on_bytes)

    # -- look --------------------------------------------------------------------------------------------------

    def where(self, key: str) -> dict[str, CopyState]:
        """Return the state of every copy of the block that holds a slot, by tier."""
        with self._changed:
            return {c.tier: c.state for c in self._leasing.block(key).copies.values() if c.slot is not None}

    def blocks(self) -> Iterator[BlockSpec]:
        """Return the specs of all registered blocks, in order of registration."""
        with self._changed:
            return iter([block.spec for block in self._blocks.values()])

    def spec(self, key: str) -> BlockSpec:
        """Return the spec of a block.

        Raises:
            BlockNotFoundError: there is no such block.
        """
        with self._changed:
            return self._leasing.block(key).spec

    @property
    def tier_names(self) -> list[str]:
        """Return the names of the tiers, fast to slow."""
        return list(self._movement.order)

    def tier(self, name: str) -> Tier:
        """Return a tier by name, for its ``reserve`` and ``usage``."""
        return self._leasing.tier(name)

    def stats(self) -> StoreStats:
        """Return all counters; subtract two of them for a window."""
        with self._changed:
            counters, tiers, due = self._movement.counters, self._movement.tiers, due_bytes(self._movement)
            written: dict[str, int] = {}
            for tier in tiers.values():
                if isinstance(tier, WriteCountingTier):
                    written.update(tier.bytes_written_by_path())
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
                written_bytes=written,
                due_bytes={f"{link.src}->{link.dst}": due.get((link.src, link.dst), 0) for link in self._links},
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
        """Finish transfers and a commit in progress, and free everything. Uncommitted contents are lost. Idempotent.

        Warns (``RuntimeWarning``) of a commit that failed without a ``wait`` for it. Does nothing in a forked child.
        """
        if self._changed.is_of_parent:
            return
        self._generations.join()
        with self._changed:
            if self._leasing.closed:
                return
            self._leasing.closed = True
            self._movement.prefetcher.follow(None, 0)
            while any(block.num_transfers for block in self._blocks.values()):
                self._changed.wait()
            self._changed.notify_all()
        with ExitStack() as ends:  # all of them run, even if an earlier one raises, as after a device error
            ends.callback(self._generations.close)
            for tier in reversed(list(self._movement.tiers.values())):
                ends.callback(tier.close)
            for link in self._links:
                ends.callback(link.close)

    def give_up_waiting(self) -> None:
        """Make writes that wait for room on a full drive fail, now and from now on. No effect in a forked child."""
        if self._changed.is_of_parent:
            return
        self._movement.give_up_waiting()
        self._generations.full.give_up()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.give_up_waiting()  # for a full drive: the bytes are not needed any more
        self.close()
