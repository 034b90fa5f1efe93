"""Chooses the checkpoint from which a run resumes: the newest complete checkpoint that matches the run's config."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, FINAL_NAME
from megatrain.checkpoint.copy_transfer import PART_NAME, fetch
from megatrain.checkpoint.document import Checkpoint, merge_by_save
from megatrain.checkpoint.inspection import InventoryEntry, inspect_folder, merge_entries
from megatrain.checkpoint.listing import folder_notices, ignore_damage, read_checkpoints
from megatrain.checkpoint.notices import LostPartsNotice, moved_run_notices
from megatrain.checkpoint.object_folder import DamagedError, RemoteError
from megatrain.checkpoint.remote_folder import RemoteCheckpoint, RemoteFolder
from megatrain.checkpoint.state import CheckpointError, DecidedSettings
from megatrain.checkpoint.table import CheckpointSpec
from megatrain.models.export import RECORD_FILE
from tiered.errors import GenerationError, NewerFormatError
from tiered.ext import top_problem
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.base.changes import ConfigChanges


__all__ = [
    "ConfigChangedError",
    "LostCheckpointsError",
    "NoSuchCheckpointError",
    "check_changes",
    "download_newest",
    "find_candidates",
    "settings_of_newest",
]


#: Function that receives a notice for the user.
OnNotice = Callable[[str], None]
#: Entries of ``RunState.model`` that affect results, with their names in messages.
RESULT_ENTRIES = {
    "config_xxh3_64": "the model's config.json, as a checksum",
    "dtype": "precision.compute_dtype as resolved",
    "device": "device as resolved",
    "attention": "model.attn_implementation as resolved",
    "decays": "the parameters that weight decay applies to, as a checksum of their names",
}
_DECAY_KEY = "optimizer.weight_decay_exclude"
_BLOCK_FORMAT_KEYS = ("optimizer.state_dtype",)  # keys that set the format of blocks, which a run cannot convert


class ConfigChangedError(Exception):
    """The config has changes that would alter the results of the run that wrote the checkpoint."""


class NoSuchCheckpointError(CheckpointError):
    """``checkpoint.resume_from_checkpoint`` refers to a folder without checkpoints."""


class UnreadableCheckpointsError(CheckpointError):
    """Checkpoints exist, but none of their manifests can be read."""


class LostCheckpointsError(CheckpointError):
    """Every checkpoint of a run has lost parts that were on drives.

    Attributes:
        newest: Checkpoint from which the run would have resumed.
    """

    def __init__(self, message: str, newest: Checkpoint) -> None:
        self.newest = newest
        super().__init__(message)


def find_candidates(spec: CheckpointSpec, on_notice: OnNotice) -> list[Checkpoint]:
    """Return the checkpoints and copies from which the run can resume, in order of preference.

    Checkpoints in the run's own folder come before checkpoints in ``checkpoint.resume_from_checkpoint``.

    Args:
        on_notice: Called with notices about checkpoints that are damaged or have lost parts on drives.

    Raises:
        LostCheckpointsError: Checkpoints exist, but each has lost a part that was on a drive.
        CheckpointError: The folder contains checkpoints although the config forbids resuming, or the source has none.
    """
    source = spec.table.resume_from_checkpoint
    entries = _find_readable_in_run(spec.output_dir, spec.drives, on_notice)
    if source == "no":
        if entries:
            step = entries[0].checkpoint.step
            raise CheckpointError(
                f"'{spec.output_dir}' holds a run that was saved at step {step}, and "
                'checkpoint.resume_from_checkpoint is "no". Write "auto" to continue it, name another output_dir, or '
                f"remove its checkpoints: megatrain-tier ckpt rm {spec.output_dir} --all"
            )
        return []
    if entries or source == "auto":
        return _select_complete(entries, spec.output_dir, on_notice)
    root = Path(source)
    if any((root / name).is_dir() for name in (CHECKPOINTS_NAME, COPIES_NAME)):
        candidates = _select_complete(_find_readable_in_run(root, spec.drives, on_notice), root, on_notice)
    else:  # the source is itself a folder of checkpoints
        candidates = [entry.checkpoint for entry in _find_readable(root, spec.drives, on_notice)]
    if not candidates:
        raise NoSuchCheckpointError(
            f"checkpoint.resume_from_checkpoint: '{root}' holds no checkpoint. Name the output_dir of a run that saved"
        )
    return candidates


def download_newest(
    spec: CheckpointSpec, on_message: Callable[[str], None], check: Callable[[Checkpoint], None]
) -> None:
    """Download the newest copy and the copy of the best evaluation, if the newest copy is newer than all local ones.

    Args:
        check: Called with the newest copy before the download. It must raise an error if the run cannot resume from it.

    Raises:
        RemoteError: The URL cannot be used, belongs to another run, or has no complete copy.
    """
    url = spec.table.copy_url
    assert url is not None
    folders = [spec.output_dir / name for name in (CHECKPOINTS_NAME, COPIES_NAME)]
    entries = [each for folder in folders for each in inspect_folder(folder, spec.drives, on_damage=ignore_damage)]
    remote_folder = RemoteFolder(url)
    usable_checkpoints = [each.checkpoint for each in entries if each.problem is None]
    remote_folder.claim(spec.output_dir, is_empty=not entries)
    newest_key = max((each.order_key for each in usable_checkpoints), default=(0, ""))
    copies = remote_folder.checkpoints()
    newer_copies = [each for each in copies if each.checkpoint.order_key > newest_key]
    if not newer_copies:
        shutil.rmtree(spec.output_dir / PART_NAME, ignore_errors=True)  # left by an interrupted download
        return
    if spec.table.resume_from_checkpoint == "no":
        raise RemoteError(
            f"{remote_folder.objects.title} holds a run that was saved at step {newer_copies[0].step}, and "
            'checkpoint.resume_from_checkpoint is "no". Write "auto" to continue it, or name another URL'
        )
    check(replace(newer_copies[0].checkpoint, folder=spec.output_dir / CHECKPOINTS_NAME))
    problems: list[str] = []
    for each in newer_copies:
        try:
            best = _find_best_copy(each, copies) if spec.table.load_best_model_at_end else None
            for copy in (best, each):
                if copy is not None and copy.checkpoint.identity not in [each.identity for each in usable_checkpoints]:
                    size = format_size(copy.nbytes)
                    on_message(f"downloading the checkpoint of step {copy.step} from '{url}', {size}")
                    fetch(remote_folder, copy, spec.output_dir, spec.table.min_free_disk)
            return
        except DamagedError as error:
            problems.append(str(error))
            on_message(f"the copy of step {each.step} is skipped: {error}")
    if not usable_checkpoints:
        raise RemoteError(
            f"none of the {len(newer_copies)} copies in '{url}' is whole; the newest: {problems[0]}. Name another URL "
            "to start from scratch"
        )


def _find_best_copy(newest: RemoteCheckpoint, copies: Sequence[RemoteCheckpoint]) -> RemoteCheckpoint | None:
    best = newest.checkpoint.meta.get("best")
    step = best.get("step") if isinstance(best, Mapping) else None
    return next((copy for copy in copies if copy.step == step and copy.number < newest.number), None)


def settings_of_newest(output_dir: Path, resume_from: str) -> DecidedSettings | None:
    """Return the settings of the checkpoint from which a run would resume, or None if there is none."""
    if resume_from == "no":
        return None
    other_runs = [] if resume_from == "auto" else [Path(resume_from)]
    for run in (output_dir, *other_runs):
        # Ignore damaged documents here, because loading the checkpoint reports them later.
        checkpoints, copies, folder_checkpoints = (
            read_checkpoints(folder, ignore_damage)[::-1] for folder in (run / CHECKPOINTS_NAME, run / COPIES_NAME, run)
        )
        checkpoint = next((c for c in (*merge_by_save(checkpoints, copies), *folder_checkpoints) if c.meta), None)
        if checkpoint is not None and (settings := DecidedSettings.of_meta(checkpoint.meta)) is not None:
            return settings
    return None


def _find_readable_in_run(output_dir: Path, drives: Sequence[Path], on_notice: OnNotice) -> list[InventoryEntry]:
    """Return a run's readable checkpoints and their copies, newest first.

    If there is a copy, an ``UnreadableCheckpointsError`` about the checkpoints is only reported as a notice.
    """
    copies: list[InventoryEntry] = []
    with contextlib.suppress(UnreadableCheckpointsError):
        copies = _find_readable(output_dir / COPIES_NAME, drives, on_notice)
    try:
        checkpoints = _find_readable(output_dir / CHECKPOINTS_NAME, drives, on_notice)
    except UnreadableCheckpointsError as error:
        if not copies:
            raise
        on_notice(str(error))
        checkpoints = []
    return merge_entries(checkpoints, copies)


def _select_complete(entries: Sequence[InventoryEntry], output_dir: Path, on_notice: OnNotice) -> list[Checkpoint]:
    """Return the checkpoints that have all parts. Report incomplete checkpoints if the newest one is among them.

    Raises:
        LostCheckpointsError: No checkpoint has all parts.
    """
    complete_checkpoints = [entry.checkpoint for entry in entries if not entry.is_gone]
    notice = LostPartsNotice.among(entries)
    if notice is None:
        return complete_checkpoints
    if not complete_checkpoints:
        text = f"{notice}. {_describe_remains(output_dir)}. {notice.remedy(output_dir)}"
        raise LostCheckpointsError(text, entries[0].checkpoint)
    if entries[0].checkpoint is not complete_checkpoints[0]:
        on_notice(f"{notice}. This run continues from {complete_checkpoints[0]} instead")
    return complete_checkpoints


def _describe_remains(output_dir: Path) -> str:
    final = output_dir / FINAL_NAME
    if (final / RECORD_FILE).is_file():
        return f"The trained model in '{final}' still exists, but there is no checkpoint that a run could continue"
    return "There is no copy of them in output_dir, and no other checkpoint that a run could continue"


def _find_readable(folder: Path, drives: Sequence[Path], on_notice: OnNotice) -> list[InventoryEntry]:
    """Return the checkpoints in a folder whose documents can be read, newest first. Some may have lost parts.

    The errors prevent a run from skipping or overwriting saved work.

    Raises:
        CheckpointError: A newer version of this program wrote the newest checkpoint, or no checkpoint can be read.
    """
    problems: list[str] = []

    def skip_damaged(error: GenerationError) -> None:
        if isinstance(error, NewerFormatError):
            raise CheckpointError(str(error)) from error
        problems.append(str(error))
        on_notice(f"checkpoints of several ranks are skipped: {error}")

    for notice in folder_notices(folder):
        on_notice(notice)
    entries: list[InventoryEntry] = []
    for entry in inspect_folder(folder, drives, on_damage=skip_damaged):
        if entry.problem is None or entry.lost:
            entries.append(entry)
        elif entry.is_foreign:
            if not entries:
                raise CheckpointError(entry.problem)
        else:
            problems.append(entry.problem)
            on_notice(f"a checkpoint is skipped: {entry.problem}")
    for notice in moved_run_notices(entries):
        on_notice(notice)
    if not entries and not problems and (problem := top_problem(folder)) is not None:
        raise UnreadableCheckpointsError(
            f"{problem}: the folder may be a copy of a live run. Copy it again, or name another output_dir"
        )
    if problems and not entries:
        raise UnreadableCheckpointsError(
            f"none of the {len(problems)} checkpoints in '{folder}' can be read; the newest: {problems[0]}. "
            "Restore their files, or name another output_dir"
        )
    return entries


def check_changes(
    changes: ConfigChanges,
    checkpoint: Checkpoint,
    model: Mapping[str, Any],
    data_fingerprint: str,
    *,
    allow: bool,
    on_notice: OnNotice,
    find_others: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Compare the config, the model and the data with the records of a checkpoint.

    Args:
        changes: Differences between the checkpoint's config and this run's config.
        data_fingerprint: Checksum of the rows (``BatchLoader.fingerprint``).
        find_others: Function that returns further lines for the error. It is called only if an error will be raised.

    Raises:
        ConfigChangedError: The data or a key that alters results has changed, and ``allow`` is False.
    """
    old_model = checkpoint.state.model
    changed = {key for key, value in model.items() if key in RESULT_ENTRIES and old_model.get(key) != value}
    # Compare the parameters that decay instead of the globs, because the default globs may change between versions.
    glob_changes = [change for change in changes.altering if change.key == _DECAY_KEY]
    ignored_changes = glob_changes if "decays" in model and "decays" not in changed else []
    if glob_changes:
        changed.discard("decays")
    texts = [str(change) for change in changes.altering if change not in ignored_changes]
    texts += [
        f"{label}: {old_model.get(key)} -> {model[key]}" for key, label in RESULT_ENTRIES.items() if key in changed
    ]
    if checkpoint.state.data_fingerprint != data_fingerprint:
        texts.append("data: the rows of [[data.train]] differ, or are in another order")
    if texts and not allow:
        is_readable = not any(change.key in _BLOCK_FORMAT_KEYS for change in changes.altering)
        remedies = ", name another output_dir, or accept the changes with --allow-config-change"
        raise ConfigChangedError(
            f"this config would continue {checkpoint} with other results:\n"
            + "".join(f"  {line}\n" for line in [*texts, *find_others()])
            + f"Undo that{remedies if is_readable else ' or name another output_dir'}"
        )
    if texts:
        on_notice("continuing with changes that alter results: " + "; ".join(texts))
    threads = [values.get("threads") for values in (checkpoint.state.model, model)]
    if None not in threads and threads[0] != threads[1]:
        on_notice(
            f"torch computes on {threads[1]} threads, and did on {threads[0]} up to the checkpoint: on a CPU this "
            "changes last bits. Set the number with OMP_NUM_THREADS, or with distributed.threads of several processes"
        )
    if changes.free or ignored_changes:
        free_changes = [*changes.free, *ignored_changes]
        on_notice("changed, without effect on results: " + "; ".join(map(str, free_changes)))
