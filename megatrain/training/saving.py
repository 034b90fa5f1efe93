"""Creates a run's checkpoint writer, and the copier of its whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.copier import Copier, open_copier
from megatrain.checkpoint.document import Checkpoint, read_checkpoints
from megatrain.checkpoint.resume import is_not_after
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from megatrain.plan.plan import Plan
from megatrain.ranks.group import RankGroup
from megatrain.training.weights import saved_places
from tiered import TieredStore

__all__ = ["make_copier", "make_writer"]


def make_copier(plan: Plan, group: RankGroup, on_message: Callable[[str], None]) -> Copier:
    """Create the copier of all ranks' checkpoints. This is a collective.

    Args:
        on_message: Called with messages for the user.
    """
    drive_bytes = sum(group.gather(plan.checkpoint_bytes_on_drives))  # homes may differ between ranks
    return open_copier(plan.run.checkpoint, drive_bytes, on_message, plan.run.world.rank, group.gather)


def make_writer(
    plan: Plan,
    store: TieredStore,
    group: RankGroup,
    on_message: Callable[[str], None],
    *,
    loaded: Checkpoint | None,
    best: Checkpoint | None,
    remote_save_number: int = 0,
) -> CheckpointWriter:
    """Create this rank's checkpoint writer, which cooperates with the other ranks' writers.

    Args:
        on_message: Called with messages for the user.
        loaded: Checkpoint from which the run resumes, or None for a new run.
        best: Checkpoint of the best evaluation so far, or None. It is never pruned.
        remote_save_number: Largest save number among the copies at a URL.
    """
    run = plan.run
    path = run.output_dir / CHECKPOINTS_NAME
    folder = CheckpointFolder(path, run.world.rank, group.gather, run.checkpoint.table.save_total_limit, on_message)
    folder.best = best
    copies = folder.run_on_first_rank(
        lambda: read_checkpoints(run.output_dir / COPIES_NAME, on_damage=lambda error: None)
    )
    return CheckpointWriter(
        folder,
        store,
        lanes=run.num_lanes,
        elements={key: place.num_elements for key, place in saved_places(plan).items()},
        is_past=lambda each: loaded is None or not loaded.belongs_to(run.output_dir) or is_not_after(each, loaded),
        save_number=max(remote_save_number, *(each.save_number for each in copies), 0),
        starts_over=loaded is None,
    )
