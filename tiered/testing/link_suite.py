"""LinkSuite: inheritable tests for the links between a tier and its neighbour."""

from __future__ import annotations

import threading

import torch

from tiered.errors import TransferError
from tiered.links.base import Link
from tiered.testing.subjects import TIMEOUT_S, PairSubject, Rig, raised_by, random_bytes
from tiered.tiers.base import Slot
from tiered.transfer import Transfer


class LinkSuite(PairSubject):
    """Tests for a tier's links. Subclass it and define ``make_tier``; pytest collects the tests::

        class TestMyLinks(LinkSuite):
            def make_tier(self, capacity_bytes: int) -> Tier:
                return MyTier(capacity_bytes)

            def failing(self, fast: Tier, slow: Tier) -> AbstractContextManager[object]:
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
            for link in (rig.down, rig.up):
                assert isinstance(link, Link), f"{type(link).__name__} does not implement tiered.Link"
                assert link.path and isinstance(link.path, str), repr(link.path)
                usage = link.usage()
                assert (usage.num_bytes, usage.busy_s, usage.inflight_bytes, usage.num_transfers) == (0, 0, 0, 0), usage
                assert usage.path == link.path, (usage.path, link.path)

    def test_round_trip_keeps_bytes_of_every_size(self) -> None:
        with self.rig() as rig:
            for seed, nbytes in enumerate(self._sizes()):
                data = random_bytes(nbytes, seed)
                fast, slow = rig.fast_slot(nbytes), rig.slow_slot(nbytes)
                rig.write(fast, data)
                transfer = rig.send(fast, slow)
                assert transfer.done() and transfer.error is None and not transfer.skipped, vars_of(transfer)
                assert transfer.event is None or transfer.event.query() is True, "the transfer has ended, not its event"
                assert (transfer.src, transfer.dst) == (rig.fast.name, rig.slow.name), vars_of(transfer)
                assert (transfer.nbytes, transfer.path) == (nbytes, rig.down.path), vars_of(transfer)
                assert torch.equal(rig.read(fast), data), f"the source of {nbytes} bytes was changed"
                assert torch.equal(rig.fetch(slow, fast), data), f"a fetch of {nbytes} bytes returned wrong bytes"
                assert torch.equal(rig.fetch(slow, fast), data), f"a second fetch of {nbytes} bytes failed"
                rig.fast.free(fast)
                rig.slow.free(slow)

    def test_last_write_wins(self) -> None:
        with self.rig() as rig:
            nbytes = self.unit_bytes + 1
            fast, slow = rig.fast_slot(nbytes), rig.slow_slot(nbytes)
            for seed in range(4):
                rig.write(fast, random_bytes(nbytes, seed))
                rig.send(fast, slow)
            assert torch.equal(rig.fetch(slow, fast), random_bytes(nbytes, 3))

    def test_transfer_leaves_other_slots_unchanged(self) -> None:
        with self.rig() as rig:
            nbytes = 2 * self.unit_bytes + 3
            slots = [(rig.fast_slot(nbytes, f"block.{n}"), rig.slow_slot(nbytes, f"block.{n}")) for n in range(3)]
            for number, (fast, slow) in enumerate(slots):
                rig.write(fast, random_bytes(nbytes, number))
                rig.send(fast, slow)
            rig.write(slots[1][0], random_bytes(nbytes, 9))
            rig.send(*slots[1])
            assert torch.equal(rig.fetch(slots[1][1], slots[1][0]), random_bytes(nbytes, 9))
            for number in (0, 2):
                fast, slow = slots[number]
                assert torch.equal(rig.read(fast), random_bytes(nbytes, number)), (
                    "another slot of the fast tier changed"
                )
                assert torch.equal(rig.fetch(slow, fast), random_bytes(nbytes, number)), "another home was changed"

    def test_concurrent_transfers_in_both_directions(self) -> None:
        with self.rig() as rig:
            homes = self._stored(rig, 12)
            news = [self._filled(rig, number + 100) for number in range(12)]
            targets = [rig.fast_slot(home.nbytes, f"copy.{number}") for number, home in enumerate(homes)]
            slow_news = [rig.slow_slot(slot.nbytes, f"new.{number}") for number, slot in enumerate(news)]
            jobs = [(rig.up, home, target) for home, target in zip(homes, targets, strict=True)]
            jobs += [(rig.down, slot, home) for slot, home in zip(news, slow_news, strict=True)]
            jobs = jobs[::2] + jobs[1::2]
            transfers = self._submit_from_threads(jobs)
            for transfer in transfers:
                transfer.wait(TIMEOUT_S)
            for number, target in enumerate(targets):
                assert torch.equal(rig.read(target), self._data(number)), f"concurrent fetch {number} is wrong"
            for number, (home, target) in enumerate(zip(slow_news, targets, strict=True)):
                assert torch.equal(rig.fetch(home, target), self._data(number + 100)), f"write {number} is wrong"
            for link in (rig.up, rig.down):
                assert link.usage().inflight_bytes == 0, link.usage()

    def test_counters_count_contents(self) -> None:
        with self.rig() as rig:
            slots = [(rig.fast_slot(nbytes), rig.slow_slot(nbytes, f"block.{nbytes}")) for nbytes in self._sizes()]
            for fast, slow in slots:
                rig.write(fast, random_bytes(fast.nbytes, 0))
                rig.send(fast, slow)
                rig.fetch(slow, fast)
            for link in (rig.down, rig.up):
                usage = link.usage()
                assert usage.num_bytes == sum(self._sizes()), f"{usage}, moved {sum(self._sizes())} bytes of contents"
                assert usage.num_transfers == len(slots) and usage.inflight_bytes == 0, usage
                assert usage.busy_s > 0, usage

    def test_submit_and_usage_do_not_wait_for_callbacks(self) -> None:
        """The store submits transfers while holding its lock, and transfer callbacks take the same lock."""
        with self.rig() as rig:
            homes = self._stored(rig, 6)
            targets = [rig.fast_slot(home.nbytes, f"copy.{number}") for number, home in enumerate(homes)]
            lock, entered, called = threading.RLock(), threading.Event(), threading.Semaphore(0)
            transfers: list[Transfer] = []

            def ended(_: Transfer) -> None:
                entered.set()
                with lock:
                    called.release()

            def submit_all() -> None:
                with lock:
                    for number, (home, target) in enumerate(zip(homes, targets, strict=True)):
                        if number == len(homes) // 2:
                            entered.wait(TIMEOUT_S)  # Wait until a callback is waiting for the lock.
                        transfer = rig.up.submit(home, target, home.nbytes)
                        transfer.add_done_callback(ended)
                        transfers.append(transfer)
                        rig.up.usage()

            thread = threading.Thread(target=submit_all, daemon=True)
            thread.start()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "submit or usage waits for a callback, which waits for its caller's lock"
            for transfer in transfers:
                transfer.wait(TIMEOUT_S)
            assert all(called.acquire(timeout=TIMEOUT_S) for _ in transfers), "a callback was not called"
            assert not called.acquire(blocking=False), "a callback was called twice"

    def test_failures_end_in_the_transfer(self) -> None:
        with self.rig() as rig:
            nbytes = self.unit_bytes
            (home,), target = self._stored(rig, 1), rig.fast_slot(nbytes, "copy")
            source, slow = rig.fast_slot(nbytes, "source"), rig.slow_slot(nbytes, "other")
            rig.write(source, random_bytes(nbytes, 50))
            before = rig.down.usage(), rig.up.usage()
            with self.failing(rig.fast, rig.slow):
                for transfer in (rig.down.submit(source, slow, nbytes), rig.up.submit(home, target, home.nbytes)):
                    error = raised_by(lambda transfer=transfer: transfer.wait(TIMEOUT_S))  # type: ignore[misc]
                    assert isinstance(error, TransferError), f"a failed transfer raised {error!r}, not a TransferError"
                    assert error.tier and str(error), "the error names no tier"
                    assert transfer.done() and transfer.error is error, vars_of(transfer)
            for link, earlier in zip((rig.down, rig.up), before, strict=True):
                usage = link.usage()
                assert (usage.num_bytes, usage.inflight_bytes) == (earlier.num_bytes, 0), usage
            assert torch.equal(rig.read(source), random_bytes(nbytes, 50)), "a failed write changed its source"
            assert torch.equal(rig.fetch(home, target), self._data(0)), "a failed fetch changed its source"
            rig.send(source, slow)
            assert torch.equal(rig.fetch(slow, target), random_bytes(nbytes, 50)), "a link must work after a failure"

    def test_close_leaves_the_other_direction_open(self) -> None:
        with self.rig() as rig:
            (home,) = self._stored(rig, 1)
            rig.down.close()
            assert torch.equal(rig.fetch(home, rig.fast_slot(home.nbytes)), self._data(0))

    def test_close_finishes_pending_transfers(self) -> None:
        with self.rig() as rig:
            homes = self._stored(rig, 8)
            targets = [rig.fast_slot(home.nbytes, f"copy.{number}") for number, home in enumerate(homes)]
            transfers = [rig.up.submit(home, target, home.nbytes) for home, target in zip(homes, targets, strict=True)]
            for link in (rig.up, rig.down, rig.up):  # Both links may share threads that end with the last link.
                link.close()
            for number, (transfer, target) in enumerate(zip(transfers, targets, strict=True)):
                assert transfer.done(), "all links are closed, but a transfer has not ended"
                transfer.wait(0)
                assert torch.equal(rig.read(target), self._data(number))

    # -- helpers -----------------------------------------------------------------------------------------------

    def _data(self, number: int) -> torch.Tensor:
        return random_bytes(self.unit_bytes + 13 * (number % 50), number)

    def _filled(self, rig: Rig, number: int) -> Slot:
        data = self._data(number)
        slot = rig.fast_slot(data.numel(), f"filled.{number}")
        rig.write(slot, data)
        return slot

    def _stored(self, rig: Rig, count: int) -> list[Slot]:
        """Return ``count`` slots of the slower tier that contain ``_data(0)``, ``_data(1)`` ..."""
        homes = []
        for number in range(count):
            slot = self._filled(rig, number)
            homes.append(rig.slow_slot(slot.nbytes, f"home.{number}"))
            rig.send(slot, homes[-1])
            rig.fast.free(slot)
        return homes

    @staticmethod
    def _submit_from_threads(jobs: list[tuple[Link, Slot, Slot]]) -> list[Transfer]:
        transfers: list[Transfer] = []

        def submit(part: list[tuple[Link, Slot, Slot]]) -> None:
            for link, source, target in part:
                transfers.append(link.submit(source, target, source.nbytes))

        threads = [threading.Thread(target=submit, args=(jobs[number::3],), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(transfers) == len(jobs), f"submit raised or hangs: {len(transfers)} of {len(jobs)} transfers"
        return transfers


def vars_of(transfer: Transfer) -> str:
    """Describe a transfer for messages."""
    return f"{transfer.src}->{transfer.dst}, {transfer.nbytes} bytes, {transfer.path!r}, error {transfer.error!r}"
