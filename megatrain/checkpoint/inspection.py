"""Checks whether the checkpoints in a folder are usable, from documents and file names, without reading blocks.

This module imports neither torch nor a store, so that ``status`` starts fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatrain.checkpoint.document import Checkpoint, merge_by_save
from megatrain.checkpoint.listing import (
    ManifestReader,
    read_checkpoints,
    read_manifests,
    still_exists,
    whole_blocks,
)
from megatrain.checkpoint.locations import LostPart, drives_of_config, lost_parts, outside_drives
from megatrain.checkpoint.state import CheckpointError
from tiered import read_manifest
from tiered.errors import GenerationError, NewerFormatError
from tiered.ext import DrivePlace

__all__ = ["InventoryEntry", "inspect_folder", "merge_entries"]


@dataclass(frozen=True, slots=True)
class InventoryEntry:
    """A checkpoint with its size and the reasons why it might be unusable.

    Attributes:
        nbytes: Bytes of all blocks; 0 if the manifests cannot be read.
        lost: Parts that were lost because their drives are missing or were cleared.
        outside: Drives that contain parts of the checkpoint but were not copied or moved with the run.
        problem: Reason why the checkpoint cannot be used, according to documents and file names, or None.
        is_foreign: Whether another program or a newer version wrote the checkpoint. A run then ends with an error
            instead of skipping the checkpoint.
    """

    checkpoint: Checkpoint
    nbytes: int = 0
    lost: tuple[LostPart, ...] = ()
    outside: tuple[DrivePlace, ...] = ()
    problem: str | None = None
    is_foreign: bool = False

    @property
    def is_readable(self) -> bool:
        """Whether all documents can be read. Parts may be lost."""
        return self.problem is None or bool(self.lost)

    @property
    def is_gone(self) -> bool:
        """Whether parts are certainly lost. Other hosts may have the parts that a listed checkpoint lacks here."""
        return bool(self.lost) and not self.checkpoint.is_listed


def inspect_folder(
    folder: Path,
    drives: Sequence[Path] = (),
    *,
    validate_state: bool = True,
    on_damage: Callable[[GenerationError], None] | None = None,
) -> list[InventoryEntry]:
    """Return all checkpoints in a folder, newest first. Unusable checkpoints have a ``problem``.

    The run may be active during the call. Checkpoints that it removes meanwhile are omitted.

    Args:
        drives: Paths to search for parts, in addition to the drives in the run's last config.
        validate_state: Whether to validate the whole ``RunState``. False checks only the step and imports less code.

    Raises:
        GenerationError: The list of checkpoints is damaged, and ``on_damage`` is None.
    """
    search = tuple(dict.fromkeys([*drives, *drives_of_config(folder.parent)]))
    read = cache(read_manifest)  # cached, because listing and inspection read the same manifests
    checkpoints = reversed(read_checkpoints(folder, on_damage, read))
    entries = (_inspect(entry, search, read, validate_state=validate_state) for entry in checkpoints)
    return [entry for entry in entries if entry is not None]


def _inspect(
    checkpoint: Checkpoint, search: Sequence[Path], read: ManifestReader, *, validate_state: bool
) -> InventoryEntry | None:
    """Return a checkpoint with the results of its checks, or None if a live run has just removed it."""
    try:
        if not checkpoint.is_listed:
            read(checkpoint.folder, checkpoint.number)  # raise if the manifest, which holds the state, is damaged
        if validate_state:
            _ = checkpoint.state
        elif checkpoint.step is None:
            raise CheckpointError(f"{checkpoint.where} has no step")
        manifests = read_manifests(checkpoint, read)
        nbytes = sum(block.nbytes for block in whole_blocks(checkpoint, manifests).values())
    except CheckpointError as error:
        return InventoryEntry(replace(checkpoint, meta={}), problem=str(error), is_foreign=True)
    except GenerationError as error:
        is_newer = isinstance(error, NewerFormatError)
        return InventoryEntry(checkpoint, problem=str(error), is_foreign=is_newer) if still_exists(checkpoint) else None
    parts, outside = list[LostPart](), list[DrivePlace]()
    for store, manifest in zip(checkpoint.stores, manifests, strict=True):
        arguments = checkpoint.folder / store, [path / store for path in search]
        parts += lost_parts(manifest, *arguments)
        outside += outside_drives(manifest, *arguments)
    problem = "parts of it are gone: " + "; ".join(map(str, parts)) if parts else None
    return InventoryEntry(checkpoint, nbytes, tuple(parts), tuple(outside), problem)


def merge_entries(own: Sequence[InventoryEntry], copies: Sequence[InventoryEntry]) -> list[InventoryEntry]:
    """Merge checkpoints and copies, both newest first, like ``merge_by_save``."""
    entries = {id(entry.checkpoint): entry for entry in (*own, *copies)}
    merged = merge_by_save([entry.checkpoint for entry in own], [entry.checkpoint for entry in copies])
    return [entries[id(entry)] for entry in merged]
