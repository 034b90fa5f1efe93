"""Storage of saved tensors in blocks of a store. Blocks are written in the forward and prefetched in the backward.

Sizes and order are unknown before the first forward, and the garbage collector frees the memory. A stored tensor
therefore has a block only while a graph needs it. Storages are tracked by version and weak reference.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.embed.stores import shared_state
from megatrain.engine.unit.graph_keeping import version_probe
from tiered import Lease, Mode, TieredStore, Transfer
from tiered.errors import CapacityError
from tiered.units import PAGE_BYTES, GiB, round_up

#: Restored memory is aligned like the source storage up to this many bytes, because alignment affects kernel results.
_ALIGNMENT_BYTES = 512
#: Store the whole storage if it is at most this many times as large as the tensor.
_WHOLE_SHARE = 2
#: Use a stored whole storage for a tensor if it is at most this many times as large as the tensor.
_SHARED_SHARE = 4
#: Integer dtypes for copies, by element size. With them, copies never interpret the elements.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
#: A tensor stays in memory if the staging tier has no space for it within this time.
_MAX_WAIT_S = 60.0
#: Limits of one look-ahead: number of stored tensors to search, and number of transfers to request.
_MAX_STEPS_BACK = 64
_MAX_FETCHES = 16


def can_be_placed(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided view of its storage, not a subclass or a different layout."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_inference()
        and tensor.dtype.itemsize in _WORDS
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a storage that one block contains, without the bytes between them.

    Attributes:
    """

    itemsize: int
    start: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Total bytes of the elements."""
        return self.itemsize * math.prod(self.counts)

    @property
    def first_byte(self) -> int:
        """Position in the source storage of the first byte that is restored."""
        return self.start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    def read(self, storage: torch.UntypedStorage, into: Tensor) -> None:
        """Copy the elements from a storage to ``into``, a contiguous 1-D uint8 tensor of ``nbytes`` on any device."""
        self._shaped(into).copy_(self._inside(storage, 0))

    def restore(self, contents: Tensor, device: torch.device) -> torch.UntypedStorage:
        """Return new memory on ``device`` with the elements at their original positions. Other bytes are undefined."""
        last = sum((count - 1) * step for count, step in zip(self.counts, self.strides, strict=True))
        nbytes = self.start + (last + 1) * self.itemsize - self.first_byte
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._inside(memory, self.first_byte).copy_(self._shaped(contents))
        return memory

    def _inside(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        empty = torch.empty(0, dtype=_WORDS[self.itemsize], device=storage.device)
        return empty.set_(storage, (self.start - first_byte) // self.itemsize, self.counts, self.strides)

    def _shaped(self, contents: Tensor) -> Tensor:
        return contents.view(_WORDS[self.itemsize]).view(self.counts)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor, described as a view of its storage.

    Attributes:
        start: First byte in the storage.
        elements: Elements of the view, without the repetitions of expanded dimensions.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    start: int
    elements: Elements

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the place of a tensor. ``can_be_placed`` must be true for the tensor."""
        itemsize = tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        start = int(tensor.storage_offset()) * itemsize
        sizes = zip(shape, stride, strict=True)
        dimensions = sorted(((step, count) for count, step in sizes if step and count > 1), reverse=True)
        merged: list[tuple[int, int]] = []  # dimensions are merged so that reshaped views compare equal
        for step, count in dimensions:
            if merged and merged[-1][0] == count * step:
                count *= merged.pop()[1]
            merged.append((step, count))
        span = sum((count - 1) * step for step, count in merged) + 1
        if math.prod(count for _, count in merged) > span:  # overlapping windows contain elements several times
            merged = [(1, span)]
        elements = Elements(itemsize, start, tuple(count for _, count in merged), tuple(step for step, _ in merged))
        return cls(shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(), start, elements)

    def view(self, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
        """Return the tensor as a view of ``storage``, which begins at byte ``first_byte`` of the source storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = empty.set_(storage, (self.start - first_byte) // self.dtype.itemsize, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class WeakStorage:
    """Weak reference to a storage. While the reference exists, no other storage can get the same address."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it was freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


class SourceStorage:
    """One version of a storage with tensors saved for a backward. This object does not keep the storage alive.

    Attributes:
        stored: Stored parts, by their elements.
        kept: Weak reference to a saved tensor that keeps the storage in memory, or None.
    """

    __slots__ = ("__weakref__", "_nbytes", "_probe", "_reference", "_version", "kept", "stored")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._reference = WeakStorage(storage)
        self._nbytes = storage.nbytes()
        self._probe, self._version = version_probe(tensor), tensor._version
        self.stored: WeakValueDictionary[Elements, StoredElements] = WeakValueDictionary()
        self.kept: ref[Any] | None = None

    def is_still(self, version: int) -> bool:
        """Return whether the storage is unchanged, and a tensor with this version has the recorded contents."""
        return self._probe._version == self._version == version

    def memory(self) -> torch.UntypedStorage | None:
        """Return the storage if other code keeps it alive and its contents are unchanged, otherwise None."""
        if self._probe._version != self._version:
            return None
        storage = self._reference()
        return storage if storage is not None and storage.nbytes() == self._nbytes else None

    def to_store(self, place: StorageView) -> Elements:
        """Return the elements to store for a tensor: its whole storage, or only its own elements."""
        is_large = place.elements.nbytes * _WHOLE_SHARE >= self._nbytes
        return self._whole if is_large else place.elements

    def find(self, place: StorageView) -> StoredElements | None:
        """Return a stored part that contains the elements of a tensor, or None."""
        whole = self.stored.get(self._whole) if place.elements.nbytes * _SHARED_SHARE >= self._nbytes else None
        return self.stored.get(place.elements) if whole is None else whole

    @property
    def _whole(self) -> Elements:
        return Elements(1, 0, (self._nbytes,), (1,))


@dataclass(slots=True, eq=False)
class ActivationBlock:
    """A registered block of bytes, with the transfer that was requested last."""

    key: str
    home: str
    nbytes: int
    transfer: Transfer | None = None


class ActivationBlocks:
    """The blocks of saved tensors in one store. Thread-safe.

    Each stored tensor gets a new block. After a block is unregistered, its tiers keep the buffers and files for blocks
    of the same size until they need the space.

    Attributes:
        has_warned: Whether a lack of space was already logged.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._lock = threading.Lock()
        # Finalizers only append to this deque. They can run in any thread, even one that holds this lock or the
        # store's.
        self._dead: deque[ActivationBlock] = deque()
        self._registered_bytes = self._num_names = 0

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
        size = rounded_bytes(nbytes)
        with self._lock:
            for waits in (False, True):
                self._collect_locked(store, waits=waits)
                if max_bytes is not None and self._registered_bytes + size > max_bytes:
                    continue
                key = f"activations/{self._num_names}"
                try:
                    home = shared_state(store).register(key, size, torch.uint8, homes, durable=False)
                except CapacityError:
                    continue
                self._num_names += 1
                self._registered_bytes += size
                return ActivationBlock(key, home, size)
        return None

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the blocks that a backward may still read."""
        with self._lock:
            return self._registered_bytes - sum(block.nbytes for block in list(self._dead))

    def release(self, block: ActivationBlock) -> None:
        """Release a block whose contents are no longer needed."""
        self._dead.append(block)

    def release_with(self, owner: object, block: ActivationBlock) -> None:
        """Release a block when ``owner`` is freed, which can happen in any thread."""
        weakref.finalize(owner, self._dead.append, block).atexit = False

    def collect(self, store: TieredStore, *, waits: bool = False) -> None:
        """Unregister released blocks. Do nothing if another thread is already doing so.

        Args:
            waits: Whether to wait for the other thread, and for blocks in transfer.
        """
        if self._dead and self._lock.acquire(blocking=waits):
            try:
                self._collect_locked(store, waits=waits)
            finally:
                self._lock.release()

    def _collect_locked(self, store: TieredStore, *, waits: bool) -> None:
        if store.is_closed:  # closing the store removed the blocks
            self._dead.clear()
            self._registered_bytes = 0
            return
        ended = []
        for _ in range(len(self._dead)):
            block = self._dead.popleft()
            if waits or block.transfer is None or block.transfer.done():
                ended.append(block)
            else:
                self._dead.append(block)  # unregistering the block now would wait for its transfer
        store.unregister(*(block.key for block in ended))  # unregistered blocks are not written back
        self._registered_bytes -= sum(block.nbytes for block in ended)


def rounded_bytes(nbytes: int) -> int:
    """Round ``nbytes`` up to one of eight sizes per power of two, so that blocks of similar size can share buffers."""
    step = max(PAGE_BYTES, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return round_up(max(nbytes, 1), step)


_BLOCKS: WeakKeyDictionary[TieredStore, ActivationBlocks] = WeakKeyDictionary()


@dataclass(slots=True, weakref_slot=True, eq=False)
class StoredElements:
    """Elements of a source storage that are stored in a block. The block is released when this object is freed.

    Attributes:
        number: Position in the order in which elements were stored.
        staging: Tier through which the elements were written.
        is_near: Whether the staging tier has a copy of the block, or a prefetch was requested.
        restored: Weak reference to memory restored from the block, and the stream that restored it.
    """

    source: SourceStorage
    elements: Elements
    block: ActivationBlock
    number: int
    device: torch.device
    staging: str
    is_near: bool
    restored: tuple[WeakStorage, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    """Tiers that saved tensors of one device use.

    Attributes:
        homes: Allowed home tiers of blocks, preferred first.
        staging: Addressable tiers, fastest first.
    """

    homes: tuple[str, ...]
    staging: tuple[str, ...]
    lookahead_bytes: int


class ActivationCache:
    """Writes and reads storage elements in blocks of one store. Thread-safe.

    The last ``lookahead_bytes`` stay in the staging tier, because the backward needs them first. Older elements move to
    their homes during the forward. Reading elements prefetches the elements that were stored before them.

    Attributes:
        write_wait_s: Seconds that writes waited for space.
        read_wait_s: Seconds that reads waited for transfers.
        written_bytes: Bytes copied to blocks.
        restored_bytes: Bytes read back.
    """

    def __init__(
        self, store: TieredStore, tier: str | None, max_bytes: int | None, lookahead_bytes: int | None
    ) -> None:
        if tier is not None:
            store.tier(tier)  # raises for an unknown name
        self._store, self._tier, self._max_bytes, self._lookahead_bytes = store, tier, max_bytes, lookahead_bytes
        self._names = tuple(store.stats().tiers)
        self.blocks = _BLOCKS.setdefault(store, ActivationBlocks())
        self._routes: dict[torch.device, _Route] = {}
        self._lock = threading.Lock()  # never held while waiting
        self._live: WeakValueDictionary[int, StoredElements] = WeakValueDictionary()
        self._staged: deque[tuple[int, ref[StoredElements]]] = deque()
        self._staged_bytes = self._num_stored = 0
        self.write_wait_s = self.read_wait_s = 0.0
        self.restored_bytes = self.written_bytes = 0

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
            self.write_wait_s += time.perf_counter() - started_s
            with lease:
                elements.read(storage, lease.tensor[: elements.nbytes])
        except (CapacityError, TimeoutError):
            self.blocks.release(block)
            return None
        except BaseException:
            self.blocks.release(block)
            raise
        self.written_bytes += elements.nbytes
        is_staged = lease.tier != block.home
        with self._lock:
            stored = StoredElements(source, elements, block, self._num_stored, device, lease.tier, is_staged)
            self._num_stored += 1
            self._live[stored.number] = stored
            leaving = self._note_staged(stored, route.lookahead_bytes) if is_staged else []
        self.blocks.release_with(stored, block)
        source.stored[elements] = stored
        for old in leaving:
            old.block.transfer = self._store.evict(old.block.key, old.staging)
        return stored

    def _note_staged(self, stored: StoredElements, lookahead_bytes: int) -> list[StoredElements]:
        """Add the newest elements, and return the oldest elements that no longer fit in the look-ahead."""
        self._staged.append((stored.block.nbytes, ref(stored)))
        self._staged_bytes += stored.block.nbytes
        leaving = []
        while self._staged_bytes > lookahead_bytes:
            nbytes, reference = self._staged.popleft()
            self._staged_bytes -= nbytes
            old = reference()
            if old is not None:
                old.is_near = False
                leaving.append(old)
        return leaving

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
            self.read_wait_s += waited_s
            self.restored_bytes += nbytes
        self.blocks.collect(self._store)
        return memory

    def _look_ahead(self, stored: StoredElements) -> None:
        """Prefetch a block and the blocks that the backward needs next, in reverse order of storing."""
        route = self._route(stored.device)
        num_fetches, ahead_bytes = 0, 0
        for number in range(stored.number, max(-1, stored.number - _MAX_STEPS_BACK), -1):
            other = stored if number == stored.number else self._live.get(number)
            if other is None or other.block.home in route.staging[:1] or other.device != stored.device:
                continue
            if other is not stored:
                ahead_bytes += other.block.nbytes
                if ahead_bytes > route.lookahead_bytes:
                    return
            if other.is_near or (other is not stored and other.source.memory() is not None):
                continue
            transfer = self._store.prefetch(other.block.key, route.staging[0])
            if not transfer.skipped:  # skipped if there is no space, or if the block is already in transfer
                other.is_near, other.block.transfer = True, transfer
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
        route = self._routes.get(device)
        if route is None:
            route = self._routes[device] = self._new_route(device)
        return route

    def _new_route(self, device: torch.device) -> _Route:
        places = [(name, self._store.tier(name).device) for name in self._names]
        own = [name for name, place in places if place is not None and _is_same(place, device)]
        addressable = [name for name, place in places if place is not None]
        first = self._names.index((own or addressable)[0])
        # A copy in the tensor's own tier frees no memory, so it is made only if the user chose this tier (``tier``).
        slower = self._names[first + 1 :] if own else self._names[first:]
        homes = slower[::-1] if self._tier is None else (self._tier,)
        staging = tuple(name for name in self._names[first:] if name in addressable)
        lookahead_bytes = self._lookahead_bytes
        if lookahead_bytes is None:
            lookahead_bytes = min(GiB, self._store.tier(staging[0]).capacity_bytes // 4)
        return _Route(homes, staging, lookahead_bytes)


def _is_same(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and (place.index is None or place.index == device.index)


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
