"""Loggers for a run's metrics, selected by ``logging.report_to``: ``metrics.jsonl`` and accelerate's trackers."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatrain.base.errors import ConfigError, Problem
from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunObserver, RunSummary, StepMetrics
from tiered.errors import install_command
from tiered.units import GB, GiB

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.run.table import LoggingConfig


__all__ = ["METRICS_NAME", "Logger", "MetricsLog", "TrackerLog", "check_loggers", "last_evaluations", "make_loggers"]

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
#: File with this run's data for each tracker: the run's id in the tracker, and the last logged steps.
TRACKERS_NAME = "trackers.json"


class Logger(RunObserver):
    """Observer with an open file or connection. A context manager that calls ``close`` on exit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the file or connection. Idempotent."""


@dataclass(frozen=True, slots=True)
class LoggingSpec:
    """Destinations of a run's metrics.

    Attributes:
        run_name: Name of the run, as trackers show it.
        output_dir: The run's folder, for metrics files.
        values: Resolved config as nested tables.
        toml: Resolved config as TOML text.
    """

    table: LoggingConfig
    run_name: str
    output_dir: Path
    values: Mapping[str, Any]
    toml: str


def check_loggers(spec: LoggingSpec) -> None:
    """Check that the packages of all trackers in ``logging.report_to`` are installed.

    Raises:
        ConfigError: A package is missing. The message states how to install it.
    """
    problems = [
        Problem(
            "logging.report_to",
            f'logging.report_to names "{name}"; not installed: {", ".join(missing)}',
            f"Install it: {install_command(name)}, or leave it out",
        )
        for name in spec.table.report_to
        if name in _TRACKERS
        and (missing := [package for package in (name, "accelerate") if not importlib.util.find_spec(package)])
    ]
    if problems:
        raise ConfigError("the config", problems)


def make_loggers(
    spec: LoggingSpec, resume_step: int | None, on_notice: Callable[[str], None] = lambda text: None
) -> list[Logger]:
    """Return a logger for each entry of ``logging.report_to``. ``output_dir`` must exist.

    Steps after ``resume_step`` are logged again. Each logger drops, replaces or keeps earlier entries for these
    steps.

    Args:
        spec: Names and destinations of the loggers.
        resume_step: Number of finished steps if this run continues from a checkpoint, or None for a new run.
        on_notice: Called when a tracker fails. The run continues without the tracker.

    Raises:
        ConfigError: If a package is not installed.
        OSError: If ``metrics.jsonl`` cannot be written.
    """
    check_loggers(spec)
    return [
        MetricsLog(spec.output_dir / METRICS_NAME, resume_step=resume_step)
        if name == "jsonl"
        else TrackerLog(name, spec, resume_step, on_notice)
        for name in spec.table.report_to
    ]


# -- metrics.jsonl -------------------------------------------------------------------------------------------------


class MetricsLog(Logger):
    """Logger that appends a JSON object for each step, evaluation and checkpoint to a file, without buffering.

    Evaluations have ``"event": "evaluation"``, and checkpoints have ``"event": "checkpoint"``. Steps have no ``event``.
    If the drive is full, lines are kept in memory until there is space.

    Args:
        path: Path of the file, in an existing folder.
        resume_step: Number of finished steps if this run continues from a checkpoint. Lines of later steps are
            dropped, because these steps are logged again. If None, an old file is moved to ``metrics.old.jsonl``.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        if path.exists():
            if resume_step is None:
                os.replace(path, path.with_suffix(".old.jsonl"))
            else:
                _drop_later_steps(path, resume_step)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unwritten = b""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # An error from a full drive must not replace an error that is already being raised.
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close()

    def on_step(self, metrics: StepMetrics) -> None:
        self._write(metrics.to_json())

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write({"event": "evaluation", **metrics.to_json()})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._write({"event": "checkpoint", **metrics.to_json()})

    def on_end(self, summary: RunSummary) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent.

        Raises:
            OSError: The drive is still full, so some lines cannot be written.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            self._flush(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None  # add the path
        finally:
            os.close(fd)

    def _write(self, values: Mapping[str, Any]) -> None:
        self._unwritten += json.dumps(values, allow_nan=False).encode() + b"\n"
        try:
            self._flush(self._fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _flush(self, fd: int) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]


def last_evaluations(path: Path, step: int) -> dict[str, EvaluationMetrics]:
    """Return each set's last evaluation at or before ``step`` in ``metrics.jsonl``, or {} if the file is unreadable."""
    evaluations = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = list(file)
    except OSError:
        return {}
    for line in lines:
        if '"evaluation"' in line and _has_step_up_to(step, line):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                metrics = EvaluationMetrics.from_json(json.loads(line))
                evaluations[metrics.name] = metrics
    return evaluations


def _drop_later_steps(path: Path, last_step: int) -> None:
    """Rewrite a metrics file without the lines of later steps and without a line that a crash truncated."""
    partial_path = path.with_name(path.name + ".partial")
    with (
        path.open(encoding="utf-8", errors="replace") as source,
        partial_path.open("w", encoding="utf-8") as target,
    ):
        target.writelines(line for line in source if _has_step_up_to(last_step, line))
    os.replace(partial_path, path)


def _has_step_up_to(last_step: int, line: str) -> bool:
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= last_step
    except (ValueError, KeyError, TypeError):
        return False


# -- trackers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TrackerStart:
    """Arguments for starting a tracker.

    Attributes:
        spec: Project and name of the run in the tracker.
        run_id: Id of the run in the tracker. None if the tracker generates the id.
        is_new: Whether the run must be created in the tracker.
        first_step: First step that this process logs.
    """

    spec: LoggingSpec
    run_id: str | None
    is_new: bool
    first_step: int


@dataclass(frozen=True, slots=True)
class _Tracker:
    """Settings for one of accelerate's trackers.

    Attributes:
        arguments: Function that returns the tracker's keyword arguments.
        make_id: Function that generates the id of a new run. None if the tracker generates the id.
        read_id: Function that reads the run's id from the started tracker, or None if the id is known in advance.
        stores_duplicates: Whether the tracker would store a repeated step twice. If so, steps that the tracker already
            has are not sent.
        on_start: Called with the started tracker.
        finish: Function that ends the run, given the tracker and the summary. The summary is None after an error.
        accepts_nan: Whether the tracker accepts non-finite values.
    """

    arguments: Callable[[_TrackerStart], dict[str, Any]]
    make_id: Callable[[], str] | None = lambda: uuid.uuid4().hex
    read_id: Callable[[Any], str] | None = None
    stores_duplicates: bool = False
    on_start: Callable[[Any, _TrackerStart], None] = lambda tracker, start: None
    finish: Callable[[Any, RunSummary | None], None] = lambda tracker, summary: tracker.finish()
    accepts_nan: bool = False


def _log_config_text(tracker: Any, start: _TrackerStart) -> None:
    tracker.log({"config": "    " + start.spec.toml.replace("\n", "\n    ")}, step=start.first_step)


def _log_config_once(tracker: Any, start: _TrackerStart) -> None:
    # Log parameters only once, because a continued run already has them, and MLflow rejects changed values.
    if start.is_new:
        tracker.store_init_configuration(_flatten(start.spec.values))


def _name_comet_run(tracker: Any, start: _TrackerStart) -> None:
    tracker.tracker.set_name(start.spec.run_name)
    _log_config_once(tracker, start)


def _finish_wandb(tracker: Any, summary: RunSummary | None) -> None:
    if summary is not None:
        tracker.tracker.summary.update({"interrupted": summary.interrupted, "num_steps": summary.num_steps})
    tracker.tracker.finish(exit_code=0 if summary is not None else 1)


def _finish_mlflow(tracker: Any, summary: RunSummary | None) -> None:
    importlib.import_module("mlflow").end_run("FAILED" if summary is None else "FINISHED")


_TRACKERS: dict[str, _Tracker] = {
    "tensorboard": _Tracker(
        # Files of earlier starts stay. With purge_step, TensorBoard hides the steps in them that are logged again.
        lambda start: {
            "run_name": TENSORBOARD_NAME,
            "logging_dir": str(start.spec.output_dir),
            "purge_step": start.first_step,
        },
        on_start=_log_config_text,
        accepts_nan=True,
    ),
    # WANDB_MODE=offline needs no network. If a step is logged twice, the service keeps the first values.
    "wandb": _Tracker(
        lambda start: {
            "run_name": start.spec.table.project,
            "name": start.spec.run_name,
            "dir": str(start.spec.output_dir),
            "id": start.run_id,
            "resume": "allow",
            "config": start.spec.values,
        },
        make_id=lambda: uuid.uuid4().hex[:12],
        finish=_finish_wandb,
    ),
    "mlflow": _Tracker(
        lambda start: {
            "experiment_name": start.spec.table.project,
            "run_name": start.spec.run_name,
            "run_id": start.run_id,
        },
        make_id=None,
        read_id=lambda tracker: str(tracker.tracker.info.run_id),
        stores_duplicates=True,
        on_start=_log_config_once,
        finish=_finish_mlflow,
    ),
    "swanlab": _Tracker(
        lambda start: {
            "run_name": start.spec.table.project,
            "name": start.spec.run_name,
            "log_dir": str(start.spec.output_dir / "swanlab"),
            "id": start.run_id,
            "resume": "allow",
            "config": start.spec.values,
        },
        stores_duplicates=True,
    ),
    # trackio identifies runs by name, so the name contains the id.
    "trackio": _Tracker(
        lambda start: {
            "run_name": start.spec.table.project,
            "name": f"{start.spec.run_name}-{start.run_id}",
            "resume": "allow",
            "config": _flatten(start.spec.values),
        },
        make_id=lambda: uuid.uuid4().hex[:6],
        stores_duplicates=True,
    ),
    "comet_ml": _Tracker(
        lambda start: {
            "run_name": start.spec.table.project,
            "experiment_key": start.run_id,
            "mode": "get_or_create",
        },
        stores_duplicates=True,
        on_start=_name_comet_run,
    ),
}


class TrackerLog(Logger):
    """Logger for one of accelerate's trackers. The tracker shows all starts of a run as one run.

    Training does not depend on a tracker. After a tracker's first error, which is reported, it gets no more metrics.

    Args:
        name: Name in ``logging.report_to``.
        spec: Project and name of the run in the tracker.
        resume_step: Number of finished steps if this run continues from a checkpoint, or None to create a new run in
            the tracker.
        on_notice: Called with the text of the first error.
    """

    def __init__(self, name: str, spec: LoggingSpec, resume_step: int | None, on_notice: Callable[[str], None]) -> None:
        self._name, self._settings, self._on_notice = name, _TRACKERS[name], on_notice
        self._path = spec.output_dir / TRACKERS_NAME
        entry = _read_json(self._path).get(name) if resume_step is not None else None
        self._saved: dict[str, Any] = entry if isinstance(entry, dict) else {}  # id, and last step by kind of metrics
        self._tracker: Any = None
        try:
            self._start(spec, 0 if resume_step is None else resume_step + 1)
        except Exception as error:
            self._give_up(error)

    def on_step(self, metrics: StepMetrics) -> None:
        self._log("train", step_scalars(metrics), metrics.step)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._log(f"eval/{metrics.name}", evaluation_scalars(metrics), metrics.step)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        scalars = checkpoint_scalars(metrics)
        if self._name == "wandb":
            # Log without a step: wandb rejects earlier steps, and training continued while the checkpoint was written.
            self._try(lambda tracker: tracker.log({**scalars, "checkpoint/step": metrics.step}, commit=False))
        else:
            self._log("checkpoint", scalars, metrics.step)

    def on_end(self, summary: RunSummary) -> None:
        self._finish(summary)

    def close(self) -> None:
        """Mark the run as failed in the tracker, unless it has already ended."""
        self._finish(None)

    def _start(self, spec: LoggingSpec, first_step: int) -> None:
        tracking = importlib.import_module("accelerate.tracking")
        # accelerate's logging requires this state. Keep it on the CPU, because the run uses the device.
        importlib.import_module("accelerate").PartialState(cpu=True)
        is_new = "id" not in self._saved
        if is_new:
            self._saved = {"id": None if self._settings.make_id is None else self._settings.make_id()}
        start = _TrackerStart(spec, self._saved["id"], is_new, first_step)
        tracker = tracking.LOGGER_TYPE_TO_CLASS[self._name](**self._settings.arguments(start))
        tracker.start()
        self._tracker = tracker
        if self._settings.read_id is not None:
            self._saved["id"] = self._settings.read_id(tracker)
        self._remember()
        self._settings.on_start(tracker, start)

    def _log(self, kind: str, scalars: Mapping[str, float], step: int) -> None:
        if self._settings.stores_duplicates and step <= self._saved.get(kind, -1):
            return
        values = {name: value for name, value in scalars.items() if self._settings.accepts_nan or math.isfinite(value)}
        self._try(lambda tracker: tracker.log(values, step=step))
        if self._settings.stores_duplicates and self._tracker is not None:
            # Write this after the metrics, so that a kill in between duplicates a point in the tracker instead of
            # losing it.
            self._saved[kind] = step
            self._remember()

    def _remember(self) -> None:
        """Write the run's id in the tracker and the last logged steps to ``TRACKERS_NAME``."""
        temp = self._path.with_name(self._path.name + ".partial")
        with contextlib.suppress(OSError):  # the drive may be full
            temp.write_text(json.dumps({**_read_json(self._path), self._name: self._saved}) + "\n", encoding="utf-8")
            os.replace(temp, self._path)

    def _finish(self, summary: RunSummary | None) -> None:
        self._try(lambda tracker: self._settings.finish(tracker, summary))
        self._tracker = None

    def _try(self, action: Callable[[Any], object]) -> None:
        """Call an action with the tracker, unless the tracker has failed or ended."""
        if self._tracker is not None:
            try:
                action(self._tracker)
            except Exception as error:  # a tracker's error must not end the run
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tracker = None
        self._on_notice(f"no more figures for {self._name}: {type(error).__name__}: {error}. The run continues")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names. Values that are not scalars are converted to text."""
    flat_values: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat_values |= _flatten(value, f"{prefix}{name}.")
        else:
            flat_values[prefix + name] = value if isinstance(value, str | int | float) else str(value)
    return flat_values


def step_scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return the metrics of a step, by curve name."""
    values: dict[str, float] = {
        "train/loss": metrics.loss,
        "train/grad_norm": metrics.grad_norm,
        "train/learning_rate": metrics.lr,
        "train/epoch": metrics.epoch,
        "speed/tokens_per_s": metrics.real_tokens_per_s,
        "speed/trained_tokens_per_s": metrics.trained_tokens_per_s,
        "speed/step_s": metrics.step_s,
        "memory/process_GiB": metrics.rss_bytes / GiB,
    }
    if metrics.hardware_flops:
        values["speed/model_TFLOPs"] = metrics.model_flops_per_s / 1e12
        values["speed/hardware_TFLOPs"] = metrics.hardware_flops_per_s / 1e12
    values |= {f"memory/{tier}_GiB": nbytes / GiB for tier, nbytes in metrics.tier_used_bytes.items()}
    values |= {f"train/{name}": value for name, value in metrics.preferences.items()}
    values |= {f"wait/{cause}_s": seconds for cause, seconds in metrics.stall_s.items()}
    if metrics.written_bytes:
        values["drives/written_GB"] = sum(metrics.written_bytes.values()) / GB
    return values


def evaluation_scalars(metrics: EvaluationMetrics) -> dict[str, float]:
    """Return the metrics of an evaluation, by curve name."""
    name = f"eval/{metrics.name}"
    if metrics.preferences:
        return {f"{name}_loss": metrics.loss} | {f"{name}_{key}": value for key, value in metrics.preferences.items()}
    return {f"{name}_loss": metrics.loss, f"{name}_perplexity": metrics.perplexity}


def checkpoint_scalars(metrics: CheckpointMetrics) -> dict[str, float]:
    """Return the metrics of a checkpoint, by curve name."""
    return {
        "checkpoint/GiB": metrics.nbytes / GiB,
        "checkpoint/seconds": metrics.seconds,
        "checkpoint/stall_s": metrics.stall_s,
    }
