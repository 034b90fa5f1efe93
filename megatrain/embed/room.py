"""Whether a module fits a store, told before anything of it is moved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.embed.partition import Part, TieringError, UnitPart
from megatrain.embed.stores import Wanted, compute_tier, ledger_of, room_for_homes
from megatrain.engine.program import gradient_key, weight_key
from tiered.errors import CapacityError

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["block_root", "check_room"]

#: Bytes per trained parameter that pass RAM together: weights, gradient and the largest optimizer state.
_STATE_BYTES = 4 + 4 + 8


def block_root(name: str, part: Part) -> str:
    """Return what the keys of a part's blocks begin with: letters that a key may have, different for every part."""
    return f"{name}/" + re.sub(r"[^A-Za-z0-9_.]", lambda found: f"-{ord(found[0]):x}-", part.layout.name)


def check_room(
    store: TieredStore,
    name: str,
    units: Sequence[UnitPart],
    parts: Sequence[Part],
    weights: Sequence[str],
    gradients: Sequence[str],
) -> None:
    """Refuse what the store has no room for: as homes, or when a layer runs. Note what has to stay free of homes.

    Args:
        weights: tiers that they may live in, most wanted first.
        gradients: tiers that they may live in, most wanted first.

    Raises:
        CapacityError: with the tier, and what it would need.
        TieringError: the name is in use.
    """
    wanted = [Wanted(weight_key(block_root(name, part)), _bytes(part), tuple(weights), True) for part in parts]
    trained = [part for part in parts if part.layout.trainable]
    wanted += [
        Wanted(gradient_key(block_root(name, part), 0), 4 * part.layout.num_elements, tuple(gradients), False)
        for part in trained
    ]
    known = {spec.key for spec in store.blocks()}
    if any(block.key in known for block in wanted):
        raise TieringError(f'this store has a module of that name: megatrain.tier(..., name="..."), not "{name}"')
    ledger = ledger_of(store)
    working_bytes = max(ledger.working_bytes, _working_bytes(units))
    before, ledger.working_bytes = ledger.working_bytes, working_bytes
    try:
        homes = ledger.placed(store, wanted)
        _check_layers(store, units, dict(zip([block.key for block in wanted], homes, strict=True)), wanted, name)
    except BaseException:
        ledger.working_bytes = before
        raise


def _check_layers(
    store: TieredStore, units: Sequence[UnitPart], homes: dict[str, str], wanted: Sequence[Wanted], name: str
) -> None:
    """Refuse a compute tier in which some layer cannot run beside the homes there, with all modules around it."""
    where = compute_tier(store)
    tier = store.tier(where)
    taken = sum(tier.slot_bytes(block.nbytes) for block in wanted if homes[block.key] == where)
    room = room_for_homes(store, where) - taken
    for unit in units:
        around = [other for other in units if other.name == "" or f"{unit.name}.".startswith(f"{other.name}.")]
        needed: dict[str, int] = {}
        for part in (part for other in around for part in other.parts):
            needed[weight_key(block_root(name, part))] = _bytes(part)
        for part in unit.parts:
            if part.layout.trainable:
                needed[gradient_key(block_root(name, part), 0)] = 4 * part.layout.num_elements
        need = sum(tier.slot_bytes(nbytes) for key, nbytes in needed.items() if homes[key] != where)
        if need > room:
            raise CapacityError(
                where,
                need,
                max(0, room),
                detail=f"to run {unit.name or 'the module'} with its weights and gradients. Give {where} more room",
            )


def _bytes(part: Part) -> int:
    return part.layout.num_elements * part.dtype.itemsize


def _working_bytes(units: Sequence[UnitPart]) -> int:
    """Return the room that the largest unit's update and the next unit's weights take together."""
    sizes = [sum(part.layout.num_elements for part in unit.parts) for unit in units]
    return (_STATE_BYTES + 2 * 4) * max(sizes)
