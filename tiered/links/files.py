"""Memory <-> files: transfers cut into large parts, moved by a few threads, checked on the way.

How one part is moved is the business of a ``PartMover``: plain system calls (``posix.py``) or kvikio (``kvikio.py``).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from tiered.errors import CorruptBlockError, TieredError, TransferError
from tiered.file_io import PIECE_BYTES, checksum, drop_cached, pieces, read_all, write_all
from tiered.links.base import LinkUsage, Meter, Workers
from tiered.tiers.base import Slot
from tiered.tiers.gpu import DeviceBuffer, GpuTier
from tiered.tiers.layout import ChunkFile, HomeFiles, files_of, place_of
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import HostSlab, RamTier
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, MiB, round_up

PART_BYTES = 16 * MiB
_MIN_THREADS = 8
_THREADS_PER_PATH = 4
_PATIENT_SHARE = 2  # half of the threads is left to writes that wait
#: Resource of a slot, which a transfer reads or fills.
Memory = HostSlab | DeviceBuffer


class PartMover(Protocol):
    """Moves bytes between memory and one file of a tier. Called by several threads at once.

    A mover of device memory gets a tensor on the device, 1-D uint8, instead of a memoryview.
    """

    @property
    def path(self) -> str:
        """Return the path that bytes take now, e.g. ``posix-direct``."""
        ...

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` (bytes, multiple of 4096 like the length).

        Raises:
            OSError: the drive refused.
            TransferError: the file ends too early.
        """
        ...

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset``, to a file that no snapshot links. Raises ``OSError``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """A piece of a transfer: bytes ``start`` to ``stop`` of the slot, in one file; multiples of 4096."""

    file: ChunkFile
    start: int
    stop: int


class _FileTransfer:
    """A transfer in progress: how many parts are left, the first error, and which pieces have all their bytes."""

    def __init__(
        self, transfer: Transfer, memory: Memory, home: HomeFiles, parts: list[FilePart], meter: Meter
    ) -> None:
        self.transfer, self.memory, self.home, self.meter = transfer, memory, home, meter
        self.error: BaseException | None = None
        self.found: dict[int, str] = {}  # checksums by the start of their piece
        self._lock = threading.Lock()
        self._uncounted_bytes: Counter[int] = Counter()  # of a write, by path: not counted as wear yet
        for part in parts:
            self._uncounted_bytes[part.file.path_index] += part.stop - part.start
        self._num_left = max(1, len(parts))  # calls of `task_done` that end the transfer: one where nothing moves
        self._parts_left = {
            piece: sum(part.start < piece[1] and piece[0] < part.stop for part in parts)
            for piece in pieces(transfer.nbytes)
        }

    def count_wear(self, tier: NvmeTier) -> None:
        """Count the whole write for its paths before its first part is written; later calls do nothing.

        Raises:
            WearLimitError: a path may not be written that much.
            OSError: a drive refused.
        """
        with self._lock:
            if self._uncounted_bytes:
                tier.count_wear(self._uncounted_bytes)
                self._uncounted_bytes.clear()

    def arrived(self, part: FilePart) -> list[tuple[int, int]]:
        """Count a part as moved; return the pieces that it completed."""
        completed = []
        with self._lock:
            for piece in self._parts_left:
                if part.start < piece[1] and piece[0] < part.stop:
                    self._parts_left[piece] -= 1
                    if not self._parts_left[piece]:
                        completed.append(piece)
        return completed

    def digest_from(self, part: FilePart) -> None:
        """Note the checksums of the pieces that begin in a part: each begins in one."""
        for start in range(round_up(part.start, PIECE_BYTES), min(part.stop, self.transfer.nbytes), PIECE_BYTES):
            self.found[start] = self.digest((start, min(start + PIECE_BYTES, self.transfer.nbytes)))

    def digest(self, piece: tuple[int, int]) -> str:
        """Return the checksum of a piece as it is in memory."""
        with self.memory.view(*piece) as view:
            return checksum(view)

    def task_done(self, error: BaseException | None) -> bool:
        """Count a task as ended; True for the last one."""
        with self._lock:
            self.error = self.error or error
            self._num_left -= 1
            return self._num_left == 0


class FileEngine:
    """The threads that read and write one NvmeTier's files; shared by its read and its write link.

    At most ``num_threads`` parts of 16 MiB are in flight, reads and writes together. Queued reads go first, but leave
    half of the threads to writes: a drive does both at once, and waiting writes hold room that reads need. A transfer
    ends when all its parts have ended, so that its slots are untouched from then on even after an error.

    Contents get their checksums when they are written (unless ``tier.verify`` is ``off``) and are compared when they
    are read (``always``). The thread that moves the bytes does both without the interpreter's lock. Writes from a
    GpuTier get no checksums, because the bytes are not in RAM.

    Device streams do not order file I/O. So parts of a GpuTier's slot move once the device has finished all work that
    was recorded as using the slot; two separate threads wait for that. After a read has ended, its bytes are in device
    memory, and kernels that are queued later need no further order.
    """

    def __init__(
        self, tier: NvmeTier, mover: PartMover, *, num_threads: int | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        assert part_bytes > 0 and part_bytes % PAGE_BYTES == 0, part_bytes
        self.tier, self.mover = tier, mover
        self._part_bytes = part_bytes
        num_threads = num_threads or max(_MIN_THREADS, _THREADS_PER_PATH * len(tier.paths))
        self._workers = Workers(num_threads, f"tiered-{tier.name}", num_patient=num_threads // _PATIENT_SHARE)
        self._order = Workers(2, f"tiered-{tier.name}-order", num_patient=1)
        self._counting = threading.Lock()
        self._num_links = 0

    # -- transfers ---------------------------------------------------------------------------------------------

    def start(self, files_slot: Slot, fast_slot: Slot, transfer: Transfer, meter: Meter, *, is_write: bool) -> None:
        """Queue all parts of a transfer between the two slots."""
        memory, home = fast_slot.resource, files_of(files_slot)
        assert isinstance(memory, Memory), fast_slot
        assert transfer.nbytes <= min(files_slot.nbytes, fast_slot.nbytes), (transfer.nbytes, files_slot, fast_slot)
        parts = list(self._parts(home.files, transfer.nbytes))
        meter.start(transfer.nbytes)
        job = _FileTransfer(transfer, memory, home, parts, meter)
        if isinstance(memory, HostSlab) or memory.is_idle():
            self._queue(job, parts, is_write)
        else:
            self._order.submit(lambda: self._queue_after(memory, job, parts, is_write), urgent=not is_write)

    def _queue_after(self, buffer: DeviceBuffer, job: _FileTransfer, parts: list[FilePart], is_write: bool) -> None:
        try:
            buffer.wait()
        except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
            job.error = TransferError(f"the device failed: {cause}", tier=f"{job.transfer.src}->{job.transfer.dst}")
            job.error.__cause__ = cause
        self._queue(job, parts, is_write)

    def _queue(self, job: _FileTransfer, parts: list[FilePart], is_write: bool) -> None:
        if is_write:
            job.home.checksums, job.home.is_flushed = None, False  # until all the new ones are known
        tasks: list[FilePart | None] = [*parts] or [None]
        for part in tasks:
            # Callers wait for reads; writes have time.
            self._workers.submit(lambda part=part: self._run(job, part, is_write), urgent=not is_write)  # type: ignore[misc]

    def _parts(self, files: tuple[ChunkFile, ...], nbytes: int) -> Iterator[FilePart]:
        # O_DIRECT moves multiples of 4096 bytes. Both slots have them: the slab is rounded up, and so are the files.
        end = round_up(nbytes, PAGE_BYTES)
        for file in files:
            stop = min(file.offset + file.nbytes, end)
            for start in range(file.offset, stop, self._part_bytes):
                yield FilePart(file, start, min(start + self._part_bytes, stop))

    def _run(self, job: _FileTransfer, part: FilePart | None, is_write: bool) -> None:
        error: BaseException | None = None
        if job.error is None and part is not None:  # else nothing to move, or the transfer has failed
            try:
                if is_write and self.tier.verify != "off" and isinstance(job.memory, HostSlab):
                    job.digest_from(part)  # first: the drive's copy finds the bytes in the processor's cache
                self._move(job, part, is_write)
                if not is_write and self.tier.verify == "always":
                    self._compare(job, job.arrived(part))
            except TieredError as cause:  # damage, a limit, a truncated file: it needs no context
                error = cause
            except OSError as cause:
                error = self._wrap(cause, part, is_write)
            except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
                error = TransferError(f"transfer failed: {cause!r}", tier=self.tier.name, path=str(part.file.path))
                error.__cause__ = cause
        if job.task_done(error):
            self._finish(job, is_write)

    def _finish(self, job: _FileTransfer, is_write: bool) -> None:
        if is_write and job.error is None and job.found:
            job.home.checksums = tuple(job.found[start] for start, _ in pieces(job.transfer.nbytes))
        job.meter.end(job.transfer.nbytes, moved=job.error is None)
        try:
            if is_write and job.error is not None:
                number = job.error.errno if isinstance(job.error, OSError) else None
                self.tier.notice(
                    f"block '{job.home.key}' could not be written and stays in memory: {job.error}",
                    once=f"write:{type(job.error).__name__}:{number}",
                )
        finally:
            job.transfer.finish(job.error)

    # -- one part ----------------------------------------------------------------------------------------------

    def _move(self, job: _FileTransfer, part: FilePart, is_write: bool) -> None:
        with job.memory.view(part.start, part.stop) as view:
            if not is_write:
                with self._measured(part, is_write=False):
                    self.mover.read(part.file, part.start - part.file.offset, view)
                return
            while True:
                try:
                    job.count_wear(self.tier)
                    with self._measured(part, is_write=True):
                        self.mover.write(part.file, part.start - part.file.offset, view)
                    break
                except OSError as cause:
                    self.tier.full.wait(self.tier.paths[part.file.path_index], part.file.nbytes, cause)
        self.tier.full.wrote(self.tier.paths[part.file.path_index])
        contents_end = min(part.stop, job.transfer.nbytes)
        self.tier.count_written(part.file.path_index, contents_end - part.start)

    def _measured(self, part: FilePart, *, is_write: bool) -> AbstractContextManager[None]:
        index = part.file.path_index
        path = self.tier.paths[index]
        return self.tier.meters[index].moving(
            part.stop - part.start,
            is_write=is_write,
            on_slow=lambda figures: self.tier.notice(
                f"path '{path}' has slowed down: {figures}. Look for other work on its drive, heat, or a failing drive",
                once=f"slow:{path}",
            ),
        )

    def _compare(self, job: _FileTransfer, completed: list[tuple[int, int]]) -> None:
        """Compare the pieces that are whole now with the checksums of the last write."""
        if job.home.checksums is None:
            return  # nothing was written since the tier began to check
        for start, stop in completed:
            expected, found = job.home.checksums[start // PIECE_BYTES], job.digest((start, stop))
            if found != expected:
                raise CorruptBlockError(job.home.key, expected, found, place=place_of(job.home.files, start, stop))

    def _wrap(self, cause: OSError, part: FilePart, is_write: bool) -> TransferError:
        error = TransferError(
            f"{'write' if is_write else 'read'} failed: {explain(cause)}",
            tier=self.tier.name,
            path=str(part.file.path),
            errno=cause.errno,
            offset=part.start - part.file.offset,
        )
        error.__cause__ = cause
        return error

    # -- the threads -------------------------------------------------------------------------------------------

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
            self._order.close()
            self._workers.close()
            self.mover.close()


class _FileLink:
    """Base of both directions."""

    def __init__(self, src: str, dst: str, engine: FileEngine) -> None:
        self.src = src
        self.dst = dst
        self.engine = engine
        self._meter = Meter()
        self._is_closed = False
        engine.link_opened()

    @property
    def path(self) -> str:
        """Return the path that bytes take now, e.g. ``posix-direct`` or ``kvikio-posix``."""
        return self.engine.mover.path

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress; the threads stop with the last link of the engine. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.link_closed()


class FileReadLink(_FileLink):
    """Reads home slots of an NvmeTier into slots of a RamTier, or of a GpuTier whose alignment is 4096."""

    def __init__(self, nvme: NvmeTier, fast: RamTier | GpuTier, engine: FileEngine) -> None:
        super().__init__(nvme.name, fast.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start reading the first ``nbytes`` of the files and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self.engine.start(src_slot, dst_slot, transfer, self._meter, is_write=False)
        return transfer


class FileWriteLink(_FileLink):
    """Writes slots of a RamTier or a GpuTier to home slots of an NvmeTier.

    Files that a snapshot holds are replaced, not written.
    """

    def __init__(self, fast: RamTier | GpuTier, nvme: NvmeTier, engine: FileEngine) -> None:
        super().__init__(fast.name, nvme.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start writing all contents of the slot (``nbytes`` must be the slot's) and return at once."""
        assert nbytes == dst_slot.nbytes, f"a part of a slot cannot be written: {nbytes} of {dst_slot.nbytes} bytes"
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self.engine.start(dst_slot, src_slot, transfer, self._meter, is_write=True)
        return transfer


class PosixMover:
    """``PartMover`` with ``preadv`` and ``pwritev``. Thread-safe.

    A file is opened for every part: 1.5 microseconds, compared with 8 milliseconds for 16 MiB. So a part never uses
    a file that only a snapshot holds by now.
    """

    def __init__(self, tier: NvmeTier) -> None:
        self._tier = tier

    @property
    def path(self) -> str:
        """Return ``posix-direct``, or ``posix-buffered`` if a file system of the tier cannot do O_DIRECT."""
        return self._tier.io_path

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the file; see ``PartMover``."""
        with self._opened(self._tier.open_for_read(file), offset, len(view)) as fd:
            nbytes = read_all(fd, view, offset, self._tier.stop_direct_io)
        if nbytes < len(view):
            raise TransferError(
                f"file ends {len(view) - nbytes} bytes before the block does: it was cut off",
                tier=self._tier.name,
                path=str(file.path),
                offset=offset + nbytes,
            )

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Write ``view`` to the file; see ``PartMover``."""
        with self._opened(self._tier.open_for_write(file), offset, len(view)) as fd:
            write_all(fd, view, offset, self._tier.stop_direct_io)

    @contextmanager
    def _opened(self, fd: int, offset: int, nbytes: int) -> Iterator[int]:
        try:
            yield fd
            if not self._tier.is_direct:  # else the kernel would keep a copy of what the RAM tier accounts for
                drop_cached(fd, offset, nbytes)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Do nothing: no file stays open."""


_DEAD = "The drive, or the way to it, is failing: look into the kernel's log (dmesg) and check the drive"
_ADVICE = {
    errno.ENOSPC: "Free space on that drive",
    errno.EDQUOT: "Free space there, or raise the quota",
    errno.EROFS: "The file system became read-only, mostly after an error of the drive: look into the kernel's log "
    "(dmesg), mend it and mount it again",
    errno.EIO: _DEAD,
    errno.ENXIO: _DEAD,
    errno.ENODEV: _DEAD,
    errno.EREMOTEIO: _DEAD,
    errno.ENOTCONN: _DEAD,
    errno.ESTALE: _DEAD,
    errno.ENOENT: "Another program removed the file while it was in use",
    errno.EACCES: "Another program changed the permissions of the file",
}


def explain(cause: OSError) -> str:
    """Return the system's message with the name of the error, and advice."""
    code = cause.errno or 0
    text = f"{cause.strerror or cause} ({errno.errorcode.get(code, f'error {code}')})"
    advice = _ADVICE.get(code)
    return text if advice is None else f"{text}. {advice}; generations committed before are untouched"
