"""Copies every checkpoint to a URL before it is pruned locally, in order and concurrently with training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.checkpoint.document import Checkpoint, order_key, read_checkpoints
from megatrain.checkpoint.remote import (
    RemoteCheckpoint,
    RemoteError,
    RemoteFolder,
    RemotePart,
    TakenError,
    Upload,
    UploadCancelledError,
    find_run_files,
    identity,
)
from megatrain.checkpoint.state import CheckpointError
from tiered import GenerationReader, format_size
from tiered.errors import CorruptBlockError, GenerationError

if TYPE_CHECKING:
    from megatrain.checkpoint.table import CheckpointSpec
    from megatrain.checkpoint.writer import Gather

__all__ = ["RemoteCopier"]

#: Number of consecutive failed tries after which ``finish`` gives up. During training, retries never end.
LAST_TRY = 8
#: Longest pause between two tries.
MAX_DELAY_S = 60.0
_POLL_S = 0.1


@dataclass
class _Job:
    """One copy. First each rank sends its parts. Then rank 0 writes the document and removes old copies.

    Attributes:
        uploads: Progress of this rank's uploads, by part.
        parts: Parts of all ranks; empty until all parts are sent.
        num_failed: Number of consecutive failed tries.
        found: Parts that this rank has sent.
        notice: Message to report when the copy is complete.
        problem: Kind and message of the error, or None.
    """

    checkpoint: Checkpoint
    number: int
    uploads: dict[int, Upload]
    start_s: float = field(default_factory=time.perf_counter)
    parts: tuple[RemotePart, ...] = ()
    num_failed: int = 0
    thread: threading.Thread | None = None
    found: list[RemotePart] = field(default_factory=list)
    notice: str = ""
    problem: tuple[str, str] | None = None


class RemoteCopier:
    """Copies every checkpoint to the URL in ``checkpoint.save_copy``. Called by the training thread.

    Copies are made one at a time, oldest first. Training waits only if a save would remove a checkpoint that is not yet
    at the URL. Failed tries are reported and retried with backoff, at most 60 s apart.

    Each rank sends its own part, and all ranks must call the same methods in the same order.

    Args:
        spec: Local folders of the run's checkpoints, and the URL.
        gather: All-gathers one object per rank.

    Attributes:
        save_number: Largest save number among the copies that were at the URL when the run started, or 0.

    Raises:
        CheckpointError: The URL cannot be read.
    """

    def __init__(self, spec: CheckpointSpec, on_message: Callable[[str], None], rank: int, gather: Gather) -> None:
        assert spec.table.copy_url is not None
        self._spec, self._on_message, self._rank, self._gather = spec, on_message, rank, gather
        self._source = spec.output_dir / CHECKPOINTS_NAME
        self._url = spec.table.copy_url
        found: Any = None
        try:
            self._remote = RemoteFolder(self._url)
            if rank == 0:
                found = self._read_remote(), ""
        except CheckpointError as error:
            found = None, str(error)
        gathered = gather(found)
        for each in gathered:
            if each is not None and each[0] is None:
                raise CheckpointError(each[1])
        self._size = len(gathered)
        (self.save_number, self._number, self._copied, self._queue), _ = gathered[0]
        self._job: _Job | None = None
        self._has_reported_waiting = False
        self._hurry, self._cancelled = threading.Event(), threading.Event()

    def _read_remote(self) -> tuple[int, int, set[tuple[int | None, str]], list[Checkpoint]]:
        """Return the largest save and copy numbers, the identities of the copies, and the checkpoints to copy."""
        there = self._remote.checkpoints()
        newest = max(map(order_key, there), default=(0, ""))
        own = read_checkpoints(self._source, on_damage=lambda error: None)
        late = [each for each in own if each.problem is None and order_key(each) > newest]
        return newest[0], max((each.number for each in there), default=0), set(map(identity, there)), late

    # -- methods for the training thread -----------------------------------------------------------------------

    def offer(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint for copying, unless the URL already contains it."""
        waiting = [identity(each) for each in self._waiting]
        if identity(checkpoint) not in self._copied and identity(checkpoint) not in waiting:
            self._queue.append(checkpoint)
        self.poll()

    def poll(self) -> None:
        """Report a finished copy, retry after a failure, and start the next copy.

        Raises:
            CheckpointError: Another run uses the URL.
        """
        job = self._job
        if job is None:
            self._start_next()
            return
        assert job.thread is not None
        own = None if job.thread.is_alive() else (job.found, job.notice, job.problem)
        gathered = self._gather(own)
        if any(each is None for each in gathered):
            return
        problems = [problem for _, _, problem in gathered if problem is not None]
        if problems:
            self._fail(job, *max(problems))
            return
        job.num_failed = 0
        if not job.parts:
            job.parts = tuple(sorted((part for parts, _, _ in gathered for part in parts), key=lambda part: part.path))
            self._begin(job)
            return
        self._job = None
        self._copied.add(identity(job.checkpoint))
        self._number = job.number
        size, seconds = format_size(sum(part.nbytes for part in job.parts)), time.perf_counter() - job.start_s
        self._on_message(
            f"copied checkpoint at step {job.checkpoint.step} to '{self._url}': {size}, compared, in {seconds:.1f} s"
        )
        for _, notice, _ in gathered:
            if notice:
                self._on_message(notice)
        self._start_next()

    def wait_for_pruned(self, outgoing: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None:
        """Wait until every checkpoint that the next commit prunes has been copied.

        If a stop was requested and the URL is unreachable, checkpoints are pruned without a copy, because the newest
        steps are worth more.
        """
        going = [identity(each) for each in outgoing]
        while any(identity(each) in going for each in self._waiting):
            self._hurry.set()
            job = self._job
            is_stopping = any(self._gather(should_stop()))
            if is_stopping and job is not None and job.num_failed:
                self._give_up(going)
                return
            if not self._has_reported_waiting:
                self._has_reported_waiting = True
                step = next(each.step for each in self._waiting if identity(each) in going)
                self._on_message(
                    f"training waits: the checkpoint of step {step} would be removed now, and is not in '{self._url}' "
                    "yet. Save less often, or keep more: checkpoint.save_total_limit"
                )
            self._wait_a_little()
            self.poll()

    def finish(self) -> None:
        """Wait for all copies, without throttling.

        Raises:
            CheckpointError: A copy still fails after ``LAST_TRY`` tries.
        """
        if self._queue and self._job is None:
            self._start_next()
        if self._job is not None:
            steps = ", ".join(str(each.step) for each in self._waiting)
            self._on_message(f"copying the checkpoint of step {steps} to '{self._url}'")
        while self._job is not None:
            self._hurry.set()
            if self._job.num_failed >= LAST_TRY:
                step = self._job.checkpoint.step
                raise CheckpointError(
                    f"the checkpoint of step {step} is not in '{self._url}', after {LAST_TRY} tries. It is whole in "
                    f"'{self._source}': repeat the same command to copy it"
                )
            self._wait_a_little()
            self.poll()

    def close(self) -> None:
        """Cancel the current copy. Idempotent."""
        self._queue.clear()
        self._cancel()

    # -- one copy ----------------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> list[Checkpoint]:
        """Checkpoints that wait for their copy or are being copied."""
        return [*([] if self._job is None else [self._job.checkpoint]), *self._queue]

    def _start_next(self) -> None:
        if not self._queue:
            return
        checkpoint = self._queue.pop(0)
        self._hurry.clear()
        # If there are fewer ranks than in the run that saved, the ranks divide all parts among them.
        own = [part for part in range(checkpoint.world) if part % self._size == self._rank]
        uploads = {part: Upload(self._hurry, self._cancelled) for part in own}
        self._job = _Job(checkpoint, self._number + 1, uploads)
        self._begin(self._job)

    def _begin(self, job: _Job, delay_s: float = 0.0) -> None:
        job.found, job.notice, job.problem = [], "", None
        job.thread = threading.Thread(target=self._run, args=(job, delay_s), name="checkpoint-upload", daemon=True)
        job.thread.start()

    def _run(self, job: _Job, delay_s: float) -> None:
        """Send this rank's parts, or commit the copy. Called on a thread for this one try."""
        try:
            if self._cancelled.wait(delay_s):
                return
            if not job.parts:
                job.found = [self._send(job, part, upload) for part, upload in job.uploads.items()]
            elif self._rank == 0:
                self._commit(job)
        except UploadCancelledError:
            pass
        except TakenError as error:
            job.problem = "taken", str(error)
        except (CorruptBlockError, GenerationError) as error:
            job.problem = "damaged", str(error)
        except Exception as error:
            job.problem = "failed", str(error)

    def _copy_of(self, job: _Job) -> RemoteCheckpoint:
        checkpoint = job.checkpoint
        return RemoteCheckpoint(
            job.number, checkpoint.step or 0, job.parts, checkpoint.meta, checkpoint.lanes, checkpoint.elements
        )

    def _send(self, job: _Job, number: int, upload: Upload) -> RemotePart:
        rank = job.checkpoint.ranks[number]
        drives = [path / rank.path for path in self._spec.drives]
        reader = GenerationReader(self._source / rank.path, rank.generation, drives)
        run_files = find_run_files(self._spec.output_dir) if number == 0 else None
        return self._remote.send(reader, self._copy_of(job).name, rank.path, upload, run_files)

    def _commit(self, job: _Job) -> None:
        copy, table = self._copy_of(job), self._spec.table
        self._remote.commit(copy)
        best = copy.meta.get("best") if table.load_best_model_at_end else None
        try:
            self._remote.prune(table.save_total_limit, None if best is None else best["step"])
        except RemoteError as error:
            job.notice = f"old copies could not be removed: {error}. The next copy tries again"

    def _fail(self, job: _Job, kind: str, problem: str) -> None:
        """Report the error. Retry unless the checkpoint is damaged or another run uses the URL."""
        step = job.checkpoint.step
        if kind == "taken":
            raise CheckpointError(problem)
        if kind == "damaged":
            self._job = None
            self._on_message(
                f"the checkpoint of step {step} cannot be copied to '{self._url}', because it is damaged: {problem}"
            )
            self._start_next()
            return
        job.num_failed += 1
        delay_s = min(MAX_DELAY_S, 2.0 ** (job.num_failed - 1))
        self._on_message(
            f"the checkpoint of step {step} is not in '{self._url}' yet: {problem}. It stays on its drive; next try "
            f"in {delay_s:.0f} s"
        )
        self._begin(job, delay_s)

    def _give_up(self, going: Sequence[tuple[int | None, str]]) -> None:
        lost = [each for each in self._waiting if identity(each) in going]
        if self._job is not None and self._job.checkpoint in lost:
            self._cancel()
        self._queue = [each for each in self._queue if each not in lost]
        steps = ", ".join(str(each.step) for each in lost)
        self._on_message(
            f"stopping: '{self._url}' is out of reach, so the checkpoint of step {steps} is replaced by the last one "
            "without having been copied"
        )

    def _cancel(self) -> None:
        self._cancelled.set()
        self._hurry.set()
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()
        self._job = None
        self._cancelled = threading.Event()

    def _wait_a_little(self) -> None:
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join(_POLL_S)
