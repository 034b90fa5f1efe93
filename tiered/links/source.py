"""SourceTier: blocks whose contents come from files that are never written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from tiered.errors import TieredError, TransferError
from tiered.links.base import Link, LinkUsage, Meter, Workers
from tiered.tiers.base import Ledger, Slot, Tier, TierUsage
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer

#: Function that fills one part of a block. It gets the whole block (1-D uint8, CPU), and raises an error on failure.
ReadPart = Callable[[torch.Tensor], None]


class BlockSource(Protocol):
    """Source of the contents of blocks."""

    @property
    def block_bytes(self) -> Mapping[str, int]:
        """Size in bytes of each block, by key."""
        ...

    def parts(self, key: str) -> Sequence[ReadPart]:
        """Return functions that together fill a block. Several threads call the functions concurrently."""
        ...


class SourceTier:
    """A read-only tier. Its slots are homes that have their contents from the start. Thread-safe.

    It takes no space, because the bytes stay in the source. Its blocks are never written and cannot be committed, so
    register them with ``durable=False``. Copies are read into a RamTier.

    Args:
        path: name of the copy method for statistics.
    """

    is_read_only = True

    def __init__(
        self, source: BlockSource, *, name: str = "source", path: str = "source", num_threads: int = 4
    ) -> None:
        self.name, self.path = name, path
        self.capacity_bytes = sum(source.block_bytes.values())
        self.alignment_bytes = 1
        self.device: torch.device | None = None
        self.durable = False
        self._source, self._num_threads = source, num_threads
        self._ledger = Ledger(name, self.capacity_bytes)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` unchanged."""
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a block's slot, with the block's key as its resource.

        Raises:
            ValueError: the source lacks the block, or its size differs.
        """
        assert home, f"tier '{self.name}' can only be a home, not hold a copy of '{name}'"
        size = self._source.block_bytes.get(name)
        if size != nbytes:
            raise ValueError(f"tier '{self.name}' has {size or 'no'} bytes of block '{name}', not {nbytes}")
        return Slot(self.name, nbytes, nbytes, name) if self._ledger.take(nbytes) else None

    def free(self, slot: Slot) -> None:
        """Remove a slot from the ledger; the contents stay in the source."""
        self._ledger.give(slot.slot_bytes)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raise ``TieredError``, because only links can read the contents."""
        raise TieredError(f"tier '{self.name}' is not addressable: fetch the block into a faster tier first")

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot; see ``Tier``."""
        self._ledger.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing, because the tier is never written."""

    def usage(self) -> TierUsage:
        """Return the tier's current byte counts."""
        return self._ledger.usage()

    def close(self) -> None:
        """Do nothing, because the links own the threads."""

    def links_with(self, neighbour: Tier) -> Sequence[Link] | None:
        """Return the link that reads blocks into a RamTier, or None if the neighbour is not a RamTier."""
        if not isinstance(neighbour, RamTier):
            return None
        return [SourceLink(self, neighbour, self._source, num_threads=self._num_threads)]


class SourceLink:
    """Link that reads blocks of a SourceTier into slots of a RamTier, several parts concurrently. Thread-safe."""

    def __init__(self, src: SourceTier, dst: RamTier, source: BlockSource, *, num_threads: int) -> None:
        self.src, self.dst, self.path = src.name, dst.name, src.path
        self._ram, self._source = dst, source
        self._meter = Meter()
        self._workers = Workers(num_threads, f"tiered-{src.name}")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start reading a whole block and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        key = str(src_slot.resource)
        out = self._ram.tensor(dst_slot, (nbytes,), torch.uint8)
        parts = list(self._source.parts(key)) or [lambda tensor: None]
        job = _SourceRead(len(parts))
        for part in parts:
            self._workers.submit(lambda part=part: self._run(job, part, out, transfer, key))  # type: ignore[misc]
        return transfer

    def _run(self, job: _SourceRead, part: ReadPart, out: torch.Tensor, transfer: Transfer, key: str) -> None:
        error: BaseException | None = None
        if job.error is None:  # After an error, skip the remaining parts.
            try:
                part(out)
            except TieredError as cause:
                error = cause
            except Exception as cause:  # Every exception must end the transfer. Otherwise, its waiters hang.
                error_number = cause.errno if isinstance(cause, OSError) else None
                error = TransferError(f"block '{key}' could not be read: {cause}", tier=self.src, errno=error_number)
                error.__cause__ = cause
        if job.finish_part(error):
            self._meter.end(transfer.nbytes, moved=job.error is None)
            transfer.finish(job.error)

    def usage(self) -> LinkUsage:
        """Return the link's counters."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress and stop the threads. Idempotent."""
        self._workers.close()


class _SourceRead:
    """State of a transfer in progress: the number of remaining parts and the first error."""

    def __init__(self, num_parts: int) -> None:
        self.error: BaseException | None = None
        self._num_parts_left = num_parts
        self._lock = threading.Lock()

    def finish_part(self, error: BaseException | None) -> bool:
        """Count a part that has ended. Return whether it was the last one."""
        with self._lock:
            self.error = self.error or error
            self._num_parts_left -= 1
            return self._num_parts_left == 0
