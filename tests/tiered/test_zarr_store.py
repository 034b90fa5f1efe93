"""``ZarrStore`` passes zarr's own suites. Its arrays can be larger than RAM, and commits keep them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from tiered import CapacityError, GpuTier, KiB, MiB, NvmeTier, RamTier, TieredError, TieredStore, ZarrStore


@pytest.fixture
def tiered_store(tmp_path: Path) -> Iterator[TieredStore]:
    ram = RamTier(256 * KiB, pin_memory=False)
    with TieredStore([ram, NvmeTier([tmp_path / "drive"], 16 * MiB)]) as store:
        yield store


class TestZarrStore(StoreTests[ZarrStore, cpu.Buffer]):
    store_cls = ZarrStore
    buffer_cls = cpu.Buffer

    async def set(self, store: ZarrStore, key: str, value: Buffer) -> None:
        block_key, _ = store.block_keys(key)
        store._store.register(block_key, (len(value),), torch.uint8, home="nvme")
        with store._store.acquire(block_key, "ram", "w") as lease:
            lease.tensor.numpy()[:] = np.frombuffer(value.to_bytes(), dtype=np.uint8)

    async def get(self, store: ZarrStore, key: str) -> Buffer:
        held = {spec.key for spec in store._store.blocks()}
        (block_key,) = held.intersection(store.block_keys(key))
        with store._store.acquire(block_key, "ram") as lease:
            return cpu.Buffer.from_bytes(lease.tensor.numpy().tobytes())

    @pytest.fixture
    def store_kwargs(self, tiered_store: TieredStore) -> dict[str, Any]:
        return {"store": tiered_store}

    def test_store_repr(self, store: ZarrStore) -> None:
        assert repr(store) == "ZarrStore('zarr', home='nvme', tier='ram')"

    def test_store_supports_writes(self, store: ZarrStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: ZarrStore) -> None:
        assert store.supports_listing


FEW = settings(
    max_examples=8,
    stateful_step_count=15,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.parametrize("machine", [ZarrStoreStateMachine, ZarrHierarchyStateMachine])
@pytest.mark.filterwarnings("ignore::zarr.core.dtype.common.UnstableSpecificationWarning")
def test_zarr_stateful_suites_pass(machine: Any, tiered_store: TieredStore) -> None:
    run_state_machine_as_test(lambda: machine(ZarrStore(tiered_store)), settings=FEW)


def bytes_at(store: ZarrStore, key: str) -> bytes | None:
    found = store.get_sync(key)
    return None if found is None else found.to_bytes()


def put(store: ZarrStore, key: str, value: bytes) -> None:
    store.set_sync(key, cpu.Buffer.from_bytes(value))


def test_zarr_array_larger_than_ram_survives_reopening(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(96, 4096)).astype(np.float32)  # 1.5 MiB, six times the RAM tier
    tiers = [RamTier(256 * KiB, pin_memory=False), NvmeTier([tmp_path / "a", tmp_path / "b"], 8 * MiB)]
    with TieredStore(tiers) as store:
        array = zarr.create_array(
            ZarrStore(store), name="deep/values", shape=values.shape, chunks=(4, 4096), dtype="f4", compressors=None
        )
        array[:] = values
        assert np.array_equal(array[40:50], values[40:50])
        assert 240 * KiB <= store.stats().tiers["ram"].high_water_bytes <= 256 * KiB, "chunks of 16 KiB"
        store.commit().wait(60)
    tiers = [RamTier(512 * KiB, pin_memory=False), NvmeTier([tmp_path / "a", tmp_path / "b"], 8 * MiB)]
    with TieredStore.open(str(tmp_path / "a"), tiers) as store:
        assert np.array_equal(zarr.open_array(ZarrStore(store), path="deep/values", mode="r")[:], values)


def test_keys_invalid_as_block_names_round_trip(tiered_store: TieredStore) -> None:
    store = ZarrStore(tiered_store)
    keys = ["a", "a/b", "a/c/0", "a_v", "a_d/b", "A b/\u00fcml\u00e4ut/_5F", "zarr.json", "c", ".", "..", "x//y", "a_w"]
    for number, key in enumerate(keys):
        put(store, key, bytes([number]))
    assert {key: bytes_at(store, key) for key in keys} == {key: bytes([n]) for n, key in enumerate(keys)}
    assert sorted(store._keys()) == sorted(keys)


def test_value_that_does_not_fit_leaves_the_old_value(tmp_path: Path) -> None:
    with TieredStore([RamTier(256 * KiB, pin_memory=False), NvmeTier([tmp_path], 96 * KiB)]) as tiers:
        store = ZarrStore(tiers)
        put(store, "k", b"old")
        with pytest.raises(CapacityError):
            put(store, "k", bytes(100 * KiB))
        assert bytes_at(store, "k") == b"old"
        for size in (40, 30, 50, 30):  # each value fits only if the previous one is freed first
            put(store, "k", bytes([size]) * size * KiB)
            assert bytes_at(store, "k") == bytes([size]) * size * KiB
        with pytest.raises(CapacityError):
            put(store, "other", bytes(70 * KiB))
        store.delete_sync("k")
        put(store, "other", bytes(70 * KiB))


def test_crash_during_replacement_leaves_a_complete_value(tmp_path: Path) -> None:
    """A commit between writing the new block and removing the old one contains both. The newer block counts."""
    tiers = [RamTier(256 * KiB, pin_memory=False), NvmeTier([tmp_path], 8 * MiB)]
    with TieredStore(tiers) as tiers_before:
        store = ZarrStore(tiers_before)
        put(store, "k", b"first")
        put(store, "k", b"a second one")
        store._forget = lambda block_key: tiers_before.commit().wait(60)  # type: ignore[method-assign,assignment]
        put(store, "k", b"third")
    with TieredStore.open(
        str(tmp_path), [RamTier(256 * KiB, pin_memory=False), NvmeTier([tmp_path], 8 * MiB)]
    ) as tiers:
        store = ZarrStore(tiers)
        assert len(list(tiers.blocks())) == 2
        tiers.put("unrelated", torch.ones(3))
        assert bytes_at(store, "k") == b"third" and store._keys() == ["k"]
        put(store, "k", b"fourth!")
        assert bytes_at(store, "k") == b"fourth!" and len(list(tiers.blocks())) == 2


def test_equal_stores_have_the_same_blocks_prefix_and_access(tiered_store: TieredStore, tmp_path: Path) -> None:
    store = ZarrStore(tiered_store, "p", timeout_s=7)
    assert store == ZarrStore(tiered_store, "p") and hash(store) == hash(ZarrStore(tiered_store, "p"))
    with TieredStore([RamTier(MiB, pin_memory=False)], path=str(tmp_path / "other")) as other:
        for different in (
            ZarrStore(tiered_store),
            ZarrStore(tiered_store, "p", read_only=True),
            ZarrStore(other, "p"),
            5,
        ):
            assert store != different
    reopened = pickle.loads(pickle.dumps(store.with_read_only(True)))
    assert reopened == store.with_read_only(True) and reopened.read_only and not store.read_only
    assert (
        reopened._arguments()
        == store._arguments()
        == {
            "prefix": "p",
            "home": "nvme",
            "tier": "ram",
            "durable": True,
            "timeout_s": 7,
        }
    )
    assert store.block_keys("a b/ü") == ("p/a_20b_d/_C3_BC_v", "p/a_20b_d/_C3_BC_w")
    for use in (lambda s: s.get_sync("k"), lambda s: s.delete_sync("k"), lambda s: put(s, "k", b"1")):
        fresh = ZarrStore(tiered_store)
        assert not fresh._is_open
        use(fresh)
        assert fresh._is_open, "zarr need not open a store that is in use"
    with pytest.raises(TypeError, match="a value must be a zarr Buffer, not bytes"):
        store.set_sync("k", b"text")  # type: ignore[arg-type]


def test_prefixes_and_other_blocks_are_isolated(tiered_store: TieredStore) -> None:
    tiered_store.register("zarr_b/x", (4,), torch.float32, home="ram")
    one, two = ZarrStore(tiered_store), ZarrStore(tiered_store, "zarr/inner", home="ram", durable=False)
    put(two, "k", b"two")
    put(one, "k", b"one")
    assert bytes_at(one, "k") == b"one" and bytes_at(two, "k") == b"two"
    assert two._keys() == ["k"] and one != two
    assert tiered_store.spec(two.block_keys("k")[0]).home == "ram"


def test_readers_and_writers_of_one_key_see_whole_values(tiered_store: TieredStore) -> None:
    stores = [ZarrStore(tiered_store) for _ in range(3)]
    put(stores[0], "k", b"\0" * 10)

    def work(number: int) -> int:
        found = bytes_at(stores[number % 3], "k")
        assert found is not None and len(set(found)) == 1 and len(found) == 10 + found[0]
        put(stores[number % 3], "k", bytes([number % 7]) * (10 + number % 7))
        return 1

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(120), timeout=60)) == 120
    assert len(list(tiered_store.blocks())) == 1


def test_unpickling_in_another_process_explains_the_missing_values(tiered_store: TieredStore) -> None:
    kind, (cls, _, arguments, read_only) = ZarrStore(tiered_store).__reduce__()
    with pytest.raises(TieredError, match="Commit there"):
        kind(cls, "of another process", arguments, read_only)


def test_unusable_zarr_tiers_are_refused(tmp_path: Path) -> None:
    with TieredStore([NvmeTier([tmp_path], MiB)]) as store, pytest.raises(ValueError, match="none of the tiers nvme"):
        ZarrStore(store)
    with TieredStore([RamTier(MiB, pin_memory=False), NvmeTier([tmp_path], MiB)]) as store:
        with pytest.raises(ValueError, match="'nvme' is not addressable"):
            ZarrStore(store, tier="nvme")
        with pytest.raises(ValueError, match="no tier named 'gpu'"):
            ZarrStore(store, home="gpu")


@pytest.mark.gpu
def test_gpu_tier_values_are_read_as_device_arrays(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    tiers = [GpuTier(64 * MiB), RamTier(64 * MiB), NvmeTier([tmp_path], 64 * MiB)]
    with TieredStore(tiers) as store, zarr.config.enable_gpu():
        array = zarr.create_array(ZarrStore(store, tier="gpu"), shape=(1000, 100), chunks=(100, 100), dtype="f4")
        array[:] = np.arange(100_000, dtype="f4").reshape(1000, 100)
        found = array[250:]
        assert type(found).__module__.startswith("cupy")
        assert float(found.sum()) == float(np.arange(25_000, 100_000, dtype="f8").sum())
