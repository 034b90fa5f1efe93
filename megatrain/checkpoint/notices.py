"""Notices about checkpoint parts that were lost with their drives, or that were not moved with the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.checkpoint.inspection import InventoryEntry
    from tiered.ext import DrivePlace

__all__ = ["LostPartsNotice", "moved_run_notices"]


@dataclass(frozen=True, slots=True)
class LostPartsNotice:
    """Message about checkpoints that have lost parts on drives.

    Attributes:
        places: Former locations of the parts, as in ``LostPart.place``.
        has_missing_folder: Whether a part's folder does not exist, for example because its drive is not mounted.
    """

    steps: tuple[int, ...]
    places: tuple[str, ...]
    has_missing_folder: bool

    @classmethod
    def among(cls, entries: Iterable[InventoryEntry]) -> LostPartsNotice | None:
        """Return a message about the checkpoints that have lost parts, or None if all are complete."""
        lost_entries = [entry for entry in entries if entry.is_gone]
        if not lost_entries:
            return None
        steps = tuple(sorted({step for entry in lost_entries if (step := entry.checkpoint.step) is not None}))
        parts = [part for entry in lost_entries for part in entry.lost]
        return cls(steps, tuple(dict.fromkeys(part.place for part in parts)), not all(part.is_there for part in parts))

    def __str__(self) -> str:
        verb = "is" if len(self.steps) == 1 else "are"
        pronoun = "it" if verb == "is" else "them"
        return f"the {_of_steps(self.steps)} {verb} gone: parts of {pronoun} lay in {'; '.join(self.places)}"

    def remedy(self, output_dir: Path) -> str:
        """Return advice for a run without usable checkpoints. Suggest removing them only if all part folders exist."""
        copy = "If this folder is a copy of a live run, copy it again; a larger checkpoint.save_total_limit keeps more"
        if self.has_missing_folder:
            advice = "Restore that folder (mount its drive, restore a backup) and run again"
            return f"{advice}. {copy}. To start from scratch, name another output_dir"
        return (
            f"Restore a backup and run again. {copy}. Or give up what was trained: megatrain-tier ckpt rm {output_dir} "
            "--all, then run again"
        )


def _of_steps(steps: Sequence[int]) -> str:
    label = "checkpoint of step" if len(steps) == 1 else "checkpoints of steps"
    return f"{label} {', '.join(map(str, steps))}"


def moved_run_notices(entries: Iterable[InventoryEntry]) -> list[str]:
    """Return a notice for each drive that contains checkpoint parts but was not copied or moved with the run."""
    steps_by_drive: dict[DrivePlace, set[int]] = {}
    for entry in entries:
        for drive in entry.outside:
            steps_by_drive.setdefault(drive, set()).add(entry.checkpoint.step or 0)
    return [
        "warning: this run was copied or moved without all of its drives. Parts of the "
        f"{_of_steps(sorted(steps))} are read from '{drive.recorded}', because '{drive.nearby}' does not hold them"
        for drive, steps in steps_by_drive.items()
    ]
