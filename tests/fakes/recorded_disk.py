"""A software disk that replays recorded file operations, completely or up to a power cut."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = 0  # the number of the recorded folder itself

# A number identifies each file, folder and symbolic link, independently of its names.
Change = tuple[int, str, int | None]  # (folder's number, name, number of the named item, or None if removed)


@dataclass(frozen=True, slots=True)
class Names:
    """Change of one name, or the two changes of a rename, with the new name first."""

    changes: tuple[Change, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Write:
    file: int
    offset: int
    data: bytes
    place: str


@dataclass(frozen=True, slots=True)
class Resize:
    file: int
    nbytes: int
    grows_only: bool
    place: str


@dataclass(frozen=True, slots=True)
class Sync:
    number: int
    place: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Message that the recorded program left in the recording."""

    text: str
    place: str = ""


Operation = Names | Write | Resize | Sync | Mark


@dataclass
class Disk:
    """File tree: the names in each folder, the bytes of each file, and the target of each link, by number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)

    def copy(self) -> Disk:
        folders = {number: dict(names) for number, names in self.folders.items()}
        return Disk(folders, {number: bytearray(data) for number, data in self.files.items()}, dict(self.links))

    def rename(self, changes: Sequence[Change]) -> None:
        for folder, name, number in changes:
            names = self.folders[folder]
            if number is None:
                names.pop(name, None)
            else:
                names[name] = number

    def write(self, file: int, offset: int, data: bytes) -> None:
        contents = self.files[file]
        if len(contents) < offset + len(data):
            contents.extend(bytes(offset + len(data) - len(contents)))
        contents[offset : offset + len(data)] = data

    def resize(self, file: int, nbytes: int, *, grows_only: bool) -> None:
        contents = self.files[file]
        if len(contents) < nbytes:
            contents.extend(bytes(nbytes - len(contents)))
        elif not grows_only:
            del contents[nbytes:]

    def walk(self, folder: int = ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield (path, number) of every named item, each folder before its contents."""
        for name, number in sorted(self.folders[folder].items()):
            yield prefix + name, number
            if number in self.folders:
                yield from self.walk(number, f"{prefix}{name}/")

    def listing(self) -> dict[str, tuple[str, str | bytes]]:
        """Return the visible state: path -> (first path of the same item, the item's contents or link target)."""
        first: dict[int, str] = {}
        seen: dict[str, tuple[str, str | bytes]] = {}
        for path, number in self.walk():
            same = first.setdefault(number, path)
            seen[path] = (same, self.links.get(number) or bytes(self.files.get(number, b"folder")))
        return seen

    def make(self, root: Path) -> None:
        """Write this tree to an empty folder. If a file has several names, they become hard links."""
        made: dict[int, Path] = {}
        for name, number in self.walk():
            path = root / name
            if number in self.folders:
                path.mkdir()
            elif number in self.links:
                path.symlink_to(self.links[number])
            elif number in made:
                os.link(made[number], path)
            else:
                path.write_bytes(self.files[number])
                made[number] = path


@dataclass
class Recording:
    """Initial file tree, which counts as flushed, and all later operations."""

    root: Path
    start: Disk
    operations: list[Operation] = field(default_factory=list)
    new: Disk = field(default_factory=Disk)  # items created during the recording; files and folders are empty

    def blank(self) -> Disk:
        """Return the initial tree, plus all items created later, which have no contents or names yet."""
        disk = self.start.copy()
        disk.folders |= {number: {} for number in self.new.folders if number != ROOT}
        disk.files |= {number: bytearray() for number in self.new.files}
        disk.links |= self.new.links
        return disk

    def disk(self) -> Disk:
        """Return the tree after all operations."""
        disk = self.blank()
        for operation in self.operations:
            match operation:
                case Names():
                    disk.rename(operation.changes)
                case Write():
                    disk.write(operation.file, operation.offset, operation.data)
                case Resize():
                    disk.resize(operation.file, operation.nbytes, grows_only=operation.grows_only)
        return disk

    def mark(self, text: str) -> None:
        self.operations.append(Mark(text))


def scan(root: Path) -> tuple[Disk, dict[tuple[int, int], int]]:
    """Return the tree of a folder, and a mapping from (device, inode) to item number."""
    disk = Disk()
    status = root.stat()
    numbers = {(status.st_dev, status.st_ino): ROOT}

    def read(folder: Path, names: dict[str, int]) -> None:
        for path in sorted(folder.iterdir()):
            status = path.lstat()
            is_new = (status.st_dev, status.st_ino) not in numbers
            number = names[path.name] = numbers.setdefault((status.st_dev, status.st_ino), len(numbers))
            if path.is_symlink():
                disk.links[number] = os.readlink(path)
            elif path.is_dir():
                disk.folders[number] = {}
                read(path, disk.folders[number])
            elif is_new:
                disk.files[number] = bytearray(path.read_bytes())

    read(root, disk.folders[ROOT])
    return disk, numbers


#: Number of bytes that a drive writes atomically.
SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Survival:
    """Behavior of a disk at a power cut.

    ``names`` and ``contents`` say how likely unflushed changes are to survive, from 0 (never) to 1 (always).
    """

    disk: Literal["strict", "journal"]
    names: float
    contents: float


#: Cases from losing all unflushed data to keeping all of it, including names that survive without their contents.
SURVIVALS = tuple(
    Survival(disk, names, contents)
    for disk in ("strict", "journal")
    for names, contents in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.8, 0.5), (0.2, 0.8), (0.0, 1.0), (1.0, 1.0))
)


def cut_power(recording: Recording, cut: int, survival: Survival, chance: random.Random) -> Disk:
    """Return the disk after a power cut that occurs right after the first ``cut`` operations."""
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
    """Apply an unflushed write completely, partly (some of its sectors), or not at all."""
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
    """Return the index of the first operation that is missing from the journal on disk.

    Flushing an item writes the journal at least up to the item's last change.
    """
    changed: dict[int, int] = {}  # item's number -> index of the last change of its names or entries
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
