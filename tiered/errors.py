"""Errors of the store. Attributes hold the facts of an error; the message proposes a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.units import format_size


def shorten_key(text: object) -> str:
    """Return a key for use in a message, with the middle of a long key omitted."""
    whole = str(text)
    return whole if len(whole) <= 200 else f"{whole[:100]}...{whole[-60:]}"


class TieredError(Exception):
    """Base class of all errors that the store raises on purpose."""


class CapacityError(TieredError):
    """A tier lacks space, and waiting cannot help.

    Attributes:
        largest_holders: (key, bytes) of the largest slots, largest first.
    """

    def __init__(
        self,
        tier: str,
        need_bytes: int,
        free_bytes: int,
        *,
        pinned_bytes: int = 0,
        leased_bytes: int = 0,
        largest_holders: Sequence[tuple[str, int]] = (),
        detail: str = "",
    ) -> None:
        self.tier = tier
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.pinned_bytes = pinned_bytes
        self.leased_bytes = leased_bytes
        self.largest_holders = tuple(largest_holders)
        text = (
            f"tier '{tier}' is too small: {need_bytes} bytes ({format_size(need_bytes)}) needed, "
            f"{free_bytes} ({format_size(free_bytes)}) free, {pinned_bytes} pinned, {leased_bytes} leased"
        )
        if detail:
            text += f"; {detail}"
        if self.largest_holders:
            holders = ", ".join(f"{key} {format_size(nbytes)}" for key, nbytes in self.largest_holders)
            text += f"; largest: {holders}"
        super().__init__(text)


class BlockNotFoundError(TieredError, KeyError):
    """No block with this name is registered."""

    def __init__(self, key: str, hint: str = "") -> None:
        self.key = key
        super().__init__(f"no block named '{shorten_key(key)}' is registered" + (f" ({hint})" if hint else ""))

    # ``KeyError.__str__`` returns the repr of the argument.
    def __str__(self) -> str:
        return str(self.args[0])


class UninitializedBlockError(TieredError):
    """The block was registered but never written, or its contents were discarded."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"block '{key}' has no contents: write it once with mode 'w' before reading it")


class LeaseError(TieredError):
    """The program broke a rule for leases."""


class TransferError(TieredError, OSError):
    """A transfer, read or write failed.

    Attributes:
        tier: name of the tier (or link) that failed.
        offset: byte offset in the file, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str,
        path: str | None = None,
        errno: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.tier = tier
        self.path = path
        self.offset = offset
        parts = [tier]
        if path is not None:
            parts.append(path if offset is None else f"{path}, offset {offset}")
        text = f"{message} [{', '.join(parts)}]"
        super().__init__(text)
        self.errno = errno
        self.message = text

    def __str__(self) -> str:
        return self.message


class CorruptBlockError(TieredError):
    """The bytes on disk differ from the bytes that were written.

    Attributes:
        generation: number of the damaged generation, or None for uncommitted contents.
    """

    def __init__(self, key: str, expected: str, found: str, *, place: str, generation: int | None = None) -> None:
        self.key, self.generation, self.expected, self.found, self.place = key, generation, expected, found, place
        of = "" if generation is None else f" of generation {generation}"
        advice = "go back to the last committed generation" if generation is None else "open another generation"
        super().__init__(
            f"block '{key}'{of} is damaged: checksum {found}, expected {expected}, in {place}. The drive or the memory "
            f"of this machine changed the bytes: check both, and {advice}"
        )


class GenerationError(TieredError):
    """A committed generation is missing, unreadable, or was written by a newer format."""


class NewerFormatError(GenerationError):
    """A newer version of this package wrote the generation."""


class UnusableDirectoryError(TieredError):
    """A tier's directory cannot be created, or contains files of other programs. The tier wrote nothing."""


class LockingError(TieredError, OSError):
    """The file system does not support locks, so two processes could use the same folder at the same time."""

    def __init__(self, path: str, cause: OSError, file_system: str) -> None:
        self.path = path
        self.message = (
            f"'{path}' cannot be locked: {cause.strerror}. The file system ({file_system}) has no working flock. Use a "
            "folder on a local drive, or mount with locks (Lustre: option flock; NFS: not nolock, local_lock=none)"
        )
        super().__init__(self.message)
        self.errno = cause.errno

    def __str__(self) -> str:
        return self.message


class LockedError(TieredError):
    """Another process uses the same directory."""

    def __init__(self, path: str, owner: str) -> None:
        self.path, self.owner = path, owner
        super().__init__(f"'{path}' is in use by {owner}. Stop that run, or give this one another directory")
