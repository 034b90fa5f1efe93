"""What a GPU does in one step of ours: the kernels that take longest, and the gaps in which no kernel runs.

    python bench/gpu_profile.py --json --out gpu.jsonl --trace step.json.gz     # 7B, T = 4k, needs a GPU
    python bench/gpu_profile.py --quick --device cpu                            # a tiny model, operators of the CPU

The step is the third: kernels are compiled and memory is made by then. torch's profiler takes part in nothing but that
step, and watches the device alone, so that the host is not slower for it; `step.unprofiled` is the one before. Where
torch has no profiler of a device, the host's operators are counted, of which some run inside others. Claims nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Both are read at the first use of the device.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from bench.common import Report
from bench.gpu_sides.cases import OURS, part_named
from bench.gpu_sides.job import make_job

#: Kinds of events of torch's traces: what computes, and what copies, on the device; and operators of the host.
KERNELS, COPIES, OPERATORS = ("kernel",), ("gpu_memcpy", "gpu_memset"), ("cpu_op",)
NUM_GAPS = 5
_LONGEST_NAME = 160


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of a trace; seconds from any instant."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds in which nothing ran, and what began after them."""

    seconds: float
    before: str


def main() -> int:
    """Profile a step and print its rows."""
    arguments = parse_arguments()
    part = part_named(arguments.part)
    part = part.small() if arguments.quick else part
    report = Report("gpu_profile", as_json=arguments.json, tokens_per_step=part.tokens, out=arguments.out)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        job = make_job(
            OURS,
            part,
            Path(scratch, "ours"),
            budget_s=0.0,
            device=arguments.device,
            quick=arguments.quick,
            num_steps=2,
            layers=arguments.layers,
            ram=arguments.ram,
            tables=arguments.tables,
        )
        trace = arguments.trace or Path(scratch, "step.json")
        wall_s, unprofiled_s, kinds = profiled_step(job, trace)
        row = report.row
        row("part", arguments.part, "of gpu.py")
        row("step", wall_s, "s")
        row("step.unprofiled", unprofiled_s, "s")
        print_rows(report, trace, kinds, top=arguments.top)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="7b_4k", help="of gpu.py, variants too; default: 7b_4k")
    parser.add_argument("--top", type=int, default=30, help="kernels that are printed; default: 30")
    parser.add_argument("--trace", type=Path, help="file for torch's trace of the step, for Perfetto; .gz packs it")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a JSON line")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for --quick")
    parser.add_argument("--tables", type=json.loads, default={}, help="more tables of our config, as JSON")
    parser.add_argument("--layers", type=int, help="layers of the model; default: the part's")
    parser.add_argument("--ram", default="", help='our RAM tier, e.g. "110GiB"; default: what is free')
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU that it can use; --quick --device cpu profiles a tiny model")
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("--device cpu needs --quick: these models are too large for it")
    try:
        part_named(arguments.part)
    except KeyError as error:
        parser.error(f"--part {arguments.part}: there is no {error}")
    return arguments


def profiled_step(job: Any, trace: Path) -> tuple[float, float, Sequence[str]]:
    """Take three steps and write the trace of the last one.

    Returns:
        Its seconds, those of the step before it, and the kinds of events that say what computed.
    """
    from bench.gpu_sides.ours import OursSide
    from bench.gpu_sides.worker import now

    has_device = ProfilerActivity.CUDA in supported_activities()
    seen = profile(activities=[ProfilerActivity.CUDA if has_device else ProfilerActivity.CPU])
    side, steps_s = OursSide(job), []
    for number in range(3):
        is_profiled = number == 2
        with seen if is_profiled else nullcontext():
            start_s = now(job.device)
            side.step(is_last=False)
            steps_s.append(now(job.device) - start_s)
    side.finish()
    trace.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(trace))
    return steps_s[2], steps_s[1], KERNELS if has_device else OPERATORS


def print_rows(report: Report, trace: Path, kinds: Sequence[str], *, top: int) -> None:
    """Print what a trace file says of kernels, copies and gaps."""
    row, kernels = report.row, events(trace, kinds)
    if not kernels:
        row("kernels", None, "the profiler has seen none")
        return
    span_s, busy = max(e.end_s for e in kernels) - min(e.start_s for e in kernels), busy_s(kernels)
    row("kernels", len(kernels), "1")
    row("kernels.span", span_s, "s from the first one's begin to the last one's end")
    row("kernels.busy", busy, "s")
    row("gaps", span_s - busy, "s in which no kernel runs")
    for number, gap in enumerate(longest_gaps(kernels, NUM_GAPS), start=1):
        row(f"gaps.{number:02}", gap.seconds, f"s before {gap.before[:_LONGEST_NAME]}")
    copies = events(trace, COPIES)
    row("copies", len(copies), "1")
    row("copies.busy", busy_s(copies), "s")
    row("copies.alone", busy_s([*kernels, *copies]) - busy, "s in which something is copied and no kernel runs")
    totals = by_name(kernels)
    for number, (name, (seconds, count)) in enumerate(list(totals.items())[:top], start=1):
        row(f"kernel.{number:02}", seconds, f"s in {count} launches of {name[:_LONGEST_NAME]}")
    rest_s = sum(seconds for seconds, _ in list(totals.values())[top:])
    row("kernel.others", rest_s, f"s of {max(0, len(totals) - top)} more kinds of kernels")


def events(trace: Path, kinds: Sequence[str]) -> list[Event]:
    """Return the bars of some kinds of a trace file, in order of their begin."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open(encoding="utf-8") as file:
        found: Iterable[Mapping[str, Any]] = json.load(file)["traceEvents"]
    bars = [event for event in found if event.get("ph") == "X" and event.get("cat") in kinds]
    made = [Event(bar["name"], bar["ts"] / 1e6, (bar["ts"] + bar["dur"]) / 1e6) for bar in bars]
    return sorted(made, key=lambda event: event.start_s)


def busy_s(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one of some events goes on."""
    total_s, end_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, end_s))
        end_s = max(end_s, event.end_s)
    return total_s


def longest_gaps(events: Sequence[Event], count: int) -> list[Gap]:
    """Return the longest stretches between events, given in order of their begin, in which none of them goes on."""
    gaps, end_s = [], events[0].end_s
    for before, after in pairwise(events):
        end_s = max(end_s, before.end_s)
        gaps.append(Gap(after.start_s - end_s, after.name))
    return sorted((gap for gap in gaps if gap.seconds > 0), key=lambda gap: -gap.seconds)[:count]


def by_name(events: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """Return name -> seconds of all events of that name and their number, the longest first."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        seconds, count = found.get(event.name, (0.0, 0))
        found[event.name] = seconds + event.end_s - event.start_s, count + 1
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


if __name__ == "__main__":
    sys.exit(main())
