"""Saves checkpoints when they are due, one at a time, concurrently with training."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.observer import CheckpointMetrics, RunObserver
from megatrain.checkpoint.state import CheckpointError, RunState
from megatrain.checkpoint.table import CheckpointSpec
from tiered.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from megatrain.base.progress import Activity
    from megatrain.checkpoint.copier import CheckpointCopier
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.checkpoint.writer import CheckpointWriter
    from tiered import Commit, TieredStore

#: Seconds between checks of a drive with too little free space.
RETRY_S = 1.0


class Saver:
    """Saves a run. Used by the training thread.

    Args:
        ready: Context in which weights and state are final after the last step and change only in the next step.
        copier: makes whole copies of checkpoints.
        should_stop: whether a stop was requested; polled while the saver waits for disk space.
        written_bytes: bytes of one checkpoint that this rank writes to the drive of ``output_dir``.
        writer: makes checkpoints jointly with the other ranks, whose savers are called in the same order.
        saved: the newest checkpoint of these ranks, or None.

    Attributes:
        is_waiting: paused until disk space is freed.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        store: TieredStore,
        writer: CheckpointWriter,
        observer: RunObserver,
        ready: Callable[[], AbstractContextManager[None]],
        copier: CheckpointCopier,
        activity: Activity,
        *,
        should_stop: Callable[[], bool],
        written_bytes: int,
        steps_per_epoch: int,
        saved: Checkpoint | None = None,
    ) -> None:
        self._writer, self._saved = writer, saved
        self.is_waiting = False
        self._table, self._on_full = spec.table, spec.on_full
        self._store, self._observer, self._ready = store, observer, ready
        self._copier, self._should_stop, self._activity = copier, should_stop, activity
        self._written_bytes = written_bytes * len(writer.folder.paths)
        self._steps_per_epoch = steps_per_epoch
        self._path = Path(store.path or spec.output_dir)
        self._last_s = time.monotonic()
        self._in_flight: tuple[Commit, RunState, float] | None = None  # seconds stalled

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint, or None without one."""
        return None if self._saved is None else self._saved.step

    def is_due(self, step: int) -> bool:
        """Return whether the config requests a checkpoint after ``step`` steps."""
        strategy = self._table.save_strategy
        if strategy == "steps":
            return step % self._table.save_steps == 0
        if strategy == "epoch":
            return step % self._steps_per_epoch == 0
        interval_s = self._table.save_interval
        return strategy == "time" and interval_s is not None and time.monotonic() - self._last_s >= interval_s

    def next_step(self, step: int) -> int | None:
        """Return the first step after ``step`` at which a checkpoint is due, or None if saving is time-based or off."""
        every = {"steps": self._table.save_steps, "epoch": self._steps_per_epoch}.get(self._table.save_strategy)
        return None if every is None else (step // every + 1) * every

    def save(self, state: RunState, *, wait: bool = False) -> None:
        """Save the run, unless a checkpoint of this step exists.

        Returns once it holds only memory that is still to be written; a thread does the rest, except with ``wait`` or
        ``checkpoint.async_save = false``.

        Raises:
            CheckpointError: too little free space, with ``on_disk_full = "error"``.
            KeyboardInterrupt: too little free space and a stop was requested; already reported.
            TransferError: this checkpoint or the previous one could not be written. The newest whole one stays.
        """
        in_flight_step = self._in_flight[1].step if self._in_flight is not None else self.saved_step
        if in_flight_step != state.step:
            start_s = time.perf_counter()
            self.finish()
            self._wait_for_room(state.step)
            self._copier.wait_for_pruned(self._writer.outgoing(), self._should_stop)
            with self._ready():
                self._writer.begin()
                state = replace(state, save_number=self._writer.next_save_number())
                commit = self._store.commit(state.to_meta())
            self._activity.saving = commit
            self._in_flight = commit, state, time.perf_counter() - start_s
            self._last_s = time.monotonic()
        if wait or not self._table.async_save:
            self.finish()

    def poll(self) -> None:
        """Report a checkpoint and a copy that have finished. Raises as ``finish``."""
        if self._in_flight is not None and self._writer.are_whole(self._in_flight[0]):
            self.finish()
        self._copier.poll()

    def copy_last(self) -> None:
        """Start a copy of the newest checkpoint if copies are on; the last checkpoint of a run is always copied."""
        self._offer(is_last=True)

    def _offer(self, *, is_last: bool = False) -> None:
        """Offer the newest checkpoint to the copier."""
        if self._saved is not None:
            self._copier.offer(self._saved, is_last=is_last)

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one, and report it.

        Raises:
            CheckpointError: a rank could not write its part.
            TransferError: it could not be written.
        """
        if self._in_flight is None:
            return
        commit, state, stall_s = self._in_flight
        wait_start_s = time.perf_counter()
        saved = self._writer.finish(commit, state.to_meta())
        stall_s += time.perf_counter() - wait_start_s
        self._in_flight, self._saved = None, saved
        if state.best is not None and state.best["step"] == state.step:
            self._writer.folder.best = saved
        figures = commit.figures
        sizes = self._writer.of_all((figures.nbytes, figures.written_bytes, figures.linked_bytes))
        path = self._writer.folder.path
        self._observer.on_checkpoint(CheckpointMetrics(state.step, path, *sizes, figures.seconds, stall_s))
        self._offer()

    def _wait_for_room(self, step: int) -> None:
        """Wait until the drive of the checkpoints has room for one more and ``min_free_disk``.

        A stop requested meanwhile may use ``min_free_disk`` for its checkpoint: steps are worth more than the reserve.
        All ranks see the same figures, so they decide the same.
        """
        need = self._written_bytes + self._table.min_free_disk
        while True:
            free, is_stopping = self._room()
            if free >= need:
                break
            if is_stopping and free >= self._written_bytes:
                self.is_waiting = False
                self._observer.on_message(
                    f"stopping: step {step} is saved into the space that checkpoint.min_free_disk keeps free. "
                    f"Free {format_size(need - free)} on the drive of '{self._path}' before you resume the run"
                )
                return
            text = (
                f"no room for a checkpoint: the drive of '{self._path}' has {format_size(free)} free, one takes "
                f"{format_size(self._written_bytes)} there and checkpoint.min_free_disk is "
                f"{format_size(self._table.min_free_disk)}. Free {format_size(need - free)}"
            )
            if self._on_full == "error":
                raise CheckpointError(f"{text}, or lower min_free_disk. The previous checkpoint is whole")
            if is_stopping:
                since = "all steps" if self.saved_step is None else f"the steps after {self.saved_step}"
                text = f"step {step} cannot be saved, {since} are lost: {text}"
                self._observer.on_message(text)
                raise KeyboardInterrupt(text)
            if not self.is_waiting:
                self.is_waiting = True
                self._observer.on_message(f"{text}: paused, nothing is lost; the run resumes by itself")
            time.sleep(RETRY_S)
        if self.is_waiting:
            self.is_waiting = False
            self._observer.on_message("there is room for a checkpoint again: the run continues")

    def _room(self) -> tuple[int, bool]:
        """Return the bytes free for a checkpoint, and whether a stop was requested; equal on all ranks."""
        drive = next(path for path in (self._path, *self._path.parents) if path.exists())
        return self._writer.agree_on_room(lambda: shutil.disk_usage(drive).free, self._should_stop())
