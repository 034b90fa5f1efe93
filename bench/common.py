"""Output shared by all benches: one JSON object per line, with the full header, so that each line is self-contained."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"

#: Fields of the header, which every row has in addition to its own fields.
HEADER_FIELDS = ("bench", "hardware", "versions", "commit", "T")
ROW_FIELDS = ("name", "value", "unit", "target", "ok", "timing")


def hardware() -> dict[str, Any]:
    """Return this machine's processor, number of usable CPUs, torch threads, RAM in bytes, and GPU or None."""
    # Import late, because processes that measure their own memory import this file.
    from megatrain.machine.profiles import cpu_name

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "numba", "zarr"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def commit() -> str:
    """Return this working tree's commit, with "+" if `megatrain` or `tiered` has changes, or "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (
            "+" if _git("status", "--porcelain", "--untracked-files=no", "--", "megatrain", "tiered") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Report:
    """Printer of a bench's rows, as JSON lines or as a table for people.

    Args:
        bench: Name of the bench.
        as_json: Whether to print JSON lines instead of a table.
        tokens_per_step: Tokens per step (T) to state in every row, or None for a bench without tokens.
        out: File to which every row is appended as a JSON line.
    """

    def __init__(self, bench: str, *, as_json: bool, tokens_per_step: int | None, out: Path | None = None) -> None:
        self._out = out
        self._header = dict(zip(HEADER_FIELDS, (bench, hardware(), versions(), commit(), tokens_per_step), strict=True))
        self._as_json = as_json
        self._all_ok = True
        if not as_json:
            print(json.dumps(self._header))

    @property
    def all_ok(self) -> bool:
        """Whether every row so far is ok, except for timing rows."""
        return self._all_ok

    def row(
        self,
        name: str,
        value: float | int | str | Sequence[float] | None,
        unit: str,
        *,
        target: float | int | None = None,
        ok: bool | None = None,
        timing: bool = False,
    ) -> None:
        """Print one row.

        Args:
            name: Dotted name of what was measured.
            value, unit: Measured value and its unit, or None and the reason why there is no value.
            target: Target or limit of the value, or None if the row claims nothing.
            ok: Whether the target is met, or None without a target.
            timing: Whether ``ok`` depends on the machine's speed and load. If so, a miss does not fail the bench.
        """
        self._all_ok = self._all_ok and (timing or ok is not False)
        own = dict(zip(ROW_FIELDS, (name, value, unit, target, ok, timing), strict=True))
        line = json.dumps({**own, **self._header})
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        if self._as_json:
            print(line, flush=True)
            return
        verdict = "" if ok is None else "ok" if ok else "NOT OK"
        is_small = isinstance(value, float) and 0 < abs(value) < 1e-3
        shown = f"{value:.2e}" if is_small else f"{value:,.4f}" if isinstance(value, float) else str(value)
        print(
            f"{name:44} {shown:>20} {unit:10} {'' if target is None else f'target {target:,}':>24} {verdict}",
            flush=True,
        )


def step_shape(text: str) -> tuple[int, int, int]:
    """Parse ``"2x1x256"`` from a command line: micro-batches, rows per micro-batch, tokens per row."""
    num_micro_batches, rows, length = (int(part) for part in text.split("x"))
    return num_micro_batches, rows, length


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def process_usage() -> dict[str, float]:
    """Return the CPU seconds and the page faults of this process so far, by row name."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"user": used.ru_utime, "system": used.ru_stime, "page_faults": used.ru_minflt + used.ru_majflt}


def high_water_bytes() -> int:
    """Return the peak resident memory of this process in bytes, or 0 if the kernel does not report it."""
    found = re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else 0


def reset_high_water() -> None:
    """Reset the peak that `high_water_bytes` returns to the current memory (Linux, proc(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
