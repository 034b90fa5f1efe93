"""What decides the sizes of a first config: of a machine and of a model, as far as they are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Drive", "MachineFacts", "ModelFacts"]


@dataclass(frozen=True, slots=True)
class Drive:
    """A folder that could hold blocks.

    Attributes:
        path: the folder, as it is written.
        kind: its file system.
        objection: why it is better not used, or "".
    """

    path: str
    free_bytes: int
    kind: str
    objection: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What decides sizes. ``gpu_bytes`` is what is free now; None: there is no CUDA device."""

    ram_bytes: int
    free_ram_bytes: int
    gpu_bytes: int | None
    drives: Sequence[Drive]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model: its path or hub name, and 0 for numbers that are not known."""

    path: str
    num_parameters: int = 0
    max_positions: int = 0
