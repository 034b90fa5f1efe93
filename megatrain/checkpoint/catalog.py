"""Lists, finds, verifies and removes the checkpoints of a run, without opening a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, RANKS_NAME
from megatrain.base.owner import find_owner
from megatrain.checkpoint.document import Checkpoint, folder_notices, forget_checkpoint, merge_by_save
from megatrain.checkpoint.scan import is_listed, moved_run_notices, scan
from megatrain.checkpoint.state import CheckpointError
from tiered import BlockRecord, list_generations
from tiered.errors import GenerationError, TieredError
from tiered.ext import SNAPSHOT_FOLDER, top_problem
from tiered.units import is_number

__all__ = [
    "check_not_in_use",
    "checkpoints_folder",
    "find_checkpoint",
    "list_checkpoints",
    "list_notices",
    "next_start",
    "remove_checkpoint",
    "verify_checkpoints",
]


def checkpoints_folder(run: Path | str) -> Path:
    """Return a run's folder of checkpoints. ``run`` is the run's ``output_dir`` or the folder itself.

    If the checkpoints no longer exist, return the folder of whole copies.

    Raises:
        CheckpointError: The folder does not exist, or no checkpoint was ever saved in it.
    """
    folder = Path(os.path.abspath(run))
    for candidate in (folder / CHECKPOINTS_NAME, folder / COPIES_NAME, folder):
        if _holds_checkpoints(candidate):
            return candidate
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a folder. Give the output_dir of a run")
    raise CheckpointError(f"'{folder}' holds no checkpoint. Give the output_dir of a run that saved")


def list_checkpoints(run: Path | str) -> list[Checkpoint]:
    """Return all checkpoints of a run, oldest first, then their copies. Damaged checkpoints have a ``problem``.

    This reads only documents. It can be called while the run is active.

    Raises:
        CheckpointError: No checkpoint was ever saved there, or the document cannot be read.
    """
    found = [each for folder in _folders(run) for each in reversed(_scan(folder))]
    newest = next_start(found)
    return [replace(each, is_newest=each is newest) for each in found]


def list_notices(run: Path | str, checkpoints: Sequence[Checkpoint] = ()) -> list[str]:
    """Return the notices that a run would print about checkpoint documents and drives before it resumes.

    Raises:
        CheckpointError: No checkpoint was ever saved there.
    """
    notices = moved_run_notices(checkpoints)
    for folder in _folders(run):
        notices += folder_notices(folder)
        if not list_generations(folder) and (problem := top_problem(folder)) is not None:
            notices.append(problem)  # a run would raise this error
    return notices


def next_start(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint from which a run would resume, or None.

    Args:
        checkpoints: Entries of ``list_checkpoints``, in the same order.
    """
    return next(iter(_in_resume_order(checkpoints[::-1])), None)


def find_checkpoint(run_or_folder: Path | str, step: int | None = None) -> Checkpoint:
    """Return the newest usable checkpoint, or the newest of one step. Only documents and file names are checked.

    Args:
        run_or_folder: ``output_dir``, its folder of checkpoints, or a checkpoint's folder ``snap/<generation>``.
        step: Number of finished steps. If several checkpoints have this step, the newest is returned.

    Raises:
        CheckpointError: There is no such checkpoint. The message lists the available steps.
    """
    given = Path(os.path.abspath(run_or_folder))
    if given.parent.name == SNAPSHOT_FOLDER and is_number(given.name):
        folder = given.parent.parent
        found = [each for each in _scan(folder) if not each.is_listed and each.number == int(given.name)]
    else:
        folder, *_ = folders = _folders(given)
        found = [each for one in folders for each in _scan(one)]
    tried = _in_resume_order(found)
    chosen = next((each for each in tried if step in (None, each.step)), None)
    if chosen is not None:
        return chosen
    unusable = [each for each in found if each.problem is not None]
    lost = {each.step: _describe_problem(each) for each in reversed(unusable) if each.step is not None}
    if step in lost:
        raise CheckpointError(lost[step])
    if tried:
        known = ", ".join(map(str, sorted({each.step for each in tried if each.step is not None})))
        raise CheckpointError(f"'{folder}' holds no checkpoint of step {step}. Saved steps: {known}")
    if unusable:
        raise CheckpointError(f"no checkpoint in '{folder}' can be used: {_describe_problem(unusable[0])}")
    raise CheckpointError(f"'{folder}' holds no checkpoint. Give the output_dir of a run that saved")


def verify_checkpoints(
    run: Path | str, step: int | None = None, on_block: Callable[[int, str], None] | None = None
) -> Iterator[tuple[Checkpoint, list[str]]]:
    """Read every byte of the checkpoints. Yield each checkpoint with a list of its problems.

    This can be called while the run is active. Checkpoints that the run prunes meanwhile are omitted.

    Args:
        on_block: Called after each block with the checkpoint's number and the block's key.

    Raises:
        CheckpointError: There is no checkpoint, or no checkpoint of this step.
    """
    checkpoints = [each for each in list_checkpoints(run) if step is None or each.step == step]
    if not checkpoints:
        find_checkpoint(run, step)  # raises an error that lists the available steps
    for each in checkpoints:
        problems = [each.problem] if each.problem is not None else _problems(each, on_block)
        if not problems or is_listed(each):
            yield each, problems


def remove_checkpoint(run: Path | str, checkpoint: Checkpoint, *, force: bool = False) -> int:
    """Remove a checkpoint, including its parts on drives. Return the number of freed bytes.

    Args:
        force: Whether to remove the checkpoint even if it is the last usable one.

    Raises:
        CheckpointError: The checkpoint is the only usable one or does not exist, or a live run uses the folder.
        LockedError: A run that has just started uses the folder.
        OSError: A file cannot be removed. A repeated call resumes the removal.
    """
    folder = checkpoint.folder
    check_not_in_use(folder)
    known = list_checkpoints(run)
    if not any(_is_same(each, checkpoint) for each in known):
        raise CheckpointError(f"'{folder}' holds no generation {checkpoint.number}")
    others = [each for each in known if each.problem is None and not _is_same(each, checkpoint)]
    if checkpoint.problem is None and not others and not force:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is the only one in '{folder}' that can be used. Remove it with "
            "--all"
        )
    forget_checkpoint(checkpoint)
    return checkpoint.nbytes


def check_not_in_use(folder: Path) -> None:
    """Raise ``CheckpointError`` if a live run uses the folder of checkpoints or its parent ``output_dir``."""
    for place in (folder, folder.parent) if folder.name in (CHECKPOINTS_NAME, COPIES_NAME) else (folder,):
        owner = find_owner(place)
        if owner is not None:
            raise CheckpointError(
                f"'{place}' is in use by {owner.text}: nothing was removed. Stop that run first: megatrain-tier stop"
            )


def _folders(run: Path | str) -> list[Path]:
    """Return the folder of checkpoints. If ``run`` is an ``output_dir`` with copies, also return their folder.

    Raises:
        CheckpointError: Neither folder exists.
    """
    folder = checkpoints_folder(run)
    copies = folder.parent / COPIES_NAME
    is_given_alone = folder == Path(os.path.abspath(run))
    has_copies = folder.name == CHECKPOINTS_NAME and not is_given_alone and _holds_checkpoints(copies)
    return [folder, copies] if has_copies else [folder]


def _holds_checkpoints(folder: Path) -> bool:
    return (folder / SNAPSHOT_FOLDER).is_dir() or (folder / RANKS_NAME).is_file()


def _scan(folder: Path) -> list[Checkpoint]:
    try:
        return scan(folder)
    except GenerationError as error:
        raise CheckpointError(str(error)) from error


def _in_resume_order(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the usable checkpoints and copies, newest first, in the order in which a run would try them.

    Args:
        checkpoints: Checkpoints, newest first, and copies, newest first.
    """
    usable = [each for each in checkpoints if each.problem is None]
    own, copies = ([each for each in usable if each.is_copy == is_copy] for is_copy in (False, True))
    return merge_by_save(own, copies)


def _describe_problem(checkpoint: Checkpoint) -> str:
    """Return the reason why a checkpoint cannot be used."""
    if checkpoint.step is None:
        return str(checkpoint.problem)
    place = checkpoint.folder
    return f"the checkpoint of step {checkpoint.step} in '{place}' cannot be used: {checkpoint.problem}"


def _is_same(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.folder, one.ranks) == (other.folder, other.ranks)


def _problems(checkpoint: Checkpoint, on_block: Callable[[int, str], None] | None) -> list[str]:
    from megatrain.checkpoint.reader import CheckpointReader  # imported late, because it imports torch

    def report(record: BlockRecord) -> None:
        if on_block is not None:
            on_block(checkpoint.number, record.key)

    try:
        return list(CheckpointReader(checkpoint).problems(report, with_top=False))
    except (TieredError, OSError) as error:
        return [str(error)]
