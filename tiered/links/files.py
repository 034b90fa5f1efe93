"""Links between memory and files. Several threads move each transfer in large parts and verify checksums.

A ``PartMover`` moves one part: ``PosixMover`` with system calls, or ``KvikioMover`` with kvikio.
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
from tiered.tiers.layout import ChunkFile, HomeFiles, files_of, place_text
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import HostSlab, RamTier
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, MiB, round_up

PART_BYTES = 16 * MiB
_MIN_THREADS = 8
_THREADS_PER_PATH = 4
_RESERVED_SHARE = 2  # Reads leave half of the threads to writes.
#: Resource of a transfer's memory slot.
Memory = HostSlab | DeviceBuffer


class PartMover(Protocol):
    """Mover of bytes between memory and a tier's files. Several threads call it concurrently.

    For device memory, ``view`` is a 1-D uint8 tensor on the device instead of a memoryview.
    """

    @property
    def path(self) -> str:
        """Name of the current copy method, e.g. ``posix-direct``."""
        ...

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the file's bytes at ``offset``. The offset and the length are multiples of 4096.

        Raises:
            OSError: the drive returned an error.
            TransferError: the file is too short.
        """
        ...

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset``. Must not write to a file that a snapshot links. Raises ``OSError``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a transfer: bytes ``start`` to ``stop`` (multiples of 4096) of the slot, within one file."""

    file: ChunkFile
    start: int
    stop: int


class _FileTransfer:
    """State of a transfer in progress: the number of remaining parts, the first error, and the completed pieces."""

    def __init__(
        self, transfer: Transfer, memory: Memory, home: HomeFiles, parts: list[FilePart], meter: Meter
    ) -> None:
        self.transfer, self.memory, self.home, self.meter = transfer, memory, home, meter
        self.error: BaseException | None = None
        self.checksums: dict[int, str] = {}  # checksums, by the offset of the piece
        self._lock = threading.Lock()
        self._uncounted_bytes: Counter[int] = Counter()  # bytes not yet counted as wear, by path index
        for part in parts:
            self._uncounted_bytes[part.file.path_index] += part.stop - part.start
        self._num_open_tasks = max(1, len(parts))  # remaining calls to `finish_task`, at least one
        self._num_open_parts = {
            piece: sum(part.start < piece[1] and piece[0] < part.stop for part in parts)
            for piece in pieces(transfer.nbytes)
        }

    def count_wear(self, tier: NvmeTier) -> None:
        """Count all bytes of a write as wear of the paths. Called before every part, but only the first call counts.

        Raises:
            WearLimitError: the write would exceed the limit of a path.
            OSError: a drive returned an error.
        """
        with self._lock:
            if self._uncounted_bytes:
                tier.count_wear(self._uncounted_bytes)
                self._uncounted_bytes.clear()

    def mark_moved(self, part: FilePart) -> list[tuple[int, int]]:
        """Mark a part as moved, and return the pieces that are now complete."""
        complete_pieces = []
        with self._lock:
            for piece in self._num_open_parts:
                if part.start < piece[1] and piece[0] < part.stop:
                    self._num_open_parts[piece] -= 1
                    if not self._num_open_parts[piece]:
                        complete_pieces.append(piece)
        return complete_pieces

    def store_checksums(self, part: FilePart) -> None:
        """Compute and store the checksums of the pieces that begin in a part."""
        for start in range(round_up(part.start, PIECE_BYTES), min(part.stop, self.transfer.nbytes), PIECE_BYTES):
            self.checksums[start] = self.digest((start, min(start + PIECE_BYTES, self.transfer.nbytes)))

    def digest(self, piece: tuple[int, int]) -> str:
        """Return the checksum of a piece in memory."""
        with self.memory.view(*piece) as view:
            return checksum(view)

    def finish_task(self, error: BaseException | None) -> bool:
        """Count a task that has ended. Return whether it was the last one."""
        with self._lock:
            self.error = self.error or error
            self._num_open_tasks -= 1
            return self._num_open_tasks == 0


class FileEngine:
    """The threads that read and write one NvmeTier's files. The read link and the write link share them.

    At most ``num_threads`` parts of 16 MiB are in flight (reads and writes together). Queued reads have priority but
    leave half of the threads free for writes. A drive can read and write concurrently, and waiting writes occupy space
    that reads need. A transfer ends after all its parts have ended, so no thread uses its slots afterwards, even
    after an error.

    Writes compute checksums of the contents unless ``tier.verify`` is ``off``. Reads compare the checksums if
    ``tier.verify`` is ``always``. The thread that moves the bytes does this without the GIL. Writes from a GpuTier
    compute no checksums, because the bytes are not in RAM.

    Device streams do not order file I/O. Parts of a GpuTier's slot therefore move only after the device has finished
    all recorded work on the slot; two separate threads wait for this. After a read has ended, the bytes are in device
    memory, so kernels that are queued later need no further ordering.
    """

    def __init__(
        self, tier: NvmeTier, mover: PartMover, *, num_threads: int | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        assert part_bytes > 0 and part_bytes % PAGE_BYTES == 0, part_bytes
        self.tier, self.mover = tier, mover
        self._part_bytes = part_bytes
        num_threads = num_threads or max(_MIN_THREADS, _THREADS_PER_PATH * len(tier.paths))
        self._workers = Workers(num_threads, f"tiered-{tier.name}", num_reserved=num_threads // _RESERVED_SHARE)
        self._order_workers = Workers(2, f"tiered-{tier.name}-order", num_reserved=1)
        self._links_lock = threading.Lock()
        self._num_links = 0

    # -- transfers ---------------------------------------------------------------------------------------------

    def start(self, files_slot: Slot, memory_slot: Slot, transfer: Transfer, meter: Meter, *, is_write: bool) -> None:
        """Queue all parts of a transfer between the two slots."""
        memory, home = memory_slot.resource, files_of(files_slot)
        assert isinstance(memory, Memory), memory_slot
        assert transfer.nbytes <= min(files_slot.nbytes, memory_slot.nbytes), (transfer.nbytes, files_slot, memory_slot)
        parts = list(self._parts(home.files, transfer.nbytes))
        meter.start(transfer.nbytes)
        job = _FileTransfer(transfer, memory, home, parts, meter)
        if isinstance(memory, HostSlab) or memory.is_idle():
            self._queue(job, parts, is_write)
        else:
            self._order_workers.submit(lambda: self._queue_after(memory, job, parts, is_write), urgent=not is_write)

    def _queue_after(self, buffer: DeviceBuffer, job: _FileTransfer, parts: list[FilePart], is_write: bool) -> None:
        try:
            buffer.wait()
        except Exception as cause:  # Every exception must end the transfer, because otherwise its waiters would hang.
            job.error = TransferError(f"the device failed: {cause}", tier=f"{job.transfer.src}->{job.transfer.dst}")
            job.error.__cause__ = cause
        self._queue(job, parts, is_write)

    def _queue(self, job: _FileTransfer, parts: list[FilePart], is_write: bool) -> None:
        if is_write:
            job.home.checksums, job.home.is_flushed = None, False  # unknown until the whole write has ended
        tasks: list[FilePart | None] = [*parts] or [None]
        for part in tasks:
            # Reads are urgent because callers wait for them.
            self._workers.submit(lambda part=part: self._run(job, part, is_write), urgent=not is_write)  # type: ignore[misc]

    def _parts(self, files: tuple[ChunkFile, ...], nbytes: int) -> Iterator[FilePart]:
        # O_DIRECT moves multiples of 4096 bytes. The sizes of the slab and the files are rounded up accordingly.
        end = round_up(nbytes, PAGE_BYTES)
        for file in files:
            stop = min(file.offset + file.nbytes, end)
            for start in range(file.offset, stop, self._part_bytes):
                yield FilePart(file, start, min(start + self._part_bytes, stop))

    def _run(self, job: _FileTransfer, part: FilePart | None, is_write: bool) -> None:
        error: BaseException | None = None
        if job.error is None and part is not None:  # Otherwise the transfer is empty or has failed.
            try:
                if is_write and self.tier.verify != "off" and isinstance(job.memory, HostSlab):
                    job.store_checksums(part)  # Compute checksums first, so the write finds the bytes in the CPU cache.
                self._move(job, part, is_write)
                if not is_write and self.tier.verify == "always":
                    self._verify(job, job.mark_moved(part))
            except TieredError as cause:  # The message is complete, e.g. about damage or the wear limit.
                error = cause
            except OSError as cause:
                error = self._transfer_error(cause, part, is_write)
            except Exception as cause:  # Every exception must end the transfer. Otherwise, its waiters hang.
                error = TransferError(f"transfer failed: {cause!r}", tier=self.tier.name, path=str(part.file.path))
                error.__cause__ = cause
        if job.finish_task(error):
            self._finish(job, is_write)

    def _finish(self, job: _FileTransfer, is_write: bool) -> None:
        if is_write and job.error is None and job.checksums:
            job.home.checksums = tuple(job.checksums[start] for start, _ in pieces(job.transfer.nbytes))
        job.meter.end(job.transfer.nbytes, moved=job.error is None)
        try:
            if is_write and job.error is not None:
                error_number = job.error.errno if isinstance(job.error, OSError) else None
                self.tier.notice(
                    f"block '{job.home.key}' could not be written and stays in memory: {job.error}",
                    key=f"write:{type(job.error).__name__}:{error_number}",
                )
        finally:
            job.transfer.finish(job.error)

    # -- one part ----------------------------------------------------------------------------------------------

    def _move(self, job: _FileTransfer, part: FilePart, is_write: bool) -> None:
        with job.memory.view(part.start, part.stop) as view:
            if not is_write:
                with self._measure(part, is_write=False):
                    self.mover.read(part.file, part.start - part.file.offset, view)
                return
            while True:
                try:
                    job.count_wear(self.tier)
                    with self._measure(part, is_write=True):
                        self.mover.write(part.file, part.start - part.file.offset, view)
                    break
                except OSError as cause:
                    self.tier.full.wait(self.tier.paths[part.file.path_index], part.file.nbytes, cause)
        self.tier.full.mark_writable(self.tier.paths[part.file.path_index])
        contents_end = min(part.stop, job.transfer.nbytes)
        self.tier.count_written(part.file.path_index, contents_end - part.start)

    def _measure(self, part: FilePart, *, is_write: bool) -> AbstractContextManager[None]:
        index = part.file.path_index
        path = self.tier.paths[index]
        return self.tier.meters[index].measure(
            part.stop - part.start,
            is_write=is_write,
            on_slow=lambda figures: self.tier.notice(
                f"path '{path}' has slowed down: {figures}. Check its drive for other load, heat, or failure",
                key=f"slow:{path}",
            ),
        )

    def _verify(self, job: _FileTransfer, complete_pieces: list[tuple[int, int]]) -> None:
        """Compare completed pieces with the checksums from the last write. Raises ``CorruptBlockError``."""
        if job.home.checksums is None:
            return  # No write has computed checksums yet.
        for start, stop in complete_pieces:
            expected, actual = job.home.checksums[start // PIECE_BYTES], job.digest((start, stop))
            if actual != expected:
                raise CorruptBlockError(job.home.key, expected, actual, place=place_text(job.home.files, start, stop))

    def _transfer_error(self, cause: OSError, part: FilePart, is_write: bool) -> TransferError:
        error = TransferError(
            f"{'write' if is_write else 'read'} failed: {explain(cause)}",
            tier=self.tier.name,
            path=str(part.file.path),
            errno=cause.errno,
            offset=part.start - part.file.offset,
        )
        error.__cause__ = cause
        return error

    # -- threads -----------------------------------------------------------------------------------------------

    def add_link(self) -> None:
        """Register a link that uses this engine."""
        with self._links_lock:
            self._num_links += 1

    def remove_link(self) -> None:
        """Unregister a link. After the last one, run all queued parts and stop the threads."""
        with self._links_lock:
            self._num_links -= 1
            is_last = self._num_links == 0
        if is_last:
            self._order_workers.close()
            self._workers.close()
            self.mover.close()


class _FileLink:
    """Base class of ``FileReadLink`` and ``FileWriteLink``."""

    def __init__(self, src: str, dst: str, engine: FileEngine) -> None:
        self.src = src
        self.dst = dst
        self.engine = engine
        self._meter = Meter()
        self._is_closed = False
        engine.add_link()

    @property
    def path(self) -> str:
        """Name of the current copy method, e.g. ``posix-direct`` or ``kvikio-posix``."""
        return self.engine.mover.path

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress. The threads stop when the engine's last link is closed. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.remove_link()


class FileReadLink(_FileLink):
    """Link that reads home slots of an NvmeTier into slots of a RamTier, or of a GpuTier with 4096-byte alignment."""

    def __init__(self, nvme: NvmeTier, memory_tier: RamTier | GpuTier, engine: FileEngine) -> None:
        super().__init__(nvme.name, memory_tier.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start reading the first ``nbytes`` of the files and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self.engine.start(src_slot, dst_slot, transfer, self._meter, is_write=False)
        return transfer


class FileWriteLink(_FileLink):
    """Link that writes slots of a RamTier or a GpuTier to home slots of an NvmeTier.

    A file that a snapshot links is replaced, never overwritten.
    """

    def __init__(self, memory_tier: RamTier | GpuTier, nvme: NvmeTier, engine: FileEngine) -> None:
        super().__init__(memory_tier.name, nvme.name, engine)

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start writing the whole slot and return at once; ``nbytes`` must be the slot's size."""
        assert nbytes == dst_slot.nbytes, f"slots must be written completely: {nbytes} of {dst_slot.nbytes} bytes"
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self.engine.start(dst_slot, src_slot, transfer, self._meter, is_write=True)
        return transfer


class PosixMover:
    """``PartMover`` with ``preadv`` and ``pwritev``. Thread-safe.

    It opens the file for every part, so it never uses a file that was replaced and now belongs only to a snapshot.
    Opening takes 1.5 microseconds; moving 16 MiB takes 8 milliseconds.
    """

    def __init__(self, tier: NvmeTier) -> None:
        self._tier = tier

    @property
    def path(self) -> str:
        """``posix-direct``, or ``posix-buffered`` if a file system of the tier does not support O_DIRECT."""
        return self._tier.io_path

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the file; see ``PartMover``."""
        with self._close_after_use(self._tier.open_for_read(file), offset, len(view)) as fd:
            nbytes = read_all(fd, view, offset, self._tier.stop_direct_io)
        if nbytes < len(view):
            raise TransferError(
                f"file is truncated: it ends {len(view) - nbytes} bytes before the block does",
                tier=self._tier.name,
                path=str(file.path),
                offset=offset + nbytes,
            )

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Write ``view`` to the file; see ``PartMover``."""
        with self._close_after_use(self._tier.open_for_write(file), offset, len(view)) as fd:
            write_all(fd, view, offset, self._tier.stop_direct_io)

    @contextmanager
    def _close_after_use(self, fd: int, offset: int, nbytes: int) -> Iterator[int]:
        try:
            yield fd
            if not self._tier.is_direct:  # Drop the kernel's cached copy, because the RAM tier has the contents.
                drop_cached(fd, offset, nbytes)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Do nothing, because no file stays open."""


_DRIVE_FAILING = "The drive or its connection is failing: read the kernel's log (dmesg) and check the drive"
_ADVICE = {
    errno.ENOSPC: "Free space on that drive",
    errno.EDQUOT: "Free space there, or raise the quota",
    errno.EROFS: "The file system became read-only, usually after the drive has failed: read the kernel's log (dmesg), "
    "repair the file system and mount it again",
    errno.EIO: _DRIVE_FAILING,
    errno.ENXIO: _DRIVE_FAILING,
    errno.ENODEV: _DRIVE_FAILING,
    errno.EREMOTEIO: _DRIVE_FAILING,
    errno.ENOTCONN: _DRIVE_FAILING,
    errno.ESTALE: _DRIVE_FAILING,
    errno.ENOENT: "Another program removed the file while it was in use",
    errno.EACCES: "Another program changed the permissions of the file",
}


def explain(cause: OSError) -> str:
    """Return the system's error message, with the name of the error and advice."""
    code = cause.errno or 0
    text = f"{cause.strerror or cause} ({errno.errorcode.get(code, f'error {code}')})"
    advice = _ADVICE.get(code)
    return text if advice is None else f"{text}. {advice}; committed generations are unaffected"
