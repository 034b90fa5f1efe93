"""Checksums of blocks: xxh3-64 of every 16 MiB of contents, so that damage is found and its place is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

from tiered.units import MiB

#: Contents under one checksum. A constant of the format: not of a tier, an engine or a machine.
PIECE_BYTES = 16 * MiB
#: Of contents that come in parts: ``update`` with each, then ``hexdigest``.
Digest = xxhash.xxh3_64


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of every piece of a block's contents."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, nbytes)


def checksum(*buffers: Any) -> str:
    """Return the xxh3-64 of the buffers one after the other, as 16 hex digits. Releases the GIL while it runs.

    0.09 CPU-seconds per GB, a third of crc32; crc32c bindings hold the GIL (docs/decisions/0006-checksums.md).

    Args:
        buffers: contiguous objects with the buffer protocol (memoryview, numpy array, bytes).
    """
    digest = Digest()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
