"""NvmeTier: slots in preallocated files that form a zarr v3 hierarchy, with snapshots by hard links."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from tiered.errors import TieredError, TransferError
from tiered.file_io import flush_contents, folder_clashes, open_direct, sync_paths
from tiered.tiers.base import Ledger, Slot, TierUsage
from tiered.tiers.directory import open_directories, write_document
from tiered.tiers.health import FullDrives, OnFull, PathMeter, count_writes
from tiered.tiers.layout import ArrayKeys, ChunkFile, HomeFiles, allocation_error, array_document, files_of
from tiered.tiers.snapshots import Snapshots
from tiered.tiers.stripe import check_rates, plan_chunks
from tiered.units import PAGE_BYTES

#: When to compare contents with their checksums. With ``off``, writes do not compute checksums.
Verify = Literal["off", "resume", "always"]
#: Library that moves the bytes. ``auto`` uses kvikio if GPUDirect Storage works, otherwise system calls.
Engine = Literal["posix", "auto", "kvikio"]
#: Bytes that a snapshot needs in addition to its contents: per block for two folders and a document, and per snapshot
#: for folders, notes and a manifest.
_DOCUMENT_BYTES, _NOTES_BYTES = 4 * PAGE_BYTES, 16 * PAGE_BYTES


class NvmeTier:
    """Tier of files on one or more drives. Its slots can only be homes and are not addressable. Thread-safe.

    ``<path>/live/<key>/`` on the first path is a zarr v3 array with the block's contents, with symbolic links to files
    on other paths. Only snapshots outlive the process: the next process recycles the files under ``live/``. Files of
    freed slots are kept for reuse and count as free. They are deleted when space is needed, so that slots, reservations
    and kept files never exceed the capacity. Bytes that only snapshots hold (``snapshots.nbytes``) do not count toward
    the capacity, unless they are reserved.

    A file that a snapshot links is never written. The first write after a snapshot replaces the file with a new one.

    Args:
        paths: directories, created if missing. Each must be empty or from an earlier run. The first directory has the
            arrays.
        capacity_bytes: maximum total bytes over all paths.
        rates: relative speed of each path (default: equal). Blocks are striped in this proportion.
        chunk_bytes: maximum file size (a multiple of 4096). Default: 512 MiB for one path, 16 MiB for several.
        engine: library that moves the bytes. ``kvikio`` needs the optional dependency ``gds`` and an NVIDIA driver.
        past_ram: whether blocks move directly between the files and a GpuTier, bypassing RAM. On a CUDA device, kvikio
            moves all bytes and GPUDirect Storage must work. For a GpuTier in host memory, ``engine`` applies. Blocks
            written from device memory get their checksums at a commit, which reads them back.
        direct_io: whether to use O_DIRECT if the file system supports it; see ``io_path``.
        verify: ``resume`` computes checksums at each write and compares them when a generation is opened. ``always``
            also compares them at every read. ``off`` computes them only at a commit, by reading the files back.
        on_full: what a write does if a drive is full: ``pause`` until there is space, or ``error``.
        on_notice: called with a sentence for the user, on any thread. By default, the sentence is logged as a warning.
        max_written_bytes: for each path, limit on the bytes written in the directory's lifetime, or None.

    Raises:
        LockedError: another process uses one of the paths.
        TieredError: a directory contains files of other programs.
        ValueError: there is no path, a path occurs twice, or rates, chunk_bytes or past_ram are invalid.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        capacity_bytes: int,
        *,
        name: str = "nvme",
        rates: Sequence[float] | None = None,
        chunk_bytes: int | None = None,
        engine: Engine = "posix",
        past_ram: bool = False,
        direct_io: bool = True,
        verify: Verify = "resume",
        on_full: OnFull = "error",
        on_notice: Callable[[str], None] | None = None,
        max_written_bytes: Sequence[int | None] | None = None,
    ) -> None:
        if not paths:
            raise ValueError(f"tier '{name}' needs one or more different paths, got none")
        for index, other_index, relation in folder_clashes(paths):
            raise ValueError(
                f"tier '{name}' needs different paths: '{paths[index]}' {relation} '{paths[other_index]}'. Use a "
                "separate folder for each drive"
            )
        if chunk_bytes is not None and (chunk_bytes <= 0 or chunk_bytes % PAGE_BYTES):
            raise ValueError(f"chunk_bytes must be a multiple of {PAGE_BYTES}, got {chunk_bytes}")
        if past_ram and verify == "always":
            raise ValueError("checksums need bytes in RAM: past_ram requires verify 'resume' or 'off', not 'always'")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = PAGE_BYTES
        self.device: torch.device | None = None
        self.durable = True
        self._rates = check_rates(rates if rates is not None else [1.0] * len(paths), len(paths))
        self._chunk_bytes = chunk_bytes
        self.engine: Engine = engine
        self.past_ram = past_ram
        self._is_direct = direct_io
        self.verify: Verify = verify
        self.full = FullDrives(on_full, self.notice, self._outstanding_bytes)
        self._on_notice = on_notice or logging.getLogger(__name__).warning
        self._notice_keys: set[str] = set()
        self._ledger = Ledger(name, capacity_bytes)
        self._notice_lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._keys = ArrayKeys(name)
        self._written_bytes = [0] * len(paths)
        self.meters = [PathMeter() for _ in paths]
        self.directories = open_directories(paths, max_written_bytes)
        for directory in self.directories:
            if (leftovers := directory.leftovers()) is not None:
                self.notice(leftovers)
        self.snapshots = Snapshots(name, self.directories, self._ledger)
        self._lock = self.snapshots.lock

    @property
    def paths(self) -> list[str]:
        """Absolute paths. The first path has the arrays."""
        return [str(directory.path) for directory in self.directories]

    @property
    def io_path(self) -> str:
        """Current method of file I/O: ``posix-direct`` or ``posix-buffered``."""
        return "posix-direct" if self._is_direct else "posix-buffered"

    def notice(self, text: str, *, key: str | None = None) -> None:
        """Show a message to the user, unless a message with the same ``key`` was shown before. Thread-safe."""
        with self._notice_lock:
            if key is not None and key in self._notice_keys:
                return
            self._notice_keys.add(key or "")
        self._on_notice(text)

    # -- slots -------------------------------------------------------------------------------------------------

    def slot_bytes(self, nbytes: int) -> int:
        """Return the total size of a slot's files. Each file has less than 4096 bytes of padding."""
        return plan_chunks(nbytes, self._rates, self._chunk_bytes).slot_bytes

    def allocate(self, nbytes: int, *, name: str, home: bool) -> Slot | None:
        """Return a slot with preallocated ``HomeFiles``, or None if there is not enough space.

        Raises:
            TransferError: a drive returned an error (full, read-only, ...). No file is left behind.
            ValueError: ``name`` is in use, or an array would be inside another array.
        """
        assert home, f"tier '{self.name}' can only be a home, not hold a copy of '{name}'"
        plan = plan_chunks(nbytes, self._rates, self._chunk_bytes)
        folders = [directory.live / name / "c" for directory in self.directories]
        files = tuple(
            ChunkFile(
                folders[path_index] / str(chunk_index), chunk_index * plan.chunk_bytes, plan.chunk_bytes, path_index
            )
            for chunk_index, path_index in enumerate(plan.path_indices)
        )
        slot = Slot(self.name, nbytes, plan.slot_bytes, HomeFiles(name, plan.chunk_bytes, files))
        with self._lock:
            self._keys.check(name)
            if not self._ledger.take(plan.slot_bytes):
                return None
            try:
                self.snapshots.make_files(files_of(slot))
            except BaseException as error:
                self._ledger.give(plan.slot_bytes)
                if isinstance(error, OSError):
                    raise allocation_error(error, self.name, self.paths[0], name, plan.slot_bytes) from error
                raise
            self._slots[name] = slot
            self._keys.add(name)
        return slot

    def describe(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Write the zarr document of a home slot with the block's shape and dtype."""
        home = files_of(slot)
        document = array_document(home.key, shape, dtype, home.chunk_bytes)
        write_document(self.directories[0].live / home.key, document, replace=True)

    def free(self, slot: Slot) -> None:
        """Free a slot. Keeps its files for reuse, except files that a snapshot links."""
        assert slot.tier == self.name and isinstance(slot.resource, HomeFiles), slot
        home = slot.resource
        with self._lock:
            del self._slots[home.key]
            self._keys.remove(home.key)
            self.snapshots.remove_files(home)
            self._ledger.give(slot.slot_bytes)
            slot.resource = None
            self.snapshots.trim_pools()

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raise ``TieredError``, because only links can access the files."""
        raise TieredError(f"tier '{self.name}' is not addressable: fetch the block into a faster tier first")

    def reserve(self, nbytes: int) -> None:
        """Charge bytes outside any slot, e.g. for future snapshots. A negative number returns bytes."""
        with self._lock:
            self._ledger.reserve(nbytes)
            self.snapshots.trim_pools()

    def usage(self) -> TierUsage:
        """Return the byte counts of slots and reservations. Files kept for reuse count as free."""
        return self._ledger.usage()

    @property
    def pool_bytes(self) -> int:
        """Bytes on disk of files kept for reuse."""
        return sum(directory.pool_bytes for directory in self.directories)

    def close(self) -> None:
        """Release the directories. The files stay, and the next tier on these paths recycles them. Idempotent."""
        for directory in self.directories:
            directory.close()

    # -- contents, for links -----------------------------------------------------------------------------------

    def open_for_read(self, file: ChunkFile) -> int:
        """Open a file for reading. Return its descriptor, which the caller closes. Raises ``OSError``."""
        return self._open(file.path, os.O_RDONLY)

    def open_for_write(self, file: ChunkFile) -> int:
        """Open a file for writing and return its descriptor. Replaces files that snapshots link. Raises ``OSError``."""
        # Hold the lock: if another thread replaced the file after the open, only the snapshot would still link the
        # opened file, and writes would change the snapshot.
        with self._lock:
            fd = self._open(file.path, os.O_RDWR)
            if os.fstat(fd).st_nlink == 1:
                return fd
            os.close(fd)
            self.snapshots.replace_if_linked(file)
            return self._open(file.path, os.O_RDWR)

    def stop_direct_io(self) -> None:
        """Stop using O_DIRECT, because a file system does not support it."""
        self._is_direct = False
        text = f"a file system of tier '{self.name}' ({', '.join(self.paths)}) does not support O_DIRECT, so files use "
        self.notice(text + "the kernel's cache, which is slower and takes memory", key="buffered")

    @property
    def is_direct(self) -> bool:
        """Whether files are opened with O_DIRECT."""
        return self._is_direct

    def count_written(self, path_index: int, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes written to one path. Called by links."""
        with self._lock:
            self._written_bytes[path_index] += nbytes

    def count_wear(self, nbytes_by_path: Mapping[int, int]) -> None:
        """Count bytes that are about to be written. ``nbytes_by_path`` maps the index of a path to its bytes.

        Raises:
            WearLimitError: the write would exceed a limit. Nothing is counted, and the caller must not write.
            OSError: a drive cannot save the count.
        """
        with self._lock:
            count_writes([directory.wear for directory in self.directories], nbytes_by_path)

    @property
    def is_waiting(self) -> bool:
        """Whether a write is waiting for space on a full drive."""
        return self.full.is_waiting

    def give_up_waiting(self) -> None:
        """Make current and future writes fail instead of waiting for space on a full drive."""
        self.full.give_up()

    def bytes_written_by_path(self) -> dict[str, int]:
        """Return the bytes of contents written to each path since the tier was created."""
        with self._lock:
            return dict(zip(self.paths, self._written_bytes, strict=True))

    def sync(self) -> None:
        """Flush all files, so that their contents survive a power cut. Raises ``TransferError``."""
        with self._lock:
            files = [file for slot in self._slots.values() for file in files_of(slot).files]
        sync_paths([file.path for file in files], self._flush)

    def _outstanding_bytes(self, path: str) -> int:
        """Return how many bytes a path can still grow: its slots and its share of reservations, minus its files."""
        index = self.paths.index(path)
        with self._lock:
            homes = [files_of(slot) for slot in self._slots.values()]
            path_bytes = sum(file.nbytes for home in homes for file in home.files if file.path_index == index)
            slot_bytes, reserved_bytes = self._ledger.slot_bytes, self._ledger.reserved_bytes
            if not slot_bytes or not reserved_bytes:
                return 0
            needed_bytes = path_bytes + reserved_bytes * path_bytes // slot_bytes
            num_snapshots = -(-reserved_bytes // slot_bytes) + 1  # One more, because a removal may be in progress.
            needed_bytes += num_snapshots * (len(homes) * _DOCUMENT_BYTES + _NOTES_BYTES)
            return needed_bytes - self.directories[index].disk_bytes()

    def _flush(self, path: Path) -> None:
        try:
            flush_contents(path)
        except OSError as error:
            text = f"flush failed: {error.strerror}"
            raise TransferError(text, tier=self.name, path=str(path), errno=error.errno) from error

    def _open(self, path: Path, flags: int) -> int:
        if self._is_direct:
            return open_direct(path, flags, self.stop_direct_io)
        return os.open(path, flags | os.O_CLOEXEC)
