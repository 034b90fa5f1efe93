"""Invalid calls to a store: each error states the mistake, and the store does not change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import BlockNotFoundError, BlockSpec, GpuTier, LeaseError, MiB, NvmeTier, RamTier, TieredStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore([RamTier(MiB, pin_memory=False), NvmeTier([tmp_path], MiB)]) as opened:
        yield opened


@pytest.mark.parametrize("key", [5, None, b"x", ("a", "b")])
def test_non_string_keys_are_refused(store: TieredStore, key: Any) -> None:
    with pytest.raises(TypeError, match="the key of a block is text, not"):
        store.register(key, (4,), torch.float32, home="ram")
    with pytest.raises(TypeError, match="the key of a block is text, not"):
        store[key] = torch.ones(4)
    with pytest.raises(BlockNotFoundError):
        store[key]
    assert key not in store and len(store) == 0


@pytest.mark.parametrize("key", ["k" * 5000, "/".join(["k" * 100] * 50), "k" * 256])
def test_long_key_is_refused_with_a_short_error(store: TieredStore, key: str) -> None:
    with pytest.raises(
        ValueError, match=f"has {len(key)} characters: use at most 2000, and at most 255 between"
    ) as caught:
        store.put(key, torch.ones(4))
    assert len(str(caught.value)) < 400
    with pytest.raises(BlockNotFoundError) as missing:
        store[key]
    assert len(str(missing.value)) < 400


def test_the_longest_key_can_be_committed(store: TieredStore) -> None:
    key = "/".join(["k" * 255] * 5)
    store.put(key, torch.ones(4))
    store.commit().wait()
    assert store[key].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "key", ["a", "a.b/c-d/_", "...", "a/.b", "k" * 255, f"{'/'.join(['k' * 100] * 19)}/{'k' * 81}"]
)
def test_valid_key_is_accepted(key: str) -> None:
    assert BlockSpec(key, (2, 3, 5), torch.int32, "ram").nbytes == 120
    assert BlockSpec(key, (), torch.int16, "ram").num_elements == 1


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "..",
        "a/..",
        "../a",
        "a/./b",
        "a//b",
        "/a",
        "a/",
        "a b",
        "a\n",
        f"{'/'.join(['k' * 100] * 19)}/{'k' * 82}",
    ],
)
def test_invalid_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"use letters, digits|use at most 2000"):
        BlockSpec(key, (2,), torch.int32, "ram")


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        BlockSpec("a", (3, -1, 0), torch.int32, "ram")
    assert str(caught.value) == "block 'a': negative size in shape (3, -1, 0)"
    assert BlockSpec("a", (3, 0), torch.int32, "ram").nbytes == 0


def test_a_released_lease_has_no_tensor(store: TieredStore) -> None:
    store.put("x", torch.ones(4))
    lease = store.acquire("x", "ram")
    assert lease.tensor.shape == (4,)
    lease.release()
    with pytest.raises(LeaseError, match=r"lease on 'x' in tier 'ram' was released: acquire the block again"):
        lease.tensor  # noqa: B018
    assert not hasattr(lease, "tensors")


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_store_is_not_pickled(store: TieredStore, act: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.*TieredStore\.open"):
        act(store)


def test_repr_shows_blocks_and_tiers(store: TieredStore) -> None:
    store.put("x", torch.ones(1024), home="ram")
    assert repr(store) == "<TieredStore, 1 block: ram 4.00 KiB of 1.00 MiB, nvme 0 B of 1.00 MiB>"
    store.close()
    assert repr(store).startswith("<TieredStore (closed), 1 block")


@pytest.mark.filterwarnings("ignore")  # torch warns that such tensors are in beta
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(4, 4).to_sparse(), r"dense tensor, not a sparse one: call to_dense\(\)"),
        (lambda: torch.ones(4, 4).to_sparse_csr(), "not a sparse_csr one"),
        (lambda: torch.empty(4, device="meta"), "on the meta device, which has no contents"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "not a nested one"),
    ],
)
def test_tensors_without_dense_contents_are_refused(
    store: TieredStore, make: Callable[[], torch.Tensor], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        store.put("x", make())
    assert "x" not in store


def test_a_home_three_links_away_is_refused(tmp_path: Path) -> None:
    tiers = [
        GpuTier(MiB, device="cpu"),
        RamTier(MiB, name="near"),
        RamTier(MiB, name="far"),
        NvmeTier([tmp_path], MiB),
    ]
    with TieredStore(tiers) as store:
        with pytest.raises(ValueError, match="tier 'gpu' would pass two tiers on its way to 'nvme'"):
            store.register("a", (4,), torch.float32, home="nvme")
        store.register("a", (4,), torch.float32, home="far")
