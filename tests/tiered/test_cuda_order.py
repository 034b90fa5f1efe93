"""The order of kernels and copies on a fake device that delays all work.

tests/gpu has similar tests for a real device.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from fakes.lazy_device import LazyDevice
from tiered import Access, CopyState, GpuTier, KiB, RamTier, Schedule, TieredStore, TransferError
from tiered.ext import Slot
from tiered.links.cuda import CudaLink
from tiered.tiers.gpu import DeviceBuffer, buffer_of

N = 256  # elements of a block
NBYTES = 4 * N


@pytest.fixture
def device() -> Iterator[LazyDevice]:
    with LazyDevice().in_place() as made:
        yield made


@pytest.fixture
def store(device: LazyDevice) -> Iterator[TieredStore]:
    """Yield a store whose GPU tier has space for two blocks."""
    with TieredStore([device.gpu_tier(2 * NBYTES), RamTier(64 * KiB, pin_memory=False)]) as made:
        yield made


def slot_of(tier: GpuTier | RamTier) -> Slot:
    slot = tier.allocate(NBYTES, name="block", home=False)
    assert slot is not None
    return slot


def in_ram(store: TieredStore, key: str, value: float) -> None:
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.fill_(value)


def read_in_ram(store: TieredStore, key: str) -> list[float]:
    with store.acquire(key, "ram") as lease:
        return sorted(set(lease.tensor.tolist()))


# -- single rules ------------------------------------------------------------------------------------------------------


def test_device_runs_work_as_late_as_possible(device: LazyDevice) -> None:
    done: list[int] = []
    device.launch(lambda: done.append(1))
    other = device.stream()
    other.wait_stream(device.default)
    other.queue(lambda: done.append(2))
    event = device.event()
    event.record(other)
    device.launch(lambda: done.append(3))
    assert done == [] and not event.query()
    event.synchronize()
    assert done == [1, 2] and event.query()
    device.synchronize()
    assert done == [1, 2, 3]


def test_write_back_waits_for_the_producing_kernel(device: LazyDevice, store: TieredStore) -> None:
    store.register("block", (N,), torch.float32, home="ram")
    with store.acquire("block", "gpu", "w") as lease:
        tensor = lease.tensor
        device.launch(lambda: tensor.fill_(3.0))
    assert device.num_run == 0, "the lease was returned while the kernel was queued, without a wait"
    assert read_in_ram(store, "block") == [3.0]


def test_slot_refill_waits_for_the_last_reader(device: LazyDevice, store: TieredStore) -> None:
    seen: list[float] = []
    for number in range(6):
        store.register(f"block.{number}", (N,), torch.float32, home="ram")
        in_ram(store, f"block.{number}", number)
    for number in range(6):
        with store.acquire(f"block.{number}", "gpu") as lease:
            tensor = lease.tensor
            device.launch(lambda tensor=tensor: seen.append(float(tensor.max())))  # type: ignore[misc]
        store.evict(f"block.{number}", "gpu")
    device.synchronize()
    assert seen == [0, 1, 2, 3, 4, 5]


def test_write_on_another_stream_waits_for_the_last_slot_reader(device: LazyDevice, store: TieredStore) -> None:
    """The ``w`` lease is on another stream and fetches nothing, so only the lease itself can make the write wait."""
    seen: list[float] = []
    for key in ("first", "second"):
        store.register(key, (N,), torch.float32, home="ram")
    in_ram(store, "first", 1.0)
    with store.acquire("first", "gpu") as lease:
        tensor = lease.tensor
        device.launch(lambda: seen.append(float(tensor.max())))
    store.evict("first", "gpu")
    side = device.stream()
    lease = store.acquire("second", "gpu", "w", stream=side)
    second = lease.tensor
    assert second.data_ptr() == tensor.data_ptr(), "the pool gives the newest buffer of a size"
    side.queue(lambda: second.fill_(2.0))
    lease.release(side)
    assert read_in_ram(store, "second") == [2.0]
    device.synchronize()
    assert seen == [1.0]


def test_write_back_waits_for_the_release_stream(device: LazyDevice, store: TieredStore) -> None:
    store.register("block", (N,), torch.float32, home="ram")
    side = device.stream()
    lease = store.acquire("block", "gpu", "w", stream=side)
    tensor = lease.tensor
    side.queue(lambda: tensor.fill_(7.0))
    lease.release(side)
    assert read_in_ram(store, "block") == [7.0]


def test_host_slot_is_not_reused_during_its_copy(device: LazyDevice) -> None:
    """If a transfer ended as soon as its copy was queued, the next block could overwrite the host slot."""
    gpu, ram = device.gpu_tier(4 * NBYTES), RamTier(64 * KiB, pin_memory=False)
    link = CudaLink(ram, gpu)
    host, target = slot_of(ram), slot_of(gpu)
    ram.tensor(host, (N,), torch.float32).fill_(1.0)
    transfer = link.submit(host, target, NBYTES)
    transfer.wait(30)
    ram.tensor(host, (N,), torch.float32).fill_(9.0)
    assert gpu.tensor(target, (N,), torch.float32).eq(1.0).all()
    link.close()


def test_read_does_not_wait_for_a_write_back(device: LazyDevice, store: TieredStore) -> None:
    """The lease and the write-back both only read the copy, so the lease is granted before the write-back ends."""
    store.register("block", (N,), torch.float32, home="ram")
    with store.acquire("block", "gpu", "w") as lease:
        tensor = lease.tensor
        device.launch(lambda: tensor.fill_(4.0))
    gate = device.gate()
    with store.acquire("block", "gpu") as lease:  # this use follows the gate, so the write-back waits for the gate
        pass
    block = store._blocks["block"]
    with store._changed:
        store._movement.write_back(block, block.copies["gpu"])
    copy = block.copies["gpu"]
    while copy.transfer is None or copy.transfer.event is None:
        time.sleep(0.001)
    assert copy.state is CopyState.DRAINING
    opener = threading.Timer(5, gate.open)  # if acquire waits for the write-back, the test fails instead of hanging
    opener.start()
    with store.acquire("block", "gpu", timeout_s=30) as lease:
        again = lease.tensor
        device.launch(lambda: again.mul_(1.0))
    assert copy.state is CopyState.DRAINING and not gate.is_open
    opener.cancel()
    gate.open()
    assert read_in_ram(store, "block") == [4.0]


# -- links and events --------------------------------------------------------------------------------------------------


def test_fetch_into_a_free_slot_overtakes_a_blocked_fetch(device: LazyDevice) -> None:
    gpu, ram = device.gpu_tier(4 * NBYTES), RamTier(64 * KiB, pin_memory=False)
    link = CudaLink(ram, gpu)
    busy, free, sources = slot_of(gpu), slot_of(gpu), [slot_of(ram), slot_of(ram)]
    gate = device.gate()
    gpu.record_use([busy])
    waiting, passing = link.submit(sources[0], busy, NBYTES), link.submit(sources[1], free, NBYTES)
    passing.wait(30)
    assert not waiting.done()
    behind = link.submit(sources[0], busy, NBYTES)
    with pytest.raises(TimeoutError):
        behind.wait(0.05)
    gate.open()
    waiting.wait(30)
    behind.wait(30)
    link.close()


def test_error_after_queuing_a_copy_waits_for_the_copy(device: LazyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ram = device.gpu_tier(4 * NBYTES), RamTier(64 * KiB, pin_memory=False)
    link = CudaLink(ram, gpu)
    host, target = slot_of(ram), slot_of(gpu)
    ram.tensor(host, (N,), torch.float32).fill_(5.0)

    def refuse(**options: object) -> None:
        raise RuntimeError("out of events")

    monkeypatch.setattr(torch.cuda, "Event", refuse)
    with pytest.raises(TransferError, match="out of events"):
        link.submit(host, target, NBYTES).wait(30)
    assert buffer_of(target).tensor.view(torch.float32)[:N].eq(5.0).all(), "nothing moves once the transfer has ended"
    link.close()


def test_unlocked_host_memory_is_reported(device: LazyDevice) -> None:
    gpu, ram = device.gpu_tier(4 * NBYTES), RamTier(64 * KiB, pin_memory=True)
    up, down = CudaLink(ram, gpu), CudaLink(gpu, ram)
    assert up.path == down.path == "cuda"
    slot = slot_of(ram)  # without a GPU, this memory cannot be page-locked
    if ram.num_unpinned_slabs:
        assert up.path == down.path == up.usage().path == "cuda-pageable"
    up.submit(slot, slot_of(gpu), NBYTES).wait(30)
    up.close()
    down.close()


def test_leases_that_end_together_share_an_event(device: LazyDevice) -> None:
    gpu, keys = device.gpu_tier(4 * NBYTES), "abc"
    with TieredStore([gpu]) as store:
        for key in keys:
            store.register(key, (NBYTES // 4,), torch.float32, home="gpu")
        for mode in ("w", "rw", "r"):
            with store.acquire_many([(key, "gpu", mode) for key in keys]):
                device.launch(lambda: None)
        buffers = [buffer_of(store._blocks[key].home.slot) for key in keys]
        assert len({id(event) for buffer in buffers for event in buffer.pending_events.values()}) == 1
        other = device.stream()
        for stream, num_waits in ((device.default, 0), (other, 1)):
            with mock.patch.object(stream, "wait_event") as wait:
                store.acquire("a", "gpu", stream=stream).release()
            assert wait.call_count == num_waits


def test_group_leases_query_the_stream_once(device: LazyDevice, store: TieredStore) -> None:
    for key, value in (("a", 1.0), ("b", 2.0)):
        store.register(key, (N,), torch.float32, home="gpu")
        in_ram(store, key, value)
        store.evict(key, "ram").wait(30)
    with (
        mock.patch.object(GpuTier, "current_stream", return_value=device.default) as asked,
        mock.patch.object(device.default, "wait_event") as wait,
        store.acquire_many([("a", "gpu", "r"), ("b", "gpu", "r")]) as group,
    ):
        assert asked.call_count == 1 and wait.call_count == 0
        assert [sorted(set(lease.tensor.tolist())) for lease in group] == [[1.0], [2.0]]


def test_a_lease_orders_the_current_stream_and_the_given_one(device: LazyDevice, store: TieredStore) -> None:
    store.register("block", (N,), torch.float32, home="gpu")
    side, given = device.stream(), device.stream()
    with device.use(side):
        lease = store.acquire("block", "gpu", "w")
        tensor = lease.tensor
        side.queue(lambda: tensor.fill_(5.0))
        lease.release()
    with store.acquire("block", "gpu", stream=given):
        assert device.default.is_behind(side, 1) and given.is_behind(side, 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_pool_returns_memory_to_the_device_after_its_last_kernel(device: LazyDevice) -> None:
    gpu = device.gpu_tier(2 * NBYTES)
    slot, ran = slot_of(gpu), []
    device.launch(lambda: ran.append(1))
    gpu.record_use([slot])
    gpu.free(slot)
    assert ran == [], "a slot in the pool keeps its pending work for the next user"
    larger = gpu.allocate(2 * NBYTES, name="larger", home=False)
    assert larger is not None and ran == [1] and gpu.num_drops == device.num_trims == 1
    gpu.free(larger)
    gpu.close()


def test_new_buffer_is_idle_despite_queued_kernels(device: LazyDevice) -> None:
    gpu = device.gpu_tier(2 * NBYTES)
    device.launch(lambda: None)
    assert buffer_of(slot_of(gpu)).is_idle()
    gpu.close()


def test_buffer_drops_completed_events(device: LazyDevice) -> None:
    buffer, first, second = DeviceBuffer(torch.empty(0)), device.event(), device.event()
    first.record()
    buffer.add_event(first, device.default)
    assert buffer.is_idle(), "nothing was queued before it"
    device.launch(lambda: None)
    second.record()
    buffer.add_event(second, device.default)
    assert not buffer.is_idle()
    buffer.wait()
    assert buffer.is_idle() and buffer.pending_events == {}


# -- all together ------------------------------------------------------------------------------------------------------


class Trainer:
    """Source of random work for a store.

    Its delayed kernels compare the values that they see with the expected ones.
    """

    def __init__(self, store: TieredStore, device: LazyDevice, seed: int) -> None:
        self.store, self.device, self.random = store, device, random.Random(seed)
        self.streams = [device.default, device.stream()]
        self.keys = [f"block.{number}" for number in range(5)]
        self.expected = dict.fromkeys(self.keys, 0.0)
        self.wrong: list[str] = []
        for number, key in enumerate(self.keys):
            store.register(key, (N,), torch.float32, home="gpu" if number == 4 else "ram")
            in_ram(store, key, 0.0)

    def kernel(self, key: str, tensor: torch.Tensor, change: Callable[[float], float] | None) -> Callable[[], None]:
        """Return a kernel that compares a block's value with that expected in program order, and then changes it."""
        before = self.expected[key]
        after = before if change is None else change(before)
        self.expected[key] = after

        def run() -> None:
            found = sorted(set(tensor.tolist()))
            if found != [before]:
                self.wrong.append(f"{key}: {found}, expected {before}")
            tensor.fill_(after) if change is not None else None

        return run

    def act(self) -> None:
        key, choice = self.random.choice(self.keys), self.random.random()
        stream = self.random.choice(self.streams)
        named = None if stream is self.device.default else stream  # None means the current stream
        if choice < 0.35:
            lease = self.store.acquire(key, "gpu", "r", stream=named)
            stream.queue(self.kernel(key, lease.tensor, None))
            lease.release(named)
        elif choice < 0.7:
            lease = self.store.acquire(key, "gpu", "rw", stream=named)
            stream.queue(self.kernel(key, lease.tensor, lambda value: value + 1.0))
            lease.release(named)
        elif choice < 0.8:
            with self.store.acquire(key, "ram", "r") as lease:
                self.kernel(key, lease.tensor, None)()
        elif choice < 0.85:
            with self.store.acquire(key, "ram", "rw") as lease:
                self.kernel(key, lease.tensor, lambda value: value * 2.0)()
        else:
            self.store.evict(key, "gpu")


@pytest.mark.parametrize("seed", range(12))
def test_every_kernel_sees_the_program_order_values(seed: int, device: LazyDevice) -> None:
    tiers = [device.gpu_tier(3 * NBYTES), RamTier(64 * KiB, pin_memory=False)]
    with TieredStore(tiers) as store:
        trainer = Trainer(store, device, seed)
        for _ in range(120):
            trainer.act()
        device.synchronize()
        assert trainer.wrong == []
        for key, value in trainer.expected.items():
            assert read_in_ram(store, key) == [value]


def test_prefetching_does_not_change_results(device: LazyDevice) -> None:
    """The prefetcher starts copies on the links' threads, whenever space becomes free."""
    order = [0, 1, 2, 3, 3, 2, 1, 0] * 4
    with TieredStore([device.gpu_tier(3 * NBYTES), RamTier(64 * KiB, pin_memory=False)]) as store:
        trainer = Trainer(store, device, 0)
        store.evict("block.4", "ram")
        accesses = [Access(tick, f"block.{number}", "gpu", "rw") for tick, number in enumerate(order)]
        store.set_schedule(Schedule(accesses), lookahead_bytes=None)
        for tick, number in enumerate(order):
            store.advance(tick)
            key = f"block.{number}"
            with store.acquire(key, "gpu", "rw") as lease:
                device.launch(trainer.kernel(key, lease.tensor, lambda value: value + 1.0))
            store.evict(key, "gpu")
        store.wait_idle()
        assert trainer.wrong == []
        assert [read_in_ram(store, key) for key in trainer.keys[:4]] == [[8.0]] * 4
        assert 0 < store.stats().prefetch_on_time + store.stats().prefetch_late <= len(order)
