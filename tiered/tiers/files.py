"""What the slot of a file tier is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiered.errors import TransferError
from tiered.tiers.base import Slot
from tiered.units import format_size


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One file of a home slot.

    Attributes:
        path_index: which of the tier's paths it is on.
        path: the file itself, never a symbolic link.
        offset: where its contents start in the slot.
        nbytes: its size.
    """

    path_index: int
    path: Path
    offset: int
    nbytes: int


@dataclass(slots=True)
class HomeFiles:
    """The resource of an NvmeTier's slot: the block's key and its files, in order of their offsets.

    Attributes:
        checksums: of the contents that the files hold, one per piece (``tiered.checksums``); None: not known.
        is_flushed: whether the contents survive a power cut. Both are changed only by the one transfer that writes the
            files, by commits, and by adopting a snapshot.
    """

    key: str
    chunk_bytes: int
    files: tuple[ChunkFile, ...]
    checksums: tuple[str, ...] | None = None
    is_flushed: bool = False

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * len(self.files)


def files_of(slot: Slot) -> HomeFiles:
    """Return the files of an NvmeTier's slot."""
    assert isinstance(slot.resource, HomeFiles), slot
    return slot.resource


def place_of(home: HomeFiles, start: int, stop: int) -> str:
    """Return where bytes ``start`` to ``stop`` of a block lie, for a message: files and offsets in them."""
    places = []
    for file in home.files:
        first, last = max(start, file.offset), min(stop, file.offset + file.nbytes)
        if first < last:
            places.append(f"'{file.path}' bytes {first - file.offset} to {last - file.offset}")
    return ", ".join(places)


def no_files_error(error: OSError, tier: str, path: str, key: str, nbytes: int) -> TransferError:
    """Return what to tell when the files of a new block cannot be made. ``path``: if ``error`` names none."""
    return TransferError(
        f"no files for {format_size(nbytes)} of block '{key}': {error.strerror}. Free space on the drive, "
        f"or give tier '{tier}' fewer bytes",
        tier=tier,
        path=str(error.filename or path),
        errno=error.errno,
    )
