"""Base class and helpers for the sides of `links.py`, which all move the same number of bytes and report seconds."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tiered.ext import HostSlab
from tiered.units import MiB

READ, WRITE, MIXED = "read", "write", "mixed"


class SkippedError(Exception):
    """Error for a side that cannot run on this machine. The message states the reason."""


@dataclass(frozen=True)
class Work:
    """Blocks of one size that every side moves in one measurement.

    Attributes:
        block_nbytes: Bytes per block.
        num_blocks: Number of blocks per measurement. "read" and "write" move all blocks; "mixed" reads the first half
            while it writes the second.
        folder: Working folder on the measured drive.
    """

    block_nbytes: int
    num_blocks: int
    folder: Path

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that one measurement moves, the same for all operations."""
        return self.block_nbytes * self.num_blocks

    @property
    def halves(self) -> tuple[range, range]:
        """Return the blocks that "mixed" reads, and the blocks that it writes."""
        half = self.num_blocks // 2
        return range(half), range(half, self.num_blocks)


@dataclass
class Sample:
    """Wall seconds of one measurement, and CPU seconds of all threads."""

    seconds: float = 0.0
    cpu_s: float = 0.0


class Side(ABC):
    """Base class of a side that moves bytes. Files are allocated and written before the first measurement."""

    name: str
    operations: tuple[str, ...] = (READ, WRITE, MIXED)

    @abstractmethod
    def measure(self, operation: str) -> Sample:
        """Run an operation on ``Work.nbytes`` bytes. Return once all written bytes are on the drive (fdatasync).

        Raises:
            SkippedError: This side cannot run on this machine.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the side. The bench deletes the files with its folder."""


@contextmanager
def timed() -> Iterator[Sample]:
    """Yield a sample, and fill it with the seconds that the ``with`` block takes."""
    sample = Sample()
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    yield sample
    sample.seconds, sample.cpu_s = time.perf_counter() - start_s, _cpu_s() - start_cpu_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until the written contents of the files are on the drive."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def drop_cached(paths: Iterable[Path]) -> None:
    """Drop the contents of files from the page cache, so that reads reach the drive."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # only clean pages can be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_randomly(tensor: Tensor) -> None:
    """Fill a tensor with incompressible noise, which repeats every 16 MiB."""
    noise = torch.randint(0, 256, (16 * MiB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = tensor.view(torch.uint8).view(-1)
    for start in range(0, flat.numel(), noise.numel()):
        part = flat[start : start + noise.numel()]
        part.copy_(noise[: part.numel()])


def make_random_file(path: Path, nbytes: int) -> None:
    """Write a file of noise that measurements can overwrite in place."""
    noise = HostSlab(16 * MiB)
    fill_randomly(noise.tensor)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        for start in range(0, nbytes, noise.nbytes):
            with noise.view(0, min(noise.nbytes, nbytes - start)) as view:
                os.pwrite(fd, view, start)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def require(code: str, timeout_s: float) -> None:
    """Try Python code in a separate process before running it here, because library code can hang or abort.

    Raises:
        SkippedError: The code failed or timed out. The message contains its last output line.
    """
    reason = _failure(code, timeout_s)
    if reason:
        raise SkippedError(reason)


@functools.cache
def _failure(code: str, timeout_s: float) -> str:
    """Return the reason why the code fails, or "" if it succeeds."""
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"did not start within {timeout_s:.0f} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return (lines[-1][:200] if lines else f"exit code {done.returncode}") if done.returncode else ""


@dataclass
class Samples:
    """All measurements of one side in one operation, one per round."""

    nbytes: int
    each: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Return the rate in each round, in GB/s (1e9 bytes/s)."""
        return [self.nbytes / sample.seconds / 1e9 for sample in self.each]

    @property
    def cpu_s_per_gb(self) -> list[float]:
        """Return the CPU seconds per 1e9 bytes in each round."""
        return [sample.cpu_s / (self.nbytes / 1e9) for sample in self.each]
