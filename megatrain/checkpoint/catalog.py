"""The checkpoints in a folder: listed, found by step, checked byte by byte, removed. No store is opened."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatrain.checkpoint.ranks import (
    RANKS_NAME,
    RanksCheckpoint,
    RanksReader,
    forget_checkpoint,
    read_checkpoints,
)
from megatrain.checkpoint.resume import Checkpoint
from megatrain.checkpoint.state import CheckpointError, RunState
from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME, COPIES_NAME, in_order, missing_parts
from megatrain.config.resolved import FILE_NAME
from megatrain.engine.program import kind_of_key
from megatrain.models.carried import CARRIED_COUNT
from megatrain.run.folder import living_owner
from tiered import (
    BlockRecord,
    GenerationReader,
    Manifest,
    list_generations,
    newest_first,
    read_manifest,
    remove_generation,
)
from tiered.errors import GenerationError, TieredError
from tiered.ext import SNAPSHOT_FOLDER
from tiered.units import format_size

__all__ = [
    "CheckpointInfo",
    "LostPart",
    "check_not_in_use",
    "checkpoints_folder",
    "find_checkpoint",
    "list_checkpoints",
    "reader_of",
    "remove_checkpoint",
    "search_paths",
    "verify_checkpoints",
]


@dataclass(frozen=True, slots=True)
class LostPart:
    """What of a checkpoint is gone with one drive.

    Attributes:
        path: of the drive.
        is_there: whether that path exists: else the drive may not be mounted.
        blocks: keys of the blocks that had files there, e.g. ``"model.layers.0/weight"``.
        num_blocks: of the whole checkpoint.
        nbytes: of ``blocks``; those striped over several drives have only a part of them on this one.
    """

    path: str
    is_there: bool
    blocks: tuple[str, ...]
    num_blocks: int
    nbytes: int

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(kind_of_key(key) for key in self.blocks))
        absent = "" if self.is_there else ", which is not there"
        return (
            f"{len(self.blocks)} of {self.num_blocks} blocks ({kinds}; {format_size(self.nbytes)}) lay in "
            f"'{self.path}'{absent}"
        )


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, as its manifest describes it.

    Attributes:
        step: steps done; None where the manifest cannot be read.
        generation: its number in the folder.
        saved_at: date and time, ISO 8601.
        nbytes: of all blocks.
        loss: of the last step.
        is_newest: whether a run in this folder would continue from it.
        problem: why it cannot be used, judged by its manifest and the names of its files; None if it looks sound.
        is_copy: whether it is a whole copy in ``output_dir/copies``.
        note: what an export of it needs and lacks; None: nothing.
        lost: what of it is gone, for each drive.
        num_ranks: processes that wrote it, each a part; ``generation`` is then its number in their document.
    """

    step: int | None
    generation: int
    saved_at: str | None
    nbytes: int
    loss: float | None
    is_newest: bool
    problem: str | None
    is_copy: bool = False
    note: str | None = None
    lost: tuple[LostPart, ...] = ()
    num_ranks: int = 1


def reader_of(checkpoint: Checkpoint) -> GenerationReader | RanksReader:
    """Return what reads the blocks of a checkpoint, whoever wrote it.

    Raises:
        GenerationError: a part of it is not there.
    """
    search = search_paths(checkpoint.path)
    if checkpoint.ranks is None:
        return GenerationReader(checkpoint.path, checkpoint.generation, search)
    return RanksReader(checkpoint.path, checkpoint.ranks, search)


def checkpoints_folder(run: Path | str) -> Path:
    """Return the directory of generations for an ``output_dir``, or for that directory itself.

    Falls back to the whole copies where the checkpoints themselves are gone.

    Raises:
        CheckpointError: there is no such folder, or no checkpoint was ever saved in it.
    """
    folder = Path(os.path.abspath(run))
    for candidate in (folder / CHECKPOINTS_NAME, folder / COPIES_NAME, folder):
        if (candidate / SNAPSHOT_FOLDER).is_dir() or (candidate / RANKS_NAME).is_file():
            return candidate
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a folder. Give the output_dir of a run")
    raise CheckpointError(f"'{folder}' holds no checkpoint. Give the output_dir of a run that saved")


def list_checkpoints(run: Path | str) -> list[CheckpointInfo]:
    """Return all checkpoints of a run, the one saved last at the end; damaged ones with their problem.

    Reads manifests only. Works beside a living run.

    Args:
        run: ``output_dir``, or its folder of checkpoints.

    Raises:
        CheckpointError: no checkpoint was ever saved there.
    """
    own, copies = _folders(run)
    infos: list[CheckpointInfo] = []
    tried: list[list[CheckpointInfo]] = []
    for folder, is_copy in ((own, False), (copies, True)):
        if folder is None:
            tried.append([])
            continue
        found = [_describe(folder, generation, is_copy=is_copy) for generation in list_generations(folder)]
        there = {info.generation: info for info in found if info is not None}
        of_ranks = [_describe_ranks(folder, each, is_copy=is_copy) for each in _of_ranks(folder)]
        infos += in_order([*there.values()][::-1], of_ranks[::-1], lambda info: info.saved_at or "")[::-1]
        whole = [there[number] for number in newest_first(folder) if number in there]
        tried.append(in_order(whole, of_ranks[::-1], lambda info: info.saved_at or ""))
    order = in_order(tried[0], tried[1], lambda info: info.saved_at or "")
    newest = next((info for info in order if info.problem is None), None)
    return [replace(info, is_newest=info is newest) for info in infos]


def _folders(run: Path | str) -> tuple[Path | None, Path | None]:
    """Return the directory of checkpoints, and that of copies of them; None: there is none.

    Raises:
        CheckpointError: there is neither.
    """
    folder = checkpoints_folder(run)
    if folder.name == COPIES_NAME:
        return None, folder
    copies = folder.parent / COPIES_NAME
    given_alone = folder == Path(os.path.abspath(run))
    is_there = (copies / SNAPSHOT_FOLDER).is_dir() or (copies / RANKS_NAME).is_file()
    has_copies = folder.name == CHECKPOINTS_NAME and not given_alone and is_there
    return folder, copies if has_copies else None


def _describe(folder: Path, generation: int, *, is_copy: bool) -> CheckpointInfo | None:
    """Read a manifest; None if a running process has just removed it."""
    try:
        manifest = read_manifest(folder, generation)
        state = RunState.from_meta(manifest.meta, where=f"generation {generation} in '{folder}'")
    except (GenerationError, CheckpointError) as error:
        if generation not in list_generations(folder):
            return None
        return CheckpointInfo(None, generation, None, 0, None, False, str(error), is_copy)
    nbytes = sum(record.nbytes for record in manifest.blocks)
    lost = _lost_parts(folder, manifest)
    problem, note = _describe_lost(lost), _lacks(state)
    return CheckpointInfo(
        state.step, generation, state.saved_at, nbytes, state.last_loss, False, problem, is_copy, note, lost
    )


def _of_ranks(folder: Path) -> list[RanksCheckpoint]:
    """Return the checkpoints of several ranks in a folder, oldest first.

    Raises:
        CheckpointError: their document cannot be read.
    """
    try:
        return read_checkpoints(folder)
    except GenerationError as error:
        raise CheckpointError(str(error)) from error


def _describe_ranks(folder: Path, found: RanksCheckpoint, *, is_copy: bool) -> CheckpointInfo:
    problem: str | None = None
    nbytes, world = 0, found.world
    try:
        state = RunState.from_meta(found.meta, where=f"checkpoint {found.number} in '{folder}'")
    except CheckpointError as error:
        return CheckpointInfo(None, found.number, None, 0, None, False, str(error), is_copy, num_ranks=world)
    try:
        reader = RanksReader(folder, found, search_paths(folder))
        nbytes = sum(record.nbytes for record in reader.blocks.values())
        for each in found.ranks:
            own = read_manifest(folder / each.path, each.generation)
            search = [path / each.path for path in search_paths(folder)]
            if missing := missing_parts(asdict(own), folder / each.path, search):
                problem = f"parts of it are gone: what {each.path} had in {', '.join(map(str, missing))}"
    except GenerationError as error:
        problem = str(error)
    note = _lacks(state)
    return CheckpointInfo(
        state.step,
        found.number,
        state.saved_at,
        nbytes,
        state.last_loss,
        False,
        problem,
        is_copy,
        note=note,
        num_ranks=world,
    )


def _lost_parts(folder: Path, manifest: Manifest) -> tuple[LostPart, ...]:
    missing = missing_parts(asdict(manifest), folder, search_paths(folder))
    if not missing or manifest.generation not in list_generations(folder):
        return ()
    sizes = {record.key: record.nbytes for record in manifest.blocks}
    return tuple(
        LostPart(str(path), path.is_dir(), keys, len(sizes), sum(sizes[key] for key in keys))
        for path, keys in missing.items()
    )


def _describe_lost(lost: Sequence[LostPart]) -> str | None:
    return "parts of it are gone: " + "; ".join(map(str, lost)) if lost else None


def _lacks(state: RunState) -> str | None:
    """Say if the model's folder is gone that an export copies tensors from."""
    count, folder = state.model.get(CARRIED_COUNT), Path(str(state.model.get("name")))
    if not count or (folder / "config.json").is_file():
        return None
    return (
        f"an export needs the {count} tensors that were kept in '{folder}', which is not there. Bring it back, or name "
        "a copy of it: megatrain-tier export --model FOLDER"
    )


def find_checkpoint(run_or_folder: Path | str, step: int | None = None) -> Checkpoint:
    """Return the checkpoint of a step, default the newest, whose manifest is whole.

    Args:
        run_or_folder: ``output_dir``, its folder of checkpoints, or the folder ``snap/<generation>`` of one.
        step: of several checkpoints of one step the newest is taken.

    Raises:
        CheckpointError: there is none; the message lists the steps that there are.
    """
    given = Path(os.path.abspath(run_or_folder))
    places: list[Path] = []  # of documents of several ranks
    if given.parent.name == SNAPSHOT_FOLDER and given.name.isdigit():
        folder = given.parent.parent
        numbers = [(folder, int(given.name))]
    else:
        folder = checkpoints_folder(given)
        places.append(folder)
        numbers = [(folder, number) for number in newest_first(folder)]
        if step is not None:  # also one that a crash kept from becoming the current one
            first = {number for _, number in numbers}
            numbers += [(folder, n) for n in reversed(list_generations(folder)) if n not in first]
        own, copies = _folders(given)
        if own is not None and copies is not None:
            numbers += [(copies, number) for number in newest_first(copies)]
            places.append(copies)
    steps: list[int] = []
    found: list[Checkpoint] = []
    of_ranks: list[Checkpoint] = []
    lost: dict[int, str] = {}
    problem: Exception | None = None
    documents = [(each, folder) for folder in places for each in reversed(_of_ranks(folder))]
    for each, place in documents:
        is_copy = place.name == COPIES_NAME
        info = _describe_ranks(place, each, is_copy=is_copy)
        if info.problem is None and info.step is not None:
            steps.append(info.step)
            if step is None or info.step == step:
                state = RunState.from_meta(each.meta, where=f"checkpoint {each.number} in '{place}'")
                of_ranks.append(Checkpoint(place, each.number, state, is_copy=is_copy, ranks=each))
        elif info.problem is not None and info.step is not None:
            lost[info.step] = f"the checkpoint of step {info.step} in '{place}' cannot be used: {info.problem}"
            problem = problem or CheckpointError(lost[info.step])
    for place, generation in numbers:
        try:
            manifest = read_manifest(place, generation)
            state = RunState.from_meta(manifest.meta, where=f"generation {generation} in '{place}'")
            gone = _describe_lost(_lost_parts(place, manifest))
            if gone is not None:
                lost[state.step] = f"the checkpoint of step {state.step} in '{place}' cannot be used: {gone}"
                raise CheckpointError(lost[state.step])
        except (GenerationError, CheckpointError) as error:
            problem = problem or error
            continue
        if step is None or state.step == step:
            is_copy = place.name == COPIES_NAME
            found.append(Checkpoint(place, generation, state, is_copy=is_copy))
        steps.append(state.step)
    if found or of_ranks:
        own_ones, whole_copies = (
            in_order(
                [one for one in found if one.is_copy == is_copy],
                [one for one in of_ranks if one.is_copy == is_copy],
                lambda one: one.state.saved_at,
            )
            for is_copy in (False, True)
        )
        return in_order(own_ones, whole_copies, lambda one: one.state.saved_at)[0]
    if step in lost:
        raise CheckpointError(lost[step])
    if steps:
        known = ", ".join(map(str, sorted(set(steps))))
        raise CheckpointError(f"'{folder}' holds no checkpoint of step {step}. There are those of steps {known}")
    if problem is not None:
        raise CheckpointError(f"no checkpoint in '{folder}' can be used: {problem}") from problem
    raise CheckpointError(f"'{folder}' holds no checkpoint. Give the output_dir of a run that saved")


def search_paths(folder: Path) -> list[Path]:
    """Return the drives that the config of the last run in ``output_dir`` names: parts of checkpoints may have moved.

    Args:
        folder: of the checkpoints, inside ``output_dir``.
    """
    try:
        values = tomllib.loads((folder.parent / FILE_NAME).read_text(encoding="utf-8"))
        return [Path(table["path"]) for table in values["tiers"]["nvme"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def verify_checkpoints(
    run: Path | str, step: int | None = None, on_block: Callable[[int, str], None] | None = None
) -> Iterator[tuple[CheckpointInfo, list[str]]]:
    """Read every byte of the checkpoints and yield each with its problems; none: it is sound.

    Works beside a living run. A checkpoint that the run prunes meanwhile is left out.

    Args:
        run: ``output_dir``, or its folder of checkpoints.
        step: only that one.
        on_block: called with (generation, block) after each block.

    Raises:
        CheckpointError: there is no checkpoint (of that step).
    """
    own, copies = _folders(run)
    infos = [info for info in list_checkpoints(run) if step is None or info.step == step]
    if not infos:
        find_checkpoint(run, step)  # says what there is
    for info in infos:
        folder = copies if info.is_copy else own
        assert folder is not None, info
        if info.num_ranks > 1:
            yield info, [info.problem] if info.problem is not None else _problems_of_ranks(folder, info, on_block)
            continue
        problems = [info.problem] if info.problem is not None else _problems(folder, info.generation, on_block)
        if not problems or info.generation in list_generations(folder):
            yield info, problems


def _problems(folder: Path, generation: int, on_block: Callable[[int, str], None] | None) -> list[str]:
    def tell(record: BlockRecord) -> None:
        if on_block is not None:
            on_block(generation, record.key)

    try:
        return list(GenerationReader(folder, generation, search_paths(folder)).problems(tell))
    except (TieredError, OSError) as error:
        return [str(error)]


def _problems_of_ranks(folder: Path, info: CheckpointInfo, on_block: Callable[[int, str], None] | None) -> list[str]:
    def tell(record: BlockRecord) -> None:
        if on_block is not None:
            on_block(info.generation, record.key)

    (found,) = (each for each in _of_ranks(folder) if each.number == info.generation)
    try:
        return list(RanksReader(folder, found, search_paths(folder)).problems(tell))
    except (TieredError, OSError) as error:
        return [str(error)]


def remove_checkpoint(
    run: Path | str, generation: int, *, is_copy: bool = False, force: bool = False, num_ranks: int = 1
) -> int:
    """Remove one checkpoint, including its parts on other drives; return the bytes freed.

    Args:
        run: ``output_dir``, or its folder of checkpoints.
        generation: number of the generation, from ``list_checkpoints``.
        is_copy: remove a whole copy, not the checkpoint itself.
        force: remove it even if it is the last usable checkpoint.
        num_ranks: as of the checkpoint.

    Raises:
        CheckpointError: it is the only one that can be used, or a living run has the folder.
        LockedError: a run that has just started has it.
        OSError: a file cannot be removed; calling it again goes on.
    """
    own, copies = _folders(run)
    folder = copies if is_copy else own
    if folder is None:
        raise CheckpointError(f"'{run}' holds no {'copies' if is_copy else 'checkpoints'}")
    check_not_in_use(folder)
    infos = {(info.generation, info.is_copy, info.num_ranks): info for info in list_checkpoints(run)}
    info = infos.get((generation, is_copy, num_ranks))
    if info is None:
        raise CheckpointError(f"'{folder}' holds no generation {generation}")
    others = [other for other in infos.values() if other.problem is None and other is not info]
    if info.problem is None and not others and not force:
        raise CheckpointError(
            f"the checkpoint of step {info.step} is the only one in '{folder}' that can be used. Remove it with --all"
        )
    if num_ranks > 1:
        forget_checkpoint(folder, generation)
    else:
        remove_generation(folder, generation)
    return info.nbytes


def check_not_in_use(folder: Path) -> None:
    """Raise ``CheckpointError`` if a living run has the folder of checkpoints, or the ``output_dir`` above it."""
    for place in (folder, folder.parent) if folder.name in (CHECKPOINTS_NAME, COPIES_NAME) else (folder,):
        owner = living_owner(place)
        if owner is not None:
            raise CheckpointError(
                f"'{place}' is in use by {owner.text}: nothing was removed. Stop that run first: megatrain-tier stop"
            )
