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
from tiered.testing.subjects import TIMEOUT_S, PairSubject, catch_error, random_bytes
from tiered.tiers.base import Tier

_DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.uint8)
_FAST_UNITS, _SLOW_UNITS = 5, 24


class StoreSuite(PairSubject):
    """Tests for a store on a tier. Subclass this suite and define ``make_tier``; pytest collects the tests::

        class TestMyStore(StoreSuite):
            def make_tier(self, capacity_bytes: int) -> Tier:
                return MyTier(capacity_bytes)

    See ``LinkSuite`` for other methods to override. Some tests close a store and open it again with new tiers.

    Attributes:
        seeds: random seeds. Each seed is a separate run.
    """

    num_operations = 150
    seeds = (0, 1)

    def test_random_work_keeps_every_byte(self) -> None:
        for seed in self.seeds:
            with self._folder() as folder:
                self._run_and_reopen(folder, random.Random(seed))

    def test_threads_keep_their_bytes(self) -> None:
        problems: list[str] = []
        with self._folder() as folder, self._store(folder) as store:
            threads = [
                threading.Thread(target=self._run_thread, args=(store, index, problems), daemon=True)
                for index in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert not any(thread.is_alive() for thread in threads), "the threads deadlock"
            assert not problems, problems[0]

    def test_a_failed_write_back_keeps_the_newest_bytes(self) -> None:
        fast_tier, slow_tier = self._tiers()
        with (
            self._folder() as folder,
            TieredStore([fast_tier, slow_tier], None, self.make_links(fast_tier, slow_tier), path=folder) as store,
        ):
            store.register("block", (self.unit_bytes,), torch.uint8, home=slow_tier.name)
            for seed in range(2):
                with store.acquire("block", fast_tier.name, "w", timeout_s=TIMEOUT_S) as lease:
                    lease.tensor.copy_(random_bytes(self.unit_bytes, seed))
                with self.fail_transfers(fast_tier, slow_tier):
                    error = catch_error(lambda: store.evict("block", fast_tier.name).wait(TIMEOUT_S))
                assert isinstance(error, TransferError), f"a failed write-back raised {error!r}"
                assert store.where("block")[fast_tier.name] is CopyState.DIRTY, store.where("block")
                with store.acquire("block", fast_tier.name, timeout_s=TIMEOUT_S) as lease:
                    assert torch.equal(lease.tensor.cpu(), random_bytes(self.unit_bytes, seed))
            store.wait_idle()  # retries the write-back
            store.evict("block", fast_tier.name).wait(TIMEOUT_S)
            with store.acquire("block", fast_tier.name, timeout_s=TIMEOUT_S) as lease:
                assert torch.equal(lease.tensor.cpu(), random_bytes(self.unit_bytes, 1))

    def test_commit_can_exceed_the_fast_tier(self) -> None:
        num_blocks = 3 * _FAST_UNITS
        with self._folder() as folder:
            with self._store(folder) as store:
                fast_name, slow_name = list(store.stats().tiers)
                for index in range(num_blocks):
                    store.register(f"block.{index}", (self.unit_bytes,), torch.uint8, home=slow_name)
                    with store.acquire(f"block.{index}", fast_name, "w", timeout_s=TIMEOUT_S) as lease:
                        lease.tensor.copy_(random_bytes(self.unit_bytes, index))
                thread = threading.Thread(target=lambda: store.commit().wait(TIMEOUT_S), daemon=True)
                thread.start()
                thread.join(TIMEOUT_S)
                assert not thread.is_alive(), "a commit waits forever for space in the fast tier"
            tiers = self._tiers()
            with TieredStore.open(folder, tiers, links=self.make_links(*tiers)) as store:
                assert len(list(store.blocks())) == num_blocks, list(store.blocks())
                for index in range(num_blocks):
                    with store.acquire(f"block.{index}", fast_name, timeout_s=TIMEOUT_S) as lease:
                        data = lease.tensor.cpu()
                    assert torch.equal(data, random_bytes(self.unit_bytes, index)), (
                        f"block {index} differs from its committed bytes"
                    )

    # -- helpers -----------------------------------------------------------------------------------------------

    @contextmanager
    def _folder(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tiered-suite-") as folder:
            yield str(Path(folder, "generations"))

    def _tiers(self) -> tuple[Tier, Tier]:
        return self.make_pair(_FAST_UNITS * self.unit_bytes, _SLOW_UNITS * self.unit_bytes)

    def _store(self, folder: str) -> TieredStore:
        fast_tier, slow_tier = self._tiers()
        return TieredStore([fast_tier, slow_tier], None, self.make_links(fast_tier, slow_tier), path=folder)

    def _run_and_reopen(self, folder: str, rng: random.Random) -> None:
        with self._store(folder) as store:
            operations = RandomOperations(store, rng, self.unit_bytes)
            operations.run(self.num_operations)
            contents = dict(operations.contents)
            store.commit({"step": 1}).wait(TIMEOUT_S)
            operations.run(self.num_operations // 3, commits=False)  # Closing the store discards these changes.
            operations.check_at_rest()
        fast_tier, slow_tier = self._tiers()
        with TieredStore.open(folder, [fast_tier, slow_tier], links=self.make_links(fast_tier, slow_tier)) as store:
            operations = RandomOperations(store, rng, self.unit_bytes)
            operations.contents = contents
            keys = {spec.key for spec in store.blocks()}
            assert keys == set(contents), f"opened {sorted(keys)}, committed {sorted(contents)}"
            operations.specs = {spec.key: (spec.shape, spec.dtype) for spec in store.blocks()}
            for key in sorted(contents):
                operations.read(key)
            operations.run(self.num_operations // 3)
            operations.check_at_rest()

    def _run_thread(self, store: TieredStore, index: int, problems: list[str]) -> None:
        rng = random.Random(index)
        fast_name, slow_name = list(store.stats().tiers)
        contents: dict[str, torch.Tensor] = {}
        try:
            for step in range(50):
                key = f"thread.{index}/{rng.randrange(4)}"
                if key not in contents:
                    store.register(key, (self.unit_bytes,), torch.uint8, home=slow_name)
                mode = "r" if key in contents and rng.random() < 0.5 else "w"
                with store.acquire(key, fast_name, mode, timeout_s=TIMEOUT_S) as lease:  # type: ignore[arg-type]
                    if mode == "w":
                        contents[key] = random_bytes(self.unit_bytes, 1000 * index + step)
                        lease.tensor.copy_(contents[key])
                    elif not torch.equal(lease.tensor.cpu(), contents[key]):
                        problems.append(f"{key} differs from the last write")
                if rng.random() < 0.3:
                    store.evict(key, fast_name)
        except Exception as error:
            problems.append(f"thread {index}: {error!r}")


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
        self.fast_name, self.slow_name = list(tiers)
        self._addressable = [name for name in tiers if store.tier(name).device is not None]

    def run(self, num_operations: int, *, commits: bool = True) -> None:
        """Run ``num_operations`` random operations, and check the ledgers after each."""
        operations = [self.register] * 2 + [self.write] * 4 + [self.change] * 2 + [self.read] * 6 + [self.evict] * 3
        operations += [self.prefetch] * 3 + [self.discard, self.unregister, self.pin]
        operations += [self.commit] if commits else []
        for _ in range(num_operations):
            if not self.specs:
                self.register()
            operation = self.rng.choice(operations)
            if operation in (self.register, self.commit):
                operation()
            else:
                operation(self.rng.choice(sorted(self.specs)))  # type: ignore[call-arg]
            for name, tier in self.store.stats().tiers.items():
                assert 0 <= tier.used_bytes <= tier.high_water_bytes <= tier.capacity_bytes, (name, tier)

    def check_at_rest(self) -> None:
        """Read all blocks, and check that the tiers' ledgers count exactly the store's slots."""
        for key in sorted(self.contents):
            self.read(key)
        self.store.wait_idle()
        for name, stats in self.store.stats().tiers.items():
            tier = self.store.tier(name)
            specs = [spec for spec in self.store.blocks() if name in self.store.where(spec.key)]
            expected = sum(tier.slot_bytes(spec.nbytes) for spec in specs)
            assert stats.used_bytes == expected, f"tier '{name}': {stats}, slots of {expected} bytes"

    # -- operations --------------------------------------------------------------------------------------------

    def register(self) -> None:
        key = f"group.{self.rng.randrange(3)}/block.{self.rng.randrange(6)}"
        if key in self.specs:
            return
        dtype = self.rng.choice(_DTYPES)
        num_elements = self.rng.choice([0, 1, 7, 1000, self.unit_bytes // 8, self.unit_bytes // 4])
        shape = self.rng.choice([(num_elements,), (2, num_elements)])
        num_fast_homes = sum(spec.home == self.fast_name for spec in self.store.blocks())
        home = self.fast_name if num_fast_homes == 0 and self.rng.random() < 0.3 else self.slow_name
        self.store.register(key, shape, dtype, home=home)
        self.specs[key] = (shape, dtype)

    def write(self, key: str) -> None:
        shape, dtype = self.specs[key]
        data = random_bytes(torch.Size(shape).numel() * dtype.itemsize, self.rng.randrange(1 << 30))
        with self.store.acquire(key, self._pick_tier(key), "w", timeout_s=TIMEOUT_S) as lease:
            assert (tuple(lease.tensor.shape), lease.tensor.dtype) == (shape, dtype), (key, lease.tensor.shape)
            byte_view(lease.tensor).copy_(data)
        self.contents[key] = data

    def change(self, key: str) -> None:
        if key not in self.contents:
            return
        with self.store.acquire(key, self._pick_tier(key), "rw", timeout_s=TIMEOUT_S) as lease:
            view = byte_view(lease.tensor)
            assert torch.equal(view.cpu(), self.contents[key]), f"{key} differs from the last write"
            self.contents[key] = self.contents[key].flip(0)
            view.copy_(self.contents[key])

    def read(self, key: str) -> None:
        if key not in self.contents:
            error = catch_error(lambda: self.store.acquire(key, self.fast_name, timeout_s=TIMEOUT_S))
            assert isinstance(error, UninitializedBlockError), f"{key} has no contents, but reading it gave {error!r}"
            return
        with self.store.acquire(key, self._pick_tier(key), timeout_s=TIMEOUT_S) as lease:
            assert torch.equal(byte_view(lease.tensor).cpu(), self.contents[key]), f"{key} differs from the last write"

    def evict(self, key: str) -> None:
        if key != self._pinned:
            transfer = self.store.evict(key, self.fast_name)
            if self.rng.random() < 0.5:
                transfer.wait(TIMEOUT_S)

    def prefetch(self, key: str) -> None:
        self.store.prefetch(key, self.fast_name)

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
            self.store.unpin(self._pinned, self.fast_name)
            self._pinned = None
        try:
            self.store.pin(key, self.fast_name)
        except CapacityError:
            return
        self._pinned = key

    def commit(self) -> None:
        self.store.commit()  # The commit continues during later operations.

    def _pick_tier(self, key: str) -> str:
        """Return a tier for a lease: usually the fast tier, sometimes an addressable home."""
        home = next(spec.home for spec in self.store.blocks() if spec.key == key)
        return home if home in self._addressable and self.rng.random() < 0.3 else self.fast_name
