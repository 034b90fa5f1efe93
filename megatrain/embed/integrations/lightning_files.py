"""Checkpoint files of Lightning, and the generations of the store that they refer to."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins import TorchCheckpointIO

__all__ = [
    "KeptGenerations",
    "MappedCheckpointIO",
    "file_exists",
    "local_path",
]

_RECORD = "checkpoint_files.json"


class KeptGenerations:
    """Record of checkpoint files and the generations that they refer to, stored with the generations. Thread-safe.

    After a restart, the record is read again, so it includes files of earlier processes. Pass ``numbers`` to
    ``TieredStore.keep_also``.

    Args:
        folder: Folder of the store's generations.
        exists: Returns whether a checkpoint file still exists.
    """

    def __init__(self, folder: str, exists: Callable[[str], bool]) -> None:
        self._path = Path(folder, _RECORD)
        self._exists = exists
        self._lock = threading.Lock()
        self._unseen: set[str] = set()  # recorded files that may still be in the process of being written
        try:
            self._files = {str(file): int(number) for file, number in json.loads(self._path.read_text()).items()}
        except (OSError, ValueError, AttributeError):  # missing or damaged, so the store keeps only its own generations
            self._files = {}

    def note(self, file: str, generation: int) -> None:
        """Record that a checkpoint file refers to a generation. Call this before or after the file is written."""
        with self._lock:
            self._files[file] = generation
            self._unseen.add(file)
            self._write()

    def numbers(self) -> set[int]:
        """Return the generations that existing files refer to. Remove deleted files from the record."""
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


class MappedCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """``TorchCheckpointIO`` that streams local files in the same format. The base class handles other locations."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file atomically, so that it is complete or absent even after a power failure."""
        target = local_path(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            torch.save(checkpoint, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a file. Tensors are read when they are used.

        Args:
            weights_only: False to read everything immediately, as Lightning does.
        """
        source = local_path(path)
        loaded: dict[str, Any]
        if weights_only is False or source is None or not source.is_file():
            loaded = super().load_checkpoint(path, weights_only=weights_only)
        else:
            loaded = torch.load(source, map_location=map_location or "cpu", mmap=True, weights_only=True)
        return loaded


def local_path(path: Any) -> Path | None:
    """Return a checkpoint's path if it is a local file, otherwise None."""
    system, inner = url_to_fs(str(path))
    return Path(inner) if isinstance(system, LocalFileSystem) else None


def file_exists(path: str) -> bool:
    """Return whether a checkpoint exists. If the file system cannot be reached, return True."""
    local = local_path(path)
    if local is not None:
        return local.exists()
    try:
        system, inner = url_to_fs(path)
        return bool(system.exists(inner))
    except Exception:  # the service does not answer, and its client can raise any error
        return True
