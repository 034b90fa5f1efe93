"""Manifests of generations. A manifest lists a generation's blocks with their checksums and locations.

``snap/<generation>/MANIFEST.json`` describes a generation. It is written after all files that it names, so every
generation with a manifest is complete. Then a rename atomically replaces the top-level ``MANIFEST.json`` next to
``snap``, which names the current generation for other programs. After a crash, or in a copy of a live directory, it may
name an older generation. Readers therefore take the newest complete generation, and report an outdated file.
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
#: Format version of manifests. Readers accept older versions and refuse newer versions.
MANIFEST_VERSION = 1

#: Maximum size of a block in bytes. Larger sizes are refused, because readers list every 16 MiB piece.
_MAX_BYTES = 1 << 44

_BODY_PREFIX = '{"body": '

JSON = None | bool | int | float | str | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Manifest entry for one block.

    Attributes:
        home: name of the home tier at the time of the commit.
        xxh3_64: checksums of all pieces (16 MiB of contents), 16 hex digits each.
        location: folder of the block's zarr array, relative to the directory of generations.
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
    """Contents of a generation's manifest.

    Attributes:
        generation: generation number. Numbers start at 1 and increase.
        paths: absolute paths of each file tier at the time of the commit, by tier name.
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


def manifest_text(manifest: Manifest) -> str:
    """Return the text of ``snap/<generation>/MANIFEST.json``."""
    body = {
        "generation": manifest.generation,
        "meta": manifest.meta,
        "paths": {tier: list(paths) for tier, paths in manifest.paths.items()},
        "store": manifest.store,
        "blocks": [{name: getattr(block, name) for name in BlockRecord.__slots__} for block in manifest.blocks],
    }
    return _checksummed_text(body)


def top_text(generation: int) -> str:
    """Return the text of the top-level ``MANIFEST.json`` that names a generation."""
    return _checksummed_text({"generation": generation})


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    """Commit a generation: write its manifest, then make the generation current. Both steps survive a power cut.

    The caller must have flushed all files that the manifest names (``flush_contents``, ``Snapshots.sync``).

    Raises:
        OSError: the drive returned an error. The previous generation is still current. If only the last flush failed,
            the new generation is current.
    """
    folder = generation_folder(directory, manifest.generation)
    folder.mkdir(parents=True, exist_ok=True)
    # Flush the manifest and its parent folders before ``make_current`` replaces the top-level file. If the power fails,
    # the previous generation stays current.
    replace_file(folder / MANIFEST_NAME, manifest_text(manifest), durable=True)
    sync_path(folder.parent)
    sync_path(Path(directory))
    make_current(directory, manifest.generation)


def make_current(directory: str | os.PathLike[str], generation: int) -> None:
    """Make a complete generation the current one. The change survives a power cut. Raises ``OSError``."""
    replace_file(Path(directory, MANIFEST_NAME), top_text(generation), durable=True)
    _show_latest(Path(directory), generation_folder(directory, generation))


def forget_current(directory: str | os.PathLike[str]) -> None:
    """Remove the top-level ``MANIFEST.json``, so that no generation is current. The change survives a power cut."""
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
        generations = ", ".join(map(str, list_generations(directory))) or "none"
        raise GenerationError(
            f"no generation {generation} in '{os.fspath(directory)}' ('{path}' does not exist). "
            f"Existing generations: {generations}"
        )
    body = _read_checksummed(path)
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
    generations = newest_first(directory)
    if not generations:
        current = current_generation(directory)
        if current is None:
            raise GenerationError(f"nothing was committed in '{os.fspath(directory)}'")
        return read_manifest(directory, current)  # This raises an error that names the missing manifest.
    if top_problem(directory) is None:
        return read_manifest(directory, generations[0])
    problems = []
    for generation in generations:
        try:
            return read_manifest(directory, generation)
        except NewerFormatError:
            raise
        except GenerationError as error:
            problems.append(error)
    raise problems[0]


def top_problem(directory: str | os.PathLike[str]) -> str | None:
    """Explain why the top-level ``MANIFEST.json`` does not name the newest generation. Return None if it does.

    Raises:
        NewerFormatError: a newer version of this package wrote the file.
    """
    generations, path = list_generations(directory), Path(directory, MANIFEST_NAME)
    try:
        current = current_generation(directory)
    except NewerFormatError:
        raise
    except GenerationError as error:
        return str(error)
    if current == (generations[-1] if generations else None):
        return None
    status = "is missing" if current is None else f"names generation {current}"
    if current is not None and current not in generations:
        status += f", but '{generation_folder(directory, current) / MANIFEST_NAME}' is missing"
    newest = f"the newest generation is {generations[-1]}" if generations else "no generation exists"
    return f"'{path}' {status}, and {newest}"


def _block_record(fields: Mapping[str, Any]) -> BlockRecord:
    """Validate and return a record. Raises ``ValueError``, ``TypeError`` or ``KeyError``.

    The manifest's checksum proves only that the file is undamaged, not who wrote it, so the contents are validated.
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
    """Return the generation number in the top-level ``MANIFEST.json``, or None without this file. It may be outdated.

    Raises:
        GenerationError: the file is damaged, or a newer version of this package wrote it.
    """
    path = Path(directory, MANIFEST_NAME)
    if not path.exists():
        return None
    generation = _read_checksummed(path).get("generation")
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
    """Return the numbers of all generations with a manifest, newest first. Readers try them in this order.

    Ignores the top-level file. A manifest is written last, so every generation with a manifest is complete.
    """
    return list_generations(directory)[::-1]


def store_id_in_manifests(directory: str | os.PathLike[str]) -> str | None:
    """Return the store id from the newest readable manifest, for a directory that has lost its ``STORE.json``."""
    for generation in newest_first(directory):
        with contextlib.suppress(GenerationError):
            return read_manifest(directory, generation).store or None
    return None


def forget_generation(directory: str | os.PathLike[str], generation: int) -> None:
    """Delete a generation's manifest. The generation then no longer exists, even after a power cut.

    Another generation must already be current. Delete or reuse the generation's files only after this call.
    """
    folder = generation_folder(directory, generation)
    if (folder / MANIFEST_NAME).exists():
        (folder / MANIFEST_NAME).unlink()
        sync_path(folder)


def _show_latest(directory: Path, generation: Path | None) -> None:
    # Import here, because only writers need this module. It imports torch, which would slow down readers.
    from tiered.durable.zarr_folder import show_latest

    show_latest(directory, generation)


def _checksummed_text(body: Mapping[str, Any]) -> str:
    """Return a JSON document with a body, a version and a checksum of the body."""
    text = json.dumps(body, sort_keys=True)
    return _BODY_PREFIX + text + _body_suffix(MANIFEST_VERSION, checksum(text.encode()))


def _body_suffix(version: int, digest: str) -> str:
    return f', "format": {json.dumps(version)}, "xxh3_64": {json.dumps(digest)}}}'


def _read_checksummed(path: Path) -> dict[str, Any]:
    try:
        content = read_document_file(path)
        document = json.loads(content)
        version, expected, body = document["format"], document["xxh3_64"], document["body"]
        is_newer = int(version) > MANIFEST_VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GenerationError(f"'{path}' cannot be read as a manifest: {error}") from error
    if is_newer:
        raise NewerFormatError(f"'{path}' has format {version}, this version reads up to {MANIFEST_VERSION}: upgrade")
    if not isinstance(body, dict) or expected not in _valid_checksums(content, body, _body_suffix(version, expected)):
        raise GenerationError(f"'{path}' is damaged: its checksum does not match. Open another generation")
    return body


def _valid_checksums(content: bytes, body: Mapping[str, Any], suffix: str) -> Iterator[str]:
    """Yield the valid checksums of a document: of the stored text of the body, and of the reserialized body."""
    prefix, suffix_bytes = _BODY_PREFIX.encode(), suffix.encode()
    if content.startswith(prefix) and content.endswith(suffix_bytes):
        yield checksum(memoryview(content)[len(prefix) : -len(suffix_bytes)])
    yield checksum(json.dumps(body, sort_keys=True).encode())
