"""Planned traffic: what crosses each link in a step, summed over the tapes of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from megatrain.engine.tape import Tape, compile_step
from tiered.relay import route

if TYPE_CHECKING:
    from megatrain.engine.program import Stays, StepProgram


class Traffic:
    """Counts contents by ``"src->dst"``.

    Args:
        order: names of the tiers, fast to slow.
        homes: of the placement.
        stays: of the placement.
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
        self._blocks, self._order, self._homes, self._direct = program.blocks, order, homes, direct
        self._first = compile_step(program, homes, stays, updates=False)
        kept = compile_step(program, homes, stays, kept=self._first.kept).kept
        self._step = compile_step(program, homes, stays, kept=kept)
        self._last = compile_step(program, homes, stays, passes=False, kept=kept)

    def of_first_step(self) -> dict[str, int]:
        """Return what a step moves that finds nothing waiting and nothing to update."""
        return self._count(self._first)

    def of_step(self, counts: Callable[[str], bool] | None = None) -> dict[str, int]:
        """Return what a step between the first and the last moves.

        Args:
            counts: whether a block counts, by key; default: all do.
        """
        return self._count(self._step, counts)

    def of_last_updates(self) -> dict[str, int]:
        """Return what the updates after the last step move, and what is left then on its way home."""
        moved = self._count(self._last)
        for key, kept in self._last.kept.items():
            if kept.is_newer:
                self._add(moved, key, kept.tier, self._homes[key])
        return moved

    def _count(self, tape: Tape, counts: Callable[[str], bool] | None = None) -> dict[str, int]:
        pairs = [(a, b) for a in self._order for b in self._order if a != b]
        moved = {f"{a}->{b}": 0 for src, dst in pairs for a, b in route(self._order, src, dst, self._direct)}
        for key, src, dst in tape.transfers(self._homes):
            if counts is None or counts(key):
                self._add(moved, key, src, dst)
        return moved

    def _add(self, moved: dict[str, int], key: str, src: str, dst: str) -> None:
        for a, b in route(self._order, src, dst, self._direct):
            moved[f"{a}->{b}"] += self._blocks[key].nbytes
