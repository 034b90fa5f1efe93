"""Run folders with checkpoints that earlier versions wrote (tests/data/checkpoints)."""

from __future__ import annotations

import tarfile
from pathlib import Path

from processes.saved_run import SavedRun

GOLDEN = Path(__file__).parents[1] / "data" / "checkpoints"


def unpack(form: str, folder: Path) -> SavedRun:
    """Unpack the archive ``FORM.tar.xz``, which contains a run folder, below ``folder``, and return the run."""
    with tarfile.open(GOLDEN / f"{form}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return SavedRun(folder / form)
