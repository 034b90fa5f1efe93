"""Shared memory in which a child process reports its phase to its parent."""

from __future__ import annotations

import functools
import importlib
import mmap
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["PHASES", "Board", "watch"]

#: (module, qualified name, phase) of each watched function.
WATCHED = (
    ("megatrain.training.open_run", "OpenRun.load", "loading"),
    ("megatrain.training.training_loop", "TrainingLoop.run", "between steps"),
    ("megatrain.training.training_loop", "TrainingLoop.train_step", "step"),
    ("megatrain.training.training_loop", "TrainingLoop.export", "exporting"),
    ("megatrain.checkpoint.saver", "Saver.save", "saving"),
    ("megatrain.checkpoint.saver", "Saver.finish", "saving"),
    ("tiered.durable.commit", "FrozenBlocks.freeze", "freezing"),
    ("tiered.durable.commit", "FrozenBlocks.write", "writing"),
    ("tiered.tiers.snapshots", "Snapshots.sync", "flushing"),
    ("tiered.durable.generations", "sync_tree", "flushing"),
    ("tiered.durable.generations", "write_manifest", "flipping"),
    ("tiered.durable.generations", "Generations._forget_generations", "pruning"),
    ("tiered.durable.generations", "Generations._delete", "pruning"),
    ("tiered.durable.generations", "Generations._remove_unfinished", "pruning"),
    ("megatrain.checkpoint.local_copier", "LocalCopier._copy", "copying"),
)
#: Phases of the main, commit and copy threads. "" means no phase.
PHASES = ("", "starting", *dict.fromkeys(phase for _, _, phase in WATCHED))
_STEP_NAMES = ("reported", "resumed")
_STEPS, _FIGURES = 8, 64  # byte offsets; the first three bytes are the phases of the three threads
_LANES = {"MainThread": 0, "checkpoint-copy": 2}  # all other threads belong to a commit


class Board:
    """Shared memory with one writer per value. A reader may see a slightly outdated value."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def clear(self) -> None:
        """Reset all values, and set the phase of the main thread to ``starting``."""
        self._memory[:] = bytes(mmap.PAGESIZE)
        for name in _STEP_NAMES:
            self.set_step(name, -1)
        self.set_phase(0, "starting")

    def contents(self) -> bytes:
        """Return the contents of the memory, which change whenever a phase begins or ends."""
        return self._memory[: mmap.PAGESIZE]

    def phase(self, lane: int) -> str:
        """Return the phase of the main (0), commit (1) or copy (2) thread."""
        return PHASES[self._memory[lane]]

    def set_phase(self, lane: int, phase: str) -> None:
        """Set the phase of a thread."""
        self._memory[lane] = PHASES.index(phase)

    def where(self) -> str:
        """Return the phase of the main thread, then the phases of the commit and copy threads if they have one."""
        main, commit, copy = (self.phase(lane) for lane in range(3))
        return main + (f", commit {commit}" if commit else "") + (f", {copy}" if copy else "")

    def step(self, name: str) -> int:
        """Return the step of the newest ``reported`` checkpoint, or of the ``resumed`` checkpoint.

        Return -1 if no such checkpoint exists yet. For ``resumed``, 0 means that the run started from the beginning.
        """
        (step,) = struct.unpack_from("<q", self._memory, _STEPS + 8 * _STEP_NAMES.index(name))
        return int(step)

    def set_step(self, name: str, step: int) -> None:
        """Set the step of the ``reported`` or ``resumed`` checkpoint."""
        struct.pack_into("<q", self._memory, _STEPS + 8 * _STEP_NAMES.index(name), step)

    def figures(self, phase: str) -> tuple[int, float]:
        """Return how many times a phase began, and its total duration in seconds."""
        count, seconds = struct.unpack_from("<qd", self._memory, _FIGURES + 16 * PHASES.index(phase))
        return int(count), float(seconds)

    def add(self, phase: str, count: int, seconds: float) -> None:
        """Add to the count and to the duration of a phase."""
        before, before_s = self.figures(phase)
        offset = _FIGURES + 16 * PHASES.index(phase)
        struct.pack_into("<qd", self._memory, offset, before + count, before_s + seconds)


def watch(board: Board) -> None:
    """Wrap functions of the program so that they report phases and checkpoints to the board."""
    for module_name, name, phase in WATCHED:
        owner: Any = importlib.import_module(module_name)
        *classes, last = name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        setattr(owner, last, _report_phase(getattr(owner, last), board, phase))

    from megatrain.checkpoint.saver import Saver
    from megatrain.training.open_run import OpenRun

    finish, load = Saver.finish, OpenRun.load

    def finish_and_report(self: Saver) -> None:
        finish(self)
        if self.saved_step is not None:
            board.set_step("reported", self.saved_step)

    def load_and_report(self: OpenRun, *arguments: Any) -> Any:
        checkpoint = load(self, *arguments)
        board.set_step("resumed", 0 if checkpoint is None else checkpoint.state.step)
        return checkpoint

    setattr(Saver, "finish", finish_and_report)  # noqa: B010
    setattr(OpenRun, "load", load_and_report)  # noqa: B010


def _report_phase(function: Callable[..., Any], board: Board, phase: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        lane = _LANES.get(threading.current_thread().name, 1)
        before, start_s = board.phase(lane), time.perf_counter()
        board.set_phase(lane, phase)
        board.add(phase, 1, 0.0)
        try:
            return function(*arguments, **options)
        finally:
            board.add(phase, 0, time.perf_counter() - start_s)
            board.set_phase(lane, before)

    return call
