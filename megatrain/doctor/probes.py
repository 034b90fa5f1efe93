"""The two sides of a drive's measurement: plain reads and writes of one file, and blocks of a tier."""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from tiered.memory.slab import HostSlab
from tiered.store import TieredStore
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer
from tiered.units import PAGE_BYTES, MiB

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
        path: of the file.
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
        nbytes: of all blocks together.
        block_bytes: of each; default: an eighth of them.
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
                    lease.tensor.copy_(contents)
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
            with self._store.acquire(key, "ram", "rw"):
                pass
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
            with self._store.acquire(key, "ram", "rw"):
                pass
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
                with self._store.acquire(key, "ram", "w"):  # contents: what the slot held before, which is random
                    pass
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
