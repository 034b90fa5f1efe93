"""What a disk may hold after a power cut: recorded operations, of which those that were not flushed may be lost.

Two kinds of disk. ``strict`` promises no more than POSIX: contents are safe once their file was flushed, names once
their folder was, and everything else survives or not, each on its own; the two halves of a rename between folders too.
``journal`` keeps names in order, as ext4 and xfs do: those up to some moment survive, at least up to the last flush;
contents are lost as in ``strict``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from reference.recorded_disk import Disk, Names, Recording, Resize, Sync, Write

#: What a drive writes whole or not at all.
SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Survival:
    """How much of what was not flushed survives: a share of the names and of the contents, 0 to 1."""

    disk: Literal["strict", "journal"]
    names: float
    contents: float


#: From "nothing that was not flushed" to "everything", and names without contents.
SURVIVALS = tuple(
    Survival(disk, names, contents)
    for disk in ("strict", "journal")
    for names, contents in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.8, 0.5), (0.2, 0.8), (0.0, 1.0), (1.0, 1.0))
)


def cut_power(recording: Recording, cut: int, survival: Survival, chance: random.Random) -> Disk:
    """Return what is on the disk when the power goes after the first ``cut`` operations."""
    operations = recording.operations[:cut]
    synced = {operation.number: index for index, operation in enumerate(operations) if isinstance(operation, Sync)}
    names_until = _journal_end(recording, cut, survival, chance) if survival.disk == "journal" else 0
    disk = recording.blank()
    for index, operation in enumerate(operations):
        match operation:
            case Names() if survival.disk == "journal":
                if index < names_until:
                    disk.rename(operation.changes)
            case Names():
                folders = dict.fromkeys(change[0] for change in operation.changes)
                kept = {f for f in folders if synced.get(f, -1) > index or chance.random() < survival.names}
                disk.rename([change for change in operation.changes if change[0] in kept])
            case Write() if synced.get(operation.file, -1) > index:
                disk.write(operation.file, operation.offset, operation.data)
            case Write():
                _write_torn(disk, operation, survival, chance)
            case Resize() if synced.get(operation.file, -1) > index or chance.random() < survival.contents:
                disk.resize(operation.file, operation.nbytes, grows_only=operation.grows_only)
    return disk


def _write_torn(disk: Disk, operation: Write, survival: Survival, chance: random.Random) -> None:
    """Write all of it, some sectors, or nothing."""
    if chance.random() >= survival.contents:
        return
    if survival.contents == 1 or chance.random() < 0.5:
        disk.write(operation.file, operation.offset, operation.data)
        return
    stop = operation.offset + len(operation.data)
    for start in range(operation.offset - operation.offset % SECTOR_BYTES, stop, SECTOR_BYTES):
        if chance.random() < 0.5:
            first, last = max(start, operation.offset), min(start + SECTOR_BYTES, stop)
            disk.write(operation.file, first, operation.data[first - operation.offset : last - operation.offset])


def _journal_end(recording: Recording, cut: int, survival: Survival, chance: random.Random) -> int:
    """Return before which operation the journal ends: a flush writes it up to the last change of what is flushed."""
    changed: dict[int, int] = {}  # when a file or folder last changed its names or entries
    least = most = 0
    for index, operation in enumerate(recording.operations[:cut]):
        match operation:
            case Names():
                for folder, _, number in operation.changes:
                    changed[folder] = index
                    if number is not None:
                        changed[number] = index
                most = index + 1
            case Sync():
                least = max(least, changed.get(operation.number, -1) + 1)
    if survival.names in (0, 1):
        return most if survival.names else least
    return chance.randint(least, most)
