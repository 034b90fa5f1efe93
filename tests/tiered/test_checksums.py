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


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 512 * MiB, 1024 * MiB + 1, 5000 * MiB + 3])
def test_no_piece_of_a_block_lies_in_two_of_its_files(nbytes: int) -> None:
    size = array_bytes(BlockSpec("block", (nbytes,), torch.uint8, "ram"))
    assert size >= nbytes and size % PAGE_BYTES == 0
    assert size % PIECE_BYTES == 0 or nbytes < 512 * MiB, "equal files of whole pieces"
