"""What to fetch next: walks the schedule in deadline order, as far ahead as room and a limit allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tiered.schedule import Access, Schedule


def next_fetches(
    schedule: Schedule,
    now: int,
    lookahead_bytes: int | None,
    room_bytes: Mapping[str, int],
    inspect: Callable[[Access], tuple[bool, int]],
) -> Iterator[Access]:
    """Yield the accesses whose copies should be fetched now, nearest deadline first. Pure but for ``inspect``.

    Two rules make a fetch never useless. A block that is written between now and the access is passed over:
    a copy fetched before that write would be the wrong version. And everything accessed from now up to the
    fetched access must fit its tier together, so that no use in between has to push the fetched copy out
    again; therefore the bytes moved do not depend on how fast they moved.

    Args:
        schedule: the known future. now: the trainer's tick; its own accesses are served on demand.
        lookahead_bytes: most bytes of distinct future copies to look ahead; None = no limit but the room.
        room_bytes: bytes of each tier that are open to copies (capacity less homes and reserved bytes).
        inspect: tells for an access whether its copy is there or on its way, and its size (0: needs no slot).
    """
    if lookahead_bytes == 0:
        return
    left = dict(room_bytes)
    ahead_bytes = 0
    settled: set[str] = set()
    for access in schedule.at(now):
        left[access.tier] -= inspect(access)[1]
        if access.mode != "r":
            settled.add(access.key)
    for access in schedule.upcoming(now):
        if access.key in settled:
            continue
        # Both a write and a fetch settle the key: a later access of it is looked at once this one is past.
        settled.add(access.key)
        is_present, nbytes = inspect(access)
        left[access.tier] -= nbytes
        if left[access.tier] < 0:
            return
        if access.mode == "w":
            continue
        ahead_bytes += nbytes
        if lookahead_bytes is not None and ahead_bytes > lookahead_bytes:
            return
        if not is_present:
            yield access
