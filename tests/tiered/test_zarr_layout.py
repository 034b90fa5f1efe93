from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from tiered import BlockSpec
from tiered.tiers.layout import (
    ArrayKeys,
    ChunkFile,
    allocation_error,
    array_document,
    array_view_document,
    document_chunk_bytes,
    dtype_from_name,
    dtype_name,
    group_document,
    own_attributes,
    parts_of,
    place_text,
    zarr_data_type,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_opens_the_document_and_reads_the_padded_file(tmp_path: Path, dtype: torch.dtype) -> None:
    num_elements = 1000
    contents = (np.arange(num_elements * dtype.itemsize) % 2).astype(np.uint8)
    padded = np.zeros(16384, dtype=np.uint8)
    padded[: contents.size] = contents
    (tmp_path / "c").mkdir()
    padded.tofile(tmp_path / "c" / "0")
    (tmp_path / "zarr.json").write_text(json.dumps(array_document("layer/w", (10, 100), dtype, 16384)))
    array = zarr.open_array(tmp_path, mode="r")
    assert array.shape == (1000,)
    assert array.dtype.itemsize == dtype.itemsize
    assert np.array_equal(np.asarray(array[:]).view(np.uint8), contents)
    own = own_attributes(json.loads((tmp_path / "zarr.json").read_text()))
    assert own is not None
    assert own == array.attrs["megatrain"]
    assert own["shape"] == [10, 100] and own["key"] == "layer/w"
    assert dtype_from_name(own["logical_dtype"]) is dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_names_round_trip_and_chunk_size_is_recovered(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype
    assert document_chunk_bytes(array_document("k", (7,), dtype, 8192)) == 8192


def test_types_that_zarr_lacks_are_stored_raw() -> None:
    assert zarr_data_type(torch.bfloat16) == "uint16"
    assert zarr_data_type(torch.float8_e5m2) == "uint8"
    assert zarr_data_type(torch.float32) == "float32"


def test_unknown_dtype_name_is_refused() -> None:
    for name in ("float3", "nn", "save"):
        with pytest.raises(ValueError, match=name):
            dtype_from_name(name)


def test_group_documents_open_and_name_their_format(tmp_path: Path) -> None:
    document = group_document({"page_bytes": 4096})
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    assert zarr.open_group(tmp_path, mode="r").attrs["megatrain"] == {"format": 1, "page_bytes": 4096}
    assert own_attributes(document) == {"format": 1, "page_bytes": 4096}
    foreigners: list[object] = [group_document(), {}, [], None, {"attributes": 3}, {"attributes": {"megatrain": 1}}]
    for foreign in foreigners:
        assert own_attributes(foreign) is None


def test_array_documents_are_complete() -> None:
    assert array_document("a/w", (3, 5), torch.bfloat16, 8192) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [15],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4096]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"megatrain": {"format": 1, "key": "a/w", "shape": [3, 5], "logical_dtype": "bfloat16"}},
    }
    view = array_view_document(BlockSpec("b", (3, 5), torch.bool, "ram"), (2, 5))
    assert view == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 5],
        "data_type": "bool",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 5]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False,
        "codecs": [{"name": "bytes"}],
        "attributes": {"megatrain": {"format": 1, "key": "b", "shape": [3, 5], "logical_dtype": "bool"}},
    }
    assert group_document() == {"zarr_format": 3, "node_type": "group", "attributes": {}}
    fills = {dtype: array_document("k", (1,), dtype, 4096)["fill_value"] for dtype in DTYPES}
    expected = {dtype: 0.0 if zarr_data_type(dtype).startswith("float") else 0 for dtype in DTYPES}
    expected |= {torch.bool: False, torch.complex64: [0.0, 0.0]}
    assert {dtype: (type(fill), fill) for dtype, fill in fills.items()} == {
        dtype: (type(fill), fill) for dtype, fill in expected.items()
    }


def test_damaged_documents_have_no_chunk_size() -> None:
    def changed(elements: object, dtype: str = "float32") -> dict[str, object]:
        document = array_document("k", (7,), torch.float32, 8192)
        document["chunk_grid"]["configuration"]["chunk_shape"] = elements
        document["attributes"]["megatrain"]["logical_dtype"] = dtype
        return document

    assert document_chunk_bytes(changed([1024])) == 4096
    for elements in ([0], [-1024], [1000], [], ["x"], 3, None):
        assert document_chunk_bytes(changed(elements)) is None
    assert document_chunk_bytes(changed([1024], "float3")) is None
    assert document_chunk_bytes(group_document({"page_bytes": 4096})) is None
    assert document_chunk_bytes(None) is None


def test_byte_ranges_are_split_by_file(tmp_path: Path) -> None:
    files = [ChunkFile(tmp_path / name, 100 * number, 100) for number, name in enumerate("abc")]
    assert list(parts_of(files, 30, 250)) == [
        (tmp_path / "a", 30, 100, 30),
        (tmp_path / "b", 0, 100, 100),
        (tmp_path / "c", 0, 50, 200),
    ]
    assert list(parts_of(files, 100, 200)) == [(tmp_path / "b", 0, 100, 100)]
    assert list(parts_of(files, 120, 120)) == list(parts_of(files, 300, 400)) == []
    (tmp_path / "c").symlink_to(tmp_path / "real")
    assert place_text(files, 150, 230) == f"'{tmp_path / 'b'}' bytes 50 to 100, '{tmp_path / 'real'}' bytes 0 to 30"


def test_array_keys_exclude_equal_and_nested_names() -> None:
    keys = ArrayKeys("nvme")
    for key in ("a/b/c", "a/d"):
        keys.check(key)
        keys.add(key)
    text = "a block cannot be inside another block"
    for key, message in {
        "a/d": "tier 'nvme' already has a slot for 'a/d'",
        "a": f"'a': {text} ('a/...')",
        "a/b": f"'a/b': {text} ('a/b/...')",
        "a/d/e/f": f"'a/d/e/f': {text} ('a/d')",
        "a//e": "'a//e' cannot name files: no segment may be empty, '.', '..' or 'zarr.json'",
    }.items():
        with pytest.raises(ValueError) as caught:
            keys.check(key)
        assert str(caught.value) == message
    keys.check("a/b/d")
    keys.remove("a/b/c")
    keys.check("a/b")
    keys.check("a/b/c/d")
    with pytest.raises(ValueError, match="inside another"):
        keys.check("a")
    keys.remove("a/d")
    keys.check("a")


@pytest.mark.parametrize(("filename", "path"), [("/drive/x", "/drive/x"), (None, "/drive")])
def test_allocation_error_names_the_file_or_the_path(filename: str | None, path: str) -> None:
    error = allocation_error(OSError(28, "No space", filename), "nvme", "/drive", "layer/w", 5 << 20)
    assert (error.tier, error.path, error.errno) == ("nvme", path, 28)
    assert str(error) == (
        "no files for 5.00 MiB of block 'layer/w': No space. Free space on the drive, or give tier 'nvme' fewer bytes "
        f"[nvme, {path}]"
    )
