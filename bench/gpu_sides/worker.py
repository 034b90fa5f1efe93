"""Process that runs one side in `gpu.py` and writes its measurements after each step."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil
import torch

from bench.gpu_sides.cases import OURS, PLAIN, REFERENCE
from bench.gpu_sides.job import Job, StepSeen

#: Seconds spent on timing products of square matrices.
_MATMUL_S = 1.0
_SAMPLE_S = 0.1
#: Share of a side's time limit for startup and steps. The rest is reserved for the work after the steps.
_SHARE_FOR_STEPS = 0.9


class Side(Protocol):
    """Protocol of a trainer that is ready to run steps."""

    def about(self) -> dict[str, Any]:
        """Return facts for the report: at least ``num_parameters``, and ``optimizer`` (its name and precision)."""
        ...

    def step(self, *, is_last: bool) -> StepSeen:
        """Run one step."""
        ...

    def profile(self) -> dict[str, Any]:
        """Run an additional step under torch's profiler, if the job requests it, and return rows about it."""
        ...

    def finish(self) -> dict[str, Any]:
        """Return the measurements that are available only after the last step."""
        ...


def main() -> None:
    """Run the job given on the command line, and update its result file after each step."""
    begin_s, job = time.perf_counter(), Job.of(sys.argv[1])
    torch.set_num_threads(job.num_threads)
    result: dict[str, Any] = {"matmul_flops_per_s": [matmul_rate(job)]}
    with HostMemory() as host:
        start_s = time.perf_counter()
        side = make_side(job)
        result |= {"start_s": time.perf_counter() - start_s, "steps": [], **side.about()}
        result["start_host_bytes"] = host.taken_bytes()
        write(job.result, result)
        print(f"ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
        host.restart()
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        num_steps, is_last = job.has_warm_up + job.num_steps, False
        while not is_last:
            is_last = len(result["steps"]) == num_steps - 1 or _is_time_up(job, begin_s, result["steps"])
            start_s = now(job.device)
            seen = side.step(is_last=is_last)
            result["steps"].append({"total_s": now(job.device) - start_s, **asdict(seen)})
            result |= {"host_bytes": host.taken_bytes(), "peak_rss": host.peak_rss(), **device_memory(job.device)}
            write(job.result, result)
            print(f"step {len(result['steps'])} of {num_steps} after {time.perf_counter() - begin_s:.1f} s", flush=True)
        result["num_steps_missing"] = num_steps - len(result["steps"])
        if job.has_profile and not _is_time_up(job, begin_s, result["steps"]):
            try:
                result["profile"] = side.profile()
            except Exception as error:  # the profiler fails on some new machines, but bytes and peaks are valid
                result["profile"] = {"failed": (f"{type(error).__name__}: {error}"[:500], "reason")}
            write(job.result, result)
        else:
            result["num_steps_missing"] += job.has_profile
        result |= side.finish()
        del side
        result["matmul_flops_per_s"].append(matmul_rate(job))
        write(job.result, {**result, "is_complete": True})


def _is_time_up(job: Job, begin_s: float, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the next step must be the last, because a further step would exceed the time limit."""
    if not steps:
        return False
    longest_s = max(step["total_s"] for step in steps)
    return time.perf_counter() - begin_s + 2 * longest_s > _SHARE_FOR_STEPS * job.budget_s


def make_side(job: Job) -> Side:
    """Return the trainer of a job. Import only the libraries that this trainer needs."""
    if job.side == OURS:
        from bench.gpu_sides.ours import OursSide

        return OursSide(job)
    if job.side == PLAIN:
        from bench.gpu_sides.plain import PlainSide

        return PlainSide(job)
    if job.side == REFERENCE:
        from bench.gpu_sides.reference import ReferenceSide

        return ReferenceSide(job)
    from bench.gpu_sides.zero3 import Zero3Side

    return Zero3Side(job)


def write(path: str, result: Mapping[str, Any]) -> None:
    """Replace the result file atomically, so that a killed process leaves a complete file."""
    temporary = f"{path}.tmp"
    Path(temporary).write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, path)


def matmul_rate(job: Job) -> float:
    """Return FLOP/s of large square matrix products in the layers' dtype, or 0.0 if the matrices do not fit."""
    size = job.matmul
    try:
        left = torch.randn(size, size, device=job.device).to(job.torch_dtype)
        right, out = left.T.contiguous(), torch.empty_like(left)
    except torch.OutOfMemoryError:
        return 0.0
    for _ in range(3):
        torch.mm(left, right, out=out)
    count, start_s = 0, now(job.device)
    while now(job.device) - start_s < _MATMUL_S:
        for _ in range(5):
            torch.mm(left, right, out=out)
        count += 5
    rate = 2 * size**3 * count / (now(job.device) - start_s)
    if job.device == "cuda":
        del left, right, out
        torch.cuda.empty_cache()  # our GPU tier takes the free memory, which excludes torch's cache
    return rate


def device_memory(device: str) -> dict[str, int]:
    """Return the peak bytes of tensors on the GPU and the peak bytes that torch reserved; 0 on a CPU."""
    if device != "cuda":
        return {"device_bytes": 0, "device_reserved_bytes": 0}
    return {
        "device_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def now(device: str) -> float:
    """Wait until the device has finished all queued work, and return the time in seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class HostMemory:
    """Context manager that measures the peak RAM use of this process (VmHWM) and, by sampling, of the machine.

    Only the machine's peak includes page-locked memory of the driver.
    """

    def __init__(self) -> None:
        self._before = psutil.virtual_memory().available
        self._least = self._before
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self._least = min(self._least, psutil.virtual_memory().available)

    def restart(self) -> None:
        """Reset the peaks, so that only the following work is measured."""
        self._least = psutil.virtual_memory().available
        # Reset the kernel's VmHWM. If this is refused, the peak includes the setup.
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return

    def taken_bytes(self) -> int:
        """Return the machine's peak RAM use since ``restart``, minus its use when this object was created, in bytes."""
        return max(0, self._before - self._least)

    def peak_rss(self) -> int:
        """Return the peak resident memory of the process in bytes."""
        status = Path("/proc/self/status").read_text(encoding="ascii")
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None, status
        return 1024 * int(found[1])
