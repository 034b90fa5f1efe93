"""Writes saved tensors to blocks of a store in the forward, and prefetches and reads them in the backward."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch

from megatrain.embed.activation_blocks import ActivationBlock, blocks_of
from megatrain.embed.source_storages import Elements, SourceStorage, StoredElements, WeakStorage
from tiered import Lease, Mode, TieredStore
from tiered.errors import CapacityError
from tiered.units import GiB

#: A tensor stays in memory if the staging tier does not free enough space within this time.
_MAX_WAIT_S = 60.0
#: Limits of one look-ahead: number of stored tensors to search, and number of transfers to request.
_MAX_STEPS_BACK = 64
_MAX_FETCHES = 16


@dataclass(slots=True)
class ActivationStats:
    """Statistics of an ``offload_activations`` context since its creation.

    Attributes:
        offloaded_bytes: Bytes written to blocks.
        restored_bytes: Bytes read back. Excludes memory that was still alive and could be reused.
        deduplicated_bytes: Bytes of saved tensors that were already in a block.
        no_room_bytes: Bytes of storages that stayed in memory because no tier had space.
        small_bytes: Bytes of saved tensors smaller than ``min_bytes``.
        pack_wait_s: Seconds that the forward waited for the store.
        unpack_wait_s: Seconds that the backward waited for the store.
        in_use_bytes: Bytes of activation blocks in the store that a graph still needs.
    """

    offloaded_bytes: int = 0
    restored_bytes: int = 0
    deduplicated_bytes: int = 0
    no_room_bytes: int = 0
    small_bytes: int = 0
    pack_wait_s: float = 0.0
    unpack_wait_s: float = 0.0
    in_use_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Route:
    """Tiers used for saved tensors from one device.

    Attributes:
        homes: Allowed home tiers of blocks, preferred first.
        staging: Addressable tiers, fastest first.
    """

    homes: tuple[str, ...]
    staging: tuple[str, ...]
    lookahead_bytes: int


class ActivationCache:
    """Cache of storage elements in blocks of one store. Thread-safe.

    The newest elements, up to ``lookahead_bytes``, stay in the staging tier, because the backward needs them first.
    Older elements move to their homes during the forward. Reading elements prefetches those stored before them.
    """

    def __init__(
        self, store: TieredStore, tier: str | None, max_bytes: int | None, lookahead_bytes: int | None
    ) -> None:
        if tier is not None:
            store.tier(tier)  # raises for an unknown name
        self._store, self._tier, self._max_bytes, self._lookahead_bytes = store, tier, max_bytes, lookahead_bytes
        self._names = tuple(store.stats().tiers)
        self.blocks = blocks_of(store)
        self._routes: dict[torch.device, _Route] = {}
        self._lock = threading.Lock()  # never held while waiting, which would block other threads
        self._live: WeakValueDictionary[int, StoredElements] = WeakValueDictionary()
        self._staged: deque[tuple[int, ref[StoredElements]]] = deque()
        self._staged_bytes = self._num_stored = 0
        self.stats = ActivationStats()

    def write(self, source: SourceStorage, elements: Elements, storage: torch.UntypedStorage) -> StoredElements | None:
        """Copy elements of a storage to a new block. Return None if no tier has space for them.

        Raises:
            TransferError: A drive could not provide reserved space, or an earlier write-back failed.
        """
        device = storage.device
        route = self._route(device)
        started_s = time.perf_counter()
        block = self.blocks.register(self._store, elements.nbytes, route.homes, self._max_bytes)
        if block is None:
            return None
        try:
            lease = self._acquire(block, route, "w")
            self.stats.pack_wait_s += time.perf_counter() - started_s
            with lease:
                elements.read(storage, lease.tensor[: elements.nbytes])
        except (CapacityError, TimeoutError):
            self.blocks.release(block)
            return None
        except BaseException:
            self.blocks.release(block)
            raise
        self.stats.offloaded_bytes += elements.nbytes
        is_staged = lease.tier != block.home
        with self._lock:
            stored = StoredElements(source, elements, block, self._num_stored, device, lease.tier, is_staged)
            self._num_stored += 1
            self._live[stored.number] = stored
            overflow = self._add_staged(stored, route.lookahead_bytes) if is_staged else []
        self.blocks.release_with(stored, block)
        source.stored[elements] = stored
        for item in overflow:
            item.block.transfer = self._store.evict(item.block.key, item.staging)
        return stored

    def _add_staged(self, stored: StoredElements, lookahead_bytes: int) -> list[StoredElements]:
        """Add the newest elements, and return the oldest elements that no longer fit in the look-ahead."""
        self._staged.append((stored.block.nbytes, ref(stored)))
        self._staged_bytes += stored.block.nbytes
        overflow = []
        while self._staged_bytes > lookahead_bytes:
            nbytes, reference = self._staged.popleft()
            self._staged_bytes -= nbytes
            item = reference()
            if item is not None:
                item.is_staged = False
                overflow.append(item)
        return overflow

    def read(self, stored: StoredElements) -> torch.UntypedStorage:
        """Return memory with the elements at their original positions. Readers on the same stream share it.

        Raises:
            CapacityError: This thread's leases fill the staging tiers.
            TransferError: The block could not be read back.
            CorruptBlockError: The drive returned different bytes than were written.
        """
        stream = _current_stream(stored.device)
        with self._lock:
            if stored.restored is not None and stored.restored[1] == stream:
                memory = stored.restored[0]()
                if memory is not None:
                    return memory
        started_s = time.perf_counter()
        self._look_ahead(stored)
        nbytes = stored.elements.nbytes
        with self._acquire(stored.block, self._route(stored.device), "r") as lease:
            waited_s = time.perf_counter() - started_s
            memory = stored.elements.restore(lease.tensor[:nbytes], stored.device)
        with self._lock:
            stored.restored = WeakStorage(memory), stream
            self.stats.unpack_wait_s += waited_s
            self.stats.restored_bytes += nbytes
        self.blocks.collect(self._store)
        return memory

    def _look_ahead(self, stored: StoredElements) -> None:
        """Prefetch a block and the blocks that were stored before it, because the backward needs them next."""
        route = self._route(stored.device)
        num_fetches, ahead_bytes = 0, 0
        for index in range(stored.number, max(-1, stored.number - _MAX_STEPS_BACK), -1):
            other = stored if index == stored.number else self._live.get(index)
            if other is None or other.block.home in route.staging[:1] or other.device != stored.device:
                continue
            if other is not stored:
                ahead_bytes += other.block.nbytes
                if ahead_bytes > route.lookahead_bytes:
                    return
            if other.is_staged or (other is not stored and other.source.memory() is not None):
                continue
            transfer = self._store.prefetch(other.block.key, route.staging[0])
            if not transfer.skipped:  # skipped if there is no space, or if the block is already in transfer
                other.is_staged, other.block.transfer = True, transfer
            num_fetches += 1
            if num_fetches >= _MAX_FETCHES:
                return

    def _acquire(self, block: ActivationBlock, route: _Route, mode: Mode) -> Lease:
        """Lease a block in the fastest staging tier that has space for it."""
        home = self._names.index(block.home)
        staging = [name for name in route.staging if self._names.index(name) <= home] or [block.home]
        for name in staging[:-1]:
            try:
                return self._store.acquire(block.key, name, mode, timeout_s=_MAX_WAIT_S)
            except (CapacityError, TimeoutError):
                continue
        return self._store.acquire(block.key, staging[-1], mode, timeout_s=_MAX_WAIT_S if mode == "w" else None)

    def _route(self, device: torch.device) -> _Route:
        if device not in self._routes:
            self._routes[device] = self._new_route(device)
        return self._routes[device]

    def _new_route(self, device: torch.device) -> _Route:
        places = [(name, self._store.tier(name).device) for name in self._names]
        own = [name for name, tier_device in places if tier_device is not None and _is_same_device(tier_device, device)]
        addressable = [name for name, tier_device in places if tier_device is not None]
        first = self._names.index((own or addressable)[0])
        # A copy in the tensor's own tier frees no memory, so it is made only if the user chose this tier (``tier``).
        slower = self._names[first + 1 :] if own else self._names[first:]
        homes = slower[::-1] if self._tier is None else (self._tier,)
        staging = tuple(name for name in self._names[first:] if name in addressable)
        lookahead_bytes = self._lookahead_bytes
        if lookahead_bytes is None:
            lookahead_bytes = min(GiB, self._store.tier(staging[0]).capacity_bytes // 4)
        return _Route(homes, staging, lookahead_bytes)


def _is_same_device(tier_device: torch.device, device: torch.device) -> bool:
    return tier_device.type == device.type and (tier_device.index is None or tier_device.index == device.index)


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
