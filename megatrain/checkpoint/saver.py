"""Saves checkpoints: when they are due, one at a time, written while training continues."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.checkpoint.ranks import RANKS_NAME, CheckpointId, prune_other_worlds
from megatrain.checkpoint.state import CheckpointError, CheckpointSpec, RunState
from megatrain.run.metrics import CheckpointMetrics, RunObserver
from tiered import newest_first
from tiered.errors import TieredError
from tiered.ext import files_below, generation_folder
from tiered.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatrain.checkpoint.copier import CheckpointCopier
    from megatrain.checkpoint.ranks import RankSaves
    from megatrain.run.activity import Activity
    from tiered import Commit, TieredStore

#: Seconds between checks of a drive with too little free space.
RETRY_S = 1.0


class Saver:
    """Saves a run. Used by the thread that trains.

    Args:
        spec: when, and how many are kept.
        begin: makes weights and state those after the last step, and nothing but the next step changes them again.
        copier: makes whole copies of what was saved.
        activity: is told what is being written.
        should_stop: whether a stop was requested; polled while the saver waits for disk space.
        written_bytes: what this rank writes of one checkpoint to the drive of ``output_dir``.
        saved_step: step of the newest checkpoint; None without one.
        saved_number: that of its generation, or of the checkpoint of several ranks; None without one.
        ranks: what this rank does together with the others, whose savers are called in the same order; None: alone.
        best: checkpoint of the best evaluation, which stays; None without one.

    Attributes:
        saved_step: as above, kept current.
        is_waiting: paused until disk space is freed.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        store: TieredStore,
        observer: RunObserver,
        begin: Callable[[], None],
        copier: CheckpointCopier,
        activity: Activity,
        *,
        should_stop: Callable[[], bool],
        written_bytes: int,
        steps_per_epoch: int,
        saved_step: int | None = None,
        saved_number: int | None = None,
        ranks: RankSaves | None = None,
        best: CheckpointId | None = None,
    ) -> None:
        if ranks is None:
            store.keep_also(self._best_one)
        self._ranks = ranks
        self._set_best(best)
        self.saved_step, self._saved_number = saved_step, saved_number
        self.is_waiting = False
        self._spec = spec
        self._store, self._observer, self._begin = store, observer, begin
        self._copier, self._should_stop, self._activity = copier, should_stop, activity
        self._written_bytes = written_bytes * (1 if ranks is None else ranks.world)
        self._steps_per_epoch = steps_per_epoch
        self._path = Path(store.path or spec.output_dir)
        self._last_s = time.monotonic()
        self._in_flight: tuple[Commit, RunState, float] | None = None  # seconds stalled

    def is_due(self, step: int) -> bool:
        """Return whether the config asks for a checkpoint now that ``step`` steps are done."""
        strategy = self._spec.strategy
        if strategy == "steps":
            return step % self._spec.every_steps == 0
        if strategy == "epoch":
            return step % self._steps_per_epoch == 0
        interval_s = self._spec.interval_s
        return strategy == "time" and interval_s is not None and time.monotonic() - self._last_s >= interval_s

    def next_step(self, step: int) -> int | None:
        """Return the first step after ``step`` at which a checkpoint is due; None: that is not known in steps."""
        every = {"steps": self._spec.every_steps, "epoch": self._steps_per_epoch}.get(self._spec.strategy)
        return None if every is None else (step // every + 1) * every

    def save(self, state: RunState, *, wait: bool = False) -> None:
        """Save the run as it stands, unless this step is saved already.

        Returns once nothing but memory that is still to be written is held; the rest is done by a thread, except with
        ``wait`` or ``checkpoint.async_save = false``.

        Raises:
            CheckpointError: too little free space, with ``on_disk_full = "error"``.
            KeyboardInterrupt: too little free space and a stop was requested; already reported.
            TransferError: it could not be written, or the one before could not. The newest whole one stays.
        """
        in_flight_step = self._in_flight[1].step if self._in_flight is not None else self.saved_step
        if in_flight_step != state.step:
            start_s = time.perf_counter()
            self.finish()
            self._wait_for_room(state.step)
            outgoing = self._outgoing(self._spec.keep - 1) if self._ranks is None else self._ranks.outgoing()
            self._copier.wait_for_those_that_go(outgoing)
            self._begin()
            if self._ranks is not None:
                self._ranks.begin()
            commit = self._store.commit(state.to_meta())
            self._activity.saving = commit
            self._in_flight = commit, state, time.perf_counter() - start_s
            self._last_s = time.monotonic()
        if wait or not self._spec.is_async:
            self.finish()

    def poll(self) -> None:
        """Report a checkpoint, and a copy, that has ended meanwhile. Raises as ``finish``."""
        if self._in_flight is not None:
            commit = self._in_flight[0]
            if commit.is_done if self._ranks is None else self._ranks.are_whole(commit):
                self.finish()
        self._copier.poll()

    def copy_last(self) -> None:
        """Begin a copy of the newest checkpoint, if copies are wanted: the last one of a run is always copied."""
        self._offer(is_last=True)

    def _offer(self, *, is_last: bool = False) -> None:
        """Have the newest checkpoint copied, if one is due."""
        number, step = self._saved_number, self.saved_step
        if number is not None and step is not None:
            of_ranks = None if self._ranks is None else self._ranks.find(number)
            self._copier.offer(number, step, ranks=of_ranks, is_last=is_last)

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one, and report it.

        Raises:
            TransferError: it could not be written.
        """
        if self._in_flight is None:
            return
        commit, state, stall_s = self._in_flight
        step = state.step
        wait_start_s = time.perf_counter()
        if self._ranks is None:
            commit.wait()
            number = commit.generation
            if (self._path / RANKS_NAME).exists():
                self._prune_of_ranks()
        else:
            number = self._ranks.finish(commit, state.to_meta()).number
        stall_s += time.perf_counter() - wait_start_s
        self._in_flight = None
        self.saved_step, self._saved_number = step, number
        if state.best is not None and state.best["step"] == step and number is not None:
            self._set_best(CheckpointId(number, is_of_ranks=self._ranks is not None))
        figures, path = commit.figures, self._path
        sizes = figures.nbytes, figures.written_bytes, figures.linked_bytes
        if self._ranks is not None:
            path, sizes = path.parent, self._ranks.of_all(sizes)
        self._observer.on_checkpoint(
            CheckpointMetrics(
                step,
                path,
                *sizes,
                figures.seconds,
                stall_s,
            )
        )
        self._offer()

    def _set_best(self, best: CheckpointId | None) -> None:
        self._best = best
        if self._ranks is not None:
            self._ranks.best = best

    def _best_one(self) -> list[int]:
        """Return the generation of the best checkpoint, where one process wrote it."""
        return [] if self._best is None or self._best.is_of_ranks else [self._best.number]

    def _prune_of_ranks(self) -> None:
        """Remove checkpoints of several ranks that are older than those to be kept: an earlier start wrote them."""
        try:
            prune_other_worlds(self._path, self._spec.keep, 1, self._best)
        except (TieredError, OSError) as error:
            self._observer.on_message(f"old checkpoints in '{self._path}' could not be removed: {error}")

    def _wait_for_room(self, step: int) -> None:
        """Wait until the drive of the checkpoints has room for one more and ``min_free_disk``.

        A stop requested meanwhile may use ``min_free_disk`` for its checkpoint: steps are worth more than that reserve.
        All ranks decide by the same figures, so they do the same.
        """
        need = self._written_bytes + self._spec.min_free_bytes
        while True:
            free, is_stopping = self._room()
            if free >= need:
                break
            if is_stopping and free >= self._written_bytes:
                self.is_waiting = False
                self._observer.on_message(
                    f"stopping: step {step} is saved into the space that checkpoint.min_free_disk keeps free. "
                    f"Free {format_size(need - free)} on the drive of '{self._path}' before the run goes on"
                )
                return
            text = (
                f"no room for a checkpoint: the drive of '{self._path}' has {format_size(free)} free, one takes "
                f"{format_size(self._written_bytes)} there and checkpoint.min_free_disk is "
                f"{format_size(self._spec.min_free_bytes)}. Free {format_size(need - free)}"
            )
            if self._spec.on_full == "error":
                raise CheckpointError(f"{text}, or lower min_free_disk. The checkpoint before is whole")
            if is_stopping:
                since = "all steps" if self.saved_step is None else f"the steps after {self.saved_step}"
                text = f"step {step} cannot be saved, {since} are lost: {text}"
                self._observer.on_message(text)
                raise KeyboardInterrupt(text)
            if not self.is_waiting:
                self.is_waiting = True
                self._observer.on_message(f"{text}: paused, nothing is lost; the run goes on by itself")
            time.sleep(RETRY_S)
        if self.is_waiting:
            self.is_waiting = False
            self._observer.on_message("there is room for a checkpoint again: the run goes on")

    def _room(self) -> tuple[int, bool]:
        """Return the bytes that a checkpoint may take, and whether a stop was requested; the same on all ranks."""
        drive = next(path for path in (self._path, *self._path.parents) if path.exists())
        if self._ranks is not None:
            return self._ranks.agree_on_room(lambda: shutil.disk_usage(drive).free, self._should_stop())
        return shutil.disk_usage(drive).free + self._outgoing_bytes(), self._should_stop()

    def _outgoing(self, keep: int) -> list[int]:
        """Return the generations that a commit removes of which the newest ``keep`` stay."""
        known = sorted(set(newest_first(self._path)) - set(self._best_one()))
        return known[: max(0, len(known) - keep)]

    def _outgoing_bytes(self) -> int:
        """Return what the generations take in ``output_dir`` that make way for the next one; copies may link it too."""
        outgoing = self._outgoing(max(1, self._spec.keep - 1))
        files = (file for number in outgoing for file in files_below(generation_folder(self._path, number)))
        return sum(status.st_blocks * 512 for file in files if (status := file.lstat()).st_nlink == 1)
