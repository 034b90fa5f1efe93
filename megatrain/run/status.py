"""``status.json``: a run's progress. The run writes it about once a second, and other processes read it.

The run's results do not depend on this file. Reading it imports neither torch nor the store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from megatrain.base.observer import RunObserver, StepMetrics, StoredRecord
from megatrain.base.progress import Activity
from megatrain.checkpoint.inventory import usable_checkpoint
from megatrain.checkpoint.state import now_text

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunInfo, RunSummary

__all__ = [
    "FINAL_STATES",
    "SILENT_S",
    "STATUS_NAME",
    "RunStatus",
    "State",
    "StatusWriter",
    "read_status",
    "write_status",
]

STATUS_NAME = "status.json"
_INTERVAL_S = 1.0
_READ_ATTEMPTS, _READ_RETRY_S = 3, 0.02
#: Seconds without an update after which a run probably hangs, because a run writes its status every second.
SILENT_S = 15.0

State = Literal["starting", "training", "paused", "exporting", "done", "stopped", "failed"]
FINAL_STATES: tuple[State, ...] = ("done", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class RunStatus(StoredRecord):
    """Progress of a run. Times are ISO 8601, UTC.

    Attributes:
        state: ``starting`` before training, ``paused`` while a drive is full, or another ``State``.
        step: Number of finished steps.
        metrics: Metrics of the last step. None before the first step.
        checkpoint_step: Step of the newest checkpoint. None without a checkpoint.
        checkpoint_at: Time at which this checkpoint was finished.
        evaluations: JSON values of each set's last evaluation: ``step``, ``loss``, ``perplexity``, and for preference
            losses also ``preferences``.
        activity: Activity of the run at the time of writing; see ``ActivitySnapshot``.
        exit_code: Exit code of the process. None while the process runs.
        message: Last message for the user. For a failed run, the reason.
    """

    state: State
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    run_name: str = ""
    step: int = 0
    max_steps: int = 0
    metrics: StepMetrics | None = None
    checkpoint_step: int | None = None
    checkpoint_at: str | None = None
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    activity: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    updated_at: str = ""
    message: str = ""


def read_status(path: Path | str) -> RunStatus | None:
    """Return the last status that a run wrote to its folder, or None if it cannot be read."""
    for attempt in range(_READ_ATTEMPTS):
        try:
            return RunStatus.from_json(json.loads(Path(path, STATUS_NAME).read_bytes()))
        except ValueError:  # partly written on a full drive
            if attempt + 1 < _READ_ATTEMPTS:
                time.sleep(_READ_RETRY_S)
        except (OSError, TypeError, AttributeError, RecursionError, OverflowError):
            return None
    return None


def write_status(path: Path | str, status: RunStatus) -> None:
    """Replace a folder's ``status.json`` atomically. Raises no error if the drive is full or broken.

    On a full drive, the existing file is overwritten in place, which needs no space, because users must still see that
    the run is waiting for space. A reader that finds a partly written file reads it again.
    """
    temporary = Path(path, f".{STATUS_NAME}.tmp")
    text = json.dumps(replace(status, updated_at=now_text()).to_json(), allow_nan=False) + "\n"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, Path(path, STATUS_NAME))
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                _overwrite(Path(path, STATUS_NAME), text.encode())


def _overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file within its existing disk blocks. Write nothing if the data needs more blocks."""
    with path.open("r+b") as file:
        file_stat = os.fstat(file.fileno())
        max_bytes = max(file_stat.st_size, file_stat.st_blocks * 512)
        if len(data) <= max_bytes:
            file.write(data.ljust(file_stat.st_size))  # keep the file's length; JSON allows trailing spaces
            file.flush()


class StatusWriter(RunObserver):
    """Observer that keeps ``status.json`` up to date. Writes nothing before the first event.

    Enter this context manager inside the context of the run's folder. From the start of training, a thread
    writes the current activity once a second. An exception that leaves the context is recorded as the end of the run.

    Args:
        path: The run's locked folder. The previous run's status stays there until the first event. The new status
            keeps the previous values up to the checkpoint from which this run continues.
        exit_code_of: Function that returns the process's exit code for an error or a summary.
        on_interval: Called once a second on the writing thread. Must not raise errors.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_name: str = "",
        activity: Activity | None = None,
        exit_code_of: Callable[[BaseException | RunSummary], int] | None = None,
        on_interval: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_interval = on_interval
        self._path = path
        self._activity = activity or Activity()
        self._exit_code_of = exit_code_of or _default_exit_code
        # Reentrant, because a signal may interrupt a write, and the signal's handler may send a message.
        self._lock = threading.RLock()
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_entered = False
        self._last_write_s: float | None = None
        self._status = _initial_status(path, run_name)
        previous = read_status(path)
        self._was_done = previous is not None and previous.state == "done"  # reset when training starts or pauses

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Stop the thread before the folder is unlocked, because the next owner must be the only writer.
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None and self._last_write_s is not None and self._status.state not in FINAL_STATES:
            state: State = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            message = str(error) or type(error).__name__
            self._write(True, state=state, message=message, exit_code=self._exit_code_of(error), activity={})

    def set_state(self, state: State, message: str | None = None) -> None:
        """Set the state, e.g. ``paused`` or ``exporting``, and write it at once."""
        self._write(True, state=state, **({} if message is None else {"message": message}))

    def fail(self, message: str, exit_code: int) -> None:
        """Record that the run failed, from any thread. The process then ends without leaving the context."""
        if self._last_write_s is not None:
            self._stop_event.set()
            self._write(True, state="failed", message=message, exit_code=exit_code, activity={})

    def on_start(self, info: RunInfo) -> None:
        self._was_done = False
        self._write(True, state="training", run_name=info.run_name, max_steps=info.max_steps)
        if self._is_entered and self._thread is None:
            self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
            self._thread.start()

    def on_step(self, metrics: StepMetrics) -> None:
        is_last = metrics.step == metrics.max_steps  # after the last step, the run saves and exports
        self._write(
            is_last,
            state="exporting" if is_last else "training",
            step=metrics.step,
            max_steps=metrics.max_steps,
            metrics=metrics,
            activity=asdict(self._activity.snapshot()),
        )

    def on_message(self, text: str) -> None:
        """Write a message, and update the state, because the run may have paused or resumed."""
        state = self._status.state
        if self._activity.is_paused():
            state, self._was_done = "paused", False
        elif state == "paused":
            state = "training"
        self._write(True, state=state, message=text)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(True, evaluations={**self._status.evaluations, metrics.name: _evaluation_json(metrics)})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._write(True, checkpoint_step=metrics.step, checkpoint_at=now_text())

    def on_end(self, summary: RunSummary) -> None:
        self._stop_event.set()  # set before writing the final state, so that the thread does not overwrite it
        evaluations = {name: _evaluation_json(metrics) for name, metrics in summary.evaluations.items()}
        self._write(
            True,
            state="stopped" if summary.interrupted else "done",
            step=summary.num_steps,
            max_steps=self._status.max_steps or summary.num_steps,
            activity={},
            exit_code=self._exit_code_of(summary),
            evaluations={**self._status.evaluations, **evaluations},
        )

    def _keep_writing(self) -> None:
        while not self._stop_event.wait(_INTERVAL_S):
            self._on_interval()
            self._write(True, activity=asdict(self._activity.snapshot()))

    def _write(self, force: bool, **changes: Any) -> None:
        """Change the status, and write it at most once a second unless ``force`` is set."""
        with self._lock:
            if self._was_done:  # keep the state "done" if this start has nothing to do
                return
            if self._stop_event.is_set() and "exit_code" not in changes and self._status.exit_code is not None:
                return
            self._status = replace(self._status, **changes)
            now_s = time.monotonic()
            if force or self._last_write_s is None or now_s - self._last_write_s >= _INTERVAL_S:
                self._last_write_s = now_s
                write_status(self._path, self._status)


def _initial_status(path: Path, run_name: str) -> RunStatus:
    """Return a run's first status: the previous status up to the checkpoint from which this run continues."""
    status = RunStatus("starting", run_name=run_name)
    checkpoint, previous = usable_checkpoint(path), read_status(path)
    if checkpoint is None or checkpoint.step is None:
        return status
    status = replace(status, step=checkpoint.step, checkpoint_step=checkpoint.step)
    if previous is None:
        return status
    return replace(
        status,
        step=previous.step,
        max_steps=previous.max_steps,
        checkpoint_at=previous.checkpoint_at if previous.checkpoint_step == checkpoint.step else None,
        evaluations={
            name: metrics for name, metrics in previous.evaluations.items() if metrics.get("step", 0) <= checkpoint.step
        },
    )


def _default_exit_code(outcome: BaseException | RunSummary) -> int:
    return int(isinstance(outcome, BaseException) or outcome.interrupted)


def _evaluation_json(metrics: EvaluationMetrics) -> dict[str, Any]:
    values = metrics.to_json()
    return {name: values[name] for name in ("step", "loss", "perplexity", "preferences") if values[name] != {}}
