"""CudaLink: copies between device memory and pinned host memory, with separate copy streams per direction."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from tiered.errors import TransferError
from tiered.links.base import LinkUsage, Meter, Workers
from tiered.tiers.base import Slot
from tiered.tiers.gpu import DeviceBuffer, GpuTier, buffer_of
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer


@dataclass(eq=False, slots=True)
class _Lane:
    """A stream that runs copies in order, and the thread that waits for these copies in the same order."""

    waiter: Workers
    stream: Any = None


class CudaLink:
    """One-way link between a GpuTier and a RamTier. Uses no device before the first transfer.

    These rules make a transfer safe:

    1. Before the copy, its stream waits for all work that is recorded as using the device slot: kernels that wrote the
       bytes, or that still read the slot's old contents. Only the stream waits, on the device; no thread waits.
    2. The transfer finishes when the bytes have arrived. Until then, an H2D copy reads the host slot and a D2H copy
       reads the device slot. Afterwards the store can reuse either slot, and kernels that are queued after an H2D copy
       need no further ordering.
    3. The copy streams are not the legacy default stream and do not synchronize with it. Kernels on that stream and
       copies wait for each other only through the events of rule 1.

    Each direction has two streams: one for copies whose device slot is free, and one for copies that wait for kernels.
    With a single stream, a fetch to a slot that a kernel still reads would delay all later fetches. For example, with
    many micro-batches an activation's slot is reused while the layer still runs. The next layer's weights would
    wait although their slot is free. The copies of one stream keep the order of submission, which is the order of use.
    All D2H copies wait for the kernel that wrote the bytes. These kernels end in order, so D2H needs only one stream.

    One thread enqueues copies (a copy from unpinned memory blocks it); one thread per stream waits for the device.
    """

    def __init__(self, src_tier: GpuTier | RamTier, dst_tier: GpuTier | RamTier) -> None:
        gpu = src_tier if isinstance(src_tier, GpuTier) else dst_tier
        if not isinstance(gpu, GpuTier) or gpu.device is None or gpu.device.type != "cuda" or src_tier is dst_tier:
            raise ValueError(
                f"a cuda link needs one tier on a CUDA device, got '{src_tier.name}' and '{dst_tier.name}'"
            )
        self.src = src_tier.name
        self.dst = dst_tier.name
        self._src_tier = src_tier
        self._dst_tier = dst_tier
        self._host_tier = dst_tier if gpu is src_tier else src_tier
        self._device = gpu.device
        self._meter = Meter()
        self._enqueuer = Workers(1, f"tiered-{self.src}-{self.dst}-enqueue")
        self._free_lane, self._waiting_lane = (
            _Lane(Workers(1, f"tiered-{self.src}-{self.dst}-wait-{name}")) for name in ("free", "busy")
        )

    @property
    def path(self) -> str:
        """``cuda``, or ``cuda-pageable`` if some host memory is not pinned (the driver then stages its copies)."""
        is_staged = isinstance(self._host_tier, RamTier) and self._host_tier.num_unpinned_slabs > 0
        return "cuda-pageable" if is_staged else "cuda"

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once. ``transfer.event`` completes after the copy."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        self._enqueuer.submit(lambda: self._enqueue(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def _enqueue(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        """Queue the copy and a wait for its end. Only the enqueuing thread calls this, so lanes need no lock."""
        buffer = buffer_of(src_slot if isinstance(self._src_tier, GpuTier) else dst_slot)
        lane = self._free_lane
        try:
            # One check is enough: if the kernel ends a moment later, the copy only takes the slower lane.
            lane = self._free_lane if buffer.is_idle() else self._waiting_lane
            event = self._copy(lane, buffer, src_slot, dst_slot, nbytes)
            transfer.event = event
        except Exception as cause:  # Every exception must end the transfer, because otherwise its waiters would hang.
            self._fail(lane, transfer, cause)
            return
        lane.waiter.submit(lambda: self._wait(event, transfer))

    def _copy(self, lane: _Lane, buffer: DeviceBuffer, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Any:
        """Queue the copy on a lane's stream, and return an event recorded after it."""
        if lane.stream is None:
            lane.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffer.order_before(lane.stream)
        with torch.cuda.stream(lane.stream):
            source, target = self._byte_view(self._src_tier, src_slot), self._byte_view(self._dst_tier, dst_slot)
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        # With blocking=True, the waiting thread sleeps instead of keeping a CPU core busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(lane.stream)
        return event

    @staticmethod
    def _byte_view(tier: GpuTier | RamTier, slot: Slot) -> torch.Tensor:
        if isinstance(tier, GpuTier):  # The copy stream already waits for earlier users, so skip ``GpuTier.tensor``.
            return buffer_of(slot).tensor
        return tier.tensor(slot, (slot.slot_bytes,), torch.uint8)

    def _wait(self, event: Any, transfer: Transfer) -> None:
        try:
            event.synchronize()
        except Exception as cause:
            self._finish(transfer, cause)
            return
        self._finish(transfer, None)

    def _fail(self, lane: _Lane, transfer: Transfer, cause: Exception) -> None:
        if lane.stream is not None:
            # Wait, because the copy may have been queued before the error, and the slots must not be freed while bytes
            # move. If the device is broken, this raises again, but then no bytes move.
            with contextlib.suppress(Exception):
                lane.stream.synchronize()
        self._finish(transfer, cause)

    def _finish(self, transfer: Transfer, cause: Exception | None) -> None:
        error: TransferError | None = None
        if cause is not None:
            error = TransferError(f"copy of {transfer.nbytes} bytes failed: {cause}", tier=f"{self.src}->{self.dst}")
            error.__cause__ = cause
        self._meter.end(transfer.nbytes, moved=error is None)
        transfer.finish(error)

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish transfers in progress and stop the threads. Idempotent."""
        self._enqueuer.close()
        for lane in (self._free_lane, self._waiting_lane):
            lane.waiter.close()
