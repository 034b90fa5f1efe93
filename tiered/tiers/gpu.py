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
    """Resource of a GpuTier's slot: device memory, and the events of the work that uses it.

    A buffer outlives its slots: the pool passes it to the next slot of the same size, even while kernels of the old
    slot are still queued. Events therefore belong to the buffer, not to the slot.

    Attributes:
        tensor: all bytes, 1-D uint8 on the device.
        pending_events: for each stream, the event after the last work that uses the bytes. One event per stream is
            enough, because a stream runs in order. The next user's stream waits for these events.
        lock: guards ``pending_events`` against concurrent access by links, trainer and prefetcher.
    """

    tensor: torch.Tensor
    pending_events: dict[Any, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_event(self, event: Any, stream: Any) -> None:
        """Add the event of recorded work, and remove events that the device has already reached."""
        with self.lock:
            self.pending_events.pop(stream, None)  # Usually this was the only event, so no query is needed.
            self._drop_finished_events()
            self.pending_events[stream] = event

    def is_idle(self) -> bool:
        """Return whether the device has finished all recorded work. Does not wait."""
        with self.lock:
            self._drop_finished_events()
            return not self.pending_events

    def _drop_finished_events(self) -> None:
        if self.pending_events:
            self.pending_events = {s: pending for s, pending in self.pending_events.items() if not pending.query()}

    def order_before(self, stream: Any) -> None:
        """Make later work on ``stream`` wait for the recorded work on other streams."""
        with self.lock:
            for other_stream, event in self.pending_events.items():
                if other_stream != stream:
                    stream.wait_event(event)

    def wait(self) -> None:
        """Make the host wait for the work recorded so far. Meanwhile, other threads can record more work."""
        with self.lock:
            events = dict(self.pending_events)
        for event in events.values():
            event.synchronize()
        with self.lock:
            self.pending_events = {
                stream: event for stream, event in self.pending_events.items() if event is not events.get(stream)
            }

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[Any]:
        """Yield bytes ``start`` to ``stop``: a tensor for device memory, a memoryview for host memory."""
        part = self.tensor[start:stop]
        yield part if part.is_cuda else part.numpy().data


class GpuTier:
    """Tier in device memory. Every slot is a separate buffer of exactly the slot's (rounded) size.

    Uses no device before the first slot. torch's allocator rounds buffers above 1 MiB up to multiples of 2 MiB, so
    leave a few percent of the device's memory outside the tier.

    The tier allocates buffers on a separate stream. So torch never gives the tier memory that another stream's kernels
    still use, and never gives the tier's memory to another stream. A copy into a new buffer need not wait.

    A slot reuses a buffer of its size, preferably an idle one, so that steps neither allocate nor wait.
    ``keep_buffers`` allocates buffers before the first step. A buffer is dropped for another size only if there is no
    other space. Then the host waits for the buffer's last users, and returning the memory briefly stops all streams.
    ``num_drops`` counts drops.

    Args:
        capacity_bytes: maximum total bytes of slots and reservations.
        alignment_bytes: slots are rounded up to this power of two, at least 512. Use 4096 to read files directly into
            slots.
        device: CUDA device (default: the current one), or ``"cpu"`` to test a three-tier setup in host memory.

    Attributes:
        num_drops: number of buffers returned to the device, to make space or on ``close``.
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
            raise ValueError(f"alignment_bytes must be a power of two, at least {_ALIGNMENT_BYTES}: {alignment_bytes}")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self._device = _with_index(torch.device(device))
        self.device: torch.device | None = self._device
        self.durable = False
        self.num_drops = 0
        self._is_cuda = self._device.type == "cuda"
        self._stream_lock = threading.Lock()
        self._allocation_stream: Any = None
        self._ledger = Ledger(name, capacity_bytes)
        self._pool: SlabPool[DeviceBuffer] = SlabPool(self._ledger, self._make, self._drop, DeviceBuffer.is_idle)

    def _make(self, nbytes: int) -> DeviceBuffer:
        if not self._is_cuda:
            buffer = torch.empty(nbytes + self.alignment_bytes, dtype=torch.uint8, device=self._device)
            offset = -buffer.data_ptr() % self.alignment_bytes
            return DeviceBuffer(buffer[offset : offset + nbytes])
        # torch orders the reuse of memory on the stream that freed the memory. No kernels run on the tier's stream, and
        # _drop frees only idle buffers, so the next user need not wait.
        with torch.cuda.stream(self._get_allocation_stream()):
            return DeviceBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _drop(self, buffer: DeviceBuffer) -> None:
        # The host must wait, because streams do not order the return of memory to the device.
        buffer.wait()
        buffer.tensor = torch.empty(0, dtype=torch.uint8)
        self.num_drops += 1  # The pool's lock guards the counter.
        if self._is_cuda:
            # Otherwise torch would cache the memory, and a buffer of another size would need additional memory.
            torch.cuda.empty_cache()

    def _get_allocation_stream(self) -> Any:
        with self._stream_lock:  # Any thread can allocate, without the pool's lock.
            if self._allocation_stream is None:
                self._allocation_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            return self._allocation_stream

    def _record_event(self, stream: Any) -> Any:
        # With blocking=True, a waiting host thread sleeps instead of keeping a CPU core busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def current_stream(self) -> Any:
        """Return the calling thread's current stream on the tier's device, or None for host memory."""
        # Pass the index, because torch needs more time to look up the index than to find the stream.
        return torch.cuda.current_stream(self._device.index) if self._is_cuda else None

    def record_use(self, slots: Sequence[Slot], stream: Any = None) -> None:
        """Record the work queued so far on ``stream`` (default: the current one) as a use of all these slots."""
        if self._is_cuda:
            stream = stream if stream is not None else self.current_stream()
            event = self._record_event(stream)
            for slot in slots:
                buffer_of(slot).add_event(event, stream)

    def order_before(self, slot: Slot, stream: Any) -> None:
        """Make later work on ``stream`` wait for all recorded uses of the slot's buffer, by this or earlier slots."""
        if self._is_cuda:
            buffer_of(slot).order_before(stream)

    def slot_bytes(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return round_up(nbytes, self.alignment_bytes)

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot with a ``DeviceBuffer`` as its resource, or None if there is not enough space.

        Raises:
            TransferError: the device has less free memory than the ledger shows.
        """
        slot_bytes = self.slot_bytes(nbytes)
        if slot_bytes == 0:
            return Slot(self.name, 0, 0, DeviceBuffer(torch.empty(0, dtype=torch.uint8, device=self._device)))
        try:
            buffer = self._pool.take(slot_bytes)
        except torch.OutOfMemoryError as error:
            raise self._memory_error(f"{format_size(slot_bytes)} of block '{name}'") from error
        return None if buffer is None else Slot(self.name, nbytes, slot_bytes, buffer)

    def free(self, slot: Slot) -> None:
        """Return the slot's buffer to the pool. The buffer's next user waits for the recorded work."""
        buffer = buffer_of(slot)
        if slot.slot_bytes:
            self._pool.give(slot.slot_bytes, buffer)
        slot.resource = None

    def _memory_error(self, purpose: str) -> TransferError:
        return TransferError(
            f"the device has no memory for {purpose}. "
            f"Give tier '{self.name}' fewer bytes than the {format_size(self.capacity_bytes)} it has",
            tier=self.name,
        )

    def keep_buffers(self, counts: Mapping[int, int]) -> None:
        """Allocate the missing buffers; see ``BufferTier``.

        Raises:
            TransferError: the device has less free memory than the ledger shows.
        """
        try:
            self._pool.keep(counts)
        except torch.OutOfMemoryError as error:
            raise self._memory_error("the buffers of copies") from error

    def has_buffer(self, nbytes: int) -> bool:
        """Return whether a slot can be allocated without dropping kept buffers; see ``BufferTier``."""
        return self._pool.has(self.slot_bytes(nbytes))

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of the slot. Before using it on a stream, call ``order_before`` for the stream."""
        return view_as(buffer_of(slot).tensor, shape, dtype)

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot. A negative number returns bytes. Raises ``CapacityError``."""
        self._pool.reserve(nbytes)

    def sync(self) -> None:
        """Do nothing, because device memory does not survive the process."""

    def usage(self) -> TierUsage:
        """Return the tier's current byte counts. Buffers kept for reuse count as free."""
        return self._ledger.usage()

    def close(self) -> None:
        """Return the memory of all unused buffers to the device."""
        self._pool.close()


def _with_index(device: torch.device) -> torch.device:
    """Return a device with an index. "cuda" without an index means the calling thread's current device.

    Before CUDA is initialized, the current device is always the first one.
    """
    if device.type != "cuda" or ":" in str(device):
        return device
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device() if is_initialized else 0)


def buffer_of(slot: Slot) -> DeviceBuffer:
    """Return the buffer of a GpuTier's slot."""
    assert isinstance(slot.resource, DeviceBuffer), slot
    return slot.resource
