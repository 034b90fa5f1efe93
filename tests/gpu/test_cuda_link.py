"""Tests of page-locked slabs, device slots, and the order of copies and kernels. They need a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tiered import GpuTier, MiB, RamTier, TransferError
from tiered.ext import Slot
from tiered.links.cuda import CudaLink
from tiered.tiers.ram import HostSlab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_ELEMENTS = 4 * MiB


def slot_of(tier: GpuTier | RamTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes, name="block", home=False)
    assert slot is not None
    return slot


def busy(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for a while, so that a missing wait makes the test fail."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def test_slabs_are_page_locked_and_torch_knows() -> None:
    slab = HostSlab(8 * MiB, pin=True)
    assert slab.is_pinned
    assert slab.tensor.is_pinned()
    slab.close()


def test_ram_tier_pins_by_itself_and_counts_failures() -> None:
    tier = RamTier(8 * MiB)
    slot = slot_of(tier, 4 * MiB)
    assert tier.tensor(slot, (MiB,), torch.float32).is_pinned()
    assert tier.num_unpinned_slabs == 0
    tier.free(slot)
    tier.close()


def test_bytes_round_trip_between_ram_and_gpu() -> None:
    gpu, ram = GpuTier(64 * MiB), RamTier(64 * MiB)
    up, down = CudaLink(ram, gpu), CudaLink(gpu, ram)
    nbytes = 4 * NUM_ELEMENTS
    source, device, target = slot_of(ram, nbytes), slot_of(gpu, nbytes), slot_of(ram, nbytes)
    expected = torch.randn(NUM_ELEMENTS)
    ram.tensor(source, (NUM_ELEMENTS,), torch.float32).copy_(expected)
    transfer = up.submit(source, device, nbytes)
    transfer.wait_stream(gpu.current_stream())
    gpu.tensor(device, (NUM_ELEMENTS,), torch.float32).mul_(2)
    gpu.record_use([device])
    down.submit(device, target, nbytes).wait(60)
    assert torch.equal(ram.tensor(target, (NUM_ELEMENTS,), torch.float32), expected * 2)
    assert up.usage().num_bytes == down.usage().num_bytes == nbytes
    for part in (up, down, gpu, ram):
        part.close()


def test_copy_waits_for_recorded_slot_use() -> None:
    gpu, ram = GpuTier(64 * MiB), RamTier(64 * MiB)
    down, up = CudaLink(gpu, ram), CudaLink(ram, gpu)
    nbytes = 4 * NUM_ELEMENTS
    device, target = slot_of(gpu, nbytes), slot_of(ram, nbytes)
    tensor = gpu.tensor(device, (NUM_ELEMENTS,), torch.float32)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    busy(stream)
    with torch.cuda.stream(stream):
        tensor.fill_(5)
    gpu.record_use([device], stream)
    down.submit(device, target, nbytes).wait(60)
    assert float(ram.tensor(target, (NUM_ELEMENTS,), torch.float32).min()) == 5

    busy(stream)
    seen = torch.empty_like(tensor)
    with torch.cuda.stream(stream):
        seen.copy_(tensor)
    gpu.record_use([device], stream)
    gpu.free(device)
    again = slot_of(gpu, nbytes)
    ram.tensor(target, (NUM_ELEMENTS,), torch.float32).fill_(9)
    up.submit(target, again, nbytes).wait(60)
    torch.cuda.synchronize()
    assert float(seen.max()) == 5, "a freed slot was overwritten before its last reader had run"
    for part in (up, down, gpu, ram):
        part.close()


def test_the_tier_gives_memory_back_to_the_device() -> None:
    torch.cuda.empty_cache()
    gpu = GpuTier(512 * MiB)
    before = torch.cuda.memory_reserved()
    for nbytes in (256 * MiB, 300 * MiB, 400 * MiB):
        gpu.free(slot_of(gpu, nbytes))
        assert torch.cuda.memory_reserved() - before <= gpu.capacity_bytes + 2 * MiB
    gpu.close()
    assert torch.cuda.memory_reserved() <= before


def test_out_of_gpu_memory_is_reported() -> None:
    gpu = GpuTier(1 << 50)
    with pytest.raises(TransferError, match="fewer bytes"):
        gpu.allocate(1 << 49, name="block", home=False)
    assert gpu.usage().used_bytes == 0
