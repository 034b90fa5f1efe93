"""LinkSuite: inheritable tests for the links between a tier and its neighbour."""

from __future__ import annotations

import threading

import torch

from tiered.errors import TransferError
from tiered.links.base import Link
from tiered.testing.subjects import TIMEOUT_S, PairSubject, Rig, catch_error, random_bytes
from tiered.tiers.base import Slot
from tiered.transfer import Transfer


class LinkSuite(PairSubject):
    """Tests for a tier's links. Subclass this suite and define ``make_tier``; pytest collects the tests::

        class TestMyLinks(LinkSuite):
            def make_tier(self, capacity_bytes: int) -> Tier:
                return MyTier(capacity_bytes)

            def fail_transfers(self, fast_tier: Tier, slow_tier: Tier) -> AbstractContextManager[object]:
                return ...  # a context in which the tier's transfers fail

    ``default_links`` creates the links. Override ``make_links`` to test other links, and ``make_neighbour`` if the
    neighbour is not a ``RamTier``. Set ``is_faster`` if the tier is faster than its neighbour. The faster tier must be
    addressable.
    """

    def _sizes(self) -> list[int]:
        unit = self.unit_bytes
        return [0, 1, 2, 3, 511, 513, 4095, 4096, 4097, unit - 1, unit, unit + 1, 3 * unit + 7]

    def test_links_implement_the_protocol(self) -> None:
        with self.rig() as rig:
            for link in (rig.write_link, rig.read_link):
                assert isinstance(link, Link), f"{type(link).__name__} does not implement tiered.Link"
                assert link.path and isinstance(link.path, str), repr(link.path)
                usage = link.usage()
                assert (usage.num_bytes, usage.busy_s, usage.inflight_bytes, usage.num_transfers) == (0, 0, 0, 0), usage
                assert usage.path == link.path, (usage.path, link.path)

    def test_round_trip_keeps_bytes_of_every_size(self) -> None:
        with self.rig() as rig:
            for seed, nbytes in enumerate(self._sizes()):
                data = random_bytes(nbytes, seed)
                src, dst = rig.fast_slot(nbytes), rig.slow_slot(nbytes)
                rig.write(src, data)
                transfer = rig.send(src, dst)
                assert transfer.done() and transfer.error is None and not transfer.skipped, describe(transfer)
                assert transfer.event is None or transfer.event.query() is True, "the transfer has ended, not its event"
                assert (transfer.src, transfer.dst) == (rig.fast_tier.name, rig.slow_tier.name), describe(transfer)
                assert (transfer.nbytes, transfer.path) == (nbytes, rig.write_link.path), describe(transfer)
                assert torch.equal(rig.read(src), data), f"the source of {nbytes} bytes was changed"
                assert torch.equal(rig.fetch(dst, src), data), f"a fetch of {nbytes} bytes returned wrong bytes"
                assert torch.equal(rig.fetch(dst, src), data), f"a second fetch of {nbytes} bytes failed"
                rig.fast_tier.free(src)
                rig.slow_tier.free(dst)

    def test_last_write_wins(self) -> None:
        with self.rig() as rig:
            nbytes = self.unit_bytes + 1
            src, dst = rig.fast_slot(nbytes), rig.slow_slot(nbytes)
            for seed in range(4):
                rig.write(src, random_bytes(nbytes, seed))
                rig.send(src, dst)
            assert torch.equal(rig.fetch(dst, src), random_bytes(nbytes, 3))

    def test_transfer_leaves_other_slots_unchanged(self) -> None:
        with self.rig() as rig:
            nbytes = 2 * self.unit_bytes + 3
            slots = [(rig.fast_slot(nbytes, f"block.{n}"), rig.slow_slot(nbytes, f"block.{n}")) for n in range(3)]
            for index, (src, dst) in enumerate(slots):
                rig.write(src, random_bytes(nbytes, index))
                rig.send(src, dst)
            rig.write(slots[1][0], random_bytes(nbytes, 9))
            rig.send(*slots[1])
            assert torch.equal(rig.fetch(slots[1][1], slots[1][0]), random_bytes(nbytes, 9))
            for index in (0, 2):
                src, dst = slots[index]
                assert torch.equal(rig.read(src), random_bytes(nbytes, index)), "another slot of the fast tier changed"
                assert torch.equal(rig.fetch(dst, src), random_bytes(nbytes, index)), "another home was changed"

    def test_concurrent_transfers_in_both_directions(self) -> None:
        with self.rig() as rig:
            homes = self._fill_homes(rig, 12)
            new_slots = [self._fill_slot(rig, index + 100) for index in range(12)]
            targets = [rig.fast_slot(home.nbytes, f"copy.{index}") for index, home in enumerate(homes)]
            new_homes = [rig.slow_slot(slot.nbytes, f"new.{index}") for index, slot in enumerate(new_slots)]
            jobs = [(rig.read_link, home, target) for home, target in zip(homes, targets, strict=True)]
            jobs += [(rig.write_link, slot, home) for slot, home in zip(new_slots, new_homes, strict=True)]
            jobs = jobs[::2] + jobs[1::2]
            transfers = self._submit_from_threads(jobs)
            for transfer in transfers:
                transfer.wait(TIMEOUT_S)
            for index, target in enumerate(targets):
                assert torch.equal(rig.read(target), self._make_data(index)), f"concurrent fetch {index} is wrong"
            for index, (home, target) in enumerate(zip(new_homes, targets, strict=True)):
                assert torch.equal(rig.fetch(home, target), self._make_data(index + 100)), f"write {index} is wrong"
            for link in (rig.read_link, rig.write_link):
                assert link.usage().inflight_bytes == 0, link.usage()

    def test_counters_count_contents(self) -> None:
        with self.rig() as rig:
            slots = [(rig.fast_slot(nbytes), rig.slow_slot(nbytes, f"block.{nbytes}")) for nbytes in self._sizes()]
            for src, dst in slots:
                rig.write(src, random_bytes(src.nbytes, 0))
                rig.send(src, dst)
                rig.fetch(dst, src)
            for link in (rig.write_link, rig.read_link):
                usage = link.usage()
                assert usage.num_bytes == sum(self._sizes()), f"{usage}, moved {sum(self._sizes())} bytes of contents"
                assert usage.num_transfers == len(slots) and usage.inflight_bytes == 0, usage
                assert usage.busy_s > 0, usage

    def test_submit_and_usage_do_not_wait_for_callbacks(self) -> None:
        """The store submits transfers while holding its lock, and transfer callbacks take the same lock."""
        with self.rig() as rig:
            homes = self._fill_homes(rig, 6)
            targets = [rig.fast_slot(home.nbytes, f"copy.{index}") for index, home in enumerate(homes)]
            lock, callback_started, calls = threading.RLock(), threading.Event(), threading.Semaphore(0)
            transfers: list[Transfer] = []

            def on_end(_: Transfer) -> None:
                callback_started.set()
                with lock:
                    calls.release()

            def submit_all() -> None:
                with lock:
                    for index, (home, target) in enumerate(zip(homes, targets, strict=True)):
                        if index == len(homes) // 2:
                            callback_started.wait(TIMEOUT_S)  # Wait until a callback is waiting for the lock.
                        transfer = rig.read_link.submit(home, target, home.nbytes)
                        transfer.add_done_callback(on_end)
                        transfers.append(transfer)
                        rig.read_link.usage()

            thread = threading.Thread(target=submit_all, daemon=True)
            thread.start()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "submit or usage waits for a callback, which waits for its caller's lock"
            for transfer in transfers:
                transfer.wait(TIMEOUT_S)
            assert all(calls.acquire(timeout=TIMEOUT_S) for _ in transfers), "a callback was not called"
            assert not calls.acquire(blocking=False), "a callback was called twice"

    def test_failures_end_in_the_transfer(self) -> None:
        with self.rig() as rig:
            nbytes = self.unit_bytes
            (home,), copy = self._fill_homes(rig, 1), rig.fast_slot(nbytes, "copy")
            src, dst = rig.fast_slot(nbytes, "source"), rig.slow_slot(nbytes, "other")
            rig.write(src, random_bytes(nbytes, 50))
            old_usages = rig.write_link.usage(), rig.read_link.usage()
            with self.fail_transfers(rig.fast_tier, rig.slow_tier):
                transfers = rig.write_link.submit(src, dst, nbytes), rig.read_link.submit(home, copy, home.nbytes)
                for transfer in transfers:
                    error = catch_error(lambda transfer=transfer: transfer.wait(TIMEOUT_S))  # type: ignore[misc]
                    assert isinstance(error, TransferError), f"a failed transfer raised {error!r}, not a TransferError"
                    assert error.tier and str(error), "the error names no tier"
                    assert transfer.done() and transfer.error is error, describe(transfer)
            for link, old_usage in zip((rig.write_link, rig.read_link), old_usages, strict=True):
                usage = link.usage()
                assert (usage.num_bytes, usage.inflight_bytes) == (old_usage.num_bytes, 0), usage
            assert torch.equal(rig.read(src), random_bytes(nbytes, 50)), "a failed write changed its source"
            assert torch.equal(rig.fetch(home, copy), self._make_data(0)), "a failed fetch changed its source"
            rig.send(src, dst)
            assert torch.equal(rig.fetch(dst, copy), random_bytes(nbytes, 50)), "a link must work after a failure"

    def test_close_leaves_the_other_direction_open(self) -> None:
        with self.rig() as rig:
            (home,) = self._fill_homes(rig, 1)
            rig.write_link.close()
            assert torch.equal(rig.fetch(home, rig.fast_slot(home.nbytes)), self._make_data(0))

    def test_close_finishes_pending_transfers(self) -> None:
        with self.rig() as rig:
            homes = self._fill_homes(rig, 8)
            targets = [rig.fast_slot(home.nbytes, f"copy.{index}") for index, home in enumerate(homes)]
            transfers = [
                rig.read_link.submit(home, target, home.nbytes) for home, target in zip(homes, targets, strict=True)
            ]
            # Both links may share threads that end with the last link.
            for link in (rig.read_link, rig.write_link, rig.read_link):
                link.close()
            for index, (transfer, target) in enumerate(zip(transfers, targets, strict=True)):
                assert transfer.done(), "all links are closed, but a transfer has not ended"
                transfer.wait(0)
                assert torch.equal(rig.read(target), self._make_data(index))

    # -- helpers -----------------------------------------------------------------------------------------------

    def _make_data(self, seed: int) -> torch.Tensor:
        return random_bytes(self.unit_bytes + 13 * (seed % 50), seed)

    def _fill_slot(self, rig: Rig, seed: int) -> Slot:
        data = self._make_data(seed)
        slot = rig.fast_slot(data.numel(), f"filled.{seed}")
        rig.write(slot, data)
        return slot

    def _fill_homes(self, rig: Rig, count: int) -> list[Slot]:
        """Return ``count`` slots of the slower tier that contain ``_make_data(0)``, ``_make_data(1)`` ..."""
        homes = []
        for index in range(count):
            slot = self._fill_slot(rig, index)
            homes.append(rig.slow_slot(slot.nbytes, f"home.{index}"))
            rig.send(slot, homes[-1])
            rig.fast_tier.free(slot)
        return homes

    @staticmethod
    def _submit_from_threads(jobs: list[tuple[Link, Slot, Slot]]) -> list[Transfer]:
        transfers: list[Transfer] = []

        def submit(share: list[tuple[Link, Slot, Slot]]) -> None:
            for link, source, target in share:
                transfers.append(link.submit(source, target, source.nbytes))

        threads = [threading.Thread(target=submit, args=(jobs[index::3],), daemon=True) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(transfers) == len(jobs), f"submit raised or hangs: {len(transfers)} of {len(jobs)} transfers"
        return transfers


def describe(transfer: Transfer) -> str:
    """Describe a transfer for messages."""
    return f"{transfer.src}->{transfer.dst}, {transfer.nbytes} bytes, {transfer.path!r}, error {transfer.error!r}"
