"""Buffer aliasing: gradients with disjoint lifetimes share a block.

A gradient lives from its first contribution to its update. If updates are not deferred (``GroupUpdates.are_deferred``),
each update follows the backward that completes its gradient. A step then needs memory for the gradients of only one or
two layers. If updates are deferred, all gradients live until the next step, so no gradients can share a block.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatrain.engine.program.block_plan import BlockPlan

if TYPE_CHECKING:
    from megatrain.engine.program.step_program import Group, StepProgram, Tick
    from tiered import Mode

#: Minimum fraction of a shared block that each gradient must fill. The whole block is moved, including unused bytes.
MIN_FILL = 0.75


@dataclass(frozen=True, slots=True)
class _Lifetime:
    """Lifetime of one gradient: its first and last tick."""

    start: int
    stop: int
    gradient: BlockPlan


class _AliasedBlock:
    """Block that is shared by several gradients. The first gradient is the largest."""

    def __init__(self, largest: _Lifetime) -> None:
        self.lifetimes = [largest]  # sorted by start
        self._largest = largest.gradient

    def can_hold(self, lifetime: _Lifetime) -> bool:
        """Return whether a gradient can use the block: it is nearly as large, and lifetimes do not overlap."""
        gradient = lifetime.gradient
        if gradient.dtype != self._largest.dtype or gradient.num_elements < MIN_FILL * self._largest.num_elements:
            return False
        position = self._position(lifetime)
        # Lifetimes include their first and last tick, because a tick leases all of its blocks together.
        is_after = position == 0 or self.lifetimes[position - 1].stop < lifetime.start
        return is_after and (position == len(self.lifetimes) or lifetime.stop < self.lifetimes[position].start)

    def add(self, lifetime: _Lifetime) -> None:
        self.lifetimes.insert(self._position(lifetime), lifetime)

    @property
    def pattern(self) -> tuple[tuple[int, str], ...]:
        """Key that is equal for two blocks if they hold parts of the same layouts at the same times."""
        return tuple((lifetime.start, lifetime.gradient.tensor_key) for lifetime in self.lifetimes)

    def block(self, index: int, first_index: int) -> BlockPlan:
        """Return the shared block, or the gradient's own block if there is only one gradient."""
        if len(self.lifetimes) == 1:
            return self._largest
        tensor_key = f"gradients/grad.{first_index}"
        return replace(self._largest, key=f"gradients/grad.{index}", parent_key=tensor_key)

    def _position(self, lifetime: _Lifetime) -> int:
        return bisect_left(self.lifetimes, lifetime.start, key=lambda other: other.start)


def share_gradients(program: StepProgram) -> StepProgram:
    """Return a copy of the program in which gradients share blocks.

    Results are bit-identical, because the same contributions are added in the same order.

    Args:
        program: Program with a separate block for every gradient.
    """
    pools: list[_AliasedBlock] = []
    # Sort gradients of equal size by start. First fit then needs no more blocks than gradients that are live at once.
    for lifetime in sorted(_lifetimes(program), key=lambda lifetime: (-lifetime.gradient.num_elements, lifetime.start)):
        pool = next((pool for pool in reversed(pools) if pool.can_hold(lifetime)), None)  # the smallest block that fits
        if pool is None:
            pools.append(_AliasedBlock(lifetime))
        else:
            pool.add(lifetime)
    first_indexes: dict[tuple[tuple[int, str], ...], int] = {}
    blocks: dict[str, BlockPlan] = {}
    for index, pool in enumerate(pools):
        block = pool.block(index, first_indexes.setdefault(pool.pattern, index))
        blocks.update((lifetime.gradient.key, block) for lifetime in pool.lifetimes)
    targets = {key: block for key, block in blocks.items() if block.key != key}
    return replace(
        program,
        blocks={block.key: block for block in (targets.get(key, plan) for key, plan in program.blocks.items())},
        ticks=tuple(_replace_blocks(tick, targets) for tick in program.ticks),
        occupants={
            (index, targets[key].key): program.blocks[key]
            for index, tick in enumerate(program.ticks)
            for key, _ in tick.uses
            if key in targets
        },
    )


def _lifetimes(program: StepProgram) -> list[_Lifetime]:
    """Return the lifetime of each gradient whose lifetime begins and ends within a step."""
    uses: dict[str, list[tuple[int, Mode, bool]]] = {}
    for index, tick in enumerate(program.ticks):
        for key, mode in tick.uses:
            if program.blocks[key].kind == "gradients":
                uses.setdefault(key, []).append((index, mode, key in tick.spent))
    return [
        _Lifetime(key_uses[0][0], key_uses[-1][0], program.blocks[key])
        for key, key_uses in uses.items()
        if key_uses[0][1] == "w" and key_uses[-1][2]
    ]


def _replace_blocks(tick: Tick, targets: dict[str, BlockPlan]) -> Tick:
    def replace_keys(group: Group) -> Group:
        return tuple((targets[key].key if key in targets else key, mode) for key, mode in group)

    return replace(
        tick,
        held=replace_keys(tick.held),
        passing=tuple(replace_keys(group) for group in tick.passing),
        spent=frozenset(targets[key].key if key in targets else key for key in tick.spent),
    )
