"""Direct transfers between files and device memory. They need a CUDA device, kvikio and GPUDirect Storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiered import GpuTier, KiB, MiB, NvmeTier, RamTier, TieredStore
from tiered.links.probe import probe_kvikio

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N = 5_000_001  # elements of a block with two parts; its size is not a multiple of 4096 bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder on a drive with GPUDirect Storage: MEGATRAIN_GDS_DIR if it is set, else pytest's folder."""
    path = Path(os.environ.get("MEGATRAIN_GDS_DIR", tmp_path))
    if reason := probe_kvikio(path).reason:
        pytest.skip(f"GPUDirect Storage does not work in {path}: {reason}")
    return path / "blocks"


@pytest.fixture
def store(folder: Path) -> Iterator[TieredStore]:
    tiers = [
        GpuTier(64 * MiB, alignment_bytes=4 * KiB),
        RamTier(64 * MiB),
        NvmeTier([folder], 256 * MiB, past_ram=True),
    ]
    with TieredStore(tiers) as made:
        made.register("block", (N,), torch.float32, home="nvme")
        yield made


def test_device_memory_and_files_exchange_bytes_without_ram(store: TieredStore) -> None:
    for number in range(4):
        with store.acquire("block", "gpu", "w") as lease:
            torch.arange(N, out=lease.tensor)
            lease.tensor.add_(number)  # still queued when the lease ends: the write waits for it
        store.evict("block", "gpu").wait(60)
        with store.acquire("block", "gpu") as lease:
            assert torch.equal(lease.tensor, torch.arange(N, dtype=torch.float32, device="cuda") + number)
        store.evict("block", "gpu")
    assert store.stats().tiers["ram"].high_water_bytes == 0
    assert store.stats().links["nvme->gpu"].path == "kvikio-gds"
    assert store.stats().links["gpu->nvme"].num_bytes == 4 * 4 * N


def test_ram_reads_data_written_by_the_device(store: TieredStore) -> None:
    with store.acquire("block", "gpu", "w") as lease:
        lease.tensor.fill_(7.0)
    store.evict("block", "gpu").wait(60)
    with store.acquire("block", "ram") as lease:
        assert bool((lease.tensor == 7.0).all())
