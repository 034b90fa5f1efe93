"""Fault injection for drives. A wrapper around a ``PartMover`` fails, corrupts or delays operations on demand."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tiered.links.base import Link
from tiered.links.files import FileReadLink, FileWriteLink, PartMover
from tiered.tiers.layout import ChunkFile
from tiered.units import PAGE_BYTES


@dataclass(eq=False)
class Fault:
    """A fault that affects some of the moved parts.

    Attributes:
        kind: ``error`` fails with ``errno`` and moves nothing; ``short`` moves only the first half and reports success;
            ``flip`` changes one bit; ``late`` delays the call by ``latency_s``.
        path: text that must occur in the path of an affected file.
        skip: number of matching calls that succeed first.
        times: number of affected calls after the skipped calls, or None for all.
        bit: index, within the part, of the bit that ``flip`` changes.
    """

    kind: Literal["error", "short", "flip", "late"]
    operation: Literal["read", "write"]
    errno: int = 0
    path: str = ""
    skip: int = 0
    times: int | None = None
    bit: int = 0
    latency_s: float = 0.0
    num_calls: int = 0

    def affects(self, operation: str, file: ChunkFile) -> bool:
        """Count a call, and return whether the fault affects this call."""
        if operation != self.operation or self.path not in str(file.path):
            return False
        self.num_calls += 1
        call_index = self.num_calls - self.skip
        return call_index > 0 and (self.times is None or call_index <= self.times)


class FaultyMover:
    """A ``PartMover`` that adds faults to another mover. Thread-safe."""

    def __init__(
        self, inner: PartMover, faults: Iterable[Fault] = (), *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.inner = inner
        self.faults = list(faults)  # The caller can change the list at any time.
        self._sleep = sleep
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """Name of the inner mover's copy method."""
        return self.inner.path

    def read(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Read with the inner mover and apply the active faults."""
        faults = self._begin("read", file)
        if any(fault.kind == "short" for fault in faults):
            with view[: _half(len(view))] as half:
                self.inner.read(file, offset, half)
        else:
            self.inner.read(file, offset, view)
        for fault in faults:
            if fault.kind == "flip":
                view[fault.bit // 8 % len(view)] ^= 1 << fault.bit % 8

    def write(self, file: ChunkFile, offset: int, view: memoryview) -> None:
        """Write with the inner mover and apply the active faults."""
        faults = self._begin("write", file)
        if any(fault.kind == "short" for fault in faults):
            with view[: _half(len(view))] as half:
                self.inner.write(file, offset, half)
        else:
            self.inner.write(file, offset, view)
        for fault in faults:
            if fault.kind == "flip":
                flip_bit(file, 8 * offset + fault.bit % (8 * len(view)))

    def close(self) -> None:
        """Close the inner mover."""
        self.inner.close()

    def _begin(self, operation: str, file: ChunkFile) -> Sequence[Fault]:
        with self._lock:
            faults = [fault for fault in self.faults if fault.affects(operation, file)]
        for fault in faults:
            if fault.kind == "late":
                self._sleep(fault.latency_s)
        for fault in faults:
            if fault.kind == "error":
                raise OSError(fault.errno, os.strerror(fault.errno))
        return faults


def flip_bit(file: ChunkFile, bit: int) -> None:
    """Change one bit of a file on disk; ``bit`` counts from the start of the file."""
    fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(fd, 1, bit // 8)
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(fd)


def make_faulty(links: Iterable[Link], *faults: Fault) -> FaultyMover:
    """Add faults to the engine of the file links in ``links``. Return the new mover, to which more can be added."""
    engines = {link.engine for link in links if isinstance(link, FileReadLink | FileWriteLink)}
    (engine,) = engines
    engine.mover = FaultyMover(engine.mover, faults)
    return engine.mover


def _half(nbytes: int) -> int:
    """Return about half of ``nbytes``, rounded down to whole pages for O_DIRECT."""
    return nbytes // 2 // PAGE_BYTES * PAGE_BYTES
