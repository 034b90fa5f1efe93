"""Checks of a run's folder after every kill, and after the run has finished."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.inventory import saved_checkpoints
from megatrain.checkpoint.state import RunState
from tiered import GenerationReader, TieredError
from tiered.durable.manifest import MANIFEST_NAME, SNAPSHOT_FOLDER, list_generations, newest_first

__all__ = [
    "Outcome",
    "bytes_on_disk",
    "check_after_kill",
    "check_at_end",
    "newest_copy",
    "problems_of",
    "read_outcome",
]


@dataclass(frozen=True)
class Outcome:
    """Results of a finished run.

    Attributes:
        losses: (step, loss) of each step line in ``metrics.jsonl``.
        state: Checksums of each block in the last checkpoint, by block key.
        weights: Contents of the exported weights file.
    """

    losses: tuple[tuple[int, float], ...]
    state: dict[str, tuple[str, ...]]
    weights: bytes


def read_outcome(folder: Path) -> Outcome:
    """Return the results of the run in ``<folder>/out``."""
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    losses = tuple((line["step"], line["loss"]) for line in lines if "loss" in line)
    blocks = GenerationReader(folder / "out/checkpoints").manifest.blocks
    state = {record.key: record.xxh3_64 for record in blocks}
    return Outcome(losses, state, (folder / "out/final/model.safetensors").read_bytes())


def check_at_end(folder: Path, expected: Outcome) -> Iterator[str]:
    """Yield the differences between a finished run and an undisturbed run, and any leftovers of the export."""
    found = read_outcome(folder)
    if found.losses != expected.losses:
        yield f"losses {found.losses}, not {expected.losses}"
    if found.state.keys() != expected.state.keys():
        yield f"blocks {sorted(found.state)}, not {sorted(expected.state)}"
    differing = [key for key, checksums in expected.state.items() if found.state.get(key, checksums) != checksums]
    if differing:
        yield f"other bits in blocks {differing}"
    if found.weights != expected.weights:
        yield "other bits in final/model.safetensors"
    left = sorted(path.name for path in (folder / "out").iterdir() if "partial" in path.name)
    if left:
        yield f"left beside the export: {left}"


def check_after_kill(folder: Path, keep: int, reported: int, drives: Sequence[Path]) -> Iterator[str]:
    """Yield the errors in the checkpoints of a run that was killed.

    Args:
        keep: Value of save_total_limit.
        reported: Newest step that must not be lost, or -1. It is the step of the newest reported checkpoint or, after a
            loss of drives, of the newest whole copy.
        drives: Paths of the NVMe tier.
    """
    path = folder / "out/checkpoints"
    generations = list_generations(path)
    if len(generations) > keep + 1:
        yield f"generations {generations} where {keep} are kept"
    for drive in drives:
        snap = drive / SNAPSHOT_FOLDER
        names = sorted(e.name for e in snap.iterdir() if e.name.isdigit()) if snap.is_dir() else []
        if len(names) > keep + 1:
            yield f"snapshots {names} on {drive.name} where {keep} are kept"
    saved = saved_checkpoints(folder / "out")
    lost = {each.checkpoint.number for each in saved if each.is_gone and not each.checkpoint.is_copy}
    usable = next((each.checkpoint for each in saved if not each.is_gone), None)
    best = -1 if usable is None or usable.step is None else usable.step
    if best < reported:
        yield f"the newest checkpoint is of step {best}, but step {reported} was reported"
    try:
        yield from _problems_of_copies(folder / "out/copies", keep)
        newest = next((number for number in newest_first(path) if number not in lost), None)
        if newest is not None:
            # A kill during the first commit can leave a complete generation that no top-level manifest names yet.
            is_named = (path / MANIFEST_NAME).exists()
            yield from (text for text in problems_of(path, newest) if is_named or "names the current" not in text)
            RunState.from_meta(GenerationReader(path, newest).manifest.meta, where=str(path))
    except TieredError as error:
        yield str(error)


def _problems_of_copies(path: Path, keep: int) -> Iterator[str]:
    """Yield the errors in whole copies. Every listed copy must be intact, and old copies must have been removed."""
    numbers = newest_first(path)
    if len(numbers) > max(keep, 2):
        yield f"copies {numbers} where {keep} are kept"
    is_named = (path / MANIFEST_NAME).exists()
    for number in numbers:
        yield from (text for text in problems_of(path, number) if is_named or "names the current" not in text)


def newest_copy(folder: Path) -> int | None:
    """Return the step of the newest whole copy of a run's checkpoints, or None."""
    copies = [each.checkpoint for each in saved_checkpoints(folder / "out") if each.checkpoint.is_copy]
    return max((copy.step for copy in copies if copy.step is not None), default=None)


def problems_of(path: Path, generation: int | None = None) -> list[str]:
    """Return all errors in a generation. Default: the current generation."""
    return list(GenerationReader(path, generation).problems())


def bytes_on_disk(folders: Sequence[Path]) -> int:
    """Return the disk usage of the files in these folders. A file with several hard links counts once."""
    seen = {}
    for folder in folders:
        for file in folder.rglob("*"):
            found = file.lstat()
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())
