"""GenerationReader: a committed generation read and checked without opening a store, also beside a living run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tiered.block import BlockSpec
from tiered.checksums import PIECE_BYTES, pieces
from tiered.contents import (
    ChunkPlace,
    array_chunk_bytes,
    byte_view,
    chunk_files,
    no_array_text,
    place_in,
    read_files,
    read_piece,
    snapshot_of,
)
from tiered.errors import BlockNotFoundError, CorruptBlockError, GenerationError
from tiered.inspection import problems_of
from tiered.manifest import (
    SNAPSHOT_FOLDER,
    BlockRecord,
    Manifest,
    current_generation,
    forget_current,
    forget_generation,
    generation_name,
    list_generations,
    make_current,
    newest_first,
    read_manifest,
)
from tiered.tiers.directory import lock_directory, unlock_directory
from tiered.tiers.ownership import StoreIdentity, read_owner, read_store_id, remove_snapshot_folder, snapshot_folders
from tiered.zarr_layout import dtype_from_name

if TYPE_CHECKING:
    import zarr


class GenerationReader:
    """One committed generation, read only. It takes no lock: a living run may remove the generation meanwhile.

    Args:
        path: directory of the generations.
        generation: its number, default the current one.
        search: paths of file tiers, for parts that are not where they were written.

    Attributes:
        manifest: of the generation.
        blocks: its records by key, in order of registration.

    Raises:
        GenerationError: there is no such generation, or its manifest is damaged or newer than this package.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        generation: int | None = None,
        search: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.manifest: Manifest = read_manifest(self.path, generation)
        self.blocks: dict[str, BlockRecord] = {record.key: record for record in self.manifest.blocks}
        written = [path for paths in self.manifest.paths.values() for path in paths]
        self._owners: dict[Path, str] = {}  # by folder of a generation: ours, foreign, or unknown
        self._search = list(dict.fromkeys(Path(os.path.abspath(path)) for path in [*search, *written]))

    @property
    def generation(self) -> int:
        """Return the number of the generation."""
        return self.manifest.generation

    def spec(self, key: str) -> BlockSpec:
        """Return a block as it was registered.

        Raises:
            BlockNotFoundError: the generation has none of that name.
            GenerationError: its record makes no sense here.
        """
        if key not in self.blocks:
            raise BlockNotFoundError(key, f"generation {self.generation} has {len(self.blocks)} blocks")
        record = self.blocks[key]
        try:
            spec = BlockSpec(key, record.shape, dtype_from_name(record.dtype), record.home)
        except ValueError as error:
            raise GenerationError(f"block '{key}' of generation {self.generation}: {error}") from error
        if spec.nbytes != record.nbytes:
            raise GenerationError(f"block '{key}': {record.nbytes} bytes do not make {spec.shape} of {spec.dtype}")
        return spec

    def read(self, key: str, out: torch.Tensor) -> None:
        """Read a block's contents into ``out`` and verify them.

        Args:
            out: contiguous, of the block's dtype and number of elements, on any device. Undefined after an error.

        Raises:
            ValueError: ``out`` does not fit.
            CorruptBlockError: damaged.
            GenerationError: a part is missing.
            TransferError: the drive refused.
        """
        spec = self.spec(key)
        if out.dtype != spec.dtype or out.numel() != spec.num_elements or not out.is_contiguous():
            raise ValueError(f"block '{key}' is {spec.shape} of {spec.dtype}, not {tuple(out.shape)} of {out.dtype}")
        files = self.files(key)
        self.check(key, files, read_files(files, spec, byte_view(out)))

    def read_range(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes ``start`` to ``stop`` of a block's contents, verified, without reading the rest.

        Reads whole pieces of 16 MiB, since those have checksums.

        Returns:
            1-D uint8 in host memory.

        Raises:
            ValueError: no such range. Otherwise as ``read``.
        """
        spec, expected = self.spec(key), self.blocks[key].xxh3_64
        if not 0 <= start <= stop <= spec.nbytes:
            raise ValueError(f"block '{key}' has {spec.nbytes} bytes, not {start} to {stop}")
        files = self.files(key)
        found = torch.empty(stop - start, dtype=torch.uint8)
        for number, (first, last) in enumerate(pieces(spec.nbytes)):
            if last <= start or first >= stop:
                continue
            # Into its place where the whole piece is asked for, else through a buffer of one piece.
            is_inside = start <= first and last <= stop
            piece = found[first - start : last - start] if is_inside else torch.empty(last - first, dtype=torch.uint8)
            at_start = [(path, offset - first, nbytes) for path, offset, nbytes in files]
            actual = read_piece(at_start, spec, piece, (0, last - first))
            if number >= len(expected) or actual != expected[number]:
                recorded = expected[number] if number < len(expected) else "none"
                place = place_in(files, first, last)
                raise CorruptBlockError(key, recorded, actual, place=place, generation=self.generation)
            if not is_inside:
                part = slice(max(start, first), min(stop, last))
                found[part.start - start : part.stop - start] = piece[part.start - first : part.stop - first]
        return found

    def to_zarr(self) -> zarr.Group:
        """Return the generation as a read-only ``zarr.Group``: each block an array of its shape, read when indexed.

        What is read is verified, whatever drives it is striped over. bfloat16 and float8 are arrays of unsigned
        integers of that size, with the true name in ``attrs["megatrain"]["logical_dtype"]``.
        """
        from tiered.zarr_views import BlockView, group_of  # zarr takes half a second to import

        views = [BlockView(self.spec(key), partial(self.read_range, key)) for key in self.blocks]
        return group_of(views, {"generation": self.generation, "meta": self.manifest.meta})

    def problems(self, on_block: Callable[[BlockRecord], None] | None = None) -> Iterator[str]:
        """Yield a sentence about every damage, with the file; nothing if the generation is sound. Reads all of it.

        Args:
            on_block: called with every block's record once it was checked.
        """
        yield from problems_of(self, on_block)

    def files(self, key: str) -> list[ChunkPlace]:
        """Return the chunk files of a block, in order.

        Raises:
            GenerationError: its array is nowhere.
        """
        place = self.place(key)
        return chunk_files(place, self.spec(key), elsewhere=[each for each in self.folders(key) if each != place])

    def place(self, key: str) -> Path:
        """Return the folder with the document of a block's array.

        Raises:
            GenerationError: its array is nowhere.
        """
        self.spec(key)
        place = next((folder for folder in self.folders(key) if array_chunk_bytes(folder) is not None), None)
        if place is None:
            named = Path(os.path.normpath(self.path / self.blocks[key].location))
            raise GenerationError(no_array_text(key, named))
        return place

    def folders(self, key: str) -> list[Path]:
        """Return where the array of a block may be, the place that the manifest names first."""
        name, depth = generation_name(self.generation), key.count("/")
        named = Path(os.path.normpath(self.path / self.blocks[key].location))
        others = dict.fromkeys(path / SNAPSHOT_FOLDER / name / key for path in self._search)
        # A folder of that number may be another store's: several may use one path, one after the other.
        ours = [folder for folder in others if folder != named and self._owner(folder.parents[depth]) == "ours"]
        return ours if self._owner(named.parents[depth]) == "foreign" else [named, *ours]

    def paths(self) -> list[Path]:
        """Return the paths of file tiers that have, or may have, a part of the generation."""
        found = dict.fromkeys(self._search)
        for key in self.blocks:
            with contextlib.suppress(GenerationError):
                found.update(dict.fromkeys(snapshot_of(file, key).parent.parent for file, _, _ in self.files(key)))
        return list(found)

    def _owner(self, folder: Path) -> str:
        if folder not in self._owners:
            owner = read_owner(folder)
            is_known = owner is not None and owner.id != ""
            is_ours = owner is not None and owner.id == self.manifest.store
            self._owners[folder] = "ours" if is_ours else "foreign" if is_known else "unknown"
        return self._owners[folder]

    def check(self, key: str, files: Sequence[ChunkPlace], found: Sequence[str]) -> None:
        """Raise ``CorruptBlockError`` for the first piece whose checksum is not the recorded one.

        Args:
            files: that were read.
            found: their checksums.
        """
        record = self.blocks[key]
        if tuple(found) == record.xxh3_64:
            return
        for number, (_, actual) in enumerate(zip_longest(pieces(record.nbytes), found)):
            self.check_piece(key, files, number, actual or "none")

    def check_piece(self, key: str, files: Sequence[ChunkPlace], number: int, found: str) -> None:
        """Raise ``CorruptBlockError`` if the checksum of one piece, counted from 0, is not the recorded one."""
        record = self.blocks[key]
        expected = record.xxh3_64[number] if number < len(record.xxh3_64) else "none"
        if found != expected:
            start = number * PIECE_BYTES
            place = place_in(files, start, min(start + PIECE_BYTES, record.nbytes))
            raise CorruptBlockError(key, expected, found, place=place, generation=self.generation)


def remove_generation_everywhere(
    path: str | os.PathLike[str], generation: int, search: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Remove a committed generation, also what lies on the paths of file tiers. No store may have the directory open.

    Where it is the current one, the newest of the others becomes that first.

    Args:
        search: paths of file tiers beside those that the manifests name.

    Raises:
        GenerationError: there is no such generation.
        LockedError: a living process uses the directory.
        OSError: a file cannot be removed; calling it again goes on.
    """
    directory = Path(os.path.abspath(path))
    if generation not in list_generations(directory):
        read_manifest(directory, generation)  # raises, and says which there are
    fd, _ = lock_directory(directory)
    try:
        paths = [Path(os.path.abspath(path)) for path in search]
        identity = StoreIdentity(read_store_id(directory) or "", directory)
        for number in list_generations(directory):  # the paths of the others too: its own manifest may be damaged
            with contextlib.suppress(GenerationError):
                reader = GenerationReader(directory, number, search)
                paths += reader.paths()
                identity = StoreIdentity(identity.id or reader.manifest.store, directory)
        _flip_away(directory, generation)
        forget_generation(directory, generation)
        # Its own folder last: what a crash leaves on other drives is found as long as that is there.
        for number, folder in snapshot_folders([*dict.fromkeys(paths), directory]):
            if number == generation and identity.owns(folder):
                remove_snapshot_folder(folder)
    finally:
        unlock_directory(fd)


def _flip_away(directory: Path, generation: int) -> None:
    """Let another generation be the current one where it is ``generation``, or where nobody knows which it is."""
    others = [number for number in newest_first(directory) if number != generation]
    try:
        is_current = current_generation(directory) in (generation, None)
    except GenerationError:
        is_current = True
    if is_current and others:
        make_current(directory, others[0])
    elif is_current:
        forget_current(directory)
