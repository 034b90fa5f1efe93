"""Damage in a committed generation: documents, files and contents compared with what they must be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.block import BlockSpec
from tiered.checksums import pieces
from tiered.contents import (
    ChunkPlace,
    array_chunk_bytes,
    chunk_files,
    link_text,
    missing_text,
    parts_of,
    place_in,
    read_piece,
    snapshot_of,
)
from tiered.errors import GenerationError, TieredError
from tiered.manifest import BlockRecord, current_generation, generation_folder
from tiered.tiers.directory import STORE_NAME
from tiered.tiers.ownership import OWNER_NAME, read_owner, read_store_id
from tiered.units import PAGE_BYTES
from tiered.zarr_layout import DOCUMENT_NAME, array_document, group_document

if TYPE_CHECKING:
    from tiered.reader import GenerationReader

_NUM_THREADS = 4


def problems_of(reader: GenerationReader, on_block: Callable[[BlockRecord], None] | None) -> Iterator[str]:
    """Yield a sentence about every damage of a generation; see ``GenerationReader.problems``."""
    yield from _manifest_problems(reader)
    inspection = _Inspection(reader)
    yield from inspection.root_problems(generation_folder(reader.path, reader.generation))
    for record in reader.manifest.blocks:
        yield from inspection.block_problems(record)
        if on_block is not None:
            on_block(record)


def _manifest_problems(reader: GenerationReader) -> Iterator[str]:
    try:  # the generation's own manifest was read by the reader
        if current_generation(reader.path) is None:
            yield f"'{reader.path}' has no file that names the current generation"
    except GenerationError as error:
        yield str(error)
    store = reader.manifest.store
    if store and read_store_id(reader.path) != store:
        yield f"'{reader.path / STORE_NAME}' is missing or damaged: it must name the store {store}"


class _Inspection:
    """Looks at the blocks of one generation, and once at each document that several of them have in common."""

    def __init__(self, reader: GenerationReader) -> None:
        self._reader = reader
        self._seen: set[Path] = set()

    def root_problems(self, root: Path) -> Iterator[str]:
        """Look at a folder ``snap/<generation>`` and at what is above it."""
        if root in self._seen:
            return
        self._seen.add(root)
        yield from self._document_problems(root.parent.parent, group_document({"page_bytes": PAGE_BYTES}))
        yield from self._document_problems(root.parent, group_document())
        yield from self._document_problems(root, group_document())
        yield from self._owner_problems(root)

    def _owner_problems(self, root: Path) -> Iterator[str]:
        path = Path(os.path.realpath(root), OWNER_NAME)
        if path in self._seen:
            return
        self._seen.add(path)
        owner, store = read_owner(root), self._reader.manifest.store
        if store and (owner is None or owner.id != store):
            yield f"'{path}' is missing or damaged: it must name the store {store}"

    def block_problems(self, record: BlockRecord) -> Iterator[str]:
        """Look at the documents, the files and the contents of a block."""
        try:
            spec = self._reader.spec(record.key)
            folders = self._reader.folders(record.key)
            if not folders:
                self._reader.files(record.key)  # raises, and says where it should be
        except GenerationError as error:
            yield str(error)
            return
        place = next((folder for folder in folders if os.path.lexists(folder / DOCUMENT_NAME)), folders[0])
        depth = record.key.count("/")
        yield from self.root_problems(place.parents[depth])
        for group in place.parents[:depth]:
            yield from self._document_problems(group, group_document())
        chunk_bytes = array_chunk_bytes(place)
        wanted = array_document(spec.key, spec.shape, spec.dtype, chunk_bytes or PAGE_BYTES)
        yield from self._document_problems(place, wanted)
        if chunk_bytes is not None:
            files = chunk_files(place, spec, elsewhere=[folder for folder in folders if folder != place])
            for root in dict.fromkeys(snapshot_of(path, spec.key) for path, _, _ in files if path.exists()):
                yield from self._owner_problems(root)
            yield from _content_problems(record, spec, files, chunk_bytes)

    def _document_problems(self, folder: Path, wanted: Mapping[str, Any]) -> Iterator[str]:
        path = folder / DOCUMENT_NAME
        if path in self._seen:
            return
        self._seen.add(path)
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            yield f"'{path}' is missing"
        except OSError as error:
            yield f"'{path}' cannot be read: {error.strerror}"
        except ValueError:
            yield f"'{path}' is damaged: it is not JSON"
        else:
            if found != wanted:
                names = [name for name in {**wanted, **_dict(found)} if wanted.get(name) != _dict(found).get(name)]
                yield f"'{path}' is damaged: {', '.join(names) or 'all of it'} is not what it must be"


def _dict(document: object) -> Mapping[str, Any]:
    return document if isinstance(document, dict) else {}


def _content_problems(
    record: BlockRecord, spec: BlockSpec, files: Sequence[ChunkPlace], chunk_bytes: int
) -> Iterator[str]:
    bad: set[Path] = set()
    for path, _, _ in files:
        problem = _file_problem(path, chunk_bytes)
        if problem is not None:
            bad.add(path)
            yield f"{problem} (block '{spec.key}')"

    def check(number_and_piece: tuple[int, tuple[int, int]]) -> str | None:
        number, piece = number_and_piece
        if any(path in bad for path, _, _, _ in parts_of(files, *piece)):
            return None
        expected = record.xxh3_64[number] if number < len(record.xxh3_64) else "none"
        try:
            found = read_piece(files, spec, None, piece)
        except TieredError as error:
            return str(error)
        place = place_in(files, *piece)
        return None if found == expected else f"{place}: checksum {found}, expected {expected} (block '{spec.key}')"

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tiered-inspect") as threads:
        for problem in threads.map(check, enumerate(pieces(spec.nbytes))):
            if problem is not None:
                yield problem


def _file_problem(path: Path, chunk_bytes: int) -> str | None:
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        return f"a file is missing: {missing_text(path)}"
    except OSError as error:
        return f"{link_text(path)} cannot be read: {error.strerror}"
    return (
        None if nbytes == chunk_bytes else f"'{os.path.realpath(path)}' has {nbytes} bytes, it must have {chunk_bytes}"
    )
