"""SourceTier: blocks that have contents from the start, read from files that are never written."""

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

#: Fills its part of a block, given all the block's bytes (1-D uint8, CPU). Raises on failure.
ReadPart = Callable[[torch.Tensor], None]


class BlockSource(Protocol):
    """Source of the contents of blocks."""

    @property
    def block_bytes(self) -> Mapping[str, int]:
        """Return the bytes of each block, by key."""
        ...

    def parts(self, key: str) -> Sequence[ReadPart]:
        """Return the readers of a block, which together write all of its bytes. They run on several threads at once."""
        ...


class SourceTier:
    """A read-only tier: its slots are homes that hold their contents from the start. Thread-safe.

    Takes no room: the bytes are wherever the source has them. A block at home here is never written, and no commit
    holds it: register it with ``durable=False``. Copies are read into a RamTier.

    Args:
        path: name of the path that bytes take, for statistics.
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
        """Return the bytes of the contents."""
        return nbytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return the slot of a block that the source has; its resource is the key.

        Raises:
            ValueError: the source has no such block, or one of another size.
        """
        assert home, f"tier '{self.name}' holds homes only, not a copy of '{name}'"
        found = self._source.block_bytes.get(name)
        if found != nbytes:
            raise ValueError(f"tier '{self.name}' has {found or 'no'} bytes of block '{name}', not {nbytes}")
        return Slot(self.name, nbytes, nbytes, name) if self._ledger.take(nbytes) else None

    def free(self, slot: Slot) -> None:
        """Forget a slot; the contents stay where they are."""
        self._ledger.give(slot.slot_bytes)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Refuse: contents are reached through links only."""
        raise TieredError(f"tier '{self.name}' is not addressable: fetch the block into a faster tier first")

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot; see ``Tier``."""
        self._ledger.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing: nothing is ever written."""

    def usage(self) -> TierUsage:
        """Return the ledger."""
        return self._ledger.usage()

    def close(self) -> None:
        """Do nothing: the links own the threads."""

    def links_with(self, neighbour: Tier) -> Sequence[Link] | None:
        """Return the link that reads blocks into a RamTier, or None if the neighbour is another kind of tier."""
        if not isinstance(neighbour, RamTier):
            return None
        return [SourceLink(self, neighbour, self._source, num_threads=self._num_threads)]


class SourceLink:
    """Reads blocks of a SourceTier into slots of a RamTier, several parts at once. Thread-safe."""

    def __init__(self, src: SourceTier, dst: RamTier, source: BlockSource, *, num_threads: int) -> None:
        self.src, self.dst, self.path = src.name, dst.name, src.path
        self._ram, self._source = dst, source
        self._meter = Meter()
        self._workers = Workers(num_threads, f"tiered-{src.name}")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start reading all of a block and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        key = str(src_slot.resource)
        into = self._ram.tensor(dst_slot, (nbytes,), torch.uint8)
        parts = list(self._source.parts(key)) or [lambda tensor: None]
        job = _SourceRead(len(parts))
        for part in parts:
            self._workers.submit(lambda part=part: self._run(job, part, into, transfer, key))  # type: ignore[misc]
        return transfer

    def _run(self, job: _SourceRead, part: ReadPart, into: torch.Tensor, transfer: Transfer, key: str) -> None:
        error: BaseException | None = None
        if job.error is None:  # else the transfer has failed already: its other parts are not worth reading
            try:
                part(into)
            except TieredError as cause:
                error = cause
            except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
                number = cause.errno if isinstance(cause, OSError) else None
                error = TransferError(f"block '{key}' could not be read: {cause}", tier=self.src, errno=number)
                error.__cause__ = cause
        if job.part_done(error):
            self._meter.end(transfer.nbytes, moved=job.error is None)
            transfer.finish(job.error)

    def usage(self) -> LinkUsage:
        """Return the counters."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress and stop the threads. Idempotent."""
        self._workers.close()


class _SourceRead:
    """A transfer in progress: how many parts are left, and the first error."""

    def __init__(self, num_parts: int) -> None:
        self.error: BaseException | None = None
        self._num_left = num_parts
        self._lock = threading.Lock()

    def part_done(self, error: BaseException | None) -> bool:
        """Count a part as ended; True for the last one."""
        with self._lock:
            self.error = self.error or error
            self._num_left -= 1
            return self._num_left == 0
