"""The store's records: a block with the copies of it that exist, and the only place their states change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.block import LEGAL_MOVES, BlockSpec, CopyState

if TYPE_CHECKING:
    from tiered.lease import Lease
    from tiered.tiers.base import Slot
    from tiered.transfer import Transfer


class Copy:
    """One copy of one block in one tier. All fields are guarded by the store's lock.

    Attributes:
        readers: read leases plus transfers that read from this copy.
        pins: counted long residencies.
        wanted: acquires that wait for this copy; it is no candidate for eviction meanwhile.
        last_use: order of its last use or arrival.
        leased_at: tick in which it was leased last.
        transfer: the movement that fills or drains it, while under way; the last fill afterwards.
        prefetched: brought by the prefetcher and not used yet.
        drop_when_clean: evict once drained.
    """

    __slots__ = (
        "drop_when_clean",
        "is_home",
        "last_use",
        "leased_at",
        "pins",
        "prefetched",
        "readers",
        "slot",
        "state",
        "tier",
        "transfer",
        "wanted",
    )

    def __init__(self, tier: str, *, is_home: bool) -> None:
        self.tier = tier
        self.is_home = is_home
        self.state = CopyState.STALE if is_home else CopyState.ABSENT
        self.slot: Slot | None = None
        self.readers = 0
        self.pins = 0
        self.wanted = 0
        self.last_use = -1
        self.leased_at: int | None = None
        self.prefetched = False
        self.drop_when_clean = False
        self.transfer: Transfer | None = None

    @property
    def slot_bytes(self) -> int:
        return 0 if self.slot is None else self.slot.slot_bytes

    def move(self, state: CopyState) -> None:
        """Change state; every change of every copy goes through here."""
        assert (self.state, state) in LEGAL_MOVES, f"illegal move {self.state.name} -> {state.name} in {self.tier}"
        self.state = state


class Block:
    """A registered block: its spec, its copies by tier, and who may touch them."""

    __slots__ = ("copies", "num_transfers", "spec", "version", "writer")

    def __init__(self, spec: BlockSpec) -> None:
        self.spec = spec
        self.copies: dict[str, Copy] = {spec.home: Copy(spec.home, is_home=True)}
        self.writer: Lease | None = None
        self.num_transfers = 0  # movements under way, of any copy
        self.version = 0  # counts released writes

    def copy_in(self, tier: str) -> Copy:
        """Return the copy record for a tier (ABSENT if it never held one)."""
        copy = self.copies.get(tier)
        if copy is None:
            copy = self.copies[tier] = Copy(tier, is_home=False)
        return copy

    @property
    def home(self) -> Copy:
        return self.copies[self.spec.home]

    @property
    def has_contents(self) -> bool:
        return any(copy.state.is_valid for copy in self.copies.values())

    @property
    def num_readers(self) -> int:
        return sum(copy.readers for copy in self.copies.values())

    def newest(self) -> Copy | None:
        """Return the copy that holds bytes newer than home's, or None."""
        for copy in self.copies.values():
            if copy.state in (CopyState.DIRTY, CopyState.DRAINING):
                return copy
        return None
