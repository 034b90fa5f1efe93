"""Checkpoints of several ranks: one generation of each rank's store, and one document that makes them a checkpoint.

    output_dir/checkpoints/RANKS.json        which generation of which rank belong together, the newest last
    output_dir/checkpoints/rank00000/...     the directory of a store, as that of a run of one process

A save has two phases. Every rank commits a generation of its store. When all are whole, rank 0 replaces the document,
and the checkpoint exists: before that instant no reader knows of it, and what ranks have of it is an abandoned future
(`Generations`). So whatever rank dies when, the document names generations that are whole on all of them.

A block lies on the ranks in shares of equal length, one after the other; what is past its end is zeros
(`megatrain/ranks/shares.py`). `RanksReader` reads it as one, in ranges, so another number of ranks, an export and a
single process read the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.checkpoint.state import CheckpointError
from tiered import (
    BlockRecord,
    BlockSpec,
    CopyFigures,
    GenerationReader,
    checksum,
    list_generations,
    read_manifest,
    remove_generation,
)
from tiered.errors import BlockNotFoundError, CorruptBlockError, GenerationError, NewerFormatError, TieredError
from tiered.ext import (
    claim_directory,
    dtype_from_name,
    files_below,
    generation_folder,
    read_document_file,
    replace_file,
)

if TYPE_CHECKING:
    from tiered import Commit, TieredStore

__all__ = [
    "RANKS_NAME",
    "CheckpointId",
    "RankCopies",
    "RankGeneration",
    "RankSaves",
    "RanksCheckpoint",
    "RanksReader",
    "forget_checkpoint",
    "prune_other_worlds",
    "rank_folder_name",
    "read_checkpoints",
    "write_checkpoints",
]

RANKS_NAME = "RANKS.json"
#: Of ``RANKS.json``. Readers refuse newer ones.
RANKS_FORMAT = 2
_MANIFEST_NAME = "MANIFEST.json"  # of tiered.durable.manifest


@dataclass(frozen=True, slots=True)
class CheckpointId:
    """Which of the checkpoints in a folder: those of one process and those of several are counted apart.

    Attributes:
        number: of the generation, or of ``RanksCheckpoint``.
        is_of_ranks: whether several processes wrote it.
    """

    number: int
    is_of_ranks: bool = False


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """What one rank has of a checkpoint.

    Attributes:
        path: directory of its store, beside the document: ``"rank00003"``.
        generation: number there.
        xxh3_64: checksum of the generation's manifest, so that no other generation can stand for it.
    """

    path: str
    generation: int
    xxh3_64: str


@dataclass(frozen=True, slots=True)
class RanksCheckpoint:
    """A checkpoint of several ranks.

    Attributes:
        number: of the checkpoint, growing; it stands for a generation's where there is one process.
        lanes: in which gradients were added (``engine/lanes.py``).
        ranks: by rank.
        elements: of each block, without what shares have past its end.
        meta: ``RunState``, as in the manifest of a generation.
    """

    number: int
    lanes: int
    ranks: tuple[RankGeneration, ...]
    elements: Mapping[str, int]
    meta: Mapping[str, Any]

    @property
    def world(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.ranks)

    @property
    def id(self) -> CheckpointId:
        """Which of the checkpoints in its folder this is."""
        return CheckpointId(self.number, is_of_ranks=True)


def rank_folder_name(rank: int) -> str:
    """Return the name of a rank's folder in one of the run, e.g. ``rank00003``."""
    return f"rank{rank:05d}"


def read_checkpoints(folder: Path) -> list[RanksCheckpoint]:
    """Return the checkpoints that a folder's document names, oldest first; nothing without a document.

    Raises:
        GenerationError: it is damaged.
        NewerFormatError: a newer version of this program wrote it.
    """
    path = folder / RANKS_NAME
    try:
        document = json.loads(read_document_file(path))
        version, expected, body = document["format"], document["xxh3_64"], document["checkpoints"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GenerationError(f"'{path}' cannot be read: {error}. Restore it from a backup of the folder") from error
    if not isinstance(version, int) or version > RANKS_FORMAT:
        raise NewerFormatError(f"'{path}' has format {version}, this version reads up to {RANKS_FORMAT}: upgrade")
    if checksum(json.dumps(body, sort_keys=True).encode()) != expected:
        raise GenerationError(f"'{path}' is damaged: its checksum does not match. Restore it from a backup")
    try:
        return [_checkpoint(each) for each in body]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GenerationError(f"'{path}' makes no sense: {error}. Restore it from a backup") from error


def _checkpoint(fields: Mapping[str, Any]) -> RanksCheckpoint:
    """Return a checkpoint after checking that it is one. Raises ``KeyError``, ``TypeError`` or ``ValueError``.

    A document may come from a stranger, and generations are removed by what it says: no name of a folder may lead out.
    """
    ranks = tuple(RankGeneration(**rank) for rank in fields["ranks"])
    for rank, each in enumerate(ranks):
        if each.path != rank_folder_name(rank):
            raise ValueError(f"rank {rank} is said to lie in {each.path!r}, not in '{rank_folder_name(rank)}'")
        if type(each.generation) is not int or each.generation < 1 or not isinstance(each.xxh3_64, str):
            raise ValueError(f"rank {rank} is said to have generation {each.generation!r}")
    numbers = (fields["number"], fields["lanes"], *fields["elements"].values())
    if not ranks or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"checkpoint {fields['number']!r} has {len(ranks)} ranks, or numbers that are none")
    if not isinstance(fields["meta"], dict):
        raise TypeError(f"the state of checkpoint {fields['number']} is no object")
    return RanksCheckpoint(fields["number"], fields["lanes"], ranks, fields["elements"], fields["meta"])


def write_checkpoints(folder: Path, checkpoints: Sequence[RanksCheckpoint]) -> None:
    """Replace the document of a folder in one step; it survives a power cut."""
    body = [{**asdict(each), "world": each.world} for each in checkpoints]
    seal = checksum(json.dumps(body, sort_keys=True).encode())
    folder.mkdir(parents=True, exist_ok=True)
    document = {"format": RANKS_FORMAT, "xxh3_64": seal, "checkpoints": body}
    replace_file(folder / RANKS_NAME, json.dumps(document, sort_keys=True), durable=True)


def manifest_checksum(directory: Path, generation: int) -> str:
    """Return the checksum of the manifest of a generation.

    Raises:
        GenerationError: there is no such generation.
    """
    path = generation_folder(directory, generation) / _MANIFEST_NAME
    try:
        return checksum(path.read_bytes())
    except OSError as error:
        raise GenerationError(f"generation {generation} in '{directory}' cannot be read: {error}") from error


def forget_checkpoint(folder: Path, number: int) -> None:
    """Remove a checkpoint: first from the document, then the generations of its ranks that no other one has.

    Raises:
        LockedError: a run has one of the stores.
        OSError: a file cannot be removed.
    """
    known = read_checkpoints(folder)
    doomed = [each for each in known if each.number == number]
    left = [each for each in known if each.number != number]
    write_checkpoints(folder, left)
    named = {(rank.path, rank.generation) for each in left for rank in each.ranks}
    for checkpoint in doomed:
        for rank in checkpoint.ranks:
            directory = folder / rank.path
            if (rank.path, rank.generation) in named or rank.generation not in list_generations(directory):
                continue
            # Through a link only what the document is sealed with: else it may be a checkpoint of somebody else.
            if not directory.is_symlink() or manifest_checksum(directory, rank.generation) == rank.xxh3_64:
                remove_generation(directory, rank.generation)


def prune_other_worlds(folder: Path, keep: int, world: int, best: CheckpointId | None = None) -> None:
    """Remove what is older than the newest checkpoints and belongs to no store of this run, which prunes its own.

    Args:
        folder: of checkpoints: of generations of one process, and of the document of several ranks.
        keep: newest checkpoints that stay, whoever wrote them.
        world: ranks of this run.
        best: stays as well, and does not count.

    Raises:
        GenerationError: the document cannot be read.
        OSError: a file cannot be removed.
    """
    known = read_checkpoints(folder)
    saved_at = {each.id: str(each.meta.get("saved_at", "")) for each in known}
    for generation in list_generations(folder):
        with contextlib.suppress(GenerationError):
            saved_at[CheckpointId(generation)] = str(read_manifest(folder, generation).meta.get("saved_at", ""))
    by_age = sorted(saved_at, key=lambda each: (saved_at[each], each.is_of_ranks, each.number))
    doomed = set([each for each in by_age if each != best][:-keep])
    left = [each for each in known if each.id not in doomed]
    if len(left) < len(known):
        write_checkpoints(folder, left)
    if world > 1:
        for each in doomed:
            if not each.is_of_ranks:
                remove_generation(folder, each.number)
    named = {(rank.path, rank.generation) for each in left for rank in each.ranks}
    others = [path for path in folder.glob("rank*") if path.name >= rank_folder_name(0 if world == 1 else world)]
    for path in others:
        for generation in list_generations(path):
            if (path.name, generation) not in named:
                remove_generation(path, generation)


class RanksReader:
    """The blocks of a checkpoint of several ranks, as if one process had written them.

    Takes no lock. Reads as ``GenerationReader`` does: whole pieces of each rank's share, all of them verified.

    Args:
        folder: of the document.
        checkpoint: in it.
        search: paths of file tiers, for parts that are not where they were written.

    Attributes:
        blocks: records by key, with the shape of the whole block; its checksums are those of the shares.
        piece_bytes: as of ``GenerationReader``.

    Raises:
        GenerationError: a rank's generation is not there, is another one, or lacks a block. The rank is named.
    """

    piece_bytes = GenerationReader.piece_bytes

    def __init__(
        self, folder: Path, checkpoint: RanksCheckpoint, search: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self._readers: list[GenerationReader] = []
        for rank, each in enumerate(checkpoint.ranks):
            directory = folder / each.path
            with _naming(rank, directory):
                found = manifest_checksum(directory, each.generation)
                if found != each.xxh3_64:
                    raise GenerationError(
                        f"the manifest of generation {each.generation} has checksum {found}, {RANKS_NAME} says "
                        f"{each.xxh3_64}: it is another generation, or damaged"
                    )
                own = [Path(path, each.path) for path in search]
                self._readers.append(GenerationReader(directory, each.generation, own))
        self._shares = [reader.blocks for reader in self._readers]
        first = self._shares[0]
        for rank, blocks in enumerate(self._shares):
            with _naming(rank, folder / checkpoint.ranks[rank].path):
                if blocks.keys() != first.keys() or any(blocks[key].shape != first[key].shape for key in blocks):
                    raise GenerationError("its blocks are not those of rank 0")
        self.blocks: dict[str, BlockRecord] = {
            key: replace(
                record,
                shape=(self._elements(key, record),),
                nbytes=self._elements(key, record) * dtype_from_name(record.dtype).itemsize,
                xxh3_64=tuple(sum_ for blocks in self._shares for sum_ in blocks[key].xxh3_64),
            )
            for key, record in first.items()
        }

    def _elements(self, key: str, share: BlockRecord) -> int:
        length, world = share.shape[0], self.checkpoint.world
        found = self.checkpoint.elements.get(key, length * world)
        if not length * world - length * world < found <= length * world:
            raise GenerationError(f"block '{key}' has {found} elements, {world} shares of {length} cannot hold them")
        return found

    def spec(self, key: str) -> BlockSpec:
        """Return a block, whole."""
        if key not in self.blocks:
            raise BlockNotFoundError(key, f"the checkpoint has {len(self.blocks)} blocks")
        record = self.blocks[key]
        return BlockSpec(key, record.shape, dtype_from_name(record.dtype), record.home)

    def read(self, key: str, out: torch.Tensor) -> None:
        """Read a whole block into ``out`` and verify it; see ``GenerationReader.read``."""
        spec = self.spec(key)
        if out.dtype != spec.dtype or out.numel() != spec.num_elements or not out.is_contiguous():
            raise ValueError(f"block '{key}' is {spec.shape} of {spec.dtype}, not {tuple(out.shape)} of {out.dtype}")
        memory = out.reshape(-1).view(torch.uint8)
        for start in range(0, spec.nbytes, self.piece_bytes):
            stop = min(start + self.piece_bytes, spec.nbytes)
            memory[start:stop] = self.read_range(key, start, stop)

    def read_range(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes ``start`` to ``stop`` of a block, verified, from the ranks that have them.

        Returns:
            1-D uint8 in host memory.

        Raises:
            CorruptBlockError: damaged; the rank is named.
            GenerationError: a part is missing; the rank is named.
            TransferError: the drive refused.
        """
        spec = self.spec(key)
        if not 0 <= start <= stop <= spec.nbytes:
            raise ValueError(f"block '{key}' has {spec.nbytes} bytes, not {start} to {stop}")
        length = self._shares[0][key].nbytes
        found = torch.empty(stop - start, dtype=torch.uint8)
        for rank, reader in enumerate(self._readers):
            first, last = max(start, rank * length), min(stop, (rank + 1) * length)
            if first < last:
                with _naming(rank, reader.path):
                    part = reader.read_range(key, first - rank * length, last - rank * length)
                found[first - start : last - start] = part
        return found

    def problems(self, on_block: Callable[[BlockRecord], None] | None = None) -> Iterator[str]:
        """Yield a sentence about every damage, with the rank; reads all of it."""
        for rank, reader in enumerate(self._readers):
            for problem in reader.problems(on_block):
                yield f"rank {rank}: {problem}"


@contextlib.contextmanager
def _naming(rank: int, directory: Path) -> Iterator[None]:
    """Name the rank in what is said of its part."""
    try:
        yield
    except CorruptBlockError as error:
        error.args = (f"rank {rank}: {error}", *error.args[1:])
        raise
    except GenerationError as error:
        raise GenerationError(f"rank {rank} ('{directory}'): {error}") from error


class RankSaves:
    """The two phases of a rank's saves. All ranks call the same methods in the same order.

    Args:
        folder: of the document.
        rank: this one.
        gather: returns what all ranks gave, by rank (``Collectives.gather_objects``).
        store: of this rank. From now on its commits leave what the document names, and nothing else that is older.
        lanes: of the run.
        elements: of each block, without what shares have past its end.
        keep: checkpoints that the document names at most.
        is_past: whether a checkpoint is not newer than the one that this run went on from. Newer ones could not be
            loaded: the first save drops them, and not the one that could.

    Attributes:
        best: a checkpoint that stays whatever its age, beside ``keep`` others.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        gather: Callable[[object], Sequence[Any]],
        store: TieredStore,
        *,
        lanes: int,
        elements: Mapping[str, int],
        keep: int,
        is_past: Callable[[RanksCheckpoint], bool] = lambda checkpoint: True,
    ) -> None:
        self._folder, self._rank, self._gather, self._store = folder, rank, gather, store
        self._lanes, self._elements, self._keep = lanes, dict(elements), keep
        self.best: CheckpointId | None = None
        self._world, self._is_past = len(gather(None)), is_past
        self._name = rank_folder_name(rank)
        self._known: list[RanksCheckpoint] = _from_first(rank, gather, lambda: read_checkpoints(folder))
        store.keep_only(self._named)

    def _named(self) -> list[int]:
        """Return the generations of this rank that the document names."""
        return [rank.generation for each in self._known for rank in each.ranks if rank.path == self._name]

    def begin(self) -> None:
        """Make way for one more checkpoint: the document names one less than it may, but never none."""
        if len(left := self._left()) < len(self._known):
            self._known = _from_first(self._rank, self._gather, lambda: self._written(left))
        self._is_past = lambda checkpoint: True  # what is made from now on

    def _left(self) -> list[RanksCheckpoint]:
        """Return the checkpoints that stay when one more is made."""
        return self._newest([each for each in self._known if self._is_past(each)], max(1, self._keep - 1))

    def _newest(self, checkpoints: Sequence[RanksCheckpoint], keep: int) -> list[RanksCheckpoint]:
        """Return the last of some checkpoints, and the best one."""
        stay = {each.id for each in [each for each in checkpoints if each.id != self.best][-keep:]}
        return [each for each in checkpoints if each.id in stay or each.id == self.best]

    def agree_on_room(self, free_bytes: Callable[[], int], is_stopping: bool) -> tuple[int, bool]:
        """Return what rank 0 finds free for the checkpoint of all, and whether any rank is asked to stop.

        Counts what ``begin`` and the commits after it remove: generations of this world that no document will name.
        """
        free = 0
        if self._rank == 0:
            named = {(rank.path, rank.generation) for each in self._left() for rank in each.ranks}
            for name in map(rank_folder_name, range(self._world)):
                for number in list_generations(self._folder / name):
                    if (name, number) not in named:
                        files = files_below(generation_folder(self._folder / name, number))
                        free += sum(found.st_blocks * 512 for file in files if (found := file.lstat()).st_nlink == 1)
            free += free_bytes()
        told = self._gather((free, is_stopping))
        return told[0][0], any(stopping for _, stopping in told)

    def of_all(self, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the sums of what all ranks give."""
        first, second, third = (sum(each) for each in zip(*self._gather(sizes), strict=True))
        return first, second, third

    def outgoing(self) -> list[int]:
        """Return the numbers of the checkpoints that ``begin`` drops."""
        stay = {each.id for each in self._left()}
        return [each.number for each in self._known if each.id not in stay]

    def find(self, number: int) -> RanksCheckpoint | None:
        """Return a checkpoint of the document."""
        return next((each for each in self._known if each.number == number), None)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._world

    def are_whole(self, commit: Commit) -> bool:
        """Return whether the generations of all ranks are whole, or have failed. Does not wait for the drives."""
        return all(self._gather(commit.is_done))

    def finish(self, commit: Commit, meta: Mapping[str, Any]) -> RanksCheckpoint:
        """Wait until the generations of all ranks are whole, and make them a checkpoint.

        Raises:
            CheckpointError: a rank could not write its own; the document is as before.
        """
        ranks = self._whole_on_all(commit)
        number = 1 + max([each.number for each in self._known] + list_generations(self._folder), default=0)
        found = RanksCheckpoint(number, self._lanes, ranks, self._elements, dict(meta))
        # What rank 0 returns from has been written: no rank begins another commit, which prunes, before that.
        stay = self._newest([*self._known, found], self._keep)
        self._known = _from_first(self._rank, self._gather, lambda: self._written(stay))
        return self._known[-1]

    def _whole_on_all(self, commit: Commit) -> tuple[RankGeneration, ...]:
        """Wait until the generations of all ranks are whole; return them."""
        own: tuple[RankGeneration | None, str]
        try:
            commit.wait()
            number = commit.generation
            assert number is not None
            directory = self._folder / self._name
            own = RankGeneration(self._name, number, manifest_checksum(directory, number)), ""
        except (TieredError, OSError) as error:
            own = None, f"rank {self._rank}: {error}"
        everyone = self._gather(own)
        failed = [problem for generation, problem in everyone if generation is None]
        if failed:
            raise CheckpointError(f"no checkpoint was made: {'; '.join(failed)}. The one before is whole")
        return tuple(generation for generation, _ in everyone)

    def _written(self, checkpoints: Sequence[RanksCheckpoint]) -> list[RanksCheckpoint]:
        write_checkpoints(self._folder, checkpoints)
        prune_other_worlds(self._folder, self._keep, self._world, self.best)
        return read_checkpoints(self._folder)


class RankCopies:
    """Whole copies of checkpoints of several ranks: each copies its own part, a document says which belong together.

    All ranks call the same methods in the same order. What fails costs the copy, and raises nothing.

    Args:
        folder: of the copies; each rank has its own in it.
        rank: this one.
        gather: as in ``RankSaves``.
        keep: copies that the document names at most.
    """

    def __init__(self, folder: Path, rank: int, gather: Callable[[object], Sequence[Any]], keep: int) -> None:
        self._folder, self._rank, self._gather, self._keep = folder, rank, gather, keep
        self._world = len(gather(None))
        self._known: list[RanksCheckpoint] = []
        with contextlib.suppress(CheckpointError):  # a document that is damaged names no copy; the next one replaces it
            self._known = _from_first(rank, gather, lambda: read_checkpoints(folder))

    @property
    def newest(self) -> int:
        """The number of the newest copy, which is that of its checkpoint; 0: there is none."""
        return max((each.number for each in self._known), default=0)

    def begin(self) -> list[int]:
        """Make way for one more copy, but leave one; return the generations of this rank that stay."""
        left = self._known[-max(1, self._keep - 1) :]

        def make_way() -> list[RanksCheckpoint]:
            # Before ranks have folders in it: else it is a folder of somebody else's.
            claim_directory(self._folder)
            return self._written(left) if len(left) < len(self._known) else self._known

        # What cannot be written now is told when the copy is made.
        with contextlib.suppress(CheckpointError):
            self._known = _from_first(self._rank, self._gather, make_way)
        name = rank_folder_name(self._rank)
        return [rank.generation for each in self._known for rank in each.ranks if rank.path == name]

    def are_done(self, is_done: bool) -> bool:
        """Return whether all ranks have copied their own, or failed to."""
        return all(self._gather(is_done))

    def finish(
        self, checkpoint: RanksCheckpoint, figures: CopyFigures | None, error: Exception | None
    ) -> tuple[CopyFigures | None, str]:
        """Make what all ranks have copied a copy of the checkpoint.

        Args:
            checkpoint: that was copied.
            figures: of this rank's copy; None: there is none.
            error: why not.

        Returns:
            The figures of all ranks together; or None, and why there is no copy.
        """
        own: RankGeneration | None = None
        name, problem = rank_folder_name(self._rank), str(error or "it was given up")
        if figures is not None:
            try:
                checksum_ = manifest_checksum(self._folder / name, figures.generation)
                own = RankGeneration(name, figures.generation, checksum_)
            except GenerationError as failure:
                problem = str(failure)
        everyone = self._gather((own, figures, f"rank {self._rank}: {problem}"))
        failed = [text for generation, _, text in everyone if generation is None]
        if failed:
            return None, "; ".join(failed)
        copy = replace(checkpoint, ranks=tuple(generation for generation, _, _ in everyone))
        # A number that grows no more: the checkpoints were removed, and theirs began anew.
        left = [each for each in self._known if each.number < copy.number]
        stay = [*left, copy][-self._keep :]
        try:
            self._known = _from_first(self._rank, self._gather, lambda: self._written(stay))
        except CheckpointError as failure:
            return None, str(failure)
        copied = sum(each.copied_bytes for _, each, _ in everyone)
        return CopyFigures(copy.number, copied, sum(each.linked_bytes for _, each, _ in everyone)), ""

    def _written(self, copies: Sequence[RanksCheckpoint]) -> list[RanksCheckpoint]:
        write_checkpoints(self._folder, copies)
        prune_other_worlds(self._folder, self._keep, self._world)
        return read_checkpoints(self._folder)


def _from_first(rank: int, gather: Callable[[object], Sequence[Any]], find: Callable[[], Any]) -> Any:
    """Return what rank 0 found, on all ranks; what it raised is raised on all."""
    found: Any = None
    if rank == 0:
        try:
            found = find(), None
        except (TieredError, CheckpointError, OSError) as error:
            found = None, f"rank 0: {error}"
    result, problem = gather(found)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return result
