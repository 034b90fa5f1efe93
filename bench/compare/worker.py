"""One side of a comparison. It reads step counts from standard input, one per line, and runs that many steps."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

#: AdamW's hyper-parameters on both sides, and the maximum gradient norm if gradients are clipped.
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.01, 1.0
RESULT_FD = 1


@dataclass(frozen=True)
class Job:
    """Task and settings of one side of the comparison.

    Attributes:
        side: "ours" or "deepspeed".
        model: Hugging Face folder with weights.
        nvme: This side's folder on the drive.
        shape: Number of micro-batches per step, rows per micro-batch, and tokens per row.
        ram: Size of our RAM tier, or "" for a quarter above the minimum.
        compute_dtype: Compute dtype of our side.
        is_pipelined: Whether DeepSpeed overlaps state reads and writes with the update.
        max_grad_norm: Norm to which gradients are clipped, or 0 for no clipping.
        overrides: Additional tables of our config.
        rank, size: Rank and world size of the process.
        meeting: Rendezvous point of the processes: a file for our side, a local port for DeepSpeed.
    """

    side: str
    model: str
    nvme: str
    shape: tuple[int, int, int]
    num_steps: int
    num_threads: int
    compute_dtype: str = "bfloat16"
    ram: str = ""
    is_pipelined: bool = True
    max_grad_norm: float = MAX_GRAD_NORM
    overrides: Mapping[str, Any] | None = None
    rank: int = 0
    size: int = 1
    meeting: str = ""

    def micro_batches(self) -> list[dict[str, Tensor]]:
        """Return a step's micro-batches. All steps have the same ones, so that the loss shows the effect of updates."""
        num_micro_batches, rows, length = self.shape
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, config["vocab_size"], (num_micro_batches, rows, length), generator=generator)
        return [{"input_ids": part, "labels": part.clone()} for part in tokens]


@dataclass(frozen=True)
class Steps:
    """Mean wall seconds per step, mean seconds per step for each part, and the loss of the last step."""

    total_s: float
    parts_s: Mapping[str, float]
    loss: float


class ComparedSide(Protocol):
    """Protocol of a trainer that is ready to run steps."""

    def about(self) -> dict[str, Any]:
        """Return facts for the report: at least ``num_parameters`` and ``state_memory`` (bytes of RAM for state)."""
        ...

    def steps(self, batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> Steps:
        """Run consecutive steps, given the micro-batches of each step."""
        ...


def main() -> None:
    """Answer each step count on standard input (one per line) with a line of JSON, until the input ends."""
    # Libraries print to standard output, so redirect it to the log and keep the pipe for this program.
    with os.fdopen(os.dup(RESULT_FD), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), RESULT_FD)
        values = json.loads(sys.argv[1])
        job = Job(**{**values, "shape": tuple(values["shape"])})
        torch.set_num_threads(job.num_threads)
        start_s = time.perf_counter()
        side = make_side(job)
        micro_batches = job.micro_batches()
        print(json.dumps({"start_s": time.perf_counter() - start_s, **side.about()}), file=answers)
        for line in sys.stdin:
            num_steps = int(line)
            before = drive_bytes()
            steps = side.steps([micro_batches] * num_steps)
            moved = {name: (after - before[name]) / num_steps for name, after in drive_bytes().items()}
            peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({**asdict(steps), **moved, "peak_rss": peak_rss}), file=answers)


def make_side(job: Job) -> ComparedSide:
    """Return the trainer of a job. Import only the libraries that this trainer needs."""
    if job.side == "ours":
        from bench.compare.ours import OursSide

        return OursSide(job)
    from bench.compare.zero3 import Zero3Side

    return Zero3Side(job)


def drive_bytes() -> dict[str, int]:
    """Return the bytes that this process has read from and written to drives."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return {name: int(fields[name]) for name in ("read_bytes", "write_bytes")}
