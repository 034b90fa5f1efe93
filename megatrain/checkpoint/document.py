"""What a checkpoint is: a document that names one generation of each rank's store.

    output_dir/checkpoints/RANKS.json        of several ranks: which generations belong together, the newest last
    output_dir/checkpoints/rank00000/...     the directory of a rank's store
    output_dir/checkpoints/snap/00000003/    of one process: a generation, whose sealed manifest is the document

A save has two phases. Every rank commits a generation of its store. When all are whole, rank 0 replaces the document,
and the checkpoint exists: before that instant no reader knows of it, and what ranks have of it is an abandoned future
(`Generations`). So whatever rank dies when, the document names generations that are whole on all of them.

One process needs no second file: its store writes the manifest of a generation in the instant in which it is whole, so
there is no time between the two phases. `_of_one_process` reads that form and `_of_document` the other one; what they
return is alike, and nothing else asks which it was but who writes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, RANKS_NAME
from megatrain.checkpoint.state import RunState
from megatrain.checkpoint.whereabouts import LostPart
from tiered import checksum, list_generations, read_manifest
from tiered.errors import CorruptBlockError, GenerationError, NewerFormatError
from tiered.ext import generation_folder, read_document_file, replace_file, top_problem

if TYPE_CHECKING:
    from tiered import BlockRecord, Manifest
    from tiered.ext import DrivePlace

__all__ = [
    "Checkpoint",
    "RankGeneration",
    "folder_notices",
    "forget_checkpoint",
    "in_order",
    "manifest_checksum",
    "order_key",
    "prune",
    "rank_folder_name",
    "read_checkpoints",
    "read_manifests",
    "store_paths",
    "whole_blocks",
    "write_document",
]

#: Of ``RANKS.json``. Readers refuse newer ones.
RANKS_FORMAT = 2
_MANIFEST_NAME = "MANIFEST.json"  # of tiered.durable.manifest
_CARRIED_COUNT = "num_kept_tensors"  # of megatrain.models.carried, which imports torch
_LAST = (sys.maxsize, "")  # after any save


class Saved(Protocol):
    """A checkpoint, here or at a URL, as far as its order among those of its run is concerned."""

    @property
    def save_number(self) -> int:
        """Number of the save; 0 where it was not counted."""
        ...

    @property
    def saved_at(self) -> str:
        """Date and time, ISO 8601."""
        ...


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """What one rank has of a checkpoint.

    Attributes:
        path: directory of its store, beside the document: ``"rank00003"``; "" where one process has the folder itself.
        xxh3_64: checksum of the generation's manifest, so that no other generation can stand for it; "" where that
            manifest is the document.
    """

    path: str
    generation: int
    xxh3_64: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, or a whole copy of one; its blocks are not read yet.

    What a scan finds out about it (``scan.py``) is at the end, and as if all were well before.

    Attributes:
        number: Larger than that of any earlier checkpoint; where one process wrote it, its generation's.
        meta: ``RunState`` as JSON; empty where it cannot be read.
        elements: Block -> elements, without what shards have past its end; empty: blocks are as long as they say.
        outside: Drives outside a copied or moved run that hold parts of its checkpoint.
        problem: why it cannot be used, judged by documents and the names of its files; None if it looks sound.
        is_foreign: another program or a newer version wrote it: it is no damage, and nothing to pass over.
        is_newest: whether a run would continue from it.
        manifest: manifest of its only generation, where that is its document; None: not read.
    """

    folder: Path
    number: int
    ranks: tuple[RankGeneration, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    lanes: int = 1
    elements: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    lost: tuple[LostPart, ...] = ()
    outside: tuple[DrivePlace, ...] = ()
    problem: str | None = None
    is_foreign: bool = False
    is_newest: bool = False
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    @property
    def world(self) -> int:
        """Number of ranks that wrote it."""
        return len(self.ranks)

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` names it: else the manifest of its only generation is its document."""
        return self.ranks[0].path != ""

    @property
    def note(self) -> str | None:
        """What an export of it needs and lacks: the model's folder, if it copies tensors from there; None: nothing."""
        model = self.meta.get("model")
        if not isinstance(model, Mapping) or not model.get(_CARRIED_COUNT):
            return None
        folder = Path(str(model.get("name")))
        if (folder / "config.json").is_file():
            return None
        return (
            f"an export needs the {model[_CARRIED_COUNT]} tensors that were kept in '{folder}', which is not there. "
            "Bring it back, or name a copy of it: megatrain-tier export --model FOLDER"
        )

    @property
    def is_copy(self) -> bool:
        """Whether it is a whole copy, which the store of the run does not know."""
        return self.folder.name == COPIES_NAME

    @property
    def is_gone(self) -> bool:
        """Whether parts of it are gone for sure: drives of several ranks may be those of hosts that alone can tell."""
        return bool(self.lost) and not self.is_listed

    @property
    def step(self) -> int | None:
        """Steps done; None where that cannot be read."""
        step = self.meta.get("step")
        return step if type(step) is int else None

    @property
    def saved_at(self) -> str:
        """Date and time, ISO 8601; "" where that cannot be read."""
        return str(self.meta.get("saved_at", ""))

    @property
    def save_number(self) -> int:
        """Number of the save among all of the run; 0 where it was not counted (before December 2026)."""
        number = self.meta.get("save_number")
        return number if type(number) is int else 0

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None where that cannot be read."""
        loss = self.meta.get("last_loss")
        return loss if isinstance(loss, float) else None

    @property
    def where(self) -> str:
        """What messages about its document call it."""
        return f"{'checkpoint' if self.is_listed else 'generation'} {self.number} in '{self.folder}'"

    @property
    def state(self) -> RunState:
        """Where the run stands.

        Raises:
            CheckpointError: ``meta`` is no state of a run, or one of a newer version.
        """
        return RunState.from_meta(self.meta, where=self.where)

    def is_in_stores(self, output_dir: Path, size: int) -> bool:
        """Return whether the stores of a run of so many ranks have it: they take over its files as they are."""
        is_theirs = [each.path for each in self.ranks] == store_paths(size)
        return is_theirs and self.folder == output_dir / CHECKPOINTS_NAME

    def is_of(self, output_dir: Path) -> bool:
        """Return whether a run has it: else it is that of a run it is to start from."""
        return self.folder.parent == output_dir

    def __str__(self) -> str:
        what = "copy of the checkpoint" if self.is_copy else "checkpoint"
        number = f"number {self.number}, {self.world} ranks" if self.is_listed else f"generation {self.number}"
        return f"the {what} of step {self.step} in '{self.folder}' ({number})"

    @contextmanager
    def naming(self, rank: int) -> Iterator[None]:
        """Name the rank in what is said of its part, where there are others."""
        try:
            yield
        except CorruptBlockError as error:
            if self.is_listed:
                error.args = (f"rank {rank}: {error}", *error.args[1:])
            raise
        except GenerationError as error:
            if not self.is_listed:
                raise
            raise GenerationError(f"rank {rank} ('{self.folder / self.ranks[rank].path}'): {error}") from error


def rank_folder_name(rank: int) -> str:
    """Return the name of a rank's folder in one of the run, e.g. ``rank00003``."""
    return f"rank{rank:05d}"


def store_paths(size: int) -> list[str]:
    """Return where in a folder of checkpoints the stores of so many ranks are: that of one process is the folder."""
    return [""] if size == 1 else [rank_folder_name(rank) for rank in range(size)]


# -- read --------------------------------------------------------------------------------------------------------


def read_checkpoints(folder: Path, on_damage: Callable[[GenerationError], None] | None = None) -> list[Checkpoint]:
    """Return the checkpoints in a folder, whoever wrote them, oldest first; those that cannot be read too.

    Args:
        on_damage: called where ``RANKS.json`` cannot be read: what it names is passed over.

    Raises:
        GenerationError: ``RANKS.json`` is damaged, and there is no ``on_damage``.
        NewerFormatError: a newer version of this program wrote it.
    """
    listed: list[Checkpoint] = []
    try:
        listed = _of_document(folder)
    except GenerationError as error:
        if on_damage is None:
            raise
        on_damage(error)
    return in_order(list(_of_one_process(folder))[::-1], listed[::-1])[::-1]


def order_key(checkpoint: Saved) -> tuple[int, str]:
    """Return what orders checkpoints: the number of the save, which only grows whatever clocks do.

    Older versions did not count saves: theirs come before all counted ones, ordered by time.
    """
    return checkpoint.save_number, "" if checkpoint.save_number else checkpoint.saved_at


def in_order(own: Sequence[Checkpoint], others: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Merge two sequences by the numbers of their saves; of two equal ones the first sequence's comes first.

    Each sequence keeps its order. A checkpoint that cannot be read stays behind the one before it.

    Args:
        own: newest first.
        others: newest first; the copies of ``own``, for example.
    """

    def keys(checkpoints: Sequence[Checkpoint]) -> list[tuple[int, str]]:
        found: list[tuple[int, str] | None] = []
        number = 0
        for each in reversed(checkpoints):
            # An older version may have continued a counted run: what it saved follows the last counted save.
            number = max(number, each.save_number)
            is_known = each.save_number or each.saved_at
            found.append((number, order_key(each)[1]) if is_known else None)
        key = _LAST
        return [key := each or key for each in reversed(found)]

    merged, left = [], list(zip(keys(others), others, strict=True))
    for key, checkpoint in zip(keys(own), own, strict=True):
        while left and left[0][0] > key:
            merged.append(left.pop(0)[1])
        merged.append(checkpoint)
    return [*merged, *(each for _, each in left)]


def folder_notices(folder: Path) -> list[str]:
    """Return what a reader of a folder of checkpoints should know: documents that are older than what they name.

    Such a folder is a copy of a live run, or a crash came before the last write.
    """
    notices = []
    with contextlib.suppress(NewerFormatError):  # whoever reads the generations says so
        if list_generations(folder) and (problem := top_problem(folder)) is not None:
            notices.append(f"{problem}. The checkpoints themselves decide: the newest whole one is continued")
    with contextlib.suppress(GenerationError):
        unnamed = {
            path.name: generations
            for path in sorted(folder.glob("rank?????"))
            if (generations := list_generations(path))
        }
        if unnamed and not _of_document(folder):
            parts = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in unnamed.items())
            notices.append(
                f"'{folder / RANKS_NAME}' names no checkpoint, so these generations of ranks are none: {parts}. "
                "They stay until a run here has saved a checkpoint of its own"
            )
    return notices


def _of_one_process(folder: Path) -> Iterator[Checkpoint]:
    """Yield what one process wrote, oldest first: generations of a store in the folder itself."""
    for number in list_generations(folder):
        ranks = (RankGeneration("", number),)
        try:
            manifest = read_manifest(folder, number)
        except GenerationError as error:
            if number in list_generations(folder):  # else a living run has just removed it
                is_newer = isinstance(error, NewerFormatError)
                yield Checkpoint(folder, number, ranks, problem=str(error), is_foreign=is_newer)
        else:
            meta = manifest.meta if isinstance(manifest.meta, dict) else {}
            yield Checkpoint(folder, number, ranks, meta, manifest=manifest)


def _of_document(folder: Path) -> list[Checkpoint]:
    """Return what the folder's ``RANKS.json`` names, oldest first; nothing without one."""
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
        return [_checkpoint(folder, each) for each in body]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GenerationError(f"'{path}' makes no sense: {error}. Restore it from a backup") from error


def _checkpoint(folder: Path, fields: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint after checking that it is one. Raises ``KeyError``, ``TypeError`` or ``ValueError``.

    A document may come from a stranger, and generations are removed by what it says: no name of a folder may lead out.
    """
    ranks = tuple(RankGeneration(**rank) for rank in fields["ranks"])
    for rank, each in enumerate(ranks):
        if each.path != rank_folder_name(rank):
            raise ValueError(f"rank {rank} is said to lie in {each.path!r}, not in '{rank_folder_name(rank)}'")
        is_sealed = isinstance(each.xxh3_64, str) and each.xxh3_64 != ""
        if type(each.generation) is not int or each.generation < 1 or not is_sealed:
            raise ValueError(f"rank {rank} is said to have generation {each.generation!r}")
    numbers = (fields["number"], fields["lanes"], *fields["elements"].values())
    if not ranks or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"checkpoint {fields['number']!r} has {len(ranks)} ranks, or numbers that are none")
    if not isinstance(fields["meta"], dict):
        raise TypeError(f"the state of checkpoint {fields['number']} is no object")
    return Checkpoint(folder, fields["number"], ranks, fields["meta"], fields["lanes"], fields["elements"])


def read_manifests(checkpoint: Checkpoint) -> list[Manifest]:
    """Return the manifest of each rank's generation.

    Raises:
        GenerationError: a generation is not there, is another one, or lacks a block. Of several the rank is named.
    """
    found: list[Manifest] = []
    for rank, each in enumerate(checkpoint.ranks):
        directory = checkpoint.folder / each.path
        with checkpoint.naming(rank):
            if each.xxh3_64 and (sum_ := manifest_checksum(directory, each.generation)) != each.xxh3_64:
                raise GenerationError(
                    f"the manifest of generation {each.generation} has checksum {sum_}, {RANKS_NAME} says "
                    f"{each.xxh3_64}: it is another generation, or damaged"
                )
            found.append(read_manifest(directory, each.generation))
            shapes = [[(block.key, block.shape) for block in manifest.blocks] for manifest in (found[0], found[-1])]
            if shapes[0] != shapes[1]:
                raise GenerationError("its blocks are not those of rank 0")
    return found


def whole_blocks(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> dict[str, BlockRecord]:
    """Return the blocks of a checkpoint by key: the shards of all ranks together, without what is past the end.

    Returns:
        Records with the shape of the whole block, and the checksums of the shards.

    Raises:
        GenerationError: a block cannot have the length that the document says.
    """
    if not checkpoint.is_listed:
        return {block.key: block for block in manifests[0].blocks}
    found: dict[str, BlockRecord] = {}
    for shards in zip(*(manifest.blocks for manifest in manifests), strict=True):
        key, length, world = shards[0].key, shards[0].shape[0], len(shards)
        elements = checkpoint.elements.get(key, length * world)
        if not 0 < elements <= length * world:
            raise GenerationError(f"block '{key}' has {elements} elements, {world} shards of {length} cannot hold them")
        found[key] = replace(
            shards[0],
            shape=(elements,),
            nbytes=elements * (shards[0].nbytes // length),
            xxh3_64=tuple(each for shard in shards for each in shard.xxh3_64),
        )
    return found


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


# -- write and remove --------------------------------------------------------------------------------------------


def write_document(folder: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Let ``RANKS.json`` name these checkpoints, in one step; it survives a power cut."""
    body = [
        {
            "number": each.number,
            "world": each.world,
            "lanes": each.lanes,
            "ranks": [asdict(rank) for rank in each.ranks],
            "elements": dict(each.elements),
            "meta": dict(each.meta),
        }
        for each in checkpoints
    ]
    seal = checksum(json.dumps(body, sort_keys=True).encode())
    folder.mkdir(parents=True, exist_ok=True)
    document = {"format": RANKS_FORMAT, "xxh3_64": seal, "checkpoints": body}
    replace_file(folder / RANKS_NAME, json.dumps(document, sort_keys=True), durable=True)


def forget_checkpoint(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint: first from its document, then the generations of its ranks that no other one has.

    Raises:
        LockedError: a run has one of the stores.
        OSError: a file cannot be removed.
    """
    folder = checkpoint.folder
    left = [each for each in read_checkpoints(folder) if each.ranks != checkpoint.ranks]
    if checkpoint.is_listed:
        write_document(folder, [each for each in left if each.is_listed])
    named = _named(left)
    for rank in checkpoint.ranks:
        directory = folder / rank.path
        if (rank.path, rank.generation) in named or rank.generation not in list_generations(directory):
            continue
        # Through a link only what the document is sealed with: else it may be a checkpoint of somebody else.
        if not directory.is_symlink() or rank.xxh3_64 in ("", manifest_checksum(directory, rank.generation)):
            _remove_generation(directory, rank.generation)


def prune(folder: Path, stay: Sequence[Checkpoint], own: Sequence[str]) -> None:
    """Remove what belongs to no checkpoint that stays, and to no store of this run, which prunes its own.

    Args:
        own: paths of the stores of this run, as in ``RankGeneration``.

    Raises:
        GenerationError: the document cannot be read: nobody knows what belongs to it.
        OSError: a file cannot be removed.
    """
    _of_document(folder)
    named = _named(stay)
    for name in ["", *sorted(path.name for path in folder.glob("rank?????"))]:
        if name not in own:
            for generation in list_generations(folder / name):
                if (name, generation) not in named:
                    _remove_generation(folder / name, generation)


def _named(checkpoints: Sequence[Checkpoint]) -> set[tuple[str, int]]:
    return {(rank.path, rank.generation) for each in checkpoints for rank in each.ranks}


def _remove_generation(directory: Path, generation: int) -> None:
    from tiered import remove_generation  # needs torch, which ``status`` does without

    remove_generation(directory, generation)
