"""README for a folder on a drive. It warns users not to delete the folder, because it contains checkpoints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megatrain.base.names import CHECKPOINTS_NAME
from tiered.ext import read_owner, snapshot_folders

__all__ = ["README_NAME", "write_readme"]

README_NAME = "README.txt"
_TEXT = """\
This folder belongs to megatrain-tier. IT HOLDS CHECKPOINTS: do not use it as scratch space.

snap/          parts of checkpoints that exist nowhere else. Without this folder they cannot be opened.
live/, .pool/  blocks of the current or last run of this folder: weights, gradients, optimizer state.
               Data that they share with a checkpoint takes space only once (hard links).
the files      record the owner of the folder, its current user, and the bytes written to it.

Checkpoints of these runs are or will be stored here (the next run that uses the folder rewrites this file):
{runs}

How to delete data in it:
  leftovers of ended runs, not in any checkpoint   megatrain-tier clean {folder}
  a checkpoint                                     megatrain-tier ckpt ls RUN
                                                   megatrain-tier ckpt rm RUN --step N
  the whole folder                                 megatrain-tier ckpt rm RUN --all, for each of these runs; then rm -r
Deleting anything else by hand destroys checkpoints.

A run with `save_copy = true` in its [checkpoint] table keeps whole copies in its output_dir, which do not need this
folder.
"""


def write_readme(drive: Path, checkpoints: Path) -> None:
    """Write the README into a folder on a drive, ignoring failures. The caller must hold the folder's lock.

    Args:
        checkpoints: Directory with the generations of the run or store that now uses the folder.
    """
    stores = [checkpoints]
    for _, folder in snapshot_folders([drive]):
        owner = read_owner(folder)
        if owner is not None and owner.path:
            stores.append(Path(owner.path))
    runs = dict.fromkeys(store.parent if store.name == CHECKPOINTS_NAME else store for store in stores)
    text = _TEXT.format(runs="\n".join(f"  {run}" for run in runs), folder=drive)
    path, temporary_path = drive / README_NAME, drive / f".{README_NAME}.tmp"
    with contextlib.suppress(OSError):  # if the drive is full, the run's other writes report it
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            return
        try:
            temporary_path.write_text(text, encoding="utf-8")
            os.replace(temporary_path, path)
        finally:
            temporary_path.unlink(missing_ok=True)
