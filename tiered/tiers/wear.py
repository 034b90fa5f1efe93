"""Wear: the bytes written to a directory over its whole life, kept through crashes, and a limit they never pass."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiered.errors import TieredError
from tiered.units import GiB, format_size

WEAR_NAME = "WEAR.json"
#: How far the figure on disk runs ahead of the truth, so that a crash never makes it too low.
AHEAD_BYTES = GiB


class WearLimitError(TieredError):
    """A write would pass the limit that was set for a path. Nothing of it was written.

    Attributes:
        path: the directory.
        limit_bytes: what may be written in its whole life.
        written_bytes: what was.
        need_bytes: of the write that was refused.
    """

    def __init__(self, path: str, limit_bytes: int, written_bytes: int, need_bytes: int) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self.written_bytes, self.need_bytes = written_bytes, need_bytes
        super().__init__(
            f"'{path}' may be written {limit_bytes} bytes ({format_size(limit_bytes)}, max_written) in its whole life, "
            f"and {written_bytes} ({format_size(written_bytes)}) are: {format_size(need_bytes)} more would pass that. "
            f"Nothing of it was written. Raise max_written of this path, or name a path on another drive; "
            f"{WEAR_NAME} there holds the count"
        )


class WearCounter:
    """Counts the bytes written below one directory, in its ``WEAR.json``. Guarded by the lock of its owner.

    The file is moved ahead of the count in steps before bytes are written, and set right by ``close``. So it is never
    too low, and after a crash at most ``ahead_bytes`` too high.

    Args:
        directory: where the file lies; the caller holds the directory's lock.
        limit_bytes: most bytes of the directory's whole life, None: no limit.

    Raises:
        TieredError: the file cannot be read.
    """

    def __init__(self, directory: Path, limit_bytes: int | None = None, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._path = directory / WEAR_NAME
        self.limit_bytes = limit_bytes
        self._ahead_bytes = ahead_bytes
        self.written_bytes = self._on_disk_bytes = self._read()

    def _read(self) -> int:
        try:
            written = json.loads(self._path.read_bytes())["written_bytes"]
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TieredError(
                f"'{self._path}' cannot be read ({error}): it counts the bytes written to this drive. "
                "Mend it, or delete it to count from zero"
            ) from error
        if not isinstance(written, int) or written < 0:
            raise TieredError(f"'{self._path}' counts {written!r} bytes. Mend it, or delete it to count from zero")
        return written

    def check(self, nbytes: int) -> None:
        """Raise ``WearLimitError`` if ``nbytes`` more would pass the limit."""
        if self.limit_bytes is not None and self.written_bytes + nbytes > self.limit_bytes:
            raise WearLimitError(str(self._path.parent), self.limit_bytes, self.written_bytes, nbytes)

    def add(self, nbytes: int) -> None:
        """Count bytes that are about to be written. Raises ``OSError``: the drive refused; then nothing is counted."""
        needed_bytes = self.written_bytes + nbytes
        if needed_bytes > self._on_disk_bytes:
            self._save(needed_bytes + self._ahead_bytes)
        self.written_bytes = needed_bytes

    def close(self) -> None:
        """Set the file right. A drive that refuses keeps the figure that is too high. Idempotent."""
        if self._on_disk_bytes != self.written_bytes:
            try:
                self._save(self.written_bytes)
            except OSError:
                return

    def _save(self, written_bytes: int) -> None:
        temporary = self._path.with_suffix(".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, json.dumps({"format": 1, "written_bytes": written_bytes}).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, self._path)
        self._on_disk_bytes = written_bytes


def count_writes(counters: Sequence[WearCounter], nbytes_by_path: Mapping[int, int]) -> None:
    """Count a write to several paths, all or nothing as far as limits go. Call with their owner's lock held.

    Raises:
        WearLimitError: it would pass a limit; nothing is counted.
        OSError: a drive refused.
    """
    for index, nbytes in nbytes_by_path.items():
        counters[index].check(nbytes)
    for index, nbytes in nbytes_by_path.items():
        counters[index].add(nbytes)
