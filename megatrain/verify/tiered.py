"""Tiered training of the small model: whole runs of the trainer, as ``run`` makes them, with each placement."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.api import METRICS_NAME, Trainer, load_config
from megatrain.base.names import CHECKPOINTS_NAME, FINAL_NAME
from megatrain.base.observer import RunObserver, StepMetrics
from tiered import checksum, read_manifest

if TYPE_CHECKING:
    from megatrain.api import Plan, StepBatch


@dataclass
class TieredRun:
    """What a run gave.

    Attributes:
        losses: one per step.
        grad_norms: one per step.
        weights: folder of the trained model.
        state: checksums by block of the last checkpoint: weights and optimizer state.
        files: by name, of the model.
        link_bytes: bytes moved by each link, over all starts of the run.
        planned_link_bytes: what the plan promised for them.
        planned_is_most: less may move: experts that no token goes to stay where they are, as do directions of matrices
            without a gradient.
        high_water_bytes: peak bytes in use, by tier.
        capacity_bytes: capacity, by tier.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: Path = Path()
    state: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    planned_link_bytes: dict[str, int] = field(default_factory=dict)
    planned_is_most: bool = False
    high_water_bytes: Mapping[str, int] = field(default_factory=dict)
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """Bytes over all links."""
        return sum(self.link_bytes.values())


class _Listener(RunObserver):
    """Keeps what a run says of each step."""

    def __init__(self, run: TieredRun) -> None:
        self._run = run

    def on_step(self, metrics: StepMetrics) -> None:
        self._run.losses.append(metrics.loss)
        self._run.grad_norms.append(metrics.grad_norm)


def train(trainer: Trainer, before: TieredRun | None = None) -> TieredRun:
    """Run to the end; continue what is in the run's folder.

    Args:
        trainer: makes the run.
        before: the part of the run that came earlier; its figures are kept and added to.
    """
    run = before or TieredRun()
    done = len(run.losses)
    trainer.observer = _Listener(run)
    summary = trainer.train()
    if summary.interrupted:
        raise KeyboardInterrupt
    assert summary.export_dir is not None, summary
    planned = _planned_bytes(trainer.plan, len(run.losses) - done)
    plan = trainer.plan
    run.planned_is_most = any(visit.chance_of_no_token for visit in plan.trace.visits)
    run.planned_is_most |= bool(plan.program.updates.sent_elements)
    for link, nbytes in summary.link_bytes.items():
        run.link_bytes[link] = run.link_bytes.get(link, 0) + nbytes
        run.planned_link_bytes[link] = run.planned_link_bytes.get(link, 0) + planned.get(link, 0)
    run.weights = summary.export_dir
    run.files = {path.name: checksum(path.read_bytes()) for path in sorted(run.weights.glob("*.safetensors"))}
    run.state = {block.key: block.xxh3_64 for block in read_manifest(trainer.run.output_dir / CHECKPOINTS_NAME).blocks}
    run.high_water_bytes, run.capacity_bytes = summary.tier_peak_bytes, summary.tier_capacity_bytes
    return run


def _planned_bytes(plan: Plan, num_steps: int) -> Mapping[str, int]:
    return plan.placement.run_traffic_bytes(num_steps) if num_steps else {}


def batches(trainer: Trainer, num_steps: int) -> list[StepBatch]:
    """Return the batches that a run trains on."""
    return list(islice(trainer.make_loader(), num_steps))


class RanksFailedError(Exception):
    """A run of several processes did not end well; the text is what it said last."""


def train_in_processes(command: Sequence[str], config: Path, num_processes: int) -> TieredRun:
    """Run a config in new processes, as a user does, with a thread each.

    Args:
        command: the words before the config: ``megatrain-tier run``.
        config: file.
        num_processes: how many are started on this machine.

    Returns:
        Losses, norms and the exported model.

    Raises:
        ProcessesFailedError: they did not train it to its end.
    """
    words = [*command, str(config), "--processes", str(num_processes)]
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise RanksFailedError(" | ".join(said) or f"exit code {done.returncode}")
    output_dir = load_config(config).config.output_dir
    lines = map(json.loads, filter(None, (output_dir / METRICS_NAME).read_text(encoding="utf-8").split("\n")))
    steps = [line for line in lines if "event" not in line]
    files = {path.name: checksum(path.read_bytes()) for path in sorted((output_dir / FINAL_NAME).glob("*.safetensors"))}
    return TieredRun([step["loss"] for step in steps], [step["grad_norm"] for step in steps], files=files)


def differences(ours: TieredRun, theirs: TieredRun) -> Iterable[str]:
    """Yield what is not the same, bit for bit, in two runs."""
    for name, mine, other in (("loss", ours.losses, theirs.losses), ("norm", ours.grad_norms, theirs.grad_norms)):
        if mine != other:
            wrong = [step for step, pair in enumerate(zip(mine, other, strict=False), 1) if pair[0] != pair[1]]
            yield f"{name} of step {wrong[0]}" if wrong else f"{len(mine)} and {len(other)} steps"
    blocks = [key for key in sorted({*ours.state, *theirs.state}) if ours.state.get(key) != theirs.state.get(key)]
    if blocks:
        yield f"{len(blocks)} of {len(theirs.state)} blocks: {', '.join(blocks[:4])}" + (" ..." if blocks[4:] else "")
    if ours.files != theirs.files:
        yield "the exported model"
