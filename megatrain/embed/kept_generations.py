"""Which generations of a store the checkpoint files of a host trainer name: those stay as long as the files do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["KeptGenerations"]

_RECORD = "checkpoint_files.json"


class KeptGenerations:
    """A list of files and the generation that each names, beside the generations. Thread-safe.

    It is read again after a restart, so that files of an earlier process count. Give ``numbers`` to
    ``TieredStore.keep_also``.

    Args:
        folder: of the store's generations.
        exists: tells whether a checkpoint file is still there.
    """

    def __init__(self, folder: str, exists: Callable[[str], bool]) -> None:
        self._path = Path(folder, _RECORD)
        self._exists = exists
        self._lock = threading.Lock()
        self._unseen: set[str] = set()  # noted, and perhaps still being written
        try:
            self._files = {str(file): int(number) for file, number in json.loads(self._path.read_text()).items()}
        except (OSError, ValueError, AttributeError):  # none yet, or damaged: what the store keeps anyway is kept
            self._files = {}

    def note(self, file: str, generation: int) -> None:
        """Note that a checkpoint file names a generation; before or after it is written."""
        with self._lock:
            self._files[file] = generation
            self._unseen.add(file)
            self._write()

    def numbers(self) -> set[int]:
        """Return the generations that files name which are still there; the others are forgotten."""
        with self._lock:
            present = {file for file in self._files if self._exists(file)}
            self._unseen -= present
            gone = set(self._files) - present - self._unseen
            if gone:
                self._files = {file: number for file, number in self._files.items() if file not in gone}
                self._write()
            return set(self._files.values())

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._files, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)
