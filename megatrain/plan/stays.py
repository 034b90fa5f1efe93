"""Choice of the copies that stay in a tier from one use to the next, as free memory and buffers permit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatrain.engine.program.step_program import Stays, StepProgram
from megatrain.plan.copy_windows import CopyWindows, TickCopies


@dataclass(frozen=True, slots=True)
class RetainedCopy:
    """Copy of block ``key`` that stays in ``tier`` from one use to the next.

    Attributes:
        start: Tick of the first use.
        stop: Tick of the next use. It is at most ``start`` if it belongs to the next step.
        between: Ticks between the uses. The copy takes extra memory there.
        ends: Subset of the ticks ``start`` and ``stop`` at which the copy takes extra memory.
        nbytes: Size of the copy's slot.
    """

    key: str
    tier: str
    start: int
    stop: int
    between: tuple[range, ...]
    ends: tuple[int, ...]
    nbytes: int

    @property
    def num_held(self) -> int:
        """Number of ticks at which the copy takes extra memory."""
        return sum(map(len, self.between)) + len(self.ends)

    @property
    def held(self) -> Iterator[int]:
        """Ticks at which the copy takes extra memory."""
        return chain(*self.between, self.ends)

    def fits(self, left: Sequence[int]) -> bool:
        """Return whether the copy fits in ``left``, the free bytes at every tick."""
        if any(left[end] < self.nbytes for end in self.ends):
            return False
        return all(min(left[each.start : each.stop]) >= self.nbytes for each in self.between)


def choose_stays(
    program: StepProgram,
    homes: Mapping[str, str],
    slot_bytes: Mapping[str, Callable[[int], int]],
    room: Mapping[str, Sequence[int]],
    buffers: Mapping[str, BufferBudget] | None = None,
) -> Stays:
    """Return the copies that stay. Copies that take memory for fewer ticks are chosen first.

    Args:
        slot_bytes: For each tier, a function that rounds the bytes of a block's contents up to slot bytes.
        room: Free bytes for stays at every tick, by tier.
        buffers: Buffers that must still fit, by tier. Each chosen stay is added to them.
    """
    left = {tier: list(by_tick) for tier, by_tick in room.items()}
    chosen: dict[tuple[int, str], int] = {}
    for stay in sorted(_possible_stays(program, homes, slot_bytes), key=lambda stay: (stay.num_held, stay.start)):
        if not stay.fits(left[stay.tier]):
            continue
        if buffers is None or stay.tier not in buffers or buffers[stay.tier].add(stay, len(program.ticks)):
            for tick in stay.held:
                left[stay.tier][tick] -= stay.nbytes
            chosen[stay.start, stay.key] = stay.stop
    return chosen


def _possible_stays(
    program: StepProgram, homes: Mapping[str, str], slot_bytes: Mapping[str, Callable[[int], int]]
) -> Iterator[RetainedCopy]:
    length = len(program.ticks)
    for key, uses in _uses(program).items():
        for (start, _), (stop, mode) in zip(uses, uses[1:] + uses[:1], strict=True):
            tick, following = program.ticks[start], program.ticks[stop]
            tier = program.tier_of(tick, homes)
            if start == stop or homes[key] == tier or tier != program.tier_of(following, homes):
                continue
            if key in tick.spent or mode == "w":  # the next use does not read the current contents
                continue
            between = [range(start + 1, stop)] if stop > start else [range(start + 1, length), range(stop)]
            # Working sets count held blocks, but only one passing group, so other copies take extra memory.
            ends = [end for end in (start, stop) if key not in dict(program.ticks[end].held)]
            nbytes = slot_bytes[tier](program.blocks[key].nbytes)
            yield RetainedCopy(key, tier, start, stop, tuple(each for each in between if each), tuple(ends), nbytes)


def _uses(program: StepProgram) -> dict[str, list[tuple[int, str]]]:
    uses: dict[str, list[tuple[int, str]]] = {}
    for number, tick in enumerate(program.ticks):
        for key, mode in tick.uses:
            uses.setdefault(key, []).append((number, mode))
    return uses


def _pairs_with(ticks: Iterable[int], num_ticks: int) -> set[int]:
    """Return the first tick of each pair of consecutive ticks that contains one of ``ticks``."""
    return {(number - before) % num_ticks for number in ticks for before in (0, 1)}


class BufferBudget:
    """Buffers for the copies that two consecutive ticks need, counted per size, within a limit in bytes."""

    def __init__(self, copies: Sequence[TickCopies], room_bytes: int) -> None:
        counts = CopyWindows(copies).counts(2)
        self._counts: dict[int, list[int]] = {size: of_windows.tolist() for size, of_windows in counts.items()}
        self._most: dict[int, int] = {size: max(counts) for size, counts in self._counts.items()}
        self._left_bytes = room_bytes - sum(size * count for size, count in self._most.items())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the buffers exceed the available memory; 0 if they fit."""
        return max(0, -self._left_bytes)

    def add(self, stay: RetainedCopy, num_ticks: int) -> bool:
        """Add a copy that stays, if its buffer fits. Return whether it was added."""
        used = {stay.start, stay.stop} - {*stay.held}  # these ticks' counts already include the copy
        windows = _pairs_with(stay.held, num_ticks) - _pairs_with(used, num_ticks)
        counts = self._counts.setdefault(stay.nbytes, [0] * num_ticks)
        before = self._most.get(stay.nbytes, 0)
        most = max([before, *(counts[number] + 1 for number in windows)])
        if (most - before) * stay.nbytes > self._left_bytes:
            return False
        for number in windows:
            counts[number] += 1
        self._most[stay.nbytes] = most
        self._left_bytes -= (most - before) * stay.nbytes
        return True
