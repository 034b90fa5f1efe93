"""What authors of tiers, links and policies import, and of tools that look after a tier's directories.

The contracts are in docs/extending.md, their suites in ``tiered.testing``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.durable.drive_places import DrivePlace, drive_places, holds_part
    from tiered.durable.manifest import SNAPSHOT_FOLDER, generation_folder, top_problem
    from tiered.durable.ownership import read_owner, read_store_id, snapshot_folders
    from tiered.file_io import drop_cached, folder_clashes, open_direct, read_all, read_document_file, replace_file
    from tiered.hops import route
    from tiered.links.base import Link, LinkedTier, LinkUsage, Meter, ThreadedLink, Workers
    from tiered.links.probe import KvikioProbe, may_open_driver, probe_kvikio
    from tiered.links.route import default_links
    from tiered.links.source import BlockSource, ReadPart, SourceTier
    from tiered.links.unified import UnifiedTier, host_view
    from tiered.locks import DirectoryLock, has_open, holder_text, lock, lock_directory, mount_of, owner_in, unescape
    from tiered.policies import Candidate, EvictionPolicy
    from tiered.simulation import SimulatedChannel, SimulatedClock, SimulatedLink, SimulatedTier
    from tiered.tiers.base import (
        BufferTier,
        DescribingTier,
        Ledger,
        PausingTier,
        ReadOnlyTier,
        Slot,
        StreamTier,
        Tier,
        TierUsage,
        WriteCountingTier,
    )
    from tiered.tiers.cleanup import (
        Leftovers,
        Orphan,
        find_directories,
        find_orphans,
        measure_leftovers,
        remove_leftovers,
        remove_orphan,
    )
    from tiered.tiers.directory import (
        check_ours,
        claim_directory,
        files_below,
        refuse_links,
        reusable_bytes,
        statuses_below,
    )
    from tiered.tiers.health import WearCounter
    from tiered.tiers.layout import dtype_from_name
    from tiered.tiers.ram import HostSlab, view_as
    from tiered.tiers.snapshots import DurableTier, Snapshots
    from tiered.tiers.stripe import check_rates, plan_chunks
    from tiered.transfer import Transfer

__all__ = [
    "SNAPSHOT_FOLDER",
    "DrivePlace",
    "drive_places",
    "generation_folder",
    "holds_part",
    "top_problem",
    "read_owner",
    "read_store_id",
    "read_document_file",
    "refuse_links",
    "replace_file",
    "snapshot_folders",
    "Link",
    "LinkedTier",
    "LinkUsage",
    "Meter",
    "ThreadedLink",
    "Workers",
    "KvikioProbe",
    "may_open_driver",
    "probe_kvikio",
    "default_links",
    "BlockSource",
    "ReadPart",
    "SourceTier",
    "UnifiedTier",
    "host_view",
    "route",
    "Candidate",
    "EvictionPolicy",
    "SimulatedChannel",
    "SimulatedClock",
    "SimulatedLink",
    "SimulatedTier",
    "BufferTier",
    "DescribingTier",
    "Ledger",
    "PausingTier",
    "ReadOnlyTier",
    "Slot",
    "StreamTier",
    "Tier",
    "TierUsage",
    "WriteCountingTier",
    "Leftovers",
    "Orphan",
    "find_directories",
    "find_orphans",
    "measure_leftovers",
    "remove_leftovers",
    "remove_orphan",
    "check_ours",
    "claim_directory",
    "files_below",
    "statuses_below",
    "DirectoryLock",
    "has_open",
    "holder_text",
    "lock",
    "lock_directory",
    "mount_of",
    "owner_in",
    "unescape",
    "reusable_bytes",
    "WearCounter",
    "dtype_from_name",
    "drop_cached",
    "folder_clashes",
    "open_direct",
    "read_all",
    "HostSlab",
    "view_as",
    "DurableTier",
    "Snapshots",
    "check_rates",
    "plan_chunks",
    "Transfer",
]

#: Imported when they are first asked for: most need torch, which takes seconds.
_HOMES = {
    "BufferTier": "tiers.base",
    "Candidate": "policies",
    "DescribingTier": "tiers.base",
    "DrivePlace": "durable.drive_places",
    "DurableTier": "tiers.snapshots",
    "EvictionPolicy": "policies",
    "HostSlab": "tiers.ram",
    "KvikioProbe": "links.probe",
    "Ledger": "tiers.base",
    "Leftovers": "tiers.cleanup",
    "Link": "links.base",
    "LinkUsage": "links.base",
    "LinkedTier": "links.base",
    "Meter": "links.base",
    "Orphan": "tiers.cleanup",
    "PausingTier": "tiers.base",
    "ReadOnlyTier": "tiers.base",
    "BlockSource": "links.source",
    "ReadPart": "links.source",
    "SourceTier": "links.source",
    "UnifiedTier": "links.unified",
    "host_view": "links.unified",
    "SNAPSHOT_FOLDER": "durable.manifest",
    "SimulatedChannel": "simulation",
    "SimulatedClock": "simulation",
    "SimulatedLink": "simulation",
    "SimulatedTier": "simulation",
    "Slot": "tiers.base",
    "Snapshots": "tiers.snapshots",
    "StreamTier": "tiers.base",
    "ThreadedLink": "links.base",
    "Tier": "tiers.base",
    "TierUsage": "tiers.base",
    "Transfer": "transfer",
    "WearCounter": "tiers.health",
    "Workers": "links.base",
    "WriteCountingTier": "tiers.base",
    "check_ours": "tiers.directory",
    "check_rates": "tiers.stripe",
    "claim_directory": "tiers.directory",
    "default_links": "links.route",
    "drive_places": "durable.drive_places",
    "holds_part": "durable.drive_places",
    "dtype_from_name": "tiers.layout",
    "drop_cached": "file_io",
    "folder_clashes": "file_io",
    "open_direct": "file_io",
    "read_all": "file_io",
    "replace_file": "file_io",
    "read_document_file": "file_io",
    "refuse_links": "tiers.directory",
    "files_below": "tiers.directory",
    "statuses_below": "tiers.directory",
    "find_directories": "tiers.cleanup",
    "find_orphans": "tiers.cleanup",
    "top_problem": "durable.manifest",
    "generation_folder": "durable.manifest",
    "DirectoryLock": "locks",
    "has_open": "locks",
    "holder_text": "locks",
    "lock": "locks",
    "lock_directory": "locks",
    "mount_of": "locks",
    "owner_in": "locks",
    "unescape": "locks",
    "may_open_driver": "links.probe",
    "measure_leftovers": "tiers.cleanup",
    "plan_chunks": "tiers.stripe",
    "probe_kvikio": "links.probe",
    "read_owner": "durable.ownership",
    "read_store_id": "durable.ownership",
    "remove_leftovers": "tiers.cleanup",
    "remove_orphan": "tiers.cleanup",
    "reusable_bytes": "tiers.directory",
    "route": "hops",
    "snapshot_folders": "durable.ownership",
    "view_as": "tiers.ram",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tiered.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiered.ext' has no attribute '{name}'")
