"""HostLink: copies between two tiers that both live in host memory."""

from __future__ import annotations

import torch

from tiered.links.threaded import ThreadedLink
from tiered.tiers.base import Slot, Tier


class HostLink(ThreadedLink):
    """Copies one way between two addressable CPU tiers, on threads that start with the first transfer."""

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
