"""Starts several ranks on this machine, as torchrun does, to run a program or a function of a test.

Each rank is forked by ``processes.warm``, with torch, transformers and megatrain already imported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.ranks.world import World, init
from processes import warm

ROOT = Path(__file__).parents[2]
#: Seconds until hanging ranks are killed, so that the test suite continues. Tiny models take only a few seconds.
LIMIT_S = 120.0
ADDRESS = "MASTER_ADDR"
#: Rendezvous address for ranks that are started without the project's launcher.
MEETING = {ADDRESS: "127.0.0.1"}


@dataclass
class Ended:
    """Results of processes that have ended.

    Attributes:
        codes: Exit codes by rank, or only the exit code of the launcher.
        out: Combined stdout.
        err: Combined stderr.
    """

    codes: list[int]
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Return the lines of stderr that report an error."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def environment(**more: str) -> dict[str, str]:
    """Return environment variables with which a program can import the test helpers."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


@contextlib.contextmanager
def started(words: Sequence[object], **more: str) -> Iterator[Any]:
    """Start a Python program that may have child processes, such as a launcher. Kill it at the end of the context.

    Args:
        words: Arguments of the interpreter.
        more: Additional environment variables.
    """
    pipe = subprocess.PIPE
    with warm.Popen(
        [sys.executable, *map(str, words)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=ROOT,
        env=environment(**more),
        with_children=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def start_ranks(
    commands: Sequence[Sequence[object]], *, num_hosts: int = 1, folders: Sequence[Path] = (), **more: str
) -> list[Any]:
    """Start one rank for each Python command, without a launcher but with the environment variables of torchrun.

    Args:
        commands: Arguments of the interpreter, by rank.
        num_hosts: Number of simulated hosts.
        folders: Working directories by rank. Default: the repository.
        more: Additional environment variables.
    """
    with socket.socket() as free:
        free.bind((MEETING[ADDRESS], 0))
        meeting = {**MEETING, "MASTER_PORT": str(free.getsockname()[1])}
    size, local_size = len(commands), len(commands) // num_hosts
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size)}
    pipe = subprocess.PIPE
    return [
        warm.Popen(
            [sys.executable, *map(str, words)],
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=folders[rank] if folders else ROOT,
            env=environment(**meeting, **sizes, RANK=str(rank), LOCAL_RANK=str(rank % local_size), **more),
        )
        for rank, words in enumerate(commands)
    ]


def finish_ranks(ranks: Sequence[Any], limit_s: float = LIMIT_S) -> Ended:
    """Wait until all ranks have ended. Ranks that exceed the limit are killed and have negative exit codes."""
    end_s, out, err = time.monotonic() + limit_s, "", ""
    try:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=max(0.1, end_s - time.monotonic()))
                out, err = out + said[0], err + said[1]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                said = process.communicate(timeout=10)
                out, err = out + said[0], err + said[1]
    return Ended([process.returncode for process in ranks], out, err)


def run_on_ranks(
    size: int, job: Callable[..., Any], *arguments: Any, num_hosts: int = 1, limit_s: float = LIMIT_S
) -> list[Any]:
    """Run ``job(world, *arguments)`` on each rank, and return the results by rank. Fail if any rank raises an error.

    The ranks have joined a gloo group, unless there is only one rank.

    Args:
        job: Module-level function, so that other processes can import it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((job, arguments)))
        ranks = start_ranks([[__file__, folder]] * size, num_hosts=num_hosts)
        try:
            wait_for_end(ranks, limit_s)
        finally:
            for process in ranks:
                process.kill()
            ended = finish_ranks(ranks)
        files = [folder / f"result{rank}" for rank in range(size)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    errors = [f"rank {rank}: {each[1]}" for rank, each in enumerate(found) if each is not None and each[0]]
    assert not errors, "\n".join(errors)
    assert None not in found, f"ranks without a result after {limit_s:.0f} s at the most: {ended}"
    return [result for _, result in found]


def wait_for_end(ranks: Sequence[Any], limit_s: float) -> None:
    """Wait until all ranks have ended, a rank has failed, or the time limit is reached."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return
        time.sleep(0.01)


def main(folder: Path) -> None:
    """Run as one rank of a job; exit with 1 after an error."""
    torch.set_num_threads(1)
    world = World.from_environment()
    try:
        store = torch.distributed.FileStore(str(folder / "meeting"), world.size)
        init(world, torch.device("cpu"), store)
        job, arguments = pickle.loads((folder / "job").read_bytes())
        is_error, text = False, pickle.dumps((False, job(world, *arguments)))  # includes the values of tensors
    except BaseException:
        is_error, text = True, pickle.dumps((True, traceback.format_exc()))
    part = folder / f"part{world.rank}"
    part.write_bytes(text)
    part.rename(folder / f"result{world.rank}")
    sys.stdout.flush()
    os._exit(int(is_error))  # see ``megatrain.ranks.group.RankGroup.end``


if __name__ == "__main__":
    main(Path(sys.argv[1]))
