"""Space that is in use, and space that is left for copies, in each tier. Callers hold the store's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tiered.block import CopyState
from tiered.records import Block, Copy
from tiered.tiers.base import BufferTier, Slot, Tier


class Occupancy:
    """Bytes that homes, copies, pins, reservations and relayed write-backs take in each tier.

    Attributes:
        buffer_tiers: tiers that keep buffers of exact sizes, by name.
        home_bytes: bytes of home slots, by tier.
        reserved_bytes: reserved bytes, by tier.
        pinned_bytes: bytes of pinned copies, including copies that have not arrived yet, by tier.
        copy_bytes: bytes of slots that are not home slots, by tier.
        num_changes: number of changes that can make fetches possible, such as a released slot or an unpin. With more
            than two tiers, a copy that becomes valid also counts: it needs no more space in intermediate tiers.
        copy_buffers: number of buffers kept for copies, by tier and slot size. In these tiers, buffers of another size
            are dropped for a copy only as a last resort.
        pinned_buffers: number of pinned copies, by (tier, slot size).
    """

    def __init__(self, tiers: Sequence[Tier], blocks: Mapping[str, Block]) -> None:
        """
        Args:
            blocks: the store's registered blocks. The store adds and removes entries later.
        """
        self._tiers, self._blocks = {tier.name: tier for tier in tiers}, blocks
        # Check optional protocols only here, because isinstance with a protocol is slow.
        self.buffer_tiers = {tier.name: tier for tier in tiers if isinstance(tier, BufferTier)}
        self.home_bytes = dict.fromkeys(self._tiers, 0)
        self.pinned_bytes = dict.fromkeys(self._tiers, 0)
        self.reserved_bytes = dict.fromkeys(self._tiers, 0)
        self.copy_bytes = dict.fromkeys(self._tiers, 0)
        self.num_changes = 0
        self.copy_buffers: dict[str, Mapping[int, int]] = {}
        self.pinned_buffers = Counter[tuple[str, int]]()
        self._relayed_bytes = dict.fromkeys(self._tiers, 0)  # bytes of write-backs in progress through each tier
        self._relayed_buffers = Counter[tuple[str, int]]()

    def take_slot(self, copy: Copy, slot: Slot) -> None:
        """Assign a slot to a copy outside the block's home."""
        copy.slot = slot
        self.copy_bytes[copy.tier] += slot.slot_bytes

    def count_valid_copy(self) -> None:
        """Increment ``num_changes`` after a copy became valid, if this can free space in intermediate tiers."""
        self.num_changes += len(self._tiers) > 2

    def release_slot(self, copy: Copy) -> None:
        """Return the slot of a copy to its tier. A home copy keeps its slot."""
        copy.prefetched = copy.drop_when_clean = False
        if copy.slot is not None and not copy.is_home:
            self.copy_bytes[copy.tier] -= copy.slot.slot_bytes
            self.num_changes += 1
            self._tiers[copy.tier].free(copy.slot)
            copy.slot = None

    def add_pinned(self, tier: str, slot_bytes: int, count: int) -> None:
        """Add ``count`` pinned copies of one size; a negative count removes them."""
        self.pinned_bytes[tier] += count * slot_bytes
        self.pinned_buffers[tier, slot_bytes] += count

    def add_relayed(self, relay: Copy, count: int) -> None:
        """Add ``count`` write-backs that pass through a copy; a negative count removes them."""
        self._relayed_bytes[relay.tier] += count * relay.slot_bytes
        self._relayed_buffers[relay.tier, relay.slot_bytes] += count

    def keep_buffers(self, tier: str, counts: Mapping[int, int]) -> None:
        """Allocate and keep buffers for copies; see ``TieredStore.keep_buffers``."""
        owner = self.buffer_tiers.get(tier)
        if owner is None:
            return
        self.copy_buffers.pop(tier, None)
        if counts:
            self.copy_buffers[tier] = dict(counts)
        homes = Counter(copy.slot_bytes for _, copy in self.copies(tier) if copy.is_home)
        owner.keep_buffers({size: homes[size] + count for size, count in counts.items()})

    def slot_bytes(self, block: Block, tier: str) -> int:
        """Return the bytes of a block's slot in a tier. Cached, because every walk of the schedule calls this often."""
        nbytes = block.slot_bytes.get(tier)
        if nbytes is None:
            nbytes = block.slot_bytes[tier] = self._tiers[tier].slot_bytes(block.spec.nbytes)
        return nbytes

    def copies(self, tier: str) -> list[tuple[Block, Copy]]:
        """Return (block, copy) for each copy with a slot in a tier, including home copies."""
        return [(b, c) for b in self._blocks.values() if (c := b.copies.get(tier)) is not None and c.slot is not None]

    def evicting_copy(self, block: Block, tier: str) -> Copy | None:
        """Return a copy that is being evicted and has a buffer of the right size for ``block``, or None."""
        slot_bytes = self._tiers[tier].slot_bytes(block.spec.nbytes)
        for _, copy in self.copies(tier):
            if copy.drop_when_clean and copy.state is CopyState.DRAINING and copy.slot_bytes == slot_bytes:
                return copy
        return None

    def bytes_for_copies(self, tier: str) -> int:
        """Return the bytes of a tier that are available to copies: all except home slots and reservations."""
        return self._tiers[tier].usage().free_bytes + self.copy_bytes[tier]

    def prefetch_bytes(self, blocked_slots: Mapping[tuple[str, int], int]) -> dict[str, int]:
        """Return the bytes of each tier that are available to prefetched copies.

        Args:
            blocked_slots: number of slots that blocked write-backs need, by (tier, slot size).
        """
        charges = (self.home_bytes, self.reserved_bytes, self.pinned_bytes, self._relayed_bytes)
        result = {name: tier.capacity_bytes - sum(c[name] for c in charges) for name, tier in self._tiers.items()}
        for (name, size), count in blocked_slots.items():
            result[name] -= count * size
        return result

    def prefetch_buffers(self, blocked_slots: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Return the number of buffers that are available to prefetched copies, by (tier, slot size)."""
        charges = (self.pinned_buffers, self._relayed_buffers, blocked_slots)
        return {
            (tier, size): count - sum(c.get((tier, size), 0) for c in charges)
            for tier, counts in self.copy_buffers.items()
            for size, count in counts.items()
        }
