"""Prefetching: walks the schedule in deadline order, as far ahead as room and a limit allow."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tiered.block import CopyState
from tiered.hops import Routes, stops
from tiered.schedule import Access, Schedule

if TYPE_CHECKING:
    from tiered.occupancy import Occupancy
    from tiered.records import Block
    from tiered.transfer import Waiting


class AwaySchedule:
    """Scheduled accesses of blocks that are ever used away from home. The others need no fetch and no room.

    The schedule is walked at every change. If most blocks stay at home, walking them would dominate the work of a step.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._all = schedule or Schedule([])
        self._part: Schedule | None = None

    def know(self, block: Block) -> None:
        """Note a new block, which the schedule may already contain."""
        if block.spec.key in self._all.keys:
            self._part = None

    def among(self, blocks: Mapping[str, Block]) -> Schedule:
        """Return the schedule of registered ``blocks``, by key, that are used away from home."""
        if self._part is None:
            accesses = [access for access in self._all.accesses if access.key in blocks]
            away = {access.key for access in accesses if blocks[access.key].spec.home != access.tier}
            self._part = self._all.of(lambda access: access.key in away)
        return self._part


def next_fetches(
    schedule: Schedule,
    now: int,
    lookahead_bytes: int | None,
    room_bytes: Mapping[str, int],
    inspect: Callable[[Access], tuple[bool, int]],
    passing: Callable[[Access], Mapping[str, int]] | None = None,
    buffers: Mapping[tuple[str, int], int] | None = None,
    skipped: Container[tuple[int, str]] = (),
) -> Iterator[Access]:
    """Yield the accesses whose copies should be fetched now, nearest deadline first. Pure but for ``inspect``.

    Two rules keep fetches useful. A block that is written between now and the access is skipped, because a copy
    fetched before that write would be the wrong version. And the copies of all accesses from now up to the fetched
    one must fit together, in their tiers and in the tiers that they pass. So no use in between evicts the fetched
    copy, and the moved bytes do not depend on the speed of transfers.

    Args:
        now: the trainer's tick; its own accesses are served on demand.
        lookahead_bytes: most bytes of distinct future copies to look ahead; None = no limit but the room.
        room_bytes: bytes of each tier that are open to copies (capacity less homes and reserved bytes).
        inspect: returns whether an access has a copy, arrived or in flight, and its size (0: needs no slot). It and
            ``passing`` get accesses of the schedule, which may have the ticks of its first period.
        passing: returns the room that an access needs in tiers between its tier and the block's home. None if there
            are no such tiers.
        buffers: by (tier, size), the number of copies with a buffer; sizes without an entry share the bytes.
        skipped: (tick, key) of reads that will not take place.
    """
    if lookahead_bytes == 0:
        return
    room = _FreeBytes(room_bytes, passing, buffers)
    ahead_bytes = 0
    settled: set[str] = set()
    for access in schedule.used_at(now):
        room.take(access, inspect(access)[1])
        if access.mode != "r":
            settled.add(access.key)
    room.counted.clear()  # copies used now leave, and are fetched again
    for tick, access in schedule.walk(now):
        key = access.key
        if key in settled and (key, access.tier) in room.counted and not (passing is not None and passing(access)):
            continue  # the steps below would change nothing
        is_present, nbytes = inspect(access)
        if not room.take(access, nbytes):
            return
        # Both a write and a fetch settle the key: a later access of it is fetched for once this one is past.
        is_settled = key in settled
        settled.add(key)
        if is_settled or access.mode == "w":
            continue
        ahead_bytes += nbytes
        if lookahead_bytes is not None and ahead_bytes > lookahead_bytes:
            return
        # A skipped access keeps its room, and the fetches after it their order: it may take place after all.
        if not is_present and (tick, key) not in skipped:
            yield Access(tick, key, access.tier, access.mode)


class _FreeBytes:
    """Free bytes of each tier, while the copies of a schedule are counted.

    Attributes:
        counted: (key, tier) of copies whose room was taken.
    """

    def __init__(
        self,
        room_bytes: Mapping[str, int],
        passing: Callable[[Access], Mapping[str, int]] | None = None,
        buffers: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self._left, self._passing, self._buffers = dict(room_bytes), passing, dict(buffers or {})
        self.counted: set[tuple[str, str]] = set()

    def take(self, access: Access, nbytes: int) -> bool:
        """Take the room of an access, once per copy; return False if a tier lacks it."""
        others = self._passing(access) if self._passing is not None else None
        if not others:  # in line: a step has some 10,000 of these calls
            tier, place = access.tier, (access.key, access.tier)
            if place not in self.counted:
                self.counted.add(place)
                self._left[tier] -= nbytes
                if (tier, nbytes) in self._buffers:
                    self._buffers[tier, nbytes] -= 1
            return self._left[tier] >= 0 and self._buffers.get((tier, nbytes), 0) >= 0
        needs = {access.tier: nbytes, **others}
        for tier, need_bytes in needs.items():
            if (access.key, tier) not in self.counted:
                self.counted.add((access.key, tier))
                self._left[tier] -= need_bytes
                if (tier, need_bytes) in self._buffers:
                    self._buffers[tier, need_bytes] -= 1
        return all(self._left[tier] >= 0 and self._buffers.get((tier, n), 0) >= 0 for tier, n in needs.items())


class Mover(Protocol):
    """Part of ``Movement`` that its prefetcher uses.

    Attributes:
        order: names of the tiers, fast to slow.
        inflight_bytes: sum over the transfers that bring a copy in.
    """

    blocks: dict[str, Block]
    order: list[str]
    routes: Routes
    occupancy: Occupancy
    inflight_bytes: int

    @property
    def has_held_up(self) -> bool: ...

    def bring(self, block: Block, tier: str, *, for_use: int, demand: bool) -> Waiting | None: ...

    def send_held_up(self) -> bool: ...

    def held_up_slots(self) -> Mapping[tuple[str, int], int]: ...


class Prefetcher:
    """Starts fetches by a schedule, as far ahead as there is room. Everything here runs under the store's lock.

    Attributes:
        lookahead_bytes: most bytes of copies to look ahead; None = no limit but the room.
        settled: state in which the last search left nothing to fetch, or None.
    """

    def __init__(self, mover: Mover, max_inflight_bytes: int) -> None:
        """
        Args:
            mover: moves copies; it calls ``pump`` when a copy has arrived or left.
            max_inflight_bytes: no fetch starts while this many bytes are in flight.
        """
        self._mover, self._max_inflight_bytes = mover, max_inflight_bytes
        self.schedule: Schedule | None = None
        self._away = AwaySchedule(None)
        self._skipped: set[tuple[int, str]] = set()  # (tick, key) of accesses that will not take place
        self.lookahead_bytes: int | None = 0
        self.now = 0
        self.settled: object = None
        self._is_pumping = False

    def know(self, block: Block) -> None:
        """Note a new block, which the schedule may already contain."""
        self._away.know(block)

    def follow(self, schedule: Schedule | None, lookahead_bytes: int | None) -> None:
        """Fetch ahead by another schedule."""
        self._mover.occupancy.num_changes += 1
        self.schedule, self.lookahead_bytes, self._away = schedule, lookahead_bytes, AwaySchedule(schedule)
        self._skipped = set()

    def advance(self, tick: int) -> None:
        """Go to a tick."""
        self.now = tick
        if self._skipped:
            self._skipped = {each for each in self._skipped if each[0] >= tick}

    def skip(self, accesses: Iterable[tuple[int, str]], but_not: Iterable[tuple[int, str]]) -> None:
        """Do not prefetch for these accesses, (tick, key)."""
        self._mover.occupancy.num_changes += 1
        self._skipped.update(accesses)
        self._skipped.difference_update(but_not)

    def pump(self) -> None:
        """Start the fetches that the schedule asks for and that have room. Cheap when there is nothing to do."""
        if self._is_pumping:
            return
        if not self._away.among(self._mover.blocks).accesses and not self._mover.has_held_up:
            return
        self._is_pumping = True
        try:
            self._mover.send_held_up()  # first: fetches must not take the room that these need in middle tiers
            state = self.state_of_fetches()
            if state == self.settled:
                return
            self.settled, has_begun_all = None, True
            for access in self.wanted():
                if self._mover.inflight_bytes >= self._max_inflight_bytes:
                    return
                waits_for = self._prefetch(access)
                if waits_for == "space":  # nothing later overtakes it
                    return
                has_begun_all &= waits_for == ""
            if has_begun_all:
                self.settled = state  # the earlier state: it differs if a copy has left since
        finally:
            self._is_pumping = False

    def state_of_fetches(self) -> object:
        """Return everything that decides what to fetch: equal states lead to equal fetches."""
        occupancy, held_up = self._mover.occupancy, self._mover.held_up_slots()
        return self.now, occupancy.num_changes, occupancy.room(held_up), occupancy.buffers(held_up)

    def wanted(self) -> Iterator[Access]:
        """Yield scheduled accesses without a copy, nearest deadline first, as far as there is room."""
        away, held_up = self._away.among(self._mover.blocks), self._mover.held_up_slots()
        room, buffers = self._mover.occupancy.room(held_up), self._mover.occupancy.buffers(held_up)
        passing = self._passing if len(self._mover.order) > 2 else None
        return next_fetches(away, self.now, self.lookahead_bytes, room, self._inspect, passing, buffers, self._skipped)

    @contextmanager
    def pumping_once(self) -> Iterator[None]:
        """Start the fetches for all changes made inside in one walk at the end. Call it with the lock held."""
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
            is_pinned = copy is not None and copy.pins > 0  # its room is set apart already
            return False, 0 if is_pinned else self._mover.occupancy.slot_bytes(block, access.tier)
        return True, 0 if copy.pins else copy.slot.slot_bytes  # filled, or on its way

    def _passing(self, access: Access) -> dict[str, int]:
        block = self._mover.blocks.get(access.key)
        if block is None:
            return {}
        names = stops(self._mover.routes, block, access)
        return {name: self._mover.occupancy.slot_bytes(block, name) for name in names}

    def _prefetch(self, access: Access) -> str:
        """Start one fetch; return the cause of a wait, or "" if the copy is in flight."""
        block = self._mover.blocks[access.key]
        if not block.has_contents or block.writer is not None:
            return "contents"
        waiting = self._mover.bring(block, access.tier, for_use=access.tick, demand=False)
        if waiting is not None and waiting.cause == "space":
            return "space"
        copy = block.copy_in(access.tier)
        copy.prefetched = copy.state is CopyState.FILLING  # False if it has only reached a middle tier
        return "" if copy.slot is not None else "another hop"
