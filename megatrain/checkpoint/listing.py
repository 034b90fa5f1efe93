"""Reads and writes the documents of a folder: the list of its checkpoints, and the manifests of each checkpoint.

For several ranks, ``RANKS.json`` lists the checkpoints. For a single process, each generation is a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.names import RANKS_NAME
from megatrain.checkpoint.document import Checkpoint, RankGeneration, merge_by_save
from megatrain.ranks.world import RANK_FOLDERS, rank_folder_name
from tiered import checksum, list_generations, read_manifest
from tiered.errors import GenerationError, NewerFormatError
from tiered.ext import MANIFEST_NAME, generation_folder, read_document_file, replace_file, top_problem

if TYPE_CHECKING:
    from tiered import BlockRecord, Manifest

__all__ = [
    "ManifestReader",
    "folder_notices",
    "ignore_damage",
    "manifest_checksum",
    "read_checkpoints",
    "read_listed",
    "read_manifests",
    "still_exists",
    "whole_blocks",
    "write_document",
]

#: Function that returns the manifest of a generation in a directory, like ``read_manifest``.
ManifestReader = Callable[[Path, int], "Manifest"]

#: Format of ``RANKS.json``. Readers refuse newer formats.
RANKS_FORMAT = 2


def read_checkpoints(
    folder: Path,
    on_damage: Callable[[GenerationError], None] | None = None,
    read: ManifestReader = read_manifest,
) -> list[Checkpoint]:
    """Return all checkpoints in a folder, oldest first, including unreadable checkpoints.

    Args:
        on_damage: Called if ``RANKS.json`` cannot be read. The checkpoints in this file are then skipped.
        read: Function that reads manifests. A caller that reads manifests repeatedly passes a cached function.

    Raises:
        GenerationError: ``RANKS.json`` is damaged, and ``on_damage`` is None.
        NewerFormatError: A newer version of this program wrote ``RANKS.json``, and ``on_damage`` is None.
    """
    listed_checkpoints: list[Checkpoint] = []
    try:
        listed_checkpoints = read_listed(folder)
    except GenerationError as error:
        if on_damage is None:
            raise
        on_damage(error)
    return merge_by_save(list(_read_generations(folder, read))[::-1], listed_checkpoints[::-1])[::-1]


def ignore_damage(error: GenerationError) -> None:
    """Do nothing, because another search for checkpoints reports the damage."""


def _read_generations(folder: Path, read: ManifestReader) -> Iterator[Checkpoint]:
    """Yield a single process's checkpoints, oldest first. They are the generations of a store in the folder itself."""
    for generation in list_generations(folder):
        try:
            meta = read(folder, generation).meta
        except GenerationError:
            if generation not in list_generations(folder):  # a live run has just removed the generation
                continue
            meta = {}
        yield Checkpoint(folder, generation, (RankGeneration("", generation),), meta if isinstance(meta, dict) else {})


def read_listed(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder's ``RANKS.json``, oldest first, or [] if the file does not exist."""
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
        return [_checkpoint(folder, entry) for entry in body]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GenerationError(f"'{path}' is invalid: {error}. Restore it from a backup") from error


def _checkpoint(folder: Path, fields: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint from an entry of ``RANKS.json``. Raises ``KeyError``, ``TypeError`` or ``ValueError``.

    The document may be untrusted, and it determines which generations are removed. Paths that lead outside of the
    folder are therefore refused.
    """
    ranks = tuple(RankGeneration(**rank) for rank in fields["ranks"])
    for rank, part in enumerate(ranks):
        if part.path != rank_folder_name(rank):
            raise ValueError(f"rank {rank} has the path {part.path!r} instead of '{rank_folder_name(rank)}'")
        is_sealed = isinstance(part.xxh3_64, str) and part.xxh3_64 != ""
        if type(part.generation) is not int or part.generation < 1 or not is_sealed:
            raise ValueError(f"rank {rank} lacks a checksum, or has the invalid generation {part.generation!r}")
    numbers = (fields["number"], fields["lanes"], *fields["elements"].values())
    if not ranks or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"checkpoint {fields['number']!r} has {len(ranks)} ranks, or invalid numbers")
    if not isinstance(fields["meta"], dict):
        raise TypeError(f"the state of checkpoint {fields['number']} is not an object")
    return Checkpoint(folder, fields["number"], ranks, fields["meta"], fields["lanes"], fields["elements"])


def still_exists(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint still exists. A live run may have removed it in the meantime."""
    return any(other.ranks == checkpoint.ranks for other in read_checkpoints(checkpoint.folder, ignore_damage))


def write_document(folder: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """Write checkpoints to ``RANKS.json``. The write is atomic and durable."""
    body = [
        {
            "number": checkpoint.number,
            "world": checkpoint.world,
            "lanes": checkpoint.lanes,
            "ranks": [asdict(rank) for rank in checkpoint.ranks],
            "elements": dict(checkpoint.elements),
            "meta": dict(checkpoint.meta),
        }
        for checkpoint in checkpoints
    ]
    digest = checksum(json.dumps(body, sort_keys=True).encode())
    folder.mkdir(parents=True, exist_ok=True)
    document = {"format": RANKS_FORMAT, "xxh3_64": digest, "checkpoints": body}
    replace_file(folder / RANKS_NAME, json.dumps(document, sort_keys=True), durable=True)


def folder_notices(folder: Path) -> list[str]:
    """Return a notice for each document in a folder of checkpoints that is older than the files it describes.

    This happens if the folder was copied from a live run, or if the run crashed before it wrote the document.
    """
    notices = []
    with contextlib.suppress(NewerFormatError):  # ``read_checkpoints`` reports this error
        if list_generations(folder) and (problem := top_problem(folder)) is not None:
            notices.append(f"{problem}. The checkpoints themselves decide: the newest whole one is continued")
    with contextlib.suppress(GenerationError):
        unlisted = {
            path.name: generations
            for path in sorted(folder.glob(RANK_FOLDERS))
            if (generations := list_generations(path))
        }
        if unlisted and not read_listed(folder):
            parts = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in unlisted.items())
            notices.append(
                f"'{folder / RANKS_NAME}' names no checkpoint, so these generations of ranks are not checkpoints: "
                f"{parts}. They stay until a run here has saved a checkpoint"
            )
    return notices


# -- manifests ---------------------------------------------------------------------------------------------------


def read_manifests(checkpoint: Checkpoint, read: ManifestReader = read_manifest) -> list[Manifest]:
    """Return the manifest of each rank's generation.

    Raises:
        GenerationError: A generation is missing, does not match its checksum, or has different blocks than rank 0's.
    """
    manifests: list[Manifest] = []
    for rank, part in enumerate(checkpoint.ranks):
        directory = checkpoint.folder / part.path
        with checkpoint.add_rank_to_errors(rank):
            if part.xxh3_64 and (digest := manifest_checksum(directory, part.generation)) != part.xxh3_64:
                raise GenerationError(
                    f"the manifest of generation {part.generation} has checksum {digest}, {RANKS_NAME} says "
                    f"{part.xxh3_64}: it is another generation, or damaged"
                )
            manifests.append(read(directory, part.generation))
            first_shapes, last_shapes = ([(block.key, block.shape) for block in manifests[i].blocks] for i in (0, -1))
            if first_shapes != last_shapes:
                raise GenerationError("its blocks differ from the blocks of rank 0")
    return manifests


def whole_blocks(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> dict[str, BlockRecord]:
    """Return a checkpoint's blocks by key. The shards of all ranks are joined, without their padding.

    Returns:
        Records with the shape of the whole block and the checksums of the shards.

    Raises:
        GenerationError: A block's shards are too small for the number of elements in the document.
    """
    if not checkpoint.is_listed:
        return {block.key: block for block in manifests[0].blocks}
    blocks: dict[str, BlockRecord] = {}
    for shards in zip(*(manifest.blocks for manifest in manifests), strict=True):
        key, length, world = shards[0].key, shards[0].shape[0], len(shards)
        elements = checkpoint.elements.get(key, length * world)
        if not 0 < elements <= length * world:
            raise GenerationError(f"block '{key}' has {elements} elements, {world} shards of {length} cannot hold them")
        blocks[key] = replace(
            shards[0],
            shape=(elements,),
            nbytes=elements * (shards[0].nbytes // length),
            xxh3_64=tuple(digest for shard in shards for digest in shard.xxh3_64),
        )
    return blocks


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
