"""HostLink: copies between two tiers that both live in host memory."""

from __future__ import annotations

import torch

from tiered.errors import TransferError
from tiered.links.base import LinkUsage
from tiered.links.meter import Meter
from tiered.links.workers import Workers
from tiered.tiers.base import Slot, Tier
from tiered.transfer import Transfer

_NUM_THREADS = 2


class HostLink:
    """Copies one way between two addressable CPU tiers, on threads that start with the first transfer."""

    def __init__(self, src_tier: Tier, dst_tier: Tier) -> None:
        for tier in (src_tier, dst_tier):
            if tier.device is None or tier.device.type != "cpu":
                raise ValueError(f"a host link needs tiers in host memory; tier '{tier.name}' is on {tier.device}")
        self.src = src_tier.name
        self.dst = dst_tier.name
        self.path = "host"
        self._src_tier = src_tier
        self._dst_tier = dst_tier
        self._meter = Meter()
        self._workers = Workers(_NUM_THREADS, f"tiered-{self.src}-{self.dst}")

    def submit(self, src_slot: Slot, dst_slot: Slot, nbytes: int) -> Transfer:
        """Start copying the first ``nbytes`` and return at once."""
        transfer = Transfer(self.src, self.dst, nbytes, self.path)
        self._meter.start(nbytes)
        self._workers.submit(lambda: self._copy(src_slot, dst_slot, nbytes, transfer))
        return transfer

    def _copy(self, src_slot: Slot, dst_slot: Slot, nbytes: int, transfer: Transfer) -> None:
        error: TransferError | None = None
        try:
            source = self._src_tier.tensor(src_slot, (nbytes,), torch.uint8)
            self._dst_tier.tensor(dst_slot, (nbytes,), torch.uint8).copy_(source)
        except Exception as cause:  # a waiter would hang if a transfer did not end: every cause is passed on
            error = TransferError(f"copy of {nbytes} bytes failed: {cause}", tier=f"{self.src}->{self.dst}")
            error.__cause__ = cause
        self._meter.end(nbytes, moved=error is None)
        transfer.finish(error)

    def usage(self) -> LinkUsage:
        """Return the counters of this direction."""
        return self._meter.usage(self.path)

    def close(self) -> None:
        """Finish what is under way and stop the threads."""
        self._workers.close()
