"""tiered: named blocks of tensors in GPU memory, RAM and files, moved by schedule. Knows nothing of training.

For users of a store. ``tiered.ext`` is for authors of tiers, links and policies, ``tiered.testing`` has their suites.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.block import BlockSpec, CopyState
    from tiered.durable.commit import Commit, CommitFigures
    from tiered.durable.generations import remove_generation
    from tiered.durable.manifest import BlockRecord, Manifest, list_generations, newest_first, read_manifest
    from tiered.durable.reader import GenerationReader
    from tiered.durable.whole_copies import CopyFigures, WholeCopies
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
    from tiered.file_io import checksum
    from tiered.plugins import available_tiers, tier_class
    from tiered.policies import LRU, Belady
    from tiered.records import Lease, LeaseGroup
    from tiered.schedule import NEVER, Access, Mode, Schedule, Trace
    from tiered.store import TieredStore
    from tiered.tiers.base import Tier
    from tiered.tiers.gpu import GpuTier
    from tiered.tiers.nvme import NvmeTier
    from tiered.tiers.ram import RamTier
    from tiered.transfer import Transfer
    from tiered.units import GB, MB, GiB, KiB, MiB, TiB, format_size, parse_size
    from tiered.zarr_store import ZarrStore

__all__ = [
    "BlockSpec",
    "CopyState",
    "checksum",
    "Commit",
    "CommitFigures",
    "remove_generation",
    "BlockRecord",
    "Manifest",
    "list_generations",
    "newest_first",
    "read_manifest",
    "GenerationReader",
    "CopyFigures",
    "WholeCopies",
    "BlockNotFoundError",
    "CapacityError",
    "CorruptBlockError",
    "GenerationError",
    "LeaseError",
    "LockedError",
    "TieredError",
    "TransferError",
    "UninitializedBlockError",
    "Event",
    "StoreStats",
    "TierStats",
    "available_tiers",
    "tier_class",
    "LRU",
    "Belady",
    "Lease",
    "LeaseGroup",
    "NEVER",
    "Access",
    "Mode",
    "Schedule",
    "Trace",
    "TieredStore",
    "Tier",
    "GpuTier",
    "NvmeTier",
    "RamTier",
    "Transfer",
    "GB",
    "MB",
    "GiB",
    "KiB",
    "MiB",
    "TiB",
    "format_size",
    "parse_size",
    "ZarrStore",
]

#: Imported when they are first asked for: most need torch, which takes seconds, ZarrStore zarr; units need neither.
_HOMES = {
    "Access": "schedule",
    "Belady": "policies",
    "BlockNotFoundError": "errors",
    "BlockRecord": "durable.manifest",
    "BlockSpec": "block",
    "CapacityError": "errors",
    "Commit": "durable.commit",
    "CommitFigures": "durable.commit",
    "CopyFigures": "durable.whole_copies",
    "CopyState": "block",
    "CorruptBlockError": "errors",
    "Event": "events",
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
    "LockedError": "errors",
    "MB": "units",
    "Manifest": "durable.manifest",
    "MiB": "units",
    "Mode": "schedule",
    "NEVER": "schedule",
    "NvmeTier": "tiers.nvme",
    "RamTier": "tiers.ram",
    "Schedule": "schedule",
    "StoreStats": "events",
    "TiB": "units",
    "Tier": "tiers.base",
    "TierStats": "events",
    "TieredError": "errors",
    "TieredStore": "store",
    "Trace": "schedule",
    "Transfer": "transfer",
    "TransferError": "errors",
    "UninitializedBlockError": "errors",
    "WholeCopies": "durable.whole_copies",
    "ZarrStore": "zarr_store",
    "available_tiers": "plugins",
    "checksum": "file_io",
    "format_size": "units",
    "list_generations": "durable.manifest",
    "newest_first": "durable.manifest",
    "parse_size": "units",
    "read_manifest": "durable.manifest",
    "remove_generation": "durable.generations",
    "tier_class": "plugins",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":  # written once, in pyproject.toml
        return import_module("importlib.metadata").version("megatrain-tier")
    if name in _HOMES:
        return getattr(import_module(f"tiered.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiered' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return what is public, also where it is not imported yet: for tab completion and ``help``."""
    return sorted([*__all__, "__version__"])
