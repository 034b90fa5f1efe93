"""What a drive gives to plain reads and writes, and what the tier gets of it, in turns within one run."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatrain.api import FileSystem, available_ram_bytes, file_system_of
from tiered import NvmeTier, RamTier, TieredStore, Transfer
from tiered.ext import HostSlab
from tiered.units import PAGE_BYTES, GiB, KiB, MiB, format_size

SCRATCH_PREFIX = ".megatrain-tier-doctor-"

#: Least free space that a measurement is made with.
MIN_FREE_BYTES = 256 * MiB


class UnusablePathError(Exception):
    """A path cannot be measured: it is missing, not a folder, not writable, or full."""


def check_path(path: Path) -> int:
    """Return the bytes that are free on the drive of a folder that can be written.

    Raises:
        UnusablePathError: it cannot be measured; the text says why and what to do.
    """
    if not path.exists():
        raise UnusablePathError(f"{path} does not exist: make it, or name another folder on that drive")
    if not path.is_dir():
        raise UnusablePathError(f"{path} is not a folder: name the folder in which it lies")
    with scratch_folder(path):
        free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UnusablePathError(
            f"{path} has {format_size(free)} free, measuring needs {format_size(MIN_FREE_BYTES)}: "
            "free some, or name another folder"
        )
    return free


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder inside ``path`` and remove it with all it holds, also after an error or Ctrl-C.

    Raises:
        UnusablePathError: ``path`` cannot be written.
    """
    folder: Path | None = None
    try:
        with _uninterrupted():  # what arrives meanwhile is raised at its end, when the folder is known
            folder = _make_folder(path)
        yield folder
    finally:
        if folder is not None:
            with _uninterrupted():
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(path: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=path))
    except OSError as error:
        reason = error.strerror or "refused"
        raise UnusablePathError(f"{path} cannot be written: {reason}. Name another folder") from error


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what runs inside the way Ctrl-C does, so that scratch folders go."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handled_by((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back what would end the process between making a folder and knowing of it, or while it is removed."""
    arrived: list[int] = []
    try:
        # Not by a signal mask: the kernel would give the signal to another thread, and Python's handler runs in the
        # main thread all the same.
        held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with _handled_by(held, lambda number, frame: arrived.append(number)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def _handled_by(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals by ``handler`` inside; ignored ones stay ignored. No-op in threads, to which no signal comes."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


PART_BYTES = 16 * MiB
_NUM_THREADS = 4
_NUM_BLOCKS = 8
_MIN_BLOCK_BYTES = 8 * MiB
_MOST_WRITES_AHEAD = 2
_READS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SustainedWrite:
    """A long write through the tier: bytes per second in its first and its last quarter."""

    first: float
    last: float
    nbytes: int
    seconds: float


class BareFile:
    """One preallocated file, read and written in parts of 16 MiB by four threads: what the drive gives.

    A context manager. O_DIRECT where the file system has it, else the kernel's cache is dropped after each part, as
    the tier does it.

    Args:
        path: the file's.
        nbytes: most that it takes. A drive that needs more than half a second for it gets less.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes // PART_BYTES * PART_BYTES
        assert self.nbytes >= PART_BYTES, nbytes
        self._buffers = [_random_slab(PART_BYTES) for _ in range(_NUM_THREADS)]
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="doctor")
        self._fd, self.is_direct = _create(path, self.nbytes)
        try:
            # The first write of a preallocated file is slower than later ones: it does not count as a measurement.
            first = min(self.nbytes, _NUM_THREADS * PART_BYTES)
            rate = self._pass(lambda number: True, first)
            half_a_second = int(rate / 2) // PART_BYTES * PART_BYTES
            self.nbytes = max(first, min(self.nbytes, half_a_second))
            self._pass(lambda number: True, self.nbytes)
        except BaseException:
            self.close()
            raise

    def run(self, is_write: Callable[[int], bool]) -> float:
        """Pass over the whole file once; return bytes per second. ``is_write(n)`` says what is done with part n."""
        return self._pass(is_write, self.nbytes)

    def mixed(self, seconds: float) -> float:
        """Read every other part and write the rest, for that long and at least once; return bytes per second."""
        start, num_passes = time.perf_counter(), 0
        while num_passes == 0 or time.perf_counter() < start + seconds:
            self.run(lambda number: number % 2 == 1)
            num_passes += 1
        return num_passes * self.nbytes / (time.perf_counter() - start)

    def _pass(self, is_write: Callable[[int], bool], nbytes: int) -> float:
        parts = iter(range(nbytes // PART_BYTES))
        lock = threading.Lock()

        def work(slab: HostSlab) -> None:
            with slab.view(0, PART_BYTES) as view:
                while True:
                    with lock:
                        number = next(parts, None)
                    if number is None:
                        return
                    if is_write(number):
                        _renew(slab.tensor)
                    self._move(view, number * PART_BYTES, is_write(number))

        start = time.perf_counter()
        for future in [self._threads.submit(work, slab) for slab in self._buffers]:
            future.result()
        return nbytes / (time.perf_counter() - start)

    def _move(self, view: memoryview, offset: int, is_write: bool) -> None:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                move = os.pwritev if is_write else os.preadv
                count = move(self._fd, [rest], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ended early")
            done += count
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Stop the threads and give the memory back. Idempotent; the file stays."""
        self._threads.shutdown(wait=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        for slab in self._buffers:
            slab.close()

    def __enter__(self) -> BareFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TierProbe:
    """A store of two tiers, RAM and one path, whose blocks all fit the RAM: what the tier gets. A context manager.

    Args:
        path: a folder that is not there yet.
        nbytes: size of all blocks together.
        block_bytes: size of each; default: an eighth of them.
    """

    def __init__(self, path: Path, nbytes: int, block_bytes: int | None = None) -> None:
        if block_bytes is None:
            block_bytes = max(_MIN_BLOCK_BYTES, nbytes // _NUM_BLOCKS // PAGE_BYTES * PAGE_BYTES)
        self._keys = [f"block{number}" for number in range(max(1, nbytes // block_bytes))]
        self.nbytes = len(self._keys) * block_bytes
        self._nvme = NvmeTier([path], self.nbytes)
        self._store = TieredStore([RamTier(self.nbytes, pin_memory=False), self._nvme], max_inflight_bytes=self.nbytes)
        try:
            contents = torch.randint(0, 256, (block_bytes,), dtype=torch.uint8)
            for key in self._keys:
                self._store.register(key, (block_bytes,), torch.uint8, home="nvme", durable=False)
                with self._store.acquire(key, "ram", "w") as lease:
                    _renew(lease.tensor.copy_(contents))
            self._evict_all()
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Return whether the tier uses O_DIRECT."""
        return self._nvme.is_direct

    def read(self) -> float:
        """Read every block into RAM, where they stay until ``write``; return bytes per second."""
        start = time.perf_counter()
        _wait([self._store.prefetch(key, "ram") for key in self._keys])
        return self.nbytes / (time.perf_counter() - start)

    def write(self) -> float:
        """Write every block back from RAM; return bytes per second."""
        for key in self._keys:
            with self._store.acquire(key, "ram", "rw") as lease:
                _renew(lease.tensor)
        return self._evict_all()

    def mixed(self, seconds: float) -> float:
        """Take blocks as an optimizer does, in a circle: fetch, use, write back, some ahead and some behind.

        Returns:
            Bytes read and written per second.
        """
        behind: deque[Transfer] = deque()
        start, num_blocks = time.perf_counter(), 0
        while num_blocks < len(self._keys) or time.perf_counter() < start + seconds:
            for ahead in range(1, _READS_AHEAD + 1):
                self._store.prefetch(self._keys[(num_blocks + ahead) % len(self._keys)], "ram")
            key = self._keys[num_blocks % len(self._keys)]
            with self._store.acquire(key, "ram", "rw") as lease:
                _renew(lease.tensor)
            behind.append(self._store.evict(key, "ram"))
            num_blocks += 1
            if len(behind) > _MOST_WRITES_AHEAD:
                behind.popleft().wait()
        _wait(behind)
        rate = 2 * num_blocks * (self.nbytes // len(self._keys)) / (time.perf_counter() - start)
        for key in self._keys:
            self._store.evict(key, "ram")  # what was fetched ahead and not used
        self._store.wait_idle()
        return rate

    def seconds_per_copy(self) -> float:
        """Fetch every block and write it back, one after the other; return what a copy costs the calling thread.

        Waiting does not count: it is the processor's time, of what the store decides and notes.
        """
        start_s = time.thread_time()
        for key in self._keys:
            with self._store.acquire(key, "ram", "rw"):
                pass
            self._store.evict(key, "ram").wait()
        return (time.thread_time() - start_s) / (2 * len(self._keys))

    def sustained_write(self, seconds: float, nbytes: int) -> SustainedWrite:
        """Write over the blocks again and again, until either limit is reached."""
        rates: list[float] = []
        start = time.perf_counter()
        while not rates or (time.perf_counter() < start + seconds and len(rates) * self.nbytes < nbytes):
            for key in self._keys:
                with self._store.acquire(key, "ram", "w") as lease:  # contents: what the slot held before: random
                    _renew(lease.tensor)
            rates.append(self._evict_all())
        quarter = max(1, len(rates) // 4)
        return SustainedWrite(
            first=statistics.median(rates[:quarter]),
            last=statistics.median(rates[-quarter:]),
            nbytes=len(rates) * self.nbytes,
            seconds=time.perf_counter() - start,
        )

    def _evict_all(self) -> float:
        start = time.perf_counter()
        _wait([self._store.evict(key, "ram") for key in self._keys])
        return self.nbytes / (time.perf_counter() - start)

    def close(self) -> None:
        """Finish what is under way and give everything back but the files."""
        self._store.close()

    def __enter__(self) -> TierProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _random_slab(nbytes: int) -> HostSlab:
    slab = HostSlab(nbytes)
    slab.tensor.random_(0, 256)  # drives may store zeros without writing them
    return slab


_WRITE_NUMBERS = itertools.count(1)


def _renew(contents: torch.Tensor) -> None:
    """Make every page of random bytes another one than any that was written before: drives may keep equal ones once."""
    contents.view(torch.int64)[:: PAGE_BYTES // 8] = next(_WRITE_NUMBERS)


def _create(path: Path, nbytes: int) -> tuple[int, bool]:
    """Make a file with all its space; return its descriptor and whether it is used with O_DIRECT."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return fd, False
        try:
            slab = HostSlab(PAGE_BYTES)
            with slab.view(0, PAGE_BYTES) as view:
                os.pwritev(direct, [view], 0)  # some file systems refuse O_DIRECT only when it is used
            slab.close()
        except OSError:
            os.close(direct)
            return fd, False
        os.close(fd)
        return direct, True
    except BaseException:
        os.close(fd)
        raise


@dataclass(frozen=True, slots=True)
class DriveEffort:
    """How much is spent on one drive.

    Attributes:
        span_bytes: bytes of each of the two sets of files.
        turn_s: seconds of reads and writes in turns.
        mixed_s: seconds of both at once.
        beside_s: seconds of reads and writes at once while the processor computes.
        sustained_s: the long write ends after so many seconds,
        sustained_bytes: or after so many bytes.
    """

    span_bytes: int
    turn_s: float
    mixed_s: float
    sustained_s: float = 0.0
    sustained_bytes: int = 0
    beside_s: float = 0.0


QUICK = DriveEffort(span_bytes=256 * MiB, turn_s=2.0, mixed_s=1.0, beside_s=1.0)
FULL = DriveEffort(
    span_bytes=512 * MiB, turn_s=8.0, mixed_s=4.0, sustained_s=30.0, sustained_bytes=32 * GiB, beside_s=4.0
)
_NUM_SMALL, _SMALL_BYTES = 64, 64 * KiB
_PRODUCT_SIZE = 768  # of matrices: some milliseconds, in the processor's caches


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second: medians of several turns. ``mixed``: reads and writes at once, both counted."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True, slots=True)
class DriveResult:
    """What was measured on one path.

    Attributes:
        free_bytes: before.
        is_direct: O_DIRECT worked.
        is_rotational: a disk with a motor; None where unknown.
        tier: what the tier got.
        bare: what plain I/O with as many threads got.
        span_bytes: what either went over.
        sustained: None in a quick run.
        computing_s_per_byte: what computing on all cores loses while a byte goes through the tier; None: not measured.
        seconds_per_copy: what a copy of a block, however small, costs the thread that asks for it.
    """

    path: Path
    file_system: FileSystem
    free_bytes: int
    is_direct: bool
    is_rotational: bool | None
    span_bytes: int
    tier: Rates
    bare: Rates
    sustained: SustainedWrite | None = None
    computing_s_per_byte: float | None = None
    seconds_per_copy: float | None = None


def measure_drive(path: Path, effort: DriveEffort) -> DriveResult:
    """Measure the drive of a folder, in a scratch folder inside it.

    Takes at most twice ``effort.span_bytes`` of disk, and a quarter of what is free; fewer on a slow drive.

    Raises:
        UnusablePathError: the folder cannot be used.
        TieredError: the drive failed.
        OSError: the drive failed.
    """
    free_bytes = check_path(path)
    file_system = file_system_of(path)
    room = min(effort.span_bytes, free_bytes // 4, available_ram_bytes() // 4)
    with scratch_folder(path) as folder, BareFile(folder / "bare", max(room, MIN_FREE_BYTES // 4)) as bare:
        with TierProbe(folder / "tier", bare.nbytes) as tier:
            turns = _AlternatingRates()
            deadline = time.perf_counter() + effort.turn_s
            while turns.is_empty or time.perf_counter() < deadline:
                turns.add(tier, bare)
            tier_mixed = tier.mixed(effort.mixed_s)
            lost = computing_lost(tier, effort.beside_s) if effort.beside_s else None
            bare_mixed = bare.mixed(effort.mixed_s)
            sustained = tier.sustained_write(effort.sustained_s, effort.sustained_bytes) if effort.sustained_s else None
            is_direct = tier.is_direct
        with TierProbe(folder / "small", _NUM_SMALL * _SMALL_BYTES, _SMALL_BYTES) as small:
            small.seconds_per_copy()
            seconds_per_copy = small.seconds_per_copy()
        return DriveResult(
            path=path,
            file_system=file_system,
            free_bytes=free_bytes,
            is_direct=is_direct,
            is_rotational=is_rotational(file_system.device),
            span_bytes=bare.nbytes,
            tier=Rates(statistics.median(turns.tier_read), statistics.median(turns.tier_write), tier_mixed),
            bare=Rates(statistics.median(turns.bare_read), statistics.median(turns.bare_write), bare_mixed),
            sustained=sustained,
            computing_s_per_byte=lost,
            seconds_per_copy=seconds_per_copy,
        )


def computing_lost(tier: TierProbe, seconds: float) -> float:
    """Return the seconds of computing that a byte costs which is read or written meanwhile.

    Checksums, system calls and the drive's own driver take processors and memory away from it. Matrix products are
    timed alone, and beside a tier that reads and writes.
    """
    left, right = torch.empty(2, _PRODUCT_SIZE, _PRODUCT_SIZE).uniform_(-1.0, 1.0).unbind()
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    times: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        for is_alone in (True, False):
            start_s, count = time.perf_counter(), 0
            rate = None if is_alone else thread.submit(tier.mixed, seconds)
            while time.perf_counter() < start_s + seconds if rate is None else not rate.done():
                torch.mm(left, right, out=product)
                count += 1
            elapsed_s = time.perf_counter() - start_s
            times.append(elapsed_s / max(1, count))
    assert rate is not None
    share_lost = max(0.0, 1 - times[0] / times[1])
    return share_lost / rate.result()


def is_rotational(device: str, root: Path = Path("/sys/dev/block")) -> bool | None:
    """Return whether a device ``major:minor`` is a disk with a motor; None where the kernel does not say."""
    for folder in (root / device, (root / device).resolve().parent):  # a partition's queue is its disk's
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


@dataclass
class _AlternatingRates:
    """Rates of reads and writes, ours and bare ones in turns, so that both meet the same drive."""

    tier_read: list[float] = field(default_factory=list)
    tier_write: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)
    bare_write: list[float] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.tier_read

    def add(self, tier: TierProbe, bare: BareFile) -> None:
        self.tier_read.append(tier.read())
        self.bare_read.append(bare.run(lambda number: False))
        self.tier_write.append(tier.write())
        self.bare_write.append(bare.run(lambda number: True))
