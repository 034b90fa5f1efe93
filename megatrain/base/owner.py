"""Find the running process that holds the lock of a run's folder, and send it signals. Does not import torch."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from megatrain.base.names import LOCK_NAME
from tiered.ext import has_open, holder_text, owner_in

__all__ = ["LockHolder", "UnreachableRunError", "check_reachable", "find_owner", "has_signal_handler", "send_signal"]


class UnreachableRunError(Exception):
    """Error for a running process that this process cannot reach. The message states the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The running process that holds the lock of a run's folder.

    Attributes:
        pid: Process id, or None if the lock file does not contain it.
        host: Host name, or None if the lock file does not contain it.
        text: Contents of the lock file, for messages.
    """

    pid: int | None
    host: str | None
    text: str


def find_owner(path: Path | str) -> LockHolder | None:
    """Return the running process that holds the lock of a run's folder, or None.

    Raises:
        OSError: The lock cannot be read.
    """
    text = holder_text(path)
    return None if text is None else LockHolder(*owner_in(text), text)


def check_reachable(path: Path | str, owner: LockHolder) -> None:
    """Check that this process can use the owner's pid, which can belong to another machine or container.

    Raises:
        UnreachableRunError: The owner is on another machine, in another container, or belongs to another user.
        ProcessLookupError: The owner has ended.
    """
    if owner.pid is None or owner.host != socket.gethostname():
        raise UnreachableRunError(f"'{path}' is in use by {owner.text}. Run this command on that machine")
    try:
        has_lock = has_open(owner.pid, Path(path, LOCK_NAME))
    except PermissionError:
        raise UnreachableRunError(
            f"'{path}' is in use by {owner.text}, which belongs to another user. Run this command as that user"
        ) from None
    except FileNotFoundError:
        has_lock = False
    if has_lock:
        return
    if find_owner(path) != owner:
        raise ProcessLookupError(f"process {owner.pid} has ended")
    raise UnreachableRunError(
        f"'{path}' is in use by {owner.text}, which is in another container. Run this command in that container"
    )


def send_signal(path: Path | str, owner: LockHolder, signal_number: int) -> None:
    """Send a signal to the process that holds the lock of a run's folder.

    Raises:
        UnreachableRunError: See ``check_reachable``.
        ProcessLookupError: See ``check_reachable``.
    """
    check_reachable(path, owner)
    assert owner.pid is not None
    os.kill(owner.pid, signal_number)


def has_signal_handler(pid: int, signal_number: int) -> bool:
    """Return whether a process on this machine handles a signal. Most unhandled signals would end the process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (signal_number - 1) & 1)
