"""Facts about a machine and a model, which determine the sizes in a new config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Drive", "MachineFacts", "ModelFacts"]


@dataclass(frozen=True, slots=True)
class Drive:
    """A folder that can store blocks.

    Attributes:
        path: Path of the folder, as in the config.
        kind: Kind of the file system.
        objection: Reason not to use the folder, or "".
    """

    path: str
    free_bytes: int
    kind: str
    objection: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Memory and drives of a machine. ``gpu_bytes`` is the free GPU memory, or None without a CUDA device."""

    ram_bytes: int
    free_ram_bytes: int
    gpu_bytes: int | None
    drives: Sequence[Drive]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Known facts about a model. ``path`` is a folder or a hub id. Unknown numbers are 0."""

    path: str
    num_parameters: int = 0
    max_positions: int = 0
