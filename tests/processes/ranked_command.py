"""Runs one rank of the command ``run`` with injected faults: ``python ranked_command.py run CONFIG ...``.

The environment variable ``RANK_HAPPENS`` lists faults, separated by semicolons:

- ``RANK:kill:INSTANT:NTH``: the rank is killed when it reaches one of ``INSTANTS`` for the nth time. ``stop`` sends
  SIGSTOP and ``raise`` raises an error instead.
- ``RANK:full:FILE``: the rank's drives are full while the file exists.
- ``RANK:flip:FILE``: each read from the rank's drives has one flipped bit while the file exists.
- ``RANK:asks:FILE``: each GPU query through torch appends the visible GPUs to the file.

Every rank writes its pid to a file in the folder ``RANK_PIDS``. Otherwise, it behaves like the command.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint import writer
from megatrain.checkpoint.writer import CheckpointWriter
from processes.saved_run import command_group
from tiered import Commit, TieredStore
from tiered.links.files import FileEngine
from tiered.testing.faults import Fault, FaultyMover

#: Instants of a save, from first to last -> (class or module, function, whether the instant is after the call).
INSTANTS: dict[str, tuple[Any, str, bool]] = {
    "begins": (CheckpointWriter, "begin", False),
    "frozen": (TieredStore, "commit", True),
    "own generation whole": (Commit, "wait", True),
    "all whole": (CheckpointWriter, "_wait_for_all_ranks", True),
    "document written": (writer, "write_document", True),  # only on rank 0
    "saved": (CheckpointWriter, "finish", True),
}


def fail() -> None:
    """Raise an unexpected error."""
    raise RuntimeError("an unexpected failure")


def install_fault(what: str, instant: str, nth: int) -> None:
    """Make this process die, stop or raise an error when it reaches an instant for the nth time."""
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(what)
    happen = fail if number is None else partial(os.kill, os.getpid(), number)
    owner, name, is_after = INSTANTS[instant]
    real: Callable[..., Any] = getattr(owner, name)
    left = nth

    @wraps(real)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not is_after:
            happen()
        result = real(*arguments, **named)
        if left == 0 and is_after:
            happen()
        return result

    setattr(owner, name, wrapped)


class FaultWhileFileExists(Fault):
    """Fault of a drive that lasts while a file exists: no free space, or a flipped bit in each read."""

    def __init__(self, what: str, file: Path) -> None:
        if what == "full":
            super().__init__("error", "write", errno.ENOSPC)
        else:
            super().__init__("flip", "read", bit=77)
        self._file = file

    def affects(self, on: str, file: Any) -> bool:
        """Return whether the fault affects a call."""
        return super().affects(on, file) and self._file.exists()


def inject_drive_faults(what: str, file: Path) -> None:
    """Simulate full drives, or flip bits in reads, while a file exists. The tier checks full drives every 20 ms."""
    importlib.import_module("tiered.tiers.health").RETRY_S = 0.02
    real = FileEngine.__init__

    def make(self: FileEngine, tier: Any, mover: Any, **options: Any) -> None:
        real(self, tier, FaultyMover(mover, [FaultWhileFileExists(what, file)]), **options)

    FileEngine.__init__ = make  # type: ignore[method-assign]


def record_gpu_queries(file: Path) -> None:
    """Append the visible GPUs to ``file`` whenever this process queries torch for GPUs."""

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def asked(*arguments: Any, **named: Any) -> Any:
            with file.open("a") as lines:
                lines.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\n")
            return real(*arguments, **named)

        return asked

    for name in ("is_available", "device_count", "init", "_lazy_init"):
        setattr(torch.cuda, name, noting(getattr(torch.cuda, name)))


def main() -> None:
    """Install the faults of this rank, and run the command."""
    own = os.environ["RANK"]
    if folder := os.environ.get("RANK_PIDS"):
        Path(folder, own).write_text(str(os.getpid()))
    for each in filter(None, os.environ.get("RANK_HAPPENS", "").split(";")):
        rank, what, *how = each.split(":")
        if rank == own and what in ("kill", "stop", "raise"):
            install_fault(what, how[0], int(how[1]))
        elif rank == own and what == "asks":
            record_gpu_queries(Path(how[0]))
        elif rank == own:
            inject_drive_faults(what, Path(how[0]))
    command_group()()


if __name__ == "__main__":
    sys.argv[0] = "megatrain-tier"
    main()
