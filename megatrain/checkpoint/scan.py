"""Scans a run's folder for checkpoints, and checks whether they are usable.

This module imports neither torch nor a store, so that ``status`` starts fast. It reads documents, and checks only
whether files exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.document import Checkpoint, merge_by_save, read_checkpoints, read_manifests, whole_blocks
from megatrain.checkpoint.locations import LostPart, drives_of_config, lost_parts, outside_drives
from megatrain.checkpoint.state import CheckpointError
from tiered.errors import GenerationError
from tiered.ext import DrivePlace

__all__ = ["LostPartsNotice", "is_listed", "moved_run_notices", "saved_checkpoints", "scan", "usable_checkpoint"]


@dataclass(frozen=True, slots=True)
class LostPartsNotice:
    """Message about checkpoints that have lost parts on drives.

    Attributes:
        places: Former locations of the parts, as in ``LostPart.place``.
        is_absent: Whether a part's folder does not exist, for example because its drive is not mounted.
    """

    steps: tuple[int, ...]
    places: tuple[str, ...]
    is_absent: bool

    @classmethod
    def among(cls, checkpoints: Sequence[Checkpoint]) -> LostPartsNotice | None:
        """Return a message about the checkpoints that have lost parts, or None if all are complete."""
        gone = [each for each in checkpoints if each.is_gone]
        if not gone:
            return None
        steps = tuple(sorted({each.step for each in gone if each.step is not None}))
        parts = [part for each in gone for part in each.lost]
        return cls(steps, tuple(dict.fromkeys(part.place for part in parts)), not all(part.is_there for part in parts))

    def __str__(self) -> str:
        verb = "is" if len(self.steps) == 1 else "are"
        them = "it" if verb == "is" else "them"
        return f"the {_of_steps(self.steps)} {verb} gone: parts of {them} lay in {'; '.join(self.places)}"

    def remedy(self, output_dir: Path) -> str:
        """Return advice if no checkpoint is usable. It suggests removal only if the folders of all lost parts exist."""
        copy = "If this folder is a copy of a live run, copy it again; a larger checkpoint.save_total_limit keeps more"
        if self.is_absent:
            back = "Restore that folder (mount its drive, restore a backup) and run again"
            return f"{back}. {copy}. To start from scratch, name another output_dir"
        return (
            f"Restore a backup and run again. {copy}. Or give up what was trained: megatrain-tier ckpt rm {output_dir} "
            "--all, then run again"
        )


def _of_steps(steps: Sequence[int]) -> str:
    what = "checkpoint of step" if len(steps) == 1 else "checkpoints of steps"
    return f"{what} {', '.join(map(str, steps))}"


def moved_run_notices(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return a notice for each drive outside of a copied or moved run that contains parts of its checkpoints."""
    found: dict[DrivePlace, set[int]] = {}
    for each in checkpoints:
        for drive in each.outside:
            found.setdefault(drive, set()).add(each.step or 0)
    notices = []
    for drive, numbers in found.items():
        notices.append(
            "warning: this run was copied or moved without all of its drives. Parts of the "
            f"{_of_steps(sorted(numbers))} are read from '{drive.recorded}', because '{drive.nearby}' does not hold "
            "them"
        )
    return notices


def scan(
    folder: Path,
    drives: Sequence[Path] = (),
    *,
    reads_state: bool = True,
    on_damage: Callable[[GenerationError], None] | None = None,
) -> list[Checkpoint]:
    """Return all checkpoints in a folder, newest first. Unusable checkpoints have a ``problem``.

    This can be called while the run is active. Checkpoints that the run removes meanwhile are omitted.

    Args:
        drives: Paths to search for parts, in addition to the drives in the run's last config.
        reads_state: Whether to validate the whole ``RunState``. If False, only the step is checked, which imports less.

    Raises:
        GenerationError: ``RANKS.json`` is damaged, and ``on_damage`` is None.
    """
    search = tuple(dict.fromkeys([*drives, *drives_of_config(folder.parent)]))
    found = (_examined(each, search, reads_state) for each in reversed(read_checkpoints(folder, on_damage)))
    return [each for each in found if each is not None]


def saved_checkpoints(output_dir: Path | str, drives: Sequence[Path] = ()) -> list[Checkpoint]:
    """Return a run's checkpoints and their copies, in the order in which the run would try them.

    Checkpoints with invalid documents are omitted. Checkpoints with lost parts are included.
    """
    root = Path(os.path.abspath(output_dir))
    found: list[list[Checkpoint]] = []
    for name in (CHECKPOINTS_NAME, COPIES_NAME):
        there = scan(root / name, drives, reads_state=False, on_damage=lambda error: None)
        if there and there[0].is_foreign:
            there = []  # a run would raise an error instead of using an older checkpoint
        found.append([each for each in there if each.problem is None or each.lost])
    return merge_by_save(*found)


def usable_checkpoint(output_dir: Path | str) -> Checkpoint | None:
    """Return the checkpoint from which a run in this folder would resume, or None."""
    return next((each for each in saved_checkpoints(output_dir) if not each.is_gone), None)


def _examined(checkpoint: Checkpoint, search: Sequence[Path], reads_state: bool) -> Checkpoint | None:
    """Return a checkpoint with the results of its checks, or None if a live run has just removed it."""
    if checkpoint.problem is not None:
        return checkpoint
    try:
        if reads_state:
            _ = checkpoint.state
        elif checkpoint.step is None:
            raise CheckpointError(f"{checkpoint.where} has no step")
    except CheckpointError as error:
        return replace(checkpoint, meta={}, problem=str(error), is_foreign=True)
    try:
        manifests = read_manifests(checkpoint) if checkpoint.manifest is None else [checkpoint.manifest]
        nbytes = sum(block.nbytes for block in whole_blocks(checkpoint, manifests).values())
    except GenerationError as error:
        return replace(checkpoint, problem=str(error)) if is_listed(checkpoint) else None
    lost, outside = list[LostPart](), list[DrivePlace]()
    for rank, manifest in zip(checkpoint.ranks, manifests, strict=True):
        place = checkpoint.folder / rank.path, [path / rank.path for path in search]
        lost += lost_parts(manifest, *place)
        outside += outside_drives(manifest, *place)
    problem = "parts of it are gone: " + "; ".join(map(str, lost)) if lost else None
    return replace(checkpoint, nbytes=nbytes, lost=tuple(lost), outside=tuple(outside), problem=problem)


def is_listed(checkpoint: Checkpoint) -> bool:
    """Return whether the document still lists this checkpoint. A live run removes old checkpoints."""
    known = read_checkpoints(checkpoint.folder, on_damage=lambda error: None)
    return any(each.ranks == checkpoint.ranks for each in known)
