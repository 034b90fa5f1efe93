"""The two phases of a save, which all ranks of a run perform together (see `document.py`)."""

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

#: Collective that all-gathers one object per rank: ``RankGroup.gather``.
Gather = Callable[[Any], Sequence[Any]]


class CheckpointFolder:
    """A folder of checkpoints or copies, with identical state on all ranks. Rank 0 changes the files.

    All ranks call the same methods in the same order.

    Args:
        gather: Collective that all-gathers one object per rank.
        on_message: Called on rank 0 if old files could not be removed. No checkpoint is lost then.
        ignores_damage: Whether a damaged document counts as empty and is replaced by the next one. Otherwise it
            raises an error.

    Attributes:
        known: Existing checkpoints, oldest first.
        best: Checkpoint that is kept at any age, in addition to ``keep`` other checkpoints.
        own: Path of this rank's store, as in ``RankGeneration``.
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
        self.known: list[Checkpoint] = self.run_on_first_rank(lambda: read_checkpoints(path, on_damage))

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` lists the checkpoints. For a single process, the manifests of generations do."""
        return self.own != ""

    @property
    def newest_number(self) -> int:
        """Largest number of the checkpoints of this form (listed or not), or 0."""
        return max((each.number for each in self.known if each.is_listed == self.is_listed), default=0)

    def generations(self, checkpoints: Sequence[Checkpoint | None]) -> list[int]:
        """Return the generations that these checkpoints have in the store of this rank."""
        ranks = [rank for each in checkpoints if each is not None for rank in each.ranks]
        return [rank.generation for rank in ranks if rank.path == self.own]

    def newest(self, checkpoints: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
        """Return the newest ``keep`` of these checkpoints, and additionally the best one."""
        is_best = [self.best is not None and each.ranks == self.best.ranks for each in checkpoints]
        others = [number for number, best in enumerate(is_best) if not best]
        stay = set(others[max(0, len(others) - keep) :])
        return [each for number, each in enumerate(checkpoints) if is_best[number] or number in stay]

    def change(self, keep: int, *, drop: Sequence[Checkpoint] = (), made: Checkpoint | None = None) -> None:
        """Keep the newest ``keep`` checkpoints and remove all others. A collective.

        The next commits of this run's stores remove the generations in those stores.

        Args:
            drop: Checkpoints to remove at any age.
            made: New checkpoint, whose generations are whole.
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
            # All ranks wait for rank 0's write, so that no rank starts another commit before it. A commit prunes.
            self.run_on_first_rank(write)
            self.known = left

    def run_on_first_rank(self, find: Callable[[], Any]) -> Any:
        """Run ``find`` on rank 0, and return its result, or raise its error, on all ranks. A collective."""
        found: Any = None
        if self.rank == 0:
            try:
                found = find(), None
            except (TieredError, CheckpointError, OSError) as error:
                found = None, self.with_rank(str(error))
        result, problem = self.gather(found)[0]
        if problem is not None:
            raise CheckpointError(problem)
        return result

    def with_rank(self, problem: str) -> str:
        """Add this rank's number to an error message, if there are several ranks."""
        return f"rank {self.rank}: {problem}" if self.is_listed else problem


def _ignore_damage(error: GenerationError) -> None:
    """Do nothing, because the search for checkpoints has already reported the damage."""


class CheckpointWriter:
    """Writer of checkpoints in two phases. All ranks call the same methods in the same order.

    Args:
        store: Store of this rank. Its commits keep the generations that checkpoints name, and prune other older ones.
        lanes: Number of lanes that add gradients.
        elements: Elements by block, without the padding of shards.
        is_past: Returns whether a checkpoint is not newer than the one that this run resumed from. Newer checkpoints
            could not be loaded, so the first save drops them and keeps the loaded one.
        save_number: Largest save number of the copies at a URL.
        starts_over: Whether the run starts without a checkpoint. Then generations that no checkpoint names are kept
            until the run has saved its first checkpoint.
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
            self._unnamed = folder.run_on_first_rank(
                lambda: {path: list_generations(folder.path / path) for path in folder.paths}
            )
        if folder.is_listed:
            store.keep_only(lambda: [*folder.generations(folder.known), *self._unnamed.get(folder.own, ())])
        else:  # each generation is a checkpoint, and the store itself limits their number
            store.keep_also(lambda: folder.generations([folder.best]))

    def begin(self) -> None:
        """Drop checkpoints to free space for the next one, but never the last checkpoint."""
        drop = [each for each in self.folder.known if not self._is_past(each)]
        self.folder.change(self._num_left, drop=drop)
        self._is_past = lambda checkpoint: True  # checkpoints from now on belong to this run

    def next_save_number(self) -> int:
        """Return the number of the next save, which is larger than all earlier numbers."""
        self._save_number += 1
        return self._save_number

    @property
    def _num_left(self) -> int:
        return max(1, self.folder.keep - 1)

    @property
    def _past_checkpoints(self) -> list[Checkpoint]:
        return [each for each in self.folder.known if self._is_past(each)]

    def outgoing(self) -> list[Checkpoint]:
        """Return the checkpoints that the next one replaces."""
        stay = [each.ranks for each in self.folder.newest(self._past_checkpoints, self.folder.keep - 1)]
        return [each for each in self.folder.known if each.ranks not in stay]

    def agree_on_free_space(self, free_bytes: Callable[[], int], is_stopping: bool) -> tuple[int, bool]:
        """Return the bytes free on rank 0 for the next checkpoint of all ranks, and whether a stop was requested.

        The bytes include the generations that no checkpoint will name, which ``begin`` and the next commits remove.
        """
        free = 0
        if self.folder.rank == 0:
            left = self.folder.newest(self._past_checkpoints, self._num_left)
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

    def sum_over_ranks(self, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the sums of three sizes over all ranks. A collective."""
        first, second, third = (sum(each) for each in zip(*self.folder.gather(sizes), strict=True))
        return first, second, third

    def are_whole(self, commit: Commit) -> bool:
        """Return whether the generations of all ranks are whole or have failed, without waiting for drives."""
        return all(self.folder.gather(commit.is_done))

    def finish(self, commit: Commit, meta: Mapping[str, Any]) -> Checkpoint:
        """Wait until the generations of all ranks are whole, and make them a checkpoint.

        Raises:
            CheckpointError: A rank could not write its part. The document is unchanged.
            TransferError: The single process could not write its generation.
        """
        folder, ranks = self.folder, self._wait_for_all_ranks(commit)
        number = ranks[0].generation
        if folder.is_listed:
            number = 1 + max((each.number for each in folder.known), default=0)
        made = Checkpoint(folder.path, number, ranks, dict(meta), self._lanes, self._elements)
        folder.change(folder.keep, made=made)
        self._unnamed = {}
        return made

    def _wait_for_all_ranks(self, commit: Commit) -> tuple[RankGeneration, ...]:
        """Wait until the generations of all ranks are whole, and return them."""
        folder = self.folder
        own: tuple[RankGeneration | None, str]
        try:
            commit.wait()
            assert commit.generation is not None
            own = rank_generation(folder, commit.generation), ""
        except (TieredError, OSError) as error:
            if not folder.is_listed:
                raise
            own = None, folder.with_rank(str(error))
        everyone = folder.gather(own)
        failed = [problem for generation, problem in everyone if generation is None]
        if failed:
            raise CheckpointError(f"no checkpoint was made: {'; '.join(failed)}. The previous one is whole")
        return tuple(generation for generation, _ in everyone)


class CopyWriter:
    """Writer of whole copies: each rank copies its own part of a checkpoint, and a document groups the parts.

    All ranks call the same methods in the same order. If a rank fails, there is no copy, but no error is raised.

    Args:
        folder: Folder of the copies; a damaged document counts as empty.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def begin(self) -> list[int]:
        """Prune copies to free space for one more, but keep one. Return the generations of this rank that are kept."""
        folder = self.folder
        # A write error at this point is reported when the copy is made.
        with contextlib.suppress(CheckpointError):
            if folder.is_listed:  # claim it first, because a folder that already has rank folders would be refused
                folder.run_on_first_rank(lambda: claim_directory(folder.path))
            folder.change(max(1, folder.keep - 1))
        return folder.generations(folder.known)

    def are_done(self, is_done: bool) -> bool:
        """Return whether all ranks have copied their parts or have failed."""
        return all(self.folder.gather(is_done))

    def finish(
        self, checkpoint: Checkpoint, figures: CopyFigures | None, error: Exception | None
    ) -> tuple[tuple[int, int] | None, str]:
        """Combine the parts that all ranks have copied into a copy of the checkpoint.

        Args:
            figures: Figures of this rank's copy, or None if it failed.

        Returns:
            Bytes copied and linked by all ranks, or None after a failure, and the error or "".
        """
        folder, own = self.folder, None
        problem = str(error or "it was cancelled")
        if figures is not None:
            try:
                own = rank_generation(folder, figures.generation)
            except GenerationError as failure:
                problem = str(failure)
        everyone = folder.gather((own, figures, folder.with_rank(problem)))
        failed = [text for generation, _, text in everyone if generation is None]
        if failed:
            return None, "; ".join(failed)
        ranks = tuple(each for each, _, _ in everyone)
        # If another copy has the checkpoint's number, the copy of a single process gets a larger one.
        number = checkpoint.number if folder.is_listed else ranks[0].generation
        made = replace(checkpoint, folder=folder.path, number=number, ranks=ranks)
        # If the number did not grow, the checkpoints were removed and their numbers restarted.
        drop = [each for each in folder.known if each.is_listed == made.is_listed and each.number >= made.number]
        try:
            folder.change(folder.keep, drop=drop, made=made)
        except CheckpointError as failure:
            return None, str(failure)
        all_figures = [figures for _, figures, _ in everyone]
        return (sum(each.copied_bytes for each in all_figures), sum(each.linked_bytes for each in all_figures)), ""


def rank_generation(folder: CheckpointFolder, generation: int) -> RankGeneration:
    """Return this rank's part of a checkpoint, which is a whole generation of its store.

    Raises:
        GenerationError: the generation does not exist.
    """
    sum_ = manifest_checksum(folder.path / folder.own, generation)
    return RankGeneration(folder.own, generation, sum_ if folder.is_listed else "")
