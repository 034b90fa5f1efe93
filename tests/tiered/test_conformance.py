"""The package's own tiers, links and policies pass the conformance suites that it offers to other packages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from tiered import LRU, Belady, GpuTier, KiB, NvmeTier, RamTier, Tier
from tiered.ext import EvictionPolicy, Link
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PosixMover
from tiered.links.route import direct_links
from tiered.testing import LinkSuite, PolicySuite, StoreSuite, TierSuite
from tiered.testing.manual import MemoryTier
from tiered.tiers import ram as slab_module

EIO = OSError(errno.EIO, "Input/output error")


class Ram:
    def make_tier(self, capacity_bytes: int) -> Tier:
        return RamTier(capacity_bytes, name="slow ram", pin_memory=False)


class TestRamTier(Ram, TierSuite):
    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        return mock.patch.object(slab_module, "_advise", return_value=errno.ENOMEM)


class TestHostLinks(Ram, LinkSuite): ...


class TestStoreOfRamAlone(Ram, StoreSuite): ...


class GpuOnHost:
    is_faster = True

    def make_tier(self, capacity_bytes: int) -> Tier:
        return GpuTier(capacity_bytes, device="cpu")

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        return mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("out of memory"))


class TestGpuTierOnHostMemory(GpuOnHost, TierSuite): ...


class TestLinksOfGpuTierOnHostMemory(GpuOnHost, LinkSuite): ...


class TestStoreOfGpuTierOnHostMemory(GpuOnHost, StoreSuite): ...


class Nvme:
    """NVMe tier with files of up to 128 KiB on two paths."""

    takes_copies = False

    @pytest.fixture(autouse=True)
    def _paths(self, tmp_path: Path) -> None:
        self.paths = [tmp_path / "a", tmp_path / "b"]

    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier(self.paths, capacity_bytes, chunk_bytes=128 * KiB)

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        full = OSError(errno.ENOSPC, "No space left on device")
        return mock.patch.object(os, "posix_fallocate", side_effect=full)

    @contextmanager
    def fail_transfers(self, fast: Tier, slow: Tier) -> Iterator[None]:
        with mock.patch.object(os, "pwritev", side_effect=EIO), mock.patch.object(os, "preadv", side_effect=EIO):
            yield


class TestNvmeTier(Nvme, TierSuite): ...


class TestNvmeTierOnOnePath(Nvme, TierSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier(self.paths[:1], capacity_bytes)


class TestFileLinks(Nvme, LinkSuite):
    def make_links(self, fast: Tier, slow: Tier) -> list[Link]:
        assert isinstance(fast, RamTier) and isinstance(slow, NvmeTier)
        engine = FileEngine(slow, PosixMover(slow), part_bytes=16 * KiB)
        return [FileReadLink(slow, fast, engine), FileWriteLink(fast, slow, engine)]


class TestBufferedFileLinks(Nvme, LinkSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return NvmeTier(self.paths[:1], capacity_bytes, direct_io=False)


class TestStoreOfFiles(Nvme, StoreSuite): ...


class PastRam(Nvme):
    """NVMe tier with direct links to a stand-in for GPU memory."""

    def make_neighbour(self, capacity_bytes: int) -> Tier:
        return GpuTier(capacity_bytes, device="cpu", alignment_bytes=4 * KiB)

    def make_links(self, fast: Tier, slow: Tier) -> list[Link]:
        assert isinstance(fast, GpuTier) and isinstance(slow, NvmeTier)
        return direct_links(fast, slow, FileEngine(slow, PosixMover(slow), part_bytes=16 * KiB))


class TestLinksPastRam(PastRam, LinkSuite): ...


class TestStorePastRam(PastRam, StoreSuite): ...


class TestMemoryTier(TierSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return MemoryTier("memory", capacity_bytes)


class TestMemoryTierReachedByLinksOnly(TierSuite):
    def make_tier(self, capacity_bytes: int) -> Tier:
        return MemoryTier("memory", capacity_bytes, addressable=False)


class TestLRU(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LRU()


class TestBelady(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Belady()
