"""GpuTier: slots in device memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tiered.errors import TransferError
from tiered.tiers.base import Ledger, Slot, TierUsage
from tiered.tiers.pool import SlabPool
from tiered.tiers.ram import view_as
from tiered.units import format_size, round_up

_ALIGNMENT_BYTES = 512  # alignment of the device's copy engines and of torch's allocator


@dataclass(eq=False, slots=True)
class DeviceBuffer:
    """The resource of a GpuTier's slot.

    It outlives its slots: the pool hands it on to the next slot of its size while kernels of the last one are still
    queued. So the events stay with the buffer, not with the slot.

    Attributes:
        tensor: all bytes, 1-D uint8 on the device.
        pending_events: stream -> the last event recorded there, after work that still uses the bytes. One per stream is
            enough: what a stream did before is done by then. The next user of the buffer waits for them first, on the
            device, not on the host. Guarded by ``lock``: links, trainer and prefetcher have different threads.
    """

    tensor: torch.Tensor
    pending_events: dict[Any, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_event(self, event: Any, stream: Any) -> None:
        """Remember recorded work; forget work that the device has finished."""
        with self.lock:
            self.pending_events.pop(stream, None)  # usually the only one: the device need not be queried
            self._forget_what_is_done()
            self.pending_events[stream] = event

    def is_idle(self) -> bool:
        """Return whether the device has finished all remembered work. Asks, does not wait."""
        with self.lock:
            self._forget_what_is_done()
            return not self.pending_events

    def _forget_what_is_done(self) -> None:
        if self.pending_events:
            self.pending_events = {s: pending for s, pending in self.pending_events.items() if not pending.query()}

    def order_before(self, stream: Any) -> None:
        """Make later work of ``stream`` wait for the remembered work of other streams; its own is in order already."""
        with self.lock:
            for other, event in self.pending_events.items():
                if other != stream:
                    stream.wait_event(event)

    def wait(self) -> None:
        """Wait on the host for the work remembered so far. More can be remembered meanwhile."""
        with self.lock:
            waited_for = dict(self.pending_events)
        for event in waited_for.values():
            event.synchronize()
        with self.lock:
            self.pending_events = {
                stream: event for stream, event in self.pending_events.items() if event is not waited_for.get(stream)
            }

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[Any]:
        """Yield bytes ``start`` to ``stop``: as a memoryview of host memory, as a tensor of device memory."""
        part = self.tensor[start:stop]
        yield part if part.is_cuda else part.numpy().data


class GpuTier:
    """Device memory of at most ``capacity_bytes``; every slot is its own buffer of exact size (rounded up).

    Touches no device before the first slot. torch's allocator rounds buffers above 1 MiB up to 2 MiB inside its
    own segments: leave a few percent of the device outside the tier.

    Buffers are made on a separate stream of the tier, so torch never hands it bytes that queued kernels of another
    stream still use, nor the reverse. So a new buffer is free at once, and a copy into it waits for nothing.

    A slot reuses a buffer of its size, an idle one first, so that no step allocates or waits. ``keep_buffers`` makes
    buffers before the first step. A buffer of another size is dropped only if the homes and the buffers of all
    sizes that are in use together exceed the capacity. Then the host waits for its last users, and returning the bytes
    to the device stops all streams for a moment. ``num_drops`` counts that.

    Args:
        capacity_bytes: bound on all slots and reservations together.
        alignment_bytes: slots are rounded up to this power of two, 512 at least; 4096 if files are read straight into
            them.
        device: a CUDA device, by default the current one here. With ``"cpu"`` it is a second tier of host memory, for
            tests and for trying out a three-tier setup without a device.

    Attributes:
        num_drops: buffers whose bytes went back to the device, for another size or at the end.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        name: str = "gpu",
        device: str | torch.device = "cuda",
        alignment_bytes: int = _ALIGNMENT_BYTES,
    ) -> None:
        if alignment_bytes < _ALIGNMENT_BYTES or alignment_bytes & (alignment_bytes - 1):
            raise ValueError(f"alignment_bytes must be a power of two, {_ALIGNMENT_BYTES} at least: {alignment_bytes}")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self._device = _numbered(torch.device(device))
        self.device: torch.device | None = self._device
        self.durable = False
        self.num_drops = 0
        self._is_cuda = self._device.type == "cuda"
        self._streams = threading.Lock()
        self._own_stream: Any = None
        self._ledger = Ledger(name, capacity_bytes)
        self._pool: SlabPool[DeviceBuffer] = SlabPool(self._ledger, self._make, self._drop, DeviceBuffer.is_idle)

    def _make(self, nbytes: int) -> DeviceBuffer:
        if not self._is_cuda:
            whole = torch.empty(nbytes + self.alignment_bytes, dtype=torch.uint8, device=self._device)
            start = -whole.data_ptr() % self.alignment_bytes
            return DeviceBuffer(whole[start : start + nbytes])
        # torch hands out memory in the order of the stream it was freed on. On the tier's own stream nothing runs, and
        # _drop frees only what is idle: the next user of the buffer need not wait for anything.
        with torch.cuda.stream(self._allocating_stream()):
            return DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _drop(self, buffer: DeviceBuffer) -> None:
        # On the host: no stream orders memory that is given back to the device.
        buffer.wait()
        buffer.tensor = torch.empty(0, dtype=torch.uint8)
        self.num_drops += 1  # under the pool's lock
        if self._is_cuda:
            # Without this, torch keeps the bytes for itself and the next size would come on top of them.
            torch.cuda.empty_cache()

    def _allocating_stream(self) -> Any:
        with self._streams:  # buffers are made from any thread, without the pool's lock
            if self._own_stream is None:
                self._own_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            return self._own_stream

    def _recorded_event(self, stream: Any) -> Any:
        # blocking=True: a host thread that waits sleeps instead of spinning on a core that computes
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def current_stream(self) -> Any:
        """Return the calling thread's current stream on the tier's device; None for host memory."""
        # By its number: torch takes longer to look up a device's number than to find the stream.
        return torch.cuda.current_stream(self._device.index) if self._is_cuda else None

    def record_use(self, slots: Sequence[Slot], stream: Any = None) -> None:
        """Remember the work queued so far on ``stream`` (default: the current one) as a user of each of the slots."""
        if self._is_cuda:
            stream = stream if stream is not None else self.current_stream()
            event = self._recorded_event(stream)
            for slot in slots:
                buffer_of(slot).add_event(event, stream)

    def order_before(self, slot: Slot, stream: Any) -> None:
        """Make later work of ``stream`` wait for all remembered users of the slot's buffer, in any slot."""
        if self._is_cuda:
            buffer_of(slot).order_before(stream)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return round_up(nbytes, self.alignment_bytes)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot (resource: a ``DeviceBuffer``), or None when there is no room now.

        Raises:
            TransferError: the device has less free memory than the ledger says.
        """
        slot_bytes = self.slot_bytes(nbytes)
        if slot_bytes == 0:
            return Slot(self.name, 0, 0, DeviceBuffer(torch.empty(0, dtype=torch.uint8, device=self._device)))
        try:
            buffer = self._pool.take(slot_bytes)
        except torch.OutOfMemoryError as error:
            raise self._no_memory(f"{format_size(slot_bytes)} of block '{name}'") from error
        return None if buffer is None else Slot(self.name, nbytes, slot_bytes, buffer)

    def free(self, slot: Slot) -> None:
        """Take the slot back. Work that still uses it is remembered and waited for by the next user."""
        buffer = buffer_of(slot)
        if slot.slot_bytes:
            self._pool.give(slot.slot_bytes, buffer)
        slot.resource = None

    def _no_memory(self, what: str) -> TransferError:
        return TransferError(
            f"the device has no memory for {what}. "
            f"Give tier '{self.name}' fewer bytes than the {format_size(self.capacity_bytes)} it has",
            tier=self.name,
        )

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        """Make the buffers that are missing; see ``BufferTier``.

        Raises:
            TransferError: the device has less free memory than the ledger says.
        """
        try:
            self._pool.keep(counts)
        except torch.OutOfMemoryError as error:
            raise self._no_memory("the buffers of copies") from error

    def has_buffer(self, nbytes: int) -> bool:
        """Return whether a slot needs no room of buffers that are kept; see ``BufferTier``."""
        return self._pool.has(self.slot_bytes(nbytes))

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of the slot. Kernels that use it come after ``order_before`` of their stream."""
        return view_as(buffer_of(slot).tensor, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Charge bytes that live outside any slot; negative gives back. Raises ``CapacityError`` without room."""
        self._pool.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing: device memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the ledger now; buffers kept for reuse count as free."""
        return self._ledger.usage()

    def close(self) -> None:
        """Return all memory that no slot holds to the device."""
        self._pool.close()


def _numbered(device: torch.device) -> torch.device:
    """Return a device with its number. "cuda" alone means the current one, which each thread has for itself.

    A process that has not initialised CUDA yet cannot have chosen another device than the first.
    """
    if device.type != "cuda" or ":" in str(device):
        return device
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if is_initialized else 0)


def buffer_of(slot: Slot) -> DeviceBuffer:
    """Return the device buffer of a GpuTier's slot."""
    assert isinstance(slot.resource, DeviceBuffer), slot
    return slot.resource
