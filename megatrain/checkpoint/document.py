"""A checkpoint is a document that lists one generation of each rank's store.

    output_dir/checkpoints/RANKS.json        several ranks: the document, which lists checkpoints, newest last
    output_dir/checkpoints/rank00000/...     the directory of a rank's store
    output_dir/checkpoints/snap/00000003/    single process: a generation, whose manifest is the document

A save has two phases. First, every rank commits a generation of its store. When all generations are complete, rank 0
replaces the document. Only then does the checkpoint exist for readers. Without the second phase, the generations count
as abandoned (`Generations`). Therefore, even if a rank dies, the document lists only generations that are
complete on all ranks.

A single process needs no second file, because its store writes a manifest only when the generation is complete.
`listing.py` reads both forms as a `Checkpoint`, so only writers distinguish them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.state import RunState
from megatrain.ranks.world import store_paths
from tiered.errors import CorruptBlockError, GenerationError

__all__ = ["Checkpoint", "RankGeneration", "merge_by_save"]

_NUM_KEPT_KEY = "num_kept_tensors"  # same as in megatrain.models.passthrough, which imports torch
_LAST = (sys.maxsize, "")  # sorts after the key of every save


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """One rank's part of a checkpoint.

    Attributes:
        path: Directory of the rank's store, next to the document, such as ``"rank00003"``; "" for a single process.
        xxh3_64: Checksum of the generation's manifest, which detects a different generation with the same number. "" if
            the manifest is the document.
    """

    path: str
    generation: int
    xxh3_64: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint or a complete copy of one, as its document describes it. No other file is read.

    Attributes:
        number: Number that grows with every checkpoint. For a single process, the number of the generation.
        meta: ``RunState`` as JSON; empty if the document cannot be read.
        lanes: Number of gradient lanes (``training.gradient_lanes``).
        elements: Number of elements of each block, by key, excluding the padding of shards. Empty if the manifest's
            lengths contain no padding.
    """

    folder: Path
    number: int
    ranks: tuple[RankGeneration, ...]
    meta: Mapping[str, Any]
    lanes: int = 1
    elements: Mapping[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return len(self.ranks)

    @property
    def stores(self) -> list[str]:
        """Directories of the ranks' stores, as in ``RankGeneration.path``."""
        return [rank.path for rank in self.ranks]

    @property
    def is_listed(self) -> bool:
        """Whether ``RANKS.json`` lists the checkpoint. Otherwise its only generation's manifest is the document."""
        return self.ranks[0].path != ""

    @property
    def export_note(self) -> str | None:
        """Message if an export needs tensors from the model's folder but the folder is missing; None otherwise."""
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
        """Whether this is a complete copy, which is stored outside of the run's stores."""
        return self.folder.name == COPIES_NAME

    @property
    def step(self) -> int | None:
        """Number of finished steps; None if it cannot be read."""
        step = self.meta.get("step")
        return step if type(step) is int else None

    @property
    def saved_at(self) -> str:
        """Date and time of the save, ISO 8601; "" if they cannot be read."""
        return str(self.meta.get("saved_at", ""))

    @property
    def save_number(self) -> int:
        """Number of the save within the run; 0 for checkpoints from before December 2026, which have no number."""
        number = self.meta.get("save_number")
        return number if type(number) is int else 0

    @property
    def order_key(self) -> tuple[int, str]:
        """Sort key by time: the save number, which grows even if clocks go backwards.

        Older versions did not count saves. Their checkpoints come before all counted ones, ordered by save time.
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
        """Number and folder of the checkpoint, for messages."""
        return f"{'checkpoint' if self.is_listed else 'generation'} {self.number} in '{self.folder}'"

    @property
    def state(self) -> RunState:
        """The state of the run.

        Raises:
            CheckpointError: ``meta`` is not the state of a run, or a newer version wrote it.
        """
        return RunState.from_meta(self.meta, where=self.where)

    def is_in_stores(self, output_dir: Path, size: int) -> bool:
        """Return whether the checkpoint is in the stores of a run with ``size`` ranks, which can reuse its files."""
        return self.folder == output_dir / CHECKPOINTS_NAME and self.stores == store_paths(size)

    def belongs_to(self, output_dir: Path) -> bool:
        """Return whether the checkpoint is in ``output_dir``. A run can also start from another run's checkpoint."""
        return self.folder.parent == output_dir

    def is_not_newer_than(self, loaded: Checkpoint) -> bool:
        """Return whether the checkpoint is not newer than the loaded checkpoint of the same folder."""
        if self.is_listed == loaded.is_listed:
            return self.number <= loaded.number
        return self.order_key <= loaded.order_key

    def relocated(self, folder: Path, number: int, generations: Sequence[RankGeneration]) -> Checkpoint:
        """Return this checkpoint with references to the copies of its generations in another folder."""
        return replace(self, folder=folder, number=number, ranks=tuple(generations))

    def __str__(self) -> str:
        kind = "copy of the checkpoint" if self.is_copy else "checkpoint"
        number = f"number {self.number}, {self.world} ranks" if self.is_listed else f"generation {self.number}"
        return f"the {kind} of step {self.step} in '{self.folder}' ({number})"

    @contextmanager
    def add_rank_to_errors(self, rank: int) -> Iterator[None]:
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


def merge_by_save(own: Sequence[Checkpoint], others: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Merge two sequences by save number. On a tie, the entry of the first sequence comes first.

    Each sequence keeps its order. An unreadable checkpoint directly follows the next newer one of its sequence.

    Args:
        own: Checkpoints, newest first.
        others: Checkpoints, newest first, for example the copies of ``own``.
    """

    def keys(checkpoints: Sequence[Checkpoint]) -> list[tuple[int, str]]:
        sort_keys: list[tuple[int, str] | None] = []
        number = 0
        for checkpoint in reversed(checkpoints):
            # An older version, which does not number saves, may have continued the run. Its saves get the last number.
            number = max(number, checkpoint.save_number)
            is_known = checkpoint.save_number or checkpoint.saved_at
            sort_keys.append((number, checkpoint.order_key[1]) if is_known else None)
        key = _LAST
        return [key := own_key or key for own_key in reversed(sort_keys)]

    merged, remainder = [], list(zip(keys(others), others, strict=True))
    for key, checkpoint in zip(keys(own), own, strict=True):
        while remainder and remainder[0][0] > key:
            merged.append(remainder.pop(0)[1])
        merged.append(checkpoint)
    return [*merged, *(each for _, each in remainder)]
