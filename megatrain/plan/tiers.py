"""Creation of a run's planned tiers and store, and checks of the free space on their drives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from megatrain.base.drive_readme import write_readme
from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME
from megatrain.checkpoint.table import CheckpointSpec
from megatrain.engine.program.block_keys import weight_key
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.machine.file_systems import disk_usage, file_system_number, own_drive_bytes
from megatrain.models.folder import ModelFolderError
from megatrain.models.in_place import NUM_READERS, FolderSource, frozen_blocks
from megatrain.models.load import WeightLoader
from megatrain.plan.budgets import FOLDER
from megatrain.plan.plan import Plan
from megatrain.plan.run_tiers import make_tier
from megatrain.plan.shortfall import DoesNotFitError, Shortfall
from megatrain.ranks.world import RANK_FOLDERS, World
from tiered import LRU, Belady, Event, Schedule, Tier, TieredStore
from tiered.errors import TieredError
from tiered.ext import SourceTier, check_claimable, claim_directory, plan_chunks, statuses_below
from tiered.units import format_size


def open_store(
    plan: Plan,
    *,
    on_notice: Callable[[str], None] = lambda text: None,
    on_event: Callable[[Event], None] | None = None,
    loader: WeightLoader | None = None,
) -> TieredStore:
    """Open a run's store, without blocks. The caller closes it.

    Args:
        on_notice: Function called with notices about the drives, from any thread.
        on_event: Function called for every copy and wait, from any thread.
        loader: Reader of the model's folder, for blocks whose home is the folder.

    Raises:
        ModelFolderError: If the folder has changed since planning.
        LockedError: If another run uses an NVMe path.
        UnusableDirectoryError: If an NVMe path contains other files.
    """
    run = plan.run
    checkpoints = run.world.rank_folder(run.output_dir / CHECKPOINTS_NAME)
    tiers = make_tiers(plan, on_notice, loader)
    try:
        store = TieredStore(
            tiers,
            LRU() if run.advanced.eviction_policy == "lru" else Belady(),
            path=str(checkpoints),
            keep_generations=run.checkpoint.table.save_total_limit,
            overwrite=True,  # the caller has already chosen the checkpoint to resume
            on_full=run.tiers.table.on_disk_full,
            on_notice=on_notice,
            on_event=on_event,
        )
    except BaseException:
        for tier in tiers:  # no store owns the tiers yet, so close them here
            tier.close()
        raise
    for drive in run.tiers.table.nvme:
        write_readme(run.world.rank_folder(drive.path), checkpoints)
    return store


def claim_folders(plan: Plan) -> None:
    """Claim the parents of the rank folders. Delete what ended runs left in rank folders that this run does not use.

    Without these claims, a single process could not later use a folder that only ranks have used. On each host, the
    first rank calls this function before any rank opens its store.

    Raises:
        LockedError: If another run uses one of the folders.
        UnusableDirectoryError: If a folder contains other files.
    """
    run = plan.run
    if not run.world.is_single:
        folders = [drive.path for drive in run.tiers.table.nvme]
        if run.world.is_first:
            folders.append(run.output_dir / CHECKPOINTS_NAME)
        for folder in folders:
            claim_directory(folder)
    first_rank = run.world.host_index * run.world.local_size
    ranks = range(first_rank, first_rank + run.world.local_size)
    own_names = {replace(run.world, rank=rank).rank_folder(Path()).name for rank in ranks}
    for drive in run.tiers.table.nvme:
        for folder in Path(drive.path).glob(RANK_FOLDERS):
            if folder.name not in own_names:
                with contextlib.suppress(TieredError):  # another run uses this folder
                    claim_directory(folder)


def make_tiers(
    plan: Plan, on_notice: Callable[[str], None] | None = None, loader: WeightLoader | None = None
) -> list[Tier]:
    """Return the planned tiers of a run, fast to slow. Include the model's folder only if there is a loader.

    Raises:
        ModelFolderError: If the folder has changed since planning.
    """
    tiers: list[Tier] = []
    for budget in plan.budgets_by_tier.values():
        if not budget.is_read_only:
            tiers.append(make_tier(plan, budget, on_notice))
        elif loader is not None:
            source = _folder_source(plan, loader)
            tiers.append(SourceTier(source, name=FOLDER, path="file", num_threads=NUM_READERS))
    return tiers


def _folder_source(plan: Plan, loader: WeightLoader) -> FolderSource:
    layouts = plan.graph.layouts.values()
    blocks = plan.program.blocks
    in_place = {key: item for item in layouts if (key := weight_key(item.name)) in blocks and blocks[key].in_place}
    frozen = frozen_blocks(loader, in_place.values(), plan.graph.dtype)
    for key, layout in in_place.items():
        if layout.name not in frozen or frozen[layout.name].nbytes != blocks[key].nbytes:
            raise ModelFolderError(loader.origin.folder.path, f"has changed since planning: {layout.name}")
    return FolderSource({key: frozen[layout.name] for key, layout in in_place.items()}, plan.graph.dtype)


def register_blocks(store: TieredStore, plan: Plan, *, durable: bool) -> None:
    """Register a plan's blocks at their homes: weights and optimizer state if ``durable``, else all other blocks.

    Commits save weights and optimizer state, except blocks that are in the model's folder.
    """
    for block in plan.program.blocks.values():
        if (block.kind in DURABLE_KINDS) == durable:
            home = plan.placement.homes[block.key]
            store.register(block.key, (block.num_elements,), block.dtype, home=home, durable=block.is_saved)


def unregister_transient_blocks(store: TieredStore, plan: Plan) -> None:
    """Release a plan's gradients, activations, workspace and buffers. The store must have no schedule."""
    blocks = plan.program.blocks.values()
    store.unregister(*(block.key for block in blocks if block.kind not in DURABLE_KINDS))
    reserve(store, plan.placement.workspace_bytes, sign=-1)
    for tier in plan.placement.buffers:
        store.keep_buffers(tier, {})


def register_transient_blocks(store: TieredStore, plan: Plan) -> None:
    """Undo ``unregister_transient_blocks``: register the blocks and reserve the workspace and buffers again."""
    register_blocks(store, plan, durable=False)
    reserve(store, plan.placement.workspace_bytes)
    keep_buffers(store, plan)


@contextmanager
def lend_step_memory(store: TieredStore, plan: Plan, other: Plan) -> Iterator[None]:
    """Within the context, let the passes of another plan use the memory that a plan's steps use.

    Both plans must have the same weights and optimizer state. Enter the context between two steps, without pending
    updates, because the lent memory loses its contents. The store has no schedule on entry and on exit.
    """
    store.set_schedule(None)
    store.wait_idle()
    unregister_transient_blocks(store, plan)
    register_transient_blocks(store, other)
    yield
    store.set_schedule(None)
    store.wait_idle()
    unregister_transient_blocks(store, other)
    register_transient_blocks(store, plan)


def reserve(store: TieredStore, nbytes: Mapping[str, int], *, sign: int = 1) -> None:
    """Reserve these workspace bytes in each tier. ``sign=-1`` releases them."""
    for tier, count in nbytes.items():
        if count:
            store.reserve(tier, sign * count)


def keep_buffers(store: TieredStore, plan: Plan) -> None:
    """Allocate the buffers that steps need for copies. Call this after registering blocks and reserving workspace."""
    for tier, counts in plan.placement.buffers.items():
        store.keep_buffers(tier, counts)


def set_schedule(store: TieredStore, schedule: Schedule, lookahead_bytes: int | None) -> None:
    """Replace the prefetcher's schedule. ``lookahead_bytes`` limits prefetched bytes; if None, only memory does.

    Tick numbers of the old schedule are invalid in the new schedule. Therefore, the old schedule is removed before the
    tick is set to the one before the new start. Only then is the new schedule set.
    """
    store.set_schedule(None)
    store.advance(schedule.start - 1)
    store.set_schedule(schedule, lookahead_bytes=lookahead_bytes)


def check_folders(spec: CheckpointSpec) -> None:
    """Check that the folders for drives and checkpoints contain no unrelated files. Nothing is written.

    Raises:
        UnusableDirectoryError: If a folder contains unrelated files.
    """
    for path in (*spec.drives, spec.output_dir / CHECKPOINTS_NAME):
        if path.is_dir():
            check_claimable(path)


def check_drives(plan: Plan) -> None:
    """Check that the drives have the free space that the plan needs. Files from earlier starts count as free.

    The drive of ``output_dir`` also needs ``checkpoint.min_free_disk``, because saves start only with this much free
    space.

    Raises:
        DoesNotFitError: If a drive is too small. The error contains the needed bytes.
    """
    spec, world = plan.run.checkpoint, plan.run.world
    needs = _drive_needs(plan)
    for path in spec.drives:  # each rank on a host needs these bytes
        needs[path] *= world.local_size
    owned_bytes = _owned_bytes(spec, world)
    drives: dict[int, list[Path]] = {}
    for path in needs:
        drives.setdefault(file_system_number(path), []).append(path)
    for paths in drives.values():
        free_bytes = disk_usage(paths[0]).free + sum(owned_bytes[path] for path in paths)
        need_bytes = sum(needs[path] for path in paths)
        if need_bytes > free_bytes:
            raise DoesNotFitError(_drive_shortfall(plan, paths, need_bytes, free_bytes))


def _owned_bytes(spec: CheckpointSpec, world: World) -> dict[Path, int]:
    """Return the bytes that earlier starts of the run wrote, by path, for all ranks of a host."""
    checkpoints = spec.output_dir / CHECKPOINTS_NAME
    host_ranks = [replace(world, rank=world.host_index * world.local_size + rank) for rank in range(world.local_size)]
    nbytes = {
        path: sum(own_drive_bytes(rank.rank_folder(path), rank.rank_folder(checkpoints)) for rank in host_ranks)
        for path in spec.drives
    }
    own_files = chain(statuses_below(checkpoints), statuses_below(spec.output_dir / COPIES_NAME))
    sizes = {status.st_ino: status.st_blocks * 512 for status in own_files}
    nbytes[checkpoints] = sum(sizes.values())  # counted by inode, because copies can be links to checkpoint files
    return nbytes


def _drive_shortfall(plan: Plan, paths: Sequence[Path], need_bytes: int, free_bytes: int) -> Shortfall:
    """Return the shortfall for a drive that is too small, with the settings that determine the used space."""
    spec = plan.run.checkpoint
    table, checkpoints = spec.table, spec.output_dir / CHECKPOINTS_NAME
    tier = "output_dir" if paths == [checkpoints] else "nvme"
    place = f"output_dir ({spec.output_dir})" if tier == "output_dir" else paths[0]
    message = f"does not fit: the drive of {place} has {format_size(free_bytes)} free"
    message += f", but this run needs at least {format_size(need_bytes)} there"
    advice = "Free space, or use another drive."
    reserve = table.min_free_disk if checkpoints in paths else 0
    if reserve:
        message += f": {format_size(need_bytes - reserve)} to write, and {format_size(reserve)} that stay free"
        message += " (checkpoint.min_free_disk)"
        if need_bytes - reserve < free_bytes:
            advice = "Lower checkpoint.min_free_disk, free space, or use another drive."
    uses_drives = any(path != checkpoints for path in paths)
    if table.num_generations and (uses_drives or plan.checkpoint.output_dir_bytes):
        advice += f" {table.num_generations} checkpoints are part of this: lower checkpoint.save_total_limit."
    if checkpoints in paths and table.num_copies and plan.checkpoint.drive_bytes:
        size = format_size(table.num_copies * plan.checkpoint.drive_bytes * plan.run.world.size)
        advice += f" {size} of this is for whole copies: checkpoint.save_copy."
    return Shortfall(tier, need_bytes, free_bytes, advice, message=message)


def _drive_needs(plan: Plan) -> Counter[Path]:
    """Return the run's peak bytes on drives, by path."""
    spec, tiers = plan.run.checkpoint, plan.run.tiers
    table = spec.table
    needs = Counter[Path]()
    for key, block in plan.program.blocks.items():
        if plan.placement.homes[key] == "nvme":
            chunks = plan_chunks(block.nbytes, tiers.rates, tiers.file_bytes)
            num_copies = 1 + (table.num_generations if block.is_saved else 0)
            for path_index, count in Counter(chunks.path_indices).items():
                needs[spec.drives[path_index]] += num_copies * chunks.chunk_bytes * count
    if table.is_on:
        # All ranks write their parts of a checkpoint into the same folder.
        checkpoint_bytes = plan.checkpoint.output_dir_bytes * plan.run.world.size
        output_bytes = table.num_generations * checkpoint_bytes + table.min_free_disk
        output_bytes += table.num_copies * plan.checkpoint.drive_bytes * plan.run.world.size
        needs[spec.output_dir / CHECKPOINTS_NAME] += output_bytes
    return needs
