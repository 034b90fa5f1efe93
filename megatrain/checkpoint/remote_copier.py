"""Copies every checkpoint to a URL before it is pruned locally, in order and concurrently with training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.checkpoint.copy_thread import CopyCancelledError, Throttle, run_on_thread
from megatrain.checkpoint.copy_transfer import Upload, find_run_files
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.listing import ignore_damage, read_checkpoints
from megatrain.checkpoint.object_folder import RemoteError
from megatrain.checkpoint.remote_folder import RemoteCheckpoint, RemoteFolder, RemotePart, UrlInUseError
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


class _UploadVerdict(IntEnum):
    """Result of an upload attempt, which decides how the run continues. If ranks differ, the largest value applies."""

    DONE = 0
    DAMAGED = 1  # the checkpoint is damaged, so it is not copied
    FAILED = 2  # the next try may succeed
    TAKEN = 3  # another run uses the URL, so this run ends


@dataclass(frozen=True, slots=True)
class _UploadOutcome:
    """Result of one try on one rank.

    Attributes:
        text: Error, or message to report when the copy is complete, or "".
        parts: Parts that the rank sent in this try.
    """

    verdict: _UploadVerdict
    text: str = ""
    parts: tuple[RemotePart, ...] = ()


@dataclass(frozen=True, slots=True)
class _UploadJob:
    """The copy in progress. First each rank sends its parts. Then rank 0 writes the document and removes old copies.

    Attributes:
        parts: Parts of all ranks; empty until all parts are sent.
        num_failed: Number of consecutive failed tries.
    """

    checkpoint: Checkpoint
    number: int
    upload: Upload
    parts: tuple[RemotePart, ...] = ()
    num_failed: int = 0
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def copy(self) -> RemoteCheckpoint:
        """The copy at the URL, with the parts that have been sent."""
        return RemoteCheckpoint(self.number, self.checkpoint.step or 0, self.parts, self.checkpoint)


@dataclass(frozen=True, slots=True)
class _UploadTry:
    job: _UploadJob
    future: Future[_UploadOutcome]


class RemoteCopier:
    """``Copier`` that copies every checkpoint to a URL.

    Copies are made one at a time, oldest first. Training waits only if a save would remove a checkpoint that is not yet
    at the URL. Failed tries are reported and retried with backoff, at most 60 s apart.

    Raises:
        CheckpointError: The URL cannot be read.
    """

    def __init__(self, spec: CheckpointSpec, on_message: Callable[[str], None], rank: int, gather: Gather) -> None:
        assert spec.table.copy_url is not None
        self._spec, self._on_message, self._rank, self._gather = spec, on_message, rank, gather
        self._source = spec.output_dir / CHECKPOINTS_NAME
        self._url = spec.table.copy_url
        listing: tuple[list[RemoteCheckpoint], list[Checkpoint]] | CheckpointError | None = None
        try:
            self._remote = RemoteFolder(self._url)
            if rank == 0:
                listing = self._remote.checkpoints(), read_checkpoints(self._source, ignore_damage)
        except CheckpointError as error:
            listing = error
        listings = gather(listing)
        for item in listings:
            if isinstance(item, CheckpointError):
                raise CheckpointError(str(item))
        copies, checkpoints = listings[0]
        newest_key = max((item.checkpoint.order_key for item in copies), default=(0, ""))
        self.remote_save_number = newest_key[0]
        self._size, self._number = len(listings), max((item.number for item in copies), default=0)
        self._copied_ids = {item.checkpoint.identity for item in copies}
        self._queue = [item for item in checkpoints if item.order_key > newest_key]
        self._try: _UploadTry | None = None
        self._has_reported_waiting = False

    def offer(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Queue a checkpoint for upload unless the URL has it. Unlike local copies, every checkpoint is copied."""
        identities = [pending.identity for pending in self._pending]
        if checkpoint.identity not in self._copied_ids and checkpoint.identity not in identities:
            self._queue.append(checkpoint)
        self.poll()

    def poll(self) -> None:
        """Report a finished copy, retry after a failure, and start the next copy.

        Raises:
            CheckpointError: Another run uses the URL.
        """
        if self._try is None:
            self._start_next()
            return
        job, future = self._try.job, self._try.future
        outcomes = self._gather(future.result() if future.done() else None)
        if any(outcome is None for outcome in outcomes):
            return
        worst_outcome = max(outcomes, key=lambda each: (each.verdict, each.text))
        if worst_outcome.verdict is not _UploadVerdict.DONE:
            self._fail(job, worst_outcome.verdict, worst_outcome.text)
        elif not job.parts:
            parts = sorted((part for outcome in outcomes for part in outcome.parts), key=lambda part: part.path)
            self._start_try(replace(job, parts=tuple(parts), num_failed=0))
        else:
            self._complete(job, worst_outcome.text)

    def wait_until_prunable(self, checkpoints: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None:
        """Wait until every checkpoint that the next commit prunes has been copied.

        If a stop was requested and the URL is unreachable, checkpoints are pruned without a copy, so that the newest
        steps can be saved.
        """
        identities = [checkpoint.identity for checkpoint in checkpoints]
        while any(checkpoint.identity in identities for checkpoint in self._pending):
            is_stopping = any(self._gather(should_stop()))
            if is_stopping and self._try is not None and self._try.job.num_failed:
                self._give_up(identities)
                return
            if not self._has_reported_waiting:
                self._has_reported_waiting = True
                step = next(checkpoint.step for checkpoint in self._pending if checkpoint.identity in identities)
                self._on_message(
                    f"training waits: the checkpoint of step {step} would be removed now, and is not in '{self._url}' "
                    "yet. Save less often, or keep more: checkpoint.save_total_limit"
                )
            self._poll_at_full_speed()

    def finish(self) -> None:
        """Wait for all copies, without throttling.

        Raises:
            CheckpointError: A copy still fails after ``LAST_TRY`` tries.
        """
        if self._try is None:
            self._start_next()
        if self._try is not None:
            steps = ", ".join(str(checkpoint.step) for checkpoint in self._pending)
            self._on_message(f"copying the checkpoint of step {steps} to '{self._url}'")
        while self._try is not None:
            job = self._try.job
            if job.num_failed >= LAST_TRY:
                raise CheckpointError(
                    f"the checkpoint of step {job.checkpoint.step} is not in '{self._url}', after {LAST_TRY} tries. "
                    f"It is whole in '{self._source}': repeat the same command to copy it"
                )
            self._poll_at_full_speed()

    def close(self) -> None:
        """Cancel the current copy. Idempotent."""
        self._queue.clear()
        self._cancel()

    # -- the steps of a copy -----------------------------------------------------------------------------------------

    @property
    def _pending(self) -> list[Checkpoint]:
        """Checkpoints whose upload is in progress or queued."""
        return [*([] if self._try is None else [self._try.job.checkpoint]), *self._queue]

    def _start_next(self) -> None:
        if not self._queue:
            return
        self._start_try(_UploadJob(self._queue.pop(0), self._number + 1, Upload(self._remote, Throttle())))

    def _start_try(self, job: _UploadJob, delay_s: float = 0.0) -> None:
        task = partial(self._run, job, delay_s)
        self._try = _UploadTry(job, run_on_thread(task, "checkpoint-upload", is_daemon=True))

    def _complete(self, job: _UploadJob, notice: str) -> None:
        self._try = None
        self._copied_ids.add(job.checkpoint.identity)
        self._number = job.number
        size, seconds = format_size(job.copy.nbytes), time.perf_counter() - job.start_s
        self._on_message(
            f"copied checkpoint at step {job.checkpoint.step} to '{self._url}': {size}, compared, in {seconds:.1f} s"
        )
        if notice:
            self._on_message(notice)
        self._start_next()

    def _fail(self, job: _UploadJob, verdict: _UploadVerdict, problem: str) -> None:
        """Report the error. Retry unless the checkpoint is damaged or another run uses the URL."""
        step = job.checkpoint.step
        if verdict is _UploadVerdict.TAKEN:
            raise CheckpointError(problem)
        if verdict is _UploadVerdict.DAMAGED:
            self._try = None
            self._on_message(
                f"the checkpoint of step {step} cannot be copied to '{self._url}', because it is damaged: {problem}"
            )
            self._start_next()
            return
        delay_s = min(MAX_DELAY_S, 2.0**job.num_failed)
        self._on_message(
            f"the checkpoint of step {step} is not in '{self._url}' yet: {problem}. It stays on its drive; next try "
            f"in {delay_s:.0f} s"
        )
        self._start_try(replace(job, num_failed=job.num_failed + 1), delay_s)

    def _give_up(self, identities: Sequence[tuple[int | None, str]]) -> None:
        skipped_checkpoints = [checkpoint for checkpoint in self._pending if checkpoint.identity in identities]
        if self._try is not None and self._try.job.checkpoint in skipped_checkpoints:
            self._cancel()
        self._queue = [checkpoint for checkpoint in self._queue if checkpoint not in skipped_checkpoints]
        steps = ", ".join(str(checkpoint.step) for checkpoint in skipped_checkpoints)
        self._on_message(
            f"stopping: '{self._url}' is out of reach, so the checkpoint of step {steps} is replaced by the last one "
            "without having been copied"
        )

    def _cancel(self) -> None:
        if self._try is not None:
            self._try.job.upload.throttle.cancel()
            wait([self._try.future])
        self._try = None

    def _poll_at_full_speed(self) -> None:
        """Let the current copy run at full speed for a moment, then call ``poll``."""
        if self._try is not None:
            self._try.job.upload.throttle.disable()
            wait([self._try.future], _POLL_S)
        self.poll()

    # -- one try, on its thread ----------------------------------------------------------------------------------

    def _run(self, job: _UploadJob, delay_s: float) -> _UploadOutcome:
        """Send this rank's parts. If all ranks have sent theirs, rank 0 commits the copy instead."""
        try:
            job.upload.throttle.delay(delay_s)
            if not job.parts:
                # If the run that saved the checkpoint had more ranks, each rank may have to send several parts.
                rank_indices = range(self._rank, job.checkpoint.world, self._size)
                return _UploadOutcome(_UploadVerdict.DONE, parts=tuple(self._send(job, part) for part in rank_indices))
            return _UploadOutcome(_UploadVerdict.DONE, self._commit(job.copy) if self._rank == 0 else "")
        except CopyCancelledError:
            return _UploadOutcome(_UploadVerdict.DONE)
        except UrlInUseError as error:
            return _UploadOutcome(_UploadVerdict.TAKEN, str(error))
        except (CorruptBlockError, GenerationError) as error:
            return _UploadOutcome(_UploadVerdict.DAMAGED, str(error))
        except Exception as error:
            return _UploadOutcome(_UploadVerdict.FAILED, str(error))

    def _send(self, job: _UploadJob, rank_index: int) -> RemotePart:
        rank = job.checkpoint.ranks[rank_index]
        drives = [path / rank.path for path in self._spec.drives]
        reader = GenerationReader(self._source / rank.path, rank.generation, drives)
        run_files = find_run_files(self._spec.output_dir) if rank_index == 0 else {}
        return job.upload.send(reader, job.copy.name, rank.path, run_files)

    def _commit(self, copy: RemoteCheckpoint) -> str:
        """Complete a copy and remove old copies. Return a notice if old copies cannot be removed, or ""."""
        table = self._spec.table
        self._remote.commit(copy)
        best = copy.checkpoint.meta.get("best") if table.load_best_model_at_end else None
        try:
            self._remote.prune(table.save_total_limit, None if best is None else best["step"])
        except RemoteError as error:
            return f"old copies could not be removed: {error}. The next copy tries again"
        return ""
