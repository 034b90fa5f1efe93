"""Prefetching: fetches copies in the order of their deadlines, as far ahead as space and a limit allow."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tiered.block import CopyState
from tiered.hops import Routes, intermediate_tiers
from tiered.schedule import Access, Schedule

if TYPE_CHECKING:
    from tiered.occupancy import Occupancy
    from tiered.records import Block
    from tiered.transfer import WaitReason


class FetchSchedule:
    """Scheduled accesses of the blocks that are used outside their home at least once. Other blocks need no fetch.

    The prefetcher walks this schedule after every change in the store. It is short if most blocks stay at home.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._schedule = schedule or Schedule([])
        self._filtered_schedule: Schedule | None = None

    def add_block(self, block: Block) -> None:
        """Update the schedule for a newly registered block, which may already have accesses."""
        if block.spec.key in self._schedule.keys:
            self._filtered_schedule = None

    def select(self, blocks: Mapping[str, Block]) -> Schedule:
        """Return the accesses of the registered ``blocks`` (by key) that are used outside their home."""
        if self._filtered_schedule is None:
            accesses = [access for access in self._schedule.accesses if access.key in blocks]
            away_keys = {access.key for access in accesses if blocks[access.key].spec.home != access.tier}
            self._filtered_schedule = self._schedule.of(lambda access: access.key in away_keys)
        return self._filtered_schedule


def next_fetches(
    schedule: Schedule,
    current_tick: int,
    lookahead_bytes: int | None,
    free_bytes: Mapping[str, int],
    inspect: Callable[[Access], tuple[bool, int]],
    hop_bytes: Callable[[Access], Mapping[str, int]] | None = None,
    buffers: Mapping[tuple[str, int], int] | None = None,
    skipped_reads: Container[tuple[int, str]] = (),
) -> Iterator[Access]:
    """Yield the accesses whose copies should be fetched now, nearest deadline first. Has no side effects.

    Two rules keep fetches useful. First, an access is skipped if its block is written before it, because a copy fetched
    now would be stale. Second, a copy is fetched only if it and the copies of all earlier accesses fit together, in
    their tiers and in the tiers on their routes. So no earlier use evicts the fetched copy, and the number of moved
    bytes does not depend on the speed of transfers.

    Args:
        current_tick: the trainer's tick. Copies for this tick are fetched on demand.
        lookahead_bytes: maximum bytes of distinct future copies. If None, only space limits them.
        free_bytes: bytes of each tier that are available to copies (capacity minus home slots and reservations).
        inspect: function that returns whether an access has a copy (arrived or in flight), and the bytes of the slot
            that it needs (0 if none). Like ``hop_bytes``, it gets accesses with ticks in the first period.
        hop_bytes: function that returns the bytes that an access needs in each tier between its tier and the block's
            home. None if no route has such tiers.
        buffers: number of buffers by (tier, size). Sizes without an entry share the remaining bytes.
        skipped_reads: (tick, key) pairs of reads that will not happen.
    """
    if lookahead_bytes == 0:
        return
    budget = _FreeBytes(free_bytes, hop_bytes, buffers)
    ahead_bytes = 0
    settled_keys: set[str] = set()
    for access in schedule.used_at(current_tick):
        budget.take(access, inspect(access)[1])
        if access.mode != "r":
            settled_keys.add(access.key)
    budget.counted_copies.clear()  # Copies in use now can be evicted before their next use, which needs space again.
    for tick, access in schedule.walk(current_tick):
        key = access.key
        is_counted = key in settled_keys and (key, access.tier) in budget.counted_copies
        if is_counted and not (hop_bytes is not None and hop_bytes(access)):
            continue  # The steps below would change nothing.
        is_present, nbytes = inspect(access)
        if not budget.take(access, nbytes):
            return
        # A write or a fetch settles the key: fetches for later accesses to the block start only after this access.
        is_settled = key in settled_keys
        settled_keys.add(key)
        if is_settled or access.mode == "w":
            continue
        ahead_bytes += nbytes
        if lookahead_bytes is not None and ahead_bytes > lookahead_bytes:
            return
        # A skipped access still counts toward space and look-ahead, because it may happen after all.
        if not is_present and (tick, key) not in skipped_reads:
            yield Access(tick, key, access.tier, access.mode)


class _FreeBytes:
    """Remaining free bytes of each tier while the copies of a schedule are counted.

    Attributes:
        counted_copies: (key, tier) pairs of the counted copies.
    """

    def __init__(
        self,
        free_bytes: Mapping[str, int],
        hop_bytes: Callable[[Access], Mapping[str, int]] | None = None,
        buffers: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self._free_bytes, self._hop_bytes, self._buffers = dict(free_bytes), hop_bytes, dict(buffers or {})
        self.counted_copies: set[tuple[str, str]] = set()

    def take(self, access: Access, nbytes: int) -> bool:
        """Subtract the bytes of an access, once per copy. Return False if a tier has too little space."""
        hop_needs = self._hop_bytes(access) if self._hop_bytes is not None else None
        if not hop_needs:  # This common case is inlined, because a step calls this method about 10,000 times.
            tier, copy_id = access.tier, (access.key, access.tier)
            if copy_id not in self.counted_copies:
                self.counted_copies.add(copy_id)
                self._free_bytes[tier] -= nbytes
                if (tier, nbytes) in self._buffers:
                    self._buffers[tier, nbytes] -= 1
            return self._free_bytes[tier] >= 0 and self._buffers.get((tier, nbytes), 0) >= 0
        needs = {access.tier: nbytes, **hop_needs}
        for tier, need_bytes in needs.items():
            if (access.key, tier) not in self.counted_copies:
                self.counted_copies.add((access.key, tier))
                self._free_bytes[tier] -= need_bytes
                if (tier, need_bytes) in self._buffers:
                    self._buffers[tier, need_bytes] -= 1
        return all(self._free_bytes[tier] >= 0 and self._buffers.get((tier, n), 0) >= 0 for tier, n in needs.items())


class Mover(Protocol):
    """The part of ``Movement`` that the prefetcher uses.

    Attributes:
        order: names of the tiers, fast to slow.
        inflight_bytes: bytes of all fetches in progress.
    """

    blocks: dict[str, Block]
    order: list[str]
    routes: Routes
    occupancy: Occupancy
    inflight_bytes: int

    @property
    def has_blocked_write_backs(self) -> bool: ...

    def advance_fetch(self, block: Block, tier: str, *, tick: int, on_demand: bool) -> WaitReason | None: ...

    def start_blocked(self) -> bool: ...

    def blocked_slots(self) -> Mapping[tuple[str, int], int]: ...


class Prefetcher:
    """Prefetcher of scheduled accesses, as far ahead as space allows. The caller holds the store's lock.

    Attributes:
        lookahead_bytes: maximum bytes of copies to fetch ahead. If None, only space limits them.
        idle_state: last ``fetch_state`` in which nothing was left to fetch, or None if unknown.
    """

    def __init__(self, mover: Mover, max_inflight_bytes: int) -> None:
        """
        Args:
            mover: mover of the copies, which calls ``pump`` after a copy has arrived or was evicted.
            max_inflight_bytes: number of bytes in flight at which no further fetch starts.
        """
        self._mover, self._max_inflight_bytes = mover, max_inflight_bytes
        self.schedule: Schedule | None = None
        self._fetch_schedule = FetchSchedule(None)
        self._skipped: set[tuple[int, str]] = set()  # (tick, key) pairs of accesses that will not happen
        self.lookahead_bytes: int | None = 0
        self.tick = 0
        self.idle_state: object = None
        self._is_pumping = False

    def add_block(self, block: Block) -> None:
        """Update the schedule for a newly registered block, which may already have accesses."""
        self._fetch_schedule.add_block(block)

    def set_schedule(self, schedule: Schedule | None, lookahead_bytes: int | None) -> None:
        """Replace the schedule and the look-ahead, and forget all skipped accesses."""
        self._mover.occupancy.num_changes += 1
        self.schedule, self.lookahead_bytes, self._fetch_schedule = schedule, lookahead_bytes, FetchSchedule(schedule)
        self._skipped = set()

    def advance(self, tick: int) -> None:
        """Set the current tick, and forget earlier skipped accesses."""
        self.tick = tick
        if self._skipped:
            self._skipped = {pair for pair in self._skipped if pair[0] >= tick}

    def skip(self, accesses: Iterable[tuple[int, str]], resumed: Iterable[tuple[int, str]]) -> None:
        """Skip prefetches for (tick, key) pairs in ``accesses``, and resume prefetches for pairs in ``resumed``."""
        self._mover.occupancy.num_changes += 1
        self._skipped.update(accesses)
        self._skipped.difference_update(resumed)

    def pump(self) -> None:
        """Start the scheduled fetches that fit. Cheap if there is nothing to fetch."""
        if self._is_pumping:
            return
        if not self._fetch_schedule.select(self._mover.blocks).accesses and not self._mover.has_blocked_write_backs:
            return
        self._is_pumping = True
        try:
            # Start blocked write-backs first, because they need intermediate space that fetches could take.
            self._mover.start_blocked()
            state = self.fetch_state()
            if state == self.idle_state:
                return
            self.idle_state, have_all_started = None, True
            for access in self.missing_accesses():
                if self._mover.inflight_bytes >= self._max_inflight_bytes:
                    return
                obstacle = self._prefetch(access)
                if obstacle == "space":  # Later fetches must not overtake this one.
                    return
                have_all_started &= obstacle == ""
            if have_all_started:
                self.idle_state = state  # This state is from before the fetches: if they evicted a copy, search again.
        finally:
            self._is_pumping = False

    def fetch_state(self) -> object:
        """Return all values that determine what to fetch. Equal states lead to the same fetches."""
        occupancy, slots = self._mover.occupancy, self._mover.blocked_slots()
        return self.tick, occupancy.num_changes, occupancy.prefetch_bytes(slots), occupancy.prefetch_buffers(slots)

    def missing_accesses(self) -> Iterator[Access]:
        """Yield scheduled accesses that have no copy yet, nearest deadline first, as far as space allows."""
        fetches, slots = self._fetch_schedule.select(self._mover.blocks), self._mover.blocked_slots()
        free, buffers = self._mover.occupancy.prefetch_bytes(slots), self._mover.occupancy.prefetch_buffers(slots)
        hops = self._hop_bytes if len(self._mover.order) > 2 else None
        return next_fetches(fetches, self.tick, self.lookahead_bytes, free, self._inspect, hops, buffers, self._skipped)

    @contextmanager
    def defer_fetches(self) -> Iterator[None]:
        """Defer all fetches to one walk of the schedule after the ``with`` block. The caller holds the lock."""
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
        block = self._mover.blocks.get(access.key)
        if block is None or block.spec.home == access.tier:
            return True, 0
        copy = block.copies.get(access.tier)
        if copy is None or copy.slot is None:
            is_pinned = copy is not None and copy.pins > 0  # The space of pinned copies is already subtracted.
            return False, 0 if is_pinned else self._mover.occupancy.slot_bytes(block, access.tier)
        return True, 0 if copy.pins else copy.slot.slot_bytes  # The copy is valid or in flight.

    def _hop_bytes(self, access: Access) -> dict[str, int]:
        block = self._mover.blocks.get(access.key)
        if block is None:
            return {}
        names = intermediate_tiers(self._mover.routes, block, access)
        return {name: self._mover.occupancy.slot_bytes(block, name) for name in names}

    def _prefetch(self, access: Access) -> str:
        """Start one fetch. Return the reason why it cannot start yet, or "" if the copy is in flight."""
        block = self._mover.blocks[access.key]
        if not block.has_contents or block.writer is not None:
            return "contents"
        reason = self._mover.advance_fetch(block, access.tier, tick=access.tick, on_demand=False)
        if reason is not None and reason.cause == "space":
            return "space"
        copy = block.copy_in(access.tier)
        copy.prefetched = copy.state is CopyState.FILLING  # False if the bytes are moving on an earlier hop
        return "" if copy.slot is not None else "another hop"
