"""What slots take of each tier, and what is open to copies. Everything here runs under the store's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tiered.block import CopyState
from tiered.records import Block, Copy
from tiered.tiers.base import BufferTier, Slot, Tier


class Occupancy:
    """Who holds how much of each tier: homes, copies, pins, reservations, and write-backs that pass through.

    Attributes:
        buffer_tiers: by name, those that keep buffers of exact sizes.
        home_bytes: bytes of home slots, by tier.
        reserved_bytes: bytes that are set apart, by tier.
        pinned_bytes: by tier, what pinned copies take once they are there.
        copy_bytes: bytes of slots that are no homes, by tier.
        num_changes: counts what may add to what is to be fetched, beside the tick and the sums of bytes: copies that
            went, and pins. With tiers between, also copies that became valid: they need no room there any more.
        copy_buffers: tier -> bytes of a slot -> how many buffers of it are kept for copies. No copy takes the room of
            buffers of another size in such a tier, as long as there is another way.
        pinned_buffers: by (tier, bytes of a slot), the pinned copies.
    """

    def __init__(self, tiers: Sequence[Tier], blocks: Mapping[str, Block]) -> None:
        """
        Args:
            blocks: those that are registered, by key; the store's own mapping, which changes.
        """
        self._tiers, self._blocks = {tier.name: tier for tier in tiers}, blocks
        # What tiers can do besides is found out once: asking a protocol takes longer than most calls.
        self.buffer_tiers = {tier.name: tier for tier in tiers if isinstance(tier, BufferTier)}
        self.home_bytes = dict.fromkeys(self._tiers, 0)
        self.pinned_bytes = dict.fromkeys(self._tiers, 0)
        self.reserved_bytes = dict.fromkeys(self._tiers, 0)
        self.copy_bytes = dict.fromkeys(self._tiers, 0)
        self.num_changes = 0
        self.copy_buffers: dict[str, Mapping[int, int]] = {}
        self.pinned_buffers = Counter[tuple[str, int]]()
        self._relayed_bytes = dict.fromkeys(self._tiers, 0)  # write-backs that pass through a tier now
        self._relayed_buffers = Counter[tuple[str, int]]()

    def take_slot(self, copy: Copy, slot: Slot) -> None:
        """Give a copy that is no home a slot."""
        copy.slot = slot
        self.copy_bytes[copy.tier] += slot.slot_bytes

    def note_valid(self) -> None:
        """Count a copy that became valid, where that may leave more room to others."""
        self.num_changes += len(self._tiers) > 2

    def release_slot(self, copy: Copy) -> None:
        """Give the slot of a copy back to its tier; a home keeps its own."""
        copy.prefetched = copy.drop_when_clean = False
        if copy.slot is not None and not copy.is_home:
            self.copy_bytes[copy.tier] -= copy.slot.slot_bytes
            self.num_changes += 1
            self._tiers[copy.tier].free(copy.slot)
            copy.slot = None

    def add_pinned(self, tier: str, slot_bytes: int, count: int) -> None:
        """Count pinned copies of a size; a negative count: that are pinned no more."""
        self.pinned_bytes[tier] += count * slot_bytes
        self.pinned_buffers[tier, slot_bytes] += count

    def add_relayed(self, middle: Copy, count: int) -> None:
        """Count write-backs that pass through a copy; a negative count: that are over."""
        self._relayed_bytes[middle.tier] += count * middle.slot_bytes
        self._relayed_buffers[middle.tier, middle.slot_bytes] += count

    def keep_buffers(self, tier: str, counts: Mapping[int, int]) -> None:
        """Make and keep buffers for copies; see ``TieredStore.keep_buffers``."""
        owner = self.buffer_tiers.get(tier)
        if owner is None:
            return
        self.copy_buffers.pop(tier, None)
        if counts:
            self.copy_buffers[tier] = dict(counts)
        homes = Counter(copy.slot_bytes for _, copy in self.copies(tier) if copy.is_home)
        owner.keep_buffers({size: homes[size] + count for size, count in counts.items()})

    def slot_bytes(self, block: Block, tier: str) -> int:
        """Return the size of a slot of a block. Remembered, as the future is walked at every change."""
        known = block.slot_bytes.get(tier)
        if known is None:
            known = block.slot_bytes[tier] = self._tiers[tier].slot_bytes(block.spec.nbytes)
        return known

    def copies(self, tier: str) -> list[tuple[Block, Copy]]:
        """Return all that hold a slot of a tier, homes among them."""
        return [(b, c) for b in self._blocks.values() if (c := b.copies.get(tier)) is not None and c.slot is not None]

    def leaving(self, block: Block, tier: str) -> Copy | None:
        """Return a copy on its way out, if there is one whose buffer ``block`` could have."""
        slot_bytes = self._tiers[tier].slot_bytes(block.spec.nbytes)
        for _, copy in self.copies(tier):
            if copy.drop_when_clean and copy.state is CopyState.DRAINING and copy.slot_bytes == slot_bytes:
                return copy
        return None

    def bytes_for_copies(self, tier: str) -> int:
        """Return the bytes of a tier that neither homes nor reservations take."""
        return self._tiers[tier].usage().free_bytes + self.copy_bytes[tier]

    def room(self, held_up: Mapping[tuple[str, int], int]) -> dict[str, int]:
        """Return the bytes of each tier that are open to copies which are fetched ahead.

        Args:
            held_up: by (tier, bytes of a slot), how many slots write-backs will take that have not begun.
        """
        taken = (self.home_bytes, self.reserved_bytes, self.pinned_bytes, self._relayed_bytes)
        room = {name: tier.capacity_bytes - sum(each[name] for each in taken) for name, tier in self._tiers.items()}
        for (name, size), count in held_up.items():
            room[name] -= count * size
        return room

    def buffers(self, held_up: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Return how many buffers of which size are open to them, by (tier, bytes of a slot)."""
        taken = (self.pinned_buffers, self._relayed_buffers, held_up)
        return {
            (tier, size): count - sum(each.get((tier, size), 0) for each in taken)
            for tier, counts in self.copy_buffers.items()
            for size, count in counts.items()
        }
