"""A rank of the command ``run`` to which something happens: ``python ranked_command.py run CONFIG ...``.

``RANK_HAPPENS`` in the environment says what, for each rank that something happens to:

- ``RANK:kill:INSTANT:NTH``: it is killed at the nth time that it comes to one of ``INSTANTS``; with ``stop`` it is
  stopped (SIGSTOP), with ``raise`` an error is raised there.
- ``RANK:full:FILE``: its drives have no room while that file exists.
- ``RANK:flip:FILE``: what is read from its drives has one wrong bit while that file exists.
- ``RANK:asks:FILE``: whenever it asks torch for GPUs, the file gets a line: those that it may see by then.

In ``RANK_PIDS`` every rank leaves its number. Nothing else differs from the command.
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

#: Of a save, in their order -> whose method it is, its name, and whether the instant is after it, or before.
INSTANTS: dict[str, tuple[Any, str, bool]] = {
    "begins": (CheckpointWriter, "begin", False),
    "frozen": (TieredStore, "commit", True),
    "own generation whole": (Commit, "wait", True),
    "all whole": (CheckpointWriter, "_whole_on_all", True),
    "document written": (writer, "write_document", True),  # by rank 0
    "saved": (CheckpointWriter, "finish", True),
}


def fail() -> None:
    """Raise what no code expects."""
    raise RuntimeError("a thing that nobody thought of")


def happens_at(what: str, instant: str, nth: int) -> None:
    """Have this process killed, stopped or fail when it comes to an instant."""
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


class FaultWhile(Fault):
    """A fault while a file exists: no room, or a wrong bit."""

    def __init__(self, what: str, file: Path) -> None:
        if what == "full":
            super().__init__("error", "write", errno.ENOSPC)
        else:
            super().__init__("flip", "read", bit=77)
        self._file = file

    def strikes(self, on: str, file: Any) -> bool:
        """Return whether a call fails."""
        return super().strikes(on, file) and self._file.exists()


def spoil_drives(what: str, file: Path) -> None:
    """Let drives be full, or err, while a file exists; full ones are looked at every 20 ms."""
    importlib.import_module("tiered.tiers.health").RETRY_S = 0.02
    real = FileEngine.__init__

    def make(self: FileEngine, tier: Any, mover: Any, **options: Any) -> None:
        real(self, tier, FaultyMover(mover, [FaultWhile(what, file)]), **options)

    FileEngine.__init__ = make  # type: ignore[method-assign]


def note_asking(file: Path) -> None:
    """Note which GPUs this process may see whenever it asks torch for some."""

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
    """Be one rank."""
    own = os.environ["RANK"]
    if folder := os.environ.get("RANK_PIDS"):
        Path(folder, own).write_text(str(os.getpid()))
    for each in filter(None, os.environ.get("RANK_HAPPENS", "").split(";")):
        rank, what, *how = each.split(":")
        if rank == own and what in ("kill", "stop", "raise"):
            happens_at(what, how[0], int(how[1]))
        elif rank == own and what == "asks":
            note_asking(Path(how[0]))
        elif rank == own:
            spoil_drives(what, Path(how[0]))
    command_group()()


if __name__ == "__main__":
    sys.argv[0] = "megatrain-tier"
    main()
