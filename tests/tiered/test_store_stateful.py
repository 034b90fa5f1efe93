"""Random operations on a store whose transfers end in any order and may fail. Invariants hold after each operation."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered import (
    LRU,
    Access,
    Belady,
    CapacityError,
    CopyState,
    Lease,
    LeaseError,
    Schedule,
    TieredStore,
    TransferError,
    UninitializedBlockError,
)
from tiered.testing.manual import ManualLink, MemoryTier

KEYS = [f"b{i}" for i in range(5)]
SIZES = {"b0": 1, "b1": 2, "b2": 1, "b3": 3, "b4": 2}
HOMES = {"b0": "disk", "b1": "disk", "b2": "ram", "b3": "disk", "b4": "ram"}
ADDRESSABLE = ["gpu", "ram"]


class StoreMachine(RuleBasedStateMachine):
    """Operations and invariants of a store with one calling thread.

    Every ``acquire`` has a timeout of zero, so that a call that must wait raises an error instead.
    """

    @initialize(belady=st.booleans())
    def make(self, belady: bool) -> None:
        self.tiers = [MemoryTier("gpu", 5), MemoryTier("ram", 8), MemoryTier("disk", 12, addressable=False)]
        self.links = [ManualLink(a, b) for a, b in [("gpu", "ram"), ("ram", "gpu"), ("ram", "disk"), ("disk", "ram")]]
        self.store = TieredStore(self.tiers, Belady() if belady else LRU(), self.links)
        for key in KEYS:
            self.store.register(key, (SIZES[key],), torch.uint8, home=HOMES[key])
        self.contents: dict[str, int] = {}
        self.leases: list[tuple[Lease, int]] = []
        self.pins: list[tuple[str, str]] = []
        self.next_value = 0
        self.tick = self.reserved = 0

    # -- operations --------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(ADDRESSABLE), mode=st.sampled_from(["r", "w", "rw"]))
    def acquire(self, key: str, tier: str, mode: str) -> None:
        try:
            lease = self.store.acquire(key, tier, mode, timeout_s=0)  # type: ignore[arg-type]
        except UninitializedBlockError:
            assert key not in self.contents
            return
        except (TimeoutError, CapacityError, LeaseError, TransferError):
            return
        if mode != "w":
            assert lease.tensor.tolist() == [self.contents[key]] * SIZES[key]
        if mode != "r":
            self.next_value = (self.next_value + 1) % 250
            lease.tensor.fill_(self.next_value)
        self.leases.append((lease, self.next_value if mode != "r" else self.contents[key]))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 10), abandon=st.booleans())
    def release(self, index: int, abandon: bool) -> None:
        lease, value = self.leases.pop(index % len(self.leases))
        if lease.mode == "w" and abandon:
            was_home_or_newest = not any(
                tier != lease.tier and state.is_valid for tier, state in self.store.where(lease.key).items()
            )
            lease.abandon()
            if was_home_or_newest:
                self.contents.pop(lease.key, None)
        else:
            lease.release()
            if lease.mode != "r":
                self.contents[lease.key] = value

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(ADDRESSABLE))
    def evict(self, key: str, tier: str) -> None:
        if (key, tier) not in self.pins:
            self.store.evict(key, tier)

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(ADDRESSABLE))
    def prefetch(self, key: str, tier: str) -> None:
        self.store.prefetch(key, tier)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        if any(copy.transfer for link in self.links for copy in link.pending):
            return  # discard would wait for transfers that only this thread can finish
        try:
            self.store.discard(key)
        except LeaseError:
            return
        self.contents.pop(key, None)

    @rule(ticks=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(ADDRESSABLE)), max_size=6))
    def set_schedule(self, ticks: list[tuple[str, str]]) -> None:
        accesses = [Access(self.tick + 1 + i, key, tier) for i, (key, tier) in enumerate(ticks)]
        self.store.set_schedule(Schedule(accesses))

    @rule()
    def advance(self) -> None:
        self.tick += 1
        self.store.advance(self.tick)

    @precondition(lambda self: any(link.pending for link in self.links))
    @rule(pick=st.integers(0, 100), fails=st.sampled_from([False, False, False, True]))
    def finish_transfer(self, pick: int, fails: bool) -> None:
        pending = [(link, i) for link in self.links for i in range(len(link.pending))]
        link, index = pending[pick % len(pending)]
        link.fail(index) if fails else link.complete(index)

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(ADDRESSABLE))
    def pin(self, key: str, tier: str) -> None:
        try:
            self.store.pin(key, tier)
        except CapacityError:
            return
        self.pins.append((key, tier))

    @precondition(lambda self: self.pins)
    @rule(index=st.integers(0, 10))
    def unpin(self, index: int) -> None:
        self.store.unpin(*self.pins.pop(index % len(self.pins)))

    @rule(late_by=st.integers(1, 4), key=st.sampled_from(KEYS), comes=st.booleans())
    def pass_over(self, late_by: int, key: str, comes: bool) -> None:
        access = (self.tick + late_by, key)
        self.store.pass_over([access], but_not=[access] if comes else [])

    @rule(nbytes=st.integers(-2, 2))
    def reserve(self, nbytes: int) -> None:
        if any(link.pending for link in self.links) or self.reserved + nbytes < 0:
            return
        try:
            self.store.reserve("gpu", nbytes)
        except (CapacityError, TransferError):
            return
        self.reserved += nbytes

    # -- invariants --------------------------------------------------------------------------------------------

    @invariant()
    def capacities_hold_and_are_exact(self) -> None:
        for tier in self.tiers:
            held = sum(
                copy.slot_bytes
                for block in self.store._movement.blocks.values()
                for copy in block.copies.values()
                if copy.tier == tier.name
            )
            reserved = self.reserved if tier.name == "gpu" else 0
            assert held + reserved == tier.usage().used_bytes <= tier.capacity_bytes
            movement = self.store._movement
            assert movement.occupancy.copy_bytes[tier.name] == held - movement.occupancy.home_bytes[tier.name]

    @invariant()
    def skipped_walks_would_fetch_nothing(self) -> None:
        """Assert that a walk of the schedule is skipped only if it would find nothing to fetch."""
        prefetcher = self.store._movement.prefetcher
        if prefetcher.schedule is not None and prefetcher.idle_state == prefetcher.fetch_state():
            assert not list(prefetcher.missing_accesses())

    @invariant()
    def leased_bytes_do_not_change(self) -> None:
        for lease, value in self.leases:
            assert lease.tensor.tolist() == [value] * SIZES[lease.key]

    @invariant()
    def written_blocks_have_their_bytes(self) -> None:
        writing = {lease.key for lease, _ in self.leases if lease.mode != "r"}
        for block in self.store._movement.blocks.values():
            key = block.spec.key
            newest = [c for c in block.copies.values() if c.state in (CopyState.DIRTY, CopyState.DRAINING)]
            assert len(newest) <= 1
            if key in writing:
                continue
            valid = [copy for copy in block.copies.values() if copy.state.is_valid]
            assert bool(valid) == (key in self.contents), key
            for copy in valid:
                assert copy.slot is not None and isinstance(copy.slot.resource, torch.Tensor)
                assert copy.slot.resource.tolist() == [self.contents[key]] * SIZES[key]

    @invariant()
    def idle_store_has_no_transitional_copies(self) -> None:
        if self.leases or any(link.pending for link in self.links):
            return
        for block in self.store._movement.blocks.values():
            for copy in block.copies.values():
                assert copy.state not in (CopyState.FILLING, CopyState.DRAINING)
                assert copy.readers == copy.num_waiters == 0 and block.num_transfers == 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease, _ in self.leases:
            lease.release()
        while any(link.pending for link in self.links):
            for link in self.links:
                while link.pending:
                    link.complete()
        if not any(block.num_transfers for block in self.store._movement.blocks.values()):
            self.store.close()  # otherwise an invariant is broken, and close would wait forever


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
