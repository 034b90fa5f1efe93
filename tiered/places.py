"""Where copies stay, on request: contents dropped, pins, evictions, room set apart. The store's methods say more."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.block import CopyState
from tiered.errors import LeaseError
from tiered.grants import Grants
from tiered.movement import Movement
from tiered.transfer import Transfer


def discard(movement: Movement, grants: Grants, keys: Sequence[str]) -> None:
    """Drop all contents of blocks; see ``TieredStore.discard``."""
    with movement.changed:
        for key in keys:
            block = grants.block(key)
            grants.wait_quiet_locked(block)
            for copy in block.copies.values():
                if not copy.is_home and copy.slot is not None:
                    movement.drop(copy)
            if block.home.state is CopyState.CLEAN:
                block.home.move(CopyState.STALE)
            movement.unsaved.pop(block, None)
        movement.pump()
        movement.changed.notify_all()


def pin(movement: Movement, grants: Grants, key: str, tier: str) -> None:
    """Count one more pin; see ``TieredStore.pin``."""
    with movement.changed:
        block = grants.block(key)
        need = grants.tier(tier).slot_bytes(block.spec.nbytes)
        copy = block.copy_in(tier)
        if not copy.is_home and copy.pins == 0:
            if movement.pinned_bytes[tier] + need > grants.room_for_copies_locked(tier):
                raise grants.capacity_error_locked(tier, need, f"to pin '{key}'")
            movement.pinned_bytes[tier] += need
        copy.pins += 1


def unpin(movement: Movement, grants: Grants, key: str, tier: str) -> None:
    """Count one pin less; see ``TieredStore.unpin``."""
    with movement.changed:
        block = grants.block(key)
        copy = block.copy_in(tier)
        if copy.pins == 0:
            raise LeaseError(f"block '{key}' is not pinned in tier '{tier}'")
        copy.pins -= 1
        if not copy.is_home and copy.pins == 0:
            movement.pinned_bytes[tier] -= grants.tier(tier).slot_bytes(block.spec.nbytes)
        movement.pump()
        movement.changed.notify_all()


def evict(movement: Movement, grants: Grants, key: str, tier: str) -> Transfer:
    """Let a copy go as soon as it can; see ``TieredStore.evict``."""
    with movement.changed:
        block = grants.block(key)
        copy = block.copy_in(tier)
        if copy.pins:
            raise LeaseError(f"block '{key}' is pinned in tier '{tier}': unpin it first")
        if copy.is_home or copy.state is CopyState.ABSENT:
            return Transfer.finished(tier, block.spec.home)
        if copy.state is CopyState.FILLING and block.writer is None:
            copy.drop_when_clean = True
        elif copy.state is not CopyState.FILLING:
            movement.evict(block, copy)
        movement.changed.notify_all()
        draining = copy.state is CopyState.DRAINING and copy.transfer is not None
        return copy.transfer if draining and copy.transfer else Transfer.finished(tier, block.spec.home)


def reserve(movement: Movement, grants: Grants, tier: str, nbytes: int) -> None:
    """Set room apart; see ``TieredStore.reserve``."""
    owner = grants.tier(tier)
    with movement.changed:
        while nbytes > owner.usage().free_bytes and any(block.num_transfers for block in movement.blocks.values()):
            movement.changed.wait()
        if nbytes > owner.usage().free_bytes:
            movement.raise_unsaved()  # why there is no room
        owner.reserve(nbytes)
        movement.reserved_bytes[tier] += nbytes
        movement.changed.notify_all()
