from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from tiered import BlockSpec, GenerationError, MiB
from tiered.durable import arrays
from tiered.durable.arrays import array_bytes, chunk_files
from tiered.file_io import PIECE_BYTES, checksum
from tiered.units import PAGE_BYTES


def test_checksum_is_xxh3_of_the_concatenation() -> None:
    contents = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    assert checksum(contents) == xxhash.xxh3_64_hexdigest(contents.tobytes())
    assert checksum(contents[:300], contents[300:]) == checksum(contents)
    assert len(checksum(b"")) == 16


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, 0),
        (1, PAGE_BYTES),
        (4097, 2 * PAGE_BYTES),
        (512 * MiB, 32 * PIECE_BYTES),
        (1024 * MiB + 1, 3 * 22 * PIECE_BYTES),
        (5000 * MiB + 3, 10 * 32 * PIECE_BYTES),
    ],
)
def test_no_checksum_piece_spans_two_files(nbytes: int, expected: int) -> None:
    """All files of a block have the same length, up to 512 MiB.

    If there are several, each consists of whole 16 MiB pieces.
    """
    assert array_bytes(BlockSpec("block", (nbytes,), torch.uint8, "ram")) == expected


def test_files_of_an_array_are_limited_and_found_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_MAX_FILES", 3)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, name in zip(folders, ("0", "1"), strict=True):
        (folder / "c").mkdir(parents=True)
        (folder / "c" / name).touch()
    files = chunk_files(folders[0], BlockSpec("a", (3 * 4096,), torch.uint8, "ram"), folders[1:], 4096)
    found = [(str(file.path.relative_to(tmp_path)), file.offset, file.nbytes, file.path_index) for file in files]
    assert found == [("first/c/0", 0, 4096, 0), ("second/c/1", 4096, 4096, 0), ("first/c/2", 8192, 4096, 0)]
    with pytest.raises(GenerationError) as caught:
        chunk_files(folders[0], BlockSpec("a", (3 * 4096 + 1,), torch.uint8, "ram"), (), 4096)
    assert str(caught.value) == (
        f"the document of block 'a' in '{folders[0]}' claims 4 files. Name the paths of the run that wrote it, or open "
        "another generation"
    )
    with pytest.raises(GenerationError) as caught:
        chunk_files(folders[0], BlockSpec("a", (1,), torch.uint8, "ram"))
    assert str(caught.value) == (
        f"block 'a' has no array in '{folders[0]}': '{folders[0]}/zarr.json' is missing or damaged. Name the paths of "
        "the run that wrote it, or open another generation"
    )
