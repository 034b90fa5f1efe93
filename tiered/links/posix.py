"""Host memory <-> files: O_DIRECT reads and writes in large parts, on a few threads."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tiered.errors import TransferError
from tiered.links.base import LinkUsage
from tiered.links.meter import Meter
from tiered.links.workers import Workers
from tiered.memory.slab import HostSlab
from tiered.tiers.base import Slot
from tiered.tiers.files import ChunkFile, files_of
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, MiB, round_up

PART_BYTES = 16 * MiB
_MIN_THREADS = 4
_THREADS_PER_PATH = 2
_READ_PRIORITY, _WRITE_PRIORITY = 0, 1  # somebody waits for a read; writes have time


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a transfer: bytes ``start`` to ``stop`` of the slot, in one file; multiples of 4096."""

    file: ChunkFile
    start: int
    stop: int


class _Job:
    """A transfer under way: how many parts are left, and the first error."""

    def __init__(self, transfer: Transfer, slab: HostSlab, num_parts: int, meter: Meter) -> None:
        self.transfer = transfer
        self.slab = slab
        self.meter = meter
        self.error: TransferError | None = None
        self._num_left = num_parts
        self._lock = threading.Lock()

    def part_done(self, error: TransferError | None) -> None:
        with self._lock:
            self.error = self.error or error
            self._num_left -= 1
            if self._num_left:
                return
        self.meter.end(self.transfer.nbytes, moved=self.error is None)
        self.transfer.finish(self.error)


class IoEngine:
    """The threads that read and write one NvmeTier's files; shared by its read and its write link.

    At most ``num_threads`` parts of 16 MiB are in flight, reads and writes together; queued reads go first.
    A transfer ends when all its parts did, so that its slots are untouched from then on even after an error.
    """

    def __init__(self, tier: NvmeTier, *, num_threads: int | None = None, part_bytes: int = PART_BYTES) -> None:
        assert part_bytes > 0 and part_bytes % PAGE_BYTES == 0, part_bytes
        self.tier = tier
        self._part_bytes = part_bytes
        num_threads = num_threads or max(_MIN_THREADS, _THREADS_PER_PATH * len(tier.paths))
        self._workers = Workers(num_threads, f"tiered-{tier.name}")
        self._counting = threading.Lock()
        self._num_links = 0

    def start(self, files_slot: Slot, ram_slot: Slot, transfer: Transfer, meter: Meter, *, is_write: bool) -> None:
        """Queue all parts of a transfer between the two slots."""
        nbytes = transfer.nbytes
        slab = ram_slot.resource
        assert isinstance(slab, HostSlab), ram_slot
        assert nbytes <= min(files_slot.nbytes, ram_slot.nbytes), (nbytes, files_slot.nbytes, ram_slot.nbytes)
        parts = list(self._parts(files_of(files_slot).files, nbytes))
        meter.start(nbytes)
        job = _Job(transfer, slab, max(1, len(parts)), meter)
        priority = _WRITE_PRIORITY if is_write else _READ_PRIORITY
        if not parts:
            self._workers.submit(lambda: job.part_done(None), priority=priority)
        for part in parts:
            self._workers.submit(lambda part=part: self._run(job, part, is_write), priority=priority)  # type: ignore[misc]

    def _parts(self, files: tuple[ChunkFile, ...], nbytes: int) -> Iterator[Part]:
        # O_DIRECT moves whole 4096s. Both slots have them: the slab is rounded up, and so are the files.
        end = round_up(nbytes, PAGE_BYTES)
        for file in files:
            stop = min(file.offset + file.nbytes, end)
            for start in range(file.offset, stop, self._part_bytes):
                yield Part(file, start, min(start + self._part_bytes, stop))

    def _run(self, job: _Job, part: Part, is_write: bool) -> None:
        error: TransferError | None = None
        if job.error is None:  # else the transfer has failed already: its other parts are not worth moving
            try:
                self._move(job, part, is_write)
            except OSError as cause:
                error = self._wrap(cause, part, is_write)
            except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
                error = TransferError(f"transfer failed: {cause!r}", tier=self.tier.name, path=str(part.file.path))
                error.__cause__ = cause
        job.part_done(error)

    def _wrap(self, cause: OSError, part: Part, is_write: bool) -> TransferError:
        if isinstance(cause, TransferError):
            return cause
        error = TransferError(
            f"{'write' if is_write else 'read'} failed: {cause.strerror}",
            tier=self.tier.name,
            path=str(part.file.path),
            errno=cause.errno,
            offset=part.start - part.file.offset,
        )
        error.__cause__ = cause
        return error

    def _move(self, job: _Job, part: Part, is_write: bool) -> None:
        was_direct = self.tier.is_direct
        try:
            self._move_once(job, part, is_write)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
            # Some file systems accept O_DIRECT when a file is opened and refuse it when it is used.
            self.tier.stop_direct_io()
            self._move_once(job, part, is_write)
        if is_write:
            contents_end = min(part.stop, job.transfer.nbytes)
            self.tier.count_written(part.file.path_index, contents_end - part.start)

    def _move_once(self, job: _Job, part: Part, is_write: bool) -> None:
        fd = self.tier.open_for_write(part.file) if is_write else self.tier.open_for_read(part.file)
        try:
            with job.slab.view(part.start, part.stop) as view:
                offset = part.start - part.file.offset
                if is_write:
                    _write_all(fd, view, offset)
                else:
                    self._read_all(fd, view, offset, part)
            if not self.tier.is_direct:  # else the kernel would keep a copy of what the RAM tier accounts for
                os.posix_fadvise(fd, offset, part.stop - part.start, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _read_all(self, fd: int, view: memoryview, offset: int, part: Part) -> None:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                count = os.preadv(fd, [rest], offset + done)
            if count == 0:
                raise TransferError(
                    f"file ends {len(view) - done} bytes before the block does: it was cut off",
                    tier=self.tier.name,
                    path=str(part.file.path),
                    offset=offset + done,
                )
            done += count

    def link_opened(self) -> None:
        """Count a link that uses this engine."""
        with self._counting:
            self._num_links += 1

    def link_closed(self) -> None:
        """Stop the threads once the last link was closed, after everything queued has run."""
        with self._counting:
            self._num_links -= 1
            is_last = self._num_links == 0
        if is_last:
            self._workers.close()


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            done += os.pwritev(fd, [rest], offset + done)


class _PosixLink:
    """What both directions share."""

    def __init__(self, src: str, dst: str, engine: IoEngine) -> None:
        self.src = src
        self.dst = dst
        self._engine = engine
        self._meter = Meter()
        self._is_closed = False
        engine.link_opened()

    @property
    def path(self) -> str:
        """Return ``posix-direct``, or ``posix-buffered`` where the file system cannot do O_DIRECT."""
        return self._engine.tier.io_path

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish what is under way; the threads stop with the last link of the engine. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.link_closed()


class PosixReadLink(_PosixLink):
    """Reads home slots of an NvmeTier into slots of a RamTier."""

    def __init__(self, nvme: NvmeTier, ram: RamTier, engine: IoEngine) -> None:
        super().__init__(nvme.name, ram.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start reading the first ``nbytes`` of the files and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._engine.start(src_slot, dst_slot, transfer, self._meter, is_write=False)
        return transfer


class PosixWriteLink(_PosixLink):
    """Writes slots of a RamTier to home slots of an NvmeTier. Files that a snapshot holds are replaced, not written."""

    def __init__(self, ram: RamTier, nvme: NvmeTier, engine: IoEngine) -> None:
        super().__init__(ram.name, nvme.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start writing all contents of the slot (``nbytes`` must be the slot's) and return at once."""
        assert nbytes == dst_slot.nbytes, f"a part of a slot cannot be written: {nbytes} of {dst_slot.nbytes} bytes"
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._engine.start(dst_slot, src_slot, transfer, self._meter, is_write=True)
        return transfer
