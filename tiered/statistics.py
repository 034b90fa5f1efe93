"""Collects the counters of a store into one frozen ``StoreStats``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered.events import LinkStats, StoreStats, TierStats
from tiered.lease import Lease
from tiered.links.base import Link
from tiered.movement import Movement


def collect_stats(movement: Movement, links: Sequence[Link], leases: Iterable[Lease]) -> StoreStats:
    """Return the statistics now. Call with ``movement.changed`` held."""
    counters = movement.counters
    leased = {name: 0 for name in movement.tiers}
    for lease in leases:
        leased[lease.tier] += lease._copy.slot_bytes
    written: dict[str, int] = {}
    for tier in movement.tiers.values():
        per_path = getattr(tier, "bytes_written_by_path", None)
        if per_path is not None:
            written.update(per_path())
    return StoreStats(
        tiers={name: _tier_stats(movement, name, leased[name]) for name in movement.tiers},
        links={f"{link.src}->{link.dst}": _link_stats(link) for link in links},
        stall_s=dict(counters.stall_s),
        prefetch_on_time=counters.prefetch_on_time,
        prefetch_late=counters.prefetch_late,
        prefetch_wasted=counters.prefetch_wasted,
        evictions_clean=counters.evictions_clean,
        evictions_dirty=counters.evictions_dirty,
        schedule_misses=counters.schedule_misses,
        written_bytes=written,
    )


def _tier_stats(movement: Movement, name: str, leased_bytes: int) -> TierStats:
    usage = movement.tiers[name].usage()
    copies = [block.copies[name] for block in movement.blocks.values() if name in block.copies]
    return TierStats(
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        home_bytes=sum(copy.slot_bytes for copy in copies if copy.is_home),
        pinned_bytes=sum(copy.slot_bytes for copy in copies if copy.pins),
        leased_bytes=leased_bytes,
        high_water_bytes=usage.high_water_bytes,
    )


def _link_stats(link: Link) -> LinkStats:
    usage = link.usage()
    return LinkStats(usage.num_bytes, usage.busy_s, usage.inflight_bytes, usage.path)
