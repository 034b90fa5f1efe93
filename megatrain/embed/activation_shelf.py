"""Saved memory on its way: into a block of the store in the forward, back ahead of the backward."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.embed.activation_blocks import ActivationBlock, pool_of
from tiered.errors import CapacityError
from tiered.units import GiB

if TYPE_CHECKING:
    from megatrain.embed.spans import Place, Span
    from tiered.lease import Lease
    from tiered.schedule import Mode
    from tiered.store import TieredStore

__all__ = ["Original", "Shelf", "StoredSpan", "WeakStorage", "witness_of"]

#: A tensor for which no room comes free in the fast tier for so long stays where it is.
_MAX_WAIT_S = 60.0
#: How far the look-ahead goes back in the order of the forward, and how many fetches it asks for at a time.
_MAX_STEPS_BACK = 64
_MAX_FETCHES = 16


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def witness_of(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose ``_version`` is that of ``tensor``, now and after it is gone."""
    witness = tensor.detach()
    witness.data = _nothing(tensor.dtype, tensor.device)
    return witness


class WeakStorage:
    """A weak reference to a storage. While it lives, no other storage gets the same address."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.UntypedStorage | None:
        """Return the storage, or None where nobody has it any more."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


class Original:
    """A storage, in one state of its contents, parts of which were saved for a backward. Keeps no memory.

    While it lives, the address of the storage means this storage.

    Attributes:
        spans: what is stored of it, weakly.
        kept: something that keeps the storage itself, weakly, or None.
    """

    __slots__ = ("__weakref__", "_nbytes", "_reference", "_version", "_witness", "kept", "spans")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._reference = WeakStorage(storage)
        self._nbytes = storage.nbytes()
        self._witness, self._version = witness_of(tensor), tensor._version
        self.spans: list[ref[StoredSpan]] = []
        self.kept: ref[Any] | None = None

    def is_still(self, version: int) -> bool:
        """Return whether contents are those that a tensor of this storage with that version has."""
        return self._witness._version == self._version == version

    def memory(self) -> torch.UntypedStorage | None:
        """Return the storage where somebody else still has it, with the contents that it had."""
        if self._witness._version != self._version:
            return None
        storage = self._reference()
        return storage if storage is not None and storage.nbytes() == self._nbytes else None

    def find(self, place: Place) -> StoredSpan | None:
        """Return what is stored of it and serves a tensor."""
        found = [(reference, stored) for reference in self.spans if (stored := reference()) is not None]
        self.spans = [reference for reference, _ in found]
        return next((stored for _, stored in found if stored.span.serves(place)), None)


@dataclass(slots=True, weakref_slot=True, eq=False)
class StoredSpan:
    """A part of an original in a block, as long as somebody holds this.

    Attributes:
        number: order of being stored.
        device: where it came from.
        desk: tier through which it came.
        is_near: it is there still.
        is_asked: it was asked to come back.
        restored: memory that was made of it, if anybody still has it, and the stream on which it was made.
    """

    original: Original
    span: Span
    block: ActivationBlock
    number: int
    device: torch.device
    desk: str
    is_near: bool
    is_asked: bool = False
    restored: tuple[WeakStorage, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    """How memory of one device travels: homes, most wanted first, and addressable tiers, fastest first."""

    homes: tuple[str, ...]
    desks: tuple[str, ...]
    lookahead_bytes: int


class Shelf:
    """Writes parts of storages to blocks of one store, and makes memory of them again. Thread-safe.

    The last ``lookahead_bytes`` that were written stay in the fast tier as well, since the backward begins with
    them; what is older goes on to its home while the forward goes on. When one is read, those before it are fetched.

    Attributes:
        write_wait_s: seconds in calls that waited for room to write to.
        read_wait_s: seconds in calls that waited for bytes.
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
        self._near: deque[tuple[int, ref[StoredSpan]]] = deque()
        self._near_bytes = 0
        self._num_stored = 0
        self.write_wait_s = self.read_wait_s = 0.0
        self.restored_bytes = self.written_bytes = 0

    # -- writing -----------------------------------------------------------------------------------------------

    def write(self, original: Original, span: Span, storage: torch.UntypedStorage) -> StoredSpan | None:
        """Copy a part of a storage into a block; None where no tier has room for it.

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
        return self._remember(original, span, block, lease.tier, device)

    def _remember(
        self, original: Original, span: Span, block: ActivationBlock, desk: str, device: torch.device
    ) -> StoredSpan:
        is_near = desk != block.home
        with self._lock:
            stored = StoredSpan(original, span, block, self._num_stored, device, desk, is_near)
            self._num_stored += 1
            self._live[stored.number] = stored
            leaving = self._note_near(stored) if is_near else []
        self._pool.release_with(stored, block)
        original.spans.append(ref(stored))
        for old in leaving:
            old.block.transfer = self._store.evict(old.block.key, old.desk)
        return stored

    def _note_near(self, stored: StoredSpan) -> list[StoredSpan]:
        """Return those that are no longer among the last ones."""
        self._near.append((stored.block.nbytes, ref(stored)))
        self._near_bytes += stored.block.nbytes
        leaving = []
        while self._near_bytes > self._route(stored.device).lookahead_bytes:
            nbytes, reference = self._near.popleft()
            self._near_bytes -= nbytes
            old = reference()
            if old is not None:
                old.is_near = False
                leaving.append(old)
        return leaving

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, stored: StoredSpan) -> torch.UntypedStorage:
        """Return memory with the contents of a part of a storage; the same one as long as anybody has it.

        Raises:
            CapacityError: the tiers on its way are full of what this thread holds.
            TransferError: it could not be brought back.
            CorruptBlockError: the drive gave other bytes than were written.
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
        """Ask for a block, and for those that the backward wants next: in reverse order of the forward."""
        route = self._route(stored.device)
        num_fetches, ahead_bytes = 0, 0
        for number in range(stored.number, max(-1, stored.number - _MAX_STEPS_BACK), -1):
            other = stored if number == stored.number else self._live.get(number)
            if other is None or other.block.home in route.desks[:1] or other.device != stored.device:
                continue
            if other is not stored:
                ahead_bytes += other.block.nbytes
                if ahead_bytes > route.lookahead_bytes:
                    return
            if other.is_near or other.is_asked or (other is not stored and other.original.memory() is not None):
                continue
            transfer = self._store.prefetch(other.block.key, route.desks[0])
            if not transfer.skipped:  # else there is no room, it is still leaving, or it came half the way
                other.is_asked, other.block.transfer = True, transfer
            num_fetches += 1
            if num_fetches >= _MAX_FETCHES:
                return

    # -- ways --------------------------------------------------------------------------------------------------

    def _acquire(self, block: ActivationBlock, route: _Route, mode: Mode) -> Lease:
        """Lease a block in the fastest tier on its way that has room for it."""
        home = self._names.index(block.home)
        desks = [desk for desk in route.desks if self._names.index(desk) <= home] or [block.home]
        for desk in desks[:-1]:
            try:
                return self._store.acquire(block.key, desk, mode, timeout_s=_MAX_WAIT_S)
            except (CapacityError, TimeoutError):
                continue
        return self._store.acquire(block.key, desks[-1], mode, timeout_s=_MAX_WAIT_S if mode == "w" else None)

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
        # A copy in the tier that the tensor comes from frees nothing: only on request.
        slower = self._names[first + 1 :] if own else self._names[first:]
        homes: Sequence[str] = slower[::-1] if self._tier is None else (self._tier,)
        desks = tuple(name for name in self._names[first:] if name in addressable)
        lookahead_bytes = self._lookahead_bytes
        if lookahead_bytes is None:
            lookahead_bytes = min(GiB, self._store.tier(desks[0]).capacity_bytes // 4)
        return _Route(tuple(homes), desks, lookahead_bytes)


def _is_same(place: torch.device, device: torch.device) -> bool:
    return place.type == device.type and (place.index is None or place.index == device.index)


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
