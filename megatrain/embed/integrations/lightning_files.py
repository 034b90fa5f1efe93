"""Lightning's checkpoint files, and the generations of the store that these files name."""

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

_RECORD = "checkpoint_files.json"


class KeptGenerations:
    """Record of checkpoint files and their generations, stored with the generations. Thread-safe.

    The record is read again after a restart, so that it includes files of earlier processes. Pass ``numbers`` to
    ``TieredStore.keep_also``.

    Args:
        folder: Folder of the store's generations.
        exists: Function that returns whether a checkpoint file still exists.
    """

    def __init__(self, folder: str, exists: Callable[[str], bool]) -> None:
        self._path = Path(folder, _RECORD)
        self._exists = exists
        self._lock = threading.Lock()
        self._unseen: set[str] = set()  # recorded files that may not be written completely yet
        try:
            self._files = {str(file): int(number) for file, number in json.loads(self._path.read_text()).items()}
        except (OSError, ValueError, AttributeError):  # the record is missing or damaged
            self._files = {}

    def note(self, file: str, generation: int) -> None:
        """Record that a checkpoint file names a generation, either before or after the file is written."""
        with self._lock:
            self._files[file] = generation
            self._unseen.add(file)
            self._write()

    def numbers(self) -> set[int]:
        """Return the generations that existing files name, and remove deleted files from the record."""
        with self._lock:
            existing_files = {file for file in self._files if self._exists(file)}
            self._unseen -= existing_files
            deleted_files = set(self._files) - existing_files - self._unseen
            if deleted_files:
                self._files = {file: n for file, n in self._files.items() if file not in deleted_files}
                self._write()
            return set(self._files.values())

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._files, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


class MappedCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """``TorchCheckpointIO`` that streams local files in the same format. The base class handles all other files."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint file. Local files are written atomically, even if the power fails."""
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
        """Return the contents of a file. Tensors of local files are memory-mapped, unless ``weights_only`` is False."""
        source = local_path(path)
        loaded: dict[str, Any]
        if weights_only is False or source is None or not source.is_file():
            loaded = super().load_checkpoint(path, weights_only=weights_only)
        else:
            loaded = torch.load(source, map_location=map_location or "cpu", mmap=True, weights_only=True)
        return loaded


def local_path(path: Any) -> Path | None:
    """Return the path of a checkpoint if it is on a local file system, otherwise None."""
    system, inner_path = url_to_fs(str(path))
    return Path(inner_path) if isinstance(system, LocalFileSystem) else None


def file_exists(path: str) -> bool:
    """Return whether a checkpoint exists. Return True if the file system cannot be reached."""
    local_file = local_path(path)
    if local_file is not None:
        return local_file.exists()
    try:
        system, inner_path = url_to_fs(path)
        return bool(system.exists(inner_path))
    except Exception:  # a client can raise any error if its service does not answer
        return True
