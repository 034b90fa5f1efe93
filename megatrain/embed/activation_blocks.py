"""Scratch blocks of a store that are used again and again: a new one costs files and memory, an old one nothing."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from megatrain.embed.stores import ledger_of
from tiered.errors import CapacityError
from tiered.store import TieredStore
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, round_up

__all__ = ["ActivationBlock", "BlockPool", "pool_of", "rounded_bytes"]

#: A block that nobody wanted for so many rounds is given up.
_IDLE_ROUNDS = 8
#: Where there is no room for a new block, a kept one of another size serves if it is at most so many times too large.
_MAX_WASTE = 2


@dataclass(slots=True, eq=False)
class ActivationBlock:
    """A registered block of bytes.

    Attributes:
        key: as registered.
        home: as registered.
        nbytes: as registered.
        transfer: the last movement that was asked for.
        last_round: when it was taken last.
    """

    key: str
    home: str
    nbytes: int
    transfer: Transfer | None = None
    last_round: int = 0

    @property
    def is_quiet(self) -> bool:
        """Return whether no movement that was asked for is under way."""
        return self.transfer is None or self.transfer.done()


class BlockPool:
    """The blocks that activations use in one store. Thread-safe.

    A round ends when a forward does, or when no block is in use any more.

    Attributes:
        registered_bytes: of all blocks, used or kept.
        num_registered: how many there are.
        has_told: somebody was told that there is no room for more.
    """

    def __init__(self) -> None:
        self.registered_bytes = 0
        self.num_registered = 0
        self._lock = threading.Lock()
        # Finalizers run anywhere, also in a thread that holds the store's lock or this one: they only append.
        self._dead: deque[ActivationBlock] = deque()
        self._moving: list[ActivationBlock] = []  # dead, with a movement under way
        self._kept: dict[int, list[ActivationBlock]] = {}  # by size
        self._num_names = 0
        self._round = 0
        self.has_told = False

    def take(
        self, store: TieredStore, nbytes: int, homes: Sequence[str], max_bytes: int | None
    ) -> ActivationBlock | None:
        """Return a block of at least ``nbytes`` with undefined contents; None where there is no room for it.

        Args:
            homes: tiers that it may live in, most wanted first.
            max_bytes: most bytes of all blocks together.

        Raises:
            TransferError: a drive refused the files.
        """
        size = rounded_bytes(nbytes)
        with self._lock:
            self._collect_locked(store)
            larger = sorted(other for other in self._kept if size < other <= _MAX_WASTE * size)
            block = (
                _take_best(self._kept.get(size, []), homes)
                or self._new_locked(store, size, homes, max_bytes)
                # One that still moves: the lease for writing waits for that.
                or _take_best(self._moving, homes, size)
                or next((found for other in larger if (found := _take_best(self._kept[other], homes))), None)
            )
            if block is not None:
                block.last_round = self._round
            return block

    @property
    def in_use_bytes(self) -> int:
        """Return the bytes of blocks with contents that somebody may want, as of the last ``collect``."""
        with self._lock:
            return self.registered_bytes - sum(block.nbytes for block in (*self._all_kept(), *self._moving))

    def release_with(self, owner: object, block: ActivationBlock) -> None:
        """Take a block back when ``owner`` dies, wherever that happens."""
        weakref.finalize(owner, self._dead.append, block).atexit = False

    def release(self, block: ActivationBlock) -> None:
        """Take a block back; its contents are dead."""
        self._dead.append(block)

    def collect(self, store: TieredStore) -> None:
        """Let go of dead contents, unless another thread is at it."""
        if self._dead and self._lock.acquire(blocking=False):
            try:
                self._collect_locked(store)
            finally:
                self._lock.release()

    def end_round(self, store: TieredStore) -> None:
        """Say that a forward is over; give up blocks that nobody wanted for long."""
        with self._lock:
            self._collect_locked(store)
            self._round += 1
            idle = [block for block in self._all_kept() if self._round - block.last_round > _IDLE_ROUNDS]
            self._give_up_locked(store, idle)

    def trim(self, store: TieredStore) -> None:
        """Give back every block that holds nothing now. Waits for their movements."""
        with self._lock:
            self._collect_locked(store)
            for block in self._moving:
                self._keep_locked(block)
            self._moving = []
            self._give_up_locked(store, self._all_kept())

    def _all_kept(self) -> list[ActivationBlock]:
        return [block for same_size in self._kept.values() for block in same_size]

    def _keep_locked(self, block: ActivationBlock) -> None:
        self._kept.setdefault(block.nbytes, []).append(block)

    def _collect_locked(self, store: TieredStore) -> None:
        if store.is_closed:  # its blocks are gone with it
            self._dead.clear()
            self._kept, self._moving, self.num_registered, self.registered_bytes = {}, [], 0, 0
            return
        dead, self._moving = self._moving, []
        num_before = len(dead)
        while self._dead:
            dead.append(self._dead.popleft())
        for block in dead:
            if block.is_quiet:
                store.discard(block.key)  # what is dead is never written
                block.transfer = None
                self._keep_locked(block)
            else:
                self._moving.append(block)  # to discard it now would mean to wait
        if len(dead) > num_before and len(self._all_kept()) + len(self._moving) == self.num_registered:
            self._round += 1

    def _new_locked(
        self, store: TieredStore, size: int, homes: Sequence[str], max_bytes: int | None
    ) -> ActivationBlock | None:
        if not homes or (max_bytes is not None and self.registered_bytes + size > max_bytes):
            return None
        key = f"activations/{self._num_names}"
        try:
            home = ledger_of(store).register(store, key, size, torch.uint8, homes, durable=False)
        except CapacityError:
            return None
        self._num_names += 1
        self.num_registered += 1
        self.registered_bytes += size
        return ActivationBlock(key, home, size)

    def _give_up_locked(self, store: TieredStore, blocks: Sequence[ActivationBlock]) -> None:
        for block in blocks:
            self._kept[block.nbytes].remove(block)
            self.num_registered -= 1
            self.registered_bytes -= block.nbytes
            store.unregister(block.key)


def _take_best(blocks: list[ActivationBlock], homes: Sequence[str], nbytes: int = 0) -> ActivationBlock | None:
    """Take a block out of a list: in the most wanted home, and there the last one, whose memory is the warmest."""
    for home in homes:
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index].home == home and nbytes in (0, blocks[index].nbytes):
                return blocks.pop(index)
    return None


def rounded_bytes(nbytes: int) -> int:
    """Return the size of a block for ``nbytes``: one of eight per power of two, so that near sizes share blocks."""
    step = max(PAGE_BYTES, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return round_up(max(nbytes, 1), step)


_POOLS: WeakKeyDictionary[TieredStore, BlockPool] = WeakKeyDictionary()


def pool_of(store: TieredStore) -> BlockPool:
    """Return the pool of a store; made at the first call, and kept as long as the store."""
    return _POOLS.setdefault(store, BlockPool())
