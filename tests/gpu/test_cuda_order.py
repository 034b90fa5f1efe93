"""The ordering tests of tests/tiered/test_cuda_order.py, on a busy CUDA device instead of a lazy fake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fakes.gpu_run import no_waits_allowed
from megatrain.engine.device.host_io import Staging, read_numbers
from tiered import GpuTier, MiB, RamTier, TieredStore
from tiered.ext import Slot
from tiered.links.cuda import CudaLink
from tiered.tiers.gpu import buffer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N = MiB
NBYTES = 4 * N
CYCLES = 400_000_000  # a few tenths of a second, much longer than a copy of 4 MiB


@pytest.fixture
def store() -> Iterator[TieredStore]:
    """Yield a store whose GPU tier has room for two blocks."""
    with TieredStore([GpuTier(2 * NBYTES), RamTier(32 * NBYTES)]) as made:
        yield made
    torch.cuda.synchronize()


def busy(stream: torch.cuda.Stream | None = None) -> None:
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def slot_of(tier: GpuTier | RamTier) -> Slot:
    slot = tier.allocate(NBYTES, name="block", home=False)
    assert slot is not None
    return slot


def in_ram(store: TieredStore, key: str, value: float) -> None:
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.fill_(value)


def test_write_back_waits_for_the_producing_kernel(store: TieredStore) -> None:
    store.register("block", (N,), torch.float32, home="ram")
    with store.acquire("block", "gpu", "w") as lease:
        busy()
        lease.tensor.fill_(3.0)
    with store.acquire("block", "ram") as lease:
        assert lease.tensor.eq(3.0).all()


def test_slot_refill_waits_for_the_last_reader(store: TieredStore) -> None:
    seen = []
    for number in range(6):
        store.register(f"block.{number}", (N,), torch.float32, home="ram")
        in_ram(store, f"block.{number}", number)
    for number in range(6):
        with store.acquire(f"block.{number}", "gpu") as lease:
            busy()
            seen.append(lease.tensor.max())
        store.evict(f"block.{number}", "gpu")
    assert [float(value) for value in seen] == [0, 1, 2, 3, 4, 5]


def test_write_on_another_stream_waits_for_the_last_slot_reader(store: TieredStore) -> None:
    for key in ("first", "second"):
        store.register(key, (N,), torch.float32, home="ram")
    in_ram(store, "first", 1.0)
    with store.acquire("first", "gpu") as lease:
        address = lease.tensor.data_ptr()
        busy()
        seen = lease.tensor.clone()
    store.evict("first", "gpu")
    side = new_stream()
    lease = store.acquire("second", "gpu", "w", stream=side)
    assert lease.tensor.data_ptr() == address
    with torch.cuda.stream(side):
        lease.tensor.fill_(2.0)
    lease.release(side)
    with store.acquire("second", "ram") as lease:
        assert lease.tensor.eq(2.0).all()
    assert seen.eq(1.0).all()


def test_read_does_not_wait_for_a_write_back(store: TieredStore) -> None:
    store.register("block", (N,), torch.float32, home="ram")
    with store.acquire("block", "gpu", "w") as lease:
        lease.tensor.fill_(4.0)
        busy()
    with store._changed:
        store._movement.write_back(store._blocks["block"], store._blocks["block"].copies["gpu"])
    with store.acquire("block", "gpu", timeout_s=30) as lease:
        seen = lease.tensor.clone()
    with store.acquire("block", "ram") as lease:
        assert lease.tensor.eq(4.0).all()
    assert seen.eq(4.0).all()


def test_fetch_into_a_free_slot_overtakes_a_blocked_fetch() -> None:
    gpu, ram = GpuTier(4 * NBYTES), RamTier(8 * NBYTES)
    link = CudaLink(ram, gpu)
    slots, sources = [slot_of(gpu), slot_of(gpu)], [slot_of(ram), slot_of(ram)]
    for slot, source in zip(slots, sources, strict=True):  # creates streams and threads
        link.submit(source, slot, NBYTES).wait(60)
    for _ in range(5):
        busy()
    gpu.record_use([slots[0]])
    waiting, passing = link.submit(sources[0], slots[0], NBYTES), link.submit(sources[1], slots[1], NBYTES)
    passing.wait(60)
    assert not waiting.done()
    waiting.wait(60)
    for part in (link, gpu, ram):
        part.close()


def test_memory_returns_after_its_last_kernel_without_waits() -> None:
    gpu = GpuTier(2 * NBYTES)
    slot = slot_of(gpu)
    tensor = gpu.tensor(slot, (N,), torch.float32).fill_(1.0)
    torch.cuda.synchronize()
    busy()
    assert buffer_of(slot_of(gpu)).is_idle()
    seen = tensor.sum()
    gpu.record_use([slot])
    gpu.free(slot)
    assert gpu.allocate(NBYTES + 4096, name="none", home=False) is None
    gpu.close()
    assert float(seen) == N


def test_staged_micro_batches_arrive_whole_on_a_busy_device() -> None:
    staging = Staging(torch.device("cuda"))
    placed = []
    for number in range(4):
        busy()
        placed.append(staging.upload({"ids": torch.full((300_000,), number), "mask": torch.ones(7, dtype=torch.bool)}))
    for number, tensors in enumerate(placed):
        assert tensors["ids"].eq(number).all() and tensors["mask"].all()
    assert staging._slab is not None and staging._slab.is_pinned


def test_read_at_step_end_passes_sync_debug_mode() -> None:
    values = [torch.tensor(2.0, device="cuda"), 3.0, torch.tensor(0.5, device="cuda", dtype=torch.float64)]
    read_numbers(values)
    with no_waits_allowed():
        assert read_numbers(values) == [2.0, 3.0, 0.5]
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(values[0])
