"""Folders of runs whose checkpoints an earlier version wrote (tests/data/checkpoints)."""

from __future__ import annotations

import tarfile
from pathlib import Path

from processes.saved_run import SavedRun

GOLDEN = Path(__file__).parents[1] / "data" / "checkpoints"


def unpack(form: str, folder: Path) -> SavedRun:
    """Return the run of a golden form, in a new folder."""
    with tarfile.open(GOLDEN / f"{form}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return SavedRun(folder / form)
