"""Choice of the copies that stay in a tier from one use to the next, as free memory and buffers permit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatrain.engine.program.step_program import NextUses, StepProgram
from megatrain.plan.copy_windows import CopyWindows, TickCopies


@dataclass(frozen=True, slots=True)
class RetainedCopy:
    """Copy of block ``key`` that stays in ``tier`` from one use to the next.

    Attributes:
        start: Tick of the first use.
        stop: Tick of the next use. If that use is in the next step, ``stop`` is at most ``start``.
        gaps: Ticks between the uses. The copy takes extra memory there.
        ends: Subset of the ticks ``start`` and ``stop`` at which the copy takes extra memory.
        nbytes: Size of the copy's slot.
    """

    key: str
    tier: str
    start: int
    stop: int
    gaps: tuple[range, ...]
    ends: tuple[int, ...]
    nbytes: int

    @property
    def num_held_ticks(self) -> int:
        """Number of ticks at which the copy takes extra memory."""
        return sum(map(len, self.gaps)) + len(self.ends)

    @property
    def held_ticks(self) -> Iterator[int]:
        """Ticks at which the copy takes extra memory."""
        return chain(*self.gaps, self.ends)

    def fits(self, free_bytes: Sequence[int]) -> bool:
        """Return whether the copy fits in ``free_bytes``, the free bytes at every tick."""
        if any(free_bytes[end] < self.nbytes for end in self.ends):
            return False
        return all(min(free_bytes[ticks.start : ticks.stop]) >= self.nbytes for ticks in self.gaps)


def choose_stays(
    program: StepProgram,
    homes: Mapping[str, str],
    slot_bytes: Mapping[str, Callable[[int], int]],
    room: Mapping[str, Sequence[int]],
    buffers: Mapping[str, BufferBudget] | None = None,
) -> NextUses:
    """Return the copies that stay. Copies that take memory for fewer ticks are chosen first.

    Args:
        slot_bytes: For each tier, a function that rounds the bytes of a block's contents up to slot bytes.
        room: Free bytes for stays at every tick, by tier.
        buffers: Buffers that must still fit, by tier. Each chosen stay is added to them.
    """
    free_bytes = {tier: list(by_tick) for tier, by_tick in room.items()}
    stays: dict[tuple[int, str], int] = {}
    for copy in sorted(_possible_stays(program, homes, slot_bytes), key=lambda stay: (stay.num_held_ticks, stay.start)):
        if not copy.fits(free_bytes[copy.tier]):
            continue
        if buffers is None or copy.tier not in buffers or buffers[copy.tier].add(copy, len(program.ticks)):
            for tick in copy.held_ticks:
                free_bytes[copy.tier][tick] -= copy.nbytes
            stays[copy.start, copy.key] = copy.stop
    return stays


def _possible_stays(
    program: StepProgram, homes: Mapping[str, str], slot_bytes: Mapping[str, Callable[[int], int]]
) -> Iterator[RetainedCopy]:
    num_ticks = len(program.ticks)
    for key, uses in _uses_by_key(program).items():
        for (start, _), (stop, mode) in zip(uses, uses[1:] + uses[:1], strict=True):
            tick, next_tick = program.ticks[start], program.ticks[stop]
            tier = program.tick_tier(tick, homes)
            if start == stop or homes[key] == tier or tier != program.tick_tier(next_tick, homes):
                continue
            if key in tick.spent or mode == "w":  # the next use does not read the current contents
                continue
            gaps = [range(start + 1, stop)] if stop > start else [range(start + 1, num_ticks), range(stop)]
            # Working sets count held blocks, but only one passing group, so other copies take extra memory.
            ends = [end for end in (start, stop) if key not in dict(program.ticks[end].held)]
            nbytes = slot_bytes[tier](program.blocks[key].nbytes)
            yield RetainedCopy(key, tier, start, stop, tuple(ticks for ticks in gaps if ticks), tuple(ends), nbytes)


def _uses_by_key(program: StepProgram) -> dict[str, list[tuple[int, str]]]:
    uses: dict[str, list[tuple[int, str]]] = {}
    for tick_index, tick in enumerate(program.ticks):
        for key, mode in tick.uses:
            uses.setdefault(key, []).append((tick_index, mode))
    return uses


def _pair_starts(ticks: Iterable[int], num_ticks: int) -> set[int]:
    """Return the first tick of each pair of consecutive ticks that contains one of ``ticks``."""
    return {(tick - offset) % num_ticks for tick in ticks for offset in (0, 1)}


class BufferBudget:
    """Buffers for the copies that two consecutive ticks need, counted per size, within a limit in bytes."""

    def __init__(self, copies: Sequence[TickCopies], room_bytes: int) -> None:
        counts = CopyWindows(copies).buffer_counts(2)
        self._counts: dict[int, list[int]] = {size: window_counts.tolist() for size, window_counts in counts.items()}
        self._max_counts: dict[int, int] = {size: max(counts) for size, counts in self._counts.items()}
        self._free_bytes = room_bytes - sum(size * count for size, count in self._max_counts.items())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the buffers exceed the available memory; 0 if they fit."""
        return max(0, -self._free_bytes)

    def add(self, copy: RetainedCopy, num_ticks: int) -> bool:
        """Add a copy that stays, if its buffer fits. Return whether it was added."""
        counted_ticks = {copy.start, copy.stop} - {*copy.held_ticks}  # these ticks' counts already include the copy
        windows = _pair_starts(copy.held_ticks, num_ticks) - _pair_starts(counted_ticks, num_ticks)
        counts = self._counts.setdefault(copy.nbytes, [0] * num_ticks)
        old_count = self._max_counts.get(copy.nbytes, 0)
        new_count = max([old_count, *(counts[window] + 1 for window in windows)])
        if (new_count - old_count) * copy.nbytes > self._free_bytes:
            return False
        for window in windows:
            counts[window] += 1
        self._max_counts[copy.nbytes] = new_count
        self._free_bytes -= (new_count - old_count) * copy.nbytes
        return True
