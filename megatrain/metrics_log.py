"""``metrics.jsonl``: one JSON object per step, evaluation and checkpoint, through kills and full drives."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import TYPE_CHECKING, Any, Self

from megatrain.metrics import EvaluationMetrics

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from megatrain.metrics import CheckpointMetrics, RunInfo, RunSummary, StepMetrics


class MetricsLog:
    """An observer that appends a JSON object per step, evaluation and checkpoint to a file; each is written at once.

    Lines of evaluations have ``"event": "evaluation"``, those of checkpoints ``"checkpoint"``; those of steps have no
    event.

    Args:
        path: the file; its folder must exist.
        continued_from: steps done before, if this run goes on; lines of later steps, which come again, are dropped. A
            run that starts anew moves the file of an earlier one to ``metrics.old.jsonl``.
    """

    def __init__(self, path: Path, *, continued_from: int | None = None) -> None:
        if path.exists():
            if continued_from is None:
                os.replace(path, path.with_suffix(".old.jsonl"))
            else:
                _drop_later_steps(path, continued_from)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unwritten = b""  # what a full drive has not taken yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close()

    def on_start(self, info: RunInfo) -> None:
        """Write nothing: the file holds figures only."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Append the step."""
        self._write(metrics.to_json())

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append the evaluation."""
        self._write({"event": "evaluation", **metrics.to_json()})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Append the checkpoint."""
        self._write({"event": "checkpoint", **metrics.to_json()})

    def _write(self, values: Mapping[str, Any]) -> None:
        self._unwritten += json.dumps(values, allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]

    def on_message(self, text: str) -> None:
        """Write nothing: the file holds figures only."""

    def on_end(self, summary: RunSummary) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file. Safe to call twice.

        Raises:
            OSError: lines that a full drive did not take cannot be written now either.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None  # it does not know the file by itself
        finally:
            os.close(fd)


def last_evaluations(path: Path, step: int) -> dict[str, EvaluationMetrics]:
    """Return the last evaluation of each set, up to a step, that a metrics file has; none if there is no file."""
    found = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return {}
    for line in lines:
        if '"evaluation"' in line and _is_of_steps_up_to(step, line):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                metrics = EvaluationMetrics.from_json(json.loads(line))
                found[metrics.name] = metrics
    return found


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Rewrite the file without what comes after a step, and without a line that a crash has cut off."""
    partial = path.with_name(path.name + ".partial")
    with path.open(encoding="utf-8", errors="replace") as old, partial.open("w", encoding="utf-8") as new:
        new.writelines(line for line in old if _is_of_steps_up_to(last_step, line))
    os.replace(partial, path)


def _is_of_steps_up_to(last_step: int, line: str) -> bool:
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= last_step
    except (ValueError, KeyError, TypeError):
        return False
