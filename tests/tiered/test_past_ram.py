"""The link between files and GPU memory that bypasses RAM, with a stand-in for GPU memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from fakes.lazy_device import LazyDevice
from tiered import Access, GpuTier, KiB, MiB, NvmeTier, RamTier, Schedule, TieredError, TieredStore, TransferError
from tiered.hops import Routes
from tiered.links.files import FileEngine, FileReadLink, FileWriteLink, PosixMover
from tiered.links.probe import probe_kvikio
from tiered.links.route import default_links, direct_links
from tiered.tiers.gpu import buffer_of

N = 5000  # elements of a block: its size is not a multiple of 4096 bytes
EIO = OSError(errno.EIO, "Input/output error")


def gpu(capacity_bytes: int = MiB) -> GpuTier:
    return GpuTier(capacity_bytes, device="cpu", alignment_bytes=4 * KiB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """Yield a store with direct links between the drive and GPU memory."""
    nvme = NvmeTier([tmp_path / "a", tmp_path / "b"], MiB, chunk_bytes=8 * KiB, past_ram=True)
    with TieredStore([gpu(), RamTier(64 * KiB, pin_memory=False), nvme]) as made:
        made.register("block", (N,), torch.float32, home="nvme")
        yield made


def put(store: TieredStore, value: float, tier: str = "gpu") -> None:
    with store.acquire("block", tier, "w") as lease:
        lease.tensor.fill_(value)
    store.evict("block", tier).wait(30)


def value_in(store: TieredStore, tier: str) -> float:
    with store.acquire("block", tier) as lease:
        (value,) = lease.tensor.unique().tolist()
    store.evict("block", tier)
    return float(value)


def moved(store: TieredStore) -> dict[str, int]:
    store.wait_idle()
    return {link: stats.num_bytes // (4 * N) for link, stats in store.stats().links.items() if stats.num_bytes}


def test_routes_select_the_links_of_a_copy() -> None:
    line = (("ram", "gpu"), ("gpu", "ram"), ("nvme", "ram"), ("ram", "nvme"))
    assert Routes(line).between("nvme", "gpu") == (("nvme", "ram"), ("ram", "gpu"))
    assert Routes(line).between("gpu", "nvme") == (("gpu", "ram"), ("ram", "nvme"))
    direct = Routes((*line, ("nvme", "gpu"), ("gpu", "nvme")))
    assert direct.between("nvme", "gpu") == (("nvme", "gpu"),)
    assert direct.between("gpu", "nvme") == (("gpu", "nvme"),)
    assert direct.between("ram", "gpu") == (("ram", "gpu"),)
    assert direct.between("ram", "ram") == ()


def test_blocks_move_directly_between_gpu_and_nvme(store: TieredStore) -> None:
    put(store, 3.0)
    assert value_in(store, "gpu") == 3.0
    assert moved(store) == {"gpu->nvme": 1, "nvme->gpu": 1}
    assert store.stats().tiers["ram"].high_water_bytes == 0
    path = store.stats().links["nvme->gpu"].path
    assert path == store.stats().links["nvme->ram"].path and path.startswith("posix-")
    assert store.tiers_between("nvme", "gpu") == store.tiers_between("gpu", "nvme") == ()


def test_direct_block_uses_ram_if_it_is_used_there(store: TieredStore) -> None:
    put(store, 1.0, "ram")
    assert value_in(store, "gpu") == 1.0
    put(store, 2.0)
    assert value_in(store, "ram") == 2.0
    assert moved(store) == {"ram->nvme": 1, "nvme->gpu": 1, "gpu->nvme": 1, "nvme->ram": 1}


def test_direct_prefetch_needs_no_space_in_ram(store: TieredStore) -> None:
    """The prefetcher fetches directly to the GPU, even if homes fill all of RAM."""
    put(store, 4.0)
    store.register("full", (64 * KiB,), torch.uint8, home="ram")
    store.set_schedule(Schedule([Access(1, "block", "gpu", "r")]))
    store.advance(0)
    store.wait_idle()
    assert store.stats().links["nvme->gpu"].num_bytes == 4 * N
    assert value_in(store, "gpu") == 4.0
    assert store.stats().prefetch_on_time == 1


def test_failed_read_raises_and_can_be_retried(store: TieredStore) -> None:
    put(store, 5.0)
    with mock.patch.object(os, "preadv", side_effect=EIO), pytest.raises(TransferError, match="read failed"):
        store.acquire("block", "gpu")
    assert value_in(store, "gpu") == 5.0


def test_a_failed_write_keeps_the_bytes_in_gpu_memory(store: TieredStore) -> None:
    put(store, 6.0)
    with mock.patch.object(os, "pwritev", side_effect=EIO), pytest.raises(TransferError, match="write failed"):
        put(store, 7.0)
    store.wait_idle()
    assert value_in(store, "gpu") == 7.0


def test_direct_writes_get_checksums_at_the_commit(store: TieredStore) -> None:
    put(store, 8.0)
    assert store.verify() == 0, "no checksum was taken on the way"
    store.commit().wait(30)
    assert store.verify() == 4 * N
    put(store, 9.0)
    assert store.verify() == 0, "and the checksums of the old contents are gone"
    store.commit().wait(30)
    assert store.verify() == 4 * N
    put(store, 10.0)
    for generation, value in ((1, 8.0), (2, 9.0)):
        store.load(generation)
        assert value_in(store, "gpu") == value


def test_invalid_direct_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="past_ram requires verify"):
        NvmeTier([tmp_path], MiB, past_ram=True, verify="always")
    with pytest.raises(ValueError, match="a power of two"):
        GpuTier(MiB, alignment_bytes=100)
    nvme = NvmeTier([tmp_path], MiB, past_ram=True)
    ram = RamTier(MiB, pin_memory=False)
    with pytest.raises(ValueError, match="alignment_bytes=4096"):
        default_links([GpuTier(MiB, device="cpu"), ram, nvme])
    assert len(default_links([ram, nvme])) == 2, "there is no GPU tier"
    nvme.close()


def test_a_device_needs_gpudirect_storage(tmp_path: Path) -> None:
    reason = probe_kvikio(tmp_path).reason
    if not reason:
        pytest.skip("GPUDirect Storage works here")
    nvme = NvmeTier([tmp_path], MiB, past_ram=True)
    with pytest.raises(TieredError, match="GPUDirect Storage does not work") as caught:
        default_links([GpuTier(MiB, alignment_bytes=4 * KiB), RamTier(MiB, pin_memory=False), nvme])
    assert reason in str(caught.value)
    nvme.close()


# -- the order of kernels and files ------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[LazyDevice]:
    with LazyDevice().in_place() as made:
        yield made


@pytest.fixture
def device_store(device: LazyDevice, tmp_path: Path) -> Iterator[TieredStore]:
    """Yield a store with space for one block on a device that delays all work until the host waits."""
    nvme, ram = NvmeTier([tmp_path], MiB), RamTier(64 * KiB, pin_memory=False)
    tier = device.gpu_tier(20 * KiB, alignment_bytes=4 * KiB)
    engine = FileEngine(nvme, PosixMover(nvme))
    host_links = [FileReadLink(nvme, ram, engine), FileWriteLink(ram, nvme, engine)]
    links = [*default_links([tier, ram]), *host_links, *direct_links(tier, nvme, engine)]
    with TieredStore([tier, ram, nvme], links=links) as made:
        for key in ("block", "other"):
            made.register(key, (N,), torch.float32, home="nvme")
        yield made


def test_file_receives_the_preceding_kernel_output(device: LazyDevice, device_store: TieredStore) -> None:
    with device_store.acquire("block", "gpu", "w") as lease:
        tensor = lease.tensor
        tensor.zero_()
        device.launch(lambda: tensor.fill_(3.0))
    assert device.num_run == 0, "no wait before the bytes move"
    device_store.evict("block", "gpu").wait(30)
    assert device.num_run == 1
    assert value_in(device_store, "ram") == 3.0


def test_direct_read_waits_for_the_last_slot_reader(device: LazyDevice, device_store: TieredStore) -> None:
    for key, value in (("block", 1.0), ("other", 2.0)):
        with device_store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
        device_store.evict(key, "ram").wait(30)
    seen: list[float] = []
    for key in ("block", "other"):
        with device_store.acquire(key, "gpu") as lease:
            tensor = lease.tensor
            device.launch(lambda tensor=tensor: seen.append(float(tensor.max())))  # type: ignore[misc]
        device_store.evict(key, "gpu")
    device.synchronize()
    assert seen == [1.0, 2.0]


def test_long_kernel_does_not_delay_unrelated_reads(device: LazyDevice, tmp_path: Path) -> None:
    nvme = NvmeTier([tmp_path], MiB)
    tier = device.gpu_tier(MiB, alignment_bytes=4 * KiB)
    read, write = direct_links(tier, nvme, FileEngine(nvme, PosixMover(nvme)))
    homes = [nvme.allocate(4 * N, name=name, home=True) for name in ("a", "b")]
    slots = [tier.allocate(4 * N, name=name, home=False) for name in ("a", "b")]
    for slot, home in zip(slots, homes, strict=True):
        assert slot is not None and home is not None
        write.submit(slot, home, 4 * N).wait(30)
    busy, free = slots
    assert busy is not None and free is not None and homes[0] is not None and homes[1] is not None
    gate = device.gate()
    tier.record_use([busy])
    waits = read.submit(homes[0], busy, 4 * N)
    read.submit(homes[1], free, 4 * N).wait(30)
    assert not waits.done()
    gate.open()
    waits.wait(30)
    for link in (read, write):
        link.close()
    nvme.close()


def _illegal_access_mock() -> Callable[[], None]:
    return mock.Mock(side_effect=RuntimeError("an illegal memory access"))


def test_a_device_that_fails_ends_the_transfer(tmp_path: Path) -> None:
    nvme, tier = NvmeTier([tmp_path], MiB), gpu()
    read, write = direct_links(tier, nvme, FileEngine(nvme, PosixMover(nvme)))
    home, slot = nvme.allocate(100, name="a", home=True), tier.allocate(100, name="a", home=False)
    assert home is not None and slot is not None
    buffer_of(slot).add_event(mock.Mock(query=lambda: False, synchronize=_illegal_access_mock()), "compute")
    for transfer in (write.submit(slot, home, 100), read.submit(home, slot, 100)):
        with pytest.raises(TransferError, match="the device failed: an illegal memory access"):
            transfer.wait(30)
    for link in (read, write):
        link.close()
    nvme.close()
