"""``status.json`` kept current while a run goes on: what ``megatrain-tier status`` shows of the living."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

from megatrain.activity import Activity
from megatrain.checkpoint.state import now_text
from megatrain.run_folder import RunFolder, RunStatus, State, committed_step, read_status

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.metrics import CheckpointMetrics, EvaluationMetrics, RunInfo, RunSummary, StepMetrics

__all__ = ["StatusWriter"]

_INTERVAL_S = 1.0


class StatusWriter:
    """A ``RunObserver`` that keeps ``status.json`` of a locked folder current. Nothing is written until it is told.

    A context manager: from the start of training until it is left, a thread writes once a second what the run is doing.

    Args:
        folder: entered. If it holds a checkpoint, what the last run wrote stands until there is news.
        run_name: as in the config.
        activity: what is done at this moment.
        exit_code_of: what the process will end with.

    Attributes:
        is_paused: set by the run: whether it waits for a person, e.g. on a full drive. Asked at every message.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        run_name: str = "",
        activity: Activity | None = None,
        exit_code_of: Callable[[RunSummary], int] | None = None,
    ) -> None:
        self.is_paused: Callable[[], bool] = lambda: False
        self._folder = folder
        self._changing = threading.RLock()
        self._activity = activity or Activity()
        self._exit_code_of = exit_code_of or (lambda summary: int(summary.interrupted))
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_entered = False
        self._status = RunStatus("starting", run_name=run_name)
        before, saved = read_status(folder.path), committed_step(folder.path)
        if saved is not None:
            self._status = replace(self._status, step=saved, checkpoint_step=saved)
        if saved is not None and before is not None:
            at = before.checkpoint_at if before.checkpoint_step == saved else None
            self._status = replace(self._status, step=before.step, max_steps=before.max_steps, checkpoint_at=at)
            seen = {name: each for name, each in before.evaluations.items() if each.get("step", 0) <= saved}
            self._status = replace(self._status, evaluations=seen)

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread: whoever has the folder next writes there alone."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _keep_writing(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            self._write(True, activity=asdict(self._activity.look()))

    def say(self, state: State, message: str | None = None) -> None:
        """Write a new state at once, e.g. ``paused`` or ``exporting``."""
        self._write(True, state=state, **({} if message is None else {"message": message}))

    def on_start(self, info: RunInfo) -> None:
        """Training starts."""
        self._write(True, state="training", run_name=info.run_name, max_steps=info.max_steps)
        if self._is_entered and self._thread is None:
            self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
            self._thread.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is done: its figures. After the last one the run saves and exports."""
        is_last = metrics.step == metrics.max_steps
        self._write(
            is_last,
            state="exporting" if is_last else "training",
            step=metrics.step,
            max_steps=metrics.max_steps,
            loss=metrics.loss,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            tokens_per_s=metrics.real_tokens_per_s,
            eta_s=metrics.eta_s,
            tier_used_bytes=dict(metrics.tier_used_bytes),
            tier_capacity_bytes=dict(metrics.tier_capacity_bytes),
            rss_bytes=metrics.rss_bytes,
            metrics=metrics.to_json(),
            activity=asdict(self._activity.look()),
        )

    def on_message(self, text: str) -> None:
        """A person was told something, perhaps that the run waits, or goes on."""
        state = self._status.state
        if self.is_paused():
            state = "paused"
        elif state == "paused":
            state = "training"
        self._write(True, state=state, message=text)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """An evaluation is done."""
        self._write(True, evaluations={**self._status.evaluations, metrics.name: _shown(metrics)})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A checkpoint is done."""
        self._write(True, checkpoint_step=metrics.step, checkpoint_at=now_text())

    def on_end(self, summary: RunSummary) -> None:
        """The run ended, at its end or because somebody stopped it."""
        self._over.set()  # what follows is the last word
        state: State = "stopped" if summary.interrupted else "done"
        self._write(
            True,
            state=state,
            step=summary.num_steps,
            max_steps=self._status.max_steps or summary.num_steps,
            loss=summary.last_loss,
            eta_s=None,
            activity={},
            exit_code=self._exit_code_of(summary),
            evaluations={
                **self._status.evaluations,
                **{name: _shown(metrics) for name, metrics in summary.evaluations.items()},
            },
        )

    def _write(self, force: bool, **changes: Any) -> None:
        with self._changing:
            if self._over.is_set() and "exit_code" not in changes and self._status.exit_code is not None:
                return
            self._status = replace(self._status, **changes)
            self._folder.write_status(self._status, force=force)


def _shown(metrics: EvaluationMetrics) -> dict[str, Any]:
    values = metrics.to_json()
    return {name: values[name] for name in ("step", "loss", "perplexity")}
