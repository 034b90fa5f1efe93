"""Makes checkpoints of generations: the two phases of a save, jointly on all ranks of a run (see `document.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.document import (
    Checkpoint,
    RankGeneration,
    manifest_checksum,
    prune,
    read_checkpoints,
    store_paths,
    write_document,
)
from megatrain.checkpoint.state import CheckpointError
from tiered import list_generations
from tiered.errors import GenerationError, TieredError
from tiered.ext import claim_directory, files_below, generation_folder

if TYPE_CHECKING:
    from tiered import Commit, CopyFigures, TieredStore

__all__ = ["CheckpointFolder", "CheckpointWriter", "CopyWriter"]

#: All-gathers one object per rank: ``RankGroup.gather``. A collective.
Gather = Callable[[Any], Sequence[Any]]


class CheckpointFolder:
    """A folder of checkpoints or copies, in the same state on all ranks. Rank 0 changes it and informs the others.

    All ranks call the same methods in the same order.

    Args:
        gather: All-gathers one object per rank; a collective.
        on_message: called on rank 0 if old files could not be removed, which costs no checkpoint.
        ignores_damage: Whether a damaged document counts as empty and is replaced by the next one. Otherwise it
            raises an error.

    Attributes:
        known: the existing checkpoints, oldest first.
        best: a checkpoint that is kept at any age, in addition to ``keep`` others.
        own: path of this rank's store, as in ``RankGeneration``.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        gather: Gather,
        keep: int,
        on_message: Callable[[str], None],
        *,
        ignores_damage: bool = False,
    ) -> None:
        self.path, self.rank, self.keep = path, rank, keep
        self.best: Checkpoint | None = None
        self.gather, self._on_message = gather, on_message
        self.paths = store_paths(len(gather(None)))
        self.own = self.paths[rank]
        on_damage = None if self.is_listed and not ignores_damage else _ignore_damage
        self.known: list[Checkpoint] = self.from_first(lambda: read_checkpoints(path, on_damage))

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` names the checkpoints. A single process names them in its generations' manifests."""
        return self.own != ""

    @property
    def newest_number(self) -> int:
        """Largest number among the checkpoints of this form, or 0."""
        return max((each.number for each in self.known if each.is_listed == self.is_listed), default=0)

    def generations(self, checkpoints: Sequence[Checkpoint | None]) -> list[int]:
        """Return the generations of this rank in these checkpoints."""
        ranks = [rank for each in checkpoints if each is not None for rank in each.ranks]
        return [rank.generation for rank in ranks if rank.path == self.own]

    def newest(self, checkpoints: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
        """Return the newest ``keep`` of these checkpoints, and the best one in addition."""
        is_best = [self.best is not None and each.ranks == self.best.ranks for each in checkpoints]
        others = [number for number, best in enumerate(is_best) if not best]
        stay = set(others[max(0, len(others) - keep) :])
        return [each for number, each in enumerate(checkpoints) if is_best[number] or number in stay]

    def change(self, keep: int, *, drop: Sequence[Checkpoint] = (), made: Checkpoint | None = None) -> None:
        """Keep the newest checkpoints and remove the others. A collective.

        Generations in this run's own stores are removed by the stores' next commits.

        Args:
            drop: checkpoints to remove at any age.
            made: a new checkpoint, whose generations are whole.
        """
        doomed = {each.ranks for each in drop}
        left = [each for each in self.known if each.ranks not in doomed]
        left = self.newest(left if made is None else [*left, made], keep)

        def write() -> None:
            listed = [each for each in left if each.is_listed]
            if listed != [each for each in self.known if each.is_listed]:
                write_document(self.path, listed)
            try:
                prune(self.path, left, self.paths)
            except (TieredError, OSError) as error:
                self._on_message(f"old checkpoints in '{self.path}' could not be removed: {error}")

        if left != self.known:
            # All ranks wait for rank 0's write, so that no rank starts another commit, which prunes, before it.
            self.from_first(write)
            self.known = left

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Run ``find`` on rank 0, and return its result, or raise its error, on all ranks. A collective."""
        found: Any = None
        if self.rank == 0:
            try:
                found = find(), None
            except (TieredError, CheckpointError, OSError) as error:
                found = None, self.named(str(error))
        result, problem = self.gather(found)[0]
        if problem is not None:
            raise CheckpointError(problem)
        return result

    def named(self, problem: str) -> str:
        """Return an error message with this rank's number, if there are several ranks."""
        return f"rank {self.rank}: {problem}" if self.is_listed else problem


def _ignore_damage(error: GenerationError) -> None:
    """Do nothing, because the search for checkpoints has reported it."""


class CheckpointWriter:
    """The two phases of a save. All ranks call the same methods in the same order.

    Args:
        store: Store of this rank. Its commits now keep the generations named in checkpoints, and prune older others.
        lanes: Lanes in which gradients are added up.
        elements: Elements by block, without the padding of shards.
        is_past: Whether a checkpoint is not newer than the one that this run resumed from. Newer ones could not be
            loaded, so the first save drops them and keeps the loaded one.
        save_number: largest save number among copies elsewhere.
        starts_over: Whether the run continues no checkpoint. Then unnamed generations of these ranks stay until the
            run has saved its first checkpoint.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        store: TieredStore,
        *,
        lanes: int,
        elements: Mapping[str, int],
        is_past: Callable[[Checkpoint], bool] = lambda checkpoint: True,
        save_number: int = 0,
        starts_over: bool = False,
    ) -> None:
        self.folder, self._lanes, self._elements, self._is_past = folder, lanes, dict(elements), is_past
        self._save_number = max(save_number, *(each.save_number for each in folder.known), 0)
        self._unnamed: dict[str, list[int]] = {}
        if folder.is_listed and starts_over:
            self._unnamed = folder.from_first(
                lambda: {path: list_generations(folder.path / path) for path in folder.paths}
            )
        if folder.is_listed:
            store.keep_only(lambda: [*folder.generations(folder.known), *self._unnamed.get(folder.own, ())])
        else:  # the generations are the checkpoints: the store counts them itself when the newest is whole
            store.keep_also(lambda: folder.generations([folder.best]))

    def begin(self) -> None:
        """Drop checkpoints to make room for the next one, but never the last."""
        drop = [each for each in self.folder.known if not self._is_past(each)]
        self.folder.change(self._num_left, drop=drop)
        self._is_past = lambda checkpoint: True  # new checkpoints from now on

    def next_save_number(self) -> int:
        """Return the number of the save that begins, which is larger than all earlier ones."""
        self._save_number += 1
        return self._save_number

    @property
    def _num_left(self) -> int:
        return max(1, self.folder.keep - 1)

    @property
    def _past(self) -> list[Checkpoint]:
        return [each for each in self.folder.known if self._is_past(each)]

    def outgoing(self) -> list[Checkpoint]:
        """Return the checkpoints that the next one replaces."""
        stay = [each.ranks for each in self.folder.newest(self._past, self.folder.keep - 1)]
        return [each for each in self.folder.known if each.ranks not in stay]

    def agree_on_room(self, free_bytes: Callable[[], int], is_stopping: bool) -> tuple[int, bool]:
        """Return rank 0's free bytes for the checkpoint of all ranks, and whether any rank has a stop request.

        Counts the space that ``begin`` and the next commits free: generations that will no longer be named.
        """
        free = 0
        if self.folder.rank == 0:
            left = self.folder.newest(self._past, self._num_left)
            named = {(rank.path, rank.generation) for each in left for rank in each.ranks}
            named |= {(path, number) for path, numbers in self._unnamed.items() for number in numbers}
            for path in self.folder.paths:
                directory = self.folder.path / path
                for number in list_generations(directory):
                    if (path, number) not in named:
                        files = files_below(generation_folder(directory, number))
                        free += sum(found.st_blocks * 512 for file in files if (found := file.lstat()).st_nlink == 1)
            free += free_bytes()
        gathered = self.folder.gather((free, is_stopping))
        return gathered[0][0], any(stopping for _, stopping in gathered)

    def of_all(self, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the sums over all ranks."""
        first, second, third = (sum(each) for each in zip(*self.folder.gather(sizes), strict=True))
        return first, second, third

    def are_whole(self, commit: Commit) -> bool:
        """Return whether the generations of all ranks are whole, or have failed. Does not wait for the drives."""
        return all(self.folder.gather(commit.is_done))

    def finish(self, commit: Commit, meta: Mapping[str, Any]) -> Checkpoint:
        """Wait until the generations of all ranks are whole, and make them a checkpoint.

        Raises:
            CheckpointError: a rank could not write its part; the document is unchanged.
            TransferError: the only process could not.
        """
        folder, ranks = self.folder, self._whole_on_all(commit)
        number = ranks[0].generation
        if folder.is_listed:
            number = 1 + max((each.number for each in folder.known), default=0)
        made = Checkpoint(folder.path, number, ranks, dict(meta), self._lanes, self._elements)
        folder.change(folder.keep, made=made)
        self._unnamed = {}
        return made

    def _whole_on_all(self, commit: Commit) -> tuple[RankGeneration, ...]:
        """Wait until the generations of all ranks are whole; return them."""
        folder = self.folder
        own: tuple[RankGeneration | None, str]
        try:
            commit.wait()
            assert commit.generation is not None
            own = rank_generation(folder, commit.generation), ""
        except (TieredError, OSError) as error:
            if not folder.is_listed:
                raise
            own = None, folder.named(str(error))
        everyone = folder.gather(own)
        failed = [problem for generation, problem in everyone if generation is None]
        if failed:
            raise CheckpointError(f"no checkpoint was made: {'; '.join(failed)}. The previous one is whole")
        return tuple(generation for generation, _ in everyone)


class CopyWriter:
    """Whole copies of checkpoints: each rank copies its own part, and a document groups the parts.

    All ranks call the same methods in the same order. A failure costs the copy and raises nothing.

    Args:
        folder: Folder of the copies; a damaged document counts as empty.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def begin(self) -> list[int]:
        """Prune copies to make room for one more, but keep one; return the generations of this rank that stay."""
        folder = self.folder
        # A write error here is reported when the copy is made.
        with contextlib.suppress(CheckpointError):
            if folder.is_listed:  # claim first: with folders of ranks inside, it would be refused as foreign
                folder.from_first(lambda: claim_directory(folder.path))
            folder.change(max(1, folder.keep - 1))
        return folder.generations(folder.known)

    def are_done(self, is_done: bool) -> bool:
        """Return whether all ranks have copied their parts, or failed to."""
        return all(self.folder.gather(is_done))

    def finish(
        self, checkpoint: Checkpoint, figures: CopyFigures | None, error: Exception | None
    ) -> tuple[tuple[int, int] | None, str]:
        """Turn the parts that all ranks have copied into a copy of the checkpoint.

        Args:
            figures: Figures of this rank's copy, or None if it failed.

        Returns:
            Bytes copied and linked by all ranks, or None; and the error.
        """
        folder, own = self.folder, None
        problem = str(error or "it was cancelled")
        if figures is not None:
            try:
                own = rank_generation(folder, figures.generation)
            except GenerationError as failure:
                problem = str(failure)
        everyone = folder.gather((own, figures, folder.named(problem)))
        failed = [text for generation, _, text in everyone if generation is None]
        if failed:
            return None, "; ".join(failed)
        ranks = tuple(each for each, _, _ in everyone)
        # If another copy has the checkpoint's number, the copy of a single process gets a larger one.
        number = checkpoint.number if folder.is_listed else ranks[0].generation
        made = replace(checkpoint, folder=folder.path, number=number, ranks=ranks)
        # A number that stops growing means that the checkpoints were removed and their numbers restarted.
        drop = [each for each in folder.known if each.is_listed == made.is_listed and each.number >= made.number]
        try:
            folder.change(folder.keep, drop=drop, made=made)
        except CheckpointError as failure:
            return None, str(failure)
        of_all = [figures for _, figures, _ in everyone]
        return (sum(each.copied_bytes for each in of_all), sum(each.linked_bytes for each in of_all)), ""


def rank_generation(folder: CheckpointFolder, generation: int) -> RankGeneration:
    """Return this rank's part of a checkpoint: a whole generation of its store.

    Raises:
        GenerationError: the generation does not exist.
    """
    sum_ = manifest_checksum(folder.path / folder.own, generation)
    return RankGeneration(folder.own, generation, sum_ if folder.is_listed else "")
