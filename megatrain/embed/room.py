"""Homes of an offloaded module's blocks in a store, and leases of these blocks in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain.base.layout import UnitLayout
from megatrain.embed.block_homes import HomeRequest, compute_tier, free_home_bytes, shared_state
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.partition import OffloadError, Part, UnitPart, enclosing_parts, parts_of
from megatrain.embed.state_blocks import LayoutShard
from megatrain.optim.base import StateKind
from tiered import Mode, TieredStore
from tiered.errors import CapacityError

#: Bytes of RAM per trained parameter during an update: weight, gradient and the largest optimizer state.
_STATE_BYTES = 4 + 4 + 8
#: Bytes per trained parameter when an update overlaps with fetching the next unit's weights.
UPDATE_BYTES = _STATE_BYTES + 2 * 4


#: Home tiers by block key.
Homes = Mapping[str, str]


class WeightLease(Protocol):
    """A lease of a complete weight block, or a full copy gathered from shards."""

    @property
    def tensor(self) -> Tensor:
        """Flat weights, one value per element of the layout."""

    @property
    def mode(self) -> str:
        """Mode of the lease: "r", "rw", or "w" if the block has no values yet."""

    def release(self) -> None:
        """End the lease and keep changes."""

    def abandon(self) -> None:
        """End a lease of mode "w" and drop changes."""


class LocalBlocks:
    """Access to blocks that this process stores completely. Its subclass ``ModuleRanks`` accesses sharded blocks.

    Attributes:
        tier: Tier in which blocks are leased.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store, self.tier = store, compute_tier(store)

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the number of a block's elements that this process stores."""
        return layout.num_elements

    def shard(self, layout: UnitLayout, kinds: Iterable[StateKind]) -> LayoutShard | None:
        """Return this process's shard of a layout, or None if it stores the whole layout. ``kinds``: kinds of state."""
        return None

    def lease(self, part: Part, mode: Mode) -> WeightLease:
        """Return a lease of a part's weight block."""
        return self.store.acquire(part.weight_key, self.tier, mode)

    @contextmanager
    def new_contents(self, part: Part) -> Iterator[Tensor]:
        """Yield a flat tensor of zeros. On exit, its values become the contents of a part's weight block."""
        with torch.no_grad(), self.store.acquire(part.weight_key, "ram", "w") as lease:
            lease.tensor.zero_()
            yield lease.tensor

    def is_copy(self, home: str) -> bool:
        """Return whether a lease copies the block, because the block's home is a different tier."""
        return self.tier != home

    def evict_copy(self, part: Part) -> None:
        """Evict a copy of a weight block that was changed during a read-only lease."""
        self.store.evict(part.weight_key, self.tier)

    def gradient_elements(self, part: Part) -> Mapping[str, int]:
        """Return the number of fp32 elements of a trained part's gradient blocks, by key."""
        return {part.gradient_key: part.layout.num_elements}

    def gradient_block(self, part: Part) -> GradientBlock:
        """Return an object that sums a part's gradients in the registered gradient blocks."""
        return GradientBlock(self.store, part.gradient_key, part.layout, part.parameters)

    def check_module(self, model: nn.Module, units: Sequence[UnitPart], find_homes: Callable[[], Homes]) -> Homes:
        """Return the homes of a module's blocks, or raise an error if it cannot be offloaded. The module is unchanged.

        Args:
            find_homes: Function that reserves the working set and returns the homes, or raises if they do not fit.
        """
        return find_homes()

    def working_bytes(self, units: Sequence[UnitPart]) -> int:
        """Return the bytes of RAM that suffice to update any unit while the next unit's weights are fetched."""
        return max(
            sum(
                UPDATE_BYTES * part.layout.num_elements if part.layout.trainable else 2 * part.weight_bytes
                for part in unit.parts
            )
            for unit in units
        )

    def reserve_memory(self, units: Sequence[UnitPart]) -> None:
        """Do nothing, because a single process needs no memory outside of blocks."""

    def check_working_set(self, units: Sequence[UnitPart], homes: Homes, home_bytes_in: Callable[[str], int]) -> None:
        """Raise ``CapacityError`` if a layer and its enclosing modules do not fit next to the compute tier's homes.

        Args:
            homes: Home tiers of the module's blocks, by key.
            home_bytes_in: Function that returns the bytes of these homes in a tier.
        """
        name = self.tier
        tier = self.store.tier(name)
        room = free_home_bytes(self.store, name) - home_bytes_in(name)
        for unit in units:
            sizes = {part.weight_key: part.weight_bytes for part in enclosing_parts(unit, units)}
            sizes.update((part.gradient_key, part.gradient_bytes) for part in unit.parts if part.layout.trainable)
            need_bytes = sum(tier.slot_bytes(nbytes) for key, nbytes in sizes.items() if homes[key] != name)
            if need_bytes > room:
                detail = f"to run {unit.name or 'the module'} with its parts. Increase the size of {name}"
                raise CapacityError(name, need_bytes, max(0, room), detail=detail)


def find_homes(
    access: LocalBlocks, name: str, units: Sequence[UnitPart], weights: Sequence[str], gradients: Sequence[str]
) -> Homes:
    """Reserve the working set of a module, and return the home tiers of its blocks by key.

    ``weights`` and ``gradients`` are the allowed home tiers of these blocks, preferred first.

    Raises:
        CapacityError: The module does not fit. The error contains the tier and the needed bytes.
        OffloadError: The store already contains a module with this name.
    """
    store, parts = access.store, parts_of(units)
    requests = [
        HomeRequest(part.weight_key, access.num_elements(part.layout) * part.dtype.itemsize, tuple(weights), True)
        for part in parts
    ]
    requests += [
        HomeRequest(key, num_elements * torch.float32.itemsize, tuple(gradients), False)
        for part in parts
        if part.layout.trainable
        for key, num_elements in access.gradient_elements(part).items()
    ]
    existing_keys = {spec.key for spec in store.blocks()}
    if any(block.key in existing_keys for block in requests):
        raise OffloadError(
            f'this store already has a module "{name}". Choose another: megatrain.offload(..., name="...")'
        )
    shared = shared_state(store)

    def home_bytes_in(where: str) -> int:
        return sum(store.tier(where).slot_bytes(block.nbytes) for block in requests if homes[block.key] == where)

    with shared.working_room(access.working_bytes(units)):
        access.reserve_memory(units)
        homes = dict(zip([block.key for block in requests], shared.choose_homes(requests), strict=True))
        access.check_working_set(units, homes, home_bytes_in)
    return homes
