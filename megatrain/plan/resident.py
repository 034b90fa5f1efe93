"""Residents: blocks whose home is GPU memory, because that saves most seconds per byte held.

A layer's weights alone save next to nothing there: an update in RAM fetches them and sends them back. So what is
decided about is a *group*, the weights of a layout with their state: once all of it is at home where layers run, it is
updated there, and nothing of it moves any more (docs/decisions/0014-gpu-residency.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.engine.program import KINDS
from megatrain.engine.tape import Access, follow

if TYPE_CHECKING:
    from megatrain.engine.program import Kind, StepProgram
    from tiered.schedule import Mode

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Residency:
    """What is given about homes in the compute tier, where that is not RAM.

    Attributes:
        kinds: of blocks whose home the planner may put there.
        bus_s_per_byte: what a byte between it and RAM costs.
        host_update_s_per_element: what it costs that a weight is updated in RAM. On a machine that was not measured 1
            and 0: then bytes decide.
    """

    kinds: frozenset[Kind]
    bus_s_per_byte: float = 1.0
    host_update_s_per_element: float = 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Blocks that go together. Of two that save equally much per byte the lower ``rank`` goes first."""

    keys: tuple[str, ...]
    rank: tuple[float, ...]


class ResidentChooser:
    """Chooses residents of the compute tier, greedily.

    Args:
        slot_bytes: of that tier, for contents of so many bytes.
    """

    def __init__(self, program: StepProgram, residency: Residency, slot_bytes: Callable[[int], int]) -> None:
        self._program, self._residency, self._slot_bytes = program, residency, slot_bytes
        self._tier = program.compute_tier
        self._groups: dict[str, tuple[str, ...]] = {}
        self._uses: dict[str, list[tuple[int, Mode]]] = {key: [] for key in program.blocks}
        for number, tick in enumerate(program.ticks):
            for key, mode in (*tick.held, *tick.passing):
                self._uses[key].append((number, mode))
            if tick.phase == "update":
                group = tuple(key for key, _ in tick.held)
                self._groups.update(dict.fromkeys(group, group))
        self._candidates = [
            candidate
            for candidate in (*self._of_groups(), *self._of_blocks())
            if all(program.blocks[key].kind in residency.kinds for key in candidate.keys)
        ]
        self._of_key: dict[str, list[int]] = {}
        for number, candidate in enumerate(self._candidates):
            for key in candidate.keys:
                self._of_key.setdefault(key, []).append(number)

    def _of_groups(self) -> Iterator[_Candidate]:
        """Yield the groups that can be updated there, with their gradient and without."""
        if not self._program.updates_in_compute_tier:
            return
        updates = [tick for tick in self._program.ticks if tick.phase == "update"]
        for number, tick in enumerate(updates):
            # Spread over the model: between two layers that are fetched, one that is there leaves time for it.
            rank = (-1.0, number * _GOLDEN % 1.0)
            keys = tuple(key for key, _ in tick.held)
            yield _Candidate(keys, rank)
            yield _Candidate(tuple(key for key in keys if key not in tick.spent), rank)

    def _of_blocks(self) -> Iterator[_Candidate]:
        for number, block in enumerate(self._program.blocks.values()):
            yield _Candidate((block.key,), (KINDS.index(block.kind), number))

    def everything(self) -> Sequence[str]:
        """Return all blocks, if a step could do without any copy then; else nothing."""
        return list(self._program.blocks) if len(self._residency.kinds) == len(KINDS) else ()

    def choose(
        self,
        homes: Mapping[str, str],
        try_move: Callable[[Sequence[str]], bool],
        is_needed: Callable[[], bool] | None = None,
    ) -> None:
        """Move blocks, those first that save most per byte.

        Args:
            homes: of all blocks; seen as they change.
            try_move: makes the tier their home, or says that they do not fit.
            is_needed: where given, blocks go on moving as long as it says so, even if that costs time.
        """
        queue: list[tuple[float, tuple[float, ...], int]] = []
        self._push(queue, range(len(self._candidates)), homes)
        while queue and (is_needed is None or is_needed()):
            cost, _, number = heapq.heappop(queue)
            if is_needed is None and cost >= 0:
                return
            keys = self._left(number, homes)
            if not keys:
                continue
            if self._cost(keys, homes) != cost:  # others of the group have moved meanwhile, and it was queued anew
                continue
            if try_move(keys):
                self._push(queue, self._beside(keys), homes)

    def _push(
        self, queue: list[tuple[float, tuple[float, ...], int]], numbers: Sequence[int], homes: Mapping[str, str]
    ) -> None:
        for number in numbers:
            keys = self._left(number, homes)
            if keys:
                heapq.heappush(queue, (self._cost(keys, homes), self._candidates[number].rank, number))

    def _left(self, number: int, homes: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(key for key in self._candidates[number].keys if homes[key] != self._tier)

    def _beside(self, keys: Sequence[str]) -> Sequence[int]:
        """Return the candidates that have blocks of the same groups."""
        related = {other for key in keys for other in self._groups.get(key, (key,))}
        return sorted({number for key in related for number in self._of_key.get(key, ())})

    def _cost(self, keys: Sequence[str], homes: Mapping[str, str]) -> float:
        """Return the seconds per byte that a step takes longer if blocks move; negative if they are worth it."""
        related = dict.fromkeys(other for key in keys for other in self._groups.get(key, (key,)))
        after = {key: homes[key] for key in related} | dict.fromkeys(keys, self._tier)
        more_s = self._seconds(related, after) - self._seconds(related, homes)
        return more_s / max(1, sum(self._slot_bytes(self._program.blocks[key].nbytes) for key in keys))

    def _seconds(self, keys: Mapping[str, None], homes: Mapping[str, str]) -> float:
        """Return what a step spends on the bus for some blocks, and on their updates in RAM."""
        moved = sum(self._program.blocks[key].nbytes * self._num_moves(key, homes) for key in keys)
        updated = 0
        for key in keys:
            block = self._program.blocks[key]
            if block.kind == "weights" and key in self._groups:
                tick = self._program.ticks[next(n for n, mode in self._uses[key] if mode == "rw")]
                updated += block.num_elements * (self._program.tier_of(tick, homes) != self._tier)
        return moved * self._residency.bus_s_per_byte + updated * self._residency.host_update_s_per_element

    def _num_moves(self, key: str, homes: Mapping[str, str]) -> int:
        """Return how often a block crosses the bus in a step; from one tick to the very next its copy stays."""
        program, uses = self._program, self._uses[key]
        tiers = [program.tier_of(program.ticks[number], homes) for number, _ in uses]
        accesses = []
        for n, (number, mode) in enumerate(uses):
            is_last = key in program.ticks[number].spent
            follows = n + 1 < len(uses) and uses[n + 1][0] == number + 1
            is_kept = follows and uses[n + 1][1] != "w" and tiers[n + 1] == tiers[n] and not is_last
            accesses.append(Access(number, mode, tiers[n], is_last, is_kept))
        found, _ = follow(key, accesses, homes[key])
        # What moves between RAM and a drive does not cross the bus.
        lives_there = homes[key] == self._tier
        crosses = [lives_there != (tier == self._tier) for tier in tiers]
        return sum(use.fetches + use.writes_back for use, does in zip(found, crosses, strict=True) if does)
