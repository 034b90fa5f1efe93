"""Lists, finds and verifies a run's checkpoints and their copies, without opening a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, RANKS_NAME
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.inspection import InventoryEntry, inspect_folder, merge_entries
from megatrain.checkpoint.listing import folder_notices, ignore_damage, still_exists
from megatrain.checkpoint.notices import moved_run_notices
from megatrain.checkpoint.state import CheckpointError
from tiered import list_generations
from tiered.errors import GenerationError, TieredError
from tiered.ext import SNAPSHOT_FOLDER, top_problem
from tiered.units import is_number

__all__ = [
    "OnBlock",
    "RunInventory",
    "Verified",
    "checkpoint_folders",
    "find_checkpoint",
    "next_start",
    "saved_checkpoints",
    "usable_checkpoint",
]

#: Function that receives the key of a block that was read.
OnBlock = Callable[[str], None]
#: An inventory entry, and the problems that were found by reading its blocks.
Verified = tuple[InventoryEntry, list[str]]


class RunInventory:
    """All checkpoints of a run and their copies. The run may be active while they are listed.

    Args:
        run: ``output_dir`` of the run, or its folder of checkpoints.

    Attributes:
        entries: Checkpoints, oldest first, then their copies, oldest first.

    Raises:
        CheckpointError: The folder contains no checkpoint, or a document cannot be read.
    """

    def __init__(self, run: Path | str) -> None:
        self._run = run
        self._folders = checkpoint_folders(run)
        self.entries = [entry for folder in self._folders for entry in reversed(_inspect(folder))]

    def of_step(self, step: int | None) -> list[InventoryEntry]:
        """Return the entries that were saved at a step, or all entries if ``step`` is None.

        Raises:
            CheckpointError: There is no checkpoint, or no checkpoint of this step.
        """
        entries = [entry for entry in self.entries if step in (None, entry.checkpoint.step)]
        if not entries:
            find_checkpoint(self._run, step)  # raises an error that lists the available steps
        return entries

    def verify(self, step: int | None, on_block: OnBlock = lambda key: None) -> Iterator[Verified]:
        """Read every byte of the entries that ``of_step`` returns. Yield each entry with a list of its problems.

        Checkpoints that the run prunes meanwhile are omitted.
        """
        for entry in self.of_step(step):
            problems = [entry.problem] if entry.problem is not None else _problems(entry.checkpoint, on_block)
            if not problems or still_exists(entry.checkpoint):
                yield entry, problems

    def notices(self, entries: Iterable[InventoryEntry]) -> list[str]:
        """Return the notices that a run would print about its documents and about the drives of these entries."""
        notices = moved_run_notices(entries)
        for folder in self._folders:
            notices += folder_notices(folder)
            if not list_generations(folder) and (problem := top_problem(folder)) is not None:
                notices.append(problem)  # a run would raise this error
        return notices


def next_start(entries: Sequence[InventoryEntry]) -> InventoryEntry | None:
    """Return the entry from which a run would resume, or None. ``entries`` are ordered as in ``RunInventory``."""
    return next(iter(_in_resume_order(entries[::-1])), None)


def checkpoint_folders(run: Path | str) -> list[Path]:
    """Return the folders that contain a run's checkpoints and their copies. Folders without checkpoints are omitted.

    Args:
        run: ``output_dir`` of the run, or one of these folders.

    Raises:
        CheckpointError: The folder does not exist, or no checkpoint was ever saved in it.
    """
    root = Path(os.path.abspath(run))
    for folders in ([root / CHECKPOINTS_NAME, root / COPIES_NAME], [root]):
        if matches := [path for path in folders if (path / SNAPSHOT_FOLDER).is_dir() or (path / RANKS_NAME).is_file()]:
            return matches
    if not root.is_dir():
        raise CheckpointError(f"'{root}' does not exist or is not a folder. Give the output_dir of a run")
    raise CheckpointError(f"'{root}' holds no checkpoint. Give the output_dir of a run that saved")


def find_checkpoint(run_or_folder: Path | str, step: int | None = None) -> InventoryEntry:
    """Return the newest usable checkpoint, overall or of one step. Only documents and file names are checked.

    Args:
        run_or_folder: ``output_dir``, its folder of checkpoints, or a checkpoint's folder ``snap/<generation>``.
        step: Number of finished steps. If several checkpoints have this step, the newest is returned.

    Raises:
        CheckpointError: There is no such checkpoint. The message lists the available steps.
    """
    path = Path(os.path.abspath(run_or_folder))
    if path.parent.name == SNAPSHOT_FOLDER and is_number(path.name):
        folder = path.parent.parent
        entries = [entry for entry in _inspect(folder) if not entry.checkpoint.is_listed]
        all_entries = [entry for entry in entries if entry.checkpoint.number == int(path.name)]
    else:
        folder, *_ = folders = checkpoint_folders(path)
        all_entries = [entry for one in folders for entry in _inspect(one)]
    candidates = _in_resume_order(all_entries)
    match = next((entry for entry in candidates if step in (None, entry.checkpoint.step)), None)
    if match is not None:
        return match
    unusable = [entry for entry in all_entries if entry.problem is not None]
    messages = {entry.checkpoint.step: _describe_problem(entry) for entry in reversed(unusable)}
    if step is not None and step in messages:
        raise CheckpointError(messages[step])
    if candidates:
        steps = {entry.checkpoint.step for entry in candidates}
        steps_text = ", ".join(map(str, sorted(entry for entry in steps if entry is not None)))
        raise CheckpointError(f"'{folder}' holds no checkpoint of step {step}. Saved steps: {steps_text}")
    if unusable:
        raise CheckpointError(f"no checkpoint in '{folder}' can be used: {_describe_problem(unusable[0])}")
    raise CheckpointError(f"'{folder}' holds no checkpoint. Give the output_dir of a run that saved")


def saved_checkpoints(output_dir: Path | str) -> list[InventoryEntry]:
    """Return a run's checkpoints and their copies, in the order in which the run would try them.

    Checkpoints with invalid documents are omitted. Checkpoints with lost parts are included.
    """
    root = Path(os.path.abspath(output_dir))
    entries: list[list[InventoryEntry]] = []
    for name in (CHECKPOINTS_NAME, COPIES_NAME):
        folder_entries = inspect_folder(root / name, validate_state=False, on_damage=ignore_damage)
        if folder_entries and folder_entries[0].is_foreign:
            folder_entries = []  # a run would raise an error instead of using an older checkpoint
        entries.append([entry for entry in folder_entries if entry.is_readable])
    return merge_entries(*entries)


def usable_checkpoint(output_dir: Path | str) -> Checkpoint | None:
    """Return the checkpoint from which a run in this folder would resume, or None."""
    return next((entry.checkpoint for entry in saved_checkpoints(output_dir) if not entry.is_gone), None)


def _inspect(folder: Path) -> list[InventoryEntry]:
    """Return all checkpoints in a folder, newest first. Raises ``CheckpointError`` if a document is damaged."""
    try:
        return inspect_folder(folder)
    except GenerationError as error:
        raise CheckpointError(str(error)) from error


def _in_resume_order(entries: Sequence[InventoryEntry]) -> list[InventoryEntry]:
    """Sort usable checkpoints and copies, each newest first, in the order in which a run would try them."""
    usable = [entry for entry in entries if entry.problem is None]
    own, copies = ([entry for entry in usable if entry.checkpoint.is_copy == is_copy] for is_copy in (False, True))
    return merge_entries(own, copies)


def _describe_problem(entry: InventoryEntry) -> str:
    """Return the reason why a checkpoint cannot be used."""
    checkpoint = entry.checkpoint
    if checkpoint.step is None:
        return str(entry.problem)
    return f"the checkpoint of step {checkpoint.step} in '{checkpoint.folder}' cannot be used: {entry.problem}"


def _problems(checkpoint: Checkpoint, on_block: OnBlock) -> list[str]:
    from megatrain.checkpoint.reader import CheckpointReader  # imported late, because it imports torch

    try:
        return list(CheckpointReader(checkpoint).problems(on_block))
    except (TieredError, OSError) as error:
        return [str(error)]
