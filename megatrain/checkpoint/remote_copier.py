"""Copies of checkpoints at a URL, made by a thread while training goes on: each one, in order, before it is removed."""

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
    files_beside,
    identity,
)
from megatrain.checkpoint.state import CheckpointError
from tiered import GenerationReader, format_size
from tiered.errors import CorruptBlockError, GenerationError

if TYPE_CHECKING:
    from megatrain.checkpoint.table import CheckpointSpec
    from megatrain.checkpoint.writer import Gather

__all__ = ["RemoteCopier"]

#: Tries in a row that fail before the end of a run waits no longer; while training goes on there is no last one.
LAST_TRY = 8
#: Longest pause between two tries.
MAX_DELAY_S = 60.0
_POLL_S = 0.1


@dataclass
class _Job:
    """One copy: first each rank sends its parts, then rank 0 writes the document and removes old copies.

    Attributes:
        uploads: by part of this rank, what has been sent.
        parts: What all ranks have sent, once they have.
        num_failed: tries that failed since the last one that did not.
        notice: What is told once the copy is there.
        problem: The kind of error, and its message; None: there was none.
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
    """Copies every checkpoint to ``checkpoint.save_copy``. Used by the thread that trains.

    One copy is made at a time, the oldest first. Training waits only where a save would remove a checkpoint that is
    not there yet. A try that fails is told and repeated, sooner at first, then once a minute.

    Each rank sends its own part, and all call the same methods in the same order.

    Args:
        spec: where the run saves, and the URL.
        gather: returns what all ranks gave, by rank.

    Attributes:
        save_number: largest number of a save whose copy was at the URL at the start; 0: there was none.

    Raises:
        CheckpointError: the URL cannot be read.
    """

    def __init__(self, spec: CheckpointSpec, tell: Callable[[str], None], rank: int, gather: Gather) -> None:
        assert spec.table.copy_url is not None
        self._spec, self._tell, self._rank, self._gather = spec, tell, rank, gather
        self._source = spec.output_dir / CHECKPOINTS_NAME
        self._url = spec.table.copy_url
        found: Any = None
        try:
            self._remote = RemoteFolder(self._url)
            if rank == 0:
                found = self._look(), ""
        except CheckpointError as error:
            found = None, str(error)
        told = gather(found)
        for each in told:
            if each is not None and each[0] is None:
                raise CheckpointError(each[1])
        self._size = len(told)
        (self.save_number, self._number, self._there, self._queue), _ = told[0]
        self._job: _Job | None = None
        self._said_waiting = False
        self._hurry, self._cancelled = threading.Event(), threading.Event()

    def _look(self) -> tuple[int, int, set[tuple[int | None, str]], list[Checkpoint]]:
        """Return the largest number of a save there, that of a copy, which there are, and what is to be copied."""
        there = self._remote.checkpoints()
        newest = max(map(order_key, there), default=(0, ""))
        own = read_checkpoints(self._source, on_damage=lambda error: None)
        late = [each for each in own if each.problem is None and order_key(each) > newest]
        return newest[0], max((each.number for each in there), default=0), set(map(identity, there)), late

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def offer(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, unless it is there already."""
        waiting = [identity(each) for each in self._waiting]
        if identity(checkpoint) not in self._there and identity(checkpoint) not in waiting:
            self._queue.append(checkpoint)
        self.poll()

    def poll(self) -> None:
        """Report a copy that is there, repeat a try that failed, and start the next one.

        Raises:
            CheckpointError: another run has the URL.
        """
        job = self._job
        if job is None:
            self._start_next()
            return
        assert job.thread is not None
        own = None if job.thread.is_alive() else (job.found, job.notice, job.problem)
        told = self._gather(own)
        if any(each is None for each in told):
            return
        problems = [problem for _, _, problem in told if problem is not None]
        if problems:
            self._fail(job, *max(problems))
            return
        job.num_failed = 0
        if not job.parts:
            job.parts = tuple(sorted((part for parts, _, _ in told for part in parts), key=lambda part: part.path))
            self._begin(job)
            return
        self._job = None
        self._there.add(identity(job.checkpoint))
        self._number = job.number
        size, seconds = format_size(sum(part.nbytes for part in job.parts)), time.perf_counter() - job.start_s
        self._tell(
            f"copied checkpoint at step {job.checkpoint.step} to '{self._url}': {size}, compared, in {seconds:.1f} s"
        )
        for _, notice, _ in told:
            if notice:
                self._tell(notice)
        self._start_next()

    def wait_for_pruned(self, outgoing: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None:
        """Wait until no checkpoint that the next commit prunes is still to be copied.

        Where a stop was requested and the URL is out of reach, they go without: the newest steps are worth more.
        """
        going = [identity(each) for each in outgoing]
        while any(identity(each) in going for each in self._waiting):
            self._hurry.set()
            job = self._job
            is_stopping = any(self._gather(should_stop()))
            if is_stopping and job is not None and job.num_failed:
                self._give_up(going)
                return
            if not self._said_waiting:
                self._said_waiting = True
                step = next(each.step for each in self._waiting if identity(each) in going)
                self._tell(
                    f"training waits: the checkpoint of step {step} would be removed now, and is not in '{self._url}' "
                    "yet. Save less often, or keep more: checkpoint.save_total_limit"
                )
            self._wait_a_little()
            self.poll()

    def finish(self) -> None:
        """Wait for all copies, without rests from now on.

        Raises:
            CheckpointError: one cannot be made.
        """
        if self._queue and self._job is None:
            self._start_next()
        if self._job is not None:
            steps = ", ".join(str(each.step) for each in self._waiting)
            self._tell(f"copying the checkpoint of step {steps} to '{self._url}'")
        while self._job is not None:
            self._hurry.set()
            if self._job.num_failed >= LAST_TRY:
                step = self._job.checkpoint.step
                raise CheckpointError(
                    f"the checkpoint of step {step} is not in '{self._url}', after {LAST_TRY} tries. It is whole in "
                    f"'{self._source}': give the same command again, and it is copied"
                )
            self._wait_a_little()
            self.poll()

    def close(self) -> None:
        """Cancel the copy in flight. Idempotent."""
        self._queue.clear()
        self._cancel()

    # -- one copy ----------------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> list[Checkpoint]:
        """What is to be copied, or is being copied."""
        return [*([] if self._job is None else [self._job.checkpoint]), *self._queue]

    def _start_next(self) -> None:
        if not self._queue:
            return
        checkpoint = self._queue.pop(0)
        self._hurry.clear()
        # A rank that is no more left its part to the others.
        own = [part for part in range(checkpoint.world) if part % self._size == self._rank]
        uploads = {part: Upload(self._hurry, self._cancelled) for part in own}
        self._job = _Job(checkpoint, self._number + 1, uploads)
        self._begin(self._job)

    def _begin(self, job: _Job, delay_s: float = 0.0) -> None:
        job.found, job.notice, job.problem = [], "", None
        job.thread = threading.Thread(target=self._run, args=(job, delay_s), name="checkpoint-upload", daemon=True)
        job.thread.start()

    def _run(self, job: _Job, delay_s: float) -> None:
        """Be the thread of one try."""
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
        beside = files_beside(self._spec.output_dir) if number == 0 else None
        return self._remote.send(reader, self._copy_of(job).name, rank.path, upload, beside)

    def _commit(self, job: _Job) -> None:
        copy, table = self._copy_of(job), self._spec.table
        self._remote.commit(copy)
        best = copy.meta.get("best") if table.load_best_model_at_end else None
        try:
            self._remote.prune(table.save_total_limit, None if best is None else best["step"])
        except RemoteError as error:
            job.notice = f"old copies could not be removed: {error}. The next copy tries it again"

    def _fail(self, job: _Job, kind: str, problem: str) -> None:
        """Report what went wrong, and try again where that may help."""
        step = job.checkpoint.step
        if kind == "taken":
            raise CheckpointError(problem)
        if kind == "damaged":
            self._job = None
            self._tell(f"the checkpoint of step {step} cannot be copied to '{self._url}', it is damaged: {problem}")
            self._start_next()
            return
        job.num_failed += 1
        delay_s = min(MAX_DELAY_S, 2.0 ** (job.num_failed - 1))
        self._tell(
            f"the checkpoint of step {step} is not in '{self._url}' yet: {problem}. It stays where it lies; tried "
            f"again in {delay_s:.0f} s"
        )
        self._begin(job, delay_s)

    def _give_up(self, going: Sequence[tuple[int | None, str]]) -> None:
        lost = [each for each in self._waiting if identity(each) in going]
        if self._job is not None and self._job.checkpoint in lost:
            self._cancel()
        self._queue = [each for each in self._queue if each not in lost]
        steps = ", ".join(str(each.step) for each in lost)
        self._tell(
            f"stopping: '{self._url}' is out of reach, so the checkpoint of step {steps} makes way for the last one "
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
