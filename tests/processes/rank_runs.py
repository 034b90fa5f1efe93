"""Whole runs of several processes: started by our launcher, or each rank as torchrun and srun start it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import launch_program, ranked_command, warm
from processes.saved_run import ROOT, command_words

LIMIT_S = 120.0  # of a test that hangs
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
MEETING = {"MASTER_ADDR": "127.0.0.1"}  # of ranks without our launcher


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


@contextmanager
def launched_with(size: int, folder: Path, happens: str, config: Path, *options: str) -> Iterator[Any]:
    """Start ranks to some of which something happens; see ``processes.ranked_command``.

    Args:
        size: number of ranks; one is a process without a launcher.
        folder: in which each of them leaves its process number.
        happens: what is done to which.
    """
    launcher = [launch_program.__file__, str(size)] if size > 1 else []
    words = [*launcher, ranked_command.__file__, "run", str(config), *options]
    environment = {"RANK": "0", "RANK_PIDS": str(folder), "RANK_HAPPENS": happens}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    pipe = subprocess.PIPE
    with warm.Popen(
        [sys.executable, *map(str, words)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        with_children=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def start_ranks(configs: Sequence[Path], *options: str, folders: Sequence[Path] = ()) -> list[Any]:
    """Start one rank for each config, with the variables of torchrun and no launcher; each in its folder, if given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(len(configs))
    shared = {**MEETING, "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [
        warm.Popen(
            [*command_words(), "run", str(config), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folders[rank] if folders else ROOT,
            env={
                **ENVIRONMENT,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": str(ROOT),
            },
        )
        for rank, config in enumerate(configs)
    ]


def run_ranks(configs: Sequence[Path], *options: str, folders: Sequence[Path] = ()) -> Ended:
    """Run one rank for each config, to the end."""
    ranks = start_ranks(configs, *options, folders=folders)
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


def wait_until(holds: Callable[[], bool], process: Any) -> None:
    """Wait for something that a run does."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s and process.poll() is None, process.communicate()
        time.sleep(0.01)


def read_until(text: str, process: Any) -> str:
    """Read lines of a run until one has a text; return these lines."""
    lines = [""]
    while text not in lines[-1]:
        line = process.stdout.readline()
        assert line, (lines, process.communicate())
        lines.append(line)
    return "".join(lines)
