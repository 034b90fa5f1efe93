"""A checkpoint is a document that lists one generation of each rank's store.

    output_dir/checkpoints/RANKS.json        several ranks: which generations belong together, the newest last
    output_dir/checkpoints/rank00000/...     the directory of a rank's store
    output_dir/checkpoints/snap/00000003/    one process: a generation, whose sealed manifest is the document

A save has two phases. First, every rank commits a generation of its store. When all generations are whole, rank 0
replaces the document. Only then does the checkpoint exist for readers. Without the second phase, the generations count
as an abandoned future (`Generations`). Therefore, even if a rank dies, the document lists only generations that are
whole on all ranks.

A single process needs no second file, because its store writes a generation's manifest when the generation is whole.
`_read_generations` reads this form, and `_read_document` reads `RANKS.json`. Both return the same type, so only writers
distinguish the two forms.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, RANKS_NAME
from megatrain.checkpoint.locations import LostPart
from megatrain.checkpoint.state import RunState
from megatrain.ranks.world import RANK_FOLDERS, rank_folder_name, store_paths
from tiered import checksum, list_generations, read_manifest
from tiered.errors import CorruptBlockError, GenerationError, NewerFormatError
from tiered.ext import MANIFEST_NAME, generation_folder, read_document_file, replace_file, top_problem

if TYPE_CHECKING:
    from tiered import BlockRecord, Manifest
    from tiered.ext import DrivePlace

__all__ = [
    "Checkpoint",
    "RankGeneration",
    "folder_notices",
    "forget_checkpoint",
    "merge_by_save",
    "manifest_checksum",
    "prune",
    "read_checkpoints",
    "read_manifests",
    "whole_blocks",
    "write_document",
]

#: Format of ``RANKS.json``. Readers refuse newer formats.
RANKS_FORMAT = 2
_NUM_KEPT_KEY = "num_kept_tensors"  # same as in megatrain.models.passthrough, which imports torch
_LAST = (sys.maxsize, "")  # larger than the key of any save


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """One rank's part of a checkpoint.

    Attributes:
        path: Directory of the rank's store, next to the document, such as ``"rank00003"``; "" for a single process.
        xxh3_64: Checksum of the generation's manifest, so that no other generation can take its place. "" if the
            manifest is the document.
    """

    path: str
    generation: int
    xxh3_64: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, or a whole copy of a checkpoint. Its blocks are not read yet.

    A scan (``scan.py``) sets ``nbytes`` and all later fields. Before a scan, their defaults mean "no problem".

    Attributes:
        number: Larger than the number of any earlier checkpoint. For a single process, the number of the generation.
        meta: ``RunState`` as JSON; empty if it cannot be read.
        elements: Number of elements by block, without the padding of shards. Empty if the recorded lengths of blocks
            have no padding.
        outside: Drives outside of a copied or moved run that contain parts of its checkpoint.
        problem: Reason why the checkpoint cannot be used, according to documents and file names, or None.
        is_foreign: Whether another program or a newer version wrote the checkpoint. A run then ends with an error
            instead of skipping the checkpoint.
        is_newest: Whether a run would resume from the checkpoint.
        manifest: Manifest of the only generation, if it is the document and was read.
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
        """Number of ranks that wrote the checkpoint."""
        return len(self.ranks)

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` lists the checkpoint. Otherwise its only generation's manifest is the document."""
        return self.ranks[0].path != ""

    @property
    def note(self) -> str | None:
        """Return a message if an export needs tensors from the model's folder but the folder is missing."""
        model = self.meta.get("model")
        if not isinstance(model, Mapping) or not model.get(_NUM_KEPT_KEY):
            return None
        folder = Path(str(model.get("name")))
        if (folder / "config.json").is_file():
            return None
        return (
            f"an export needs the {model[_NUM_KEPT_KEY]} tensors that were kept in '{folder}', which does not exist. "
            "Restore it, or name a copy of it: megatrain-tier export --model FOLDER"
        )

    @property
    def is_copy(self) -> bool:
        """Whether this is a whole copy. The run's store does not know whole copies."""
        return self.folder.name == COPIES_NAME

    @property
    def is_gone(self) -> bool:
        """Whether parts are certainly lost. With several ranks, they may be on drives of hosts that are not visible."""
        return bool(self.lost) and not self.is_listed

    @property
    def step(self) -> int | None:
        """Number of finished steps; None if it cannot be read."""
        step = self.meta.get("step")
        return step if type(step) is int else None

    @property
    def saved_at(self) -> str:
        """Date and time, ISO 8601; "" if they cannot be read."""
        return str(self.meta.get("saved_at", ""))

    @property
    def save_number(self) -> int:
        """Number of the save within the run; 0 if it was not counted (before December 2026)."""
        number = self.meta.get("save_number")
        return number if type(number) is int else 0

    @property
    def order_key(self) -> tuple[int, str]:
        """Sort key by time: the save number, which grows even if clocks go backwards.

        Older versions did not count saves. Their checkpoints come before all counted ones and are ordered by clock.
        """
        return self.save_number, "" if self.save_number else self.saved_at

    @property
    def identity(self) -> tuple[int | None, str]:
        """Step and save time, which identify a checkpoint within its run."""
        return self.step, self.saved_at

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None if it cannot be read."""
        loss = self.meta.get("last_loss")
        return loss if isinstance(loss, float) else None

    @property
    def where(self) -> str:
        """Name of the document, for messages."""
        return f"{'checkpoint' if self.is_listed else 'generation'} {self.number} in '{self.folder}'"

    @property
    def state(self) -> RunState:
        """The state of the run.

        Raises:
            CheckpointError: ``meta`` is not the state of a run, or a newer version wrote it.
        """
        return RunState.from_meta(self.meta, where=self.where)

    def is_in_stores(self, output_dir: Path, size: int) -> bool:
        """Return whether the stores of a run of ``size`` ranks contain the checkpoint, so that they reuse its files."""
        is_theirs = [each.path for each in self.ranks] == store_paths(size)
        return is_theirs and self.folder == output_dir / CHECKPOINTS_NAME

    def belongs_to(self, output_dir: Path) -> bool:
        """Return whether the checkpoint belongs to the run in ``output_dir``, and not to a run from which it starts."""
        return self.folder.parent == output_dir

    def __str__(self) -> str:
        what = "copy of the checkpoint" if self.is_copy else "checkpoint"
        number = f"number {self.number}, {self.world} ranks" if self.is_listed else f"generation {self.number}"
        return f"the {what} of step {self.step} in '{self.folder}' ({number})"

    @contextmanager
    def errors_with_rank(self, rank: int) -> Iterator[None]:
        """Add the rank's number to errors about the rank's part, if there are several ranks."""
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


# -- read --------------------------------------------------------------------------------------------------------


def read_checkpoints(folder: Path, on_damage: Callable[[GenerationError], None] | None = None) -> list[Checkpoint]:
    """Return all checkpoints in a folder, oldest first, including unreadable checkpoints.

    Args:
        on_damage: Called if ``RANKS.json`` cannot be read. The checkpoints in this file are then skipped.

    Raises:
        GenerationError: ``RANKS.json`` is damaged, and ``on_damage`` is None.
        NewerFormatError: A newer version of this program wrote ``RANKS.json``, and ``on_damage`` is None.
    """
    listed: list[Checkpoint] = []
    try:
        listed = _read_document(folder)
    except GenerationError as error:
        if on_damage is None:
            raise
        on_damage(error)
    return merge_by_save(list(_read_generations(folder))[::-1], listed[::-1])[::-1]


def merge_by_save(own: Sequence[Checkpoint], others: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Merge two sequences by save number. On a tie, the entry of the first sequence comes first.

    Each sequence keeps its order. An unreadable checkpoint stays directly behind its predecessor.

    Args:
        own: Checkpoints, newest first.
        others: Checkpoints, newest first, for example the copies of ``own``.
    """

    def keys(checkpoints: Sequence[Checkpoint]) -> list[tuple[int, str]]:
        found: list[tuple[int, str] | None] = []
        number = 0
        for each in reversed(checkpoints):
            # An older version may have continued a counted run. Its saves come after the last counted save.
            number = max(number, each.save_number)
            is_known = each.save_number or each.saved_at
            found.append((number, each.order_key[1]) if is_known else None)
        key = _LAST
        return [key := each or key for each in reversed(found)]

    merged, left = [], list(zip(keys(others), others, strict=True))
    for key, checkpoint in zip(keys(own), own, strict=True):
        while left and left[0][0] > key:
            merged.append(left.pop(0)[1])
        merged.append(checkpoint)
    return [*merged, *(each for _, each in left)]


def folder_notices(folder: Path) -> list[str]:
    """Return a notice for each document in a folder of checkpoints that is older than the files it describes.

    This happens if the folder is a copy of a live run, or if the run crashed before it wrote the document.
    """
    notices = []
    with contextlib.suppress(NewerFormatError):  # ``read_checkpoints`` reports this error
        if list_generations(folder) and (problem := top_problem(folder)) is not None:
            notices.append(f"{problem}. The checkpoints themselves decide: the newest whole one is continued")
    with contextlib.suppress(GenerationError):
        unnamed = {
            path.name: generations
            for path in sorted(folder.glob(RANK_FOLDERS))
            if (generations := list_generations(path))
        }
        if unnamed and not _read_document(folder):
            parts = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in unnamed.items())
            notices.append(
                f"'{folder / RANKS_NAME}' names no checkpoint, so these generations of ranks are not checkpoints: "
                f"{parts}. They stay until a run here has saved a checkpoint"
            )
    return notices


def _read_generations(folder: Path) -> Iterator[Checkpoint]:
    """Yield a single process's checkpoints, oldest first. They are the generations of a store in the folder itself."""
    for number in list_generations(folder):
        ranks = (RankGeneration("", number),)
        try:
            manifest = read_manifest(folder, number)
        except GenerationError as error:
            if number in list_generations(folder):  # otherwise a live run has just removed the generation
                is_newer = isinstance(error, NewerFormatError)
                yield Checkpoint(folder, number, ranks, problem=str(error), is_foreign=is_newer)
        else:
            meta = manifest.meta if isinstance(manifest.meta, dict) else {}
            yield Checkpoint(folder, number, ranks, meta, manifest=manifest)


def _read_document(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder's ``RANKS.json``, oldest first, or an empty list without this file."""
    path = folder / RANKS_NAME
    try:
        document = json.loads(read_document_file(path))
        version, expected, body = document["format"], document["xxh3_64"], document["checkpoints"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GenerationError(f"'{path}' cannot be read: {error}. Restore it from a backup of the folder") from error
    if not isinstance(version, int) or version > RANKS_FORMAT:
        raise NewerFormatError(f"'{path}' has format {version}, but this version reads up to {RANKS_FORMAT}: upgrade")
    if checksum(json.dumps(body, sort_keys=True).encode()) != expected:
        raise GenerationError(f"'{path}' is damaged: its checksum does not match. Restore it from a backup")
    try:
        return [_checkpoint(folder, each) for each in body]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GenerationError(f"'{path}' is invalid: {error}. Restore it from a backup") from error


def _checkpoint(folder: Path, fields: Mapping[str, Any]) -> Checkpoint:
    """Return a validated checkpoint. Raises ``KeyError``, ``TypeError`` or ``ValueError``.

    The document may be untrusted, and it determines which generations are removed. A folder name in the document must
    therefore not lead outside of the folder.
    """
    ranks = tuple(RankGeneration(**rank) for rank in fields["ranks"])
    for rank, each in enumerate(ranks):
        if each.path != rank_folder_name(rank):
            raise ValueError(f"rank {rank} has the path {each.path!r} instead of '{rank_folder_name(rank)}'")
        is_sealed = isinstance(each.xxh3_64, str) and each.xxh3_64 != ""
        if type(each.generation) is not int or each.generation < 1 or not is_sealed:
            raise ValueError(f"rank {rank} lacks a checksum, or has the invalid generation {each.generation!r}")
    numbers = (fields["number"], fields["lanes"], *fields["elements"].values())
    if not ranks or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"checkpoint {fields['number']!r} has {len(ranks)} ranks, or invalid numbers")
    if not isinstance(fields["meta"], dict):
        raise TypeError(f"the state of checkpoint {fields['number']} is not an object")
    return Checkpoint(folder, fields["number"], ranks, fields["meta"], fields["lanes"], fields["elements"])


def read_manifests(checkpoint: Checkpoint) -> list[Manifest]:
    """Return the manifest of each rank's generation.

    Raises:
        GenerationError: A generation is missing, differs, or lacks a block. With several ranks, it names the rank.
    """
    found: list[Manifest] = []
    for rank, each in enumerate(checkpoint.ranks):
        directory = checkpoint.folder / each.path
        with checkpoint.errors_with_rank(rank):
            if each.xxh3_64 and (sum_ := manifest_checksum(directory, each.generation)) != each.xxh3_64:
                raise GenerationError(
                    f"the manifest of generation {each.generation} has checksum {sum_}, {RANKS_NAME} says "
                    f"{each.xxh3_64}: it is another generation, or damaged"
                )
            found.append(read_manifest(directory, each.generation))
            shapes = [[(block.key, block.shape) for block in manifest.blocks] for manifest in (found[0], found[-1])]
            if shapes[0] != shapes[1]:
                raise GenerationError("its blocks differ from the blocks of rank 0")
    return found


def whole_blocks(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> dict[str, BlockRecord]:
    """Return a checkpoint's blocks by key. The shards of all ranks are joined, without their padding.

    Returns:
        Records with the shape of the whole block and the checksums of the shards.

    Raises:
        GenerationError: A block's shards cannot contain the number of elements in the document.
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
    """Return the checksum of a generation's manifest.

    Raises:
        GenerationError: The generation does not exist.
    """
    path = generation_folder(directory, generation) / MANIFEST_NAME
    try:
        return checksum(path.read_bytes())
    except OSError as error:
        raise GenerationError(f"generation {generation} in '{directory}' cannot be read: {error}") from error


# -- write and remove --------------------------------------------------------------------------------------------


def write_document(folder: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Write checkpoints to ``RANKS.json``. The write is atomic and durable."""
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
    """Remove a checkpoint from its document. Then remove the generations that no other checkpoint refers to.

    Raises:
        LockedError: A run uses one of the stores.
        OSError: A file cannot be removed.
    """
    folder = checkpoint.folder
    left = [each for each in read_checkpoints(folder) if each.ranks != checkpoint.ranks]
    if checkpoint.is_listed:
        write_document(folder, [each for each in left if each.is_listed])
    named = _named_generations(left)
    for rank in checkpoint.ranks:
        directory = folder / rank.path
        if (rank.path, rank.generation) in named or rank.generation not in list_generations(directory):
            continue
        # Through a link, remove only the generation with the document's checksum, because others may belong to another
        # run.
        if not directory.is_symlink() or rank.xxh3_64 in ("", manifest_checksum(directory, rank.generation)):
            _remove_generation(directory, rank.generation)


def prune(folder: Path, stay: Sequence[Checkpoint], own: Sequence[str]) -> None:
    """Remove generations that no kept checkpoint refers to. This run's own stores are skipped: they prune themselves.

    Args:
        own: Paths of this run's stores, as in ``RankGeneration``.

    Raises:
        GenerationError: The document cannot be read, so it is unknown which generations are in use.
        OSError: A file cannot be removed.
    """
    _read_document(folder)
    named = _named_generations(stay)
    for name in ["", *sorted(path.name for path in folder.glob(RANK_FOLDERS))]:
        if name not in own:
            for generation in list_generations(folder / name):
                if (name, generation) not in named:
                    _remove_generation(folder / name, generation)


def _named_generations(checkpoints: Sequence[Checkpoint]) -> set[tuple[str, int]]:
    return {(rank.path, rank.generation) for each in checkpoints for rank in each.ranks}


def _remove_generation(directory: Path, generation: int) -> None:
    from tiered import remove_generation  # imported late, because it imports torch and ``status`` must not

    remove_generation(directory, generation)
