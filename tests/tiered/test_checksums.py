from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from tiered import BlockSpec, MiB
from tiered.durable.arrays import array_bytes
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
