"""Moving blocks between tiers: fetch, write back, make room. Everything here runs under the store's lock.

The functions are level-triggered: ``bring`` takes the next possible step towards "a valid copy is in that
tier" and says what it waits for; when something ends, the waiting caller or the prefetcher calls it again.
So no plan of several steps has to be kept consistent while other threads change the world.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tiered.block import CopyState
from tiered.errors import UninitializedBlockError
from tiered.events import Counters, Event, EventSink
from tiered.links.base import Link
from tiered.policies import Candidate, EvictionPolicy
from tiered.prefetch import Travels, next_fetches
from tiered.records import Block, Copy
from tiered.schedule import NEVER, Access, Schedule
from tiered.simulation import SimulatedClock
from tiered.tiers.base import BufferTier, PausingTier, ReadOnlyTier, Slot, StreamTier, Tier
from tiered.tiers.snapshots import DurableTier
from tiered.transfer import Transfer, Waiting


class Movement:
    """The moving part of a store: owns no promise, only the mechanics. Call with ``changed`` held.

    Attributes:
        changed: condition over the store's lock, notified after every change of any copy.
        stream_tiers: by name, those on a device with streams.
        durable_tiers: by name, those whose files commits keep by links.
        pausing_tiers: those whose writes may wait for room.
        buffer_tiers: by name, those that keep buffers of exact sizes.
        read_only_tiers: names of those whose homes hold their contents from the start.
        time_s: the clock that stalls are measured with.
        now: the trainer's tick.
        schedule: the known future, or None.
        home_bytes: by tier, of home slots.
        reserved_bytes: by tier, of reservations.
        pinned_bytes: by tier, what pinned copies take once they are there.
        copy_bytes: by tier, of slots that are no homes.
        num_changes: counts what may change what is to be fetched, beside the tick and the sums of bytes: copies that
            came, went, or were filled, and pins.
        settled: the state in which nothing was left to fetch when it was last looked for, or None.
        copy_buffers: tier -> bytes of a slot -> how many buffers of it are kept for copies. No copy takes the room of
            buffers of another size in such a tier, as long as there is another way.
        pinned_buffers: by (tier, bytes of a slot), the pinned copies.
        failed_write_backs: errors of write-backs; raised to callers that wait for room while one is added.
        unsaved: blocks whose newest bytes are not at home because their last write-back failed, and why.
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
        self.changed: threading.Condition = clock or threading.Condition()
        self.time_s: Callable[[], float] = time.perf_counter if clock is None else lambda: clock.now_s
        self.blocks: dict[str, Block] = {}
        self.tiers: Mapping[str, Tier] = {tier.name: tier for tier in tiers}
        self.order = [tier.name for tier in tiers]
        # What tiers can do besides is found out once: asking a protocol takes longer than most calls.
        self.stream_tiers = {tier.name: tier for tier in tiers if isinstance(tier, StreamTier)}
        self.pausing_tiers = [tier for tier in tiers if isinstance(tier, PausingTier)]
        self.durable_tiers = {tier.name: tier for tier in tiers if isinstance(tier, DurableTier)}
        self.buffer_tiers = {tier.name: tier for tier in tiers if isinstance(tier, BufferTier)}
        self.read_only_tiers = {tier.name for tier in tiers if isinstance(tier, ReadOnlyTier) and tier.is_read_only}
        # A read-only tier is beside the others: nothing passes it, and what is at home there has no nearer place.
        writable = [name for name in self.order if name not in self.read_only_tiers]
        self._distance = {name: len(self.order) for name in self.order} | {n: at for at, n in enumerate(writable)}
        self.links = {(link.src, link.dst): link for link in links}
        self.policy = policy
        self.counters = Counters()
        self.on_event = on_event
        self.schedule: Schedule | None = None
        self._travels = Travels(None)
        self._passed_over: set[tuple[int, str]] = set()  # (tick, key) of accesses that will not take place
        self.lookahead_bytes: int | None = 0
        self.now = 0
        self.home_bytes = dict.fromkeys(self.order, 0)
        self.pinned_bytes = dict.fromkeys(self.order, 0)
        self.reserved_bytes = dict.fromkeys(self.order, 0)
        self.copy_bytes = dict.fromkeys(self.order, 0)
        self.num_changes = 0
        self.settled: object = None
        self.copy_buffers: dict[str, Mapping[int, int]] = {}
        self.pinned_buffers = Counter[tuple[str, int]]()
        self._relayed_bytes = dict.fromkeys(self.order, 0)  # write-backs that pass through a tier now
        self._relayed_buffers = Counter[tuple[str, int]]()
        self._held_up: dict[Copy, Block] = {}  # on their way out, for which there was no room on the way yet
        self.failed_write_backs: list[BaseException] = []
        self.unsaved: dict[Block, BaseException] = {}
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        self._num_uses = 0
        self._is_pumping = False

    def follow(self, schedule: Schedule | None, lookahead_bytes: int | None) -> None:
        """Fetch ahead by another schedule."""
        self.num_changes += 1
        self.schedule, self.lookahead_bytes, self._travels = schedule, lookahead_bytes, Travels(schedule)
        self._passed_over = set()

    def advance(self, tick: int) -> None:
        """Go to a tick."""
        self.now = tick
        if self._passed_over:
            self._passed_over = {each for each in self._passed_over if each[0] >= tick}

    def pass_over(self, accesses: Iterable[tuple[int, str]], but_not: Iterable[tuple[int, str]]) -> None:
        """Fetch nothing for these accesses, (tick, key), before they are past."""
        self.num_changes += 1
        self._passed_over.update(accesses)
        self._passed_over.difference_update(but_not)

    def add(self, block: Block) -> None:
        """Add a registered block."""
        self.num_changes += 1
        self.blocks[block.spec.key] = block
        self._travels.know(block)

    def nearest_addressable(self, home: str) -> str:
        """Return the tier nearest to ``home``, on the fast side, that a lease can be in."""
        names = self.order[: self.order.index(home) + 1]
        return next(name for name in reversed(names) if self.tiers[name].device is not None)

    # -- bringing a copy in ------------------------------------------------------------------------------------

    def bring(self, block: Block, tier: str, *, for_use: int, demand: bool) -> Waiting | None:
        """Take the next step towards a valid copy of ``block`` in ``tier``; return None when it is there.

        Args:
            for_use: tick of the use it serves. Without ``demand``, only copies needed later than that make way.

        Raises:
            UninitializedBlockError: there are no contents to bring.
        """
        target = block.copy_in(tier)
        newest = block.newest()
        if newest is not None and newest.drop_when_clean:
            # On its way out. Using it after all would make the bytes moved depend on who is faster.
            waiting = self.write_back(block, newest) or self.rest_of(newest, "drain")
            if waiting is not None:
                return waiting
            newest = block.newest()
        if target.state.is_valid:
            return None
        if target.state is CopyState.FILLING:
            return Waiting("fill", target.transfer)
        if target.is_home:
            if newest is None:
                raise UninitializedBlockError(block.spec.key)
            return self.write_back(block, newest) or self.rest_of(newest, "drain")
        source = self._nearest_source(block, tier)
        if source is None:
            if block.home.state is CopyState.FILLING:
                return Waiting("fill", block.home.transfer)
            raise UninitializedBlockError(block.spec.key)
        hop = self._hop_towards(source.tier, tier)
        if hop != source.tier:
            waiting = self.bring(block, hop, for_use=for_use, demand=demand)
            return waiting or self.bring(block, tier, for_use=for_use, demand=demand)
        slot = self.make_room(block, tier, for_use=for_use, demand=demand)
        if slot is None:
            return self.no_room(block, tier)
        self.take_slot(target, slot)
        self._fill(block, source, target)
        return self.rest_of(target, "fill")

    @staticmethod
    def rest_of(copy: Copy, cause: str) -> Waiting | None:
        """Return what to wait for after a transfer to or from ``copy`` was started: None where it ended at once."""
        assert copy.transfer is not None
        is_over = copy.state is CopyState.CLEAN or (copy.state is CopyState.ABSENT and copy.transfer.error is None)
        return None if is_over else Waiting(cause, copy.transfer)

    def _nearest_source(self, block: Block, tier: str) -> Copy | None:
        here = self._distance[tier]
        valid = [copy for copy in block.copies.values() if copy.state.is_valid]
        return min(valid, key=lambda copy: abs(self._distance[copy.tier] - here), default=None)

    def _hop_towards(self, src: str, dst: str) -> str:
        """Return the tier from which ``dst`` is filled on the way from ``src``: ``src`` itself or a neighbour."""
        return route(self.order, src, dst, self.links)[-1][0]

    def _fill(self, block: Block, source: Copy, target: Copy) -> None:
        assert source.slot is not None and target.slot is not None
        target.move(CopyState.FILLING)
        source.readers += 1
        block.num_transfers += 1
        nbytes = block.spec.nbytes
        self._inflight_bytes += nbytes
        transfer = self.links[source.tier, target.tier].submit(source.slot, target.slot, nbytes)
        target.transfer = transfer
        self.mark_used(target)
        source.prefetched = False  # it was fetched for this
        # Last: of a transfer that is over already the callback runs here and now, and must find all of the above.
        transfer.add_done_callback(lambda done: self._filled(block, source, target, done))

    def _filled(self, block: Block, source: Copy, target: Copy, transfer: Transfer) -> None:
        with self.changed:
            source.readers -= 1
            block.num_transfers -= 1
            self._inflight_bytes -= block.spec.nbytes
            self.num_changes += 1
            if transfer.error is None:
                target.move(CopyState.CLEAN)
            else:
                self._release_slot(target)
                target.move(CopyState.ABSENT)
            self._emit("fetch", block, target.tier, transfer)
            self.settle(block, source)
            self.settle(block, target)
            self.pump()
            self.changed.notify_all()

    # -- writing back ------------------------------------------------------------------------------------------

    def write_back(self, block: Block, copy: Copy) -> Waiting | None:
        """Start writing a DIRTY copy to its home; return why it cannot start yet, or None when under way."""
        if copy.state is CopyState.DRAINING:
            return None
        assert copy.state is CopyState.DIRTY and copy.slot is not None and block.home.slot is not None
        if block.writer is not None:
            return Waiting("lease")
        hop = self._hop_towards(block.spec.home, copy.tier)
        middle = None if hop == block.spec.home else block.copy_in(hop)
        if middle is not None and not middle.state.is_valid:
            if middle.state is CopyState.FILLING:  # a fetch of these very bytes: send them on from there
                return Waiting("fill", middle.transfer)
            slot = self.make_room(block, hop, for_use=self.now, demand=True, waits=False)
            if slot is None:
                return self.no_room(block, hop)
            self.take_slot(middle, slot)
        copy.move(CopyState.DRAINING)
        block.home.move(CopyState.FILLING)
        block.num_transfers += 1
        if middle is None:
            transfer = self.links[copy.tier, block.spec.home].submit(copy.slot, block.home.slot, block.spec.nbytes)
        else:
            self._relayed_bytes[middle.tier] += middle.slot_bytes
            self._relayed_buffers[middle.tier, middle.slot_bytes] += 1
            transfer = submit_two_hops(self.links, block, copy, middle)
        copy.transfer = block.home.transfer = transfer
        # Last: of a transfer that is over already the callback runs here and now, and must find all of the above.
        transfer.add_done_callback(lambda done: self._drained(block, copy, middle, done))
        return None

    def _drained(self, block: Block, copy: Copy, middle: Copy | None, transfer: Transfer) -> None:
        with self.changed:
            block.num_transfers -= 1
            self.num_changes += 1
            if transfer.error is None:
                copy.move(CopyState.CLEAN)
                block.home.move(CopyState.CLEAN)
                self.unsaved.pop(block, None)
            else:  # the copy keeps the only valid bytes; callers that wait for room or for the home get the error
                self.failed_write_backs.append(transfer.error)
                self.unsaved[block] = transfer.error
                copy.move(CopyState.DIRTY)
                copy.drop_when_clean = False
                block.home.move(CopyState.STALE)
            if middle is not None:
                self._end_relay(block, middle, transfer)
            self._emit("write_back", block, block.spec.home, transfer)
            self.settle(block, copy)
            self.pump()
            self.changed.notify_all()

    def is_moving(self) -> bool:
        """Return whether a transfer is under way, after starting those that were held up and have room by now."""
        while not any(block.num_transfers for block in self.blocks.values()):
            if not self.send_held_up():
                return False
        return True

    def retry_unsaved(self) -> None:
        """Start every write-back that failed once more; copies that were on their way out go when it succeeds."""
        for block in list(self.unsaved):
            newest = block.newest()
            if newest is not None and newest.state is CopyState.DIRTY:
                if newest.pins:
                    self.write_back(block, newest)
                else:
                    self.evict(block, newest)

    def raise_unsaved(self) -> None:
        """Raise why the first block that should be at home is not there; nothing if all are."""
        for error in self.unsaved.values():
            raise error

    def give_up_waiting(self) -> None:
        """Let writes fail that wait for room on a full drive, also those to come."""
        for tier in self.pausing_tiers:
            tier.give_up_waiting()

    def _end_relay(self, block: Block, middle: Copy, transfer: Transfer) -> None:
        """Release the copy that a write-back went through; one that was made for it is evicted."""
        self._relayed_bytes[middle.tier] -= middle.slot_bytes
        self._relayed_buffers[middle.tier, middle.slot_bytes] -= 1
        middle.readers -= 1
        if middle.state is CopyState.FILLING and transfer.error is not None:
            self._release_slot(middle)
            middle.move(CopyState.ABSENT)
        elif middle.state is CopyState.FILLING:
            middle.move(CopyState.CLEAN)
            middle.drop_when_clean = True
        self.settle(block, middle)

    # -- making room -------------------------------------------------------------------------------------------

    def make_room(
        self, block: Block, tier: str, *, for_use: int, demand: bool, home: bool = False, waits: bool = True
    ) -> Slot | None:
        """Return a slot in ``tier``, evicting what the policy ranks first; None when room is not there yet.

        Args:
            block: that gets it.
            tier: of the slot.
            for_use: as for ``bring``.
            demand: as for ``bring``.
            home: it is the block's home slot.
            waits: the caller asks again when a copy has left; else a buffer of another size rather makes way.
        """
        owner = self.tiers[tier]
        name, nbytes = block.spec.key, block.spec.nbytes
        keeps_to_size = not home and tier in self.copy_buffers
        if keeps_to_size and not self._make_buffer(block, tier, for_use=for_use, demand=demand):
            is_near = waits and self._leaving(block, tier) is not None
            if is_near or not demand:
                return None
            # No buffer of this size comes back by itself: one of another size has to go after all.
        slot = owner.allocate(nbytes, name=name, home=home)
        if slot is not None:
            return slot
        missing = owner.slot_bytes(nbytes) - owner.usage().free_bytes
        for _, copy in self._copies(tier):
            if copy.drop_when_clean and copy.state is CopyState.DRAINING:
                missing -= copy.slot_bytes
        evictable = {b.spec.key: (b, c) for b, c in self._copies(tier) if self._may_evict(b, c)}
        for candidate in self._ranked(evictable):
            if missing <= 0:
                break
            if not demand and candidate.next_use <= for_use:
                continue
            victim_block, victim = evictable[candidate.key]
            missing -= victim.slot_bytes
            self.evict(victim_block, victim)
        return owner.allocate(nbytes, name=name, home=home)

    def _make_buffer(self, block: Block, tier: str, *, for_use: int, demand: bool) -> bool:
        """Evict a copy of the same size, if there is no buffer for it; return whether there is one now."""
        owner, nbytes = self.buffer_tiers[tier], block.spec.nbytes
        if owner.has_buffer(nbytes):
            return True
        if self._leaving(block, tier) is not None:
            return False
        slot_bytes = self.tiers[tier].slot_bytes(nbytes)
        copies = [(b, c) for b, c in self._copies(tier) if c.slot_bytes == slot_bytes and self._may_evict(b, c)]
        evictable = {b.spec.key: (b, c) for b, c in copies}
        victim = next((each for each in self._ranked(evictable) if demand or each.next_use > for_use), None)
        if victim is not None:
            self.evict(*evictable[victim.key])
        return owner.has_buffer(nbytes)

    def _leaving(self, block: Block, tier: str) -> Copy | None:
        """Return a copy on its way out, if there is one whose buffer ``block`` could have."""
        slot_bytes = self.tiers[tier].slot_bytes(block.spec.nbytes)
        for _, copy in self._copies(tier):
            if copy.drop_when_clean and copy.state is CopyState.DRAINING and copy.slot_bytes == slot_bytes:
                return copy
        return None

    def no_room(self, block: Block, tier: str) -> Waiting:
        """Return the reason to wait after ``make_room`` found none."""
        leaving = self._leaving(block, tier) if tier in self.copy_buffers else None
        if leaving is not None:
            return Waiting("drain", leaving.transfer)
        return Waiting("space", tier=tier, need_bytes=self.tiers[tier].slot_bytes(block.spec.nbytes))

    def keep_buffers(self, tier: str, counts: Mapping[int, int]) -> None:
        """Make and keep buffers for copies; see ``TieredStore.keep_buffers``."""
        owner = self.buffer_tiers.get(tier)
        if owner is None:
            return
        self.copy_buffers.pop(tier, None)
        if counts:
            self.copy_buffers[tier] = dict(counts)
        homes = Counter(copy.slot_bytes for _, copy in self._copies(tier) if copy.is_home)
        owner.keep_buffers({size: homes[size] + count for size, count in counts.items()})

    def evict(self, block: Block, copy: Copy) -> None:
        """Drop a copy, writing it back first if it is DIRTY (then it goes when the write ended)."""
        is_first = not copy.drop_when_clean
        copy.drop_when_clean = True
        if copy.state in (CopyState.DIRTY, CopyState.DRAINING):
            self.counters.evictions_dirty += is_first
        else:
            self.counters.evictions_clean += is_first
        self.settle(block, copy)

    def settle(self, block: Block, copy: Copy) -> None:
        """Take the next step of an eviction that was asked for, if nothing holds the copy any more."""
        if not copy.drop_when_clean or block.writer is not None:
            return
        if copy.pins:
            # Not for a mere wish to use it: whether that came in time would decide what is moved.
            copy.drop_when_clean = False
        elif copy.state is CopyState.DIRTY:
            if self.write_back(block, copy) is not None:
                self._held_up[copy] = block
        elif copy.state is CopyState.CLEAN and not copy.readers:
            self.drop(copy)

    def send_held_up(self) -> bool:
        """Start the write-backs of evicted copies for which there was no room on the way; return whether one began.

        They must not be left to whoever needs the room of these copies next: then whether they are written before
        they are used again, and so the bytes moved, would depend on who is faster.
        """
        num_before = len(self._held_up)
        for copy, block in list(self._held_up.items()):
            if self._held_up.pop(copy, None) is not None and copy.state is CopyState.DIRTY:
                self.settle(block, copy)
        return len(self._held_up) < num_before

    def drop(self, copy: Copy) -> None:
        """Free a cache copy's slot without writing anything."""
        assert not copy.is_home and not copy.readers, (copy.tier, copy.readers)
        if copy.prefetched:
            self.counters.prefetch_wasted += 1
        self._release_slot(copy)
        copy.move(CopyState.ABSENT)

    def take_slot(self, copy: Copy, slot: Slot) -> None:
        """Give a copy that is no home a slot."""
        copy.slot = slot
        self.copy_bytes[copy.tier] += slot.slot_bytes
        self.num_changes += 1

    def _release_slot(self, copy: Copy) -> None:
        copy.prefetched = copy.drop_when_clean = False
        if copy.slot is not None and not copy.is_home:
            self.copy_bytes[copy.tier] -= copy.slot.slot_bytes
            self.num_changes += 1
            self.tiers[copy.tier].free(copy.slot)
            copy.slot = None

    def _copies(self, tier: str) -> list[tuple[Block, Copy]]:
        return [(b, c) for b in self.blocks.values() if (c := b.copies.get(tier)) is not None and c.slot is not None]

    @staticmethod
    def _may_evict(block: Block, copy: Copy) -> bool:
        return (
            not copy.is_home
            and copy.state in (CopyState.CLEAN, CopyState.DIRTY)
            and not copy.readers
            and block.writer is None
            and not copy.pins
            and not copy.wanted
        )

    def mark_used(self, copy: Copy) -> None:
        """Make a copy the most recently used one. Uses are counted, not timed: callers need not advance any tick."""
        self._num_uses += 1
        copy.last_use = self._num_uses

    def _ranked(self, evictable: Mapping[str, tuple[Block, Copy]]) -> Sequence[Candidate]:
        return self.policy.rank([self._candidate(block, copy) for block, copy in evictable.values()], self.now)

    def _candidate(self, block: Block, copy: Copy) -> Candidate:
        key, next_use = block.spec.key, NEVER
        if self.schedule is not None:
            # A use in the present tick is still to come until the copy is leased in that tick.
            is_past = copy.leased_at == self.now
            next_use = self.schedule.next_use(key, copy.tier, self.now if is_past else self.now - 1)
        return Candidate(key, copy.slot_bytes, copy.state is CopyState.DIRTY, copy.last_use, next_use)

    # -- prefetching -------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start the fetches that the schedule asks for and that have room. Cheap when there is nothing to do."""
        if self._is_pumping:
            return
        if not self._travels.among(self.blocks).accesses and not self._held_up:
            return
        self._is_pumping = True
        try:
            self.send_held_up()  # first: what comes must not take the room on the way of what goes
            state = self.state_of_fetches()
            if state == self.settled:
                return
            self.settled = state
            for access in self.wanted():
                self.settled = None
                if self._inflight_bytes >= self._max_inflight_bytes:
                    return
                if not self._prefetch(access):
                    return
        finally:
            self._is_pumping = False

    def state_of_fetches(self) -> object:
        """Return all that decides what is to be fetched: the same state asks for the same."""
        return self.now, self.num_changes, self._room(), self._buffers()

    def wanted(self) -> Iterator[Access]:
        """Yield what the schedule asks for that is not there, nearest deadline first, as far as there is room."""
        travels, room, buffers = self._travels.among(self.blocks), self._room(), self._buffers()
        passing = self._passing if len(self.order) > 2 else None
        return next_fetches(
            travels, self.now, self.lookahead_bytes, room, self._inspect, passing, buffers, self._passed_over
        )

    def _room(self) -> dict[str, int]:
        """Return the bytes of each tier that are open to copies which are fetched ahead."""
        taken = (self.home_bytes, self.reserved_bytes, self.pinned_bytes, self._relayed_bytes)
        room = {name: tier.capacity_bytes - sum(each[name] for each in taken) for name, tier in self.tiers.items()}
        for (name, size), count in self._held_up_slots().items():
            room[name] -= count * size
        return room

    def _held_up_slots(self) -> Mapping[tuple[str, int], int]:
        """Return how many slots of which size write-backs will take on their way that are held up, by tier and size."""
        slots = Counter[tuple[str, int]]()
        for copy, block in self._held_up.items():
            hop = self._hop_towards(block.spec.home, copy.tier)
            if hop != block.spec.home:
                slots[hop, self._slot_bytes(block, hop)] += 1
        return slots

    def _buffers(self) -> dict[tuple[str, int], int]:
        """Return how many buffers of which size are open to them, by tier and size."""
        taken = (self.pinned_buffers, self._relayed_buffers, self._held_up_slots())
        return {
            (tier, size): count - sum(each.get((tier, size), 0) for each in taken)
            for tier, counts in self.copy_buffers.items()
            for size, count in counts.items()
        }

    @contextmanager
    def pumping_once(self) -> Iterator[None]:
        """Start what all changes inside ask for when they are made, in one walk. Call it with the lock held."""
        if self._is_pumping:
            yield
            return
        self._is_pumping = True
        try:
            yield
        finally:
            self._is_pumping = False
            self.pump()

    def _inspect(self, access: Access) -> tuple[bool, int]:
        block = self.blocks.get(access.key)
        if block is None or block.spec.home == access.tier:
            return True, 0
        copy = block.copies.get(access.tier)
        is_present = copy is not None and (copy.state.is_valid or copy.state is CopyState.FILLING)
        is_pinned = copy is not None and copy.pins > 0  # its room is set apart already
        return is_present, 0 if is_pinned else self._slot_bytes(block, access.tier)

    def _slot_bytes(self, block: Block, tier: str) -> int:
        """Return the size of a slot of a block. Remembered, as the future is walked at every change."""
        known = block.slot_bytes.get(tier)
        if known is None:
            known = block.slot_bytes[tier] = self.tiers[tier].slot_bytes(block.spec.nbytes)
        return known

    def _passing(self, access: Access) -> dict[str, int]:
        block = self.blocks.get(access.key)
        if block is None or (block.spec.home, access.tier) in self.links:
            return {}
        names = stops(self.order, block, access, self.links)
        return {name: self._slot_bytes(block, name) for name in names}

    def _prefetch(self, access: Access) -> bool:
        """Start one fetch; False when room ran out, so that nothing later overtakes it."""
        block = self.blocks[access.key]
        if not block.has_contents or block.writer is not None:
            return True
        waiting = self.bring(block, access.tier, for_use=access.tick, demand=False)
        if waiting is not None and waiting.cause == "space":
            return False
        copy = block.copy_in(access.tier)
        copy.prefetched = copy.state is CopyState.FILLING  # not yet where it only got as far as a middle tier
        return True

    def _emit(self, kind: str, block: Block, tier: str, transfer: Transfer) -> None:
        if self.on_event is not None:
            self.on_event(
                Event(kind, block.spec.key, tier, transfer.nbytes, transfer.start_s, transfer.end_s, transfer.path)
            )


def route(order: Sequence[str], src: str, dst: str, direct: Container[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the links that a copy takes: from each tier the one that goes furthest. Plans use the same rule.

    Args:
        order: names of the tiers, fast to slow.
        direct: pairs of tiers with a link between them; neighbours need not be named.
    """
    here, end = order.index(src), order.index(dst)
    step = 1 if end > here else -1
    links = []
    while here != end:
        onward = (there for there in range(end, here, -step) if (order[here], order[there]) in direct)
        there = next(onward, here + step)
        links.append((order[here], order[there]))
        here = there
    return links


def stops(order: Sequence[str], block: Block, access: Access, direct: Container[tuple[str, str]] = ()) -> Sequence[str]:
    """Return the tiers between a block's home and an access in which it has or will have a copy on its way.

    Args:
        order: names of the tiers, fast to slow.
        direct: as for ``route``.
    """
    between = [src for src, _ in route(order, block.spec.home, access.tier, direct)[1:]]
    target = block.copies.get(access.tier)
    if access.mode == "r" and target is not None and target.state.is_valid:  # it came by, and will not go back
        return [name for name in between if name in block.copies and block.copies[name].slot is not None]
    return between


def submit_two_hops(links: Mapping[tuple[str, str], Link], block: Block, copy: Copy, middle: Copy) -> Transfer:
    """Start writing ``copy`` to the block's home by way of ``middle``; call it with the store's lock held.

    Args:
        links: by (source, destination).
        middle: has a slot, and the newest bytes already if its state is valid.

    Returns:
        One transfer that ends with the second hop.
    """
    assert copy.slot is not None and middle.slot is not None
    nbytes, home = block.spec.nbytes, block.home
    whole = Transfer(copy.tier, home.tier, nbytes, "staged")
    middle.readers += 1

    def second_hop(first: Transfer | None) -> None:
        if first is not None and first.error is not None:
            whole.finish(first.error)
            return
        assert middle.slot is not None and home.slot is not None
        last = links[middle.tier, home.tier].submit(middle.slot, home.slot, nbytes)
        last.add_done_callback(lambda done: whole.finish(done.error))

    if middle.state.is_valid:
        second_hop(None)
    else:
        middle.move(CopyState.FILLING)
        middle.transfer = whole
        links[copy.tier, middle.tier].submit(copy.slot, middle.slot, nbytes).add_done_callback(second_hop)
    return whole
