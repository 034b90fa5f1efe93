"""What was done to the files below a folder: names, contents, flushes, in their order, and how to play it back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 0  # the number of the recorded folder itself

# Every file, folder and symbolic link has a number, its identity however many names it has.
Change = tuple[int, str, int | None]  # in folder, this name now means this number, or nothing


@dataclass(frozen=True, slots=True)
class Names:
    """Names changed: one change, or the two halves of a rename, the new name first."""

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
    """What the recorded program said about itself."""

    text: str
    place: str = ""


Operation = Names | Write | Resize | Sync | Mark


@dataclass
class Disk:
    """A tree of files: folders by number with their names, files with their bytes, links with their targets."""

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
        """Yield (path, number) of everything that has a name, folders before what is in them."""
        for name, number in sorted(self.folders[folder].items()):
            yield prefix + name, number
            if number in self.folders:
                yield from self.walk(number, f"{prefix}{name}/")

    def listing(self) -> dict[str, tuple[str, str | bytes]]:
        """Return what can be seen: by path, the first path with the same contents, and contents or target."""
        first: dict[int, str] = {}
        seen: dict[str, tuple[str, str | bytes]] = {}
        for path, number in self.walk():
            same = first.setdefault(number, path)
            seen[path] = (same, self.links.get(number) or bytes(self.files.get(number, b"folder")))
        return seen

    def make(self, root: Path) -> None:
        """Make this tree in an empty folder; several names of a file become hard links."""
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
    """What was there first, and every operation since. Everything there first counts as safely on the disk."""

    root: Path
    start: Disk
    operations: list[Operation] = field(default_factory=list)
    new: Disk = field(default_factory=Disk)  # what was made since, empty: folders, files and links by number

    def blank(self) -> Disk:
        """Return the first tree, with everything made later present but nameless and empty."""
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
    """Return the tree below a folder, and the numbers of its inodes."""
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
