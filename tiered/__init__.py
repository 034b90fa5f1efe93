"""tiered: a store of named tensors (blocks) in GPU memory, RAM and files. Independent of training code.

Programs that use a store import from here. Authors of tiers, links and policies import from ``tiered.ext`` and test
their implementations with ``tiered.testing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.lazy import lazy_names

if TYPE_CHECKING:
    from tiered.block import BlockSpec as BlockSpec
    from tiered.block import CopyState as CopyState
    from tiered.durable.commit import Commit as Commit
    from tiered.durable.commit import CommitFigures as CommitFigures
    from tiered.durable.generations import remove_generation as remove_generation
    from tiered.durable.manifest import BlockRecord as BlockRecord
    from tiered.durable.manifest import Manifest as Manifest
    from tiered.durable.manifest import list_generations as list_generations
    from tiered.durable.manifest import newest_first as newest_first
    from tiered.durable.manifest import read_manifest as read_manifest
    from tiered.durable.reader import GenerationReader as GenerationReader
    from tiered.durable.whole_copies import CopyFigures as CopyFigures
    from tiered.durable.whole_copies import WholeCopies as WholeCopies
    from tiered.errors import BlockNotFoundError as BlockNotFoundError
    from tiered.errors import CapacityError as CapacityError
    from tiered.errors import CorruptBlockError as CorruptBlockError
    from tiered.errors import GenerationError as GenerationError
    from tiered.errors import LeaseError as LeaseError
    from tiered.errors import LockedError as LockedError
    from tiered.errors import TieredError as TieredError
    from tiered.errors import TransferError as TransferError
    from tiered.errors import UninitializedBlockError as UninitializedBlockError
    from tiered.events import Event as Event
    from tiered.events import StoreStats as StoreStats
    from tiered.events import TierStats as TierStats
    from tiered.file_io import checksum as checksum
    from tiered.plugins import available_tiers as available_tiers
    from tiered.plugins import tier_class as tier_class
    from tiered.policies import LRU as LRU
    from tiered.policies import Belady as Belady
    from tiered.records import Lease as Lease
    from tiered.records import LeaseGroup as LeaseGroup
    from tiered.schedule import NEVER as NEVER
    from tiered.schedule import Access as Access
    from tiered.schedule import Mode as Mode
    from tiered.schedule import Schedule as Schedule
    from tiered.schedule import Trace as Trace
    from tiered.store import TieredStore as TieredStore
    from tiered.tiers.base import Tier as Tier
    from tiered.tiers.gpu import GpuTier as GpuTier
    from tiered.tiers.nvme import NvmeTier as NvmeTier
    from tiered.tiers.ram import RamTier as RamTier
    from tiered.transfer import Transfer as Transfer
    from tiered.units import GB as GB
    from tiered.units import MB as MB
    from tiered.units import GiB as GiB
    from tiered.units import KiB as KiB
    from tiered.units import MiB as MiB
    from tiered.units import TiB as TiB
    from tiered.units import format_size as format_size
    from tiered.units import parse_size as parse_size
    from tiered.zarr_store import ZarrStore as ZarrStore
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, distribution="megatrain-tier")
