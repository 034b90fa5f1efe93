"""Performs the two phases of a save in cooperation with all other ranks of the run (see `document.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.document import Checkpoint, RankGeneration
from megatrain.checkpoint.listing import ignore_damage, manifest_checksum, read_checkpoints, write_document
from megatrain.checkpoint.removal import prune
from megatrain.checkpoint.state import CheckpointError
from megatrain.ranks.world import store_paths
from tiered import list_generations
from tiered.errors import GenerationError, TieredError
from tiered.ext import claim_directory, files_below, generation_folder

if TYPE_CHECKING:
    from tiered import Commit, CopyFigures, TieredStore

__all__ = ["CheckpointFolder", "CheckpointWriter", "begin_copy", "finish_copy"]

#: Collective that all-gathers one object per rank: ``RankGroup.gather``.
Gather = Callable[[Any], Sequence[Any]]


class CheckpointFolder:
    """A folder of checkpoints or copies. Its state is identical on all ranks, and only rank 0 changes files.

    All ranks must call the same methods in the same order.

    Args:
        on_message: Called on rank 0 if old files could not be removed. In this case, no checkpoint is lost.
        ignores_damage: Whether a damaged document counts as empty and is replaced. Otherwise it raises an error.

    Attributes:
        known: Existing checkpoints, oldest first.
        best: Checkpoint that is kept regardless of its age, in addition to ``keep`` other checkpoints.
        own: Path of this rank's store, as in ``RankGeneration``.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        gather: Gather,
        num_kept: int,
        on_message: Callable[[str], None],
        *,
        ignores_damage: bool = False,
    ) -> None:
        self.path, self.rank, self.keep = path, rank, num_kept
        self.best: Checkpoint | None = None
        self.gather, self._on_message = gather, on_message
        self.paths = store_paths(len(gather(None)))
        self.own = self.paths[rank]
        on_damage = None if self.is_listed and not ignores_damage else ignore_damage
        self.known: list[Checkpoint] = self.run_on_first_rank(lambda: read_checkpoints(path, on_damage))

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` lists the checkpoints. Otherwise each generation's manifest is a document."""
        return self.own != ""

    def generations(self, checkpoints: Sequence[Checkpoint | None]) -> list[int]:
        """Return the numbers of these checkpoints' generations in this rank's store."""
        ranks = [rank for checkpoint in checkpoints if checkpoint is not None for rank in checkpoint.ranks]
        return [rank.generation for rank in ranks if rank.path == self.own]

    def newest(self, checkpoints: Sequence[Checkpoint], num_kept: int) -> list[Checkpoint]:
        """Return the newest ``num_kept`` of these checkpoints, plus the best one if it is among them."""
        is_best = [self.best is not None and checkpoint.ranks == self.best.ranks for checkpoint in checkpoints]
        other_indices = [index for index, best in enumerate(is_best) if not best]
        kept_indices = set(other_indices[max(0, len(other_indices) - num_kept) :])
        return [checkpoint for index, checkpoint in enumerate(checkpoints) if is_best[index] or index in kept_indices]

    def change(self, num_kept: int, *, drop: Sequence[Checkpoint] = (), new: Checkpoint | None = None) -> None:
        """Keep the newest ``num_kept`` checkpoints and the best one, and remove all others. This is a collective.

        Generations in this run's stores are removed only by the next commits.

        Args:
            drop: Checkpoints to remove regardless of their age.
            new: New checkpoint, whose generations are complete.
        """
        dropped_ranks = {checkpoint.ranks for checkpoint in drop}
        kept = [checkpoint for checkpoint in self.known if checkpoint.ranks not in dropped_ranks]
        kept = self.newest(kept if new is None else [*kept, new], num_kept)

        def write() -> None:
            listed = [checkpoint for checkpoint in kept if checkpoint.is_listed]
            if listed != [checkpoint for checkpoint in self.known if checkpoint.is_listed]:
                write_document(self.path, listed)
            try:
                prune(self.path, kept, self.paths)
            except (TieredError, OSError) as error:
                self._on_message(f"old checkpoints in '{self.path}' could not be removed: {error}")

        if kept != self.known:
            # All ranks wait for rank 0's write, because the next commit prunes files and must not start earlier.
            self.run_on_first_rank(write)
            self.known = kept

    def run_on_first_rank(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on rank 0. Return its result, or raise its error, on all ranks. This is a collective."""
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = function(), None
            except (TieredError, CheckpointError, OSError) as error:
                outcome = None, self.add_rank(str(error))
        result, problem = self.gather(outcome)[0]
        if problem is not None:
            raise CheckpointError(problem)
        return result

    def add_rank(self, problem: str) -> str:
        """Add this rank's number to an error message, if there are several ranks."""
        return f"rank {self.rank}: {problem}" if self.is_listed else problem


class CheckpointWriter:
    """Writer that saves checkpoints in two phases. All ranks must call the same methods in the same order.

    Args:
        store: This rank's store. Its commits keep generations that checkpoints refer to, and prune other old ones.
        lanes: Number of gradient lanes (``training.gradient_lanes``).
        elements: Number of elements of each block, by key, excluding the padding of shards.
        is_past: Function that returns whether a checkpoint is not newer than the checkpoint that this run loaded. Newer
            checkpoints could not be loaded, so the first save drops them and keeps the loaded checkpoint.
        save_number: Largest save number among the copies at the run's URL, or 0.
        is_new_run: Whether the run starts from scratch. Generations without a checkpoint are then kept until the run
            has saved its first checkpoint.
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
        is_new_run: bool = False,
    ) -> None:
        self.folder, self._lanes, self._elements, self._is_past = folder, lanes, dict(elements), is_past
        self._save_number = max(save_number, *(c.save_number for c in folder.known), 0)
        self._orphans: dict[str, list[int]] = {}
        if folder.is_listed and is_new_run:
            self._orphans = folder.run_on_first_rank(
                lambda: {path: list_generations(folder.path / path) for path in folder.paths}
            )
        if folder.is_listed:
            store.keep_only(lambda: [*folder.generations(folder.known), *self._orphans.get(folder.own, ())])
        else:  # each generation is a checkpoint, and the store itself limits their number
            store.keep_also(lambda: folder.generations([folder.best]))

    def begin(self) -> None:
        """Drop old checkpoints to free space for the next checkpoint, but always keep one."""
        drop = [c for c in self.folder.known if not self._is_past(c)]
        self.folder.change(self._num_left, drop=drop)
        self._is_past = lambda checkpoint: True  # from now on, all checkpoints belong to this run

    def next_save_number(self) -> int:
        """Return the next save's number, which is larger than all earlier numbers."""
        self._save_number += 1
        return self._save_number

    @property
    def _num_left(self) -> int:
        return max(1, self.folder.keep - 1)

    @property
    def _past_checkpoints(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.folder.known if self._is_past(checkpoint)]

    def outgoing(self) -> list[Checkpoint]:
        """Return the checkpoints that the next checkpoint will replace."""
        kept_ranks = [other.ranks for other in self.folder.newest(self._past_checkpoints, self.folder.keep - 1)]
        return [other for other in self.folder.known if other.ranks not in kept_ranks]

    def agree_on_free_space(self, free_bytes: Callable[[], int], is_stopping: bool) -> tuple[int, bool]:
        """Return rank 0's count of free bytes for the next checkpoint, and whether a stop was requested on any rank.

        Generations that no checkpoint will refer to count as free, because ``begin`` and the next commits remove them.
        """
        total = 0
        if self.folder.rank == 0:
            kept = self.folder.newest(self._past_checkpoints, self._num_left)
            references = {(rank.path, rank.generation) for checkpoint in kept for rank in checkpoint.ranks}
            references |= {(path, generation) for path, numbers in self._orphans.items() for generation in numbers}
            for path in self.folder.paths:
                directory = self.folder.path / path
                for generation in list_generations(directory):
                    if (path, generation) not in references:
                        files = files_below(generation_folder(directory, generation))
                        total += sum(status.st_blocks * 512 for file in files if (status := file.lstat()).st_nlink == 1)
            total += free_bytes()
        results = self.folder.gather((total, is_stopping))
        return results[0][0], any(stopping for _, stopping in results)

    def all_ranks_done(self, commit: Commit) -> bool:
        """Return whether every rank's generation is complete or has failed. This does not wait for drives."""
        return all(self.folder.gather(commit.is_done))

    def finish(self, commit: Commit, meta: Mapping[str, Any]) -> Checkpoint:
        """Wait until all ranks' generations are complete, and combine them into a checkpoint.

        Raises:
            CheckpointError: A rank could not write its part. The document is unchanged.
            TransferError: The generation of a single process could not be written.
        """
        folder, ranks = self.folder, self._wait_for_all_ranks(commit)
        number = ranks[0].generation
        if folder.is_listed:
            number = 1 + max((other.number for other in folder.known), default=0)
        checkpoint = Checkpoint(folder.path, number, ranks, dict(meta), self._lanes, self._elements)
        folder.change(folder.keep, new=checkpoint)
        self._orphans = {}
        return checkpoint

    def _wait_for_all_ranks(self, commit: Commit) -> tuple[RankGeneration, ...]:
        """Wait until all ranks' generations are complete, and return them."""
        folder = self.folder
        result: tuple[RankGeneration | None, str]
        try:
            commit.wait()
            assert commit.generation is not None
            result = rank_generation(folder, commit.generation), ""
        except (TieredError, OSError) as error:
            if not folder.is_listed:
                raise
            result = None, folder.add_rank(str(error))
        results = folder.gather(result)
        problems = [problem for generation, problem in results if generation is None]
        if problems:
            raise CheckpointError(f"no checkpoint was made: {'; '.join(problems)}. The previous one is whole")
        return tuple(generation for generation, _ in results)


def begin_copy(folder: CheckpointFolder) -> list[int]:
    """Prune copies to free space for a new copy, but keep one. Return this rank's generations that are kept.

    This is a collective. ``folder`` is the folder of the copies.
    """
    # Ignore a failed write here, because the copy itself then fails too and reports the error.
    with contextlib.suppress(CheckpointError):
        if folder.is_listed:  # claim the folder before the ranks create folders in it, or it would be refused
            folder.run_on_first_rank(lambda: claim_directory(folder.path))
        folder.change(max(1, folder.keep - 1))
    return folder.generations(folder.known)


def finish_copy(
    folder: CheckpointFolder, checkpoint: Checkpoint, figures: CopyFigures | None, problem: str
) -> tuple[int, int]:
    """Combine all ranks' copied parts into a copy of the checkpoint. This is a collective.

    Args:
        figures: Figures of this rank's copy, or None if it failed.
        problem: Reason why this rank's copy failed.

    Returns:
        Bytes copied and linked by all ranks.

    Raises:
        CheckpointError: A rank could not copy its part. The document is unchanged.
    """
    part = None
    if figures is not None:
        try:
            part = rank_generation(folder, figures.generation)
        except GenerationError as failure:
            problem = str(failure)
    results = folder.gather((part, figures, folder.add_rank(problem)))
    problems = [text for generation, _, text in results if generation is None]
    if problems:
        raise CheckpointError("; ".join(problems))
    ranks = tuple(item for item, _, _ in results)
    # If another copy already has the checkpoint's number, a single process's copy gets a larger number.
    number = checkpoint.number if folder.is_listed else ranks[0].generation
    copy = checkpoint.relocated(folder.path, number, ranks)
    # If the number did not grow, earlier checkpoints were removed and numbering restarted.
    drop = [item for item in folder.known if item.is_listed == copy.is_listed and item.number >= copy.number]
    folder.change(folder.keep, drop=drop, new=copy)
    all_figures = [figures for _, figures, _ in results]
    return sum(item.copied_bytes for item in all_figures), sum(item.linked_bytes for item in all_figures)


def rank_generation(folder: CheckpointFolder, generation: int) -> RankGeneration:
    """Return this rank's part of a checkpoint, which is a complete generation of its store.

    Raises:
        GenerationError: The generation does not exist.
    """
    digest = manifest_checksum(folder.path / folder.own, generation)
    return RankGeneration(folder.own, generation, digest if folder.is_listed else "")
