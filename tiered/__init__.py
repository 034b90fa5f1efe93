"""tiered: named blocks of tensors in GPU memory, RAM and files, moved by schedule. Knows nothing of training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.block import BlockSpec, CopyState
    from tiered.durable.commit import Commit
    from tiered.durable.reader import GenerationReader
    from tiered.errors import (
        BlockNotFoundError,
        CapacityError,
        CorruptBlockError,
        GenerationError,
        LeaseError,
        LockedError,
        TieredError,
        TransferError,
        UninitializedBlockError,
    )
    from tiered.events import Event, StoreStats, TierStats
    from tiered.links.base import Link, LinkUsage, ThreadedLink
    from tiered.plugins import available_tiers, tier_class
    from tiered.policies import LRU, Belady, Candidate, EvictionPolicy
    from tiered.records import Lease, LeaseGroup
    from tiered.schedule import NEVER, Access, Schedule, Trace
    from tiered.store import TieredStore
    from tiered.tiers.base import Ledger, Slot, Tier, TierUsage
    from tiered.tiers.gpu import GpuTier
    from tiered.tiers.nvme import NvmeTier
    from tiered.tiers.ram import RamTier
    from tiered.transfer import Transfer
    from tiered.units import GB, MB, GiB, KiB, MiB, TiB, format_size, parse_size
    from tiered.zarr_store import ZarrStore

__all__ = [
    "GB",
    "LRU",
    "MB",
    "NEVER",
    "Access",
    "Belady",
    "BlockNotFoundError",
    "BlockSpec",
    "Candidate",
    "CapacityError",
    "Commit",
    "CopyState",
    "CorruptBlockError",
    "Event",
    "EvictionPolicy",
    "GenerationError",
    "GenerationReader",
    "GiB",
    "GpuTier",
    "KiB",
    "Lease",
    "LeaseError",
    "LeaseGroup",
    "Ledger",
    "Link",
    "LinkUsage",
    "LockedError",
    "MiB",
    "NvmeTier",
    "RamTier",
    "Schedule",
    "Slot",
    "StoreStats",
    "ThreadedLink",
    "TiB",
    "Tier",
    "TierStats",
    "TierUsage",
    "TieredError",
    "TieredStore",
    "Trace",
    "Transfer",
    "TransferError",
    "UninitializedBlockError",
    "ZarrStore",
    "available_tiers",
    "format_size",
    "parse_size",
    "tier_class",
]

#: Imported when they are first asked for: most need torch, which takes seconds, ZarrStore zarr; units need neither.
_HOMES = {
    "Access": "schedule",
    "Belady": "policies",
    "BlockNotFoundError": "errors",
    "BlockSpec": "block",
    "Candidate": "policies",
    "CapacityError": "errors",
    "Commit": "durable.commit",
    "CopyState": "block",
    "CorruptBlockError": "errors",
    "Event": "events",
    "EvictionPolicy": "policies",
    "GB": "units",
    "GenerationError": "errors",
    "GenerationReader": "durable.reader",
    "GiB": "units",
    "GpuTier": "tiers.gpu",
    "KiB": "units",
    "LRU": "policies",
    "Lease": "records",
    "LeaseError": "errors",
    "LeaseGroup": "records",
    "Ledger": "tiers.base",
    "Link": "links.base",
    "LinkUsage": "links.base",
    "LockedError": "errors",
    "MB": "units",
    "MiB": "units",
    "NEVER": "schedule",
    "NvmeTier": "tiers.nvme",
    "RamTier": "tiers.ram",
    "Schedule": "schedule",
    "Slot": "tiers.base",
    "StoreStats": "events",
    "ThreadedLink": "links.base",
    "TiB": "units",
    "Tier": "tiers.base",
    "TierStats": "events",
    "TierUsage": "tiers.base",
    "TieredError": "errors",
    "TieredStore": "store",
    "Trace": "schedule",
    "Transfer": "transfer",
    "TransferError": "errors",
    "UninitializedBlockError": "errors",
    "ZarrStore": "zarr_store",
    "available_tiers": "plugins",
    "format_size": "units",
    "parse_size": "units",
    "tier_class": "plugins",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tiered.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiered' has no attribute '{name}'")
