"""``UnifiedTier``, host memory in which a GPU computes, passes the conformance suites on a fake device.

The device delays all work.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from fakes.virtual_cuda import Allocation, VirtualCuda
from tiered import KiB, NvmeTier, Tier, TieredStore, TransferError
from tiered.ext import Link, ReadPart, SourceTier, UnifiedTier, default_links
from tiered.links import unified
from tiered.testing import LinkSuite, StoreSuite, TierSuite
from tiered.tiers import ram as slab_module

EIO = OSError(errno.EIO, "Input/output error")
SIZE = 5000


@pytest.fixture(autouse=True)
def device() -> Iterator[VirtualCuda]:
    device = VirtualCuda(is_integrated=True)
    device.allows_addresses = True
    with device.in_place(), mock.patch.object(unified, "device_view", device.view_of_host):
        yield device


class TestUnifiedTier(TierSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return UnifiedTier(capacity_bytes)

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        return mock.patch.object(slab_module, "_advise", return_value=errno.ENOMEM)


class Files:
    takes_copies = False

    @pytest.fixture(autouse=True)
    def _paths(self, tmp_path: Path) -> None:
        self.paths = [tmp_path / "a", tmp_path / "b"]

    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier(self.paths, capacity_bytes, chunk_bytes=128 * KiB)

    def make_neighbour(self, capacity_bytes: int) -> Tier:
        return UnifiedTier(capacity_bytes)

    def make_links(self, fast: Tier, slow: Tier) -> Sequence[Link]:
        return default_links([fast, slow])

    @contextmanager
    def fail_transfers(self, fast: Tier, slow: Tier) -> Iterator[None]:
        with mock.patch.object(os, "pwritev", side_effect=EIO), mock.patch.object(os, "preadv", side_effect=EIO):
            yield


class TestLinksOfFiles(Files, LinkSuite): ...


class TestStoreOverFiles(Files, StoreSuite): ...


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    with mock.patch.object(slab_module, "_register", return_value=False):
        tier = UnifiedTier(1 << 20)
        with pytest.raises(TransferError, match="CUDA cannot pin"):
            tier.allocate(SIZE, name="block", home=True)
        assert tier.usage().used_bytes == 0


@pytest.mark.parametrize("uses_host_page_tables", [False, True])
def test_memory_is_not_registered_with_shared_page_tables(uses_host_page_tables: bool, device: VirtualCuda) -> None:
    pinned = []

    def view(memory: torch.Tensor, of: torch.device) -> torch.Tensor:
        pinned.append(device.is_page_locked(memory))
        return device.tensor(memory, Allocation(device, 0))

    with (
        mock.patch.object(unified, "uses_host_page_tables", return_value=uses_host_page_tables),
        mock.patch.object(unified, "device_view", view),
        TieredStore([UnifiedTier(1 << 20)]) as store,
    ):
        store.put("a", torch.full((SIZE,), 3.0))
        with store.acquire("a", "ram", "rw") as lease:
            lease.tensor.mul_(2)
        assert torch.equal(store["a"], torch.full((SIZE,), 6.0))
    assert pinned == [not uses_host_page_tables]


def test_machine_without_a_driver_has_no_shared_page_tables() -> None:
    with mock.patch.object(unified.ctypes, "CDLL", side_effect=OSError):
        assert not unified.uses_host_page_tables.__wrapped__(0)


def test_file_write_waits_for_the_producing_kernel(tmp_path: Path, device: VirtualCuda) -> None:
    """The kernel runs only when the host waits for it, so a write without a wait would store stale bytes."""
    with TieredStore([UnifiedTier(1 << 20), NvmeTier([tmp_path], 1 << 20, verify="always")]) as store:
        for key in "ab":
            store.register(key, (SIZE,), torch.uint8, home="nvme")
        for key, number in (("a", 3), ("b", 4)):  # both use the same slot, and must not be mixed up
            with store.acquire(key, "ram", "w") as lease:
                assert lease.tensor.is_cuda
                lease.tensor.fill_(number)
            store.evict(key, "ram").wait()
        for key, number in (("a", 3), ("b", 4)):
            with store.acquire(key, "ram", "r") as lease:
                doubled = lease.tensor * 2  # still queued when the next block enters this memory
            store.evict(key, "ram")
            with store.acquire("b" if key == "a" else "a", "ram", "r"):
                pass
            assert doubled.cpu().tolist() == [2 * number] * SIZE


class _Source:
    block_bytes = {"a": SIZE}  # noqa: RUF012

    def parts(self, key: str) -> Sequence[ReadPart]:
        def read(into: torch.Tensor) -> None:
            assert not into.is_cuda
            into.fill_(5)

        return [read]


def test_blocks_of_a_source_are_read_into_it() -> None:
    tier, source = UnifiedTier(1 << 20), SourceTier(_Source())
    with TieredStore([tier, source]) as store:
        store.register("a", (SIZE,), torch.uint8, home="source", durable=False)
        with store.acquire("a", "ram", "r") as lease:
            assert lease.tensor.is_cuda and lease.tensor.cpu().tolist() == [5] * SIZE
        assert store.stats().links["source->ram"].num_bytes == SIZE
