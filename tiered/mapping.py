"""A store as a mapping from names to tensors: ``store["a"] = tensor``, ``store["a"]``, ``del store["a"]``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiered.block import BlockSpec
from tiered.by_name import NamedAccess
from tiered.errors import BlockNotFoundError
from tiered.events import StoreStats
from tiered.units import format_size

#: Types whose values can be written to a block.
Writable = torch.Tensor | npt.NDArray[Any]


class BlockMapping(MutableMapping[str, torch.Tensor]):
    """A ``MutableMapping`` from names to blocks, for programs that do not use leases. These rules apply:

    * Reading returns a **copy** in ordinary memory; ``values()`` and ``items()`` copy one block at a time.
    * ``store[key] = tensor`` writes like ``put``. A block keeps its shape, dtype and home for life, because its slot is
      fixed. Assigning a different shape or dtype raises ``ValueError`` and changes nothing.
    * ``del store[key]`` unregisters a block, but committed generations keep its contents. If a commit is still writing
      the block, ``del`` waits for that commit. If the block is leased, ``del`` raises ``LeaseError`` and keeps the
      block.
    * Iteration uses a snapshot of the names, so the loop can add and remove blocks.
    * A store equals only itself, and is truthy even if it is empty.
    """

    _named_access: NamedAccess

    @abstractmethod
    def register(
        self, key: str, shape: Sequence[int], dtype: torch.dtype, *, home: str, durable: bool = True
    ) -> BlockSpec:
        """Declare a block and reserve its home slot."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's counters."""

    @abstractmethod
    def unregister(self, *keys: str) -> None:
        """Remove blocks from the store and free their home slots."""

    @abstractmethod
    def spec(self, key: str) -> BlockSpec:
        """Return the spec of a block. Raises ``BlockNotFoundError``."""

    @abstractmethod
    def blocks(self) -> Iterator[BlockSpec]:
        """Return the specs of all registered blocks, in order of registration."""

    def put(self, key: str, tensor: Writable, *, home: str | None = None, durable: bool = True) -> BlockSpec:
        """Write a tensor to a block without a lease, registering the block if it is new.

        Args:
            tensor: tensor on any device, or NumPy array. For a registered block, shape and dtype must match.
            home: home tier of a new block; default: the slowest tier.
            durable: whether commits include a new block.

        Raises:
            ValueError: the block's shape, dtype or home differs. ``register`` and ``acquire`` can raise other errors.
            TypeError: the value is neither a tensor nor an array, or it is an array whose dtype torch does not support.
        """
        tensor = as_tensor(key, tensor)
        is_new = key not in self
        if is_new:
            spec = self.register(
                key, tensor.shape, tensor.dtype, home=home or self._named_access.default_home(), durable=durable
            )
        else:
            spec = self.spec(key)
            request = tuple(tensor.shape), tensor.dtype, home or spec.home
            if request != (spec.shape, spec.dtype, spec.home):
                raise ValueError(
                    f"block '{key}' has shape {spec.shape}, {spec.dtype} and home '{spec.home}', not {request[0]}, "
                    f"{request[1]} and '{request[2]}': convert it, or unregister the block first (del store['{key}'])"
                )
        try:
            self._named_access.write(spec, tensor, None)
        except BaseException:
            if is_new:
                self.unregister(key)
            raise
        return spec

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a copy of a block, in host memory outside all tiers. Raises the errors of ``acquire``."""
        return self._named_access.read(self.spec(key))

    def __setitem__(self, key: str, tensor: Writable) -> None:
        """Write a block. A new block is durable, and its home is the slowest tier. Raises the errors of ``put``."""
        self.put(key, tensor)

    def __delitem__(self, key: str) -> None:
        """Remove a block and free its home slot. Raises the errors of ``unregister``."""
        self.unregister(key)

    def __contains__(self, key: object) -> bool:
        """Return whether a block with this name is registered, even if the block was never written."""
        try:
            self.spec(key)  # type: ignore[arg-type]
        except BlockNotFoundError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all registered blocks, in order of registration."""
        return iter([spec.key for spec in self.blocks()])

    def __len__(self) -> int:
        """Return the number of registered blocks."""
        return sum(1 for _ in self.blocks())

    def __bool__(self) -> bool:
        """Return True, so that ``store or default`` keeps an empty store."""
        return True

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is the same object, without reading contents."""
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Describe the store by its number of blocks and by each tier's used and total bytes."""
        count = f"{len(self)} block{'' if len(self) == 1 else 's'}"
        tiers = ", ".join(
            f"{name} {format_size(tier.used_bytes)} of {format_size(tier.capacity_bytes)}"
            for name, tier in self.stats().tiers.items()
        )
        return f"<{type(self).__name__}{' (closed)' if self.is_closed else ''}, {count}: {tiers}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TieredStore cannot be pickled or copied: it owns memory and files. "
            "Commit, and let the other process call TieredStore.open with a copy of the folder"
        )

    def clear(self) -> None:
        """Remove all blocks without reading them. Raises the errors of ``unregister``."""
        self.unregister(*self)


def as_tensor(key: str, value: object) -> torch.Tensor:
    """Return a tensor unchanged, or convert a NumPy array. The result shares the array's memory if torch allows it.

    Raises:
        TypeError: the value is neither a tensor nor an array, the tensor is not dense or has no contents, or torch does
            not support the array's dtype.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise TypeError(f"block '{key}' cannot be written from a tensor on the meta device, which has no contents")
        if value.layout != torch.strided or value.is_nested:
            kind = str(value.layout).removeprefix("torch.").removesuffix("_coo").replace("strided", "nested")
            raise TypeError(f"block '{key}' must be written from a dense tensor, not a {kind} one: call to_dense()")
        return value
    if not isinstance(value, np.ndarray | np.generic):
        type_name = type(value).__name__
        raise TypeError(f"block '{key}' must be written from a torch tensor or a NumPy array, not '{type_name}'")
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch warns about read-only arrays and rejects negative strides.
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise TypeError(f"block '{key}': torch has no dtype for a NumPy array of {array.dtype}; convert it") from None
