"""The GPU tier and its links pass the conformance suites of ``tiered.testing``."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch

from fakes.virtual_cuda import VirtualCuda
from tiered import GpuTier, Tier
from tiered.testing import LinkSuite, StoreSuite, TierSuite


@pytest.fixture(autouse=True)
def device(virtual: VirtualCuda | None) -> None:
    if virtual is not None:
        virtual.allows_addresses = True


class Gpu:
    is_faster = True

    def make_tier(self, capacity_bytes: int) -> Tier:
        return GpuTier(capacity_bytes)

    def exhaust_memory(self, tier: Tier) -> AbstractContextManager[object]:
        return mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("out of memory"))

    def fail_transfers(self, fast: Tier, slow: Tier) -> AbstractContextManager[object]:
        return mock.patch.object(slow, "tensor", side_effect=OSError(errno.EIO, "Input/output error"))


class TestGpuTier(Gpu, TierSuite): ...


class TestCudaLinks(Gpu, LinkSuite): ...


class TestStoreOfGpuAndRam(Gpu, StoreSuite): ...
