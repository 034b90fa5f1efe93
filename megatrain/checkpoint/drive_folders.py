"""The README in folders on drives, and messages about them: they hold checkpoints and must not be deleted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.whereabouts import bytes_on_drives
from tiered.ext import read_owner, snapshot_folders
from tiered.units import format_size

if TYPE_CHECKING:
    from megatrain.checkpoint.state import CheckpointSpec

__all__ = ["README_NAME", "describe_drives", "write_readme"]

README_NAME = "README.txt"
_TEXT = """\
This folder belongs to megatrain-tier. CHECKPOINTS LIE HERE: it is no scratch space.

snap/          parts of checkpoints that no other place has. Without this folder they cannot be opened.
live/, .pool/  blocks of the run that uses the folder now, or used it last: weights, gradients, optimizer state.
               What a checkpoint shares with them takes its room only once (hard links).
the files      say whose the folder is, who uses it, and how much was written to it.

Checkpoints of these runs lie here, or will (the next run that uses the folder writes this file anew):
{runs}

What may be deleted, and how:
  what ended runs left and no checkpoint needs     megatrain-tier clean {folder}
  a checkpoint                                     megatrain-tier ckpt ls RUN
                                                   megatrain-tier ckpt rm RUN --step N
  the whole folder                                 megatrain-tier ckpt rm RUN --all, for each of these runs; then rm -r
Deleting anything else by hand destroys checkpoints.

A run with `save_copy = true` in its [checkpoint] table keeps whole copies in its output_dir, which need nothing of this
folder.
"""


def write_readme(drive: Path, checkpoints: Path) -> None:
    """Write the README of a folder on a drive; failures are ignored. The caller holds the folder's lock.

    Args:
        drive: path of the NVMe tier.
        checkpoints: directory of generations of the run or store that uses it now.
    """
    stores = [checkpoints]
    for _, folder in snapshot_folders([drive]):
        owner = read_owner(folder)
        if owner is not None and owner.path:
            stores.append(Path(owner.path))
    runs = dict.fromkeys(store.parent if store.name == CHECKPOINTS_NAME else store for store in stores)
    text = _TEXT.format(runs="\n".join(f"  {run}" for run in runs), folder=drive)
    path, temporary = drive / README_NAME, drive / f".{README_NAME}.tmp"
    with contextlib.suppress(OSError):  # optional: a full drive is reported where it matters
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            return
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def describe_drives(spec: CheckpointSpec, drive_bytes: int) -> list[str]:
    """Return messages about the drives that hold, or will hold, parts of a run's checkpoints.

    Args:
        spec: of the run.
        drive_bytes: bytes of one checkpoint that stay on drives, by the plan.
    """
    drives = spec.drives
    found = bytes_on_drives(spec.output_dir, drives)
    lines = []
    if drive_bytes and spec.is_on:
        names = _names(drives)
        now = sum(found.get(path, 0) for path in drives)
        lies = f"{format_size(drive_bytes)} of each checkpoint stay in {names}, {format_size(now)} lie there now"
        lines.append(f"{lies}: deleting that folder destroys them. {_advice(spec)}")
    elif any(path in found for path in drives):
        there = [path for path in drives if path in found]
        nbytes = format_size(sum(found[path] for path in there))
        lines.append(f"{nbytes} of this run's checkpoints lie in {_names(there)}: deleting that destroys them")
    others = {path: nbytes for path, nbytes in found.items() if path not in drives}
    lines += [f"{format_size(size)} of this run's earlier checkpoints lie in '{path}'" for path, size in others.items()]
    return lines


def _advice(spec: CheckpointSpec) -> str:
    if spec.save_copy is False:
        return "checkpoint.save_copy = true keeps whole copies in output_dir"
    which = {True: "every checkpoint", "last": "the last checkpoint"}.get(
        spec.save_copy, f"every {spec.save_copy}th checkpoint"
    )
    return f"A whole copy of {which} goes to '{spec.output_dir / COPIES_NAME}'"


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
