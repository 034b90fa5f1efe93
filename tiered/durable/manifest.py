"""Manifests of generations: the parts of a committed state, their checksums, and the atomic switch to it.

``snap/<generation>/MANIFEST.json`` describes a generation. It is written after all files that it names, so every
generation with a manifest is complete. Then a rename replaces ``MANIFEST.json`` at the top, which names the current
generation for other programs. After a crash, or in a copy of a live directory, the top file may be older. So readers
take the newest complete generation, and report a top file that names another one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiered.errors import GenerationError, NewerFormatError
from tiered.file_io import checksum, read_document_file, replace_file, sync_path
from tiered.units import is_number

MANIFEST_NAME = "MANIFEST.json"
SNAPSHOT_FOLDER = "snap"
#: Format version of manifests. A reader accepts all older versions and refuses newer ones.
MANIFEST_VERSION = 1

#: Maximum bytes of a block (a part of a layer). A larger size is invalid, and would make a reader list its pieces.
_MAX_BYTES = 1 << 44

_BEFORE_BODY = '{"body": '

JSON = None | bool | int | float | str | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block of a generation.

    Attributes:
        home: name of the home tier at the commit.
        xxh3_64: checksum of every 16 MiB of contents, 16 hex digits each.
        location: folder of its zarr array, relative to the directory of the manifest.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    home: str
    nbytes: int
    xxh3_64: tuple[str, ...]
    location: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A generation.

    Attributes:
        generation: number of the generation, at least 1, increasing.
        paths: absolute paths of each file tier at the commit.
        store: id of the store that wrote the generation.
    """

    generation: int
    blocks: tuple[BlockRecord, ...]
    meta: Mapping[str, JSON] = field(default_factory=dict)
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    store: str = ""


def generation_name(generation: int) -> str:
    """Return the folder name of a generation: zero-padded digits, so that names sort like numbers."""
    assert generation >= 0, generation
    return f"{generation:08d}"


def generation_folder(directory: str | os.PathLike[str], generation: int) -> Path:
    """Return the folder of a generation."""
    return Path(directory, SNAPSHOT_FOLDER, generation_name(generation))


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    """Commit a generation: write its manifest, then make the generation current. Both survive a power cut.

    The caller has flushed all files that the manifest names (``flush_contents``, ``Snapshots.sync``).

    Raises:
        OSError: the drive returned an error. The previous generation is still current, or this one if only the last
            flush failed.
    """
    folder = generation_folder(directory, manifest.generation)
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "generation": manifest.generation,
        "meta": manifest.meta,
        "paths": {tier: list(paths) for tier, paths in manifest.paths.items()},
        "store": manifest.store,
        "blocks": [{name: getattr(block, name) for name in BlockRecord.__slots__} for block in manifest.blocks],
    }
    # Flush the manifest and its parent folders before the top file names them: a power cut in between leaves the
    # previous generation current.
    _write_sealed(folder / MANIFEST_NAME, body)
    sync_path(folder.parent)
    sync_path(Path(directory))
    make_current(directory, manifest.generation)


def make_current(directory: str | os.PathLike[str], generation: int) -> None:
    """Make a complete generation the current one. The change survives a power cut. Raises ``OSError``."""
    _write_sealed(Path(directory, MANIFEST_NAME), {"generation": generation})
    _show_latest(Path(directory), generation_folder(directory, generation))


def forget_current(directory: str | os.PathLike[str]) -> None:
    """Remove the top file, so that no generation is current. The change survives a power cut."""
    Path(directory, MANIFEST_NAME).unlink(missing_ok=True)
    _show_latest(Path(directory), None)
    sync_path(Path(directory))


def read_manifest(directory: str | os.PathLike[str], generation: int | None = None) -> Manifest:
    """Return the manifest of a generation (default: the newest one).

    Raises:
        GenerationError: the manifest is missing, is damaged, or was written by a newer version of this package.
    """
    if generation is None:
        return _newest_manifest(directory)
    path = generation_folder(directory, generation) / MANIFEST_NAME
    if not path.exists():
        known = ", ".join(map(str, list_generations(directory))) or "none"
        raise GenerationError(
            f"no generation {generation} in '{os.fspath(directory)}' ('{path}' does not exist). "
            f"Existing generations: {known}"
        )
    body = _read_sealed(path)
    try:
        blocks = tuple(_block_record(record) for record in body["blocks"])
        paths = {tier: tuple(map(str, paths)) for tier, paths in body.get("paths", {}).items()}
        manifest = Manifest(int(body["generation"]), blocks, body["meta"], paths, str(body.get("store", "")))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise GenerationError(f"'{path}' is not a manifest: {error}") from error
    if manifest.generation != generation:
        raise GenerationError(f"'{path}' describes generation {manifest.generation}, not {generation}")
    return manifest


def _newest_manifest(directory: str | os.PathLike[str]) -> Manifest:
    known = newest_first(directory)
    if not known:
        current = current_generation(directory)
        if current is None:
            raise GenerationError(f"nothing was committed in '{os.fspath(directory)}'")
        return read_manifest(directory, current)  # Raises an error with the missing manifest.
    if top_problem(directory) is None:
        return read_manifest(directory, known[0])
    problems = []
    for number in known:
        try:
            return read_manifest(directory, number)
        except NewerFormatError:
            raise
        except GenerationError as error:
            problems.append(error)
    raise problems[0]


def top_problem(directory: str | os.PathLike[str]) -> str | None:
    """Return a sentence that explains why the top file does not name the newest generation, or None if it does.

    Raises:
        NewerFormatError: a newer version of this package wrote the file.
    """
    known, top = list_generations(directory), Path(directory, MANIFEST_NAME)
    try:
        current = current_generation(directory)
    except NewerFormatError:
        raise
    except GenerationError as error:
        return str(error)
    if current == (known[-1] if known else None):
        return None
    found = "is missing" if current is None else f"names generation {current}"
    if current is not None and current not in known:
        found += f", but '{generation_folder(directory, current) / MANIFEST_NAME}' is missing"
    return f"'{top}' {found}, and " + (f"the newest generation is {known[-1]}" if known else "no generation exists")


def _block_record(fields: Mapping[str, Any]) -> BlockRecord:
    """Validate and return a record. Raises ``ValueError``, ``TypeError`` or ``KeyError``.

    The checksum of a manifest proves that the file is intact, not who wrote it, so its contents are validated.
    """
    record = BlockRecord(**{**fields, "shape": tuple(fields["shape"]), "xxh3_64": tuple(fields["xxh3_64"])})
    texts = (record.key, record.dtype, record.home, record.location, *record.xxh3_64)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"block {record.key!r} has a name or a checksum that is not text")
    sizes = (*record.shape, record.nbytes)
    if not all(type(size) is int and 0 <= size < _MAX_BYTES for size in sizes):
        raise ValueError(f"block '{record.key}' has the shape {record.shape} and {record.nbytes} bytes")
    return record


def current_generation(directory: str | os.PathLike[str]) -> int | None:
    """Return the number in the top file, or None without this file. The number may be older than the newest generation.

    Raises:
        GenerationError: the file is damaged or newer than this package.
    """
    path = Path(directory, MANIFEST_NAME)
    if not path.exists():
        return None
    generation = _read_sealed(path).get("generation")
    if not isinstance(generation, int):
        raise GenerationError(f"'{path}' names no generation")
    return generation


def list_generations(directory: str | os.PathLike[str]) -> list[int]:
    """Return the numbers of all generations that have a manifest, oldest first."""
    root = Path(directory, SNAPSHOT_FOLDER)
    if not root.is_dir():
        return []
    folders = (f for f in root.iterdir() if is_number(f.name) and not f.is_symlink())
    return sorted(int(f.name) for f in folders if (f / MANIFEST_NAME).is_file())


def newest_first(directory: str | os.PathLike[str]) -> list[int]:
    """Return the numbers of all generations with a manifest, newest first: the order in which a reader tries them.

    The top file does not matter: the manifest is a generation's last file, so every generation with one is complete.
    """
    return list_generations(directory)[::-1]


def store_id_in_manifests(directory: str | os.PathLike[str]) -> str | None:
    """Return the store id in the newest readable manifest, for a directory that lost its ``STORE.json``."""
    for number in newest_first(directory):
        with contextlib.suppress(GenerationError):
            return read_manifest(directory, number).store or None
    return None


def forget_generation(directory: str | os.PathLike[str], generation: int) -> None:
    """Delete a generation's manifest, so that the generation no longer exists, even after a power cut.

    Delete or reuse its files only afterwards. Another generation must already be current.
    """
    folder = generation_folder(directory, generation)
    if (folder / MANIFEST_NAME).exists():
        (folder / MANIFEST_NAME).unlink()
        sync_path(folder)


def _show_latest(directory: Path, generation: Path | None) -> None:
    # Import here, because only writers need this module, and it imports torch, which would slow down readers.
    from tiered.durable.zarr_folder import show_latest

    show_latest(directory, generation)


def _write_sealed(path: Path, body: Mapping[str, Any]) -> None:
    """Write a JSON file with a version and a checksum of its body. The file survives a power cut."""
    text = json.dumps(body, sort_keys=True)
    replace_file(path, _BEFORE_BODY + text + _after_body(MANIFEST_VERSION, checksum(text.encode())), durable=True)


def _after_body(version: int, seal: str) -> str:
    return f', "format": {json.dumps(version)}, "xxh3_64": {json.dumps(seal)}}}'


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        content = read_document_file(path)
        document = json.loads(content)
        version, expected, body = document["format"], document["xxh3_64"], document["body"]
        is_newer = int(version) > MANIFEST_VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GenerationError(f"'{path}' cannot be read as a manifest: {error}") from error
    if is_newer:
        raise NewerFormatError(f"'{path}' has format {version}, this version reads up to {MANIFEST_VERSION}: upgrade")
    if not isinstance(body, dict) or expected not in _seals_of(content, body, _after_body(version, expected)):
        raise GenerationError(f"'{path}' is damaged: its checksum does not match. Open another generation")
    return body


def _seals_of(content: bytes, body: Mapping[str, Any], after: str) -> Iterator[str]:
    """Yield the valid checksums of a document: of its body as stored in the file, and as serialized now."""
    before, end = _BEFORE_BODY.encode(), after.encode()
    if content.startswith(before) and content.endswith(end):
        yield checksum(memoryview(content)[len(before) : -len(end)])
    yield checksum(json.dumps(body, sort_keys=True).encode())
