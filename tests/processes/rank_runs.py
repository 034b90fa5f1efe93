"""Whole runs of several processes: started by our launcher, or each rank as torchrun and srun start it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import warm
from processes.saved_run import ROOT, command_words

LIMIT_S = 120.0  # of a test that hangs
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Ended:
    """How processes ended.

    Attributes:
        codes: exit codes, by rank; of the launcher alone where there is one.
        out: what they wrote to stdout.
        err: what they wrote to stderr.
    """

    codes: list[int]
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines that tell of an error."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@contextmanager
def launched(size: int, config: Path, *options: str) -> Iterator[Any]:
    """Start ``run --processes N``; what is left at the end is killed."""
    words = [*command_words(), "run", str(config), "--processes", str(size), *options]
    pipe = subprocess.PIPE
    with warm.Popen(
        words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=ENVIRONMENT, with_children=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def launch(size: int, config: Path, *options: str) -> Ended:
    """Run in several processes, to the end."""
    with launched(size, config, *options) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        return Ended([process.returncode], out, err)


def start_ranks(configs: Sequence[Path], *options: str) -> list[Any]:
    """Start one rank for each config, with the variables of torchrun and no launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(len(configs))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [
        warm.Popen(
            [*command_words(), "run", str(config), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, **shared, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, config in enumerate(configs)
    ]


def run_ranks(configs: Sequence[Path], *options: str) -> Ended:
    """Run one rank for each config, to the end."""
    ranks = start_ranks(configs, *options)
    out, err = "", ""
    try:
        for process in ranks:
            process.wait(LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
            said = process.communicate(timeout=10)
            out, err = out + said[0], err + said[1]
    return Ended([process.returncode for process in ranks], out, err)
