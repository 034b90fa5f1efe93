"""The fio sides in `links.py`, which measure the drive's rate in a program that does nothing but I/O."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.base import MIXED, READ, WRITE, Sample, Side, SkippedError, Work
from tiered.units import MiB

#: Makes glibc touch memory at allocation. Otherwise, fio's first reads would include the page faults.
TOUCHED = "glibc.malloc.perturb=1"
#: Lets malloc use huge pages (glibc 2.35), as our slots do. Huge pages affect rates more than engine or queue depth.
HUGE_PAGES = "glibc.malloc.hugetlb=1"


@dataclass(frozen=True)
class Variant:
    """Settings for fio: I/O engine, request size and queue depth."""

    engine: str
    request_mib: int
    depth: int
    options: tuple[str, ...] = ()
    huge_pages: bool = False

    @property
    def name(self) -> str:
        """Return the name of the side."""
        pages = "_huge" if self.huge_pages else ""
        return f"fio_{self.engine}_{self.request_mib}M_qd{self.depth}{pages}"


VARIANTS = (
    Variant("libaio", 1, 32),
    Variant("io_uring", 4, 8, ("--fixedbufs=1",)),
    Variant("libaio", 16, 4, huge_pages=True),
    Variant("io_uring", 4, 8, ("--fixedbufs=1",), huge_pages=True),
    Variant("libaio", 8, 8),
    Variant("libaio", 16, 4),
)
#: Number of variants in a quick run. The best variant is among them.
NUM_QUICK_VARIANTS = 4


class FioSide(Side):
    """Side that runs one variant of fio on an existing file. Rate and CPU time come from fio's report.

    Both exclude startup and the filling of buffers, but include ``end_fsync``.
    """

    def __init__(self, work: Work, variant: Variant, path: Path) -> None:
        if shutil.which("fio") is None:
            raise SkippedError("fio is not installed")
        if work.block_nbytes % (variant.request_mib * MiB):
            raise SkippedError(f"a block of {work.block_nbytes} bytes is no multiple of {variant.request_mib} MiB")
        self.name = variant.name
        self._work, self._variant, self._path = work, variant, path

    def measure(self, operation: str) -> Sample:
        """Run fio once over all bytes of a measurement. For "mixed", two concurrent jobs each use half of the file."""
        nbytes, half = self._work.nbytes, self._work.block_nbytes * len(self._work.halves[0])
        if operation == MIXED:
            jobs = [*_job(READ, 0, half), *_job(WRITE, half, nbytes - half)]
        else:
            jobs = _job(operation, 0, nbytes)
        reports = self._run([*self._options(), *jobs])
        return Sample(
            seconds=max(report[kind]["runtime"] for report in reports for kind in (READ, WRITE)) / 1e3,
            cpu_s=sum(
                (report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1e3 for report in reports
            ),
        )

    def _options(self) -> list[str]:
        variant = self._variant
        return [
            f"--filename={self._path}",
            f"--ioengine={variant.engine}",
            f"--bs={variant.request_mib}m",
            f"--iodepth={variant.depth}",
            *variant.options,
            "--direct=1",
            "--end_fsync=1",
            "--fallocate=none",
            "--overwrite=1",
            "--allow_file_create=0",
            "--scramble_buffers=0",  # reduces the CPU work of fio
            "--gtod_reduce=1",
            "--output-format=json",
        ]

    def _run(self, options: Sequence[str]) -> list[Mapping[str, Any]]:
        tunables = f"{TOUCHED}:{HUGE_PAGES}" if self._variant.huge_pages else TOUCHED
        environment = {**os.environ, "GLIBC_TUNABLES": tunables}
        done = subprocess.run(["fio", *options], capture_output=True, text=True, env=environment, timeout=120)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise SkippedError(lines[-1][:200] if lines else f"fio ended with {done.returncode}")
        text = done.stdout[done.stdout.index("{") :]
        reports: list[Mapping[str, Any]] = json.loads(text)["jobs"]
        moved = sum(report[kind]["io_bytes"] for report in reports for kind in (READ, WRITE))
        assert moved == self._work.nbytes, (moved, self._work.nbytes)
        return reports

    def close(self) -> None:
        """Do nothing, because fio runs only during measurements."""


def _job(operation: str, offset: int, nbytes: int) -> list[str]:
    return [f"--name={operation}", f"--rw={operation}", f"--offset={offset}", f"--size={nbytes}"]
