"""The folder of a run: who owns it, and ``status.json``, which tells other processes where the run stands.

Looking at a folder imports neither torch nor the store, so that ``status``, ``save`` and ``stop`` answer at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from megatrain.checkpoint.state import now_text
from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME, COPIES_NAME, usable_checkpoint

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "CHECKPOINTS_NAME",
    "COPIES_NAME",
    "FINAL_STATES",
    "LOG_NAME",
    "STATUS_NAME",
    "Owner",
    "RunFolder",
    "RunStatus",
    "UnreachableRunError",
    "catches_signal",
    "check_reachable",
    "committed_step",
    "living_owner",
    "read_status",
    "send_signal",
]

STATUS_NAME = "status.json"
#: Where the output of a run goes that has no terminal, inside ``output_dir``.
LOG_NAME = "run.log"
#: Where the trained model goes, inside ``output_dir``.
FINAL_NAME = "final"
_LOCK_NAME = "LOCK"  # of tiered.tiers.directory, which imports torch
_WRITE_INTERVAL_S = 1.0
_LOCK_ATTEMPTS = 5  # who looks whether a folder is owned holds its lock for an instant
_LOCK_RETRY_S = 0.02
_OWNER = re.compile(r"process (\d+) on ([^,\s]+)")

State = Literal["starting", "training", "paused", "exporting", "done", "stopped", "failed"]
FINAL_STATES: tuple[State, ...] = ("done", "stopped", "failed")


class UnreachableRunError(Exception):
    """A run is alive, but this process cannot reach it; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A living process that has a run's folder.

    Attributes:
        pid: None where the lock does not say.
        host: None where the lock does not say.
        text: as it stands in the lock, for messages.
    """

    pid: int | None
    host: str | None
    text: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands; ``status.json``. A courtesy: nothing that a run computes depends on it.

    Attributes:
        state: ``starting`` until the first step; ``paused`` while a drive is full; the last three are final.
        pid: of the process that wrote this.
        host: of the process that wrote this.
        run_name: as in the config.
        step: steps done, and of the whole run.
        max_steps: steps done, and of the whole run.
        loss: of the last step; None before the first.
        lr: of the last step; None before the first.
        grad_norm: of the last step; None before the first.
        tokens_per_s: of the last step; None before the first.
        eta_s: seconds the rest will take.
        tier_used_bytes: tier -> bytes in use after that step, and all there are.
        tier_capacity_bytes: tier -> bytes in use after that step, and all there are.
        rss_bytes: resident memory of the process.
        checkpoint_step: the newest checkpoint, and when it was done; None if there is none.
        checkpoint_at: the newest checkpoint, and when it was done; None if there is none.
        evaluations: set -> JSON values of its last evaluation: ``step``, ``loss``, ``perplexity``.
        metrics: ``StepMetrics.to_json`` of the last step.
        activity: what is done at this moment, see ``Moment``.
        exit_code: that the process ends with; None while it runs.
        updated_at: when this was written.
        message: what a person was told last; of a failed run, why it failed.

    Times are ISO 8601, UTC.
    """

    state: State
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    run_name: str = ""
    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    tier_used_bytes: Mapping[str, int] = field(default_factory=dict)
    tier_capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    rss_bytes: int = 0
    checkpoint_step: int | None = None
    checkpoint_at: str | None = None
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    activity: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    updated_at: str = ""
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a number that is not finite becomes text, which strict JSON needs."""
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunStatus:
        """Return the status that ``to_json`` gave; keys of newer versions are ignored.

        Raises:
            ValueError: it is no status.
            TypeError: it is no status.
            KeyError: it is no status.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "eta_s"):
            if isinstance(known.get(name), str):
                known[name] = float(known[name])
        return cls(**{"state": values["state"], **known})


class RunFolder:
    """The folder of one run, locked while the context is open. ``write_status`` may be called from any thread.

    Args:
        path: ``output_dir``; made if missing, and removed again if nothing came to lie in it.
        exit_code_of: what the process will end with after an error, for who follows the run.

    Attributes:
        path: absolute.
        checkpoints: where checkpoints and the trained model go.
        final: where checkpoints and the trained model go.
        dead_owner: after entering, the process that had it last, if that died without giving it up.
        status: written last, or None.

    Entering raises LockedError where a living run has the folder, OSError where it cannot be made or locked.
    """

    def __init__(self, path: Path | str, *, exit_code_of: Callable[[BaseException], int] = lambda error: 1) -> None:
        self._exit_code_of = exit_code_of
        self.path = Path(os.path.abspath(path))
        self.checkpoints = self.path / CHECKPOINTS_NAME
        self.final = self.path / FINAL_NAME
        self.dead_owner: str | None = None
        self.status: RunStatus | None = None
        self._made: list[Path] = []
        self._lock_fd = -1
        self._written_s = -math.inf
        self._writing = threading.RLock()  # a signal may interrupt a write, and its handler tells news, too

    def __enter__(self) -> Self:
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock_fd, self.dead_owner = _lock(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # somebody else's lock stays, and so does the folder
                for folder in self._made:
                    folder.rmdir()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from tiered.ext import unlock_directory

        if error is not None and self.status is not None and self.status.state not in FINAL_STATES:
            state: State = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            message, code = str(error) or type(error).__name__, self._exit_code_of(error)
            ended = replace(self.status, state=state, message=message, exit_code=code, activity={})
            self.write_status(ended, force=True)
        self._remove_if_unused()
        fd, self._lock_fd = self._lock_fd, -1
        unlock_directory(fd)

    def _remove_if_unused(self) -> None:
        """Remove the folder if this object made it and nothing but the lock and the status lies in it."""
        if self.path not in self._made or not {_LOCK_NAME, STATUS_NAME}.issuperset(os.listdir(self.path)):
            return
        with contextlib.suppress(OSError):  # somebody put something there just now
            for name in (STATUS_NAME, _LOCK_NAME):
                (self.path / name).unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def write_status(self, status: RunStatus, *, force: bool = False) -> None:
        """Replace ``status.json``, at most once a second unless ``force``. Never raises for a full or broken drive."""
        with self._writing:
            self.status = status = replace(status, updated_at=now_text())
            now_s = time.monotonic()
            if not force and now_s - self._written_s < _WRITE_INTERVAL_S:
                return
            self._written_s = now_s
            temporary = self.path / f".{STATUS_NAME}.tmp"
            try:
                temporary.write_text(json.dumps(status.to_json(), allow_nan=False) + "\n", encoding="utf-8")
                os.replace(temporary, self.path / STATUS_NAME)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()


def _lock(path: Path) -> tuple[int, str | None]:
    from tiered.errors import LockedError
    from tiered.ext import lock_directory

    for _ in range(_LOCK_ATTEMPTS - 1):
        with contextlib.suppress(LockedError):
            return lock_directory(path)
        time.sleep(_LOCK_RETRY_S)
    return lock_directory(path)


def living_owner(path: Path | str) -> Owner | None:
    """Return the process that has the folder of a run now, or None; a lock that a dead process left is nobody's.

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
    """Make sure that a signal to the owner's number would reach the owner, and nobody else.

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
    """Send a signal to the process that has a folder. Raises as ``check_reachable``."""
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


def read_status(path: Path | str) -> RunStatus | None:
    """Return what a run last wrote into its folder, or None if there is nothing that can be read."""
    try:
        values = json.loads(Path(path, STATUS_NAME).read_bytes())
        return RunStatus.from_json(values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def committed_step(path: Path | str) -> int | None:
    """Return the step of the checkpoint, or copy of one, that a run in this folder would continue from, or None.

    Believes manifests and the names of files: whether the blocks are sound is seen when they are read.
    """
    found = usable_checkpoint(path)
    return None if found is None else found.step
