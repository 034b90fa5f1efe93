"""Checksums of blocks: xxh3-64 of every 16 MiB of contents, so that damage is found and its place is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

from tiered.units import MiB

#: Contents under one checksum. A constant of the format: not of a tier, an engine or a machine.
PIECE_BYTES = 16 * MiB


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
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


class PieceDigest:
    """Checksums of contents that come in order, in parts of any size. Not thread-safe."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._room = PIECE_BYTES
        self._done: list[str] = []

    def update(self, part: memoryview | bytearray) -> None:
        """Take the next part of the contents."""
        with memoryview(part) as view:
            start = 0
            while start < len(view):
                stop = min(start + self._room, len(view))
                with view[start:stop] as rest:
                    self._digest.update(rest)
                self._room -= stop - start
                start = stop
                if self._room == 0:
                    self._end_piece()

    def _end_piece(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest = xxhash.xxh3_64()
        self._room = PIECE_BYTES

    def checksums(self) -> tuple[str, ...]:
        """Return the checksums of all pieces; nothing can follow."""
        if self._room < PIECE_BYTES:
            self._end_piece()
        return tuple(self._done)
