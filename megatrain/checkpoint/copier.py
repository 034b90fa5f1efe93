"""Copies whole checkpoints to ``output_dir/copies`` or to a URL, on a thread, concurrently with training."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.remote_copier import RemoteCopier
from megatrain.checkpoint.writer import CheckpointFolder, CopyWriter
from tiered import CopyFigures, GenerationReader, WholeCopies
from tiered.errors import TieredError
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.checkpoint.table import CheckpointSpec
    from megatrain.checkpoint.writer import Gather

__all__ = ["CheckpointCopier"]


class _CancelledError(Exception):
    """The copy was cancelled before it was complete."""


@dataclass
class _CopyJob:
    """One copy: its checkpoint, its thread and its result.

    Attributes:
        kept: Generations of this rank's earlier copies that are kept when the copy prunes.
    """

    checkpoint: Checkpoint
    kept: Sequence[int] = ()
    thread: threading.Thread | None = None
    figures: CopyFigures | None = None
    error: Exception | None = None
    seconds: float = 0.0


class CheckpointCopier:
    """Makes the copies that ``checkpoint.save_copy`` requests. A context manager for the training thread.

    A background thread makes one copy at a time. It pauses half of the time, which leaves at least half of a drive's
    bandwidth to training. As soon as a caller waits for the thread, it runs at full speed. A checkpoint that is due
    during a copy is queued, and a later checkpoint replaces it in the queue. Training waits only if the checkpoint
    being copied would be pruned. A failed copy is reported and never ends the run. ``RemoteCopier`` has different rules
    for copies at a URL.

    Each rank copies its own part, and all ranks must call the same methods in the same order.

    Args:
        drive_bytes: Bytes of one checkpoint that are on drives and must be copied, summed over ranks. 0 if checkpoints
            are whole without copies.
        gather: All-gathers one object per rank (``RankGroup.gather``). Default: a single rank.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        drive_bytes: int,
        on_message: Callable[[str], None],
        rank: int = 0,
        gather: Gather = lambda item: [item],
    ) -> None:
        table = spec.table
        self.is_on = table.num_copies > 0 and drive_bytes > 0
        self._every = table.copy_every
        self._min_free_disk = table.min_free_disk
        self._drive_bytes, self._on_message = drive_bytes, on_message
        self._folder = spec.output_dir / COPIES_NAME
        self._remote = RemoteCopier(spec, on_message, rank, gather) if table.copy_url is not None else None
        if self.is_on:
            folder = CheckpointFolder(
                self._folder, rank, gather, table.save_total_limit, on_message, ignores_damage=True
            )
            own, self._writer = folder.own, CopyWriter(folder)
            self._rank, self._source, self._path = rank, spec.output_dir / CHECKPOINTS_NAME / own, self._folder / own
            self._drives = [path / own for path in spec.drives]
        self._copies: WholeCopies | None = None
        self._job: _CopyJob | None = None  # copy in flight
        self._next: _CopyJob | None = None  # queued copy
        self._has_reported_slow = False
        self._hurry = threading.Event()
        self._cancelled = threading.Event()

    def __enter__(self) -> CheckpointCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def remote_save_number(self) -> int:
        """Largest save number among the copies that were at the URL when the run started, or 0."""
        return 0 if self._remote is None else self._remote.save_number

    def offer(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Copy a new checkpoint, if a copy is due.

        Args:
            checkpoint: A checkpoint in these ranks' stores.
            is_last: Whether this is the last checkpoint of the process, which is always copied.
        """
        if self._remote is not None:
            self._remote.offer(checkpoint)
        if not self.is_on:
            return
        self.poll()
        if not (self._newest() != checkpoint.number if is_last else self._is_due(checkpoint.number)):
            return
        job = _CopyJob(checkpoint)
        if self._job is None:
            self._start(job)
        else:
            self._skip_next()
            self._next = job

    def poll(self) -> None:
        """Report a finished copy, and start the next one."""
        if self._remote is not None:
            self._remote.poll()
        if self._job is None or self._job.thread is None:
            return
        if not self._writer.are_done(not self._job.thread.is_alive()):
            return
        job, self._job = self._job, None
        moved, problem = self._writer.finish(job.checkpoint, job.figures, job.error)
        if self._copies is not None and moved is not None:
            with contextlib.suppress(OSError):  # if old copies cannot be removed, the next copy tries again
                self._copies.keep_only(self._writer.folder.generations(self._writer.folder.known))
        self._report(job, moved, problem)
        if self._next is not None:
            job, self._next = self._next, None
            self._start(job)

    def wait_for_pruned(self, outgoing: Sequence[Checkpoint], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until no checkpoint that the next commit prunes is being copied."""
        self.poll()
        if self._remote is not None:
            self._remote.wait_for_pruned(outgoing, should_stop)
        if self._job is None or self._job.checkpoint.ranks not in [each.ranks for each in outgoing]:
            return
        self._skip_next()  # the checkpoint being saved replaces the queued one
        self._wait()

    def finish(self) -> None:
        """Disable throttling, and wait for all copies that are due.

        Raises:
            CheckpointError: A copy cannot be sent to its URL.
        """
        if self._remote is not None:
            self._remote.finish()
        while self._job is not None:
            if self._job.thread is not None and self._job.thread.is_alive():
                size = format_size(self._drive_bytes)
                self._on_message(
                    f"copying the checkpoint of step {self._job.checkpoint.step} into '{self._folder}', {size}"
                )
            self._wait()

    def close(self) -> None:
        """Cancel the copy in flight and unlock the folder. Idempotent."""
        if self._remote is not None:
            self._remote.close()
        self._cancelled.set()
        self._hurry.set()
        self._next = None
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()
        self._job = None
        if self._copies is not None:
            self._copies.close()

    # -- one copy ----------------------------------------------------------------------------------------------

    def _is_due(self, number: int) -> bool:
        """Return whether ``copy_every`` checkpoints were saved since the newest copy, according to their numbers."""
        if self._every is None:
            return False
        newest = self._newest()
        # A smaller number means that earlier checkpoints were removed and numbering restarted.
        return number - newest >= self._every or number < newest

    def _newest(self) -> int:
        """Return the number of the newest copy, including unfinished copies, or 0 without copies."""
        pending = [job.checkpoint.number for job in (self._job, self._next) if job is not None]
        return max(self._writer.folder.newest_number, *pending, 0)

    def _skip_next(self) -> None:
        if self._next is None or self._job is None:
            return
        if not self._has_reported_slow:
            self._has_reported_slow = True
            due, going = self._next.checkpoint.step, self._job.checkpoint.step
            self._on_message(
                f"the checkpoint of step {due} is not copied: the copy of step {going} is still running, and a newer "
                "one is due. Save less often, or copy fewer: checkpoint.save_copy = 2"
            )
        self._next = None

    def _start(self, job: _CopyJob) -> None:
        self._hurry.clear()
        job.kept = self._writer.begin()
        job.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-copy")
        self._job = job
        job.thread.start()

    def _run(self, job: _CopyJob) -> None:
        """Make one copy. Called on the copy's thread."""
        start_s = time.perf_counter()
        try:
            job.figures = self._copy(job)
        except _CancelledError:
            pass
        except (TieredError, OSError) as error:
            job.error = error
        job.seconds = time.perf_counter() - start_s

    def _copy(self, job: _CopyJob) -> CopyFigures:
        if self._copies is None:
            self._copies = WholeCopies(self._path)
        copies = self._copies
        # Prune first, so that the drive never contains more than planned. The newest copy always stays.
        copies.keep_only(job.kept)
        free, need = shutil.disk_usage(self._path).free, self._drive_bytes + self._min_free_disk
        if free < need:
            raise TieredError(
                f"the drive of '{self._path}' has {format_size(free)} free, but a copy takes "
                f"{format_size(self._drive_bytes)} and checkpoint.min_free_disk is {format_size(self._min_free_disk)}. "
                f"Free {format_size(need - free)}"
            )
        reader = GenerationReader(self._source, job.checkpoint.ranks[self._rank].generation, self._drives)
        return copies.copy(reader, _Pace(self._hurry, self._cancelled).rest)

    def _wait(self) -> None:
        """Wait for the current copy, and start the next copy. A signal can interrupt the wait."""
        assert self._job is not None and self._job.thread is not None
        self._hurry.set()
        self._job.thread.join()
        self.poll()
        self._hurry.set()

    def _report(self, job: _CopyJob, moved: tuple[int, int] | None, problem: str) -> None:
        step = job.checkpoint.step
        if moved is None:
            self._on_message(
                f"the checkpoint of step {step} was not copied into '{self._folder}': {problem}. The original is "
                "whole; the next checkpoint is copied again"
            )
            return
        copied, linked = map(format_size, moved)
        parts = f"{copied} copied" + (f", {linked} linked" if moved[1] else "")
        self._on_message(
            f"copied checkpoint at step {step} into '{self._folder}': {parts}, compared, in {job.seconds:.1f} s"
        )


class _Pace:
    """Throttles a thread, so that it pauses half of the time until ``hurry`` is set."""

    def __init__(self, hurry: threading.Event, cancelled: threading.Event) -> None:
        self._hurry, self._cancelled = hurry, cancelled
        self._since_s = time.perf_counter()

    def rest(self) -> None:
        """Sleep for as long as the last piece took. Raises ``_CancelledError`` if the copy was cancelled."""
        if not self._hurry.is_set():
            self._hurry.wait(time.perf_counter() - self._since_s)
        if self._cancelled.is_set():
            raise _CancelledError
        self._since_s = time.perf_counter()
