"""What the slot of a file tier is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiered.tiers.base import Slot


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One file of a home slot.

    Attributes:
        path_index: which of the tier's paths it is on. path: the file itself, never a symbolic link.
        offset: where its contents start in the slot. nbytes: its size.
    """

    path_index: int
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HomeFiles:
    """The resource of an NvmeTier's slot: the block's key and its files, in order of their offsets."""

    key: str
    chunk_bytes: int
    files: tuple[ChunkFile, ...]

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * len(self.files)


def files_of(slot: Slot) -> HomeFiles:
    """Return the files of an NvmeTier's slot."""
    assert isinstance(slot.resource, HomeFiles), slot
    return slot.resource
