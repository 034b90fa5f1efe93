"""Copies complete checkpoints to ``output_dir/copies`` on a background thread, while training continues."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.copy_thread import CopyCancelledError, Throttle, run_on_thread
from megatrain.checkpoint.state import CheckpointError
from megatrain.checkpoint.writer import CheckpointFolder, begin_copy, finish_copy
from tiered import CopyFigures, GenerationReader, WholeCopies
from tiered.errors import TieredError
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.checkpoint.table import CheckpointSpec
    from megatrain.checkpoint.writer import Gather

__all__ = ["LocalCopier"]


@dataclass(frozen=True, slots=True)
class _CopyOutcome:
    """Result of this rank's part of a copy: its figures, or None and the error."""

    figures: CopyFigures | None
    problem: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _CopyJob:
    checkpoint: Checkpoint
    throttle: Throttle
    future: Future[_CopyOutcome]


class LocalCopier:
    """``Copier`` that copies checkpoints to ``output_dir/copies``.

    A background thread makes one copy at a time. A checkpoint that is due during a copy is queued, and a later
    checkpoint replaces it in the queue. Training waits only if the checkpoint being copied would be pruned. A failed
    copy is reported and never ends the run.

    Args:
        drive_bytes: Bytes of one checkpoint that are on drives, summed over ranks.
    """

    remote_save_number = 0

    def __init__(
        self, spec: CheckpointSpec, drive_bytes: int, on_message: Callable[[str], None], rank: int, gather: Gather
    ) -> None:
        table = spec.table
        self._copy_every, self._min_free_disk = table.copy_every, table.min_free_disk
        self._drive_bytes, self._on_message, self._rank = drive_bytes, on_message, rank
        self._path = spec.output_dir / COPIES_NAME
        folder = CheckpointFolder(self._path, rank, gather, table.save_total_limit, on_message, ignores_damage=True)
        self._folder, self._own_path = folder, self._path / folder.own
        self._source = spec.output_dir / CHECKPOINTS_NAME / folder.own
        self._drives = [path / folder.own for path in spec.drives]
        self._copies: WholeCopies | None = None  # opened by the first copy, so that an error fails only that copy
        self._job: _CopyJob | None = None
        self._next: Checkpoint | None = None
        self._has_reported_slow = False

    def offer(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Copy a new checkpoint, or queue it if another copy is in progress. See ``Copier.offer``."""
        self.poll()
        if not (self._newest() != checkpoint.number if is_last else self._is_due(checkpoint.number)):
            return
        if self._job is None:
            self._start(checkpoint)
        else:
            self._skip_next(self._job)
            self._next = checkpoint

    def poll(self) -> None:
        """Report a finished copy, and start the next one."""
        if self._job is None:
            return
        if not all(self._folder.gather(self._job.future.done())):
            return
        job, self._job = self._job, None
        self._complete(job.checkpoint, job.future.result())
        if self._next is not None:
            checkpoint, self._next = self._next, None
            self._start(checkpoint)

    def wait_until_prunable(self, checkpoints: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None:
        """Wait while a checkpoint that the next commit prunes is being copied, even if a stop is requested."""
        self.poll()
        if self._job is None or self._job.checkpoint.ranks not in [checkpoint.ranks for checkpoint in checkpoints]:
            return
        self._skip_next(self._job)  # the checkpoint being saved replaces the queued one
        self._wait(self._job)

    def finish(self) -> None:
        """Wait for all copies that are due, without throttling."""
        while (job := self._job) is not None:
            if not job.future.done():
                size = format_size(self._drive_bytes)
                self._on_message(f"copying the checkpoint of step {job.checkpoint.step} into '{self._path}', {size}")
            self._wait(job)

    def close(self) -> None:
        """Cancel the copy in progress and unlock the folder. Idempotent."""
        self._next = None
        if self._job is not None:
            self._job.throttle.cancel()
            wait([self._job.future])
        self._job = None
        if self._copies is not None:
            self._copies.close()

    # -- which checkpoints are copied --------------------------------------------------------------------------

    def _is_due(self, number: int) -> bool:
        """Return whether checkpoint ``number`` is at least ``copy_every`` saves newer than the newest copy."""
        if self._copy_every is None:
            return False
        newest_number = self._newest()
        # A smaller number means that earlier checkpoints were removed and numbering restarted.
        return number - newest_number >= self._copy_every or number < newest_number

    def _newest(self) -> int:
        """Return the number of the newest copy, including queued and unfinished copies, or 0 without copies."""
        current = None if self._job is None else self._job.checkpoint
        pending = [copy.number for copy in (current, self._next) if copy is not None]
        copies = [copy.number for copy in self._folder.known if copy.is_listed == self._folder.is_listed]
        return max([*copies, *pending, 0])

    def _skip_next(self, job: _CopyJob) -> None:
        if self._next is None:
            return
        if not self._has_reported_slow:
            self._has_reported_slow = True
            self._on_message(
                f"the checkpoint of step {self._next.step} is not copied: the copy of step {job.checkpoint.step} is "
                "still running, and a newer one is due. Save less often, or copy fewer: checkpoint.save_copy = 2"
            )
        self._next = None

    # -- one copy ----------------------------------------------------------------------------------------------

    def _start(self, checkpoint: Checkpoint) -> None:
        kept_generations, throttle = begin_copy(self._folder), Throttle()
        task = partial(self._run, checkpoint, kept_generations, throttle)
        self._job = _CopyJob(checkpoint, throttle, run_on_thread(task, "checkpoint-copy"))

    def _run(self, checkpoint: Checkpoint, kept_generations: Sequence[int], throttle: Throttle) -> _CopyOutcome:
        """Copy this rank's part of a checkpoint. Called on the copy's thread."""
        start_s, figures, problem = time.perf_counter(), None, ""
        try:
            figures = self._copy(checkpoint.ranks[self._rank].generation, kept_generations, throttle)
        except CopyCancelledError:
            problem = "it was cancelled"
        except Exception as error:
            problem = str(error)
        return _CopyOutcome(figures, problem, time.perf_counter() - start_s)

    def _copy(self, new_generation: int, generations: Sequence[int], throttle: Throttle) -> CopyFigures:
        """Copy a generation of this rank's store, and remove this rank's copies that are not in ``generations``."""
        if self._copies is None:
            self._copies = WholeCopies(self._own_path)
        # Prune first, so that the drive never contains more copies than planned. The newest copy is never removed.
        self._copies.keep_only(generations)
        free_bytes, need_bytes = shutil.disk_usage(self._own_path).free, self._drive_bytes + self._min_free_disk
        if free_bytes < need_bytes:
            raise TieredError(
                f"the drive of '{self._own_path}' has {format_size(free_bytes)} free, but a copy takes "
                f"{format_size(self._drive_bytes)} and checkpoint.min_free_disk is {format_size(self._min_free_disk)}. "
                f"Free {format_size(need_bytes - free_bytes)}"
            )
        start_s = time.perf_counter()

        def rest() -> None:
            nonlocal start_s
            start_s = throttle.pause(start_s)

        return self._copies.copy(GenerationReader(self._source, new_generation, self._drives), rest)

    def _wait(self, job: _CopyJob) -> None:
        """Wait for the current copy, and start the next copy. A signal can interrupt the wait."""
        job.throttle.disable()
        wait([job.future])
        self.poll()

    def _complete(self, checkpoint: Checkpoint, outcome: _CopyOutcome) -> None:
        """Combine all ranks' parts into a copy, and report the copy or the failure."""
        step = checkpoint.step
        try:
            copy_bytes, link_bytes = finish_copy(self._folder, checkpoint, outcome.figures, outcome.problem)
        except CheckpointError as error:
            self._on_message(
                f"the checkpoint of step {step} was not copied into '{self._path}': {error}. The original is "
                "whole; the next checkpoint is copied again"
            )
            return
        if self._copies is not None:
            with contextlib.suppress(OSError):  # if old copies cannot be removed, the next copy tries again
                self._copies.keep_only(self._folder.generations(self._folder.known))
        parts = f"{format_size(copy_bytes)} copied" + (f", {format_size(link_bytes)} linked" if link_bytes else "")
        self._on_message(
            f"copied checkpoint at step {step} into '{self._path}': {parts}, compared, in {outcome.seconds:.1f} s"
        )
