"""The tiers in examples/extend pass the test suites for tiers. Like users' tiers, they are not in the packages."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import tiered
from oracles.example_files import Objects, load_example, module
from tiered.testing import LinkSuite, StoreSuite, TierSuite

compressed = load_example("extend/compressed_ram_tier.py")


class Compressed:
    def make_tier(self, capacity_bytes: int) -> tiered.Tier:
        tier: tiered.Tier = compressed.CompressedRamTier(capacity_bytes)
        return tier


class TestCompressedRamTier(Compressed, TierSuite): ...


class TestCompressedLinks(Compressed, LinkSuite): ...


class TestStoreOfCompressedRam(Compressed, StoreSuite): ...


class TestObjectsInMemory(Objects, TierSuite): ...


class TestObjectLinksInMemory(Objects, LinkSuite): ...


class TestStoreOfObjectsInMemory(Objects, StoreSuite): ...


class ObjectsInFolder(Objects):
    @pytest.fixture(autouse=True)
    def _url(self, tmp_path: Path) -> None:
        self.url = tmp_path.as_uri()


class TestObjectsInAFolder(ObjectsInFolder, TierSuite): ...


class TestObjectLinksInAFolder(ObjectsInFolder, LinkSuite): ...


class TestStoreOfObjectsInAFolder(ObjectsInFolder, StoreSuite): ...


def weights(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return (0.02 * torch.randn(num_elements, generator=torch.Generator().manual_seed(0))).to(dtype)


def put(store: tiered.TieredStore, key: str, data: torch.Tensor) -> None:
    store.register(key, data.shape, data.dtype, home=list(store.stats().tiers)[-1])
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.copy_(data)
    store.evict(key, "ram").wait(60)


def get(store: tiered.TieredStore, key: str) -> torch.Tensor:
    with store.acquire(key, "ram", timeout_s=60) as lease:
        return lease.tensor.clone()


@pytest.mark.parametrize(("dtype", "max_stored_fraction"), [(torch.float32, 0.9), (torch.bfloat16, 0.82)])
def test_compressed_weights_use_less_space_and_are_restored(dtype: torch.dtype, max_stored_fraction: float) -> None:
    data = weights(700_001, dtype)
    tier = compressed.CompressedRamTier(4 * tiered.MiB)
    with tiered.TieredStore([tiered.RamTier(4 * tiered.MiB), tier]) as store:
        put(store, "layer", data)
        assert 0.5 * data.nbytes < tier.stored_bytes < max_stored_fraction * data.nbytes, (
            tier.stored_bytes / data.nbytes
        )
        assert torch.equal(get(store, "layer"), data)
        assert store.stats().links["ram->compressed"].path == "zlib"
        store.unregister("layer")
        assert tier.stored_bytes == tier.usage().used_bytes == 0


def test_incompressible_data_takes_its_full_size() -> None:
    noise = torch.randint(0, 256, (1_500_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tier = compressed.CompressedRamTier(2 * tiered.MiB)
    with tiered.TieredStore([tiered.RamTier(2 * tiered.MiB), tier]) as store:
        put(store, "noise", noise)
        assert tier.stored_bytes == noise.nbytes
        assert torch.equal(get(store, "noise"), noise)


def test_overestimated_compression_loses_no_data() -> None:
    noise = torch.randint(0, 256, (600_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tier = compressed.CompressedRamTier(4 * tiered.MiB, memory_bytes=tiered.MiB)
    with tiered.TieredStore([tiered.RamTier(2 * tiered.MiB), tier]) as store:
        for number in range(3):
            put(store, f"zeros.{number}", torch.zeros(900_000, dtype=torch.uint8))
        put(store, "a", noise)
        with pytest.raises(tiered.TransferError, match="more memory_bytes"):
            put(store, "b", noise.flip(0))
        assert noise.nbytes <= tier.most_stored_bytes <= tier.memory_bytes
        assert torch.equal(get(store, "b"), noise.flip(0)), "it stays in RAM"
        store.unregister("a")
        store.wait_idle()
        store.evict("b", "ram").wait(60)
        assert torch.equal(get(store, "b"), noise.flip(0)), "now there is space"


def test_objects_are_deleted_with_their_blocks_and_at_the_end(tmp_path: Path) -> None:
    tier = module.ObjectStoreTier(tmp_path.as_uri(), 4 * tiered.MiB, part_bytes=100_000)
    with tiered.TieredStore([tiered.RamTier(4 * tiered.MiB), tier]) as store:
        put(store, "layers.0/weight", weights(60_000, torch.float32))
        put(store, "layers.1/weight", weights(1000, torch.float32))
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sorted(path.stat().st_size for path in files) == [4000, 40_000, 100_000, 100_000]
        store.unregister("layers.0/weight")
        assert [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()] == [4000]
    assert list(tmp_path.iterdir()) == []


def test_changed_object_is_detected(tmp_path: Path) -> None:
    tier = module.ObjectStoreTier(tmp_path.as_uri(), 4 * tiered.MiB)
    with tiered.TieredStore([tiered.RamTier(4 * tiered.MiB), tier]) as store:
        put(store, "layer", weights(1000, torch.float32))
        (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
        data = bytearray(path.read_bytes())
        data[77] ^= 4
        for wrong in (bytes(data), bytes(data[:-1])):
            path.write_bytes(wrong)
            with pytest.raises(tiered.CorruptBlockError, match="'layer' is damaged"):
                get(store, "layer")
        data[77] ^= 4
        path.write_bytes(bytes(data))
        assert torch.equal(get(store, "layer"), weights(1000, torch.float32))


def test_neither_tier_links_to_a_gpu() -> None:
    for tier in (compressed.CompressedRamTier(1), module.ObjectStoreTier("memory://bucket", 1)):
        assert tier.links_with(tiered.GpuTier(1)) is None
        with pytest.raises(ValueError, match="put a RamTier between"):
            tiered.TieredStore([tiered.GpuTier(1), tier])


def test_failed_commit_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [tiered.RamTier(tiered.MiB), compressed.CompressedRamTier(4 * tiered.MiB)]
    with tiered.TieredStore(tiers, path=str(tmp_path)) as store:
        put(store, "layer", torch.ones(1000))
        store.commit().wait()
        with store.acquire("layer", "ram", "rw") as lease:
            lease.tensor.fill_(2)
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "posix_fallocate", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
            )
            with pytest.raises(tiered.TransferError, match="No space left"):
                store.commit()
        assert sorted(path.name for path in (tmp_path / "snap").iterdir() if path.is_dir()) == ["00000001"]
        with store.acquire("layer", "ram", "rw") as lease:  # the failed commit has released its leases
            lease.tensor.fill_(3)
        store.commit().wait()
    tiers = [tiered.RamTier(tiered.MiB), compressed.CompressedRamTier(4 * tiered.MiB)]
    with tiered.TieredStore.open(str(tmp_path), tiers) as store:
        assert torch.equal(get(store, "layer"), torch.full((1000,), 3.0))
