"""Folders of runs whose checkpoints were written by earlier versions (tests/data/checkpoints)."""

from __future__ import annotations

import tarfile
from pathlib import Path

from processes.saved_run import SavedRun

GOLDEN = Path(__file__).parents[1] / "data" / "checkpoints"


def unpack(form: str, folder: Path) -> SavedRun:
    """Unpack a run from the archive ``FORM.tar.xz`` into ``folder``, and return the run."""
    with tarfile.open(GOLDEN / f"{form}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return SavedRun(folder / form)
