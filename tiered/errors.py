"""Errors that a store raises. An error's attributes hold the facts, and its message proposes a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.units import format_size


def shorten_key(text: object) -> str:
    """Return a key for use in a message, with the middle of a long key omitted."""
    key = str(text)
    return key if len(key) <= 200 else f"{key[:100]}...{key[-60:]}"


def install_command(extra: str) -> str:
    """Return how to install an optional dependency, for use in a message. ``extra`` is a name in ``pyproject.toml``."""
    return f'pip install -e ".[{extra}]" in the folder of the repository'


class TieredError(Exception):
    """Base class of all errors that the store raises on purpose."""


class CapacityError(TieredError):
    """Error for a tier with too little space. Raised only if waiting cannot help.

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
    """Error for a name that no registered block has."""

    def __init__(self, key: str, hint: str = "") -> None:
        self.key = key
        super().__init__(f"no block named '{shorten_key(key)}' is registered" + (f" ({hint})" if hint else ""))

    # ``KeyError.__str__`` would return the repr of the message.
    def __str__(self) -> str:
        return str(self.args[0])


class UninitializedBlockError(TieredError):
    """Error for reading a block that was never written, or whose contents were discarded."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"block '{key}' has no contents: write it once with mode 'w' before reading it")


class LeaseError(TieredError):
    """Error for a call that breaks a rule for leases."""


class TransferError(TieredError, OSError):
    """Error for a failed transfer, read or write.

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
    """Error for a block whose bytes on disk differ from the bytes that were written.

    Attributes:
        generation: number of the damaged generation, or None for uncommitted contents.
    """

    def __init__(self, key: str, expected: str, found: str, *, place: str, generation: int | None = None) -> None:
        self.key, self.generation, self.expected, self.found, self.place = key, generation, expected, found, place
        origin = "" if generation is None else f" of generation {generation}"
        advice = "go back to the last committed generation" if generation is None else "open another generation"
        super().__init__(
            f"block '{key}'{origin} is damaged: checksum {found}, expected {expected}, in {place}. The drive or the "
            f"memory of this machine changed the bytes: check both, and {advice}"
        )


class GenerationError(TieredError):
    """Error for a committed generation that is missing, unreadable, or in a newer format."""


class NewerFormatError(GenerationError):
    """Error for a generation that a newer version of this package wrote."""


class UnusableDirectoryError(TieredError):
    """Error for a directory that a tier cannot create or must not use, e.g. because it has other programs' files."""


class LockingError(TieredError, OSError):
    """Error for a file system without locks, where two processes could use the same folder at the same time."""

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
    """Error for a directory that another process uses."""

    def __init__(self, path: str, owner: str) -> None:
        self.path, self.owner = path, owner
        super().__init__(f"'{path}' is in use by {owner}. Stop that run, or give this one another directory")
