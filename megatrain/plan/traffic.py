"""Planned traffic: what crosses each link in a step, from the program, the homes and the stays alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from tiered.relay import route

if TYPE_CHECKING:
    from megatrain.engine.program import Stays, StepProgram

#: Copies that wait for their next use: key -> (tier, whether they are newer than the home).
Waiting = dict[str, tuple[str, bool]]


class Traffic:
    """Counts contents by ``"src->dst"``.

    Args:
        order: names of the tiers, fast to slow. homes: block key -> tier. stays: copies that wait for their next use.
        direct: pairs of tiers that are no neighbours and have a link between them.
    """

    def __init__(
        self,
        program: StepProgram,
        order: Sequence[str],
        homes: Mapping[str, str],
        stays: Stays,
        direct: Collection[tuple[str, str]] = (),
    ) -> None:
        self._program, self._order, self._homes, self._stays = program, order, homes, stays
        self._direct = direct

    def of_first_step(self) -> dict[str, int]:
        """Return what a step moves that finds nothing waiting and nothing to update."""
        return self._count({}, updates=False)[0]

    def of_step(self) -> dict[str, int]:
        """Return what a step between the first and the last moves."""
        return self._count(self._after_steps(2))[0]

    def of_last_updates(self) -> dict[str, int]:
        """Return what the updates after the last step move, and what is left then on its way home."""
        moved, waiting = self._count(self._after_steps(2), passes=False)
        for key, (tier, is_newer) in waiting.items():
            if is_newer:
                self._add(moved, key, tier, self._homes[key])
        return moved

    def _after_steps(self, number: int) -> Waiting:
        waiting = self._count({}, updates=False)[1]
        for _ in range(number - 1):
            waiting = self._count(waiting)[1]
        return waiting

    def _count(self, waiting: Waiting, *, updates: bool = True, passes: bool = True) -> tuple[dict[str, int], Waiting]:
        """Return what the turns of a step move, and the copies that wait after it."""
        pairs = [(a, b) for a in self._order for b in self._order if a != b]
        moved = {f"{a}->{b}": 0 for src, dst in pairs for a, b in route(self._order, src, dst, self._direct)}
        here = dict(waiting)
        for _, tick, kept in self._program.turns(self._stays, updates=updates, passes=passes):
            tier = self._program.tier_of(tick, self._homes)
            for key, mode in (*tick.held, *tick.passing):
                if self._homes[key] == tier:
                    continue
                was_here = key in here
                _, was_newer = here.pop(key, (tier, False))
                if mode != "w" and not was_here:
                    self._add(moved, key, self._homes[key], tier)
                is_newer = mode != "r" or was_newer
                if key in kept:
                    here[key] = (tier, is_newer)
                elif is_newer and key not in tick.spent:
                    self._add(moved, key, tier, self._homes[key])
        return moved, here

    def _add(self, moved: dict[str, int], key: str, src: str, dst: str) -> None:
        for a, b in route(self._order, src, dst, self._direct):
            moved[f"{a}->{b}"] += self._program.blocks[key].nbytes
