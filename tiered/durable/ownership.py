"""Ownership of snapshots. A store puts a note with its identity into every folder that it creates on a shared path.

Several stores can use the same path of a file tier, one at a time. ``STORE.json`` in the directory of generations has
the store's id; ``OWNER.json`` in ``snap/<generation>/`` has the owner's id. A store removes only folders that it owns.
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
from tiered.durable.manifest import SNAPSHOT_FOLDER, store_id_in_manifests
from tiered.file_io import checksum, write_json
from tiered.tiers.directory import STORE_NAME
from tiered.units import is_number

_UNFINISHED_NOTE = Path(OWNER_NAME).with_suffix(".tmp").name
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Owner:
    """Contents of an ownership note: the store's id and directory. Both are "" if the note is damaged."""

    id: str
    path: str


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """A store's id (32 hexadecimal digits) and the absolute path of its directory of generations."""

    id: str
    path: Path

    @classmethod
    def of(cls, path: Path) -> StoreIdentity:
        """Return the identity of the store in a locked directory, creating one if there is none.

        If ``STORE.json`` is lost, the id is taken from the directory's manifests.
        """
        store_id = read_store_id(path)
        if store_id is None:
            store_id = store_id_in_manifests(path) or uuid.uuid4().hex
            write_json(path / STORE_NAME, {"id": store_id}, durable=True)
        return cls(store_id, path)

    def mark(self, folder: Path) -> None:
        """Create a folder and write a note that this store owns it. Does not flush the note."""
        folder.mkdir(parents=True, exist_ok=True)
        path = str(self.path)
        write_json(folder / OWNER_NAME, {"id": self.id, "path": path, "xxh3_64": _note_digest(self.id, path)})

    def owns(self, folder: Path) -> bool:
        """Return whether this store owns a folder ``<path>/snap/<generation>``.

        In its own directory, the store owns folders with its own note or without a note. Elsewhere, the note must have
        this store's id. If the note names another directory, the store must have been moved from there, not copied.
        """
        owner = read_owner(folder)
        # Resolve links, because this store does not own another user's files behind a link.
        is_in_own_directory = _is_same_folder(Path(os.path.realpath(folder)).parent.parent, self.path)
        if owner is None or is_in_own_directory:
            return is_in_own_directory and (owner is None or owner.id == self.id)
        if owner.id != self.id:
            return False
        return _is_same_folder(Path(owner.path), self.path) or read_store_id(Path(owner.path)) != self.id


def read_store_id(directory: Path) -> str | None:
    """Return the store id of a directory of generations, or None if ``STORE.json`` is missing or invalid."""
    note = read_note(directory / STORE_NAME)
    return note["id"] if _is_id(note.get("id")) else None


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of a folder, or None if the folder has no note. If the note is damaged, the owner has no id."""
    if not (folder / OWNER_NAME).exists():
        return None
    note = read_note(folder / OWNER_NAME)
    owner, path = str(note.get("id")), str(note.get("path"))
    return Owner(owner, path) if _is_id(owner) and note.get("xxh3_64") == _note_digest(owner, path) else Owner("", "")


def snapshot_folders(paths: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[int, Path]]:
    """Yield (generation, folder) for all snapshot folders on these paths, of any store. Skips links."""
    for path in paths:
        root = Path(path, SNAPSHOT_FOLDER)
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if is_number(folder.name) and folder.is_dir() and not folder.is_symlink():
                yield int(folder.name), folder


def used_numbers(paths: Sequence[str | os.PathLike[str]]) -> set[int]:
    """Return the generation numbers that name entries in ``snap/`` on these paths, including files and links."""
    roots = [root for path in paths if (root := Path(path, SNAPSHOT_FOLDER)).is_dir()]
    return {int(entry.name) for root in roots for entry in root.iterdir() if is_number(entry.name)}


def remove_snapshot_folder(folder: Path) -> None:
    """Delete a folder in ``snap/``, and its ownership note last, so that a crash leaves no unowned folder."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != OWNER_NAME:
                entry.unlink()
        (folder / OWNER_NAME).unlink(missing_ok=True)
        folder.rmdir()


def remove_if_empty(folder: Path) -> None:
    """Delete a folder in ``snap/`` if a crash left it empty or with only an unfinished ownership note."""
    if {entry.name for entry in folder.iterdir()} <= {_UNFINISHED_NOTE}:
        (folder / _UNFINISHED_NOTE).unlink(missing_ok=True)
        folder.rmdir()


def _note_digest(owner: str, path: str) -> str:
    return checksum(f"{owner} {path}".encode())


def _is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _is_same_folder(path: Path, other_path: Path) -> bool:
    """Return whether two paths name the same existing directory."""
    try:
        return os.path.samefile(path, other_path)
    except OSError:
        return False
