"""The folder of a run: its lock, and the process that holds it.

Only locking imports torch and the store: ``status``, ``save`` and ``stop`` look at folders and answer at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME, usable_checkpoint
from megatrain.run.status import STATUS_NAME

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "FINAL_NAME",
    "LOG_NAME",
    "Owner",
    "RunFolder",
    "UnreachableRunError",
    "catches_signal",
    "check_reachable",
    "committed_step",
    "living_owner",
    "run_of_final",
    "send_signal",
    "trained_model",
]

#: Output of a run without a terminal, inside ``output_dir``.
LOG_NAME = "run.log"
#: The trained model, inside ``output_dir``.
FINAL_NAME = "final"
_LOCK_NAME = "LOCK"  # of tiered.tiers.directory, which imports torch
#: What a run writes into its folder, and the names under which it does that before they take their places.
_WRITTEN = ("*.json", "*.jsonl", "*.toml", "*.log", "*.html", "*.tmp", "*.partial*", ".*")
_LOCK_ATTEMPTS = 5  # living_owner holds the lock for an instant
_LOCK_RETRY_S = 0.02
_OWNER = re.compile(r"process (\d+) on ([^,\s]+)")


#: One of them is in a folder that holds a model, or an adapter.
_OF_MODELS = ("config.json", "adapter_config.json")


def trained_model(folder: Path) -> Path:
    """Return the folder of the model that a run wrote, for the run's own folder; any other folder as it is."""
    final = folder / FINAL_NAME
    has_own, has_final = (any((each / name).is_file() for name in _OF_MODELS) for each in (folder, final))
    return final if has_final and not has_own else folder


def run_of_final(folder: Path) -> Path | None:
    """Return the run whose trained model is in a folder; None: the folder is another one."""
    folder = folder.absolute()
    is_of_run = folder.name == FINAL_NAME and (folder.parent / CHECKPOINTS_NAME).is_dir()
    return folder.parent if is_of_run else None


class UnreachableRunError(Exception):
    """A run is alive, but this process cannot reach it; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The living process that holds the lock of a run's folder.

    Attributes:
        pid: None where the lock does not say.
        host: None where the lock does not say.
        text: contents of the lock, for messages.
    """

    pid: int | None
    host: str | None
    text: str


class RunFolder:
    """The folder of one run, locked while the context is open.

    Args:
        path: ``output_dir``; created if missing, and removed again if it holds only its lock and status.

    Attributes:
        path: absolute.
        checkpoints: folder of the checkpoints.
        final: folder of the trained model.
        dead_owner: after entering, the process that died holding the lock.

    Raises:
        LockedError: on entering: a living run holds the lock.
        UnusableDirectoryError: on entering: a file that the run writes is a symbolic link there.
        OSError: on entering: the folder cannot be created or locked.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(os.path.abspath(path))
        self.checkpoints = self.path / CHECKPOINTS_NAME
        self.final = self.path / FINAL_NAME
        self.dead_owner: str | None = None
        self._made: list[Path] = []
        self._lock_fd = -1

    def __enter__(self) -> Self:
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            _refuse_links(self.path)
            self._lock_fd, self.dead_owner = _lock(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # a folder with another run's lock is not empty and stays
                for folder in self._made:
                    folder.rmdir()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from tiered.ext import unlock_directory

        self._remove_if_unused()
        fd, self._lock_fd = self._lock_fd, -1
        unlock_directory(fd)

    def _remove_if_unused(self) -> None:
        """Remove the folder if entering created it and it holds only the lock and the status."""
        if self.path not in self._made or not {_LOCK_NAME, STATUS_NAME}.issuperset(os.listdir(self.path)):
            return
        with contextlib.suppress(OSError):  # another process has just put a file there
            for name in (STATUS_NAME, _LOCK_NAME):
                (self.path / name).unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()


def _refuse_links(path: Path) -> None:
    from tiered.ext import refuse_links

    refuse_links(path, _WRITTEN)


def _lock(path: Path) -> tuple[int, str | None]:
    from tiered.errors import LockedError
    from tiered.ext import lock_directory

    for _ in range(_LOCK_ATTEMPTS - 1):
        with contextlib.suppress(LockedError):
            return lock_directory(path)
        time.sleep(_LOCK_RETRY_S)
    return lock_directory(path)


def living_owner(path: Path | str) -> Owner | None:
    """Return the process that holds the lock of a run's folder, or None; the file of a dead process is no lock.

    Raises:
        OSError: the lock cannot be read.
    """
    try:
        fd = os.open(Path(path, _LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        text = os.pread(fd, 4096, 0).decode(errors="replace").strip()
        match = _OWNER.match(text)
        pid, host = (int(match[1]), match[2]) if match else (None, None)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Owner(pid, host, text or "another process")
        return None
    finally:
        os.close(fd)


def check_reachable(path: Path | str, owner: Owner) -> None:
    """Make sure that the owner's pid names the owner here: it may be of another machine or container.

    Raises:
        UnreachableRunError: it is on another machine, in another container, or another user's.
        ProcessLookupError: it has ended.
    """
    if owner.pid is None or owner.host != socket.gethostname():
        raise UnreachableRunError(f"'{path}' is in use by {owner.text}. Give this command on that machine")
    try:
        lock = os.stat(Path(path, _LOCK_NAME))
        has_lock = any(
            os.path.samestat(os.stat(entry), lock)
            for entry in Path(f"/proc/{owner.pid}/fd").iterdir()
            if entry.exists()
        )
    except PermissionError:
        raise UnreachableRunError(
            f"'{path}' is in use by {owner.text}, which belongs to another user. Give this command as that user"
        ) from None
    except FileNotFoundError:
        has_lock = False
    if has_lock:
        return
    if living_owner(path) != owner:
        raise ProcessLookupError(f"process {owner.pid} has ended")
    raise UnreachableRunError(
        f"'{path}' is in use by {owner.text}, which is in another container. Give this command there"
    )


def send_signal(path: Path | str, owner: Owner, number: int) -> None:
    """Send a signal to the owner of a folder.

    Raises:
        UnreachableRunError: as ``check_reachable``.
        ProcessLookupError: as ``check_reachable``.
    """
    check_reachable(path, owner)
    assert owner.pid is not None
    os.kill(owner.pid, number)


def catches_signal(pid: int, number: int) -> bool:
    """Return whether a process on this machine has a handler for a signal; without one, most signals end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def committed_step(path: Path | str) -> int | None:
    """Return the step of the checkpoint, or copy of one, that a run in this folder would continue, or None.

    Looks at manifests and file names only; checksums are verified when the blocks are read.
    """
    found = usable_checkpoint(path)
    return None if found is None else found.step
