"""Generations of one store: its directory, numbers, commits one after the other, pruning, and loading one again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from tiered.block import BlockSpec
from tiered.durable.arrays import sync_tree
from tiered.durable.commit import Commit, check_meta, freeze, record_linked, tell, write_leased, writes_before_return
from tiered.durable.loading import Loader
from tiered.durable.manifest import (
    JSON,
    Manifest,
    current_generation,
    forget_generation,
    generation_folder,
    generation_name,
    make_current,
    newest_first,
    store_id_in_manifests,
    write_manifest,
)
from tiered.durable.ownership import (
    StoreIdentity,
    read_owner,
    read_store_id,
    remove_if_empty,
    remove_snapshot_folder,
    snapshot_folders,
)
from tiered.durable.reader import GenerationReader
from tiered.errors import GenerationError, TransferError
from tiered.leasing import Leasing
from tiered.movement import Movement
from tiered.tiers.directory import TierDirectory
from tiered.tiers.health import FullDrives
from tiered.tiers.snapshots import DurableTier
from tiered.units import PAGE_BYTES

#: ``TieredStore.register``.
Register = Callable[..., BlockSpec]


class Generations:
    """Commits, prunes and loads generations. At most one commit is under way.

    Args:
        path: directory of the generations; None: the first path of a file tier, or nothing to commit to.
        keep: how many of the last generations a commit leaves, at least 1.
        full: waits for room on the drive of ``path`` where no tier owns it.
        notice: tells a person.
    """

    def __init__(
        self,
        movement: Movement,
        leasing: Leasing,
        path: str | None,
        keep: int,
        full: FullDrives,
        notice: Callable[[str], None],
    ) -> None:
        self._movement = movement
        self._leasing = leasing
        self._file_tiers = list(movement.durable_tiers.values())
        self.path = path if path is not None else next((tier.paths[0] for tier in self._file_tiers), None)
        self.full = full
        self._notice = notice
        self.num_kept = max(1, keep)
        self.keep_also: Callable[[], Collection[int]] | None = None
        self._committing = threading.Lock()
        self._last: Commit | None = None  # under way or ended
        self._directory: TierDirectory | None = None  # owns ``path`` where no tier does
        self._identity: StoreIdentity | None = None
        self._abandoned: set[int] = set()  # newer than the one that was loaded

    # -- committing --------------------------------------------------------------------------------------------

    def commit(self, meta: Mapping[str, JSON]) -> Commit:
        """Freeze the present contents of all durable blocks, and let a thread make them the next generation.

        First waits for the commit before this one. Blocks that hold nothing are left out.

        Raises:
            GenerationError: the store has no directory, or ``meta`` is not JSON.
            LeaseError: the caller holds a write lease.
            TransferError: a write-back failed, or the commit before failed and nobody was told.
        """
        check_meta(meta)
        with self._committing:
            if self._last is not None:
                self._last.wait_before_next()
            store, full = self._ready_directory()
            commit = Commit(self._movement, store, full, self._next_number(store), meta)
            try:
                # Before anything more is held, so that at most ``keep`` generations are (two, where one is kept).
                make_room = partial(self._forget_old, store, max(1, self.num_kept - 1))
                doomed = full.retry(str(store.path), PAGE_BYTES, make_room)
                if writes_before_return(self._movement):
                    self._delete(store, doomed)  # their room may be needed for it
                    doomed = []
                freeze(self._movement, self._leasing, commit, self._owner_tier(store))
            except BaseException as failure:
                commit.end_staging()
                with contextlib.suppress(OSError):  # the next commit removes what the drive keeps now
                    self._remove(store, commit.generation)
                if (told := _told(failure, commit.path, commit.generation)) is not failure:
                    raise told from failure
                raise
            self._last = commit
            threading.Thread(target=self._finish, args=(commit, doomed), name="tiered-commit").start()
            return commit

    def _finish(self, commit: Commit, doomed: list[int]) -> None:
        """The commit's thread: write what is leased, check and flush everything, flip, drop old generations."""
        is_committed = False
        error: BaseException | None = None
        try:
            self._delete(commit.owner, doomed)
            records = write_leased(commit, self._owner_tier(commit.owner))
            commit.end_staging()
            records |= record_linked(self._movement, commit)
            for tier in self._file_tiers:
                tier.snapshots.sync(generation_name(commit.generation))
            blocks = tuple(records[frozen.block.spec.key] for frozen in commit.frozen)
            paths = {tier.name: tuple(tier.paths) for tier in self._file_tiers}
            manifest = Manifest(commit.generation, blocks, commit.meta, paths, commit.owner.id)
            commit.full.retry(str(commit.path), PAGE_BYTES, partial(_flip, commit, manifest))
            is_committed = True
            self._prune(commit.owner)
            commit.count(blocks)
            tell(self._movement, commit)
        except BaseException as failure:
            error = _told(failure, commit.path, commit.generation)
            commit.end_staging()
            if not is_committed:
                with contextlib.suppress(OSError):  # the next commit removes what the drive keeps now
                    self._remove(commit.owner, commit.generation)
        finally:
            commit.frozen.clear()
            commit.end(error)

    def join(self) -> None:
        """Wait for the commit under way; warns of a failure that nobody was told."""
        with self._committing:
            if self._last is not None:
                self._last.join()

    def close(self) -> None:
        """Give up the directory; the files stay. Idempotent."""
        if self._directory is not None:
            self._directory.close()

    # -- the directory -----------------------------------------------------------------------------------------

    def _own_directory(self) -> StoreIdentity:
        """Return who this store is; where no file tier owns its directory, lock it for this store."""
        if self._identity is not None:
            return self._identity
        if self.path is None:
            raise GenerationError("this store has no directory for generations: pass path=..., or give it an NvmeTier")
        path = Path(os.path.abspath(self.path))
        if self._directory is None and not any(str(path) in tier.paths for tier in self._file_tiers):
            self._directory = TierDirectory(path)
            while self._directory.drop_largest():
                pass  # files that a file tier once kept for reuse: nobody takes them now
        self._identity = StoreIdentity.of(path, store_id_in_manifests(path) if read_store_id(path) is None else None)
        for _, folder in self._snapshot_folders(self._identity):
            owner = read_owner(folder)
            if owner is not None and owner.path != str(path) and self._identity.owns(folder):
                self._identity.mark(folder)  # the directory was moved
        return self._identity

    def _ready_directory(self) -> tuple[StoreIdentity, FullDrives]:
        """Return who this store is, and what waits for room on the drive of its generations; halves are removed."""
        path = Path(os.path.abspath(self.path or ""))
        owner = next((tier for tier in self._file_tiers if str(path) in tier.paths), None)
        full = self.full if owner is None else owner.full
        try:
            store = full.retry(str(path), PAGE_BYTES, self._own_directory)
            self._remove_unfinished(store)
        except OSError as failure:
            raise _told(failure, path) from failure
        return store, full

    def _owner_tier(self, store: StoreIdentity) -> DurableTier | None:
        """Return the file tier that the directory of generations is a path of, or None."""
        return next((tier for tier in self._file_tiers if str(store.path) in tier.paths), None)

    def _snapshot_folders(self, store: StoreIdentity) -> list[tuple[int, Path]]:
        """Return (generation, folder) under ``snap/`` of the directory and of all paths of file tiers, of any store."""
        paths = [str(store.path), *(path for tier in self._file_tiers for path in tier.paths)]
        return list(snapshot_folders(list(dict.fromkeys(paths))))

    def _next_number(self, store: StoreIdentity) -> int:
        """Return a number that no generation has here, of whatever store."""
        return 1 + max([*newest_first(store.path), *(number for number, _ in self._snapshot_folders(store))], default=0)

    # -- removing ----------------------------------------------------------------------------------------------

    def _forget_old(self, store: StoreIdentity, keep: int) -> list[int]:
        """Take all but ``keep`` generations out of existence, and return them for ``_delete``.

        An abandoned future goes first, then the oldest. This is the quick part: files on file tiers are renamed.
        """
        known = sorted(newest_first(store.path))
        self._abandoned &= set(known)
        order = sorted(self._abandoned) + [number for number in known if number not in self._abandoned]
        wanted = set(self.keep_also()) if self.keep_also is not None else set()
        unwanted = [number for number in order if number not in wanted]
        doomed = unwanted[: max(0, len(unwanted) - keep)]
        with contextlib.suppress(GenerationError):  # damaged: the coming flip mends it
            if current_generation(store.path) in doomed:
                make_current(store.path, order[-1])
        for number in doomed:
            forget_generation(store.path, number)
            for tier in self._file_tiers:
                tier.snapshots.release(generation_name(number), store)
        return doomed

    def _delete(self, store: StoreIdentity, doomed: list[int]) -> None:
        """Delete the folders of generations that were forgotten, with what the store wrote into its own."""
        for number in doomed:
            for tier in self._file_tiers:
                tier.snapshots.drop(generation_name(number), store)
            folder = generation_folder(store.path, number)
            if store.owns(folder):
                remove_snapshot_folder(folder)

    def _prune(self, store: StoreIdentity) -> None:
        try:
            self._delete(store, self._forget_old(store, self.num_kept))
        except OSError as error:  # the new generation is there: the next commit tries this again
            self._notice(f"old generations in '{store.path}' could not be removed: {error}")

    def _remove_unfinished(self, store: StoreIdentity) -> None:
        """Remove what a crash left half-written or half-removed, on every path of every file tier too."""
        known = set(newest_first(store.path))
        found = {number for number, folder in self._snapshot_folders(store) if store.owns(folder)}
        for number in sorted(found - known):
            self._remove(store, number)
        for _, folder in self._snapshot_folders(store):
            remove_if_empty(folder)

    def _remove(self, store: StoreIdentity, generation: int) -> None:
        # The manifest first: a crash half-way leaves a generation that is plainly not there.
        forget_generation(store.path, generation)
        self._delete(store, [generation])

    # -- loading -----------------------------------------------------------------------------------------------

    def load(self, generation: int | None) -> Manifest:
        """Fill the registered durable blocks; see ``TieredStore.load``."""
        with self._committing:
            if self._last is not None:
                self._last.wait_before_next()
            reader = self._reader(generation)
            loader = self._loader(reader)
            loader.check_registered()
            for key in reader.blocks:
                loader.fill(key)
            self._loaded(reader)
            return reader.manifest

    def open(self, generation: int | None, register: Register) -> None:
        """Register the blocks of a committed generation in an empty store, with verified contents.

        Raises:
            GenerationError: there is no such generation, or a part is missing.
            CorruptBlockError: damaged bytes.
            CapacityError: the tiers are too small.
        """
        with self._committing:
            reader = self._reader(generation)
            loader = self._loader(reader)
            for key in reader.blocks:
                spec = reader.spec(key)
                home = spec.home if spec.home in self._movement.tiers else self._movement.order[-1]
                register(key, spec.shape, spec.dtype, home=home)
                loader.fill(key)  # block by block: files that adopting sets free serve the next one
            self._loaded(reader)

    def _reader(self, generation: int | None) -> GenerationReader:
        if self.path is None:
            raise GenerationError("this store has no directory of generations: pass path=..., or give it an NvmeTier")
        return GenerationReader(self.path, generation, [path for tier in self._file_tiers for path in tier.paths])

    def _loader(self, reader: GenerationReader) -> Loader:
        store, _ = self._ready_directory()  # only now that it is known to hold any: a wrong path stays untouched
        return Loader(self._movement, self._leasing, reader, store)

    def _loaded(self, reader: GenerationReader) -> None:
        self._abandoned = {number for number in newest_first(reader.path) if number > reader.generation}


def _flip(commit: Commit, manifest: Manifest) -> None:
    """Make the generation the current one. Everything that its manifest names is on disk before that is."""
    sync_tree(commit.folder, commit.path)
    write_manifest(commit.path, manifest)


def _told(failure: BaseException, path: Path, generation: int | None = None) -> BaseException:
    """Return a failure of a commit, the system's own as ``TransferError``."""
    if not isinstance(failure, OSError) or isinstance(failure, TransferError):
        return failure
    what = "generations" if generation is None else f"generation {generation}"
    text = f"{what} cannot be written: {failure.strerror}"
    return TransferError(text, tier="generations", path=str(failure.filename or path), errno=failure.errno)
