"""Generations of one store: sequential commits, pruning, loading, and ownership of their directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiered.block import BlockSpec, CopyState
from tiered.durable.arrays import SMALL_BYTES, check_pieces, read_array, sync_tree
from tiered.durable.commit import Commit, CommitFigures, FrozenBlocks, check_meta
from tiered.durable.manifest import (
    JSON,
    Manifest,
    current_generation,
    forget_current,
    forget_generation,
    generation_folder,
    generation_name,
    list_generations,
    make_current,
    newest_first,
    read_manifest,
    write_manifest,
)
from tiered.durable.ownership import (
    StoreIdentity,
    read_owner,
    read_store_id,
    remove_if_empty,
    remove_snapshot_folder,
    snapshot_folders,
    used_numbers,
)
from tiered.durable.reader import GenerationReader
from tiered.durable.zarr_folder import write_members
from tiered.errors import CapacityError, CorruptBlockError, GenerationError, NewerFormatError, TransferError
from tiered.file_io import folder_clashes
from tiered.leasing import Leasing, Request
from tiered.locks import lock_directory
from tiered.movement import Movement
from tiered.records import Block, Lease
from tiered.tiers.base import Tier
from tiered.tiers.directory import TierDirectory
from tiered.tiers.health import FullDrives
from tiered.tiers.layout import HomeFiles, dtype_name, files_of
from tiered.tiers.snapshots import DurableTier
from tiered.units import PAGE_BYTES

#: Number of threads that read small blocks, and number of blocks per task.
_NUM_THREADS = 4
_BLOCKS_PER_TASK = 64

#: Type of ``TieredStore.register``.
Register = Callable[..., BlockSpec]


class Generations:
    """The generations of a store, with methods that commit, prune and load them. At most one commit is in progress.

    Args:
        path: directory of the generations, or None if the store cannot commit.
        num_kept: number of newest generations that commits keep, at least 1.
        full_drives: rule for writes while the drive of ``path`` is full. Unused if a tier owns the directory.
        notice: called with each message for the user.
    """

    def __init__(
        self,
        movement: Movement,
        leasing: Leasing,
        path: str | None,
        num_kept: int,
        full_drives: FullDrives,
        notice: Callable[[str], None],
    ) -> None:
        self._movement = movement
        self._leasing = leasing
        self._file_tiers = list(movement.durable_tiers.values())
        self.path = path
        self.full = full_drives
        self._notice = notice
        self.num_kept = max(1, num_kept)
        self.keep_also: Callable[[], Collection[int]] | None = None
        self._commit_lock = threading.Lock()
        self._last_commit: Commit | None = None  # last commit, in progress or ended
        self._directory: TierDirectory | None = None  # owner of ``path`` if no tier owns it
        self._identity: StoreIdentity | None = None
        self._abandoned: set[int] = set()  # generations newer than the loaded one
        self._skipped: set[int] = set()  # damaged generations newer than the opened one

    # -- commits -----------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, JSON]) -> Commit:
        """Freeze the current contents of all durable blocks, and start a thread that commits them as a new generation.

        First waits for the previous commit. Omits blocks without contents.

        Raises:
            GenerationError: the store has no directory, or ``meta`` is not JSON.
            LeaseError: the caller holds a write lease.
            TransferError: a write-back failed, or the previous commit failed and no other call has raised its error.
        """
        check_meta(meta)
        with self._commit_lock:
            if self._last_commit is not None:
                self._last_commit.wait_before_next()
            store, drives = self._prepare_directory()
            if self._directory is not None:
                self._directory.check_lock()
            generation = self._next_generation(store)
            commit = Commit(self._movement, generation)
            blocks = FrozenBlocks(self._movement, self._leasing, store, generation, drives, self._owner_tier(store))
            try:
                # Prune before freezing, so that at most ``num_kept`` generations exist (two if ``num_kept`` is 1).
                make_room = partial(self._forget_generations, store, max(min(1, self.num_kept), self.num_kept - 1))
                old_generations = drives.retry(str(store.path), PAGE_BYTES, make_room)
                if blocks.has_blocking_writes():
                    self._delete(store, old_generations)  # The new generation may need the space of the old ones.
                    old_generations = []
                blocks.freeze()
            except BaseException as failure:
                self._undo(store, blocks, generation)
                if (error := _as_transfer_error(failure, store.path, generation)) is not failure:
                    raise error from failure
                raise
            self._last_commit, commit.num_bytes = commit, blocks.num_bytes
            arguments = (commit, blocks, dict(meta), store, drives, old_generations)
            threading.Thread(target=self._finish, args=arguments, name="tiered-commit").start()
            return commit

    def _finish(
        self,
        commit: Commit,
        blocks: FrozenBlocks,
        meta: Mapping[str, JSON],
        store: StoreIdentity,
        drives: FullDrives,
        old_generations: list[int],
    ) -> None:
        """Finish a commit: write leased blocks, check and flush all files, make the generation current, and prune."""
        is_committed = False
        error: BaseException | None = None
        figures: CommitFigures | None = None
        try:
            self._delete(store, old_generations)
            records = blocks.write(commit.count)
            for tier in self._file_tiers:
                tier.snapshots.sync(generation_name(commit.generation))
            paths = {tier.name: tuple(tier.paths) for tier in self._file_tiers}
            manifest = Manifest(commit.generation, records, meta, paths, store.id)
            drives.retry(str(store.path), PAGE_BYTES, partial(_publish_generation, blocks.folder, store.path, manifest))
            is_committed = True
            self._prune(store)
            figures = blocks.figures()
            blocks.emit()
        except BaseException as failure:
            error = _as_transfer_error(failure, store.path, commit.generation)
            if is_committed:
                blocks.release()
            else:
                self._undo(store, blocks, commit.generation)
        finally:
            commit.end(error, figures)

    def _undo(self, store: StoreIdentity, blocks: FrozenBlocks, generation: int) -> None:
        """Remove a failed commit's files, unless its generation is already current (and then complete)."""
        blocks.release()
        # The next commit deletes files that cannot be deleted now. If the top-level ``MANIFEST.json`` is unreadable,
        # keep the files, because it may name this generation.
        with contextlib.suppress(OSError, GenerationError):
            if current_generation(store.path) != generation:
                self._remove(store, generation)

    def join(self) -> None:
        """Wait for the commit in progress. Warn if it failed and no call has raised its error."""
        with self._commit_lock:
            if self._last_commit is not None:
                self._last_commit.join()

    def close(self) -> None:
        """Release the directory, but keep its files. Idempotent."""
        if self._directory is not None:
            self._directory.close()

    # -- the directory -----------------------------------------------------------------------------------------

    def _claim_directory(self) -> StoreIdentity:
        """Return the store's identity. If no file tier owns the store's directory, lock the directory."""
        if self._identity is not None:
            return self._identity
        if self.path is None:
            raise GenerationError("this store has no directory for generations: pass path=..., or give it an NvmeTier")
        path = Path(os.path.abspath(self.path))
        if self._directory is None and not any(str(path) in tier.paths for tier in self._file_tiers):
            self._directory = TierDirectory(path)
            while self._directory.drop_largest():
                pass  # An earlier file tier may have kept files for reuse. Delete them, because no tier will use them.
        self._identity = StoreIdentity.of(path)
        for _, folder in self._snapshot_folders(self._identity):
            owner = read_owner(folder)
            if owner is not None and owner.path != str(path) and self._identity.owns(folder):
                self._identity.mark(folder)  # The directory was moved, so update the path in the note.
        return self._identity

    def _prepare_directory(self) -> tuple[StoreIdentity, FullDrives]:
        """Claim the directory and remove unfinished generations. Return the store's identity and the ``FullDrives``."""
        path = Path(os.path.abspath(self.path or ""))
        owner = next((tier for tier in self._file_tiers if str(path) in tier.paths), None)
        drives = self.full if owner is None else owner.full
        try:
            store = drives.retry(str(path), PAGE_BYTES, self._claim_directory)
            self._remove_unfinished(store)
        except OSError as failure:
            raise _as_transfer_error(failure, path) from failure
        return store, drives

    def _owner_tier(self, store: StoreIdentity) -> DurableTier | None:
        """Return the file tier whose paths include the directory of generations, or None."""
        return next((tier for tier in self._file_tiers if str(store.path) in tier.paths), None)

    def _snapshot_folders(self, store: StoreIdentity) -> list[tuple[int, Path]]:
        """Return (generation, folder) for all snapshots, of any store, in the directory and on file tiers."""
        return list(snapshot_folders(self._paths(store)))

    def _paths(self, store: StoreIdentity) -> list[str]:
        return list(dict.fromkeys([str(store.path), *(path for tier in self._file_tiers for path in tier.paths)]))

    def _next_generation(self, store: StoreIdentity) -> int:
        """Return a generation number that no store has used on the paths of this store."""
        return 1 + max([*newest_first(store.path), *used_numbers(self._paths(store))], default=0)

    # -- removal -----------------------------------------------------------------------------------------------

    def _forget_generations(self, store: StoreIdentity, num_kept: int) -> list[int]:
        """Invalidate all but ``num_kept`` generations (and protected ones). Return their numbers for ``_delete``.

        Invalidates abandoned newer generations first, then the oldest. This is fast: file tiers only rename files.
        """
        generations = sorted(newest_first(store.path))
        self._abandoned &= set(generations)
        # A generation may look damaged only because a drive is not mounted. Keep it until newer generations replace it.
        num_newer = sum(generation > max(self._skipped, default=0) for generation in generations)
        protected_generations = self._skipped if num_newer < max(1, self.num_kept) else set()
        order = sorted(generations, key=lambda generation: (generation not in self._abandoned, generation))
        kept_generations = set(self.keep_also()) if self.keep_also is not None else set()
        candidates = [generation for generation in order if generation not in kept_generations | protected_generations]
        old_generations = candidates[: max(0, len(candidates) - num_kept)]
        with contextlib.suppress(GenerationError):  # The next commit replaces a damaged top-level ``MANIFEST.json``.
            if current_generation(store.path) in old_generations:
                survivors = [generation for generation in order if generation not in old_generations]
                if survivors:
                    make_current(store.path, survivors[-1])
                else:
                    forget_current(store.path)
        for generation in old_generations:
            # Delete the manifest before its files are reused. Otherwise, a crash could leave it naming reused files.
            forget_generation(store.path, generation)
            for tier in self._file_tiers:
                tier.snapshots.release(generation_name(generation), store)
        return old_generations

    def _delete(self, store: StoreIdentity, generations: list[int]) -> None:
        """Delete the folders of invalid generations, including their files in the store's directory."""
        for generation in generations:
            for tier in self._file_tiers:
                tier.snapshots.drop(generation_name(generation), store)
            folder = generation_folder(store.path, generation)
            if store.owns(folder):
                remove_snapshot_folder(folder)

    def _prune(self, store: StoreIdentity) -> None:
        try:
            self._delete(store, self._forget_generations(store, max(1, self.num_kept)))
        except OSError as error:  # The new generation is committed, so let the next commit retry the removal.
            self._notice(f"old generations in '{store.path}' could not be removed: {error}")

    def _remove_unfinished(self, store: StoreIdentity) -> None:
        """Remove generations that a crash left partly written or partly removed, on all paths."""
        complete_generations = set(newest_first(store.path))
        own_generations = {generation for generation, folder in self._snapshot_folders(store) if store.owns(folder)}
        for generation in sorted(own_generations - complete_generations):
            self._remove(store, generation)
        for _, folder in self._snapshot_folders(store):
            remove_if_empty(folder)

    def _remove(self, store: StoreIdentity, generation: int) -> None:
        # Delete the manifest first, so that after a crash the generation does not exist.
        forget_generation(store.path, generation)
        self._delete(store, [generation])

    # -- loading -----------------------------------------------------------------------------------------------

    def load(self, generation: int | None, on_bytes: Callable[[int], None]) -> Manifest:
        """Fill the registered durable blocks from a generation; see ``TieredStore.load``."""
        with self._commit_lock:
            if self._last_commit is not None:
                self._last_commit.wait_before_next()
            reader = self._reader(generation)
            loader = self._loader(reader)
            loader.check_registered()
            loader.fill_all(reader.blocks, on_bytes)
            self._mark_abandoned(reader)
            return reader.manifest

    def open(self, generation: int | None, register: Register, unregister: Callable[..., None]) -> None:
        """Register the blocks of a committed generation in an empty store, with verified contents.

        Args:
            generation: number of the generation. If None, opens the newest complete one and reports damaged newer ones.

        Raises:
            GenerationError: the generation does not exist or is incomplete.
            CorruptBlockError: a block is damaged. If ``generation`` is None, no older generation can be used either.
            CapacityError: the tiers are too small.
        """
        with self._commit_lock:
            if generation is None:
                reader = self._fill_newest_complete(register, unregister)
                self._skipped = {number for number in newest_first(reader.path) if number > reader.generation}
            else:
                reader = self._reader(generation)
                self._fill(reader, register)
                self._mark_abandoned(reader)

    def _fill(self, reader: GenerationReader, register: Register) -> None:
        def register_blocks() -> Iterator[str]:
            for key in reader.blocks:
                spec = reader.spec(key)
                tier = spec.home if spec.home in self._movement.tiers else self._movement.slowest_writable
                register(key, spec.shape, spec.dtype, home=tier)
                yield key  # The caller fills this block before registering the next block, which may reuse freed files.

        self._loader(reader).fill_all(register_blocks())

    def _fill_newest_complete(self, register: Register, unregister: Callable[..., None]) -> GenerationReader:
        """Fill the store from the newest complete generation, and report damaged newer generations."""
        path, reader = self._require_path(), None
        try:
            reader = self._open_reader(None)
            self._fill(reader, register)
        except NewerFormatError:
            raise
        except (CorruptBlockError, GenerationError) as error:
            # If ``reader`` is None, the newest manifest is damaged. Otherwise, the reader's generation is unusable.
            newest_generation = max(newest_first(path), default=0) if reader is None else reader.generation
            problems = [f"generation {newest_generation} cannot be used: {error}"]
            older = self._fill_older(newest_generation, problems, register, unregister)
            self._notice(". ".join(problems))
            if older is None:
                raise
            return older
        if reader.notice is not None:
            self._notice(reader.notice)
        return reader

    def _fill_older(
        self, newest_generation: int, problems: list[str], register: Register, unregister: Callable[..., None]
    ) -> GenerationReader | None:
        """Fill the store from the newest complete generation older than ``newest_generation``, or return None.

        Args:
            problems: list that gets a sentence about each unusable generation, and one about the generation used.
        """
        for generation in newest_first(self._require_path()):
            unregister(*self._movement.blocks)
            if generation >= newest_generation:
                continue
            try:
                reader = self._open_reader(generation)
                self._fill(reader, register)
            except NewerFormatError:
                raise
            except (CorruptBlockError, GenerationError, CapacityError) as error:
                problems.append(f"generation {generation} cannot be used: {error}")
            else:
                problems.append(f"Using generation {generation}, the newest complete one")
                return reader
        return None

    def _reader(self, generation: int | None) -> GenerationReader:
        reader = self._open_reader(generation)
        if reader.notice is not None:
            self._notice(reader.notice)
        return reader

    def _require_path(self) -> str:
        if self.path is None:
            raise GenerationError("this store has no directory of generations: pass path=..., or give it an NvmeTier")
        return self.path

    def _open_reader(self, generation: int | None) -> GenerationReader:
        return GenerationReader(
            self._require_path(), generation, [path for tier in self._file_tiers for path in tier.paths]
        )

    def _loader(self, reader: GenerationReader) -> _Loader:
        store, _ = self._prepare_directory()  # The reader found a generation, so the directory is safe to claim.
        return _Loader(self._movement, self._leasing, reader, store)

    def _mark_abandoned(self, reader: GenerationReader) -> None:
        self._abandoned = {number for number in newest_first(reader.path) if number > reader.generation}

    # -- verification ------------------------------------------------------------------------------------------

    def verify_at_rest(self, keys: Sequence[str] | None = None) -> int:
        """Compare the files of home slots with their checksums; see ``TieredStore.verify``."""
        with self._movement.changed:
            self._leasing.check_open()
            blocks = self._movement.blocks.values()
            selected_blocks = list(blocks) if keys is None else [self._leasing.block(key) for key in keys]
        return sum(map(self._verify, selected_blocks))

    def _verify(self, block: Block) -> int:
        with self._movement.changed:
            slot = block.home.slot
            is_current = self._movement.blocks.get(block.spec.key) is block and block.home.state is CopyState.CLEAN
            if not is_current or slot is None or not isinstance(slot.resource, HomeFiles) or block.writer is not None:
                return 0
            home, expected = slot.resource, slot.resource.checksums
            if expected is None:
                return 0
            block.home.readers += 1  # The reader count keeps other threads from changing or freeing the block.
        try:
            checksums = read_array(home.files, block.spec)
        finally:
            with self._movement.changed:
                block.home.readers -= 1
                self._movement.changed.notify_all()
        check_pieces(home.key, home.files, block.spec.nbytes, expected, checksums)
        return block.spec.nbytes


def default_path(tiers: Iterable[Tier]) -> str | None:
    """Return the default directory of generations: the first path of the first file tier, or None."""
    return next((tier.paths[0] for tier in tiers if isinstance(tier, DurableTier)), None)


def refuse_clashes(tiers: Iterable[Tier], path: str | None) -> None:
    """Raise ``ValueError`` if folders of tiers or generations overlap, because a tier empties its folder.

    Args:
        path: directory of the generations. It can be equal to a tier's folder.
    """
    folders = [folder for tier in tiers if isinstance(tier, DurableTier) for folder in tier.paths]
    if path is not None and os.path.abspath(path) not in folders:
        folders.append(path)
    for index, other_index, relation in folder_clashes(folders):
        raise ValueError(f"'{folders[index]}' {relation} '{folders[other_index]}': give each its own folder")


def refuse_committed(path: str) -> None:
    """Raise ``GenerationError`` if a directory has generations, because a new store's commits would prune them."""
    generations = list_generations(path)
    if generations:
        raise GenerationError(
            f"'{path}' has generation {generations[-1]}, which a new store ignores and its commits remove. "
            f"Continue it with TieredStore.open({path!r}, tiers), name another path, or start empty with "
            "TieredStore(tiers, overwrite=True)"
        )


def _publish_generation(folder: Path, path: Path, manifest: Manifest) -> None:
    """Write a generation's documents and manifest, and make it current. Its blocks are already on disk."""
    write_members(folder, [record.key for record in manifest.blocks])
    sync_tree(folder, path)
    write_manifest(path, manifest)


def _as_transfer_error(failure: BaseException, path: Path, generation: int | None = None) -> BaseException:
    """Convert a commit's ``OSError`` to ``TransferError``. Return other errors unchanged."""
    if not isinstance(failure, OSError) or isinstance(failure, TransferError):
        return failure
    subject = "generations" if generation is None else f"generation {generation}"
    text = f"{subject} cannot be written: {failure.strerror}"
    return TransferError(text, tier="generations", path=str(failure.filename or path), errno=failure.errno)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loader that fills a store's blocks from a generation, by hard links where possible and otherwise by reading.

    Attributes:
        identity: identity of the store. Files are adopted only from this store's snapshots.
    """

    movement: Movement
    leasing: Leasing
    reader: GenerationReader
    identity: StoreIdentity

    def check_registered(self) -> None:
        """Raise ``GenerationError`` unless the store and the generation have the same durable blocks."""
        reader = self.reader
        source = f"generation {reader.generation} in '{reader.path}'"
        advice = "it was made with another model or other settings"
        with self.movement.changed:
            specs = {block.spec.key: block.spec for block in self.movement.blocks.values() if block.spec.durable}
        for key, spec in specs.items():
            record, expected = reader.blocks.get(key), f"{spec.shape} of {dtype_name(spec.dtype)}"
            if record is None:
                raise GenerationError(f"{source} has no block '{key}', which is {expected} here: {advice}")
            if (record.shape, record.dtype) != (spec.shape, dtype_name(spec.dtype)):
                recorded = f"{record.shape} of {record.dtype}"
                raise GenerationError(f"block '{key}' is {recorded} in {source}, and {expected} here: {advice}")
        for key, record in reader.blocks.items():
            if key not in specs:
                raise GenerationError(
                    f"{source} has a block '{key}', {record.shape} of {record.dtype}, which this store lacks: {advice}"
                )

    def fill_all(self, keys: Iterable[str], on_bytes: Callable[[int], None] = lambda nbytes: None) -> None:
        """Replace the contents of registered blocks with the generation's verified contents.

        Reads small blocks in batches if their home is RAM. Fills all other blocks one at a time.

        Args:
            on_bytes: called with the size of each block after it is filled.

        Raises:
            GenerationError: a part of the generation is missing.
            CorruptBlockError: a block is damaged.
            TransferError: a drive returned an error.
            LeaseError: a block is leased.
        """
        batch: list[BlockSpec] = []
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tiered-load") as threads:

            def read_batch() -> None:
                self._read_small(batch, threads)
                for spec in batch:
                    on_bytes(spec.nbytes)
                batch.clear()

            for key in keys:
                self.reader.spec(key)  # This raises an error if the record is invalid.
                block = self.movement.blocks[key]
                spec = block.spec
                home_device = self.movement.tiers[spec.home].device
                if spec.nbytes <= SMALL_BYTES and home_device is not None and home_device.type == "cpu":
                    batch.append(spec)
                    if len(batch) == _NUM_THREADS * _BLOCKS_PER_TASK:
                        read_batch()
                    continue
                self.leasing.discard([key])
                if not self._adopt(block):
                    self._read_into_place(block)
                on_bytes(spec.nbytes)
            read_batch()

    def _read_small(self, specs: Sequence[BlockSpec], threads: ThreadPoolExecutor) -> None:
        """Read blocks into their home slots in RAM with several threads. No stream uses these slots."""
        keys = [spec.key for spec in specs]
        self.leasing.discard(keys)
        requests: list[Request] = [(spec.key, spec.home, "w") for spec in specs]

        def read(leases: Sequence[Lease]) -> None:
            for lease in leases:
                self.reader.read(lease.key, lease.tensor)

        if requests:
            with self.leasing.acquire_many(requests, stream=None, timeout_s=None) as leases:
                starts = range(0, len(leases), _BLOCKS_PER_TASK)
                futures = [threads.submit(read, leases[start : start + _BLOCKS_PER_TASK]) for start in starts]
                wait(futures)  # Wait for all reads, even if one fails: no read may outlive the leases.
                for future in futures:
                    future.result()

    def _adopt(self, block: Block) -> bool:
        """Use the generation's files as a block's home slot, without copying. Return False if the tier lacks them."""
        movement, slot = self.movement, block.home.slot
        tier = movement.durable_tiers.get(block.spec.home)
        if tier is None:
            return False
        assert slot is not None, block.spec
        with movement.changed:
            old_bytes = slot.slot_bytes
            block.home.move(CopyState.FILLING)
            block.num_transfers += 1  # Count a transfer, so that other threads cannot change the block.
        is_adopted = False
        try:
            name = generation_name(self.reader.generation)
            tier.snapshots.adopt(slot, name, self.identity, lambda home: self._check(block.spec, home))
            # Rewrite the document, because the snapshot's document may be damaged.
            tier.describe(slot, block.spec.shape, block.spec.dtype)
            home = files_of(slot)
            home.checksums, home.is_flushed = self.reader.blocks[block.spec.key].xxh3_64, True
            is_adopted = True
        except (GenerationError, CapacityError):  # The files are elsewhere or have a different size, so read the block.
            pass
        finally:
            with movement.changed:
                movement.occupancy.home_bytes[block.spec.home] += slot.slot_bytes - old_bytes
                block.num_transfers -= 1
                block.home.move(CopyState.CLEAN if is_adopted else CopyState.STALE)
                block.version += is_adopted
                movement.changed.notify_all()
        return is_adopted

    def _check(self, spec: BlockSpec, home: HomeFiles) -> None:
        self.reader.check(spec.key, home.files, read_array(home.files, spec))

    def _read_into_place(self, block: Block) -> None:
        key, home = block.spec.key, block.spec.home
        tier = self.movement.nearest_addressable(home)
        with self.leasing.acquire(key, tier, "w") as lease:
            self.reader.read(key, lease.tensor)
        if tier != home and not block.copy_in(tier).pins:
            self.leasing.evict(key, tier)  # All blocks pass through this tier, which may hold only a few of them.


def remove_generation(
    path: str | os.PathLike[str], generation: int, search: Sequence[str | os.PathLike[str]] = ()
) -> None:
    """Remove a committed generation and its parts on file tiers. The directory must not be open in a store.

    If the generation is current, the newest other generation becomes current before the removal.

    Args:
        search: paths of file tiers, in addition to the paths in the manifests.

    Raises:
        GenerationError: the generation does not exist.
        LockedError: a running process uses the directory.
        OSError: a file cannot be removed. The next commit of the store removes the remaining files.
    """
    directory = Path(os.path.abspath(path))
    if generation not in list_generations(directory):
        read_manifest(directory, generation)  # This raises an error that lists the existing generations.
    lock = lock_directory(directory)
    try:
        paths = [Path(os.path.abspath(path)) for path in search]
        identity = StoreIdentity(read_store_id(directory) or "", directory)
        # Collect the paths of all manifests, because the manifest of this generation may be damaged.
        for other_generation in list_generations(directory):
            with contextlib.suppress(GenerationError):
                reader = GenerationReader(directory, other_generation, search)
                paths += reader.paths()
                identity = StoreIdentity(identity.id or reader.manifest.store, directory)
        _make_other_current(directory, generation)
        forget_generation(directory, generation)
        # Remove the generation's folder last. After a crash, it identifies the remaining files on other drives.
        for other_generation, folder in snapshot_folders([*dict.fromkeys(paths), directory]):
            if other_generation == generation and identity.owns(folder):
                remove_snapshot_folder(folder)
    finally:
        lock.release()


def _make_other_current(directory: Path, generation: int) -> None:
    """Make the newest other generation (or none) current, unless another generation is already current."""
    other_generations = [number for number in newest_first(directory) if number != generation]
    try:
        current = current_generation(directory)
    except GenerationError:
        current = None
    if other_generations and current not in other_generations:
        make_current(directory, other_generations[0])
    elif not other_generations:
        forget_current(directory)
