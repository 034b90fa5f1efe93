"""Checks whether an offloaded module fits in a store, and leases of its blocks in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from megatrain.base.layout import UnitLayout
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.partition import OffloadError, Part, UnitPart, parts_around, parts_of
from megatrain.embed.stores import HomeRequest, compute_tier, room_for_homes, shared_state
from tiered import Mode, TieredStore
from tiered.errors import CapacityError

#: Bytes of RAM per trained parameter during an update: weight, gradient and the largest optimizer state.
_STATE_BYTES = 4 + 4 + 8
#: Bytes per trained parameter when an update overlaps with fetching the next unit's weights.
UPDATE_BYTES = _STATE_BYTES + 2 * 4


class WeightLease(Protocol):
    """A lease of a whole weight block, or a full copy gathered from several ranks."""

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


class WholeBlocks:
    """Access to a module's blocks in a single process. The subclass ``ModuleRanks`` supports several ranks.

    Attributes:
        tier: Tier in which blocks are leased.
    """

    def __init__(self, store: TieredStore) -> None:
        self.store, self.tier = store, compute_tier(store)

    # -- leases -----------------------------------------------------------------------------

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the number of a block's elements that this process stores."""
        return layout.num_elements

    def lease(self, key: str, layout: UnitLayout, dtype: torch.dtype, mode: Mode) -> WeightLease:
        """Return a lease of a block."""
        return self.store.acquire(key, self.tier, mode)

    @contextmanager
    def filling(self, key: str, layout: UnitLayout, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a flat tensor of zeros. On exit, the tensor's values become the block's contents."""
        with torch.no_grad(), self.store.acquire(key, "ram", "w") as lease:
            lease.tensor.zero_()
            yield lease.tensor

    def is_copy(self, home: str) -> bool:
        """Return whether a lease copies the block, because the block's home is a different tier."""
        return self.tier != home

    def drop(self, key: str) -> None:
        """Evict a copy that was changed during a read-only lease."""
        self.store.evict(key, self.tier)

    def gradient_block(self, part: Part, homes: Sequence[str]) -> GradientBlock:
        """Register and return the gradient block of a part."""
        return GradientBlock(self.store, part.gradient_key, part.layout, part.parameters, homes)

    # -- room --------------------------------------------------------------------------------------------------

    def check_module(self, model: nn.Module, units: Sequence[UnitPart], check_room: Callable[[], None]) -> None:
        """Check whether a module can be offloaded. Nothing is changed before this check.

        Args:
            check_room: Reserves the module's working set, or raises an error if the module does not fit.
        """
        check_room()

    def gradient_bytes(self, part: Part) -> Mapping[str, int]:
        """Return the bytes of a part's gradient blocks, by key."""
        return {part.gradient_key: part.gradient_bytes}

    def working_bytes(self, units: Sequence[UnitPart]) -> int:
        """Return the maximum RAM in bytes for the update of one unit and the weights of the next unit."""
        return max(
            sum(
                UPDATE_BYTES * part.layout.num_elements if part.layout.trainable else 2 * part.weight_bytes
                for part in unit.parts
            )
            for unit in units
        )

    def reserve_room(self, units: Sequence[UnitPart]) -> None:
        """Reserve memory outside of blocks. A single process needs none."""

    def check_working_set(
        self, units: Sequence[UnitPart], homes: Mapping[str, str], taken: Callable[[str], int]
    ) -> None:
        """Raise an error if a layer and its enclosing modules do not fit in the compute tier in addition to homes.

        Args:
            homes: Home tiers of the module's blocks, by key.
            taken: Returns the bytes of these homes in a tier.

        Raises:
            CapacityError: A layer does not fit. The error contains the tier and the bytes that the layer needs.
        """
        where = self.tier
        tier = self.store.tier(where)
        room = room_for_homes(self.store, where) - taken(where)
        for unit in units:
            needed = {part.weight_key: part.weight_bytes for part in parts_around(unit, units)}
            needed.update((part.gradient_key, part.gradient_bytes) for part in unit.parts if part.layout.trainable)
            need = sum(tier.slot_bytes(nbytes) for key, nbytes in needed.items() if homes[key] != where)
            if need > room:
                raise CapacityError(
                    where,
                    need,
                    max(0, room),
                    detail=f"to run {unit.name or 'the module'} with its parts. Increase the size of {where}",
                )


def check_room(
    access: WholeBlocks, name: str, units: Sequence[UnitPart], weights: Sequence[str], gradients: Sequence[str]
) -> None:
    """Reserve the working set of a module. Raise an error if the blocks or the largest layer do not fit.

    Args:
        name: Name of the module in the store.
        weights: Allowed home tiers of weights, preferred first.
        gradients: Allowed home tiers of gradients, preferred first.

    Raises:
        CapacityError: The module does not fit. The error contains the tier and the needed bytes.
        OffloadError: The store already contains a module with this name.
    """
    store, parts = access.store, parts_of(units)
    wanted = [
        HomeRequest(part.weight_key, access.num_elements(part.layout) * part.dtype.itemsize, tuple(weights), True)
        for part in parts
    ]
    wanted += [
        HomeRequest(key, nbytes, tuple(gradients), False)
        for part in parts
        if part.layout.trainable
        for key, nbytes in access.gradient_bytes(part).items()
    ]
    known = {spec.key for spec in store.blocks()}
    if any(block.key in known for block in wanted):
        raise OffloadError(
            f'this store already has a module "{name}". Choose another: megatrain.offload(..., name="...")'
        )
    shared = shared_state(store)
    before = shared.working_bytes
    shared.working_bytes = max(before, access.working_bytes(units))

    def taken(where: str) -> int:
        return sum(store.tier(where).slot_bytes(block.nbytes) for block in wanted if homes[block.key] == where)

    try:
        access.reserve_room(units)
        homes = dict(zip([block.key for block in wanted], shared.placed(wanted), strict=True))
        access.check_working_set(units, homes, taken)
    except BaseException:
        shared.working_bytes = before
        raise
