"""ZarrStore: a zarr v3 Store that keeps its values as blocks of a TieredStore, in RAM, NVMe and GPU tiers."""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype

from tiered.errors import BlockNotFoundError, TieredError
from tiered.store import TieredStore
from tiered.zarr_views import range_of

#: Number of locks that all keys share. With this number, fetches of different chunks rarely wait for each other.
_NUM_LOCKS = 64
_ESCAPED = re.compile(r"[^A-Za-z0-9.\-]")


class _ZarrState:
    """State that all ZarrStores over one TieredStore share, so that two of them never replace a value concurrently.

    Attributes:
        token: id of the TieredStore, for pickling and unpickling a ZarrStore in this process.
    """

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]

    def lock(self, block_key: str) -> threading.Lock:
        return self._locks[hash(block_key) % _NUM_LOCKS]


_states: WeakKeyDictionary[TieredStore, _ZarrState] = WeakKeyDictionary()
_open_stores: WeakValueDictionary[str, TieredStore] = WeakValueDictionary()
_states_lock = threading.Lock()


def _find_state(store: TieredStore) -> _ZarrState:
    with _states_lock:
        state = _states.get(store)
        if state is None:
            state = _states[store] = _ZarrState()
            _open_stores[state.token] = store
        return state


class ZarrStore(Store):
    """A zarr v3 store over a ``TieredStore``: ``zarr.create_array(tiered.ZarrStore(store), ...)``.

    Each value (a chunk or a metadata document) is one block of bytes with one home tier. ``get`` reads a value through
    ``tier``, where a copy stays until the store's policy evicts it. ``store.commit()`` commits all values as a
    generation that survives a crash. To read the values again, make a ZarrStore over ``TieredStore.open(...)``.

    Slots are multiples of 4096 bytes, and each value on a drive has separate files, so use chunks of at least a few
    megabytes. ``set`` replaces a value of the same size in place. For a value of a different size, the old and the new
    block must both fit; otherwise ``set`` raises ``CapacityError`` and keeps the old value. Readers and commits get the
    old value or the new value, never a mixture.

    Thread-safe. ``close`` leaves the TieredStore open. The caller owns it and must not close it before this store.

    Args:
        store: store that holds the blocks. Its other blocks are not touched.
        prefix: prefix of the blocks' keys. ZarrStores with different prefixes share no values.
        home: home tier of the values; default: the slowest tier.
        tier: addressable tier for reads and writes; default: the slowest tier in host memory. With
            ``zarr.config.enable_gpu()``, a GPU tier avoids a copy through the host.
        durable: whether commits include the values.
        timeout_s: maximum time that one access waits for space or for a drive before it raises ``TimeoutError``.

    Raises:
        ValueError: a tier is unknown or not addressable.
    """

    supports_writes: bool = True
    supports_deletes: bool = True
    supports_listing: bool = True

    def __init__(
        self,
        store: TieredStore,
        prefix: str = "zarr",
        *,
        home: str | None = None,
        tier: str | None = None,
        durable: bool = True,
        read_only: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(read_only=read_only)
        names = store.tier_names
        host_tiers = [n for n in names if (device := store.tier(n).device) is not None and device.type == "cpu"]
        usable_tiers = [name for name in names if store.tier(name).device is not None]
        if not usable_tiers:
            raise ValueError(
                f"none of the tiers {', '.join(names)} is addressable: a ZarrStore needs a RAM or GPU tier"
            )
        self._store = store
        self._prefix = prefix
        self._home = store._named_access.default_home() if home is None else store.tier(home).name
        self._tier = (host_tiers or usable_tiers)[-1] if tier is None else store.tier(tier).name
        if self._tier not in usable_tiers:
            raise ValueError(f"tier '{self._tier}' is not addressable: read through one of {', '.join(usable_tiers)}")
        self._durable = durable
        self._timeout_s = timeout_s
        self._state = _find_state(store)

    def _arguments(self) -> dict[str, Any]:
        return {
            "prefix": self._prefix,
            "home": self._home,
            "tier": self._tier,
            "durable": self._durable,
            "timeout_s": self._timeout_s,
        }

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        """Return a store with the same values that is read-only or writable."""
        return type(self)(self._store, **self._arguments(), read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, type(self))
            and self._store is other._store
            and self._prefix == other._prefix
            and self.read_only == other.read_only
        )

    def __hash__(self) -> int:
        return hash((id(self._store), self._prefix, self.read_only))

    def __repr__(self) -> str:
        return f"ZarrStore('{self._prefix}', home='{self._home}', tier='{self._tier}')"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the open TieredStore, which only this process can resolve."""
        return _unpickle, (type(self), self._state.token, self._arguments(), self.read_only)

    # -- keys --------------------------------------------------------------------------------------------------

    def block_keys(self, key: str) -> tuple[str, str]:
        """Return the keys of the two blocks that can hold a value. A value of a new size goes to the unused block.

        Every folder segment ends in ``_d``, and the last segment in ``_v`` or ``_w``. A file tier requires that no key
        is a folder of another key, but zarr allows both ``a`` and ``a/b``. The endings keep such keys apart. Characters
        that are not allowed in block keys become ``_`` and two hex digits per UTF-8 byte.
        """
        *folders, name = key.split("/")
        stem = "/".join([self._prefix, *(f"{_escape(folder)}_d" for folder in folders), _escape(name)])
        return f"{stem}_v", f"{stem}_w"

    def _zarr_key(self, block_key: str) -> str | None:
        """Return a block's zarr key, or None if the block's key does not have this store's prefix."""
        if not block_key.startswith(f"{self._prefix}/"):
            return None
        segments = block_key.removeprefix(f"{self._prefix}/").split("/")
        return "/".join(_unescape(segment[:-2]) for segment in segments)

    def _keys(self) -> list[str]:
        pairs = ((self._zarr_key(spec.key), spec.key) for spec in self._store.blocks())
        return list(dict.fromkeys(key for key, block in pairs if key is not None and self._has_value(block)))

    def _has_value(self, block_key: str) -> bool:
        """Return whether the block exists and has contents. It has none between ``register`` and the first write."""
        try:
            return any(state.is_valid for state in self._store.where(block_key).values())
        except BlockNotFoundError:
            return False

    def _find_block(self, key: str) -> str | None:
        """Return the key of the block that holds a value, or None if the value does not exist."""
        holders = [block_key for block_key in self.block_keys(key) if self._has_value(block_key)]
        if len(holders) < 2:
            return holders[0] if holders else None
        # Both blocks exist if the opened generation was committed during a replacement. Return the block registered
        # later. Its value is newer, and complete because only written blocks enter a commit.
        return [spec.key for spec in self._store.blocks() if spec.key in holders][-1]

    # -- values ------------------------------------------------------------------------------------------------

    @contextmanager
    def _lock_key(self, key: str) -> Iterator[None]:
        """Prevent other threads from replacing this value inside the ``with`` block."""
        lock = self._state.lock(self.block_keys(key)[0])
        if not lock.acquire(timeout=self._timeout_s):
            raise TimeoutError(f"'{key}' was in use for {self._timeout_s:g} s")
        try:
            yield
        finally:
            lock.release()

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a copy of a value or of a range of its bytes, or None if no such value exists. Blocks the caller."""
        prototype = prototype or default_buffer_prototype()
        self._is_open = True
        with self._lock_key(key):
            block_key = self._find_block(key)
            if block_key is None:
                return None
            with self._store.acquire(block_key, self._tier, "r", timeout_s=self._timeout_s) as lease:
                part = lease.tensor[range_of(lease.tensor.numel(), byte_range)]
                if part.is_cuda and prototype.buffer is not cpu.Buffer:
                    # The lease and the caller's kernels use the current stream, so the clone needs no synchronization.
                    return prototype.buffer.from_array_like(part.clone())
                # `cpu()` returns the same tensor for host memory, so clone it to outlive the lease.
                copy = part.clone() if part.device.type == "cpu" else part.cpu()
        return prototype.buffer.from_buffer(cpu.Buffer.from_array_like(copy.numpy()))

    def set_sync(self, key: str, value: Buffer) -> None:
        """Store a value, replacing any old value. Blocks the caller."""
        self._check_writable()
        self._is_open = True
        if not isinstance(value, Buffer):
            raise TypeError(f"a value must be a zarr Buffer, not {type(value).__name__}")
        with self._lock_key(key):
            self._put(key, value)

    def _put(self, key: str, value: Buffer) -> None:
        current_key = self._find_block(key)
        if current_key is not None and self._store.spec(current_key).nbytes == len(value):
            self._write(current_key, value)
            return
        new_key = next(block_key for block_key in self.block_keys(key) if block_key != current_key)
        self._forget(new_key)  # The block exists if the opened generation was committed during a replacement.
        self._store.register(new_key, (len(value),), torch.uint8, home=self._home, durable=self._durable)
        try:
            self._write(new_key, value)
        except BaseException:
            self._forget(new_key)
            raise
        if current_key is not None:
            self._forget(current_key)

    def _write(self, block_key: str, value: Buffer) -> None:
        with self._store.acquire(block_key, self._tier, "w", timeout_s=self._timeout_s) as lease:
            if lease.tensor.device.type == "cpu":
                np.copyto(lease.tensor.numpy(), value.as_numpy_array().view(np.uint8))
            else:
                lease.tensor.copy_(torch.as_tensor(value.as_array_like(), device=lease.tensor.device))

    def _forget(self, block_key: str) -> None:
        with suppress(BlockNotFoundError):
            self._store.unregister(block_key)

    def delete_sync(self, key: str) -> None:
        """Remove a value if it exists. Blocks the caller."""
        self._check_writable()
        self._is_open = True
        with self._lock_key(key):
            for block_key in self.block_keys(key):
                self._forget(block_key)

    # -- zarr's interface --------------------------------------------------------------------------------------

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """See ``zarr.abc.store.Store``. Waits for drives in a thread, so that chunks are fetched concurrently."""
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """See ``zarr.abc.store.Store``."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """See ``zarr.abc.store.Store``."""
        return self._find_block(key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        """See ``zarr.abc.store.Store``."""
        await asyncio.to_thread(self.set_sync, key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """See ``zarr.abc.store.Store``. Atomic: only one of several concurrent writers stores its value."""
        self._check_writable()

        def put() -> None:
            with self._lock_key(key):
                if self._find_block(key) is None:
                    self._put(key, value)

        await asyncio.to_thread(put)

    async def delete(self, key: str) -> None:
        """See ``zarr.abc.store.Store``."""
        await asyncio.to_thread(self.delete_sync, key)

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes without reading the value; see ``zarr.abc.store.Store``."""
        block_key = self._find_block(key)
        if block_key is None:
            raise FileNotFoundError(key)
        return self._store.spec(block_key).nbytes

    async def list(self) -> AsyncIterator[str]:
        """See ``zarr.abc.store.Store``."""
        for key in self._keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """See ``zarr.abc.store.Store``."""
        for key in self._keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """See ``zarr.abc.store.Store``."""
        folder = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        names = (key.removeprefix(folder).split("/")[0] for key in self._keys() if key.startswith(folder))
        for name in dict.fromkeys(names):
            yield name


def _unpickle(kind: type[ZarrStore], token: str, arguments: dict[str, Any], read_only: bool) -> ZarrStore:
    store = _open_stores.get(token)
    if store is None:
        raise TieredError(
            "a ZarrStore uses memory of the process that made it and cannot be sent to another process. "
            "Commit there, and open the generation here: ZarrStore(TieredStore.open(path, tiers))"
        )
    return kind(store, **arguments, read_only=read_only)


def _escape(segment: str) -> str:
    """Encode a segment with characters that block keys allow. ``_unescape`` reverses this."""
    return _ESCAPED.sub(lambda match: "".join(f"_{byte:02X}" for byte in match[0].encode()), segment)


def _unescape(segment: str) -> str:
    parts = re.split(r"((?:_[0-9A-F]{2})+)", segment)
    return "".join(bytes.fromhex(part.replace("_", "")).decode() if part.startswith("_") else part for part in parts)
