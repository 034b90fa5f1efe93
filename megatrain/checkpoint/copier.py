"""Whole copies of checkpoints in ``output_dir/copies``, made by a thread while training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.checkpoint.ranks import RANKS_NAME, prune_other_worlds, rank_folder_name
from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME, COPIES_NAME
from tiered import CopyFigures, GenerationReader, WholeCopies, newest_first
from tiered.errors import TieredError
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.checkpoint.ranks import RankCopies, RanksCheckpoint
    from megatrain.checkpoint.state import CheckpointSpec

__all__ = ["CheckpointCopier"]


class _CancelledError(Exception):
    """The copy was cancelled."""


@dataclass
class _Job:
    """One copy: its checkpoint, the thread that makes it, and what came of it."""

    number: int
    step: int
    ranks: RanksCheckpoint | None = None
    stays: Sequence[int] = ()
    """Of several ranks: the copies of this one that are not removed."""
    thread: threading.Thread | None = None
    figures: CopyFigures | None = None
    error: Exception | None = None
    seconds: float = 0.0


class CheckpointCopier:
    """Copies what ``checkpoint.save_copy`` asks for. Used by the thread that trains; a context manager.

    One copy is made at a time, by a background thread with a duty cycle of one half, so that it takes at most half of
    a drive's bandwidth; it runs at full speed once a caller waits for it. A checkpoint that is due while another is
    being copied is queued; a later one replaces it in the queue. Training waits only where the checkpoint being
    copied would be pruned. A failed copy is reported and costs the copy, never the run.

    Of several ranks each copies its own part, and all call the same methods in the same order.

    Args:
        spec: which checkpoints are copied, and where.
        drive_bytes: of one checkpoint, what lies on drives and is copied, by all ranks together. 0: checkpoints are
            whole without copies.
        tell: called with messages for the user.
        rank: this one, of several.
        ranks: what it does together with the others; None: it is alone.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        drive_bytes: int,
        tell: Callable[[str], None],
        rank: int = 0,
        ranks: RankCopies | None = None,
    ) -> None:
        self.is_on = spec.num_copies > 0 and drive_bytes > 0
        self._every = spec.copy_every
        self._keep, self._min_free_disk = spec.keep, spec.min_free_bytes
        self._drive_bytes, self._tell = drive_bytes, tell
        self._folder, self._rank, self._ranks = spec.output_dir / COPIES_NAME, rank, ranks
        own = "" if ranks is None else rank_folder_name(rank)
        self._source, self._path = spec.output_dir / CHECKPOINTS_NAME / own, self._folder / own
        self._drives = [path / own for path in spec.drives]
        self._copies: WholeCopies | None = None
        self._job: _Job | None = None  # under way
        self._next: _Job | None = None  # due after it
        self._said_slow = False
        self._hurry = threading.Event()
        self._cancelled = threading.Event()

    def __enter__(self) -> CheckpointCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, number: int, step: int, *, ranks: RanksCheckpoint | None = None, is_last: bool = False) -> None:
        """Copy a checkpoint that was committed, if one is due.

        Args:
            number: of the generation; of several ranks: of their checkpoint.
            step: steps done.
            ranks: what each rank has of it.
            is_last: it is the last one of this start of the run: it is copied unless it is already.
        """
        if not self.is_on:
            return
        self.poll()
        if not (self._newest() != number if is_last else self._is_due(number)):
            return
        job = _Job(number, step, ranks)
        if self._job is None:
            self._start(job)
        else:
            self._pass_over_next()
            self._next = job

    def poll(self) -> None:
        """Report a copy that has finished, and start the next one."""
        if self._job is None or self._job.thread is None:
            return
        is_done = not self._job.thread.is_alive()
        if not (is_done if self._ranks is None else self._ranks.are_done(is_done)):
            return
        job, self._job = self._job, None
        if self._ranks is not None and job.ranks is not None:
            job.figures, problem = self._ranks.finish(job.ranks, job.figures, job.error)
            job.error = None if job.figures is not None else TieredError(problem)
        self._report(job)
        if self._next is not None:
            job, self._next = self._next, None
            self._start(job)

    def wait_for_those_that_go(self, outgoing: Sequence[int]) -> None:
        """Wait until no checkpoint that the next commit prunes is being copied.

        Args:
            outgoing: numbers of the checkpoints that go.
        """
        self.poll()
        if self._job is None or self._job.number not in outgoing:
            return
        self._pass_over_next()  # the one that is committed now takes its place, and has more time
        self._wait()

    def finish(self) -> None:
        """Wait for all copies that are due, without rests from now on."""
        while self._job is not None:
            if self._job.thread is not None and self._job.thread.is_alive():
                size = format_size(self._drive_bytes)
                self._tell(f"copying the checkpoint of step {self._job.step} into '{self._folder}', {size}")
            self._wait()

    def close(self) -> None:
        """Cancel the copy in flight and unlock the folder. Idempotent."""
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
        """Whether so many checkpoints were saved since the newest copy; a copy has the number of its checkpoint."""
        if self._every is None:
            return False
        newest = self._newest()
        # A smaller number: the checkpoints were removed, and their numbers began anew.
        return number - newest >= self._every or number < newest

    def _newest(self) -> int:
        """Return the number of the newest copy, also one that is not made yet; 0: there is none."""
        pending = [job.number for job in (self._job, self._next) if job is not None]
        made = newest_first(self._path) if self._ranks is None else [self._ranks.newest]
        return max([*made, *pending], default=0)

    def _pass_over_next(self) -> None:
        if self._next is None or self._job is None:
            return
        if not self._said_slow:
            self._said_slow = True
            self._tell(
                f"the checkpoint of step {self._next.step} is not copied: the copy of step {self._job.step} still goes "
                "on, and a newer one is due. Save less often, or copy fewer: checkpoint.save_copy = 2"
            )
        self._next = None

    def _start(self, job: _Job) -> None:
        self._hurry.clear()
        job.stays = () if self._ranks is None else self._ranks.begin()
        job.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-copy")
        self._job = job
        job.thread.start()

    def _run(self, job: _Job) -> None:
        """Be the thread of one copy."""
        start_s = time.perf_counter()
        try:
            job.figures = self._copy(job)
        except _CancelledError:
            pass
        except (TieredError, OSError) as error:
            job.error = error
        job.seconds = time.perf_counter() - start_s

    def _copy(self, job: _Job) -> CopyFigures:
        if self._copies is None:
            self._copies = WholeCopies(self._path)
        copies = self._copies
        # Before the new one is made, so that the drive never holds more than the plan says; the newest always stays.
        if job.ranks is None:
            copies.prune(self._keep - 1)
        else:
            copies.keep_only(job.stays)
        free, need = shutil.disk_usage(self._path).free, self._drive_bytes + self._min_free_disk
        if free < need:
            raise TieredError(
                f"the drive of '{self._path}' has {format_size(free)} free, a copy takes "
                f"{format_size(self._drive_bytes)} and checkpoint.min_free_disk is {format_size(self._min_free_disk)}. "
                f"Free {format_size(need - free)}"
            )
        generation = job.number if job.ranks is None else job.ranks.ranks[self._rank].generation
        reader = GenerationReader(self._source, generation, self._drives)
        figures = copies.copy(reader, _Pace(self._hurry, self._cancelled).rest)
        if job.ranks is None:
            copies.prune(self._keep)
            if (self._path / RANKS_NAME).exists():  # of an earlier start
                prune_other_worlds(self._path, self._keep, 1)
        return figures

    def _wait(self) -> None:
        """Wait for the copy under way, and start the next one; a signal may interrupt it."""
        assert self._job is not None and self._job.thread is not None
        self._hurry.set()
        self._job.thread.join()
        self.poll()
        self._hurry.set()

    def _report(self, job: _Job) -> None:
        if job.error is not None:
            self._tell(
                f"the checkpoint of step {job.step} was not copied into '{self._folder}': {job.error}. It is whole "
                "where it lies; the next one is copied again"
            )
        elif job.figures is not None:
            copied, linked = format_size(job.figures.copied_bytes), format_size(job.figures.linked_bytes)
            parts = f"{copied} copied" + (f", {linked} linked" if job.figures.linked_bytes else "")
            self._tell(
                f"copied checkpoint at step {job.step} into '{self._folder}': {parts}, compared, in {job.seconds:.1f} s"
            )


class _Pace:
    """Throttles a thread to a duty cycle of one half, until it is told to hurry."""

    def __init__(self, hurry: threading.Event, cancelled: threading.Event) -> None:
        self._hurry, self._cancelled = hurry, cancelled
        self._since_s = time.perf_counter()

    def rest(self) -> None:
        """Sleep for the time the last piece took. Raises ``_CancelledError`` once the copy was cancelled."""
        if not self._hurry.is_set():
            self._hurry.wait(time.perf_counter() - self._since_s)
        if self._cancelled.is_set():
            raise _CancelledError
        self._since_s = time.perf_counter()
