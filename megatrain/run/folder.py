"""Folder of a run, locked while the run uses it. Also finds the checkpoint from which a run in a folder continues.

Only locking imports torch and the store, so the commands ``status``, ``save`` and ``stop`` respond at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megatrain.base.names import CHECKPOINTS_NAME, FINAL_NAME, LOCK_NAME
from megatrain.base.observer import RunObserver
from megatrain.checkpoint.inventory import usable_checkpoint
from megatrain.run.status import STATUS_NAME
from tiered.errors import LockedError, TieredError

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.base.observer import StepMetrics
    from tiered.ext import DirectoryLock

__all__ = ["LOG_NAME", "LockKeeper", "RunFolder", "committed_step"]

#: Name of the file in ``output_dir`` that gets the output of a run after its terminal has closed.
LOG_NAME = "run.log"
#: Name patterns of the files that a run writes into its folder, including temporary files.
_FILE_PATTERNS = ("*.json", "*.jsonl", "*.toml", "*.log", "*.html", "*.tmp", "*.partial*", ".*")
_LOCK_ATTEMPTS = 5  # retry, because find_owner briefly takes the lock
_LOCK_RETRY_S = 0.02


def describe_world_writable(folders: Iterable[Path]) -> str:
    """Return a sentence that lists the folders to which all users of this machine can write, or "".

    Folders with the sticky bit are left out, because users can only remove their own files from them.
    """
    writable = []
    for folder in folders:
        with contextlib.suppress(OSError):
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                writable.append(str(folder))
    if not writable:
        return ""
    return (
        f"every user of this machine can write in {', '.join(writable)}, and change what is trained: "
        f"chmod o-w {shlex.join(writable)}"
    )


class RunFolder:
    """A run's folder, which is locked during the ``with`` block.

    Args:
        path: ``output_dir``, created if missing. On exit, a folder that was created is removed if it contains only the
            lock and the status.

    Attributes:
        dead_owner: Process that died while it held the lock, or None. Set on entry.

    Raises:
        LockedError: On entry, if a running process holds the lock.
        UnusableDirectoryError: On entry, if a file that the run would write is a symbolic link.
        OSError: On entry, if the folder cannot be created or locked.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(os.path.abspath(path))
        self.checkpoints = self.path / CHECKPOINTS_NAME
        self.final = self.path / FINAL_NAME
        self.dead_owner: str | None = None
        self._created_folders: list[Path] = []
        self._lock: DirectoryLock | None = None
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        self._created_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            _refuse_links(self.path)
            self._lock = _lock(self.path)
            self.dead_owner = self._lock.dead_owner
        except BaseException:
            with contextlib.suppress(OSError):  # a folder with another run's lock is not empty, so it stays
                for folder in self._created_folders:
                    folder.rmdir()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_if_unused()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def keep_lock(self) -> str | None:
        """Lock the folder again and return a message if the lock file was removed, else return None.

        Raises:
            LockedError: Another run has locked the folder in the meantime.
            OSError: The folder was removed.
        """
        with self._mutex:
            if self._lock is not None:
                with contextlib.suppress(LockedError):
                    self._lock.check()
                    return None
            if not self.path.is_dir():
                text = "the folder was removed while this run used it, and its checkpoints with it"
                raise OSError(errno.ENOENT, text, str(self.path))
            lock, self._lock = self._lock, None  # clear it first: a second release could close another file
            if lock is not None:
                lock.release()
            self._lock = _lock(self.path)
        path = self.path / LOCK_NAME
        return (
            f"warning: '{path}' was removed while this run uses the folder. It is locked again; checkpoints may be "
            f"gone: megatrain-tier ckpt ls {shlex.quote(str(self.path))}"
        )

    def _remove_if_unused(self) -> None:
        """Remove the folder if this object created it and it contains only the lock and the status."""
        if self.path not in self._created_folders or not self.path.is_dir():
            return
        if not {LOCK_NAME, STATUS_NAME}.issuperset(os.listdir(self.path)):
            return
        with contextlib.suppress(OSError):  # another process may have created a file there
            for name in (STATUS_NAME, LOCK_NAME):
                (self.path / name).unlink(missing_ok=True)
            for folder in self._created_folders:
                folder.rmdir()


class LockKeeper(RunObserver):
    """Observer that checks, every second and after each step, that the run still holds its folder's lock.

    Args:
        on_message: Called with messages for the user.
    """

    def __init__(self, folder: RunFolder, on_message: Callable[[str], None]) -> None:
        self._folder, self._on_message = folder, on_message

    def check_lock(self) -> None:
        """Lock the folder again if its lock file is gone. Ignore errors, because ``on_step`` will raise them."""
        with contextlib.suppress(TieredError, OSError):
            self._report()

    def on_step(self, metrics: StepMetrics) -> None:
        """Lock the folder again if its lock file is gone."""
        self._report()

    def _report(self) -> None:
        if (text := self._folder.keep_lock()) is not None:
            self._on_message(text)


def _refuse_links(path: Path) -> None:
    from tiered.ext import refuse_links

    refuse_links(path, _FILE_PATTERNS)


def _lock(path: Path) -> DirectoryLock:
    from tiered.errors import LockedError
    from tiered.ext import lock_directory

    for _ in range(_LOCK_ATTEMPTS - 1):
        with contextlib.suppress(LockedError):
            return lock_directory(path)
        time.sleep(_LOCK_RETRY_S)
    return lock_directory(path)


def committed_step(path: Path | str) -> int | None:
    """Return the step of the checkpoint or copy from which a run in this folder would continue, or None.

    Reads only manifests and file names. Checksums are verified later, when the blocks are read.
    """
    checkpoint = usable_checkpoint(path)
    return None if checkpoint is None else checkpoint.step
