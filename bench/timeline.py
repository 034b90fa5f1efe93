"""Timeline of one step: as a file for Perfetto, as a picture, and as a few numbers.

    python bench/timeline.py --trace trace.json --picture step.svg
    python bench/timeline.py --quick                  # a few seconds, a small model

Weights, gradients, optimizer state and activations have NVMe as their home. Gradients are clipped. Claim: every tick of
the plan is on the timeline, in order. The numbers show how long links were busy, and how long the step waited for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import Ours, batches, run_config
from megatrain.config.schema import RunConfig
from megatrain.extras.report.step_picture import PASSES, UPDATES, WAITING, Bar, draw, read_bars
from megatrain.optim.threads import default_num_threads
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from tiered.units import MiB, parse_size

ON_NVME = {kind: ["nvme"] for kind in ("weights", "gradients", "optimizer", "activations")}
LR = 1e-4


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    shape = arguments.tokens
    report = Report("timeline", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (256, 4, 1024) if arguments.quick else (768, 12, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        trace_step(model, arguments, Path(scratch), report)
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 3.7 M parameters")
    parser.add_argument(
        "--tokens", type=step_shape, default=(1, 1, 128), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--ram", help='RAM tier, e.g. "400MiB"; default: twice its minimum')
    parser.add_argument("--steps", type=int, default=4, help="steps to take; the last one is shown")
    parser.add_argument("--trace", type=Path, help="file for Perfetto")
    parser.add_argument("--picture", type=Path, help="file for the picture, an SVG")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


class Traced(Ours):
    """Our engine, with a timeline that records its last step."""

    def trace_last(self, turns: Sequence[Any], path: Path) -> float:
        """Run steps, write the timeline of the last step, and return the seconds of that step."""
        timeline = self._run.timeline
        for turn in turns[:-1]:
            self.step(turn, LR)
        timeline.is_recording = True
        seconds = self.step(turns[-1], LR).total_s
        timeline.is_recording = False
        timeline.write(path)
        return seconds


def trace_step(model: Path, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    """Run the steps, and print rows about the timeline of the last step."""
    ram = arguments.ram or twice_the_minimum(model, arguments, folder)
    config = make_config(model, arguments, folder, ram)
    data = batches(config)
    trace = arguments.trace or folder / "trace.json"
    with Traced(config, arguments.steps) as side:
        seconds = side.trace_last([next(data) for _ in range(arguments.steps)], trace)
        ticks = [f"{tick.phase} {tick.visit}" for tick in side.plan.program.ticks]
        parameters = side.plan.graph.num_parameters
        side.finish()
    bars = read_bars(trace)
    rows = {row: [bar for bar in bars if bar.row == row] for row in {bar.row for bar in bars}}
    shown = [f"{bar.kind} {bar.label}" for bar in bars if bar.row in (PASSES, UPDATES)]
    missing = len(ticks) - sum(one == other for one, other in zip(ticks, shown, strict=False))
    report.row("ticks.missing", missing, f"of {len(ticks)}", target=0, ok=missing == 0)
    report.row("ram_tier", parse_size(ram), "bytes")
    report.row("parameters", parameters, "")
    report.row("step", seconds, "s")
    for row, own in sorted(rows.items()):
        report.row(f"busy.{row}", busy_s(own), "s")
    moving_s = busy_s(bar for bar in bars if bar.row not in (PASSES, UPDATES, WAITING))
    report.row("busy.links", moving_s, "s")
    waited_s = busy_s(rows.get(WAITING, []))
    report.row("links.hidden", 1 - min(1.0, waited_s / moving_s), "of the time in which links were busy")
    if arguments.picture is not None:
        tokens, total = "x".join(map(str, arguments.tokens)), f"{16 * parameters / MiB:.0f} MiB"
        title = (
            f"One step: {parameters / 1e6:.1f} M parameters, all state at home on NVMe, {default_num_threads()} cores"
        )
        note = f"{tokens} tokens, RAM tier of {parse_size(ram) / MiB:.0f} MiB for {total}"
        picture = draw(bars, title, f"{note} of weights, gradients and optimizer state")
        picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        arguments.picture.write_text(picture, encoding="utf-8")


def busy_s(bars: Iterable[Bar]) -> float:
    """Return the seconds during which at least one of the bars is in progress."""
    total, reached = 0.0, 0.0
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        total += max(0.0, bar.end_s - max(bar.start_s, reached))
        reached = max(reached, bar.end_s)
    return total


def twice_the_minimum(model: Path, arguments: argparse.Namespace, folder: Path) -> str:
    """Return twice the minimum size of the RAM tier."""
    try:
        plan_run(resolve(make_config(model, arguments, folder, "1MiB")))
    except DoesNotFitError as error:
        return f"{2 * error.need_bytes}B"
    return "1MiB"


def make_config(model: Path, arguments: argparse.Namespace, folder: Path, ram: str) -> RunConfig:
    """Return the config of a run with all blocks on the drive."""
    tiers = {"ram": {"size": ram}, "nvme": [{"path": str(folder / "nvme")}]}
    text = QUICKSTART / "loomings.txt"
    return run_config(model, text, arguments.tokens, folder, tiers=tiers, placement=ON_NVME)


if __name__ == "__main__":
    sys.exit(main())
