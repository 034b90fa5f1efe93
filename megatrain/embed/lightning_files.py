"""Lightning's checkpoint files without a second copy in memory: written from, and read into, mapped files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins import TorchCheckpointIO

__all__ = ["MappedCheckpointIO", "file_exists", "local_path"]


class MappedCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """``TorchCheckpointIO`` that streams. The files are the same; places that are no local folder go its way."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file that is there whole or not at all, also after a power cut."""
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
        """Return the contents; tensors are read when they are used.

        Args:
            weights_only: False reads everything at once, Lightning's way.
        """
        source = local_path(path)
        loaded: dict[str, Any]
        if weights_only is False or source is None or not source.is_file():
            loaded = super().load_checkpoint(path, weights_only=weights_only)
        else:
            loaded = torch.load(source, map_location=map_location or "cpu", mmap=True, weights_only=True)
        return loaded


def local_path(path: Any) -> Path | None:
    """Return a checkpoint's path as that of a local file, or None where it is something else."""
    system, inner = url_to_fs(str(path))
    return Path(inner) if isinstance(system, LocalFileSystem) else None


def file_exists(path: str) -> bool:
    """Tell whether a checkpoint is there; one that nobody can be asked about now counts as there."""
    local = local_path(path)
    if local is not None:
        return local.exists()
    try:
        system, inner = url_to_fs(path)
        return bool(system.exists(inner))
    except Exception:  # a service that does not answer: whatever its client raises
        return True
