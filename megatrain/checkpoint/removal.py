"""Removes checkpoints: a checkpoint that the user names, or all checkpoints that a run no longer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.base.owner import find_owner
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.inventory import RunInventory
from megatrain.checkpoint.listing import manifest_checksum, read_checkpoints, read_listed, write_document
from megatrain.checkpoint.state import CheckpointError
from megatrain.ranks.world import RANK_FOLDERS
from tiered import list_generations, remove_generation

__all__ = ["check_not_in_use", "forget_checkpoint", "prune", "remove_checkpoint"]


def remove_checkpoint(run: Path | str, checkpoint: Checkpoint, *, force: bool = False) -> int:
    """Remove a checkpoint, including its parts on drives. Return the number of freed bytes.

    Args:
        force: Whether to remove the checkpoint even if it is the last usable one.

    Raises:
        CheckpointError: The checkpoint is the only usable one or does not exist, or a live run uses the folder.
        LockedError: A run that has just started uses the folder.
        OSError: A file cannot be removed. A repeated call resumes the removal.
    """
    folder, key = checkpoint.folder, (checkpoint.folder, checkpoint.ranks)
    check_not_in_use(folder)
    entries = {(item.checkpoint.folder, item.checkpoint.ranks): item for item in RunInventory(run).entries}
    if key not in entries:
        raise CheckpointError(f"'{folder}' holds no generation {checkpoint.number}")
    entry = entries.pop(key)
    if entry.problem is None and all(item.problem is not None for item in entries.values()) and not force:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is the only one in '{folder}' that can be used. Remove it with "
            "--all"
        )
    forget_checkpoint(checkpoint)
    return entry.nbytes


def check_not_in_use(folder: Path) -> None:
    """Raise ``CheckpointError`` if a live run uses the folder of checkpoints or its parent ``output_dir``."""
    for path in (folder, folder.parent) if folder.name in (CHECKPOINTS_NAME, COPIES_NAME) else (folder,):
        owner = find_owner(path)
        if owner is not None:
            raise CheckpointError(
                f"'{path}' is in use by {owner.text}: nothing was removed. Stop that run first: megatrain-tier stop"
            )


def forget_checkpoint(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint from its document. Then remove its generations, unless another checkpoint refers to them.

    Raises:
        LockedError: A run uses one of the stores.
        OSError: A file cannot be removed.
    """
    folder = checkpoint.folder
    remaining_checkpoints = [other for other in read_checkpoints(folder) if other.ranks != checkpoint.ranks]
    if checkpoint.is_listed:
        write_document(folder, [other for other in remaining_checkpoints if other.is_listed])
    used_generations = _named_generations(remaining_checkpoints)
    for rank in checkpoint.ranks:
        directory = folder / rank.path
        if (rank.path, rank.generation) in used_generations or rank.generation not in list_generations(directory):
            continue
        # If the directory is a symbolic link, remove only a generation with the recorded checksum, because others may
        # belong to another run.
        if not directory.is_symlink() or rank.xxh3_64 in ("", manifest_checksum(directory, rank.generation)):
            remove_generation(directory, rank.generation)


def prune(folder: Path, kept_checkpoints: Sequence[Checkpoint], own_stores: Sequence[str]) -> None:
    """Remove generations that no kept checkpoint refers to. Skip this run's own stores, which prune themselves.

    Args:
        own_stores: Paths of this run's stores, as in ``RankGeneration``.

    Raises:
        GenerationError: The document cannot be read, so it is unknown which generations are in use.
        OSError: A file cannot be removed.
    """
    read_listed(folder)
    used_generations = _named_generations(kept_checkpoints)
    for name in ["", *sorted(path.name for path in folder.glob(RANK_FOLDERS))]:
        if name not in own_stores:
            for generation in list_generations(folder / name):
                if (name, generation) not in used_generations:
                    remove_generation(folder / name, generation)


def _named_generations(checkpoints: Sequence[Checkpoint]) -> set[tuple[str, int]]:
    return {(rank.path, rank.generation) for checkpoint in checkpoints for rank in checkpoint.ranks}
