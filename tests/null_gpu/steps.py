"""Plans parts of `bench/gpu.py` at full size, runs their steps on the null GPU, and measures memory and host time.

    . temp/null_gpu/env.sh; python tests/null_gpu/steps.py 7b_4k@h200 7b_64k@h100 --json --out rows.jsonl

A part without a GPU after @ runs on an H200. The RAM tier has 110 GiB, as in `bench/gpu_fifteen.sh`. Host
seconds, launches, leases and bytes are real; results of kernels and GPU seconds are not. Weights are not loaded, and
AdamW on the host is skipped. The RAM tier therefore fits into any machine, because its pages are never touched.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from bench import sides
from bench.common import Report
from bench.gpu_sides.cases import OURS, Part, part_named
from bench.gpu_sides.job import make_job
from bench.gpu_sides.ours import OursSide, planned_peak
from megatrain.base.timeline import Timeline
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.profiles import LoadedProfile
from megatrain.optim import clip
from megatrain.plan.estimate import estimate_step
from megatrain.plan.plan import Plan
from megatrain.training import weights
from tiered.leasing import Leasing
from tiered.tiers.ram import HostSlab

#: Memory of the supported GPUs in bytes, as nvidia-smi reports it.
GPUS = {"h200": 143_771 << 20, "h100": 81_559 << 20, "rtx4090": 24_564 << 20}
DEFAULT = (
    *("7b_64k@h200", "7b_4k@h200", "14b@h200", "long_32k@h200"),
    *("7b_64k@h100", "7b_4k@h100", "7b_16k@rtx4090", "7b_4k@rtx4090"),
)
#: Total and free RAM that the script pretends the machine has, and size of the RAM tier.
RAM_BYTES, FREE_RAM_BYTES, RAM_TIER = 134_000_000_000, 130_000_000_000, "110GiB"
#: Allocations on the GPU may exceed the plan by this much, for libraries and the allocator's rounding.
LIBRARIES_BYTES = 256 << 20
#: Indices of counters in the stub of libcudart: launches through the runtime, launches through the driver (by Triton),
#: and waits for a stream or an event.
LAUNCHES, DRIVER_LAUNCHES, SYNCS = 0, 3, 6


def main() -> int:
    """Run each part in a separate process. Return 1 if a part fails or allocates more than planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--steps", type=int, default=3, help="after one that is not measured")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a JSON line")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument(
        "--launches-per-s", type=float, help="as `doctor --json` measures them without the null GPU; adds a prediction"
    )
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name.partition("@")[2] not in ("", *GPUS):
            parser.error(f"{name}: GPUs are {', '.join(GPUS)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != "NULL H200":
        parser.error("this is not the null GPU: read its env.sh first")
    if arguments.in_process:
        (name,) = arguments.parts
        part = part_named(name.partition("@")[0])
        part = part.small() if arguments.quick else part
        report = Report("null_gpu", as_json=arguments.json, tokens_per_step=part.tokens, out=arguments.out)
        Steps(name, part, report, arguments.launches_per_s, quick=arguments.quick).run(arguments.steps)
        sys.stdout.flush()
        os._exit(0 if report.all_ok else 1)  # skip the usual cleanup
    words = [word for word in sys.argv[1:] if word not in arguments.parts]
    codes = []
    for name in arguments.parts:
        environment = {**os.environ, "NULL_GPU_BYTES": str(GPUS[name.partition("@")[2] or "h200"])}
        command = [sys.executable, __file__, name, *words, "--in-process"]
        codes.append(subprocess.call(command, env=environment))
    return 1 if any(codes) else 0


class Phases:
    """Counter of the main thread's CPU seconds, launches and leases in each phase of a step."""

    def __init__(self, counts: Any, leases: list[int]) -> None:
        self._counts, self._leases = counts, leases
        self.restart()

    def restart(self) -> None:
        """Discard the counts so far."""
        self.found: dict[str, list[float]] = {}
        self._op: tuple[str, tuple[float, int, int]] | None = None

    def now(self) -> tuple[float, int, int]:
        """Return CPU seconds, launches and leases since the process started."""
        return time.thread_time(), self._counts[LAUNCHES] + self._counts[DRIVER_LAUNCHES], self._leases[0]

    def on_op(self, op: Any) -> None:
        """Add the counts of the op that ends. ``op`` is the op that begins, or None at the end of a step."""
        now = self.now()
        if self._op is not None:
            phase, before = self._op
            found = self.found.setdefault(phase, [0.0, 0, 0])
            for number, (start, end) in enumerate(zip(before, now, strict=True)):
                found[number] += end - start
        self._op = None if op is None else (op.phase, now)


class Steps:
    """Runner that plans one part, runs its steps, and reports rows."""

    def __init__(
        self, name: str, part: Part, report: Report, launches_per_s: float | None = None, *, quick: bool
    ) -> None:
        self._name, self._part, self._report, self._quick = name, part, report, quick
        self._launches_per_s = launches_per_s
        self._counts = (ctypes.c_long * 7).in_dll(ctypes.CDLL("libcudart.so.13"), "null_counts")
        self._leases = [0]

    def row(self, name: str, value: Any, unit: str, **claim: Any) -> None:
        """Report a row, with the name of the part as a prefix."""
        self._report.row(f"{self._name}.{name}", value, unit, **claim)

    def run(self, num_steps: int) -> None:
        """Plan the part, run its steps, and report the results."""
        with tempfile.TemporaryDirectory() as folder:
            _skip_memory_heavy_code()
            self._count_leases()
            job = make_job(
                OURS,
                self._part,
                Path(folder, "ours"),
                budget_s=0.0,
                device="cuda",
                quick=self._quick,
                num_steps=num_steps,
                ram="" if self._quick else RAM_TIER,
            )
            side = OursSide(job)
            about, plan = side.about(), side._ours.plan
            self.row("plan", about["start_parts_s"]["plan"], "s")
            self.row("plan_is_exact", int(plan.trace.exact), "1", target=1, ok=plan.trace.exact)
            self.row("uncounted", len(plan.trace.uncounted_ops), "operators", target=0, ok=not plan.trace.uncounted_ops)
            self.row("hardware_flops", about["hardware_flops"], "FLOP")
            if self._launches_per_s is not None:
                self._predict_host(plan, self._launches_per_s)
            phases = Phases(self._counts, self._leases)
            mock.patch.object(Timeline, "on_op", lambda timeline, op: phases.on_op(op)).start()
            self._step(side, phases, num_steps, planned_peak(plan.placement, "gpu"))

    def _predict_host(self, plan: Plan, launches_per_s: float) -> None:
        """Report the host time that the planner predicts for an H200 and the given launch rate."""
        machine = find_machine("h200-1.5tb").profile.model_copy(update={"launches_per_s": launches_per_s})
        seconds = estimate_step(plan, plan.shape, LoadedProfile(machine)).seconds
        self.row("host.predicted", seconds["host"], "s")

    def _count_leases(self) -> None:
        acquire = Leasing._acquire

        def counted(leasing: Leasing, requests: Sequence[Any], *more: Any) -> Any:
            self._leases[0] += len(requests)
            return acquire(leasing, requests, *more)

        mock.patch.object(Leasing, "_acquire", counted).start()

    def _step(self, side: OursSide, phases: Phases, num_steps: int, planned: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        seconds: list[float] = []
        by_phase: list[dict[str, list[float]]] = []
        for number in range(1 + num_steps):
            phases.restart()
            gc.collect()
            before, waits = phases.now(), self._counts[SYNCS]
            seen = side._ours.step(side._batches, 1e-5)
            if number:
                seconds.append(phases.now()[0] - before[0])
                by_phase.append(phases.found)
        _, launches, leases = (end - start for start, end in zip(before, phases.now(), strict=True))
        self.row("host", statistics.median(seconds), "s of the main thread")
        for phase in by_phase[-1]:
            times = [found[phase][0] for found in by_phase]
            self.row(f"host.{phase}", statistics.median(times), "s of the main thread")
            for place, what in ((1, "launches"), (2, "leases")):
                self.row(f"{what}.{phase}", int(by_phase[-1][phase][place]), what)
        self.row("launches", launches, "launches")
        self.row("leases", leases, "leases")
        self.row("waits", self._counts[SYNCS] - waits, "waits of the host")
        drops = sum(seen.num_drops.values())
        self.row("num_drops", drops, "buffers given back", target=0, ok=drops == 0)
        peak = torch.cuda.max_memory_allocated()
        self.row("planned_peak", planned, "bytes")
        self.row("peak", peak, "bytes", target=planned + LIBRARIES_BYTES, ok=peak <= planned + LIBRARIES_BYTES)
        self.row("reserved", torch.cuda.max_memory_reserved(), "bytes")
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        self.row("alloc_retries", retries, "retries", target=0, ok=retries == 0)


def _skip_memory_heavy_code() -> None:
    """Replace code that would touch the tiers' pages, and fake the RAM size. Tiers can be larger than the real RAM."""
    memory = psutil.virtual_memory()
    lent = memory._replace(total=RAM_BYTES, available=FREE_RAM_BYTES)

    def load(self: weights.Weights, candidates: Sequence[Any] = ()) -> None:
        for block in self._plan.program.blocks.values():
            if block.is_saved:
                with self._store.acquire(block.key, "ram", "w"):
                    pass
                self._evict_streamed(block.key)
        self.passthrough = {}

    for owner, name, stand_in in (
        (psutil, "virtual_memory", lambda: lent),
        (HostSlab, "_populate", lambda slab: None),
        (weights.Weights, "load", load),
        (sides.TimedOptimizer, "update", lambda self, blocks, gradient, segments, update: None),
        (clip, "_host_partials", lambda gradient, threads: [1.0]),
    ):
        mock.patch.object(owner, name, stand_in).start()


if __name__ == "__main__":
    sys.exit(main())
