"""A tier of compressed memory between RAM and a drive, in one file outside the package.

The tier groups the bytes of all numbers by their position (all first bytes, then all second bytes, ...), and compresses
them with zlib. Grouping helps because the exponents of weights are similar. A store uses this tier like any
other tier::

    tiered.TieredStore([tiered.RamTier(64 * tiered.MiB), CompressedRamTier(1 * tiered.GiB)])

The size of a slot must be known before its contents. The ledger therefore assumes the worst case, in which nothing can
be compressed; contents that do not compress are stored uncompressed. ``stored_bytes`` is the memory that is actually
used. To save memory through compression, use ``CompressedRamTier(1 * GiB, memory_bytes=700 * MiB)``. This tier has a
capacity of 1 GiB and takes at most 700 MiB of memory. If a block does not fit into this memory, it stays complete and
readable in the faster tier. As with a full drive, the caller that waits for the write gets an error.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Sequence

import torch

import tiered
from tiered.ext import Ledger, Link, Slot, ThreadedLink, Tier, TierUsage

_CHUNK_BYTES = 1 << 20  # chunks are compressed one at a time, so a transfer needs memory for only a few
_LEVEL = 1


class CompressedContents:
    """Resource of a slot: its compressed chunks, and the size of one number in bytes."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.item_bytes = 1


class CompressedRamTier:
    """Tier with ``capacity_bytes`` of contents in at most ``memory_bytes`` of memory. Only links access the contents.

    Args:
        capacity_bytes: Capacity in bytes before compression.
        memory_bytes: Limit of the compressed bytes. The default ``capacity_bytes`` is always enough.
    """

    alignment_bytes = 1
    device: torch.device | None = None
    durable = False

    def __init__(self, capacity_bytes: int, *, memory_bytes: int | None = None, name: str = "compressed") -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.memory_bytes = capacity_bytes if memory_bytes is None else memory_bytes
        self._ledger = Ledger(name, capacity_bytes)
        self._lock = threading.Lock()
        self._stored_bytes = self._most_stored_bytes = 0

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of memory that the contents of all slots take."""
        return self._stored_bytes

    @property
    def most_stored_bytes(self) -> int:
        """Return the maximum of ``stored_bytes`` so far."""
        return self._most_stored_bytes

    # -- methods of every tier ---------------------------------------------------------------------------------

    def slot_bytes(self, nbytes: int) -> int:
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        return Slot(self.name, nbytes, nbytes, CompressedContents()) if self._ledger.take(nbytes) else None

    def free(self, slot: Slot) -> None:
        self._drop(slot)
        slot.resource = None
        self._ledger.give(slot.slot_bytes)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise tiered.TieredError(f"tier '{self.name}' holds compressed bytes: fetch the block into a faster tier first")

    def reserve(self, nbytes: int) -> None:
        self._ledger.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing: memory does not survive the process."""

    def usage(self) -> TierUsage:
        return self._ledger.usage()

    def close(self) -> None:
        """Do nothing: the slots own the memory."""

    # -- methods of optional protocols ---------------------------------------------------------------------------------

    def describe(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Record the size of one number in a home slot. The store calls this once, before it writes to the slot."""
        contents_of(slot).item_bytes = dtype.itemsize

    def links_with(self, neighbour: Tier) -> list[Link] | None:
        """Return the links to a tier in host memory, or None for any other tier."""
        if neighbour.device is None or neighbour.device.type != "cpu":
            return None

        def compress(source: Slot, target: Slot, nbytes: int) -> None:
            self._compress(neighbour.tensor(source, (nbytes,), torch.uint8), target)

        def expand(source: Slot, target: Slot, nbytes: int) -> None:
            self._expand(source, neighbour.tensor(target, (nbytes,), torch.uint8))

        return [
            ThreadedLink(neighbour.name, self.name, compress, path="zlib"),
            ThreadedLink(self.name, neighbour.name, expand, path="zlib"),
        ]

    # -- the bytes ---------------------------------------------------------------------------------------------

    def _compress(self, contents: torch.Tensor, slot: Slot) -> None:
        self._drop(slot)  # the old contents are stale, so their memory can be reused
        for start in range(0, len(contents), _CHUNK_BYTES):
            raw = to_planes(contents[start : start + _CHUNK_BYTES], contents_of(slot).item_bytes).numpy().tobytes()
            small = zlib.compress(raw, _LEVEL)
            self._add(slot, small if len(small) < len(raw) else raw)

    def _expand(self, slot: Slot, contents: torch.Tensor) -> None:
        stored = contents_of(slot)
        assert len(stored.chunks) == len(range(0, len(contents), _CHUNK_BYTES)), (
            len(stored.chunks),
            len(contents),
        )
        for chunk, into in zip(stored.chunks, contents.split(_CHUNK_BYTES), strict=False):
            raw = bytearray(chunk if len(chunk) == len(into) else zlib.decompress(chunk))
            from_planes(torch.frombuffer(raw, dtype=torch.uint8), stored.item_bytes, into)

    def _add(self, slot: Slot, chunk: bytes) -> None:
        """Append a chunk to a slot. If there is no memory for it, drop all chunks of the slot and raise an error."""
        with self._lock:
            has_room = self._stored_bytes + len(chunk) <= self.memory_bytes
            if has_room:
                contents_of(slot).chunks.append(chunk)
                self._stored_bytes += len(chunk)
                self._most_stored_bytes = max(self._most_stored_bytes, self._stored_bytes)
        if not has_room:
            self._drop(slot)
            raise tiered.TransferError(
                f"no memory for a block of {slot.nbytes} bytes: other blocks take {self._stored_bytes} of "
                f"{self.memory_bytes} after compression. Give the tier more memory_bytes, or fewer capacity_bytes",
                tier=self.name,
                errno=errno.ENOSPC,
            )

    def _drop(self, slot: Slot) -> None:
        stored = contents_of(slot)
        with self._lock:
            self._stored_bytes -= sum(map(len, stored.chunks))
            stored.chunks = []


def contents_of(slot: Slot) -> CompressedContents:
    """Return the contents of a slot of this tier."""
    assert isinstance(slot.resource, CompressedContents), slot
    return slot.resource


def to_planes(contents: torch.Tensor, item_bytes: int) -> torch.Tensor:
    """Return bytes grouped by their position in a number: all first bytes, then all second bytes, then a remainder."""
    whole = len(contents) // item_bytes * item_bytes
    return torch.cat([contents[:whole].view(-1, item_bytes).T.reshape(-1), contents[whole:]])


def from_planes(planes: torch.Tensor, item_bytes: int, into: torch.Tensor) -> None:
    """Reverse ``to_planes``."""
    whole = len(into) // item_bytes * item_bytes
    into[:whole].view(-1, item_bytes).copy_(planes[:whole].view(item_bytes, -1).T)
    into[whole:].copy_(planes[whole:])
