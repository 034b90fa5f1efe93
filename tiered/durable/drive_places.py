"""Current locations of the parts of a committed generation that are on other drives. All readers use this module.

If the directory of generations was copied or moved, these parts may have moved with it. A reader therefore looks for
each part first at the same place relative to the directory, and then at the recorded path.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered.durable.manifest import SNAPSHOT_FOLDER, Manifest, generation_name
from tiered.file_io import read_document_file

OWNER_NAME = "OWNER.json"


@dataclass(frozen=True, slots=True)
class DrivePlace:
    """A file tier's path as recorded in a generation, and its current location.

    Attributes:
        recorded: absolute path at the time of the commit.
        nearby: path with the same position relative to the current directory of generations.
        path: path to read. This is ``recorded`` if only ``recorded`` has a part of the generation or if ``nearby``
            belongs to another store, otherwise ``nearby``.
    """

    recorded: Path
    nearby: Path
    path: Path

    @property
    def is_outside(self) -> bool:
        """Whether the recorded path is read even though the directory was copied or moved."""
        return self.path != self.nearby


def drive_places(manifest: Manifest, directory: Path) -> tuple[DrivePlace, ...]:
    """Return the place of each file-tier path in a manifest. ``directory`` is the current directory of generations."""
    name = generation_name(manifest.generation)
    places: dict[Path, DrivePlace] = {}
    for tier, paths in ((tier, paths) for tier, paths in manifest.paths.items() if paths):
        block = next((block for block in manifest.blocks if block.home == tier), None)
        subfolder = "" if block is None else f"{SNAPSHOT_FOLDER}/{name}/{block.key}"
        # A tier's first path has the arrays. Their location reveals the common parent of this path and the directory.
        location = "." if block is None else os.path.normpath(block.location.removesuffix(subfolder) or ".")
        depth = Path(location).parts.count("..")
        common = os.path.normpath(Path(paths[0], *[".."] * (len(Path(location).parts) - depth)))
        base = Path(os.path.abspath(directory), *[".."] * depth)
        for path in map(Path, paths):
            nearby = path if block is None else Path(os.path.normpath(base / os.path.relpath(path, common)))
            is_moved = nearby != path  # If the directory was not moved, skip reading the ownership notes.
            is_outside = is_moved and not holds_part(nearby, manifest)
            is_outside = is_outside and (holds_part(path, manifest) or _belongs_to_other_store(nearby, manifest.store))
            places[path] = DrivePlace(path, nearby, path if is_outside else nearby)
    return tuple(places.values())


def holds_part(path: Path | str, manifest: Manifest) -> bool:
    """Return whether a path has a snapshot folder with the generation's number that no other store owns."""
    folder = Path(path, SNAPSHOT_FOLDER, generation_name(manifest.generation))
    return os.path.isdir(folder) and read_note(folder / OWNER_NAME).get("id", manifest.store) == manifest.store


def _belongs_to_other_store(path: Path, store: str) -> bool:
    """Return whether a path has snapshots that all belong to other stores, for example to an unrelated run."""
    owners = {read_note(note).get("id", store) for note in path.glob(f"{SNAPSHOT_FOLDER}/*/{OWNER_NAME}")}
    return bool(owners) and store not in owners


def read_note(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file is missing or invalid."""
    try:
        document = json.loads(read_document_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
