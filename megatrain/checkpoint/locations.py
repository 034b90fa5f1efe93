"""Locations of the files of a run's checkpoints: lost parts, bytes on drives, and messages about them.

This module imports neither torch nor a store, so that ``status`` starts fast. It reads no blocks.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, RESOLVED_NAME
from tiered import list_generations, read_manifest
from tiered.errors import GenerationError, TieredError
from tiered.ext import OWNER_NAME, SNAPSHOT_FOLDER, drive_places, holds_part, read_note
from tiered.units import format_size, is_number

if TYPE_CHECKING:
    from megatrain.checkpoint.table import CheckpointSpec
    from tiered import BlockRecord, Manifest
    from tiered.ext import DrivePlace


__all__ = [
    "LostPart",
    "bytes_on_drives",
    "describe_drives",
    "drives_of_config",
    "lost_parts",
    "outside_drives",
    "refused_drives",
]

_ATTRIBUTES_KEY = "megatrain"  # same as in tiered.tiers.layout, which imports torch
_STORE_NAME = "STORE.json"  # same as in tiered.tiers.directory, whose import loads torch


@dataclass(frozen=True, slots=True)
class LostPart:
    """Blocks of a checkpoint that were lost because a drive is missing or was cleared.

    Attributes:
        path: Folder on the drive. For a copied run, the folder of the copy.
        is_there: Whether this path exists. A missing path may mean that the drive is not mounted.
        blocks: Keys of the blocks that had files there, for example ``"model.layers.0/weight"``.
        nbytes: Full size of ``blocks``. A striped block has only some of its bytes on this drive.
        recorded: Path of the drive when the checkpoint was saved.
    """

    path: str
    is_there: bool
    blocks: tuple[str, ...]
    num_blocks: int
    nbytes: int
    recorded: str = ""

    @property
    def place(self) -> str:
        """Description of the location: the path, whether it exists, and the recorded path if it differs."""
        if self.is_there:
            return f"'{self.path}'"
        suffix = f" (it was '{self.recorded}')" if self.recorded not in ("", self.path) else ""
        return f"'{self.path}', which is not there{suffix}"

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(key.rpartition("/")[2].partition(".")[0] for key in self.blocks))
        count = f"{len(self.blocks)} of {self.num_blocks} blocks"
        return f"{count} ({kinds}; {format_size(self.nbytes)}) lay in {self.place}"


def lost_parts(manifest: Manifest, directory: Path, search: Sequence[Path] = ()) -> tuple[LostPart, ...]:
    """Return the parts of a generation that were lost with drives. Empty if a live run has just removed it."""
    missing_parts = _missing_parts(manifest, directory, search)
    if not missing_parts or manifest.generation not in list_generations(directory):
        return ()
    sizes = {record.key: record.nbytes for record in manifest.blocks}
    recorded_paths = {place.path: str(place.recorded) for place in drive_places(manifest, directory)}
    return tuple(
        LostPart(
            str(path),
            os.path.isdir(path),
            keys,
            len(sizes),
            sum(sizes[key] for key in keys),
            recorded_paths.get(path, str(path)),
        )
        for path, keys in missing_parts.items()
    )


def outside_drives(manifest: Manifest, directory: Path, search: Sequence[Path] = ()) -> list[DrivePlace]:
    """Return the drives that contain parts of a generation but were not copied or moved with its directory."""
    places = drive_places(manifest, directory)
    outside_places = [place for place in places if place.is_outside]
    if not outside_places:
        return []
    name, recorded_paths = f"{manifest.generation:08d}", {place.recorded for place in outside_places}
    paths = [path for path in (*search, *(place.path for place in places)) if path not in recorded_paths]
    paths = [path for path in paths if holds_part(path, manifest)]
    folders = [path / SNAPSHOT_FOLDER / name for path in paths]
    return [place for place in outside_places if _has_unique_file(place.path / SNAPSHOT_FOLDER / name, folders)]


def _has_unique_file(snap: Path, other_folders: Sequence[Path]) -> bool:
    """Return whether a folder contains a block file that none of the other folders contains as a regular file."""
    files = (Path(place, file) for place, _, names in os.walk(snap) for file in names if Path(place).name == "c")
    places = ([other / file.relative_to(snap) for other in other_folders] for file in files)
    return any(not any(os.path.isfile(place) and not os.path.islink(place) for place in paths) for paths in places)


def _missing_parts(manifest: Manifest, folder: Path, search: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """Return the drives on which a generation's folder is lost, with the keys of the blocks that had files there.

    A single missing file in an existing folder is not included, because the generation's reader reports it.
    """
    name, drives = f"{manifest.generation:08d}", drive_places(manifest, folder)
    drive_paths = {str(place.path) for place in drives} | _drives_of_locations(manifest, folder, name)
    if all(holds_part(drive, manifest) for drive in drive_paths):
        return {}  # checking each block would be slow with thousands of checkpoints
    moved_paths = {place.recorded: place.path for place in drives}
    lost_keys: dict[Path, dict[str, None]] = {}
    paths = [path for path in (*search, *(place.path for place in drives)) if holds_part(path, manifest)]
    nearby_paths = {place.nearby: place.path for place in drives}
    for block in manifest.blocks:
        depth = block.key.count("/")
        array_folder = Path(os.path.normpath(folder / block.location))
        drive = array_folder.parents[depth + 2]
        drive = nearby_paths.get(drive, drive)
        array_folder = drive / SNAPSHOT_FOLDER / name / block.key
        places = [array_folder, *(path / SNAPSHOT_FOLDER / name / block.key for path in paths)]
        if (num_files := _count_files(block, places)) is None:
            lost_keys.setdefault(drive, {})[block.key] = None
            continue
        for index in range(num_files):
            # ``os.path`` raises no errors, so a failed or unreadable drive counts as lost.
            if not any(os.path.exists(place / "c" / str(index)) for place in places):
                recorded_drive = _recorded_drive(array_folder / "c" / str(index), depth)
                lost_keys.setdefault(moved_paths.get(recorded_drive, recorded_drive), {})[block.key] = None
    return {
        drive: tuple(keys) for drive, keys in lost_keys.items() if drive != folder and not holds_part(drive, manifest)
    }


def _drives_of_locations(manifest: Manifest, folder: Path, name: str) -> set[str]:
    """Return the drives of blocks whose tier has no recorded paths, derived from the locations of these blocks."""
    blocks = [block for block in manifest.blocks if block.home not in manifest.paths]
    prefixes = {block.location.removesuffix(f"{SNAPSHOT_FOLDER}/{name}/{block.key}") for block in blocks}
    return {os.path.normpath(os.path.join(folder, prefix)) for prefix in prefixes}


def bytes_on_drives(output_dir: Path | str, drives: Sequence[Path] = ()) -> dict[Path, int]:
    """Return the bytes that a run's checkpoints occupy on each drive, by path. Hard links count once.

    Args:
        drives: Paths to search, in addition to the paths in the manifests and in the run's last config.
    """
    root = Path(os.path.abspath(output_dir))
    folder = root / CHECKPOINTS_NAME
    drive_bytes = Counter[Path]()
    for store_dir in [folder, *sorted(folder.glob("rank*"))]:
        # With several ranks, each rank has a separate folder on every drive.
        rank = "" if store_dir == folder else store_dir.name
        store = read_note(store_dir / _STORE_NAME).get("id")
        paths = [path.parent if rank and path.name == rank else path for path in _paths_of_tiers(store_dir)]
        for path in dict.fromkeys([*drives, *drives_of_config(root), *paths]):
            nbytes = sum(_chunk_sizes(path / rank / SNAPSHOT_FOLDER, store).values()) if store is not None else 0
            if nbytes:
                drive_bytes[path] += nbytes
    return dict(drive_bytes)


def describe_drives(spec: CheckpointSpec, drive_bytes: int) -> list[str]:
    """Return messages about the checkpoint parts that a run stores on drives: their folders and sizes.

    Args:
        drive_bytes: Planned bytes per checkpoint that stay on drives.
    """
    drives = spec.drives
    used_bytes = bytes_on_drives(spec.output_dir, drives)
    lines = []
    if drive_bytes and spec.table.is_on:
        names = _quote_paths(drives)
        current_bytes = sum(used_bytes.get(path, 0) for path in drives)
        text = f"{format_size(drive_bytes)} of each checkpoint stay in {names} (now {format_size(current_bytes)})"
        lines.append(f"{text}: deleting that folder destroys them. {_advice(spec)}")
    elif any(path in used_bytes for path in drives):
        paths = [path for path in drives if path in used_bytes]
        nbytes = format_size(sum(used_bytes[path] for path in paths))
        lines.append(f"{nbytes} of this run's checkpoints are in {_quote_paths(paths)}: deleting that destroys them")
    old_bytes = {path: nbytes for path, nbytes in used_bytes.items() if path not in drives}
    lines += [
        f"{format_size(size)} of this run's earlier checkpoints are in '{path}'" for path, size in old_bytes.items()
    ]
    return lines


def _advice(spec: CheckpointSpec) -> str:
    rule = spec.table.save_copy
    if rule is False:
        return "checkpoint.save_copy = true keeps whole copies in output_dir"
    subject = {True: "every checkpoint", "last": "the last checkpoint"}.get(rule, f"one checkpoint in {rule}")
    return f"A whole copy of {subject} goes to '{spec.output_dir / COPIES_NAME}'"


def _quote_paths(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


def refused_drives(output_dir: Path | str) -> list[str]:
    """Return the reasons why a run would refuse the drive folders of its last config. Empty if it accepts all."""
    reasons = []
    for path in drives_of_config(Path(os.path.abspath(output_dir))):
        try:
            if not os.listdir(path) or _ATTRIBUTES_KEY in read_note(path / "zarr.json").get("attributes", {}):
                continue
        except (OSError, TypeError):  # the run will create the folder or report the error
            continue
        from tiered.ext import check_claimable  # imported late, because it imports torch

        try:
            check_claimable(path)
        except TieredError as error:
            reasons.append(str(error))
    return reasons


def _paths_of_tiers(directory: Path) -> Iterator[Path]:
    """Yield the current paths of the drives that the generations in a directory use."""
    for generation in list_generations(directory):
        with contextlib.suppress(GenerationError):
            yield from (place.path for place in drive_places(read_manifest(directory, generation), directory))


def _chunk_sizes(root: Path, store: object) -> dict[int, int]:
    """Return the bytes that each chunk file of a store occupies, by inode. A live run may remove files meanwhile."""
    sizes: dict[int, int] = {}
    for name in os.listdir(root) if os.path.isdir(root) else ():
        if not is_number(name) or read_note(root / name / OWNER_NAME).get("id") != store:
            continue
        for place, _, files in os.walk(root / name):
            for file in files if os.path.basename(place) == "c" else ():
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(place, file))
                    if stat.S_ISREG(status.st_mode):
                        sizes[status.st_ino] = status.st_blocks * 512
    return sizes


def _count_files(block: BlockRecord, places: Sequence[Path]) -> int | None:
    """Return the number of files in a block's array, or None if the array's document is missing."""
    for place in places:
        try:
            grid = read_note(place / "zarr.json")["chunk_grid"]
            num_files: int = math.ceil(math.prod(block.shape) / int(grid["configuration"]["chunk_shape"][0]))
            return num_files
        except (LookupError, TypeError, ValueError, ZeroDivisionError):
            continue
    return None


def _recorded_drive(file: Path, depth: int) -> Path:
    """Return the drive path of a missing file, using the target of its link or the location of its array.

    Args:
        file: ``<drive>/snap/<generation>/<key>/c/<number>``.
    """
    target = Path(os.readlink(file)) if os.path.islink(file) else file
    return target.parents[depth + 4]


def drives_of_config(output_dir: Path) -> tuple[Path, ...]:
    """Return the drives from the config of the last run in a folder. Checkpoint parts may have been moved to them.

    As in ``drive_places``, the path relative to ``output_dir`` takes precedence over the recorded path.
    """
    try:
        values = tomllib.loads((output_dir / RESOLVED_NAME).read_text(encoding="utf-8"))
        paths = [Path(table["path"]) for table in values["tiers"]["nvme"]]
        old_dir = values.get("output_dir", output_dir)
        nearby_paths = [Path(os.path.normpath(output_dir / os.path.relpath(path, old_dir))) for path in paths]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    pairs = zip(nearby_paths, paths, strict=True)
    return tuple(near if os.path.isdir(near) or not os.path.isdir(path) else path for near, path in pairs)
