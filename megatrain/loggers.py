"""Where the figures of a run go: JSON lines, TensorBoard, Weights & Biases, as ``logging.report_to`` says."""

from __future__ import annotations

import importlib
import importlib.util
import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from megatrain.config.problems import ConfigError, Problem
from megatrain.config.resolved import resolved_values, to_toml
from megatrain.metrics import (
    CheckpointMetrics,
    EvaluationMetrics,
    RunInfo,
    RunObserver,
    RunSummary,
    StepMetrics,
)
from megatrain.metrics_log import MetricsLog
from tiered.units import GB, GiB

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.config.schema import RunConfig

__all__ = ["Logger", "TensorBoardLog", "WandbLog", "check_loggers", "make_loggers"]

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
WANDB_ID_NAME = "wandb_id.txt"
#: How to get what is not part of the core.
_INSTALL = {"tensorboard": 'pip install "megatrain-tier[tensorboard]"', "wandb": 'pip install "megatrain-tier[wandb]"'}


class Logger(RunObserver, AbstractContextManager["Logger", None], Protocol):
    """An observer that holds a file or a connection: leaving its context closes it."""


def check_loggers(config: RunConfig) -> None:
    """Make sure that everything in ``logging.report_to`` is installed.

    Raises:
        ConfigError: what is missing, and how to get it.
    """
    missing = [name for name in config.logging.report_to if name in _INSTALL and not importlib.util.find_spec(name)]
    if missing:
        problems = [
            Problem(
                "logging.report_to",
                f'logging.report_to names "{name}", which is not installed',
                f"Install it: {_INSTALL[name]}, or leave it out",
            )
            for name in missing
        ]
        raise ConfigError("the config", problems)


def make_loggers(
    config: RunConfig, continued_from: int | None, on_notice: Callable[[str], None] = lambda text: None
) -> list[Logger]:
    """Return an observer for each place that ``logging.report_to`` names. ``output_dir`` must exist.

    Figures of steps after ``continued_from`` come again: each place drops or replaces those it has.

    Args:
        continued_from: steps done before, if this run goes on; None: it starts anew.
        on_notice: told when one of them fails; the run goes on without it.

    Raises:
        ConfigError: something that is asked for is not installed.
        OSError: ``metrics.jsonl`` cannot be written.
    """
    check_loggers(config)
    loggers: list[Logger] = []
    for name in config.logging.report_to:
        if name == "jsonl":
            loggers.append(MetricsLog(config.output_dir / METRICS_NAME, continued_from=continued_from))
        elif name == "tensorboard":
            loggers.append(_Dispensable(name, on_notice, lambda: TensorBoardLog(config, continued_from)))
        else:
            loggers.append(_Dispensable(name, on_notice, lambda: WandbLog(config, continued_from)))
    return loggers


def scalars_of_step(metrics: StepMetrics) -> dict[str, float]:
    """Return the figures of a step by the name of their curve."""
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
    values |= {f"wait/{cause}_s": seconds for cause, seconds in metrics.stall_s.items()}
    if metrics.written_bytes:
        values["drives/written_GB"] = sum(metrics.written_bytes.values()) / GB
    return values


def scalars_of_evaluation(metrics: EvaluationMetrics) -> dict[str, float]:
    """Return the figures of an evaluation by the name of their curve."""
    return {f"eval/{metrics.name}_loss": metrics.loss, f"eval/{metrics.name}_perplexity": metrics.perplexity}


def scalars_of_checkpoint(metrics: CheckpointMetrics) -> dict[str, float]:
    """Return the figures of a checkpoint by the name of their curve."""
    return {
        "checkpoint/GiB": metrics.nbytes / GiB,
        "checkpoint/seconds": metrics.seconds,
        "checkpoint/stall_s": metrics.stall_s,
    }


class _Closing:
    """A context manager that ends with ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is held."""


class TensorBoardLog(_Closing):
    """Curves for TensorBoard, in ``output_dir/tensorboard``.

    Args:
        config: of the run.
        continued_from: steps done before; None: a run that starts anew. Files of earlier starts stay, and TensorBoard
            hides what this start replaces.
    """

    def __init__(self, config: RunConfig, continued_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if continued_from is None else continued_from + 1
        self._writer: Any = SummaryWriter(str(config.output_dir / TENSORBOARD_NAME), purge_step=first)
        self._writer.add_text("config", "    " + to_toml(config).replace("\n", "\n    "), first)

    def on_start(self, info: RunInfo) -> None:
        """Nothing yet."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Add a point to each curve."""
        self._add(scalars_of_step(metrics), metrics.step)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Add a point to the curves of a set."""
        self._add(scalars_of_evaluation(metrics), metrics.step)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Add a point to the curves of checkpoints."""
        self._add(scalars_of_checkpoint(metrics), metrics.step)

    def on_message(self, text: str) -> None:
        """Messages are no curves."""

    def on_end(self, summary: RunSummary) -> None:
        """Write what is left."""
        self._writer.flush()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the file. Safe to call twice."""
        self._writer.close()


class WandbLog(_Closing):
    """A run at Weights & Biases; one and the same over all starts. ``WANDB_MODE=offline`` needs no network.

    Its steps are ours. A service that already has a step keeps what it has: a step that is repeated after a restart
    gives the same numbers.
    """

    def __init__(self, config: RunConfig, continued_from: int | None) -> None:
        self._run: Any = importlib.import_module("wandb").init(
            project=config.logging.project,
            name=config.run_name,
            dir=str(config.output_dir),
            id=_wandb_id(config.output_dir / WANDB_ID_NAME, continued_from is not None),
            resume="allow",
            config=resolved_values(config),
        )

    def on_start(self, info: RunInfo) -> None:
        """Nothing yet."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Log the step."""
        self._run.log(_finite(scalars_of_step(metrics)), step=metrics.step)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Log the evaluation, with the step after which it was made."""
        self._run.log(_finite(scalars_of_evaluation(metrics)), step=metrics.step)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Log the checkpoint with the present step: its own is over."""
        self._run.log({**scalars_of_checkpoint(metrics), "checkpoint/step": metrics.step}, commit=False)

    def on_message(self, text: str) -> None:
        """Messages are on the console, which is captured anyway."""

    def on_end(self, summary: RunSummary) -> None:
        """End the run there."""
        if self._run is not None:
            self._run.summary.update({"interrupted": summary.interrupted, "num_steps": summary.num_steps})
            self._finish(exit_code=0)

    def close(self) -> None:
        """End the run there as failed, unless it is over."""
        self._finish(exit_code=1)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)


def _wandb_id(path: Path, goes_on: bool) -> str:
    """Return the id of the run there, which the output folder remembers; a run that starts anew gets a new one."""
    if goes_on and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    name = uuid.uuid4().hex[:12]
    path.write_text(name + "\n", encoding="utf-8")
    return name


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


class _Dispensable(_Closing):
    """A logger that a run goes on without: the first error is told, then it is given up.

    Args:
        name: as the config has it.
        make: opens it.
    """

    def __init__(self, name: str, on_notice: Callable[[str], None], make: Callable[[], Logger]) -> None:
        self._name, self._on_notice = name, on_notice
        self._logger: Logger | None = None
        self._do(lambda: setattr(self, "_logger", make()))

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever their code raises must not end a run of days
            self._logger = None
            self._on_notice(f"no more figures for {self._name}: {type(error).__name__}: {error}. The run goes on")

    def on_start(self, info: RunInfo) -> None:
        """Pass on."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_start(info))

    def on_step(self, metrics: StepMetrics) -> None:
        """Pass on."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_step(metrics))

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Pass on."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_evaluation(metrics))

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Pass on."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_checkpoint(metrics))

    def on_message(self, text: str) -> None:
        """Pass on, unless it is about this very logger."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_message(text))

    def on_end(self, summary: RunSummary) -> None:
        """Pass on."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.on_end(summary))

    def close(self) -> None:
        """Close what is there."""
        if (logger := self._logger) is not None:
            self._do(lambda: logger.__exit__(None, None, None))
            self._logger = None
