"""Where the bytes of a run's checkpoints lie, and whether they are still there, by names and sizes alone.

Imports neither torch nor the store, so that ``status`` answers at once. Contents are compared when they are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "CHECKPOINTS_NAME",
    "COPIES_NAME",
    "Lost",
    "SavedCheckpoint",
    "bytes_on_drives",
    "in_order",
    "missing_parts",
    "saved_checkpoints",
    "usable_checkpoint",
]

#: Where checkpoints, and whole copies of them, go inside ``output_dir``.
CHECKPOINTS_NAME = "checkpoints"
COPIES_NAME = "copies"
_RESOLVED_NAME = "config.resolved.toml"  # of megatrain.config.resolved, which imports torch
_MANIFEST_NAME, _SNAPSHOT_FOLDER = "MANIFEST.json", "snap"  # of tiered.durable.manifest
_RANKS_NAME = "RANKS.json"  # of megatrain.checkpoint.ranks
_Kind = TypeVar("_Kind")
_STORE_NAME, _OWNER_NAME = "STORE.json", "OWNER.json"  # of tiered.tiers.directory and ownership


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint as its manifest describes it.

    Attributes:
        step: steps done.
        generation: its number in its folder.
        saved_at: date and time, ISO 8601.
        is_copy: whether it is a whole copy in ``copies/``.
        missing: paths of drives on which parts of it are gone; none: it is whole, as far as names tell.
    """

    step: int
    generation: int
    saved_at: str
    is_copy: bool
    missing: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Checkpoints whose parts on drives are gone, for messages.

    Attributes:
        steps: ascending.
        paths: where the parts lay.
    """

    steps: tuple[int, ...]
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, checkpoints: Sequence[SavedCheckpoint]) -> Lost | None:
        """Return what is lost of these, None if nothing is."""
        lost = [checkpoint for checkpoint in checkpoints if checkpoint.missing]
        if not lost:
            return None
        steps = tuple(sorted({checkpoint.step for checkpoint in lost}))
        paths = tuple(dict.fromkeys(path for checkpoint in lost for path in checkpoint.missing))
        return cls(steps, paths)

    def __str__(self) -> str:
        what = "checkpoint of step" if len(self.steps) == 1 else "checkpoints of steps"
        steps = ", ".join(map(str, self.steps))
        verb = "is" if len(self.steps) == 1 else "are"
        states = (f"'{path}'" + ("" if os.path.isdir(path) else ", which is not there") for path in self.paths)
        return f"the {what} {steps} {verb} gone: parts of {'it' if verb == 'is' else 'them'} lay in {'; '.join(states)}"


def usable_checkpoint(output_dir: Path | str) -> SavedCheckpoint | None:
    """Return the checkpoint that a run in this folder would continue from, or None."""
    return next((checkpoint for checkpoint in saved_checkpoints(output_dir) if not checkpoint.missing), None)


def saved_checkpoints(output_dir: Path | str, drives: Sequence[Path] = ()) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run and their copies, in the order in which a run would try them.

    Those whose manifest makes no sense are left out.

    Args:
        drives: paths where parts may have moved, besides those that the last config of the run names.
    """
    root = Path(os.path.abspath(output_dir))
    search = tuple(dict.fromkeys([*drives, *_drives_of_config(root)]))
    own = list(_described(root / CHECKPOINTS_NAME, search, is_copy=False))
    of_ranks = list(_of_ranks(root / CHECKPOINTS_NAME, is_copy=False))
    own = in_order(own, of_ranks, lambda checkpoint: checkpoint.saved_at)
    copies = list(_described(root / COPIES_NAME, (), is_copy=True))
    of_ranks = list(_of_ranks(root / COPIES_NAME, is_copy=True))
    copies = in_order(copies, of_ranks, lambda checkpoint: checkpoint.saved_at)
    return in_order(own, copies, lambda checkpoint: checkpoint.saved_at)


def in_order(own: Sequence[_Kind], copies: Sequence[_Kind], saved_at: Callable[[_Kind], str]) -> list[_Kind]:
    """Return checkpoints and copies in one order, the newest first, a copy after what it is a copy of.

    Args:
        own: checkpoints of the run, newest first.
        copies: whole copies, newest first.
        saved_at: when one was saved, ISO 8601.
    """
    merged, left = [], list(copies)
    for checkpoint in own:
        while left and saved_at(left[0]) > saved_at(checkpoint):
            merged.append(left.pop(0))
        merged.append(checkpoint)
    return [*merged, *left]


def missing_parts(manifest: dict[str, Any], folder: Path, search: Sequence[Path] = ()) -> dict[Path, tuple[str, ...]]:
    """Return the drives on which the folder of a generation is gone, each with the blocks that had files there.

    No contents are read.

    A file that is missing in a folder that is there is damage: the reader of the generation names it.

    Args:
        manifest: the body of its manifest.
        folder: directory of generations.
        search: paths where parts may have moved.
    """
    name = f"{manifest['generation']:08d}"
    missing: dict[Path, dict[str, None]] = {}
    for block in manifest["blocks"]:
        named = Path(os.path.normpath(folder / block["location"]))
        places = [named, *(path / _SNAPSHOT_FOLDER / name / block["key"] for path in search)]
        written = [Path(path) for path in manifest.get("paths", {}).get(block["home"], ())]
        places += [path / _SNAPSHOT_FOLDER / name / block["key"] for path in written]
        depth = block["key"].count("/")
        drive = named.parents[depth + 2]
        if (num_files := _num_files(block, places)) is None:
            missing.setdefault(drive, {})[block["key"]] = None
            continue
        for number in range(num_files):
            # A drive that died, or that this user may not read, is as good as gone: ``os.path`` raises nothing.
            if not any(os.path.exists(place / "c" / str(number)) for place in places):
                missing.setdefault(_where_it_lay(named / "c" / str(number), depth), {})[block["key"]] = None
    return {
        drive: tuple(keys)
        for drive, keys in missing.items()
        if drive != folder and not os.path.isdir(drive / _SNAPSHOT_FOLDER / name)
    }


def bytes_on_drives(output_dir: Path | str, drives: Sequence[Path] = ()) -> dict[Path, int]:
    """Return path of a drive -> bytes of this run's checkpoints that lie there, each file counted once.

    Args:
        drives: paths to look at besides those that the manifests and the last config of the run name.
    """
    root = Path(os.path.abspath(output_dir))
    folder = root / CHECKPOINTS_NAME
    found = Counter[Path]()
    for own in [folder, *sorted(folder.glob("rank*"))]:
        # Of several ranks each has a folder of its own on every drive.
        inside = "" if own == folder else own.name
        store = _read(own / _STORE_NAME).get("id")
        named = [Path(path) for body in _bodies(own) for paths in body.get("paths", {}).values() for path in paths]
        named = [path.parent if inside and path.name == inside else path for path in named]
        for path in dict.fromkeys([*drives, *_drives_of_config(root), *named]):
            nbytes = sum(_bytes_of(path / inside / _SNAPSHOT_FOLDER, store).values()) if store is not None else 0
            if nbytes:
                found[path] += nbytes
    return dict(found)


def _bytes_of(snap: Path, store: object) -> dict[int, int]:
    """Return inode -> bytes of the chunk files in the snapshots of one store, of which a living run may remove some."""
    sizes: dict[int, int] = {}
    for name in os.listdir(snap) if os.path.isdir(snap) else ():
        if not name.isdigit() or _read(snap / name / _OWNER_NAME).get("id") != store:
            continue
        for place, _, files in os.walk(snap / name):
            for file in files if os.path.basename(place) == "c" else ():
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(place, file))
                    if stat.S_ISREG(status.st_mode):
                        sizes[status.st_ino] = status.st_blocks * 512
    return sizes


def _described(folder: Path, search: Sequence[Path], *, is_copy: bool) -> Iterator[SavedCheckpoint]:
    """Yield what manifests say; nothing where the newest is no checkpoint of ours, which a run would refuse."""
    for number, body in enumerate(_bodies(folder)):
        try:
            meta, generation = body["meta"], int(body["generation"])
            step, missing = int(meta["step"]), tuple(missing_parts(body, folder, search))
            if missing and not (folder / _SNAPSHOT_FOLDER / f"{generation:08d}" / _MANIFEST_NAME).exists():
                continue  # a living run has just removed it: the manifest first
            yield SavedCheckpoint(step, generation, str(meta.get("saved_at", "")), is_copy, missing)
        except (LookupError, TypeError, ValueError, AttributeError):
            if number == 0:
                return


def _of_ranks(folder: Path, *, is_copy: bool) -> Iterator[SavedCheckpoint]:
    """Yield the checkpoints of several ranks, newest first: where their parts lie the manifests of the ranks say."""
    found = _read(folder / _RANKS_NAME).get("checkpoints")
    for each in reversed(found if isinstance(found, list) else []):
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            meta = each["meta"]
            yield SavedCheckpoint(int(meta["step"]), int(each["number"]), str(meta.get("saved_at", "")), is_copy, ())


def _bodies(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifests of a directory of generations that are current or older, the newest first."""
    snap = folder / _SNAPSHOT_FOLDER
    try:
        names = sorted((entry.name for entry in snap.iterdir() if entry.name.isdigit()), reverse=True)
    except OSError:
        return
    top = _read(folder / _MANIFEST_NAME).get("body")
    current = top.get("generation") if isinstance(top, dict) else None
    for name in names:
        body = _read(snap / name / _MANIFEST_NAME).get("body")
        if isinstance(body, dict) and (not isinstance(current, int) or int(name) <= current):
            yield body


def _num_files(block: dict[str, Any], places: Sequence[Path]) -> int | None:
    """Return how many files the array of a block has, None if its document is nowhere."""
    for place in places:
        try:
            grid = _read(place / "zarr.json")["chunk_grid"]
            num_files: int = math.ceil(math.prod(block["shape"]) / int(grid["configuration"]["chunk_shape"][0]))
            return num_files
        except (LookupError, TypeError, ValueError, ZeroDivisionError):
            continue
    return None


def _where_it_lay(file: Path, depth: int) -> Path:
    """Return the path of the drive that a missing file was on: where its link points, or where the array is.

    Args:
        file: ``<drive>/snap/<generation>/<key>/c/<number>``.
        depth: slashes in the key.
    """
    target = Path(os.readlink(file)) if os.path.islink(file) else file
    return target.parents[depth + 4]


def _drives_of_config(output_dir: Path) -> tuple[Path, ...]:
    """Return the drives that the config of the last run in a folder names: parts of checkpoints may have moved."""
    try:
        values = tomllib.loads((output_dir / _RESOLVED_NAME).read_text(encoding="utf-8"))
        return tuple(Path(table["path"]) for table in values["tiers"]["nvme"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
