"""Bytes that a program's steps move over each link, given the homes of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatrain.engine.program.step_program import NextUses, StepProgram
from megatrain.engine.tape.tape import Tape, compile_step
from tiered.ext import Routes


class Traffic:
    """Counter of the block bytes that each link (``"src->dst"``) moves."""

    def __init__(self, program: StepProgram, routes: Routes, homes: Mapping[str, str], stays: NextUses) -> None:
        self._program, self._routes, self._homes = program, routes, homes
        self._first = compile_step(program, homes, stays, updates=False)
        self._step = compile_step(program, homes, stays, pinned=self._first.pinned)
        if (pinned := self._step.pinned) != self._first.pinned:
            self._step = compile_step(program, homes, stays, pinned=pinned)
        self._last = compile_step(program, homes, stays, passes=False, pinned=pinned)

    def first_step_bytes(self) -> dict[str, int]:
        """Return the bytes that the first step moves. This step starts without copies and without pending updates."""
        return self._count(self._first)

    def step_bytes(self, is_counted: Callable[[str], bool] | None = None) -> dict[str, int]:
        """Return the bytes that each step between the first and the last moves.

        Args:
            is_counted: Function that returns whether to count the block with a key. Default: all blocks count.
        """
        return self._count(self._step, is_counted)

    def num_transfers(self, tier: str, is_counted: Callable[[str], bool] | None = None) -> int:
        """Return how many blocks each step between the first and the last moves into or out of a tier."""
        transfers = self._step.transfers(self._homes)
        return sum(tier in (src, dst) and (is_counted is None or is_counted(key)) for key, src, dst in transfers)

    def last_update_bytes(self) -> dict[str, int]:
        """Return the bytes that the updates after the last step move, including the final write-backs to homes."""
        moved_bytes = self._count(self._last)
        for key, pinned in self._last.pinned.items():
            if pinned.is_newer:
                self._add(moved_bytes, key, pinned.tier, self._homes[key])
        return moved_bytes

    def _count(self, tape: Tape, is_counted: Callable[[str], bool] | None = None) -> dict[str, int]:
        moved_bytes = {f"{src}->{dst}": 0 for src, dst in self._routes.links}
        for key, src, dst in tape.transfers(self._homes):
            if is_counted is None or is_counted(key):
                self._add(moved_bytes, key, src, dst)
        if not self._program.sharding.shards.is_local:
            moved_bytes.update(dict.fromkeys(self._program.links_between_ranks(), 0))
        for op in tape.ops:
            for link, nbytes in op.bytes_outside.items():
                moved_bytes[link] += nbytes
        return moved_bytes

    def _add(self, moved_bytes: dict[str, int], key: str, src: str, dst: str) -> None:
        for a, b in self._routes.between(src, dst):
            moved_bytes[f"{a}->{b}"] += self._program.blocks[key].nbytes
