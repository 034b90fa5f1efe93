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
    from megatrain.checkpoint.copier import Copier
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.checkpoint.writer import CheckpointWriter
    from tiered import Commit, TieredStore

#: Seconds between checks of a drive with too little free space.
RETRY_S = 1.0


class Saver:
    """Saver for a run's checkpoints. The training thread calls it.

    Args:
        should_stop: Function that returns whether a stop was requested. Called while the saver waits for disk space.
        written_bytes: Bytes of one checkpoint that this rank writes to the drive of ``output_dir``.
        writer: Writer for all ranks' checkpoints. All ranks must call the methods of their savers in the same order.
        saved: Newest checkpoint in the stores of this run's ranks, or None.

    Attributes:
        is_waiting: Whether the run is paused until the user frees disk space.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        store: TieredStore,
        writer: CheckpointWriter,
        observer: RunObserver,
        copier: Copier,
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
        self._store, self._observer = store, observer
        self._copier, self._should_stop, self._activity = copier, should_stop, activity
        self._written_bytes = written_bytes * len(writer.folder.paths)
        self._steps_per_epoch = steps_per_epoch
        self._path = Path(store.path or spec.output_dir)
        self._last_save_s = time.monotonic()
        self._in_flight: tuple[Commit, RunState, float] | None = None  # the last item is the stall so far, in seconds

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint, or None if there is no checkpoint."""
        return None if self._saved is None else self._saved.step

    def is_due(self, step: int) -> bool:
        """Return whether the config requests a checkpoint after step ``step``."""
        strategy = self._table.save_strategy
        if strategy == "steps":
            return step % self._table.save_steps == 0
        if strategy == "epoch":
            return step % self._steps_per_epoch == 0
        interval_s = self._table.save_interval
        return strategy == "time" and interval_s is not None and time.monotonic() - self._last_save_s >= interval_s

    def next_step(self, step: int) -> int | None:
        """Return the first step after ``step`` with a checkpoint, or None if saving is time-based or disabled."""
        interval = {"steps": self._table.save_steps, "epoch": self._steps_per_epoch}.get(self._table.save_strategy)
        return None if interval is None else (step // interval + 1) * interval

    def save(self, state: RunState, flush: Callable[[], AbstractContextManager[None]], *, wait: bool = False) -> None:
        """Save the run, unless a checkpoint of this step exists.

        The write continues in the background after the method returns, unless ``wait`` is set or ``async_save`` is off.

        Args:
            flush: Function that returns a context in which weights and state include the last step's update.

        Raises:
            CheckpointError: The drive has too little free space, and ``on_disk_full`` is "error".
            KeyboardInterrupt: The drive has too little free space, and a stop was requested. The user was notified.
            TransferError: This checkpoint or its predecessor could not be written. The newest complete one is kept.
        """
        in_flight_step = self._in_flight[1].step if self._in_flight is not None else self.saved_step
        if in_flight_step != state.step:
            start_s = time.perf_counter()
            self.finish()
            self._wait_for_space(state.step)
            self._copier.wait_until_prunable(self._writer.outgoing(), self._should_stop)
            with flush():
                self._writer.begin()
                state = replace(state, save_number=self._writer.next_save_number())
                commit = self._store.commit(state.to_meta())
            self._activity.saving = commit
            self._in_flight = commit, state, time.perf_counter() - start_s
            self._last_save_s = time.monotonic()
        if wait or not self._table.async_save:
            self.finish()

    def poll(self) -> None:
        """Report finished checkpoints and copies. Raises the same errors as ``finish``."""
        if self._in_flight is not None and self._writer.all_ranks_done(self._in_flight[0]):
            self.finish()
        self._copier.poll()

    def copy_last(self) -> None:
        """Start copying the newest checkpoint as the last one of this process, if copies are enabled."""
        if self._saved is not None:
            self._copier.offer(self._saved, is_last=True)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and report it.

        Raises:
            CheckpointError: A rank could not write its part.
            TransferError: The checkpoint of a single process could not be written.
        """
        if self._in_flight is None:
            return
        commit, state, stall_s = self._in_flight
        wait_start_s = time.perf_counter()
        checkpoint = self._writer.finish(commit, state.to_meta())
        stall_s += time.perf_counter() - wait_start_s
        self._in_flight, self._saved = None, checkpoint
        if state.best is not None and state.best.step == state.step:
            self._writer.folder.best = checkpoint
        folder, figures = self._writer.folder, commit.figures
        parts = folder.gather((figures.nbytes, figures.written_bytes, figures.linked_bytes))
        nbytes, new_bytes, link_bytes = (sum(counts) for counts in zip(*parts, strict=True))
        metrics = CheckpointMetrics(state.step, folder.path, nbytes, new_bytes, link_bytes, figures.seconds, stall_s)
        self._observer.on_checkpoint(metrics)
        self._copier.offer(checkpoint)

    def _wait_for_space(self, step: int) -> None:
        """Wait until the drive has space for one more checkpoint in addition to ``min_free_disk``.

        If a stop is requested meanwhile, the checkpoint may use ``min_free_disk``, because losing steps is worse
        than using the reserve. All ranks get the same numbers, so all ranks make the same decision.
        """
        need_bytes = self._written_bytes + self._table.min_free_disk
        while True:
            free_bytes, is_stopping = self._free_space()
            if free_bytes >= need_bytes:
                break
            if is_stopping and free_bytes >= self._written_bytes:
                self.is_waiting = False
                self._observer.on_message(
                    f"stopping: step {step} is saved into the space that checkpoint.min_free_disk keeps free. Free "
                    f"{format_size(need_bytes - free_bytes)} on the drive of '{self._path}' before you resume the run"
                )
                return
            text = (
                f"no room for a checkpoint: the drive of '{self._path}' has {format_size(free_bytes)} free, but one "
                f"takes {format_size(self._written_bytes)} there and checkpoint.min_free_disk is "
                f"{format_size(self._table.min_free_disk)}. Free {format_size(need_bytes - free_bytes)}"
            )
            if self._on_full == "error":
                raise CheckpointError(f"{text}, or lower min_free_disk. The previous checkpoint is whole")
            if is_stopping:
                lost_steps = "all steps" if self.saved_step is None else f"the steps after {self.saved_step}"
                text = f"step {step} cannot be saved, so {lost_steps} are lost: {text}"
                self._observer.on_message(text)
                raise KeyboardInterrupt(text)
            if not self.is_waiting:
                self.is_waiting = True
                self._observer.on_message(f"{text}: paused, nothing is lost; the run resumes automatically")
            time.sleep(RETRY_S)
        if self.is_waiting:
            self.is_waiting = False
            self._observer.on_message("there is room for a checkpoint again: the run continues")

    def _free_space(self) -> tuple[int, bool]:
        """Return the free bytes for a checkpoint, and whether a stop was requested. Identical on all ranks."""
        drive = next(path for path in (self._path, *self._path.parents) if path.exists())
        return self._writer.agree_on_free_space(lambda: shutil.disk_usage(drive).free, self._should_stop())
