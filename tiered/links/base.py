"""Protocol and base classes for links. A link moves bytes between the slots of two tiers in the background."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tiered.errors import TieredError, TransferError
from tiered.tiers.base import Slot, Tier
from tiered.transfer import Transfer


@dataclass(frozen=True, slots=True)
class LinkUsage:
    """Counters of one direction of a link since its creation.

    Attributes:
        num_bytes: bytes of contents that were moved, without padding.
        busy_s: wall-clock seconds with at least one transfer in progress.
    """

    num_bytes: int
    busy_s: float
    inflight_bytes: int
    num_transfers: int
    path: str

    @property
    def rate_bytes_per_s(self) -> float:
        """Mean rate while at least one transfer was in progress."""
        return self.num_bytes / self.busy_s if self.busy_s else 0.0


@runtime_checkable
class Link(Protocol):
    """One-way link that moves bytes from the ``src`` tier to the ``dst`` tier. ``submit`` never waits for the copy."""

    src: str
    dst: str

    @property
    def path(self) -> str:
        """Name of the current copy method: "host", "cuda", "posix-direct", "kvikio-gds" ..."""
        ...

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once; the transfer finishes on a link thread.

        The caller must not change either slot until the transfer is done. ``submit`` raises no errors. An error
        becomes the transfer's ``TransferError``.
        """
        ...

    def usage(self) -> LinkUsage: ...

    def close(self) -> None:
        """Finish transfers and stop the threads. Shared threads stop after their last link closes. Idempotent."""
        ...


@runtime_checkable
class LinkedTier(Protocol):
    """A tier that creates its own links. ``default_links`` calls ``links_with`` of every tier that has this method."""

    def links_with(self, neighbour: Tier) -> Sequence[Link] | None:
        """Return two links, to and from ``neighbour``, or None if the tiers cannot be linked.

        A ``ReadOnlyTier`` returns only the link to the neighbour.

        The method must not start threads or use a device. Links do so at their first transfer.
        """
        ...


class Meter:
    """Counters of a link's transfers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_transfers = 0
        self._num_active = 0
        self._inflight_bytes = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    def start(self, nbytes: int) -> None:
        """Count a transfer as in progress."""
        with self._lock:
            if self._num_active == 0:
                self._busy_since_s = time.perf_counter()
            self._num_active += 1
            self._inflight_bytes += nbytes

    def end(self, nbytes: int, *, moved: bool) -> None:
        """Count a transfer as ended. ``moved`` is False if it failed. Call this before ``Transfer.finish``."""
        with self._lock:
            self._num_active -= 1
            self._inflight_bytes -= nbytes
            if moved:
                self._num_bytes += nbytes
                self._num_transfers += 1
            if self._num_active == 0:
                self._busy_s += time.perf_counter() - self._busy_since_s

    def usage(self, path: str) -> LinkUsage:
        """Return the current counters, including the current busy period."""
        with self._lock:
            busy_s = self._busy_s + (time.perf_counter() - self._busy_since_s if self._num_active else 0.0)
            return LinkUsage(self._num_bytes, busy_s, self._inflight_bytes, self._num_transfers, path)


class Workers:
    """Pool of ``num_threads`` daemon threads that run jobs, urgent ones first, and otherwise in FIFO order.

    If a job raises an exception, ``threading.excepthook`` reports it, and the thread continues with other jobs.

    Args:
        num_reserved: number of threads that urgent jobs leave free for ordinary jobs. For example, if all threads ran
            reads (urgent), a drive's write bandwidth would be unused, although it can read and write concurrently.
    """

    def __init__(self, num_threads: int, name: str, *, num_reserved: int = 0) -> None:
        assert 0 <= num_reserved < num_threads, (num_reserved, num_threads)
        self._num_threads = num_threads
        self._max_urgent = num_threads - num_reserved
        self._num_urgent_running = 0
        self._name = name
        self._changed = threading.Condition()
        self._urgent_jobs: deque[Callable[[], None]] = deque()
        self._ordinary_jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, job: Callable[[], None], *, urgent: bool = True) -> None:
        """Queue a job; never blocks."""
        with self._changed:
            assert not self._is_closed, f"{self._name}: job submitted after close"
            (self._urgent_jobs if urgent else self._ordinary_jobs).append(job)
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._urgent_jobs and not self._ordinary_jobs and not self._is_closed:
                    self._changed.wait()
                if not self._urgent_jobs and not self._ordinary_jobs:
                    return
                may_run = self._num_urgent_running < self._max_urgent or not self._ordinary_jobs
                is_urgent = bool(self._urgent_jobs) and may_run
                job = (self._urgent_jobs if is_urgent else self._ordinary_jobs).popleft()
                self._num_urgent_running += is_urgent
            try:
                job()
            except BaseException:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del job  # Otherwise, an idle thread could keep a slot's memory alive.
            with self._changed:
                self._num_urgent_running -= is_urgent

    def close(self) -> None:
        """Run the queued jobs, then stop the threads. Idempotent. Jobs must not call this method."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


#: Function that copies the first bytes of a source slot to a destination slot, or raises an error.
Move = Callable[[Slot, Slot, int], None]


class ThreadedLink:
    """One direction of a link, with a few threads that start at the first transfer. Thread-safe.

    If ``move`` raises a ``TieredError``, the transfer fails with it. Other exceptions become a ``TransferError``.

    Args:
        move: called on the link's threads as ``move(src_slot, dst_slot, nbytes)``, concurrently for different slots.
    """

    def __init__(self, src: str, dst: str, move: Move, *, path: str, num_threads: int = 2) -> None:
        self.src = src
        self.dst = dst
        self.path = path
        self._move = move
        self._meter = Meter()
        self._workers = Workers(num_threads, f"tiered-{src}-{dst}")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        self._workers.submit(lambda: self._run(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def _run(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        error: TieredError | None = None
        try:
            self._move(src_slot, dst_slot, nbytes)
        except TieredError as cause:
            error = cause
        except Exception as cause:  # Every exception must end the transfer, because otherwise its waiters would hang.
            error_number = cause.errno if isinstance(cause, OSError) else None
            text = f"copy of {nbytes} bytes failed: {cause}"
            error = TransferError(text, tier=f"{self.src}->{self.dst}", errno=error_number)
            error.__cause__ = cause
        self._meter.end(nbytes, moved=error is None)
        transfer.finish(error)

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress and stop the threads. Idempotent."""
        self._workers.close()


class HostLink(ThreadedLink):
    """One-way link between two addressable tiers in host memory, with threads that start at the first transfer."""

    def __init__(self, src_tier: Tier, dst_tier: Tier) -> None:
        for tier in (src_tier, dst_tier):
            if tier.device is None or tier.device.type != "cpu":
                raise ValueError(f"a host link needs tiers in host memory; tier '{tier.name}' is on {tier.device}")
        super().__init__(src_tier.name, dst_tier.name, self._copy, path="host")
        self._src_tier = src_tier
        self._dst_tier = dst_tier

    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> None:
        source = self._src_tier.tensor(src_slot, (nbytes,), torch.uint8)
        self._dst_tier.tensor(dst_slot, (nbytes,), torch.uint8).copy_(source)
