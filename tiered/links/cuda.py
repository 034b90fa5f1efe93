"""CudaLink: device memory <-> page-locked host memory, on a copy stream of its own per direction."""

from __future__ import annotations

from typing import Any

import torch

from tiered.errors import TransferError
from tiered.links.base import LinkUsage
from tiered.links.meter import Meter
from tiered.links.workers import Workers
from tiered.tiers.base import Slot
from tiered.tiers.gpu import GpuTier, buffer_of
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer


class CudaLink:
    """Copies one way between a GpuTier and a RamTier. Touches no device before the first transfer.

    Before a copy starts, its stream waits for all work that was recorded as using the device slot. A transfer
    finishes when the bytes have arrived, in both directions: an H2D copy that was only enqueued still reads the
    host slot, and the store may reuse that as soon as the transfer is done. The compute stream keeps the copy
    hidden as long as fetches are issued one block ahead.

    One thread enqueues (a copy from memory that is not page-locked blocks it), another waits for the device.
    """

    def __init__(self, src_tier: GpuTier | RamTier, dst_tier: GpuTier | RamTier) -> None:
        gpu = src_tier if isinstance(src_tier, GpuTier) else dst_tier
        if not isinstance(gpu, GpuTier) or gpu.device is None or gpu.device.type != "cuda" or src_tier is dst_tier:
            raise ValueError(
                f"a cuda link needs one tier on a CUDA device, got '{src_tier.name}' and '{dst_tier.name}'"
            )
        self.src = src_tier.name
        self.dst = dst_tier.name
        self.path = "cuda"
        self._src_tier = src_tier
        self._dst_tier = dst_tier
        self._device = gpu.device
        self._meter = Meter()
        self._stream: Any = None
        self._enqueuer = Workers(1, f"tiered-{self.src}-{self.dst}-enqueue")
        self._waiter = Workers(1, f"tiered-{self.src}-{self.dst}-wait")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once. ``transfer.event`` ends after the copy."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        self._enqueuer.submit(lambda: self._enqueue(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def _enqueue(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        try:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            buffer_of(src_slot if isinstance(self._src_tier, GpuTier) else dst_slot).order_before(self._stream)
            with torch.cuda.stream(self._stream):
                source, target = self._bytes(self._src_tier, src_slot), self._bytes(self._dst_tier, dst_slot)
                target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            # blocking=True: the waiting thread sleeps instead of spinning on a core that computes
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            transfer.event = event
        except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
            self._finish(transfer, cause)
            return
        self._waiter.submit(lambda: self._wait(event, transfer))

    @staticmethod
    def _bytes(tier: GpuTier | RamTier, slot: Slot) -> torch.Tensor:
        if isinstance(tier, GpuTier):  # not tier.tensor(): the caller has ordered the copy stream itself
            return buffer_of(slot).tensor
        return tier.tensor(slot, (slot.slot_bytes,), torch.uint8)

    def _wait(self, event: Any, transfer: Transfer) -> None:
        try:
            event.synchronize()
        except Exception as cause:
            self._finish(transfer, cause)
            return
        self._finish(transfer, None)

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
        """Finish what is under way and stop the threads. Idempotent."""
        self._enqueuer.close()
        self._waiter.close()
