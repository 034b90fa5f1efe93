"""Home tiers of blocks, and other state that the offloaded modules, optimizers and activations of a store share.

The engine knows its program, so its placement minimizes traffic (``megatrain.plan.placement``). Other trainers add
modules and optimizers one at a time, and their program is unknown, so each block goes to the first tier with space.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from tiered import TieredStore
from tiered.errors import CapacityError
from tiered.units import format_size


def compute_tier(store: TieredStore) -> str:
    """Return the tier in which modules compute, which is the fastest tier."""
    return next(iter(store.stats().tiers))


def compute_device(store: TieredStore) -> torch.device:
    """Return the device of the tier in which modules compute."""
    device = store.tier(compute_tier(store)).device
    assert device is not None, "the fastest tier of a store is addressable"
    return device


def mapped_copy(tensor: Tensor, store: TieredStore) -> Tensor:
    """Return a CPU copy of a tensor in an unlinked memory-mapped file. The file is freed with the copy.

    The file is created in the store's folder if the store has one, else in the system's temporary folder.

    Raises:
        OSError: The drive has no space.
    """
    if not tensor.numel():
        return tensor.cpu().clone()
    folder = store.path if store.path is not None and os.path.isdir(store.path) else None
    descriptor, path = tempfile.mkstemp(prefix=".state-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, tensor.numel() * tensor.element_size())  # else a full drive raises SIGBUS
        copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return copy.copy_(tensor)


@dataclass(frozen=True, slots=True)
class HomeRequest:
    """A block that needs a home. ``homes`` lists the allowed tiers, preferred first."""

    key: str
    nbytes: int
    homes: tuple[str, ...]
    durable: bool


class SharedState:
    """State shared by the offloaded modules, optimizers and activations of one store.

    Attributes:
        working_bytes: Bytes that homes must leave free in RAM and on the GPU, for copies of blocks from slower tiers.
        num_changes: Number of changes to weights and state so far, by updates or by other writes.
        last_commit: (num_changes, generation) of the last commit or load.
        mark: Random text that distinguishes the committed generation from other generations with the same number.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store_ref = ref(store)  # a strong reference would keep the weak key of ``_SHARED_STATES`` alive
        self._last_tier = tuple(store.stats().tiers)[-1]
        self._registered: list[str] | None = None
        self.working_bytes = 0
        self.num_changes = 0
        self.last_commit: tuple[int, int | None] = (0, None)
        self.mark = ""
        self.optimizers: WeakSet[Any] = WeakSet()
        self.modules: WeakSet[Any] = WeakSet()

    @property
    def _store(self) -> TieredStore:
        store = self._store_ref()
        assert store is not None
        return store

    def finish_updates(self) -> None:
        """Apply the deferred updates of all optimizers that use this store."""
        for optimizer in list(self.optimizers):
            optimizer.finish_updates()

    def register(self, key: str, num_elements: int, dtype: torch.dtype, homes: Sequence[str], *, durable: bool) -> str:
        """Register a block in the first tier of ``homes`` with enough space, and return this tier.

        If a durable block gets a home on a drive, space for its copies in generations is also reserved.

        Raises:
            CapacityError: No tier has enough space.
            ValueError: A block with this key exists.
        """
        store = self._store
        request = HomeRequest(key, num_elements * dtype.itemsize, tuple(homes), durable)
        (name,) = self.choose_homes([request])
        store.register(key, (num_elements,), dtype, home=name, durable=durable)
        generation_bytes = _generation_bytes(store, name, request)
        if generation_bytes:
            store.reserve(name, generation_bytes)
        if self._registered is not None:
            self._registered.append(key)
        return name

    def choose_homes(self, blocks: Sequence[HomeRequest]) -> list[str]:
        """Return the home tier of each block, in order. Raise ``CapacityError`` if a block fits in no tier."""
        store = self._store
        used_bytes: dict[str, int] = {}
        names = []
        for block in blocks:
            reasons = []
            for name in block.homes:
                tier = store.tier(name)
                is_last = name == self._last_tier
                reserved_bytes = 0 if is_last or tier.device is None else self.working_bytes
                need_bytes = tier.slot_bytes(block.nbytes) + _generation_bytes(store, name, block)
                other_bytes = reserved_bytes + used_bytes.get(name, 0)
                free_bytes = tier.usage().free_bytes
                if need_bytes + other_bytes > free_bytes:  # count copies as free space, because they can be evicted
                    free_bytes = free_home_bytes(store, name)
                if need_bytes + other_bytes <= free_bytes:
                    used_bytes[name] = used_bytes.get(name, 0) + need_bytes
                    names.append(name)
                    break
                reasons.append(f"{name} has {format_size(max(0, free_bytes - other_bytes))} left")
            else:
                hint = "Increase the size of a tier, or open the store with nvme=[...]"
                raise CapacityError(
                    block.homes[-1],
                    block.nbytes,
                    max(0, free_bytes - other_bytes),
                    detail=f"for '{block.key}': {'; '.join(reasons)}. {hint}",
                )
        return names

    def note_change(self) -> None:
        """Record that weights or state have changed, so that the next ``state_dict`` commits a generation."""
        self.num_changes += 1

    @contextmanager
    def working_room(self, nbytes: int = 0) -> Iterator[None]:
        """Set ``working_bytes`` to at least ``nbytes``. If the context ends with an error, restore the old value."""
        previous_bytes = self.working_bytes
        self.working_bytes = max(previous_bytes, nbytes)
        try:
            yield
        except BaseException:
            self.working_bytes = previous_bytes
            raise

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Unregister all blocks that were registered inside the context if it ends with an error."""
        assert self._registered is None, self._registered
        registered: list[str] = []
        self._registered = registered
        try:
            yield
        except BaseException:
            self.unregister(*registered)
            raise
        finally:
            self._registered = None

    def unregister(self, *keys: str) -> None:
        """Unregister blocks and release the space that was reserved for their generations."""
        store = self._store
        specs = {spec.key: spec for spec in store.blocks()}
        for key in keys:
            spec = specs[key]
            tier = store.tier(spec.home)
            store.unregister(key)
            if spec.durable and tier.durable:
                store.reserve(spec.home, -tier.slot_bytes(spec.nbytes) * store.keep_generations)


_SHARED_STATES: WeakKeyDictionary[TieredStore, SharedState] = WeakKeyDictionary()


def shared_state(store: TieredStore) -> SharedState:
    """Return the shared state of a store. The first call creates it."""
    if store not in _SHARED_STATES:
        _SHARED_STATES[store] = SharedState(store)
    return _SHARED_STATES[store]


def free_home_bytes(store: TieredStore, name: str) -> int:
    """Return a tier's free space for homes, in bytes. Copies count as free space: they can be evicted."""
    tier = store.tier(name)
    if tier.device is None:
        return tier.usage().free_bytes  # a drive has no copies, and its generations also use space
    return tier.capacity_bytes - store.stats().tiers[name].home_bytes


def _generation_bytes(store: TieredStore, name: str, block: HomeRequest) -> int:
    """Return the bytes that a block's copies in generations use on a drive, in addition to its home."""
    tier = store.tier(name)
    return tier.slot_bytes(block.nbytes) * store.keep_generations if block.durable and tier.durable else 0


def home_order(store: TieredStore, homes: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of the allowed home tiers, preferred first. "auto" means RAM, then drives.

    Raises:
        ValueError: The store does not have one of these tiers.
    """
    names = tuple(store.stats().tiers)
    if homes == "auto":
        return tuple(name for name in names if name != "gpu") or names
    tiers = (homes,) if isinstance(homes, str) else tuple(homes)
    for name in tiers:
        if name not in names:
            raise ValueError(f'this store has no tier "{name}", only {", ".join(names)}. Pass "auto" or one of these')
    return tiers
