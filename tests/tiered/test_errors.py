"""Messages of errors: the facts, the place and the remedy."""

from __future__ import annotations

import errno

import pytest

from tiered import (
    BlockNotFoundError,
    CapacityError,
    CorruptBlockError,
    LockedError,
    TransferError,
    UninitializedBlockError,
)
from tiered.errors import LockingError, shorten_key
from tiered.links.files import explain

LONG_KEY = "".join(chr(97 + number % 26) for number in range(201))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            CapacityError("ram", 5000, 7),
            "tier 'ram' is too small: 5000 bytes (4.88 KiB) needed, 7 (7 B) free, 0 pinned, 0 leased",
        ),
        (
            CapacityError(
                "ram",
                1,
                2,
                pinned_bytes=3,
                leased_bytes=4,
                largest_holders=[("a", 2048), ("b", 1)],
                detail="to pin x",
            ),
            "tier 'ram' is too small: 1 bytes (1 B) needed, 2 (2 B) free, 3 pinned, 4 leased; to pin x; "
            "largest: a 2.00 KiB, b 1 B",
        ),
        (BlockNotFoundError("a"), "no block named 'a' is registered"),
        (BlockNotFoundError("a", "see b"), "no block named 'a' is registered (see b)"),
        (UninitializedBlockError("a"), "block 'a' has no contents: write it once with mode 'w' before reading it"),
        (TransferError("read failed", tier="nvme"), "read failed [nvme]"),
        (TransferError("read failed", tier="nvme", path="/x", errno=5), "read failed [nvme, /x]"),
        (TransferError("read failed", tier="nvme", path="/x", offset=0), "read failed [nvme, /x, offset 0]"),
        (
            CorruptBlockError("a", "12", "34", place="'/x' bytes 0 to 9"),
            "block 'a' is damaged: checksum 34, expected 12, in '/x' bytes 0 to 9. The drive or the memory of this "
            "machine changed the bytes: check both, and go back to the last committed generation",
        ),
        (
            CorruptBlockError("a", "12", "34", place="'/x' bytes 0 to 9", generation=0),
            "block 'a' of generation 0 is damaged: checksum 34, expected 12, in '/x' bytes 0 to 9. The drive or the "
            "memory of this machine changed the bytes: check both, and open another generation",
        ),
        (
            LockedError("/x", "process 5"),
            "'/x' is in use by process 5. Stop that run, or give this one another directory",
        ),
        (
            LockingError("/x", OSError(errno.ENOLCK, "No locks"), "nfs of server"),
            "'/x' cannot be locked: No locks. The file system (nfs of server) has no working flock. Use a folder on a "
            "local drive, or mount with locks (Lustre: option flock; NFS: not nolock, local_lock=none)",
        ),
    ],
)
def test_messages_are_complete(error: Exception, text: str) -> None:
    assert str(error) == text


def test_error_attributes_hold_the_facts() -> None:
    capacity = CapacityError("ram", 1, 2, pinned_bytes=3, leased_bytes=4, largest_holders=[("a", 5)])
    facts = (capacity.tier, capacity.need_bytes, capacity.free_bytes, capacity.pinned_bytes, capacity.leased_bytes)
    assert (*facts, capacity.largest_holders) == ("ram", 1, 2, 3, 4, (("a", 5),))
    transfer = TransferError("text", tier="nvme", path="/x", errno=5, offset=8)
    assert (transfer.tier, transfer.path, transfer.errno, transfer.offset) == ("nvme", "/x", 5, 8)
    damage = CorruptBlockError("a", "12", "34", place="there", generation=6)
    found = (damage.key, damage.expected, damage.found, damage.place, damage.generation)
    assert found == ("a", "12", "34", "there", 6)
    locking = LockingError("/x", OSError(errno.ENOLCK, "No locks"), "nfs")
    assert (locking.path, locking.errno) == ("/x", errno.ENOLCK)
    assert (LockedError("/x", "process 5").path, LockedError("/x", "process 5").owner) == ("/x", "process 5")


def test_only_long_keys_are_shortened() -> None:
    assert shorten_key(LONG_KEY[:200]) == LONG_KEY[:200]
    assert shorten_key(LONG_KEY) == f"{LONG_KEY[:100]}...{LONG_KEY[141:]}"
    assert shorten_key(7) == "7"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space"),
            "No space (ENOSPC). Free space on that drive; committed generations are unaffected",
        ),
        (
            OSError(errno.EIO, "Input/output error"),
            "Input/output error (EIO). The drive or its connection is failing: read the kernel's log (dmesg) and check "
            "the drive; committed generations are unaffected",
        ),
        (OSError(errno.EBADF, "Bad file"), "Bad file (EBADF)"),
        (OSError(9999, "Strange"), "Strange (error 9999)"),
        (OSError("no number"), "no number (error 0)"),
    ],
)
def test_drive_errors_are_explained(error: OSError, text: str) -> None:
    assert explain(error) == text
