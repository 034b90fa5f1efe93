"""Blocks of a store for saved tensors.

The sizes and the order of saved tensors are unknown before the first forward, and the garbage collector determines when
they are freed. A stored tensor therefore has a block only while a graph needs it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from megatrain.embed.block_homes import shared_state
from tiered import TieredStore, Transfer
from tiered.errors import CapacityError
from tiered.units import PAGE_BYTES, round_up


@dataclass(slots=True, eq=False)
class ActivationBlock:
    """A registered block of bytes, with its most recently requested transfer."""

    key: str
    home: str
    nbytes: int
    transfer: Transfer | None = None


class ActivationBlocks:
    """The blocks of saved tensors in one store. Thread-safe.

    Each stored tensor gets a new block. After a block is unregistered, its tiers keep the buffers and files for blocks
    of the same size until the tiers need the space.

    Attributes:
        has_warned: Whether a lack of space was already logged.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._lock = threading.Lock()
        # Finalizers only append to this deque. If they took a lock, they could deadlock, because they can run in a
        # thread that already holds it.
        self._released: deque[ActivationBlock] = deque()
        self._registered_bytes = self._num_registered = 0

    def register(
        self, store: TieredStore, nbytes: int, homes: Sequence[str], max_bytes: int | None
    ) -> ActivationBlock | None:
        """Return a new block of at least ``nbytes``, or None if no tier has space for it.

        Args:
            homes: Allowed home tiers, preferred first.
            max_bytes: Limit on the total bytes of all blocks; None for no limit.

        Raises:
            TransferError: A drive could not create the files.
        """
        if not homes:
            return None
        size = round_block_bytes(nbytes)
        with self._lock:
            for wait in (False, True):
                self._collect_locked(store, wait=wait)
                if max_bytes is not None and self._registered_bytes + size > max_bytes:
                    continue
                key = f"activations/{self._num_registered}"
                try:
                    home = shared_state(store).register(key, size, torch.uint8, homes, durable=False)
                except CapacityError:
                    continue
                self._num_registered += 1
                self._registered_bytes += size
                return ActivationBlock(key, home, size)
        return None

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the blocks that a backward may still read."""
        with self._lock:
            return self._registered_bytes - sum(block.nbytes for block in list(self._released))

    def release(self, block: ActivationBlock) -> None:
        """Release a block whose contents are no longer needed."""
        self._released.append(block)

    def release_with(self, owner: object, block: ActivationBlock) -> None:
        """Release a block when ``owner`` is freed, which can happen in any thread."""
        weakref.finalize(owner, self._released.append, block).atexit = False

    def collect(self, store: TieredStore, *, wait: bool = False) -> None:
        """Unregister released blocks. Without ``wait``, leave those that cannot be unregistered immediately.

        Args:
            wait: Whether to wait for transfers of the blocks, and for other threads that use this object.
        """
        if self._released and self._lock.acquire(blocking=wait):
            try:
                self._collect_locked(store, wait=wait)
            finally:
                self._lock.release()

    def _collect_locked(self, store: TieredStore, *, wait: bool) -> None:
        if store.is_closed:  # closing the store removed the blocks
            self._released.clear()
            self._registered_bytes = 0
            return
        unused = []
        for _ in range(len(self._released)):
            block = self._released.popleft()
            if wait or block.transfer is None or block.transfer.done():
                unused.append(block)
            else:
                self._released.append(block)  # unregistering it now would wait for its transfer
        store.unregister(*(block.key for block in unused))  # unregistered blocks are not written back
        self._registered_bytes -= sum(block.nbytes for block in unused)


def round_block_bytes(nbytes: int) -> int:
    """Round ``nbytes`` up to one of eight sizes per power of two, so that blocks of similar size can share buffers."""
    step = max(PAGE_BYTES, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return round_up(max(nbytes, 1), step)


_BLOCKS: WeakKeyDictionary[TieredStore, ActivationBlocks] = WeakKeyDictionary()


def blocks_of(store: TieredStore) -> ActivationBlocks:
    """Return the activation blocks of a store. All contexts of the store share them."""
    return _BLOCKS.setdefault(store, ActivationBlocks())
