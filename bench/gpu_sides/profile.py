"""Profile of one step: the kernels that take longest, and the gaps in which no kernel runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, supported_activities

from bench.gpu_sides.worker import now

#: Kinds of events in torch's traces: computation and copies on the device, and operators on the host.
KERNELS, COPIES, OPERATORS = ("kernel",), ("gpu_memcpy", "gpu_memset"), ("cpu_op",)
NUM_GAPS, NUM_KERNELS = 5, 40
_LONGEST_NAME = 160


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a trace. Times are in seconds from an arbitrary origin."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Period without events: its length in seconds, and the name of the next event."""

    seconds: float
    before: str


def profiled(step: Callable[[], object], trace: Path, device: str) -> dict[str, Any]:
    """Run a step under torch's profiler and write the trace. Trace only the GPU, so that the host is not slowed down.

    Without a GPU, the profiler traces the host's operators, which can be nested.

    Returns:
        Name of a row -> (value, unit), for JSON.
    """
    has_device = ProfilerActivity.CUDA in supported_activities()
    with profile(activities=[ProfilerActivity.CUDA if has_device else ProfilerActivity.CPU]) as seen:
        start_s = now(device)
        step()
        step_s = now(device) - start_s
    trace.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(trace))
    return {"step": (step_s, "s"), **figures(trace, KERNELS if has_device else OPERATORS)}


def figures(trace: Path, kinds: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return the rows of a trace file as (value, unit), by name."""
    kernels, copies = events(trace, kinds), events(trace, COPIES)
    if not kernels:
        return {"kernels": (None, "the profiler has seen none")}
    span_s, busy = max(e.end_s for e in kernels) - min(e.start_s for e in kernels), busy_s(kernels)
    found: dict[str, tuple[Any, str]] = {
        "kernels": (len(kernels), "1"),
        "kernels.span": (span_s, "s from the start of the first kernel to the end of the last one"),
        "kernels.busy": (busy, "s"),
        "gaps": (span_s - busy, "s in which no kernel runs"),
        "copies": (len(copies), "1"),
        "copies.busy": (busy_s(copies), "s"),
        "copies.alone": (busy_s([*kernels, *copies]) - busy, "s of copies while no kernel runs"),
    }
    for number, gap in enumerate(longest_gaps(kernels, NUM_GAPS), start=1):
        found[f"gaps.{number:02}"] = gap.seconds, f"s before {gap.before[:_LONGEST_NAME]}"
    totals = by_name(kernels)
    for number, (name, (seconds, count)) in enumerate(list(totals.items())[:NUM_KERNELS], start=1):
        found[f"kernel.{number:02}"] = seconds, f"s in {count} launches of {name[:_LONGEST_NAME]}"
    others = list(totals.values())[NUM_KERNELS:]
    found["kernel.others"] = sum(seconds for seconds, _ in others), f"s of {len(others)} more kinds of kernels"
    return found


def events(trace: Path, kinds: Sequence[str]) -> list[Event]:
    """Return a trace file's events of the given kinds, ordered by start."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open(encoding="utf-8") as file:
        found: Iterable[Mapping[str, Any]] = json.load(file)["traceEvents"]
    bars = [event for event in found if event.get("ph") == "X" and event.get("cat") in kinds]
    made = [Event(bar["name"], bar["ts"] / 1e6, (bar["ts"] + bar["dur"]) / 1e6) for bar in bars]
    return sorted(made, key=lambda event: event.start_s)


def busy_s(events: Iterable[Event]) -> float:
    """Return the seconds during which at least one event is in progress."""
    total_s, end_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, end_s))
        end_s = max(end_s, event.end_s)
    return total_s


def longest_gaps(events: Sequence[Event], count: int) -> list[Gap]:
    """Return the longest periods without an event in progress, given events ordered by start."""
    gaps, end_s = [], events[0].end_s
    for before, after in pairwise(events):
        end_s = max(end_s, before.end_s)
        gaps.append(Gap(after.start_s - end_s, after.name))
    return sorted((gap for gap in gaps if gap.seconds > 0), key=lambda gap: -gap.seconds)[:count]


def by_name(events: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """Return the total seconds and the number of events by name, the longest total first."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        seconds, count = found.get(event.name, (0.0, 0))
        found[event.name] = seconds + event.end_s - event.start_s, count + 1
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
