"""A complete run from its config to its export, with its reports and files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunObserver, RunSummary, StepMetrics
from megatrain.config import load_config
from megatrain.plan.plan import Plan
from megatrain.training.trainer import Trainer
from tiered.durable.manifest import read_manifest


class RunRecorder(RunObserver):
    """Observer that records a run's reports and can stop the run with a signal.

    Args:
        stop_after: Step after which the run stops, or None to run to the end.
        stop_at: Evaluation set after which the run stops in that step, or "" to stop at the end of the step.
    """

    def __init__(self, stop_after: int | None = None, stop_at: str = "") -> None:
        self._stop_after, self._stop_at = stop_after, stop_at
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvaluationMetrics] = []
        self.checkpoints: list[CheckpointMetrics] = []
        self.messages: list[str] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        self._stop(metrics.step, "")

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)
        self._stop(metrics.step, metrics.name)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self.checkpoints.append(metrics)

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def _stop(self, step: int, name: str) -> None:
        if (step, name) == (self._stop_after, self._stop_at):
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class WholeRun:
    """A run that has ended, with its folder and reports."""

    folder: Path
    trainer: Trainer
    summary: RunSummary
    told: RunRecorder

    @property
    def plan(self) -> Plan:
        """Plan of the last start."""
        return self.trainer.plan

    @property
    def config(self) -> Any:
        """Config of the last start."""
        return self.trainer.config

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of the log."""
        return [json.loads(line) for line in (self.folder / "out/metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """``(step, loss)`` of all steps in the log, including the steps of earlier starts."""
        return [(line["step"], line["loss"]) for line in self.lines if "grad_norm" in line]

    @property
    def figures(self) -> list[tuple[float, float, dict[str, float]]]:
        """Loss, gradient norm and preference metrics of each step since the last start."""
        return [(step.loss, step.grad_norm, dict(step.preferences)) for step in self.told.steps]

    @property
    def weights(self) -> bytes:
        """Bytes of the file with the exported weights."""
        return (self.folder / "out/final/model.safetensors").read_bytes()

    @property
    def state(self) -> dict[str, tuple[str, ...]]:
        """Checksums of each block in the last checkpoint, by key."""
        return {block.key: block.xxh3_64 for block in read_manifest(self.folder / "out/checkpoints").blocks}

    def assert_same(self, other: WholeRun) -> None:
        """Assert that all losses, the last checkpoint and the export are bit-identical in both runs."""
        assert self.losses == other.losses
        assert self.state == other.state
        assert self.weights == other.weights


def train_whole(
    folder: Path,
    text: str,
    *,
    stop_after: int | None = None,
    stop_at: str = "",
    allow: bool = False,
    overrides: Sequence[str] = (),
) -> WholeRun:
    """Run a config whose ``output_dir`` is ``<folder>/out``, resuming from the newest checkpoint if one exists.

    Args:
        text: Config, in TOML.
        allow: Whether the config may differ from the checkpoint's.
        overrides: Config changes in the form of ``--set`` arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text)
    told = RunRecorder(stop_after, stop_at)
    trainer = Trainer(load_config(path, overrides=overrides).config, observer=told, allow_config_change=allow)
    summary = trainer.train()
    assert summary.interrupted == (stop_after is not None)
    return WholeRun(folder, trainer, summary, told)
