"""What to fetch next: walks the schedule in deadline order, as far ahead as room and a limit allow."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING

from tiered.schedule import Access, Schedule

if TYPE_CHECKING:
    from tiered.records import Block


class Travels:
    """What a schedule says of blocks that are ever used away from home. The others need no fetch, and no room.

    The future is walked at every change; where most blocks stay at home that would be most of the work of a step.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        self._all = schedule or Schedule([])
        self._part: Schedule | None = None

    def know(self, block: Block) -> None:
        """Note a block that was registered, of which the schedule may have spoken before."""
        if block.spec.key in self._all.keys:
            self._part = None

    def among(self, blocks: Mapping[str, Block]) -> Schedule:
        """Return that part of the schedule; ``blocks`` by key, all that are registered."""
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
    passed_over: Container[tuple[int, str]] = (),
) -> Iterator[Access]:
    """Yield the accesses whose copies should be fetched now, nearest deadline first. Pure but for ``inspect``.

    Two rules make a fetch never useless. A block that is written between now and the access is passed over:
    a copy fetched before that write would be the wrong version. And everything accessed from now up to the
    fetched access must fit its tier together, and what passes through other tiers must fit there as well, so that
    no use in between has to push the fetched copy out again; therefore the bytes moved do not depend on how fast
    they moved.

    Args:
        schedule: the known future.
        now: the trainer's tick; its own accesses are served on demand.
        lookahead_bytes: most bytes of distinct future copies to look ahead; None = no limit but the room.
        room_bytes: bytes of each tier that are open to copies (capacity less homes and reserved bytes).
        inspect: returns for an access whether its copy is there or on its way, and its size (0: needs no slot). It and
            ``passing`` get accesses of the schedule, whose ticks may be those of its first period.
        passing: returns for an access the room it needs in tiers between its tier and the block's home; None: there are
            none.
        buffers: by (tier, size), how many copies of a size have a buffer; sizes that are not named share the bytes.
        passed_over: (tick, key) of reads that will not take place.
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
    room.counted.clear()  # what is used now leaves, and comes once more
    for tick, access in schedule.walk(now):
        key = access.key
        if key in settled and (key, access.tier) in room.counted and not (passing is not None and passing(access)):
            continue  # nothing below would come of it
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
        # One that is passed over keeps its room, and the fetches behind it their turn: it may take place all the same.
        if not is_present and (tick, key) not in passed_over:
            yield Access(tick, key, access.tier, access.mode)


class _FreeBytes:
    """Bytes of each tier that are left, while the copies of a schedule are counted.

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
        """Take the room of an access, once for each copy; False if some tier does not have it."""
        others = self._passing(access) if self._passing is not None else None
        if not others:
            return self._take(access.key, access.tier, nbytes)
        needs = {access.tier: nbytes, **others}
        for tier, need_bytes in needs.items():
            if (access.key, tier) not in self.counted:
                self.counted.add((access.key, tier))
                self._left[tier] -= need_bytes
                if (tier, need_bytes) in self._buffers:
                    self._buffers[tier, need_bytes] -= 1
        return all(self._left[tier] >= 0 and self._buffers.get((tier, n), 0) >= 0 for tier, n in needs.items())

    def _take(self, key: str, tier: str, nbytes: int) -> bool:
        """Take the room of a copy in one tier."""
        if (key, tier) not in self.counted:
            self.counted.add((key, tier))
            self._left[tier] -= nbytes
            if (tier, nbytes) in self._buffers:
                self._buffers[tier, nbytes] -= 1
        return self._left[tier] >= 0 and self._buffers.get((tier, nbytes), 0) >= 0
