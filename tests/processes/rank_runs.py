"""Starts complete runs with several processes: through the project's launcher, or rank by rank as under srun."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from processes import launch_program, ranked_command
from processes.ranks import LIMIT_S, Ended, finish_ranks, start_ranks, started
from processes.saved_run import command_words


def launched(size: int, config: Path, *options: str) -> AbstractContextManager[Any]:
    """Start ``run --processes SIZE``. At the end of the context, kill the remaining processes."""
    return started([*command_words()[1:], "run", config, "--processes", size, *options])


def launch(size: int, config: Path, *options: str) -> Ended:
    """Execute ``run --processes SIZE``, and wait until all processes have ended."""
    with launched(size, config, *options) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        return Ended([process.returncode], out, err)


def launched_with(size: int, folder: Path, happens: str, config: Path, *options: str) -> AbstractContextManager[Any]:
    """Start ranks, some of them with faults (see ``processes.ranked_command``).

    Args:
        size: Number of ranks. A single rank is started without a launcher.
        folder: Folder in which each rank writes its pid.
        happens: Faults and their ranks, in the format of ``RANK_HAPPENS``.
    """
    launcher = [launch_program.__file__, size] if size > 1 else []
    words = [*launcher, ranked_command.__file__, "run", config, *options]
    return started(words, RANK="0", RANK_PIDS=str(folder), RANK_HAPPENS=happens)


def start_runs(configs: Sequence[Path], *options: str, folders: Sequence[Path] = ()) -> list[Any]:
    """Start one rank for each config without a launcher. ``folders`` are the working directories of the ranks."""
    return start_ranks([[*command_words()[1:], "run", config, *options] for config in configs], folders=folders)


def run_ranks(configs: Sequence[Path], *options: str, folders: Sequence[Path] = ()) -> Ended:
    """Run one rank for each config, and wait until all ranks have ended."""
    return finish_ranks(start_runs(configs, *options, folders=folders))


def wait_until(holds: Callable[[], bool], process: Any) -> None:
    """Wait until a condition holds. Fail if the process ends first."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s and process.poll() is None, process.communicate()
        time.sleep(0.01)


def read_until(text: str, process: Any) -> str:
    """Read the output lines of a process up to the first line that contains ``text``, and return them."""
    lines = [""]
    while text not in lines[-1]:
        line = process.stdout.readline()
        assert line, (lines, process.communicate())
        lines.append(line)
    return "".join(lines)
