"""Measurements of a drive through an NVMe tier: reads, writes, both concurrently, and a long write."""

from __future__ import annotations

import itertools
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatrain.api import FileSystem, available_ram_bytes, file_system_of
from tiered import NvmeTier, RamTier, TieredStore, Transfer
from tiered.units import PAGE_BYTES, GiB, KiB, MiB, format_size

SCRATCH_PREFIX = ".megatrain-tier-doctor-"

#: Minimum free space for a measurement. Its files take at most a quarter of the free space.
MIN_FREE_BYTES = 256 * MiB
_MIN_SPAN_BYTES = MIN_FREE_BYTES // 4


class UnusablePathError(Exception):
    """Error for a path that cannot be measured because it is missing, not a folder, not writable, or full."""


def check_path(path: Path) -> int:
    """Return the free bytes on the drive of a folder, after checking that the folder is writable.

    Raises:
        UnusablePathError: The folder cannot be measured. The message contains the cause and the remedy.
    """
    if not path.exists():
        raise UnusablePathError(f"{path} does not exist. Create it, or name another folder on that drive")
    if not path.is_dir():
        raise UnusablePathError(f"{path} is not a folder. Name the folder that contains it")
    with scratch_folder(path):
        free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise UnusablePathError(
            f"{path} has {format_size(free)} of free space, but the measurement needs "
            f"{format_size(MIN_FREE_BYTES)}. Free some space, or name another folder"
        )
    return free


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder inside ``path``, and remove it with its contents on exit, even after an error or Ctrl-C.

    Raises:
        UnusablePathError: ``path`` is not writable.
    """
    folder: Path | None = None
    try:
        with _delay_signals():  # a signal is raised only after `folder` is assigned
            folder = _make_folder(path)
        yield folder
    finally:
        if folder is not None:
            with _delay_signals():
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(path: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=path))
    except OSError as error:
        reason = error.strerror or "refused"
        raise UnusablePathError(f"{path} cannot be written: {reason}. Name another folder") from error


@contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C inside the context, so that scratch folders are removed."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Delay signals until the context exits, while a folder is created or removed."""
    arrived_signals: list[int] = []
    try:
        # A signal mask does not help, because the kernel would deliver the signal to another thread, and Python would
        # still run the handler in the main thread.
        delayed_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with _handle_signals(delayed_signals, lambda number, frame: arrived_signals.append(number)):
            yield
    finally:
        if arrived_signals:
            signal.raise_signal(arrived_signals[0])


@contextmanager
def _handle_signals(signums: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals with ``handler`` inside the context, except ignored ones. A no-op outside of the main thread."""
    old_handlers = {}
    if threading.current_thread() is threading.main_thread():
        old_handlers = {signum: signal.getsignal(signum) for signum in signums}
        old_handlers = {signum: old for signum, old in old_handlers.items() if old not in (None, signal.SIG_IGN)}
    for signum in old_handlers:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in old_handlers.items():
            signal.signal(signum, old)


_NUM_BLOCKS = 8
_MIN_BLOCK_BYTES = 8 * MiB
_MAX_WRITES_AHEAD = 2
_READS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SustainedWrite:
    """A long write through the tier, with the bytes per second of its first and last quarter."""

    first: float
    last: float
    nbytes: int
    seconds: float


class TierProbe:
    """Store with RAM and one NVMe path that measures the path's rates. All blocks fit in RAM. A context manager.

    Args:
        path: Folder that does not exist yet.
        nbytes: Total bytes of all blocks.
        block_bytes: Bytes of each block; default: an eighth of ``nbytes``.
    """

    def __init__(self, path: Path, nbytes: int, block_bytes: int | None = None) -> None:
        if block_bytes is None:
            block_bytes = max(_MIN_BLOCK_BYTES, nbytes // _NUM_BLOCKS // PAGE_BYTES * PAGE_BYTES)
        self._keys = [f"block{index}" for index in range(max(1, nbytes // block_bytes))]
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
        """Whether the tier uses O_DIRECT."""
        return self._nvme.is_direct

    def read(self) -> float:
        """Read every block into RAM and return bytes per second. The blocks stay in RAM until ``write``."""
        start = time.perf_counter()
        _wait([self._store.prefetch(key, "ram") for key in self._keys])
        return self.nbytes / (time.perf_counter() - start)

    def write(self) -> float:
        """Write every block back from RAM and return bytes per second."""
        for key in self._keys:
            with self._store.acquire(key, "ram", "rw") as lease:
                _renew(lease.tensor)
        return self._evict_all()

    def read_and_write(self, seconds: float) -> float:
        """Fetch, change and write back blocks in turn, like an optimizer. Prefetches and write-backs run concurrently.

        Returns:
            Total bytes read and written per second.
        """
        writes: deque[Transfer] = deque()
        start, num_blocks = time.perf_counter(), 0
        while num_blocks < len(self._keys) or time.perf_counter() < start + seconds:
            for distance in range(1, _READS_AHEAD + 1):
                self._store.prefetch(self._keys[(num_blocks + distance) % len(self._keys)], "ram")
            key = self._keys[num_blocks % len(self._keys)]
            with self._store.acquire(key, "ram", "rw") as lease:
                _renew(lease.tensor)
            writes.append(self._store.evict(key, "ram"))
            num_blocks += 1
            if len(writes) > _MAX_WRITES_AHEAD:
                writes.popleft().wait()
        _wait(writes)
        rate = 2 * num_blocks * (self.nbytes // len(self._keys)) / (time.perf_counter() - start)
        for key in self._keys:
            self._store.evict(key, "ram")  # evict blocks that were prefetched but not used
        self._store.wait_idle()
        return rate

    def seconds_per_copy(self) -> float:
        """Fetch and write back every block, one at a time, and return the calling thread's CPU seconds per copy.

        The store spends this time on decisions and bookkeeping. Waiting does not count.
        """
        start_s = time.thread_time()
        for key in self._keys:
            with self._store.acquire(key, "ram", "rw"):
                pass
            self._store.evict(key, "ram").wait()
        return (time.thread_time() - start_s) / (2 * len(self._keys))

    def sustained_write(self, seconds: float, nbytes: int) -> SustainedWrite:
        """Overwrite the blocks repeatedly until either limit is reached."""
        rates: list[float] = []
        start = time.perf_counter()
        while not rates or (time.perf_counter() < start + seconds and len(rates) * self.nbytes < nbytes):
            for key in self._keys:
                with self._store.acquire(key, "ram", "w") as lease:  # fetches nothing; the slot still has random bytes
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
        """Finish all transfers and release everything except the files."""
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


_WRITE_NUMBERS = itertools.count(1)


def _renew(contents: torch.Tensor) -> None:
    """Make every page of random bytes unique, because a drive may store identical pages only once."""
    contents.view(torch.int64)[:: PAGE_BYTES // 8] = next(_WRITE_NUMBERS)


@dataclass(frozen=True, slots=True)
class DriveEffort:
    """Limits on the time and space for measuring a drive.

    Attributes:
        span_bytes: Maximum bytes of the files.
        turn_s: Seconds during which reads and writes alternate.
        mixed_s: Seconds of concurrent reads and writes.
        computing_s: Seconds of concurrent reads and writes while the CPU computes; 0 to skip them.
        sustained_s: Time limit of the long write; 0 to skip it.
        sustained_bytes: Byte limit of the long write.
    """

    span_bytes: int
    turn_s: float
    mixed_s: float
    sustained_s: float = 0.0
    sustained_bytes: int = 0
    computing_s: float = 0.0


QUICK = DriveEffort(span_bytes=256 * MiB, turn_s=1.0, mixed_s=1.0, computing_s=1.0)
FULL = DriveEffort(
    span_bytes=512 * MiB, turn_s=4.0, mixed_s=4.0, sustained_s=30.0, sustained_bytes=32 * GiB, computing_s=4.0
)
_NUM_SMALL_BLOCKS, _SMALL_BLOCK_BYTES = 64, 64 * KiB
_PRODUCT_SIZE = 768  # a product of such matrices takes a few milliseconds and fits in the CPU's caches


@dataclass(frozen=True, slots=True)
class Rates:
    """Median bytes per second of repeated reads and writes. ``mixed`` is the total rate while both run concurrently."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True, slots=True)
class DriveResult:
    """Measurements of one path.

    Attributes:
        is_direct: Whether O_DIRECT worked.
        is_rotational: Whether the drive is a hard disk; None if unknown.
        sustained: Result of the long write; None in a quick run.
        computing_s_per_byte: Seconds by which each byte that the tier moves delays computation; None if not measured.
        seconds_per_copy: CPU seconds that the requesting thread spends per block copy, regardless of the block's size.
    """

    path: Path
    file_system: FileSystem
    free_bytes: int
    is_direct: bool
    is_rotational: bool | None
    span_bytes: int
    tier: Rates
    sustained: SustainedWrite | None = None
    computing_s_per_byte: float | None = None
    seconds_per_copy: float | None = None


def measure_drive(path: Path, effort: DriveEffort) -> DriveResult:
    """Measure the drive of a folder, in a scratch folder inside it.

    The files take at most ``effort.span_bytes``, and at most a quarter of the free space and RAM; less on a slow drive.

    Raises:
        UnusablePathError: The folder cannot be measured.
        TieredError: The drive failed.
        OSError: The drive failed.
    """
    free_bytes = check_path(path)
    file_system = file_system_of(path)
    max_bytes = min(effort.span_bytes, free_bytes // 4, available_ram_bytes() // 4)
    with scratch_folder(path) as folder:
        span_bytes = _span_bytes(folder / "first", max(max_bytes, _MIN_SPAN_BYTES))
        reads, writes = list[float](), list[float]()
        with TierProbe(folder / "tier", span_bytes) as tier:
            deadline = time.perf_counter() + effort.turn_s
            while not reads or time.perf_counter() < deadline:
                reads.append(tier.read())
                writes.append(tier.write())
            mixed = tier.read_and_write(effort.mixed_s)
            slowdown = compute_slowdown(tier, effort.computing_s) if effort.computing_s else None
            sustained = tier.sustained_write(effort.sustained_s, effort.sustained_bytes) if effort.sustained_s else None
            is_direct = tier.is_direct
        with TierProbe(folder / "small", _NUM_SMALL_BLOCKS * _SMALL_BLOCK_BYTES, _SMALL_BLOCK_BYTES) as small_probe:
            small_probe.seconds_per_copy()
            seconds_per_copy = small_probe.seconds_per_copy()
    return DriveResult(
        path=path,
        file_system=file_system,
        free_bytes=free_bytes,
        is_direct=is_direct,
        is_rotational=is_rotational(file_system.device),
        span_bytes=tier.nbytes,
        tier=Rates(statistics.median(reads), statistics.median(writes), mixed),
        sustained=sustained,
        computing_s_per_byte=slowdown,
        seconds_per_copy=seconds_per_copy,
    )


def _span_bytes(folder: Path, max_bytes: int) -> int:
    """Return the bytes that a drive writes in half a second, limited to a range. Creates and removes ``folder``."""
    with TierProbe(folder, _MIN_SPAN_BYTES) as probe:
        half_second_bytes = int(probe.write() / 2) // MiB * MiB
    shutil.rmtree(folder)
    return max(_MIN_SPAN_BYTES, min(max_bytes, half_second_bytes))


def compute_slowdown(tier: TierProbe, seconds: float) -> float:
    """Return the seconds by which each byte that a tier concurrently reads or writes delays computation.

    Checksums, system calls and the drive's driver use CPU time and memory bandwidth. The function times matrix
    products first while the tier is idle, and then while it reads and writes.
    """
    left, right = torch.empty(2, _PRODUCT_SIZE, _PRODUCT_SIZE).uniform_(-1.0, 1.0).unbind()
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    times: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        for is_idle in (True, False):
            start_s, count = time.perf_counter(), 0
            future = None if is_idle else thread.submit(tier.read_and_write, seconds)
            while time.perf_counter() < start_s + seconds if future is None else not future.done():
                torch.mm(left, right, out=product)
                count += 1
            elapsed_s = time.perf_counter() - start_s
            times.append(elapsed_s / max(1, count))
    assert future is not None
    lost_share = max(0.0, 1 - times[0] / times[1])
    return lost_share / future.result()


def is_rotational(device: str, root: Path = Path("/sys/dev/block")) -> bool | None:
    """Return whether a device ``major:minor`` is a hard disk; None if the kernel does not report it."""
    for folder in (root / device, (root / device).resolve().parent):  # the parent of a partition is its disk
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
