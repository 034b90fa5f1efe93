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
LEAST_FILLED = 0.75


@dataclass(frozen=True, slots=True)
class _Lifetime:
    """Lifetime of one gradient: its first and last tick."""

    start: int
    stop: int
    gradient: BlockPlan


class _AliasedBlock:
    """Block that is shared by several gradients. The first gradient is the largest."""

    def __init__(self, first: _Lifetime) -> None:
        self.lifetimes = [first]  # sorted by start
        self._largest = first.gradient

    def admits(self, lifetime: _Lifetime) -> bool:
        """Return whether a gradient can use the block: it is nearly as large, and lifetimes do not overlap."""
        gradient = lifetime.gradient
        if gradient.dtype != self._largest.dtype or gradient.num_elements < LEAST_FILLED * self._largest.num_elements:
            return False
        after = self._position(lifetime)
        # Lifetimes include their first and last tick, because a tick leases all of its blocks together.
        is_after = after == 0 or self.lifetimes[after - 1].stop < lifetime.start
        return is_after and (after == len(self.lifetimes) or lifetime.stop < self.lifetimes[after].start)

    def add(self, lifetime: _Lifetime) -> None:
        self.lifetimes.insert(self._position(lifetime), lifetime)

    @property
    def pattern(self) -> tuple[tuple[int, str], ...]:
        """Key that is equal for two blocks if they hold parts of the same layouts at the same times."""
        return tuple((lifetime.start, lifetime.gradient.whole) for lifetime in self.lifetimes)

    def block(self, number: int, first_equal: int) -> BlockPlan:
        """Return the shared block, or the gradient's own block if there is only one gradient."""
        if len(self.lifetimes) == 1:
            return self._largest
        whole = f"gradients/grad.{first_equal}"
        return replace(self._largest, key=f"gradients/grad.{number}", part_of=whole)

    def _position(self, lifetime: _Lifetime) -> int:
        return bisect_left(self.lifetimes, lifetime.start, key=lambda other: other.start)


def sharing_gradients(program: StepProgram) -> StepProgram:
    """Return a copy of the program in which gradients share blocks.

    Results are bit-identical, because the same contributions are added in the same order.

    Args:
        program: Program with a separate block for every gradient.
    """
    rooms: list[_AliasedBlock] = []
    # Sort gradients of equal size by start. First fit then needs no more blocks than there are live gradients.
    for lifetime in sorted(_lifetimes(program), key=lambda lifetime: (-lifetime.gradient.num_elements, lifetime.start)):
        room = next((room for room in reversed(rooms) if room.admits(lifetime)), None)  # the smallest block that fits
        if room is None:
            rooms.append(_AliasedBlock(lifetime))
        else:
            room.add(lifetime)
    first_numbers: dict[tuple[tuple[int, str], ...], int] = {}
    blocks: dict[str, BlockPlan] = {}
    for number, room in enumerate(rooms):
        block = room.block(number, first_numbers.setdefault(room.pattern, number))
        blocks.update((lifetime.gradient.key, block) for lifetime in room.lifetimes)
    moved = {key: block for key, block in blocks.items() if block.key != key}
    return replace(
        program,
        blocks={block.key: block for block in (moved.get(key, own) for key, own in program.blocks.items())},
        ticks=tuple(_with_blocks(tick, moved) for tick in program.ticks),
        occupants={
            (number, moved[key].key): program.blocks[key]
            for number, tick in enumerate(program.ticks)
            for key, _ in tick.uses
            if key in moved
        },
    )


def _lifetimes(program: StepProgram) -> list[_Lifetime]:
    """Return the lifetime of each gradient that begins and ends within a step."""
    uses: dict[str, list[tuple[int, Mode, bool]]] = {}
    for number, tick in enumerate(program.ticks):
        for key, mode in tick.uses:
            if program.blocks[key].kind == "gradients":
                uses.setdefault(key, []).append((number, mode, key in tick.spent))
    return [
        _Lifetime(of_key[0][0], of_key[-1][0], program.blocks[key])
        for key, of_key in uses.items()
        if of_key[0][1] == "w" and of_key[-1][2]
    ]


def _with_blocks(tick: Tick, moved: dict[str, BlockPlan]) -> Tick:
    def with_moved_keys(group: Group) -> Group:
        return tuple((moved[key].key if key in moved else key, mode) for key, mode in group)

    return replace(
        tick,
        held=with_moved_keys(tick.held),
        passing=tuple(with_moved_keys(group) for group in tick.passing),
        spent=frozenset(moved[key].key if key in moved else key for key in tick.spent),
    )
