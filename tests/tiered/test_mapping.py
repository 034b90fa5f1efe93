"""A store as a mapping: assigning, deleting and iterating over blocks, and assigning NumPy arrays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiered import BlockNotFoundError, KiB, LeaseError, MiB, NvmeTier, RamTier, TieredStore, UninitializedBlockError


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with make_store(tmp_path) as store:
        yield store


def make_store(path: Path) -> TieredStore:
    return TieredStore([RamTier(MiB, pin_memory=False), NvmeTier([path / "drive"], 8 * MiB, chunk_bytes=16 * KiB)])


def test_store_behaves_like_a_dict(store: TieredStore) -> None:
    assert isinstance(store, MutableMapping) and len(store) == 0
    one, two = torch.arange(6.0).view(2, 3), torch.tensor([1, 2])
    store["a/b"] = one
    store["c"] = two
    assert store.spec("a/b").home == "nvme" and store.spec("a/b").durable
    assert len(store) == 2 and list(store.keys()) == ["a/b", "c"] and "c" in store.keys()  # noqa: SIM118
    assert [tensor.tolist() for tensor in store.values()] == [one.tolist(), two.tolist()]
    assert {key: tensor.sum().item() for key, tensor in store.items()} == {"a/b": 15, "c": 3}
    assert store.get("nothing") is None and store.get("nothing", 3) == 3
    found = store.get("c")
    assert found is not None and found.tolist() == [1, 2]
    store["c"] = two + 1
    assert store["c"].tolist() == [2, 3]
    assert store.pop("c").tolist() == [2, 3] and "c" not in store
    store.update({"d": two})
    assert list(store) == ["a/b", "d"]
    store.clear()
    assert len(store) == 0 and store.stats().tiers["nvme"].home_bytes == 0


def test_a_block_keeps_its_shape_and_dtype_until_it_is_deleted(store: TieredStore) -> None:
    store["a"] = torch.ones(4)
    before = store.stats().tiers["nvme"].home_bytes
    for other in (torch.ones(5), torch.ones(4, dtype=torch.float64), torch.ones(1)):
        with pytest.raises(ValueError, match=r"del store\['a'\]"):
            store["a"] = other
    assert store["a"].tolist() == [1, 1, 1, 1] and store.stats().tiers["nvme"].home_bytes == before
    del store["a"]
    store["a"] = torch.ones(5)
    assert store["a"].shape == (5,)


def test_a_leased_block_is_not_deleted(store: TieredStore) -> None:
    store["a"] = torch.ones(4)
    store["b"] = torch.ones(4)
    with store.acquire("a", "ram"):
        with pytest.raises(LeaseError, match="'a' is leased"):
            del store["a"]
        with pytest.raises(LeaseError):
            store["a"] = torch.zeros(4)
    assert store["a"].tolist() == [1, 1, 1, 1]
    del store["a"]
    with pytest.raises(BlockNotFoundError):
        del store["a"]
    with pytest.raises(KeyError):
        store["a"]
    assert list(store) == ["b"]


def test_committed_block_outlives_a_deletion(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        store["a"] = torch.ones(4)
        commit = store.commit()
        del store["a"]  # waits for the commit's pending write
        commit.wait(10)
        assert len(store) == 0
    with TieredStore.open(str(tmp_path / "drive"), make_tiers(tmp_path)) as store:
        assert store["a"].tolist() == [1, 1, 1, 1]


def make_tiers(path: Path) -> list[Any]:
    return [RamTier(MiB, pin_memory=False), NvmeTier([path / "drive"], 8 * MiB, chunk_bytes=16 * KiB)]


def test_unwritten_block_exists_without_contents(store: TieredStore) -> None:
    store.register("a", (4,), torch.float32, home="nvme")
    assert "a" in store and len(store) == 1
    with pytest.raises(UninitializedBlockError):
        store.get("a")
    store["a"] = torch.ones(4)
    assert store["a"].sum() == 4


def test_store_is_truthy_and_compared_by_identity(store: TieredStore, tmp_path: Path) -> None:
    """An empty store is truthy, and stores are compared by identity, without reading blocks."""
    with make_store(tmp_path / "other") as other:
        assert store and store == store and store != other and len({store, other, store}) == 2
    store["a"] = torch.ones(1)
    for key in store:
        del store[key]
    assert len(store) == 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=np.int16)[::-1],
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(4, dtype=">i4"),
        np.array([True, False]),
        np.float32(2.5),
    ],
    ids=["float64", "backwards", "transposed", "big-endian", "bool", "number"],
)
@pytest.mark.filterwarnings("error")
def test_numpy_arrays_are_stored(array: Any, store: TieredStore) -> None:
    store["a"] = array
    assert np.array_equal(store["a"].numpy(), array) and store["a"].shape == array.shape
    frozen = np.array(array)
    frozen.setflags(write=False)
    store.put("a", frozen.astype(array.dtype.newbyteorder("="), copy=False))
    assert np.array_equal(store["a"].numpy(), array)


def test_rows_are_written_from_numpy_and_other_types_are_refused(store: TieredStore) -> None:
    store["a"] = np.zeros((4, 2), dtype=np.float32)
    store.write_rows("a", 1, np.ones((2, 2), dtype=np.float32))
    assert store["a"].sum() == 4
    for wrong, said in (
        ([1.0], "not 'list'"),
        ("text", "not 'str'"),
        (np.array(["a"]), "torch has no dtype"),
    ):
        with pytest.raises(TypeError, match=said):
            store["b"] = wrong  # type: ignore[assignment]
    assert list(store) == ["a"]


@pytest.mark.parametrize("mode", ["write", "wr", "W", "a", ""])
def test_unknown_mode_is_refused(mode: Any, store: TieredStore) -> None:
    store["a"] = torch.ones(4)
    for ask in (
        lambda: store.acquire("a", "ram", mode),
        lambda: store.acquire_many([("a", "ram", mode)]),
        lambda: next(store.stream(["a"], "ram", mode)),
    ):
        with pytest.raises(ValueError, match=f"unknown mode '{mode}'; use 'r' to read, 'rw' to change, 'w' to"):
            ask()
    with store.acquire("a", "ram", "rw"):
        pass


@pytest.mark.parametrize("package", ["tiered", "megatrain"])
def test_dir_lists_public_names(package: str) -> None:
    """Tab completion calls `dir`, which must not import torch. `help` then reads each listed name."""
    public = "sorted({*p.__all__, '__version__'} ^ set(dir(p)))"
    code = f"import sys, {package} as p; print({public}, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[] False"
    module = __import__(package)
    assert all(getattr(module, name) is not None for name in dir(module))
