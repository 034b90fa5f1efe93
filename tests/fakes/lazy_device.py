"""A fake CUDA device that delays all work until the host waits. This reveals missing synchronization.

Kernels and copies are queued on streams. When the host waits for an event, only work that must precede the event runs.
This is work on the event's stream, and on streams for which that stream waits. A copy that does not wait for the kernel
that writes its source therefore always moves stale bytes. A kernel whose slot was reused too early always reads a
different block.

Host memory stands in for device memory. The store, tiers, links and leases are real, including their threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tiered import GpuTier

DEVICE = torch.device("cuda", 0)


class LazyDevice:
    """Device whose streams and events replace torch's in the context ``in_place``.

    Attributes:
        num_trims: Number of calls to ``torch.cuda.empty_cache``.
        num_run: Number of executed kernels and copies.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.num_trims = 0
        self.num_run = 0
        self._streams: list[LazyStream] = []
        self.default = self.stream()
        self._current = threading.local()

    def check(self) -> None:
        """Raise the device's pending error, if any. Every call from the host to the device calls this method."""

    def stream(self, *args: Any, **options: Any) -> LazyStream:
        """Return a new stream. Replaces ``torch.cuda.Stream``."""
        with self.lock:
            self._streams.append(LazyStream(self))
            return self._streams[-1]

    def event(self, **options: Any) -> LazyEvent:
        """Return a new event. Replaces ``torch.cuda.Event``."""
        return LazyEvent(self)

    def current_stream(self, device: Any = None) -> LazyStream:
        """Return the calling thread's current stream. Replaces ``torch.cuda.current_stream``."""
        stream: LazyStream = getattr(self._current, "stream", self.default)
        return stream

    @contextmanager
    def use(self, stream: LazyStream) -> Iterator[None]:
        """Make ``stream`` the current stream, and queue copies on it. Replaces ``torch.cuda.stream``."""
        before, self._current.stream = self.current_stream(), stream
        try:
            with _QueuesCopies(stream):
                yield
        finally:
            self._current.stream = before

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Queue a kernel on the current stream."""
        self.current_stream().queue(kernel)

    def gate(self) -> Gate:
        """Block the current stream with a kernel that ends only after the test opens the returned gate."""
        gate = Gate(self)
        self.current_stream().queue(gate)
        return gate

    def synchronize(self) -> None:
        """Run all queued work."""
        with self.lock:
            for stream in self._streams:
                stream.run_to(len(stream.work))

    def _trim(self) -> None:
        self.num_trims += 1

    def gpu_tier(self, capacity_bytes: int, alignment_bytes: int = 512) -> GpuTier:
        """Return a GPU tier in host memory that counts as this device's memory."""
        tier = GpuTier(capacity_bytes, device="cpu", alignment_bytes=alignment_bytes)
        tier.device, tier._is_cuda = DEVICE, True
        return tier

    @contextmanager
    def in_place(self) -> Iterator[LazyDevice]:
        """Replace torch's CUDA functions with this device's within the context."""
        names = {
            "Stream": self.stream,
            "Event": self.event,
            "stream": self.use,
            "current_stream": self.current_stream,
            "empty_cache": self._trim,
        }
        with mock.patch.multiple(torch.cuda, **names):
            yield self


class Gate:
    """Kernel that blocks its stream until a test opens the gate."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.is_open = False

    def open(self) -> None:
        with self._device.lock:
            self.is_open = True
            self._device.lock.notify_all()

    def __call__(self) -> None:
        assert self.is_open


class LazyStream:
    """Stream with a list of queued work. The first ``num_done`` items of the list have run."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.work: list[Callable[[], Any]] = []
        self.num_done = 0
        self._behind: dict[LazyStream, int] = {}  # stream -> number of its items that run before new work on this one
        self._runner: int | None = None

    def queue(self, work: Callable[[], Any]) -> None:
        self._device.check()
        with self._device.lock:
            self.work.append(work)

    def wait_event(self, event: LazyEvent) -> None:
        """Make later work wait for the event. As in CUDA, an event that was never recorded causes no wait."""
        place = event.place
        if place is not None:
            self.queue(lambda: place[0].run_to(place[1], counts=False))
            with self._device.lock:
                for stream, stop in event.behind.items():
                    self._behind[stream] = max(stop, self._behind.get(stream, 0))

    def wait_stream(self, stream: LazyStream) -> None:
        event = LazyEvent(self._device)
        event.record(stream)
        self.wait_event(event)

    def is_behind(self, stream: LazyStream, stop: int) -> bool:
        """Return whether new work on this stream runs after the first ``stop`` items of ``stream``."""
        return stream is self or stream.num_done >= stop or self._behind.get(stream, 0) >= stop

    def all_before(self) -> dict[LazyStream, int]:
        """Return, for each stream, how many of its items run before new work on this stream."""
        return {**self._behind, self: len(self.work)}

    def synchronize(self) -> None:
        self._device.check()
        self.run_to(len(self.work))

    def run_to(self, stop: int, *, counts: bool = True) -> None:
        """Run the first ``stop`` items of the stream, or wait for the thread that runs them."""
        lock, me = self._device.lock, threading.get_ident()
        with lock:
            while self.num_done < stop:
                work = self.work[self.num_done]
                if self._runner not in (None, me) or (isinstance(work, Gate) and not work.is_open):
                    lock.wait()
                    continue
                before, self._runner = self._runner, me
                try:
                    work()
                finally:
                    self._runner = before
                    self.work[self.num_done] = _done
                    self.num_done += 1
                    self._device.num_run += counts
                    lock.notify_all()


def _done() -> None:
    """Do nothing. Replaces finished work in a stream's list, so that objects referenced by the work can be freed."""


class LazyEvent:
    """Event that marks a position in a stream."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.place: tuple[LazyStream, int] | None = None
        self.behind: dict[LazyStream, int] = {}

    def record(self, stream: LazyStream | None = None) -> None:
        self._device.check()
        with self._device.lock:
            stream = stream or self._device.current_stream()
            self.place, self.behind = (stream, len(stream.work)), stream.all_before()

    def query(self) -> bool:
        self._device.check()
        return self.place is None or self.place[0].num_done >= self.place[1]

    def synchronize(self) -> None:
        self._device.check()
        if self.place is not None:
            self.place[0].run_to(self.place[1])


class _QueuesCopies(TorchFunctionMode):
    """Function mode that queues each ``copy_`` on a stream instead of copying immediately."""

    def __init__(self, stream: LazyStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            self._stream.queue(lambda: target.copy_(source))
            return target
        return func(*args, **(kwargs or {}))
