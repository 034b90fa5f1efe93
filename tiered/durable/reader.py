"""GenerationReader: reads and checks a committed generation without opening a store, even during a run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiered.block import BlockSpec
from tiered.durable.arrays import (
    SMALL_BYTES,
    array_chunk_bytes,
    byte_view,
    check_pieces,
    chunk_files,
    link_text,
    missing_text,
    no_array_text,
    read_array,
    read_piece,
    read_small,
    snapshot_of,
)
from tiered.durable.drive_places import OWNER_NAME, drive_places
from tiered.durable.manifest import (
    MANIFEST_NAME,
    SNAPSHOT_FOLDER,
    BlockRecord,
    Manifest,
    current_generation,
    generation_folder,
    generation_name,
    list_generations,
    newest_first,
    read_manifest,
    top_problem,
)
from tiered.durable.ownership import read_owner, read_store_id
from tiered.durable.zarr_folder import directory_document, generation_document
from tiered.errors import BlockNotFoundError, CorruptBlockError, GenerationError, NewerFormatError, TieredError
from tiered.file_io import PIECE_BYTES, pieces, read_document_file
from tiered.tiers.directory import STORE_NAME, read_document
from tiered.tiers.layout import (
    DOCUMENT_NAME,
    ChunkFile,
    array_document,
    dtype_from_name,
    group_document,
    parts_of,
    place_text,
)
from tiered.units import PAGE_BYTES

if TYPE_CHECKING:
    import zarr

_NUM_THREADS = 4


class GenerationReader:
    """Read-only view of a committed generation. Takes no lock, so a running store can prune the generation.

    Args:
        generation: number of the generation. Default: the newest one if the top-level ``MANIFEST.json`` names it,
            otherwise the newest one with all its files.
        search: paths of file tiers to search for parts that were moved.

    Attributes:
        blocks: records by key, in order of registration.
        piece_bytes: size of a piece (the bytes of contents per checksum). ``read_range`` reads whole pieces.
        notice: sentence that explains why the generation in the top-level ``MANIFEST.json`` was not chosen, or None.

    Raises:
        GenerationError: the generation does not exist, or its manifest is damaged or has a newer format.
    """

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        path: str | os.PathLike[str],
        generation: int | None = None,
        search: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.notice: str | None = None
        if generation is None and list_generations(self.path) and (problem := top_problem(self.path)) is not None:
            generation, reasons = _newest_complete(self.path, search)
            texts = [problem, *reasons, f"Using generation {generation}, the newest complete one"]
            self.notice = ". ".join(texts)
        self.manifest: Manifest = read_manifest(self.path, generation)
        self.blocks: dict[str, BlockRecord] = {record.key: record for record in self.manifest.blocks}
        self._name = generation_name(self.manifest.generation)
        self._folder = generation_folder(self.path, self.manifest.generation)
        places = drive_places(self.manifest, self.path)
        self._moved_paths = {place.recorded: place.path for place in places if place.path != place.recorded}
        self._specs: dict[str, BlockSpec] = {}  # specs of valid records, by key
        self._owners: dict[Path, str] = {}  # "ours", "foreign" or "unknown", by folder
        near, outside = ([p.path for p in places if p.is_outside == is_outside] for is_outside in (False, True))
        self._search = list(dict.fromkeys(Path(os.path.abspath(path)) for path in [*near, *search, *outside]))

    @property
    def generation(self) -> int:
        """Number of the generation."""
        return self.manifest.generation

    def spec(self, key: str) -> BlockSpec:
        """Return the spec of a block.

        Raises:
            BlockNotFoundError: the generation has no block with this name.
            GenerationError: the record is invalid.
        """
        if key in self._specs:
            return self._specs[key]
        if key not in self.blocks:
            raise BlockNotFoundError(key, f"generation {self.generation} has {len(self.blocks)} blocks")
        record = self.blocks[key]
        try:
            dtype = dtype_from_name(record.dtype)
        except ValueError as error:  # The generation is intact, so the caller must not open an older one.
            raise NewerFormatError(f"block '{key}' of generation {self.generation}: {error}") from error
        try:
            spec = BlockSpec(key, record.shape, dtype, record.home)
        except ValueError as error:
            raise GenerationError(f"block '{key}' of generation {self.generation}: {error}") from error
        expected = (SNAPSHOT_FOLDER, self._name, *key.split("/"))
        if not self._is_local(record) and Path(record.location).parts[-len(expected) :] != expected:
            raise GenerationError(
                f"block '{key}' of generation {self.generation} has the location '{record.location}', which is not "
                "a folder of that block"
            )
        if spec.nbytes != record.nbytes:
            raise GenerationError(f"block '{key}' has {record.nbytes} bytes, not those of {spec.shape} of {spec.dtype}")
        self._specs[key] = spec
        return spec

    def read(self, key: str, out: torch.Tensor) -> None:
        """Read a block's contents into ``out`` and verify them.

        Args:
            out: contiguous tensor with the block's dtype and number of elements, on any device. Undefined after errors.

        Raises:
            ValueError: ``out`` has the wrong dtype or size, or is not contiguous.
            CorruptBlockError: the block is damaged.
            GenerationError: a part is missing.
            TransferError: the drive returned an error.
        """
        spec = self.spec(key)
        if out.dtype != spec.dtype or out.numel() != spec.num_elements or not out.is_contiguous():
            raise ValueError(f"block '{key}' is {spec.shape} of {spec.dtype}, not {tuple(out.shape)} of {out.dtype}")
        if not self._read_small(spec, byte_view(out)):
            files = self.files(key)
            self.check(key, files, read_array(files, spec, byte_view(out)))

    def _read_small(self, spec: BlockSpec, out: torch.Tensor) -> bool:
        """Read a block if it is one small file in the generation's folder. Return whether valid contents were read.

        The array's document with the file sizes is not read, because the checksum is sufficient.
        """
        record = self.blocks[spec.key]
        if not 0 < spec.nbytes <= SMALL_BYTES or not self._is_local(record) or self._owner(self._folder) == "foreign":
            return False
        file = f"{self._folder}/{spec.key}/c/0"
        if self._moved_paths and os.path.islink(file):  # The link may still lead to a drive's old location.
            return False
        return (read_small(file, out),) == record.xxh3_64

    def _is_local(self, record: BlockRecord) -> bool:
        """Return whether an array is in the generation's folder, next to the manifest."""
        return record.location == f"{SNAPSHOT_FOLDER}/{self._name}/{record.key}"

    def read_range(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read and verify bytes ``start`` to ``stop`` of a block. Return them as 1-D uint8 in host memory.

        Reads only the pieces that contain these bytes, because every piece of 16 MiB has its own checksum.

        Raises:
            ValueError: the range is invalid. Also raises the errors of ``read``.
        """
        spec = self.spec(key)
        if not 0 <= start <= stop <= spec.nbytes:
            raise ValueError(f"block '{key}' has {spec.nbytes} bytes, not {start} to {stop}")
        files = self.files(key)
        data = torch.empty(stop - start, dtype=torch.uint8)
        for begin, end in pieces(spec.nbytes):
            if end <= start or begin >= stop:
                continue
            # Read a whole piece directly into the result, and parts of a piece through a buffer.
            is_whole = start <= begin and end <= stop
            piece = data[begin - start : end - start] if is_whole else torch.empty(end - begin, dtype=torch.uint8)
            self.read_piece(key, files, (begin, end), piece)
            if not is_whole:
                overlap = slice(max(start, begin), min(stop, end))
                data[overlap.start - start : overlap.stop - start] = piece[overlap.start - begin : overlap.stop - begin]
        return data

    def read_piece(
        self, key: str, files: Sequence[ChunkFile], piece: tuple[int, int], out: torch.Tensor | None = None
    ) -> None:
        """Read one piece of a block and verify it.

        Args:
            files: all files of the block, in this generation or in a copy of this generation.
            piece: byte range that ``tiered.file_io.pieces`` yields.
            out: destination with the size of the piece, or None.

        Raises:
            CorruptBlockError: the piece is damaged.
            GenerationError: a file is missing.
            TransferError: the drive returned an error.
        """
        expected = self._expected_checksum(key, piece)
        actual = read_piece(files, self.spec(key), piece, out)
        if actual != expected:
            raise CorruptBlockError(key, expected, actual, place=place_text(files, *piece), generation=self.generation)

    def _expected_checksum(self, key: str, piece: tuple[int, int]) -> str:
        checksums, index = self.blocks[key].xxh3_64, piece[0] // PIECE_BYTES
        return checksums[index] if index < len(checksums) else "none"

    def to_zarr(self) -> zarr.Group:
        """Return the generation as a read-only ``zarr.Group`` with one array per block. Data is read on indexing.

        Reads are verified. The data can be on several drives. bfloat16 and float8 appear as unsigned integers of the
        same size; ``attrs["megatrain"]["logical_dtype"]`` is the true dtype.
        """
        from tiered.zarr_views import BlockView, group_of  # Import here, because importing zarr takes half a second.

        views = [BlockView(self.spec(key), partial(self.read_range, key)) for key in self.blocks]
        return group_of(views, {"generation": self.generation, "meta": self.manifest.meta})

    def problems(
        self, on_block: Callable[[BlockRecord], None] | None = None, *, with_top: bool = True
    ) -> Iterator[str]:
        """Read the whole generation, and yield one sentence per problem. Each sentence names the file.

        Args:
            on_block: called with each block's record after the block is checked.
            with_top: whether to check the top-level ``MANIFEST.json`` also. Readers do not need this file.
        """
        inspection = _Inspection(self)
        if with_top:
            yield from inspection.top_problems()
        yield from inspection.store_problems()
        yield from inspection.root_problems(generation_folder(self.path, self.generation))
        for record in self.manifest.blocks:
            yield from inspection.block_problems(record)
            if on_block is not None:
                on_block(record)

    def files(self, key: str) -> list[ChunkFile]:
        """Return the chunk files of a block, in order.

        Raises:
            GenerationError: the block's array was not found.
        """
        array_folder, chunk_bytes, folders = self._find_array(key)
        other_folders = [folder for folder in folders if folder != array_folder]
        return chunk_files(array_folder, self.spec(key), other_folders, chunk_bytes, self._moved_paths)

    def place(self, key: str) -> Path:
        """Return the folder that has the document of a block's array.

        Raises:
            GenerationError: the block's array was not found.
        """
        return self._find_array(key)[0]

    def _find_array(self, key: str) -> tuple[Path, int, list[Path]]:
        """Return the folder with a block's array document, the bytes per file, and all candidate folders."""
        self.spec(key)
        folders = self.folders(key)
        for folder in folders:
            if (chunk_bytes := array_chunk_bytes(folder)) is not None:
                return folder, chunk_bytes, folders
        recorded_folder = Path(os.path.normpath(self.path / self.blocks[key].location))
        raise GenerationError(no_array_text(key, recorded_folder))

    def folders(self, key: str) -> list[Path]:
        """Return the folders that may have a block's array, starting with the folder that the manifest names."""
        name, depth = self._name, key.count("/")
        main_folder = Path(os.path.normpath(self.path / self.blocks[key].location))
        other_folders = dict.fromkeys(path / SNAPSHOT_FOLDER / name / key for path in self._search)
        # A folder with this number may belong to another store, because several stores can use the same path in turn.
        own_folders = [f for f in other_folders if f != main_folder and self._owner(f.parents[depth]) == "ours"]
        return own_folders if self._owner(main_folder.parents[depth]) == "foreign" else [main_folder, *own_folders]

    def paths(self) -> list[Path]:
        """Return the paths of file tiers that may have a part of the generation."""
        paths = dict.fromkeys([*self._search, *self._moved_paths])
        for key in self.blocks:
            with contextlib.suppress(GenerationError):
                paths.update(dict.fromkeys(snapshot_of(file.path, key).parent.parent for file in self.files(key)))
        return list(paths)

    def _owner(self, folder: Path) -> str:
        if folder not in self._owners:
            owner = read_owner(folder)
            is_known = owner is not None and owner.id != ""
            is_own = owner is not None and owner.id == self.manifest.store
            self._owners[folder] = "ours" if is_own else "foreign" if is_known else "unknown"
        return self._owners[folder]

    def check(self, key: str, files: Sequence[ChunkFile], checksums: Sequence[str]) -> None:
        """Raise ``CorruptBlockError`` for the first piece whose checksum differs from the recorded one."""
        record = self.blocks[key]
        check_pieces(key, files, record.nbytes, record.xxh3_64, checksums, self.generation)


def _newest_complete(path: Path, search: Sequence[str | os.PathLike[str]]) -> tuple[int, list[str]]:
    """Return the newest generation with a readable manifest and all files, and reasons for skipping newer ones.

    Raises:
        GenerationError: no generation is complete.
    """
    problems: list[str] = []
    for generation in newest_first(path):
        try:
            reader = GenerationReader(path, generation, search)
            for key in reader.blocks:
                missing_path = next((file.path for file in reader.files(key) if not file.path.exists()), None)
                if missing_path is not None:
                    raise GenerationError(f"a part of block '{key}' is missing: {missing_text(missing_path)}")
            return generation, problems
        except NewerFormatError:
            raise
        except GenerationError as error:
            problems.append(f"generation {generation} is incomplete: {error}")
    raise GenerationError(f"no generation in '{path}' is complete: {'; '.join(problems)}")


class _Inspection:
    """Inspection of one generation's files. A document that several blocks share is checked only once."""

    def __init__(self, reader: GenerationReader) -> None:
        self._reader = reader
        self._checked_paths: set[Path] = set()

    def top_problems(self) -> Iterator[str]:
        """Yield problems with the top-level ``MANIFEST.json``, which names the current generation."""
        reader = self._reader
        try:
            if current_generation(reader.path) is None:
                yield f"'{reader.path / MANIFEST_NAME}' is missing, which names the current generation"
        except GenerationError as error:
            yield str(error)

    def store_problems(self) -> Iterator[str]:
        """Yield problems with ``STORE.json``, which has the store's identity."""
        reader = self._reader
        store = reader.manifest.store
        if store and read_store_id(reader.path) != store:
            yield f"'{reader.path / STORE_NAME}' is missing or damaged: it must name the store {store}"

    def root_problems(self, root: Path) -> Iterator[str]:
        """Yield problems with a folder ``snap/<generation>`` and the folders above it."""
        if root in self._checked_paths:
            return
        self._checked_paths.add(root)
        top, base = root.parent.parent, group_document({"page_bytes": PAGE_BYTES})
        # If a commit crashes before it updates this document, the list of members is stale until the next commit.
        yield from self._document_problems(top, base, lambda: directory_document(top, base), allow_stale=True)
        yield from self._document_problems(root.parent, group_document())
        keys = [record.key for record in self._reader.manifest.blocks]
        yield from self._document_problems(root, group_document(), lambda: generation_document(root, keys))
        yield from self._owner_problems(root)

    def _owner_problems(self, root: Path) -> Iterator[str]:
        path = Path(os.path.realpath(root), OWNER_NAME)
        if path in self._checked_paths:
            return
        self._checked_paths.add(path)
        owner, store = read_owner(root), self._reader.manifest.store
        if store and (owner is None or owner.id != store):
            yield f"'{path}' is missing or damaged: it must name the store {store}"

    def block_problems(self, record: BlockRecord) -> Iterator[str]:
        """Yield problems with a block's documents, files and contents."""
        try:
            spec = self._reader.spec(record.key)
            folders = self._reader.folders(record.key)
            if not folders:
                self._reader.files(record.key)  # This raises an error that names the expected folder.
        except GenerationError as error:
            yield str(error)
            return
        array_folder = next((folder for folder in folders if os.path.lexists(folder / DOCUMENT_NAME)), folders[0])
        depth = record.key.count("/")
        yield from self.root_problems(array_folder.parents[depth])
        for group in array_folder.parents[:depth]:
            yield from self._document_problems(group, group_document())
        chunk_bytes = array_chunk_bytes(array_folder)
        expected = array_document(spec.key, spec.shape, spec.dtype, chunk_bytes or PAGE_BYTES)
        yield from self._document_problems(array_folder, expected)
        if chunk_bytes is not None:
            files = self._reader.files(spec.key)
            for root in dict.fromkeys(snapshot_of(file.path, spec.key) for file in files if file.path.exists()):
                yield from self._owner_problems(root)
            yield from _content_problems(self._reader, spec, files, chunk_bytes)

    def _document_problems(
        self,
        folder: Path,
        expected: Mapping[str, Any],
        expected_with_members: Callable[[], Mapping[str, Any]] | None = None,
        *,
        allow_stale: bool = False,
    ) -> Iterator[str]:
        """Yield problems with a document. Its member list is optional, and a running process may be changing the list.

        Args:
            expected_with_members: function that returns the expected document with the current member list.
            allow_stale: whether an outdated member list is valid. Only viewers read this list.
        """
        path = folder / DOCUMENT_NAME
        if path in self._checked_paths:
            return
        self._checked_paths.add(path)
        try:
            data = json.loads(read_document_file(path))
        except FileNotFoundError:
            yield f"'{path}' is missing"
        except OSError as error:
            yield f"'{path}' cannot be read: {error.strerror}"
        except (ValueError, RecursionError):
            yield f"'{path}' is damaged: it is not JSON"
        else:
            if allow_stale and isinstance(data, dict) and isinstance(data.get("consolidated_metadata", {}), dict):
                data = {name: value for name, value in data.items() if name != "consolidated_metadata"}
            if expected_with_members is not None and data != expected:
                expected = expected_with_members()
                if data != expected:
                    data, expected = read_document(folder), expected_with_members()
            if data != expected:
                fields = _as_mapping(data)
                names = [name for name in {**expected, **fields} if expected.get(name) != fields.get(name)]
                yield f"'{path}' is damaged: {', '.join(names) or 'its content'} has a wrong value"


def _as_mapping(document: object) -> Mapping[str, Any]:
    return document if isinstance(document, dict) else {}


def _content_problems(
    reader: GenerationReader, spec: BlockSpec, files: Sequence[ChunkFile], chunk_bytes: int
) -> Iterator[str]:
    bad_paths: set[Path] = set()
    for file in files:
        problem = _file_problem(file.path, chunk_bytes)
        if problem is not None:
            bad_paths.add(file.path)
            yield f"{problem} (block '{spec.key}')"

    def check(piece: tuple[int, int]) -> str | None:
        if any(path in bad_paths for path, _, _, _ in parts_of(files, *piece)):
            return None
        try:
            reader.read_piece(spec.key, files, piece)
        except CorruptBlockError as error:
            return f"{error.place}: checksum {error.found}, expected {error.expected} (block '{spec.key}')"
        except TieredError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tiered-inspect") as threads:
        for problem in threads.map(check, pieces(spec.nbytes)):
            if problem is not None:
                yield problem


def _file_problem(path: Path, chunk_bytes: int) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"a file is missing: {missing_text(path)}"
    except OSError as error:
        return f"{link_text(path)} cannot be read: {error.strerror}"
    return None if size == chunk_bytes else f"'{os.path.realpath(path)}' has {size} bytes instead of {chunk_bytes}"
