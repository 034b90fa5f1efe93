"""``offload_activations``: what autograd saves for the backward waits in a store instead of memory.

The engine stores the inputs of its layers alone, whose shapes its program knows (``StoreAccess.put_activation``). Here
any tensor comes, several may be views of one storage, and the memory of each is still the user's: so blocks are pooled
by size, and storages are followed by their version and by weak references.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.embed.stores import shared_state
from megatrain.embed.weights import Delegated, KeptInMemory, OuterHooks, SavedTensor, Versioned, outer_hooks, unpack
from megatrain.engine.graph_keeping import version_probe
from tiered import TieredStore, Transfer
from tiered.errors import CapacityError
from tiered.units import PAGE_BYTES, GiB, MiB, format_size, round_up

if TYPE_CHECKING:
    from tiered import Lease, Mode


#: Restored memory begins where it lay in the storage, modulo this: some kernels round by the alignment of an address.
_ALIGNMENT_BYTES = 512
#: A span is stored whole if at least one in so many of its bytes belongs to the tensor, else only those that do.
_DENSE_SHARE = 2
#: A tensor is read from a larger span that is stored already if that is at most so many times its own size.
_SHARED_SHARE = 4
#: Elements are copied as numbers of the same size, so that no bit of them means anything.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def can_be_placed(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided view of its storage; False for subclasses and other layouts."""
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
class Place:
    """Where a tensor lies in its storage, and how it is read there.

    Attributes:
        shape: the tensor's.
        stride: the tensor's, in elements.
        dtype: the tensor's.
        is_conj: its lazy conjugation.
        is_neg: its lazy negation.
        start: first byte of the storage that it needs.
        stop: one past the last byte that it needs.
        own_bytes: size of its distinct elements: an expanded one counts once.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    start: int
    stop: int
    own_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return the place of a tensor for which ``can_be_placed``."""
        size = tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        start = int(tensor.storage_offset()) * size
        steps = [(int(count), int(step)) for count, step in zip(shape, stride, strict=True)]
        stop, own_bytes = start, 0
        if tensor.numel():
            stop = start + (sum((count - 1) * step for count, step in steps) + 1) * size
            num_own = math.prod(count for count, step in steps if step)
            own_bytes = min(num_own * size, stop - start)  # windows that overlap show an element more than once
        return cls(shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(), start, stop, own_bytes)

    def view(self, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
        """Return the tensor as a view of memory whose byte 0 is byte ``first_byte`` of the source storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = empty.set_(storage, (self.start - first_byte) // self.dtype.itemsize, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


@dataclass(frozen=True, slots=True)
class StorageRange:
    """The part of a storage that is stored as one block, for one tensor or for several.

    Attributes:
        start: first byte of the source storage that restored memory stands for.
        stop: one past the last such byte.
        nbytes: size of the contents: all bytes from ``start`` to ``stop``, or with ``grid`` its elements alone.
        grid: (bytes per element, first byte, counts, strides in elements) of those, largest stride first.
    """

    start: int
    stop: int
    nbytes: int
    grid: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None

    @classmethod
    def around(cls, place: Place, storage_bytes: int) -> StorageRange:
        """Return what to store for a tensor: what it needs, or a little more where others will need the rest."""
        start = place.start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if place.own_bytes * _DENSE_SHARE < place.stop - place.start:
            return cls(start, place.stop, place.own_bytes, _grid_of(place))
        if (place.stop - place.start) * 8 >= storage_bytes * 7:  # such as x[:, :-1]: then x is there as well
            return cls(0, storage_bytes, storage_bytes, None)
        return cls(start, place.stop, place.stop - start, None)

    def serves(self, place: Place) -> bool:
        """Return whether a tensor is better read from this span than stored by itself."""
        if self.grid is not None:
            return place.own_bytes == self.nbytes and self.grid == _grid_of(place)
        is_inside = self.start <= place.start and place.stop <= self.stop
        return is_inside and place.own_bytes * _SHARED_SHARE >= self.nbytes

    def read(self, storage: torch.UntypedStorage, into: Tensor) -> None:
        """Copy the contents out of the source storage, to ``nbytes`` bytes: contiguous, 1-D, uint8, any device."""
        self._copy(into, storage, 0, outward=True)

    def restore(self, contents: Tensor, device: torch.device) -> torch.UntypedStorage:
        """Return new memory on ``device`` with the contents where they were; the rest of it is undefined."""
        memory = torch.empty(self.stop - self.start, dtype=torch.uint8, device=device).untyped_storage()
        self._copy(contents, memory, self.start, outward=False)
        return memory

    def _copy(self, contents: Tensor, storage: torch.UntypedStorage, first_byte: int, *, outward: bool) -> None:
        if self.grid is None:
            inside = bytes_of(storage)[self.start - first_byte : self.stop - first_byte]
        else:
            size, start, counts, strides = self.grid
            empty = torch.empty(0, dtype=_WORDS[size], device=storage.device)
            inside = empty.set_(storage, (start - first_byte) // size, counts, strides)
            contents = contents.view(_WORDS[size]).view(counts)
        source, target = (inside, contents) if outward else (contents, inside)
        target.copy_(source)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a 1-D uint8 tensor, no copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _grid_of(place: Place) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    steps = sorted(
        ((step, count) for count, step in zip(place.shape, place.stride, strict=True) if step and count > 1),
        reverse=True,
    )
    counts, strides = tuple(count for _, count in steps), tuple(step for step, _ in steps)
    return place.dtype.itemsize, place.start, counts, strides


#: A block that was not used for so many rounds is unregistered.
_IDLE_ROUNDS = 8
#: Where there is no room for a new block, a kept one serves that is at most so many times too large.
_MAX_WASTE = 2


@dataclass(slots=True, eq=False)
class ActivationBlock:
    """A registered block of bytes.

    Attributes:
        key: the block's name.
        transfer: last movement that was requested.
        last_round: in which it was taken last.
    """

    key: str
    home: str
    nbytes: int
    transfer: Transfer | None = None
    last_round: int = 0

    @property
    def is_quiet(self) -> bool:
        """Whether the last movement that was requested is over."""
        return self.transfer is None or self.transfer.done()


class BlockPool:
    """The blocks that activations use in one store. Thread-safe.

    A round ends with a forward, or when no block is in use any more.

    Attributes:
        registered_bytes: size of all blocks, used or kept.
        num_registered: how many there are.
        has_warned: the lack of room was logged.
    """

    def __init__(self) -> None:
        self.registered_bytes = 0
        self.num_registered = 0
        self._lock = threading.Lock()
        # Finalizers run in any thread, also in one that holds the store's lock or this one: they only append.
        self._dead: deque[ActivationBlock] = deque()
        self._moving: list[ActivationBlock] = []  # dead, with a movement under way
        self._kept: dict[int, list[ActivationBlock]] = {}  # by size
        self._num_names = 0
        self._round = 0
        self.has_warned = False

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
                # Still moving: the lease for writing waits for the movement.
                or _take_best(self._moving, homes, size)
                or next((found for other in larger if (found := _take_best(self._kept[other], homes))), None)
            )
            if block is not None:
                block.last_round = self._round
            return block

    @property
    def in_use_bytes(self) -> int:
        """Bytes of blocks whose contents may still be read, as of the last ``collect``."""
        with self._lock:
            return self.registered_bytes - sum(block.nbytes for block in (*self._all_kept(), *self._moving))

    def release_with(self, owner: object, block: ActivationBlock) -> None:
        """Take a block back when ``owner`` is freed, in whatever thread."""
        weakref.finalize(owner, self._dead.append, block).atexit = False

    def release(self, block: ActivationBlock) -> None:
        """Take a block back; its contents are dead."""
        self._dead.append(block)

    def collect(self, store: TieredStore) -> None:
        """Discard dead contents, unless another thread is doing so."""
        if self._dead and self._lock.acquire(blocking=False):
            try:
                self._collect_locked(store)
            finally:
                self._lock.release()

    def end_round(self, store: TieredStore) -> None:
        """End a round; unregister blocks that were idle for long."""
        with self._lock:
            self._collect_locked(store)
            self._round += 1
            idle = [block for block in self._all_kept() if self._round - block.last_round > _IDLE_ROUNDS]
            self._unregister_locked(store, idle)

    def trim(self, store: TieredStore) -> None:
        """Unregister every block without live contents. Waits for their movements."""
        with self._lock:
            self._collect_locked(store)
            for block in self._moving:
                self._keep_locked(block)
            self._moving = []
            self._unregister_locked(store, self._all_kept())

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
                store.discard(block.key)  # dead contents are never written back
                block.transfer = None
                self._keep_locked(block)
            else:
                self._moving.append(block)  # discarding it now would wait
        if len(dead) > num_before and len(self._all_kept()) + len(self._moving) == self.num_registered:
            self._round += 1

    def _new_locked(
        self, store: TieredStore, size: int, homes: Sequence[str], max_bytes: int | None
    ) -> ActivationBlock | None:
        if not homes or (max_bytes is not None and self.registered_bytes + size > max_bytes):
            return None
        key = f"activations/{self._num_names}"
        try:
            home = shared_state(store).register(key, size, torch.uint8, homes, durable=False)
        except CapacityError:
            return None
        self._num_names += 1
        self.num_registered += 1
        self.registered_bytes += size
        return ActivationBlock(key, home, size)

    def _unregister_locked(self, store: TieredStore, blocks: Sequence[ActivationBlock]) -> None:
        for block in blocks:
            self._kept[block.nbytes].remove(block)
            self.num_registered -= 1
            self.registered_bytes -= block.nbytes
            store.unregister(block.key)


def _take_best(blocks: list[ActivationBlock], homes: Sequence[str], nbytes: int = 0) -> ActivationBlock | None:
    """Take a block out of a list: of the most wanted home the last one, whose memory is the warmest."""
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
    """Return the pool of a store, made at the first call."""
    return _POOLS.setdefault(store, BlockPool())


#: A tensor stays in memory when no room comes free in the staging tier for so long.
_MAX_WAIT_S = 60.0
#: How far the look-ahead goes back in the order of the forward, and how many fetches it requests at a time.
_MAX_STEPS_BACK = 64
_MAX_FETCHES = 16


class WeakStorage:
    """A weak reference to a storage. While it lives, no other storage gets the same address."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.UntypedStorage | None:
        """Return the storage, or None when it was freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


class SourceStorage:
    """A storage at one version, parts of which were saved for a backward. Keeps no memory.

    While it lives, no other storage gets the same address.

    Attributes:
        spans: parts that are stored, weakly.
        kept: a saved tensor that keeps the storage in memory, weakly; None: there is none.
    """

    __slots__ = ("__weakref__", "_nbytes", "_probe", "_reference", "_version", "kept", "spans")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._reference = WeakStorage(storage)
        self._nbytes = storage.nbytes()
        self._probe, self._version = version_probe(tensor), tensor._version
        self.spans: list[ref[StoredSpan]] = []
        self.kept: ref[Any] | None = None

    def is_still(self, version: int) -> bool:
        """Return whether a tensor of this storage at that version has these contents."""
        return self._probe._version == self._version == version

    def memory(self) -> torch.UntypedStorage | None:
        """Return the storage while it is alive elsewhere with unchanged contents, else None."""
        if self._probe._version != self._version:
            return None
        storage = self._reference()
        return storage if storage is not None and storage.nbytes() == self._nbytes else None

    def find(self, place: Place) -> StoredSpan | None:
        """Return a stored part that serves a tensor."""
        found = [(reference, stored) for reference in self.spans if (stored := reference()) is not None]
        self.spans = [reference for reference, _ in found]
        return next((stored for _, stored in found if stored.span.serves(place)), None)


@dataclass(slots=True, weakref_slot=True, eq=False)
class StoredSpan:
    """A part of a source storage in a block, which is released with this object.

    Attributes:
        number: in the order of storing.
        staging: tier that it was written through.
        is_requested: its prefetch was requested.
        restored: memory that was made of it, weakly, and the stream on which it was made.
    """

    source: SourceStorage
    span: StorageRange
    block: ActivationBlock
    number: int
    device: torch.device
    staging: str
    is_staged: bool
    is_requested: bool = False
    restored: tuple[WeakStorage, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    """Tiers for memory of one device. ``homes``: most wanted first. ``staging``: addressable tiers, fastest first."""

    homes: tuple[str, ...]
    staging: tuple[str, ...]
    lookahead_bytes: int


class ActivationCache:
    """Writes parts of storages to blocks of one store, and restores them. Thread-safe.

    The last ``lookahead_bytes`` stay in the staging tier, since the backward begins with them; older ones move to their
    homes while the forward goes on. Reading one prefetches those before it.

    Attributes:
        write_wait_s: seconds that writing waited for room.
        read_wait_s: seconds that reading waited for bytes.
        written_bytes: copied to blocks.
        restored_bytes: read back.
    """

    def __init__(
        self, store: TieredStore, tier: str | None, max_bytes: int | None, lookahead_bytes: int | None
    ) -> None:
        if tier is not None:
            store.tier(tier)  # raises for a name that is not there
        self._store, self._tier, self._max_bytes, self._lookahead_bytes = store, tier, max_bytes, lookahead_bytes
        self._names = tuple(store.stats().tiers)
        self._pool = pool_of(store)
        self._routes: dict[torch.device, _Route] = {}
        self._lock = threading.Lock()  # never held while anything waits
        self._live: WeakValueDictionary[int, StoredSpan] = WeakValueDictionary()
        self._staged: deque[tuple[int, ref[StoredSpan]]] = deque()
        self._staged_bytes = 0
        self._num_stored = 0
        self.write_wait_s = self.read_wait_s = 0.0
        self.restored_bytes = self.written_bytes = 0

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, source: SourceStorage, span: StorageRange, storage: torch.UntypedStorage) -> StoredSpan | None:
        """Copy a part of a storage into a block; None if no tier has room for it.

        Raises:
            TransferError: a drive refused what it had promised, or an earlier write-back failed.
        """
        device = storage.device
        route = self._route(device)
        started_s = time.perf_counter()
        block = self._pool.take(self._store, span.nbytes, route.homes, self._max_bytes)
        if block is None:
            return None
        try:
            lease = self._acquire(block, route, "w")
            self.write_wait_s += time.perf_counter() - started_s
            with lease:
                span.read(storage, lease.tensor[: span.nbytes])
        except (CapacityError, TimeoutError):
            self._pool.release(block)
            return None
        except BaseException:
            self._pool.release(block)
            raise
        self.written_bytes += span.nbytes
        return self._remember(source, span, block, lease.tier, device)

    def _remember(
        self, source: SourceStorage, span: StorageRange, block: ActivationBlock, staging: str, device: torch.device
    ) -> StoredSpan:
        is_staged = staging != block.home
        with self._lock:
            stored = StoredSpan(source, span, block, self._num_stored, device, staging, is_staged)
            self._num_stored += 1
            self._live[stored.number] = stored
            leaving = self._note_staged(stored) if is_staged else []
        self._pool.release_with(stored, block)
        source.spans.append(ref(stored))
        for old in leaving:
            old.block.transfer = self._store.evict(old.block.key, old.staging)
        return stored

    def _note_staged(self, stored: StoredSpan) -> list[StoredSpan]:
        """Add the newest one; return the oldest, which no longer fit into ``lookahead_bytes``."""
        self._staged.append((stored.block.nbytes, ref(stored)))
        self._staged_bytes += stored.block.nbytes
        leaving = []
        while self._staged_bytes > self._route(stored.device).lookahead_bytes:
            nbytes, reference = self._staged.popleft()
            self._staged_bytes -= nbytes
            old = reference()
            if old is not None:
                old.is_staged = False
                leaving.append(old)
        return leaving

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, stored: StoredSpan) -> torch.UntypedStorage:
        """Return memory with the contents of a part of a storage, shared by all readers while it lives.

        Raises:
            CapacityError: the staging tiers are full of what this thread holds.
            TransferError: it could not be read back.
            CorruptBlockError: the drive returned other bytes than were written.
        """
        stream = _current_stream(stored.device)
        with self._lock:
            if stored.restored is not None and stored.restored[1] == stream:
                memory = stored.restored[0]()
                if memory is not None:
                    return memory
        started_s = time.perf_counter()
        self._look_ahead(stored)
        with self._acquire(stored.block, self._route(stored.device), "r") as lease:
            waited_s = time.perf_counter() - started_s
            memory = stored.span.restore(lease.tensor[: stored.span.nbytes], stored.device)
        with self._lock:
            stored.restored = WeakStorage(memory), stream
            self.read_wait_s += waited_s
            self.restored_bytes += stored.span.nbytes
        self._pool.collect(self._store)
        return memory

    def _look_ahead(self, stored: StoredSpan) -> None:
        """Prefetch a block and those that the backward needs next: in reverse order of the forward."""
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
            if other.is_staged or other.is_requested or (other is not stored and other.source.memory() is not None):
                continue
            transfer = self._store.prefetch(other.block.key, route.staging[0])
            if not transfer.skipped:  # skipped: no room, still on its way out, or only half the way in
                other.is_requested, other.block.transfer = True, transfer
            num_fetches += 1
            if num_fetches >= _MAX_FETCHES:
                return

    # -- routes --------------------------------------------------------------------------------------------------

    def _acquire(self, block: ActivationBlock, route: _Route, mode: Mode) -> Lease:
        """Lease a block in the fastest of its staging tiers that has room for it."""
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
        # A copy in the tensor's own tier frees nothing: only where ``tier`` names it.
        slower = self._names[first + 1 :] if own else self._names[first:]
        homes: Sequence[str] = slower[::-1] if self._tier is None else (self._tier,)
        staging = tuple(name for name in self._names[first:] if name in addressable)
        lookahead_bytes = self._lookahead_bytes
        if lookahead_bytes is None:
            lookahead_bytes = min(GiB, self._store.tier(staging[0]).capacity_bytes // 4)
        return _Route(tuple(homes), staging, lookahead_bytes)


def _is_same(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and (place.index is None or place.index == device.index)


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


#: Nodes of the graph that give the same values in another shape or dtype.
_SAME_VALUES = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze"),
    *("T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
}
_MAX_NODES = 8


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """Figures of one ``offload_activations``, since it was made.

    Attributes:
        offloaded_bytes: written to blocks.
        restored_bytes: read back; what was still in memory elsewhere is used from there and not counted.
        deduplicated_bytes: size of saved tensors whose bytes were in a block already.
        no_room_bytes: size of storages that stayed in memory since no tier had room.
        small_bytes: size of saved tensors below ``min_bytes``.
        pack_wait_s: seconds that the forward waited for the store.
        unpack_wait_s: seconds that the backward waited for the store.
        registered_bytes: size of blocks for activations in this store now, in use or kept for the next step.
        num_registered: how many such blocks there are.
        in_use_bytes: size of those blocks that a graph needs now.
    """

    offloaded_bytes: int
    restored_bytes: int
    deduplicated_bytes: int
    no_room_bytes: int
    small_bytes: int
    pack_wait_s: float
    unpack_wait_s: float
    registered_bytes: int
    num_registered: int
    in_use_bytes: int


class offload_activations:
    """Context manager: tensors that autograd saves inside it wait in the store until the backward needs them.

    ::

        with megatrain.offload_activations(store, model=model):
            loss = model(**batch).loss
        loss.backward()

    Results do not change by a bit. Enter it around the forward; it can be entered again and again, nested, and by
    several threads, and a new one for every step is as good: the blocks belong to the store and are used again.
    Tensors on a device wait in RAM or on a drive, tensors in memory on a drive; what finds no room there stays, and
    is counted. Every tier keeps to its capacity; memory that the backward works with comes on top, as always. On a CPU
    set ``MALLOC_MMAP_THRESHOLD_=1048576`` for the process: else glibc keeps much of what is freed in its heap.

    Saved views of one storage share one block while the storage is not modified in place, and share memory again when
    they are restored. As in plain PyTorch the backward raises ``RuntimeError`` for a tensor that was modified in place
    after it was saved. Changes that autograd does not see (through ``.data``, or by a custom kernel) are not detected:
    keep the tensors of a storage that is saved before and after such a change, with ``keep``.

    Weights stay: parameters, their views, and copies of them in another dtype or shape. Without ``model`` also leaves
    that require gradients; with it, its buffers. Saved-tensor hooks around this context get what it does not take;
    inside ``torch.utils.checkpoint`` only the inputs of a segment are saved, and those it takes. Tensor subclasses and
    layouts other than strided stay.

    Args:
        store: not closed before the last backward.
        tier: home of the blocks; None: the slowest tier with room, but not that of the tensor itself.
        model: module, or several, whose parameters and buffers stay where they are.
        min_bytes: smaller tensors stay: moving them costs more time than it saves memory.
        max_bytes: most bytes of blocks for activations in this store; None: as much as there is room.
        lookahead_bytes: how much of the staging tier may hold what was saved last and what the backward needs next;
            None: a quarter of its capacity, at most 1 GiB.
        keep: called with a tensor that is about to be saved; True leaves it in memory. Must not keep the tensor.

    Raises:
        ValueError: the store has no such tier.
        TransferError: in the forward or backward: a drive failed.
        CapacityError: in the backward: the fast tier is too small to bring back a single tensor.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        tier: str | None = None,
        model: nn.Module | Iterable[nn.Module] | None = None,
        min_bytes: int = MiB,
        max_bytes: int | None = None,
        lookahead_bytes: int | None = None,
        keep: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._store = store
        self._cache = ActivationCache(store, tier, max_bytes, lookahead_bytes)
        self._modules = None if model is None else [model] if isinstance(model, nn.Module) else list(model)
        self._min_bytes = min_bytes
        self._keep = keep
        self._module_storages: dict[int, WeakStorage] = {}
        self._entered = threading.local()
        # One thread packs at a time. Unpacking never takes this lock: it may hold the room that packing waits for.
        self._packing = threading.RLock()
        self._sources: WeakValueDictionary[int, SourceStorage] = WeakValueDictionary()
        self._deduplicated_bytes = self._no_room_bytes = self._small_bytes = 0

    def __enter__(self) -> offload_activations:
        self._module_storages = _storages_of(self._modules or [])
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, outer_hooks()), unpack)
        hooks.__enter__()
        self._stack().append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack().pop().__exit__()
        pool_of(self._store).end_round(self._store)

    def stats(self) -> ActivationStats:
        """Return the figures so far."""
        pool = pool_of(self._store)
        pool.collect(self._store)
        return ActivationStats(
            offloaded_bytes=self._cache.written_bytes,
            restored_bytes=self._cache.restored_bytes,
            deduplicated_bytes=self._deduplicated_bytes,
            no_room_bytes=self._no_room_bytes,
            small_bytes=self._small_bytes,
            pack_wait_s=self._cache.write_wait_s,
            unpack_wait_s=self._cache.read_wait_s,
            registered_bytes=pool.registered_bytes,
            num_registered=pool.num_registered,
            in_use_bytes=pool.in_use_bytes,
        )

    def close(self) -> None:
        """Unregister the store's blocks for activations that no graph needs. The context can be used again."""
        pool_of(self._store).trim(self._store)

    def _stack(self) -> list[torch.autograd.graph.saved_tensors_hooks]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[torch.autograd.graph.saved_tensors_hooks] = self._entered.stack
        return stack

    # -- packing -----------------------------------------------------------------------------------------------

    def _pack(self, outer: OuterHooks | None, tensor: Tensor) -> SavedTensor:
        packed: SavedTensor | None = None
        if can_be_placed(tensor) and tensor.numel() and not self._stays(tensor):
            with self._packing:
                packed = self._move(tensor, may_keep=outer is None)
        if packed is not None:
            return packed
        return _KeptWithSource(tensor) if outer is None else Delegated(outer, tensor)

    def _stays(self, tensor: Tensor) -> bool:
        base = tensor._base
        if isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter):
            return True
        if self._modules is None:
            source = tensor if base is None else base
            if source.is_leaf and source.requires_grad:
                return True
        elif tensor.untyped_storage()._cdata in self._module_storages:
            return True
        return _is_copy_of_weight(tensor) or (self._keep is not None and self._keep(tensor))

    def _move(self, tensor: Tensor, *, may_keep: bool) -> SavedTensor | None:
        """Return what stands for the tensor without its memory; None: the tensor stays."""
        place, storage = Place.of(tensor), tensor.untyped_storage()
        is_small = place.own_bytes < self._min_bytes
        if is_small:
            self._small_bytes += place.own_bytes
            if storage.nbytes() < self._min_bytes:
                return None
        source = self._sources.get(storage._cdata)
        if source is None or not source.is_still(tensor._version):
            source = self._sources[storage._cdata] = SourceStorage(tensor, storage)
        if source.kept is not None and source.kept() is not None:
            return None  # its memory stays anyway
        if is_small:
            return _Copied(tensor, place, storage)  # it must not keep all the storage
        stored = source.find(place)
        if stored is not None:
            self._deduplicated_bytes += place.own_bytes
        else:
            span = StorageRange.around(place, storage.nbytes())
            stored = self._cache.write(source, span, storage)
        if stored is not None:
            return _Stored(tensor, place, stored, self._cache)
        self._note_no_room(storage.nbytes())
        if not may_keep:
            return None
        kept = _KeptWithSource(tensor, source)
        source.kept = ref(kept)
        return kept

    def _note_no_room(self, nbytes: int) -> None:
        pool = pool_of(self._store)
        if not pool.has_warned:
            pool.has_warned = True
            logging.getLogger(__name__).warning(
                "No tier of the store has room for %s of activations: they stay in memory. Give a slower tier more "
                "room; stats().no_room_bytes of offload_activations says how much it is",
                format_size(nbytes),
            )
        self._no_room_bytes += nbytes


# -- what the graph holds -----------------------------------------------------------------------------------------


class _Offloaded(Versioned):
    """A tensor whose memory is elsewhere; its probe has no shape."""

    __slots__ = ("_place",)
    saved_inside = "offload_activations"

    def __init__(self, tensor: Tensor, place: Place) -> None:
        super().__init__(tensor, version_probe(tensor))
        self._place = place

    def _describe(self) -> str:
        return f"[{self._probe.type()} {list(self._place.shape)}]"


class _KeptWithSource(KeptInMemory):
    """A tensor that stays in memory, with the source storage that it keeps."""

    __slots__ = ("__weakref__", "_source")
    saved_inside = "offload_activations"

    def __init__(self, tensor: Tensor, source: SourceStorage | None = None) -> None:
        super().__init__(tensor)
        self._source = source


class _Copied(_Offloaded):
    """A small part of a large storage, copied so that it does not keep the whole."""

    __slots__ = ("_memory", "_start")

    def __init__(self, tensor: Tensor, place: Place, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor, place)
        span = StorageRange.around(place, place.stop)
        contents = torch.empty(span.nbytes, dtype=torch.uint8, device=storage.device)
        span.read(storage, contents)
        self._start, self._memory = span.start, span.restore(contents, storage.device)

    def unpack(self) -> Tensor:
        self.check_version()
        return self._place.view(self._memory, self._start)


class _Stored(_Offloaded):
    """A tensor whose bytes are in a block."""

    __slots__ = ("_cache", "_stored")

    def __init__(self, tensor: Tensor, place: Place, stored: StoredSpan, cache: ActivationCache) -> None:
        super().__init__(tensor, place)
        self._stored, self._cache = stored, cache

    def unpack(self) -> Tensor:
        self.check_version()
        memory = self._stored.source.memory()
        if memory is not None:
            return self._place.view(memory)
        return self._place.view(self._cache.read(self._stored), self._stored.span.start)


# -- what is a weight ---------------------------------------------------------------------------------------------


def _storages_of(modules: Iterable[nn.Module]) -> dict[int, WeakStorage]:
    """Return the storages of parameters and buffers by address; the references keep an address from being reused."""
    found = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if can_be_placed(tensor):
                storage = tensor.untyped_storage()
                found[storage._cdata] = WeakStorage(storage)
    return found


def _is_copy_of_weight(tensor: Tensor) -> bool:
    """Return whether the numbers are those of a parameter, such as what autocast makes of one."""
    node = tensor.grad_fn
    for _ in range(_MAX_NODES):
        if node is None:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return isinstance(variable, nn.Parameter) and tensor.numel() <= variable.numel()
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SAME_VALUES:
            return False
        node = node.next_functions[0][0]
    return False
