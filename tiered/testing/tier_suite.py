"""TierSuite: inheritable tests for a tier."""

from __future__ import annotations

import contextlib
import random
import threading

import torch

from tiered.errors import CapacityError, TieredError, TransferError
from tiered.testing.subjects import TIMEOUT_S, TierSubject, catch_error, random_bytes
from tiered.tiers.base import Slot, Tier

_DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint8, torch.float64)
_SHAPES = ((3, 5), (7,), (2, 1, 4), (), (0,), (0, 4))
_NUM_UNITS = 8


class TierSuite(TierSubject):
    """Tests for a tier. Subclass this suite and define ``make_tier``; pytest collects the tests::

        class TestMyTier(TierSuite):
            def make_tier(self, capacity_bytes: int) -> Tier:
                return MyTier(capacity_bytes)

    Every test creates a tier and closes it.
    """

    def _tier(self) -> contextlib.closing[Tier]:
        return contextlib.closing(self.make_tier(_NUM_UNITS * self.unit_bytes))

    def _sizes(self, tier: Tier) -> list[int]:
        """Return sizes that are edge cases: empty, odd, and close to the alignment."""
        align, unit = tier.alignment_bytes, self.unit_bytes
        return sorted({0, 1, 3, max(0, align - 1), align, align + 1, unit - 1, unit, unit + 1, 2 * unit + 5})

    # -- protocol ----------------------------------------------------------------------------------------------

    def test_tier_implements_the_protocol(self) -> None:
        with self._tier() as tier:
            assert isinstance(tier, Tier), f"{type(tier).__name__} does not implement tiered.Tier"
            assert tier.name and isinstance(tier.name, str), repr(tier.name)
            assert tier.capacity_bytes == _NUM_UNITS * self.unit_bytes, tier.capacity_bytes
            assert isinstance(tier.alignment_bytes, int) and tier.alignment_bytes >= 1, tier.alignment_bytes
            assert tier.device is None or isinstance(tier.device, torch.device), tier.device
            assert isinstance(tier.durable, bool), tier.durable
            assert 4 * tier.alignment_bytes <= self.unit_bytes, f"set unit_bytes: alignment {tier.alignment_bytes}"

    # -- ledger ------------------------------------------------------------------------------------------------

    def test_the_ledger_counts_whole_slots(self) -> None:
        with self._tier() as tier:
            usage = tier.usage()
            assert (usage.used_bytes, usage.high_water_bytes) == (0, 0), usage
            assert usage.free_bytes == usage.capacity_bytes == tier.capacity_bytes, usage
            expected = peak_bytes = 0
            for index, nbytes in enumerate(self._sizes(tier)):
                slot_bytes = tier.slot_bytes(nbytes)
                assert slot_bytes >= nbytes, (nbytes, slot_bytes)
                assert slot_bytes % tier.alignment_bytes == 0, (nbytes, slot_bytes, tier.alignment_bytes)
                slot = self.allocate(tier, nbytes, f"layers.{index}/weight")
                assert (slot.tier, slot.nbytes, slot.slot_bytes) == (tier.name, nbytes, slot_bytes), slot
                expected += slot_bytes
                peak_bytes = max(peak_bytes, expected)
                assert tier.usage().used_bytes == expected, (tier.usage(), expected)
                if index % 2:
                    tier.free(slot)
                    expected -= slot_bytes
                assert tier.usage().used_bytes == expected, (tier.usage(), expected)
            assert tier.usage().high_water_bytes == peak_bytes, (tier.usage(), peak_bytes)

    def test_allocation_without_space_returns_none_at_no_cost(self) -> None:
        with self._tier() as tier:
            assert tier.allocate(tier.capacity_bytes + 1, name="huge", home=True) is None
            slots: list[Slot] = []
            while tier.slot_bytes(self.unit_bytes) <= tier.usage().free_bytes:
                slots.append(self.allocate(tier, self.unit_bytes, f"block.{len(slots)}"))
            assert slots, tier.usage()
            old_usage = tier.usage()
            assert old_usage.used_bytes <= tier.capacity_bytes, old_usage
            assert tier.allocate(self.unit_bytes, name="more", home=not self.takes_copies) is None
            assert tier.usage() == old_usage, (tier.usage(), old_usage)
            tier.free(slots.pop())
            self.allocate(tier, self.unit_bytes, "more")

    def test_requests_within_the_free_bytes_are_granted(self) -> None:
        """The store evicts until enough bytes are free, and then relies on the allocation to succeed."""
        rng = random.Random(0)
        with self._tier() as tier:
            slots: list[Slot] = []
            for step in range(120):
                usage = tier.usage()
                limit = min(usage.free_bytes, 3 * self.unit_bytes)
                nbytes = rng.choice([*self._sizes(tier), rng.randrange(3 * self.unit_bytes), limit, limit])
                slot = tier.allocate(nbytes, name=f"block.{step}", home=not self.takes_copies)
                fits = tier.slot_bytes(nbytes) <= usage.free_bytes
                assert (slot is not None) == fits, f"{nbytes} bytes, slot {tier.slot_bytes(nbytes)}, {usage}"
                if slot is not None:
                    slots.append(slot)
                while slots and (slot is None or rng.random() < 0.4):
                    tier.free(slots.pop(rng.randrange(len(slots))))
                    slot = slots[0] if slots else None
                expected = sum(slot.slot_bytes for slot in slots)
                assert tier.usage().used_bytes == expected <= tier.capacity_bytes, (tier.usage(), expected)

    def test_freeing_a_slot_twice_raises(self) -> None:
        with self._tier() as tier:
            other, slot = self.allocate(tier, self.unit_bytes, "kept"), self.allocate(tier, self.unit_bytes, "gone")
            tier.free(slot)
            assert catch_error(lambda: tier.free(slot)) is not None, "a slot was freed twice without an error"
            assert tier.usage().used_bytes == other.slot_bytes, tier.usage()

    def test_freed_names_can_be_reused(self) -> None:
        with self._tier() as tier:
            for nbytes in (self.unit_bytes, 1, 2 * self.unit_bytes):
                slot = self.allocate(tier, nbytes, "model.layers.0/self_attn.q-proj_weight")
                other = self.allocate(tier, nbytes, "model.layers.0/other")
                tier.free(slot)
                tier.free(other)
            assert tier.usage().used_bytes == 0, tier.usage()

    def test_reservations_share_the_ledger(self) -> None:
        with self._tier() as tier:
            slot = self.allocate(tier, self.unit_bytes, "block")
            free_bytes = tier.usage().free_bytes
            tier.reserve(0)
            tier.reserve(free_bytes)
            assert tier.usage().free_bytes == 0, tier.usage()
            assert tier.usage().high_water_bytes == tier.capacity_bytes, tier.usage()
            assert tier.allocate(1, name="more", home=not self.takes_copies) is None
            old_usage = tier.usage()
            error = catch_error(lambda: tier.reserve(1))
            assert isinstance(error, CapacityError), f"reserve beyond the capacity: {error!r}, not a CapacityError"
            assert (error.tier, error.need_bytes, error.free_bytes) == (tier.name, 1, 0), vars(error)
            assert tier.usage() == old_usage, (tier.usage(), old_usage)
            tier.reserve(-free_bytes)
            assert tier.usage().free_bytes == free_bytes, tier.usage()
            tier.free(slot)
            assert tier.usage().used_bytes == 0, tier.usage()
            self.allocate(tier, self.unit_bytes, "again")

    def test_lack_of_machine_memory_raises_transfer_error(self) -> None:
        with self._tier() as tier:
            with self.exhaust_memory(tier):
                error = catch_error(lambda: tier.allocate(self.unit_bytes, name="block", home=not self.takes_copies))
            assert isinstance(error, TransferError), f"the machine refused: {error!r}, not a TransferError"
            assert error.tier == tier.name, error.tier
            assert tier.usage().used_bytes == 0, tier.usage()
            self.allocate(tier, self.unit_bytes, "block")

    # -- contents ----------------------------------------------------------------------------------------------

    def test_tensors_are_views_of_the_slot(self) -> None:
        with self._tier() as tier:
            if tier.device is None:
                slot = self.allocate(tier, 4, "block")
                error = catch_error(lambda: tier.tensor(slot, (1,), torch.float32))
                assert isinstance(error, TieredError), f"not addressable, but tensor() gave {error!r}"
                return
            for dtype in _DTYPES:
                for shape in _SHAPES:
                    slot = self.allocate(tier, torch.Size(shape).numel() * dtype.itemsize, "block")
                    tensor, second_view = tier.tensor(slot, shape, dtype), tier.tensor(slot, shape, dtype)
                    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), (tensor.shape, tensor.dtype)
                    assert tensor.is_contiguous() and tensor.device.type == tier.device.type, tensor.device
                    assert tensor.data_ptr() % dtype.itemsize == 0, (tensor.data_ptr(), dtype)
                    tensor.fill_(1)
                    assert bool((second_view == 1).all()), f"{dtype} {shape}: the second tensor does not see the first"
                    assert tensor.data_ptr() == second_view.data_ptr(), "a copy, not a view"
                    tier.free(slot)

    def test_slots_do_not_overlap(self) -> None:
        with self._tier() as tier:
            if tier.device is None:
                return
            contents = {}
            for index, nbytes in enumerate([1, 5000, self.unit_bytes, 3, self.unit_bytes + 1]):
                slot = self.allocate(tier, nbytes, f"block.{index}")
                contents[slot] = random_bytes(nbytes, index)
                tier.tensor(slot, (nbytes,), torch.uint8).copy_(contents[slot])
            for index in range(10):  # Allocate and free other slots.
                slot = self.allocate(tier, self.unit_bytes, f"other.{index}")
                tier.tensor(slot, (self.unit_bytes,), torch.uint8).fill_(index)
                tier.free(slot)
            for slot, expected in contents.items():
                data = tier.tensor(slot, (slot.nbytes,), torch.uint8)
                assert torch.equal(data.cpu(), expected), f"another slot changed the slot of {slot.nbytes} bytes"

    def test_tensor_cannot_exceed_the_slot(self) -> None:
        with self._tier() as tier:
            if tier.device is None:
                return
            slot = self.allocate(tier, self.unit_bytes, "block")
            tier.tensor(slot, (self.unit_bytes,), torch.uint8).copy_(random_bytes(self.unit_bytes, 0))
            prefix = tier.tensor(slot, (100,), torch.uint8)
            assert torch.equal(prefix.cpu(), random_bytes(self.unit_bytes, 0)[:100])
            nbytes = slot.slot_bytes + 1
            assert catch_error(lambda: tier.tensor(slot, (nbytes,), torch.uint8)) is not None, "bytes beyond the slot"

    # -- closing and threads -----------------------------------------------------------------------------------

    def test_sync_returns(self) -> None:
        with self._tier() as tier:
            tier.sync()
            self.allocate(tier, self.unit_bytes, "block")
            tier.sync()

    def test_close_is_idempotent(self) -> None:
        with self._tier() as tier:  # closes the tier again
            slot = self.allocate(tier, self.unit_bytes, "block")
            tier.close()
            if self.takes_copies:
                tier.free(slot)  # A lease can outlive the store.

    def test_concurrent_threads_keep_the_ledger_exact(self) -> None:
        """Threads do not exceed the capacity or change each other's slots. At the end, the ledger is empty."""
        problems: list[str] = []
        with self._tier() as tier:
            threads = [
                threading.Thread(target=self._run_thread, args=(tier, index, problems), daemon=True)
                for index in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads), "the threads deadlock"
            assert not problems, problems[0]
            assert tier.usage().used_bytes == 0, tier.usage()

    def _run_thread(self, tier: Tier, index: int, problems: list[str]) -> None:
        rng = random.Random(index)
        slots: list[tuple[Slot, int]] = []
        try:
            for step in range(60):
                nbytes = rng.choice([100, self.unit_bytes // 2, self.unit_bytes, 2 * self.unit_bytes])
                slot = tier.allocate(nbytes, name=f"thread.{index}/{step}", home=not self.takes_copies)
                if slot is not None:
                    slots.append((slot, rng.randrange(256)))
                    self._fill(tier, *slots[-1])
                if slot is None or rng.random() < 0.5:
                    self._check_and_free(tier, slots, rng, problems)
                usage = tier.usage()
                own_bytes = sum(slot.slot_bytes for slot, _ in slots)
                if not own_bytes <= usage.used_bytes <= usage.high_water_bytes <= tier.capacity_bytes:
                    problems.append(f"thread {index} holds {own_bytes} bytes, {usage}")
            while slots:
                self._check_and_free(tier, slots, rng, problems)
        except Exception as error:
            problems.append(f"thread {index}: {error!r}")

    @staticmethod
    def _fill(tier: Tier, slot: Slot, value: int) -> None:
        if tier.device is not None:
            tier.tensor(slot, (slot.nbytes,), torch.uint8).fill_(value)

    @staticmethod
    def _check_and_free(tier: Tier, slots: list[tuple[Slot, int]], rng: random.Random, problems: list[str]) -> None:
        if not slots:
            return
        slot, value = slots.pop(rng.randrange(len(slots)))
        if tier.device is not None and not bool((tier.tensor(slot, (slot.nbytes,), torch.uint8) == value).all()):
            problems.append(f"a slot of {slot.nbytes} bytes was changed by another thread")
        tier.free(slot)
