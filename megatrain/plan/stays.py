"""Stays: copies away from home that wait in their tier for the next use instead of going back there.

Where a step turns round, a block is used again soon: the last layer's weights in the backward, the first layer's
gradient in the next update. Bringing such a copy home and back costs its bytes twice, and its next use waits for a
queue of others. A stay is part of the plan, not a lucky hit: so planned traffic stays moved traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.engine.program import Stays

if TYPE_CHECKING:
    from megatrain.engine.program import StepProgram


@dataclass(frozen=True, slots=True)
class Stay:
    """A copy of ``key`` in ``tier`` from one use to the next one.

    Attributes:
        start: ticks of the two uses; ``stop`` may lie in the next step, then it is not later.
        stop: ticks of the two uses; ``stop`` may lie in the next step, then it is not later.
        held: ticks at which it takes room that it would not take anyway.
        nbytes: of its slot.
    """

    key: str
    tier: str
    start: int
    stop: int
    held: tuple[int, ...]
    nbytes: int


def choose_stays(
    program: StepProgram,
    homes: Mapping[str, str],
    slot_bytes: Mapping[str, Callable[[int], int]],
    room: Mapping[str, Sequence[int]],
) -> Stays:
    """Return the stays that fit, those that take room for the shortest time first.

    Args:
        slot_bytes: by tier, the size of a slot for contents of so many bytes.
        room: tier -> for every tick, the bytes that stays may take there.
    """
    left = {tier: list(by_tick) for tier, by_tick in room.items()}
    chosen: dict[tuple[int, str], int] = {}
    for stay in sorted(_possible(program, homes, slot_bytes), key=lambda stay: (len(stay.held), stay.start)):
        if all(left[stay.tier][tick] >= stay.nbytes for tick in stay.held):
            for tick in stay.held:
                left[stay.tier][tick] -= stay.nbytes
            chosen[stay.start, stay.key] = stay.stop
    return chosen


def _possible(
    program: StepProgram, homes: Mapping[str, str], slot_bytes: Mapping[str, Callable[[int], int]]
) -> Iterator[Stay]:
    length = len(program.ticks)
    for key, uses in _uses(program).items():
        for (start, _), (stop, mode) in zip(uses, uses[1:] + uses[:1], strict=True):
            tick, following = program.ticks[start], program.ticks[stop]
            tier = program.tier_of(tick, homes)
            if start == stop or homes[key] == tier or tier != program.tier_of(following, homes):
                continue
            if key in tick.spent or mode == "w":  # dead by then, or not read
                continue
            between = [number % length for number in range(start + 1, stop + (0 if stop > start else length))]
            # Of what passes through a tick only one is in its working set; those that stay are all there.
            ends = [end for end in (start, stop) if key in dict(program.ticks[end].passing)]
            nbytes = slot_bytes[tier](program.blocks[key].nbytes)
            yield Stay(key, tier, start, stop, (*between, *ends), nbytes)


def _uses(program: StepProgram) -> dict[str, list[tuple[int, str]]]:
    uses: dict[str, list[tuple[int, str]]] = {}
    for number, tick in enumerate(program.ticks):
        for key, mode in (*tick.held, *tick.passing):
            uses.setdefault(key, []).append((number, mode))
    return uses
