"""StoreSuite: inheritable tests for a store on a tier. They compare random operations with a dict."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tiered.block import CopyState
from tiered.durable.arrays import byte_view
from tiered.errors import CapacityError, TransferError, UninitializedBlockError
from tiered.store import TieredStore
from tiered.testing.subjects import TIMEOUT_S, PairSubject, raised_by, random_bytes
from tiered.tiers.base import Tier

_DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.uint8)
_FAST_UNITS, _SLOW_UNITS = 5, 24


class StoreSuite(PairSubject):
    """Tests for a store on a tier. Subclass it and define ``make_tier``; pytest collects the tests::

        class TestMyStore(StoreSuite):
            def make_tier(self, capacity_bytes: int) -> Tier:
                return MyTier(capacity_bytes)

    See ``LinkSuite`` for other methods to override. After a store is closed, the tests open it again with new tiers.

    Attributes:
        seeds: random seeds. Each seed is a separate run.
    """

    num_operations = 150
    seeds = (0, 1)

    def test_random_work_keeps_every_byte(self) -> None:
        for seed in self.seeds:
            with self._folder() as folder:
                self._work_and_reopen(folder, random.Random(seed))

    def test_threads_keep_their_bytes(self) -> None:
        problems: list[str] = []
        with self._folder() as folder, self._store(folder) as store:
            threads = [
                threading.Thread(target=self._thread, args=(store, number, problems), daemon=True)
                for number in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads), "the threads deadlock"
            assert not problems, problems[0]

    def test_a_failed_write_back_keeps_the_newest_bytes(self) -> None:
        fast, slow = self._tiers()
        with (
            self._folder() as folder,
            TieredStore([fast, slow], None, self.make_links(fast, slow), path=folder) as store,
        ):
            store.register("block", (self.unit_bytes,), torch.uint8, home=slow.name)
            for seed in range(2):
                with store.acquire("block", fast.name, "w", timeout_s=TIMEOUT_S) as lease:
                    lease.tensor.copy_(random_bytes(self.unit_bytes, seed))
                with self.failing(fast, slow):
                    error = raised_by(lambda: store.evict("block", fast.name).wait(TIMEOUT_S))
                assert isinstance(error, TransferError), f"a failed write-back raised {error!r}"
                assert store.where("block")[fast.name] is CopyState.DIRTY, store.where("block")
                with store.acquire("block", fast.name, timeout_s=TIMEOUT_S) as lease:
                    assert torch.equal(lease.tensor.cpu(), random_bytes(self.unit_bytes, seed))
            store.wait_idle()  # retries the write-back
            store.evict("block", fast.name).wait(TIMEOUT_S)
            with store.acquire("block", fast.name, timeout_s=TIMEOUT_S) as lease:
                assert torch.equal(lease.tensor.cpu(), random_bytes(self.unit_bytes, 1))

    def test_commit_can_exceed_the_fast_tier(self) -> None:
        num_blocks = 3 * _FAST_UNITS
        with self._folder() as folder:
            with self._store(folder) as store:
                fast, slow = list(store.stats().tiers)
                for number in range(num_blocks):
                    store.register(f"block.{number}", (self.unit_bytes,), torch.uint8, home=slow)
                    with store.acquire(f"block.{number}", fast, "w", timeout_s=TIMEOUT_S) as lease:
                        lease.tensor.copy_(random_bytes(self.unit_bytes, number))
                thread = threading.Thread(target=lambda: store.commit().wait(TIMEOUT_S), daemon=True)
                thread.start()
                thread.join(TIMEOUT_S)
                assert not thread.is_alive(), "a commit waits forever for space in the fast tier"
            tiers = self._tiers()
            with TieredStore.open(folder, tiers, links=self.make_links(*tiers)) as store:
                assert len(list(store.blocks())) == num_blocks, list(store.blocks())
                for number in range(num_blocks):
                    with store.acquire(f"block.{number}", fast, timeout_s=TIMEOUT_S) as lease:
                        found = lease.tensor.cpu()
                    assert torch.equal(found, random_bytes(self.unit_bytes, number)), (
                        f"block {number} differs from its committed bytes"
                    )

    # -- helpers -----------------------------------------------------------------------------------------------

    @contextmanager
    def _folder(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tiered-suite-") as folder:
            yield str(Path(folder, "generations"))

    def _tiers(self) -> tuple[Tier, Tier]:
        return self.make_pair(_FAST_UNITS * self.unit_bytes, _SLOW_UNITS * self.unit_bytes)

    def _store(self, folder: str) -> TieredStore:
        fast, slow = self._tiers()
        return TieredStore([fast, slow], None, self.make_links(fast, slow), path=folder)

    def _work_and_reopen(self, folder: str, rng: random.Random) -> None:
        with self._store(folder) as store:
            work = RandomOperations(store, rng, self.unit_bytes)
            work.run(self.num_operations)
            committed = dict(work.contents)
            store.commit({"step": 1}).wait(TIMEOUT_S)
            work.run(self.num_operations // 3, commits=False)  # Closing the store discards these changes.
            work.check_at_rest()
        fast, slow = self._tiers()
        with TieredStore.open(folder, [fast, slow], links=self.make_links(fast, slow)) as store:
            work = RandomOperations(store, rng, self.unit_bytes)
            work.contents = committed
            found = {spec.key for spec in store.blocks()}
            assert found == set(committed), f"opened {sorted(found)}, committed {sorted(committed)}"
            work.specs = {spec.key: (spec.shape, spec.dtype) for spec in store.blocks()}
            for key in sorted(committed):
                work.read(key)
            work.run(self.num_operations // 3)
            work.check_at_rest()

    def _thread(self, store: TieredStore, number: int, problems: list[str]) -> None:
        rng = random.Random(number)
        fast, slow = list(store.stats().tiers)
        contents: dict[str, torch.Tensor] = {}
        try:
            for step in range(50):
                key = f"thread.{number}/{rng.randrange(4)}"
                if key not in contents:
                    store.register(key, (self.unit_bytes,), torch.uint8, home=slow)
                mode = "r" if key in contents and rng.random() < 0.5 else "w"
                with store.acquire(key, fast, mode, timeout_s=TIMEOUT_S) as lease:  # type: ignore[arg-type]
                    if mode == "w":
                        contents[key] = random_bytes(self.unit_bytes, 1000 * number + step)
                        lease.tensor.copy_(contents[key])
                    elif not torch.equal(lease.tensor.cpu(), contents[key]):
                        problems.append(f"{key} differs from the last write")
                if rng.random() < 0.3:
                    store.evict(key, fast)
        except Exception as error:
            problems.append(f"thread {number}: {error!r}")


class RandomOperations:
    """Random operations on a store, and the expected contents of every block.

    Attributes:
        contents: bytes of the written blocks, by key.
        specs: shape and dtype of all blocks, by key.
    """

    def __init__(self, store: TieredStore, rng: random.Random, unit_bytes: int) -> None:
        self.store, self.rng, self.unit_bytes = store, rng, unit_bytes
        self.contents: dict[str, torch.Tensor] = {}
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._pinned: str | None = None
        tiers = store.stats().tiers
        self.fast, self.slow = list(tiers)
        self._addressable = [name for name in tiers if store.tier(name).device is not None]

    def run(self, num_operations: int, *, commits: bool = True) -> None:
        """Run ``num_operations`` random operations, and check the ledgers after each."""
        acts = [self.register] * 2 + [self.write] * 4 + [self.change] * 2 + [self.read] * 6 + [self.evict] * 3
        acts += [self.prefetch] * 3 + [self.discard, self.unregister, self.pin]
        acts += [self.commit] if commits else []
        for _ in range(num_operations):
            if not self.specs:
                self.register()
            act = self.rng.choice(acts)
            if act in (self.register, self.commit):
                act()
            else:
                act(self.rng.choice(sorted(self.specs)))  # type: ignore[call-arg]
            for name, tier in self.store.stats().tiers.items():
                assert 0 <= tier.used_bytes <= tier.high_water_bytes <= tier.capacity_bytes, (name, tier)

    def check_at_rest(self) -> None:
        """Read all blocks, and check that the tiers' ledgers count exactly the store's slots."""
        for key in sorted(self.contents):
            self.read(key)
        self.store.wait_idle()
        for name, figures in self.store.stats().tiers.items():
            tier = self.store.tier(name)
            held = [spec for spec in self.store.blocks() if name in self.store.where(spec.key)]
            expected = sum(tier.slot_bytes(spec.nbytes) for spec in held)
            assert figures.used_bytes == expected, f"tier '{name}': {figures}, slots of {expected} bytes"

    # -- operations --------------------------------------------------------------------------------------------

    def register(self) -> None:
        key = f"group.{self.rng.randrange(3)}/block.{self.rng.randrange(6)}"
        if key in self.specs:
            return
        dtype = self.rng.choice(_DTYPES)
        num_elements = self.rng.choice([0, 1, 7, 1000, self.unit_bytes // 8, self.unit_bytes // 4])
        shape = self.rng.choice([(num_elements,), (2, num_elements)])
        num_at_fast = sum(spec.home == self.fast for spec in self.store.blocks())
        home = self.fast if num_at_fast == 0 and self.rng.random() < 0.3 else self.slow
        self.store.register(key, shape, dtype, home=home)
        self.specs[key] = (shape, dtype)

    def write(self, key: str) -> None:
        shape, dtype = self.specs[key]
        data = random_bytes(torch.Size(shape).numel() * dtype.itemsize, self.rng.randrange(1 << 30))
        with self.store.acquire(key, self._tier_for(key), "w", timeout_s=TIMEOUT_S) as lease:
            assert (tuple(lease.tensor.shape), lease.tensor.dtype) == (shape, dtype), (key, lease.tensor.shape)
            byte_view(lease.tensor).copy_(data)
        self.contents[key] = data

    def change(self, key: str) -> None:
        if key not in self.contents:
            return
        with self.store.acquire(key, self._tier_for(key), "rw", timeout_s=TIMEOUT_S) as lease:
            view = byte_view(lease.tensor)
            assert torch.equal(view.cpu(), self.contents[key]), f"{key} differs from the last write"
            self.contents[key] = self.contents[key].flip(0)
            view.copy_(self.contents[key])

    def read(self, key: str) -> None:
        if key not in self.contents:
            error = raised_by(lambda: self.store.acquire(key, self.fast, timeout_s=TIMEOUT_S))
            assert isinstance(error, UninitializedBlockError), f"{key} has no contents, but reading it gave {error!r}"
            return
        with self.store.acquire(key, self._tier_for(key), timeout_s=TIMEOUT_S) as lease:
            assert torch.equal(byte_view(lease.tensor).cpu(), self.contents[key]), f"{key} differs from the last write"

    def evict(self, key: str) -> None:
        if key != self._pinned:
            transfer = self.store.evict(key, self.fast)
            if self.rng.random() < 0.5:
                transfer.wait(TIMEOUT_S)

    def prefetch(self, key: str) -> None:
        self.store.prefetch(key, self.fast)

    def discard(self, key: str) -> None:
        self.store.discard(key)
        self.contents.pop(key, None)

    def unregister(self, key: str) -> None:
        self.store.unregister(key)
        self.contents.pop(key, None)
        del self.specs[key]
        self._pinned = None if self._pinned == key else self._pinned

    def pin(self, key: str) -> None:
        if self._pinned is not None:
            self.store.unpin(self._pinned, self.fast)
            self._pinned = None
        try:
            self.store.pin(key, self.fast)
        except CapacityError:
            return
        self._pinned = key

    def commit(self) -> None:
        self.store.commit()  # The commit continues during later operations.

    def _tier_for(self, key: str) -> str:
        """Return a tier for a lease: usually the fast tier, sometimes an addressable home."""
        home = next(spec.home for spec in self.store.blocks() if spec.key == key)
        return home if home in self._addressable and self.rng.random() < 0.3 else self.fast
