"""Granting and ending leases on copies, and pinning and evicting copies."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch.autograd import graph

from tiered.block import CopyState
from tiered.condition import StoreCondition
from tiered.errors import BlockNotFoundError, CapacityError, LeaseError, TieredError
from tiered.events import Event
from tiered.movement import Movement
from tiered.records import NO_THREAD, Block, Copy, Lease, LeaseGroup
from tiered.schedule import Access, Mode, Trace
from tiered.tiers.base import Slot, StreamTier, Tier
from tiered.transfer import Transfer, WaitReason

#: A (key, tier, mode) request to ``TieredStore.acquire_many``.
Request = tuple[str, str, Mode]

_MODES = get_args(Mode)
_MODES_TEXT = "use 'r' to read, 'rw' to change, 'w' to overwrite without reading"


def _find_streams(tiers: Mapping[str, StreamTier], names: Collection[str], stream: Any) -> Mapping[str, Sequence[Any]]:
    """Return the streams that will use the leases, by tier: the tier's current stream and the caller's stream."""
    candidates = {name: (tiers[name].current_stream(), stream) for name in names if name in tiers}
    return {name: [s for s in streams if s is not None] for name, streams in candidates.items()}


class Leasing:
    """The leases of one store, and the rules for eviction and pins.

    The caller of a ``*_locked`` method holds ``movement.changed``.
    """

    def __init__(self, movement: Movement) -> None:
        self.movement = movement
        self.leases: set[Lease] = set()
        self.trace: Trace | None = None
        self.closed = False
        self._acquire_many_lock = StoreCondition()

    # -- lookup ------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``TieredError`` if the store is closed."""
        if self.closed:
            raise TieredError("the store is closed")

    def block(self, key: str) -> Block:
        """Return a block by key. Raises ``BlockNotFoundError``."""
        block = self.movement.blocks.get(key)
        if block is None:
            raise BlockNotFoundError(key)
        return block

    def tier(self, name: str) -> Tier:
        """Return a tier by name. Raises ``ValueError`` if the store has no such tier."""
        if name not in self.movement.tiers:
            raise ValueError(f"no tier named '{name}'; this store has {', '.join(self.movement.tiers)}")
        return self.movement.tiers[name]

    def _target(self, key: str, tier: str) -> tuple[Block, Copy]:
        block = self.block(key)
        if self.tier(tier).device is None:
            raise ValueError(f"tier '{tier}' is not addressable: acquire '{key}' in a faster tier")
        return block, block.copy_in(tier)

    # -- acquiring ---------------------------------------------------------------------------------------------

    def acquire(self, key: str, tier: str, mode: Mode, *, stream: Any = None, timeout_s: float | None = None) -> Lease:
        """Return a lease; see ``TieredStore.acquire``."""
        return self._acquire([(key, tier, mode)], stream, timeout_s)[0]

    def acquire_many(self, requests: Sequence[Request], *, stream: Any, timeout_s: float | None) -> LeaseGroup:
        """Return leases on several blocks, all or nothing; see ``TieredStore.acquire_many``."""
        if len({key for key, _, _ in requests}) != len(requests):
            raise ValueError(f"acquire_many got the same block twice: {[key for key, _, _ in requests]}")
        # Only one caller collects copies at a time. Otherwise, two callers that each hold part of the space could
        # deadlock.
        with self._acquire_many_lock:
            return LeaseGroup(self._acquire(requests, stream, timeout_s))

    def _acquire(self, requests: Sequence[Request], stream: Any, timeout_s: float | None) -> list[Lease]:
        deadline = None if timeout_s is None else self.movement.time_s() + timeout_s
        for key, _, mode in requests:
            if mode not in _MODES:
                raise ValueError(f"lease of '{key}': unknown mode '{mode}'; {_MODES_TEXT}")
        with self.movement.changed:
            self.check_open()
            targets = [(*self._target(key, tier), mode) for key, tier, mode in requests]
            for block, _, mode in targets:
                if mode != "r" and block.spec.home in self.movement.read_only_tiers:
                    text = f"the home of block '{block.spec.key}' is the read-only tier '{block.spec.home}'"
                    raise LeaseError(f"{text}: a lease of mode '{mode}' is not possible")
            # Add a waiter to every copy before the first wait. Copies with waiters are never evicted, so copies that
            # have arrived stay while the remaining copies are fetched.
            for _, copy, _ in targets:
                copy.num_waiters += 1
            try:
                has_waited = is_retry = False
                while (reason := self._first_obstacle(targets)) is not None:
                    if self._cancel_evictions(targets, reason):
                        continue
                    self._refuse_futile_wait(targets, reason)
                    is_retry = not self._wait(reason, targets[0][0], deadline, is_retry=is_retry)
                    has_waited = True
                streams = _find_streams(self.movement.stream_tiers, {copy.tier for _, copy, _ in targets}, stream)
                return [self._grant(block, copy, mode, streams, late=has_waited) for block, copy, mode in targets]
            finally:
                for block, copy, mode in targets:
                    copy.num_waiters -= 1
                    has_new_slot = mode == "w" and copy.state is CopyState.FILLING
                    if has_new_slot and block.writer is None and not block.num_transfers:
                        self._invalidate(copy)  # The lease was not granted, so free its slot.
                        self.movement.changed.notify_all()

    def _first_obstacle(self, targets: Sequence[tuple[Block, Copy, Mode]]) -> WaitReason | None:
        """Advance every target by one step. Return the first reason to wait, or None if all leases can be granted."""
        first_reason: WaitReason | None = None
        for block, copy, mode in targets:
            reason = self._prepare(block, copy, mode)
            first_reason = first_reason or reason
        return first_reason

    def _prepare(self, block: Block, copy: Copy, mode: Mode) -> WaitReason | None:
        if block.writer is not None:
            return WaitReason("lease")
        # If the home copy is CLEAN, no copy is newer, so no fetch is needed. Most blocks in a step are in this state.
        is_at_home = copy.is_home and copy.state is CopyState.CLEAN
        if mode != "w" and not is_at_home:
            reason = self.movement.advance_fetch(block, copy.tier, tick=self.movement.prefetcher.tick, on_demand=True)
            if reason is not None:
                return reason
        if mode == "r":
            return None
        if block.num_transfers:
            return WaitReason("drain")
        if block.num_readers:
            return WaitReason("lease")
        if copy.slot is None:
            slot = self.movement.make_space(block, copy.tier, tick=self.movement.prefetcher.tick, on_demand=True)
            if slot is None:
                return self.movement.space_wait_reason(block, copy.tier)
            self.movement.occupancy.take_slot(copy, slot)
            copy.move(CopyState.FILLING)
        return None

    def _wait(self, reason: WaitReason, block: Block, deadline: float | None, *, is_retry: bool) -> bool:
        """Wait for a notification. If the space is already free, return False, because no notification would come.

        Raises:
            TieredError: the tier refuses space that it reports as free. Can also raise ``TimeoutError`` or a
                transfer's error.
        """
        if reason.cause == "space":
            free_bytes = self.movement.tiers[reason.tier].usage().free_bytes
            if free_bytes >= reason.need_bytes and is_retry:
                raise TieredError(
                    f"tier '{reason.tier}' reports {free_bytes} free bytes but allocates no slot of "
                    f"{reason.need_bytes} bytes: its usage() and allocate() contradict each other. "
                    "tiered.testing.TierSuite tests the contract of a tier"
                )
            if free_bytes >= reason.need_bytes:
                return False
        start_s = self.movement.time_s()
        remaining_s = None if deadline is None else deadline - start_s
        if remaining_s is not None and remaining_s <= 0:
            raise TimeoutError(f"block '{block.spec.key}' not granted in time (waiting for: {reason.cause})")
        num_failures = len(self.movement.failed_write_backs)
        # A transfer that failed before this wait sends no further notification.
        if reason.transfer is None or reason.transfer.error is None:
            self.movement.changed.wait(remaining_s)
        end_s = self.movement.time_s()
        self.check_open()
        self.movement.counters.stall_s[reason.cause] += end_s - start_s
        if self.movement.on_event is not None:
            self.movement.on_event(Event("stall", block.spec.key, "", 0, start_s, end_s, reason.cause))
        transfer = reason.transfer
        if transfer is not None and transfer.error is not None:
            raise transfer.error
        if reason.cause in ("space", "drain") and len(self.movement.failed_write_backs) > num_failures:
            raise self.movement.failed_write_backs[-1]
        return True

    def _grant(
        self, block: Block, copy: Copy, mode: Mode, streams: Mapping[str, Sequence[Any]], *, late: bool
    ) -> Lease:
        movement = self.movement
        if copy.prefetched:
            copy.prefetched = False
            movement.counters.prefetch_late += late
            movement.counters.prefetch_on_time += not late
        movement.mark_used(copy)
        schedule, tick = movement.prefetcher.schedule, movement.prefetcher.tick
        copy.leased_at = tick
        copy.drop_when_clean = False
        if self.trace is not None or (schedule is not None and not copy.is_home):
            access = Access(tick, block.spec.key, copy.tier, mode)
            if self.trace is not None:
                self.trace.accesses.append(access)
            if schedule is not None and not copy.is_home and access not in schedule:
                movement.counters.schedule_misses += 1
        assert copy.slot is not None
        tier = self.movement.tiers[copy.tier]
        if mode == "w" and copy.state is CopyState.STALE:
            copy.move(CopyState.FILLING)
        tensor = tier.tensor(copy.slot, block.spec.shape, block.spec.dtype)
        self._order_streams(copy, streams.get(copy.tier, ()))
        lease = Lease(self, block, copy, mode, tensor)
        if mode == "r":
            copy.readers += 1
        else:
            block.writer = lease
        self.leases.add(lease)
        return lease

    def _order_streams(self, copy: Copy, streams: Sequence[Any]) -> None:
        """Make streams wait for earlier kernels and transfers that use the copy. Does nothing for host memory."""
        if not streams:
            return
        assert copy.slot is not None
        # A write-back only reads the copy, so readers need not wait for it.
        transfer = None if copy.state is CopyState.DRAINING else copy.transfer
        if transfer is not None and transfer.event is not None and transfer.error is None:
            if transfer.event.query():
                copy.transfer = None  # The transfer has ended, so later leases need not wait for it.
            else:
                transfer.wait_stream(streams[-1])
        tier = self.movement.stream_tiers[copy.tier]
        for stream in streams:
            # The slot may have held another block before, so wait for the kernels of all earlier users.
            tier.order_before(copy.slot, stream)

    def return_leases(self, leases: Sequence[Lease], *, abandoned: bool, stream: Any) -> None:
        """End a group of leases; see ``Lease.release`` and ``Lease.abandon``.

        Args:
            abandoned: whether to drop the contents that ``w`` leases wrote.
        """
        movement = self.movement
        with movement.changed:
            # Record the use before the copies can be evicted, because the slot's next user must wait for the kernels
            # queued now.
            for name, tier in movement.stream_tiers.items():
                copies = (lease._copy for lease in leases if lease.tier == name)
                if slots := [copy.slot for copy in copies if copy.slot is not None]:
                    tier.record_use(slots, stream)
            with movement.prefetcher.defer_fetches():
                for lease in leases:
                    block, copy = lease._block, lease._copy
                    self.leases.discard(lease)
                    if lease.mode == "r":
                        copy.readers -= 1
                    else:
                        block.writer = None
                        if abandoned and lease.mode == "w":
                            self._invalidate(copy)
                        else:
                            self._mark_newest(block, copy)
                    movement.advance_eviction(block, copy)
            movement.changed.notify_all()

    def _mark_newest(self, block: Block, copy: Copy) -> None:
        """Make a copy the newest version of its block. Drop or invalidate all other copies."""
        block.version += 1
        self.movement.occupancy.count_valid_copy()
        for other_copy in block.copies.values():
            if other_copy is copy:
                continue
            if not other_copy.is_home and other_copy.slot is not None:
                self.movement.drop(other_copy)
            elif other_copy.is_home and other_copy.state is CopyState.CLEAN:
                other_copy.move(CopyState.STALE)
        if copy.is_home:
            if copy.state is CopyState.FILLING:
                copy.move(CopyState.CLEAN)
        elif copy.state is not CopyState.DIRTY:
            copy.move(CopyState.DIRTY)

    def _invalidate(self, copy: Copy) -> None:
        """Discard the contents of a copy after a ``w`` lease was abandoned or not granted."""
        if copy.is_home:
            copy.move(CopyState.STALE)
        else:
            self.movement.drop(copy)

    # -- refusal -----------------------------------------------------------------------------------------------

    def _refuse_futile_wait(self, targets: Sequence[tuple[Block, Copy, Mode]], reason: WaitReason) -> None:
        """Raise an error if waiting cannot help: the tier is too small, or the caller's own lease is in the way."""
        if reason.cause == "lease":
            thread_ids = caller_thread_ids()
            for block, _, mode in targets:
                for lease in self.leases:
                    if lease._block is block and lease.thread_id in thread_ids and (mode != "r" or lease.mode != "r"):
                        key = block.spec.key
                        holder = "this thread" if lease.thread_id == thread_ids[0] else "the caller of this backward"
                        raise LeaseError(f"'{key}' is leased ('{lease.mode}') by {holder}: release it first")
        if reason.cause == "space":
            copies = [(b, c) for b, c, _ in targets if c.tier == reason.tier and not c.is_home]
            need_bytes = sum(self.tier(reason.tier).slot_bytes(b.spec.nbytes) for b, _ in copies) or reason.need_bytes
            if need_bytes > self._max_free_bytes(reason.tier, freeable_copies=[c for _, c in copies]):
                keys = ", ".join(b.spec.key for b, _, _ in targets)
                raise self._capacity_error(reason.tier, need_bytes, f"to acquire {keys}")

    def _cancel_evictions(self, targets: Sequence[tuple[Block, Copy, Mode]], reason: WaitReason) -> bool:
        """Cancel targets' evictions that need space held by the caller's leases. Return whether any was canceled."""
        if reason.cause != "space" or reason.need_bytes <= self._max_free_bytes(reason.tier):
            return False
        newest_copies = [copy for block, _, _ in targets if (copy := block.newest()) is not None]
        evictions = [copy for copy in newest_copies if copy.drop_when_clean and copy.state is CopyState.DIRTY]
        for copy in evictions:
            copy.drop_when_clean = False
        return bool(evictions)

    def _max_free_bytes(self, tier: str, freeable_copies: Sequence[Copy] = ()) -> int:
        """Return the bytes of ``tier`` that could become free if all other callers released their leases."""
        usage = self.movement.tiers[tier].usage()
        thread_ids = caller_thread_ids()
        own_copies = {lease._copy for lease in self.leases if lease.thread_id in thread_ids}
        freeable_bytes = 0
        for block in self.movement.blocks.values():
            copy = block.copies.get(tier)
            if copy is None or copy.is_home or copy.slot is None:
                continue
            if copy in freeable_copies or not (copy.pins or copy in own_copies):
                freeable_bytes += copy.slot_bytes
        return usage.free_bytes + freeable_bytes

    def leased_bytes_locked(self, tier: str) -> int:
        """Return the bytes of leased copies in a tier."""
        return sum(lease._copy.slot_bytes for lease in self.leases if lease.tier == tier)

    def _capacity_error(self, tier: str, need_bytes: int, detail: str) -> CapacityError:
        """Return a ``CapacityError`` with the tier's byte counts and its largest slots."""
        blocks = self.movement.blocks.values()
        copies = [(b.spec.key, c) for b in blocks if (c := b.copies.get(tier)) and c.slot is not None]
        largest_copies = sorted(copies, key=lambda item: -item[1].slot_bytes)[:3]
        return CapacityError(
            tier,
            need_bytes,
            self.movement.tiers[tier].usage().free_bytes,
            pinned_bytes=sum(copy.slot_bytes for _, copy in copies if copy.pins),
            leased_bytes=self.leased_bytes_locked(tier),
            largest_holders=[(key, copy.slot_bytes) for key, copy in largest_copies],
            detail=detail,
        )

    def home_slot_locked(self, block: Block, tier: Tier) -> Slot:
        """Allocate the home slot of a new block. Evicts copies if needed."""
        nbytes, need_bytes = block.spec.nbytes, tier.slot_bytes(block.spec.nbytes)
        is_retry = False
        # Skip the scan of all blocks (up to 100,000) if enough bytes are free.
        while need_bytes <= tier.usage().free_bytes or need_bytes <= self._max_free_bytes(tier.name):
            slot = self.movement.make_space(block, tier.name, tick=-1, on_demand=True, home=True)
            if slot is not None:
                return slot
            # Wait for evictions in progress. If a write-back fails, this raises TransferError.
            is_retry = not self._wait(self.movement.space_wait_reason(block, tier.name), block, None, is_retry=is_retry)
        raise self._capacity_error(tier.name, need_bytes, f"to register '{block.spec.key}' ({nbytes} bytes)")

    def wait_until_idle_locked(self, block: Block) -> None:
        """Wait until all transfers of the block have ended and no commit holds the block.

        Raises:
            LeaseError: the block is leased.
        """
        while block.num_transfers or block.writer is not None or block.num_readers:
            if any(lease._block is block and lease.thread_id != NO_THREAD for lease in self.leases):
                raise LeaseError(f"block '{block.spec.key}' is leased: release it first")
            self.movement.changed.wait()

    def wait_for_home_locked(self, reason: WaitReason, block: Block) -> None:
        """Wait once for progress in writing the newest bytes of ``block`` to its home.

        Raises:
            CapacityError: waiting cannot help. Can also raise ``LeaseError``.
            TransferError: a write-back failed.
        """
        self._refuse_futile_wait([(block, block.home, "r")], reason)
        self._wait(reason, block, None, is_retry=True)

    # -- placement ---------------------------------------------------------------------------------------------

    def discard(self, keys: Sequence[str]) -> None:
        """Drop the contents of blocks; see ``TieredStore.discard``."""
        with self.movement.changed:
            for key in keys:
                block = self.block(key)
                self.wait_until_idle_locked(block)
                for copy in block.copies.values():
                    if not copy.is_home and copy.slot is not None:
                        self.movement.drop(copy)
                if block.home.state is CopyState.CLEAN and block.spec.home not in self.movement.read_only_tiers:
                    block.home.move(CopyState.STALE)
                self.movement.write_back_errors.pop(block, None)
            self.movement.prefetcher.pump()
            self.movement.changed.notify_all()

    def pin(self, key: str, tier: str) -> None:
        """Add a pin to a copy; see ``TieredStore.pin``."""
        occupancy = self.movement.occupancy
        with self.movement.changed:
            block = self.block(key)
            need_bytes = self.tier(tier).slot_bytes(block.spec.nbytes)
            copy = block.copy_in(tier)
            if not copy.is_home and copy.pins == 0:
                if occupancy.pinned_bytes[tier] + need_bytes > occupancy.bytes_for_copies(tier):
                    raise self._capacity_error(tier, need_bytes, f"to pin '{key}'")
                occupancy.add_pinned(tier, need_bytes, 1)
            copy.pins += 1
            occupancy.num_changes += 1

    def unpin(self, key: str, tier: str) -> None:
        """Remove a pin from a copy; see ``TieredStore.unpin``."""
        occupancy = self.movement.occupancy
        with self.movement.changed:
            block = self.block(key)
            copy = block.copy_in(tier)
            if copy.pins == 0:
                raise LeaseError(f"block '{key}' is not pinned in tier '{tier}'")
            copy.pins -= 1
            occupancy.num_changes += 1
            if not copy.is_home and copy.pins == 0:
                occupancy.add_pinned(tier, self.tier(tier).slot_bytes(block.spec.nbytes), -1)
            self.movement.prefetcher.pump()
            self.movement.changed.notify_all()

    def prefetch(self, key: str, tier: str) -> Transfer:
        """Start fetching a copy; see ``TieredStore.prefetch``."""
        with self.movement.changed:
            block = self.block(key)
            self.tier(tier)
            skipped_transfer = Transfer(block.spec.home, tier, 0, skipped=True)
            if block.writer is not None or not block.has_contents:
                return skipped_transfer
            copy = block.copy_in(tier)
            if copy.state.is_valid:
                return skipped_transfer
            self.movement.advance_fetch(block, tier, tick=self.movement.prefetcher.tick, on_demand=True)
            if copy.state is not CopyState.FILLING or copy.transfer is None:
                return skipped_transfer
            copy.prefetched = True
            return copy.transfer

    def evict(self, key: str, tier: str) -> Transfer:
        """Evict a copy as soon as no lease or transfer uses it; see ``TieredStore.evict``."""
        with self.movement.changed:
            block = self.block(key)
            copy = block.copy_in(tier)
            if copy.pins:
                raise LeaseError(f"block '{key}' is pinned in tier '{tier}': unpin it first")
            if copy.is_home or copy.state is CopyState.ABSENT:
                return Transfer(tier, block.spec.home, 0, skipped=True)
            if copy.state is CopyState.FILLING and block.writer is None:
                copy.drop_when_clean = True
            elif copy.state is not CopyState.FILLING:
                self.movement.evict(block, copy)
            self.movement.start_blocked()
            self.movement.changed.notify_all()
            write_back = copy.transfer if copy.state is CopyState.DRAINING else None
            return write_back or Transfer(tier, block.spec.home, 0, skipped=True)

    def reserve(self, tier: str, nbytes: int) -> None:
        """Reserve bytes of a tier; see ``TieredStore.reserve``."""
        owner, movement = self.tier(tier), self.movement
        with movement.changed:
            while nbytes > owner.usage().free_bytes and any(block.num_transfers for block in movement.blocks.values()):
                movement.changed.wait()
            if nbytes > owner.usage().free_bytes:
                movement.raise_write_back_error()  # A failed write-back is the most likely cause.
            owner.reserve(nbytes)
            movement.occupancy.reserved_bytes[tier] += nbytes
            movement.changed.notify_all()


#: Before Python 3.12, ``sys._current_frames`` deadlocks if a garbage collection during the call frees a tensor.
_CAN_SEE_FRAMES = sys.version_info >= (3, 12)


def caller_thread_ids() -> Sequence[int]:
    """Return ids of threads whose leases this thread must not wait for: itself, then threads waiting for its backward.

    On a CPU, a backward runs in the thread that called it. On a device, it runs in an autograd thread, which would
    deadlock if it waited for a lease of the calling thread. In Python 3.11, the calling thread cannot be found, so the
    deadlock is not detected. If two threads wait for a backward, both are returned: they share the autograd thread.
    """
    own_id = threading.get_ident()
    if not _CAN_SEE_FRAMES or torch._C._current_graph_task_id() == -1:
        return (own_id,)
    # The autograd engine is C++, so the innermost Python frame of a waiting thread is the frame that called the engine.
    engine_code = getattr(graph._engine_run_backward, "__code__", None)
    return (own_id, *(thread_id for thread_id, frame in sys._current_frames().items() if frame.f_code is engine_code))
