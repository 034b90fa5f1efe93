"""A read-only tier has contents from the start and refuses writes. If one part cannot be read, the fetch fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import zarr

from tiered import NvmeTier, RamTier, TieredStore, TransferError, ZarrStore
from tiered.block import CopyState
from tiered.errors import LeaseError
from tiered.ext import ReadPart, Routes, SourceTier
from tiered.tiers.gpu import GpuTier
from tiered.units import MiB

SIZE = 5000


class Numbers:
    """Source of blocks whose bytes all have the same value. Each block is read in two halves."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values
        self.block_bytes = dict.fromkeys(values, SIZE)
        self.num_reads = 0
        self.fails = False

    def parts(self, key: str) -> Sequence[ReadPart]:
        def fill(into: torch.Tensor, start: int, stop: int) -> None:
            if self.fails and start:
                raise OSError(5, "the drive is gone")
            into[start:stop] = self.values[key]

        self.num_reads += 1
        return [lambda into: fill(into, 0, SIZE // 2), lambda into: fill(into, SIZE // 2, SIZE)]


def open_store(source: Numbers, *tiers: object) -> TieredStore:
    """Return a store with the source's tier between RAM and slower tiers."""
    ram = next(tier for tier in tiers if isinstance(tier, RamTier))
    tier = SourceTier(source)
    at = tiers.index(ram) + 1
    store = TieredStore([*tiers[:at], tier, *tiers[at:]])  # type: ignore[list-item]
    for key in source.values:
        store.register(key, (SIZE,), torch.uint8, home="source", durable=False)
    return store


def test_source_contents_are_read_again_after_an_eviction() -> None:
    source = Numbers({"a": 3, "b": 4})
    with open_store(source, RamTier(MiB)) as store:
        assert store.where("a") == {"source": CopyState.CLEAN}
        for _ in range(2):
            with store.acquire("a", "ram") as lease:
                assert bool((lease.tensor == 3).all())
            store.evict("a", "ram")
        assert source.num_reads == 2
        assert store.stats().links["source->ram"].num_bytes == 2 * SIZE
        assert store.stats().tiers["source"].home_bytes == 2 * SIZE


def test_zarr_values_have_their_home_in_a_writable_tier() -> None:
    with open_store(Numbers({"a": 3}), RamTier(MiB)) as store:
        array = zarr.create_array(ZarrStore(store), name="x", shape=(4,), chunks=(4,), dtype="i4", compressors=None)
        array[:] = 7
        assert array[:].tolist() == [7] * 4


def test_source_copy_is_evicted_without_write_back() -> None:
    source = Numbers({str(number): number for number in range(6)})
    with open_store(source, RamTier(2 * 8192)) as store:
        for number in range(6):
            with store.acquire(str(number), "ram", timeout_s=10) as lease:
                assert bool((lease.tensor == number).all())
        assert store.stats().evictions_dirty == 0


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_writing_is_refused(mode: str) -> None:
    with (
        open_store(Numbers({"a": 3}), RamTier(MiB)) as store,
        pytest.raises(LeaseError, match="read-only tier 'source'"),
    ):
        store.acquire("a", "ram", mode)  # type: ignore[arg-type]


def test_source_refuses_durable_and_unknown_blocks() -> None:
    with open_store(Numbers({"a": 3}), RamTier(MiB)) as store:
        with pytest.raises(ValueError, match="durable=False"):
            store.register("x", (SIZE,), torch.uint8, home="source")
        store.unregister("a")
        for key, nbytes, found in (("x", SIZE, "no"), ("a", SIZE - 1, str(SIZE))):
            with pytest.raises(ValueError) as caught:
                store.register(key, (nbytes,), torch.uint8, home="source", durable=False)
            assert str(caught.value) == f"tier 'source' has {found} bytes of block '{key}', not {nbytes}"


def test_discarded_source_block_is_read_again() -> None:
    with open_store(Numbers({"a": 3}), RamTier(MiB)) as store:
        store.acquire("a", "ram").release()
        store.discard("a")
        with store.acquire("a", "ram", timeout_s=10) as lease:
            assert bool((lease.tensor == 3).all())


def test_failed_source_read_raises_and_can_be_retried() -> None:
    source = Numbers({"a": 3})
    with open_store(source, RamTier(MiB)) as store:
        source.fails = True
        with pytest.raises(TransferError) as caught:
            store.acquire("a", "ram", timeout_s=10)
        assert str(caught.value) == "block 'a' could not be read: [Errno 5] the drive is gone [source]"
        assert caught.value.errno == 5
        usage = store.stats().links["source->ram"]
        assert (usage.num_bytes, usage.inflight_bytes, usage.num_transfers, usage.path) == (0, 0, 0, "source")
        source.fails = False
        with store.acquire("a", "ram", timeout_s=10) as lease:
            assert bool((lease.tensor == 3).all())


def test_source_blocks_are_never_written_to_the_drive(tmp_path: object) -> None:
    """Blocks whose home is the drive move as usual. The source's blocks pass through RAM, but never reach the drive."""
    source = Numbers({"a": 3})
    tiers = (GpuTier(MiB, device="cpu"), RamTier(MiB), NvmeTier([str(tmp_path)], MiB))
    with open_store(source, *tiers) as store:
        store.register("n", (SIZE,), torch.uint8, home="nvme")
        with store.acquire("n", "gpu", "w") as lease:
            lease.tensor.fill_(9)
        store.evict("n", "gpu")
        with store.acquire_many([("a", "gpu", "r"), ("n", "gpu", "r")], timeout_s=20) as leases:
            assert bool((leases.of("a").tensor == 3).all()) and bool((leases.of("n").tensor == 9).all())
        moved = {name: link.num_bytes for name, link in store.stats().links.items()}
        assert moved["source->ram"] == SIZE and moved["ram->nvme"] == moved["nvme->ram"] == SIZE


def test_no_route_leads_into_a_read_only_tier() -> None:
    routes = Routes((("gpu", "ram"), ("ram", "gpu"), ("source", "ram"), ("nvme", "ram"), ("ram", "nvme")))
    assert routes.between("source", "gpu") == (("source", "ram"), ("ram", "gpu"))
    assert routes.tiers_between("source", "nvme") == ("ram",)
    with pytest.raises(ValueError, match="no links lead from tier 'gpu' to tier 'source'"):
        routes.between("gpu", "source")
