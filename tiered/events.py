"""Events and statistics of a store."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.links.base import LinkUsage

#: Reasons why a caller of the store can wait.
STALL_CAUSES = ("fill", "drain", "space", "lease", "commit")


@dataclass(frozen=True, slots=True)
class Event:
    """One movement, stall or commit in a store.

    Attributes:
        kind: ``fetch``, ``write_back``, ``stall`` or ``commit``.
        start_s: start time in seconds, from ``time.perf_counter``.
        detail: the link's copy method for movements, the cause for stalls, or the generation for commits.
    """

    kind: str
    key: str
    tier: str
    nbytes: int
    start_s: float
    end_s: float
    detail: str = ""


EventSink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Current byte counts of one tier. ``high_water_bytes`` is the tier's peak usage."""

    capacity_bytes: int
    used_bytes: int
    home_bytes: int
    pinned_bytes: int
    leased_bytes: int
    high_water_bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store. ``later - earlier`` has the increases of the counters, and the ``tiers`` of ``later``.

    Attributes:
        stall_s: seconds that callers waited, by cause.
        prefetch_on_time: number of prefetched copies that arrived before they were acquired.
        prefetch_late: number of prefetched copies that were acquired while in flight.
        prefetch_wasted: number of prefetched copies that were dropped unused.
        evictions_clean: number of copies evicted without a write-back.
        evictions_dirty: number of copies evicted after a write-back.
        written_bytes: bytes written to each durable path.
        schedule_misses: number of accesses that are not in the schedule.
        due_bytes: bytes moved for all uses up to the current tick, by ``"src->dst"``. A fetch for a later use does not
            count yet; a write-back counts when it is requested. So the counts between two ticks are deterministic.
    """

    tiers: Mapping[str, TierStats]
    links: Mapping[str, LinkUsage]
    stall_s: Mapping[str, float]
    prefetch_on_time: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    evictions_clean: int = 0
    evictions_dirty: int = 0
    schedule_misses: int = 0
    written_bytes: Mapping[str, int] = field(default_factory=dict)
    due_bytes: Mapping[str, int] = field(default_factory=dict)

    def __sub__(self, earlier: StoreStats) -> StoreStats:
        links = {}
        for name, link in self.links.items():
            earlier_link = earlier.links.get(name)
            links[name] = (
                link
                if earlier_link is None
                else dataclasses.replace(
                    link,
                    num_bytes=link.num_bytes - earlier_link.num_bytes,
                    busy_s=link.busy_s - earlier_link.busy_s,
                    num_transfers=link.num_transfers - earlier_link.num_transfers,
                )
            )
        counts = {
            name: getattr(self, name) - getattr(earlier, name)
            for name in (
                "prefetch_on_time",
                "prefetch_late",
                "prefetch_wasted",
                "evictions_clean",
                "evictions_dirty",
                "schedule_misses",
            )
        }
        return StoreStats(
            tiers=self.tiers,
            links=links,
            stall_s={cause: seconds - earlier.stall_s.get(cause, 0.0) for cause, seconds in self.stall_s.items()},
            written_bytes={path: n - earlier.written_bytes.get(path, 0) for path, n in self.written_bytes.items()},
            due_bytes={link: n - earlier.due_bytes.get(link, 0) for link, n in self.due_bytes.items()},
            **counts,
        )


@dataclass(slots=True)
class Counters:
    """Running counts of a store, guarded by its lock."""

    stall_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALL_CAUSES, 0.0))
    prefetch_on_time: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    evictions_clean: int = 0
    evictions_dirty: int = 0
    schedule_misses: int = 0


class DueBytes:
    """Bytes that links move, counted by the tick that needs them. Guarded by the store's lock."""

    def __init__(self) -> None:
        self._total = Counter[tuple[str, str]]()
        self._later_uses: list[tuple[int, tuple[str, str], int]] = []  # (tick, link, bytes) of uses at later ticks

    def add(self, link: tuple[str, str], nbytes: int, *, tick: int, current_tick: int) -> None:
        """Count bytes that a link moves for tick ``tick``. A negative number cancels a failed transfer's count."""
        self._total[link] += nbytes
        self._later_uses = [use for use in self._later_uses if use[0] > current_tick]
        if tick > current_tick:
            self._later_uses.append((tick, link, nbytes))

    def bytes_until(self, last_tick: int) -> Mapping[tuple[str, str], int]:
        """Return the bytes that were needed up to tick ``last_tick``, by link."""
        totals = Counter(self._total)
        for tick, link, nbytes in self._later_uses:
            if tick > last_tick:
                totals[link] -= nbytes
        return totals
