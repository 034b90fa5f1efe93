"""Public names for authors of tiers, links and policies, and for tools that maintain a tier's directories.

``docs/extending.md`` states the contracts; ``tiered.testing`` contains test suites for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.lazy import lazy_names

if TYPE_CHECKING:
    from tiered.durable.drive_places import OWNER_NAME as OWNER_NAME
    from tiered.durable.drive_places import DrivePlace as DrivePlace
    from tiered.durable.drive_places import drive_places as drive_places
    from tiered.durable.drive_places import holds_part as holds_part
    from tiered.durable.drive_places import read_note as read_note
    from tiered.durable.manifest import MANIFEST_NAME as MANIFEST_NAME
    from tiered.durable.manifest import SNAPSHOT_FOLDER as SNAPSHOT_FOLDER
    from tiered.durable.manifest import generation_folder as generation_folder
    from tiered.durable.manifest import manifest_text as manifest_text
    from tiered.durable.manifest import top_problem as top_problem
    from tiered.durable.manifest import top_text as top_text
    from tiered.durable.ownership import read_owner as read_owner
    from tiered.durable.ownership import read_store_id as read_store_id
    from tiered.durable.ownership import snapshot_folders as snapshot_folders
    from tiered.file_io import drop_cached as drop_cached
    from tiered.file_io import folder_clashes as folder_clashes
    from tiered.file_io import open_direct as open_direct
    from tiered.file_io import read_all as read_all
    from tiered.file_io import read_document_file as read_document_file
    from tiered.file_io import replace_file as replace_file
    from tiered.hops import Routes as Routes
    from tiered.links.base import Link as Link
    from tiered.links.base import LinkedTier as LinkedTier
    from tiered.links.base import LinkUsage as LinkUsage
    from tiered.links.base import Meter as Meter
    from tiered.links.base import ThreadedLink as ThreadedLink
    from tiered.links.base import Workers as Workers
    from tiered.links.probe import KvikioProbe as KvikioProbe
    from tiered.links.probe import may_open_driver as may_open_driver
    from tiered.links.probe import probe_kvikio as probe_kvikio
    from tiered.links.route import default_links as default_links
    from tiered.links.source import BlockSource as BlockSource
    from tiered.links.source import ReadPart as ReadPart
    from tiered.links.source import SourceTier as SourceTier
    from tiered.links.unified import UnifiedTier as UnifiedTier
    from tiered.links.unified import host_view as host_view
    from tiered.locks import DirectoryLock as DirectoryLock
    from tiered.locks import has_open as has_open
    from tiered.locks import holder_text as holder_text
    from tiered.locks import lock as lock
    from tiered.locks import lock_directory as lock_directory
    from tiered.locks import mount_of as mount_of
    from tiered.locks import owner_in as owner_in
    from tiered.locks import unescape as unescape
    from tiered.policies import Candidate as Candidate
    from tiered.policies import EvictionPolicy as EvictionPolicy
    from tiered.simulation import SimulatedChannel as SimulatedChannel
    from tiered.simulation import SimulatedClock as SimulatedClock
    from tiered.simulation import SimulatedLink as SimulatedLink
    from tiered.simulation import SimulatedTier as SimulatedTier
    from tiered.tiers.base import BufferTier as BufferTier
    from tiered.tiers.base import DescribingTier as DescribingTier
    from tiered.tiers.base import Ledger as Ledger
    from tiered.tiers.base import PausingTier as PausingTier
    from tiered.tiers.base import ReadOnlyTier as ReadOnlyTier
    from tiered.tiers.base import Slot as Slot
    from tiered.tiers.base import StreamTier as StreamTier
    from tiered.tiers.base import Tier as Tier
    from tiered.tiers.base import TierUsage as TierUsage
    from tiered.tiers.base import WriteCountingTier as WriteCountingTier
    from tiered.tiers.cleanup import Leftovers as Leftovers
    from tiered.tiers.cleanup import Orphan as Orphan
    from tiered.tiers.cleanup import find_directories as find_directories
    from tiered.tiers.cleanup import find_orphans as find_orphans
    from tiered.tiers.cleanup import measure_leftovers as measure_leftovers
    from tiered.tiers.cleanup import remove_leftovers as remove_leftovers
    from tiered.tiers.cleanup import remove_orphan as remove_orphan
    from tiered.tiers.directory import check_claimable as check_claimable
    from tiered.tiers.directory import claim_directory as claim_directory
    from tiered.tiers.directory import files_below as files_below
    from tiered.tiers.directory import refuse_links as refuse_links
    from tiered.tiers.directory import reusable_bytes as reusable_bytes
    from tiered.tiers.directory import statuses_below as statuses_below
    from tiered.tiers.health import WearCounter as WearCounter
    from tiered.tiers.layout import dtype_from_name as dtype_from_name
    from tiered.tiers.ram import HostSlab as HostSlab
    from tiered.tiers.ram import view_as as view_as
    from tiered.tiers.snapshots import DurableTier as DurableTier
    from tiered.tiers.snapshots import Snapshots as Snapshots
    from tiered.tiers.stripe import check_rates as check_rates
    from tiered.tiers.stripe import plan_chunks as plan_chunks
    from tiered.transfer import Transfer as Transfer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
