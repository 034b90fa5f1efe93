"""Transfers of blocks between tiers: fetch, write back, evict. All of this code runs under the store's lock.

The functions are level-triggered: ``advance_fetch`` takes the next possible step toward a valid copy in a tier and
returns the reason to wait. After the wait, the caller or the prefetcher calls it again. So there is no multi-step plan
that other threads could invalidate by changing the state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tiered.block import CopyState
from tiered.condition import StoreCondition
from tiered.errors import UninitializedBlockError
from tiered.events import Counters, DueBytes, Event, EventSink
from tiered.hops import Routes
from tiered.links.base import Link
from tiered.occupancy import Occupancy
from tiered.policies import Candidate, EvictionPolicy
from tiered.prefetch import Prefetcher
from tiered.records import Block, Copy
from tiered.schedule import NEVER
from tiered.simulation import SimulatedClock
from tiered.tiers.base import DescribingTier, PausingTier, ReadOnlyTier, Slot, StreamTier, Tier
from tiered.tiers.snapshots import DurableTier
from tiered.transfer import Transfer, WaitReason


class Movement:
    """Mover of a store's copies between tiers. Callers hold ``changed``.

    Attributes:
        changed: condition with the store's lock, notified after every change to a copy.
        stream_tiers: tiers on a device with streams, by name.
        describing_tiers: tiers that record the shapes and dtypes of home slots, by name.
        durable_tiers: tiers with files that commits preserve by hard links, by name.
        pausing_tiers: tiers whose writes can wait for space.
        read_only_tiers: names of tiers whose home slots have their contents from the start.
        time_s: clock that measures stalls.
        due: bytes per link, by the tick that needs the bytes.
        inflight_bytes: bytes of all fetches in progress.
        failed_write_backs: errors of all failed write-backs. If an error is added while a caller waits for space or a
            write-back, the caller raises the error.
        write_back_errors: errors of failed write-backs, by block. The newest bytes of these blocks are not at home.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        links: Sequence[Link],
        policy: EvictionPolicy,
        *,
        max_inflight_bytes: int,
        on_event: EventSink | None,
        clock: SimulatedClock | None = None,
    ) -> None:
        self.changed: StoreCondition = clock or StoreCondition()
        self.time_s: Callable[[], float] = time.perf_counter if clock is None else lambda: clock.now_s
        self.blocks: dict[str, Block] = {}
        self.tiers: Mapping[str, Tier] = {tier.name: tier for tier in tiers}
        self.order = [tier.name for tier in tiers]
        # Check optional protocols only here, because isinstance with a protocol is slow.
        self.stream_tiers = {tier.name: tier for tier in tiers if isinstance(tier, StreamTier)}
        self.describing_tiers = {tier.name: tier for tier in tiers if isinstance(tier, DescribingTier)}
        self.pausing_tiers = [tier for tier in tiers if isinstance(tier, PausingTier)]
        self.durable_tiers = {tier.name: tier for tier in tiers if isinstance(tier, DurableTier)}
        self.read_only_tiers = {tier.name for tier in tiers if isinstance(tier, ReadOnlyTier) and tier.is_read_only}
        self._index = {name: index for index, name in enumerate(self.order)}
        self.links = {(link.src, link.dst): link for link in links}
        self.routes = Routes(tuple(self.links))
        self.policy = policy
        self.counters = Counters()
        self.due = DueBytes()
        self.on_event = on_event
        self.occupancy = Occupancy(tiers, self.blocks)
        self.prefetcher = Prefetcher(self, max_inflight_bytes)
        self._blocked: dict[Copy, Block] = {}  # evicted copies that wait for space in an intermediate tier
        self.failed_write_backs: list[BaseException] = []
        self.write_back_errors: dict[Block, BaseException] = {}
        self.inflight_bytes = 0
        self._num_uses = 0

    def add(self, block: Block) -> None:
        """Add a newly registered block."""
        self.occupancy.num_changes += 1
        self.blocks[block.spec.key] = block
        self.prefetcher.add_block(block)

    @property
    def slowest_writable(self) -> str:
        """Name of the slowest writable tier, the default home of a block."""
        return next(name for name in reversed(self.order) if name not in self.read_only_tiers)

    def nearest_addressable(self, home: str) -> str:
        """Return the slowest addressable tier that is not slower than ``home``."""
        names = self.order[: self.order.index(home) + 1]
        return next(name for name in reversed(names) if self.tiers[name].device is not None)

    # -- fetching ----------------------------------------------------------------------------------------------

    def advance_fetch(self, block: Block, tier: str, *, tick: int, on_demand: bool) -> WaitReason | None:
        """Take the next step toward a valid copy of ``block`` in ``tier``. Return the reason to wait, or None if valid.

        Args:
            tick: tick that needs the copy. Unless ``on_demand`` is set, only copies with a later next use are evicted.

        Raises:
            UninitializedBlockError: the block has no contents.
        """
        target = block.copy_in(tier)
        newest_copy = block.newest()
        if newest_copy is not None and newest_copy.drop_when_clean:
            # Finish the eviction first. If the copy were reused, the number of moved bytes would depend on timing.
            reason = self.write_back(block, newest_copy) or self.transfer_wait_reason(newest_copy, "drain")
            if reason is not None:
                return reason
            newest_copy = block.newest()
        if target.state.is_valid:
            return None
        if target.state is CopyState.FILLING:
            return self.transfer_wait_reason(target, "fill")
        if target.is_home:
            if newest_copy is None:
                raise UninitializedBlockError(block.spec.key)
            return self.write_back(block, newest_copy) or self.transfer_wait_reason(newest_copy, "drain")
        source = self._nearest_source(block, tier)
        if source is None:
            if block.home.state is CopyState.FILLING:
                return self.transfer_wait_reason(block.home, "fill")
            raise UninitializedBlockError(block.spec.key)
        hop = self.routes.between(source.tier, tier)[-1][0]
        if hop != source.tier:
            reason = self.advance_fetch(block, hop, tick=tick, on_demand=on_demand)
            return reason or self.advance_fetch(block, tier, tick=tick, on_demand=on_demand)
        slot = self.make_space(block, tier, tick=tick, on_demand=on_demand)
        if slot is None:
            return self.space_wait_reason(block, tier)
        self.occupancy.take_slot(target, slot)
        self._fill(block, source, target, tick)
        return self.transfer_wait_reason(target, "fill")

    @staticmethod
    def transfer_wait_reason(copy: Copy, cause: str) -> WaitReason | None:
        """Return a reason to wait for the transfer to or from ``copy``, or None if the transfer has ended."""
        has_failed = copy.transfer is not None and copy.transfer.error is not None
        if copy.state in (CopyState.FILLING, CopyState.DRAINING):
            # Callers that waited for a failed transfer raise its error. Later callers retry once its callback has run.
            return WaitReason(cause, None if has_failed else copy.transfer)
        return WaitReason(cause, copy.transfer) if has_failed and copy.state is not CopyState.CLEAN else None

    def _nearest_source(self, block: Block, tier: str) -> Copy | None:
        def distance(copy: Copy) -> tuple[int, bool, int]:
            is_slow = copy.tier in self.read_only_tiers  # Among equally near copies, prefer writable tiers.
            return len(self.routes.between(copy.tier, tier)), is_slow, abs(self._index[copy.tier] - self._index[tier])

        return min((copy for copy in block.copies.values() if copy.state.is_valid), key=distance, default=None)

    def _fill(self, block: Block, source: Copy, target: Copy, tick: int) -> None:
        assert source.slot is not None and target.slot is not None
        target.move(CopyState.FILLING)
        source.readers += 1
        block.num_transfers += 1
        nbytes = block.spec.nbytes
        self.inflight_bytes += nbytes
        self.due.add((source.tier, target.tier), nbytes, tick=tick, current_tick=self.prefetcher.tick)
        transfer = self.links[source.tier, target.tier].submit(source.slot, target.slot, nbytes)
        target.transfer = transfer
        self.mark_used(target)
        source.prefetched = False  # The source was prefetched for this fetch, so do not count it as wasted.
        # Add the callback last: if the transfer has ended, it runs at once and needs the state set above.
        transfer.add_done_callback(lambda done: self._on_fetched(block, source, target, tick, done))

    def _on_fetched(self, block: Block, source: Copy, target: Copy, tick: int, transfer: Transfer) -> None:
        with self.changed:
            source.readers -= 1
            block.num_transfers -= 1
            self.inflight_bytes -= block.spec.nbytes
            self.occupancy.count_valid_copy()
            if transfer.error is None:
                target.move(CopyState.CLEAN)
            else:
                hop, nbytes = (source.tier, target.tier), block.spec.nbytes
                self.due.add(hop, -nbytes, tick=tick, current_tick=self.prefetcher.tick)
                self.occupancy.release_slot(target)
                target.move(CopyState.ABSENT)
            self._emit("fetch", block, target.tier, transfer)
            self.advance_eviction(block, source)
            self.advance_eviction(block, target)
            self.prefetcher.pump()
            self.changed.notify_all()

    # -- writing back ------------------------------------------------------------------------------------------

    def write_back(self, block: Block, copy: Copy) -> WaitReason | None:
        """Start writing a DIRTY copy to its home. Return the reason to wait, or None if the write is in progress."""
        if copy.state is CopyState.DRAINING:
            return None
        assert copy.state is CopyState.DIRTY and copy.slot is not None and block.home.slot is not None
        if block.writer is not None:
            return WaitReason("lease")
        hops = list(self.routes.between(copy.tier, block.spec.home))
        hop = hops[0][1]
        relay = None if hop == block.spec.home else block.copy_in(hop)
        if relay is not None and relay.state.is_valid:
            hops.pop(0)
        elif relay is not None:
            if relay.state is CopyState.FILLING:  # A fetch of the same bytes is in progress: reuse its copy.
                return self.transfer_wait_reason(relay, "fill")
            slot = self.make_space(block, hop, tick=self.prefetcher.tick, on_demand=True, will_retry=False)
            if slot is None:
                return self.space_wait_reason(block, hop)
            self.occupancy.take_slot(relay, slot)
        copy.move(CopyState.DRAINING)
        block.home.move(CopyState.FILLING)
        block.num_transfers += 1
        _count_write_back(self, block, hops, 1)
        if relay is None:
            transfer = self.links[copy.tier, block.spec.home].submit(copy.slot, block.home.slot, block.spec.nbytes)
        else:
            self.occupancy.add_relayed(relay, 1)
            transfer = submit_two_hops(self.links, block, copy, relay)
        copy.transfer = block.home.transfer = transfer
        # Add the callback last: if the transfer has ended, it runs at once and needs the state set above.
        transfer.add_done_callback(lambda done: self._on_written_back(block, copy, relay, hops, done))
        return None

    def _on_written_back(
        self, block: Block, copy: Copy, relay: Copy | None, hops: Sequence[tuple[str, str]], transfer: Transfer
    ) -> None:
        with self.changed:
            block.num_transfers -= 1
            self.occupancy.count_valid_copy()
            if transfer.error is None:
                copy.move(CopyState.CLEAN)
                block.home.move(CopyState.CLEAN)
                self.write_back_errors.pop(block, None)
            else:  # The copy keeps the only valid bytes. Callers that wait for space or the home raise the error.
                _count_write_back(self, block, hops, -1)
                self.failed_write_backs.append(transfer.error)
                self.write_back_errors[block] = transfer.error
                copy.move(CopyState.DIRTY)
                copy.drop_when_clean = False
                block.home.move(CopyState.STALE)
            if relay is not None:
                self._end_relay(block, relay, transfer)
            self._emit("write_back", block, block.spec.home, transfer)
            self.advance_eviction(block, copy)
            self.prefetcher.pump()
            self.changed.notify_all()

    def is_moving(self) -> bool:
        """Start blocked write-backs if space is now free. Return whether a transfer is in progress."""
        while not any(block.num_transfers for block in self.blocks.values()):
            if not self.start_blocked():
                return False
        return True

    def retry_failed_write_backs(self) -> None:
        """Retry every failed write-back. After a success, evict the copy unless it is pinned."""
        for block in list(self.write_back_errors):
            newest_copy = block.newest()
            if newest_copy is not None and newest_copy.state is CopyState.DIRTY:
                if newest_copy.pins:
                    self.write_back(block, newest_copy)
                else:
                    self.evict(block, newest_copy)

    def raise_write_back_error(self) -> None:
        """Raise the error of the first block whose last write-back failed, if any."""
        for error in self.write_back_errors.values():
            raise error

    def give_up_waiting(self) -> None:
        """Make current and future writes fail if a drive is full, instead of waiting for space."""
        for tier in self.pausing_tiers:
            tier.give_up_waiting()

    def _end_relay(self, block: Block, relay: Copy, transfer: Transfer) -> None:
        """Release the intermediate copy of a write-back; evict it if the write-back created it."""
        self.occupancy.add_relayed(relay, -1)
        relay.readers -= 1
        if relay.state is CopyState.FILLING and transfer.error is not None:
            self.occupancy.release_slot(relay)
            relay.move(CopyState.ABSENT)
        elif relay.state is CopyState.FILLING:
            relay.move(CopyState.CLEAN)
            relay.drop_when_clean = True
        self.advance_eviction(block, relay)

    # -- making space ------------------------------------------------------------------------------------------

    def make_space(
        self, block: Block, tier: str, *, tick: int, on_demand: bool, home: bool = False, will_retry: bool = True
    ) -> Slot | None:
        """Return a slot in ``tier``, or None if there is not enough space yet. Evicts copies in the policy's order.

        Args:
            home: whether the slot is the block's home slot.
            will_retry: whether the caller retries after an eviction. If False, a buffer of another size can be dropped.
        """
        owner = self.tiers[tier]
        name, nbytes = block.spec.key, block.spec.nbytes
        has_fixed_sizes = not home and tier in self.occupancy.copy_buffers
        if has_fixed_sizes and not self._make_buffer(block, tier, tick=tick, on_demand=on_demand):
            is_buffer_coming = will_retry and self.occupancy.evicting_copy(block, tier) is not None
            if is_buffer_coming or not on_demand:
                return None
            # No buffer of this size will become free in time, so the allocation drops a buffer of another size.
        slot = owner.allocate(nbytes, name=name, home=home)
        if slot is not None:
            return slot
        missing_bytes = owner.slot_bytes(nbytes) - owner.usage().free_bytes
        for _, copy in self.occupancy.copies(tier):
            if copy.drop_when_clean and copy.state is CopyState.DRAINING:
                missing_bytes -= copy.slot_bytes
        evictable = {b.spec.key: (b, c) for b, c in self.occupancy.copies(tier) if self._is_evictable(b, c)}
        for candidate in self._rank(evictable):
            if missing_bytes <= 0:
                break
            if not on_demand and candidate.next_use <= tick:
                continue
            victim_block, victim = evictable[candidate.key]
            missing_bytes -= victim.slot_bytes
            self.evict(victim_block, victim)
        return owner.allocate(nbytes, name=name, home=home)

    def _make_buffer(self, block: Block, tier: str, *, tick: int, on_demand: bool) -> bool:
        """If no buffer of the block's size is free, evict a copy of this size. Return whether a buffer is free now."""
        owner, nbytes = self.occupancy.buffer_tiers[tier], block.spec.nbytes
        if owner.has_buffer(nbytes):
            return True
        if self.occupancy.evicting_copy(block, tier) is not None:
            return False
        slot_bytes = self.tiers[tier].slot_bytes(nbytes)
        same_size_copies = [(b, c) for b, c in self.occupancy.copies(tier) if c.slot_bytes == slot_bytes]
        evictable = {b.spec.key: (b, c) for b, c in same_size_copies if self._is_evictable(b, c)}
        victim = next((c for c in self._rank(evictable) if on_demand or c.next_use > tick), None)
        if victim is not None:
            self.evict(*evictable[victim.key])
        return owner.has_buffer(nbytes)

    def space_wait_reason(self, block: Block, tier: str) -> WaitReason:
        """Return the reason to wait after ``make_space`` returned None."""
        evicting_copy = self.occupancy.evicting_copy(block, tier) if tier in self.occupancy.copy_buffers else None
        reason = None if evicting_copy is None else self.transfer_wait_reason(evicting_copy, "drain")
        return reason or WaitReason("space", tier=tier, need_bytes=self.tiers[tier].slot_bytes(block.spec.nbytes))

    def evict(self, block: Block, copy: Copy) -> None:
        """Drop a copy. A DIRTY copy is first written back and then dropped."""
        is_first = not copy.drop_when_clean
        copy.drop_when_clean = True
        if copy.state in (CopyState.DIRTY, CopyState.DRAINING):
            self.counters.evictions_dirty += is_first
        else:
            self.counters.evictions_clean += is_first
        self.advance_eviction(block, copy)

    def advance_eviction(self, block: Block, copy: Copy) -> None:
        """Advance a requested eviction, unless a lease or transfer uses the copy. A pin cancels the eviction."""
        if not copy.drop_when_clean or block.writer is not None:
            return
        if copy.pins:
            # Pins cancel an eviction. Waiting ``acquire`` calls do not, because otherwise the moved bytes would depend
            # on timing.
            copy.drop_when_clean = False
        elif copy.state is CopyState.DIRTY:
            if self.write_back(block, copy) is not None:
                self._blocked[copy] = block
        elif copy.state is CopyState.CLEAN and not copy.readers:
            self.drop(copy)

    def start_blocked(self) -> bool:
        """Start blocked write-backs of evicted copies if space is now free. Return whether any started.

        Write-backs start even if no caller needs the space. Otherwise the number of moved bytes would depend on timing:
        a copy might or might not be written before its next use.
        """
        num_blocked = len(self._blocked)
        for copy, block in list(self._blocked.items()):
            if self._blocked.pop(copy, None) is not None and copy.state is CopyState.DIRTY:
                self.advance_eviction(block, copy)
        return len(self._blocked) < num_blocked

    @property
    def has_blocked_write_backs(self) -> bool:
        """Whether a write-back is waiting for space in an intermediate tier."""
        return bool(self._blocked)

    def blocked_slots(self) -> Mapping[tuple[str, int], int]:
        """Return the number of intermediate slots that blocked write-backs need, by (tier, slot bytes)."""
        slots = Counter[tuple[str, int]]()
        for copy, block in self._blocked.items():
            hop = self.routes.between(copy.tier, block.spec.home)[0][1]
            if hop != block.spec.home:
                slots[hop, self.occupancy.slot_bytes(block, hop)] += 1
        return slots

    def drop(self, copy: Copy) -> None:
        """Free the slot of a non-home copy without writing the copy back."""
        assert not copy.is_home and not copy.readers, (copy.tier, copy.readers)
        if copy.prefetched:
            self.counters.prefetch_wasted += 1
        self.occupancy.release_slot(copy)
        copy.move(CopyState.ABSENT)

    @staticmethod
    def _is_evictable(block: Block, copy: Copy) -> bool:
        return (
            not copy.is_home
            and copy.state in (CopyState.CLEAN, CopyState.DIRTY)
            and not copy.readers
            and block.writer is None
            and not copy.pins
            and not copy.num_waiters
        )

    def mark_used(self, copy: Copy) -> None:
        """Make a copy the most recently used one. A counter orders the uses, so callers need not advance the tick."""
        self._num_uses += 1
        copy.last_use = self._num_uses

    def _rank(self, evictable: Mapping[str, tuple[Block, Copy]]) -> Sequence[Candidate]:
        return self.policy.rank(
            [self._candidate(block, copy) for block, copy in evictable.values()], self.prefetcher.tick
        )

    def _candidate(self, block: Block, copy: Copy) -> Candidate:
        key, next_use = block.spec.key, NEVER
        schedule, tick = self.prefetcher.schedule, self.prefetcher.tick
        if schedule is not None:
            # The use at the current tick is still to come if the copy has not been leased in this tick.
            is_past = copy.leased_at == tick
            next_use = schedule.next_use(key, copy.tier, tick if is_past else tick - 1)
        return Candidate(key, copy.slot_bytes, copy.state is CopyState.DIRTY, copy.last_use, next_use)

    def _emit(self, kind: str, block: Block, tier: str, transfer: Transfer) -> None:
        if self.on_event is not None:
            self.on_event(
                Event(kind, block.spec.key, tier, transfer.nbytes, transfer.start_s, transfer.end_s, transfer.path)
            )


def due_bytes(movement: Movement) -> Mapping[tuple[str, str], int]:
    """Return the bytes per link for all uses up to the current tick, regardless of when the bytes move."""
    totals = Counter(movement.due.bytes_until(movement.prefetcher.tick))
    for copy, block in movement._blocked.items():
        for hop in movement.routes.between(copy.tier, block.spec.home):
            totals[hop] += block.spec.nbytes
    return totals


def _count_write_back(movement: Movement, block: Block, hops: Sequence[tuple[str, str]], count: int) -> None:
    """Count a write-back's bytes on its links. A ``count`` of -1 cancels a failed write-back."""
    tick = movement.prefetcher.tick
    for hop in hops:
        movement.due.add(hop, count * block.spec.nbytes, tick=tick, current_tick=tick)


def submit_two_hops(links: Mapping[tuple[str, str], Link], block: Block, copy: Copy, relay: Copy) -> Transfer:
    """Start writing ``copy`` to the block's home through ``relay``. The caller holds the store's lock.

    Args:
        relay: intermediate copy, which has a slot. If this copy is valid, the first hop is omitted.

    Returns:
        A transfer that ends when the second hop ends.
    """
    assert copy.slot is not None and relay.slot is not None
    nbytes, home = block.spec.nbytes, block.home
    transfer = Transfer(copy.tier, home.tier, nbytes, "staged")
    relay.readers += 1

    def start_second_hop(first_transfer: Transfer | None) -> None:
        if first_transfer is not None and first_transfer.error is not None:
            transfer.finish(first_transfer.error)
            return
        assert relay.slot is not None and home.slot is not None
        second_transfer = links[relay.tier, home.tier].submit(relay.slot, home.slot, nbytes)
        second_transfer.add_done_callback(lambda done: transfer.finish(done.error))

    if relay.state.is_valid:
        start_second_hop(None)
    else:
        relay.move(CopyState.FILLING)
        relay.transfer = transfer
        links[copy.tier, relay.tier].submit(copy.slot, relay.slot, nbytes).add_done_callback(start_second_hop)
    return transfer
