"""Generations as read-only zarr groups: chunk shapes, keys, listings and byte ranges."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from tiered import BlockSpec, zarr_views
from tiered.zarr_views import BlockView, group_of, range_of


def view_of(key: str, *shape: int, dtype: torch.dtype = torch.int16) -> BlockView:
    """Return a view of a block that has the numbers 0, 1, 2, ..."""
    contents = torch.arange(math.prod(shape)).to(dtype).reshape(-1).view(torch.uint8)
    return BlockView(BlockSpec(key, shape, dtype, "ram"), lambda start, stop: contents[start:stop])


def listed(keys: AsyncIterator[str]) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in keys]

    return asyncio.run(collect())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_views, "_CHUNK_BYTES", 48)


@pytest.mark.parametrize(
    ("shape", "chunk_shape"),
    [
        ((7, 4), (6, 4)),
        ((5, 4), (5, 4)),
        ((9, 2, 6), (2, 2, 6)),
        ((3, 25), (1, 25)),
        ((30,), (24,)),
        ((), ()),
        ((0, 3), (1, 3)),
        ((3, 0), (3, 1)),
    ],
)
def test_chunks_have_whole_rows(shape: tuple[int, ...], chunk_shape: tuple[int, ...], small_chunks: None) -> None:
    assert view_of("a", *shape).chunk_shape == chunk_shape
    array = group_of([view_of("a", *shape)], {})["a"]
    assert isinstance(array, zarr.Array)
    assert array.chunks == chunk_shape
    assert np.array_equal(np.asarray(array[...]), np.arange(math.prod(shape)).reshape(shape))


def test_last_chunk_is_padded_with_zeros(small_chunks: None) -> None:
    view = view_of("a", 7, 4)
    assert view.chunk((0, 0)).view(torch.int16).tolist() == list(range(24))
    assert view.chunk((1, 0)).view(torch.int16).tolist() == [24, 25, 26, 27, *[0] * 20]
    assert view_of("b").chunk(()).view(torch.int16).tolist() == [0]


def test_every_key_is_listed_and_others_do_not_exist(small_chunks: None) -> None:
    views = [view_of("x/y/a", 7, 4), view_of("x/b", 13, 4), view_of("number"), view_of("empty", 0, 3)]
    group = group_of(views, {"generation": 3})
    store: Any = group.store
    documents = ["zarr.json", "x/zarr.json", "x/y/zarr.json", *(f"{view.spec.key}/zarr.json" for view in views)]
    chunks = ["x/y/a/c/0/0", "x/y/a/c/1/0", "x/b/c/0/0", "x/b/c/1/0", "x/b/c/2/0", "number/c"]
    assert sorted(listed(store.list())) == sorted(documents + chunks)
    assert sorted(listed(store.list_prefix("x/b"))) == ["x/b/c/0/0", "x/b/c/1/0", "x/b/c/2/0", "x/b/zarr.json"]
    assert sorted(listed(store.list_dir(""))) == ["empty", "number", "x", "zarr.json"]
    for prefix in ("x", "x/"):
        assert sorted(listed(store.list_dir(prefix))) == ["b", "y", "zarr.json"]
    assert sorted(listed(store.list_dir("x/b/c"))) == ["0", "1", "2"]
    missing = ["x/b/c/3/0", "x/b/c/0/1", "x/b/c", "x/b/c/0", "number/c/0", "number", "x/b", "empty/c/0/0", "n/c", "y/a"]
    found = [asyncio.run(store.exists(key)) for key in [*documents, *chunks, *missing]]
    assert found == [True] * len(documents + chunks) + [False] * len(missing)
    assert asyncio.run(store.get("x/b/c/3/0")) is None
    assert json.loads(asyncio.run(store.get("zarr.json")).to_bytes()) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"megatrain": {"format": 1, "generation": 3}},
    }
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["empty", "number", "x", "x/b", "x/y", "x/y/a"]
    assert repr(store) == "<4 blocks of a committed generation>"
    assert store == store and store != group_of(views, {}).store
    for change in (store.set("x", None), store.delete("x")):
        with pytest.raises(ValueError, match="read-only"):
            asyncio.run(change)


def test_byte_ranges_select_parts_of_a_value(small_chunks: None) -> None:
    store: Any = group_of([view_of("a", 30, dtype=torch.uint8)], {}).store
    requests = [
        ("a/c/0", None),
        ("a/c/0", RangeByteRequest(3, 7)),
        ("a/c/0", OffsetByteRequest(27)),
        ("a/c/0", SuffixByteRequest(2)),
        ("a/c/0", SuffixByteRequest(100)),
        ("b/c/0", None),
    ]
    prototype = zarr.core.buffer.default_buffer_prototype()
    values = asyncio.run(store.get_partial_values(prototype, requests))
    assert [None if value is None else list(value.to_bytes()) for value in values] == [
        list(range(30)),
        [3, 4, 5, 6],
        [27, 28, 29],
        [28, 29],
        list(range(30)),
        None,
    ]
    with pytest.raises(ValueError, match="Unexpected byte_range, got 5"):
        range_of(9, 5)  # type: ignore[arg-type]
