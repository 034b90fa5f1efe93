from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from tiered.tiers.layout import (
    array_document,
    document_chunk_bytes,
    dtype_from_name,
    dtype_name,
    group_document,
    own_attributes,
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
