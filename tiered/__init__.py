"""tiered: named blocks of tensors in GPU memory, RAM and files, moved by schedule. Knows nothing of training."""

from typing import TYPE_CHECKING, Any

from tiered.block import BlockSpec, CopyState
from tiered.commit import Commit
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
from tiered.events import Event, LinkStats, StoreStats, TierStats
from tiered.lease import Lease, LeaseGroup
from tiered.links.base import Link, LinkUsage
from tiered.links.threaded import ThreadedLink
from tiered.plugins import available_tiers, tier_class
from tiered.policies import LRU, Belady, Candidate, EvictionPolicy
from tiered.reader import GenerationReader
from tiered.schedule import NEVER, Access, Schedule, Trace
from tiered.store import TieredStore
from tiered.tiers.base import Slot, Tier, TierUsage
from tiered.tiers.gpu import GpuTier
from tiered.tiers.ledger import Ledger
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.transfer import Transfer
from tiered.units import GB, MB, GiB, KiB, MiB, TiB, format_size, parse_size

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
    "LinkStats",
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

if TYPE_CHECKING:
    from tiered.zarr_store import ZarrStore


def __getattr__(name: str) -> Any:
    if name == "ZarrStore":  # on first use: importing zarr takes half a second, which few programs need
        from tiered.zarr_store import ZarrStore

        return ZarrStore
    raise AttributeError(f"module 'tiered' has no attribute '{name}'")
