"""Ownership of snapshots: a store's identity, and the note of it in every folder that it makes on a shared path.

Several stores may use one path of a file tier, one after the other. ``STORE.json`` in its directory of generations
names a store; ``OWNER.json`` in ``snap/<generation>/`` names its owner. A store removes only what it owns.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered.durable.drive_places import OWNER_NAME, read_note
from tiered.durable.manifest import SNAPSHOT_FOLDER
from tiered.file_io import checksum, write_json
from tiered.tiers.directory import STORE_NAME
from tiered.units import is_number

_UNFINISHED_NOTE = Path(OWNER_NAME).with_suffix(".tmp").name
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a folder: the store's id, and where its generations were when it was made ("": unreadable)."""

    id: str
    path: str


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """A store's id (32 hexadecimal digits), and the directory of its generations, absolute."""

    id: str
    path: Path

    @classmethod
    def of(cls, path: Path, known_id: str | None = None) -> StoreIdentity:
        """Return the identity of the store of a directory that the caller has locked; a new store gets one.

        Args:
            known_id: id for a directory that has lost its note.
        """
        found = read_store_id(path)
        if found is None:
            found = known_id or uuid.uuid4().hex
            write_json(path / STORE_NAME, {"id": found}, durable=True)
        return cls(found, path)

    def mark(self, folder: Path) -> None:
        """Make a folder with a note that this store owns it; not flushed."""
        folder.mkdir(parents=True, exist_ok=True)
        path = str(self.path)
        write_json(folder / OWNER_NAME, {"id": self.id, "path": path, "xxh3_64": _seal(self.id, path)})

    def owns(self, folder: Path) -> bool:
        """Return whether a folder ``<path>/snap/<generation>`` is this store's.

        In the store's own directory it is, unless its note names another store. Elsewhere its note decides, also
        after that directory was moved here; but not if this directory is only a copy of that one.
        """
        owner = read_owner(folder)
        # The real path: a link into another user's files does not make them this store's.
        is_here = _is_same(Path(os.path.realpath(folder)).parent.parent, self.path)
        if owner is None or is_here:
            return is_here and (owner is None or owner.id == self.id)
        if owner.id != self.id:
            return False
        return _is_same(Path(owner.path), self.path) or read_store_id(Path(owner.path)) != self.id


def read_store_id(directory: Path) -> str | None:
    """Return the id of the store of a directory of generations, or None."""
    found = read_note(directory / STORE_NAME)
    return found["id"] if _is_id(found.get("id")) else None


def read_owner(folder: Path) -> Owner | None:
    """Return the owner noted in a folder, None without a note; a damaged note is an owner without id."""
    if not (folder / OWNER_NAME).exists():
        return None
    found = read_note(folder / OWNER_NAME)
    owner, path = str(found.get("id")), str(found.get("path"))
    return Owner(owner, path) if _is_id(owner) and found.get("xxh3_64") == _seal(owner, path) else Owner("", "")


def snapshot_folders(paths: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[int, Path]]:
    """Yield (generation, folder) of everything under ``snap/`` of these paths, of any store, except links."""
    for path in paths:
        snap = Path(path, SNAPSHOT_FOLDER)
        for folder in sorted(snap.iterdir()) if snap.is_dir() else ():
            if is_number(folder.name) and folder.is_dir() and not folder.is_symlink():
                yield int(folder.name), folder


def numbers_taken(paths: Sequence[str | os.PathLike[str]]) -> set[int]:
    """Return the numbers that have an entry of any kind under ``snap/`` of these paths, even a link."""
    snaps = [snap for path in paths if (snap := Path(path, SNAPSHOT_FOLDER)).is_dir()]
    return {int(entry.name) for snap in snaps for entry in snap.iterdir() if is_number(entry.name)}


def remove_snapshot_folder(folder: Path) -> None:
    """Delete a folder of ``snap/``, its ownership note last, so that a crash leaves no folder without owner."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != OWNER_NAME:
                entry.unlink()
        (folder / OWNER_NAME).unlink(missing_ok=True)
        folder.rmdir()


def remove_if_empty(folder: Path) -> None:
    """Delete a folder of ``snap/`` that a crash left without a note of ownership, if nothing else is in it."""
    if {entry.name for entry in folder.iterdir()} <= {_UNFINISHED_NOTE}:
        (folder / _UNFINISHED_NOTE).unlink(missing_ok=True)
        folder.rmdir()


def _seal(owner: str, path: str) -> str:
    return checksum(f"{owner} {path}".encode())


def _is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two names mean one existing directory."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
